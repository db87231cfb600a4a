"""Keys that are turned from the positions they were computed at to others (CR-RoPE of InfiniPot, arXiv 2410.01518)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from smelt.errors import ModelError

Renumber = Callable[[Tensor, Tensor, Tensor], Tensor]


def renumbering(network: PreTrainedModel) -> Renumber:
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
        x = (x * cosine - _quarter_turn(x) * sine) / length
        cosine, sine = _angles(rotary, x, new)
        x = (x * cosine + _quarter_turn(x) * sine).to(keys.dtype)
        return torch.where((old == new)[..., None], keys, x)

    return renumbered


def _angles(rotary: Any, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:  # [kv_heads or 1, tokens, width]
    cosine, sine = rotary(x, positions.expand(len(positions) if positions.dim() > 1 else 1, -1))
    if cosine.shape[-1] != x.shape[-1]:
        raise ModelError("this model turns only a part of each key, which a pot cannot number anew.")
    return cosine.float(), sine.float()


def _quarter_turn(x: Tensor) -> Tensor:
    low, high = x.chunk(2, dim=-1)
    return torch.cat((-high, low), dim=-1)
