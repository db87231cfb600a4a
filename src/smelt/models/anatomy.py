"""The structural view that every method works on: blocks, and in each block the parts whose units can be removed.

A *part* is a set of removable units: attention heads (with grouped-query attention: a KV head and its query heads),
feed-forward channels, or the inner channels of a residual convolution block. All parts have the same structure:
`input_projections` compute the units and `output` consumes them, so a method needs only one formula.
Each expert of a mixture is a part of its own. Linear layers of a block that belong to no part (latent attention, cross
attention, shared experts, and all layers of a network without a row in families.py) can be quantized, not pruned.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from smelt.models.families import AttentionPaths, Family, Residual, has_family
from smelt.models.implanted_layers import ImplantedConv2d
from smelt.models.quantized import QuantizedConv, QuantizedLinear

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
        return backbone_of(self.network)[0]

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


def backbone_of(network: PreTrainedModel) -> tuple[nn.Module, Any]:
    """Return the module that holds the blocks, and its config: the base model, or the language model inside it."""
    config = network.config
    text = config.get_text_config()
    if text is not config and not has_family(config.model_type):
        models = [module for module in network.modules() if isinstance(module, PreTrainedModel)]
        languages = [module for module in models if module.config.model_type == text.model_type]
        if languages:
            return languages[0].base_model, text
    return network.base_model, config
