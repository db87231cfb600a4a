"""The structural view that every method works on: blocks, and in each block the parts whose units can be removed.

A *part* is a set of removable units: attention heads (with grouped-query attention: a KV head and its query heads),
feed-forward channels, or the inner channels of a residual convolution block. All parts have the same structure:
`input_projections` compute the units and `output` consumes them, so a method needs only one formula.
Each expert of a mixture is a part of its own.
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
from smelt.models.experts import SeparateExperts
from smelt.models.families import (
    AttentionPaths,
    ChannelPaths,
    ExpertPaths,
    Family,
    FeedForwardPaths,
    Residual,
    family_of,
)
from smelt.models.quantized import QuantizedConv, QuantizedLinear

PartKind = Literal["heads", "ffn_channels", "channels"]


@dataclass(frozen=True)
class Projection:
    """A linear layer, or one chunk of a fused one (`chunk` of `num_chunks`, as in GPT-2's q, k, v)."""

    module: Any  # Linear, Conv1D or Conv2d
    path: str
    chunk: int = 0
    num_chunks: int = 1

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
        if isinstance(self.module, QuantizedLinear):
            return self.module.out_features // self.num_chunks
        return int(self.module.weight.shape[1 if self.transposed else 0]) // self.num_chunks

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
        return int(self.module.weight[0, 0].numel()) if isinstance(self.module, nn.Conv2d) else 1

    @property
    def weight(self) -> Tensor:
        """The weight as [out, in, ...], a view of the module's own storage."""
        weight: Tensor = self.module.weight.T if self.transposed else self.module.weight
        return weight[self.chunk * self.out_features : (self.chunk + 1) * self.out_features]

    @property
    def bias(self) -> Tensor | None:
        bias: Tensor | None = self.module.bias
        return None if bias is None else bias[self.chunk * self.out_features : (self.chunk + 1) * self.out_features]


@dataclass(frozen=True)
class Mixture:
    """The experts of a block, the router that dispatches tokens to them, and the number of experts per token."""

    path: str
    module: Any  # SeparateExperts
    router: Any  # has a weight [experts, hidden] and the same input as the experts
    router_path: str
    num_experts: int
    top_k: int


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
    fixed: bool = False  # the units are coupled: none can be removed
    clipped: bool = False  # values are clipped before the output: no scale or rotation can be moved across

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
    def token_fraction(self) -> float:
        """The fraction of tokens processed: 1, or top_k / num_experts for an expert (balanced routing assumed)."""
        return 1.0 if self.mixture is None else self.mixture.top_k / self.mixture.num_experts


@dataclass(frozen=True)
class Block:
    """One residual block and its parts, in execution order."""

    index: int
    path: str
    module: nn.Module
    parts: tuple[Part, ...]

    @property
    def norm_consumers(self) -> list[tuple[Any, list[Any]]]:
        """Each norm before parts of the block, with all layers that consume it: projections, a mixture's router."""
        norms: dict[int, tuple[Any, dict[int, Any]]] = {}
        for part in (part for part in self.parts if part.pre_norm is not None):
            _, layers = norms.setdefault(id(part.pre_norm), (part.pre_norm, {}))
            routers = [] if part.mixture is None else [part.mixture.router]
            layers |= {
                id(layer): layer for layer in (*routers, *(projection.module for projection in part.input_projections))
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
    def final_norm(self) -> nn.Module | None:
        """The norm between the last block and the head, if any."""
        path = self.family.final_norm
        return self.network.base_model.get_submodule(path) if path and self.residual == "pre" else None

    @property
    def embeddings(self) -> tuple[nn.Module, ...]:
        """The embedding tables that start the residual stream."""
        return tuple(self.network.base_model.get_submodule(path) for path in self.family.embeddings)

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


def anatomy_of(network: PreTrainedModel) -> Anatomy:
    """Build the structural view of a transformers network."""
    config = network.config
    family = family_of(config.model_type)
    residual = family.residual
    if family.pre_norm_flag is not None and not getattr(config, family.pre_norm_flag):
        residual = "post"
    backbone = network.base_model
    prefix = next((name for name, module in network.named_modules() if module is backbone), "")
    blocks = tuple(
        _block(family, config, residual, index, f"{prefix}.{path}".lstrip("."), module)
        for index, (path, module) in enumerate(_block_modules(backbone, family.blocks))
    )
    if not blocks:
        raise ModelError(f"no blocks were found at {family.blocks!r} in this {config.model_type} network.")
    return Anatomy(family, network, residual, blocks)


def _block_modules(backbone: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of a block list; a `*` in the path iterates over nested lists (the stages of a ResNet)."""
    head, star, tail = path.partition(".*.")
    for name, child in backbone.get_submodule(head).named_children():
        if star:
            for inner, module in child.get_submodule(tail).named_children():
                yield f"{head}.{name}.{tail}.{inner}", module
        else:
            yield f"{head}.{name}", child


def _block(family: Family, config: Any, residual: Residual, index: int, path: str, module: nn.Module) -> Block:
    parts: list[Part] = []
    norms = family.norms if residual == "pre" else None
    pre_norms = [module.get_submodule(norm) for norm in norms] if norms else [None, None]
    if family.attention is not None:
        attention = _attention(family.attention, index, path, module)
        clipped = family.attention.clip is not None and getattr(config, family.attention.clip, None) is not None
        parts.append(replace(attention, pre_norm=pre_norms[0], clipped=clipped))
    if family.experts is not None and _has(module, family.experts.owner):
        parts.extend(replace(part, pre_norm=pre_norms[1]) for part in _experts(family.experts, index, path, module))
    elif family.feed_forward is not None:
        parts.append(replace(_feed_forward(family.feed_forward, index, path, module), pre_norm=pre_norms[1]))
    parts.extend(_channels(family, index, path, module))
    return Block(index, path, module, tuple(parts))


def _projection(block: nn.Module, block_path: str, path: str, chunk: int = 0, num_chunks: int = 1) -> Projection:
    return Projection(block.get_submodule(path), f"{block_path}.{path}", chunk, num_chunks)


def _attention(paths: AttentionPaths, index: int, path: str, block: nn.Module) -> Part:
    owner: Any = block.get_submodule(paths.owner)
    output = _projection(block, path, paths.output)
    head_dim = int(getattr(owner, paths.head_dim))
    if output.in_features == 0:
        original, width = owner.smelt_original_units, owner.smelt_unit_width
        return Part(
            "heads", index, f"{path}.{paths.owner}", 0, original, (), (), output, width, owner,
            attention=paths, head_dim=head_dim,
        )  # fmt: skip
    num_chunks = 3 if paths.fused else 1
    input_projections = tuple(
        _projection(block, path, name, position if paths.fused else 0, num_chunks)
        for position, name in enumerate((paths.queries, paths.keys, paths.values))
    )
    units = input_projections[1].out_features // head_dim
    width = output.in_features // units
    return Part(
        kind="heads",
        block=index,
        path=f"{path}.{paths.owner}",
        units=units,
        original_units=getattr(owner, "smelt_original_units", units),
        input_projections=input_projections,
        rows_per_unit=(width, head_dim, head_dim),
        output=output,
        columns_per_unit=width,
        owner=owner,
        attention=paths,
        head_dim=head_dim,
        fixed=paths.joint_norms,
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
        input_projections=tuple(_projection(block, path, name) for name in paths.input_projections),
        rows_per_unit=(1,) * len(paths.input_projections),
        output=output,
        columns_per_unit=1,
        owner=owner,
    )


def _experts(paths: ExpertPaths, index: int, path: str, block: nn.Module) -> Iterator[Part]:
    module, router = block.get_submodule(paths.owner), block.get_submodule(paths.router)
    if not isinstance(module, SeparateExperts):
        raise ModelError(
            f"the experts at {path}.{paths.owner} are fused; load the model with Smelt, which splits them."
        )
    mixture = Mixture(
        path=f"{path}.{paths.owner}", module=module, router=router, router_path=f"{path}.{paths.router}",
        num_experts=len(module), top_k=int(getattr(router, paths.top_k)),
    )  # fmt: skip
    for position in range(len(module)):
        inside = f"{paths.owner}.{position}"
        expert = FeedForwardPaths((f"{inside}.{paths.up}", f"{inside}.{paths.gate}"), f"{inside}.{paths.down}")
        yield replace(_feed_forward(expert, index, path, block), mixture=mixture)


def _channels(family: Family, index: int, path: str, block: nn.Module) -> Iterator[Part]:
    for alternative in family.channels:
        if all(
            _has(block, name) for paths in alternative for name in (paths.input_projection, paths.norm, paths.output)
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
        norm=block.get_submodule(paths.norm),
    )


def _has(module: nn.Module, path: str) -> bool:
    try:
        module.get_submodule(path)
    except AttributeError:
        return False
    return True
