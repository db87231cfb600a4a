"""Search under a latency budget, from latency tables measured on this machine and a piecewise linear fit of them.

Follows Kwon et al., 2022, in its corrected form: units below the fitted threshold cost nothing once their layer exists;
for every number of dropped attention and FFN layers, the remaining budget buys further units. The result is checked
against the measured table, not the fit, and the budget is tightened until it fits there too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from smelt.compression.allocation.unit_search import Candidates, KeptUnits, kept_importance, required_count, search
from smelt.errors import BudgetError, RecipeError
from smelt.measure.cost import Workload
from smelt.models.anatomy import Anatomy, Part
from smelt.targets.device import Device
from smelt.targets.operators import AttentionOp, FeedForwardOp
from smelt.targets.table import LatencyTable, PiecewiseFit, fit_piecewise, measure_table, sample_widths

MAX_TIGHTENINGS = 40


@dataclass(frozen=True)
class LatencyTables:
    """Latency of a layer by the number of units kept, for attention and FFN."""

    heads: LatencyTable
    ffn_channels: LatencyTable

    def for_kind(self, kind: str) -> LatencyTable:
        return self.heads if kind == "heads" else self.ffn_channels

    def seconds(self, parts: Sequence[Candidates], choice: KeptUnits) -> float:
        """Return the latency of a choice according to the tables."""
        return float(sum(self.for_kind(part.kind).seconds[len(kept)] for part, kept in zip(parts, choice, strict=True)))


def search_under_latency(
    anatomy: Anatomy, parts: Sequence[Candidates], keep: float, workload: Workload, seed: int
) -> KeptUnits:
    """Measure latency tables on this machine, then search."""
    if any(part.kind == "channels" for part in anatomy.parts):
        raise RecipeError("a latency budget supports attention and FFN layers only; for convolutions use macs.")
    if any(part.mixture is not None for part in anatomy.parts):
        raise RecipeError("a latency budget supports one FFN per block; for a mixture of experts use macs.")
    return search_latency(parts, measure_latency_tables(anatomy, workload, seed), keep)


def measure_latency_tables(anatomy: Anatomy, workload: Workload, seed: int = 0, seconds: float = 20.0) -> LatencyTables:
    """Measure stand-alone layers of this network's sizes on its device."""
    weight = next(anatomy.network.parameters())
    device = Device(weight.device.type, seed=seed)
    dtype = str(weight.dtype).removeprefix("torch.")
    heads = _widest(anatomy, "heads")
    ffn = _widest(anatomy, "ffn_channels")

    def attention(units: int) -> AttentionOp:
        return AttentionOp(
            hidden=heads.output.out_features, heads=units * heads.heads_per_unit, kv_heads=units,
            head_dim=heads.head_dim, tokens=workload.tokens, batch=workload.batch, causal=anatomy.family.causal,
            dtype=dtype,
        )  # fmt: skip

    def feed_forward(units: int) -> FeedForwardOp:
        return FeedForwardOp(
            hidden=ffn.output.out_features, ffn_channels=units, gated=len(ffn.input_projections) > 1,
            tokens=workload.tokens, batch=workload.batch, dtype=dtype,
        )  # fmt: skip

    return LatencyTables(
        measure_table(device, attention, sample_widths(heads.units), seconds=seconds / 2, seed=seed),
        measure_table(device, feed_forward, sample_widths(ffn.units, 64), seconds=seconds / 2, seed=seed),
    )


def _widest(anatomy: Anatomy, kind: str) -> Part:
    return max((part for part in anatomy.parts if part.kind == kind), key=lambda part: part.units)


def search_latency(parts: Sequence[Candidates], tables: LatencyTables, keep: float) -> KeptUnits:
    """Return the best choice with at most the fraction `keep` of the network's latency in the tables."""
    all_units = [np.arange(len(part.importance)) for part in parts]
    limit = keep * tables.seconds(parts, all_units)
    budget = limit
    for _ in range(MAX_TIGHTENINGS):
        choice = _search_with_fit(parts, fit_piecewise(tables.heads), fit_piecewise(tables.ffn_channels), budget)
        if choice is None:
            break
        latency = tables.seconds(parts, choice)
        if latency <= limit:
            return choice
        budget *= min(0.99, limit / latency)
    raise BudgetError(
        f"a latency of {keep:.0%} cannot be met on this machine: even the smallest layers measured slower; allow more."
    )


@dataclass(frozen=True)
class _Layers:
    """The layers of one kind, in ascending importance of their free units, and the fit of their latency."""

    positions: list[int]  # of the parts, in that order
    base: np.ndarray  # importance of each layer's free units, in that order
    fit: PiecewiseFit

    def dropped(self, count: int) -> list[int]:
        return self.positions[:count]


def _layers(parts: Sequence[Candidates], kind: str, fit: PiecewiseFit) -> _Layers:
    positions = [i for i, part in enumerate(parts) if part.kind == kind]
    free = {i: parts[i].importance[parts[i].ranking()[: _num_free(parts[i], fit)]].sum() for i in positions}
    positions.sort(key=lambda i: (parts[i].min_units > 0, free[i]))  # protected layers are never dropped
    return _Layers(positions, np.array([free[i] for i in positions]), fit)


def _num_free(part: Candidates, fit: PiecewiseFit) -> int:
    """Return the number of units that cost nothing once the layer exists; all of them if the fit is flat."""
    units = len(part.importance)
    return units if fit.slope == 0 else max(min(fit.threshold, units), part.min_units)


def _search_with_fit(
    parts: Sequence[Candidates], heads_fit: PiecewiseFit, ffn_fit: PiecewiseFit, budget: float
) -> KeptUnits | None:
    heads, ffn = _layers(parts, "heads", heads_fit), _layers(parts, "ffn_channels", ffn_fit)
    best: KeptUnits | None = None
    best_value = -np.inf
    for heads_dropped in range(_max_dropped(parts, heads) + 1):
        for ffn_dropped in range(_max_dropped(parts, ffn) + 1):
            dropped = set(heads.dropped(heads_dropped) + ffn.dropped(ffn_dropped))
            choice = _fill_budget(parts, dropped, heads, ffn, budget)
            if choice is None:
                continue
            value = kept_importance(parts, choice)
            if value > best_value:
                best, best_value = choice, value
    return best


def _max_dropped(parts: Sequence[Candidates], layers: _Layers) -> int:
    return sum(parts[i].min_units == 0 for i in layers.positions)


def _fill_budget(
    parts: Sequence[Candidates], dropped: set[int], heads: _Layers, ffn: _Layers, budget: float
) -> KeptUnits | None:
    """Keep the free units of every remaining layer and the best further ones within the remaining budget."""
    candidates: list[Candidates] = []
    for i, part in enumerate(parts):
        fit = heads.fit if part.kind == "heads" else ffn.fit
        if i in dropped:
            candidates.append(replace(part, importance=np.zeros(0), min_units=0, unit_cost=max(fit.slope, 1e-12)))
            continue
        free = _num_free(part, fit)
        extra = fit.slope * max(0, free - fit.threshold)
        budget -= fit.constant + extra
        candidates.append(replace(part, min_units=free, unit_cost=max(fit.slope, 1e-12)))
    if budget < 0:
        return None
    return search(candidates, budget + sum(part.unit_cost * required_count(part) for part in candidates))
