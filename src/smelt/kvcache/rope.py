"""Rotate and re-rotate cached vectors with a network's own rotary embedding (RoPE).

CR-RoPE of InfiniPot (arXiv 2410.01518) moves keys from the positions they were computed at to others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from smelt.errors import ModelError
from smelt.kernels.rope import apply_rope, undo_rope

RotateFn = Callable[[Tensor, int], Tensor]  # vectors [..., tokens, head_dim] and the position of the first token
RemapFn = Callable[[Tensor, Tensor, Tensor], Tensor]  # keys, old and new positions


def rope_functions(network: PreTrainedModel, device: torch.device) -> tuple[RotateFn, RotateFn]:
    """Return functions that apply and invert RoPE; both are the identity for networks without RoPE."""
    rotary: Any = getattr(network.base_model, "rotary_emb", None)
    if rotary is None:
        return (lambda x, _: x), (lambda x, _: x)

    def cos_sin(x: Tensor, first: int) -> tuple[Tensor, Tensor]:
        positions = torch.arange(first, first + x.shape[-2], device=device)[None]
        cos, sin = rotary(x.float(), positions)
        return cos[0].float(), sin[0].float()  # [tokens, head_dim]

    def rotate(x: Tensor, first: int) -> Tensor:
        cos, sin = cos_sin(x, first)
        return apply_rope(x.float(), cos, sin).to(x.dtype)

    def unrotate(x: Tensor, first: int) -> Tensor:
        cos, sin = cos_sin(x, first)
        return undo_rope(x.float(), cos, sin).to(x.dtype)

    return rotate, unrotate


def position_remapper(network: PreTrainedModel) -> RemapFn:
    """Return a function that moves keys [kv_heads, tokens, head_dim] from old to new positions [.., tokens].

    It computes in float32 and rounds once, so low-precision keys lose one rounding per move; keys whose position does
    not change are returned unchanged."""
    rotary: Any = getattr(network.base_model, "rotary_emb", None)
    if rotary is None:
        raise ModelError("this model has no rotary positions (RoPE), and a bounded cache can only renumber those.")

    def remap(keys: Tensor, old: Tensor, new: Tensor) -> Tensor:
        x = keys.float()
        cos, sin = _cos_sin(rotary, x, old)
        x = undo_rope(x, cos, sin)
        cos, sin = _cos_sin(rotary, x, new)
        x = apply_rope(x, cos, sin).to(keys.dtype)
        return torch.where((old == new)[..., None], keys, x)

    return remap


def _cos_sin(rotary: Any, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:  # [kv_heads or 1, tokens, head_dim]
    cos, sin = rotary(x, positions.expand(len(positions) if positions.dim() > 1 else 1, -1))
    if cos.shape[-1] != x.shape[-1]:
        raise ModelError("this model applies RoPE to a part of each key only, which a bounded cache cannot renumber.")
    return cos.float(), sin.float()
