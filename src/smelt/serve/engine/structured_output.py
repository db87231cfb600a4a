"""Answers that must have a form: JSON, a JSON schema, a regular expression, a grammar. By llguidance, an extra.

A matcher stands at one place of one answer and says which tokens may come next. What a form may cost is bounded: its
text, its grammar, and the work of a step.
"""

from __future__ import annotations

import json
from functools import cached_property
from typing import TYPE_CHECKING, Any

from smelt.errors import ModelError, RequestError
from smelt.serve.engine.sampling_params import StructuredOutputParams

if TYPE_CHECKING:  # a server imports this file before it has the time to import torch
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

LIMITS: dict[str, Any] = {
    "max_grammar_size": 50_000,
    "initial_lexer_fuel": 500_000,
    "max_lexer_states": 50_000,
    "verbose_errors": False,
}
# One way to write each value: free white space would let a model write nothing else for ever.
LAYOUT: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
INSTALL = "answers in a form need llguidance: pip install 'smelt[serve]'."


class GrammarCompiler:
    """Makes matchers for one tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int, ends: tuple[int, ...]) -> None:
        self._hf_tokenizer, self._vocabulary, self._ends = tokenizer, vocab_size, ends

    def matcher(self, form: StructuredOutputParams) -> GrammarMatcher:
        """At the beginning of an answer. A form that cannot be is one sentence."""
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
            raise ModelError(f"answers in a form need a fast tokenizer ({_first_line(str(error))}).") from error


def check_structured_output(form: StructuredOutputParams) -> None:
    """Refuse what cannot be followed, without any tokenizer and before anything is queued."""
    llguidance = _library()
    told = llguidance.LLMatcher.validate_grammar(_grammar(form), limits=llguidance.LLParserLimits(**LIMITS))
    if told:
        raise RequestError(f"this {form.kind} cannot be followed: {_first_line(told)}")


def _library() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise ModelError(INSTALL) from error
    return llguidance


class GrammarMatcher:
    """What may come next in one answer."""

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
        """The token that was drawn."""
        self._inner.consume_token(token)

    @property
    def ended(self) -> bool:
        """The answer is whole, and nothing more can come; or the work of a step grew beyond all bounds."""
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
