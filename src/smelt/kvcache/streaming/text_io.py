"""Words in and out of a stream: text becomes tokens, and the likeliest tokens are said one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from smelt.errors import DataError, ModelError

Tokens = Tensor | Sequence[int]


class StreamTokenizer:
    """What a network and its tokenizer, where it has one, make of words."""

    def __init__(self, network: PreTrainedModel, tokenizer: Any) -> None:
        self.network, self._tokenizer = network, tokenizer

    def tokens(self, text: str | Tokens, begins: bool = False) -> Tensor:  # [tokens]
        """Only what begins a stream gets the tokens that a tokenizer sets before a text."""
        if isinstance(text, str):
            text = self.tokenizer(text, add_special_tokens=begins, verbose=False)["input_ids"]
        ids = torch.as_tensor(text, dtype=torch.int64, device=self.network.device)
        vocabulary = self.network.get_input_embeddings().num_embeddings
        if ids.dim() != 1 or (len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary):
            raise DataError(f"tokens come as one row of numbers from 0 to {vocabulary - 1}.")
        return ids

    def text(self, ids: Tensor) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))

    @property
    def tokenizer(self) -> Any:
        if self._tokenizer is None:
            raise ModelError("this stream has no tokenizer; give it the numbers of tokens, and ask with `answer`.")
        return self._tokenizer

    def said(self, logits: Tensor, more: Callable[[Tensor], Tensor], max_tokens: int) -> Tensor:
        """The likeliest tokens from logits [vocabulary] on, until one ends it: [at most max_tokens]. `more` puts a
        token [1] through the network and gives the logits after it."""
        found: list[Tensor] = []
        while len(found) < max_tokens:
            if found:
                logits = more(found[-1])
            word = logits.argmax(-1, keepdim=True)
            if int(word) in self._ends():
                break
            found.append(word)
        return torch.cat(found) if found else torch.zeros(0, dtype=torch.int64, device=logits.device)

    def _ends(self) -> set[int]:
        given = getattr(self.network.generation_config, "eos_token_id", None)
        return set(given) if isinstance(given, list) else set() if given is None else {int(given)}
