"""One request: its tokens, its progress through the engine, and what it holds of the KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from smelt.errors import RequestError
from smelt.serve.engine.sampling_params import SamplingParams
from smelt.serve.engine.structured_output import GrammarMatcher

if TYPE_CHECKING:
    from torch import Tensor  # the server imports this file, and does without torch


class RequestStatus(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class RequestId(NamedTuple):
    """One of the samples of a named prompt."""

    name: str
    sample: int = 0

    def __str__(self) -> str:
        return f"{self.name}-{self.sample}"


class Tenant(NamedTuple):
    """Whom a request is run for; waiting requests of several tenants share the engine by weight."""

    name: str
    weight: int = 1


ANYONE = Tenant("")


class CacheState:
    """State that a cache manager keeps for a request besides its blocks; managers that need one subclass it."""


@dataclass(eq=False)
class Request:
    """One answer to one prompt. Tokens are known as soon as their step was read; other steps may be in flight."""

    id: RequestId
    prompt: list[int]
    sampling: SamplingParams
    limit: int  # prompt and output tokens together, at most
    seed: int = 0
    priority: int = 0  # lower runs first
    salt: bytes = b""  # only requests with the same salt share cached blocks
    adapter: str | None = None
    tenant: Tenant = ANYONE
    start_tag: float = 0.0  # virtual time at which fair queueing lets it start
    arrival: int = 0  # its number in the order of arrival

    state: RequestStatus = RequestStatus.WAITING
    tokens: list[int] = field(default_factory=list)  # prompt and output
    num_computed_tokens: int = 0  # in the KV cache, or there after the steps in flight
    num_inflight: int = 0  # tokens that the steps in flight will sample
    blocks: list[int] = field(default_factory=list)  # of the KV cache, in order
    cache_state: CacheState | None = None  # owned by the cache manager
    block_hashes: list[bytes] = field(default_factory=list)  # of its full blocks, as far as they were computed
    registered: int = 0  # how many of its blocks are in the prefix cache
    slot: int = -1  # its row in the runner's buffers
    num_cached_tokens: int = 0  # of the prompt: found in the prefix cache
    num_prompt_logprobs: int = 0  # prompt tokens whose log-probabilities are known
    preemptions: int = 0
    admitted_at: int = 0  # the step that first computed some of it, counted from 1
    started: float = 0.0  # when that was, by time.monotonic()
    matcher: GrammarMatcher | None = None  # for structured output
    allowed_tokens: Tensor | None = None  # of its sampling parameters, on the device since the first step
    expert_routes: list[int] = field(default_factory=list)  # of its tokens, if a router ahead of the layers chooses
    expert_wait: int = 0  # steps that it has waited for requests of other experts
    parent: Request | None = None  # the sibling whose prompt it shares, until that one is computed
    reason: str = ""  # why it finished: stop, length, abort, error
    error: str = ""  # why its answer could not be completed

    def __post_init__(self) -> None:
        self.tokens = self.tokens or list(self.prompt)

    @property
    def order(self) -> tuple[int, float, int]:
        """Sort key: the first runs first and is preempted last."""
        return self.priority, self.start_tag, self.arrival

    @property
    def num_expected_tokens(self) -> int:
        """Tokens that there will be after the steps in flight."""
        return len(self.tokens) + self.num_inflight

    @property
    def wants_prompt_logits(self) -> bool:
        """Return whether prompt tokens must be computed, not taken from the prefix cache, for their logits."""
        return self.sampling.prompt_logprobs is not None and self.num_prompt_logprobs < len(self.prompt) - 1

    @property
    def output(self) -> list[int]:
        return self.tokens[len(self.prompt) :]


class ContextLengthError(RequestError):
    """Prompt and answer together are longer than the context."""


def check_prompt(prompt: Sequence[int], max_model_len: int, vocab_size: int, max_tokens: int = 1) -> None:
    """Refuse a prompt that the model cannot read, or that leaves no space for an answer of `max_tokens`."""
    if not prompt:
        raise RequestError("the prompt is empty; give at least one token.")
    if len(prompt) + max_tokens > max_model_len:
        answer = "an answer" if max_tokens == 1 else f"an answer of {max_tokens:,}"
        raise ContextLengthError(
            f"the prompt has {len(prompt):,} tokens; with {answer} it must fit into {max_model_len:,}."
        )
    check_tokens(prompt, vocab_size)


def check_tokens(tokens: Sequence[int], vocab_size: int) -> None:
    unknown = next((token for token in tokens if not 0 <= token < vocab_size), None)
    if unknown is not None:
        raise RequestError(f"there is no token {unknown}; the model has {vocab_size:,}.")
