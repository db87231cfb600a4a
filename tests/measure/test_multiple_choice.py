"""Multiple choice against brute force, and with a network that prefers one option."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from smelt.data import MultipleChoiceData, MultipleChoiceItem
from smelt.errors import DataError
from smelt.measure import multiple_choice as choice_module
from smelt.measure.multiple_choice import evaluate_multiple_choice
from smelt.models.model import Model
from smelt.progress import NullProgress
from tests.character_tokenizer import VOCABULARY, character_tokenizer
from tests.tiny import BUILDS

ITEMS = (
    MultipleChoiceItem(("The sky is",) * 3, ("blue", "a very long answer", "x"), 0),
    MultipleChoiceItem(("Sarah said that she", "Maria said that she"), ("left early.",) * 2, 1),
    MultipleChoiceItem(("Question: 2 + 2?\n",) * 2, ("4", "22"), 0),
    MultipleChoiceItem(("spaced ",) * 2, ("out", "in"), 0),
)
DATA = MultipleChoiceData("four", ITEMS)


def decoder(name: str = "llama", padding: bool = True) -> Model:
    return Model(BUILDS[name](), character_tokenizer(padding=padding), source=name)


@torch.no_grad()
def likelihood(model: Model, context: str, continuation: str) -> tuple[float, int]:
    gap = "" if context[-1].isspace() else " "
    tokens = [VOCABULARY[character] for character in context + gap + continuation]
    logits = model.network(input_ids=torch.tensor([tokens])).logits[0].double().log_softmax(-1)
    scored = range(len(context), len(tokens))
    return sum(float(logits[position - 1, tokens[position]]) for position in scored), len(scored)


@pytest.mark.parametrize("name", ["llama", "gpt2", "opt"])
@pytest.mark.parametrize("normalize", ["tokens", "characters", "none"])
def test_matches_brute_force(name: str, normalize: str) -> None:
    model = decoder(name)
    expected = []
    for item in ITEMS:
        values = []
        for context, continuation in zip(item.contexts, item.continuations, strict=True):
            value, tokens = likelihood(model, context, continuation)
            values.append(value / {"tokens": tokens, "characters": len(continuation), "none": 1}[normalize])
        expected.append(int(np.argmax(values)))
    result = evaluate_multiple_choice(model, DATA, normalize=normalize, batch_size=3)
    assert result.predictions is not None and result.predictions.tolist() == expected
    assert result.items.tolist() == [float(guess == item.gold) for guess, item in zip(expected, ITEMS, strict=True)]
    assert result.value == result.items.mean() and result.settings == {"normalize": normalize, "items": 4}


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


def test_length_normalization() -> None:
    model = decoder()
    model.network.get_output_embeddings().weight.data.zero_()  # a uniform distribution over tokens
    data = MultipleChoiceData("lengths", (MultipleChoiceItem(("q",) * 2, ("a long one", "b"), 0),))
    assert evaluate_multiple_choice(model, data, normalize="none").predictions == [1]


def test_limit_and_errors() -> None:
    assert len(evaluate_multiple_choice(decoder(), DATA, limit=2).items) == 2
    with pytest.raises(DataError, match="no normalization 'words'"):
        evaluate_multiple_choice(decoder(), DATA, normalize="words")
    with pytest.raises(DataError, match="a language model is required"):
        evaluate_multiple_choice(Model(BUILDS["bert"](), character_tokenizer()), DATA)
    with pytest.raises(DataError, match="Limit must be at least 1"):
        evaluate_multiple_choice(decoder(), DATA, limit=0)
