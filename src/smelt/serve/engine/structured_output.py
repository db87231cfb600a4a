"""Structured output by llguidance (an extra): JSON, a JSON schema, a regular expression or a grammar.

A matcher tracks one answer and masks the tokens that may not come next. The cost of a constraint is bounded: its text,
its grammar, and the work per step.
"""

from __future__ import annotations

import json
from functools import cached_property
from typing import TYPE_CHECKING, Any

from smelt.errors import ModelError, RequestError
from smelt.serve.engine.sampling_params import StructuredOutputParams

if TYPE_CHECKING:  # a server imports this file before torch
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

LIMITS: dict[str, Any] = {
    "max_grammar_size": 50_000,
    "initial_lexer_fuel": 500_000,
    "max_lexer_states": 50_000,
    "verbose_errors": False,
}
# A single layout: with flexible whitespace a model could write whitespace forever.
LAYOUT: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
INSTALL = "structured output needs llguidance: pip install 'smelt[serve]'."


class GrammarCompiler:
    """Compile constraints to matchers for one tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int, ends: tuple[int, ...]) -> None:
        self._hf_tokenizer, self._vocabulary, self._ends = tokenizer, vocab_size, ends

    def matcher(self, form: StructuredOutputParams) -> GrammarMatcher:
        """Return a matcher at the start of an answer; raise RequestError for an invalid constraint."""
        llguidance = _library()
        limits = llguidance.LLParserLimits(**LIMITS)
        inner = llguidance.LLMatcher(self._tokenizer, _grammar(form), log_level=0, limits=limits)
        if inner.is_error():
            raise RequestError(f"this {form.kind} cannot be followed: {_first_line(inner.get_error())}")
        return GrammarMatcher(inner, self._vocabulary)

    @cached_property
    def _tokenizer(self) -> Any:
        import llguidance.hf

        try:
            return llguidance.hf.from_tokenizer(
                self._hf_tokenizer, n_vocab=self._vocabulary, eos_token=list(self._ends) or None
            )
        except ValueError as error:
            raise ModelError(f"structured output needs a fast tokenizer ({_first_line(str(error))}).") from error


def check_structured_output(form: StructuredOutputParams) -> None:
    """Refuse an invalid constraint before anything is queued; needs no tokenizer."""
    llguidance = _library()
    error = llguidance.LLMatcher.validate_grammar(_grammar(form), limits=llguidance.LLParserLimits(**LIMITS))
    if error:
        raise RequestError(f"this {form.kind} cannot be followed: {_first_line(error)}")


def _library() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise ModelError(INSTALL) from error
    return llguidance


class GrammarMatcher:
    """Track one answer and the tokens allowed next."""

    def __init__(self, inner: Any, vocab_size: int) -> None:
        self._inner, self._vocabulary = inner, vocab_size

    def copy(self) -> GrammarMatcher:
        return GrammarMatcher(self._inner.deep_copy(), self._vocabulary)

    def allowed(self) -> Tensor:  # [vocabulary], bool
        import numpy as np
        import torch

        bits = np.frombuffer(self._inner.compute_bitmask(), dtype=np.uint8)
        return torch.from_numpy(np.unpackbits(bits, bitorder="little")[: self._vocabulary].astype(bool))

    def take(self, token: int) -> None:
        """Advance by the sampled token."""
        self._inner.consume_token(token)

    @property
    def ended(self) -> bool:
        """Return whether the answer is complete, or the work of a step exceeded its limit."""
        return bool(self._inner.is_stopped() or self._inner.is_error())


def _grammar(form: StructuredOutputParams) -> str:
    from llguidance import LLMatcher

    if form.kind == "regex":
        return str(LLMatcher.grammar_from_regex(form.text))
    if form.kind == "grammar":
        return str(LLMatcher.grammar_from_lark(form.text))
    text = '{"type": "object"}' if form.kind == "json" else form.text
    try:
        schema = json.loads(text)
        return str(LLMatcher.grammar_from_json_schema(schema, overrides=LAYOUT))
    except (ValueError, TypeError, RecursionError) as error:
        raise RequestError(f"this is not a JSON schema ({_first_line(str(error))}).") from error


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "no reason given")[:200].rstrip(".") + "."
