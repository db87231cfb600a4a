"""LoRA adapters over one base model in one batch: each token gets the delta of its request's adapter.

The base GEMM is shared; the two low-rank products run once per adapter over its tokens (as in Punica and S-LoRA, 2024).
A step without adapters costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from smelt.errors import ModelError, RequestError
from smelt.models.lora import Factors, read_lora
from smelt.models.model import Model
from smelt.serve.engine.scheduler import ScheduledChunk


class Adapters:
    """The LoRA adapters of a model by name, all in memory."""

    def __init__(self, model: Model, folders: Mapping[str, str | Path]) -> None:
        self.folders = {name: str(folder) for name, folder in folders.items()}
        self._paths = {id(module): path for path, module in model.network.named_modules()}
        self._factors: dict[str, dict[str, Factors]] = {
            name: read_lora(folder, model.network, model.network.dtype, model.device)
            for name, folder in folders.items()
        }
        head = model.network.get_output_embeddings()
        self._active_rows: dict[str, Tensor] = {}  # of the current step: adapter -> rows of its tokens
        for path in {path for layers in self._factors.values() for path in layers}:
            layer = model.network.get_submodule(path)
            if layer is head:
                raise ModelError(
                    f"an adapter changes the LM head ({path}), which all requests share; merge the adapter."
                )
            layer.register_forward_hook(self._hook(path))

    @property
    def names(self) -> list[str]:
        return list(self._factors)

    def check(self, name: str | None) -> None:
        if name is not None and name not in self._factors:
            raise RequestError(f"there is no adapter {name!r}; there are {', '.join(self._factors) or 'none'}.")

    @contextmanager
    def apply(self, chunks: Sequence[ScheduledChunk], device: torch.device) -> Iterator[None]:
        """Apply adapters to the tokens of a step inside the context."""
        rows = _rows_by_adapter(chunks).items()
        with self._activate({name: torch.tensor(indices, device=device) for name, indices in rows}):
            yield

    def token_indices(self, chunks: Sequence[ScheduledChunk]) -> Tensor:
        """Return each token's adapter index, counted from 1 (0: none); empty if no token has an adapter."""
        index_by_name = {name: index for index, name in enumerate(self._factors, 1)}
        indices = [index_by_name.get(chunk.request.adapter or "", 0) for chunk in chunks for _ in range(chunk.count)]
        return torch.tensor(indices if any(indices) else [], dtype=torch.int64)

    @contextmanager
    def apply_by_index(self, indices: Tensor) -> Iterator[None]:
        """Do the same as `apply`, by adapter indices [tokens]."""
        rows_by_name = {name: (indices == index).nonzero()[:, 0] for index, name in enumerate(self._factors, 1)}
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
        path = self._paths[id(module)]
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
