"""Streams of text in bounded memory (InfiniPot): push any amount, ask at any time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from smelt.errors import ConfigError, ModelError, RequestError
from smelt.kvcache.eviction.attention import default_attention, masked_attention, softmax_scale
from smelt.kvcache.streaming.bounded_cache import BoundedCache
from smelt.kvcache.streaming.config import BoundedCacheSize
from smelt.kvcache.streaming.infinipot import InfiniPot, InfiniPotCompressor
from smelt.kvcache.streaming.novelty import NoveltyTracker, token_novelty
from smelt.kvcache.streaming.text_io import StreamTokenizer, Tokens
from smelt.models.model import Model


class TextStream:
    """A bounded cache of `capacity` tokens. It is filled up to `capacity - reserved`, then compressed to `keep` tokens.
    The `reserved` slots are for the catalyst prompt, questions and answers; an eighth is our default.

    The KV entries of a token were computed from what the cache held when it arrived, so evicted text may still act
    through later tokens.
    """

    def __init__(
        self,
        model: Model,
        capacity: int = 4096,
        *,
        keep: int | None = None,
        reserved: int | None = None,
        method: InfiniPot | None = None,
        chunk_size: int = 512,
    ) -> None:
        compressor = InfiniPotCompressor(model, method or InfiniPot())
        if model.kv is not None:
            raise ModelError(f"this model has a quantized KV cache ({model.kv}), which a stream does not support yet.")
        if chunk_size < 1:
            raise ConfigError(f"chunk_size is {chunk_size}; it must be at least 1 token.")
        self.model, self.method, self.capacity, self.chunk_size = model, compressor.method, capacity, chunk_size
        self._compressor, self._prompt = compressor, compressor.prompt
        self._network: Any = model.network
        self._tokenizer = StreamTokenizer(model.network, model.tokenizer)
        max_positions = getattr(self._network.config, "max_position_embeddings", None)
        reserved = max(capacity // 8, len(self._prompt)) if reserved is None else reserved
        self._size = BoundedCacheSize.create(capacity, keep, reserved, len(self._prompt), max_positions)
        self.keep, self.reserved = self._size.keep, self._size.reserved
        parts = [part for part in model.anatomy.parts if part.kind == "heads"]
        self._scales = {part.block: softmax_scale(part.owner, part.head_dim) for part in parts}
        self.cache = BoundedCache(capacity, model.network.config)
        self._novelty = NoveltyTracker(capacity, model.device)
        self._last = torch.zeros(0, 0)  # [1, hidden]: hidden state that predicts the next token
        with default_attention(self._network):
            self.cache.allocate(lambda: self._forward(self._prompt[:1]))
        self.num_compressions = 0

    @property
    def nbytes(self) -> int:
        """Bytes held for the stream; constant from the first token to the last."""
        return self.cache.nbytes + self._novelty.nbytes

    @property
    def length(self) -> int:
        """Tokens in the cache, at most `capacity - reserved`."""
        return self.cache.length

    @property
    def num_seen(self) -> int:
        """Tokens that were pushed."""
        return self.cache.num_seen

    @torch.no_grad()
    def push(self, text: str | Tokens) -> None:
        """Append text to the stream. Each call is tokenized separately."""
        pending = self._tokenizer.encode(text, begins=not self.num_seen)
        with default_attention(self._network):
            while len(pending):
                if self.length >= self._size.max_text_tokens:
                    self._compress()
                chunk = pending[: min(self.chunk_size, self._size.max_text_tokens - self.length)]
                self._append(chunk)
                pending = pending[len(chunk) :]

    def ask(self, question: str, max_tokens: int = 32, *, remember: bool = False) -> str:
        """Answer a question greedily after everything that was pushed. The cache is restored bit for bit, unless
        question and answer are to be remembered: then they are pushed."""
        answer = self.answer(self._tokenizer.encode(question), max_tokens)
        if remember:
            self.push(torch.cat((self._tokenizer.encode(question), answer)))
        return self._tokenizer.decode(answer)

    @torch.no_grad()
    def answer(self, question: Tokens, max_tokens: int = 32) -> Tensor:
        """Answer in token ids [at most max_tokens], without the end token."""
        ids = self._tokenizer.encode(question)
        self._check_request(len(ids), max_tokens)
        with default_attention(self._network), self.cache.temporary():
            states = self._forward_chunks(ids)[-1] if len(ids) else self._last[0]
            return self._tokenizer.generate_greedy(
                self._lm_head(states), lambda token: self._lm_head(self._forward(token)[0]), max_tokens
            )

    @torch.no_grad()
    def logits(self, text: str | Tokens) -> Tensor:
        """Return the logits that predict each of these tokens after everything that was pushed: [tokens, vocab]. On an
        empty stream the first row is missing. The cache is restored."""
        ids = self._tokenizer.encode(text)
        self._check_request(len(ids), 0)
        with default_attention(self._network), self.cache.temporary():
            states = self._forward_chunks(ids)
        logits: Tensor = self._lm_head(torch.cat((self._last, states[:-1])) if self.num_seen else states[:-1])
        return logits

    def _check_request(self, num_tokens: int, max_tokens: int) -> None:
        free = self.capacity - self.length
        if not num_tokens and not (self.num_seen and max_tokens):
            raise RequestError("there is nothing to continue; give the model some words.")
        if max_tokens < 0 or num_tokens + max_tokens > free:
            raise RequestError(
                f"a question of {num_tokens} tokens and an answer of {max_tokens} do not fit into the {free} free "
                f"slots of the cache; ask for less, or reserve more than {self.reserved}."
            )

    def _append(self, ids: Tensor) -> None:
        first = self.num_seen
        with self.cache.transaction():
            states = self._forward(ids)
            predicting = torch.cat((self._last, states[:-1])) if first else states[:-1]
            novelty = token_novelty(predicting, ids[len(ids) - len(predicting) :], self._lm_head)
        if not first:  # nothing predicts the first token of all
            novelty = torch.cat((novelty.new_full((1,), torch.inf), novelty))
        self._novelty.add(first, novelty)
        self._last = states[-1:].clone()

    @torch.no_grad()
    def _compress(self) -> None:
        """Compress the cache to `keep` tokens."""
        length, attention = self.length, {}

        def hook(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> None:
            attention[layer] = self._compressor.attention(queries, keys, self._scales[layer])

        with self.cache.temporary(), masked_attention(self._network, hook=hook):
            self._forward(self._prompt)
        novel = self._novelty.keep_top(self.method.num_novel(self.keep))
        for layer, cached in enumerate(self.cache.layers):
            slots = self._compressor.select(attention[layer], cached.token_indices[:, :length], novel, self.keep)
            self.cache.retain(layer, slots, rerotate=self._compressor.rerotate)
        self.num_compressions += 1

    def _forward_chunks(self, ids: Tensor) -> Tensor:
        """Return the hidden states [tokens, hidden] of any number of tokens, chunk by chunk."""
        return torch.cat([self._forward(chunk) for chunk in ids.split(self.chunk_size)])

    def _forward(self, ids: Tensor) -> Tensor:
        """Run tokens [new] through the network and append them to the cache: hidden states [new, hidden]."""
        first = self.cache.length if self.method.renumber else self.cache.num_seen
        positions = torch.arange(first, first + len(ids), device=ids.device)
        with torch.no_grad():
            output = self._network.base_model(
                ids[None], position_ids=positions[None], past_key_values=self.cache, use_cache=True
            )
        states: Tensor = output.last_hidden_state[0]
        return states

    @property
    def _lm_head(self) -> Any:
        return self._network.get_output_embeddings()
