"""Evaluate speech recognition by the word error rate (WER) of greedy transcripts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from transformers import BatchFeature
from transformers.models.whisper.english_normalizer import BasicTextNormalizer

from smelt.data.batches import check_positive
from smelt.data.speech import SpeechData
from smelt.errors import DataError, ModelError
from smelt.measure.eval_result import EvalResult
from smelt.measure.logits import eval_mode
from smelt.measure.metrics import METRICS
from smelt.models.config import quiet_transformers
from smelt.models.feature_extractor import FeatureExtractor
from smelt.models.model import Model
from smelt.models.program_network import ProgramNetwork
from smelt.progress import NullProgress, Progress

MAX_NEW_TOKENS = 200
PROMPT_TOKENS = 4  # start, language, task and no timestamps
_COPY = "copy the files of the model it was made from."


def evaluate_speech(
    model: Model,
    data: SpeechData,
    *,
    metric: str | None = None,
    batch_size: int = 8,
    limit: int | None = None,
    progress: Progress = NullProgress(),  # noqa: B008
) -> EvalResult:
    """Compute the WER over all recordings or the first `limit`, of lower-case words without punctuation."""
    check_positive(limit=limit)
    if metric not in (None, "wer"):
        raise DataError(f"The metric '{metric}' does not fit recordings: use wer.")
    data = data if limit is None else data.take(range(min(limit, len(data))))
    normalize = BasicTextNormalizer()
    references = [normalize(text).split() for text in data.texts]
    if not any(references):
        raise DataError(f"{data.name} has no words in its transcripts.")
    for index in range(len(data)):
        data.check(index)  # before the first transcript
    transcripts: list[str] = []
    with eval_mode(model.network):
        starts = range(0, len(data), batch_size)
        for start in progress.track(starts, "evaluation"):
            transcripts += transcribe(model, data, range(start, min(start + batch_size, len(data))))
    pairs = zip(transcripts, references, strict=True)
    errors = np.array([word_errors(normalize(text).split(), words) for text, words in pairs], dtype=np.float64)
    counts = np.array([len(words) for words in references], dtype=np.float64)
    return EvalResult(
        metric="wer",
        value=float(METRICS["wer"](errors, counts)),
        higher_is_better=False,
        data=data.name,
        items=errors / np.maximum(counts, 1),
        predictions=errors,
        labels=counts,
        settings={"items": len(data), "words": int(counts.sum())},
    )


@torch.no_grad()
def transcribe(model: Model, data: SpeechData, indices: range) -> list[str]:
    """Return the greedy transcripts of recordings."""
    if model.tokenizer is None:
        raise ModelError(f"{_name(model)} has no tokenizer, so it cannot transcribe; {_COPY}")
    features = spectrograms(model, data, indices).to(model.device)
    features = features.to(model.network.dtype)
    if not model.network.can_generate():
        return _ctc_transcripts(model, features)
    longest = getattr(model.network.config, "max_target_positions", MAX_NEW_TOKENS + PROMPT_TOKENS)
    with quiet_transformers():
        ids = model.network.generate(
            features.input_features,
            max_new_tokens=min(MAX_NEW_TOKENS, longest - PROMPT_TOKENS),
            do_sample=False,
            num_beams=1,
        )
    return [str(text) for text in model.tokenizer.batch_decode(ids, skip_special_tokens=True)]


def spectrograms(model: Model, data: SpeechData, indices: Sequence[int]) -> BatchFeature:
    """Return recordings as the features that a network reads."""
    extractor = model.feature_extractor
    if extractor is None:
        raise ModelError(f"{_name(model)} has no preprocessor_config.json that says how it reads audio; {_COPY}")
    samples = [data.decode(index, extractor.sampling_rate) for index in indices]
    for index, each in zip(indices, samples, strict=True):
        _check_length(extractor, len(each), data.where(index))
    return extractor(samples, sampling_rate=extractor.sampling_rate, return_tensors="pt")


def _name(model: Model) -> str:
    return model.source or "this model"


def _check_length(extractor: FeatureExtractor, samples: int, where: str) -> None:
    """Raise if a recording is longer than the model reads, which the extractor would silently drop, or has no frame."""
    longest, frame = getattr(extractor, "chunk_length", None), getattr(extractor, "win_length", extractor.n_fft)
    seconds = samples / extractor.sampling_rate
    if longest is not None and seconds > longest:
        raise DataError(f"{where} has {seconds:.0f} seconds, and this model reads {longest}: split it.")
    if samples < frame:
        raise DataError(
            f"{where} has {1000 * seconds:.1f} milliseconds, and one frame of this model has "
            f"{1000 * frame / extractor.sampling_rate:.1f}: give a longer recording."
        )


def _ctc_transcripts(model: Model, features: BatchFeature) -> list[str]:
    """Return the most likely character of each frame, without repetitions and blanks."""
    network = model.network
    if isinstance(network, ProgramNetwork) and not network.reads_mask and not features.attention_mask.all():
        lengths = enumerate(features.attention_mask.sum(1).tolist())
        alone = ({name: values[i : i + 1, ..., :n] for name, values in features.items()} for i, n in lengths)
        return [text for each in alone for text in _ctc_transcripts(model, BatchFeature(each))]
    assert model.tokenizer is not None
    ids = model.network(**features).logits.argmax(-1)
    stride = -(-features.attention_mask.shape[1] // ids.shape[1])  # input frames of an output frame
    kept = features.attention_mask[:, ::stride].bool()
    # A blank keeps two equal letters apart, so that the decoder of the tokenizer has to see it.
    texts = (
        model.tokenizer.decode(row[valid], skip_special_tokens=False) for row, valid in zip(ids, kept, strict=True)
    )
    return [" ".join(str(text).split()) for text in texts]


def word_errors(words: list[str], reference: list[str]) -> int:
    """Return the least number of substitutions, insertions and deletions between two lists of words."""
    previous = list(range(len(reference) + 1))
    for row, word in enumerate(words, start=1):
        current = [row]
        for column, expected in enumerate(reference, start=1):
            current.append(min(previous[column] + 1, current[-1] + 1, previous[column - 1] + (word != expected)))
        previous = current
    return previous[-1]
