"""The structural view that every method works on: blocks, and in each block the parts whose units can be removed.

A *part* is a set of removable units: attention heads (with grouped-query attention: a KV head and its query heads),
feed-forward channels, or the inner channels of a residual convolution block. All parts have the same structure:
`input_projections` compute the units and `output` consumes them, so a method needs only one formula.
Each expert of a mixture is a part of its own. Linear layers of a block that belong to no part (latent attention, cross
attention, shared experts, and all layers of a network without a row in families.py) can be quantized, not pruned.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from smelt.errors import ModelError
from smelt.models.batch_norm import FoldedNorm
from smelt.models.carved_feed_forward import CarvedFeedForward
from smelt.models.experts import SeparateExperts
from smelt.models.families import (
    AttentionPaths,
    ChannelPaths,
    ExpertPaths,
    Family,
    FeedForwardPaths,
    Residual,
    family_of,
    has_family,
)
from smelt.models.implanted_layers import WRAPPERS, ImplantedConv2d, ImplantedOutput
from smelt.models.program_network import outline_of
from smelt.models.quantized import QuantizedConv, QuantizedLinear
from smelt.models.reused_attention import ReusedAttention

PartKind = Literal["heads", "ffn_channels", "channels"]


@dataclass(frozen=True)
class Projection:
    """A linear layer, or a slice of the outputs of a fused one (as GPT-2's q, k, v): `rows` from `first_row` on."""

    module: Any  # Linear, Conv1D or Conv2d
    path: str
    first_row: int = 0
    rows: int | None = None  # None: all

    @property
    def device(self) -> torch.device:
        if isinstance(self.module, QuantizedLinear):
            return self.module.packed.device
        device: torch.device = self.module.weight.device
        return device

    @property
    def transposed(self) -> bool:
        """Whether the weight is stored as [in, out]."""
        return isinstance(self.module, Conv1D)

    @property
    def out_features(self) -> int:
        """The number of outputs."""
        return self.module_rows if self.rows is None else self.rows

    @property
    def module_rows(self) -> int:
        """The number of outputs of the whole layer."""
        if isinstance(self.module, QuantizedLinear):
            return self.module.out_features
        return int(self.module.weight.shape[1 if self.transposed else 0])

    @property
    def in_features(self) -> int:
        """The number of inputs: of a convolution, the channels per group."""
        if isinstance(self.module, QuantizedLinear):
            return self.module.in_features // self.kernel_elements
        return int(self.module.weight.shape[0 if self.transposed else 1])

    @property
    def kernel_elements(self) -> int:
        """The number of weights per (input, output) pair: the kernel size of a convolution, else 1."""
        if isinstance(self.module, QuantizedConv):
            return math.prod(self.module.shape.kernel)
        return int(self.module.weight[0, 0].numel()) if isinstance(self.module, nn.Conv2d | ImplantedConv2d) else 1

    @property
    def weight(self) -> Tensor:
        """The weight as [out, in, ...], a view of the module's own storage."""
        weight: Tensor = self.module.weight.T if self.transposed else self.module.weight
        return weight[self.slice]

    @property
    def bias(self) -> Tensor | None:
        bias: Tensor | None = self.module.bias
        return None if bias is None else bias[self.slice]

    @property
    def slice(self) -> slice:
        """The rows of the layer."""
        return slice(self.first_row, self.first_row + self.out_features)


@dataclass(frozen=True)
class Mixture:
    """The experts of a block, the router that dispatches tokens to them, and the number of experts per token."""

    path: str
    module: Any  # SeparateExperts
    router: Any  # has a weight [experts, hidden] and the same input as the experts
    router_path: str
    num_experts: int
    top_k: int
    scales: bool = True  # the up projections enter linearly

    @property
    def kept(self) -> tuple[int, ...]:
        """The original indices of the remaining experts."""
        kept: tuple[int, ...] = getattr(self.module, "smelt_kept_experts", tuple(range(self.num_experts)))
        return kept

    @property
    def original_experts(self) -> int:
        return int(getattr(self.module, "smelt_original_experts", self.num_experts))


@dataclass(frozen=True)
class Part:
    """Units that can be removed from a block.

    Unit i owns `rows_per_unit[j]` output rows of input projection j and `columns_per_unit` input columns of `output`.
    """

    kind: PartKind
    block: int
    path: str  # of the module that runs the part; path and kind form its name
    units: int
    original_units: int
    input_projections: tuple[Projection, ...]
    rows_per_unit: tuple[int, ...]
    output: Projection
    columns_per_unit: int
    owner: Any  # the module that records the kept units and whose sizes change with them
    norm: Any = None  # of a convolution: the norm after it
    attention: AttentionPaths | None = None
    head_dim: int = 0
    # Of a pre-norm block: the norm that feeds only the input projections (and a mixture's router).
    pre_norm: Any = None
    mixture: Mixture | None = None  # of an expert: the mixture it belongs to
    fixed: str | None = None  # why none of the units can be removed
    clipped: bool = False  # values are clipped before the output: no scale or rotation can be moved across
    map_of: int | None = None  # of attention without Q and K: the block whose attention map it uses
    implant: Any = None  # of a part with a neural implant: the module that computes it
    carved: int = 0  # of an expert that was carved out of a feed-forward: how many there are in its layer

    @property
    def name(self) -> str:
        return f"{self.path}.{self.kind}"

    @property
    def kept(self) -> tuple[int, ...]:
        """The original indices of the remaining units."""
        kept: tuple[int, ...] = getattr(self.owner, "smelt_kept_units", tuple(range(self.units)))
        return kept

    @property
    def heads_per_unit(self) -> int:
        """The number of query heads per unit (1 except for grouped-query attention)."""
        return self.columns_per_unit // self.head_dim if self.head_dim else 1

    @property
    def head_parameters(self) -> tuple[nn.Parameter, ...]:
        """Parameters of attention, other than those of its projections, with one slice per unit: [units, ...]."""
        names = self.attention.head_parameters if self.attention is not None and self.units else ()
        return tuple(getattr(self.owner, name) for name in names)

    @property
    def values(self) -> Projection | None:
        """The value projection of attention; None if its rows are interleaved with those of others, or clipped, or if
        heads have values of their own besides."""
        alone = len(self.input_projections) == 3 and not self.clipped and not self.head_parameters
        return self.input_projections[2] if alone else None

    @property
    def token_fraction(self) -> float:
        """The fraction of tokens processed: 1, or top_k / num_experts for an expert (balanced routing assumed)."""
        if self.carved:
            return 1.0 / self.carved
        return 1.0 if self.mixture is None else self.mixture.top_k / self.mixture.num_experts


@dataclass(frozen=True)
class Block:
    """One residual block and its parts, in execution order, and its linear layers that belong to no part."""

    index: int
    path: str
    module: nn.Module
    parts: tuple[Part, ...]
    other_layers: tuple[Projection, ...] = ()

    @property
    def norm_consumers(self) -> list[tuple[Any, list[Any]]]:
        """Each norm before parts of the block, with all layers that consume it: projections, a mixture's router."""
        norms: dict[int, tuple[Any, dict[int, Any]]] = {}
        for part in (part for part in self.parts if part.pre_norm is not None):
            _, layers = norms.setdefault(id(part.pre_norm), (part.pre_norm, {}))
            others = [] if part.mixture is None else [part.mixture.router]
            others += [] if part.implant is None else [part.implant.down]
            layers |= {
                id(layer): layer for layer in (*others, *(projection.module for projection in part.input_projections))
            }
        return [(norm, list(layers.values())) for norm, layers in norms.values()]


@dataclass(frozen=True)
class Anatomy:
    """The structural view of a network. It is a snapshot: create a new one after surgery."""

    family: Family
    network: PreTrainedModel
    residual: Residual
    blocks: tuple[Block, ...]

    @property
    def parts(self) -> tuple[Part, ...]:
        return tuple(part for block in self.blocks for part in block.parts)

    @property
    def mixtures(self) -> tuple[Mixture, ...]:
        """The mixtures of experts, in execution order."""
        mixtures = {part.mixture.path: part.mixture for part in self.parts if part.mixture is not None}
        return tuple(mixtures.values())

    @property
    def backbone(self) -> nn.Module:
        """The module from which the paths of the family start."""
        return _backbone(self.network)[0]

    @property
    def final_norm(self) -> nn.Module | None:
        """The norm between the last block and the head, if any."""
        path = self.family.final_norm
        return self.backbone.get_submodule(path) if path and self.residual == "pre" else None

    @property
    def embeddings(self) -> tuple[nn.Module, ...]:
        """The embedding tables that start the residual stream."""
        return tuple(self.backbone.get_submodule(path) for path in self.family.embeddings)

    @property
    def hidden_size(self) -> int:
        """The width of the residual stream; of a network without parts: of its widest layer input."""
        if self.parts:
            return self.parts[0].output.out_features
        return max((layer.in_features for block in self.blocks for layer in block.other_layers), default=1)

    def shape(self) -> list[dict[str, object]]:
        """Return the remaining units of each part as plain data, enough to rebuild the structure."""
        return [
            {
                "part": part.name,
                "block": part.block,
                "kind": part.kind,
                "of": part.original_units,
                "units": part.units,
                **({"kept": list(part.kept)} if part.kind == "heads" else {}),
            }
            for part in self.parts
        ]

    def expert_shape(self) -> list[dict[str, object]]:
        """Return the remaining experts of each mixture that lost some, as plain data; `shape` numbers only these."""
        return [
            {"mixture": mixture.path, "of": mixture.original_experts, "kept": list(mixture.kept)}
            for mixture in self.mixtures
            if mixture.num_experts != mixture.original_experts
        ]


def anatomy_of(network: PreTrainedModel) -> Anatomy:
    """Build the structural view of a transformers network.

    Of a vision-language model, the language model is viewed; of a type without a row in families.py, the outermost
    lists of modules with linear layers; of a network that runs a program, its outline.
    """
    network = outline_of(network)
    backbone, config = _backbone(network)
    if has_family(config.model_type):
        family = family_of(config.model_type)
    else:
        causal = not config.is_encoder_decoder and "ForCausalLM" in type(network).__name__
        family = family_of(config.model_type, block_lists=_find_block_lists(backbone), causal=causal)
    residual = family.residual
    if family.pre_norm_flag is not None and not getattr(config, family.pre_norm_flag):
        residual = "post"
    prefix = next((name for name, module in network.named_modules() if module is backbone), "")
    block_lists = family.block_lists or ("",)
    modules = [entry for path in block_lists for entry in _block_modules(backbone, path)]
    blocks = tuple(
        _block(family, config, residual, index, f"{prefix}.{path}".strip("."), module)
        for index, (path, module) in enumerate(modules)
    )
    if any(part.map_of is not None or part.carved for block in blocks for part in block.parts):
        family = replace(family, chain=False)  # a block needs more than the output of the one before it
    if not blocks:
        raise ModelError(f"no blocks were found at {' or '.join(block_lists)} in this {config.model_type} network.")
    return Anatomy(family, network, residual, blocks)


def _backbone(network: PreTrainedModel) -> tuple[nn.Module, Any]:
    """Return the module that holds the blocks, and its config: the base model, or the language model inside it."""
    config = network.config
    text = config.get_text_config()
    if text is not config and not has_family(config.model_type):
        models = [module for module in network.modules() if isinstance(module, PreTrainedModel)]
        languages = [module for module in models if module.config.model_type == text.model_type]
        if languages:
            return languages[0].base_model, text
    return network.base_model, config


def _find_block_lists(backbone: nn.Module, path: str = "") -> tuple[str, ...]:
    """Return the paths of the outermost lists of modules that contain linear layers."""
    if isinstance(backbone, nn.ModuleList):
        return (path,) if any(_is_linear(module) for module in backbone.modules()) else ()
    children = ((f"{path}.{name}".lstrip("."), child) for name, child in backbone.named_children())
    return tuple(found for child_path, child in children for found in _find_block_lists(child, child_path))


def _block_modules(backbone: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of a block list; a `*` in the path iterates over nested lists (the stages of a ResNet).

    Without a path, the backbone is the only block; if it has no such path, there is none.
    """
    if not path:
        yield "", backbone
        return
    head, star, tail = path.partition(".*.")
    if not has_module(backbone, head):
        return
    for name, child in backbone.get_submodule(head).named_children():
        if star:
            for inner, module in child.get_submodule(tail).named_children():
                yield f"{head}.{name}.{tail}.{inner}", module
        else:
            yield f"{head}.{name}", child


def _block(family: Family, config: Any, residual: Residual, index: int, path: str, module: nn.Module) -> Block:
    parts: list[Part] = []
    norms = family.norms if residual != "post" else None
    pre_norms = [
        module.get_submodule(norm) if norm and has_module(module, norm) else None for norm in norms or ("", "")
    ]
    if family.attention is not None and has_module(module, family.attention.owner):
        attention = _attention(family.attention, index, path, module)
        clipped = family.attention.clip is not None and getattr(config, family.attention.clip, None) is not None
        fixed = family.attention.fixed
        if family.attention.fixed_if is not None and not getattr(config, family.attention.fixed_if, False):
            fixed = None
        if attention.map_of is not None or hasattr(attention.owner, "smelt_map_slot"):
            fixed = _SHARED_MAP
        implant = _implant(module, family.attention.output)
        parts.append(replace(attention, pre_norm=pre_norms[0], clipped=clipped, fixed=fixed, implant=implant))
    if family.experts is not None and has_module(module, family.experts.owner):
        experts = _experts(family.experts, config, index, path, module)
        parts.extend(replace(part, pre_norm=pre_norms[1]) for part in experts)
    else:
        feed_forward = _alternative(family.feed_forward, module)
        if feed_forward is not None:
            implant = _implant(module, feed_forward.output)
            found = _carved_experts(_feed_forward(feed_forward, index, path, module), path, module)
            parts.extend(replace(part, pre_norm=pre_norms[1], implant=implant) for part in found)
    parts.extend(_channels(family, index, path, module))
    return Block(index, path, module, tuple(parts), _other_layers(family, path, module, parts))


_SHARED_MAP = "share their attention map with another layer"
_IMPLANT = "have a neural implant"
_CARVED = "were divided among experts"

# Small layers that decide where tokens go; rounding them changes more than it saves.
_ROUTERS = {"gate", "router", "shared_expert_gate", "gating"}


def _other_layers(family: Family, path: str, block: nn.Module, parts: list[Part]) -> tuple[Projection, ...]:
    """Return the linear layers of a block that belong to no part and can be quantized."""
    in_parts = {projection.path for part in parts for projection in (*part.input_projections, part.output)}
    layers = ((f"{path}.{name}".strip("."), name, module) for name, module in block.named_modules())
    implants = {
        layer
        for part in parts
        if part.kind != "channels" and part.implant is not None
        for layer in part.implant.factors
    }
    return tuple(
        Projection(module, layer_path)
        for layer_path, name, module in layers
        if _is_linear(module)
        and layer_path not in in_parts
        and module not in implants
        and name not in family.unquantized
        and name.rpartition(".")[2] not in _ROUTERS
    )


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear | Conv1D | QuantizedLinear) and not isinstance(module, QuantizedConv)


def _alternative(paths: Any, block: nn.Module) -> FeedForwardPaths | None:
    """Return the first alternative whose paths all exist."""
    alternatives = paths if isinstance(paths, tuple) else () if paths is None else (paths,)
    for alternative in alternatives:
        if all(has_module(block, name) for name in (*alternative.input_projections, alternative.output)):
            found: FeedForwardPaths = alternative
            return found
    return None


def _projection(
    block: nn.Module, block_path: str, path: str, first_row: int = 0, rows: int | None = None
) -> Projection:
    module, path = block.get_submodule(path), f"{block_path}.{path}"
    if isinstance(module, WRAPPERS):
        module, path = module.base, f"{path}.base"
    return Projection(module, path, first_row, rows)


def _implant(block: nn.Module, output: str) -> ImplantedOutput | None:
    """Return the implant beside the output projection at this path, if any."""
    module = block.get_submodule(output) if has_module(block, output) else None
    return module if isinstance(module, ImplantedOutput) else None


def _attention(paths: AttentionPaths, index: int, path: str, block: nn.Module) -> Part:
    owner: Any = block.get_submodule(paths.owner)
    output = _projection(block, path, paths.output)
    head_dim = int(getattr(owner, paths.head_dim))
    if isinstance(owner, ReusedAttention):
        return _reused_attention(paths, index, path, block, owner)
    if output.in_features == 0:
        original, width = owner.smelt_original_units, owner.smelt_unit_width
        return Part(
            "heads", index, f"{path}.{paths.owner}", 0, original, (), (), output, width, owner,
            attention=paths, head_dim=head_dim,
        )  # fmt: skip
    names = (paths.queries, paths.keys, paths.values)
    if paths.fused:
        fused = _projection(block, path, paths.queries)
        units = (fused.out_features - output.in_features) // (2 * head_dim)  # a KV head has a key and a value
        if paths.interleaved:
            input_projections: tuple[Projection, ...] = (fused,)
        else:
            sizes = (output.in_features, units * head_dim, units * head_dim)
            starts = (0, sizes[0], sizes[0] + sizes[1])
            input_projections = tuple(
                _projection(block, path, name, *span) for name, *span in zip(names, starts, sizes, strict=True)
            )
    else:
        input_projections = tuple(_projection(block, path, name) for name in names)
        units = input_projections[1].out_features // head_dim
    return Part(
        kind="heads",
        block=index,
        path=f"{path}.{paths.owner}",
        units=units,
        original_units=getattr(owner, "smelt_original_units", units),
        input_projections=input_projections,
        rows_per_unit=tuple(projection.out_features // units for projection in input_projections),
        output=output,
        columns_per_unit=output.in_features // units,
        owner=owner,
        attention=paths,
        head_dim=head_dim,
    )


def _reused_attention(paths: AttentionPaths, index: int, path: str, block: nn.Module, owner: Any) -> Part:
    """Return the part of an attention layer that uses the map of another one: V is its only input projection."""
    values, output = _projection(block, path, paths.values), _projection(block, path, paths.output)
    units = values.out_features // owner.width
    return Part(
        kind="heads",
        block=index,
        path=f"{path}.{paths.owner}",
        units=units,
        original_units=getattr(owner, "smelt_original_units", units),
        input_projections=(values,),
        rows_per_unit=(owner.width,),
        output=output,
        columns_per_unit=output.in_features // units,
        owner=owner,
        attention=paths,
        head_dim=owner.width,
        map_of=owner.leader,
    )


def _feed_forward(paths: FeedForwardPaths, index: int, path: str, block: nn.Module) -> Part:
    output = _projection(block, path, paths.output)
    units, owner = output.in_features, output.module
    return Part(
        kind="ffn_channels",
        block=index,
        path=f"{path}.{paths.output.rpartition('.')[0]}".rstrip("."),
        units=units,
        original_units=getattr(owner, "smelt_original_units", units),
        input_projections=_feed_forward_inputs(paths, path, block, units),
        rows_per_unit=(1,) * len(paths.input_projections),
        output=output,
        columns_per_unit=1,
        owner=owner,
    )


def _feed_forward_inputs(
    paths: FeedForwardPaths, path: str, block: nn.Module, units: int
) -> tuple[Projection, ...]:  # up, gate
    names = paths.input_projections
    if len(names) == 2 and names[0] == names[1]:  # the outputs of the gate come first
        return tuple(_projection(block, path, names[0], first_row, units) for first_row in (units, 0))
    return tuple(_projection(block, path, name) for name in names)


def _experts(paths: ExpertPaths, config: Any, index: int, path: str, block: nn.Module) -> Iterator[Part]:
    module, router = block.get_submodule(paths.owner), block.get_submodule(paths.router)
    if not isinstance(module, SeparateExperts):
        raise ModelError(
            f"the experts at {path}.{paths.owner} are fused; load the model with Smelt, which splits them."
        )
    mixture = Mixture(
        path=f"{path}.{paths.owner}", module=module, router=router, router_path=f"{path}.{paths.router}",
        num_experts=len(module), top_k=int(getattr(router, paths.top_k, None) or getattr(config, paths.top_k)),
        scales=paths.scales,
    )  # fmt: skip
    for position in range(len(module)):
        inside = f"{paths.owner}.{position}"
        expert = FeedForwardPaths((f"{inside}.{paths.up}", f"{inside}.{paths.gate}"), f"{inside}.{paths.down}")
        yield replace(_feed_forward(expert, index, path, block), mixture=mixture)


def _carved_experts(shared: Part, path: str, block: nn.Module) -> Iterator[Part]:
    """Yield a feed-forward; of one that is carved into experts the shared channels, then those of each expert."""
    relative = shared.path.removeprefix(path).removeprefix(".")
    owner: Any = block.get_submodule(relative)
    if not isinstance(owner, CarvedFeedForward):
        yield shared
        return
    yield replace(shared, fixed=_CARVED)
    for position in range(len(owner.experts)):
        inside, names = f"{relative}.experts.{position}", owner.names
        expert = FeedForwardPaths((f"{inside}.{names.up}", f"{inside}.{names.gate}"), f"{inside}.{names.down}")
        yield replace(_feed_forward(expert, shared.block, path, block), fixed=_CARVED, carved=len(owner.experts))


def _channels(family: Family, index: int, path: str, block: nn.Module) -> Iterator[Part]:
    for alternative in family.channels:
        if all(
            has_module(block, name)
            for paths in alternative
            for name in (paths.input_projection, paths.norm, paths.output)
        ):
            for paths in alternative:
                yield _channel_part(paths, index, path, block)
            return


def _channel_part(paths: ChannelPaths, index: int, path: str, block: nn.Module) -> Part:
    projection, output = _projection(block, path, paths.input_projection), _projection(block, path, paths.output)
    owner = projection.module
    return Part(
        kind="channels",
        block=index,
        path=f"{path}.{paths.input_projection.rpartition('.')[0]}",
        units=projection.out_features,
        original_units=getattr(owner, "smelt_original_units", projection.out_features),
        input_projections=(projection,),
        rows_per_unit=(1,),
        output=output,
        columns_per_unit=1,
        owner=owner,
        norm=None if isinstance(norm := block.get_submodule(paths.norm), FoldedNorm) else norm,
        implant=projection.module if isinstance(projection.module, ImplantedConv2d) else None,
        fixed=_IMPLANT if isinstance(owner, ImplantedConv2d) or isinstance(output.module, ImplantedConv2d) else None,
    )


def has_module(module: nn.Module, path: str) -> bool:
    """Return whether a module has a submodule at this path."""
    try:
        module.get_submodule(path)
    except AttributeError:
        return False
    return True
