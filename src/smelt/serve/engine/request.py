"""A request on its way through the engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from smelt.serve.engine.per_head.holding import PerHeadCacheState
from smelt.serve.engine.sampling_params import SamplingParams
from smelt.serve.engine.structured_output import GrammarMatcher

if TYPE_CHECKING:
    from smelt.serve.engine.bounded.held import BoundedCacheState


class RequestStatus(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False)
class Request:
    """One answer to one prompt. Tokens are known as soon as their step was read; a step may be under way meanwhile."""

    id: str
    prompt: list[int]
    sampling: SamplingParams
    limit: int  # prompt and answer together have no more tokens than this
    seed: int = 0
    priority: int = 0  # lower runs first
    salt: bytes = b""  # only requests with the same salt share cached blocks
    adapter: str | None = None
    arrival: int = 0  # its place in the order in which requests came

    state: RequestStatus = RequestStatus.WAITING
    tokens: list[int] = field(default_factory=list)  # prompt and answer
    num_computed_tokens: int = 0  # tokens whose keys and values are in the cache, or will be after the steps under way
    num_inflight: int = 0  # tokens that steps under way will give
    blocks: list[int] = field(default_factory=list)  # of the cache, in order
    holding: PerHeadCacheState | None = None  # what these are, where clusters of heads have blocks of their own
    pot: BoundedCacheState | None = None  # what it knows of them, where they are a pot that is cooked down
    digests: list[bytes] = field(default_factory=list)  # of its full blocks, as far as they were computed
    registered: int = 0  # of its blocks: those that the prefix cache knows
    slot: int = -1  # its row in the runner's buffers
    num_cached_tokens: int = 0  # tokens of the prompt that were found in the prefix cache
    preemptions: int = 0
    admitted_at: int = 0  # the step that first computed some of it, counted from 1
    started: float = 0.0  # when that was, by time.monotonic()
    matcher: GrammarMatcher | None = None  # of the form that the answer must have
    parent: Request | None = None  # the sibling whose prompt it shares, until that one's is computed
    reason: str = ""  # why it ended: stop, length, abort

    def __post_init__(self) -> None:
        self.tokens = self.tokens or list(self.prompt)

    @property
    def order(self) -> tuple[int, int]:
        """Who runs first, and is preempted last."""
        return self.priority, self.arrival

    @property
    def num_expected_tokens(self) -> int:
        """Tokens that there will be after the steps under way."""
        return len(self.tokens) + self.num_inflight

    @property
    def output(self) -> list[int]:
        return self.tokens[len(self.prompt) :]
