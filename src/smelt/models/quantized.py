"""Linear layers and convolutions with a quantized weight, and how they replace the layers of a network.

A `QuantizationScheme` describes such a layer as plain data, enough to allocate it before its tensors are loaded. A
kernel computes the matmul; `backend` names the selected kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from smelt.errors import FormatError, ModelError
from smelt.kernels.conv import ConvShape, fake_quantize_images, prepare_conv, product_inputs
from smelt.kernels.dispatch import forced_backend
from smelt.kernels.hadamard import hadamard_transform
from smelt.kernels.linear import ActivationQuant, LinearKernel, PackedMatrix, select_kernel
from smelt.numerics.catalog import format_name, get_format
from smelt.numerics.format import PER_TENSOR, Format, QuantizedTensor, packed_shapes
from smelt.numerics.packing import pack, unpack

NO_BACKEND, DEQUANTIZED = "none yet", "dequantized at load"  # of a layer without a kernel: not yet, and on this device

STATIC_SCALE = "input_scale"
QPARAM_NAMES = ("scale", "zero", "negative", "tensor")
LOW_RANK_NAMES = ("down", "up")
_QUANTIZABLE = (nn.Linear, Conv1D, nn.Conv1d, nn.Conv2d, nn.Embedding)


@dataclass(frozen=True)
class QuantizationScheme:
    """How one layer computes: the formats of its weight and inputs, and the transformation of its inputs."""

    weight: Format
    inputs: Format | None = None
    static: bool = False  # the input scale is fixed; otherwise it is computed per input
    hadamard: bool = False  # the inputs are rotated by a Hadamard matrix, whose inverse is in the weight
    rank: int = 0  # of the low-rank factors added to the output
    clip: float = 1.0  # the fraction of the input range that the grid covers; values outside are clipped

    def to_json(self) -> dict[str, Any]:
        plain: dict[str, Any] = {"weight": format_name(self.weight)}
        if self.inputs is not None:
            plain |= {"inputs": format_name(self.inputs), "static": self.static}
        if self.hadamard:
            plain["hadamard"] = True
        if self.rank:
            plain["rank"] = self.rank
        if self.clip != 1.0:
            plain["clip"] = self.clip
        return plain

    @classmethod
    def from_json(cls, plain: Any, where: str) -> QuantizationScheme:
        """Parse an untrusted description; raise unless it has the form that `to_json` writes."""
        known = {"weight": str, "inputs": str, "static": bool, "hadamard": bool, "rank": int, "clip": float}
        if not isinstance(plain, dict) or any(type(value) is not known.get(key) for key, value in plain.items()):
            raise ModelError(f"{where}: this is not the description of a quantized layer: {plain!r:.80}.")
        try:
            weight, inputs = get_format(plain.get("weight", "")), plain.get("inputs")
            scheme = cls(weight, None if inputs is None else get_format(inputs), plain.get("static", False))
        except FormatError as error:
            raise ModelError(f"{where}: {error}") from error
        if scheme.static and (scheme.inputs is None or not scheme.inputs.has_scale_only):
            raise ModelError(f"{where}: a static scale is not possible for inputs in the format {inputs!r:.40}.")
        rank, clip = plain.get("rank", 0), plain.get("clip", 1.0)
        if not 0 <= rank <= 65536:
            raise ModelError(f"{where}: a rank of {rank} is not possible.")
        if not 0 < clip <= 1:
            raise ModelError(f"{where}: inputs cannot be clipped at {clip} of their range.")
        return cls(scheme.weight, scheme.inputs, scheme.static, plain.get("hadamard", False), rank, clip)


@dataclass(frozen=True)
class LinearGroupSpec:
    """Linear layers that share an input, without their weights: what decides how fast they are."""

    in_features: int
    out_features: tuple[int, ...]  # of each layer
    bias: bool
    scheme: QuantizationScheme | None  # None: unquantized
    token_share: float = 1.0  # of the tokens of a step; below 1 for the experts of a mixture
    fused_input: bool = True  # a norm or gate produces the input, and may quantize it at no cost


@dataclass(frozen=True)
class _SelectedKernel:
    """A selected kernel and its operands. It keeps the tensors alive, so that their ids stay unique."""

    key: tuple[Any, ...]
    kernel: LinearKernel
    packed: PackedMatrix
    inputs: ActivationQuant | None
    prepared: Any


class QuantizedLinear(nn.Module):
    """Quantized replacement for a Linear (or GPT-2's Conv1D). Its tensors are buffers: nothing is trainable."""

    def __init__(
        self, in_features: int, out_features: int, scheme: QuantizationScheme, *, bias: bool, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.down: Tensor
        self.up: Tensor
        self.in_features, self.out_features, self.scheme = in_features, out_features, scheme
        for name, (shape, buffer_dtype) in packed_shapes(scheme.weight, out_features, in_features).items():
            self.register_buffer(name, torch.empty(shape, dtype=buffer_dtype, device="meta"))
        if scheme.static:
            self.register_buffer(STATIC_SCALE, torch.empty(1, 1, 1, device="meta"))
        if scheme.rank:
            self.register_buffer("down", torch.empty(scheme.rank, in_features, dtype=dtype, device="meta"))
            self.register_buffer("up", torch.empty(out_features, scheme.rank, dtype=dtype, device="meta"))
        self.bias = nn.Parameter(torch.empty(out_features, dtype=dtype, device="meta"), False) if bias else None
        self.round_inputs: Callable[[Tensor], Tensor] | None = None  # overrides the input format of the scheme
        self._selected: _SelectedKernel | None = None
        self._dequantized: Tensor | None = None
        self._moved: tuple[Callable[[Tensor], Tensor], slice, str] | None = None

    @classmethod
    def from_quantized(
        cls, quantized: QuantizedTensor, scheme: QuantizationScheme, *, bias: Tensor | None, dtype: torch.dtype
    ) -> QuantizedLinear:
        """Create a layer from a quantized matrix. A static scale is set later; until then it is dynamic."""
        rows, columns = quantized.codes.shape
        layer = cls(columns, rows, scheme, bias=bias is not None, dtype=dtype)
        layer.set_tensors(quantized, bias)
        return layer

    def set_tensors(self, quantized: QuantizedTensor, bias: Tensor | None) -> None:
        """Set the matrix and the bias; a static scale is then unset."""
        for name, tensor in quantized.pack().items():
            setattr(self, name, tensor.contiguous())
        if self.scheme.static:
            setattr(self, STATIC_SCALE, None)
        if self.bias is not None and bias is not None:
            self.bias = nn.Parameter(bias.detach().to(self.bias.dtype), requires_grad=False)

    def set_static_input_scale(self, amax: Tensor) -> None:
        """Set the static scale from each input's largest magnitude over the calibration data."""
        assert self.scheme.inputs is not None
        scale = self.scheme.inputs.compute_qparams(amax.reshape(1, 1, -1), clip_ratio=self.scheme.clip).scale
        setattr(self, STATIC_SCALE, scale.float().reshape(1, 1, 1))

    def add_low_rank_factors(self, down: Tensor, up: Tensor) -> None:
        """Add the product of two low-rank factors, [rank, in] and [out, rank], to the layer."""
        self.scheme = replace(self.scheme, rank=len(down))
        self.register_buffer("down", down)
        self.register_buffer("up", up)

    def keep_rows(self, rows: Tensor) -> None:
        """Keep these outputs, in this order, and remove all others (each row is packed separately)."""
        shared = set(QPARAM_NAMES) if self.scheme.weight.group_size == PER_TENSOR else {"tensor"}
        for name in {"codes", *QPARAM_NAMES, "up"} - shared:
            self._select_in_buffer(name, 0, rows)
        if self.bias is not None:
            self.bias = nn.Parameter(self.bias.detach().index_select(0, rows), requires_grad=False)
        self.out_features, self._selected = len(rows), None

    def keep_columns(self, columns: Tensor) -> None:
        """Keep these inputs, in this order. Inputs that end up in one group must have shared a scale before."""
        if self.scheme.hadamard:
            raise ModelError("inputs that are rotated by a Hadamard matrix cannot be removed individually.")
        weight_format, size = self.scheme.weight, self.input_group_size
        groups = columns // size  # the old group of each kept input
        kept_groups = groups[:: weight_format.effective_group_size(len(columns))]
        if not torch.equal(
            kept_groups.repeat_interleave(weight_format.effective_group_size(len(columns)))[: len(columns)], groups
        ):
            raise ModelError(f"{size} inputs of a layer share a scale: keep or remove them together.")
        codes = unpack(self.packed.tensors["codes"], weight_format.bits, self.in_features).index_select(1, columns)
        self.register_buffer("codes", pack(codes, weight_format.bits))
        for name in set(QPARAM_NAMES) - {"tensor"}:
            self._select_in_buffer(name, 1, kept_groups)
        self._select_in_buffer("down", 1, columns)
        self.in_features, self._selected = len(columns), None

    def _select_in_buffer(self, name: str, dimension: int, index: Tensor) -> None:
        buffer = self._buffers.get(name)
        if buffer is not None:
            self.register_buffer(name, buffer.index_select(dimension, index).contiguous())

    @property
    def input_group_size(self) -> int:
        """The number of adjacent weights in a row that share a scale."""
        return self.scheme.weight.effective_group_size(self.in_features)

    @property
    def parameter_count(self) -> int:
        """The number of parameters of the matrix and the low-rank factors, without the bias."""
        return self.in_features * self.out_features + self.scheme.rank * (self.in_features + self.out_features)

    @property
    def bits_per_weight(self) -> float:
        """Bits per weight of codes, scales and low-rank factors together."""
        size = self.in_features * self.out_features
        factors = self.scheme.rank * (self.in_features + self.out_features) / size
        factor_dtype = self.down.dtype if self.scheme.rank else torch.float16
        return (
            self.scheme.weight.bits_per_value(self.in_features, self.out_features) + 8 * factor_dtype.itemsize * factors
        )

    def move_weights(self, product: Callable[[Tensor], Tensor], rows: slice, backend: str) -> None:
        """Free the packed tensors: from now on `product`, which has them in another layout, computes the outputs.

        `rows` are those of this layer among the outputs of `product` (takes [batch, in]); `backend` is its name.
        """
        for name in ("codes", *QPARAM_NAMES):
            if (buffer := self._buffers.get(name)) is not None:
                setattr(self, name, torch.empty(0, device=buffer.device))
        self._selected, self._moved = None, (product, rows, backend)

    @property
    def moved(self) -> bool:
        """Whether another object holds the weights."""
        return self._moved is not None

    @property
    def dequantized_weight(self) -> Tensor:
        """The weight [out, in] of a layer that `dequantize_without_kernel` has dequantized."""
        assert self._moved is not None and isinstance(self._moved[0], partial)
        weight = self._moved[0].args[0]
        assert isinstance(weight, Tensor)
        return weight

    def share_dequantized_weight(self, weight: Tensor) -> None:
        """Replace the weight of such a layer by a view of another tensor with the same values."""
        self.move_weights(partial(_multiply, weight, self.inputs), slice(None), DEQUANTIZED)

    @property
    def packed(self) -> PackedMatrix:
        if self.moved:
            raise ModelError("an engine has rearranged the weights of this layer; load the model again.")
        tensors = {name: getattr(self, name) for name in ("codes", *QPARAM_NAMES) if hasattr(self, name)}
        return PackedMatrix(self.scheme.weight, self.out_features, self.in_features, tensors)

    @property
    def inputs(self) -> ActivationQuant | None:
        if self.scheme.inputs is None or self.round_inputs is not None:
            return None
        return ActivationQuant(self.scheme.inputs, getattr(self, STATIC_SCALE, None), self.scheme.clip)

    @property
    def weight(self) -> Tensor:
        """The dequantized weight as a matrix [out, in], recomputed on every access."""
        return self.packed.unpack().dequantize()

    @property
    def backend(self) -> str:
        """The name of the kernel that the last forward used."""
        if self._moved is not None:
            return self._moved[2]
        return self._selected.kernel.name if self._selected else NO_BACKEND

    def forward(self, x: Tensor) -> Tensor:
        if self.scheme.hadamard:
            x = hadamard_transform(x)
        rounded = x if self.round_inputs is None else self.round_inputs(x)
        if self._moved is not None:
            product, rows, _ = self._moved
            y = product(rounded.reshape(-1, self.in_features))[:, rows].reshape(*x.shape[:-1], self.out_features)
            y = y if self.bias is None else y + self.bias
        elif self._dequantized is not None:
            y = F.linear(
                rounded if self.inputs is None else self.inputs.fake_quantize(rounded), self._dequantized, self.bias
            )
        else:
            selected = self._select_kernel(x.dtype)
            if torch.compiler.is_compiling():  # torch.compile must reach all tensors from the module
                assert self._selected is not None
                y = self._selected.kernel.run(rounded, self.packed, self.inputs, self.bias, self._selected.prepared)
            else:
                y = selected.kernel.run(rounded, selected.packed, selected.inputs, self.bias, selected.prepared)
        if self.scheme.rank:
            y = y + (x @ self.down.T.to(x.dtype)) @ self.up.T.to(x.dtype)
        return y

    @torch.compiler.assume_constant_result
    def _select_kernel(self, dtype: torch.dtype) -> _SelectedKernel:
        """Return the selected kernel; reselect if the dtype, the tensors or the forced backend changed."""
        key = (dtype, forced_backend(), *map(id, self._buffers.values()))
        if self._selected is None or self._selected.key != key:
            packed, inputs = self.packed, self.inputs
            kernel = select_kernel(packed, inputs, dtype)
            self._selected = _SelectedKernel(key, kernel, packed, inputs, kernel.prepare(packed, inputs))
        return self._selected

    def __getstate__(self) -> dict[str, Any]:
        """Drop the selected kernel from copies: its prepared data can hold pointers, which cannot be copied."""
        return {**self.__dict__, "_selected": None}

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, {self.scheme.to_json()}"


class QuantizedConv(QuantizedLinear):
    """Quantized replacement for a Conv1d or Conv2d: its weight is the matrix that unfolded images are multiplied with.

    Images have one activation scale each, or a static one. An integer product runs on unfolded images with the kernels
    of linear layers. All other convolutions (float inputs, groups) run with a dequantized weight, which is much smaller
    than what they compute.
    """

    def __init__(self, shape: ConvShape, scheme: QuantizationScheme, *, bias: bool, dtype: torch.dtype) -> None:
        if scheme.hadamard or scheme.rank:
            raise ModelError("a quantized convolution has no rotated inputs and no low-rank factors.")
        super().__init__(shape.columns, shape.out_channels, scheme, bias=bias, dtype=dtype)
        self.shape = shape

    def forward(self, x: Tensor) -> Tensor:
        images = self.shape.images(x if self.round_inputs is None else self.round_inputs(x))
        weight = self._dequantized
        if torch.compiler.is_compiling() and weight is None:
            weight = self.weight.to(x.dtype)
        if weight is None:
            selected = self._select_kernel(x.dtype)
            if selected.inputs is not None and not (x.requires_grad and torch.is_grad_enabled()):
                return self.shape.outputs(selected.prepared(images, self.bias), x)
            weight = selected.kernel.dequantize(selected.packed, selected.prepared, x.dtype)
        inputs = self.inputs
        images = images if inputs is None else fake_quantize_images(inputs, images)
        return self.shape.outputs(self.shape.convolve(images, weight, self.bias), x)

    def _select_kernel(self, dtype: torch.dtype) -> _SelectedKernel:
        """Return the kernel of an integer convolution, prepared as a function of images and bias; else, without inputs,
        a kernel that dequantizes."""
        key = (dtype, forced_backend(), self.round_inputs is None, *map(id, self._buffers.values()))
        if self._selected is None or self._selected.key != key:
            packed, inputs = self.packed, self.inputs
            product = product_inputs(inputs, self.shape, packed.device)
            kernel = select_kernel(packed, product, dtype)
            if inputs is not None and product is not None and kernel.quantizes_inputs:
                prepared: Any = prepare_conv(kernel, self.shape, packed, inputs)
            else:
                inputs, kernel = None, select_kernel(packed, None, dtype)
                prepared = kernel.prepare(packed, None)
            self._selected = _SelectedKernel(key, kernel, packed, inputs, prepared)
        return self._selected

    def extra_repr(self) -> str:
        return f"{self.shape}, {self.scheme.to_json()}"


class QuantizedEmbedding(QuantizedLinear):
    """Quantized replacement for an Embedding: the rows of the tokens are dequantized when they are looked up."""

    def __init__(self, num_embeddings: int, embedding_dim: int, scheme: QuantizationScheme, dtype: torch.dtype) -> None:
        if scheme.inputs is not None or scheme.hadamard or scheme.rank:
            raise ModelError("a quantized embedding has only a weight: no activations, rotation or low-rank factors.")
        super().__init__(embedding_dim, num_embeddings, scheme, bias=False, dtype=dtype)
        self.dtype = dtype  # of the outputs

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantizedEmbedding:
        self.dtype = fn(torch.empty(0, dtype=self.dtype)).dtype
        super()._apply(fn, recurse)
        return self

    def forward(self, x: Tensor) -> Tensor:  # [...] token ids -> [..., embedding_dim]
        ids = x.flatten()
        shared = self.scheme.weight.group_size == PER_TENSOR
        rows = {
            name: tensor if name == "tensor" or (shared and name != "codes") else tensor.index_select(0, ids)
            for name, tensor in self.packed.tensors.items()
        }
        values = QuantizedTensor.from_packed(self.scheme.weight, rows, self.in_features).dequantize()
        return values.to(self.dtype).view(*x.shape, self.in_features)

    def to_dense(self) -> nn.Embedding:
        """Return the dequantized embedding."""
        return nn.Embedding.from_pretrained(self.weight.to(self.dtype))

    @property
    def backend(self) -> str:
        return "dequantized rows"


def lacks_kernel(layer: QuantizedLinear, dtype: torch.dtype) -> bool:
    """Return whether every forward would dequantize the weights first. False while a backend is forced."""
    if forced_backend() or layer.moved or isinstance(layer, QuantizedConv | QuantizedEmbedding):
        return False
    return select_kernel(layer.packed, layer.inputs, dtype).dequantizes(layer.packed)


def dequantize_without_kernel(network: nn.Module, dtype: torch.dtype) -> list[QuantizedLinear]:
    """Dequantize the weights of layers that have no kernel here, once, instead of at every forward; return the layers.

    The packed weights are freed. Nothing happens while a backend is forced.
    """
    plain = [layer for layer in quantized_layers(network).values() if lacks_kernel(layer, dtype)]
    for layer in plain:
        weight, inputs = layer.weight.to(dtype), layer.inputs
        layer.move_weights(partial(_multiply, weight, inputs), slice(None), DEQUANTIZED)
    return plain


def merge_dequantized(layers: Sequence[nn.Module]) -> nn.Linear | None:
    """Merge layers that were dequantized, with the same inputs, into a plain one; they become views of it, so that no
    memory is added. None if they do anything else than to multiply by their weights."""
    quantized = [layer for layer in layers if isinstance(layer, QuantizedLinear) and layer.backend == DEQUANTIZED]
    extras = any(layer.bias is not None or layer.round_inputs is not None for layer in quantized)
    if len(quantized) < len(layers) or extras:
        return None
    schemes = [layer.scheme for layer in quantized]
    if any(scheme.rank or scheme.hadamard or scheme.inputs is not None for scheme in schemes):
        return None
    weight = torch.cat([layer.dequantized_weight for layer in quantized])
    for layer, view in zip(quantized, weight.split([layer.out_features for layer in quantized]), strict=True):
        layer.share_dequantized_weight(view)
    merged = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    merged.weight = nn.Parameter(weight, requires_grad=False)
    return merged


def _multiply(weight: Tensor, inputs: ActivationQuant | None, x: Tensor) -> Tensor:
    return F.linear(x if inputs is None else inputs.fake_quantize(x), weight.to(x.dtype))


@contextmanager
def dequantized_weights(module: nn.Module, dtype: torch.dtype) -> Iterator[dict[str, Tensor]]:
    """Cache the dequantized weights inside the context, for many passes over one block if memory allows.

    Yields them by the path of their layer; outputs are differentiable functions of them.
    """
    layers = quantized_layers(module)
    weights = {path: layer.weight.to(dtype) for path, layer in layers.items()}
    for path, layer in layers.items():
        layer._dequantized = weights[path]
    try:
        yield weights
    finally:
        for layer in layers.values():
            layer._dequantized = None


def linear_weight(module: nn.Module) -> Tensor:
    """Return the weight of a Linear or Conv1D as [out, in], a view; that of a convolution as the matrix that unfolded
    images are multiplied with, a copy."""
    weight: Any = module.weight
    if isinstance(module, nn.Conv1d | nn.Conv2d):
        return ConvShape.of(module).to_matrix(weight)
    return weight.T if isinstance(module, Conv1D) else weight


def conv_shape(module: nn.Module) -> ConvShape | None:
    """Return the shape of a convolution, quantized or not; None of any other module."""
    if isinstance(module, QuantizedConv):
        return module.shape
    return ConvShape.of(module) if isinstance(module, nn.Conv1d | nn.Conv2d) else None


def quantized_replacement(module: Any, scheme: QuantizationScheme) -> QuantizedLinear:
    """Return the quantized layer that replaces a Linear, Conv1D, convolution or embedding, without tensors."""
    if isinstance(module, nn.Embedding):
        return QuantizedEmbedding(module.num_embeddings, module.embedding_dim, scheme, module.weight.dtype)
    bias, dtype = module.bias is not None, module.weight.dtype
    if isinstance(module, nn.Conv1d | nn.Conv2d):
        return QuantizedConv(ConvShape.of(module), scheme, bias=bias, dtype=dtype)
    rows, columns = linear_weight(module).shape
    return QuantizedLinear(columns, rows, scheme, bias=bias, dtype=dtype)


def replace_module(network: nn.Module, path: str, new: nn.Module) -> None:
    """Replace the module at a path, keeping the attributes that surgery recorded (kept units, added bias)."""
    parent, _, name = path.rpartition(".")
    for note, value in vars(network.get_submodule(path)).items():
        if note.startswith("smelt_"):
            setattr(new, note, value)
    setattr(network.get_submodule(parent), name, new)


def quantized_layers(network: nn.Module) -> dict[str, QuantizedLinear]:
    return {path: module for path, module in network.named_modules() if isinstance(module, QuantizedLinear)}


def quantize_lm_head(network: Any, weight: Format) -> None:
    """Replace the LM head by a quantized one, rounded to nearest; a tied table of embeddings stays as it is."""
    head = network.get_output_embeddings()
    if isinstance(head, QuantizedLinear):
        return
    if type(head) is not nn.Linear:
        raise ModelError("this network has no linear LM head that could be quantized.")
    quantized = weight.quantize(head.weight.detach().float())
    bias = None if head.bias is None else head.bias.detach()
    layer = QuantizedLinear.from_quantized(quantized, QuantizationScheme(weight), bias=bias, dtype=head.weight.dtype)
    network.set_output_embeddings(layer.to(head.weight.device))


def quantize_activations(network: nn.Module, inputs: Format) -> int:
    """Quantize the inputs of weight-only layers, scaled per token, where a kernel multiplies integers.

    Return how many layers changed; layers whose inputs have a format keep it.
    """
    changed = 0
    for layer in quantized_layers(network).values():
        if layer.scheme.inputs is None and not isinstance(layer, QuantizedEmbedding):
            dtype = getattr(network, "dtype", torch.float32)
            if select_kernel(layer.packed, ActivationQuant(inputs), dtype).quantizes_inputs:
                layer.scheme, layer._selected = replace(layer.scheme, inputs=inputs), None
                changed += 1
    return changed


def prepare_quantized_layers(network: nn.Module, schemes: Any, where: str) -> None:
    """Replace the named layers of a freshly built network by quantized ones without tensors."""
    if not isinstance(schemes, dict):
        raise ModelError(f"{where}: the list of quantized layers is invalid.")
    plain = {path: module for path, module in network.named_modules() if isinstance(module, _QUANTIZABLE)}
    for path, description in schemes.items():
        if path not in plain:
            raise ModelError(f"{where}: {path} is not a linear layer, convolution or embedding of this network.")
        scheme = QuantizationScheme.from_json(description, where)
        replace_module(network, path, quantized_replacement(plain[path], scheme))
