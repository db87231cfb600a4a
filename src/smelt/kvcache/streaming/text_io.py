"""Text in and out of a stream: tokenize input, decode greedily."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from smelt.errors import DataError, ModelError

Tokens = Tensor | Sequence[int]


class StreamTokenizer:
    """A network with its tokenizer, if any."""

    def __init__(self, network: PreTrainedModel, tokenizer: Any) -> None:
        self.network, self._tokenizer = network, tokenizer

    def encode(self, text: str | Tokens, begins: bool = False) -> Tensor:  # [tokens]
        """Tokenize text, or check token ids. Special tokens are added only where the text `begins` a stream."""
        if isinstance(text, str):
            text = self.tokenizer(text, add_special_tokens=begins, verbose=False)["input_ids"]
        ids = torch.as_tensor(text, dtype=torch.int64, device=self.network.device)
        vocab_size = self.network.get_input_embeddings().num_embeddings
        if ids.dim() != 1 or (len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size):
            raise DataError(f"token ids must be one row of numbers from 0 to {vocab_size - 1}.")
        return ids

    def decode(self, ids: Tensor) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))

    @property
    def tokenizer(self) -> Any:
        if self._tokenizer is None:
            raise ModelError("this stream has no tokenizer; give it token ids, and use `answer` instead of `ask`.")
        return self._tokenizer

    def generate_greedy(self, logits: Tensor, next_logits: Callable[[Tensor], Tensor], max_tokens: int) -> Tensor:
        """Decode greedily from logits [vocab] until an end token: [at most max_tokens].

        `next_logits` runs a token [1] through the network and returns the logits after it."""
        ids: list[Tensor] = []
        while len(ids) < max_tokens:
            if ids:
                logits = next_logits(ids[-1])
            token = logits.argmax(-1, keepdim=True)
            if int(token) in self._eos_token_ids():
                break
            ids.append(token)
        return torch.cat(ids) if ids else torch.zeros(0, dtype=torch.int64, device=logits.device)

    def _eos_token_ids(self) -> set[int]:
        eos = getattr(self.network.generation_config, "eos_token_id", None)
        return set(eos) if isinstance(eos, list) else set() if eos is None else {int(eos)}
