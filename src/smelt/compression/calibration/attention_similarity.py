"""How similar the attention maps of neighboring layers are: the Jensen-Shannon divergence of their rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from smelt.compression.calibration.block_inputs import Batch, run_backbone
from smelt.errors import ModelError
from smelt.models.anatomy import Anatomy, Part
from smelt.progress import NullProgress, Progress

LN2 = float(np.log(2.0))  # the largest divergence


def jensen_shannon(first: Tensor, second: Tensor) -> Tensor:
    """Return the divergence in nats of distributions along the last axis: 0 if equal, ln 2 if disjoint."""
    middle = 0.5 * (first + second)
    divergences = [
        (each * (each.clamp_min(1e-12).log() - middle.clamp_min(1e-12).log())).sum(-1) for each in (first, second)
    ]
    return 0.5 * (divergences[0] + divergences[1])


def stacked_attention(anatomy: Anatomy) -> list[Part]:
    """Return the attention layers of one list of blocks: of an encoder and a decoder, those of the encoder."""
    parts = [part for part in anatomy.parts if part.kind == "heads"]
    lists = [anatomy.blocks[part.block].path.rpartition(".")[0] for part in parts]
    return [part for part, path in zip(parts, lists, strict=True) if path == lists[0]]


def token_mask(anatomy: Anatomy, batch: Batch, tokens: int) -> Tensor | None:
    """Return which tokens of the blocks are no padding, [batch, tokens] on the host; None: all.

    Encoders of audio have a mask of samples, of which a token is made of many.
    """
    mask = batch.get("attention_mask")
    if mask is None:
        return None
    if mask.shape[1] != tokens:
        mask = anatomy.network.base_model._get_feature_vector_attention_mask(tokens, mask.cpu())
    return mask.bool().cpu()


class _Comparison:
    """Compares the map of each layer with that of the layer before it, while the network runs."""

    def __init__(self, anatomy: Anatomy, parts: Sequence[Part]) -> None:
        self.sums = np.zeros(len(parts))
        self.rows = 0
        self.batch: Batch = {}
        self._anatomy = anatomy
        self._previous: Tensor | None = None

    def compare(self, position: int, part: Part, output: Any) -> None:
        attention_map = output[1] if isinstance(output, tuple) and len(output) > 1 else None
        if (
            attention_map is None
            or attention_map.dim() != 4
            or attention_map.shape[1] != part.units * part.heads_per_unit
        ):
            raise ModelError(
                f"{part.path} does not return an attention map per head, so that no other layer can use it."
            )
        attention_map = attention_map.float()
        mask = token_mask(self._anatomy, self.batch, attention_map.shape[2])
        if position == 0:
            self.rows += attention_map[:, 0, :, 0].numel() if mask is None else int(mask.sum())
        if position and self._previous is not None and self._previous.shape == attention_map.shape:
            rows = jensen_shannon(self._previous, attention_map).mean(1)  # [batch, queries]
            self.sums[position] += float((rows if mask is None else rows[mask.to(rows.device)]).sum())
        elif position:
            self.sums[position] = np.inf  # another number of heads: no map to share
        self._previous = attention_map


@contextmanager
def eager_attention(network: Any) -> Iterator[None]:
    """Compute attention eagerly inside the context: only that has maps."""
    before = network.config._attn_implementation
    network.set_attn_implementation("eager")
    try:
        yield
    finally:
        network.set_attn_implementation(before)


@torch.no_grad()
def map_divergences(anatomy: Anatomy, batches: Sequence[Batch], progress: Progress | None = None) -> np.ndarray:
    """Return the mean divergence of each layer's attention map from that of the layer before it; [layers], the first 0.

    The mean is over heads and unpadded queries; the layers are those of `stacked_attention`.
    """
    parts = stacked_attention(anatomy)
    comparison = _Comparison(anatomy, parts)
    hooks = []
    for position, part in enumerate(parts):

        def after(_: nn.Module, args: Any, output: Any, position: int = position, part: Part = part) -> None:
            comparison.compare(position, part, output)

        hooks.append(part.owner.register_forward_hook(after))
    try:
        with eager_attention(anatomy.network):
            for batch in (progress or NullProgress()).track(list(batches), "attention maps"):
                comparison.batch = batch
                run_backbone(anatomy, batch)
    finally:
        for hook in hooks:
            hook.remove()
    divergences: np.ndarray = comparison.sums / max(comparison.rows, 1)
    return divergences
