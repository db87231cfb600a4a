"""What one step of compression sent and chose, in plain numbers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Traffic:
    """Bytes that arrived at this worker, by purpose, and the counts behind the densities that papers speak of."""

    counts: int = 0  # bytes: how many each worker chose, and whether its gradients are finite
    plan: int = 0  # bytes: who selects where (DEFT), first thresholds
    indices: int = 0  # bytes
    values: int = 0  # bytes
    padding: int = 0  # bytes of the indices and values above that carried nothing
    elements: int = 0  # of the flat vector
    target: float = 0.0  # elements that the density asks for
    chosen: int = 0  # elements that were sent, |I|; what several workers send separately counts once
    slots: int = 0  # workers times the longest selection: what the gather of indices is padded to
    inside: int = 0  # bytes from workers of the same node, where there are nodes; `bytes` is without them

    @property
    def bytes(self) -> int:
        return self.counts + self.plan + self.indices + self.values

    @property
    def density(self) -> float:
        return self.chosen / self.elements if self.elements else 0.0

    @property
    def build_up(self) -> float:
        """|I| / (d G): 1 when as many are sent as were asked for, up to the number of workers when they disagree."""
        return self.chosen / self.target if self.target else 0.0

    @property
    def inefficiency(self) -> float:
        """n max_r(k_r) / |I| - 1: the share that padding adds to the gather of indices."""
        return self.slots / self.chosen - 1 if self.chosen else 0.0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))


def total(parts: Iterable[Traffic]) -> Traffic:
    return sum(parts, Traffic())
