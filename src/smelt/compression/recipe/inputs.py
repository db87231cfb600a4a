"""Load the calibration and evaluation data of a recipe, and warn if they overlap."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from smelt.compression.calibration.image_sources import (
    PREFIX,
    check_synthetic_source,
    is_synthetic,
    synthetic_batches,
)
from smelt.compression.recipe.recipe import CalibrationSettings, EvaluationSettings, Recipe
from smelt.data import (
    Batch,
    Demonstrations,
    Environment,
    LabeledData,
    LabeledImages,
    MultipleChoiceData,
    PromptData,
    SpeechData,
    TextData,
    demonstration_batches,
    image_batches,
    labeled_batches,
    load_chats,
    load_data,
    load_prompts,
    text_batches,
)
from smelt.data.batches import pad_batch, padding_token_id
from smelt.data.overlap import overlap
from smelt.errors import DataError, RecipeError
from smelt.measure.evaluate import Data
from smelt.measure.policies import check_demonstrations
from smelt.measure.speech import spectrograms
from smelt.measure.task import model_labels
from smelt.models.chat_packing import pack_chats
from smelt.models.chat_template import ChatTemplateRenderer
from smelt.models.generation import generate_text
from smelt.models.model import Model

CalibrationData = TextData | LabeledData | LabeledImages | SpeechData | PromptData | Demonstrations

MAX_OVERLAP = 0.01  # fraction of the evaluation data; texts of one kind share some phrases
GENERATED = "generated"  # the source of text that the model generates itself
MAX_DECODER_TOKENS = 448  # of a speech model whose config names no limit
HELD_OUT = 0.2  # fraction of the calibration data, if the recipe names no evaluation data


def needs_data(recipe: Recipe) -> bool:
    """Whether a step uses data, if only for its repair; data named in the recipe is always used."""
    return any(step.uses_data for step in recipe.steps) or recipe.data.source != "default"


def calibration_data(recipe: Recipe, model: Model) -> CalibrationData:
    """Load all data that calibration may draw from, and check that the model can use it."""
    if model.task not in ("images", "policy", "speech") and model.tokenizer is None:
        raise DataError("this model has no tokenizer, so it cannot be calibrated on text; use a method without data.")
    return usable_data(recipe, model)


def check_data(recipe: Recipe, skeleton: Model) -> Data | None:
    """Check, on a model without weights, that the data exists and suits the model; return the evaluation data."""
    if not needs_data(recipe):
        return evaluation_data(recipe, None, skeleton)
    calibrated = next((step.name for step in recipe.steps if step.uses_data), None)
    if skeleton.task == "images" and recipe.data.source == "default":
        raise DataError(
            f"{calibrated} needs calibration data, and there are no default images: name a folder of images with "
            "--data, or use a method that needs no data, such as rtn, hqq or magnitude."
        )
    if skeleton.task == "policy" and recipe.data.source == "default":
        raise DataError(
            f"{calibrated} needs demonstrations, and there are no default ones: name a NumPy archive of observations "
            "and actions with --data."
        )
    if skeleton.task == "speech" and recipe.data.source == "default":
        raise DataError(
            f"{calibrated} needs recordings, and there are no default ones: name a table of recordings and transcripts "
            "with --data, or --data none if the network has batch norms."
        )
    if skeleton.task == "images" and (not is_synthetic(recipe.data.source) or recipe.data.source.startswith(PREFIX)):
        skeleton.check_image_processor()
    data, held_out = split(recipe, usable_data(recipe, skeleton))
    if calibrated is not None and isinstance(data, TextData):
        _check_context(recipe.data, skeleton)
    return evaluation_data(recipe, held_out, skeleton)


def usable_data(recipe: Recipe, model: Model) -> CalibrationData:
    """Load the calibration data and check that the model and its loss can be used by the steps."""
    prompted = any("prompts" in step.needs for step in recipe.steps)
    data = _load_prompts(recipe.data) if prompted else load_calibration_data(recipe.data, model)
    _check_loss(recipe, model)
    return data


def load_calibration_data(settings: CalibrationSettings, model: Model) -> CalibrationData:
    """Load the data that settings name and check that the model, which may have no weights, can use it.

    Generated text is generated later, with its weights.
    """
    if settings.source == GENERATED:
        if model.task != "language":
            raise DataError(f"a model for {model.task} cannot generate its own text; name other data with --data.")
        return TextData(GENERATED, ())
    if is_synthetic(settings.source):
        check_synthetic_source(settings.source, model)
        return TextData(settings.source, ())
    if model.task == "language" and settings.text is not None and settings.label is None:
        chats = load_chats(settings.source, settings.text, split="calibration")
        if chats is not None:
            return _with_template(chats, model)
    data = _read(settings, model, "calibration")
    if isinstance(data, MultipleChoiceData):
        raise DataError(f"{settings.source} holds multiple-choice rows, which calibration cannot use; give text.")
    if isinstance(data, Environment):
        raise DataError(f"{settings.source} is an environment, which evaluation can use; give demonstrations (.npz).")
    _check_data_type(model, data, settings.source)
    if isinstance(data, LabeledData) and model.task == "classification":
        return _labels_for_loss(model, data)
    if isinstance(data, LabeledImages) and data.labels is not None:
        return replace(data, labels=_class_labels(model, data), classes=None)  # in the model's numbering
    return data


def _read(settings: CalibrationSettings | EvaluationSettings, model: Model, part: str) -> Data:
    """Load the data that the settings name; a language model reads a named text column of labeled rows as text."""
    kind = "text" if model.task == "language" and settings.text is not None and settings.label is None else None
    return load_data(
        settings.source or "default",
        kind=kind,
        text=settings.text,
        pair=settings.pair,
        label=settings.label,
        split=part,
    )


def split(recipe: Recipe, data: CalibrationData) -> tuple[CalibrationData, Data | None]:
    """Split into calibration data and, if the recipe names no evaluation data, a held-out part."""
    has_no_rows = recipe.data.source in ("default", GENERATED) or is_synthetic(recipe.data.source)
    if recipe.evaluate.source is not None or has_no_rows:
        return data, None
    if isinstance(data, PromptData):
        return data, None  # there is no metric on prompts
    if isinstance(data, LabeledData | LabeledImages | SpeechData | Demonstrations):
        order = np.random.Generator(np.random.PCG64(0)).permutation(len(data))
        num_held_out = max(1, int(len(data) * HELD_OUT))
        if num_held_out >= len(data):
            raise DataError(f"{data.name} has too few rows to hold some out; name other data to evaluate on.")
        return data.take(np.sort(order[num_held_out:])), replace(
            data.take(np.sort(order[:num_held_out])), name=f"{data.name} (held out)"
        )
    text = data.joined
    cut = int(len(text) * (1 - HELD_OUT))
    return TextData(data.name, (text[:cut],)), TextData(f"{data.name} (held out)", (text[cut:],))


def evaluation_data(recipe: Recipe, held_out: Data | None, model: Model) -> Data | None:
    """Return the data on which before and after are compared, or None if nothing suits this model."""
    if recipe.evaluate.source is not None:
        return _read(recipe.evaluate, model, "evaluation")
    if held_out is not None and _measurable(model, held_out):
        return held_out
    if model.task == "language":
        return load_data("default")
    return None


def overlap_warning(calibration: Data | PromptData, evaluation: Data | None) -> str | None:
    """Return a warning if a part of the evaluation data is also calibration data."""
    shared = 0.0 if evaluation is None else overlap(evaluation, calibration)
    if evaluation is None or shared <= MAX_OVERLAP:
        return None
    return (
        f"{100 * shared:.0f} % of the evaluation data ({evaluation.name}) also occurs in the calibration data "
        f"({calibration.name}), so the measured quality may be too good; evaluate on other data."
    )


def _measurable(model: Model, data: Data) -> bool:
    """Whether there is a metric for this kind of model on this kind of data."""
    if isinstance(data, LabeledImages):
        return model.task == "images" and data.labels is not None
    if isinstance(data, Demonstrations):
        return model.task == "policy"
    if isinstance(data, SpeechData):
        return model.task == "speech"
    if isinstance(data, LabeledData):
        return model.task == "classification" or (model.task == "embedding" and data.second is not None)
    return model.task == "language"


def calibration_batches(settings: CalibrationSettings, data: CalibrationData, model: Model, seed: int) -> list[Batch]:
    """Return windows of text of exactly `seq_len` tokens, labeled rows truncated to the model's context length,
    images, recordings, steps of demonstrations, or synthetic inputs."""
    assert settings.batch_size is not None
    if is_synthetic(settings.source):
        return synthetic_batches(
            settings.source, model, samples=settings.samples, seq_len=settings.seq_len, batch_size=settings.batch_size,
            seed=seed,
        )  # fmt: skip
    if isinstance(data, SpeechData):
        return _speech_batches(settings, data, model, seed)
    if isinstance(data, LabeledImages):
        samples, dtype = min(settings.samples, len(data)), next(model.network.parameters()).dtype
        drawn = image_batches(
            data, model.prepare_images, samples=samples, batch_size=settings.batch_size, seed=seed
        )  # fmt: skip
        return [{**batch, "pixel_values": batch["pixel_values"].to(dtype)} for batch in drawn]
    if isinstance(data, Demonstrations):
        return demonstration_batches(data, samples=settings.samples, batch_size=settings.batch_size, seed=seed)
    assert model.tokenizer is not None
    longest = getattr(model.network.config, "max_position_embeddings", settings.seq_len)
    if isinstance(data, LabeledData):
        return labeled_batches(
            data, model.tokenizer, samples=settings.samples, max_length=min(settings.seq_len, longest),
            batch_size=settings.batch_size, seed=seed, replace=settings.samples > len(data),
        )  # fmt: skip
    if isinstance(data, PromptData) and not data.answered:
        return _prompt_batches(settings, data, model, seed)
    _check_context(settings, model)
    if isinstance(data, PromptData):
        return _chat_batches(settings, data, model, seed)
    if settings.source == GENERATED:
        ids = generate_text(model.network, samples=settings.samples, length=settings.seq_len, seed=seed)
        parts = ids.split(settings.batch_size)
        return [{"input_ids": p, "attention_mask": torch.ones_like(p), "labels": p.clone()} for p in parts]
    return text_batches(
        data,
        model.tokenizer,
        samples=settings.samples,
        length=settings.seq_len,
        batch_size=settings.batch_size,
        seed=seed,
    )


def _speech_batches(settings: CalibrationSettings, data: SpeechData, model: Model, seed: int) -> list[Batch]:
    """Draw recordings, as the features that the network reads; a decoder gets their transcripts."""
    assert settings.batch_size is not None
    order = np.random.Generator(np.random.PCG64(seed)).permutation(len(data))[: settings.samples].tolist()
    batches = []
    for start in range(0, len(order), settings.batch_size):
        indices = order[start : start + settings.batch_size]
        batch = dict(spectrograms(model, data, indices))
        if model.network.config.is_encoder_decoder:
            batch |= _decoder_inputs(model, [data.texts[index] for index in indices])
        batches.append(batch)
    return batches


def _decoder_inputs(model: Model, texts: list[str]) -> Batch:
    """Return what the decoder of a speech model reads when it has transcribed these texts."""
    assert model.tokenizer is not None
    encoded = model.tokenizer([f" {text}" for text in texts], add_special_tokens=False, verbose=False)["input_ids"]
    longest = int(getattr(model.network.config, "max_target_positions", MAX_DECODER_TOKENS))
    start = [int(model.network.config.decoder_start_token_id)]
    rows = [(start + list(row))[:longest] for row in encoded]
    return {"decoder_input_ids": pad_batch({"input_ids": rows}, padding_token_id(model.tokenizer))["input_ids"]}


def _load_prompts(settings: CalibrationSettings) -> PromptData:
    if settings.source == GENERATED:
        raise DataError("prompts cannot be generated; name data with a column prompt, messages or chosen.")
    return load_prompts(settings.source, column=settings.text, split="calibration")


def _with_template(chats: PromptData, model: Model) -> PromptData:
    if model.tokenizer is not None and not model.tokenizer.chat_template:  # a skeleton has no tokenizer
        raise DataError(f"{chats.name} holds conversations, and this model has no chat template; give text.")
    return chats


def _chat_batches(settings: CalibrationSettings, data: PromptData, model: Model, seed: int) -> list[Batch]:
    """Draw conversations until they fill `samples` sequences of `seq_len` tokens; only answers are labels."""
    assert model.tokenizer is not None and settings.batch_size is not None
    order = np.random.Generator(np.random.PCG64(seed)).permutation(len(data))
    packed = pack_chats((data.conversations[index] for index in order), model.tokenizer, settings.seq_len)
    sequences = list(itertools.islice(packed, settings.samples))
    if len(sequences) < settings.samples:
        raise DataError(
            f"{data.name} fills {len(sequences):,} sequences of {settings.seq_len:,} tokens, too few for "
            f"{settings.samples:,} samples: use fewer or shorter ones."
        )
    ids, labels = (torch.stack(tensors).split(settings.batch_size) for tensors in zip(*sequences, strict=True))
    return [
        {"input_ids": part, "attention_mask": torch.ones_like(part), "labels": answers}
        for part, answers in zip(ids, labels, strict=True)
    ]


def _prompt_batches(settings: CalibrationSettings, data: PromptData, model: Model, seed: int) -> list[Batch]:
    """Draw prompts of at most `seq_len` tokens, without labels: `input_ids` and `attention_mask`, padded."""
    assert model.tokenizer is not None and settings.batch_size is not None
    renderer = ChatTemplateRenderer(model.tokenizer) if model.tokenizer.chat_template else None
    rows: list[list[int]] = []
    for index in np.random.Generator(np.random.PCG64(seed)).permutation(len(data)):
        text = prompt_text(data.conversations[index], renderer)
        tokens = model.tokenizer(text, add_special_tokens=renderer is None, verbose=False)["input_ids"]
        if 0 < len(tokens) <= settings.seq_len:
            rows.append(list(tokens))
        if len(rows) == settings.samples:
            break
    if renderer is not None:
        renderer.close()
    if len(rows) < settings.samples:
        raise DataError(
            f"{data.name} has {len(rows):,} prompts of at most {settings.seq_len:,} tokens, too few for "
            f"{settings.samples:,} samples: use fewer, or a larger seq_len."
        )
    padding = padding_token_id(model.tokenizer)
    parts = [rows[start : start + settings.batch_size] for start in range(0, len(rows), settings.batch_size)]
    return [pad_batch({"input_ids": p, "attention_mask": [[1] * len(row) for row in p]}, padding) for p in parts]


def prompt_text(messages: Sequence[Mapping[str, str]], renderer: ChatTemplateRenderer | None) -> str:
    """Return a conversation as the model's chat template writes it, or with the speakers' names if it has none."""
    if renderer is not None:
        return renderer.render(messages)
    if len(messages) == 1:
        return messages[0]["content"]
    turns = [f"{message['role'].capitalize()}: {message['content']}" for message in messages]
    return "\n\n".join([*turns, "Assistant:"])


def fingerprint(batches: Sequence[Batch]) -> str:
    """Return a short hash of the exact calibration data, for the record and for resuming."""
    digest = hashlib.sha256()
    for batch in batches:
        for name in sorted(batch):
            digest.update(name.encode())
            digest.update(batch[name].contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def _check_context(settings: CalibrationSettings, model: Model) -> None:
    longest = getattr(model.network.config, "max_position_embeddings", settings.seq_len)
    if settings.seq_len > longest:
        raise RecipeError(f"seq_len of the recipe is {settings.seq_len} tokens; this model's context is {longest}.")


def _check_data_type(model: Model, data: CalibrationData, source: str) -> None:
    if isinstance(data, Demonstrations) != (model.task == "policy"):
        if model.task == "policy":
            raise DataError(f"{source} holds no demonstrations, but this is a policy: give a NumPy archive (.npz).")
        raise DataError(f"{source} holds demonstrations for a policy, but this is a model for {model.task}.")
    if isinstance(data, Demonstrations):
        check_demonstrations(model, data)
        return
    if isinstance(data, SpeechData) != (model.task == "speech"):
        if model.task == "speech":
            raise DataError(f"{source} holds no recordings, but this is a speech model: give a table of recordings.")
        raise DataError(f"{source} holds recordings, but this is a model for {model.task}.")
    if isinstance(data, LabeledImages) != (model.task == "images"):
        if model.task == "images":
            raise DataError(f"{source} holds no images, but this is an image model: give a folder of images.")
        raise DataError(f"{source} holds images, but this is a model for {model.task}: give text.")
    if model.task == "language" and isinstance(data, LabeledData):
        raise DataError(f"{source} holds labeled rows, but this is a language model: name the text column to use it.")
    if model.task == "classification" and isinstance(data, TextData):
        raise DataError(
            f"{source} has no labels, but this is a classifier: give a file with a label column, or name it."
        )


def _labels_for_loss(model: Model, data: LabeledData) -> LabeledData:
    """Return the data with labels for the model's loss: known classes, or numbers for a model with one output."""
    classes = model.network.config.num_labels
    if classes == 1:
        return replace(data, labels=data.labels.astype(np.float32), regression=True)
    if data.regression:
        raise DataError(f"{data.name} has numbers as labels, but the model has {classes} classes.")
    if data.labels.max() >= classes:
        raise DataError(f"{data.name} has the label {data.labels.max()}, but the model has only {classes} classes.")
    return data


def _class_labels(model: Model, data: LabeledImages) -> np.ndarray:
    """Return the labels in the model's numbering, after checking that it has such classes."""
    labels, classes = model_labels(model, data), model.network.config.num_labels
    if labels.max() >= classes:
        raise DataError(f"{data.name} has the label {labels.max()}, but the model has only {classes} classes.")
    return labels


def _check_loss(recipe: Recipe, model: Model) -> None:
    """Check that the model has a head with a loss if a method needs gradients."""
    name = next((step.name for step in recipe.steps if "gradients" in step.needs), None)
    if name is not None and model.task == "embedding":
        raise RecipeError(f"{name} needs a head with a loss, which this model lacks; use flap, wanda-sp or magnitude.")
