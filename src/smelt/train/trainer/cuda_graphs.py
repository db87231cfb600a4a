"""Forward and backward of a training step as CUDA graphs: one launch instead of thousands of kernels' launches.

Small networks, and large ones with many small kernels such as those of fake quantization, otherwise wait for the CPU. A
graph computes exactly what its kernels did when it was captured: for each shape of a batch, and each state of what is
trained, there is one, captured when that comes again. All of them add to the same gradients.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from smelt.models.json_file import one_line
from smelt.train.timing import PhaseTimer
from smelt.train.trainer.dataloader import Batch

EAGER_CALLS = 2  # before the first capture: libraries initialize, networks are compiled, scales get a history
_MAX_GRAPHS = 64  # beyond, shapes that are new run eagerly
_MIN_FREE_MEMORY = 0.25  # of the device: below, too, since a graph keeps its memory, and eager steps need their own
logger = logging.getLogger(__name__)


class CudaGraphs:
    """Calls a function that runs forward and backward of a batch and returns its loss, [], by graphs if it can.

    The timer counts a replayed graph as backward.
    """

    def __init__(self, forward_backward: Callable[[Batch], Tensor], device: torch.device, timer: PhaseTimer) -> None:
        self._run, self._device, self._timer = forward_backward, device, timer
        self._graphs: dict[Hashable, _CapturedStep] = {}
        self._seen: set[Hashable] = set()
        self._eager_calls = 0
        self._pool: Any = None
        self.is_enabled = True  # until a capture fails
        self.replays = 0

    def __call__(self, batch: Batch, state: Hashable) -> Tensor:
        """Run the function, whose kernels depend on the shapes of the batch and the state only."""
        key = (state, *((name, tensor.shape, tensor.dtype) for name, tensor in sorted(batch.items())))
        if key not in self._graphs and not self._can_capture(key):
            self._seen.add(key)
            self._eager_calls += 1
            return self._run(batch)
        if key not in self._graphs:
            try:
                self._graphs[key] = self._capture(batch)
            except (RuntimeError, torch.AcceleratorError) as error:
                self._give_up(error)
                return self._run(batch)
        self.replays += 1
        with self._timer.phase("backward"):
            return self._graphs[key].replay(batch)

    def release(self) -> None:
        """Free the graphs and their memory, which nothing else could use; garbage collection would come too late."""
        self._graphs.clear()
        self._pool = None
        torch._C._cuda_clearCublasWorkspaces()  # those of the first capture are in the memory of its graph
        torch.cuda.empty_cache()

    def _can_capture(self, key: Hashable) -> bool:
        if not self.is_enabled or len(self._graphs) >= _MAX_GRAPHS:
            return False
        if key not in self._seen or self._eager_calls < EAGER_CALLS:
            return False
        free, total = torch.cuda.mem_get_info(self._device)
        return free >= _MIN_FREE_MEMORY * total

    def _capture(self, batch: Batch) -> _CapturedStep:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        static = {name: tensor.clone() for name, tensor in batch.items()}
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            loss = self._run(static)
        return _CapturedStep(graph, static, loss)

    def _give_up(self, error: Exception) -> None:
        """Go on eagerly; random numbers get a new state, as that of the default generator still expects a capture."""
        self.is_enabled = False
        torch.cuda.synchronize(self._device)
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        seed = generator.initial_seed()
        generator.graphsafe_set_state(torch.Generator(self._device).graphsafe_get_state())
        generator.manual_seed(seed)
        logger.warning(
            "the step cannot be captured as a CUDA graph, so it runs kernel by kernel, which is slower (%s)",
            one_line(error),
        )


class _CapturedStep:
    def __init__(self, graph: torch.cuda.CUDAGraph, batch: Batch, loss: Tensor) -> None:
        self._graph, self._batch, self._loss = graph, batch, loss

    def replay(self, batch: Batch) -> Tensor:
        for name, tensor in batch.items():
            self._batch[name].copy_(tensor)
        self._graph.replay()
        return self._loss.clone()
