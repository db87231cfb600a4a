"""Parameters of a request: how its tokens are sampled, and when it ends."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from smelt.errors import RequestError

MAX_LOGPROBS = 20  # that a client may ask for
MAX_CANDIDATES = 1024  # log-probabilities that the engine returns, for beam search
MAX_STOPS = 16
MAX_SAMPLES = 128
MAX_LOGIT_BIASES = 1024
MAX_ALLOWED_TOKENS = 65_536
MAX_BAD_WORDS = 64
STRUCTURED_OUTPUT_TYPES = ("json", "schema", "regex", "grammar")
MAX_CONSTRAINT_CHARS = 65_536


@dataclass(frozen=True)
class StructuredOutputParams:
    """A constraint on the output: `json` (any object), `schema` (a JSON schema), `regex` or `grammar` (Lark's)."""

    type: str
    text: str = ""

    def __post_init__(self) -> None:
        if self.type not in STRUCTURED_OUTPUT_TYPES:
            raise RequestError(
                f"there is no structured output {self.type!r}; there are {', '.join(STRUCTURED_OUTPUT_TYPES)}."
            )
        _check_range("the length of a structured output constraint", len(self.text), 0, MAX_CONSTRAINT_CHARS)


@dataclass(frozen=True)
class SamplingParams:
    """Sampling settings, validated on construction. Temperature 0 is greedy; the same seed samples the same tokens in
    any batch."""

    max_tokens: int | None = 128  # None: until the context is full; 0: compute the prompt only
    min_tokens: int = 0  # before any stop condition applies
    temperature: float = 1.0
    top_k: int = 0  # sample from the k most likely tokens; 0: all
    top_p: float = 1.0  # the most likely tokens with this total probability
    min_p: float = 0.0  # minimum probability relative to the most likely token
    presence_penalty: float = 0.0  # subtracted from the logits of generated tokens
    frequency_penalty: float = 0.0  # the same, per occurrence
    repetition_penalty: float = 1.0  # divides the logits of tokens in prompt and output where positive, else multiplies
    seed: int | None = None  # None: random
    stop: tuple[str, ...] = ()  # strings that end the request; not part of the answer
    stop_token_ids: tuple[int, ...] = ()  # tokens that end the request
    ignore_eos: bool = False  # do not stop at the model's EOS tokens
    logprobs: int | None = None  # of the sampled token, and of this many most likely ones
    prompt_logprobs: int | None = None  # of each prompt token, and of this many most likely ones
    n: int = 1  # samples per prompt
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # added to the logits of these tokens
    allowed_token_ids: tuple[int, ...] = ()  # sample only these; empty: all
    bad_words: tuple[tuple[int, ...], ...] = ()  # sequences of tokens that are not completed
    structured_output: StructuredOutputParams | None = None  # constraint on the answer

    def __post_init__(self) -> None:
        if self.max_tokens is not None:
            _check_range("max_tokens", self.max_tokens, 0, 2**31)
        _check_range("min_tokens", self.min_tokens, 0, 2**31)
        _check_range("temperature", self.temperature, 0, 100)
        _check_range("top_k", self.top_k, 0, 2**31)
        _check_range("top_p", self.top_p, 0, 1)
        _check_range("min_p", self.min_p, 0, 1)
        _check_range("presence_penalty", self.presence_penalty, -2, 2)
        _check_range("frequency_penalty", self.frequency_penalty, -2, 2)
        _check_range("repetition_penalty", self.repetition_penalty, 0.01, 100)
        _check_range("n", self.n, 1, MAX_SAMPLES)
        _check_range("the number of stop strings", len(self.stop), 0, MAX_STOPS)
        _check_range("the number of stop tokens", len(self.stop_token_ids), 0, MAX_STOPS)
        _check_range("the number of biases", len(self.logit_bias), 0, MAX_LOGIT_BIASES)
        _check_range("the number of allowed tokens", len(self.allowed_token_ids), 0, MAX_ALLOWED_TOKENS)
        _check_range("the number of bad words", len(self.bad_words), 0, 2 * MAX_BAD_WORDS)
        if self.allowed_token_ids and (self.bad_words or self.structured_output is not None):
            raise RequestError(
                "allowed_token_ids cannot be combined with bad_words or a structured output: no token may remain."
            )
        if self.seed is not None:
            _check_range("seed", self.seed, -(2**63), 2**63 - 1)
        if self.logprobs is not None:
            _check_range("logprobs", self.logprobs, 0, MAX_CANDIDATES)
        if self.prompt_logprobs is not None:
            _check_range("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        if self.top_p == 0:
            raise RequestError("top_p must be above 0; for greedy sampling use temperature 0.")
        if any(not text for text in self.stop):
            raise RequestError("an empty stop string would end every request at once; leave it out.")
        for token in self.stop_token_ids:
            _check_range("a stop token", token, 0, 2**31)
        for token in self.allowed_token_ids:
            _check_range("an allowed token", token, 0, 2**31)
        if any(not word for word in self.bad_words):
            raise RequestError("an empty bad word would forbid every token; leave it out.")
        for token, value in self.logit_bias.items():
            _check_range("a token of the bias", token, 0, 2**31)
            _check_range("a bias", value, -100, 100)

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> SamplingParams:
        """Build from `dataclasses.asdict` output that went through JSON."""
        constraint = plain.get("structured_output")
        converted = {
            "stop": tuple(plain.get("stop", ())),
            "stop_token_ids": tuple(plain.get("stop_token_ids", ())),
            "allowed_token_ids": tuple(plain.get("allowed_token_ids", ())),
            "bad_words": tuple(map(tuple, plain.get("bad_words", ()))),
            "logit_bias": {int(token): value for token, value in plain.get("logit_bias", {}).items()},
            "structured_output": None if constraint is None else StructuredOutputParams(**constraint),
        }
        return cls(**{**plain, **converted})

    @cached_property
    def greedy(self) -> bool:
        return self.temperature == 0

    @cached_property
    def penalized(self) -> bool:
        """Return whether the logits depend on earlier tokens."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)

    @cached_property
    def needs_history(self) -> bool:
        """Return whether the host must know all earlier tokens before the next one is sampled."""
        return self.penalized or self.min_tokens > 0 or self.structured_output is not None or bool(self.bad_words)

    @cached_property
    def plain(self) -> bool:
        """Return whether plain argmax suffices."""
        biased = bool(self.logit_bias or self.allowed_token_ids)
        return self.greedy and not self.needs_history and not biased and self.logprobs is None


def _check_range(name: str, value: float, low: float, high: float) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or math.isnan(value) or not low <= value <= high:
        raise RequestError(f"{name} is {value!r}; it must be between {low:g} and {high:g}.")
