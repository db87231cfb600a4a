"""Predict how long a step waits for its gradients with each method, by the alpha-beta model, and choose by it.

exposed = compute + communication - hidden. A compressed bucket is reduced when it is complete, and backward waits until
that is done, so none of a compressor's communication is hidden. DDP's own all-reduce overlaps with backward: all of it
can be hidden except for its last bucket, which is ready only when backward ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from smelt.train.gradients.autotune.dry_run import DryRunResult
from smelt.train.gradients.autotune.link import Link
from smelt.train.gradients.autotune.timed_comm import max_over_ranks
from smelt.train.gradients.comm import Comm

_DDP_BUCKET_BYTES = 25 * 2**20  # DDP's default

# A step must be predicted this many times faster: times are estimated to a fifth, and a changed gradient costs steps
# (in `benchmarks/train_time.py` 8 to 45 % more of them to the same loss).
MIN_SPEEDUP = 1.2

# Bytes in megabytes, times in milliseconds.
TABLE_COLUMNS = ["method", "MB", "calls", "communication", "hidden", "compute", "exposed", "gain"]


@dataclass(frozen=True)
class CostPrediction:
    """The cost of one step's gradients, in seconds."""

    method: str
    bytes: int  # that arrive at a rank
    calls: int  # collectives
    communication: float
    hidden: float  # part of the communication that overlaps with backward
    compute: float

    @property
    def exposed(self) -> float:
        """The time the step waits."""
        return self.communication - self.hidden + self.compute

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "exposed": self.exposed}


def predict_compressor(dry_run: DryRunResult, copy_seconds: float = 0.0) -> CostPrediction:
    """Predict a compressor's cost; `copy_seconds`: copying gradients in and out, whatever the compressor."""
    compute = dry_run.compute + copy_seconds
    return CostPrediction(dry_run.method, dry_run.bytes, dry_run.calls, dry_run.communication, 0.0, compute)


def agree_on_prediction(prediction: CostPrediction, comm: Comm, device: torch.device) -> CostPrediction:
    """Take the slowest rank's numbers on every rank: with nodes each rank has tried a share of its own."""
    numbers = [prediction.bytes, prediction.communication, prediction.compute]
    size, communication, compute = max_over_ranks(numbers, comm, device)
    return replace(prediction, bytes=int(size), communication=communication, compute=compute)


def predict_ddp(
    elements: int,
    link: Link,
    backward: float = 0.0,
    bytes_per_value: int = 4,
    cast_seconds: float = 0.0,
    name: str = "ddp",
) -> CostPrediction:
    """Predict DDP without compression; 2 bytes per value: PyTorch's 16-bit hooks, which cast for `cast_seconds`.

    `backward`: seconds that backward continues after its first gradients are ready. The link was measured with float32;
    whether a backend adds 16-bit values as fast is not measured.
    """
    message = elements * bytes_per_value
    size = 2 * (link.world_size - 1) * message // link.world_size
    buckets = max(-(-4 * elements // _DDP_BUCKET_BYTES), 1)
    communication = buckets * link.time("all-reduce", size / buckets)
    last = communication / buckets
    hidden = min(backward, communication - last)
    return CostPrediction(name, size, buckets, communication, hidden, cast_seconds)


def speedups(predictions: Sequence[CostPrediction], baseline: CostPrediction) -> list[float]:
    """Return how many times shorter each exposed time is than the baseline's; below 1: longer."""
    return [baseline.exposed / max(prediction.exposed, 1e-9) for prediction in predictions]


def table_rows(predictions: Sequence[CostPrediction], baseline: CostPrediction) -> list[list[str]]:
    """Return one row per method under `TABLE_COLUMNS`."""
    return [
        [
            prediction.method,
            f"{prediction.bytes / 1e6:.3f}",
            f"{prediction.calls}",
            f"{1000 * prediction.communication:.3f}",
            f"{1000 * prediction.hidden:.3f}",
            f"{1000 * prediction.compute:.3f}",
            f"{1000 * prediction.exposed:.3f}",
            f"{gain:.2f}x",
        ]
        for prediction, gain in zip(predictions, speedups(predictions, baseline), strict=True)
    ]


def format_table(predictions: Sequence[CostPrediction], baseline: CostPrediction) -> str:
    """Format the table as lines for a log."""
    rows = [TABLE_COLUMNS, *table_rows(predictions, baseline)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in rows
    )


def choose_methods(
    buckets: Sequence[Sequence[CostPrediction]], uncompressed: CostPrediction, other_seconds: float = 0.0
) -> tuple[int, ...]:
    """Choose the index of the method with the least exposed time for each bucket; all dense unless a step gains enough.

    `other_seconds`: the part of a step that does not depend on what is sent.
    """
    best = [min(range(len(methods)), key=lambda index: methods[index].exposed) for methods in buckets]
    total = sum(methods[index].exposed for methods, index in zip(buckets, best, strict=True))
    if not any(best) or MIN_SPEEDUP * (other_seconds + total) > other_seconds + uncompressed.exposed:
        return (0,) * len(best)
    return tuple(best)


@dataclass(frozen=True)
class AutoDecision:
    """The predictions of `auto` and what it chose; plain data, the same on every rank."""

    link: Link
    buckets: tuple[tuple[CostPrediction, ...], ...]  # the methods of each bucket; the first one is dense
    uncompressed: CostPrediction  # the whole model without compression, as it would be sent then
    backward: float  # seconds that backward continues after its first gradients are ready
    other_seconds: float  # of a step, without its communication
    choices: tuple[int, ...]  # the index of each bucket's method

    @property
    def exposed(self) -> float:
        """Seconds that a step is predicted to wait with the chosen methods."""
        if not any(self.choices):
            return self.uncompressed.exposed
        return sum(methods[choice].exposed for methods, choice in zip(self.buckets, self.choices, strict=True))

    def text(self) -> str:
        """Explain the decision for the log."""
        all_reduce = self.link.collectives["all-reduce"]
        lines = [
            f"{self.link.world_size} ranks, {self.link.backend}: an all-reduce takes {1e6 * all_reduce.alpha:.0f} us "
            f"plus its bytes at {all_reduce.bandwidth / 1e6:.1f} MB/s (spread {100 * all_reduce.spread:.0f} %)",
            f"a step without its communication: {1000 * self.other_seconds:.3f} ms, of which DDP could use "
            f"{1000 * self.backward:.3f} ms to hide its own all-reduce; compressors hide nothing",
        ]
        for index, (methods, choice) in enumerate(zip(self.buckets, self.choices, strict=True)):
            lines += [f"bucket {index}: {methods[choice].method}", format_table(methods, methods[0])]
        without, chosen = self.other_seconds + self.uncompressed.exposed, self.other_seconds + self.exposed
        lines.append(
            f"predicted step: {1000 * chosen:.3f} ms as chosen, {1000 * without:.3f} ms without compression "
            f"({self.uncompressed.method}), {without / max(chosen, 1e-9):.2f}x"
        )
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        return {
            "link": self.link.to_json(),
            "buckets": [[prediction.to_json() for prediction in methods] for methods in self.buckets],
            "uncompressed": self.uncompressed.to_json(),
            "backward": self.backward,
            "other_seconds": self.other_seconds,
            "choices": [methods[choice].method for methods, choice in zip(self.buckets, self.choices, strict=True)],
            "exposed": self.exposed,
        }
