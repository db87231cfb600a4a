"""Calibration and evaluation data never overlap; labels match the model's loss."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from smelt.compression.recipe.inputs import (
    calibration_batches,
    calibration_data,
    evaluation_data,
    fingerprint,
    needs_data,
    split,
)
from smelt.compression.recipe.recipe import Recipe
from smelt.data import LabeledData, SpeechData, TextData
from smelt.errors import DataError
from smelt.models.model import Model
from smelt.models.quartznet import ctc_tokenizer
from tests.character_tokenizer import character_tokenizer
from tests.models.test_quartznet import EXTRACTOR, quartznet
from tests.tiny import BUILDS, ENCODER

STEP = {"method": "fisher", "budget": {"parameters": 0.8}}


def recipe(source: str | Path = "default", **more: object) -> Recipe:
    data = {"source": str(source), "samples": 8, "seq_len": 16, "batch_size": 3}
    return Recipe.parse({"steps": [STEP], "data": data, **more})


def rows(path: Path, labels: list[object]) -> Path:
    path.write_text("".join(json.dumps({"sentence": f"row {i}", "label": x}) + "\n" for i, x in enumerate(labels)))
    return path


def classifier(classes: int = 2) -> Model:
    network = transformers.BertForSequenceClassification(transformers.BertConfig(**ENCODER, num_labels=classes))
    return Model(network.eval(), character_tokenizer(encoder=True))


def language_model() -> Model:
    return Model(BUILDS["llama"](), character_tokenizer())


def test_labeled_rows_are_split_into_calibration_and_evaluation(tmp_path: Path) -> None:
    config = recipe(rows(tmp_path / "rows.jsonl", [0, 1] * 25))
    data = calibration_data(config, classifier())
    seen, held_out = split(config, data)
    assert isinstance(seen, LabeledData) and isinstance(held_out, LabeledData)
    assert (len(seen), len(held_out)) == (40, 10)
    assert set(seen.first) | set(held_out.first) == {f"row {i}" for i in range(50)}
    assert not set(seen.first) & set(held_out.first)


def test_recordings_are_split_and_become_spectrograms(tmp_path: Path) -> None:
    soundfile = pytest.importorskip("soundfile", reason="soundfile is not installed")
    generator = np.random.Generator(np.random.PCG64(0))
    from tests.measure.test_speech import whisper  # needs soundfile

    for number in range(10):
        soundfile.write(tmp_path / f"{number}.wav", generator.normal(0, 0.1, 800 + 80 * number), 8_000)
    lines = (json.dumps({"file": f"{number}.wav", "text": f"word {number}"}) + "\n" for number in range(10))
    (tmp_path / "rows.jsonl").write_text("".join(lines))
    config, model = recipe(tmp_path / "rows.jsonl"), Model(quartznet(), ctc_tokenizer(), feature_extractor=EXTRACTOR)
    seen, held_out = split(config, calibration_data(config, model))
    assert isinstance(seen, SpeechData) and isinstance(held_out, SpeechData)
    assert sorted(seen.texts + held_out.texts) == [f"word {number}" for number in range(10)] and len(held_out) == 2
    batches = calibration_batches(config.data, seen, model, seed=0)
    assert [len(batch["input_features"]) for batch in batches] == [3, 3, 2]
    frames = sorted(int(length) for batch in batches for length in batch["attention_mask"].sum(1))
    assert frames == sorted(len(seen.decode(i, 8_000)) // 80 + 1 for i in range(8))
    transcribed = calibration_batches(config.data, seen, whisper(), seed=0)[0]["decoder_input_ids"]
    assert transcribed.shape == (3, 1 + len(" word 0")) and (transcribed[:, 0] == 2).all()
    with pytest.raises(DataError, match="holds recordings, but this is a model for language"):
        calibration_data(config, language_model())
    with pytest.raises(DataError, match="holds no recordings, but this is a speech model"):
        calibration_data(recipe(rows(tmp_path / "text.jsonl", [0, 1])), model)


def test_without_data_inputs_are_synthesized() -> None:
    config, model = recipe("none"), Model(quartznet(), ctc_tokenizer(), feature_extractor=EXTRACTOR)
    data, held_out = split(config, calibration_data(config, model))
    assert held_out is None
    batches = calibration_batches(config.data, data, model, seed=0)
    assert [batch["input_features"].shape for batch in batches] == [(3, 16, 16), (3, 16, 16), (2, 16, 16)]
    with pytest.raises(DataError, match="this network has none; name data"):
        calibration_data(config, language_model())


def test_text_is_split_into_calibration_and_evaluation(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("".join(chr(97 + i // 100) for i in range(1000)))
    config = recipe(tmp_path / "text.txt")
    seen, held_out = split(config, calibration_data(config, language_model()))
    assert isinstance(seen, TextData) and isinstance(held_out, TextData)
    assert set(seen.joined) == set("abcdefgh") and set(held_out.joined) == set("ij")


def test_the_default_text_has_both_splits() -> None:
    config, model = recipe(), language_model()
    seen, held_out = split(config, calibration_data(config, model))
    evaluation = evaluation_data(config, held_out, model)
    assert isinstance(seen, TextData) and isinstance(evaluation, TextData)
    assert not set(seen.documents) & set(evaluation.documents)


def test_separate_evaluation_data_leaves_all_rows_to_calibration(tmp_path: Path) -> None:
    other = rows(tmp_path / "other.jsonl", [1, 0])
    config = recipe(rows(tmp_path / "rows.jsonl", [0, 1] * 5), evaluate={"source": str(other)})
    seen, held_out = split(config, calibration_data(config, classifier()))
    assert isinstance(seen, LabeledData) and len(seen) == 10 and held_out is None
    evaluation = evaluation_data(config, held_out, classifier())
    assert isinstance(evaluation, LabeledData) and evaluation.name == str(other)


def test_models_without_a_metric_are_not_evaluated(tmp_path: Path) -> None:
    """A masked language model calibrates on text but has no metric."""
    (tmp_path / "text.txt").write_text("some words " * 100)
    network = transformers.BertForMaskedLM(transformers.BertConfig(**ENCODER)).eval()
    model, config = Model(network, character_tokenizer(encoder=True)), recipe(tmp_path / "text.txt")
    _, held_out = split(config, calibration_data(config, model))
    assert evaluation_data(config, held_out, model) is None


def test_integer_labels_are_regression_targets_for_a_single_output(tmp_path: Path) -> None:
    config, model = recipe(rows(tmp_path / "rows.jsonl", [1, 2, 5])), classifier(1)
    data = calibration_data(config, model)
    batches = calibration_batches(config.data, data, model, seed=0)
    assert batches[0]["labels"].dtype == torch.float32
    assert model.network(**batches[0]).loss.isfinite()


@pytest.mark.parametrize("labels", [[0, 3], [0.5, 1]])
def test_labels_unknown_to_the_model(labels: list[object], tmp_path: Path) -> None:
    with pytest.raises(DataError, match="the model has"):
        calibration_data(recipe(rows(tmp_path / "rows.jsonl", labels)), classifier())


def test_rows_longer_than_the_context_are_truncated(tmp_path: Path) -> None:
    config = transformers.BertConfig(**ENCODER, max_position_embeddings=10)
    model = Model(transformers.BertForSequenceClassification(config), character_tokenizer(encoder=True))
    parsed_recipe = recipe(rows(tmp_path / "rows.jsonl", [0, 1] * 4))
    long = LabeledData("long", ("a" * 50,) * 8, None, np.array([0, 1] * 4), False)
    (batch, *_) = calibration_batches(parsed_recipe.data, long, model, seed=0)
    assert batch["input_ids"].shape == (3, 10)


def test_which_recipes_need_data() -> None:
    def needed(**step: object) -> bool:
        return needs_data(Recipe.parse({"steps": [{"budget": {"parameters": 0.5}, **step}]}))

    assert not needed(method="random") and not needed(method="magnitude")
    assert needed(method="random", repair="full") and needed(method="flap") and needed(method="fisher", repair="none")


def test_a_fingerprint_distinguishes_batches() -> None:
    one = [{"input_ids": torch.tensor([[1, 2]]), "labels": torch.tensor([0])}]
    other = [{"input_ids": torch.tensor([[1, 3]]), "labels": torch.tensor([0])}]
    assert fingerprint(one) == fingerprint([dict(reversed(one[0].items()))])
    assert len({fingerprint(one), fingerprint(other), fingerprint([]), fingerprint(one + one)}) == 4


def test_text_that_the_model_generates_itself() -> None:
    config, model = recipe("generated"), language_model()
    data, held_out = split(config, calibration_data(config, model))
    batches = calibration_batches(config.data, data, model, seed=0)
    assert [batch["input_ids"].shape for batch in batches] == [(3, 16), (3, 16), (2, 16)] and held_out is None
    assert fingerprint(batches) == fingerprint(calibration_batches(config.data, data, model, seed=0))
    assert fingerprint(batches) != fingerprint(calibration_batches(config.data, data, model, seed=1))
    evaluation = evaluation_data(config, held_out, model)
    assert isinstance(evaluation, TextData) and evaluation.name == "default/evaluation"
    with pytest.raises(DataError, match="a model for classification cannot generate"):
        calibration_data(config, classifier())


def test_prompts_have_no_labels_and_are_not_cut(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": "a" * length}) + "\n" for length in (*range(1, 17), 17, 40)))
    config = Recipe.parse({"steps": [{"method": "qdpo"}], "data": {"source": str(prompts), "samples": 16,
                                                                  "seq_len": 16, "batch_size": 5}})  # fmt: skip
    model = language_model()
    data, held_out = split(config, calibration_data(config, model))
    batches = calibration_batches(config.data, data, model, seed=0)
    assert all(set(batch) == {"input_ids", "attention_mask"} for batch in batches) and held_out is None
    lengths = torch.cat([batch["attention_mask"].sum(-1) for batch in batches])
    assert sorted(lengths.tolist()) == list(range(1, 17)), "longer prompts are left out"
    more = Recipe.parse({"steps": [{"method": "qdpo"}], "data": {"source": str(prompts), "samples": 17, "seq_len": 16}})
    with pytest.raises(DataError, match="16 prompts of at most 16 tokens, too few for 17"):
        calibration_batches(more.data, data, model, seed=0)
    with pytest.raises(DataError, match="plain text: give rows with prompts"):
        calibration_data(Recipe.parse({"steps": [{"method": "qdpo"}]}), model)
    with pytest.raises(DataError, match="prompts cannot be generated"):
        calibration_data(Recipe.parse({"steps": [{"method": "qdpo"}], "data": {"source": "generated"}}), model)


def test_conversations_are_packed_and_only_answers_are_labels(tmp_path: Path) -> None:
    chats = tmp_path / "chats.jsonl"
    messages = [{"role": "user", "content": "bbb"}, {"role": "assistant", "content": "ccccc"}] * 2
    chats.write_text(json.dumps({"messages": [*messages, {"role": "user", "content": "ddd"}]}) + "\n")
    chats.write_text(chats.read_text() * 9)
    model = language_model()
    data = {"source": str(chats), "text": "messages", "samples": 10, "seq_len": 20, "batch_size": 4}
    config = Recipe.parse({"steps": [STEP], "data": data})
    with pytest.raises(DataError, match="has no chat template; give text"):
        calibration_data(config, model)
    assert model.tokenizer is not None
    model.tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role[0] }}{{ m.content }} {% endfor %}{% if add_generation_prompt %}a{% endif %}"
    )
    drawn, held_out = split(config, calibration_data(config, model))
    batches = calibration_batches(config.data, drawn, model, seed=0)
    ids, labels = (torch.cat([batch[name] for batch in batches]) for name in ("input_ids", "labels"))
    assert (
        ids.shape == labels.shape == (10, 20) and held_out is None and [len(b["labels"]) for b in batches] == [4, 4, 2]
    )
    text = "ubbb accccc ubbb accccc " * 9  # the question without an answer is left out
    tokens = model.tokenizer(text, add_special_tokens=False)["input_ids"]
    assert ids.flatten().tolist() == tokens[:200]
    expected = [token if index % 12 in range(6, 12) else -100 for index, token in enumerate(tokens)]
    assert labels.flatten().tolist() == expected[:200]
    with pytest.raises(DataError, match="fills 10 sequences of 20 tokens, too few for 11 samples"):
        calibration_batches(Recipe.parse({"steps": [STEP], "data": {**data, "samples": 11}}).data, drawn, model, seed=0)
    chats.write_text(json.dumps({"messages": messages[:1]}))
    with pytest.raises(DataError, match="no answer of the assistant in column 'messages' of row 1"):
        calibration_data(config, model)
