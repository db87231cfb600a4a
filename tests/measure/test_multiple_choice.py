"""Multiple choice against brute force, and with a network that prefers one option."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from smelt.data import MultipleChoiceData, MultipleChoiceItem
from smelt.errors import DataError
from smelt.measure import multiple_choice as choice_module
from smelt.measure.multiple_choice import NORMALIZATIONS, evaluate_multiple_choice
from smelt.models.model import Model
from smelt.progress import NullProgress
from tests.character_tokenizer import VOCABULARY, character_tokenizer
from tests.tiny import BUILDS

ITEMS = (
    MultipleChoiceItem(("The sky is",) * 3, ("blue", "a very long answer", "x"), 0),
    MultipleChoiceItem(("Sarah said that she", "Maria said that she"), ("left early.",) * 2, 1),
    MultipleChoiceItem(("Question: 2 + 2?\n",) * 2, ("4", "22"), 0),
    MultipleChoiceItem(("spaced ",) * 2, ("out", "in"), 0),
    MultipleChoiceItem(("He said",) * 2, ("\u00fcber \u00e9t\u00e9", "a bit more"), 0),  # more bytes than characters
)
DATA = MultipleChoiceData("five", ITEMS)


def decoder(name: str = "llama", padding: bool = True) -> Model:
    return Model(BUILDS[name](), character_tokenizer(padding=padding), source=name)


@torch.no_grad()
def likelihood(model: Model, context: str, continuation: str) -> tuple[float, int]:
    gap = "" if context[-1].isspace() else " "
    unknown = VOCABULARY["[UNK]"]
    tokens = [VOCABULARY.get(character, unknown) for character in context + gap + continuation]
    logits = model.network(input_ids=torch.tensor([tokens])).logits[0].double().log_softmax(-1)
    scored = range(len(context), len(tokens))
    return sum(float(logits[position - 1, tokens[position]]) for position in scored), len(scored)


@pytest.mark.parametrize("name", ["llama", "gpt2", "opt"])
@pytest.mark.parametrize("normalize", NORMALIZATIONS)
def test_matches_brute_force(name: str, normalize: str) -> None:
    model = decoder(name)
    expected = []
    for item in ITEMS:
        values = []
        for context, continuation in zip(item.contexts, item.continuations, strict=True):
            value, tokens = likelihood(model, context, continuation)
            lengths = {
                "tokens": tokens,
                "characters": len(continuation),
                "bytes": len(continuation.encode()),
                "none": 1,
            }
            values.append(value / lengths[normalize])
        expected.append(int(np.argmax(values)))
    result = evaluate_multiple_choice(model, DATA, normalize=normalize, batch_size=3)
    assert result.predictions is not None and result.predictions.tolist() == expected
    assert result.items.tolist() == [float(guess == item.gold) for guess, item in zip(expected, ITEMS, strict=True)]
    assert result.value == result.items.mean() and result.settings == {"normalize": normalize, "items": len(ITEMS)}
    assert result.by_normalization is not None and result.by_normalization[normalize] == result.value


@pytest.mark.parametrize("batch_size", [1, 5])
def test_batches_without_a_padding_token(batch_size: int) -> None:
    model = decoder(padding=False)
    options = [
        choice_module._option(model.tokenizer, context, continuation, 128)  # type: ignore[arg-type]
        for item in ITEMS
        for context, continuation in zip(item.contexts, item.continuations, strict=True)
    ]
    result = choice_module._likelihoods(model, options, batch_size, NullProgress())
    expected = [
        likelihood(model, c, t)[0] for item in ITEMS for c, t in zip(item.contexts, item.continuations, strict=True)
    ]
    assert np.allclose(result, expected, rtol=1e-5)


def test_long_contexts_are_truncated_from_the_left() -> None:
    tokenizer = character_tokenizer()
    option = choice_module._option(tokenizer, "b" * 10 + "a" * 125, "cd", 128)
    assert tokenizer.decode(option.tokens).replace(" ", "") == "a" * 125 + "cd"
    assert (len(option.tokens), option.scored_from) == (128, 125)
    too_long = choice_module._option(tokenizer, "a", "c" * 200, 128)
    assert (len(too_long.tokens), too_long.scored_from) == (128, 1)


def test_length_normalizations() -> None:
    """Every token has the same probability, and the separating space is one: only the lengths decide."""
    model = decoder()
    model.network.get_output_embeddings().weight.data.zero_()
    long_first = MultipleChoiceItem(("q",) * 2, ("a long one", "b"), 0)  # per character 11/10 tokens against 2/1
    multibyte = MultipleChoiceItem(("q",) * 2, ("\u00e9\u00e9\u00e9", "abcd"), 0)  # 4/3 against 5/4; per byte 4/6
    data = MultipleChoiceData("lengths", (long_first, multibyte))
    expected = {"none": [1, 0], "characters": [0, 1], "bytes": [0, 0], "tokens": [0, 0]}
    for name, predictions in expected.items():
        result = evaluate_multiple_choice(model, data, normalize=name)
        assert result.predictions is not None and result.predictions.tolist() == predictions, name
    assert evaluate_multiple_choice(model, data).to_json()["by_normalization"] == {
        "none": 0.5, "characters": 0.5, "bytes": 1.0, "tokens": 1.0
    }  # fmt: skip


def test_the_default_is_that_of_lm_eval() -> None:
    result = evaluate_multiple_choice(decoder(), DATA)
    assert result.settings["normalize"] == "none" and list(result.by_normalization or {}) == list(NORMALIZATIONS)


def test_limit_and_errors() -> None:
    assert len(evaluate_multiple_choice(decoder(), DATA, limit=2).items) == 2
    with pytest.raises(DataError, match="no normalization 'words'"):
        evaluate_multiple_choice(decoder(), DATA, normalize="words")
    with pytest.raises(DataError, match="a language model is required"):
        evaluate_multiple_choice(Model(BUILDS["bert"](), character_tokenizer()), DATA)
    with pytest.raises(DataError, match="Limit must be at least 1"):
        evaluate_multiple_choice(decoder(), DATA, limit=0)
