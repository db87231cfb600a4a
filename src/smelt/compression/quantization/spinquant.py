"""SpinQuant: learn the rotations of residual stream and values by Cayley SGD (Liu et al., 2025).

Rotations start as random Hadamard matrices. The loss is the network's own, with quantized inputs of linear layers and
unquantized weights (they are quantized afterwards). The weights need no rotation for that: with unquantized weights,
quantizing x R and rotating the result back by R^T is equivalent, so only the activations are rotated.

A rotation changes the size of the rounding error through the scale, so gradients pass through the scale. The official
code re-orthogonalizes by QR about once in a hundred steps at random; here every step ends with a Newton step to the
nearest orthogonal matrix. Its inputs are asymmetric and not clipped; here they are symmetric and clipped as in QuaRot.
If the loss on the calibration data does not decrease, the random rotations are kept, and the facts say so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from smelt.compression.base import METHODS, Batch, CalibrationSize, MethodContext, ResourceEstimate, within
from smelt.compression.calibration.gradients import batch_loss, frozen
from smelt.compression.quantization.rotated import RotatedQuantization
from smelt.compression.quantization.rotation import Rotations, has_layer_norms, random_rotations
from smelt.config import renamed
from smelt.errors import ModelError, RecipeError
from smelt.kernels.hadamard import hadamard_transform
from smelt.models.anatomy import Anatomy
from smelt.models.model import Model
from smelt.numerics.format import Format, QuantParams

ITERATIONS = 5  # of the fixed-point solver of a Cayley step
Round = Callable[[Tensor], Tensor]


@METHODS.register("spinquant", paper="Liu et al., 2025 (arXiv 2405.16406)", needs=("calibration data", "gradients"))
@dataclass(frozen=True)
class SpinQuant(RotatedQuantization):
    """Use for better W4A4 quality than quarot, where minutes of training are affordable."""

    offloads: ClassVar[bool] = False  # the loss is that of the whole network
    rotate_heads: bool = False  # Hadamard-rotate the attention output-projection input online, across heads
    steps: int = 100  # each on one batch of the calibration data
    lr: float = renamed("rate", default=1.5)  # of Cayley SGD, with cosine decay

    def __post_init__(self) -> None:
        super().__post_init__()
        within(self.name, "steps", self.steps, 1, 100_000)
        within(self.name, "lr", self.lr, 1e-6, 100.0)
        if self.input_activations is None:
            raise RecipeError("spinquant learns from the quantization of inputs: set input_activations, or use quarot.")

    def check(self, anatomy: Anatomy) -> None:
        super().check(anatomy)
        if has_layer_norms(anatomy):
            raise ModelError("spinquant learns rotations under RMSNorm; this network has LayerNorm: use quarot.")
        if any(part.mixture is not None for part in anatomy.parts):
            raise ModelError(
                "spinquant quantizes all readers of a norm, which a mixture's router must not be: use quarot."
            )
        if any(part.clipped for part in anatomy.parts):
            raise ModelError("spinquant rotates the values of every block, and here they are clipped: use quarot.")

    def estimate_resources(self, anatomy: Anatomy, size: CalibrationSize, memory_limit: int | None) -> ResourceEstimate:
        rounding = super().estimate_resources(anatomy, size, memory_limit)
        learning = 2 + 3 * self.steps * size.batch_size / size.samples  # a backward pass costs two
        return ResourceEstimate(rounding.passes + learning, rounding.memory)

    def rotations(self, model: Model, context: MethodContext) -> Rotations:
        matrices, facts = context.checkpoint.load("rotations"), context.checkpoint.load_facts("rotations")
        if matrices is None or facts is None:
            matrices, facts = self._learn(model, context)
            context.checkpoint.save("rotations", matrices)
            context.checkpoint.save_facts("rotations", facts)
        exact = {name: nearest_orthogonal(matrix) for name, matrix in matrices.items()}
        return Rotations(exact.pop("stream"), {int(block): matrix for block, matrix in exact.items()}, facts)

    def _learn(self, model: Model, context: MethodContext) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the learned matrices in float32 (`stream`, and those of values by block index), and the losses."""
        network, batches = model.network, context.batches
        start = random_rotations(model.anatomy, context.seed)
        assert start.stream is not None
        named = {"stream": start.stream, **{str(block): matrix for block, matrix in start.values.items()}}
        rotations = {name: matrix.to(model.device, torch.float32).requires_grad_() for name, matrix in named.items()}
        with frozen(network), self.quantized_inputs(model.anatomy, rotations):
            before, initial = (
                _mean_loss(network, batches),
                {name: rotation.detach().clone() for name, rotation in rotations.items()},
            )
            for step in context.progress.track(range(self.steps), "rotations"):
                loss = batch_loss(network, batches[step % len(batches)])
                gradients = torch.autograd.grad(loss, list(rotations.values()))
                rate = self.lr * (1 + math.cos(math.pi * step / self.steps)) / 2
                with torch.no_grad():
                    for rotation, gradient in zip(rotations.values(), gradients, strict=True):
                        rotation.copy_(cayley_step(rotation, gradient, rate))
            after = _mean_loss(network, batches)
        facts = {"loss_random_rotations": before, "loss_learned_rotations": after, "rotations_learned": after < before}
        return ({name: rotation.detach() for name, rotation in rotations.items()} if after < before else initial), facts

    @contextmanager
    def quantized_inputs(self, anatomy: Anatomy, rotations: dict[str, Tensor]) -> Iterator[None]:
        """Rotate, quantize and rotate back the inputs of linear layers inside the context."""
        number_format = self.input_format
        assert number_format is not None
        parts = [part for part in anatomy.parts if part.units]
        weights = [part.pre_norm.weight for part in parts]
        hooks: list[Any] = []

        def round_(x: Tensor) -> Tensor:
            return rounded(x, number_format, self.input_clip_ratio)

        for part, weight in zip(parts, weights, strict=True):
            part.pre_norm.weight = nn.Parameter(torch.ones_like(weight), requires_grad=False)
            hooks.append(part.pre_norm.register_forward_hook(_after_norm(rotations["stream"], weight.detach(), round_)))
            rotation = rotations[str(part.block)] if part.kind == "heads" else None
            before = _before_output(rotation, self.rotates(part), round_)
            hooks.append(part.output.module.register_forward_pre_hook(before))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            for part, weight in zip(parts, weights, strict=True):
                part.pre_norm.weight = weight


@torch.no_grad()
def _mean_loss(network: PreTrainedModel, batches: Sequence[Batch]) -> float:
    return sum(float(batch_loss(network, batch)) for batch in batches) / len(batches)


def _after_norm(rotation: Tensor, weight: Tensor, round_: Round) -> Any:
    """Return a hook that rotates, quantizes and rotates back a norm's output before it is multiplied by the weight."""

    def after(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return (round_(output.float() @ rotation) @ rotation.T).to(output.dtype) * weight

    return after


def _before_output(rotation: Tensor | None, transform: bool, round_: Round) -> Any:
    def before(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x = args[0].float()
        x = x if rotation is None else _by_head(x, rotation)
        x = hadamard_transform(round_(hadamard_transform(x)), inverse=True) if transform else round_(x)
        x = x if rotation is None else _by_head(x, rotation.T)
        return (x.to(args[0].dtype), *args[1:])

    return before


def _by_head(x: Tensor, rotation: Tensor) -> Tensor:  # [..., heads * head_dim]
    return (x.unflatten(-1, (-1, len(rotation))) @ rotation).flatten(-2)


def cayley_step(rotation: Tensor, gradient: Tensor, rate: float) -> Tensor:
    """Take one Cayley SGD step from an orthogonal matrix [n, n]."""
    downhill = -gradient.T
    product = downhill @ rotation
    half = product - 0.5 * (rotation.T @ (rotation @ product))
    skew = half - half.T
    step = min(rate, 1 / (float(skew.abs().sum(0).max()) + 1e-8))
    start = rotation.T
    moved = start + step * downhill
    for _ in range(ITERATIONS):
        moved = start + step * (skew @ (start + moved)) / 2
    rotated = moved.T
    return 1.5 * rotated - 0.5 * rotated @ (rotated.T @ rotated)


def nearest_orthogonal(matrix: Tensor) -> Tensor:
    """Return the orthogonal factor of the polar decomposition, in float64."""
    left, _, right = torch.linalg.svd(matrix.double())
    return left @ right


def rounded(x: Tensor, number_format: Format, clip: float = 1.0) -> Tensor:  # [..., columns] -> [..., columns]
    """Fake-quantize x in its own dtype, with qparams computed from x that cover `clip` of its range.

    The gradient is one inside the range and zero outside, plus that of the scale.
    """
    grouped = number_format.split_groups(x)
    qparams = number_format.compute_qparams(grouped, clip_ratio=clip, tensor_amax=number_format.tensor_amax(x.detach()))
    with torch.no_grad():
        fixed = QuantParams(**{name: tensor.detach() for name, tensor in qparams.tensors().items()})
        values, low, high = (
            number_format.dequantize_groups(number_format.quantize_groups(source, fixed), fixed)
            for source in (grouped, grouped.new_full((1,), -math.inf), grouped.new_full((1,), math.inf))
        )
        error, inside = values - grouped, (grouped >= low) & (grouped <= high)
    ratio = qparams.scale / fixed.scale  # one, with the gradient of the scale
    if qparams.negative is not None and fixed.negative is not None:
        ratio = torch.where(grouped > 0, ratio, qparams.negative / fixed.negative)
    result = torch.where(inside, grouped + error * ratio, values * ratio)
    return result.flatten(-2)[..., : x.shape[-1]].to(x.dtype)
