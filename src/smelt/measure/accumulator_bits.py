"""How many accumulator bits each layer needs in training: accumulation lengths and zeros, through VRR.

A linear layer or convolution is three GEMMs: the forward one accumulates over inputs, the backward one (the gradient of
its inputs) over outputs, the gradient one (of its weight) over all output positions of a batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from smelt.errors import ConfigError, DataError, ModelError
from smelt.models.inputs import Batch, complete_inputs, random_inputs
from smelt.models.quantized import QuantizedEmbedding, QuantizedLinear
from smelt.models.quantized_network import conv_shape
from smelt.numerics.variance_retention import min_accumulator_bits
from smelt.progress import NullProgress, Progress

DEFAULT_SEQ_LEN = 512
DEFAULT_IMAGE_SIZE = 224


@dataclass(frozen=True)
class Gemm:
    """One accumulation of a layer. `nonzero_ratio` is the share of products that are not zero, if measured."""

    name: str  # forward, backward or gradient
    length: int
    nonzero_ratio: float | None
    bits: int  # mantissa bits of the smallest accumulator, without chunks
    chunked_bits: int


@dataclass(frozen=True)
class LayerGemms:
    """The GEMMs of a layer; the first one has no backward GEMM, as nothing needs the gradient of its input."""

    name: str
    kind: str  # linear or convolution
    gemms: tuple[Gemm, ...]


@dataclass
class LayerStatistics:
    """What the passes through a network show about one layer, added over calls."""

    name: str
    module: nn.Module
    samples: int = 0
    rows: int = 0  # output positions: tokens, or pixels of a feature map
    reads_network_input: bool = False
    measured: bool = False
    # Sums over rows of the share of nonzero inputs, outputs' gradients and products of both.
    nonzero_inputs: float = 0.0
    nonzero_gradients: float = 0.0
    nonzero_products: float = 0.0
    gradient_rows: int = 0

    def lengths(self, batch_size: int) -> dict[str, int]:
        """Return the accumulation length of each GEMM."""
        positions = max(round(self.rows / self.samples * batch_size), 1)
        shape = conv_shape(self.module)
        if shape is not None:
            kernel = shape.kernel[0] * shape.kernel[1]
            lengths = {
                "forward": shape.in_channels // shape.groups * kernel,
                "backward": shape.out_channels // shape.groups * kernel,
            }
        else:
            inputs, outputs = _features(self.module)
            lengths = {"forward": inputs, "backward": outputs}
        if self.reads_network_input:
            del lengths["backward"]
        return {**lengths, "gradient": positions}

    def nonzero_ratios(self) -> dict[str, float]:
        """Return the share of nonzero products of each GEMM whose operands were measured."""
        if not self.measured:
            return {}
        ratios = {"forward": self.nonzero_inputs / self.rows}
        if self.gradient_rows:
            ratios |= {
                "backward": self.nonzero_gradients / self.gradient_rows,
                "gradient": self.nonzero_products / self.gradient_rows,
            }
        return ratios


def accumulator_bits(
    statistics: Iterable[LayerStatistics], *, batch_size: int, product_bits: int = 5, chunk_size: int = 64
) -> list[LayerGemms]:
    """Predict the accumulator of every GEMM for training with `batch_size` samples.

    product_bits: mantissa bits of a product of two operands, 5 for E5M2 and 7 for E4M3.
    """
    if batch_size < 1:
        raise ConfigError(f"a batch has at least one sample, not {batch_size}.")
    layers = []
    for layer in statistics:
        ratios = layer.nonzero_ratios()
        gemms = tuple(
            Gemm(
                name=name,
                length=length,
                nonzero_ratio=ratios.get(name),
                bits=min_accumulator_bits(product_bits, length, nonzero_ratio=ratios.get(name, 1.0)),
                chunked_bits=min_accumulator_bits(product_bits, length, chunk_size, ratios.get(name, 1.0)),
            )
            for name, length in layer.lengths(batch_size).items()
        )
        kind = "linear" if conv_shape(layer.module) is None else "convolution"
        layers.append(LayerGemms(layer.name, kind, gemms))
    return layers


def bits_by_length(layers: Sequence[LayerGemms], product_bits: int, chunk_size: int) -> list[tuple[int, int, int]]:
    """Return the curve over the layers' lengths and twice as far, without zeros: length, bits, and bits in chunks."""
    longest = max(gemm.length for layer in layers for gemm in layer.gemms)
    lengths = [round(2 ** (step / 16)) for step in range(64, math.ceil(16 * math.log2(max(2 * longest, 32))) + 1)]
    return [
        (length, min_accumulator_bits(product_bits, length), min_accumulator_bits(product_bits, length, chunk_size))
        for length in lengths
    ]


def resolve_seq_len(network: PreTrainedModel, seq_len: int | None) -> int:
    """Return the tokens of a sample, by default the smaller one of 512 and the context of the model; refuse more."""
    context = getattr(network.config.get_text_config(), "max_position_embeddings", None)
    if not isinstance(context, int):
        return seq_len or DEFAULT_SEQ_LEN
    if seq_len is not None and seq_len > context:
        raise ConfigError(f"the sequence length is {seq_len} tokens; this model's context is {context}.")
    return seq_len or min(DEFAULT_SEQ_LEN, context)


def example_inputs(network: PreTrainedModel, *, seq_len: int, image_size: int | None = None) -> Batch:
    """Return one sample that the network accepts: `seq_len` tokens, or an image."""
    config = network.config
    if network.main_input_name == "pixel_values":
        expected = getattr(config, "image_size", None)
        if image_size is not None and isinstance(expected, int) and expected != image_size:
            raise ConfigError(f"this model takes images of {expected} pixels, not {image_size}; leave the size out.")
        size = image_size or (expected if isinstance(expected, int) else DEFAULT_IMAGE_SIZE)
        return {"pixel_values": torch.zeros(1, config.num_channels, size, size)}
    inputs = random_inputs(network, batch=1, length=seq_len)
    if "input_ids" in inputs:  # without a mask: its content would be looked at
        return complete_inputs(network, {"input_ids": torch.zeros(1, seq_len, dtype=torch.int64)})
    return inputs


def layer_shapes(network: PreTrainedModel, inputs: Batch) -> list[LayerStatistics]:
    """Run one batch and return the layers that it passes through. The network may be on the meta device."""
    device = next(network.parameters()).device
    with _observed(network, measure=False) as observer:
        observer.run({name: tensor.to(device) for name, tensor in inputs.items()}, loss=False)
    return observer.layers()


def layer_statistics(
    network: PreTrainedModel, batches: Sequence[Batch], progress: Progress | None = None
) -> list[LayerStatistics]:
    """Measure nonzero inputs of all layers on real batches, and nonzero gradients if the batches have labels.

    Batch norms take the statistics of the batch, as in training: otherwise the zeros of a ReLU's gradient would pass.
    """
    if _batch_norms(network) and any(len(next(iter(batch.values()))) < 2 for batch in batches):
        raise DataError("the batch norms of this model need at least two samples per batch; give more samples.")
    progress = progress or NullProgress()
    device = next(network.parameters()).device
    with _observed(network, measure=True) as observer:
        for batch in progress.track(batches, "measuring zeros"):
            moved = {name: tensor.to(device) for name, tensor in complete_inputs(network, batch).items()}
            observer.run(moved, loss="labels" in batch)
    return observer.layers()


@dataclass
class _Observer:
    """Hooks that fill the statistics of every linear layer and convolution."""

    network: PreTrainedModel
    measure: bool
    statistics: dict[nn.Module, LayerStatistics] = field(default_factory=dict)
    inputs: Batch = field(default_factory=dict)

    def layers(self) -> list[LayerStatistics]:
        """Return the layers that were called, in order of the network."""
        called = [layer for layer in self.statistics.values() if layer.rows]
        if not called:
            raise ModelError("this model has no linear layers and no convolutions.")
        return called

    def run(self, inputs: Batch, *, loss: bool) -> None:
        """Run one batch forward and, for its loss, backward."""
        if loss:
            inputs = {
                name: tensor.requires_grad_() if tensor.is_floating_point() and name != "labels" else tensor
                for name, tensor in inputs.items()
            }
        self.inputs = inputs
        has_cache = self.measure and "input_ids" in inputs and hasattr(self.network.config, "use_cache")
        with torch.set_grad_enabled(loss):
            output = self.network(**inputs, **({"use_cache": False} if has_cache else {}))
        if not loss:
            return
        if not bool(torch.isfinite(output.loss)):
            raise DataError("the loss on the data is not a finite number; check the data and the weights.")
        output.loss.backward()

    def after_layer(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
        layer = self.statistics[module]
        x = args[0] if args else next(iter(kwargs.values()))
        layer.samples += len(next(iter(self.inputs.values())))
        layer.rows += output.numel() // _outputs(module)
        layer.reads_network_input |= any(x is tensor for tensor in self.inputs.values())
        if not self.measure:
            return
        share, layer.measured = _nonzero_share(module, x.detach()), True
        layer.nonzero_inputs += float(share.sum())
        if output.requires_grad:
            output.register_hook(lambda gradient: self.after_backward(layer, share, gradient))

    def after_backward(self, layer: LayerStatistics, inputs: Tensor, gradient: Tensor) -> None:
        channels = 1 if conv_shape(layer.module) is not None and gradient.dim() > 2 else -1
        share = (gradient != 0).float().mean(channels).flatten()
        layer.gradient_rows += len(share)
        layer.nonzero_gradients += float(share.sum())
        layer.nonzero_products += float((share * inputs).sum())

    def after_embedding(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        """Start the graph behind the token embeddings: weights are frozen, so that nothing else requires gradients."""
        return output.detach().requires_grad_(torch.is_grad_enabled()).clone()


@contextmanager
def _observed(network: PreTrainedModel, *, measure: bool) -> Iterator[_Observer]:
    """Register the hooks, freeze the weights, disable dropout and keep running statistics inside the context."""
    observer = _Observer(network, measure)
    handles = []
    for name, module in network.named_modules():
        if _is_gemm(module):
            observer.statistics[module] = LayerStatistics(name, module)
            handles.append(module.register_forward_hook(observer.after_layer, with_kwargs=True))
    embeddings = network.get_input_embeddings() if network.main_input_name == "input_ids" else None
    if measure and embeddings is not None:
        handles.append(embeddings.register_forward_hook(observer.after_embedding))
    trainable, training = [p for p in network.parameters() if p.requires_grad], network.training
    for parameter in trainable:
        parameter.requires_grad_(False)
    network.eval()
    norms = _batch_norms(network) if measure else []
    for norm in norms:
        norm.training, norm.track_running_stats = True, False
    try:
        yield observer
    finally:
        for norm in norms:
            norm.track_running_stats = True
        network.train(training)
        for parameter in trainable:
            parameter.requires_grad_(True)
        for handle in handles:
            handle.remove()


def _batch_norms(network: nn.Module) -> list[Any]:
    return [
        module
        for module in network.modules()
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d) and module.track_running_stats
    ]


def _is_gemm(module: nn.Module) -> bool:
    layers = nn.Linear | Conv1D | nn.Conv1d | nn.Conv2d | QuantizedLinear
    return isinstance(module, layers) and not isinstance(module, QuantizedEmbedding)


def _features(module: Any) -> tuple[int, int]:
    """Return the inputs and outputs of a linear layer."""
    if isinstance(module, Conv1D):
        return module.weight.shape[0], module.weight.shape[1]
    return module.in_features, module.out_features


def _outputs(module: nn.Module) -> int:
    shape = conv_shape(module)
    return _features(module)[1] if shape is None else shape.out_channels


def _nonzero_share(module: nn.Module, x: Tensor) -> Tensor:
    """Return the share of nonzero inputs of each output position: [rows]. Zero padding of a convolution counts."""
    nonzero, shape = (x != 0).float(), conv_shape(module)
    if shape is None:
        return nonzero.mean(-1).flatten()
    return shape.unfold(shape.images(nonzero)).mean((1, 2))
