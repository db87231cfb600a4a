"""In what keys and values are held: the network's own numbers, or rows of few bits."""

from __future__ import annotations

import logging

from smelt.errors import ConfigError
from smelt.kernels.kv_quant import FP8, INT4, INT8, KV_QUANT_DTYPES
from smelt.models.kv_cache import KVCacheFormat
from smelt.models.model import Model
from smelt.numerics.catalog import get_format
from smelt.numerics.format import PER_ROW

OWN = "model"  # the network's own numbers
KV_CACHE_DTYPES = (OWN, *KV_QUANT_DTYPES)
SAME = {"int8": INT8, "fp8-e4m3": FP8, "int4-asym": INT4}  # names of `smelt formats` that rows of pages are held in
log = logging.getLogger("smelt.engine")


def resolve_kv_cache_dtype(model: Model, asked: str | None) -> str | None:
    """What was asked for; else, of a model that was made with its cache in few bits, what comes nearest to that. None:
    the network's own."""
    if asked is not None:
        if asked not in KV_CACHE_DTYPES:
            raise ConfigError(f"keys and values cannot be held in {asked!r}; there is {', '.join(KV_CACHE_DTYPES)}.")
        return None if asked == OWN else asked
    if model.kv is None:
        return None
    made = _same(model.kv, max(part.head_dim for part in model.anatomy.parts if part.kind == "heads"))
    if made is None:
        told = "%s was made with keys and values in %s, which no page holds; they are in the model's own type."
        log.warning(told, model.source or "this model", model.kv)
    return made


def told(kind: str | None) -> str:
    """For an operator, behind what computes a step."""
    return "" if kind is None else f", keys and values in {kind}"


def _same(kv: KVCacheFormat, width: int) -> str | None:
    """Of the rows that hold the same: one scale a head, and nothing clipped."""
    if kv.values not in (None, kv.format) or kv.clip != 1:
        return None
    group = get_format(kv.format).group_size
    whole = group == PER_ROW or group >= width
    return SAME.get(kv.format.partition("/")[0].partition("@")[0]) if whole else None
