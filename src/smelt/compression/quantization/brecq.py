"""BRECQ: learned rounding (AdaRound) by the reconstruction of blocks, and QDrop, which drops activation quantization.

`W' = s (clip(floor(W / s) + h(V) + z) - z)` with `h(V) = clip(1.2 sigmoid(V) - 0.1, 0, 1)`, one V per weight. The loss
is the squared error of the block's output plus `regularization * sum(1 - |2 h - 1|^b)`, which pushes every h to 0 or 1
while b falls from 20 to 2; then h is rounded. Scales are searched and fixed, those of activations learned.

Batch norms are first folded into the convolutions before them, so that nothing scales what a quantized weight computes;
with one scale per output channel, the first codes are the same but for the rounding of scales and ties.
The layers outside of the blocks, the first convolution and the classifier, stay in float, where the papers have 8 bits.

With Fisher weighting, each squared error of the block's output is multiplied by the squared gradient of the
KL divergence between the quantized and the original prediction (`output_gradients.py`). Gradients are taken where a
phase starts: at the block rounded to nearest, then at the block of learned weights with quantized activations. Weights
have a mean of 1, so that `regularization` keeps its meaning.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from smelt.compression.base import METHODS, CalibrationSize, MethodContext, ResourceEstimate, one_of, within
from smelt.compression.calibration.gradients import gradient_bytes
from smelt.compression.quantization.base import BlockWork, Quantization
from smelt.compression.quantization.layers import LinearLayer
from smelt.compression.quantization.learned import COPIES, FakeQuantized, Quantizer
from smelt.compression.quantization.output_gradients import FisherWeights, check_predicts_classes
from smelt.compression.quantization.rounding import ERROR_POWER, RANGE_STEPS, search_qparams
from smelt.errors import DataError, ModelError, RecipeError
from smelt.measure.cost import block_parameters
from smelt.models.anatomy import Anatomy
from smelt.models.batch_norm import batch_norms, fold_batch_norms
from smelt.models.model import Model
from smelt.models.quantization_scheme import QuantizationScheme
from smelt.models.quantized import QuantizedLinear
from smelt.numerics.catalog import format_name, get_format
from smelt.numerics.format import PER_TENSOR, Format, QuantParams
from smelt.numerics.gradient import straight_through
from smelt.numerics.integer import Integer

STRETCH = 1.2  # of the sigmoid around 1/2, so that h reaches 0 and 1
FIRST_POWER, LAST_POWER = 20.0, 2.0  # b of the regularizer
WARMUP = 0.2  # share of the updates without the regularizer
_GRADIENT_PASSES = 5  # of each later block and batch, for Fisher weighting
_SCALE_SAMPLES = 2**16  # values of each layer's input from which its first scale is searched


@METHODS.register(
    "brecq",
    paper="Li et al., 2021 (BRECQ, arXiv 2102.05426); Nagel et al., 2020 (AdaRound, arXiv 2004.10568); "
    "Wei et al., 2022 (QDrop, arXiv 2203.05740)",
    needs=("calibration data",),
)
@dataclass(frozen=True)
class Brecq(Quantization):
    """Use for convolutions at 2 to 4 bits, with quantized activations too: learns to round weights up or down.

    Without `qdrop` weights are learned first, with float activations, and then the scales of the activations. With it,
    both are learned at once, while activations are quantized at random; that is better below 4 bits. Each calibration
    batch is one update; the papers have batches of 32 out of 1024 images. Activation scales are static, one per layer;
    where no input is negative, the format is the unsigned one of as many bits.
    """

    group_size: int = -1  # weights of a row that share a scale; -1: per-channel
    iterations: int = 20_000  # updates per block; 0: round to nearest
    lr: float = 1e-3  # of Adam on V; with fewer iterations larger, such as 1e-2 for 1000
    regularization: float = 0.01  # of the loss, per weight; 0.1 for MobileNetV2
    activation_iterations: int = 5000  # updates of the activation scales per block, without qdrop
    activation_lr: float | None = None  # with cosine decay to 0; null: 4e-4, with qdrop 4e-5
    qdrop: float | None = None  # probability of dropping the quantization of an activation (QDrop: 0.5); null: BRECQ
    fold_batch_norms: bool = True  # into the convolutions before them; false: they stay, in float
    weighting: Literal["none", "fisher"] = "none"  # of errors; fisher: the paper's, at more passes of all later blocks

    teacher: ClassVar[bool] = True
    any_format: ClassVar[bool] = False
    convolutions: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of(self.name, "weighting", self.weighting, ("none", "fisher"))
        within(self.name, "iterations", self.iterations, 0, 10_000_000)
        within(self.name, "activation_iterations", self.activation_iterations, 0, 10_000_000)
        within(self.name, "lr", self.lr, 1e-8, 10.0)
        within(self.name, "regularization", self.regularization, 0.0, 1e3)
        if self.activation_lr is not None:
            within(self.name, "activation_lr", self.activation_lr, 1e-8, 10.0)
        number_format = self.weight_format
        if type(number_format) is not Integer or number_format.zero_dtype != "code":
            raise RecipeError(f"{self.name} rounds weights to plain integers: use bits, group_size and symmetric.")
        if self.static_activations:
            raise RecipeError(f"{self.name} always learns static scales of activations; leave out static_activations.")
        inputs = self.input_format
        if inputs is not None and format_name(inputs) not in _ACTIVATION_FORMATS:
            raise RecipeError(
                f"{self.name} learns one scale and no zero point per layer: input_activations must be int2 to int8, "
                f"not {self.input_activations}."
            )
        if self.qdrop is not None:
            within(self.name, "qdrop", self.qdrop, 0.0, 1.0)
            if inputs is None:
                raise RecipeError(
                    "qdrop drops the quantization of activations: give their format, such as `input_activations: int4`."
                )

    @property
    def input_format(self) -> Format | None:
        if self.input_activations is None:
            return None
        return replace(get_format(self.input_activations), group_size=PER_TENSOR)

    @property
    def scheme(self) -> QuantizationScheme:
        return QuantizationScheme(self.weight_format, self.input_format, static=self.input_format is not None)

    @property
    def needs_original_inputs(self) -> bool:
        return self.qdrop is not None

    @property
    def needs_float_inputs(self) -> bool:
        return self.qdrop is None and self.input_activations is not None

    def check(self, anatomy: Anatomy) -> None:
        super().check(anatomy)
        if self.weighting == "fisher":
            check_predicts_classes(anatomy)

    def prepare(self, model: Model, context: MethodContext) -> int:
        """Fold the batch norms; return how many."""
        if not self.fold_batch_norms or not batch_norms(model.network):
            return 0
        inputs = {name: x.to(model.device) for name, x in context.batches[0].items() if name != "labels"}
        try:
            return len(fold_batch_norms(model.network, inputs))
        except ModelError as error:
            raise ModelError(f"{error} Use `fold_batch_norms: false` to keep them all.") from error

    def report(self, prepared: int, network: nn.Module) -> dict[str, Any]:
        return {"batch_norms_folded": prepared} if prepared else {}

    def estimate_resources(self, anatomy: Anatomy, size: CalibrationSize, memory_limit: int | None) -> ResourceEstimate:
        """Count each store of hidden states (inputs, targets, gradients), and the training of one block.

        For Fisher weighting, every block runs those after it five times: for the original prediction, and forward,
        again and backward for the gradient.
        """
        plain = super().estimate_resources(anatomy, size, memory_limit)
        batches = math.ceil(size.samples / size.batch_size)
        updates = self.iterations + (self.activation_iterations if self.needs_float_inputs else 0)
        stores = 2 + self.needs_original_inputs + self.needs_float_inputs
        training = COPIES * 4 * block_parameters(anatomy) // len(anatomy.blocks)
        gradient_passes = 0.0
        if self.weighting == "fisher":
            phases = (self.iterations > 0) + (self.needs_float_inputs and self.activation_iterations > 0)
            stores, gradient_passes = stores + 1, phases * _GRADIENT_PASSES * (len(anatomy.blocks) - 1) / 2
            training = max(training, gradient_bytes(anatomy, size.batch_size, size.seq_len, checkpointing=True))
        passes = plain.passes + 3 + 3 * updates / batches + gradient_passes
        return ResourceEstimate(passes, stores * plain.memory + training)

    def quantize(self, work: BlockWork) -> None:
        groups = work.groups
        quantizers: dict[LinearLayer, AdaRound] = {}
        for group in groups:
            number_format = work.weight_format(group)
            assert isinstance(number_format, Integer)
            quantizers |= {layer: AdaRound(layer.weight.float(), number_format) for layer in group.layers}
        reconstruction = _Reconstruction(self, work, quantizers)
        before = reconstruction.error()
        reconstruction.run()
        error = reconstruction.error()
        for group in groups:
            step = reconstruction.steps.get(group.layers[0])
            scheme = work.schemes[group.path]
            schemes = (
                work.schemes if step is None else {**work.schemes, group.path: replace(scheme, inputs=step.format)}
            )
            replace(work, schemes=schemes).replace_layers(group, [quantizers[layer].result() for layer in group.layers])
            for layer in group.layers:
                if step is not None:
                    packed = work.network.get_submodule(layer.path)
                    assert isinstance(packed, QuantizedLinear)
                    packed.set_static_inputs(step.scale.detach().clone(), None)  # a shared tensor is saved once
        work.facts[groups[0].path]["block_error"] = {"nearest": before, "learned": error}


_ACTIVATION_FORMATS = {f"{kind}{bits}/tensor" for kind in ("int", "uint") for bits in range(2, 9)}


class AdaRound(Quantizer):
    """Round each weight down or up; `rounding` is which, a value from 0 to 1 while it is learned."""

    def __init__(self, weight: Tensor, number_format: Integer) -> None:
        super().__init__(weight, number_format)
        qparams = search_qparams(self.grouped, number_format)
        self.scale, self.zero = qparams.scale, qparams.zero
        steps = self.grouped / self.scale
        self.register_buffer("low", steps.floor())
        fraction = steps - steps.floor()
        self.logits = nn.Parameter(-(STRETCH / (fraction + (STRETCH - 1) / 2) - 1).log())
        self.hard = False  # whether every weight is rounded, as it will be stored

    def qparams(self) -> QuantParams:
        return QuantParams(self.scale, self.zero)

    def rounding(self) -> Tensor:
        """Return h(V)."""
        return (STRETCH * self.logits.sigmoid() - (STRETCH - 1) / 2).clamp(0, 1)

    def codes(self, qparams: QuantParams) -> Tensor:
        rounding = self.rounding()
        rounding = (rounding >= 0.5).float() if self.hard else rounding
        low = self.low
        assert isinstance(low, Tensor)
        return (low + rounding + self.format.zero_point(qparams)).clamp(0, self.format.qmax)

    def regularizer(self, power: float) -> Tensor:
        """Return sum(1 - |2 h - 1|^b), which is 0 if every h is 0 or 1."""
        return (1 - (2 * self.rounding() - 1).abs().pow(power)).sum()


class LearnedStep(nn.Module):
    """Fake-quantize inputs with one learned scale (LSQ), or leave some of them in float."""

    def __init__(self, samples: Tensor, number_format: Format) -> None:
        """Start from the scale of least |error|^2.4 on samples of the input."""
        super().__init__()
        unsigned = bool(samples.amin() >= 0) and not format_name(number_format).startswith("uint")
        self.format = get_format(f"u{format_name(number_format)}") if unsigned else number_format
        self.low, self.high = _levels(self.format)
        self.scale = nn.Parameter(_least_error_scale(samples, self.low, self.high))

    def forward(self, x: Tensor) -> Tensor:
        steps = x / self.scale
        return straight_through(steps, steps.round()).clamp(self.low, self.high) * self.scale


def regularizer_power(update: int, updates: int) -> float | None:
    """Return b of the regularizer, which falls linearly; None during the warmup, without a regularizer."""
    warmup = int(WARMUP * updates)
    if update < warmup:
        return None
    progress = (update - warmup) / max(updates - warmup, 1)
    return LAST_POWER + (FIRST_POWER - LAST_POWER) * (1 - progress)


def reconstruction_loss(output: Tensor, target: Tensor, mask: Tensor | None, weights: Tensor | None = None) -> Tensor:
    """Return the squared error summed over channels, averaged over images and pixels, or over unmasked tokens.

    `weights`, like the output, multiply the squares.
    """
    squares = (output - target).square()
    squares = (squares if weights is None else weights * squares).sum(1 if output.dim() == 4 else -1)
    return squares.mean() if mask is None else squares[mask].mean()


class _Reconstruction:
    """The optimization of one block."""

    def __init__(self, method: Brecq, work: BlockWork, quantizers: Mapping[LinearLayer, AdaRound]) -> None:
        assert work.block_inputs is not None and work.targets is not None
        self.method, self.work, self.inputs, self.targets = method, work, work.block_inputs, work.targets
        self.quantizers = quantizers
        seed = work.context.seed + 1_000_003 * work.block.index  # of the block: a resumed run draws the same numbers
        self.order = torch.Generator().manual_seed(seed)
        device = next(iter(quantizers)).weight.device
        self.drops = torch.Generator(device).manual_seed(seed)
        self.block = FakeQuantized(work.block, quantizers, None)
        self.weights = FisherWeights(work) if method.weighting == "fisher" else None
        self.steps = {} if method.input_format is None else self._first_steps(method.input_format, device)

    def run(self) -> None:
        """Learn the rounding of the weights and the scales of the activations."""
        method, steps = self.method, list(dict.fromkeys(self.steps.values()))
        rounding = [quantizer.logits for quantizer in self.quantizers.values()]
        if method.qdrop is not None:
            self._optimize(method.iterations, rounding, [step.scale for step in steps], 4e-5, self._mixed_output)
            self._harden()
            return
        self._optimize(method.iterations, rounding, [], 0.0, self._weight_only_output)
        self._harden()
        if steps:
            scales = [step.scale for step in steps]
            self._optimize(method.activation_iterations, [], scales, 4e-4, self._quantized_output)

    @torch.no_grad()
    def error(self) -> float:
        """Return the mean loss, unweighted, over all batches of the block as it would be stored now."""
        with self._hardened():
            outputs = (self._quantized_output(batch) for batch in range(len(self.inputs)))
            losses = [float(self._loss(output, batch)) for batch, output in enumerate(outputs)]
        return sum(losses) / len(losses)

    def _harden(self) -> None:
        for quantizer in self.quantizers.values():
            quantizer.hard = True

    @contextmanager
    def _hardened(self) -> Iterator[None]:
        """Round every weight inside the context."""
        before = [quantizer.hard for quantizer in self.quantizers.values()]
        self._harden()
        try:
            yield
        finally:
            for quantizer, hard in zip(self.quantizers.values(), before, strict=True):
                quantizer.hard = hard

    def _optimize(
        self, updates: int, rounding: list[nn.Parameter], scales: list[nn.Parameter], scale_lr: float,
        output: Callable[[int], Tensor],
    ) -> None:  # fmt: skip
        """Minimize the loss with Adam; batches are shuffled in every epoch."""
        if self.weights is not None and updates:
            with self._hardened():
                self.weights.measure(self._quantized_output if scales else self._weight_only_output)
        scale_lr = self.method.activation_lr or scale_lr
        groups = [{"params": rounding, "lr": self.method.lr}, {"params": scales, "lr": scale_lr}]
        optimizer = torch.optim.Adam([group for group in groups if group["params"]])
        order: list[int] = []
        for update in self.work.context.progress.track(range(updates), f"block {self.work.block.index}"):
            order = order or torch.randperm(len(self.inputs), generator=self.order).tolist()
            batch = order.pop()
            for group in optimizer.param_groups:
                if group["params"] and scales and group["params"][0] is scales[0]:
                    group["lr"] = scale_lr * (1 + math.cos(math.pi * update / updates)) / 2
            loss = self._loss(output(batch), batch, self.weights)
            power = regularizer_power(update, updates) if rounding else None
            if power is not None:
                terms = [quantizer.regularizer(power) for quantizer in self.quantizers.values()]
                loss = loss + self.method.regularization * torch.stack(terms).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if update in (0, updates - 1) and not bool(loss.isfinite()):  # every time would wait for the GPU
                raise DataError(
                    f"the loss of {self.work.block.path} is not a finite number: look for NaN in the weights and the "
                    f"calibration data, or lower the lr of {self.method.name}."
                )

    def _loss(self, output: Tensor, batch: int, weights: FisherWeights | None = None) -> Tensor:
        target = self.targets[batch].float()
        return reconstruction_loss(
            output, target, self.inputs.masks[batch], None if weights is None else weights[batch]
        )

    def _run(self, batch: int, hidden: Tensor | None = None) -> Tensor:
        return self.inputs.run(self.block, self.work.block.index, batch, hidden)

    def _weight_only_output(self, batch: int) -> Tensor:
        """Return the output with float activations, in this block and before it."""
        float_inputs = self.work.float_inputs
        return self._run(batch, None if float_inputs is None else float_inputs.hidden[batch])

    def _quantized_output(self, batch: int) -> Tensor:
        """Return the output with quantized activations."""
        with self._quantized_inputs(0.0):
            return self._run(batch)

    def _mixed_output(self, batch: int) -> Tensor:
        """Return the output with activations of which some are in float, in this block and before it."""
        assert self.method.qdrop is not None and self.work.original_inputs is not None
        quantized, original = self.inputs.hidden[batch], self.work.original_inputs[batch]
        with self._quantized_inputs(self.method.qdrop):
            return self._run(batch, self._drop(quantized, original, self.method.qdrop))

    def _drop(self, quantized: Tensor, original: Tensor, probability: float) -> Tensor:
        """Replace values by the original ones with this probability."""
        if probability in (0.0, 1.0):
            return original if probability else quantized
        drawn = torch.rand(original.shape, generator=self.drops, device=original.device)
        return torch.where(drawn < probability, original, quantized)

    @contextmanager
    def _quantized_inputs(self, probability: float) -> Iterator[None]:
        """Fake-quantize the inputs of the layers inside the context, but for values dropped with this probability."""

        def before(step: LearnedStep) -> Any:
            return lambda _, args: (self._drop(step(args[0]), args[0], probability), *args[1:])

        hooks = [layer.module.register_forward_pre_hook(before(step)) for layer, step in self.steps.items()]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @torch.no_grad()
    def _first_steps(self, number_format: Format, device: torch.device) -> dict[LinearLayer, LearnedStep]:
        """Return the scales to start from, searched on samples of the inputs; layers with the same input share one."""
        samples: dict[LinearLayer, list[Tensor]] = {group.layers[0]: [] for group in self.work.groups}
        share = max(_SCALE_SAMPLES // len(self.inputs), 1)

        def record(layer: LinearLayer) -> Any:
            def before(_: nn.Module, args: tuple[Tensor, ...]) -> None:
                values = args[0].float().flatten()
                # The extremes are kept: they say whether the inputs are signed, and how far the search has to go.
                samples[layer].append(
                    torch.cat([values[:: max(len(values) // share, 1)], torch.stack(values.aminmax())])
                )

            return before

        hooks = [layer.module.register_forward_pre_hook(record(layer)) for layer in samples]
        try:
            for batch in range(len(self.inputs)):
                self._run(batch)
        finally:
            for hook in hooks:
                hook.remove()
        steps: dict[LinearLayer, LearnedStep] = {}
        for group in self.work.groups:
            if not samples[group.layers[0]]:
                raise DataError(f"{group.path} was never reached by the calibration data; give more of it.")
            values = torch.cat(samples[group.layers[0]])
            step = LearnedStep(values, number_format).to(device)
            if step.low == 0 and bool(values.amin() < 0):
                raise DataError(
                    f"the inputs of {group.path} have negative values, which {self.method.input_activations} sets to "
                    f"zero; use int{number_format.bits:g}."
                )
            steps |= dict.fromkeys(group.layers, step)
        return steps


def _levels(number_format: Format) -> tuple[int, int]:
    """Return the smallest and the largest level of an activation format, in steps."""
    bits = int(number_format.bits)
    unsigned = format_name(number_format).startswith("uint")
    return (0, 2**bits - 1) if unsigned else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


def _least_error_scale(samples: Tensor, low: int, high: int) -> Tensor:
    """Return the scale of least |error|^2.4, [], of those that clip at 100 % to 20 % of the largest magnitude."""
    largest = torch.maximum(samples.amax() / high, samples.amin() / low if low else samples.amin().new_zeros(()))
    largest = largest.clamp(min=1e-8)
    scales = [largest * (1 - step / 100) for step in range(RANGE_STEPS + 1)]
    errors = [
        ((samples / scale).round().clamp(low, high) * scale - samples).abs().pow(ERROR_POWER).mean() for scale in scales
    ]
    return scales[int(torch.stack(errors).argmin())]
