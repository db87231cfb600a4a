"""Word error rates, recordings in every form, and a speech model evaluated on them."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as hf
from transformers.modeling_outputs import CausalLMOutput

from smelt.compression.quantization.integer_convolutions import integer_convolutions
from smelt.data import SpeechData, load_data
from smelt.errors import DataError, ModelError
from smelt.measure.eval_result import EvalResult
from smelt.measure.evaluate import evaluate
from smelt.measure.gate import gate, parse_margins
from smelt.measure.metrics import wer
from smelt.measure.paired import compare
from smelt.measure.speech import transcribe, word_errors
from smelt.models.feature_extractor import LogMelFeatureExtractor, load_feature_extractor, save_feature_extractor
from smelt.models.model import Model
from smelt.models.quartznet import CTC_VOCABULARY, QuartzNetConfig, QuartzNetForCTC, ctc_tokenizer
from tests.character_tokenizer import character_tokenizer

soundfile = pytest.importorskip("soundfile", reason="soundfile is not installed")

RATE = 16_000
TONE = (0.5 * np.sin(2 * np.pi * 440 * np.arange(RATE // 2) / RATE)).astype(np.float32)


def wav(samples: np.ndarray = TONE, rate: int = RATE) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format="FLAC", subtype="PCM_16")
    return file.getvalue()


def whisper() -> Model:
    tokenizer = character_tokenizer()
    size = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "num_mel_bins": 8}
    tokens = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 2}
    torch.manual_seed(0)
    config = hf.WhisperConfig(
        vocab_size=len(tokenizer), max_source_positions=50, max_target_positions=16, **size, **heads, **tokens
    )
    network = hf.WhisperForConditionalGeneration(config).eval()
    extractor = hf.WhisperFeatureExtractor(feature_size=8, chunk_length=1)
    return Model(network, tokenizer, feature_extractor=extractor)


@pytest.mark.parametrize(
    ("words", "reference", "errors"),
    [
        ("a b c", "a b c", 0),
        ("a x c", "a b c", 1),
        ("a c", "a b c", 1),
        ("a b b c", "a b c", 1),
        ("", "a b", 2),
        ("a", "", 1),
        ("kitten sat", "sitting on the mat", 4),
    ],
)
def test_word_errors(words: str, reference: str, errors: int) -> None:
    assert word_errors(words.split(), reference.split()) == errors


def test_the_rate_weighs_items_by_their_words_and_is_gated() -> None:
    errors, words = np.array([1.0, 0.0, 3.0]), np.array([2.0, 8.0, 10.0])
    assert wer(errors, words) == 4 / 20
    assert wer(errors, words, np.array([[1, 0, 0], [0, 1, 1]])).tolist() == [1 / 2, 3 / 18]

    def result(errors: np.ndarray) -> EvalResult:
        return EvalResult(
            "wer", float(wer(errors, words)), False, "data", errors / words, predictions=errors, labels=words
        )

    assert compare(result(errors + 1), result(errors)).verdict in ("worse", "no clear difference")
    assert gate(result(errors), result(errors), parse_margins(["1pt"]).of("wer")).verdict == "pass"


def test_recordings_of_a_table_are_resampled_to_mono(tmp_path: Path) -> None:
    stereo = np.stack([TONE, TONE], axis=1)
    (tmp_path / "a.flac").write_bytes(wav(stereo))
    (tmp_path / "b.flac").write_bytes(wav(TONE[::2], RATE // 2))
    rows = [{"file": "a.flac", "text": "one"}, {"file": "b.flac", "text": "two"}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = load_data(tmp_path / "rows.jsonl")
    assert isinstance(data, SpeechData) and data.texts == ("one", "two")
    np.testing.assert_allclose(data.decode(0, RATE), TONE, atol=1e-3)
    resampled = data.decode(1, RATE)
    assert resampled.shape == TONE.shape and np.abs(resampled - TONE)[200:-200].max() < 0.02


def test_a_speech_model_is_evaluated_by_its_transcripts() -> None:
    model = whisper()
    assert model.task == "speech" and model.tokenizer is not None
    features = model.feature_extractor([TONE], sampling_rate=RATE, return_tensors="pt").input_features
    ids = model.network.generate(features, max_new_tokens=12, do_sample=False)
    text = model.tokenizer.batch_decode(ids, skip_special_tokens=True)[0]
    data = SpeechData("speech", [wav(), wav()], ("some words", text or "x"))
    result = evaluate(model, data, batch_size=1)
    assert result.metric == "wer" and not result.higher_is_better and len(result.items) == 2
    assert result.settings["words"] > 0 and result.predictions is not None and result.predictions[0] >= 1


def test_a_ctc_model_is_evaluated_by_its_transcripts() -> None:
    torch.manual_seed(0)
    extractor = LogMelFeatureExtractor(feature_size=4, sampling_rate=RATE)
    network = QuartzNetForCTC(
        QuartzNetConfig(num_mel_bins=4, stem_channels=4, hidden_sizes=(4,), kernel_sizes=(3,), head_channels=4)
    ).eval()
    network.classifier.weight.data *= 100  # random weights say one letter all the time
    model = Model(network, ctc_tokenizer(), feature_extractor=extractor)
    generator = np.random.Generator(np.random.PCG64(0))
    recordings = [generator.normal(0, 0.1, length).astype(np.float32) for length in (RATE // 2, RATE // 4)]
    data = SpeechData("speech", [wav(each) for each in recordings], ("one", "two"))
    expected = []
    for index in range(2):  # alone, without padding
        features = extractor([data.decode(index, RATE)])
        with torch.no_grad():
            ids = network(features.input_features).logits[0].argmax(-1)
        merged = torch.unique_consecutive(ids)
        expected.append(" ".join("".join(CTC_VOCABULARY[i] for i in merged if i).replace("|", " ").split()))
    assert all(expected)
    assert transcribe(model, data, range(2)) == expected
    result = evaluate(model, replace(data, texts=(expected[0], "four other words here")), batch_size=2)
    assert result.predictions is not None and result.predictions[0] == 0 and result.predictions[1] >= 4


class WithoutMask(QuartzNetForCTC):
    """A network that knows no padding, as the graphs of earlier versions."""

    def forward(self, input_features: torch.Tensor) -> CausalLMOutput:  # type: ignore[override]
        return super().forward(input_features)


@pytest.mark.parametrize("network_class", [QuartzNetForCTC, WithoutMask])
def test_an_integer_network_transcribes_a_padded_batch(network_class: type[QuartzNetForCTC]) -> None:
    """In one batch if the graph has a mask, else one by one: the transcripts are those of each recording alone."""
    torch.manual_seed(0)
    extractor = LogMelFeatureExtractor(feature_size=4, sampling_rate=RATE)
    sizes = {"num_mel_bins": 4, "stem_channels": 4, "hidden_sizes": (4,), "kernel_sizes": (3,), "head_channels": 4}
    network = network_class(QuartzNetConfig(**sizes)).eval()
    network.classifier.weight.data *= 100
    generator = np.random.Generator(np.random.PCG64(1))
    lengths = (RATE // 2, RATE // 5, RATE // 3)
    recordings = [generator.normal(0, 0.1, length).astype(np.float32) for length in lengths]
    model = Model(network, ctc_tokenizer(), feature_extractor=extractor)
    model.network, _ = integer_convolutions(model, [{"input_features": extractor(recordings[:1]).input_features}])
    assert model.network.reads_mask is (network_class is QuartzNetForCTC)
    data = SpeechData("speech", [wav(each) for each in recordings], ("one", "two", "three"))
    batches: list[int] = []
    model.network.register_forward_hook(lambda module, args, output: batches.append(len(output.logits)))
    together = transcribe(model, data, range(3))
    assert batches == ([3] if model.network.reads_mask else [1, 1, 1])
    assert together == [transcribe(model, data, range(index, index + 1))[0] for index in range(3)]
    assert len(set(together)) == 3


def test_a_recording_longer_than_the_model_reads_is_refused() -> None:
    data = SpeechData("speech", [wav(np.tile(TONE, 4))], ("a",))
    with pytest.raises(DataError, match="has 2 seconds, and this model reads 1: split it"):
        evaluate(whisper(), data)


def test_the_feature_extractor_is_saved_and_bounded(tmp_path: Path) -> None:
    save_feature_extractor(hf.WhisperFeatureExtractor(feature_size=16, chunk_length=2), tmp_path)
    loaded = load_feature_extractor(tmp_path)
    assert loaded is not None and loaded.feature_size == 16 and loaded.chunk_length == 2
    content = {"feature_extractor_type": "WhisperFeatureExtractor", "chunk_length": 10**9}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(content))
    with pytest.raises(ModelError, match="chunk_length is 1000000000"):
        load_feature_extractor(tmp_path)


def test_what_cannot_be_read_is_one_sentence() -> None:
    with pytest.raises(DataError, match="cannot be decoded as audio"):
        SpeechData("speech", [b"fLaC broken"], ("a",)).decode(0, RATE)
    with pytest.raises(DataError, match="recording 1 of speech is empty"):
        SpeechData("speech", [wav(TONE[:0])], ("a",)).decode(0, RATE)
    with pytest.raises(DataError, match="use wer"):
        evaluate(whisper(), SpeechData("speech", [wav()], ("a",)), metric="accuracy")
    with pytest.raises(DataError, match="no words"):
        evaluate(whisper(), SpeechData("speech", [wav()], ("...",)))
