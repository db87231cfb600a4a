"""An encoder as a server uses it: the mean of the last hidden states of each text, made one unit long, as
sentence-transformers does for the models it was made for (Reimers and Gurevych, EMNLP 2019)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor
from transformers import PreTrainedModel

from smelt.errors import ModelError
from smelt.models.load import load

BATCH = 32  # texts computed at once


class Encoder:
    """One model, computed in one thread; a batch that nobody waits for any longer is not begun."""

    def __init__(self, source: str, device: str = "cpu") -> None:
        self.model = load(source, device=device)
        if self.model.tokenizer is None:
            raise ModelError(f"{source} has no tokenizer: text cannot be served with it.")
        self.tokenizer = self.model.tokenizer
        self.network = self.model.network.base_model.eval()
        config = self.network.config
        self.vocabulary, self.width = int(config.vocab_size), int(config.hidden_size)
        self.context = min(_positions(self.network), self.tokenizer.model_max_length)
        self._padding = self.tokenizer.pad_token_id or 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="encoder")

    async def embed(self, texts: Sequence[list[int]]) -> list[list[float]]:
        """A vector a text, of its tokens. Texts of like length are computed together."""
        order = sorted(range(len(texts)), key=lambda place: len(texts[place]))
        found: dict[int, list[float]] = {}
        for start in range(0, len(order), BATCH):
            places = order[start : start + BATCH]
            batch = [texts[place] for place in places]
            vectors = await asyncio.get_running_loop().run_in_executor(self._thread, self._vectors, batch)
            found.update(zip(places, vectors.tolist(), strict=True))
        return [found[place] for place in range(len(texts))]

    @torch.inference_mode()
    def _vectors(self, texts: list[list[int]]) -> Tensor:  # [texts, width]
        longest = max(map(len, texts))
        ids = torch.tensor([text + [self._padding] * (longest - len(text)) for text in texts])
        mask = torch.tensor([[1] * len(text) + [0] * (longest - len(text)) for text in texts])
        ids, mask = ids.to(self.model.device), mask.to(self.model.device)
        states = self.network(input_ids=ids, attention_mask=mask).last_hidden_state.float()  # [texts, longest, width]
        weights = mask[..., None].float()
        means = (states * weights).sum(1) / weights.sum(1).clamp(min=1e-9)
        return torch.nn.functional.normalize(means, dim=-1).cpu()


def _positions(network: PreTrainedModel) -> int:
    """Tokens that have a position; some families count theirs from behind the padding."""
    most = int(network.config.max_position_embeddings)
    table = getattr(getattr(network, "embeddings", None), "position_embeddings", None)
    padding = getattr(table, "padding_idx", None)
    return most if padding is None else most - padding - 1
