"""Several adapters over one base model in one batch: each token gets what its request's adapter adds.

The product with the base is shared; the two thin products are done for the tokens of each adapter together (as in
Punica and S-LoRA, 2024). A step without adapters costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from smelt.errors import ModelError, RequestError
from smelt.models.lora import Factors, read_lora
from smelt.models.model import Model
from smelt.serve.engine.scheduler import Piece


class Adapters:
    """The adapters of a model by name, all of them in memory."""

    def __init__(self, model: Model, folders: Mapping[str, str | Path]) -> None:
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
    def applied(self, pieces: Sequence[Piece], device: torch.device) -> Iterator[None]:
        """Inside, the tokens of a step get what their adapters add."""
        self._tokens = {
            name: torch.tensor(places, device=device) for name, places in _places_by_adapter(pieces).items()
        }
        try:
            yield
        finally:
            self._tokens = {}

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


def uses_adapters(pieces: Sequence[Piece]) -> bool:
    return any(piece.request.adapter is not None for piece in pieces)


def _places_by_adapter(pieces: Sequence[Piece]) -> dict[str, list[int]]:
    """Where the tokens of each adapter stand in a step."""
    found: dict[str, list[int]] = {}
    at = 0
    for piece in pieces:
        if piece.request.adapter is not None:
            found.setdefault(piece.request.adapter, []).extend(range(at, at + piece.count))
        at += piece.count
    return found
