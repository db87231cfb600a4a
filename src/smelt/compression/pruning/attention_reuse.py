"""Attention map reuse: layers of a group share one attention map, that of the first (Shim et al., 2023).

head_h of layer l is P_h (x_l W_V), with P the map of the group's first layer: W_Q and W_K of the others are removed,
and generation keeps no keys for them, so that the KV cache of a group of G layers falls to (G + 1) / (2 G). Adjacent
layers are merged by the Jensen-Shannon divergence of their maps, the most similar first.

The paper trains with the sharing. Without training, `repair: full` fits the output projection of every such layer to
the outputs of the layer it was. With `epochs` the network is then distilled from the one before: its logits, the maps
of the layers that still compute one, and all hidden states.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from smelt.compression.base import (
    METHODS,
    Batch,
    CalibrationSize,
    MethodContext,
    ResourceEstimate,
    UndecidedWidth,
    one_of,
    within,
)
from smelt.compression.calibration.attention_similarity import map_divergences, stacked_attention, token_mask
from smelt.compression.calibration.block_inputs import ActivationStore, run_backbone
from smelt.compression.calibration.least_squares import NormalEquations
from smelt.compression.distillation.feature_losses import AttentionMap, HiddenStates
from smelt.compression.distillation.intermediates import (
    ObservedNetwork,
    block_paths,
    check_observable,
    check_observation,
)
from smelt.compression.distillation.losses import Logits, LossTerm
from smelt.compression.distillation.network_training import VALIDATION, NetworkTraining
from smelt.compression.distillation.samples import Samples
from smelt.compression.distillation.student import Student
from smelt.compression.distillation.teachers import DenseTeacher
from smelt.compression.distillation.training_run import remember_dtypes, restore_dtypes
from smelt.errors import DataError, ModelError
from smelt.measure.cost import block_parameters
from smelt.models.anatomy import Anatomy, Part
from smelt.models.anatomy_builder import anatomy_of
from smelt.models.attention_reuse import kv_cache_share, reuse_attention, unshareable_reason
from smelt.models.model import Model
from smelt.models.quantized import quantized_layers
from smelt.train.trainer.config import OptimizerConfig


@METHODS.register(
    "attention-reuse",
    paper="Shim et al., Exploring Attention Map Reuse for Efficient Transformer Neural Networks, 2023 "
    "(arXiv 2301.12444)",
    needs=("calibration data",),
)
@dataclass(frozen=True, kw_only=True)
class AttentionReuse(NetworkTraining):
    """Use where neighboring layers attend alike: removes Q and K of some layers, and their keys from the KV cache."""

    layers: float = 1 / 3  # fraction of the attention layers that use the map of another
    max_group: int = 3  # layers per map
    separate: int = 1  # first layers that keep their own map, each for itself
    repair: str = "full"  # full (refit the output projection of layers without a map) or none
    damping: float = 0.01  # of full, relative to the mean of the Gram diagonal, towards the weights before
    epochs: float = 0.0  # of distillation from the network before, over the samples of the recipe's data; 0: none
    losses: tuple[LossTerm, ...] = (Logits(), AttentionMap(), HiddenStates())  # of it: terms that are added up
    batch_size: int = 16  # samples per step
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-4))
    select: str = "best"  # checkpoint, by the accuracy or loss on those samples; or last

    min_epochs: ClassVar[float] = 0.0

    def __post_init__(self) -> None:
        within(self.name, "layers", self.layers, 0.0, 1.0)
        within(self.name, "max_group", self.max_group, 2, 1000)
        within(self.name, "separate", self.separate, 0, 1000)
        within(self.name, "damping", self.damping, 1e-8, 1e3)
        one_of(self.name, "repair", self.repair, ("full", "none"))
        super().__post_init__()
        self.check_losses(example="logits")

    def check(self, anatomy: Anatomy) -> None:
        if quantized_layers(anatomy.network):
            raise ModelError(
                "this model is already quantized; share the attention maps of its source, then quantize it."
            )
        attention = anatomy.family.attention
        if attention is None or not attention.interface or len(stacked_attention(anatomy)) < 2:
            raise ModelError(
                f"{self.name} needs layers of attention whose maps are known, which this {anatomy.family.name} network "
                "does not have."
            )
        if any(part.map_of is not None for part in anatomy.parts) or not _runs_in_order(anatomy):
            raise ModelError(f"{self.name} needs layers that follow one another, with a map of their own each.")
        most = self._most(anatomy)
        if most < self._wanted(anatomy):
            why = next((f" ({reason})" for reason in _reasons(anatomy)[1:] if reason is not None), "")
            raise self._too_few(anatomy, f"at most {most} can{why}")
        if self.epochs and self.intermediates:
            check_observable(anatomy, self.intermediates)

    def apply(self, model: Model, context: MethodContext) -> dict[str, Any]:
        anatomy = model.anatomy
        self.check(anatomy)
        if self.epochs and any("labels" not in batch for batch in context.batches):
            raise DataError(
                f"{self.name} evaluates what it trains with labels, and the data has none; remove `epochs`."
            )
        distillation = _Distillation(self, model, context) if self.epochs else None
        before = block_parameters(anatomy)
        divergences = map_divergences(anatomy, context.batches, context.progress)
        leaders = self.group(anatomy, divergences)
        targets = self._targets(anatomy, leaders, context) if self.repair == "full" else []
        reuse_attention(anatomy, leaders)
        changed = anatomy_of(model.network)
        if self.repair == "full":
            self._refit(changed, targets, context)
        facts = {} if distillation is None else distillation.train(leaders)
        return {
            "parameters_removed": before - block_parameters(changed),
            "block_parameters_before": before,
            "map_divergence": [round(float(value), 6) for value in divergences],
            "maps_of": {str(block): leader for block, leader in leaders.items()},
            **facts,
            **({"kv_cache_share": kv_cache_share(changed)} if anatomy.family.causal else {}),
        }

    def group(self, anatomy: Anatomy, divergences: np.ndarray) -> dict[int, int]:
        """Return which block uses the map of which: adjacent layers are merged, the most similar first."""
        parts, reasons = stacked_attention(anatomy), _reasons(anatomy)
        group = list(range(len(parts)))  # the position of the first layer of each layer's group
        merged = 0
        for position in np.argsort(divergences, kind="stable").tolist():
            if merged == self._wanted(anatomy):
                break
            if position <= self.separate or reasons[position] is not None or group[position] != position:
                continue
            leader = group[position - 1]
            size = group.count(leader) + group.count(position)
            if size <= self.max_group and not np.isinf(divergences[position]):
                group = [leader if each == position else each for each in group]
                merged += 1
        if merged < self._wanted(anatomy):
            raise self._too_few(anatomy, f"with the most similar layers in groups, {merged} can")
        return {parts[i].block: parts[leader].block for i, leader in enumerate(group) if leader != i}

    def _too_few(self, anatomy: Anatomy, how_many: str) -> ModelError:
        return ModelError(
            f"{self._wanted(anatomy)} of {len(stacked_attention(anatomy))} layers cannot use the map of another: "
            f"{how_many}; lower `layers`, or raise `max_group`."
        )

    def reshape(self, anatomy: Anatomy, undecided: Mapping[str, UndecidedWidth]) -> Mapping[str, UndecidedWidth]:
        """Share as many maps; which ones does not matter to the shape of the other layers."""
        reuse_attention(anatomy, self.group(anatomy, np.arange(len(stacked_attention(anatomy)), 0.0, -1)))
        return undecided

    @property
    def keeps_plain_shape(self) -> bool:
        return False

    @property
    def intermediates(self) -> frozenset[str]:
        """Which intermediate outputs the losses compare: names in intermediates.py."""
        return frozenset(name for term in self.losses for name in term.intermediates)

    def estimate_resources(self, anatomy: Anatomy, size: CalibrationSize, memory_limit: int | None) -> ResourceEstimate:
        layers = self._wanted(anatomy)
        maps = (
            2
            * 4
            * max(part.units * part.heads_per_unit for part in stacked_attention(anatomy))
            * size.batch_size
            * size.seq_len**2
        )
        targets = 4 * size.tokens * anatomy.hidden_size * layers if self.repair == "full" else 0
        targets = targets if memory_limit is None else min(targets, memory_limit)
        training = self.training_memory(anatomy, size.seq_len, teacher=True) if self.epochs else 0
        passes = 1.0 + ((1 + layers) if self.repair == "full" else 0) + 4 * self.epochs
        return ResourceEstimate(passes, maps + targets + training)

    def _wanted(self, anatomy: Anatomy) -> int:
        return max(1, math.floor(self.layers * len(stacked_attention(anatomy)) + 1e-9))

    def _most(self, anatomy: Anatomy) -> int:
        """Return how many layers can use another's map."""
        most, size = 0, 0
        for position, reason in enumerate(_reasons(anatomy)):
            joins = position > self.separate and reason is None and size < self.max_group
            size = size + 1 if joins else 1
            most += joins
        return most

    def _targets(self, anatomy: Anatomy, leaders: Mapping[int, int], context: MethodContext) -> list[ActivationStore]:
        """Return the outputs of the output projections before anything changes, a store for each layer in order."""
        parts = [part for part in stacked_attention(anatomy) if part.block in leaders]
        stores = [ActivationStore(context.memory_limit, context.folder) for _ in parts]

        def keep(position: int, number: int, output: Tensor) -> None:
            stores[position][number] = output.detach()

        for number, batch in enumerate(context.batches):
            hooks = [
                part.output.module.register_forward_hook(
                    lambda _, args, output, position=position, number=number: keep(position, number, output)
                )
                for position, part in enumerate(parts)
            ]
            _run(anatomy, batch, hooks)
        return stores

    @torch.no_grad()
    def _refit(self, anatomy: Anatomy, targets: Sequence[ActivationStore], context: MethodContext) -> None:
        """Fit the output projection of each layer without a map, from the first to the last, to its outputs before."""
        parts = [part for part in stacked_attention(anatomy) if part.map_of is not None]
        for part, store in zip(context.progress.track(parts, "repair"), targets, strict=True):
            equations = NormalEquations.zeros(part.output.in_features, part.output.out_features, part.output.device)
            for number, batch in enumerate(context.batches):

                def add(_: nn.Module, args: Any, store: ActivationStore = store, number: int = number,
                        batch: Batch = batch, equations: NormalEquations = equations) -> None:  # fmt: skip
                    mask = token_mask(anatomy, batch, args[0].shape[1])
                    rows, wanted = args[0].flatten(0, -2), store[number].flatten(0, -2)
                    kept = slice(None) if mask is None else mask.flatten().to(rows.device)
                    equations.add(rows[kept], wanted[kept])

                _run(anatomy, batch, [part.output.module.register_forward_pre_hook(add)])
            _solve(part, equations, self.damping)


class _Distillation:
    """The training with the network before as the teacher, which is copied at the start."""

    def __init__(self, method: AttentionReuse, model: Model, context: MethodContext) -> None:
        self.method, self.model, self.context, self.names = method, model, context, method.intermediates
        self.device = context.device or model.device
        samples = Samples.from_batches(context.batches, self.device, augment=False, seed=context.seed)
        self.samples = samples.split(VALIDATION)
        self.teacher = copy.deepcopy(model.network).float().to(self.device)
        if self.names:
            few = {name: tensor[:2] for name, tensor in samples.tensors.items()}
            check_observation(self.teacher, block_paths(anatomy_of(self.teacher)), self.names, few)

    def train(self, leaders: Mapping[int, int]) -> dict[str, Any]:
        """Train the network, whose layers share maps now; return facts about the training."""
        network = self.model.network
        dtypes = remember_dtypes(network)
        network.float().to(self.device)
        student = Student(network, self.method.losses, DenseTeacher(self.teacher, self.names, set(leaders)))
        student.observed = ObservedNetwork(network, block_paths(self.model.anatomy), self.names)
        try:
            return self.method.fine_tune(student, self.samples, self.model, self.context, self.device)
        finally:
            student.observed.close()
            restore_dtypes(network, dtypes)


def _solve(part: Part, equations: NormalEquations, damping: float) -> None:
    """Set the weight to the ridge solution around its current value; a bias stays."""
    weight = part.output.weight.detach().double()
    cross = equations.cross
    if part.output.bias is not None:
        cross = cross - torch.outer(equations.input_sum, part.output.bias.detach().double())
    ridge = damping * equations.gram.diagonal().mean().clamp_min(1e-12)
    gram = equations.gram + ridge * torch.eye(len(equations.gram), dtype=torch.float64, device=weight.device)
    solution = torch.linalg.solve(gram, cross + ridge * weight.T)
    part.output.weight.copy_(solution.T)


@torch.no_grad()
def _run(anatomy: Anatomy, batch: Mapping[str, Tensor], hooks: Sequence[Any]) -> None:
    try:
        run_backbone(anatomy, dict(batch))
    finally:
        for hook in hooks:
            hook.remove()


def _runs_in_order(anatomy: Anatomy) -> bool:
    """Return whether the layers are known to run one after another; a decoder behind an encoder stays as it is."""
    chain = anatomy.family.chain
    is_encoder = not anatomy.family.causal and chain is None
    return chain is True or is_encoder or bool(anatomy.network.config.is_encoder_decoder)


def _reasons(anatomy: Anatomy) -> list[str | None]:
    """Return why each layer cannot use the map of the layer before it; None if it can."""
    parts, types = stacked_attention(anatomy), getattr(anatomy.network.config.get_text_config(), "layer_types", None)
    reasons: list[str | None] = ["it is the first"]
    for before, part in pairwise(parts):
        reason = unshareable_reason(before, part)
        if types is not None and types[before.block] != types[part.block]:
            reason = "it attends to other positions"
        reasons.append(reason)
    return reasons
