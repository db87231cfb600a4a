"""Training of tables: better than uniform segments, on recorded inputs, and what it refuses."""

from __future__ import annotations

import pytest
import torch

from smelt.compression.calibration.nn_lut import FUNCTIONS, TableFunction, TableTraining, train_table
from smelt.errors import ConfigError
from smelt.numerics.piecewise_linear import PiecewiseLinear

QUICK = TableTraining(steps=200, samples=20_000)


@pytest.mark.parametrize(("name", "factor"), [("gelu", 1.7), ("silu", 1.7), ("tanh", 1.7), ("exp", 10)])
def test_learned_breakpoints_beat_uniform_segments(name: str, factor: float) -> None:
    """Breakpoints that stay outside of the range, or a network folded back to the wrong range, lose to uniform ones."""
    target = FUNCTIONS[name]
    x = torch.linspace(target.low, target.high, 10_001, dtype=torch.float64)
    table = train_table(target, QUICK)
    uniform = PiecewiseLinear.uniform(target.function, target.low, target.high, 16)
    error, uniform_error = ((each(x) - target.function(x)).abs().mean() for each in (table, uniform))
    assert table.entries == 16
    assert factor * error < uniform_error


def test_a_range_far_from_zero_is_normalized() -> None:
    """Breakpoints start within (-1, 1) of the normalized range; around another center they would be dead entries."""
    target = TableFunction(lambda x: torch.tanh(x - 100), 95.0, 105.0)
    x = torch.linspace(95, 105, 10_001, dtype=torch.float64)
    uniform = PiecewiseLinear.uniform(target.function, 95.0, 105.0, 16)
    error, uniform_error = (
        (each(x) - target.function(x)).abs().mean() for each in (train_table(target, QUICK), uniform)
    )
    assert 1.7 * error < uniform_error


def test_ends_are_pinned() -> None:
    far = torch.tensor([-1e4, 1e4], dtype=torch.float64)
    assert train_table(FUNCTIONS["silu"], QUICK)(far).tolist() == [0.0, 1e4]
    assert train_table(FUNCTIONS["tanh"], QUICK)(far).tolist() == [-1.0, 1.0]


def test_recorded_inputs_move_the_entries_to_where_they_are() -> None:
    """Inputs around -0.5 get a better table than uniform ones give, and the range elsewhere is not lost."""
    target = FUNCTIONS["gelu"]
    recorded = 0.3 * torch.randn(40, 500, generator=torch.Generator().manual_seed(0)) - 0.5
    everywhere = torch.linspace(-5, 5, 10_001, dtype=torch.float64)
    calibrated, default = train_table(target, QUICK, recorded), train_table(target, QUICK)
    x = recorded.double().flatten()
    assert (calibrated(x) - target.function(x)).abs().mean() < 0.5 * (default(x) - target.function(x)).abs().mean()
    assert float((calibrated(everywhere) - target.function(everywhere)).abs().max()) < 0.2


def test_inputs_beyond_the_range_extend_it() -> None:
    """SiLU inputs of -77 to 80 occur in language models; a table of (-10, 10) must cover them."""
    recorded = torch.linspace(-77, 80, 10_000)
    x = recorded.double()
    table = train_table(FUNCTIONS["silu"], QUICK, recorded)
    assert float((table(x) - torch.nn.functional.silu(x)).abs().max()) < 0.5


def test_training_is_deterministic() -> None:
    first, second = (train_table(FUNCTIONS["exp"], QUICK, seed=3) for _ in range(2))
    assert torch.equal(first.breakpoints, second.breakpoints)
    assert torch.equal(first.slopes, second.slopes)


def test_refuses_inputs_and_counts_that_cannot_be_trained_on() -> None:
    for inputs in (torch.empty(0), torch.tensor([1.0, float("inf")])):
        with pytest.raises(ConfigError, match="finite"):
            train_table(FUNCTIONS["gelu"], QUICK, inputs)
    with pytest.raises(ConfigError, match="at least 2 entries"):
        TableTraining(entries=1)
    with pytest.raises(ConfigError, match="at least 1"):
        TableTraining(steps=0)
