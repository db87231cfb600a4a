"""The quality gate: a non-inferiority test of a new model against a base model.

The gate passes only if the one-sided upper confidence bound of the drop is below the margin. Otherwise the model is
either worse by more than the margin, or there are too few items to tell. Several gates pass only if each of them
passes; such an intersection-union test needs no correction for multiple testing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from scipy.special import ndtri, stdtrit

from smelt.errors import ConfigError
from smelt.measure.bootstrap import long_run_degrees
from smelt.measure.eval_result import EvalResult
from smelt.measure.intervals import BLOCK_BOOTSTRAP, PairedQuantiles, discordant, paired_quantiles
from smelt.measure.metrics import CLASSIFICATION_METRICS, METRICS
from smelt.measure.paired import check_pair

Verdict = Literal["pass", "fail", "inconclusive"]

CONFIDENCE = 0.95
POWER = 0.8
# Of the allowed error. All intervals are approximate: at exactly 5 %, simulation finds up to 5.8 % false acceptance
# (benchmarks/gate_coverage.py).
_ERROR_SHARE = 0.85
_MAX_ITEMS_NEEDED = 10**9
RELATIVE_METRICS = ("perplexity", "return", "mse")  # their margin is relative to the base model's value
_MARGIN = re.compile(r"(\d+(?:\.\d+)?|\.\d+) *(pt|%)")


@dataclass(frozen=True)
class Margin:
    """The drop at which a model is no longer acceptable: points of a score, or percent of the base model's value."""

    value: float  # a fraction: 0.01 for 1pt and for 1%
    unit: Literal["pt", "%"]

    def __str__(self) -> str:
        return f"{100 * self.value:.6g}{self.unit}"


@dataclass(frozen=True)
class Margins:
    """Margins by metric, and those without a metric, of which there is at most one per unit."""

    by_metric: dict[str, Margin]
    general: dict[str, Margin]

    def of(self, metric: str) -> Margin:
        """Return the margin of a metric."""
        unit = _unit(metric)
        margin = self.by_metric.get(metric) or self.general.get(unit)
        if margin is not None:
            return margin
        example = f"{metric}={next(iter(self.general.values())).value * 100:g}{unit}" if self.general else f"1{unit}"
        reason = "in points, as 1pt" if unit == "pt" else "relative to the base model, as 1%"
        raise ConfigError(f"the margin of {metric} is written {reason}; add --max-drop {example}.")


@dataclass(frozen=True)
class GateResult:
    """The verdict on one metric. Drop, bounds and margin are fractions: 0.01 is 1pt of a score, or 1% of perplexity
    or of the magnitude of a return."""

    metric: str
    data: str
    verdict: Verdict
    drop: float  # positive: the new model is worse
    bound: float  # the drop is below this with the given confidence
    lower_bound: float  # the drop is above this with the given confidence
    margin: float
    unit: Literal["pt", "%"]
    items: int
    items_needed: int | None  # if inconclusive, to pass with a power of 80 %
    method: str
    block_length: int | None
    confidence: float
    resamples: int
    seed: int

    @property
    def passed(self) -> bool:
        return self.verdict == "pass"

    @property
    def sentence(self) -> str:
        """The verdict in words."""
        where, margin = f"{self.metric} on {self.data}", self._text(self.margin)
        if not math.isfinite(self.drop) or math.isnan(self.bound):
            return f"{where} is not a finite number"
        bound = f"{100 * self.confidence:g} % bound {self._text(self.bound)}"
        facts = f"drop {self._text(self.drop)}, {bound}, margin {margin}"
        if self.verdict == "pass":
            return f"{where} is not worse by more than the margin ({facts})"
        if self.verdict == "fail":
            return f"{where} is worse by more than the margin ({facts})"
        needed = "more than one" if self.items_needed is None else f"about {self.items_needed:,}"
        return f"{where}: cannot tell: not enough items: {needed} needed, {self.items:,} given ({facts})"

    def _text(self, fraction: float) -> str:
        return f"{100 * fraction:.3g}{self.unit}"

    def to_json(self) -> dict[str, Any]:
        """Return all fields and the sentence as plain values; numbers that are not finite become null."""
        values = {**asdict(self), "sentence": self.sentence}
        return {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in values.items()
        }


def parse_margins(texts: Iterable[str]) -> Margins:
    """Parse `1pt`, `1%` or `METRIC=1pt`, each at most once."""
    by_metric: dict[str, Margin] = {}
    general: dict[str, Margin] = {}
    for text in texts:
        metric, equals, amount = text.rpartition("=")
        margin = _parse_margin(amount.strip(), text)
        metric = metric.strip()
        known = (*METRICS, *RELATIVE_METRICS)
        if equals and metric not in known:
            raise ConfigError(f"--max-drop names no metric {metric!r}; use one of {', '.join(known)}.")
        if equals and margin.unit != _unit(metric):
            Margins({}, {margin.unit: margin}).of(metric)  # raises
        target, key = (by_metric, metric) if equals else (general, margin.unit)
        if key in target:
            raise ConfigError(f"--max-drop is given twice for {metric or 'the unit ' + key}; keep one.")
        target[key] = margin
    return Margins(by_metric, general)


def _parse_margin(amount: str, text: str) -> Margin:
    match = _MARGIN.fullmatch(amount)
    if match is None or not 0 < float(match[1]) <= 100:
        raise ConfigError(
            f"--max-drop {text!r} cannot be read; write 1pt for scores such as accuracy, 1% for perplexity, "
            "or METRIC=1pt; the margin is above 0 and at most 100."
        )
    return Margin(float(match[1]) / 100, "pt" if match[2] == "pt" else "%")


def _unit(metric: str) -> Literal["pt", "%"]:
    return "%" if metric in RELATIVE_METRICS else "pt"


def gate(
    new: EvalResult, base: EvalResult, margin: Margin, *, confidence: float = CONFIDENCE, resamples: int = 10_000,
    seed: int = 0,
) -> GateResult:  # fmt: skip
    """Test that the new model is worse than the base model by less than the margin."""
    check_pair(new, base, confidence, resamples)
    if margin.unit != _unit(new.metric):
        raise ConfigError(f"the margin of {new.metric} is written in {_unit(new.metric)}, not {margin.unit}.")
    quantiles = paired_quantiles(new, base, resamples, seed)
    level = bound_level(confidence)
    drops = _drops(new, base, quantiles, level)
    relative = margin.unit == "%" and quantiles.ratio is None
    drop, lower, bound = _relative(drops, base) if relative else drops
    verdict, needed = _verdict(new, base, quantiles, (drop, lower, bound), margin.value, level)
    return GateResult(
        metric=new.metric,
        data=new.data,
        verdict=verdict,
        drop=drop,
        bound=bound,
        lower_bound=lower,
        margin=margin.value,
        unit=margin.unit,
        items=len(new.items),
        items_needed=needed,
        method=quantiles.method,
        block_length=quantiles.block_length,
        confidence=confidence,
        resamples=resamples,
        seed=seed,
    )


def bound_level(confidence: float) -> float:
    """Return the quantile that bounds the drop with the given confidence, with a reserve for approximate intervals."""
    return 1 - _ERROR_SHARE * (1 - confidence)


def _drops(new: EvalResult, base: EvalResult, quantiles: PairedQuantiles, level: float) -> tuple[float, float, float]:
    """Return the observed drop and its one-sided lower and upper bounds."""
    if quantiles.ratio is not None:
        ratio = new.value / base.value if base.value else math.nan
        return ratio - 1, quantiles.ratio(1 - level) - 1, quantiles.ratio(level) - 1
    if not new.higher_is_better:
        return new.value - base.value, quantiles.difference(1 - level), quantiles.difference(level)
    return base.value - new.value, -quantiles.difference(level), -quantiles.difference(1 - level)


def _relative(drops: tuple[float, float, float], base: EvalResult) -> tuple[float, float, float]:
    """Return drops relative to the magnitude of the base model's value, which may be negative as a return."""
    unit = abs(base.value) or math.nan
    drop, lower, bound = drops
    return drop / unit, lower / unit, bound / unit


def _verdict(
    new: EvalResult, base: EvalResult, quantiles: PairedQuantiles, drops: tuple[float, float, float], margin: float,
    level: float,
) -> tuple[Verdict, int | None]:  # fmt: skip
    """Return the verdict and, if it is inconclusive, the number of items that would be enough."""
    drop, lower, bound = drops
    # Written so that a comparison with NaN never passes.
    if bound < margin:
        return "pass", None
    if not math.isfinite(drop) or math.isnan(bound) or lower >= margin:
        return "fail", None
    needed = items_needed(new, base, quantiles, drops, margin, level)
    if needed is not None and drop >= margin and needed <= len(new.items):
        return "fail", None  # with so many items a model as good as the base model would have passed
    return "inconclusive", None if needed is None else _about(max(needed, len(new.items) + 1))


def items_needed(
    new: EvalResult, base: EvalResult, quantiles: PairedQuantiles, drops: tuple[float, float, float], margin: float,
    level: float,
) -> int | None:  # fmt: skip
    """Return how many items make the gate pass with a power of 80 %, at the observed variance of the paired items.

    The true drop is taken to be the observed one if that is between 0 and the margin, else 0.
    """
    drop, _, bound = drops
    if not math.isfinite(bound):
        return None
    scale: Callable[[float], float] = math.log1p if quantiles.ratio is not None else float
    items, width = len(new.items), scale(bound) - scale(drop)
    distance = scale(margin) - scale(drop if 0 < drop < margin else 0.0)
    changed = sum(discordant(new, base)) if new.metric in CLASSIFICATION_METRICS else None
    if changed == 0:
        return math.ceil(items * width / distance)  # with no changed item the width falls as 1 / items
    deviation = width / _critical(quantiles.method, items, level) * math.sqrt(items)
    if new.metric == "accuracy" and changed is not None:
        deviation = math.sqrt(changed / items - drop**2)  # the score interval is wider in few items only

    def enough(count: int) -> bool:
        critical = _critical(quantiles.method, count, level) + float(ndtri(POWER))
        return critical * deviation / math.sqrt(count) <= distance

    high = 2
    while not enough(high):
        high *= 2
        if high > _MAX_ITEMS_NEEDED:
            return high
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def _critical(method: str, items: int, level: float) -> float:
    degrees = long_run_degrees(items) if method == BLOCK_BOOTSTRAP else items - 1
    return float(stdtrit(degrees, level))


def _about(count: int) -> int:
    """Round up to two significant digits."""
    unit = 10 ** max(0, len(str(count)) - 2)
    return math.ceil(count / unit) * unit
