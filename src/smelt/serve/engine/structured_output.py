"""Structured output by llguidance (an extra): JSON, a JSON schema, a regular expression or a grammar.

A matcher tracks one answer and masks the tokens that may not come next. The cost of a constraint is bounded: its text,
its grammar, and the work per step.
"""

from __future__ import annotations

import json
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
INSTALL_HINT = f"structured output needs llguidance: {install_command('serve')}."


class GrammarCompiler:
    """Compile constraints to matchers for one tokenizer."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int, eos_token_ids: tuple[int, ...]
    ) -> None:
        self._hf_tokenizer, self._vocab_size, self._eos_token_ids = tokenizer, vocab_size, eos_token_ids

    def matcher(self, params: StructuredOutputParams) -> GrammarMatcher:
        """Return a matcher at the start of an answer; raise RequestError for an invalid constraint."""
        llguidance = _library()
        limits = llguidance.LLParserLimits(**PARSER_LIMITS)
        matcher = llguidance.LLMatcher(self._tokenizer, _grammar(params), log_level=0, limits=limits)
        if matcher.is_error():
            raise RequestError(f"this {params.type} cannot be followed: {_first_line(matcher.get_error())}")
        return GrammarMatcher(matcher, self._vocab_size)

    @cached_property
    def _tokenizer(self) -> Any:
        import llguidance.hf

        try:
            return llguidance.hf.from_tokenizer(
                self._hf_tokenizer, n_vocab=self._vocab_size, eos_token=list(self._eos_token_ids) or None
            )
        except ValueError as error:
            raise ModelError(f"structured output needs a fast tokenizer ({_first_line(str(error))}).") from error


def check_structured_output(params: StructuredOutputParams) -> None:
    """Refuse an invalid constraint before anything is queued; needs no tokenizer."""
    llguidance = _library()
    error = llguidance.LLMatcher.validate_grammar(_grammar(params), limits=llguidance.LLParserLimits(**PARSER_LIMITS))
    if error:
        raise RequestError(f"this {params.type} cannot be followed: {_first_line(error)}")


def _library() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise ModelError(INSTALL_HINT) from error
    return llguidance


class GrammarMatcher:
    """Track one answer and the tokens allowed next."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher, self._vocab_size = matcher, vocab_size

    def copy(self) -> GrammarMatcher:
        return GrammarMatcher(self._matcher.deep_copy(), self._vocab_size)

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
        """Return whether the answer is complete, or the work of a step exceeded its limit."""
        return bool(self._matcher.is_stopped() or self._matcher.is_error())


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
