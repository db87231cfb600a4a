"""A teacher whose logits were computed once, for every training sample, and are read from disk.

Of a large vocabulary only the likeliest tokens of each position are stored, with the label, as log-probabilities in
float16; what is left of the probability is shared equally by all other tokens. Few classes are stored as they are.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import ClassVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from smelt.compression.base import Batch
from smelt.compression.distillation.intermediates import NetworkOutputs
from smelt.compression.distillation.samples import SAMPLE_INDICES, Samples
from smelt.compression.distillation.student import NetworkTeacher, Student
from smelt.errors import DataError, ModelError
from smelt.files import write_atomically
from smelt.progress import Progress
from smelt.train.gradients.comm import Comm

CLASSES = "classes"
SHARD_SIZE = 256  # samples per file: an interrupted run goes on with the next one


class CachedTeacher(NetworkTeacher):
    """The logits of another teacher, which is not needed any more once training begins."""

    capturable: ClassVar[bool] = False  # it reads files

    def __init__(self, teacher: NetworkTeacher, top_k: int) -> None:
        self._teacher: NetworkTeacher | None = teacher
        self.top_k, self._classes = top_k, 0
        self._shards: list[Path] = []

    def compile(self) -> None:
        if self._teacher is not None:
            self._teacher.compile()

    @torch.no_grad()
    def begin(self, student: Student, samples: Samples, folder: Path, batch_size: int, progress: Progress) -> None:
        """Compute what the folder does not hold yet; several ranks share the work."""
        assert self._teacher is not None
        samples.tensors[SAMPLE_INDICES] = torch.arange(len(samples), device=samples.device)
        starts, comm = range(0, len(samples), SHARD_SIZE), Comm()
        self._shards = [folder / f"logits-{start}.safetensors" for start in starts]
        own = list(zip(starts, self._shards, strict=True))[comm.rank :: comm.world_size]
        for start, path in progress.track(own, "logits of the teacher", total=len(own)):
            if not path.exists():
                rows = range(start, min(start + SHARD_SIZE, len(samples)))
                write_atomically(path, partial(save_file, self._compute(student, samples, rows, batch_size)))
        comm.all_gather(torch.zeros(1), "agreement")  # all shards are written
        self._classes = int(self._read(0)[CLASSES])
        self._teacher = None

    def check(self, student: Student, batch: Batch) -> None:
        student.eval()
        classes = student(**student.inputs(batch)).logits.shape[-1]
        student.train()
        if classes != self._classes:
            raise ModelError(f"the teacher has {self._classes} classes and the student {classes}; take another one.")

    @torch.compiler.disable  # it reads files
    def outputs(self, student: Student, batch: Batch) -> NetworkOutputs:
        rows = [self._read(index) for index in batch[SAMPLE_INDICES].tolist()]
        device = batch[SAMPLE_INDICES].device
        stacked = {name: torch.stack([row[name] for row in rows]).to(device) for name in rows[0]}
        if "input_ids" in batch:  # a batch may have less padding than the samples had
            tokens = batch["input_ids"].shape[1]
            stacked = {name: value[:, :tokens] if value.dim() == 3 else value for name, value in stacked.items()}
        if "logits" in stacked:
            return NetworkOutputs(stacked["logits"])
        return NetworkOutputs(expand(stacked["indices"], stacked["log_probs"], self._classes))

    def _compute(self, student: Student, samples: Samples, rows: range, batch_size: int) -> Batch:
        """Return what is stored of these samples, and the number of classes."""
        assert self._teacher is not None
        parts: list[Batch] = []
        for start in range(rows.start, rows.stop, batch_size):
            batch = {name: t[start : min(start + batch_size, rows.stop)] for name, t in samples.tensors.items()}
            logits = self._teacher.outputs(student, batch).logits
            if logits.shape[-1] <= self.top_k:
                parts.append({"logits": logits.float().cpu()})
            else:
                indices, log_probs = truncate(logits, batch["labels"], self.top_k)
                parts.append({"indices": indices.cpu(), "log_probs": log_probs.cpu()})
        stored = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        return {CLASSES: torch.tensor([logits.shape[-1]]), **stored}

    def _read(self, index: int) -> Batch:
        """Return what is stored of a sample."""
        path, row = self._shards[index // SHARD_SIZE], index % SHARD_SIZE
        try:
            with safe_open(path, framework="pt") as file:
                names = list(file.keys())
                return {name: file.get_slice(name)[0 if name == CLASSES else row] for name in names}
        except (OSError, SafetensorError) as error:
            raise DataError(f"{path} cannot be read ({error}); remove it, and --resume computes it again.") from error


def truncate(logits: Tensor, labels: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Keep the likeliest tokens and the next label: [batch, tokens, vocabulary] -> indices and log-probabilities,
    [batch, tokens, top_k + 1] in int32 and float16."""
    log_probs = F.log_softmax(logits.float(), dim=-1)
    following = F.pad(labels[:, 1:], (0, 1)).clamp(min=0)  # the label of position n is token n + 1; ignored: any
    indices = torch.cat([log_probs.topk(top_k, dim=-1).indices, following.unsqueeze(-1)], dim=-1)
    return indices.int(), log_probs.gather(-1, indices).half()


def expand(indices: Tensor, log_probs: Tensor, classes: int) -> Tensor:
    """Return log-probabilities of all tokens from those that `truncate` kept: [..., kept] -> [..., classes]."""
    indices, log_probs = indices.long(), log_probs.float()
    is_repeated = (indices[..., :-1] == indices[..., -1:]).any(-1)  # the label is among the likeliest
    kept = log_probs[..., :-1].exp().sum(-1) + log_probs[..., -1].exp() * ~is_repeated
    others = classes - indices.shape[-1] + is_repeated.float()
    rest = ((1 - kept).clamp(min=1e-7) / others.clamp(min=1)).log()
    dense = rest.unsqueeze(-1).expand(*rest.shape, classes).clone()
    return dense.scatter_(-1, indices, log_probs)
