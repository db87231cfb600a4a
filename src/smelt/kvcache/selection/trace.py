"""What was chosen at every step, as a file: the input of cost models for hardware that one does not own.

One safetensors file with a JSON header. A row is one head of keys of one layer, for one request, at one step; its pages
are counted within the request, so that the trace says nothing about the cache it came from.
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
from smelt.files import write_whole
from smelt.kernels.kv_quant import RowFormat, stored
from smelt.kvcache.selection.config import SparseAttentionConfig
from smelt.kvcache.selection.page_cache import OffloadConfig
from smelt.models.model import Model

FORMAT = "smelt-page-trace-1"
_TYPES = {
    "steps": torch.int32, "requests": torch.int32, "layers": torch.int32, "heads": torch.int32, "ends": torch.int64,
    "pages": torch.int32, "recalled": torch.bool,
}  # fmt: skip


@dataclass(frozen=True)
class TraceMetadata:
    """The model and the cache that a trace is of."""

    model_type: str
    hidden: int  # width of the network
    weight_bytes: int  # of all its parameters
    query_heads: tuple[int, ...]  # of each layer
    kv_heads: tuple[int, ...]
    width: int  # of a head
    page: int  # tokens
    page_bytes: int  # keys and values of one page of one head
    digest_bytes: int  # both corners of one page of one head
    digest: str
    budget: int  # tokens
    share: float
    sink: int  # pages
    window: int
    steady: int  # steps; 0 where all pages are on the device
    refresh: int
    slots: int  # pages of a head on the device; 0 where all are


@dataclass(frozen=True)
class Row:
    """One choice."""

    step: int
    request: str
    layer: int
    head: int
    pages: tuple[int, ...]  # the last one is the request's last: it has so many and one
    recalled: tuple[int, ...]  # those of `pages` that had to be copied; one that requests share was copied once


@dataclass(frozen=True)
class Trace:
    """Rows in the order in which they were computed. Pages of row i are pages[ends[i - 1] : ends[i]]."""

    shape: TraceMetadata
    names: tuple[str, ...]  # of the requests
    steps: Tensor  # [rows], int32, as are the next three
    requests: Tensor  # into `names`
    layers: Tensor
    heads: Tensor
    ends: Tensor  # [rows], int64
    pages: Tensor  # [pages of all rows], int32
    recalled: Tensor  # the same shape, bool

    def __len__(self) -> int:
        return len(self.steps)

    def rows(self) -> Iterator[Row]:
        columns = (self.steps, self.requests, self.layers, self.heads, self.ends)
        start = 0
        for step, request, layer, head, end in zip(*(each.tolist() for each in columns), strict=True):
            pages, recalled = self.pages[start:end], self.recalled[start:end]
            yield Row(step, self.names[request], layer, head, tuple(pages.tolist()), tuple(pages[recalled].tolist()))
            start = end

    def write(self, path: Path) -> None:
        """Whole or not at all."""
        shape = json.dumps(dataclasses.asdict(self.shape))
        header = {"format": FORMAT, "shape": shape, "names": json.dumps(self.names)}
        tensors = {name: getattr(self, name) for name in _TYPES}
        write_whole(path, lambda temporary: save_file(tensors, temporary, metadata=header))


class TraceRecorder:
    """Gathers a trace while an engine runs; it is small beside the cache: about five bytes a chosen page."""

    def __init__(self, shape: TraceMetadata) -> None:
        self.shape = shape
        self._names: dict[str, int] = {}
        self._parts: dict[str, list[Tensor]] = {name: [] for name in _TYPES}

    def add(
        self, step: int, layer: int, names: Sequence[str], pages: Tensor, there: Tensor, recalled: Tensor | None
    ) -> None:
        """Of these requests: pages [requests, kv_heads, most] where they are `there`, and which were recalled."""
        rows = there.shape[0] * there.shape[1]
        numbers = torch.tensor([self._names.setdefault(name, len(self._names)) for name in names])
        found = {
            "steps": torch.full((rows,), step),
            "requests": numbers.repeat_interleave(there.shape[1]),
            "layers": torch.full((rows,), layer),
            "heads": torch.arange(there.shape[1]).repeat(there.shape[0]),
            "ends": there.sum(-1).flatten(),  # counts as yet
            "pages": pages[there],
            "recalled": torch.zeros_like(there)[there] if recalled is None else recalled[there],
        }
        for name, dtype in _TYPES.items():
            self._parts[name].append(found[name].to(dtype))

    def trace(self) -> Trace:
        """What was recorded so far."""
        whole = {name: torch.cat([torch.empty(0, dtype=_TYPES[name]), *parts]) for name, parts in self._parts.items()}
        whole["ends"] = whole["ends"].cumsum(0)
        return Trace(self.shape, tuple(self._names), **whole)


def read_trace(path: Path) -> Trace:
    """Checked: a trace that cannot be is refused."""
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            if header.get("format") != FORMAT:
                raise DataError(f"{path} is no page trace of this version ({FORMAT}); record it again.")
            tensors = {name: file.get_tensor(name) for name in _TYPES}
        shape = _shape(json.loads(header["shape"]))
        names = tuple(json.loads(header["names"]))
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} cannot be read as a page trace ({error}); record it again.") from error
    _check(path, shape, names, tensors)
    return Trace(shape, names, **tensors)


def _shape(content: Mapping[str, Any]) -> TraceMetadata:
    fields = {field.name: content[field.name] for field in dataclasses.fields(TraceMetadata)}
    for name, value in fields.items():
        numbers = value if name in ("query_heads", "kv_heads") else [value]
        wanted: tuple[type, ...] = {"model_type": (str,), "digest": (str,), "share": (int, float)}.get(name, (int,))
        if not isinstance(numbers, list) or not all(isinstance(each, wanted) for each in numbers):
            raise ValueError(f"its {name} is damaged")
    lists = {name: tuple(fields[name]) for name in ("query_heads", "kv_heads")}
    return TraceMetadata(**{**fields, **lists})


def _check(path: Path, shape: TraceMetadata, names: tuple[str, ...], tensors: dict[str, Tensor]) -> None:
    sound = all(tensors[name].dtype == dtype and tensors[name].dim() == 1 for name, dtype in _TYPES.items())
    if not sound or not _fit(tensors) or not _within(tensors, shape, names):
        raise DataError(f"{path} is a damaged page trace: its rows do not fit together; record it again.")


def _fit(tensors: dict[str, Tensor]) -> bool:
    """Every row has its columns and at least one page."""
    ends = [0, *tensors["ends"].tolist()]
    columns = {len(tensors[name]) for name in ("steps", "requests", "layers", "heads", "ends")}
    rising = all(start < end for start, end in pairwise(ends))
    return len(columns) == 1 and rising and len(tensors["pages"]) == len(tensors["recalled"]) == ends[-1]


def _within(tensors: dict[str, Tensor], shape: TraceMetadata, names: tuple[str, ...]) -> bool:
    bounds = {"requests": len(names), "layers": len(shape.kv_heads), "heads": max(shape.kv_heads, default=0)}
    above = all(bool((tensors[name] >= 0).all()) for name in ("steps", "pages", *bounds))
    return above and all(bool((tensors[name] < bound).all()) for name, bound in bounds.items())


def trace_metadata(
    model: Model,
    selection: SparseAttentionConfig,
    residence: OffloadConfig | None,
    rows: Mapping[int, RowFormat | None],
) -> TraceMetadata:
    """`rows`: how pages of each layer hold keys and values."""
    parts = {part.block: part for part in model.anatomy.parts if part.kind == "heads" and part.units}
    layers = range(len(model.anatomy.blocks))
    width = max((part.head_dim for part in parts.values()), default=0)
    own = model.network.dtype
    last, held = stored(next(iter(rows.values()), None), width, own)
    return TraceMetadata(
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
