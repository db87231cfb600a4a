"""Measure the link between ranks and predict what each gradient compressor gains on it: the work of `smelt link`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as distributed
from torch.nn import functional

from smelt.errors import ConfigError
from smelt.train.gradients.autotune.auto import build_candidate
from smelt.train.gradients.autotune.cost_model import (
    CostPrediction,
    agree_on_prediction,
    predict_compressor,
    predict_ddp,
)
from smelt.train.gradients.autotune.dry_run import (
    dry_run_compressor,
    method_label,
    synthetic_gradient,
    synthetic_layout,
)
from smelt.train.gradients.autotune.link import Link, measure_link
from smelt.train.gradients.autotune.timed_comm import max_over_ranks
from smelt.train.gradients.comm import Comm
from smelt.train.gradients.compressors import COMPRESSORS, SAGE, HardThreshold
from smelt.train.gradients.hierarchy import NodeTopology
from smelt.train.timing import synchronized_time
from smelt.train.trainer.distributed import init_distributed

_MAX_ELEMENTS = 2**31 - 1  # of a flat bucket
_NEED_TUNING = (HardThreshold.name, SAGE.name)  # their first threshold must fit the model; tried only on request
_TIMEOUT = 1800.0  # seconds


@dataclass(frozen=True)
class LinkSurvey:
    """What to predict: the gradients of one step, and the compressors to try on them."""

    parameters: float
    density: float
    backward_ms: float = 0.0
    methods: str | None = None  # names separated by commas; by default all that need no tuning
    ranks_per_node: int | None = None  # dense inside a node, compressors between nodes

    def __post_init__(self) -> None:
        if not 1 <= self.parameters <= _MAX_ELEMENTS:
            raise ConfigError(f"--parameters is {self.parameters:g}; it must lie between 1 and {_MAX_ELEMENTS:,}.")
        self.compressors()

    def compressors(self) -> list[Any]:
        names = ["bf16", *COMPRESSORS] if self.methods is None else [name.strip() for name in self.methods.split(",")]
        tried = [name for name in names if self.methods is not None or name not in _NEED_TUNING]
        return [build_candidate(name, self.density) for name in tried]

    def run(self, device: str, seed: int, say: Callable[[str], None]) -> tuple[Link, list[CostPrediction]] | None:
        """Measure with the other ranks; return the link and the predictions on rank 0, None on the others."""
        local_device = init_distributed("cuda" if device.startswith("cuda") else "cpu", _TIMEOUT)
        try:
            comm = Comm()
            link, predictions = self._measure(comm, local_device, seed, say if not comm.rank else lambda _: None)
            return None if comm.rank else (link, predictions)
        finally:
            distributed.destroy_process_group()

    def _measure(
        self, comm: Comm, device: torch.device, seed: int, say: Callable[[str], None]
    ) -> tuple[Link, list[CostPrediction]]:
        nodes = None if self.ranks_per_node is None else NodeTopology.create(comm, self.ranks_per_node)
        link = measure_link(comm, device)
        layout = synthetic_layout(int(self.parameters))
        gradient = synthetic_gradient(layout, comm, device, seed)
        backward = self.backward_ms / 1000
        cast_seconds = max_over_ranks([_cast_seconds(gradient)], comm, device)[0]
        predictions = [
            predict_ddp(layout.numel, link, backward),
            predict_ddp(layout.numel, link, backward, 2, cast_seconds, "ddp, bf16 hook"),
        ]
        copy_seconds, between = 0.0, comm
        if nodes is not None:
            gradient, copy_seconds = _reduce_within_node(gradient, nodes)
            layout, between = nodes.shard(layout), nodes.inter_node
            link = measure_link(between, device)
        for compressor in self.compressors():
            say(f"trying {method_label(compressor)}")
            result = dry_run_compressor(compressor, gradient, layout, between, link)
            predictions.append(agree_on_prediction(predict_compressor(result, copy_seconds), comm, device))
        return link, predictions


def _reduce_within_node(gradient: torch.Tensor, nodes: NodeTopology) -> tuple[torch.Tensor, float]:
    """Return this rank's share of its node's mean, and the seconds that a step spends inside the node."""
    padded = functional.pad(gradient, (0, -len(gradient) % nodes.intra_node.world_size))
    nodes.all_gather(nodes.reduce_scatter(padded))  # opens connections
    start = synchronized_time(gradient.device)
    share = nodes.reduce_scatter(padded)
    nodes.all_gather(share)
    return share, synchronized_time(gradient.device) - start


def _cast_seconds(gradient: torch.Tensor) -> float:
    """Measure the cast to bfloat16 and back."""
    start = synchronized_time(gradient.device)
    gradient.to(torch.bfloat16).float()
    return synchronized_time(gradient.device) - start
