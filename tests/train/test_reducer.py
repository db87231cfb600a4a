"""Reducer invariants for every compressor: no gradient is lost, ranks agree bit for bit, density 1 is the mean."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import torch
import torch.distributed as distributed
from torch import Tensor

from smelt.errors import ConfigError
from smelt.train.gradients.comm import Comm
from smelt.train.gradients.compressor import Compressor
from smelt.train.gradients.compressors import (
    DEFT,
    DGC,
    SAGE,
    AdaComp,
    CLTk,
    EFSign,
    ExDyna,
    HardThreshold,
    MiCRO,
    RandomK,
    SIDCo,
    TopK,
)
from smelt.train.gradients.conservation import ConservationCheck
from smelt.train.gradients.reducer import Reducer
from smelt.train.gradients.settings import CompressionSettings
from tests.train.parallel import outcomes, run
from tests.train.synthetic import build_reducer, every_compressor, make_gradient, make_layout, rank

SPARSE = [ExDyna, MiCRO, DEFT, SAGE, TopK, CLTk, DGC, SIDCo, RandomK]


def digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.numpy().tobytes()).hexdigest()


def conserve(
    compressors: list[Compressor], settings: CompressionSettings, steps: int
) -> list[tuple[str, float, list[str]]]:
    """Return the name, the error of the sums over all steps, and hashes of some results."""
    results = []
    gradients = [make_gradient(make_layout(), number, rank()) for number in range(steps)]
    for compressor in compressors:
        reducer = build_reducer(compressor, settings)
        account, hashes = ConservationCheck(reducer.residual), []
        for number, gradient in enumerate(gradients):
            mean = reducer.reduce(gradient)
            account.add(gradient, mean.double() * reducer.comm.world_size)
            if number % 50 == 0:
                hashes.append(digest(mean))
        error = account.error(reducer.residual / settings.residual_momentum, reducer.comm)
        results.append((compressor.name, error, hashes))
    return results


def with_plain_dgc(density: float) -> list[Compressor]:
    """DGC conserves velocities, which without momentum are the gradients."""
    others = [compressor for compressor in every_compressor(density) if compressor.name != "dgc"]
    return [*others, DGC(density=density, momentum=0.0)]


@pytest.mark.parametrize(("workers", "steps"), [(1, 20), (3, 20), pytest.param(2, 200, marks=pytest.mark.slow)])
def test_no_gradient_is_lost_and_all_ranks_agree(workers: int, steps: int) -> None:
    results = run(workers, conserve, with_plain_dgc(0.02), CompressionSettings(), steps)
    assert len(results[0]) == 15
    for name, error, _ in results[0]:
        assert error < 1e-5, name
    assert all([entry[2] for entry in result] == [entry[2] for entry in results[0]] for result in results)


@pytest.mark.parametrize(
    "settings",
    [
        CompressionSettings(wire_dtype="float16"),
        CompressionSettings(wire_dtype="bfloat16"),
        CompressionSettings(wire_dtype="int8"),
        CompressionSettings(residual_momentum=0.3),
    ],
    ids=str,
)
def test_no_gradient_is_lost_by_rounded_values_or_a_filter(settings: CompressionSettings) -> None:
    compressors = [compressor(density=0.02) for compressor in (ExDyna, DEFT, SAGE, CLTk, TopK)]
    results = run(3, conserve, compressors, settings, 15)
    for name, error, _ in results[0]:
        assert error < 1e-5, name
    assert all([entry[2] for entry in result] == [entry[2] for entry in results[0]] for result in results)


def check_in_debug_mode(compressors: list[Compressor]) -> int:
    for compressor in compressors:
        reducer = build_reducer(compressor, CompressionSettings(check_conservation=True))
        for number in range(5):
            reducer.reduce(make_gradient(reducer.layout, number, rank()))
    return len(compressors)


def test_the_debug_mode_accepts_every_compressor_with_and_without_momentum() -> None:
    assert run(2, check_in_debug_mode, every_compressor(0.05)) == [15, 15]


def lose() -> None:
    reducer = build_reducer(TopK(density=0.1), CompressionSettings(check_conservation=True))
    reducer.reduce(make_gradient(reducer.layout, 0, rank()))
    reducer.residual[3] += 0.5
    reducer.reduce(make_gradient(reducer.layout, 1, rank()))


def test_the_debug_mode_detects_an_invented_value() -> None:
    with pytest.raises(AssertionError, match="gradients were lost or added"):
        run(2, lose)


def everything_at_once(kinds: list[type[Any]]) -> dict[str, float]:
    """Return the error of density 1 against the plain mean after some steps."""
    results = {}
    for compressor in kinds:
        more = {"momentum": 0.0} if compressor is DGC else {}
        reducer = build_reducer(compressor(density=1.0, **more))
        worst = 0.0
        for number in range(4):
            gradient = make_gradient(reducer.layout, number, rank())
            mean = gradient.clone()
            distributed.all_reduce(mean)
            mean /= reducer.comm.world_size
            worst = max(worst, float((reducer.reduce(gradient) - mean).abs().max() / mean.abs().max()))
        results[compressor.name] = worst
    return results


def test_density_one_is_the_plain_mean() -> None:
    for name, difference in run(3, everything_at_once, [*SPARSE, HardThreshold])[0].items():
        assert difference < 1e-6, name


def lr_scaled() -> tuple[float, float, float]:
    """Residuals of lr * g: check lr-weighted sums plus residuals, and the difference from the code form."""
    rates = [0.1, 0.1, 0.01, 0.01, 0.5]
    now = [0.0]
    layout = make_layout()
    paper = Reducer(
        TopK(density=0.05),
        layout,
        Comm(),
        CompressionSettings(error_feedback="lr_scaled"),
        learning_rate=lambda: now[0],
    )
    code = Reducer(TopK(density=0.05), layout, Comm())
    account = ConservationCheck(paper.residual)
    differences = []
    for number, rate in enumerate(rates):
        now[0] = rate
        gradient = make_gradient(layout, number, rank())
        mean = paper.reduce(gradient)
        account.add(rate * gradient, rate * mean.double() * paper.comm.world_size)
        differences.append(float((mean - code.reduce(gradient)).abs().max()))
    return account.error(paper.residual, paper.comm), differences[1], differences[2]


def test_error_feedback_forms_differ_only_when_the_learning_rate_changes() -> None:
    error, before, after = run(2, lr_scaled)[0]
    assert error < 1e-5
    assert before < 1e-7 < after


def traffic_of_steps(compressor: Compressor, settings: CompressionSettings) -> list[tuple[int, ...]]:
    reducer = build_reducer(compressor, settings)
    results = []
    for number in range(3):
        reducer.reduce(make_gradient(reducer.layout, number, rank()))
        reducer.resolve_deferred()
        traffic = reducer.traffic
        results.append(
            (traffic.counts, traffic.plan, traffic.indices, traffic.values, traffic.padding, traffic.num_selected)
        )
    return results


def test_every_byte_is_counted() -> None:
    """By hand, for 4 ranks: 3 peers' selections padded to the longest, and a ring all-reduce of the values."""
    elements = make_layout().numel
    number = int(0.05 * elements)
    for counts, plan, indices, values, padding, chosen in run(
        4, traffic_of_steps, TopK(density=0.05), CompressionSettings()
    )[0]:
        assert counts == 3 * (4 + 4 + 4)  # the flag, the count, and the count of the only block
        assert plan == 0
        assert indices == 3 * number * 2  # 16 bits inside the block
        assert values == 2 * 3 * 4 * chosen // 4
        assert padding == 0
        assert number < chosen < 4 * number
    for counts, _, indices, values, _, chosen in run(
        4, traffic_of_steps, RandomK(density=0.05), CompressionSettings(wire_dtype="int8")
    )[0]:
        part = -(-number // 4)
        assert (counts, indices, chosen) == (3 * 8, 0, number)
        assert values == 3 * (part + 4 * -(-part // 256)) * 2  # to the reducing rank, and back
    rows = run(4, traffic_of_steps, MiCRO(density=0.05), CompressionSettings())
    for step in range(3):
        others = sum(rows[other][step][2] - rows[other][step][4] for other in range(4))  # without padding
        assert others == 3 * 2 * rows[0][step][5]


def test_signs_take_one_bit_each() -> None:
    elements = make_layout().numel
    for _, _, _, values, padding, _ in run(2, traffic_of_steps, EFSign(), CompressionSettings())[0]:
        assert values == 4 + 6 * 4 + -(-elements // 8)
        assert padding == 0


def with_fixed_capacity(compressor: Compressor, slots: float, steps: int) -> tuple[float, list[int], list[int], bool]:
    layout = make_layout()
    fixed, free = build_reducer(compressor, CompressionSettings(fixed_capacity=slots)), build_reducer(compressor)
    account = ConservationCheck(fixed.residual)
    sizes, max_counts, same = [], [], True
    for number in range(steps):
        gradient = make_gradient(layout, number, rank())
        mean = fixed.reduce(gradient)
        same &= torch.allclose(mean, free.reduce(gradient), rtol=1e-5, atol=1e-7)
        account.add(gradient, mean.double() * fixed.comm.world_size)
        fixed.resolve_deferred()
        sizes.append(fixed.traffic.bytes)
        max_counts.append(fixed.traffic.num_selected)
    return account.error(fixed.residual, fixed.comm), sizes, max_counts, same


def test_fixed_capacity_gives_the_same_result_until_it_overflows() -> None:
    for compressor in (TopK(density=0.02), MiCRO(density=0.02), ExDyna(density=0.02)):
        error, sizes, _, same = run(3, with_fixed_capacity, compressor, 3.0, 20)[0]
        assert error < 1e-5
        assert same, compressor.name
        assert len(set(sizes[1:])) == 1


def test_overflow_beyond_fixed_capacity_stays_in_the_residual() -> None:
    error, _, chosen, same = run(3, with_fixed_capacity, HardThreshold(density=0.01, threshold=0.01), 1.0, 20)[0]
    assert error < 1e-5
    assert not same
    assert max(chosen) <= 3 * int(0.01 * make_layout().numel)


def spoil(compressor: Compressor, settings: CompressionSettings, value: float) -> None:
    reducer = build_reducer(compressor, settings)
    for number in range(3):
        gradient = make_gradient(reducer.layout, number, rank())
        if number == 1 and rank() == 1:
            gradient[5] = value
        reducer.reduce(gradient)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize(
    ("compressor", "settings"),
    [
        (ExDyna(), CompressionSettings()),
        (DEFT(), CompressionSettings()),
        (AdaComp(), CompressionSettings()),
        (MiCRO(), CompressionSettings(fixed_capacity=2.0)),
    ],
    ids=["exdyna", "deft", "adacomp", "slots"],
)
def test_nonfinite_gradients_raise_one_sentence_on_every_rank(
    compressor: Compressor, settings: CompressionSettings, value: float
) -> None:
    for result, error in outcomes(3, spoil, compressor, settings, value):
        assert result is None
        assert error.startswith("DataError: the gradients of step")
        assert "not finite on at least one rank" in error


def huge() -> float:
    reducer = build_reducer(TopK(density=1.0))
    return float(reducer.reduce(torch.full((reducer.layout.numel,), 1e36)).max())


def test_an_overflowing_sum_is_not_a_nonfinite_gradient() -> None:
    assert run(1, huge)[0] == pytest.approx(1e36, rel=1e-6)


def different(what: str) -> None:
    shapes = {"a": (3, 4 + (rank() if what == "model" else 0))}
    density = 0.1 + (rank() if what == "settings" else 0) * 0.1
    build_reducer(TopK(density=density), layout=make_layout(shapes))


@pytest.mark.parametrize(("what", "named"), [("model", "model"), ("settings", "gradient compression")])
def test_differing_ranks_raise_on_every_rank(what: str, named: str) -> None:
    for _, error in outcomes(3, different, what):
        assert error.startswith(f"ConfigError: the ranks do not have the same {named}")


@pytest.mark.parametrize(
    ("compressor", "settings", "sentence"),
    [
        (TopK(), {"error_feedback": "lr_scaled"}, "pass the optimizer too"),
        (EFSign(), {"wire_dtype": "int8"}, "leave wire_dtype at float32"),
        (CLTk(), {"fixed_capacity": 2.0}, "does not support a fixed capacity"),
        (TopK(), {"fixed_capacity": 2.0, "wire_dtype": "int8"}, "select the same elements"),
        (MiCRO(), {"fixed_capacity": 1.0}, "needs at least 1.2"),
        (TopK(), {"fixed_capacity": 0.5}, "must be at least 1, or None"),
        (TopK(), {"residual_momentum": 0.0}, "above 0 and at most 1"),
        (TopK(), {"wire_dtype": "int4"}, "one of float32, float16, bfloat16, int8"),
    ],
)
def test_incompatible_settings_raise_one_sentence(
    compressor: Compressor, settings: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        build_reducer(compressor, CompressionSettings(**settings))
