"""What page selection asks of a model, and how a trace describes it."""

from __future__ import annotations

from collections.abc import Mapping

from smelt.errors import ModelError
from smelt.kernels.kv_quant import RowFormat, stored
from smelt.kvcache.selection.page_cache import Residence
from smelt.kvcache.selection.selection import Selection
from smelt.kvcache.selection.trace import TraceShape
from smelt.models.model import Model


def selectable_heads(model: Model) -> dict[int, tuple[int, int]]:
    """Heads of keys and their width, for every layer that has attention; what pages cannot be chosen for is refused."""
    config = model.network.config.get_text_config()
    if model.task != "language" or not model.anatomy.family.causal:
        raise ModelError("only language models that read from left to right have pages to choose from.")
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"} or getattr(config, "sliding_window", None):
        raise ModelError("this model has sliding layers, which see the last tokens only; serve it without selection.")
    parts = [part for part in model.anatomy.parts if part.kind == "heads" and part.units]
    return {part.block: (part.units, part.head_dim) for part in parts}


def trace_shape(
    model: Model, selection: Selection, residence: Residence | None, rows: Mapping[int, RowFormat | None]
) -> TraceShape:
    """`rows`: how pages of each layer hold keys and values."""
    parts = {part.block: part for part in model.anatomy.parts if part.kind == "heads" and part.units}
    layers = range(len(model.anatomy.blocks))
    width = max((part.head_dim for part in parts.values()), default=0)
    own = model.network.dtype
    last, held = stored(next(iter(rows.values()), None), width, own)
    return TraceShape(
        model_type=model.network.config.model_type,
        hidden=model.network.config.get_text_config().hidden_size,
        weight_bytes=sum(parameter.nbytes for parameter in model.network.parameters()),
        query_heads=tuple(parts[layer].units * parts[layer].group if layer in parts else 0 for layer in layers),
        kv_heads=tuple(parts[layer].units if layer in parts else 0 for layer in layers),
        width=width,
        page=selection.page,
        page_bytes=selection.page * 2 * last * held.itemsize,
        digest_bytes=2 * width * own.itemsize,
        digest=selection.digest.name,
        budget=selection.budget,
        share=selection.share,
        sink=selection.sink,
        window=selection.window,
        steady=residence.steady if residence else 0,
        refresh=residence.refresh if residence else 0,
        slots=residence.slots if residence else 0,
    )
