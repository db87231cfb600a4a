"""Text embeddings: mean-pooled last hidden states, normalized to unit length, as in sentence-transformers (Reimers
and Gurevych, EMNLP 2019); and the probabilities of a classification head."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor
from transformers import PreTrainedModel

from smelt.errors import ModelError
from smelt.models.load import load
from smelt.models.program_network import outline_of

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
        num_labels = config.num_labels if self.model.task == "classification" else 0
        self.labels = [str(config.id2label[index]) for index in range(num_labels)]  # of the classification head, if any
        self.vocab_size, self.hidden_size = int(config.vocab_size), int(config.hidden_size)
        self.max_model_len = min(_positions(self.network), self.tokenizer.model_max_length)
        self._padding = self.tokenizer.pad_token_id or 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="encoder")

    async def embed(self, texts: Sequence[list[int]]) -> list[list[float]]:
        """Return one embedding per tokenized text."""
        return await self._in_batches(self._vectors, texts)

    async def classify(self, texts: Sequence[list[int]], types: Sequence[list[int]] | None = None) -> list[list[float]]:
        """Return the probability of each label for each tokenized text; `types` are the token types of pairs."""
        if types is None:
            return await self._in_batches(self._probabilities, texts)
        return await self._in_batches(self._probabilities, texts, types)

    async def encode_pairs(self, pairs: Sequence[tuple[str, str]]) -> tuple[list[list[int]], list[list[int]]]:
        """Return the tokens of pairs of texts, and their token types."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._encode_pairs, pairs)

    async def _in_batches(
        self, compute: Callable[..., Tensor], texts: Sequence[list[int]], *more: Sequence[list[int]]
    ) -> list[list[float]]:
        """Return one row of results per text. Texts of similar length are batched together."""
        order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
        rows: dict[int, list[float]] = {}
        for start in range(0, len(order), BATCH):
            indices = order[start : start + BATCH]
            batches = [[column[index] for index in indices] for column in (texts, *more)]
            results = await asyncio.get_running_loop().run_in_executor(self._thread, compute, *batches)
            rows.update(zip(indices, results.tolist(), strict=True))
        return [rows[index] for index in range(len(texts))]

    def _encode_pairs(self, pairs: Sequence[tuple[str, str]]) -> tuple[list[list[int]], list[list[int]]]:
        encoded = [self.tokenizer(*pair) for pair in pairs]
        tokens = [list(pair["input_ids"]) for pair in encoded]
        return tokens, [list(pair.get("token_type_ids", [0] * len(pair["input_ids"]))) for pair in encoded]

    @torch.inference_mode()
    def _probabilities(self, texts: list[list[int]], types: list[list[int]] | None = None) -> Tensor:  # [texts, labels]
        ids, mask = self._padded(texts)
        more = {}
        if types is not None and "token_type_ids" in self.tokenizer.model_input_names:
            more["token_type_ids"] = self._padded(types, 0)[0]
        logits = self.model.network(input_ids=ids, attention_mask=mask, **more).logits.float()
        one_of_several = len(self.labels) > 1 and self.network.config.problem_type != "multi_label_classification"
        return (logits.softmax(-1) if one_of_several else logits.sigmoid()).cpu()

    def _padded(self, texts: list[list[int]], padding: int | None = None) -> tuple[Tensor, Tensor]:
        """Return tokens and attention mask, both [texts, longest], on the model's device."""
        max_len, padding = max(map(len, texts)), self._padding if padding is None else padding
        ids = torch.tensor([text + [padding] * (max_len - len(text)) for text in texts])
        mask = torch.tensor([[1] * len(text) + [0] * (max_len - len(text)) for text in texts])
        return ids.to(self.model.device), mask.to(self.model.device)

    @torch.inference_mode()
    def _vectors(self, texts: list[list[int]]) -> Tensor:  # [texts, hidden size]
        ids, mask = self._padded(texts)
        states = self.network(input_ids=ids, attention_mask=mask).last_hidden_state.float()  # [texts, max_len, hidden]
        weights = mask[..., None].float()
        means = (states * weights).sum(1) / weights.sum(1).clamp(min=1e-9)
        return torch.nn.functional.normalize(means, dim=-1).cpu()


def _positions(network: PreTrainedModel) -> int:
    """Return the maximum sequence length; some families start positions after the padding index."""
    max_positions = int(network.config.max_position_embeddings)
    table = getattr(getattr(outline_of(network).base_model, "embeddings", None), "position_embeddings", None)
    padding = getattr(table, "padding_idx", None)
    return max_positions if padding is None else max_positions - padding - 1
