"""What a step would wait for its gradients, method by method: the alpha-beta model and what was measured here.

exposed = computing + communication - hidden. The frame reduces a vector when it is complete and holds backward up until
it is done, so nothing of a compressor's communication is hidden. DDP's own all-reduce does run beside backward: all of
it can be hidden but its last bucket, which is ready only when backward ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from smelt.train.gradients.autotune.dry_run import DryRunResult
from smelt.train.gradients.autotune.link import Link
from smelt.train.gradients.autotune.timed_comm import max_over_ranks
from smelt.train.gradients.comm import Workers

_BUCKET = 25 * 2**20  # bytes: DDP's default

# Bytes in megabytes, times in milliseconds.
TABLE_COLUMNS = ["method", "MB", "calls", "sending", "hidden", "computing", "waiting", "gain"]


@dataclass(frozen=True)
class CostPrediction:
    """Of one step, in seconds."""

    method: str
    bytes: int  # that arrive at a worker
    calls: int  # collectives
    communication: float
    hidden: float  # of the communication, behind backward
    computing: float

    @property
    def exposed(self) -> float:
        """What the step waits for."""
        return self.communication - self.hidden + self.computing

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "exposed": self.exposed}


def predict_compressor(rehearsal: DryRunResult, handling: float = 0.0) -> CostPrediction:
    """`handling`: seconds in which the frame copies the gradients in and out, whatever the compressor."""
    computing = rehearsal.computing + handling
    return CostPrediction(rehearsal.method, rehearsal.bytes, rehearsal.calls, rehearsal.communication, 0.0, computing)


def agree_on_prediction(made: CostPrediction, workers: Workers, device: torch.device) -> CostPrediction:
    """Take the slowest rank's numbers on every rank: with nodes each rank has tried a share of its own."""
    size, communication, computing = max_over_ranks([made.bytes, made.communication, made.computing], workers, device)
    return replace(made, bytes=int(size), communication=communication, computing=computing)


def predict_ddp(
    elements: int, link: Link, backward: float = 0.0, width: int = 4, rounding: float = 0.0, name: str = "ddp"
) -> CostPrediction:
    """DDP by itself, with values of `width` bytes (2: PyTorch's 16-bit hooks, which round for `rounding` seconds).

    `backward`: seconds that backward goes on after its first gradients are there. The line is that of float32; whether
    a backend adds 16-bit values as fast is not measured.
    """
    message = elements * width
    size = 2 * (link.workers - 1) * message // link.workers
    buckets = max(-(-4 * elements // _BUCKET), 1)
    communication = buckets * link.time("all-reduce", size / buckets)
    last = communication / buckets
    hidden = min(backward, communication - last)
    return CostPrediction(name, size, buckets, communication, hidden, rounding)


def gains(predictions: Sequence[CostPrediction], against: CostPrediction) -> list[float]:
    """How many times shorter than `against` each one's wait is; below 1: longer."""
    return [against.exposed / max(prediction.exposed, 1e-9) for prediction in predictions]


def table_rows(predictions: Sequence[CostPrediction], against: CostPrediction) -> list[list[str]]:
    """The arithmetic in words, a row a method, under `TABLE_COLUMNS`."""
    return [
        [
            each.method,
            f"{each.bytes / 1e6:.3f}",
            f"{each.calls}",
            *(f"{1000 * part:.3f}" for part in (each.communication, each.hidden, each.computing, each.exposed)),
            f"{gain:.2f}x",
        ]
        for each, gain in zip(predictions, gains(predictions, against), strict=True)
    ]


def format_table(predictions: Sequence[CostPrediction], against: CostPrediction) -> str:
    """The same as lines for a log."""
    rows = [TABLE_COLUMNS, *table_rows(predictions, against)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in rows
    )
