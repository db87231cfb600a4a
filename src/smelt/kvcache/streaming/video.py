"""A stream of frames in bounded memory (InfiniPot-V): push any number, ask at any time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from smelt.errors import ConfigError, DataError, RequestError
from smelt.kvcache.streaming.bounded_cache import BoundedCache, check_layers
from smelt.kvcache.streaming.frame_rule import FrameRule, FrameTokens
from smelt.kvcache.streaming.infinipot_v import InfiniPotV
from smelt.kvcache.streaming.position_ids import FramePositions
from smelt.kvcache.streaming.recent import RecentFrames
from smelt.kvcache.streaming.text_io import StreamTokenizer, Tokens
from smelt.kvcache.streaming.uniform import UniformFrames
from smelt.kvcache.streaming.vision import FrameEncoder, FrameLayout, Prepare

FRAME_RULES: dict[str, type[FrameRule]] = {rule.name: rule for rule in (InfiniPotV, RecentFrames, UniformFrames)}


class VideoStream:
    """A pot of `frames` frames. When it is full and more come, it is cooked down to the tokens of `keep_frames`, and
    there is room for the difference; no more are ever encoded at once. A `prefix` of words stays in front for ever, and
    `room` tokens are left free for what is asked and answered.

    Where a network joins frames in pairs, a pair counts as one here, and a frame without its partner waits. Frames
    [frames, channels, height, width] are sized and normalised, unless `prepare` does that. Nothing is written between
    them: a network that was trained with words between frames sees none. Positions grow with the stream and kept keys
    stay where they were computed, as in the paper. Every token sees those before it alone, also where a network would
    let the tokens of one picture see each other.
    """

    def __init__(
        self,
        network: PreTrainedModel,
        tokenizer: Any = None,
        *,
        frames: int = 32,
        keep_frames: int = 24,
        rule: FrameRule | str = "infinipot-v",
        prefix: str | Tokens = (),
        room: int = 256,
        prepare: Prepare | None = None,
    ) -> None:
        self.frames, self.keep_frames, self.room, self.rule = frames, keep_frames, room, _rule(rule)
        if not 1 <= keep_frames < frames:
            raise ConfigError(f"of {frames} frames {keep_frames} cannot be kept; keep at least 1, and fewer than all.")
        if room < 1:
            raise ConfigError(f"room is {room} tokens; a question and its answer need some.")
        self.rule.check(frames, keep_frames)
        check_layers(network.config.get_text_config(decoder=True))
        self.network: Any = network
        self._words, self._eye = StreamTokenizer(network, tokenizer), FrameEncoder(network, prepare)
        self._prefix = self._words.tokens(prefix, begins=True)  # [tokens]
        self._size = torch.Size()  # of a frame
        self._waiting: Tensor | None = None  # frames without their partners
        self._shape: FrameLayout
        self._numbering: FramePositions
        self.pot: BoundedCache | None = None  # made when the first frame shows how many tokens a frame has
        self.seen = 0  # frames
        self.cooked = 0  # how often it was cooked down
        self._held = self._new = 0  # frames in the pot, and those that came since it was cooked down

    @property
    def bytes(self) -> int:
        """What the stream holds of what it saw; the same from the first frame to the last."""
        return 0 if self.pot is None else self.pot.bytes

    @property
    def length(self) -> int:
        """Tokens in the pot."""
        return 0 if self.pot is None else self.pot.length

    @torch.no_grad()
    def push(self, frames: Tensor, *, last: bool = False) -> None:
        """Watch on. Where no more will come, `last` keeps as many older tokens as fit beside these frames."""
        waiting = self._paired(frames, last)
        joined = self._eye.joined
        while len(waiting):
            if self._held == self.frames:
                left = len(waiting) // joined
                self._cook_down(max(self.keep_frames, self.frames - left) if last else self.keep_frames)
            count = min(self.frames - self._held, self.frames - self.keep_frames, len(waiting) // joined)
            self._take(waiting[: count * joined])
            waiting = waiting[count * joined :]

    def ask(self, question: str, max_tokens: int = 32) -> str:
        """What the model says to these words, greedily, after all frames. The pot stays as it was, to the bit."""
        return self._words.text(self.answer(self._words.tokens(question), max_tokens))

    @torch.no_grad()
    def answer(self, question: Tokens, max_tokens: int = 32) -> Tensor:
        """The same in tokens [at most max_tokens]; without the token that ends it."""
        ids = self._words.tokens(question)
        pot = self._checked(len(ids), max_tokens)
        before = pot.length

        def more(word: Tensor) -> Tensor:
            position = self._numbering.words(self.seen, pot.length - before + 1)[:, -1:]
            return self._feed(self._embedded(word), position)[-1]

        with pot.aside():
            return self._words.said(self._asked(ids)[-1], more, max_tokens)

    @torch.no_grad()
    def logits(self, question: Tokens) -> Tensor:
        """What the model expects after each of these words: [words, vocabulary]. The pot stays as it was."""
        ids = self._words.tokens(question)
        with self._checked(len(ids), 0).aside():
            return self._asked(ids)

    def _asked(self, ids: Tensor) -> Tensor:
        embedded = torch.cat((self._shape.after, self._embedded(ids)))
        return self._feed(embedded, self._numbering.words(self.seen, len(embedded)), keep=len(ids))

    def _checked(self, tokens: int, more: int) -> BoundedCache:
        if self.pot is None or not self.seen:
            raise RequestError("no frame was seen yet; push some before asking.")
        if not tokens:
            raise RequestError("the question is empty; give the model some words.")
        free = self.pot.cap - self.pot.length - len(self._shape.after)
        if more < 0 or tokens + more > free:
            raise RequestError(
                f"a question of {tokens} tokens and an answer of {more} do not fit into the {free} that the pot has "
                f"free; ask for less, or make room larger than {self.room}."
            )
        return self.pot

    def _paired(self, frames: Tensor, last: bool) -> Tensor:
        """Frames with those that waited, as many as have their partners; the others wait."""
        if frames.dim() != 4 or (self._size and frames.shape[1:] != self._size):
            wanted = f"{list(self._size)}" if self._size else "[channels, height, width]"
            raise DataError(f"frames of shape {list(frames.shape)} came; they are [frames, ...] of {wanted}.")
        if self._waiting is not None:
            frames = torch.cat((self._waiting, frames))
        if last and len(frames) % self._eye.joined:
            frames = torch.cat((frames, frames[-1:].expand(-len(frames) % self._eye.joined, -1, -1, -1)))
        whole = len(frames) - len(frames) % self._eye.joined
        if self.pot is None and whole:
            self._begin(frames)
        self._size, self._waiting = frames.shape[1:], frames[whole:].clone() if whole < len(frames) else None
        return frames[:whole]

    def _begin(self, frames: Tensor) -> None:
        """Make the pot, as large as it will ever be, and put the prefix into it."""
        shape = self._eye.shape(frames)
        if self.rule.shaped and shape.grid is None:
            raise ConfigError(f"{self.rule.name} pools over rows and columns, and this network does not say its rows.")
        config = self.network.config.get_text_config(decoder=True)
        cap = len(self._prefix) + self.frames * shape.patches + len(shape.after) + self.room
        self.pot, self._shape = BoundedCache(cap, config, marked=self.rule.marked), shape
        self._numbering = FramePositions(self.network, len(self._prefix), shape)
        nothing = torch.zeros(1, dtype=torch.int64, device=self.network.device)
        self.pot.allocate(lambda: self._feed(self._embedded(nothing), self._numbering.words(0, 1)))
        if len(self._prefix):
            positions = torch.arange(len(self._prefix), device=self.network.device)
            self._feed(self._embedded(self._prefix), positions.expand(self._numbering.axes, -1))

    def _take(self, frames: Tensor) -> None:
        assert self.pot is not None
        tokens = self._eye(frames, self._shape)  # [frames, patches, width]
        with self.pot.whole():
            self._feed(tokens.flatten(0, 1), self._numbering.frames(self.seen, len(tokens)))
        self.seen, self._held, self._new = self.seen + len(tokens), self._held + len(tokens), self._new + len(tokens)

    def _cook_down(self, keep: int) -> None:
        """Cut the pot down to the tokens of `keep` frames, each head by its own choice."""
        assert self.pot is not None
        first, patches, length = len(self._prefix), self._shape.patches, self.pot.length
        fresh = slice(length - self._new * patches, length)
        for at, layer in enumerate(self.pot.layers):
            if self.rule.marked:
                whole = layer.values[:, fresh].unflatten(1, (self._new, *(self._shape.grid or (1, patches))))
                layer.marks[:, fresh] = self.rule.marks(whole, at, len(self.pot.layers)).flatten(1)
            held = FrameTokens(
                layer.keys[:, first:length],
                (layer.numbers[:, first:length] - first) % patches,
                layer.marks[:, first:length],
                patches,
            )
            self.pot.keep(at, self.rule.places(held, keep * patches), first)
        self._held, self._new, self.cooked = keep, 0, self.cooked + 1

    def _embedded(self, ids: Tensor) -> Tensor:  # [tokens, width]
        found: Tensor = self.network.get_input_embeddings()(ids)
        return found

    def _feed(self, embedded: Tensor, positions: Tensor, keep: int = 1) -> Tensor:
        """Put embedded tokens [tokens, width] at positions [axes, tokens] through the network and into the pot; the
        logits of the last ones [keep, vocabulary]."""
        found = self.network(
            inputs_embeds=embedded[None],
            position_ids=positions[:, None] if len(positions) > 1 else positions,
            past_key_values=self.pot,
            use_cache=True,
            logits_to_keep=keep,
        )
        logits: Tensor = found.logits[0]
        return logits


def _rule(given: FrameRule | str) -> FrameRule:
    if isinstance(given, FrameRule):
        return given
    if given not in FRAME_RULES:
        raise ConfigError(f"there is no frame rule {given!r}; there are {', '.join(FRAME_RULES)}.")
    return FRAME_RULES[given]()
