"""The dtype of the KV cache: the model's own, or quantized rows."""

from __future__ import annotations

import logging

from smelt.errors import ConfigError
from smelt.kernels.kv_quant import CLIP, FP8, INT3, INT4, INT8, KV_QUANT_DTYPES
from smelt.models.kv_cache import KVCacheFormat
from smelt.models.model import Model
from smelt.numerics.catalog import get_format
from smelt.numerics.format import PER_ROW

MODEL_DTYPE = "model"  # the model's own dtype
KV_CACHE_DTYPES = (MODEL_DTYPE, *KV_QUANT_DTYPES)
# Names of `smelt formats` with a paged kernel
KV_DTYPE_OF_FORMAT = {"int8": INT8, "fp8-e4m3": FP8, "int4-asym": INT4, "int3-asym": INT3}
logger = logging.getLogger(__name__)


def check_kv_cache_dtype(requested: str | None) -> None:
    if requested is not None and requested not in KV_CACHE_DTYPES:
        raise ConfigError(f"there is no KV cache dtype {requested!r}; there is {', '.join(KV_CACHE_DTYPES)}.")


def resolve_kv_cache_dtype(model: Model, requested: str | None) -> str | None:
    """Return the requested dtype, else that of a model compressed for a quantized KV cache; None: the model's own."""
    check_kv_cache_dtype(requested)
    if requested is not None:
        return None if requested == MODEL_DTYPE else requested
    if model.kv is None:
        return None
    dtype = _equivalent_dtype(model.kv, max(part.head_dim for part in model.anatomy.parts if part.kind == "heads"))
    if dtype is None:
        message = "%s was compressed for a KV cache in %s, which has no paged kernel; the model's own dtype is used."
        logger.warning(message, model.source or "this model", model.kv)
    return dtype


def backend_suffix(dtype: str | None) -> str:
    """Return the KV cache part of a backend's name."""
    return "" if dtype is None else f", {dtype} KV cache"


def _equivalent_dtype(kv: KVCacheFormat, head_dim: int) -> str | None:
    """Return the row format that stores the same: one scale per head, nothing clipped. int4 and int3 rows have a clip
    ratio of their own, with which a format that clips nothing is served as well."""
    dtype = KV_DTYPE_OF_FORMAT.get(kv.format.partition("/")[0].partition("@")[0])
    if kv.values not in (None, kv.format) or kv.clip not in (1, CLIP.get(str(dtype), 1)):
        return None
    group_size = get_format(kv.format).group_size
    return dtype if group_size == PER_ROW or group_size >= head_dim else None
