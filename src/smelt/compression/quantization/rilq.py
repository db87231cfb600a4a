"""RILQ: low-rank adapters on all quantized layers, trained jointly on the last hidden state (Lee et al., 2025).

At two bits the error of a layer has high rank, which no low-rank adapter can undo locally. Trained on the output of the
network, layers with spare rank compensate for the others, and the result depends little on the rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from smelt.compression.base import METHODS, CalibrationSize, Method, MethodContext, ResourceEstimate, one_of, within
from smelt.compression.calibration.block_inputs import ActivationStore
from smelt.compression.calibration.gradients import frozen, gradient_bytes
from smelt.compression.quantization.adapters import Adapter, attached, check_mergeable
from smelt.compression.quantization.chunked_loss import sum_in_chunks
from smelt.config import renamed
from smelt.errors import DataError, ModelError
from smelt.measure.cost import block_parameters, count_bytes, count_parameters
from smelt.models.anatomy import Anatomy
from smelt.models.load import load, skeleton
from smelt.models.model import Model
from smelt.models.quantized import QuantizedLinear, quantized_layers
from smelt.models.quantized_network import linear_weight, replace_module

VALIDATION = 0.2  # fraction of the batches, the last ones, that select the best adapters
Batch = dict[str, Tensor]


@METHODS.register("rilq", paper="Lee et al., 2025 (RILQ, arXiv 2412.01129)", needs=("calibration data",))
@dataclass(frozen=True)
class Rilq(Method):
    """Use after a 2 or 3-bit quantizer, to recover quality with trained low-rank adapters.

    Put it after a quantizer. `init: svd` with no updates is LoftQ's first round. `merge: true` works as in QA-LoRA;
    that RILQ merges the same way is from memory (medium confidence): the paper was not at hand.
    """

    teacher: str | None = None  # the unquantized model, a name or folder; null: the source model of the run
    rank: int = 64  # of the adapters
    init: str = renamed("initial", default="zero")  # zero, or svd (the best approximation of each layer's error)
    merge: bool = False  # merge adapters of pooled inputs into float16 zero points; false: keep them separate
    gt_loss_weight: float = renamed("truth", default=0.5)  # next-token loss; the rest: hidden-state error
    lr: float = renamed("rate", default=1e-4)  # of Adam
    updates: int = 1250  # at most
    accumulation: int = 8  # batches per update; the paper uses batches of one sample of 512 tokens
    validate_every: int = renamed("every", default=25)  # updates
    patience: int = 5  # validations without improvement before training stops

    def __post_init__(self) -> None:
        one_of(self.name, "init", self.init, ("zero", "svd"))
        within(self.name, "rank", self.rank, 1, 65_536)
        within(self.name, "gt_loss_weight", self.gt_loss_weight, 0.0, 1.0)
        within(self.name, "lr", self.lr, 1e-8, 1.0)
        within(self.name, "updates", self.updates, 0, 1_000_000)
        for name in ("accumulation", "validate_every", "patience"):
            within(self.name, name, getattr(self, name), 1, 1_000_000)

    def check(self, anatomy: Anatomy) -> None:
        layers = quantized_layers(anatomy.network)
        if not layers:
            raise ModelError("rilq compensates the error of a quantizer: put one, such as rtn, before it.")
        if not anatomy.family.causal or anatomy.network.get_output_embeddings() is None:
            raise ModelError("rilq trains on the next token: it needs a language model.")
        for path, layer in layers.items():
            if layer.scheme.rank:
                raise ModelError(f"{path} has low-rank adapters already; start from the model without them.")
            if self.merge:
                check_mergeable(layer, path)

    def estimate_resources(self, anatomy: Anatomy, size: CalibrationSize, memory_limit: int | None) -> ResourceEstimate:
        hidden = 4 * size.tokens * anatomy.hidden_size
        matrices = 4 * block_parameters(anatomy)
        training = (
            matrices
            + 4 * 4 * self._adapter_parameters(anatomy)
            + gradient_bytes(anatomy, size.batch_size, size.seq_len)
        )
        epochs = self.updates * self.accumulation * size.batch_size / size.samples
        stored = hidden if memory_limit is None else min(hidden, memory_limit)
        return ResourceEstimate(passes=1 + 3 * epochs, memory=stored + training)

    def added_parameters(self, anatomy: Anatomy) -> int:
        return 0 if self.merge else self._adapter_parameters(anatomy)

    def _adapter_parameters(self, anatomy: Anatomy) -> int:
        """Return the parameter count of adapters on all layers of the blocks, inputs not pooled."""
        in_parts = (projection for part in anatomy.parts for projection in (*part.input_projections, part.output))
        projections = (*in_parts, *(layer for block in anatomy.blocks for layer in block.other_layers))
        sizes = {layer.path: (layer.module_rows, layer.in_features) for layer in projections}
        return sum(min(self.rank, *size) * sum(size) for size in sizes.values())

    def apply(self, model: Model, context: MethodContext) -> dict[str, Any]:
        self.check(model.anatomy)
        if len(context.batches) < 2:
            raise DataError("rilq needs at least two batches of calibration data: the last fifth is for validation.")
        layers = quantized_layers(model.network)
        before, dtype = count_bytes(model.network), next(model.network.parameters()).dtype
        adapters = {path: Adapter(layer, self.rank, self.merge) for path, layer in layers.items()}
        teacher_states = self._init_adapters(model, context, layers, adapters)
        training = _Training(self, model, context, adapters, teacher_states)
        with frozen(model.network), attached(layers, adapters, dtype):
            facts = training.run()
        for path, layer in layers.items():
            if self.merge:
                replace_module(model.network, path, adapters[path].merge_into_layer(layer, path, dtype))
            else:
                adapters[path].add_to_layer(layer, dtype)
        adapted = quantized_layers(model.network).values()
        bits = sum(layer.bits_per_weight * layer.in_features * layer.out_features for layer in adapted)
        return {
            "layers_adapted": len(layers),
            "bits_per_weight": bits
            / sum(layer.in_features * layer.out_features for layer in adapted),  # adapters included
            "bytes_before": before,
            "bytes_after": count_bytes(model.network),
            **facts,
        }

    def _init_adapters(
        self, model: Model, context: MethodContext, layers: dict[str, QuantizedLinear], adapters: dict[str, Adapter]
    ) -> ActivationStore:
        """Initialize the adapters and return the teacher's last hidden states, one tensor per batch."""
        generator = torch.Generator().manual_seed(context.seed)
        for adapter in adapters.values():
            adapter.init_gaussian(generator)
        teacher = self._load_teacher(model)
        if self.init == "svd":
            _check_untransformed(model, teacher)
            modules = dict(teacher.network.named_modules())
            for path, layer in layers.items():
                adapters[path].init_from_error(linear_weight(modules[path]).float() - layer.weight)
        teacher_states = ActivationStore(context.memory_limit, context.folder)
        with torch.no_grad(), frozen(teacher.network):
            for position, batch in enumerate(context.progress.track(context.batches, "the teacher")):
                teacher_states[position] = last_hidden_state(teacher, batch).cpu()
        return teacher_states

    def _load_teacher(self, model: Model) -> Model:
        """Load the unquantized model, after checking that it is not quantized and has the same sizes."""
        spec = self.teacher or model.source
        if not spec:
            raise ModelError("rilq needs the unquantized model: name it, as `teacher: FOLDER`.")
        outline = skeleton(spec)
        if quantized_layers(outline):
            raise ModelError(f"the teacher {spec} is itself quantized; set `teacher` to the model it was made from.")
        ours, theirs = (network.config.get_text_config() for network in (model.network, outline))
        if (ours.hidden_size, ours.vocab_size) != (theirs.hidden_size, theirs.vocab_size):
            raise ModelError(f"the teacher {spec} has another hidden size or vocabulary than this model; use another.")
        return load(spec, device=str(model.device))


class _Training:
    """Train all adapters with Adam and periodic validation; resumable."""

    def __init__(
        self,
        settings: Rilq,
        model: Model,
        context: MethodContext,
        adapters: dict[str, Adapter],
        teacher_states: ActivationStore,
    ) -> None:
        self.settings, self.model, self.context, self.teacher_states = settings, model, context, teacher_states
        self.head = model.network.get_output_embeddings()
        held_out = max(1, int(len(context.batches) * VALIDATION))
        self.train_batches = list(range(len(context.batches) - held_out))
        self.validation_batches = list(range(len(context.batches) - held_out, len(context.batches)))
        names = {f"{path}.{name}": p for path, adapter in adapters.items() for name, p in adapter.named_parameters()}
        self.parameters = names
        self.optimizer = torch.optim.Adam(names.values(), lr=settings.lr)
        self.best: dict[str, Tensor] = {}
        self.losses: list[float] = []  # of the validations
        self.update = 0

    def run(self) -> dict[str, Any]:
        """Train until validation stops improving, and restore the best adapters."""
        self._resume()
        if not self.losses:
            self._validate()
        settings = self.settings
        for update in self.context.progress.track(range(self.update, settings.updates), "training the adapters"):
            if self._out_of_patience:
                break
            self._step(update)
            self.update = update + 1
            if self.update % settings.validate_every == 0 or self.update == settings.updates:
                self._validate()
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(self.best[name])
        return {"updates": self.update, "loss_before": self.losses[0], "loss_after": min(self.losses)}

    @property
    def _out_of_patience(self) -> bool:
        """Return whether the best loss is `patience` or more validations old."""
        return len(self.losses) - 1 - self.losses.index(min(self.losses)) >= self.settings.patience

    def _step(self, update: int) -> None:
        """Run one optimizer update; batches are cycled in order."""
        self.optimizer.zero_grad()
        for micro in range(self.settings.accumulation):
            batch = self.train_batches[(update * self.settings.accumulation + micro) % len(self.train_batches)]
            (self.loss(batch) / self.settings.accumulation).backward()
        self.optimizer.step()

    @torch.no_grad()
    def _validate(self) -> None:
        loss = sum(float(self.loss(batch)) for batch in self.validation_batches) / len(self.validation_batches)
        if not torch.isfinite(torch.tensor(loss)):
            raise DataError("the loss of rilq is not a finite number: look for NaN in the data, or lower its lr.")
        if not self.losses or loss < min(self.losses):
            self.best = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}
        self.losses.append(loss)
        self._save_checkpoint()

    def loss(self, position: int) -> Tensor:
        """Return (1 - w) MSE of the last hidden state + w cross-entropy of the next token, over the unmasked tokens
        of a batch, with w = `gt_loss_weight`."""
        batch, gt_weight = self.context.batches[position], self.settings.gt_loss_weight
        hidden = last_hidden_state(self.model, batch)  # [batch, tokens, hidden size]
        tokens = batch["input_ids"].to(hidden.device)
        mask = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).to(hidden.device).bool()
        hidden_mse = (hidden.float() - self.teacher_states[position].to(hidden.device).float())[mask].square().mean()
        valid = mask[:, :-1] & mask[:, 1:]
        rows, next_tokens = hidden[:, :-1][valid], tokens[:, 1:][valid]
        next_token = sum_in_chunks(self._next_token_loss, rows, next_tokens, self.head.weight.shape[0]) / max(
            1, len(rows)
        )
        return (1 - gt_weight) * hidden_mse + gt_weight * next_token

    def _next_token_loss(self, rows: Tensor, next_tokens: Tensor) -> Tensor:
        return F.cross_entropy(self.head(rows).float(), next_tokens, reduction="sum")

    def _save_checkpoint(self) -> None:
        """Save to alternating slots: the facts, written last, always name a complete one."""
        slot = f"factors-{len(self.losses) % 2}"
        tensors: dict[str, Tensor] = {f"now.{name}": parameter for name, parameter in self.parameters.items()}
        tensors |= {f"best.{name}": tensor for name, tensor in self.best.items()}
        for name, parameter in self.parameters.items():
            state = self.optimizer.state.get(parameter, {})
            tensors |= {f"{key}.{name}": value for key, value in state.items()}
        self.context.checkpoint.save(slot, tensors)
        self.context.checkpoint.save_facts("training", {"slot": slot, "update": self.update, "losses": self.losses})

    @torch.no_grad()
    def _resume(self) -> None:
        facts = self.context.checkpoint.load_facts("training")
        tensors = self.context.checkpoint.load(facts["slot"]) if facts else None
        if facts is None or tensors is None:
            return
        self.update, self.losses = facts["update"], facts["losses"]
        for name, parameter in self.parameters.items():
            parameter.copy_(tensors[f"now.{name}"])
            self.best[name] = tensors[f"best.{name}"].to(parameter.device)
            if f"step.{name}" in tensors:
                moments = {key: tensors[f"{key}.{name}"].to(parameter.device) for key in ("exp_avg", "exp_avg_sq")}
                self.optimizer.state[parameter] = {"step": tensors[f"step.{name}"], **moments}


def last_hidden_state(model: Model, batch: Batch) -> Tensor:
    """Return the input of the head, after the final norm: [batch, tokens, hidden size]."""
    inputs = {name: batch[name].to(model.device) for name in ("input_ids", "attention_mask") if name in batch}
    hidden: Tensor = model.network.base_model(**inputs, use_cache=False).last_hidden_state
    return hidden


def _check_untransformed(model: Model, teacher: Model) -> None:
    """Raise unless all unquantized weights equal the teacher's, so that the teacher has the weights before rounding."""
    theirs = dict(teacher.network.named_parameters())
    ours = {name: p for name, p in model.network.named_parameters() if name in theirs}
    same = all(p.shape == theirs[name].shape and torch.equal(p, theirs[name].to(p)) for name, p in ours.items())
    if not same or any(layer.scheme.hadamard for layer in quantized_layers(model.network).values()):
        raise ModelError(
            "`init: svd` compares weights, and this network was transformed before it was quantized; use `init: zero`."
        )
    if count_parameters(model.network) != count_parameters(teacher.network):
        raise ModelError("`init: svd` compares weights, and the teacher has different ones; use `init: zero`.")
