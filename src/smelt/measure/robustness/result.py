"""The robustness of one model, and of a compressed model beside its dense one, as plain data."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from smelt.measure.eval_result import EvalResult
from smelt.measure.paired import PairedComparison, compare
from smelt.measure.robustness.adversarial import RobustAccuracy
from smelt.measure.robustness.backdoor import BackdoorSuccess, is_triggered_by_compression
from smelt.measure.robustness.bit_search import BitSearchResult
from smelt.measure.robustness.sweep import FaultPoint, mean_difference, score, tolerated_ber


@dataclass(frozen=True, eq=False)
class ClippingCost:
    """What range clipping costs without faults: quality, as a paired comparison, and time."""

    comparison: PairedComparison  # clipped against not clipped
    latency_ratio: float  # clipped over not clipped: above 1 it is slower
    latency_interval: tuple[float, float]
    layers: int
    margin: float

    def to_json(self) -> dict[str, Any]:
        return {
            "comparison": self.comparison.to_json(),
            "latency_ratio": self.latency_ratio,
            "latency_interval": list(self.latency_interval),
            "layers": self.layers,
            "margin": self.margin,
        }


@dataclass(frozen=True, eq=False)
class ModelRobustness:
    """All measurements of one model."""

    name: str
    clean: EvalResult
    bits: dict[str, int]  # stored bits by part
    faults: tuple[FaultPoint, ...]
    clipping: ClippingCost
    bit_search: BitSearchResult | None = None
    attacks: tuple[RobustAccuracy, ...] = ()
    backdoor: BackdoorSuccess | None = None

    def curve(self, target: str, clipped: bool = False) -> list[FaultPoint]:
        """Return the points of one target in order of the rate."""
        points = [point for point in self.faults if point.target == target and point.clipped == clipped]
        return sorted(points, key=lambda point: point.ber)

    def tolerated(self, target: str, clipped: bool = False) -> dict[str, float | None]:
        """Return BER_1, the rate that costs one point of the metric, and BER_50, the rate that costs half of it."""
        if not self.clean.higher_is_better:
            return {}
        clean, _ = score(self.clean)
        points = self.curve(target, clipped)
        return {
            "ber_1": tolerated_ber(points, clean, clean - 0.01),
            "ber_50": tolerated_ber(points, clean, clean / 2),
        }

    def to_json(self) -> dict[str, Any]:
        targets = list(dict.fromkeys((point.target, point.clipped) for point in self.faults))
        return {
            "name": self.name,
            "clean": self.clean.to_json(),
            "bits": self.bits,
            "faults": [point.to_json() for point in self.faults],
            "tolerated": [
                {"target": target, "clipped": clipped, **self.tolerated(target, clipped)} for target, clipped in targets
            ],
            "clipping": self.clipping.to_json(),
            "bit_search": None if self.bit_search is None else self.bit_search.to_json(),
            "attacks": [attack.to_json() for attack in self.attacks],
            "backdoor": None if self.backdoor is None else self.backdoor.to_json(),
        }


@dataclass(frozen=True, eq=False)
class RobustnessReport:
    """A model and, if given, the dense model that it is compared with, measured on the same items."""

    model: ModelRobustness
    base: ModelRobustness | None
    settings: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        return {
            "settings": self.settings,
            "model": self.model.to_json(),
            "base": None if self.base is None else self.base.to_json(),
            "comparison": None if self.base is None else compare_robustness(self.model, self.base),
        }


def compare_robustness(new: ModelRobustness, base: ModelRobustness) -> dict[str, Any]:
    """Compare all measurements that both models have; differences are new minus base."""
    clean = compare(new.clean, base.clean)
    return {
        "difference": clean.difference,
        "churn": clean.flips,
        "faults": [
            _fault_difference(point, other)
            for point in new.faults
            for other in base.faults
            if (point.target, point.ber, point.clipped) == (other.target, other.ber, other.clipped)
        ],
        "attacks": [
            {
                "eps": attack.eps,
                "difference": attack.robust - other.robust,
                "relative": _relative(attack, other),
            }
            for attack, other in zip(new.attacks, base.attacks, strict=False)
        ],
        "backdoor_alarm": None
        if new.backdoor is None or base.backdoor is None
        else is_triggered_by_compression(base.backdoor, new.backdoor),
    }


def _fault_difference(new: FaultPoint, base: FaultPoint) -> dict[str, Any]:
    difference, interval = mean_difference(new, base)
    finite = all(map(math.isfinite, (difference, *interval)))
    return {
        "target": new.target,
        "ber": new.ber,
        "clipped": new.clipped,
        "difference": difference if finite else None,
        "interval": list(interval) if finite else None,
    }


def _relative(new: RobustAccuracy, base: RobustAccuracy) -> float | None:
    """Return the robust accuracy kept, relative to the clean accuracy kept; None if the dense model has none."""
    if not base.robust or not new.clean or not base.clean:
        return None
    return (new.robust / base.robust) / (new.clean / base.clean)
