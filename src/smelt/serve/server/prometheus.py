"""Counters, gauges and histograms, and Prometheus' text form of them."""

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


class Single:
    """A counter or a gauge; with a label, one value for each value of the label."""

    def __init__(self, kind: str, name: str, told: str, label: str = "", values: Sequence[str] = ("",)) -> None:
        self.kind, self.name, self.told, self.label = kind, name, told, label
        self.values: dict[str, float] = dict.fromkeys(values, 0)

    def add(self, amount: float = 1, label: str = "") -> None:
        self.values[label] = self.values.get(label, 0) + amount

    def set(self, value: float) -> None:
        self.values[""] = value

    @property
    def total(self) -> float:
        return sum(self.values.values())

    def lines(self, common: dict[str, str]) -> Iterator[str]:
        name = self.name + ("_total" if self.kind == "counter" else "")
        for value, count in self.values.items():
            yield f"{name}{_labels(common | ({self.label: value} if self.label else {}))} {_number(count)}"


class Histogram:
    """How many values fell below each bound."""

    kind = "histogram"

    def __init__(self, name: str, told: str, bounds: Sequence[float]) -> None:
        self.name, self.told, self.bounds = name, told, list(bounds)
        self.counts = [0] * (len(self.bounds) + 1)  # the last: above all bounds
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    @property
    def count(self) -> int:
        return sum(self.counts)

    def plain(self) -> dict[str, Any]:
        """For the page."""
        return {"bounds": self.bounds, "counts": self.counts, "sum": self.sum, "count": self.count}

    def lines(self, common: dict[str, str]) -> Iterator[str]:
        below = 0
        for bound, count in zip([*map(_number, self.bounds), "+Inf"], self.counts, strict=True):
            below += count
            yield f"{self.name}_bucket{_labels(common | {'le': bound})} {below}"
        yield f"{self.name}_sum{_labels(common)} {_number(self.sum)}"
        yield f"{self.name}_count{_labels(common)} {below}"


def exposition(meters: Sequence[Single | Histogram], common: dict[str, str]) -> str:
    """Prometheus' text format 0.0.4."""
    lines: list[str] = []
    for meter in meters:
        name = meter.name + ("_total" if meter.kind == "counter" else "")
        lines += [f"# HELP {name} {meter.told}", f"# TYPE {name} {meter.kind}", *meter.lines(common)]
    return "\n".join(lines) + "\n"
