"""Labeled tasks against a plain loop, and metric selection by model and data."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as hf
from scipy import stats

from smelt.data import LabeledData, MultipleChoiceData, MultipleChoiceItem, TextData, load_labeled
from smelt.errors import DataError
from smelt.measure.evaluate import evaluate, meets_threshold
from smelt.models.model import Model
from tests.character_tokenizer import character_tokenizer
from tests.tiny import BUILDS, ENCODER

WORDS = ("hello", "a much longer sentence", "no", "and another one", "x y z", "the end")
SINGLES = LabeledData("singles", WORDS, None, np.array([0, 1, 1, 0, 1, 0]), False)
PAIRS = LabeledData("pairs", WORDS, WORDS[::-1], np.array([0.1, 3.5, 2.2, 5.0, 1.0, 4.0], dtype=np.float32), True)


def encoder(cls: type = hf.BertForSequenceClassification, **options: int) -> Model:
    torch.manual_seed(3)
    return Model(
        cls(hf.BertConfig(**ENCODER, **options, initializer_range=0.5)).eval(), character_tokenizer(encoder=True)
    )


@torch.no_grad()
def one_by_one(model: Model, data: LabeledData) -> np.ndarray:
    assert model.tokenizer is not None
    texts = [(text,) for text in data.first] if data.second is None else zip(data.first, data.second, strict=True)
    return torch.cat([model.network(**model.tokenizer(*text, return_tensors="pt")).logits for text in texts]).numpy()


@pytest.mark.parametrize("data", [SINGLES, replace(PAIRS, labels=SINGLES.labels, regression=False)])
def test_classifier(data: LabeledData) -> None:
    model = encoder(num_labels=3)
    expected = one_by_one(model, data)
    result = evaluate(model, data, batch_size=4)
    assert result.logits is not None and result.logits.dtype == np.float32
    assert np.allclose(result.logits, expected, atol=1e-5)
    assert result.items.tolist() == (expected.argmax(1) == data.labels).astype(float).tolist()
    assert (result.metric, result.value, result.higher_is_better) == ("accuracy", result.items.mean(), True)
    assert json.loads(json.dumps(result.to_json()))["items"] == 6
    for metric in ("f1", "matthews"):
        assert evaluate(model, data, metric=metric).metric == metric


def test_regressor() -> None:
    model = encoder(num_labels=1)
    expected = one_by_one(model, PAIRS)[:, 0]
    assert evaluate(model, PAIRS).value == pytest.approx(stats.spearmanr(expected, PAIRS.labels)[0])
    assert evaluate(model, PAIRS, metric="pearson").value == pytest.approx(stats.pearsonr(expected, PAIRS.labels)[0])
    integers = replace(PAIRS, labels=np.arange(6), regression=False)
    assert evaluate(model, integers).value == pytest.approx(stats.spearmanr(expected, integers.labels)[0])


@torch.no_grad()
def test_embedding() -> None:
    model = encoder(hf.BertModel)
    assert model.tokenizer is not None and PAIRS.second is not None

    def embedded(text: str) -> np.ndarray:
        return model.network(**model.tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(0).numpy()

    cosines = []
    for first, second in zip(map(embedded, PAIRS.first), map(embedded, PAIRS.second), strict=True):
        cosines.append(first @ second / np.linalg.norm(first) / np.linalg.norm(second))
    result = evaluate(model, PAIRS, batch_size=4)
    assert result.metric == "spearman" and result.logits is None and result.settings["pooling"] == "mean"
    assert np.allclose(result.predictions, cosines, atol=1e-5)
    # Pairs i and 5 - i hold the same two texts: rounding, not the embedding, orders their cosines.
    assert result.value == pytest.approx(stats.spearmanr(result.predictions, PAIRS.labels)[0])
    # Rank similarity is 1 at the same rank and falls by a sixth per rank.
    distance = np.abs(stats.rankdata(result.predictions) - stats.rankdata(PAIRS.labels))
    assert np.allclose(result.items, 1 - distance / 6)


def test_classes_are_matched_by_name() -> None:
    model = encoder(num_labels=2)
    named = replace(SINGLES, classes=("Bad", "good"))
    model.network.config.label2id = {"GOOD": 0, "BAD": 1}
    assert evaluate(model, named).labels.tolist() == [1, 0, 0, 1, 0, 1]  # type: ignore[union-attr]
    model.network.config.label2id = {"LABEL_0": 0, "LABEL_1": 1}
    assert evaluate(model, named).labels.tolist() == SINGLES.labels.tolist()  # type: ignore[union-attr]


def test_a_decoder_without_padding_classifies_the_last_real_token() -> None:
    config = hf.GPT2Config(
        n_embd=32, n_layer=2, n_head=4, vocab_size=99, n_positions=64, num_labels=2, pad_token_id=None
    )
    model = Model(hf.GPT2ForSequenceClassification(config).eval(), character_tokenizer(padding=False))
    assert np.allclose(evaluate(model, SINGLES).logits, one_by_one(model, SINGLES), atol=1e-5)


def test_limit_takes_the_first_rows() -> None:
    result = evaluate(encoder(num_labels=2), SINGLES, limit=4)
    assert result.settings["items"] == 4 and result.labels is not None and result.labels.tolist() == [0, 1, 1, 0]


def test_incompatible_model_and_data() -> None:
    decoder = Model(BUILDS["llama"](), character_tokenizer(), source="tiny-llama")
    classifier, text = encoder(num_labels=2), TextData("text", ("some words",))
    choices = MultipleChoiceData("choices", (MultipleChoiceItem(("a",) * 2, ("b", "c"), 0),))
    cases = [
        (
            decoder,
            SINGLES,
            None,
            "singles holds labeled rows, but tiny-llama is a model for language: give plain text or",
        ),
        (
            classifier,
            text,
            None,
            "text holds plain text, but the model is a model for classification: give labeled rows",
        ),
        (classifier, choices, None, "choices holds multiple-choice rows"),
        (Model(BUILDS["vit"]()), SINGLES, None, "is a model for images: give images"),
        (decoder, text, "accuracy", "'accuracy' does not fit plain text: use perplexity"),
        (
            classifier,
            SINGLES,
            "spearman",
            "'spearman' does not fit labels that are classes: use accuracy or f1 or matthews",
        ),
        (encoder(num_labels=1), PAIRS, "f1", "labels that are numbers: use spearman or pearson"),
        (classifier, PAIRS, None, "numbers as labels, but the model has 2 classes"),
        (classifier, replace(SINGLES, labels=SINGLES.labels + 1), None, "label 2, but the model has only 2 classes"),
        (encoder(hf.BertModel), SINGLES, None, "evaluated on pairs"),
        (Model(classifier.network), SINGLES, None, "no tokenizer"),
        (classifier, SINGLES.take([]), None, "singles is empty"),
    ]
    for model, data, metric, sentence in cases:
        with pytest.raises(DataError, match=sentence):
            evaluate(model, data, metric=metric)  # type: ignore[arg-type]


def test_bounds() -> None:
    quality = evaluate(encoder(num_labels=2), SINGLES)
    assert (
        meets_threshold(quality)
        and meets_threshold(quality, minimum=quality.value)
        and not meets_threshold(quality, minimum=quality.value + 1e-9)
    )
    assert not meets_threshold(replace(quality, value=float("nan")), minimum=0)
    loss = evaluate(Model(BUILDS["llama"](), character_tokenizer()), TextData("text", ("some words",)), context=16)
    assert meets_threshold(loss, maximum=loss.value) and not meets_threshold(loss, maximum=loss.value - 1e-9)
    with pytest.raises(DataError, match="give a maximum"):
        meets_threshold(loss, minimum=1)
    with pytest.raises(DataError, match="give a minimum"):
        meets_threshold(quality, maximum=1)


@pytest.mark.shared
def test_glue_file_through_a_random_model(shared: Path) -> None:
    data = load_labeled(shared / "data/glue/sst2/dev.jsonl.gz")
    result = evaluate(encoder(num_labels=2), data, limit=64, max_length=48)
    assert 0 <= result.value <= 1 and len(result.items) == 64
