"""Structured output by llguidance (an extra): JSON, a JSON schema, a regular expression or a grammar.

A matcher tracks one answer and masks the tokens that may not come next. The cost of a constraint is bounded: its text,
its grammar, and the work per step. Compiled grammars are cached. llguidance releases the GIL, so that a server compiles
them in a thread while the engine runs steps.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any

from smelt.errors import ModelError, RequestError, install_command
from smelt.serve.engine.sampling_params import StructuredOutputParams

if TYPE_CHECKING:  # a server imports this file before torch
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

PARSER_LIMITS: dict[str, Any] = {
    "max_grammar_size": 50_000,
    "initial_lexer_fuel": 500_000,
    "max_lexer_states": 50_000,
    "verbose_errors": False,
}
# A single layout: with flexible whitespace a model could write whitespace forever.
JSON_LAYOUT: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
MAX_CACHED_GRAMMARS = 128
INSTALL_HINT = f"structured output needs llguidance: {install_command('serve')}."


class GrammarCompiler:
    """Compile constraints to matchers for one tokenizer, each once. Usable from several threads."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int, eos_token_ids: tuple[int, ...]
    ) -> None:
        self._hf_tokenizer, self._vocab_size, self._eos_token_ids = tokenizer, vocab_size, eos_token_ids
        self._cache: OrderedDict[StructuredOutputParams, GrammarMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def prepare(self) -> None:
        """Do what the first constraint needs, before it comes: the tokenizer's vocabulary takes most of a second."""
        with suppress(ModelError):  # structured output is refused when it is asked for
            _library()
            self._tokenizer  # noqa: B018

    def matcher(self, params: StructuredOutputParams) -> GrammarMatcher:
        """Return a matcher at the start of an answer; raise RequestError for a constraint that no answer satisfies."""
        matcher = self.cached_matcher(params)
        if matcher is None:
            matcher = self._compile(params)
            with self._lock:
                self._cache[params] = matcher
                while len(self._cache) > MAX_CACHED_GRAMMARS:
                    self._cache.popitem(last=False)
        return matcher.copy()

    def cached_matcher(self, params: StructuredOutputParams) -> GrammarMatcher | None:
        """Return a matcher if the constraint has been compiled."""
        with self._lock:
            if params not in self._cache:
                return None
            self._cache.move_to_end(params)
            return self._cache[params].copy()

    def _compile(self, params: StructuredOutputParams) -> GrammarMatcher:
        llguidance = _library()
        limits = llguidance.LLParserLimits(**PARSER_LIMITS)
        inner = llguidance.LLMatcher(self._tokenizer, _grammar(params), log_level=0, limits=limits)
        matcher = GrammarMatcher(inner, self._vocab_size, params.type)
        if not matcher.error:
            trial = matcher.copy()
            trial.token_mask()  # finds what no answer satisfies
            matcher = matcher if not trial.error else trial
        if matcher.error:
            raise RequestError(matcher.error)
        return matcher

    @cached_property
    def _tokenizer(self) -> Any:
        import llguidance.hf

        try:
            return llguidance.hf.from_tokenizer(
                self._hf_tokenizer, n_vocab=self._vocab_size, eos_token=list(self._eos_token_ids) or None
            )
        except ValueError as error:
            raise ModelError(f"structured output needs a fast tokenizer ({_first_line(str(error))}).") from error


def _library() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise ModelError(INSTALL_HINT) from error
    return llguidance


class GrammarMatcher:
    """Track one answer and the tokens allowed next."""

    def __init__(self, matcher: Any, vocab_size: int, constraint_type: str) -> None:
        self._matcher, self._vocab_size, self._type = matcher, vocab_size, constraint_type

    def copy(self) -> GrammarMatcher:
        return GrammarMatcher(self._matcher.deep_copy(), self._vocab_size, self._type)

    def token_mask(self) -> Tensor:  # [vocabulary], bool
        """Return which tokens may come next."""
        import numpy as np
        import torch

        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        return torch.from_numpy(np.unpackbits(bits, bitorder="little")[: self._vocab_size].astype(bool))

    def accept_token(self, token: int) -> None:
        """Advance by the sampled token."""
        self._matcher.consume_token(token)

    @property
    def is_terminated(self) -> bool:
        """Return whether the answer is complete; after an error, it never will be."""
        return bool(self._matcher.is_stopped())

    @property
    def error(self) -> str:
        """Return why the answer cannot go on: no token is allowed next, or a step took too much work; empty if it can.

        After an error the mask allows EOS alone, which must not pass for the end of an answer.
        """
        if not self._matcher.is_error():
            return ""
        reason = _first_line(self._matcher.get_error())
        if reason.startswith("NoExtension"):
            return f"no answer satisfies this {self._type}, or the model has no token for it."
        if reason.startswith(("lexer error", "parser error")) or "too " in reason:
            return f"this {self._type} is too complex ({reason.rstrip('.')}); simplify it."
        return f"this {self._type} cannot be followed: {reason}"


def _grammar(params: StructuredOutputParams) -> str:
    from llguidance import LLMatcher

    if params.type == "regex":
        return str(LLMatcher.grammar_from_regex(params.text))
    if params.type == "grammar":
        return str(LLMatcher.grammar_from_lark(params.text))
    text = '{"type": "object"}' if params.type == "json" else params.text
    try:
        schema = json.loads(text)
        return str(LLMatcher.grammar_from_json_schema(schema, overrides=JSON_LAYOUT))
    except (ValueError, TypeError, RecursionError) as error:
        raise RequestError(f"this is not a JSON schema ({_first_line(str(error))}).") from error


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "no reason given")[:200].rstrip(".") + "."
