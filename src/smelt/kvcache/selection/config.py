"""Which pages a head attends to in a step: the best by their digests, the first and the last ones.

The frame of Quest and ArkVale; PNM-KV (arXiv 2511.00321) takes pages chosen in this way as its starting point. ArkVale
has two numbers, the tokens that stay on the device and the pages that a step attends to; here the budget is what is
attended to, and the slots of a residence are what stays. A budget that is fixed in tokens loses accuracy on very long
texts, so that it may grow with the length.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from smelt.errors import ConfigError, ModelError
from smelt.kvcache.selection.page_summary import ArkVale, PageSummary
from smelt.models.model import Model


@dataclass(frozen=True)
class SparseAttentionConfig:
    """Each head of keys chooses for itself, at every step of decoding. A prompt attends to all of itself."""

    digest: PageSummary = field(default_factory=ArkVale)
    page: int = 32  # tokens; the block of the engine
    budget: int = 4096  # tokens that a head attends to, with those of sink and window
    share: float = 0.0  # of the pages there are: the budget is never less than that
    sink: int = 2  # of the first pages, always chosen
    window: int = 2  # of the last pages, always chosen; one that is not full is among them

    def __post_init__(self) -> None:
        if self.page < 1:
            raise ConfigError(f"a page of {self.page} tokens cannot be; give at least 1, such as 32.")
        if self.sink < 0:
            raise ConfigError(f"sink is {self.sink}; the number of first pages must not be negative.")
        if self.window < 1:
            raise ConfigError(f"window is {self.window}; at least the page that is being filled must be attended to.")
        if not 0 <= self.share <= 1:
            raise ConfigError(f"share is {self.share:g}; it is a part of the pages between 0 and 1, such as 0.1.")
        if self.budget < self.page:
            raise ConfigError(f"a budget of {self.budget} tokens holds no page; a page has {self.page}.")
        always = (self.sink + self.window) * self.page
        if always > self.budget:
            told = f"{self.sink} first and {self.window} last pages are {always} tokens, more than the budget of"
            raise ConfigError(f"{told} {self.budget}; give a larger budget or fewer of them.")

    def held(self, lengths: Tensor) -> Tensor:
        """Pages that so many tokens lie in."""
        return -(-lengths // self.page)

    def counts(self, lengths: Tensor) -> Tensor:
        """Pages that a head attends to, for texts of these lengths."""
        held = self.held(lengths)
        growing = (self.share * held.double() - 1e-9).ceil().long()  # a hair less: 0.1 * 30 is not above 3
        return torch.minimum(held, growing.clamp(min=self.budget // self.page))

    def most(self, context: int) -> int:
        """Pages that a head attends to at most, in texts of up to `context` tokens."""
        return int(self.counts(torch.tensor([context])))

    def choose(self, scores: Tensor, lengths: Tensor) -> Tensor:
        """The pages that each head attends to, in order, from scores [requests, kv_heads, pages] and the lengths
        [requests]: [requests, kv_heads, most]. Behind the `counts` of a request its last page is repeated."""
        held, counts = self.held(lengths)[:, None, None], self.counts(lengths)[:, None, None]
        page = torch.arange(scores.shape[-1], device=scores.device)
        always = (page < self.sink) | (page >= held - self.window)
        judged = scores.masked_fill(always, torch.inf).masked_fill(page >= held, -torch.inf)
        best = judged.topk(int(counts.max()), dim=-1).indices  # the best first
        rank = torch.arange(best.shape[-1], device=best.device)
        return torch.where(rank < counts, best, held - 1).sort(-1).values


def sparse_attention_heads(model: Model) -> dict[int, tuple[int, int]]:
    """Heads of keys and their width, for every layer that has attention; what pages cannot be chosen for is refused."""
    config = model.network.config.get_text_config()
    if model.task != "language" or not model.anatomy.family.causal:
        raise ModelError("only language models that read from left to right have pages to choose from.")
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"} or getattr(config, "sliding_window", None):
        raise ModelError("this model has sliding layers, which see the last tokens only; serve it without selection.")
    parts = [part for part in model.anatomy.parts if part.kind == "heads" and part.units]
    return {part.block: (part.units, part.head_dim) for part in parts}
