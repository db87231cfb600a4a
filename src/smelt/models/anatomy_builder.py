"""Build the structural view of a network: find its blocks, and in each the parts that a row of families.py names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from smelt.errors import ModelError
from smelt.models.anatomy import Anatomy, Block, Mixture, Part, Projection, backbone_of
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

# Why the units of a part are fixed.
_SHARED_MAP = "share their attention map with another layer"
_IMPLANT = "have a neural implant"
_CARVED = "were divided among experts"

# Small layers that decide where tokens go; rounding them changes more than it saves.
_ROUTERS = {"gate", "router", "shared_expert_gate", "gating"}


def anatomy_of(network: PreTrainedModel) -> Anatomy:
    """Build the structural view of a transformers network.

    Of a vision-language model, the language model is viewed; of a type without a row in families.py, the outermost
    lists of modules with linear layers; of a network that runs a program, its outline.
    """
    network = outline_of(network)
    backbone, config = backbone_of(network)
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
