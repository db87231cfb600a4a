"""Base class of token pruning: find the rule that meets the budget, train the network with it, count what is left.

A method supplies the rule. The base class supplies the training of the weights with dropped tokens, the MACs of real
token counts, and the facts. The network drops tokens from then on, wherever it runs (models/token_pruning.py).
"""

from __future__ import annotations

import copy
import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from smelt.compression.base import Batch, MethodContext, UndecidedWidth
from smelt.compression.budget import Budget
from smelt.compression.distillation.losses import LossTerm
from smelt.compression.distillation.network_training import VALIDATION, LogitDistillation
from smelt.compression.distillation.samples import Samples
from smelt.compression.distillation.student import NetworkTeacher, Student
from smelt.compression.distillation.teachers import DenseTeacher
from smelt.compression.distillation.training_run import remember_dtypes, restore_dtypes
from smelt.errors import BudgetError, ModelError, RecipeError
from smelt.measure.token_cost import count_tokens, text_lengths, token_macs
from smelt.models.anatomy import Anatomy
from smelt.models.model import Model
from smelt.models.quantized import quantized_layers
from smelt.models.token_pruning import TokenPruningEncoder, check_token_pruning, install_token_pruning
from smelt.models.token_rules import ThresholdRule, TokenRule
from smelt.train.trainer.config import OptimizerConfig

COUNTED_SEQUENCES = 512  # of the training data, on which MACs are counted


@dataclass(frozen=True, kw_only=True)
class TokenPruning(LogitDistillation):
    """Let sequences get shorter from layer to layer, and train the weights with the tokens that are left."""

    budget: Budget = field(metadata={"example": "budget: {macs: 0.5}"})
    epochs: float = 5.0  # with tokens dropped, over the samples of the recipe's data; 0: no training
    batch_size: int = 64  # samples per step
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=2e-5))
    select: str = "best"  # checkpoint, by the accuracy or loss on those samples; or last

    needs: ClassVar[tuple[str, ...]] = ("calibration data", "labels")
    min_epochs: ClassVar[float] = 0.0

    def __post_init__(self) -> None:
        if self.budget.measure != "macs":
            raise RecipeError(f"{self.name} removes tokens and no weights; give a budget of macs, such as macs=0.5.")
        if self.budget.keep == 1:
            raise RecipeError(f"{self.name} would drop nothing with macs=1; give a fraction below 1.")
        super().__post_init__()

    @abstractmethod
    def find_rule(self, run: TokenPruningRun) -> tuple[TokenRule, dict[str, Any]]:
        """Return the rule that meets the budget, and facts about it; weights may be trained on the way."""

    @abstractmethod
    def least_counts(self, lengths: Tensor, layers: int) -> Tensor:
        """Return the fewest tokens that the method can keep, [sequences, layers + 1]."""

    def adjust_rule(self, run: TokenPruningRun, rule: TokenRule) -> TokenRule:
        """Return a rule that meets the budget with the trained weights."""
        return rule

    def check(self, anatomy: Anatomy) -> None:
        check_token_pruning(anatomy)
        if quantized_layers(anatomy.network):
            raise ModelError(f"this model is quantized already; apply {self.name} to its source, then quantize.")
        if Model(anatomy.network).task != "classification":
            raise ModelError(f"{self.name} trains with the labels of a classifier; {_head(anatomy)} is none.")

    def reshape(self, anatomy: Anatomy, undecided: Mapping[str, UndecidedWidth]) -> Mapping[str, UndecidedWidth]:
        install_token_pruning(anatomy, ThresholdRule((0.0,) * len(anatomy.blocks)))
        return undecided

    @property
    def keeps_plain_shape(self) -> bool:
        return False

    def targets(self) -> dict[str, float]:
        return self.budget.to_json()

    def apply(self, model: Model, context: MethodContext) -> dict[str, Any]:
        self.check(model.anatomy)
        self.check_labels(context.batches)
        dtypes = remember_dtypes(model.network)
        run = TokenPruningRun(self, model, context)
        run.check_reachable()
        rule, facts = self.find_rule(run)
        run.encoder.rule = rule
        if self.epochs:
            facts |= run.train("training", self.epochs, self.select)
            run.encoder.rule = self.adjust_rule(run, rule)
        model.network.eval()
        restore_dtypes(model.network, dtypes)
        return {**facts, "rule": run.encoder.rule.to_json(), **run.describe_tokens()}


class TokenPruningRun:
    """What a step works with: the network that drops tokens, its samples, and the MACs that the budget allows."""

    def __init__(self, method: TokenPruning, model: Model, context: MethodContext) -> None:
        self.method, self.model, self.context = method, model, context
        self.device = context.device or model.device
        self.layers = len(model.anatomy.blocks)
        self.teacher = None if method.teacher is None else DenseTeacher(copy.deepcopy(model.network).to(self.device))
        model.network.float().to(self.device)
        self.encoder = install_token_pruning(model.anatomy, ThresholdRule((0.0,) * self.layers))
        samples = Samples.from_batches(context.batches, self.device, augment=False, seed=context.seed)
        self.samples, self.validation = samples.split(VALIDATION)
        self._counted = _first_sequences(context.batches, COUNTED_SEQUENCES)
        self.lengths = text_lengths(self._counted)
        self.mean_length = float(self.lengths.double().mean())
        self.dense_macs = self.macs(self.lengths[:, None].expand(-1, self.layers + 1))
        self.allowed_macs = method.budget.keep * self.dense_macs

    def macs(self, counts: Tensor | None = None) -> float:
        """Return the MACs of the blocks for given token counts, by default those of the network on training data."""
        return token_macs(self.model.anatomy, self.count() if counts is None else counts)

    def count(self) -> Tensor:
        """Return the tokens into each layer and left, on training data: [sequences, layers + 1]."""
        return count_tokens(self.model, self._counted)

    def check_reachable(self) -> None:
        """Raise if even the shortest sequences exceed the budget."""
        method, least = self.method, self.macs(self.method.least_counts(self.lengths, self.layers)) / self.dense_macs
        if least > method.budget.keep:
            raise BudgetError(
                f"no setting of {method.name} reaches macs={method.budget.keep:g} on this data: "
                f"{math.ceil(1000 * least) / 10:g} % of the MACs remain if all layers keep as few tokens as they can; "
                f"allow at least macs={math.ceil(100 * least) / 100:g}."
            )

    def train(self, name: str, epochs: float, select: str, regularization: float = 0.0) -> dict[str, Any]:
        """Train the weights, and the thresholds if they are soft; return facts about the training."""
        student = TokenPruningStudent(self.model.network, self.method.losses, self.teacher, self.encoder)
        student.regularization = regularization
        return self.method.fine_tune(
            student, (self.samples, self.validation), self.model, self.context, self.device, stage=name, epochs=epochs,
            select=select,
        )  # fmt: skip

    def describe_tokens(self) -> dict[str, Any]:
        """Return the MACs per sequence and the mean tokens of each layer, on training data."""
        counts = self.count()
        macs, sequences = self.macs(counts), len(counts)
        return {
            "tokens_per_layer": [round(float(tokens), 2) for tokens in counts.double().mean(0)],
            "text_macs_before": self.dense_macs / sequences,
            "text_macs_after": macs / sequences,
            "macs_kept": macs / self.dense_macs,
        }


class TokenPruningStudent(Student):
    """A network that trains with dropped tokens, or with soft thresholds and a penalty on the tokens they keep."""

    regularization: float = 0.0

    def __init__(
        self, network: Any, losses: tuple[LossTerm, ...], teacher: NetworkTeacher | None, encoder: TokenPruningEncoder
    ) -> None:
        super().__init__(network, losses, teacher)
        self._encoder = (encoder,)  # in a tuple: it is a part of the network already

    def penalty(self) -> Tensor | float:
        """Return lambda times the sum over layers of the mean gate."""
        soft = self._encoder[0].soft
        return 0.0 if soft is None else self.regularization * torch.stack(soft.mean_gates).sum()


def _first_sequences(batches: Sequence[Batch], limit: int) -> list[Batch]:
    """Return the first batches, up to about `limit` sequences."""
    kept: list[Batch] = []
    for batch in batches:
        if sum(len(each["input_ids"]) for each in kept) >= limit:
            break
        kept.append(batch)
    return kept


def _head(anatomy: Anatomy) -> str:
    return type(anatomy.network).__name__
