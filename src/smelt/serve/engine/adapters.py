"""LoRA adapters over one base model in one batch: each token gets the delta of its request's adapter.

The base GEMM is shared. On a GPU, grouped kernels add the low-rank products of all adapters (as in Punica and S-LoRA,
2024), in CUDA graphs as well: they read the factors from stacked buffers by the slot of each adapter, so an adapter can
be replaced without capturing a graph again. Elsewhere, and in runners that run the module, hooks on the linear layers
compute the two products once per adapter over its tokens. A step without adapters costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from smelt.errors import ModelError, RequestError
from smelt.models.lora import Factors, StackedFactors, read_lora
from smelt.models.model import Model
from smelt.serve.engine.scheduler import ScheduledChunk

DEFAULT_MAX_RANK = 16  # of adapters that are loaded later, if there are none at first


class Adapters:
    """The LoRA adapters of a model by name, all in memory, each in a slot.

    `max_loras` slots have room for adapters of any layers with ranks up to `max_lora_rank`. By default there is room
    for the adapters in `folders` only.
    """

    def __init__(
        self, model: Model, folders: Mapping[str, str | Path], *, max_loras: int | None = None,
        max_lora_rank: int | None = None,
    ) -> None:  # fmt: skip
        if max_loras is not None and len(folders) > max_loras:
            raise ModelError(f"{len(folders)} adapters do not fit into max_loras {max_loras}; give a larger one.")
        self.folders: dict[str, str] = {}
        self.stacks: dict[nn.Module, StackedFactors] = {}  # by the first of the layers that share an input
        self._model, self._any_layer, self._max_rank = model, max_loras is not None, max_lora_rank
        self._slots: list[str | None] = [None] * (len(folders) if max_loras is None else max_loras)
        self._revisions: dict[str, int] = {}  # how often the adapter of a name was replaced
        self._factors: dict[str, dict[str, Factors]] = {}
        self._hooked: set[str] = set()
        self._stacked: list[tuple[StackedFactors, list[str]]] = []  # the stacks with the paths of their layers
        self._active_rows: dict[str, Tensor] = {}  # of the current step: adapter -> rows of its tokens
        for name, folder in folders.items():
            self.load(name, folder)

    @property
    def names(self) -> list[str]:
        return list(self._factors)

    @property
    def layers(self) -> set[str]:
        """The paths of the layers that some adapter changes."""
        return {path for layers in self._factors.values() for path in layers}

    @property
    def max_loras(self) -> int:
        return len(self._slots)

    @property
    def max_rank(self) -> int:
        """The largest rank that has room in the stacks."""
        ranks = [len(factors.down) for layers in self._factors.values() for factors in layers.values()]
        return self._max_rank or max(ranks, default=DEFAULT_MAX_RANK)

    def check(self, name: str | None) -> None:
        if name is not None and name not in self._factors:
            raise RequestError(f"there is no adapter {name!r}; there are {', '.join(self._factors) or 'none'}.")

    def load(self, name: str, folder: str | Path) -> None:
        """Load an adapter into a free slot, or in place of the one of this name. No request may be using that one."""
        if name not in self._slots and None not in self._slots:
            raise ModelError(
                f"all {self.max_loras} slots for adapters are in use; unload one, or set max_loras higher."
            )
        network = self._model.network
        layers = read_lora(folder, network, network.dtype, self._model.device)
        self._check_layers(layers, folder)
        self.folders[name] = str(folder)
        if name in self._factors:
            self._revisions[name] = self._revisions.get(name, 0) + 1
        slot = self._slots.index(name if name in self._slots else None)
        self._slots[slot], self._factors[name] = name, layers
        for path in layers.keys() - self._hooked:
            network.get_submodule(path).register_forward_hook(self._hook(path))
            self._hooked.add(path)
        for stack, paths in self._stacked:
            self._write(slot, stack, paths)

    def unload(self, name: str) -> None:
        """Remove an adapter, which no request may be using; its slot is free for another."""
        self.check(name)
        slot = self._slots.index(name)
        self._slots[slot] = None
        self._revisions[name] = self._revisions.get(name, 0) + 1
        del self._factors[name], self.folders[name]
        for stack, paths in self._stacked:
            self._write(slot, stack, paths)

    def cache_salt(self, name: str | None, salt: bytes) -> bytes:
        """Return the salt of a request's blocks in the prefix cache: another one after an adapter was replaced."""
        revision = self._revisions.get(name or "", 0)
        return salt if not revision else salt + b"adapter revision %d" % revision

    def _check_layers(self, layers: Mapping[str, Factors], folder: str | Path) -> None:
        network = self._model.network
        head = network.get_output_embeddings()
        reserved = {path for _, paths in self._stacked for path in paths}
        for path, factors in layers.items():
            if network.get_submodule(path) is head:
                raise ModelError(
                    f"an adapter changes the LM head ({path}), which all requests share; merge the adapter."
                )
            limit = self.max_rank if self.stacks else self._max_rank
            if limit is not None and len(factors.down) > limit:
                raise ModelError(
                    f"{folder} has rank {len(factors.down)}, and there is room for {limit}; set max_lora_rank higher."
                )
            if self.stacks and path not in reserved:
                raise ModelError(
                    f"{folder} changes {path}, which no adapter did at the start; set max_loras, which reserves room "
                    "for adapters of all layers."
                )

    def stack(self, groups: Sequence[tuple[nn.Module, ...]]) -> None:
        """Move the factors into stacked buffers, one per group of layers that share an input, for grouped kernels."""
        if self.stacks or not self._slots:
            return
        network = self._model.network
        self._max_rank = self.max_rank
        paths_by_layer = {module: path for path, module in network.named_modules()}
        changed = self.layers
        for group in groups:
            paths = [paths_by_layer[layer] for layer in group]
            if self._any_layer or changed.intersection(paths):
                stack = StackedFactors(group, self.max_loras, self._max_rank, network.dtype, self._model.device)
                self.stacks[group[0]] = stack
                self._stacked.append((stack, paths))
                for slot in range(self.max_loras):
                    self._write(slot, stack, paths)
            changed.difference_update(paths)
        if changed:
            raise ModelError(f"an adapter changes {changed.pop()}, which has no grouped kernel; merge the adapter.")
        if self._model.device.type == "cuda":
            torch.cuda.empty_cache()  # the separate factors: the KV cache takes what memory is free

    def _write(self, slot: int, stack: StackedFactors, paths: Sequence[str]) -> None:
        """Copy a slot's factors into a stack; hooks use them from there, so that they are in memory once."""
        layers = self._factors.get(self._slots[slot] or "", {})
        views = stack.write(slot, [layers.get(path) for path in paths])
        layers.update({path: view for path, view in zip(paths, views, strict=True) if view is not None})

    @contextmanager
    def apply(self, chunks: Sequence[ScheduledChunk], device: torch.device) -> Iterator[None]:
        """Apply adapters to the tokens of a step inside the context."""
        rows = _rows_by_adapter(chunks).items()
        with self._activate({name: torch.tensor(indices, device=device) for name, indices in rows}):
            yield

    def token_indices(self, chunks: Sequence[ScheduledChunk]) -> np.ndarray[Any, Any]:
        """Return each token's adapter: its slot, counted from 1; 0: none."""
        indices = {name: index for index, name in enumerate(self._slots, 1) if name is not None}
        adapters = [indices.get(chunk.request.adapter or "", 0) for chunk in chunks]
        return np.repeat(np.array(adapters, dtype=np.int64), [chunk.count for chunk in chunks])

    @contextmanager
    def apply_by_index(self, indices: Tensor) -> Iterator[None]:
        """Do the same as `apply`, by adapter indices [tokens]."""
        rows_by_name = {
            name: (indices == index).nonzero()[:, 0] for index, name in enumerate(self._slots, 1) if name is not None
        }
        with self._activate({name: rows for name, rows in rows_by_name.items() if len(rows)}):
            yield

    @contextmanager
    def _activate(self, rows: dict[str, Tensor]) -> Iterator[None]:
        self._active_rows = rows
        try:
            yield
        finally:
            self._active_rows = {}

    def keep_rows(self, module: nn.Module, rows: Tensor) -> None:
        """Keep only these output rows of a layer's adapters."""
        self._update_factors(module, lambda factors: Factors(factors.down, factors.up[rows.to(factors.up.device)]))

    def keep_columns(self, module: nn.Module, columns: Tensor) -> None:
        """Keep only these input columns of a layer's adapters."""
        self._update_factors(
            module, lambda factors: Factors(factors.down[:, columns.to(factors.down.device)], factors.up)
        )

    def _update_factors(self, module: nn.Module, make: Callable[[Factors], Factors]) -> None:
        path = next(path for path, layer in self._model.network.named_modules() if layer is module)
        for layers in self._factors.values():
            if path in layers:
                layers[path] = make(layers[path])

    def to(self, device: torch.device) -> None:
        for layers in self._factors.values():
            for path, factors in layers.items():
                layers[path] = Factors(factors.down.to(device), factors.up.to(device))

    def _hook(self, path: str) -> Any:
        def add(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
            for name, rows in self._active_rows.items():
                factors = self._factors[name].get(path)
                if factors is not None:
                    x = args[0].flatten(0, -2)[rows]
                    delta = (x @ factors.down.T) @ factors.up.T
                    output = output.flatten(0, -2).index_add(0, rows, delta).view_as(output)
            return output

        return add


def uses_adapters(chunks: Sequence[ScheduledChunk]) -> bool:
    return any(chunk.request.adapter is not None for chunk in chunks)


def _rows_by_adapter(chunks: Sequence[ScheduledChunk]) -> dict[str, list[int]]:
    """Return the rows of each adapter's tokens in a step."""
    rows: dict[str, list[int]] = {}
    offset = 0
    for chunk in chunks:
        if chunk.request.adapter is not None:
            rows.setdefault(chunk.request.adapter, []).extend(range(offset, offset + chunk.count))
        offset += chunk.count
    return rows
