"""Each compressor's published behavior, on vectors small enough to check."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as distributed

import smelt.train
from smelt.errors import ConfigError
from smelt.train import CompressedStep, CompressionSettings, compress_hsdp
from smelt.train.gradients.compressor import Compressor, Sparsifier, initial_threshold
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
    create_compressor,
)
from smelt.train.gradients.compressors.deft import allocate_counts, pack_into_bins, split_layers
from smelt.train.gradients.compressors.randomk import random_subset
from tests.train.parallel import run
from tests.train.synthetic import build_reducer, make_gradient, make_layout, rank

ONE_MATRIX = {"a": (200, 250)}


@pytest.mark.parametrize("density", [0, 2, -0.1, math.nan])
@pytest.mark.parametrize("kind", [kind for kind in COMPRESSORS.values() if issubclass(kind, Sparsifier)])
def test_an_invalid_density_is_refused(kind: Any, density: float) -> None:
    with pytest.raises(ConfigError, match="above 0 and at most 1"):
        kind(density=density)


@pytest.mark.parametrize(
    ("name", "parameters", "sentence"),
    [
        ("best", {}, "there is no gradient compressor 'best'; there are adacomp"),
        ("topk", {"k": 5}, "has no parameter 'k'; it has density"),
        ("topk", {"density": "low"}, "must be a number, not 'low'"),
        ("topk", {"density": True}, "must be a number, not True"),
        ("topk", {"exchange_mode": "all"}, "exchange_mode is one of union, own"),
        ("qsgd", {"levels": 4}, "would grow without bound"),
        ("dgc", {"momentum": 1.0}, "momentum is 1"),
        ("adacomp", {"matrix_bin": 1 << 14}, "between 1 and 16383"),
        ("sidco", {"distribution": "gamma"}, "one of exponential, pareto"),
        ("threshold", {"threshold": -1.0}, "must be above 0"),
    ],
)
def test_invalid_parameters_raise_one_sentence(name: str, parameters: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        create_compressor(name, **parameters)


def test_the_repr_of_a_compressor_is_its_constructor_call() -> None:
    compressor = create_compressor("sage", density=0.01, threshold=None)
    assert eval(repr(compressor), {"SAGE": SAGE}) == compressor  # noqa: S307


def counts(compressor: Compressor, steps: int, shapes: dict[str, tuple[int, ...]] = ONE_MATRIX) -> list[int]:
    """Return how many elements of Gaussian gradients a single rank sends in each step."""
    reducer = build_reducer(compressor, layout=make_layout(shapes))
    generator = torch.Generator().manual_seed(1)
    results = []
    for _ in range(steps):
        reducer.reduce(torch.randn(reducer.layout.numel, generator=generator))
        results.append(reducer.traffic.num_selected)
    return results


@pytest.mark.parametrize(
    ("shape", "length", "first", "low", "high"), [((100, 50, 10), 50, 8.7, 4.7, 5.3), ((200, 250), 500, 37, 4.5, 6.5)]
)
def test_adacomp_sends_about_five_per_bin(
    shape: tuple[int, ...], length: int, first: float, low: float, high: float
) -> None:
    results = [number / (math.prod(shape) / length) for number in counts(AdaComp(), 150, {"a": shape})]
    assert np.mean(results[:3]) == pytest.approx(first, rel=0.1)
    assert low < np.mean(results[-30:]) < high


def test_adacomp_with_factor_one_sends_the_largest_of_each_bin() -> None:
    assert counts(AdaComp(factor=1.0), 3) == [100, 100, 100]
    assert counts(AdaComp(factor=3.0), 5)[-1] > counts(AdaComp(factor=2.0), 5)[-1] > 100


def test_adacomp_sends_signs_of_the_mean_maximum_and_1d_parameters_dense() -> None:
    layout = make_layout({"w": (3, 10), "b": (3,)})
    reducer = build_reducer(AdaComp(matrix_bin=10), layout=layout)
    gradient = torch.tensor([0.1, -4.0, *[0.0] * 8, 2.0, *[0.5] * 9, *[0.0] * 10, 7.0, 8.0, 9.0])
    sent = reducer.reduce(gradient)
    expected = torch.zeros(33)
    expected[1], expected[10], expected[30:] = -2.0, 2.0, gradient[30:]  # (4 + 2 + 0) / 3
    assert torch.equal(sent, expected)
    assert torch.allclose(reducer.residual, gradient - expected)
    assert not build_reducer(AdaComp(matrix_bin=10), layout=layout).reduce(torch.zeros(33)).any()


def test_sage_reaches_its_density_from_a_threshold_far_too_high() -> None:
    result = np.array(counts(SAGE(density=0.01, threshold=50.0), 200)) / (0.01 * 50_000)
    assert result[0] == 0
    assert 0.5 < result[120:].mean() < 2.0
    assert counts(HardThreshold(density=0.01, threshold=50.0), 20)[-1] == 0


def test_deft_shares_follow_norms_and_redistribute_the_excess() -> None:
    sizes = [10, 1000, 1000, 5]
    shares = allocate_counts(400, [100.0, 1.0, 3.0, 1.0], sizes)
    assert shares[0] == 10  # saturated
    assert sum(shares) == 400
    assert shares[2] == pytest.approx(3 * shares[1], rel=0.05)
    assert allocate_counts(2015, [1.0, 5.0, 1.0, 1.0], sizes) == sizes
    assert min(allocate_counts(2, [1.0] * 4, sizes)) == 1  # one per layer, whatever the target


def test_deft_splits_layers_larger_than_a_share_and_balances_bins() -> None:
    layout = make_layout({"big": (70, 10), "small": (3,), "other": (5, 20)})
    ranges = split_layers(layout, 4)
    assert [position for start, stop in ranges for position in range(start, stop)] == list(range(803))
    assert len(ranges) == 4 + 1 + 1
    bins = pack_into_bins([10, 10, 10, 10, 1, 5], [175, 175, 175, 175, 3, 100], 4)
    assert sorted(bins[:4]) == [0, 1, 2, 3]


def deft_counts() -> tuple[list[int], int, float]:
    reducer = build_reducer(DEFT(density=0.02))
    reducer.reduce(make_gradient(reducer.layout, 0, rank()))
    return reducer.counts, reducer.traffic.num_selected, reducer.traffic.target_count


def test_deft_never_selects_an_element_twice() -> None:
    own, chosen, target = run(3, deft_counts)[0]
    assert sum(own) <= chosen == target  # unsplit layers are not exclusive to a rank


def test_sidco_estimates_the_threshold_of_exponential_data_exactly() -> None:
    values = torch.empty(200_000).exponential_(generator=torch.Generator().manual_seed(0))
    for distribution in ("exponential", "pareto"):
        number = int((values >= SIDCo(density=0.01, distribution=distribution).threshold(values, 1)).sum())
        assert abs(number - 2000) < 4 * math.sqrt(2000)


@pytest.mark.parametrize(("kind", "power"), [("exponential", 1.0), ("exponential", 1.5), ("pareto", 1.5)])
def test_sidco_comes_close_to_its_target_on_other_tails(kind: str, power: float) -> None:
    """Use fresh vectors and empty the residual each time, so that only the stages adapt."""
    reducer = build_reducer(SIDCo(density=0.005, distribution=kind), layout=make_layout(ONE_MATRIX))
    generator, results = torch.Generator().manual_seed(3), []
    for _ in range(60):
        reducer.residual.zero_()
        reducer.reduce(
            torch.randn(50_000, generator=generator).sign() * torch.randn(50_000, generator=generator).abs() ** power
        )
        results.append(reducer.traffic.build_up)
    assert 0.75 < np.mean(results[20:]) < 1.25


def momentum_sgd(nesterov: bool) -> float:
    """Return the difference between DGC that sends everything and the velocity of the mean gradient."""
    reducer = build_reducer(DGC(density=1.0, momentum=0.8, masking=False, nesterov=nesterov))
    parameter = torch.zeros(reducer.layout.numel, requires_grad=True)
    optimizer = torch.optim.SGD([parameter], lr=1.0, momentum=0.8, nesterov=nesterov)
    applied, worst = torch.zeros(reducer.layout.numel), 0.0
    for number in range(5):
        gradient = make_gradient(reducer.layout, number, rank())
        applied -= reducer.reduce(gradient)
        parameter.grad = gradient.clone()
        distributed.all_reduce(parameter.grad)
        parameter.grad /= reducer.comm.world_size
        optimizer.step()
        worst = max(worst, float((applied - parameter.detach()).abs().max()))
    return worst


@pytest.mark.parametrize("nesterov", [False, True])
def test_dgc_at_density_one_is_momentum_sgd(nesterov: bool) -> None:
    assert max(run(2, momentum_sgd, nesterov)) < 1e-6


def test_dgc_clears_the_velocity_of_sent_elements_but_not_of_1d_parameters() -> None:
    reducer = build_reducer(DGC(density=0.1), layout=make_layout({"w": (10, 10), "b": (4,)}))
    sent = reducer.reduce(make_gradient(reducer.layout, 0, 0)) != 0
    assert int(sent[:100].sum()) == 10
    assert torch.equal(reducer.state["velocity"][:100] == 0, sent[:100])
    assert sent[100:].all()
    assert (reducer.state["velocity"][100:] != 0).all()


@pytest.mark.parametrize(
    ("optimizer", "refused"),
    [
        (lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9), True),
        (lambda parameters: torch.optim.AdamW(parameters), True),
        (lambda parameters: torch.optim.SGD(parameters, lr=0.1), False),
        (lambda parameters: torch.optim.Adam(parameters, betas=(0.0, 0.99)), False),
    ],
)
def test_dgc_refuses_an_optimizer_with_momentum(optimizer: Any, refused: bool) -> None:
    model = torch.nn.Linear(4, 4)
    expected = pytest.raises(ConfigError, match="dgc applies momentum itself") if refused else nullcontext()
    with expected:
        CompressedStep(model, DGC(), optimizer=optimizer(model.parameters()))
    CompressedStep(model, DGC(momentum=0.0), optimizer=optimizer(model.parameters()))
    CompressedStep(model, TopK(), optimizer=optimizer(model.parameters()))


def test_dgc_warns_where_it_cannot_see_the_optimizer() -> None:
    with pytest.warns(UserWarning, match="pass optimizer= to have it checked"):
        CompressedStep(torch.nn.Linear(4, 4), DGC())


def test_old_names_work_with_a_warning() -> None:
    with pytest.warns(FutureWarning, match="`warm_up` in the gradient compressor dgc is now called `warmup_epochs`"):
        assert create_compressor("dgc", warm_up=2) == DGC(warmup_epochs=2)
    with pytest.warns(FutureWarning, match="`Settings` in smelt.train is now called `CompressionSettings`"):
        old_settings = smelt.train.Settings
    with pytest.warns(FutureWarning, match="error_feedback: lr_scaled"):
        assert old_settings(form="paper") == CompressionSettings(error_feedback="lr_scaled")
    with pytest.warns(FutureWarning, match="`compress_replicas` in smelt.train"):
        assert smelt.train.compress_replicas is compress_hsdp
    with pytest.warns(FutureWarning, match="`vector_mb` in CompressedStep.__init__ is now called `bucket_cap_mb`"):
        step = CompressedStep(torch.nn.Linear(4, 4), TopK(), vector_mb=1e-6)
    assert len(step.compression.buckets) == 2
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        smelt.train.nothing  # noqa: B018


def test_dgc_warms_up_and_clips() -> None:
    warm = DGC(density=0.001, steps_per_epoch=10)
    assert [round(warm.density_at(10 * epoch), 3) for epoch in range(6)] == [0.251, 0.063, 0.016, 0.004, 0.001, 0.001]
    assert DGC().density_at(0) == 0.001
    reducer = build_reducer(DGC(density=1.0, momentum=0.0, clip_norm=0.5))
    assert float(reducer.reduce(torch.ones(reducer.layout.numel)).norm()) == pytest.approx(0.5, rel=1e-4)


def test_dgc_counts_come_close_to_their_target_without_a_full_sort() -> None:
    result = counts(DGC(density=0.01, momentum=0.0), 20)
    assert all(0.8 * 500 <= number <= 500 for number in result)


def leader_against_topk(same: bool) -> tuple[bool, list[int]]:
    leader, every = build_reducer(CLTk(density=0.03)), build_reducer(TopK(density=0.03))
    equal, numbers = True, []
    for number in range(6):
        gradient = make_gradient(leader.layout, number, 0 if same else rank())
        equal &= torch.equal(leader.reduce(gradient), every.reduce(gradient))
        numbers.append(leader.traffic.num_selected)
    return equal, numbers


def test_cltk_is_topk_when_all_workers_have_the_same_data() -> None:
    number = int(0.03 * make_layout().numel)
    assert run(3, leader_against_topk, True)[0] == (True, [number] * 6)
    assert run(3, leader_against_topk, False)[0] == (False, [number] * 6)


def test_chunked_cltk_takes_one_element_per_chunk() -> None:
    reducer = build_reducer(CLTk(density=0.1, chunked=True), layout=make_layout({"a": (10, 10)}))
    places = reducer.reduce(make_gradient(reducer.layout, 0, 0)).nonzero().flatten()
    assert (places // 10).tolist() == list(range(10))


def test_topk_takes_the_largest_of_all_or_of_every_tensor() -> None:
    gradient = make_gradient(make_layout(), 0, 0)
    everywhere = build_reducer(TopK(density=0.01)).reduce(gradient)
    assert int((everywhere != 0).sum()) == int(0.01 * len(gradient))
    assert gradient.abs()[everywhere == 0].max() <= everywhere.abs()[everywhere != 0].min()
    each = build_reducer(TopK(density=0.01, per_tensor=True)).reduce(gradient)
    for entry, values in make_layout().views(each):
        assert int((values != 0).sum()) == max(1, int(0.01 * entry.numel))


def test_qsgd_is_unbiased_and_fits_its_bits() -> None:
    gradient = make_gradient(make_layout(), 0, 0)
    for levels, width in [(1, 2), (7, 4), (127, 8)]:
        quantizer = QSGD(levels=levels, error_feedback=False)
        assert quantizer.bits == width
        reducer = build_reducer(quantizer)
        draws = torch.stack([reducer.reduce(gradient) for _ in range(400)])
        norms = torch.nn.functional.pad(gradient, (0, -len(gradient) % 128)).view(-1, 128).norm(dim=1)
        step = norms.repeat_interleave(128)[: len(gradient)] / levels
        assert float(((draws.mean(dim=0) - gradient).abs() / step).max()) < 5 * 0.5 / 20  # of 400 draws
        assert not reducer.residual.any()


def test_signs_with_error_feedback_reach_the_minimum_where_signs_alone_do_not() -> None:
    """Two data points whose gradients have the signs (1, -1) or (-1, 1): signs alone stay on the line x + y = 2."""
    losses = {}
    rows = torch.tensor([[1.5, -0.5], [-0.5, 1.5]])
    for name in ("with", "without"):
        reducer = build_reducer(EFSign(), layout=make_layout({"a": (2,)}))
        point = torch.ones(2)
        for number in range(800):
            row = rows[number % 2]
            point -= 0.03 * reducer.reduce(2 * (row @ point) * row)
            if name == "without":
                reducer.residual.zero_()
        losses[name] = float((rows @ point).square().sum())
    assert losses["with"] < 0.01 < losses["without"]


def test_one_bit_preserves_the_sum_of_every_tensor() -> None:
    gradient = make_gradient(make_layout(), 0, 0)
    sent = build_reducer(OneBit()).reduce(gradient)
    for (_, given), (_, decoded) in zip(make_layout().views(gradient), make_layout().views(sent), strict=True):
        assert float(given.sum()) == pytest.approx(float(decoded.sum()), abs=1e-5)
        assert len(decoded.unique()) <= 2


def test_random_k_selects_the_requested_count_uniformly() -> None:
    generator = torch.Generator().manual_seed(0)
    for number in (5, 30):  # small counts are drawn with possible repeats, large ones by a shuffle
        draws = [random_subset(100, number, generator) for _ in range(2000)]
        assert all(len(draw.unique()) == number for draw in draws)
        often = torch.bincount(torch.cat(draws), minlength=100) / 2000
        assert float((often - number / 100).abs().max()) < 5 * math.sqrt(number / 100 / 2000)


def test_the_first_threshold_lets_everything_pass_at_density_one() -> None:
    assert initial_threshold(0.25, 64) == 0.5 / 4 and initial_threshold(1.0, 64) == 0
