"""Base class of quantization-aware training: prepare, train, convert, check that the packed network computes the same.

A method supplies its defaults, its teacher and its loss terms. The base class supplies fake-quantized layers, the
training loop of `smelt.train` with its checkpoints, the selection of the best weights, and the facts about the run.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from smelt.compression.base import (
    Batch,
    CalibrationSize,
    MethodContext,
    ResourceEstimate,
    UndecidedWidth,
    within,
)
from smelt.compression.distillation.fake_quantize import (
    convert,
    fake_quantized_layers,
    init_activations,
    packed_scheme,
    prepare,
)
from smelt.compression.distillation.intermediates import (
    ObservedNetwork,
    block_paths,
    check_observable,
    check_observation,
)
from smelt.compression.distillation.losses import SAMPLE_WEIGHTS
from smelt.compression.distillation.network_training import VALIDATION, NetworkTraining, training_folder
from smelt.compression.distillation.quantizers import ActivationQuantizer, WeightQuantizer
from smelt.compression.distillation.quantizers.minmax import MinMax
from smelt.compression.distillation.samples import Samples
from smelt.compression.distillation.student import NetworkTeacher, Student
from smelt.compression.distillation.training_run import remember_dtypes, restore_dtypes
from smelt.compression.quantization.layers import LinearLayer, layer_groups
from smelt.errors import ConfigError, ModelError, RecipeError
from smelt.measure.cost import block_parameters, count_bytes
from smelt.models.anatomy import Anatomy
from smelt.models.implanted_layers import ImplantedConv2d
from smelt.models.implants import refuse_implants
from smelt.models.model import Model
from smelt.models.quantized import quantized_layers
from smelt.models.quantized_network import prepare_quantized_layers
from smelt.models.token_pruning import refuse_token_pruning
from smelt.train.gradients.comm import Comm
from smelt.train.trainer.config import TrainConfig
from smelt.train.trainer.gradient_sync import normalize_gradients
from smelt.train.trainer.tasks import TrainingTask

MAX_CONVERSION_ERROR = 1e-3  # of packed logits, relative to the largest logit


@dataclass(frozen=True)
class QuantizationAwareTraining(NetworkTraining):
    """Train the network with fake-quantized layers, then pack these.

    The layers of the blocks are quantized; what comes before the first block and after the last stays in float. Weights
    and optimizer are float32 while they train.
    """

    weights: WeightQuantizer = field(default_factory=MinMax)
    inputs: ActivationQuantizer | None = None  # null: activations stay in float
    gradient_accumulation_steps: int = 1  # batches per step
    gradients: str = "none"  # or a compressor of what several workers exchange: exdyna:density=0.001
    gradient_checkpointing: bool = False  # keep fewer activations, and compute blocks twice
    compile: bool = False  # forward and backward by torch.compile, by block: compiles first, then fuses the rounding
    cuda_graphs: bool = True  # on one GPU: replay forward and backward as CUDA graphs; false: kernel by kernel
    augment: bool = False  # crop and flip images randomly
    exclude: tuple[str, ...] = ()  # layers whose path contains one of these stay in float
    select: str = "best"  # checkpoint, by the accuracy or loss on those samples; or last

    needs: ClassVar[tuple[str, ...]] = ("calibration data",)
    own_loss: ClassVar[bool] = False  # the loss is not a sum of terms

    def __post_init__(self) -> None:
        super().__post_init__()
        within(self.name, "gradient_accumulation_steps", self.gradient_accumulation_steps, 1, 1_000_000)
        try:
            normalize_gradients(self.gradients)
        except ConfigError as error:
            raise RecipeError(f"gradients of {self.name}: {error}") from error
        if self.own_loss and self.losses:
            raise RecipeError(f"{self.name} has a loss of its own; remove `losses`.")
        if not self.own_loss:
            self.check_losses()
        if self.needs_teacher and not self.has_teacher:
            needy = next((f": the loss {term.name}" for term in self.losses if term.needs_teacher), "")
            raise RecipeError(f"{self.name}{needy} needs a teacher; give `teacher: source`.")

    @property
    def needs_teacher(self) -> bool:
        return any(term.needs_teacher for term in self.losses)

    @property
    def has_teacher(self) -> bool:
        """Whether the method has a teacher with its current parameters."""
        return False

    @property
    def intermediates(self) -> frozenset[str]:
        """Which intermediate outputs of student and teacher the training needs: names in intermediates.py."""
        return frozenset(name for term in self.losses for name in term.intermediates)

    def intervention(self, step: int) -> str | None:
        """Return which intermediate outputs of the student the teacher's replace in this step: None in most methods."""
        return None

    def make_teacher(self, model: Model) -> NetworkTeacher | None:
        """Return what computes the teacher's outputs, before layers of the model are replaced."""
        return None

    def weigh_samples(self, samples: Batch, teacher: NetworkTeacher | None) -> Tensor | None:
        """Return a weight for each training sample, [samples], for the terms of the loss that use weights."""
        return None

    def check(self, anatomy: Anatomy) -> None:
        check_float(self, anatomy)
        refuse_implants(anatomy.network, "its convolution cannot be quantized", kinds=(ImplantedConv2d,))
        size = self.weights.format.group_size
        for path, columns in self._columns(anatomy).items():
            if size > 0 and columns % size:
                fitting = [str(group) for group in (128, 64, 32, 16) if columns % group == 0]
                raise RecipeError(
                    f"{path} has {columns} inputs, which groups of {size} do not divide; give `weights` "
                    f"{'groups of ' + ', '.join(fitting) + ' or ' if fitting else ''}a scale per row (as in "
                    "weight_format: int4/row), or leave the layer out with `exclude`."
                )
        if not self._columns(anatomy):
            raise ModelError("there is no linear layer or convolution in the blocks of this network to quantize.")

    def reshape(self, anatomy: Anatomy, undecided: Mapping[str, UndecidedWidth]) -> Mapping[str, UndecidedWidth]:
        scheme = packed_scheme(self.weights, self.inputs).to_json()
        prepare_quantized_layers(anatomy.network, {layer.path: scheme for layer in self._layers(anatomy)}, "the plan")
        return undecided

    @property
    def input_multiple(self) -> int:
        return max(self.weights.format.group_size, 1)

    def targets(self) -> dict[str, float]:
        return {"bits": self.weights.format.bits}

    def bytes_change(self, anatomy: Anatomy) -> int:
        weights = [layer.weight for layer in self._layers(anatomy)]
        bits = (weight.numel() * self.weights.format.bits_per_value(weight.shape[1], len(weight)) for weight in weights)
        return int(sum(bits)) // 8 - sum(weight.numel() * weight.element_size() for weight in weights)

    def estimate_resources(self, anatomy: Anatomy, size: CalibrationSize, memory_limit: int | None) -> ResourceEstimate:
        dtype = torch.bfloat16 if self.precision == "bf16" else torch.float32
        memory = self.training_memory(anatomy, size.seq_len, teacher=self.needs_teacher, dtype=dtype)
        memory += 4 * block_parameters(anatomy)  # fake-quantized weights
        vocabulary = getattr(anatomy.network.config, "vocab_size", 0) if anatomy.family.causal else 0
        logits = 4 * self.batch_size * size.seq_len * vocabulary
        memory += logits * max((term.logit_copies for term in self.losses), default=0)
        return ResourceEstimate(passes=self.epochs * (4 if self.needs_teacher else 3), memory=memory)

    def apply(self, model: Model, context: MethodContext) -> dict[str, Any]:
        self.check(model.anatomy)
        self.check_batches(context.batches)
        device = context.device or next(model.network.parameters()).device
        folder = training_folder(context)
        teacher = self.make_teacher(model)
        if teacher is not None and self.compile:
            teacher.compile()
        bytes_before, dtypes = count_bytes(model.network), remember_dtypes(model.network)
        model.network.to(device)
        samples, facts = self.make_samples(model, context, device)
        train, validation = samples.split(VALIDATION)
        first = {name: tensor[: self.batch_size] for name, tensor in train.tensors.items()}
        few, blocks = {name: tensor[:2] for name, tensor in first.items()}, block_paths(model.anatomy)
        if self.intermediates:
            check_observation(model.network.float(), blocks, self.intermediates, few)
        layers, layer_facts = self.prepare_layers(model, context)
        facts |= layer_facts
        network = model.network
        student = self.make_student(network, teacher)
        student.observed = ObservedNetwork(network, blocks, self.intermediates)
        first = student.inputs(first)
        if self.gradient_checkpointing:
            _enable_gradient_checkpointing(network)
        init_activations(network, first)
        if (sample_weights := self.weigh_samples(train.tensors, teacher)) is not None:
            train.tensors[SAMPLE_WEIGHTS] = sample_weights
        task = TrainingTask(
            student, train, validation, _has_accuracy(model), saves_model=False,
            log_values=partial(_mean_learned, network),
            on_step=lambda step: setattr(student, "intervention", self.intervention(step)),
            graph_state=student.graph_state,
        )  # fmt: skip
        try:
            if teacher is not None:
                teacher.begin(student, train, folder / "teacher", self.batch_size, context.progress)
                teacher.check(student, few)
            facts |= self.train(task, model, context, device)
            if Comm().rank == 0:
                shutil.rmtree(folder / "teacher", ignore_errors=True)
        finally:
            student.observed.close()
        facts |= {f"learned_{name}": values for name, values in _learned(network).items()}
        if self.gradient_checkpointing:
            network.gradient_checkpointing_disable()
        network.eval()
        facts |= self.convert_layers(model, context, first)
        restore_dtypes(model.network, dtypes)
        return {
            "layers_quantized": len(layers),
            "bits": self.weights.format.bits,
            "bytes_before": bytes_before,
            "bytes_after": count_bytes(model.network),
            **facts,
        }

    def check_batches(self, batches: Sequence[Batch]) -> None:
        """Raise, before any work, if the method cannot train on this data."""
        self.check_labels(batches)

    def make_samples(
        self, model: Model, context: MethodContext, device: torch.device
    ) -> tuple[Samples, dict[str, Any]]:
        """Return what is trained on, and facts about it, before layers of the model are replaced."""
        return Samples.from_batches(context.batches, device, augment=self.augment, seed=context.seed), {}

    def prepare_layers(self, model: Model, context: MethodContext) -> tuple[Sequence[nn.Module], dict[str, Any]]:
        """Replace layers by fake-quantized ones, in a network of float32; return these and facts about them."""
        network = model.network.float()
        return prepare(network, dict.fromkeys(self._columns(model.anatomy), self.weights), self.inputs), {}

    @torch.no_grad()
    def convert_layers(self, model: Model, context: MethodContext, first: Batch) -> dict[str, Any]:
        """Replace the trained layers by packed ones, compare their logits on the first batch, and return facts."""
        before = model.network(**first).logits
        convert(model.network)
        return {"conversion_error": _conversion_error(before, model.network(**first).logits)}

    def make_student(self, network: nn.Module, teacher: NetworkTeacher | None) -> Student:
        """Return what computes the loss of a batch."""
        return Student(network, self.losses, teacher)

    def _layers(self, anatomy: Anatomy) -> list[LinearLayer]:
        """Return the layers to quantize."""
        layers = [layer for block in anatomy.blocks for group in layer_groups(block) for layer in group.layers]
        return [layer for layer in layers if not any(part in layer.path for part in self.exclude)]

    def _columns(self, anatomy: Anatomy) -> dict[str, int]:
        """Return the number of inputs of each layer to quantize, by path."""
        return {layer.path: layer.weight.shape[1] for layer in self._layers(anatomy)}

    @property
    def samples_per_step(self) -> int:
        return self.batch_size * self.gradient_accumulation_steps

    def train(self, task: TrainingTask, model: Model, *args: Any, **options: Any) -> dict[str, Any]:
        facts = super().train(task, model, *args, **options)
        if model.task == "policy":
            facts.pop("validation_perplexity", None)
        return facts

    def train_config(self, *args: Any) -> TrainConfig:
        return dataclasses.replace(
            super().train_config(*args), gradient_accumulation_steps=self.gradient_accumulation_steps,
            gradients=self.gradients, compile=self.compile,
            cuda_graphs=self.cuda_graphs and not self.gradient_checkpointing,  # which saves the state of random numbers
        )  # fmt: skip


def check_float(method: QuantizationAwareTraining, anatomy: Anatomy) -> None:
    """Raise if a network cannot be trained with the terms of the loss, whatever is quantized."""
    if quantized_layers(anatomy.network):
        raise ModelError("this model is quantized already; train the model it was made from.")
    refuse_token_pruning(anatomy.network, f"{method.name} trains with all tokens")
    if method.intermediates:
        check_observable(anatomy, method.intermediates)


def _enable_gradient_checkpointing(network: Any) -> None:
    if not getattr(network, "supports_gradient_checkpointing", False):
        raise ModelError(
            f"a network of type {network.config.model_type} cannot checkpoint activations; remove "
            "gradient_checkpointing and use smaller batches with gradient_accumulation_steps."
        )
    network.gradient_checkpointing_enable({"use_reentrant": False})


def _has_accuracy(model: Model) -> bool:
    discrete = getattr(model.network.config, "action_space", None) == "discrete"
    return model.task in ("images", "classification") or discrete


def _learned(network: nn.Module) -> dict[str, list[float]]:
    """Return what activation quantizers have learned, a number for each layer."""
    values: dict[str, list[float]] = {}
    for layer in fake_quantized_layers(network).values():
        for name, value in layer.input_learned.items():
            values.setdefault(name, []).append(float(value.detach()))
    return values


def _mean_learned(network: nn.Module) -> dict[str, float]:
    """Return the mean over layers of what activation quantizers have learned, such as PACT's alpha."""
    values: dict[str, list[Tensor]] = {}
    for layer in fake_quantized_layers(network).values():
        for name, value in layer.input_learned.items():
            values.setdefault(f"mean_{name}", []).append(value.detach())
    return {name: float(torch.stack(each).mean()) for name, each in values.items()}


def _conversion_error(fake_quantized: Tensor, packed: Tensor) -> float:
    """Return the largest difference of logits relative to the largest logit; raise if packing has changed them."""
    difference = (fake_quantized - packed).abs().max() / fake_quantized.abs().max().clamp(min=1e-12)
    if not float(difference) <= MAX_CONVERSION_ERROR:
        raise ModelError(
            f"the packed network's logits differ by {float(difference):.1e} of the largest; this is a bug."
        )
    return float(difference)
