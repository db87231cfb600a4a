"""Sparse page attention settings, and the rule that selects pages: the best by summary, the first and the last ones.

The scheme of Quest and ArkVale; PNM-KV (arXiv 2511.00321) starts from pages selected this way. ArkVale has two
numbers, the tokens resident on the device and the pages attended to per step; here the token budget is what a step
attends to, and `OffloadConfig.num_slots` is what stays resident. A budget fixed in tokens loses accuracy on very long
texts, so it can grow with the length.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from smelt.errors import ConfigError, ModelError
from smelt.kvcache.eviction.attention import has_full_attention
from smelt.kvcache.selection.page_summary import ArkVale, LayerHeads, PageSummary
from smelt.models.model import Model


@dataclass(frozen=True)
class SparseAttentionConfig:
    """Page selection per KV head and decode step. Prefill attends to all pages."""

    summary: PageSummary = field(default_factory=ArkVale)
    page_size: int = 32  # tokens; equal to the engine's block_size
    token_budget: int = 4096  # tokens each head attends to, sink and recent pages included
    budget_ratio: float = 0.0  # of the sequence's pages: the budget is never smaller
    sink_pages: int = 2  # first pages, always selected
    recent_pages: int = 2  # last pages, always selected, including a partly filled one
    min_tokens: int = 0  # sequences up to this length attend to all their pages

    def __post_init__(self) -> None:
        if self.page_size < 1:
            raise ConfigError(f"a page size of {self.page_size} tokens is not possible; give at least 1, such as 32.")
        if self.sink_pages < 0:
            raise ConfigError(f"sink_pages is {self.sink_pages}; it must not be negative.")
        if self.recent_pages < 1:
            raise ConfigError(f"recent_pages is {self.recent_pages}; the page being filled must be attended to.")
        if not 0 <= self.budget_ratio <= 1:
            raise ConfigError(f"budget_ratio is {self.budget_ratio:g}; it must be between 0 and 1, such as 0.1.")
        if self.token_budget < self.page_size:
            raise ConfigError(
                f"a budget of {self.token_budget} tokens holds no page; a page has {self.page_size} tokens."
            )
        always = (self.sink_pages + self.recent_pages) * self.page_size
        if always > self.token_budget:
            raise ConfigError(
                f"{self.sink_pages} sink and {self.recent_pages} recent pages are {always} tokens, more than the "
                f"budget of {self.token_budget}; give a larger budget or fewer of them."
            )

    def num_pages(self, seq_lens: Tensor) -> Tensor:
        """Return how many pages sequences of these lengths occupy."""
        return -(-seq_lens // self.page_size)

    def num_selected_pages(self, seq_lens: Tensor) -> Tensor:
        """Return how many pages a head attends to in sequences of these lengths."""
        num_pages = self.num_pages(seq_lens)
        by_ratio = (self.budget_ratio * num_pages.double() - 1e-9).ceil().long()  # a hair less: 0.1 * 30 is not above 3
        selected = torch.minimum(num_pages, by_ratio.clamp(min=self.token_budget // self.page_size))
        return torch.where(seq_lens <= self.min_tokens, num_pages, selected)

    def max_selected_pages(self, max_seq_len: int) -> int:
        """Return how many pages a head attends to, at most, in sequences of up to `max_seq_len` tokens."""
        lengths = torch.tensor([max_seq_len, min(max_seq_len, self.min_tokens)])
        return int(self.num_selected_pages(lengths).max())

    def select_pages(self, scores: Tensor, seq_lens: Tensor) -> Tensor:
        """Select each head's pages, in order, from scores [requests, kv_heads, pages] and seq_lens [requests].

        Returns [requests, kv_heads, max_selected]; rows with fewer pages repeat the last page of the sequence."""
        num_pages = self.num_pages(seq_lens)[:, None, None]
        num_selected = self.num_selected_pages(seq_lens)[:, None, None]
        page = torch.arange(scores.shape[-1], device=scores.device)
        always = (page < self.sink_pages) | (page >= num_pages - self.recent_pages)
        ranked = scores.masked_fill(always, torch.inf).masked_fill(page >= num_pages, -torch.inf)
        best = ranked.topk(int(num_selected.max()), dim=-1).indices  # best first
        rank = torch.arange(best.shape[-1], device=best.device)
        return torch.where(rank < num_selected, best, num_pages - 1).sort(-1).values


def sparse_attention_heads(model: Model) -> LayerHeads:
    """Return the KV heads and head_dim of every attention layer; refuse models without full attention."""
    config = model.network.config.get_text_config()
    if model.task != "language" or not model.anatomy.family.causal:
        raise ModelError("sparse page attention needs a causal language model.")
    if not has_full_attention(config):
        raise ModelError(
            "this model has sliding-window layers, which see only the last tokens; serve it without sparse attention."
        )
    parts = [part for part in model.anatomy.parts if part.kind == "heads" and part.units]
    return {part.block: (part.units, part.head_dim) for part in parts}
