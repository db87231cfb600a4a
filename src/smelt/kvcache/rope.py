"""Keys that are turned from the positions they were computed at to others (CR-RoPE of InfiniPot, arXiv 2410.01518)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from smelt.errors import ModelError

RotateFn = Callable[
    [Tensor, int], Tensor
]  # vectors [..., tokens, width] and the position of the first: turned by rotary
Renumber = Callable[[Tensor, Tensor, Tensor], Tensor]


def position_remapper(network: PreTrainedModel) -> Renumber:
    """A function of keys [kv_heads, tokens, width], the positions they have and those they shall have [.., tokens]:
    what the network itself would have computed there. It counts in float32 and rounds once, so that keys of fewer bits
    lose a rounding each time they move; those that stay where they are lose nothing."""
    rotary: Any = getattr(network.base_model, "rotary_emb", None)
    if rotary is None:
        raise ModelError("this model has no rotary positions, and only those can be numbered anew in a pot.")

    def renumbered(keys: Tensor, old: Tensor, new: Tensor) -> Tensor:
        x = keys.float()
        cosine, sine = _angles(rotary, x, old)
        length = cosine.square() + sine.square()  # one, but for models that scale their rotation
        x = (x * cosine - _rotate_half(x) * sine) / length
        cosine, sine = _angles(rotary, x, new)
        x = (x * cosine + _rotate_half(x) * sine).to(keys.dtype)
        return torch.where((old == new)[..., None], keys, x)

    return renumbered


def _angles(rotary: Any, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:  # [kv_heads or 1, tokens, width]
    cosine, sine = rotary(x, positions.expand(len(positions) if positions.dim() > 1 else 1, -1))
    if cosine.shape[-1] != x.shape[-1]:
        raise ModelError("this model turns only a part of each key, which a pot cannot number anew.")
    return cosine.float(), sine.float()


def _rotate_half(x: Tensor) -> Tensor:
    low, high = x.chunk(2, dim=-1)
    return torch.cat((-high, low), dim=-1)


def rope_functions(network: PreTrainedModel, device: torch.device) -> tuple[RotateFn, RotateFn]:
    """By the angle of positions, and back. Networks without rotary positions turn nothing."""
    rotary: Any = getattr(network.base_model, "rotary_emb", None)
    if rotary is None:
        return (lambda x, _: x), (lambda x, _: x)

    def angles(x: Tensor, first: int) -> tuple[Tensor, Tensor]:
        positions = torch.arange(first, first + x.shape[-2], device=device)[None]
        cosines, sines = rotary(x.float(), positions)
        return cosines[0].float(), sines[0].float()  # [tokens, width]

    def turn(x: Tensor, first: int) -> Tensor:
        cosines, sines = angles(x, first)
        return (x.float() * cosines + _rotate_half(x.float()) * sines).to(x.dtype)

    def back(x: Tensor, first: int) -> Tensor:
        cosines, sines = angles(x, first)
        length = cosines.square() + sines.square()  # one, but for models that scale their rotation
        return ((x.float() * cosines - _rotate_half(x.float()) * sines) / length).to(x.dtype)

    return turn, back
