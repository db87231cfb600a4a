"""Text embeddings: mean-pooled last hidden states, normalized to unit length, as in sentence-transformers (Reimers
and Gurevych, EMNLP 2019)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor
from transformers import PreTrainedModel

from smelt.errors import ModelError
from smelt.models.load import load

BATCH = 32  # texts per batch


class Encoder:
    """One encoder model, run in one thread; a batch whose caller has left is not started."""

    def __init__(self, source: str, device: str = "cpu") -> None:
        self.model = load(source, device=device)
        if self.model.tokenizer is None:
            raise ModelError(f"{source} has no tokenizer, so it cannot embed text.")
        self.tokenizer = self.model.tokenizer
        self.network = self.model.network.base_model.eval()
        config = self.network.config
        self.vocab_size, self.hidden_size = int(config.vocab_size), int(config.hidden_size)
        self.max_model_len = min(_positions(self.network), self.tokenizer.model_max_length)
        self._padding = self.tokenizer.pad_token_id or 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="encoder")

    async def embed(self, texts: Sequence[list[int]]) -> list[list[float]]:
        """Return one embedding per tokenized text. Texts of similar length are batched together."""
        order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
        embeddings: dict[int, list[float]] = {}
        for start in range(0, len(order), BATCH):
            indices = order[start : start + BATCH]
            batch = [texts[index] for index in indices]
            vectors = await asyncio.get_running_loop().run_in_executor(self._thread, self._vectors, batch)
            embeddings.update(zip(indices, vectors.tolist(), strict=True))
        return [embeddings[index] for index in range(len(texts))]

    @torch.inference_mode()
    def _vectors(self, texts: list[list[int]]) -> Tensor:  # [texts, hidden size]
        max_len = max(map(len, texts))
        ids = torch.tensor([text + [self._padding] * (max_len - len(text)) for text in texts])
        mask = torch.tensor([[1] * len(text) + [0] * (max_len - len(text)) for text in texts])
        ids, mask = ids.to(self.model.device), mask.to(self.model.device)
        states = self.network(input_ids=ids, attention_mask=mask).last_hidden_state.float()  # [texts, max_len, hidden]
        weights = mask[..., None].float()
        means = (states * weights).sum(1) / weights.sum(1).clamp(min=1e-9)
        return torch.nn.functional.normalize(means, dim=-1).cpu()


def _positions(network: PreTrainedModel) -> int:
    """Return the maximum sequence length; some families start positions after the padding index."""
    max_positions = int(network.config.max_position_embeddings)
    table = getattr(getattr(network, "embeddings", None), "position_embeddings", None)
    padding = getattr(table, "padding_idx", None)
    return max_positions if padding is None else max_positions - padding - 1
