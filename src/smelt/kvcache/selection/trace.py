"""Traces of selected pages, step by step: input for cost models of hardware one does not own.

One safetensors file with a JSON header. A row is one KV head of one layer, for one request, at one step; pages are
numbered within the request, so a trace does not depend on the cache it was recorded from.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from smelt.errors import DataError
from smelt.files import write_atomically
from smelt.kernels.kv_quant import KVQuantFormat, row_layout
from smelt.kvcache.selection.config import SparseAttentionConfig
from smelt.kvcache.selection.page_cache import OffloadConfig
from smelt.models.model import Model

FORMAT = "smelt-page-trace-2"
_FORMAT_1 = "smelt-page-trace-1"
_KEYS_OF_FORMAT_1 = {
    "hidden": "hidden_size", "width": "head_dim", "page": "page_size", "digest_bytes": "summary_bytes",
    "digest": "summary", "budget": "token_budget", "share": "budget_ratio", "sink": "sink_pages",
    "window": "recent_pages", "steady": "keep_steps", "refresh": "refresh_interval", "slots": "num_slots",
}  # fmt: skip
_DTYPES = {
    "steps": torch.int32, "requests": torch.int32, "layers": torch.int32, "heads": torch.int32, "ends": torch.int64,
    "pages": torch.int32, "recalled": torch.bool,
}  # fmt: skip


@dataclass(frozen=True)
class TraceMetadata:
    """Model and KV cache dimensions of a trace."""

    model_type: str
    hidden_size: int
    weight_bytes: int  # of all parameters
    query_heads: tuple[int, ...]  # per layer
    kv_heads: tuple[int, ...]
    head_dim: int
    page_size: int  # tokens
    page_bytes: int  # keys and values of one page of one head
    summary_bytes: int  # both corners of one page of one head
    summary: str
    token_budget: int
    budget_ratio: float
    sink_pages: int
    recent_pages: int
    keep_steps: int  # 0 where all pages are on the device
    refresh_interval: int
    num_slots: int  # resident pages per head; 0 where all pages are on the device


@dataclass(frozen=True)
class TraceRow:
    """Pages that one head of one layer selected in one step."""

    step: int
    request: str
    layer: int
    head: int
    pages: tuple[int, ...]  # the last one is the last page of the sequence
    recalled: tuple[int, ...]  # those of `pages` copied to the device; a page that requests share is copied once


@dataclass(frozen=True)
class Trace:
    """Rows in the order of computation. Pages of row i are pages[ends[i - 1] : ends[i]]."""

    metadata: TraceMetadata
    request_ids: tuple[str, ...]
    steps: Tensor  # [rows], int32, as are the next three
    requests: Tensor  # index into `request_ids`
    layers: Tensor
    heads: Tensor
    ends: Tensor  # [rows], int64
    pages: Tensor  # [pages of all rows], int32
    recalled: Tensor  # same shape, bool

    def __len__(self) -> int:
        return len(self.steps)

    def rows(self) -> Iterator[TraceRow]:
        columns = (self.steps, self.requests, self.layers, self.heads, self.ends)
        start = 0
        for step, request, layer, head, end in zip(*(column.tolist() for column in columns), strict=True):
            pages, recalled = self.pages[start:end], self.recalled[start:end]
            yield TraceRow(
                step, self.request_ids[request], layer, head, tuple(pages.tolist()), tuple(pages[recalled].tolist())
            )
            start = end

    def write(self, path: Path) -> None:
        """Write atomically."""
        metadata = json.dumps(dataclasses.asdict(self.metadata))
        header = {"format": FORMAT, "metadata": metadata, "request_ids": json.dumps(self.request_ids)}
        tensors = {name: getattr(self, name) for name in _DTYPES}
        write_atomically(path, lambda temporary: save_file(tensors, temporary, metadata=header))


class TraceRecorder:
    """Record a trace while an engine runs: about five bytes per selected page, small beside the KV cache."""

    def __init__(self, metadata: TraceMetadata) -> None:
        self.metadata = metadata
        self._request_indices: dict[str, int] = {}
        self._parts: dict[str, list[Tensor]] = {name: [] for name in _DTYPES}

    def add(
        self, step: int, layer: int, request_ids: Sequence[str], pages: Tensor, mask: Tensor, recalled: Tensor | None
    ) -> None:
        """Add pages [requests, kv_heads, max_selected] where `mask` is set, and which of them were recalled."""
        rows = mask.shape[0] * mask.shape[1]
        indices = [self._request_indices.setdefault(name, len(self._request_indices)) for name in request_ids]
        columns = {
            "steps": torch.full((rows,), step),
            "requests": torch.tensor(indices).repeat_interleave(mask.shape[1]),
            "layers": torch.full((rows,), layer),
            "heads": torch.arange(mask.shape[1]).repeat(mask.shape[0]),
            "ends": mask.sum(-1).flatten(),  # counts until `trace` accumulates them
            "pages": pages[mask],
            "recalled": torch.zeros_like(mask)[mask] if recalled is None else recalled[mask],
        }
        for name, dtype in _DTYPES.items():
            self._parts[name].append(columns[name].to(dtype))

    def trace(self) -> Trace:
        """Return the rows recorded so far."""
        columns = {
            name: torch.cat([torch.empty(0, dtype=_DTYPES[name]), *parts]) for name, parts in self._parts.items()
        }
        columns["ends"] = columns["ends"].cumsum(0)
        return Trace(self.metadata, tuple(self._request_indices), **columns)


def trace_metadata(
    model: Model,
    config: SparseAttentionConfig,
    offload: OffloadConfig | None,
    kv_formats: Mapping[int, KVQuantFormat | None],
) -> TraceMetadata:
    """Describe a model and its sparse attention; `kv_formats` is the quantized KV format of each layer."""
    parts = {part.block: part for part in model.anatomy.parts if part.kind == "heads" and part.units}
    layers = range(len(model.anatomy.blocks))
    head_dim = max((part.head_dim for part in parts.values()), default=0)
    dtype = model.network.dtype
    row_size, row_dtype = row_layout(next(iter(kv_formats.values()), None), head_dim, dtype)
    return TraceMetadata(
        model_type=model.network.config.model_type,
        hidden_size=model.network.config.get_text_config().hidden_size,
        weight_bytes=sum(parameter.nbytes for parameter in model.network.parameters()),
        query_heads=tuple(
            parts[layer].units * parts[layer].heads_per_unit if layer in parts else 0 for layer in layers
        ),
        kv_heads=tuple(parts[layer].units if layer in parts else 0 for layer in layers),
        head_dim=head_dim,
        page_size=config.page_size,
        page_bytes=config.page_size * 2 * row_size * row_dtype.itemsize,
        summary_bytes=2 * head_dim * dtype.itemsize,
        summary=config.summary.name,
        token_budget=config.token_budget,
        budget_ratio=config.budget_ratio,
        sink_pages=config.sink_pages,
        recent_pages=config.recent_pages,
        keep_steps=offload.keep_steps if offload else 0,
        refresh_interval=offload.refresh_interval if offload else 0,
        num_slots=offload.num_slots if offload else 0,
    )


def read_trace(path: Path) -> Trace:
    """Read and check a trace written by this version or by version 0.1."""
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            if header.get("format") not in (FORMAT, _FORMAT_1):
                raise DataError(f"{path} is not a page trace of this version ({FORMAT}); record it again.")
            tensors = {name: file.get_tensor(name) for name in _DTYPES}
        metadata, request_ids = _read_header(header)
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} cannot be read as a page trace ({error}); record it again.") from error
    _check(path, metadata, request_ids, tensors)
    return Trace(metadata, request_ids, **tensors)


def _read_header(header: Mapping[str, str]) -> tuple[TraceMetadata, tuple[str, ...]]:
    if header["format"] == FORMAT:
        return _metadata(json.loads(header["metadata"])), tuple(json.loads(header["request_ids"]))
    content = {_KEYS_OF_FORMAT_1.get(key, key): value for key, value in json.loads(header["shape"]).items()}
    return _metadata(content), tuple(json.loads(header["names"]))


def _metadata(content: Mapping[str, Any]) -> TraceMetadata:
    fields = {field.name: content[field.name] for field in dataclasses.fields(TraceMetadata)}
    types: dict[str, tuple[type, ...]] = {"model_type": (str,), "summary": (str,), "budget_ratio": (int, float)}
    for name, value in fields.items():
        values = value if name in ("query_heads", "kv_heads") else [value]
        if not isinstance(values, list) or not all(isinstance(item, types.get(name, (int,))) for item in values):
            raise ValueError(f"its {name} is damaged")
    lists = {name: tuple(fields[name]) for name in ("query_heads", "kv_heads")}
    return TraceMetadata(**{**fields, **lists})


def _check(path: Path, metadata: TraceMetadata, request_ids: tuple[str, ...], tensors: dict[str, Tensor]) -> None:
    typed = all(tensors[name].dtype == dtype and tensors[name].dim() == 1 for name, dtype in _DTYPES.items())
    if not typed or not _consistent(tensors) or not _in_bounds(tensors, metadata, request_ids):
        raise DataError(f"{path} is a damaged page trace: its rows do not fit together; record it again.")


def _consistent(tensors: dict[str, Tensor]) -> bool:
    """Return whether all columns have the same length and every row has at least one page."""
    ends = [0, *tensors["ends"].tolist()]
    lengths = {len(tensors[name]) for name in ("steps", "requests", "layers", "heads", "ends")}
    rising = all(start < end for start, end in pairwise(ends))
    return len(lengths) == 1 and rising and len(tensors["pages"]) == len(tensors["recalled"]) == ends[-1]


def _in_bounds(tensors: dict[str, Tensor], metadata: TraceMetadata, request_ids: tuple[str, ...]) -> bool:
    bounds = {
        "requests": len(request_ids),
        "layers": len(metadata.kv_heads),
        "heads": max(metadata.kv_heads, default=0),
    }
    positive = all(bool((tensors[name] >= 0).all()) for name in ("steps", "pages", *bounds))
    return positive and all(bool((tensors[name] < bound).all()) for name, bound in bounds.items())
