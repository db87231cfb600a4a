"""Attention layers that use the attention map of an earlier layer: they keep V and the output, and have no Q and K.

The first layer of a group computes the map in eager attention, where it exists as a tensor. Every other layer of the
group multiplies it with its own values. In generation such a layer keeps only values in the KV cache. Paged attention
does not keep the map: it computes the scores again from the queries and keys of the first layer. Works on the meta
device, which is how a saved artifact is restored before its weights are loaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from smelt.errors import ModelError
from smelt.models.anatomy import Anatomy, Part
from smelt.models.reused_attention import AttentionMapSlot, ReusedAttention

_NORMS = {"q_norm", "k_norm", "q_layernorm", "k_layernorm"}  # of Q and K: they leave with these


def reuse_attention(anatomy: Anatomy, leaders: Mapping[int, int]) -> None:
    """Let layers use the map of others, in place; `leaders` maps a block to the earlier block that computes its map."""
    heads = {part.block: part for part in anatomy.parts if part.kind == "heads"}
    for block, leader in leaders.items():
        reason = unshareable_reason(heads[leader], heads[block])
        if reason is not None:
            raise ModelError(f"{heads[block].path} cannot use the attention map of {heads[leader].path}: {reason}.")
    network: Any = anatomy.network
    network.set_attn_implementation("eager")
    slots: dict[int, AttentionMapSlot] = {}
    for block, leader in sorted(leaders.items()):
        if leader not in slots:
            slots[leader] = AttentionMapSlot.attach(heads[leader].owner)
        _replace(anatomy, heads[block], leader, slots[leader])


def unshareable_reason(leader: Part, part: Part) -> str | None:
    """Return why a layer cannot use the map of another, or None if it can."""
    paths = part.attention
    assert paths is not None
    if part.fixed is not None or leader.fixed is not None:
        return f"its heads {part.fixed or leader.fixed}"
    if paths.fused:
        return "one layer computes its queries, keys and values"
    if part.implant is not None:
        return "it has a neural implant"
    if part.clipped:
        return "its values are clipped"
    if not part.units or not leader.units:
        return "it has no heads left"
    if (part.units, part.heads_per_unit, part.kept) != (leader.units, leader.heads_per_unit, leader.kept):
        return "other heads were removed from it"
    names = [path.removeprefix(f"{paths.owner}.") for path in (paths.queries, paths.keys, paths.values, paths.output)]
    known = {*names, *_NORMS}
    unknown = next(
        (name for name, child in part.owner.named_children() if name not in known and _has_weights(child)), None
    )
    if unknown is not None:
        return f"Smelt does not know what its layer {unknown} does"
    queries, values = part.input_projections[0], part.input_projections[2]
    if (
        queries.out_features != part.output.in_features
        or values.out_features * part.heads_per_unit != queries.out_features
    ):
        return "its queries and values differ in width"
    return None


def reused_maps(anatomy: Anatomy) -> list[dict[str, str]]:
    """Return which layers use the map of which, as plain data."""
    heads = {part.block: part.path for part in anatomy.parts if part.kind == "heads"}
    return [{"layer": part.path, "map_of": heads[part.map_of]} for part in anatomy.parts if part.map_of is not None]


def restore_attention_reuse(anatomy: Anatomy, entries: Any, where: str) -> None:
    """Restore reuse in a freshly built network from the `attention_reuse` of a smelt.json, which is checked first."""
    heads = {part.path: part.block for part in anatomy.parts if part.kind == "heads"}
    if not isinstance(entries, list) or not all(
        isinstance(entry, dict) and entry.get("layer") in heads and entry.get("map_of") in heads for entry in entries
    ):
        raise ModelError(
            f"{where}: the reused attention maps in smelt.json do not name attention layers of this network."
        )
    leaders = {heads[entry["layer"]]: heads[entry["map_of"]] for entry in entries}
    if any(leader >= block or leader in leaders for block, leader in leaders.items()) or len(leaders) != len(entries):
        raise ModelError(
            f"{where}: a reused attention map in smelt.json is not that of an earlier layer with its own map."
        )
    reuse_attention(anatomy, leaders)


def _replace(anatomy: Anatomy, part: Part, leader: int, slot: AttentionMapSlot) -> None:
    paths = part.attention
    assert paths is not None
    owner, inside = part.owner, part.output.path.startswith(f"{part.path}.")
    replacement: Any = ReusedAttention(
        paths.values.removeprefix(f"{paths.owner}."), part.input_projections[2].module,
        part.output.path.removeprefix(f"{part.path}.") if inside else None, part.output.module if inside else None,
        slot, leader=leader, head_dim=part.head_dim, layer_idx=getattr(owner, "layer_idx", None),
    )  # fmt: skip
    setattr(replacement, paths.head_dim, part.head_dim)
    for name in ("smelt_kept_units", "smelt_original_units"):
        if hasattr(owner, name):
            setattr(replacement, name, getattr(owner, name))
    replacement.train(owner.training)
    slot.readers += 1
    parent, _, name = part.path.rpartition(".")
    setattr(anatomy.network.get_submodule(parent), name, replacement)


def _has_weights(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def kv_cache_share(anatomy: Anatomy) -> float:
    """Return the bytes of the KV cache relative to those with a key in every layer."""
    heads = [part for part in anatomy.parts if part.kind == "heads"]
    sizes: Sequence[int] = [part.units * part.head_dim for part in heads]
    kept = sum(size * (1 if part.map_of is not None else 2) for part, size in zip(heads, sizes, strict=True))
    return kept / max(2 * sum(sizes), 1)
