"""Beam search as transformers' `generate(num_beams=...)` does it: keep the most likely partial answers of each length.

Only the search is here. Whoever runs it computes the most likely next tokens of all running beams, which an engine does
as requests for one token each: beams share their prompt, and what they have in common, through the prefix cache.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from smelt.errors import RequestError

MAX_BEAMS = 16


@dataclass(frozen=True)
class BeamSearchParams:
    """Settings of a search. A finished beam of n tokens has the score log-probability / n ** length_penalty.

    `early_stopping` says when a search ends that has found `width` answers: True: at once; False: if the best running
    beam, as long as it is now, is worse than all of them; "never": if it is worse at any length up to `max_tokens`.
    """

    width: int
    max_tokens: int
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False

    def __post_init__(self) -> None:
        if not 1 <= self.width <= MAX_BEAMS:
            raise RequestError(f"the beam width is {self.width}; it must be between 1 and {MAX_BEAMS}.")


@dataclass(frozen=True)
class Beam:
    """A partial or finished answer; `score` is its log-probability, once finished with the length penalty."""

    tokens: tuple[int, ...]
    score: float
    reason: str = ""  # stop or length, once finished


class BeamSearch:
    """The search for one prompt: `advance` it with candidates for all `running` beams until it is `done`."""

    def __init__(self, params: BeamSearchParams, end_token_ids: Collection[int]) -> None:
        self.params, self.end_token_ids = params, frozenset(end_token_ids)
        self.running = [Beam((), 0.0)]
        self.finished: list[Beam] = []  # the best first, at most `width`
        self.done = False
        self._improvable = True

    @property
    def num_candidates(self) -> int:
        """Return how many next tokens of each beam `advance` needs: enough that some of them do not end an answer."""
        return max(2, 1 + len(self.end_token_ids)) * self.params.width

    def advance(self, candidates: Sequence[Sequence[tuple[int, float]]]) -> None:
        """Extend the running beams by their most likely next tokens, each with its log-probability."""
        extended = [
            Beam((*beam.tokens, token), beam.score + logprob)
            for beam, most_likely in zip(self.running, candidates, strict=True)
            for token, logprob in most_likely
        ]
        best = sorted(extended, key=lambda beam: -beam.score)[: self.num_candidates]
        reasons = [self._finish_reason(beam) for beam in best]
        self._add_finished(
            [
                Beam(beam.tokens, beam.score / len(beam.tokens) ** self.params.length_penalty, reason)
                for beam, reason in zip(best[: self.params.width], reasons, strict=False)
                if reason
            ]
        )
        continued = [beam for beam, reason in zip(best, reasons, strict=True) if not reason]
        self.running = continued[: self.params.width]
        self.done = not self.running or not self._may_improve()

    def _finish_reason(self, beam: Beam) -> str:
        if beam.tokens[-1] in self.end_token_ids:
            return "stop"
        return "length" if len(beam.tokens) >= self.params.max_tokens else ""

    def _add_finished(self, beams: list[Beam]) -> None:
        full = len(self.finished) == self.params.width and self.params.early_stopping is True
        if self._improvable and not full:
            self.finished = sorted([*self.finished, *beams], key=lambda beam: -beam.score)[: self.params.width]

    def _may_improve(self) -> bool:
        """Return whether a running beam could still replace a finished one."""
        if len(self.finished) < self.params.width:
            return True
        if self.params.early_stopping is True:
            return False
        longest = self.params.early_stopping == "never" and self.params.length_penalty > 0
        length = self.params.max_tokens if longest else len(self.running[0].tokens)
        self._improvable &= self.running[0].score / length**self.params.length_penalty > self.finished[-1].score
        return self._improvable
