"""Base class of quantization methods: block by block, transform, quantize, replace the layers, advance.

A method supplies a transform or a rounding. The base class supplies calibration inputs, the memory limit, the
replacement of layers by packed ones, resuming, and the facts about what changed.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from smelt.compression.base import CalibrationSize, Method, MethodContext, ResourceEstimate, UndecidedWidth
from smelt.compression.calibration.block_inputs import (
    ActivationStore,
    BlockInputs,
    advance,
    capture_block_inputs,
    on_device,
)
from smelt.compression.calibration.expert_routing import count_expert_tokens
from smelt.compression.calibration.observers import AbsMaxObserver, observe
from smelt.compression.quantization.block_work import BlockWork as BlockWork
from smelt.compression.quantization.block_work import relative_error
from smelt.compression.quantization.layers import (
    LayerGroup,
    few_tokens,
    layer_groups,
    observed,
    share_expert_amax,
    tied_head,
    token_embedding,
)
from smelt.compression.quantization.rounding import round_to_nearest
from smelt.compression.quantization.speed_guard import SpeedGuardResult, apply_speed_guard, final_schemes
from smelt.config import renamed
from smelt.errors import DataError, FormatError, ModelError, RecipeError
from smelt.measure.cost import count_bytes
from smelt.models.anatomy import Anatomy, Block
from smelt.models.implanted_layers import ImplantedConv2d
from smelt.models.implants import refuse_implants
from smelt.models.model import Model
from smelt.models.quantization_scheme import QuantizationScheme
from smelt.models.quantized import dequantized_weights, float_activations, quantized_layers
from smelt.models.quantized_network import (
    prepare_quantized_layers,
    quantized_replacement,
    replace_module,
    tie_layers,
)
from smelt.numerics.catalog import get_format
from smelt.numerics.format import PER_ROW, PER_TENSOR, Format
from smelt.numerics.integer import Integer


@dataclass(frozen=True)
class Quantization(Method):
    """Quantize the linear layers and convolutions of the blocks.

    A convolution has one scale per output channel unless `group_size` divides its weights, and one activation scale per
    image.
    """

    bits: int = 4  # per weight
    group_size: int = renamed("group", default=128)  # weights of a row that share a scale; -1: per-channel
    symmetric: bool = False  # true: no zero points; false: one zero point per group
    format: str | None = None  # a name from `smelt formats`; replaces bits, group_size and symmetric
    input_activations: str | None = renamed("inputs", default=None)  # their format, such as int8; null: float
    static_activations: bool = renamed("static", default=False)  # fix input scales on the calibration data
    allow_partial_group: bool = renamed("ragged", default=False)  # the last group may be smaller
    embeddings: str | None = None  # format of the token embeddings, rounded to nearest, such as int8; null: unquantized

    def __post_init__(self) -> None:
        try:
            self.weight_format  # noqa: B018  (built to be checked)
            self.input_format  # noqa: B018
            self.embedding_scheme  # noqa: B018
        except FormatError as error:
            raise RecipeError(f"{self.name}: {error}") from error
        if self.static_activations and self.input_activations is None:
            raise RecipeError(
                f"static_activations of {self.name} fixes the scale of input activations: give their format, such as "
                "`input_activations: int8`."
            )
        if self.static_activations and self.input_format is not None and not self.input_format.has_scale_only:
            raise RecipeError(
                f"static_activations of {self.name} fixes one scale and no zero point, which "
                f"{self.input_activations} needs."
            )

    @property
    def weight_format(self) -> Format:
        if self.format is not None:
            return get_format(self.format)
        return Integer(self.group_size, "float16", self.bits, self.symmetric)

    @property
    def input_format(self) -> Format | None:
        if self.input_activations is None:
            return None
        number_format = get_format(self.input_activations)
        return replace(number_format, group_size=PER_TENSOR) if self.static_activations else number_format

    @property
    def scheme(self) -> QuantizationScheme:
        return QuantizationScheme(self.weight_format, self.input_format, self.static_activations)

    @property
    def embedding_scheme(self) -> QuantizationScheme | None:
        return None if self.embeddings is None else QuantizationScheme(get_format(self.embeddings))

    @property
    def uses_data(self) -> bool:
        return super().uses_data or self.static_activations

    offloads: ClassVar[bool] = True
    teacher: ClassVar[bool] = False  # needs the outputs of the original blocks
    any_format: ClassVar[bool] = True  # `quantize` takes each group's format from the work, whichever it is
    convolutions: ClassVar[bool] = False  # quantizes convolutions, too
    needs_chain: ClassVar[bool] = True  # needs the hidden states between blocks, if it uses data

    @property
    def needs_original_inputs(self) -> bool:
        """Whether a teacher's blocks have to give their inputs, too, as `BlockWork.original_inputs`."""
        return False

    @property
    def needs_float_inputs(self) -> bool:
        """Whether the blocks also have to run with quantized weights and float activations, for `float_inputs`."""
        return False

    def prepare(self, model: Model, context: MethodContext) -> Any:
        """Process the network before the first block; the result is passed on as `BlockWork.prepared`."""

    @abstractmethod
    def quantize(self, work: BlockWork) -> None:
        """Quantize every layer of a block with `work.replace_layers`."""

    def apply(self, model: Model, context: MethodContext) -> dict[str, Any]:
        self.check(model.anatomy)
        if self.uses_data and not context.batches:
            raise DataError(f"{self.name} needs calibration data, and there is none.")
        torch.manual_seed(context.seed)
        _check_weights(model.anatomy)
        bytes_before = count_bytes(model.network)
        prepared = self.prepare(model, context)
        groups = [group for block in model.anatomy.blocks for group in layer_groups(block)]
        schemes = [(group, self.group_scheme(group, prepared)) for group in groups]
        guarded = apply_speed_guard(schemes, context)
        guard_facts = {} if guarded is None else {"speed_guard": guarded.facts(schemes)}
        run = _Run(self, model, context, prepared, final_schemes(schemes, guarded), guarded, bytes_before)
        for block in context.progress.track(model.anatomy.blocks, self.name):
            run.block(block)
        if self.embedding_scheme is not None:
            run.embedding(self.embedding_scheme)
        self.conclude(model, context)
        return {**run.facts(), **self.report(prepared, model.network), **guard_facts}

    def group_scheme(self, group: LayerGroup, prepared: Any) -> QuantizationScheme:
        """Return how the layers of a group will be quantized."""
        return self._default_scheme(group)

    def _default_scheme(self, group: LayerGroup) -> QuantizationScheme:
        """Return the scheme of the settings; a convolution that groups do not divide has one scale per channel."""
        weight = self.weight_format
        if not group.is_convolution or type(weight) is not Integer or weight.group_size <= 0:
            return self.scheme
        whole = group.columns % weight.group_size == 0
        return self.scheme if whole else replace(self.scheme, weight=weight.with_group_size(PER_ROW))

    def report(self, prepared: Any, network: nn.Module) -> dict[str, Any]:
        """Return additional facts from the result of `prepare` and the quantized network."""
        return {}

    def conclude(self, model: Model, context: MethodContext) -> None:
        """Process the network after the last block."""

    def check(self, anatomy: Anatomy) -> None:
        """Raise, before any work starts, if this network cannot be quantized with these settings."""
        refuse_implants(anatomy.network, "its convolution cannot be quantized", kinds=(ImplantedConv2d,))
        groups = [group for block in anatomy.blocks for group in layer_groups(block)]
        convolutions = [group for group in groups if group.is_convolution]
        if convolutions and not self.convolutions:
            raise ModelError(
                f"{self.name} quantizes linear layers, and {convolutions[0].path} is a convolution; use rtn, hqq, "
                "gptq or brecq."
            )
        if convolutions and self.input_format is not None and self.input_format.group_size > 0:
            raise RecipeError(
                f"{self.name}: a convolution has one activation scale per image, and {self.input_activations} has one "
                "per group; use int8."
            )
        if quantized_layers(anatomy.network):
            raise ModelError("this model is quantized already; quantize the model it was made from.")
        if self.embeddings is not None:
            token_embedding(anatomy.network)
            tied_head(anatomy.network)
        size = self.input_multiple
        for layer in (layer for group in groups if not group.is_convolution for layer in group.layers):
            columns = layer.weight.shape[1]
            if columns % size:
                fitting = [str(g) for g in (256, 128, 64, 32, 16) if columns % g == 0]
                options = f"{', '.join(fitting)} or -1" if fitting else "-1"
                raise RecipeError(
                    f"{layer.path} has {columns} inputs, which groups of {size} do not divide; use "
                    f"group_size {options}, or `allow_partial_group: true`."
                )

    @property
    def input_multiple(self) -> int:
        size = self.weight_format.group_size
        return size if size > 0 and not self.allow_partial_group else 1

    def reshape(self, anatomy: Anatomy, undecided: Mapping[str, UndecidedWidth]) -> Mapping[str, UndecidedWidth]:
        groups = [group for block in anatomy.blocks for group in layer_groups(block)]
        schemes = {layer.path: self._default_scheme(group).to_json() for group in groups for layer in group.layers}
        tied: dict[str, str] = {}
        if self.embedding_scheme is not None:
            table, head = token_embedding(anatomy.network), tied_head(anatomy.network)
            tied = {} if head is None else {head.path: table.path}
            schemes |= dict.fromkeys((table.path, *tied), self.embedding_scheme.to_json())
        prepare_quantized_layers(anatomy.network, schemes, "the plan")
        tie_layers(anatomy.network, tied)
        return undecided

    def targets(self) -> dict[str, float]:
        return {"bits": self.weight_format.bits}

    def bits_per_weight(self, rows: int, columns: int) -> float:
        """Return the mean bits of a weight of a matrix of this shape, scales and zero points included."""
        return self.weight_format.bits_per_value(columns, rows)

    def bytes_change(self, anatomy: Anatomy) -> int:
        groups = [group for block in anatomy.blocks for group in layer_groups(block)]
        weights = [layer.weight for group in groups for layer in group.layers]
        stored = sum(weight.numel() * self.bits_per_weight(*weight.shape) / 8 for weight in weights)
        if self.embedding_scheme is not None:
            weights.append(table := token_embedding(anatomy.network).weight)
            stored += table.numel() * self.embedding_scheme.weight.bits_per_value(table.shape[1], len(table)) / 8
        return int(stored) - sum(weight.numel() * weight.element_size() for weight in weights)

    def estimate_resources(self, anatomy: Anatomy, size: CalibrationSize, memory_limit: int | None) -> ResourceEstimate:
        if not self.uses_data:
            return ResourceEstimate()
        rows = 4 * size.tokens * anatomy.hidden_size
        stored = rows if memory_limit is None else min(rows, memory_limit)
        widest = max((group.columns for block in anatomy.blocks for group in layer_groups(block)), default=0)
        # All Hessians of a block exist at once, which with many experts exceeds the need of the widest layer.
        hessians = max(sum(group.columns**2 for group in layer_groups(block)) for block in anatomy.blocks)
        return ResourceEstimate(passes=2.0, memory=stored + 4 * max(5 * widest**2, hessians + 2 * widest**2))


class _Run:
    """Quantize block after block, with checkpoints to resume from."""

    def __init__(
        self, method: Quantization, model: Model, context: MethodContext, prepared: Any,
        schemes: Mapping[str, QuantizationScheme], guarded: SpeedGuardResult | None, bytes_before: int,
    ) -> None:  # fmt: skip
        self.method, self.network, self.context, self.prepared = method, model.network, context, prepared
        self.schemes, self.guarded = schemes, guarded
        self.before = bytes_before
        self.layers: dict[str, dict[str, Any]] = {}
        self.last_index = len(model.anatomy.blocks) - 1
        self.block_inputs: BlockInputs | None = None
        self.teacher: BlockInputs | None = None
        self.float_inputs: BlockInputs | None = None
        if method.uses_data:
            self.block_inputs = capture_block_inputs(
                model.anatomy, context.batches, limit=context.memory_limit, folder=context.folder, device=context.device
            )
            if method.needs_chain:
                self.block_inputs.check_chain(method.name)
            self.teacher = self._copy(self.block_inputs) if method.teacher else None
            self.float_inputs = self._copy(self.block_inputs) if method.needs_float_inputs else None

    def _copy(self, block_inputs: BlockInputs) -> BlockInputs:
        return block_inputs.copy(self.context.memory_limit, self.context.folder)

    def block(self, block: Block) -> None:
        name = f"block-{block.index}"
        checkpoint = self.context.checkpoint
        with on_device(block.module, self.context.device):
            original_inputs = None
            if self.teacher is not None:
                original_inputs = self._copy(self.teacher).hidden if self.method.needs_original_inputs else None
                advance(self.teacher, block)  # now has the targets of this block
            facts = checkpoint.load_facts(name)
            if facts is None:
                facts = self._quantize(block, original_inputs)
                checkpoint.save(name, block.module.state_dict())
                checkpoint.save_facts(name, facts)
            else:
                self._restore(block, facts, checkpoint.load(name) or {})
            self.layers |= facts
            if self.block_inputs is not None and block.index < self.last_index:
                with dequantized_weights(block.module, self.block_inputs.dtype):
                    advance(self.block_inputs, block)
                    if self.float_inputs is not None:
                        with float_activations(block.module):
                            advance(self.float_inputs, block)

    def embedding(self, scheme: QuantizationScheme) -> None:
        """Round the token embeddings to nearest; an LM head that shares them goes on doing so."""
        table, head = token_embedding(self.network), tied_head(self.network)
        matrix = round_to_nearest(table.weight, scheme.weight)
        facts = {"scheme": scheme.to_json(), "relative_error": relative_error(table.weight, matrix)}
        for tied in (table,) if head is None else (table, head):
            layer = quantized_replacement(tied.module, scheme)
            layer.set_tensors(matrix, None if tied is table else tied.module.bias)
            replace_module(self.network, tied.path, layer)
            self.layers[tied.path] = facts
        if head is not None:
            tie_layers(self.network, {head.path: table.path})
            self.network.config.tie_word_embeddings = False  # of a weight that is no more

    def _quantize(self, block: Block, original_inputs: ActivationStore | None) -> dict[str, dict[str, Any]]:
        work = BlockWork(
            block, self.block_inputs, self.context, self.network, self.schemes, {},
            targets=None if self.teacher is None else self.teacher.hidden, original_inputs=original_inputs,
            float_inputs=self.float_inputs, is_last=block.index == self.last_index, prepared=self.prepared,
            tokens={} if self.block_inputs is None else count_expert_tokens(self.block_inputs, block),
        )  # fmt: skip
        if not work.groups:
            return {}
        if self.method.any_format or self.guarded is None:
            self.method.quantize(work)
        else:
            self._quantize_by_format(work, self.guarded.formats)
        if self.method.static_activations:
            self._set_static_scales(block)
        return work.facts

    def _quantize_by_format(self, work: BlockWork, formats: Mapping[str, str]) -> None:
        """Round the groups with another format than the method's to nearest, after it quantized the others."""
        others = [group for group in work.groups if group.path in formats]
        own = {path: scheme for path, scheme in work.schemes.items() if path not in formats}
        if len(others) < len(work.groups):
            self.method.quantize(replace(work, schemes=own))
        for group in others:
            work.replace_layers(
                group, [round_to_nearest(layer.weight, work.weight_format(group)) for layer in group.layers]
            )

    def _set_static_scales(self, block: Block) -> None:
        """Set each layer's static input scale from the largest input on the calibration data."""
        assert self.block_inputs is not None
        layers = {f"{block.path}.{name}": layer for name, layer in quantized_layers(block.module).items()}
        observers: dict[nn.Module, AbsMaxObserver] = {layer: AbsMaxObserver() for layer in layers.values()}
        with dequantized_weights(block.module, self.block_inputs.dtype):
            observe(self.block_inputs, block, observers)
        share_expert_amax(block, {path: observers[layer] for path, layer in layers.items()})
        for path, layer in layers.items():
            layer.set_static_input_scale(observed(path, observers[layer].values))

    def _restore(self, block: Block, facts: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        device = next(block.module.parameters()).device
        prepare_quantized_layers(
            self.network, {path: fact["scheme"] for path, fact in facts.items()}, "the unfinished run"
        )
        block.module.load_state_dict({name: t.to(device) for name, t in tensors.items()}, assign=True)

    def facts(self) -> dict[str, Any]:
        """Return what changed; raise if there was no layer to quantize."""
        if not self.layers and self.guarded is None:
            raise ModelError(f"{self.method.name} found no layer to quantize in this network.")
        bits = [layer.bits_per_weight for layer in quantized_layers(self.network).values()]
        sizes = [layer.in_features * layer.out_features for layer in quantized_layers(self.network).values()]
        experts = {"few_tokens": few_tokens(self.layers, self.network)} if self._has_token_counts else {}
        return {
            "layers_quantized": len(self.layers),
            **({"bits_per_weight": sum(b * n for b, n in zip(bits, sizes, strict=True)) / sum(sizes)} if sizes else {}),
            "bytes_before": self.before,
            "bytes_after": count_bytes(self.network),
            **experts,
            "layers": self.layers,
        }

    @property
    def _has_token_counts(self) -> bool:
        return any("tokens" in layer for layer in self.layers.values())


def _check_weights(anatomy: Anatomy) -> None:
    """Raise if a weight is NaN or infinite: it would corrupt every later layer."""
    for layer in (layer for block in anatomy.blocks for group in layer_groups(block) for layer in group.layers):
        if not bool(layer.weight.isfinite().all()):
            raise ModelError(f"{layer.path} contains NaN or infinity; it cannot be quantized.")
