"""InfiniPot (Kim et al., EMNLP 2024, arXiv 2410.01518): which tokens of a full bounded cache of text are retained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from smelt.errors import ConfigError
from smelt.kvcache.eviction.prefill import check_evictable
from smelt.kvcache.rope import position_remapper
from smelt.kvcache.streaming.bounded_cache import topk_in_order
from smelt.kvcache.streaming.text_io import StreamTokenizer
from smelt.models.model import Model


@dataclass(frozen=True)
class InfiniPot:
    """Retain novel tokens (NuC) and tokens that a catalyst prompt attends to (CaP).

    The share `alpha` of the retained tokens are the most novel ones, the same for all heads; the others are each head's
    best by the attention of the catalyst `prompt`. Retained tokens are renumbered 0, 1, ... (CR-RoPE) if `renumber`.
    alpha = 0.5 is the paper's; the words of the prompt are ours, since the paper's are not known to us. Whether the
    paper pools CaP over neighbors is not known either: `kernel` 1 does not, and SnapKV uses 5."""

    name: ClassVar[str] = "infinipot"
    paper: ClassVar[str] = (
        "Kim et al., InfiniPot: Infinite Context Processing on Memory-Constrained LLMs, EMNLP 2024 (arXiv 2410.01518)"
    )

    alpha: float = 0.5
    prompt: str | tuple[int, ...] = (
        "\nIn summary, the key points, names and numbers of the text above are:"  # or its token ids
    )
    kernel: int = 1  # neighboring tokens that attention is averaged over
    renumber: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise ConfigError(f"infinipot: alpha is {self.alpha:g}; it is a share, between 0 and 1.")
        if self.kernel < 1 or self.kernel % 2 == 0:
            raise ConfigError(f"infinipot: kernel is {self.kernel}; it must be odd and positive.")
        if not self.prompt:
            raise ConfigError("infinipot: the prompt is empty; its attention scores the text, so give it some words.")

    def num_novel(self, count: int) -> int:
        """Return how many of `count` retained tokens are retained for their novelty."""
        return round(self.alpha * count)

    def select(self, attention: Tensor, token_indices: Tensor, novel: Tensor, count: int) -> Tensor:
        """Select slots [kv_heads, count], rising, from the attention and the rising token indices of one layer
        [kv_heads, tokens] and the indices of the novel tokens [novel], which every head holds."""
        scores = attention.clone()
        slots = torch.searchsorted(token_indices, novel.expand(len(token_indices), -1).contiguous())
        scores.scatter_(1, slots, torch.inf)
        return topk_in_order(scores, count)


class InfiniPotCompressor:
    """InfiniPot on one network, for streams and for a server's pages; refuses networks that cannot be compressed."""

    def __init__(self, model: Model, method: InfiniPot) -> None:
        check_evictable(model)
        self.method = method
        self._remap = position_remapper(model.network)
        self.prompt = StreamTokenizer(model.network, model.tokenizer).encode(method.prompt)  # [prompt_len]
        head_dim = next(part.head_dim for part in model.anatomy.parts if part.kind == "heads")
        self._to_front(torch.zeros(1, 1, head_dim, device=model.device), self.prompt.new_zeros(1, 1))  # refuses early

    def attention(self, queries: Tensor, keys: Tensor, scale: float) -> Tensor:
        """Return the attention of the prompt's queries [1, heads, prompt_len, head_dim] on the tokens before them, from
        keys [1, kv_heads, tokens + prompt_len, head_dim]: [kv_heads, tokens]."""
        return pool_neighbors(catalyst_attention(queries, keys, scale), self.method.kernel)

    def select(self, attention: Tensor, token_indices: Tensor, novel: Tensor, count: int) -> Tensor:
        """Return the slots that one layer retains, [kv_heads, count], rising; see `InfiniPot.select`."""
        return self.method.select(attention, token_indices.contiguous(), novel, count)

    def rerotate(self, keys: Tensor, slots: Tensor) -> Tensor:
        """Move keys [kv_heads, retained, head_dim] from their slots [kv_heads, retained] to positions 0, 1, ..."""
        return self._to_front(keys, slots) if self.method.renumber else keys

    def _to_front(self, keys: Tensor, slots: Tensor) -> Tensor:
        return self._remap(keys, slots, torch.arange(slots.shape[1], device=slots.device).expand_as(slots))


def catalyst_attention(queries: Tensor, keys: Tensor, scale: float) -> Tensor:
    """Return CaP, the mean attention of the last queries [1, heads, new, head_dim] on the keys [1, kv_heads, tokens +
    new, head_dim] before them, over queries and query heads: [kv_heads, tokens], float32."""
    heads, new = keys.shape[1], queries.shape[2]
    tokens = keys.shape[2] - new
    grouped = queries[0].float().unflatten(0, (heads, -1)).flatten(1, 2)  # [kv_heads, group * new, head_dim]
    logits = (grouped @ keys[0].float().mT * scale).unflatten(1, (-1, new))  # [kv_heads, group, new, tokens + new]
    future = torch.ones(new, new, dtype=torch.bool, device=keys.device).triu(1)
    logits[..., tokens:].masked_fill_(future, -torch.inf)
    return logits.softmax(dim=-1)[..., :tokens].mean(dim=(1, 2))


def pool_neighbors(scores: Tensor, kernel: int) -> Tensor:
    """Average over neighboring tokens [kv_heads, tokens], as in SnapKV: zeros beyond the ends count."""
    return F.avg_pool1d(scores[:, None], kernel, stride=1, padding=kernel // 2)[:, 0]
