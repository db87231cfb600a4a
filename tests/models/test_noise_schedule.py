"""The noise schedule against one-step recursions and Bayes' rule."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from smelt.models.noise_schedule import SCHEDULES, NoiseSchedule


def betas(schedule: NoiseSchedule) -> Tensor:
    alpha_bar = schedule.alpha_bar.double()
    return 1 - alpha_bar / torch.cat([torch.ones(1).double(), alpha_bar[:-1]])


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("steps", [10, 1000])
def test_images_become_noise(name: str, steps: int) -> None:
    schedule = NoiseSchedule.named(name, steps)
    assert schedule.alpha_bar.shape == (steps,) and bool((schedule.alpha_bar.diff() < 0).all())
    assert schedule.alpha_bar[0] > (0.85 if steps == 10 else 0.99) and schedule.alpha_bar[-1] < 1e-3
    assert float(betas(schedule).max()) <= 0.999 + 1e-6


def test_the_named_schedules_are_those_of_the_papers() -> None:
    linear = NoiseSchedule.named("linear", 1000)
    expected, product = [], 1.0
    for t in range(1000):
        product *= 1 - (1e-4 + (2e-2 - 1e-4) * t / 999)
        expected.append(product)
    assert torch.allclose(linear.alpha_bar, torch.tensor(expected), rtol=1e-4, atol=1e-8)
    cosine = NoiseSchedule.named("cosine", 1000)
    for t in (0, 250, 700, 900):
        f = [math.cos(((u / 1000 + 0.008) / 1.008) * math.pi / 2) ** 2 for u in (0, t + 1)]
        assert cosine.alpha_bar[t].item() == pytest.approx(f[1] / f[0], rel=1e-4)


def test_noise_is_added_as_by_one_step_after_the_other() -> None:
    """Mean factor and variance of x_t = sqrt(1 - beta) x_(t-1) + sqrt(beta) e, from x_0 on."""
    schedule = NoiseSchedule.named("cosine", 20)
    image, zero = torch.full((1, 1, 2, 2), 3.0), torch.zeros(1, 1, 2, 2)
    mean, variance = 3.0, 0.0
    for t, beta in enumerate(betas(schedule).tolist()):
        mean, variance = math.sqrt(1 - beta) * mean, (1 - beta) * variance + beta
        step = torch.tensor([t])
        assert schedule.add_noise(image, zero, step)[0, 0, 0, 0].item() == pytest.approx(mean, rel=1e-3, abs=1e-4)
        deviation = schedule.add_noise(zero, torch.ones_like(zero), step)[0, 0, 0, 0].item()
        assert deviation == pytest.approx(math.sqrt(variance), rel=1e-4)


def test_the_image_is_recovered_from_its_noise() -> None:
    torch.manual_seed(0)
    schedule, steps = NoiseSchedule.named("linear", 50), torch.tensor([0, 17, 40])
    images, noise = torch.randn(3, 2, 4, 4), torch.randn(3, 2, 4, 4)
    noisy = schedule.add_noise(images, noise, steps)
    assert torch.allclose(schedule.predict_images(noisy, noise, steps), images, atol=1e-4)


@pytest.mark.parametrize("gap", [1, 4])
def test_the_posterior_is_bayes_rule(gap: int) -> None:
    """q(x_s | x_t, x_0) is proportional to q(x_t | x_s) q(x_s | x_0), both Gaussian in x_s."""
    torch.manual_seed(0)
    schedule = NoiseSchedule.named("cosine", 30)
    for t in (gap, 12, 29):
        s = t - gap
        before, now = schedule.alpha_bar[s].double(), schedule.alpha_bar[t].double()
        alpha = now / before
        x0, xt = torch.randn(1, 1, 3, 3).double(), torch.randn(1, 1, 3, 3).double()
        precision = alpha / (1 - alpha) + 1 / (1 - before)
        mean = (alpha.sqrt() * xt / (1 - alpha) + before.sqrt() * x0 / (1 - before)) / precision
        actual_mean, variance = schedule.posterior(x0, xt, torch.tensor([t]), torch.tensor([s]))
        assert torch.allclose(actual_mean.double(), mean, atol=1e-4)
        assert variance.item() == pytest.approx(1 / precision.item(), rel=1e-3)


def test_a_step_with_eta_one_draws_from_the_posterior_and_zero_is_deterministic() -> None:
    torch.manual_seed(0)
    schedule, t, s = NoiseSchedule.named("cosine", 30), torch.tensor([13]), torch.tensor([9])
    images, noisy, fresh = (torch.randn(1, 2, 4, 4) for _ in range(3))
    mean, variance = schedule.posterior(images, noisy, t, s)
    ddpm = schedule.step(images, noisy, t, s, 1.0, fresh)
    assert torch.allclose(ddpm, mean + variance.sqrt() * fresh, atol=1e-4)
    # DDIM keeps the image and the noise in it, and changes their shares.
    noise = (noisy - schedule.alpha_bar[13].sqrt() * images) / (1 - schedule.alpha_bar[13]).sqrt()
    assert torch.allclose(schedule.step(images, noisy, t, s, 0.0), schedule.add_noise(images, noise, s), atol=1e-5)


def test_the_last_step_returns_the_predicted_image() -> None:
    schedule, images, noisy = NoiseSchedule.named("linear", 10), torch.randn(2, 1, 3, 3), torch.randn(2, 1, 3, 3)
    end = torch.tensor([-1, -1])
    for eta in (0.0, 1.0):
        result = schedule.step(images, noisy, torch.tensor([0, 5]), end, eta, torch.randn(2, 1, 3, 3))
        assert torch.allclose(result, images, atol=1e-5)
