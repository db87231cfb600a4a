"""Traces record the selected pages, round-trip through their file, and are refused when damaged."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from smelt.errors import DataError, ResourceError
from smelt.kvcache.selection.trace import Trace, TraceMetadata, TraceRecorder, TraceRow, read_trace

METADATA = TraceMetadata(
    model_type="llama", hidden_size=32, weight_bytes=1000, query_heads=(4, 4), kv_heads=(2, 2), head_dim=8, page_size=4,
    page_bytes=256, summary_bytes=64, summary="quest", token_budget=12, budget_ratio=0.25, sink_pages=1, recent_pages=1,
    keep_steps=8, refresh_interval=1, num_slots=9,
)  # fmt: skip


def recorded() -> Trace:
    recorder = TraceRecorder(METADATA)
    pages = torch.tensor([[[0, 2, 5], [1, 2, 5]], [[0, 1, 1], [0, 1, 1]]])
    valid = torch.tensor([[[True] * 3] * 2, [[True, True, False]] * 2])
    recalled = torch.tensor([[[False, True, False], [False] * 3], [[True, False, False], [False] * 3]])
    recorder.add(3, 1, ["a", "b"], pages, valid, recalled)
    recorder.add(4, 0, ["b"], pages[1:], valid[1:], None)
    return recorder.trace()


ROWS = [
    TraceRow(3, "a", 1, 0, (0, 2, 5), (2,)),
    TraceRow(3, "a", 1, 1, (1, 2, 5), ()),
    TraceRow(3, "b", 1, 0, (0, 1), (0,)),
    TraceRow(3, "b", 1, 1, (0, 1), ()),
    TraceRow(4, "b", 0, 0, (0, 1), ()),
    TraceRow(4, "b", 0, 1, (0, 1), ()),
]


def test_a_trace_round_trips(tmp_path: Path) -> None:
    trace = recorded()
    assert list(trace.rows()) == ROWS and len(trace) == 6
    trace.write(tmp_path / "folder" / "run.trace")
    reloaded = read_trace(tmp_path / "folder" / "run.trace")
    assert list(reloaded.rows()) == ROWS and reloaded.metadata == METADATA and reloaded.request_ids == ("a", "b")
    assert [file.name for file in (tmp_path / "folder").iterdir()] == ["run.trace"]


def test_a_trace_of_version_0_1_is_read(tmp_path: Path) -> None:
    path = tmp_path / "run.trace"
    recorded().write(path)
    shape = {
        "model_type": "llama", "hidden": 32, "weight_bytes": 1000, "query_heads": [4, 4], "kv_heads": [2, 2],
        "width": 8, "page": 4, "page_bytes": 256, "digest_bytes": 64, "digest": "quest", "budget": 12, "share": 0.25,
        "sink": 1, "window": 1, "steady": 8, "refresh": 1, "slots": 9,
    }  # fmt: skip
    header = {"format": "smelt-page-trace-1", "shape": json.dumps(shape), "names": json.dumps(["a", "b"])}
    save_file(load_file(path), path, metadata=header)
    trace = read_trace(path)
    assert list(trace.rows()) == ROWS and trace.metadata == METADATA and trace.request_ids == ("a", "b")


def test_an_empty_trace(tmp_path: Path) -> None:
    TraceRecorder(METADATA).trace().write(tmp_path / "run.trace")
    assert len(read_trace(tmp_path / "run.trace")) == 0


def test_a_failed_write_leaves_no_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ResourceError, match="could not be written"):
        recorded().write(tmp_path / "file" / "run.trace")
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("requests", lambda column: column + 1), ("layers", lambda column: column - 1),
        ("heads", lambda column: column[:-1]),
        ("heads", lambda column: column + 1), ("pages", lambda column: column[:-1]), ("pages", lambda column: -column),
        ("ends", lambda column: column.flip(0)), ("ends", lambda column: column + 1),
        ("steps", lambda column: column.long()), ("steps", lambda column: column[0]),
        ("recalled", lambda column: column[None]),
    ],
)  # fmt: skip
def test_rows_of_mismatched_shapes(tmp_path: Path, name: str, damage: Callable[[Tensor], Tensor]) -> None:
    path = tmp_path / "run.trace"
    recorded().write(path)
    with safe_open(path, framework="pt") as file:
        header = file.metadata()
    tensors = load_file(path)
    save_file({**tensors, name: damage(tensors[name]).contiguous()}, path, metadata=header)
    with pytest.raises(DataError, match="damaged page trace"):
        read_trace(path)


def test_files_that_are_not_traces(tmp_path: Path) -> None:
    path = tmp_path / "run.trace"
    with pytest.raises(DataError, match="cannot be read"):
        read_trace(path)
    path.write_bytes(b"something else entirely")
    with pytest.raises(DataError, match="cannot be read"):
        read_trace(path)
    save_file({"steps": torch.zeros(1)}, path)
    with pytest.raises(DataError, match="not a page trace of this version"):
        read_trace(path)
    damaged = dataclasses.replace(METADATA, head_dim="8")  # type: ignore[arg-type]
    dataclasses.replace(recorded(), metadata=damaged).write(path)
    with pytest.raises(DataError, match="its head_dim is damaged"):
        read_trace(path)
