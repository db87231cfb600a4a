"""Signal-to-noise ratios of the method cards: our formats reproduce the figures of a NumPy emulation."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from smelt.kernels.hadamard import hadamard_transform
from smelt.numerics import get_format
from smelt.numerics.error import signal_to_noise, underflow_share

COUNT, ROW = 1 << 21, 4096
KEYS, SPREAD = 128, 2.0  # of the softmax rows


def _rows(values: np.ndarray) -> Tensor:
    return torch.from_numpy(values).float().reshape(-1, ROW)


def _silu(values: np.ndarray) -> np.ndarray:
    return values / (1 + np.exp(-values))


def _softmax(values: np.ndarray) -> np.ndarray:
    powers = np.exp(values - values.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


DRAWS: dict[str, Callable[[np.random.Generator], np.ndarray]] = {
    "normal": lambda draw: draw.standard_normal(COUNT),
    "laplace": lambda draw: draw.laplace(size=COUNT),
    "student-5": lambda draw: draw.standard_t(5, size=COUNT),
    "silu": lambda draw: _silu(1.5 * draw.standard_normal(COUNT)),
    "softmax": lambda draw: _softmax(SPREAD * draw.standard_normal((2 * COUNT // KEYS, KEYS))),
}

CARD = {  # in the order of DRAWS
    "mxint4": (17.56, 16.01, 15.93, 14.73, 17.89),
    "mxfp4": (18.79, 17.93, 17.98, 17.55, 16.88),
    "mxfp4-up": (19.03, 18.14, 18.14, 17.34, 17.88),
    "fp4/32@e5m2": (19.74, 19.48, 19.53, 19.14, 20.99),
    "amxfp4": (20.18, 20.24, 20.29, 20.15, 20.99),
    "amxfp4@e4m3": (20.43, 20.63, 20.68, 20.47, 21.93),
    "nvfp4": (20.44, 20.66, 20.71, 20.56, 24.16),
    "int4/32": (20.26, 18.35, 18.24, 16.72, 20.13),
    "int4-asym/32": (21.85, 20.52, 20.64, 23.79, 24.85),
}


@pytest.fixture(scope="module")
def samples() -> dict[str, Tensor]:
    generator = np.random.default_rng(0)
    return {name: _rows(draw(generator)) for name, draw in DRAWS.items()}


@pytest.mark.parametrize("name", CARD)
@pytest.mark.parametrize("column", range(len(DRAWS)), ids=DRAWS)
def test_the_table_of_the_amxfp4_card(name: str, column: int, samples: dict[str, Tensor]) -> None:
    """The card does not say how its softmax rows were drawn. Of rows of 32 to 2048 keys with normal logits of standard
    deviation 0.5 to 8, those of 128 keys and 2 fit all nine figures; the next best miss one by 0.4 dB. They vary so
    much that twice the card's sample is taken.
    """
    x = samples[list(DRAWS)[column]]
    assert signal_to_noise(x, get_format(name).fake_quantize(x)) == pytest.approx(CARD[name][column], abs=0.05)


def test_two_powers_of_two_lose_to_one_fp8_scale(samples: dict[str, Tensor]) -> None:
    x = samples["normal"]
    assert signal_to_noise(x, get_format("amxfp4@e8m0").fake_quantize(x)) == pytest.approx(18.59, abs=0.05)


@pytest.mark.parametrize(
    ("draw", "integer", "denormal"),
    [("normal", 17.09, 17.54), ("laplace", 13.09, 15.24), ("student-5", 10.83, 13.81)],
)
def test_dint_on_rows(draw: str, integer: float, denormal: float, samples: dict[str, Tensor]) -> None:
    x = samples[draw]
    assert signal_to_noise(x, get_format("int4-asym").fake_quantize(x)) == pytest.approx(integer, abs=0.05)
    assert signal_to_noise(x, get_format("dint4").fake_quantize(x)) == pytest.approx(denormal, abs=0.05)


def test_dint_does_not_win_on_small_groups_of_normal_values(samples: dict[str, Tensor]) -> None:
    x = samples["normal"]
    assert signal_to_noise(x, get_format("dint4/128").fake_quantize(x)) == pytest.approx(19.90, abs=0.05)


@pytest.mark.parametrize(
    ("draw", "name", "lost", "share"),
    [
        ("laplace", "int4-asym", 0.422, 0.384),
        ("laplace", "dint4", 0.271, 0.143),
        ("student-5", "int4-asym", 0.439, None),
        ("student-5", "dint4", 0.267, None),
    ],
)
def test_underflow(draw: str, name: str, lost: float, share: float | None, samples: dict[str, Tensor]) -> None:
    x = samples[draw]
    result = underflow_share(x, get_format(name).fake_quantize(x))
    assert result[0] == pytest.approx(lost, abs=0.001)
    assert share is None or result[1] == pytest.approx(share, abs=0.001)


def test_underflow_counts_only_what_was_not_zero() -> None:
    x, rounded = torch.tensor([0.0, 0.0, 1.0, 2.0]), torch.tensor([0.0, 0.0, 0.0, 4.0])
    assert underflow_share(x, rounded) == (0.5, 0.2)
    assert underflow_share(x, x) == (0.0, 0.0)


@pytest.mark.parametrize(("group", "expected"), [("32", 21.85), ("128", 19.95), ("row", 17.09)])
def test_round_to_nearest(group: str, expected: float, samples: dict[str, Tensor]) -> None:
    x = samples["normal"]
    assert signal_to_noise(x, get_format(f"int4-asym/{group}").fake_quantize(x)) == pytest.approx(expected, abs=0.05)


@pytest.mark.parametrize(("draw", "expected"), [("normal", 20.73), ("laplace", 19.69), ("student-5", 19.60)])
def test_normal_float(draw: str, expected: float, samples: dict[str, Tensor]) -> None:
    x = samples[draw]
    assert signal_to_noise(x, get_format("nf4").fake_quantize(x)) == pytest.approx(expected, abs=0.05)


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [("int4", 11.0, 19.0), ("mxfp4", 16.1, 19.0), ("nvfp4", 22.6, 20.1), ("amxfp4", 21.3, 19.8)],
)
def test_rotation_helps_coarse_scales_and_hurts_fine_ones(name: str, before: float, after: float) -> None:
    """Tokens with 8 of 1024 channels 40 times as large. The card does not say which channels: with random ones the
    figures vary by some tenths, so the mean over ten draws is compared, with a looser tolerance than above.
    """
    draw, result = np.random.default_rng(0), []
    for _ in range(10):
        x = draw.standard_normal((128, 1024))
        x[:, draw.choice(1024, 8, replace=False)] *= 40
        plain = torch.from_numpy(x).float()
        pair = [signal_to_noise(t, get_format(name).fake_quantize(t)) for t in (plain, hadamard_transform(plain))]
        result.append(pair)
    means = np.mean(result, axis=0)
    assert means == pytest.approx([before, after], abs=0.3)
    assert (means[1] > means[0]) == (after > before)
