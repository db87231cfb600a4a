"""FlexRound and LRQ: initialization, gradients, stored weights equal trained ones, and accuracy."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from smelt.compression.base import MethodContext
from smelt.compression.checkpoint import Checkpoint
from smelt.compression.quantization.flexround import Divided, FlexRound, Full, LowRank
from smelt.compression.quantization.rounding import round_to_nearest
from smelt.compression.quantization.rtn import RoundToNearest
from smelt.errors import RecipeError
from smelt.models.model import Model
from smelt.models.quantization_scheme import QuantizationScheme
from smelt.models.quantized import QuantizedLinear
from smelt.numerics.format import PER_TENSOR
from smelt.numerics.integer import Integer
from tests.tiny import BUILDS, inputs
from tests.trained import character_batches, character_model, divergence

FORMATS = [
    Integer(16, "float16", 3, False),
    Integer(-1, "float16", 4, True),
    Integer(PER_TENSOR, "float16", 4, False),
    Integer(20, "float16", 2, False),  # the last group is shorter
]


def weights(rows: int = 24, columns: int = 48) -> torch.Tensor:
    matrix = torch.randn(rows, columns) / 8
    matrix[0], matrix[1] = 0, matrix[1].abs()  # a row of zeros, and one without negative values
    return matrix


def divided(matrix: torch.Tensor, number_format: Integer, rank: int | None, search: bool = False) -> Divided:
    divisors = Full(matrix) if rank is None else LowRank(matrix, rank, torch.Generator().manual_seed(0))
    return Divided(matrix, number_format, divisors, search)


@pytest.mark.parametrize("rank", [None, 3])
@pytest.mark.parametrize("search", [False, True])
@pytest.mark.parametrize("number_format", FORMATS, ids=str)
def test_before_training_it_is_round_to_nearest(number_format: Integer, search: bool, rank: int | None) -> None:
    matrix = weights()
    assert torch.equal(
        divided(matrix, number_format, rank, search)(), round_to_nearest(matrix, number_format, search).dequantize()
    )


@pytest.mark.parametrize("rank", [None, 3])
@pytest.mark.parametrize("number_format", FORMATS, ids=str)
def test_the_packed_layer_is_the_trained_weight_bit_for_bit(number_format: Integer, rank: int | None) -> None:
    quantizer = divided(weights(), number_format, rank)
    optimizer = torch.optim.Adam(quantizer.parameters(), lr=0.1)
    before = quantizer().detach()
    for _ in range(5):
        optimizer.zero_grad()
        (quantizer() * torch.randn(24, 48)).sum().backward()
        optimizer.step()
    trained = quantizer().detach()
    layer = QuantizedLinear.from_quantized(
        quantizer.result(), QuantizationScheme(number_format), bias=None, dtype=torch.float32
    )
    assert not torch.equal(trained, before)
    assert torch.equal(layer.weight, trained)


def test_gradients_pass_through_rounding_and_stop_at_the_clipping_range() -> None:
    """W' = s round(W / (s e^D)), straight-through: dW'/dD = -W, and zero for a clipped weight."""
    matrix = torch.tensor([[-0.5, -0.2, 0.3, 1.0]])
    quantizer = divided(matrix, Integer(-1, "float32", 4, False), None)
    with torch.no_grad():
        quantizer.step -= 0.1  # a narrower range: the ends are clipped
    quantizer().sum().backward()
    gradient = quantizer.divisors.matrix.grad  # type: ignore[union-attr]
    assert isinstance(gradient, torch.Tensor)
    assert torch.allclose(gradient[0], torch.tensor([0.0, 0.2, -0.3, 0.0]), atol=1e-6)
    assert quantizer.row.grad is not None and torch.allclose(quantizer.row.grad, gradient.sum(1, keepdim=True))


def test_low_rank_divisors_are_used_where_they_are_smaller() -> None:
    method = FlexRound(bits=4, rank=4)
    generator = torch.Generator().manual_seed(0)
    wide, thin = (method.quantizer(torch.randn(rows, 64), generator) for rows in (64, 4))
    assert isinstance(wide.divisors, LowRank) and isinstance(thin.divisors, Full)
    assert sum(p.numel() for p in wide.divisors.parameters()) == 4 * (64 + 64) + 64 + 64


@pytest.fixture(scope="module")
def at_two_bits() -> float:
    model = character_model()
    RoundToNearest(bits=2, group_size=16).apply(model, MethodContext())
    return divergence(model).kl


@pytest.mark.parametrize("rank", [None, 4])
def test_it_beats_round_to_nearest(rank: int | None, at_two_bits: float) -> None:
    model = character_model()
    FlexRound(bits=2, group_size=16, iterations=50, lr=1e-2, rank=rank).apply(
        model, MethodContext(batches=character_batches())
    )
    assert divergence(model).kl < 0.4 * at_two_bits


def test_the_same_seed_is_bit_identical(tmp_path: Path) -> None:
    """The seed sets the batch order and LRQ's random matrix, also in a resumed run."""

    def run(seed: int) -> dict[str, torch.Tensor]:
        model = Model(BUILDS["llama"]())
        batches, checkpoint = [inputs("llama", seed=number) for number in range(4)], Checkpoint(tmp_path / str(seed))
        FlexRound(bits=3, iterations=6, lr=0.03, rank=2).apply(
            model, MethodContext(batches=batches, seed=seed, checkpoint=checkpoint)
        )
        return dict(model.network.state_dict())

    first, other = run(1), run(2)
    for left in (tmp_path / "1").glob("block-[12].*"):
        left.unlink()
    repeated = run(1)
    assert all(torch.equal(first[name], repeated[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


def test_the_learning_rate_follows_a_cosine_to_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = []
    step = torch.optim.Adam.step

    def noted(self: torch.optim.Adam) -> None:
        rates.append(self.param_groups[0]["lr"])
        step(self)

    monkeypatch.setattr(torch.optim.Adam, "step", noted)
    model, batches = Model(BUILDS["llama"]()), [inputs("llama")]
    FlexRound(bits=4, iterations=4, lr=0.01).apply(model, MethodContext(batches=batches))
    assert rates[:4] == pytest.approx([0.01, 0.00853553, 0.005, 0.00146447], rel=1e-4) and rates[4] == 0.01


@pytest.mark.parametrize("settings", [{"rank": 0}, {"iterations": -1}, {"lr": 0.0}, {"format": "nf4"}])
def test_invalid_values_are_refused(settings: dict[str, object]) -> None:
    with pytest.raises(RecipeError):
        FlexRound(**settings)  # type: ignore[arg-type]
