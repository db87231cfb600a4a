"""The link model between real ranks: the fitted line matches the true speed and is equal on all ranks."""

from __future__ import annotations

import json
from typing import Any

import pytest

from smelt.errors import ConfigError
from smelt.train.gradients.autotune.link import Link, fit_alpha_beta, measure_link
from smelt.train.gradients.autotune.timed_comm import COLLECTIVES
from smelt.train.gradients.comm import Comm
from tests.train.parallel import run
from tests.train.simulated_link import ALPHA, BANDWIDTH, COMPUTE, simulate_link


def test_a_known_line_is_recovered() -> None:
    sizes = [1_000, 30_000, 1_000_000, 16_000_000]
    alpha, beta = fit_alpha_beta(sizes, [1e-4 + 2e-9 * size for size in sizes])
    assert alpha == pytest.approx(1e-4) and beta == pytest.approx(2e-9)


def test_an_error_in_the_largest_message_does_not_spoil_alpha() -> None:
    """Absolute least squares would give alpha = -0.7 ms."""
    sizes = [1_000, 30_000, 1_000_000, 16_000_000]
    seconds = [1e-4 + 2e-9 * size for size in sizes]
    seconds[-1] *= 1.3
    alpha, _ = fit_alpha_beta(sizes, seconds)
    assert alpha == pytest.approx(1e-4, rel=0.1)


@pytest.mark.parametrize(
    ("seconds", "alpha", "beta"), [([3e-3, 2e-3, 1e-3], 0.00135, 0.0), ([1e-6, 1e-3, 9e-3], 0.0, 1.5e-9)]
)
def test_alpha_and_beta_are_never_negative(seconds: list[float], alpha: float, beta: float) -> None:
    result = fit_alpha_beta([1_000, 1_000_000, 4_000_000], seconds)
    assert result == (pytest.approx(alpha, rel=0.02), pytest.approx(beta, rel=0.5)) and min(result) == 0


def measured() -> dict[str, Any]:
    simulate_link()
    link = measure_link(Comm(), repeats=3)
    assert isinstance(link, Link) and link.time("broadcast", 0) == link.collectives["broadcast"].alpha
    return link.to_json()


def test_the_speed_of_a_known_link_is_measured() -> None:
    links = run(2, measured)
    assert links[0] == links[1]
    assert json.loads(json.dumps(links[0]))["backend"] == "gloo"
    assert set(links[0]["collectives"]) == set(COLLECTIVES) and links[0]["world_size"] == 2
    for name, line in links[0]["collectives"].items():
        expected = {"alpha": ALPHA + COMPUTE, "beta": 1 / BANDWIDTH}
        assert {key: line[key] for key in expected} == pytest.approx(expected, rel=1e-3), name
        assert len(line["sizes"]) >= 3 and line["seconds"][0] < line["seconds"][-1]


def test_a_single_rank_has_no_link() -> None:
    with pytest.raises(ConfigError, match="start several with torchrun"):
        measure_link(Comm())
