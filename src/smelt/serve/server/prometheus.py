"""Counters, gauges and histograms, and their Prometheus text format."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Any


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
        self.name, self.documentation, self.value = name, documentation, 0.0

    def set(self, value: float) -> None:
        self.value = value

    def lines(self, labels: dict[str, str]) -> Iterator[str]:
        yield f"{self.name}{_labels(labels)} {_number(self.value)}"


class Counter:
    """A count that only grows; with a label, one count per label value."""

    type = "counter"

    def __init__(self, name: str, documentation: str, label: str = "", label_values: Sequence[str] = ("",)) -> None:
        self.name, self.documentation, self.label = f"{name}_total", documentation, label
        self.values: dict[str, float] = dict.fromkeys(label_values, 0)

    def inc(self, amount: float = 1, label: str = "") -> None:
        self.values[label] = self.values.get(label, 0) + amount

    @property
    def value(self) -> float:
        return sum(self.values.values())

    def lines(self, labels: dict[str, str]) -> Iterator[str]:
        for label_value, count in self.values.items():
            own = {self.label: label_value} if self.label else {}
            yield f"{self.name}{_labels(labels | own)} {_number(count)}"


class Histogram:
    """Counts of values per bucket."""

    type = "histogram"

    def __init__(self, name: str, documentation: str, buckets: Sequence[float]) -> None:
        self.name, self.documentation, self.buckets = name, documentation, list(buckets)
        self.counts = [0] * (len(self.buckets) + 1)  # the last: above every bucket
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.buckets, value)] += times
        self.sum += value * times

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
