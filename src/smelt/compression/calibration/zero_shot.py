"""Zero-shot calibration: synthesize inputs whose statistics inside a network match those of its batch norms (Q-ASR).

The running statistics of batch norms describe what the training data looked like inside the network. Inputs that are
optimized until they give the same statistics can calibrate activation ranges, if the data itself is private.

Paper: Kim et al., "Integer-only Zero-shot Quantization for Efficient Speech Recognition", ICASSP 2022.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from smelt.compression.calibration.gradients import frozen
from smelt.errors import ModelError
from smelt.models.batch_norm import batch_norms
from smelt.progress import NullProgress, Progress

Batch = dict[str, Tensor]

_EPSILON = 1e-6  # below the square root of variances
_START = 0.3  # the optimization starts from uniform values up to this magnitude


@dataclass(frozen=True)
class ZeroShotSettings:
    """How inputs are synthesized; the defaults are those of the paper's code."""

    iterations: int = 200
    lr: float = 0.05  # of Adam; larger ones diverge, since the loss divides by the variance of the inputs
    patience: int = 25  # iterations without progress before the learning rate is divided by 10
    min_lr: float = 1e-4


def synthesize_inputs(
    network: PreTrainedModel,
    shape: Sequence[int],
    *,
    samples: int,
    batch_size: int,
    seed: int,
    settings: ZeroShotSettings = ZeroShotSettings(),  # noqa: B008
    progress: Progress = NullProgress(),  # noqa: B008
) -> list[Batch]:
    """Return batches of inputs of `shape` (without the batch axis), each optimized by itself, without labels.

    The shape of a spectrogram is [bands, frames], with as many frames as the recordings have.
    """
    if not batch_norms(network):
        raise ModelError(
            "calibration without data matches the statistics of batch norms, and this network has none; name data with "
            "--data."
        )
    generator = torch.Generator().manual_seed(seed)
    device = next(network.parameters()).device
    batches = []
    starts = range(0, samples, batch_size)
    for start in progress.track(starts, "synthetic inputs"):
        size = (min(batch_size, samples - start), *shape)
        values = _START * (2 * torch.rand(size, generator=generator) - 1)
        batches.append({network.main_input_name: _optimize(network, values.to(device), settings).cpu()})
    return batches


def noise_inputs(network: PreTrainedModel, shape: Sequence[int], kind: str, *, samples: int, seed: int) -> list[Batch]:
    """Return one batch of noise to compare with: `gaussian` of unit variance, or `uniform`, the start of synthesis."""
    generator = torch.Generator().manual_seed(seed)
    if kind == "gaussian":
        return [{network.main_input_name: torch.randn(samples, *shape, generator=generator)}]
    return [{network.main_input_name: _START * (2 * torch.rand(samples, *shape, generator=generator) - 1)}]


def statistics_loss(network: PreTrainedModel, inputs: Batch) -> Tensor:
    """Return the divergence KL(N(mu0, sd0) || N(mu, sd)) of the inputs of all batch norms: summed over norms, averaged
    over channels; (mu0, sd0) are the running statistics, (mu, sd) those of the batch."""
    losses: list[Tensor] = []
    with _observed(network, losses):
        network(**inputs)
    return torch.stack(losses).sum()


def _optimize(network: PreTrainedModel, values: Tensor, settings: ZeroShotSettings) -> Tensor:
    values = values.requires_grad_()
    optimizer = torch.optim.Adam([values], lr=settings.lr)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=settings.patience, min_lr=settings.min_lr)
    with frozen(network), torch.enable_grad():
        for _ in range(settings.iterations):
            optimizer.zero_grad()
            loss = statistics_loss(network, {network.main_input_name: values})
            loss.backward()
            optimizer.step()
            schedule.step(loss.item())
    return values.detach()


@contextmanager
def _observed(network: nn.Module, losses: list[Tensor]) -> Iterator[None]:
    """Append the divergence of the inputs of every batch norm that runs."""

    def before(norm: nn.Module, args: tuple[Tensor, ...]) -> None:
        assert isinstance(norm.running_mean, Tensor) and isinstance(norm.running_var, Tensor)
        axes = [axis for axis in range(args[0].dim()) if axis != 1]
        mean, variance = args[0].mean(axes), args[0].var(axes, correction=0) + _EPSILON
        wanted = norm.running_var + _EPSILON
        ratio = (wanted + (norm.running_mean - mean).square()) / variance
        losses.append((0.5 * (variance / wanted).log() - 0.5 * (1 - ratio)).mean())

    handles = [norm.register_forward_pre_hook(before) for norm in batch_norms(network).values()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
