"""Streams of video frames in bounded memory (InfiniPot-V): push any number, ask at any time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from smelt.errors import ConfigError, DataError, RequestError
from smelt.kvcache.streaming.bounded_cache import BoundedCache, check_full_attention
from smelt.kvcache.streaming.frame_rule import FRAME_RULES, FrameRule, FrameTokens
from smelt.kvcache.streaming.position_ids import FramePositions
from smelt.kvcache.streaming.text_io import StreamTokenizer, Tokens
from smelt.kvcache.streaming.vision import FrameEncoder, FrameLayout, PreprocessFn


class VideoStream:
    """A bounded cache of `max_frames` frames. When it is full and more arrive, it is compressed to the tokens of
    `keep_frames`; no more frames than that frees are encoded at once. A text `prefix` stays in front for ever, and
    `reserved` slots are left for questions and answers.

    Where a network merges frames in pairs, a pair counts as one here, and a frame without its partner waits. Frames
    [frames, channels, height, width] are resized and normalized, unless `preprocess` does that. Nothing is inserted
    between frames, even for networks trained with text there. Positions grow with the stream and retained keys keep
    theirs, as in the paper. Attention is causal, also where a network would let the tokens of one image see each other.
    """

    def __init__(
        self,
        network: PreTrainedModel,
        tokenizer: Any = None,
        *,
        max_frames: int = 32,
        keep_frames: int = 24,
        rule: FrameRule | str = "infinipot-v",
        prefix: str | Tokens = (),
        reserved: int = 256,
        preprocess: PreprocessFn | None = None,
    ) -> None:
        self.max_frames, self.keep_frames, self.reserved = max_frames, keep_frames, reserved
        self.rule = FRAME_RULES.build(rule) if isinstance(rule, str) else rule
        if not 1 <= keep_frames < max_frames:
            raise ConfigError(
                f"of {max_frames} frames {keep_frames} cannot be kept; keep at least 1, and fewer than all."
            )
        if reserved < 1:
            raise ConfigError(f"{reserved} tokens are reserved; a question and its answer need some.")
        self.rule.check(max_frames, keep_frames)
        check_full_attention(network.config.get_text_config(decoder=True))
        self.network: Any = network
        self._tokenizer, self._encoder = StreamTokenizer(network, tokenizer), FrameEncoder(network, preprocess)
        self._prefix = self._tokenizer.encode(prefix, begins=True)  # [tokens]
        self._frame_shape = torch.Size()
        self._unpaired: Tensor | None = None  # frames without their partners
        self._layout: FrameLayout
        self._positions: FramePositions
        self.cache: BoundedCache | None = None  # allocated when the first frame shows how many tokens a frame has
        self.num_seen = 0  # frames
        self.num_compressions = 0
        self._cached_frames = self._new_frames = 0  # in the cache, and those since the last compression

    @property
    def nbytes(self) -> int:
        """Bytes held for the stream; constant from the first frame to the last."""
        return 0 if self.cache is None else self.cache.nbytes

    @property
    def length(self) -> int:
        """Tokens in the cache."""
        return 0 if self.cache is None else self.cache.length

    @torch.no_grad()
    def push(self, frames: Tensor, *, last: bool = False) -> None:
        """Append frames. Where no more will come, `last` keeps as many older tokens as fit beside these frames."""
        pending = self._paired(frames, last)
        merge = self._encoder.temporal_merge
        while len(pending):
            if self._cached_frames == self.max_frames:
                left = len(pending) // merge
                self._compress(max(self.keep_frames, self.max_frames - left) if last else self.keep_frames)
            free = self.max_frames - self._cached_frames
            count = min(free, self.max_frames - self.keep_frames, len(pending) // merge)
            self._append(pending[: count * merge])
            pending = pending[count * merge :]

    def ask(self, question: str, max_tokens: int = 32) -> str:
        """Answer a question greedily after all frames. The cache is restored bit for bit."""
        return self._tokenizer.decode(self.answer(self._tokenizer.encode(question), max_tokens))

    @torch.no_grad()
    def answer(self, question: Tokens, max_tokens: int = 32) -> Tensor:
        """Answer in token ids [at most max_tokens], without the end token."""
        ids = self._tokenizer.encode(question)
        cache = self._check_request(len(ids), max_tokens)
        before = cache.length

        def next_logits(token: Tensor) -> Tensor:
            position = self._positions.text(self.num_seen, cache.length - before + 1)[:, -1:]
            return self._forward(self._embed(token), position)[-1]

        with cache.temporary():
            return self._tokenizer.generate_greedy(self._question_logits(ids)[-1], next_logits, max_tokens)

    @torch.no_grad()
    def logits(self, question: Tokens) -> Tensor:
        """Return the logits after each token of a question: [tokens, vocab]. The cache is restored."""
        ids = self._tokenizer.encode(question)
        with self._check_request(len(ids), 0).temporary():
            return self._question_logits(ids)

    def _question_logits(self, ids: Tensor) -> Tensor:
        embedded = torch.cat((self._layout.trailing, self._embed(ids)))
        return self._forward(embedded, self._positions.text(self.num_seen, len(embedded)), num_logits=len(ids))

    def _check_request(self, num_tokens: int, max_tokens: int) -> BoundedCache:
        if self.cache is None or not self.num_seen:
            raise RequestError("no frame was seen yet; push some before asking.")
        if not num_tokens:
            raise RequestError("the question is empty; give the model some words.")
        free = self.cache.capacity - self.cache.length - len(self._layout.trailing)
        if max_tokens < 0 or num_tokens + max_tokens > free:
            raise RequestError(
                f"a question of {num_tokens} tokens and an answer of {max_tokens} do not fit into the {free} free "
                f"slots of the cache; ask for less, or reserve more than {self.reserved}."
            )
        return self.cache

    def _paired(self, frames: Tensor, last: bool) -> Tensor:
        """Join frames with those that waited and return the complete pairs; the others wait."""
        if frames.dim() != 4 or (self._frame_shape and frames.shape[1:] != self._frame_shape):
            expected = f"{list(self._frame_shape)}" if self._frame_shape else "[channels, height, width]"
            raise DataError(f"frames of shape {list(frames.shape)} came; they are [frames, ...] of {expected}.")
        merge = self._encoder.temporal_merge
        if self._unpaired is not None:
            frames = torch.cat((self._unpaired, frames))
        if last and len(frames) % merge:
            frames = torch.cat((frames, frames[-1:].expand(-len(frames) % merge, -1, -1, -1)))
        complete = len(frames) - len(frames) % merge
        if self.cache is None and complete:
            self._allocate(frames)
        self._frame_shape = frames.shape[1:]
        self._unpaired = frames[complete:].clone() if complete < len(frames) else None
        return frames[:complete]

    def _allocate(self, frames: Tensor) -> None:
        """Allocate the cache, as large as it will ever be, and prefill the prefix."""
        layout = self._encoder.layout(frames)
        if self.rule.needs_grid and layout.grid is None:
            raise ConfigError(f"{self.rule.name} pools over rows and columns, and this network does not say its rows.")
        config = self.network.config.get_text_config(decoder=True)
        capacity = len(self._prefix) + self.max_frames * layout.patches + len(layout.trailing) + self.reserved
        self.cache = BoundedCache(capacity, config, with_token_scores=self.rule.needs_token_scores)
        self._layout, self._positions = layout, FramePositions(self.network, len(self._prefix), layout)
        token = torch.zeros(1, dtype=torch.int64, device=self.network.device)
        self.cache.allocate(lambda: self._forward(self._embed(token), self._positions.text(0, 1)))
        if len(self._prefix):
            positions = torch.arange(len(self._prefix), device=self.network.device)
            self._forward(self._embed(self._prefix), positions.expand(self._positions.axes, -1))

    def _append(self, frames: Tensor) -> None:
        assert self.cache is not None
        tokens = self._encoder(frames, self._layout)  # [frames, patches, hidden]
        count = len(tokens)
        with self.cache.transaction():
            self._forward(tokens.flatten(0, 1), self._positions.frames(self.num_seen, count))
        self.num_seen += count
        self._cached_frames += count
        self._new_frames += count

    def _compress(self, keep_frames: int) -> None:
        """Compress the cache to the tokens of `keep_frames` frames, each head by its own selection."""
        assert self.cache is not None
        first, patches, length = len(self._prefix), self._layout.patches, self.cache.length
        fresh = slice(length - self._new_frames * patches, length)
        for index, layer in enumerate(self.cache.layers):
            if self.rule.needs_token_scores:
                grid = self._layout.grid or (1, patches)
                values = layer.values[:, fresh].unflatten(1, (self._new_frames, *grid))
                layer.token_scores[:, fresh] = self.rule.token_scores(values, index, len(self.cache.layers)).flatten(1)
            tokens = FrameTokens(
                layer.keys[:, first:length],
                (layer.token_indices[:, first:length] - first) % patches,
                layer.token_scores[:, first:length],
                patches,
            )
            self.cache.retain(index, self.rule.select(tokens, keep_frames * patches), first)
        self._cached_frames, self._new_frames = keep_frames, 0
        self.num_compressions += 1

    def _embed(self, ids: Tensor) -> Tensor:  # [tokens, hidden]
        embedded: Tensor = self.network.get_input_embeddings()(ids)
        return embedded

    def _forward(self, embedded: Tensor, positions: Tensor, num_logits: int = 1) -> Tensor:
        """Run embedded tokens [tokens, hidden] at positions [axes, tokens] through the network and append them to the
        cache; return the logits of the last ones [num_logits, vocab]."""
        output = self.network(
            inputs_embeds=embedded[None],
            position_ids=positions[:, None] if len(positions) > 1 else positions,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=num_logits,
        )
        logits: Tensor = output.logits[0]
        return logits
