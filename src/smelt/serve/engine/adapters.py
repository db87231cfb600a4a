"""Several adapters over one base model in one batch: each token gets what its request's adapter adds.

The product with the base is shared; the two thin products are done for the tokens of each adapter together (as in
Punica and S-LoRA, 2024). A step without adapters costs nothing.
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
    """The adapters of a model by name, all of them in memory."""

    def __init__(self, model: Model, folders: Mapping[str, str | Path]) -> None:
        self.folders = {name: str(folder) for name, folder in folders.items()}
        self._paths = {id(module): path for path, module in model.network.named_modules()}
        self._factors: dict[str, dict[str, Factors]] = {
            name: read_lora(folder, model.network, model.network.dtype, model.device)
            for name, folder in folders.items()
        }
        head = model.network.get_output_embeddings()
        self._tokens: dict[str, Tensor] = {}  # of the step under way: whose tokens stand where
        for path in {path for layers in self._factors.values() for path in layers}:
            layer = model.network.get_submodule(path)
            if layer is head:
                raise ModelError(f"an adapter changes {path}, the head, which is shared by all requests; merge it.")
            layer.register_forward_hook(self._hook(path))

    @property
    def names(self) -> list[str]:
        return list(self._factors)

    def check(self, name: str | None) -> None:
        if name is not None and name not in self._factors:
            raise RequestError(f"there is no adapter {name!r}; there are {', '.join(self._factors) or 'none'}.")

    @contextmanager
    def applied(self, pieces: Sequence[ScheduledChunk], device: torch.device) -> Iterator[None]:
        """Inside, the tokens of a step get what their adapters add."""
        places = _places_by_adapter(pieces).items()
        with self._at({name: torch.tensor(found, device=device) for name, found in places}):
            yield

    def numbers(self, pieces: Sequence[ScheduledChunk]) -> Tensor:
        """The number of each token's adapter, counted from one; zero: none. Nothing, where there are none at all."""
        numbers = {name: number for number, name in enumerate(self._factors, 1)}
        found = [numbers.get(piece.request.adapter or "", 0) for piece in pieces for _ in range(piece.count)]
        return torch.tensor(found if any(found) else [], dtype=torch.int64)

    @contextmanager
    def applied_by(self, numbers: Tensor) -> Iterator[None]:
        """As `applied`, by the numbers of the adapters."""
        names = {name: (numbers == number).nonzero()[:, 0] for number, name in enumerate(self._factors, 1)}
        with self._at({name: places for name, places in names.items() if len(places)}):
            yield

    @contextmanager
    def _at(self, tokens: dict[str, Tensor]) -> Iterator[None]:
        self._tokens = tokens
        try:
            yield
        finally:
            self._tokens = {}

    def keep_rows(self, module: nn.Module, rows: Tensor) -> None:
        """Of what is added to a layer, only these outputs are left."""
        self._change(module, lambda held: Factors(held.down, held.up[rows.to(held.up.device)]))

    def keep_columns(self, module: nn.Module, columns: Tensor) -> None:
        """Of what a layer's factors read, only these inputs are left."""
        self._change(module, lambda held: Factors(held.down[:, columns.to(held.down.device)], held.up))

    def _change(self, module: nn.Module, make: Callable[[Factors], Factors]) -> None:
        path = self._paths[id(module)]
        for layers in self._factors.values():
            if path in layers:
                layers[path] = make(layers[path])

    def to(self, device: torch.device) -> None:
        for layers in self._factors.values():
            for path, held in layers.items():
                layers[path] = Factors(held.down.to(device), held.up.to(device))

    def _hook(self, path: str) -> Any:
        def add(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
            for name, places in self._tokens.items():
                factors = self._factors[name].get(path)
                if factors is not None:
                    x = args[0].flatten(0, -2)[places]
                    more = (x @ factors.down.T) @ factors.up.T
                    output = output.flatten(0, -2).index_add(0, places, more).view_as(output)
            return output

        return add


def uses_adapters(pieces: Sequence[ScheduledChunk]) -> bool:
    return any(piece.request.adapter is not None for piece in pieces)


def _places_by_adapter(pieces: Sequence[ScheduledChunk]) -> dict[str, list[int]]:
    """Where the tokens of each adapter stand in a step."""
    found: dict[str, list[int]] = {}
    at = 0
    for piece in pieces:
        if piece.request.adapter is not None:
            found.setdefault(piece.request.adapter, []).extend(range(at, at + piece.count))
        at += piece.count
    return found
