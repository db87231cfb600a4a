"""Counters, gauges and histograms, and their Prometheus text format.

Their numbers are in cells, which the processes of a server may share; what is read is the sum over all processes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Any

from smelt.serve.server.shared_table import private_cells


def _labels(pairs: dict[str, str]) -> str:
    escaped = (
        (name, value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")) for name, value in pairs.items()
    )
    return "{" + ",".join(f'{name}="{value}"' for name, value in escaped) + "}"


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else repr(float(value))


class Gauge:
    """One number that goes up and down."""

    type = "gauge"

    def __init__(self, name: str, documentation: str) -> None:
        self.name, self.documentation, self.num_cells = name, documentation, 1
        self.cells = private_cells(self.num_cells)

    def set(self, value: float) -> None:
        self.cells.own[0] = value

    @property
    def value(self) -> float:
        return self.cells.total(0)

    def lines(self, labels: dict[str, str]) -> Iterator[str]:
        yield f"{self.name}{_labels(labels)} {_number(self.value)}"


class Counter:
    """A count that only grows; with a label, one count per label value."""

    type = "counter"

    def __init__(self, name: str, documentation: str, label: str = "", label_values: Sequence[str] = ("",)) -> None:
        self.name, self.documentation, self.label = f"{name}_total", documentation, label
        self._columns = {label_value: column for column, label_value in enumerate(label_values)}
        self.num_cells = len(self._columns)
        self.cells = private_cells(self.num_cells)

    def inc(self, amount: float = 1, label: str = "") -> None:
        self.cells.own[self._columns[label]] += amount

    @property
    def values(self) -> dict[str, float]:
        return {label: self.cells.total(column) for label, column in self._columns.items()}

    @property
    def value(self) -> float:
        return sum(self.cells.totals())

    def lines(self, labels: dict[str, str]) -> Iterator[str]:
        for label_value, count in self.values.items():
            own = {self.label: label_value} if self.label else {}
            yield f"{self.name}{_labels(labels | own)} {_number(count)}"


class Histogram:
    """Counts of values per bucket."""

    type = "histogram"

    def __init__(self, name: str, documentation: str, buckets: Sequence[float]) -> None:
        self.name, self.documentation, self.buckets = name, documentation, list(buckets)
        self.num_cells = len(self.buckets) + 2  # counts per bucket, the count above every bucket, and the sum of values
        self.cells = private_cells(self.num_cells)

    def observe(self, value: float, times: int = 1) -> None:
        self.cells.own[bisect_left(self.buckets, value)] += times
        self.cells.own[-1] += value * times

    @property
    def counts(self) -> list[int]:
        return [int(count) for count in self.cells.totals()[:-1]]

    @property
    def sum(self) -> float:
        return self.cells.total(self.num_cells - 1)

    @property
    def count(self) -> int:
        return sum(self.counts)

    def snapshot(self) -> dict[str, Any]:
        """Return plain values for the live page."""
        return {"buckets": self.buckets, "counts": self.counts, "sum": self.sum, "count": self.count}

    def lines(self, labels: dict[str, str]) -> Iterator[str]:
        cumulative = 0
        for bound, count in zip([*map(_number, self.buckets), "+Inf"], self.counts, strict=True):
            cumulative += count
            yield f"{self.name}_bucket{_labels(labels | {'le': bound})} {cumulative}"
        yield f"{self.name}_sum{_labels(labels)} {_number(self.sum)}"
        yield f"{self.name}_count{_labels(labels)} {cumulative}"


def render(metrics: Sequence[Counter | Gauge | Histogram], labels: dict[str, str]) -> str:
    """Format the metrics as Prometheus' text format 0.0.4; `labels` are added to each."""
    lines: list[str] = []
    for metric in metrics:
        lines += [f"# HELP {metric.name} {metric.documentation}", f"# TYPE {metric.name} {metric.type}"]
        lines += metric.lines(labels)
    return "\n".join(lines) + "\n"
