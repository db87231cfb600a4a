"""What each paper says of its method, on vectors small enough to check."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as distributed

from smelt.errors import ConfigError
from smelt.train.gradients.compressor import Compressor, Sparsifier
from smelt.train.gradients.compressors import (
    COMPRESSORS,
    DEFT,
    DGC,
    QSGD,
    SAGE,
    AdaComp,
    CLTk,
    EFSign,
    HardThreshold,
    OneBit,
    SIDCo,
    TopK,
    compressor_named,
)
from smelt.train.gradients.compressors.deft import cut, pack, share
from smelt.train.gradients.compressors.randomk import drawn
from tests.train.parallel import run
from tests.train.synthetic import gradient_of, layout_of, rank, reducer_of

ONE_MATRIX = {"a": (200, 250)}


@pytest.mark.parametrize("density", [0, 2, -0.1, math.nan])
@pytest.mark.parametrize("kind", [kind for kind in COMPRESSORS.values() if issubclass(kind, Sparsifier)])
def test_a_density_that_cannot_be_is_refused(kind: Any, density: float) -> None:
    with pytest.raises(ConfigError, match="above 0 and at most 1"):
        kind(density=density)


@pytest.mark.parametrize(
    ("name", "parameters", "sentence"),
    [
        ("best", {}, "there is no gradient compressor 'best'; there are exdyna"),
        ("topk", {"k": 5}, "has no parameter 'k'; it has density"),
        ("topk", {"density": "low"}, "must be float, not 'low'"),
        ("topk", {"density": True}, "must be float, not True"),
        ("topk", {"agreement": "all"}, "agreement is one of union, own"),
        ("qsgd", {"levels": 4}, "would grow without end"),
        ("dgc", {"momentum": 1.0}, "momentum is 1"),
        ("adacomp", {"matrix_bin": 1 << 14}, "between 1 and 16383"),
        ("sidco", {"distribution": "gamma"}, "one of exponential, pareto"),
        ("threshold", {"threshold": -1.0}, "must be above 0"),
    ],
)
def test_bad_parameters_are_one_sentence(name: str, parameters: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        compressor_named(name, **parameters)


def test_a_compressor_prints_as_the_call_that_makes_it() -> None:
    made = compressor_named("sage", density=0.01, threshold=None)
    assert eval(repr(made), {"SAGE": SAGE}) == made  # noqa: S307


def counts(compressor: Compressor, steps: int, shapes: dict[str, tuple[int, ...]] = ONE_MATRIX) -> list[int]:
    """How many a single worker sends in each step, of Gaussian gradients."""
    reducer = reducer_of(compressor, layout=layout_of(shapes))
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(steps):
        reducer.reduce(torch.randn(reducer.layout.size, generator=generator))
        found.append(reducer.traffic.chosen)
    return found


@pytest.mark.parametrize(
    ("shape", "length", "first", "low", "high"), [((100, 50, 10), 50, 8.7, 4.7, 5.3), ((200, 250), 500, 37, 4.5, 6.5)]
)
def test_adacomp_sends_about_five_a_bin(
    shape: tuple[int, ...], length: int, first: float, low: float, high: float
) -> None:
    found = [number / (math.prod(shape) / length) for number in counts(AdaComp(), 150, {"a": shape})]
    assert np.mean(found[:3]) == pytest.approx(first, rel=0.1)
    assert low < np.mean(found[-30:]) < high


def test_adacomp_with_factor_one_sends_the_largest_of_each_bin() -> None:
    assert counts(AdaComp(factor=1.0), 3) == [100, 100, 100]
    assert counts(AdaComp(factor=3.0), 5)[-1] > counts(AdaComp(factor=2.0), 5)[-1] > 100


def test_adacomp_sends_signs_of_the_mean_maximum_and_vectors_whole() -> None:
    layout = layout_of({"w": (3, 10), "b": (3,)})
    reducer = reducer_of(AdaComp(matrix_bin=10), layout=layout)
    gradient = torch.tensor([0.1, -4.0, *[0.0] * 8, 2.0, *[0.5] * 9, *[0.0] * 10, 7.0, 8.0, 9.0])
    sent = reducer.reduce(gradient)
    expected = torch.zeros(33)
    expected[1], expected[10], expected[30:] = -2.0, 2.0, gradient[30:]  # (4 + 2 + 0) / 3
    assert torch.equal(sent, expected)
    assert torch.allclose(reducer.residual, gradient - expected)
    assert not reducer_of(AdaComp(matrix_bin=10), layout=layout).reduce(torch.zeros(33)).any()


def test_sage_finds_its_density_from_a_threshold_far_too_high() -> None:
    found = np.array(counts(SAGE(density=0.01, threshold=50.0), 200)) / (0.01 * 50_000)
    assert found[0] == 0
    assert 0.5 < found[120:].mean() < 2.0
    assert counts(HardThreshold(density=0.01, threshold=50.0), 20)[-1] == 0


def test_deft_shares_follow_norms_and_pass_on_what_is_too_much() -> None:
    sizes = [10, 1000, 1000, 5]
    shares = share(400, [100.0, 1.0, 3.0, 1.0], sizes)
    assert shares[0] == 10  # saturated
    assert sum(shares) == 400
    assert shares[2] == pytest.approx(3 * shares[1], rel=0.05)
    assert share(2015, [1.0, 5.0, 1.0, 1.0], sizes) == sizes
    assert min(share(2, [1.0] * 4, sizes)) == 1  # one a layer, whatever the target


def test_deft_cuts_what_is_larger_than_a_share_and_balances_bins() -> None:
    layout = layout_of({"big": (70, 10), "small": (3,), "other": (5, 20)})
    ranges = cut(layout, 4)
    assert [place for start, stop in ranges for place in range(start, stop)] == list(range(803))
    assert len(ranges) == 4 + 1 + 1
    bins = pack([10, 10, 10, 10, 1, 5], [175, 175, 175, 175, 3, 100], 4)
    assert sorted(bins[:4]) == [0, 1, 2, 3]


def deft_counts() -> tuple[list[int], int, float]:
    reducer = reducer_of(DEFT(density=0.02))
    reducer.reduce(gradient_of(reducer.layout, 0, rank()))
    return reducer.counts, reducer.traffic.chosen, reducer.traffic.target


def test_deft_never_selects_twice() -> None:
    own, chosen, target = run(3, deft_counts)[0]
    assert sum(own) <= chosen == target  # whole layers are nobody's own


def test_sidco_reads_the_threshold_of_exponential_data_exactly() -> None:
    values = torch.empty(200_000).exponential_(generator=torch.Generator().manual_seed(0))
    for kind in ("exponential", "pareto"):
        number = int((values >= SIDCo(density=0.01, distribution=kind).threshold(values, 1)).sum())
        assert abs(number - 2000) < 4 * math.sqrt(2000)


@pytest.mark.parametrize(("kind", "power"), [("exponential", 1.0), ("exponential", 1.5), ("pareto", 1.5)])
def test_sidco_comes_near_its_target_on_other_tails(kind: str, power: float) -> None:
    """Fresh vectors each time: the memory is emptied, so that only the stages can learn."""
    reducer = reducer_of(SIDCo(density=0.005, distribution=kind), layout=layout_of(ONE_MATRIX))
    generator, found = torch.Generator().manual_seed(3), []
    for _ in range(60):
        reducer.residual.zero_()
        reducer.reduce(
            torch.randn(50_000, generator=generator).sign() * torch.randn(50_000, generator=generator).abs() ** power
        )
        found.append(reducer.traffic.build_up)
    assert 0.75 < np.mean(found[20:]) < 1.25


def momentum_sgd(nesterov: bool) -> float:
    """The difference of DGC that sends all and forgets nothing from the velocity of the mean gradient."""
    reducer = reducer_of(DGC(density=1.0, momentum=0.8, masking=False, nesterov=nesterov))
    parameter = torch.zeros(reducer.layout.size, requires_grad=True)
    optimiser = torch.optim.SGD([parameter], lr=1.0, momentum=0.8, nesterov=nesterov)
    applied, worst = torch.zeros(reducer.layout.size), 0.0
    for number in range(5):
        gradient = gradient_of(reducer.layout, number, rank())
        applied -= reducer.reduce(gradient)
        parameter.grad = gradient.clone()
        distributed.all_reduce(parameter.grad)
        parameter.grad /= reducer.workers.size
        optimiser.step()
        worst = max(worst, float((applied - parameter.detach()).abs().max()))
    return worst


@pytest.mark.parametrize("nesterov", [False, True])
def test_dgc_that_sends_all_is_momentum_sgd(nesterov: bool) -> None:
    assert max(run(2, momentum_sgd, nesterov)) < 1e-6


def test_dgc_forgets_the_velocity_of_what_it_sent_but_not_of_vectors() -> None:
    reducer = reducer_of(DGC(density=0.1), layout=layout_of({"w": (10, 10), "b": (4,)}))
    sent = reducer.reduce(gradient_of(reducer.layout, 0, 0)) != 0
    assert int(sent[:100].sum()) == 10
    assert torch.equal(reducer.state["velocity"][:100] == 0, sent[:100])
    assert sent[100:].all()
    assert (reducer.state["velocity"][100:] != 0).all()


def test_dgc_warms_up_and_clips() -> None:
    warm = DGC(density=0.001, epoch=10)
    assert [round(warm.density_at(10 * epoch), 3) for epoch in range(6)] == [0.251, 0.063, 0.016, 0.004, 0.001, 0.001]
    assert DGC().density_at(0) == 0.001
    reducer = reducer_of(DGC(density=1.0, momentum=0.0, clip=0.5))
    assert float(reducer.reduce(torch.ones(reducer.layout.size)).norm()) == pytest.approx(0.5, rel=1e-4)


def test_dgc_counts_come_near_their_target_without_a_sort_of_everything() -> None:
    found = counts(DGC(density=0.01, momentum=0.0), 20)
    assert all(0.8 * 500 <= number <= 500 for number in found)


def leader_against_topk(same: bool) -> tuple[bool, list[int]]:
    leader, every = reducer_of(CLTk(density=0.03)), reducer_of(TopK(density=0.03))
    equal, numbers = True, []
    for number in range(6):
        gradient = gradient_of(leader.layout, number, 0 if same else rank())
        equal &= torch.equal(leader.reduce(gradient), every.reduce(gradient))
        numbers.append(leader.traffic.chosen)
    return equal, numbers


def test_cltk_is_topk_when_all_workers_have_the_same_data() -> None:
    number = int(0.03 * layout_of().size)
    assert run(3, leader_against_topk, True)[0] == (True, [number] * 6)
    assert run(3, leader_against_topk, False)[0] == (False, [number] * 6)


def test_cltk_by_chunks_takes_one_of_each() -> None:
    reducer = reducer_of(CLTk(density=0.1, chunked=True), layout=layout_of({"a": (10, 10)}))
    places = reducer.reduce(gradient_of(reducer.layout, 0, 0)).nonzero().flatten()
    assert (places // 10).tolist() == list(range(10))


def test_topk_takes_the_largest_of_all_or_of_every_tensor() -> None:
    gradient = gradient_of(layout_of(), 0, 0)
    everywhere = reducer_of(TopK(density=0.01)).reduce(gradient)
    assert int((everywhere != 0).sum()) == int(0.01 * len(gradient))
    assert gradient.abs()[everywhere == 0].max() <= everywhere.abs()[everywhere != 0].min()
    each = reducer_of(TopK(density=0.01, per_tensor=True)).reduce(gradient)
    for piece, values in layout_of().views(each):
        assert int((values != 0).sum()) == max(1, int(0.01 * piece.size))


def test_qsgd_is_right_on_average_and_fits_its_bits() -> None:
    gradient = gradient_of(layout_of(), 0, 0)
    for levels, width in [(1, 2), (7, 4), (127, 8)]:
        quantiser = QSGD(levels=levels, error_feedback=False)
        assert quantiser.width == width
        reducer = reducer_of(quantiser)
        draws = torch.stack([reducer.reduce(gradient) for _ in range(400)])
        norms = torch.nn.functional.pad(gradient, (0, -len(gradient) % 128)).view(-1, 128).norm(dim=1)
        step = norms.repeat_interleave(128)[: len(gradient)] / levels
        assert float(((draws.mean(dim=0) - gradient).abs() / step).max()) < 5 * 0.5 / 20  # of 400 draws
        assert not reducer.residual.any()


def test_signs_with_memory_reach_the_minimum_where_signs_alone_do_not() -> None:
    """Two data points whose gradients have the signs (1, -1) or (-1, 1): signs alone stay on the line x + y = 2."""
    losses = {}
    rows = torch.tensor([[1.5, -0.5], [-0.5, 1.5]])
    for name in ("with", "without"):
        reducer = reducer_of(EFSign(), layout=layout_of({"a": (2,)}))
        point = torch.ones(2)
        for number in range(800):
            row = rows[number % 2]
            point -= 0.03 * reducer.reduce(2 * (row @ point) * row)
            if name == "without":
                reducer.residual.zero_()
        losses[name] = float((rows @ point).square().sum())
    assert losses["with"] < 0.01 < losses["without"]


def test_one_bit_keeps_the_sum_of_every_tensor() -> None:
    gradient = gradient_of(layout_of(), 0, 0)
    sent = reducer_of(OneBit()).reduce(gradient)
    for (_, given), (_, said) in zip(layout_of().views(gradient), layout_of().views(sent), strict=True):
        assert float(given.sum()) == pytest.approx(float(said.sum()), abs=1e-5)
        assert len(said.unique()) <= 2


def test_random_elements_are_as_many_as_asked_for_and_all_alike() -> None:
    generator = torch.Generator().manual_seed(0)
    for number in (5, 30):  # of few some are drawn twice, of many all are shuffled
        draws = [drawn(100, number, generator) for _ in range(2000)]
        assert all(len(draw.unique()) == number for draw in draws)
        often = torch.bincount(torch.cat(draws), minlength=100) / 2000
        assert float((often - number / 100).abs().max()) < 5 * math.sqrt(number / 100 / 2000)
