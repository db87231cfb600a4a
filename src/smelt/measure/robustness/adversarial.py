"""Adversarial inputs in an L-infinity ball: FGSM (Goodfellow et al., 2015) and PGD (Madry et al., ICLR 2018).

The inputs are continuous: the pixels of an image, or the embeddings of a text's tokens. A quantized model is attacked
through straight-through gradients and by transfer from its dense model, and the stronger attack counts: rounding hides
gradients, which is no defense.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from smelt.errors import ConfigError

Logits = Callable[[Tensor], Tensor]  # from perturbed inputs [batch, ...] to logits [batch, classes]


@dataclass(frozen=True)
class AttackSettings:
    """The ball and the steps of an attack. `low` and `high` bound valid inputs (0 and 1 for pixels)."""

    eps: float
    steps: int = 10
    step_size: float | None = None  # default: eps / 4, as 2/255 is of 8/255
    restarts: int = 1
    low: float | None = None
    high: float | None = None

    def __post_init__(self) -> None:
        if self.eps < 0 or self.steps < 1 or self.restarts < 1:
            raise ConfigError("an attack needs eps of 0 or more, and at least one step and one restart.")

    def project(self, x: Tensor, center: Tensor) -> Tensor:
        """Return the nearest valid input in the ball around `center`."""
        x = torch.minimum(torch.maximum(x, center - self.eps), center + self.eps)
        return x if self.low is None and self.high is None else x.clamp(self.low, self.high)


@dataclass(frozen=True)
class RobustAccuracy:
    """Accuracy under attack at one eps. `robust` counts an item only if it survives every attack."""

    eps: float
    clean: float
    fgsm: float
    pgd: float
    transfer: float | None  # inputs made on the dense model
    robust: float
    items: int

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))


def fgsm(logits: Logits, x: Tensor, labels: Tensor, settings: AttackSettings, mask: Tensor | None = None) -> Tensor:
    """Return the inputs one step of size eps along the sign of the gradient; `mask` selects what may change."""
    return settings.project(x + settings.eps * _direction(logits, x, labels, mask)[0], x).detach()


def pgd(
    logits: Logits,
    x: Tensor,
    labels: Tensor,
    settings: AttackSettings,
    mask: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Return, per item, the input of largest loss among all iterates of all restarts.

    The first restart begins at the input itself, the others at uniform points of the ball.
    """
    step_size = settings.eps / 4 if settings.step_size is None else settings.step_size
    best, best_loss = x.detach().clone(), torch.full((len(x),), -torch.inf, device=x.device)
    for restart in range(settings.restarts):
        current = x.detach().clone()
        if restart:
            noise = torch.rand(x.shape, generator=generator).to(x) * 2 - 1
            current = settings.project(x + settings.eps * (noise if mask is None else noise * mask), x)
        for step in range(settings.steps + 1):
            direction, losses = _direction(logits, current, labels, mask)
            better = losses > best_loss
            best[better], best_loss = current[better], torch.maximum(best_loss, losses)
            if step < settings.steps:
                current = settings.project(current + step_size * direction, x).detach()
    return best


def robust_accuracy(
    batches: Sequence[tuple[Tensor, Tensor, Tensor | None, Logits, Logits | None]],
    settings: AttackSettings,
    *,
    seed: int = 0,
) -> RobustAccuracy:
    """Attack batches of (inputs, labels, mask, logits, logits of the dense model or None)."""
    generator = torch.Generator().manual_seed(seed)
    survived: dict[str, list[Tensor]] = {name: [] for name in ("clean", "fgsm", "pgd", "transfer")}
    for x, labels, mask, logits, dense in batches:
        attacked = {
            "clean": x,
            "fgsm": fgsm(logits, x, labels, settings, mask),
            "pgd": pgd(logits, x, labels, settings, mask, generator),
        }
        if dense is not None:
            attacked["transfer"] = pgd(dense, x, labels, settings, mask, generator)
        for name, inputs in attacked.items():
            with torch.no_grad():
                survived[name].append(_correct(logits(inputs), labels))
    correct = {name: torch.cat(parts) for name, parts in survived.items() if parts}
    accuracy = {name: float(each.double().mean()) for name, each in correct.items()}
    every = torch.stack(list(correct.values())).all(dim=0)
    return RobustAccuracy(
        eps=settings.eps,
        clean=accuracy["clean"],
        fgsm=accuracy["fgsm"],
        pgd=accuracy["pgd"],
        transfer=accuracy.get("transfer"),
        robust=float(every.double().mean()),
        items=len(every),
    )


def _direction(logits: Logits, x: Tensor, labels: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the sign of the gradient of the loss, and the loss of each item. [batch, ...], [batch]"""
    with torch.enable_grad():
        inputs = x.detach().requires_grad_(True)
        losses = cross_entropy(logits(inputs).float(), labels, reduction="none")
        (gradient,) = torch.autograd.grad(losses.sum(), inputs)
    sign = gradient.nan_to_num(0.0).sign()
    return (sign if mask is None else sign * mask), losses.detach().nan_to_num(torch.inf)


def _correct(logits: Tensor, labels: Tensor) -> Tensor:
    return (logits.argmax(dim=1) == labels) & torch.isfinite(logits).all(dim=1)
