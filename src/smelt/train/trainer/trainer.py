"""The training loop: batches, forward, backward with gradient synchronization, optimizer step, log, checkpoints.

Clipping comes after reduction, on the gradient that the optimizer sees. A compressor's residual is not clipped, and
what it sends has accumulated over many steps, so its norm is larger than a plain gradient's: a limit that suits plain
training clips more. What is clipped is lost, as in plain training; it does not return to the residual, since it counts
as sent. DGC's own `clip` limits each rank's gradient before it is accumulated.
"""

from __future__ import annotations

import json
import logging
import math
import shutil
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as distributed
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from smelt.errors import DataError, DivergenceError
from smelt.files import atomic_folder
from smelt.measure.machine import machine
from smelt.models.finite import find_non_finite_layer, is_finite
from smelt.train.fp8.gemm_flops import count_gemm_flops
from smelt.train.gradients.comm import Comm, run_on_all_ranks
from smelt.train.timing import PhaseTimer
from smelt.train.trainer import checkpoint
from smelt.train.trainer.checkpoint import TrainProgress, TrainState
from smelt.train.trainer.config import TrainConfig
from smelt.train.trainer.cuda_graphs import CudaGraphs
from smelt.train.trainer.dataloader import Batch, ShuffledSampler, batch_start
from smelt.train.trainer.gradient_sync import GradientSync, build_compressor
from smelt.train.trainer.optimizer import (
    autocast,
    build_optimizer,
    convert_layers,
    grad_scaler_for,
    lr_at,
    set_lr,
)
from smelt.train.trainer.regional_compilation import compile_network, restore_eager
from smelt.train.trainer.run_folder import RunFolder, format_log_entry, format_low_precision
from smelt.train.trainer.tasks import TrainingTask, build_task

_MIN_LOSS_SCALE = 1e-4  # a scaler that fell below it skips every step
logger = logging.getLogger(__name__)
_LOG_INTERVAL = 5.0  # seconds


class Trainer:
    """One training run on one rank, of the task that the configuration describes or of another one."""

    def __init__(
        self, config: TrainConfig, out: Path, device: torch.device, *, resume: bool, resplit: bool,
        task: TrainingTask | None = None,
    ) -> None:  # fmt: skip
        self.config, self.device, self.comm = config, device, Comm()
        self.folder = RunFolder(out)
        self._on_all_ranks(lambda: self.folder.check_usable(config, resume), f"{out} is refused on another rank.")
        self.task = task or self._on_all_ranks(lambda: build_task(config), "another rank could not load model or data.")
        self.task.network.to(device).train()
        self.low_precision = self._on_all_ranks(
            lambda: convert_layers(self.task.network, config), f"another rank cannot train in {config.precision}."
        )
        self._low_precision_facts: dict[str, Any] | None = None  # with the share of FP8 GEMMs
        self._compiled = compile_network(self.task.network) if config.compile else []
        self.timer = PhaseTimer(device)
        self.scaler = grad_scaler_for(config, device)
        self.optimizer = build_optimizer(self.task.network, config)
        self.comm.require_equal(json.dumps([config.to_json(), self.task.metadata]), "configuration and data")
        compressor = build_compressor(config.gradients)
        self.model = self.task.network
        is_alone = self.comm.world_size == 1 and compressor is None
        if not is_alone:
            device_ids = [device.index] if device.type == "cuda" else None
            self.model = DistributedDataParallel(self.task.network, device_ids=device_ids, gradient_as_bucket_view=True)
        self.gradient_sync = GradientSync(
            self.model, compressor, config.exchange, config.bucket_cap_mb, self.optimizer, self.scaler, self.timer
        )
        can_capture = is_alone and device.type == "cuda" and config.cuda_graphs
        self.cuda_graphs = CudaGraphs(self._forward_backward, device, self.timer) if can_capture else None
        self.progress = TrainProgress(world_size=self.comm.world_size)
        self._decision: dict[str, Any] | None = None  # of `auto`
        self.sampler = ShuffledSampler(len(self.task.train), config.seed)
        self._start_or_resume(resume, resplit)

    @property
    def state(self) -> TrainState:
        compression = self.gradient_sync.compression
        return TrainState(self.task.network, self.optimizer, self.scaler, compression, self.progress)

    def resume_hint(self) -> str:
        """Return the end of a sentence: how to continue this run after it has stopped."""
        return checkpoint.resume_hint(self.folder.checkpoints)

    def train(self) -> None:
        """Train to the last step, and save the model."""
        for _ in self.steps():
            continue

    def steps(self) -> Iterator[dict[str, Any]]:
        """Train as `train` does; yield the log entry of each step."""
        config = self.config
        self._started = perf_counter() - self.progress.seconds
        self._last_logged = -math.inf
        try:
            while self.progress.step < config.steps:
                entry = self.train_step()
                step, is_last = self.progress.step, self.progress.step == config.steps
                if is_last or (config.evaluate.every and step % config.evaluate.every == 0):
                    entry["evaluation"] = evaluate(
                        self.task, config.evaluate.samples, config.batch_size, config.precision, self.device
                    )
                self.progress.seconds = perf_counter() - self._started
                self.log(entry, is_last)
                if is_last or (config.checkpoint.every and step % config.checkpoint.every == 0):
                    checkpoint.save(self.state, self.folder.checkpoints, config.checkpoint.keep, self.comm)
                yield entry
        finally:
            if self.cuda_graphs is not None:
                self.cuda_graphs.release()
        self.low_precision.restore()
        restore_eager(self._compiled)
        if self.comm.rank == 0 and self.task.saves_model:
            self._save_model()

    def train_step(self) -> dict[str, Any]:
        """Run the micro-steps and the optimizer step; return the log entry."""
        config, progress = self.config, self.progress
        lr = lr_at(progress.step, config.steps, config.optimizer.lr, config.schedule)
        set_lr(self.optimizer, lr)
        self.task.on_step(progress.step)
        losses = self._run_micro_steps()
        with self.timer.phase("optimizer"):
            self.gradient_sync.resolve_deferred()  # so that the traffic is known
            grad_norm = self._clip_grad_norm()
            local_loss = float(torch.stack(losses).mean())
            traffic = self.gradient_sync.traffic
            loss, received, intra_node = self._mean_over_ranks(local_loss, traffic.bytes, traffic.intra_node)
            skipped = self._optimizer_step(grad_norm, loss)
            self.low_precision.after_step()
        progress.step += 1
        progress.samples += config.batch_size * config.gradient_accumulation_steps * self.comm.world_size
        progress.bytes += received
        progress.skipped += skipped
        progress.seconds = perf_counter() - self._started
        return {
            "step": progress.step,
            "seconds": progress.seconds,
            "samples": progress.samples,
            "loss": loss,
            "lr": lr,
            "grad_norm": grad_norm,
            "skipped": skipped,
            "bytes": received,
            "total_bytes": progress.bytes,
            "intra_node_bytes": intra_node,
            "density": traffic.density,
            "build_up": traffic.build_up,
            "padding": traffic.padding_overhead if traffic.padded_count else None,
            "phases": self.timer.pop_seconds(),
            **self.task.log_values(),
        }

    def log(self, entry: dict[str, Any], is_last: bool) -> None:
        """Append an entry to the run's log file, and log one every few seconds; on rank 0 only."""
        if self.comm.rank:
            return
        self.folder.append_log(entry)
        if self.gradient_sync.decision is not None and self._decision is None:
            self._decision = self.gradient_sync.decision
            self._write_metadata()
        now = perf_counter()
        if is_last or "evaluation" in entry or now - self._last_logged > _LOG_INTERVAL:
            self._last_logged = now
            logger.info(format_log_entry(entry, self.config.steps))

    def _run_micro_steps(self) -> list[Tensor]:
        """Return the loss of each; in the first step of a run in FP8, also count the FLOPs of its GEMMs."""
        losses: list[Tensor] = []

        def run() -> None:
            losses.extend(map(self._run_micro_step, range(self.config.gradient_accumulation_steps)))

        if self.low_precision.converted and self.progress.step == 0:
            self._low_precision_facts = {**self.low_precision.to_json(), **count_gemm_flops(run)}
            logger.info(format_low_precision(self._low_precision_facts))
            if self.comm.rank == 0:
                self._write_metadata()
        else:
            run()
        return losses

    def _run_micro_step(self, micro_step: int) -> Tensor:
        """Run forward and backward of one batch and return its loss, []; the last micro-step sends the gradients."""
        with self.timer.phase("data"):
            batch = self._next_batch(micro_step)
        if self.cuda_graphs is not None and (state := self.task.graph_state()) is not None:
            return self.cuda_graphs(batch, state)
        is_last = micro_step == self.config.gradient_accumulation_steps - 1
        with nullcontext() if is_last or self.model is self.task.network else self.model.no_sync():
            return self._forward_backward(batch)

    def _forward_backward(self, batch: Batch) -> Tensor:
        """Add the gradients of a batch and return its loss, []."""
        config = self.config
        with self.timer.phase("forward"), autocast(config.precision, self.device):
            loss = self.model(**batch, **self.task.forward_kwargs).loss
        with self.timer.phase("backward"):
            scaled = loss / config.gradient_accumulation_steps
            (scaled if self.scaler is None else self.scaler.scale(scaled)).backward()
        detached: Tensor = loss.detach()
        return detached

    def _next_batch(self, micro_step: int) -> Batch:
        """Return this rank's batch, and seed the random numbers of its forward pass."""
        config = self.config
        start = batch_start(self.progress.samples, micro_step, config.batch_size, self.comm.world_size, self.comm.rank)
        batch = self.task.train.batch(self.sampler.indices(start, config.batch_size))
        torch.manual_seed(config.seed * 1_000_003 + start)  # for dropout: no RNG state has to be saved
        return {name: self._to_device(tensor) for name, tensor in batch.items()}

    def _to_device(self, tensor: Tensor) -> Tensor:
        """Move a tensor of a batch; images on a GPU become channels-last, as do the activations that follow from them.

        cuDNN's tensor-core convolutions are channels-last: others transpose their input and output every time.
        """
        tensor = tensor.to(self.device)
        is_image = tensor.dim() == 4 and tensor.is_floating_point()
        if is_image and self.device.type == "cuda":
            return tensor.contiguous(memory_format=torch.channels_last)
        return tensor

    def _clip_grad_norm(self) -> float:
        """Return the norm of the reduced gradient, which is clipped if configured; the same on every rank."""
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        parameters = [parameter for parameter in self.task.network.parameters() if parameter.grad is not None]
        if self.config.max_grad_norm is not None:
            return float(torch.nn.utils.clip_grad_norm_(parameters, self.config.max_grad_norm))
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        return float(torch.nn.utils.get_total_norm(gradients))

    def _mean_over_ranks(self, *values: float) -> list[float]:
        """Average values over all ranks; what is not finite on one is not finite on all."""
        total = torch.tensor(values, dtype=torch.float64)
        distributed.all_reduce(total)
        mean: list[float] = (total / self.comm.world_size).tolist()
        return mean

    def _optimizer_step(self, grad_norm: float, loss: float) -> bool:
        """Step the optimizer; return whether the gradient scaler skipped it."""
        step = self.progress.step
        if not math.isfinite(loss) or (self.scaler is None and not math.isfinite(grad_norm)):
            self._raise_diverged("gradient norm" if math.isfinite(loss) else "loss")
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
            if self.scaler.get_scale() < _MIN_LOSS_SCALE:
                raise DataError(
                    f"the gradients of step {step} are not finite even at the smallest loss scale; use bf16, or check "
                    "the data."
                )
        self.optimizer.zero_grad(set_to_none=self.cuda_graphs is None)  # graphs add to gradients where they are
        return not math.isfinite(grad_norm)

    def _raise_diverged(self, source: str) -> NoReturn:
        """Keep the weights before this step, and say in which layer of this rank it began."""
        checkpoint.save(self.state, self.folder.checkpoints, self.config.checkpoint.keep, self.comm)
        layer = self._gradient_origin() if source == "gradient norm" else self._loss_origin()
        origin, step = f" (it began in {layer})" if layer else "", self.progress.step
        raise DivergenceError(
            f"the {source} of step {step} is not finite{origin}; lower the learning rate, or check the data. The "
            f"weights before it are kept in {self.folder.checkpoints / f'step-{step}'}."
        )

    def _loss_origin(self) -> str | None:
        """Return the layer that makes a batch of this step not finite; None if that is another rank's."""
        for micro_step in range(self.config.gradient_accumulation_steps):
            run = partial(self.task.network, **self._next_batch(micro_step), **self.task.forward_kwargs)
            with autocast(self.config.precision, self.device):
                layer = find_non_finite_layer(self.task.layers, run)
            if layer is not None:
                return layer
        return None

    def _gradient_origin(self) -> str | None:
        """Return the last layer with a gradient that is not finite: a backward pass spreads it to all before."""
        gradients = [(name, p.grad) for name, p in self.task.layers.named_parameters() if p.grad is not None]
        broken = [name for name, gradient in gradients if not is_finite(gradient)]
        return broken[-1].rpartition(".")[0] if broken else None

    def _start_or_resume(self, resume: bool, resplit: bool) -> None:
        """Load the newest checkpoint if there is one; the log is cut to end where the run starts."""
        latest = checkpoint.latest(self.folder.checkpoints)
        if latest is not None:
            checkpoint.load(self.state, latest, self.comm, resplit=resplit)
            self.low_precision.on_load()
        elif resume and self.comm.rank == 0:
            logger.info("no checkpoint in %s; starting from the first step", self.folder.checkpoints)
        before = self.folder.read_metadata() if self.folder.exists() else {}
        self._decision, self._low_precision_facts = before.get("decision"), before.get("low_precision")
        self.comm.all_gather(torch.zeros(1), "agreement")  # all ranks have read what is rewritten now
        if self.comm.rank == 0:
            self._write_metadata()  # first, so that what a kill leaves is a run to resume
            self.folder.truncate_log(self.progress.step)
            checkpoint.prepare_folder(self.folder.checkpoints)

    def _write_metadata(self) -> None:
        network = self.task.network
        metadata = {
            "config": self.config.to_json(),
            "world_size": self.comm.world_size,
            "backend": distributed.get_backend(),
            "device": self.device.type,
            "parameters": sum(parameter.numel() for parameter in network.parameters()),
            "model_type": network.config.model_type,
            "data": self.task.metadata,
            "decision": self._decision,
            "low_precision": self._low_precision_facts,
            "machine": machine(),
        }
        self.folder.write_metadata(metadata)

    def _save_model(self) -> None:
        with atomic_folder(self.folder.model) as temporary:
            self.task.save(temporary)
            shutil.rmtree(self.folder.model, ignore_errors=True)  # of a run with fewer steps

    def _on_all_ranks(self, work: Callable[[], Any], other_failed: str) -> Any:
        """Return this rank's result; if any rank fails, all end with a sentence."""
        results: list[Any] = []
        run_on_all_ranks(self.comm, lambda: results.append(work()), other_failed)
        return results[0]


@torch.no_grad()
def evaluate(
    task: TrainingTask, samples: int, batch_size: int, precision: str, device: torch.device
) -> dict[str, float]:
    """Compute the loss, and accuracy or perplexity, on the first `samples` held-out samples, shared among the ranks."""
    rank, world_size = distributed.get_rank(), distributed.get_world_size()
    count = min(samples, len(task.held_out))
    totals = torch.zeros(3, dtype=torch.float64)  # loss, correct predictions, samples
    _broadcast_buffers(task)
    task.network.eval()
    for start in range(rank * batch_size, count, world_size * batch_size):
        indices = np.arange(start, min(start + batch_size, count))
        batch = {name: tensor.to(device) for name, tensor in task.held_out.batch(indices).items()}
        with autocast(precision, device):
            output = task.network(**batch, **task.forward_kwargs)
        correct = (output.logits.argmax(dim=-1) == batch["labels"]).sum().item() if task.is_classifier else 0.0
        totals += torch.tensor([output.loss.item() * len(indices), correct, len(indices)], dtype=torch.float64)
    task.network.train()
    distributed.all_reduce(totals)
    loss, correct, num_samples = totals.tolist()
    if task.is_classifier:
        return {"loss": loss / num_samples, "accuracy": correct / num_samples}
    if not task.has_perplexity:
        return {"loss": loss / num_samples}
    return {"loss": loss / num_samples, "perplexity": math.exp(min(loss / num_samples, 700.0))}


def _broadcast_buffers(task: TrainingTask) -> None:
    """Use rank 0's running statistics, which are saved; they differ between ranks until the next forward pass."""
    for buffer in task.network.buffers():
        distributed.broadcast(buffer, 0)
