"""QuartzNet: padding does not matter, the tokenizer undoes CTC, and folders are loaded without pickles."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers.audio_utils import mel_filter_bank, spectrogram, window_function

from smelt.errors import ModelError
from smelt.models.feature_extractor import LogMelFeatureExtractor, load_feature_extractor, save_feature_extractor
from smelt.models.inputs import random_inputs
from smelt.models.load import load
from smelt.models.quartznet import CTC_VOCABULARY, QuartzNetConfig, QuartzNetForCTC, ctc_tokenizer

EXTRACTOR = LogMelFeatureExtractor(feature_size=16, sampling_rate=8_000, hop_length=80, win_length=200)


def quartznet(**sizes: int) -> QuartzNetForCTC:
    torch.manual_seed(0)
    config = QuartzNetConfig(num_mel_bins=16, stem_channels=8, hidden_sizes=(8, 12), kernel_sizes=(3, 5), **sizes)
    network = QuartzNetForCTC(config)
    for module in network.modules():
        if isinstance(module, torch.nn.BatchNorm1d):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2.0)
    return network.eval()


def recordings() -> list[np.ndarray]:
    generator = np.random.Generator(np.random.PCG64(0))
    return [generator.normal(size=length).astype(np.float32) for length in (8_000, 4_003, 90)]


@torch.no_grad()
def test_a_padded_recording_gives_the_logits_it_gives_alone() -> None:
    network, samples = quartznet(), recordings()
    logits = network(**EXTRACTOR(samples)).logits
    for row, each in zip(logits, samples, strict=True):
        alone = network(**EXTRACTOR([each])).logits[0]
        assert alone.shape == ((len(each) // 80 + 2) // 2, len(CTC_VOCABULARY))
        torch.testing.assert_close(row[: len(alone)], alone)


def test_the_loss_is_that_of_each_recording_alone() -> None:
    network, samples = quartznet(), recordings()[:2]
    labels = torch.tensor([[3, 4, 4, 9], [7, 7, -100, -100]])
    alone = [
        network(**EXTRACTOR([each]), labels=row[row >= 0][None]).loss for each, row in zip(samples, labels, strict=True)
    ]
    torch.testing.assert_close(network(**EXTRACTOR(samples), labels=labels).loss, torch.stack(alone).mean())


def test_the_tokenizer_undoes_repetitions_and_blanks() -> None:
    tokenizer, index = ctc_tokenizer(), CTC_VOCABULARY.index
    ids = tokenizer("Three, it's 7!").input_ids
    assert [CTC_VOCABULARY[i] for i in ids] == [*"three|it's|"]
    frames = [0, index("t"), index("t"), index("h"), index("r"), index("e"), 0, index("e"), 1, 1, index("o"), 0]
    assert tokenizer.decode(frames, skip_special_tokens=False) == "three o"


def test_the_spectrogram_is_that_of_transformers() -> None:
    samples = recordings()[0]
    mel = mel_filter_bank(257, 16, 0.0, 4_000.0, 8_000, norm="slaney", mel_scale="slaney")
    expected = spectrogram(
        samples, window_function(512, "hann"), frame_length=512, hop_length=80, power=2.0, pad_mode="constant",
        mel_filters=mel, log_mel="log",
    )  # fmt: skip
    expected = (expected - expected.mean(1, keepdims=True)) / expected.std(1, keepdims=True)
    actual = replace(EXTRACTOR, win_length=512)([samples]).input_features[0].numpy()
    np.testing.assert_allclose(actual, expected, atol=1e-3)
    np.testing.assert_allclose(actual.mean(1), 0, atol=1e-4)
    np.testing.assert_allclose(actual.std(1), 1, atol=1e-3)
    with pytest.raises(ValueError, match="16000 Hz, expected 8000"):
        EXTRACTOR([samples], sampling_rate=16_000)


def test_a_folder_is_loaded_without_pickles(tmp_path: Path) -> None:
    network = quartznet()
    network.save_pretrained(tmp_path)
    ctc_tokenizer().save_pretrained(tmp_path)
    save_feature_extractor(EXTRACTOR, tmp_path)
    model = load(tmp_path)
    assert model.task == "speech" and model.feature_extractor == EXTRACTOR and model.tokenizer is not None
    inputs = random_inputs(network)
    assert torch.equal(model.network(**inputs).logits, network(**inputs).logits)


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"kernel_sizes": [3]}, "one entry for each block"), ({"head_kernel_size": 4}, "kernel sizes must be odd")],
)
def test_impossible_sizes_are_refused(changes: dict[str, object], words: str, tmp_path: Path) -> None:
    quartznet().save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**values, **changes}))
    with pytest.raises(ModelError, match=words):
        load(tmp_path)


def test_the_settings_of_the_extractor_are_bounded(tmp_path: Path) -> None:
    for change, words in (({"n_fft": 10**9}, "n_fft is 1000000000"), ({"win_length": 600}, "more than n_fft of 512")):
        save_feature_extractor(EXTRACTOR, tmp_path)
        file = tmp_path / "preprocessor_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
        with pytest.raises(ModelError, match=words):
            load_feature_extractor(tmp_path)
