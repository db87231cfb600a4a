"""The latency look-up table: seconds of a part for every width, measured once, and the line fitted through it.

Follows Kwon et al., "A Fast Post-Training Pruning Framework for Transformers", 2022 (arXiv 2204.09656).
"""

from __future__ import annotations

import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from smelt.errors import DataError
from smelt.targets.device import Target
from smelt.targets.operators import AttentionOp, FeedForwardOp, Operator

_FORMAT = 1
_LARGEST_WIDTH = 1_000_000  # a table read from a file may not make us allocate without end
_KINDS: dict[str, type[AttentionOp] | type[FeedForwardOp]] = {"attention": AttentionOp, "feed-forward": FeedForwardOp}


_RENAMED_FIELDS = {"filters": "ffn_channels"}  # of tables written before version 0.2


@dataclass(frozen=True)
class LatencyTable:
    """Seconds at the measured widths, of one operator (kept at its full width) on one target."""

    target: str
    operator: Operator
    widths: tuple[int, ...]
    measured: tuple[float, ...]

    @cached_property
    def seconds(self) -> np.ndarray:
        """Seconds for 0, 1 ... units: nothing costs nothing, and between measured widths the line is straight."""
        every_width = np.arange(self.widths[-1] + 1)
        seconds = np.interp(every_width, self.widths, self.measured)
        seconds[0] = 0.0
        return seconds

    @property
    def key(self) -> str:
        """What the table holds for; see `table_key`."""
        return table_key(self.target, self.operator)

    def to_json(self) -> str:
        content = {
            "format": _FORMAT,
            "target": self.target,
            "operator": {"kind": _kind(self.operator), **asdict(self.operator)},
            "widths": list(self.widths),
            "seconds": list(self.measured),
        }
        return json.dumps(content, indent=1)

    @classmethod
    def from_json(cls, text: str) -> LatencyTable:
        """Read a table back; anything that is not one is a DataError."""
        try:
            return _table(json.loads(text))
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise DataError(f"This is not a latency table that Smelt wrote ({error}): measure it again.") from error

    @classmethod
    def load(cls, path: Path) -> LatencyTable:
        """Read a table from a file that `save` wrote."""
        try:
            return cls.from_json(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"The latency table {path} cannot be read ({error}): measure it again.") from error

    def save(self, path: Path) -> None:
        """Write the table whole or not at all."""
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(self.to_json())
            Path(temporary).replace(path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise


def table_key(target: str, operator: Operator) -> str:
    """One line that names machine, operator, batch, length and dtype: a kept table is good only for the same line."""
    sizes = ", ".join(f"{name}={value}" for name, value in asdict(operator).items())
    return f"{target} | {_kind(operator)}({sizes})"


def sample_widths(units: int, step: int = 1) -> list[int]:
    """Widths to measure: one, every `step`-th, and all; what lies between is interpolated."""
    return sorted({1, *range(step, units + 1, step), units})


def measure_table(
    target: Target,
    make_operator: Callable[[int], Operator],
    widths: Sequence[int],
    *,
    seconds: float = 20.0,
    rounds: int = 15,
    seed: int = 0,
) -> LatencyTable:
    """Time the operator at these widths in several rounds, each in its own random order, and keep each width's median.

    A slow spell of the machine so falls on widths at random and is voted out, where an ordered sweep would turn it
    into a step of the table. After `seconds` it stops, even in the first round: the two ends come first in it, and a
    width that was never reached is interpolated.
    """
    order = sorted(set(widths))
    if not order or order[0] < 1:
        raise ValueError("the widths to measure must be one or more positive numbers")
    deadline = time.monotonic() + seconds
    random = np.random.default_rng(seed)
    ends = [order[-1], order[0]]
    readings: dict[int, list[float]] = {width: [] for width in order}
    for count in range(rounds):
        shuffled = [int(width) for width in random.permutation(order)]
        for position, width in enumerate(shuffled if count else dict.fromkeys(ends + shuffled)):
            if time.monotonic() > deadline and (count or position >= len(ends)):
                return _medians(target, make_operator(order[-1]), readings)
            readings[width].append(target.latency(make_operator(width)))
    return _medians(target, make_operator(order[-1]), readings)


def _medians(target: Target, operator: Operator, readings: dict[int, list[float]]) -> LatencyTable:
    medians = {width: float(np.median(values)) for width, values in readings.items() if values}
    return LatencyTable(target.name, operator, tuple(medians), tuple(medians.values()))


def _kind(operator: Operator) -> str:
    return next(kind for kind, operator_class in _KINDS.items() if isinstance(operator, operator_class))


def _table(content: Any) -> LatencyTable:
    if not isinstance(content, dict) or set(content) != {"format", "target", "operator", "widths", "seconds"}:
        raise ValueError("its keys are not those of a table")
    if content["format"] != _FORMAT or not isinstance(content["target"], str):
        raise ValueError("its format or target is unknown")
    widths, measured = content["widths"], content["seconds"]
    if not (_is_list_of(int, widths) and widths[0] >= 1 and widths[-1] <= _LARGEST_WIDTH):
        raise ValueError("its widths are not whole numbers in range")
    if any(later <= earlier for earlier, later in pairwise(widths)):
        raise ValueError("its widths do not increase")
    if not _is_list_of(float, measured) or len(measured) != len(widths):
        raise ValueError("it has not one time a width")
    if not all(math.isfinite(value) and value > 0 for value in measured):
        raise ValueError("a time is not a positive number")
    return LatencyTable(content["target"], _operator(content["operator"]), tuple(widths), tuple(measured))


def _is_list_of(kind: type, values: Any) -> bool:
    return isinstance(values, list) and bool(values) and all(type(value) is kind for value in values)


def _operator(content: Any) -> Operator:
    operator_class = _KINDS[content["kind"]]
    sizes = {_RENAMED_FIELDS.get(name, name): value for name, value in content.items() if name != "kind"}
    expected = {field.name: field.type for field in fields(operator_class)}
    if {name: type(value).__name__ for name, value in sizes.items()} != expected:
        raise ValueError("its operator has a wrong field")
    return operator_class(**sizes)


@dataclass(frozen=True)
class PiecewiseFit:
    """Seconds of k units: 0 for none, `constant` up to `threshold`, then `slope` more for each further unit."""

    threshold: int
    constant: float
    slope: float
    error: float

    def seconds(self, units: int) -> float:
        return 0.0 if units == 0 else self.constant + self.slope * max(0, units - self.threshold)


def fit_piecewise(table: LatencyTable) -> PiecewiseFit:
    """The piecewise line of least squared error over all thresholds."""
    latencies = table.seconds[1:]
    return min((_fit_at(latencies, threshold) for threshold in range(1, len(latencies) + 1)), key=lambda one: one.error)


def _fit_at(latencies: np.ndarray, threshold: int) -> PiecewiseFit:
    flat, rising = latencies[:threshold], latencies[threshold:]
    constant = float(flat.mean())
    further = np.arange(1.0, len(rising) + 1)
    above = rising - constant
    slope = max(0.0, float(further @ above / (further @ further))) if len(rising) else 0.0
    misfit = above - slope * further
    offset = flat - constant
    return PiecewiseFit(threshold, constant, slope, float(offset @ offset + misfit @ misfit))
