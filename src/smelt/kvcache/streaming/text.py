"""A stream of text in bounded memory (InfiniPot): push any amount, ask at any time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from smelt.errors import ConfigError, ModelError, RequestError
from smelt.kvcache.eviction.attention import default_attention, masked_attention
from smelt.kvcache.streaming.bounded_cache import BoundedCache
from smelt.kvcache.streaming.config import BoundedCacheSize
from smelt.kvcache.streaming.infinipot import InfiniPot, InfiniPotCompressor
from smelt.kvcache.streaming.novelty import NoveltyTracker, token_novelty
from smelt.kvcache.streaming.text_io import StreamTokenizer, Tokens
from smelt.models.model import Model


class TextStream:
    """A pot of `cap` tokens. It is filled up to `cap - room`; then it is cooked down to `keep` tokens, and reading goes
    on. `room` is left free for the catalyst prompt, and for what is asked and answered; that it is an eighth is a
    default of ours.

    What a network remembers of a token was computed from what the pot held when the token came, so text that was lost
    may still speak through what came after it.
    """

    def __init__(
        self,
        model: Model,
        cap: int = 4096,
        *,
        keep: int | None = None,
        room: int | None = None,
        rule: InfiniPot | None = None,
        chunk: int = 512,
    ) -> None:
        distiller = InfiniPotCompressor(model, rule or InfiniPot())
        if model.kv is not None:
            raise ModelError(f"this model keeps keys and values as {model.kv}; a pot cannot yet, so load it without.")
        if chunk < 1:
            raise ConfigError(f"chunk is {chunk}; it is how many tokens are read at once, so at least 1.")
        self.model, self.rule, self.cap, self.chunk = model, distiller.rule, cap, chunk
        self._distiller, self._prompt = distiller, distiller.prompt
        self._network: Any = model.network
        self._words = StreamTokenizer(model.network, model.tokenizer)
        window = getattr(self._network.config, "max_position_embeddings", None)
        room = max(cap // 8, len(self._prompt)) if room is None else room
        self._size = BoundedCacheSize.of(cap, keep, room, len(self._prompt), window)
        self.keep, self.room = self._size.keep, self._size.room
        parts = [part for part in model.anatomy.parts if part.kind == "heads"]
        self._scales = {part.block: _scale(part.owner, part.head_dim) for part in parts}
        self.pot = BoundedCache(cap, model.network.config)
        self._ledger = NoveltyTracker(cap, model.device)
        self._last = torch.zeros(0, 0)  # [1, width]: the hidden state that foresees the next token
        with default_attention(self._network):
            self.pot.allocate(lambda: self._read(self._prompt[:1]))
        self.cooked = 0  # how often it was cooked down

    @property
    def bytes(self) -> int:
        """What the stream holds of what it read; the same from the first token to the last."""
        return self.pot.bytes + self._ledger.bytes

    @property
    def length(self) -> int:
        """Tokens in the pot, at most `cap - room`."""
        return self.pot.length

    @property
    def seen(self) -> int:
        """Tokens that were pushed."""
        return self.pot.seen

    @torch.no_grad()
    def push(self, text: str | Tokens) -> None:
        """Read on. Text that comes in pieces is cut into tokens piece by piece."""
        waiting = self._words.tokens(text, begins=not self.seen)
        with default_attention(self._network):
            while len(waiting):
                if self.length >= self._size.full:
                    self._cook_down()
                piece = waiting[: min(self.chunk, self._size.full - self.length)]
                self._take(piece)
                waiting = waiting[len(piece) :]

    def ask(self, question: str, max_tokens: int = 32, *, remember: bool = False) -> str:
        """What the model says to these words, greedily, after all that was pushed. It leaves the pot as it was, to the
        bit, unless question and answer are to be remembered: then they are pushed."""
        answer = self.answer(self._words.tokens(question), max_tokens)
        if remember:
            self.push(torch.cat((self._words.tokens(question), answer)))
        return self._words.text(answer)

    @torch.no_grad()
    def answer(self, question: Tokens, max_tokens: int = 32) -> Tensor:
        """The same in tokens [at most max_tokens]; without the token that ends it."""
        ids = self._words.tokens(question)
        self._check_request(len(ids), max_tokens)
        with default_attention(self._network), self.pot.aside():
            states = self._read_all(ids)[-1] if len(ids) else self._last[0]
            return self._words.said(self._head(states), lambda word: self._head(self._read(word)[0]), max_tokens)

    @torch.no_grad()
    def logits(self, text: str | Tokens) -> Tensor:
        """What the model expects before each of these tokens, after all that was pushed: [tokens, vocabulary]. The
        first row needs something before it: with an empty stream it is missing. The pot stays as it was."""
        ids = self._words.tokens(text)
        self._check_request(len(ids), 0)
        with default_attention(self._network), self.pot.aside():
            states = self._read_all(ids)
        found: Tensor = self._head(torch.cat((self._last, states[:-1])) if self.seen else states[:-1])
        return found

    def _check_request(self, tokens: int, more: int) -> None:
        free = self.cap - self.length
        if not tokens and not (self.seen and more):
            raise RequestError("there is nothing to go on from; give the model some words.")
        if more < 0 or tokens + more > free:
            raise RequestError(
                f"a question of {tokens} tokens and an answer of {more} do not fit into the {free} that the pot has "
                f"free; ask for less, or make room larger than {self.room}."
            )

    def _take(self, ids: Tensor) -> None:
        first = self.seen
        with self.pot.whole():
            states = self._read(ids)
            before = torch.cat((self._last, states[:-1])) if first else states[:-1]
            novelty = token_novelty(before, ids[len(ids) - len(before) :], self._head)
        if not first:  # nothing foresaw the first token of all
            novelty = torch.cat((novelty.new_full((1,), torch.inf), novelty))
        self._ledger.add(first, novelty)
        self._last = states[-1:].clone()

    @torch.no_grad()
    def _cook_down(self) -> None:
        """Distil the pot to `keep` tokens."""
        length, attention = self.length, {}

        def listen(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> None:
            attention[layer] = self._distiller.attention(queries, keys, self._scales[layer])

        with self.pot.aside(), masked_attention(self._network, hook=listen):
            self._read(self._prompt)
        novel = self._ledger.keep(self.rule.novel(self.keep))
        for layer, held in enumerate(self.pot.layers):
            places = self._distiller.places(attention[layer], held.numbers[:, :length], novel, self.keep)
            self.pot.keep(layer, places, turned=self._distiller.turned)
        self.cooked += 1

    def _read_all(self, ids: Tensor) -> Tensor:
        """Hidden states [tokens, width] of any number of tokens, some at a time."""
        return torch.cat([self._read(piece) for piece in ids.split(self.chunk)])

    def _read(self, ids: Tensor) -> Tensor:
        """Put tokens [new] through the network and into the pot: their hidden states [new, width]."""
        first = self.pot.length if self.rule.renumber else self.pot.seen
        positions = torch.arange(first, first + len(ids), device=ids.device)
        with torch.no_grad():
            found = self._network.base_model(
                ids[None], position_ids=positions[None], past_key_values=self.pot, use_cache=True
            )
        states: Tensor = found.last_hidden_state[0]
        return states

    @property
    def _head(self) -> Any:
        return self._network.get_output_embeddings()


def _scale(holder: Any, width: int) -> float:
    return float(getattr(holder, "scaling", None) or width**-0.5)
