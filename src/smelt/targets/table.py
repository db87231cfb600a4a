"""Latency lookup table: seconds of an operator at each width, measured once, and a piecewise linear fit.

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
_MAX_WIDTH = 1_000_000  # limits allocation for a table read from a file
_OPERATOR_TYPES: dict[str, type[AttentionOp] | type[FeedForwardOp]] = {
    "attention": AttentionOp,
    "feed-forward": FeedForwardOp,
}
_RENAMED_FIELDS = {"filters": "ffn_channels"}  # of tables written before version 0.2


@dataclass(frozen=True)
class LatencyTable:
    """Latency of one operator (given at full width) on one target, at the measured widths."""

    target: str
    operator: Operator
    widths: tuple[int, ...]
    measured: tuple[float, ...]

    @cached_property
    def seconds(self) -> np.ndarray:
        """Latency for 0, 1, ... units: 0 for none, interpolated linearly between measured widths."""
        every_width = np.arange(self.widths[-1] + 1)
        seconds = np.interp(every_width, self.widths, self.measured)
        seconds[0] = 0.0
        return seconds

    @property
    def key(self) -> str:
        """What the table is valid for; see `table_key`."""
        return table_key(self.target, self.operator)

    def to_json(self) -> str:
        content = {
            "format": _FORMAT,
            "target": self.target,
            "operator": {"kind": _operator_type(self.operator), **asdict(self.operator)},
            "widths": list(self.widths),
            "seconds": list(self.measured),
        }
        return json.dumps(content, indent=1)

    @classmethod
    def from_json(cls, text: str) -> LatencyTable:
        """Parse a table; raise DataError if it is not one."""
        try:
            return _parse_table(json.loads(text))
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
        """Write the table atomically."""
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(self.to_json())
            Path(temporary).replace(path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise


def table_key(target: str, operator: Operator) -> str:
    """Return a line with target, operator, batch size, length and dtype: saved tables are valid only for that line."""
    sizes = ", ".join(f"{name}={value}" for name, value in asdict(operator).items())
    return f"{target} | {_operator_type(operator)}({sizes})"


def sample_widths(units: int, step: int = 1) -> list[int]:
    """Return widths to measure: one, every `step`-th, and all; the others are interpolated."""
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
    """Measure the operator at these widths in several rounds, each in random order, and keep the median per width.

    A slow phase of the machine then hits random widths and the median drops it, where an ordered sweep would turn it
    into a step of the table. Stops after `seconds`, even in the first round, which measures the two ends first; widths
    that were not reached are interpolated.
    """
    order = sorted(set(widths))
    if not order or order[0] < 1:
        raise ValueError("the widths to measure must be one or more positive numbers")
    deadline = time.monotonic() + seconds
    rng = np.random.default_rng(seed)
    ends = [order[-1], order[0]]
    readings: dict[int, list[float]] = {width: [] for width in order}
    for round_index in range(rounds):
        shuffled = [int(width) for width in rng.permutation(order)]
        for position, width in enumerate(shuffled if round_index else dict.fromkeys(ends + shuffled)):
            if time.monotonic() > deadline and (round_index or position >= len(ends)):
                return _medians(target, make_operator(order[-1]), readings)
            readings[width].append(target.latency(make_operator(width)))
    return _medians(target, make_operator(order[-1]), readings)


def _medians(target: Target, operator: Operator, readings: dict[int, list[float]]) -> LatencyTable:
    medians = {width: float(np.median(values)) for width, values in readings.items() if values}
    return LatencyTable(target.name, operator, tuple(medians), tuple(medians.values()))


def _operator_type(operator: Operator) -> str:
    return next(name for name, operator_class in _OPERATOR_TYPES.items() if isinstance(operator, operator_class))


def _parse_table(content: Any) -> LatencyTable:
    if not isinstance(content, dict) or set(content) != {"format", "target", "operator", "widths", "seconds"}:
        raise ValueError("unexpected keys")
    if content["format"] != _FORMAT or not isinstance(content["target"], str):
        raise ValueError("unknown format or target")
    widths, measured = content["widths"], content["seconds"]
    if not (_is_list_of(int, widths) and widths[0] >= 1 and widths[-1] <= _MAX_WIDTH):
        raise ValueError("widths are not integers in range")
    if any(later <= earlier for earlier, later in pairwise(widths)):
        raise ValueError("widths do not increase")
    if not _is_list_of(float, measured) or len(measured) != len(widths):
        raise ValueError("the numbers of latencies and widths differ")
    if not all(math.isfinite(value) and value > 0 for value in measured):
        raise ValueError("a latency is not a positive number")
    return LatencyTable(content["target"], _parse_operator(content["operator"]), tuple(widths), tuple(measured))


def _is_list_of(element_type: type, values: Any) -> bool:
    return isinstance(values, list) and bool(values) and all(type(value) is element_type for value in values)


def _parse_operator(content: Any) -> Operator:
    operator_class = _OPERATOR_TYPES[content["kind"]]
    sizes = {_RENAMED_FIELDS.get(name, name): value for name, value in content.items() if name != "kind"}
    expected = {field.name: field.type for field in fields(operator_class)}
    if {name: type(value).__name__ for name, value in sizes.items()} != expected:
        raise ValueError("unexpected operator fields")
    return operator_class(**sizes)


@dataclass(frozen=True)
class PiecewiseFit:
    """Latency of k units: 0 for none, `constant` up to `threshold`, then `slope` per additional unit."""

    threshold: int
    constant: float
    slope: float
    error: float

    def seconds(self, units: int) -> float:
        return 0.0 if units == 0 else self.constant + self.slope * max(0, units - self.threshold)


def fit_piecewise(table: LatencyTable) -> PiecewiseFit:
    """Return the fit with the least squared error over all thresholds."""
    latencies = table.seconds[1:]
    return min(
        (_fit_with_threshold(latencies, threshold) for threshold in range(1, len(latencies) + 1)),
        key=lambda fit: fit.error,
    )


def _fit_with_threshold(latencies: np.ndarray, threshold: int) -> PiecewiseFit:
    flat, rising = latencies[:threshold], latencies[threshold:]
    constant = float(flat.mean())
    further = np.arange(1.0, len(rising) + 1)
    above = rising - constant
    slope = max(0.0, float(further @ above / (further @ further))) if len(rising) else 0.0
    misfit = above - slope * further
    offset = flat - constant
    return PiecewiseFit(threshold, constant, slope, float(offset @ offset + misfit @ misfit))
