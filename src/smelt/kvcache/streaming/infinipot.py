"""InfiniPot: which tokens of a full pot of text stay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from smelt.errors import ConfigError
from smelt.kvcache.eviction.prefill import check_evictable
from smelt.kvcache.rope import position_remapper
from smelt.kvcache.streaming.bounded_cache import best_in_order
from smelt.kvcache.streaming.text_io import StreamTokenizer
from smelt.models.model import Model


@dataclass(frozen=True)
class InfiniPot:
    """Of what stays, the share `alpha` are the most novel tokens (NuC), the same for all heads; the others are each
    head's own best by the attention of the catalyst `prompt` (CaP). What is kept is numbered 0, 1, ... anew (CR-RoPE)
    where `renumber` says so. alpha = 0.5 is the paper's. The words of the prompt are ours: the paper's are not known to
    us. Whether the paper pools CaP over neighbours is not known either: `kernel` 1 does not, and SnapKV has 5."""

    name: ClassVar[str] = "infinipot"
    paper: ClassVar[str] = (
        "Kim et al., InfiniPot: Infinite Context Processing on Memory-Constrained LLMs, EMNLP 2024 (arXiv 2410.01518)"
    )

    alpha: float = 0.5
    prompt: str | tuple[int, ...] = (
        "\nIn summary, the key points, names and numbers of the text above are:"  # or its tokens
    )
    kernel: int = 1  # neighbouring tokens that the attention is averaged over
    renumber: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise ConfigError(f"infinipot: alpha is {self.alpha:g}; it is a share, between 0 and 1.")
        if self.kernel < 1 or self.kernel % 2 == 0:
            raise ConfigError(f"infinipot: kernel is {self.kernel}; it must be odd and positive.")
        if not self.prompt:
            raise ConfigError("infinipot: the prompt is empty; it is what looks at the text, so give it some words.")

    def novel(self, count: int) -> int:
        """Of `count` tokens that stay, how many for their novelty."""
        return round(self.alpha * count)

    def places(self, attention: Tensor, numbers: Tensor, novel: Tensor, count: int) -> Tensor:
        """[kv_heads, count], rising: from the attention and the numbers of the tokens in one layer [kv_heads, tokens],
        the latter rising, and the numbers of the novel ones [novel], which every head holds."""
        scores = attention.clone()
        at = torch.searchsorted(numbers, novel.expand(len(numbers), -1).contiguous())
        scores.scatter_(1, at, torch.inf)
        return best_in_order(scores, count)


def attention_of(queries: Tensor, keys: Tensor, scale: float) -> Tensor:
    """The mean attention of the last queries [1, heads, new, width] on the keys [1, kv_heads, tokens + new, width]
    before them, over these queries and over the heads that share keys: [kv_heads, tokens], float32."""
    heads, new = keys.shape[1], queries.shape[2]
    tokens = keys.shape[2] - new
    grouped = queries[0].float().unflatten(0, (heads, -1)).flatten(1, 2)  # [kv_heads, group * new, width]
    products = (grouped @ keys[0].float().mT * scale).unflatten(1, (-1, new))  # [kv_heads, group, new, tokens + new]
    later = torch.ones(new, new, dtype=torch.bool, device=keys.device).triu(1)
    products[..., tokens:].masked_fill_(later, -torch.inf)
    return products.softmax(dim=-1)[..., :tokens].mean(dim=(1, 2))


def pooled(scores: Tensor, kernel: int) -> Tensor:
    """The mean over neighbouring tokens [kv_heads, tokens], as SnapKV has it: zeros beyond the ends count."""
    return F.avg_pool1d(scores[:, None], kernel, stride=1, padding=kernel // 2)[:, 0]


class InfiniPotCompressor:
    """Refuses networks that cannot be cooked down."""

    def __init__(self, model: Model, rule: InfiniPot) -> None:
        check_evictable(model)
        self.rule = rule
        self._renumbered = position_remapper(model.network)
        self.prompt = StreamTokenizer(model.network, model.tokenizer).tokens(rule.prompt)  # [prompt]
        width = next(part.head_dim for part in model.anatomy.parts if part.kind == "heads")
        self._turned(torch.zeros(1, 1, width, device=model.device), self.prompt.new_zeros(1, 1))  # refused here if ever

    def attention(self, queries: Tensor, keys: Tensor, scale: float) -> Tensor:
        """Of the prompt's queries [1, heads, prompt, width] on the tokens before them, from the keys of these and of
        the prompt [1, kv_heads, tokens + prompt, width]: [kv_heads, tokens]"""
        return pooled(attention_of(queries, keys, scale), self.rule.kernel)

    def places(self, attention: Tensor, numbers: Tensor, novel: Tensor, count: int) -> Tensor:
        """What stays of a layer, [kv_heads, count], rising; see the rule."""
        return self.rule.places(attention, numbers.contiguous(), novel, count)

    def turned(self, keys: Tensor, places: Tensor) -> Tensor:
        """Keys [kv_heads, kept, width] that lay at these places [kv_heads, kept], now at 0, 1, ..."""
        return self._turned(keys, places) if self.rule.renumber else keys

    def _turned(self, keys: Tensor, places: Tensor) -> Tensor:
        return self._renumbered(keys, places, torch.arange(places.shape[1], device=places.device).expand_as(places))
