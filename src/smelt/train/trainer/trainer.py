"""The loop: samples, forward, backward with the gradients on their way, the optimiser, and a line in the log.

Clipping comes after reduction, on the gradient that the optimiser sees. What a compressor holds back has then been
clipped by nobody, and what it sends holds many steps at once, so its norm is larger than a plain gradient's: a limit
that suits plain training cuts more. What is cut off is lost, as in plain training; it does not return to the memory,
since it counts as sent. DGC's own `clip` limits each worker's gradient before it is remembered.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
from contextlib import nullcontext
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as distributed
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from smelt.errors import DataError
from smelt.files import atomic_folder
from smelt.measure.machine import machine
from smelt.train.gradients import state
from smelt.train.gradients.comm import Workers
from smelt.train.trainer import checkpoint
from smelt.train.trainer.checkpoint import TrainProgress, TrainState
from smelt.train.trainer.clock import PhaseTimer
from smelt.train.trainer.config import TrainConfig
from smelt.train.trainer.evaluate import evaluate
from smelt.train.trainer.gradient_sync import GradientSync, build_compressor
from smelt.train.trainer.images import images_task
from smelt.train.trainer.language import language_task
from smelt.train.trainer.optimizer import autocast, build_optimizer, grad_scaler_for, lr_at, set_lr
from smelt.train.trainer.order import ShuffledSampler, batch_start
from smelt.train.trainer.run_folder import RunFolder, format_log_entry
from smelt.train.trainer.task import TrainingTask

_SMALLEST_SCALE = 1e-4  # of the loss: a scaler that fell below it skips every step
_SECONDS_BETWEEN_WORDS = 5.0


class Trainer:
    """One run, in one worker."""

    def __init__(self, config: TrainConfig, out: Path, device: torch.device, *, resume: bool, resplit: bool) -> None:
        self.config, self.device, self.workers = config, device, Workers()
        self.folder = RunFolder(out)
        refused = f"{out} is refused on another worker."
        state.together(self.workers, lambda: self.folder.check_usable(config, resume), refused)
        self.task = self._together(lambda: _task(config))
        self.task.network.to(device).train()
        self.clock = PhaseTimer(device)
        self.scaler = grad_scaler_for(config.precision, device)
        self.optimizer = build_optimizer(self.task.network, config.optimizer, scaled=self.scaler is not None)
        self.workers.require_equal(json.dumps([config.to_json(), self.task.facts]), "configuration and data")
        on = [device.index] if device.type == "cuda" else None
        self.model = DistributedDataParallel(self.task.network, device_ids=on, gradient_as_bucket_view=True)
        self.gradients = GradientSync(
            self.model,
            build_compressor(config.gradients),
            config.exchange,
            config.vector_mb,
            self.optimizer,
            self.scaler,
            self.clock,
        )
        self.position = TrainProgress(workers=self.workers.size)
        self.order = ShuffledSampler(len(self.task.train), config.seed)
        self._begin(resplit)

    @property
    def parts(self) -> TrainState:
        compression = self.gradients.compression
        return TrainState(self.task.network, self.optimizer, self.scaler, compression, self.position)

    def resume_hint(self) -> str:
        """What a user can do after this run has stopped."""
        return checkpoint.resume_hint(self.folder.checkpoints)

    def run(self) -> None:
        """To the last step."""
        self._started = perf_counter() - self.position.seconds
        self._spoke = -math.inf
        while self.position.step < self.config.steps:
            line = self._step()
            step, last = self.position.step, self.position.step == self.config.steps
            if last or (self.config.evaluate.every and step % self.config.evaluate.every == 0):
                line["evaluation"] = self._evaluate()
            self.position.seconds = perf_counter() - self._started
            self._log(line, last)
            if last or (self.config.checkpoint.every and step % self.config.checkpoint.every == 0):
                checkpoint.save(self.parts, self.folder.checkpoints, self.config.checkpoint.keep, self.workers)
        if self.workers.rank == 0:
            self._save_model()

    def _step(self) -> dict[str, Any]:
        """Some passes and a step of the optimiser; the line that tells of it."""
        config, position = self.config, self.position
        rate = lr_at(position.step, config.steps, config.optimizer.lr, config.schedule)
        set_lr(self.optimizer, rate)
        losses = [self._pass(part) for part in range(config.accumulate)]
        with self.clock.phase("optimizer"):
            self.gradients.settle()  # so that what was sent is known
            norm = self._norm()
            loss = float(torch.stack(losses).mean())
            traffic = self.gradients.traffic
            mean_loss, arrived, inside = self._mean(loss, traffic.bytes, traffic.inside)
            skipped = self._apply(norm, mean_loss)
        position.step += 1
        position.samples += config.batch * config.accumulate * self.workers.size
        position.bytes += arrived
        position.skipped += skipped
        position.seconds = perf_counter() - self._started
        return {
            "step": position.step,
            "seconds": position.seconds,
            "samples": position.samples,
            "loss": mean_loss,
            "rate": rate,
            "norm": norm,
            "skipped": skipped,
            "bytes": arrived,
            "all_bytes": position.bytes,
            "inside": inside,
            "density": traffic.density,
            "build_up": traffic.build_up,
            "padding": traffic.inefficiency if traffic.slots else None,
            "phases": self.clock.take(),
        }

    def _pass(self, part: int) -> Tensor:
        """Forward and backward of one batch; gradients are sent in the last pass of a step. The loss, []"""
        config, last = self.config, part == self.config.accumulate - 1
        with self.clock.phase("data"):
            start = batch_start(self.position.samples, part, config.batch, self.workers.size, self.workers.rank)
            batch = self.task.train.take(self.order.places(start, config.batch))
            batch = {name: tensor.to(self.device) for name, tensor in batch.items()}
            torch.manual_seed(config.seed * 1_000_003 + start)  # of dropout: nothing random must be kept
        with nullcontext() if last else self.model.no_sync():
            with self.clock.phase("forward"), autocast(config.precision, self.device):
                loss = self.model(**batch, **self.task.options).loss
            with self.clock.phase("backward"):
                scaled = loss / config.accumulate
                (scaled if self.scaler is None else self.scaler.scale(scaled)).backward()
        detached: Tensor = loss.detach()
        return detached

    def _norm(self) -> float:
        """Of the reduced gradient, clipped if the run says so; the same on every worker."""
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        parameters = [parameter for parameter in self.task.network.parameters() if parameter.grad is not None]
        if self.config.clip is not None:
            return float(torch.nn.utils.clip_grad_norm_(parameters, self.config.clip))
        return float(torch.nn.utils.get_total_norm([each.grad for each in parameters if each.grad is not None]))

    def _mean(self, *values: float) -> list[float]:
        """Over all workers; what is not finite on one is not finite on all."""
        summed = torch.tensor(values, dtype=torch.float64)
        distributed.all_reduce(summed)
        found: list[float] = (summed / self.workers.size).tolist()
        return found

    def _apply(self, norm: float, loss: float) -> bool:
        """The optimiser's step; whether it was skipped."""
        number = self.position.step
        if not math.isfinite(loss) or (self.scaler is None and not math.isfinite(norm)):
            what = "gradients" if math.isfinite(loss) else "loss"
            raise DataError(f"the {what} of step {number} is not finite; lower the learning rate, or look at the data.")
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
            if self.scaler.get_scale() < _SMALLEST_SCALE:
                raise DataError(f"the gradients of step {number} are not finite however small the loss is scaled.")
        self.optimizer.zero_grad()
        return not math.isfinite(norm)

    def _evaluate(self) -> dict[str, float]:
        config = self.config
        return evaluate(self.task, config.evaluate.samples, config.batch, config.precision, self.device)

    def _begin(self, resplit: bool) -> None:
        """Go on from the newest checkpoint, or begin; the log ends where the run begins."""
        place = checkpoint.newest(self.folder.checkpoints)
        if place is not None:
            checkpoint.load(self.parts, place, self.workers, resplit=resplit)
        self._decision = self.folder.read_metadata().get("decision") if self.folder.exists() else None
        self.workers.gather(torch.zeros(1), "agreement")  # all have read what is written anew now
        if self.workers.rank == 0:
            self.folder.truncate_log(self.position.step)
            self._write_facts()
            checkpoint.clear_unfinished(self.folder.checkpoints)

    def _write_facts(self) -> None:
        network = self.task.network
        facts = {
            "config": self.config.to_json(),
            "workers": self.workers.size,
            "backend": distributed.get_backend(),
            "device": self.device.type,
            "parameters": sum(parameter.numel() for parameter in network.parameters()),
            "model_type": network.config.model_type,
            "data": self.task.facts,
            "decision": self._decision,
            "machine": machine(),
        }
        self.folder.write_metadata(facts)

    def _log(self, line: dict[str, Any], last: bool) -> None:
        if self.workers.rank:
            return
        self.folder.append_log(line)
        if self.gradients.decision is not None and self._decision is None:
            self._decision = self.gradients.decision
            self._write_facts()
        now = perf_counter()
        if last or "evaluation" in line or now - self._spoke > _SECONDS_BETWEEN_WORDS:
            self._spoke = now
            print(format_log_entry(line, self.config.steps), file=sys.stderr, flush=True)

    def _save_model(self) -> None:
        with atomic_folder(self.folder.model) as temporary:
            self.task.save(temporary)
            shutil.rmtree(self.folder.model, ignore_errors=True)  # of a run that was shorter

    def _together(self, work: Any) -> Any:
        """What every worker makes for itself; if one cannot, all end with a sentence."""
        made = []
        state.together(self.workers, lambda: made.append(work()), "another worker could not load model or data.")
        return made[0]


def _task(config: TrainConfig) -> TrainingTask:
    return language_task(config) if config.task == "language" else images_task(config)
