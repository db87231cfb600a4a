"""FSDP sharding plans: timelines of known length, and the search against brute force."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations, product

import pytest

from smelt.errors import ConfigError, ResourceError
from smelt.train.fsdp.plan import AlphaBeta, ClusterSpec, LayerProfile, ModelProfile, ShardingPlan, ShardUnit
from smelt.train.fsdp.search import all_plans, count_plans, search_plan
from smelt.train.fsdp.timeline import ROOT, predict_timeline

MB = 1_000_000


def make_model_profile(layers: int, size: int = MB, forward: float = 1.0, backward: float = 2.0) -> ModelProfile:
    return ModelProfile(tuple(LayerProfile(f"{number}", size, forward, backward) for number in range(layers)))


def make_cluster(seconds: float, *, memory: float = 1e12, overlap: bool = True, alpha: float = 0.0) -> ClusterSpec:
    """Return a two-rank link on which a megabyte of parameters takes this long."""
    speed = AlphaBeta(alpha, 2 * seconds / MB)
    return ClusterSpec(2, speed, speed, memory, overlap)


def one_unit_per_layer(
    layers: int, reshard_after_forward: bool = True, forward: int = 1, backward: int = 1
) -> ShardingPlan:
    return ShardingPlan(
        tuple(ShardUnit(position, position + 1, reshard_after_forward) for position in range(layers)), forward, backward
    )


def random_model(seed: int, layers: int) -> ModelProfile:
    draw = random.Random(seed)
    return ModelProfile(
        tuple(
            LayerProfile(
                f"{n}", draw.randint(1, 20) * MB, draw.uniform(0.1, 3), draw.uniform(0.2, 6), draw.randint(0, 5) * MB
            )
            for n in range(layers)
        ),
        LayerProfile("root", draw.randint(0, 1) * MB, draw.uniform(0, 1), draw.uniform(0, 1)),
    )


def test_overlapped_communication_is_not_exposed() -> None:
    """Exposed: the first all-gather, the last reduce-scatter, and the backward all-gather of
    the last layer, unless it stays unsharded after forward."""
    last_kept = ShardingPlan((*one_unit_per_layer(5).units[:-1], ShardUnit(4, 5, False)))
    for seconds in (1e-6, 0.5, 0.99):
        assert predict_timeline(
            make_model_profile(5), one_unit_per_layer(5), make_cluster(seconds)
        ).exposed_seconds == pytest.approx(3 * seconds)
        assert predict_timeline(
            make_model_profile(5), last_kept, make_cluster(seconds)
        ).exposed_seconds == pytest.approx(2 * seconds)
    assert predict_timeline(make_model_profile(5), one_unit_per_layer(5), make_cluster(0.0)).exposed_seconds == 0.0


def test_without_compute_the_step_is_the_sum_of_collectives() -> None:
    """With no compute time: forward all-gathers, backward all-gathers and reduce-scatters in sequence."""
    idle = make_model_profile(4, forward=0.0, backward=0.0)
    assert predict_timeline(idle, one_unit_per_layer(4), make_cluster(1.0)).seconds == pytest.approx(4 + 4 + 4)
    assert predict_timeline(
        idle, one_unit_per_layer(4, reshard_after_forward=False), make_cluster(1.0)
    ).seconds == pytest.approx(4 + 4)
    together = ShardingPlan((ShardUnit(0, 4, True),))
    assert predict_timeline(idle, together, make_cluster(1.0, alpha=1.0)).seconds == pytest.approx(3 * 5)
    waiting = predict_timeline(make_model_profile(4), one_unit_per_layer(4), make_cluster(1.0, overlap=False))
    assert waiting.seconds == pytest.approx(12 + 4 * 3) and waiting.exposed_seconds == pytest.approx(12)


def test_backward_waits_for_the_previous_reduce_scatter() -> None:
    """Backward 1 s, reduce-scatter 3 s: each backward but the first waits for one reduce-scatter."""
    slow = ClusterSpec(2, AlphaBeta(0, 0), AlphaBeta(0, 6 / MB), 1e12)
    result = predict_timeline(
        make_model_profile(3, forward=0.0, backward=1.0), one_unit_per_layer(3, reshard_after_forward=False), slow
    )
    starts = {
        op: [rank_result.start for rank_result in result.events if rank_result.op == op]
        for op in ("backward", "reduce-scatter")
    }
    assert starts == {"backward": [0.0, 1.0, 4.0], "reduce-scatter": [1.0, 4.0, 7.0]}
    assert result.seconds == 10.0


def test_the_event_order_matches_fsdp() -> None:
    """The next all-gather is issued before the current reduce-scatter; the root comes first and last."""
    model = replace(make_model_profile(2), root=LayerProfile("root", MB, 0.0, 0.0))
    order = predict_timeline(model, one_unit_per_layer(2), make_cluster(0.1)).order
    assert order == [
        ("all-gather", ROOT), ("all-gather", 0), ("all-gather", 1), ("forward", 0), ("forward", 1),
        ("all-gather", 1), ("all-gather", 0), ("backward", 1), ("reduce-scatter", 1), ("backward", 0),
        ("reduce-scatter", 0), ("reduce-scatter", ROOT),
    ]  # fmt: skip
    late = predict_timeline(
        make_model_profile(2), one_unit_per_layer(2, reshard_after_forward=False, forward=0), make_cluster(0.1)
    ).order
    assert late[:4] == [("all-gather", 0), ("forward", 0), ("all-gather", 1), ("forward", 1)]


def test_memory_is_counted_by_hand() -> None:
    """Two layers of 1 MB, no forward prefetch, 1 s of compute each, free collectives."""
    free = make_cluster(0.0)
    shards = 4.0 * 2 * MB / 2
    assert (
        predict_timeline(make_model_profile(2), one_unit_per_layer(2, forward=0), free).peak_memory == shards + 3 * MB
    )  # unsharded and in a buffer; prefetched
    kept = predict_timeline(make_model_profile(2), one_unit_per_layer(2, reshard_after_forward=False, forward=0), free)
    assert kept.peak_memory == shards + 3 * MB  # both unsharded, and a buffer or a gradient
    far = predict_timeline(make_model_profile(3), one_unit_per_layer(3, forward=2), free)
    assert far.peak_memory == 1.5 * shards + 4 * MB  # the first unsharded and in a buffer, two more in their buffers
    busy = ModelProfile(tuple(replace(layer, activations=10 * MB) for layer in make_model_profile(2).layers))
    assert predict_timeline(busy, one_unit_per_layer(2, forward=0), free).peak_memory == shards + 23 * MB


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("tight", [False, True])
def test_the_plan_matches_brute_force(seed: int, tight: bool) -> None:
    """Enumerate all groupings, all sets of unsharded layers and all prefetch depths independently."""
    model, cluster = random_model(seed, 4), make_cluster(0.15, alpha=0.05)
    timelines = []
    for number in range(4):
        for cuts in combinations(range(1, 4), number):
            borders = [0, *cuts, 4]
            for kept in product((True, False), repeat=number + 1):
                units = tuple(ShardUnit(a, b, flag) for a, b, flag in zip(borders, borders[1:], kept, strict=False))
                timelines += [
                    predict_timeline(model, ShardingPlan(units, f, b), cluster) for f in (0, 1, 2) for b in (1, 2)
                ]
    assert len(timelines) == count_plans(4) == len(set(all_plans(4)))
    peaks = sorted(timeline.peak_memory or 0 for timeline in timelines)
    memory = peaks[len(peaks) // 10] if tight else peaks[-1]
    best = min(timeline.seconds for timeline in timelines if (timeline.peak_memory or 0) <= memory)
    result = search_plan(model, replace(cluster, memory=memory))
    assert result.exhaustive and result.timeline.seconds == pytest.approx(best, abs=1e-11)
    assert result.timeline.peak_memory is not None and result.timeline.peak_memory <= memory
    climbed = search_plan(model, replace(cluster, memory=memory), max_exhaustive=0)
    assert not climbed.exhaustive and climbed.timeline.seconds <= 1.05 * best
    assert climbed.timeline.peak_memory is not None and climbed.timeline.peak_memory <= memory


def test_the_last_layer_stays_unsharded_and_memory_decides_for_the_others() -> None:
    model, cluster = make_model_profile(5, forward=0.2, backward=0.4), make_cluster(0.5)
    roomy = search_plan(model, cluster)
    assert not any(unit.reshard_after_forward for unit in roomy.plan.units)  # nothing is gathered twice
    assert roomy.timeline.peak_memory is not None
    tight = search_plan(model, replace(cluster, memory=roomy.timeline.peak_memory - 2 * MB))
    assert not tight.plan.units[-1].reshard_after_forward
    assert roomy.timeline.seconds < tight.timeline.seconds


def test_high_latency_groups_layers_into_one_all_gather() -> None:
    dear = search_plan(make_model_profile(5, forward=0.01, backward=0.02), make_cluster(0.001, alpha=1.0))
    cheap = search_plan(make_model_profile(5, forward=0.01, backward=0.02), make_cluster(0.01))
    assert len(dear.plan.units) == 1 and len(cheap.plan.units) > 1


def test_a_large_model_is_planned_within_memory() -> None:
    model, cluster = random_model(9, 40), make_cluster(0.5, alpha=0.01)
    usual = predict_timeline(model, one_unit_per_layer(40), cluster)
    roomy = search_plan(model, cluster)
    assert roomy.timeline.peak_memory is not None and usual.peak_memory is not None
    assert roomy.timeline.seconds < 0.9 * usual.seconds and roomy.timeline.peak_memory > 1.2 * usual.peak_memory
    memory = (usual.peak_memory + roomy.timeline.peak_memory) / 2
    tight = search_plan(model, replace(cluster, memory=memory))
    assert tight.timeline.peak_memory is not None and tight.timeline.peak_memory <= memory
    assert roomy.timeline.seconds < tight.timeline.seconds < usual.seconds


def test_invalid_plans_raise_one_sentence() -> None:
    with pytest.raises(ResourceError, match="no plan fits: the smallest needs"):
        search_plan(make_model_profile(3), make_cluster(1.0, memory=1000.0))
    with pytest.raises(ConfigError, match="plan for at least two"):
        ClusterSpec(1, AlphaBeta(0, 0), AlphaBeta(0, 0), 1.0)
    with pytest.raises(ConfigError, match="each once and in order"):
        ShardingPlan((ShardUnit(0, 1, True), ShardUnit(2, 3, True)))
