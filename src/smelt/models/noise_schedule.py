"""The noise schedule of a diffusion model: how images become noise (DDPM), and the steps back (DDPM and DDIM).

`q(x_t | x_0) = N(sqrt(abar_t) x_0, (1 - abar_t) I)` with `abar_t = prod_s (1 - beta_s)`, t from 0 to T - 1.

Papers: Ho et al., 2020 (DDPM, arXiv 2006.11239); Song et al., 2021 (DDIM, arXiv 2010.02502); Nichol and Dhariwal, 2021
(the cosine schedule, arXiv 2102.09672).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

SCHEDULES = ("cosine", "linear")
_COSINE_OFFSET = 0.008  # keeps the first betas above zero
_MAX_BETA = 0.999
_LINEAR_BETAS = (1e-4, 2e-2)  # of 1000 steps; with fewer, betas grow so that the last images are noise, too


@dataclass(frozen=True)
class NoiseSchedule:
    """The share of the image that is left after each step: `alpha_bar` [steps], from nearly 1 to nearly 0."""

    alpha_bar: Tensor

    @classmethod
    def named(cls, name: str, steps: int) -> NoiseSchedule:
        """Return a schedule by its name."""
        if name == "linear":
            low, high = (beta * 1000 / steps for beta in _LINEAR_BETAS)
            betas = torch.linspace(low, high, steps, dtype=torch.float64).clamp(max=_MAX_BETA)
        else:
            times = torch.arange(steps + 1, dtype=torch.float64) / steps
            curve = ((times + _COSINE_OFFSET) / (1 + _COSINE_OFFSET) * math.pi / 2).cos().square()
            betas = (1 - curve[1:] / curve[:-1]).clamp(max=_MAX_BETA)
        return cls((1 - betas).cumprod(0).float())

    def add_noise(self, images: Tensor, noise: Tensor, steps: Tensor) -> Tensor:
        """Return x_t of images x_0 [batch, ...]; steps is t of each image, [batch]."""
        alpha_bar = self._at(steps, images)
        return alpha_bar.sqrt() * images + (1 - alpha_bar).sqrt() * noise

    def predict_images(self, noisy: Tensor, noise: Tensor, steps: Tensor) -> Tensor:
        """Return x_0, given x_t and the noise that is in it."""
        alpha_bar = self._at(steps, noisy)
        return (noisy - (1 - alpha_bar).sqrt() * noise) / alpha_bar.sqrt()

    def posterior(self, images: Tensor, noisy: Tensor, steps: Tensor, previous: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and variance of q(x_s | x_t, x_0) for an earlier step s, `previous`; -1 is the image itself."""
        alpha_bar, before = self._at(steps, noisy), self._at(previous, noisy)
        alpha = alpha_bar / before  # of all steps from s to t together
        mean = before.sqrt() * (1 - alpha) * images + alpha.sqrt() * (1 - before) * noisy
        return mean / (1 - alpha_bar), (1 - alpha) * (1 - before) / (1 - alpha_bar)

    def step(
        self, images: Tensor, noisy: Tensor, steps: Tensor, previous: Tensor, eta: float, noise: Tensor | None = None
    ) -> Tensor:
        """Return x_s for an earlier step s, given x_t and the predicted x_0.

        With eta = 0 (DDIM) the step is deterministic; eta = 1 draws from the posterior (DDPM) by `noise`.
        """
        alpha_bar, before = self._at(steps, noisy), self._at(previous, noisy)
        _, variance = self.posterior(images, noisy, steps, previous)
        deviation = eta * variance.sqrt()
        direction = (noisy - alpha_bar.sqrt() * images) / (1 - alpha_bar).sqrt()
        result = before.sqrt() * images + (1 - before - deviation.square()).clamp(min=0).sqrt() * direction
        return result if noise is None else result + deviation * noise

    def _at(self, steps: Tensor, like: Tensor) -> Tensor:
        """Return abar of the steps, [batch, 1, ...]; that of step -1 is 1."""
        alpha_bar = self.alpha_bar.to(like.device)
        values = torch.where(steps < 0, 1.0, alpha_bar[steps.clamp(min=0)])
        return values.view(-1, *[1] * (like.dim() - 1))
