"""InfiniPot: which tokens of a full pot of text stay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from smelt.errors import ConfigError
from smelt.kvcache.streaming.bounded_cache import best_in_order


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
