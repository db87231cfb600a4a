"""QDPO: prefer the answers of the 16-bit model to those of the quantized one (Lee et al., 2024)."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from smelt.compression.base import (
    METHODS,
    Batch,
    CalibrationSize,
    MethodContext,
    ResourceEstimate,
    within,
)
from smelt.compression.calibration.gradients import gradient_bytes
from smelt.compression.distillation.base import QuantizationAwareTraining
from smelt.compression.distillation.fake_quantize import convert, init_activations, prepare
from smelt.compression.distillation.losses import IGNORED, LossTerm
from smelt.compression.distillation.samples import Samples
from smelt.compression.distillation.student import NetworkTeacher, Student
from smelt.errors import DataError, ModelError, RecipeError
from smelt.measure.cost import count_bytes
from smelt.models.anatomy import Anatomy
from smelt.models.generation import generate
from smelt.models.model import Model
from smelt.models.quantized import dequantized_weights
from smelt.train.trainer.config import OptimizerConfig, TrainConfig

_PAIRS = "pairs"  # name of the checkpoint with what was generated


@METHODS.register("qdpo", paper="Lee et al., 2024 (QDPO, arXiv 2407.03051)", needs=("calibration data", "prompts"))
@dataclass(frozen=True)
class Qdpo(QuantizationAwareTraining):
    """Use as the last step for chat models: it makes the quantized model answer as the 16-bit one does.

    Both models answer the prompts greedily; where they differ, the 16-bit model's answer is preferred, by direct
    preference optimization (DPO) with that model as the reference. Nobody labels anything. Not for base models.
    Published settings other than the loss are not known: the defaults are common starting points of DPO. Where many
    tokens flip, DPO can make the chosen answer less likely, too; train with a teacher first, or set `rpo_alpha`.
    """

    beta: float = 0.1  # how far the quantized model may move from the reference: less for a larger beta
    max_new_tokens: int = 512  # of an answer
    reference_free: bool = False  # leave out the 16-bit model's log-probabilities: a control
    rpo_alpha: float = 0.0  # weight of the chosen answer's loss per token (Pang et al., 2024); published without
    generation_batch_size: int = 32  # prompts that are answered together
    batch_size: int = 8  # pairs per step; ours
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-6))
    warmup_ratio: float = 0.1  # share of the steps; `warmup_steps` of the schedule take precedence
    losses: tuple[LossTerm, ...] = ()  # none: the loss is that of DPO

    own_loss: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        within(self.name, "beta", self.beta, 1e-6, 100.0)
        within(self.name, "max_new_tokens", self.max_new_tokens, 1, 1_000_000)
        within(self.name, "generation_batch_size", self.generation_batch_size, 1, 1_000_000)
        within(self.name, "rpo_alpha", self.rpo_alpha, 0.0, 1000.0)
        within(self.name, "warmup_ratio", self.warmup_ratio, 0.0, 1.0)
        if self.augment:
            raise RecipeError("qdpo trains on text, which cannot be augmented; remove `augment`.")

    def check(self, anatomy: Anatomy) -> None:
        super().check(anatomy)
        if not anatomy.family.causal:
            raise ModelError("qdpo compares generated answers: it needs a language model.")

    def check_batches(self, batches: Sequence[Batch]) -> None:
        if not batches or any("labels" in batch or "input_ids" not in batch for batch in batches):
            raise DataError(
                "qdpo generates answers to prompts, and the data has none: name rows with a column prompt, messages or "
                "chosen."
            )

    def make_samples(
        self, model: Model, context: MethodContext, device: torch.device
    ) -> tuple[Samples, dict[str, Any]]:
        pairs = context.checkpoint.load(_PAIRS)
        if pairs is None:
            pairs = self.make_pairs(model, context)
            context.checkpoint.save(_PAIRS, pairs)
        count, prompts = len(pairs["input_ids"]), sum(len(batch["input_ids"]) for batch in context.batches)
        if count < 2:
            raise DataError(
                f"the quantized model answers {prompts - count} of {prompts} prompts as the 16-bit model does, which "
                "leaves too few pairs to train on; give more prompts, or leave out qdpo."
            )
        facts = {"prompts": prompts, "pairs": count, "mean_first_flip": float(pairs.pop("first_flip").float().mean())}
        return Samples({name: tensor.to(device) for name, tensor in pairs.items()}), facts

    def make_pairs(self, model: Model, context: MethodContext) -> Batch:
        """Generate the answers of both models and return those pairs that differ, on CPU.

        `input_ids`, `attention_mask` and `labels` are [pairs, 2, tokens], chosen before rejected; labels are ignored
        up to the first token in which the two differ. `reference` [pairs, 2] are the 16-bit model's log-probabilities,
        and `first_flip` [pairs] is the number of tokens before the answers differ.
        """
        prompts = [
            row[mask.bool()].tolist()
            for batch in context.batches
            for row, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
        ]
        together: dict[str, Any] = {"batch_size": self.generation_batch_size, "progress": context.progress}
        chosen = generate(model.network, prompts, self.max_new_tokens, **together)
        quantized = copy.deepcopy(model.network).float()
        prepare(quantized, dict.fromkeys(self._columns(model.anatomy), self.weights), self.inputs)
        init_activations(quantized, {name: tensor.to(model.device) for name, tensor in context.batches[0].items()})
        convert(quantized)
        with dequantized_weights(quantized, torch.float32):
            rejected = generate(quantized, prompts, self.max_new_tokens, **together)
        del quantized
        pairs = preference_pairs(prompts, chosen, rejected)
        reference = torch.zeros(len(pairs["input_ids"]), 2)
        if not self.reference_free:
            for start in range(0, len(reference), self.batch_size):
                batch = {name: tensor[start : start + self.batch_size] for name, tensor in pairs.items()}
                reference[start : start + self.batch_size] = _reference_log_probs(model.network, batch)
        return {**pairs, "reference": reference}

    def make_student(self, network: nn.Module, teacher: NetworkTeacher | None) -> Student:
        return PreferenceStudent(network, self.beta, self.rpo_alpha)

    def apply(self, model: Model, context: MethodContext) -> dict[str, Any]:
        facts = super().apply(model, context)
        facts.pop("validation_perplexity", None)  # the loss of DPO has none
        return facts

    def train_config(self, *args: Any) -> TrainConfig:
        config = super().train_config(*args)
        if config.schedule.warmup_steps:
            return config
        schedule = dataclasses.replace(config.schedule, warmup_steps=round(self.warmup_ratio * config.steps))
        return dataclasses.replace(config, schedule=schedule)

    def estimate_resources(self, anatomy: Anatomy, size: CalibrationSize, memory_limit: int | None) -> ResourceEstimate:
        """Count an answer of full length to every prompt from each model, and training on both."""
        plain = super().estimate_resources(anatomy, size, memory_limit)
        tokens = size.seq_len + self.max_new_tokens
        activations = gradient_bytes(anatomy, 2 * self.batch_size, tokens)
        activations -= gradient_bytes(anatomy, self.batch_size, size.seq_len)
        passes = (2 + 2 + 2 * plain.passes) * tokens / size.seq_len
        return ResourceEstimate(passes, plain.memory + max(activations, count_bytes(anatomy.network)))


class PreferenceStudent(Student):
    """The network that trains on pairs of answers; its loss is that of DPO, also in evaluation."""

    def __init__(self, network: nn.Module, beta: float, rpo_alpha: float = 0.0) -> None:
        super().__init__(network, (), None)
        self.beta, self.rpo_alpha = beta, rpo_alpha

    def inputs(self, batch: Batch) -> Batch:
        """Return all answers as rows: [pairs, 2, tokens] -> [2 * pairs, tokens]."""
        return {name: batch[name].flatten(0, 1) for name in ("input_ids", "attention_mask")}

    def forward(self, **batch: Tensor) -> Any:
        logits = self.observed(self.inputs(batch)).logits
        log_probs = answer_log_probs(logits, batch["labels"].flatten(0, 1)).unflatten(0, (-1, 2))
        loss = preference_loss(log_probs, batch["reference"], self.beta)
        if self.rpo_alpha:
            num_tokens = (batch["labels"][:, 0, 1:] != IGNORED).sum().clamp(min=1)
            loss = loss - self.rpo_alpha * log_probs[:, 0].sum() / num_tokens
        return SimpleNamespace(loss=loss + self.penalty(), logits=logits)


def preference_loss(log_probs: Tensor, reference: Tensor, beta: float) -> Tensor:
    """Return the mean loss of DPO from log-probabilities of answers [pairs, 2], the chosen one first."""
    chosen, rejected = (log_probs - reference).unbind(-1)
    return -F.logsigmoid(beta * (chosen - rejected)).mean()


def answer_log_probs(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the log-probability of the labels that are not ignored: [rows, tokens, vocabulary] -> [rows].

    In float32: the tokens of an answer are added up, and their errors with them.
    """
    labels = labels[:, 1:]
    losses = F.cross_entropy(
        logits[:, :-1].float().flatten(0, 1), labels.flatten(), reduction="none", ignore_index=IGNORED
    )
    return -losses.view_as(labels).sum(-1)


def preference_pairs(prompts: Sequence[list[int]], chosen: Sequence[list[int]], rejected: Sequence[list[int]]) -> Batch:
    """Return the answers that differ as padded tensors [pairs, 2, tokens]; see `Qdpo.make_pairs`."""
    rows = [(prompt, pair) for prompt, *pair in zip(prompts, chosen, rejected, strict=True) if pair[0] != pair[1]]
    longest = max((len(prompt) + max(map(len, pair)) for prompt, pair in rows), default=1)
    tensors = {name: torch.zeros(len(rows), 2, longest, dtype=torch.long) for name in ("input_ids", "attention_mask")}
    tensors["labels"] = torch.full((len(rows), 2, longest), IGNORED)
    first_flip = torch.zeros(len(rows), dtype=torch.long)
    for index, (prompt, pair) in enumerate(rows):
        first_flip[index] = shared = common_prefix(*pair)
        for side, answer in enumerate(pair):
            tokens = torch.tensor(prompt + answer)
            tensors["input_ids"][index, side, : len(tokens)] = tokens
            tensors["attention_mask"][index, side, : len(tokens)] = 1
            tensors["labels"][index, side, len(prompt) + shared : len(tokens)] = tokens[len(prompt) + shared :]
    return {**tensors, "first_flip": first_flip}


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the number of tokens before two answers differ."""
    shorter = min(len(first), len(second))
    return next((index for index in range(shorter) if first[index] != second[index]), shorter)


@torch.no_grad()
def _reference_log_probs(network: Any, pairs: Batch) -> Tensor:
    device = next(network.parameters()).device
    inputs = {name: pairs[name].flatten(0, 1).to(device) for name in ("input_ids", "attention_mask")}
    log_probs = answer_log_probs(network(**inputs).logits, pairs["labels"].flatten(0, 1).to(device))
    return log_probs.unflatten(0, (-1, 2)).cpu()
