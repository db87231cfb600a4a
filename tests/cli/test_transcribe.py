"""`smelt transcribe` and `smelt eval` on recordings, as a user calls them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from smelt.models.feature_extractor import LogMelFeatureExtractor, save_feature_extractor
from smelt.models.quartznet import QuartzNetConfig, QuartzNetForCTC, ctc_tokenizer
from tests.cli.conftest import Place, Smelt

soundfile = pytest.importorskip("soundfile", reason="soundfile is not installed")

RATE = 16_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a speech model and the same recording at two rates."""
    folder = tmp_path_factory.mktemp("speech")
    torch.manual_seed(0)
    config = QuartzNetConfig(num_mel_bins=8, stem_channels=8, hidden_sizes=(8,), kernel_sizes=(3,), head_channels=8)
    QuartzNetForCTC(config).save_pretrained(folder / "model")
    ctc_tokenizer().save_pretrained(folder / "model")
    save_feature_extractor(LogMelFeatureExtractor(feature_size=8, sampling_rate=RATE // 2), folder / "model")
    time = np.arange(RATE) / RATE
    chirp = 0.3 * np.sin(2 * np.pi * (200 + 600 * time) * time) * np.hanning(len(time))
    soundfile.write(folder / "a.wav", chirp, RATE)
    soundfile.write(folder / "b.flac", chirp[::2], RATE // 2)
    return folder


def test_recordings_of_any_rate_are_transcribed(folder: Path, smelt_here: Smelt, tmp_path: Path) -> None:
    one = smelt_here("transcribe", str(folder / "model"), str(folder / "b.flac"))
    assert one.code == 0, one.err
    text = one.out.strip()
    files = [str(folder / "a.wav"), str(folder / "b.flac")]
    both = smelt_here("transcribe", str(folder / "model"), *files, "--json", str(tmp_path / "result.json"))
    assert both.code == 0 and both.out.splitlines()[1] == f"{files[1]}: {text}"
    transcripts = json.loads((tmp_path / "result.json").read_text())["transcripts"]
    assert [entry["file"] for entry in transcripts] == files and transcripts[1]["text"] == text
    single = smelt_here("transcribe", str(folder / "model"), *files, "--batch-size", "1")
    assert single.out == both.out


def test_eval_gives_the_word_error_rate(folder: Path, smelt_here: Smelt, tmp_path: Path) -> None:
    text = smelt_here("transcribe", str(folder / "model"), str(folder / "b.flac")).out.strip()
    rows = [{"file": "b.flac", "text": text or "x"}, {"file": "b.flac", "text": "some other words"}]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ("--data", str(folder / "rows.jsonl"), "--json", str(tmp_path / "quality.json"))
    done = smelt_here("eval", str(folder / "model"), *arguments)
    assert done.code == 0, done.err
    quality = json.loads((tmp_path / "quality.json").read_text())["quality"]
    assert quality["metric"] == "wer" and quality["settings"]["items"] == 2
    assert quality["value"] >= 3 / quality["settings"]["words"]


def test_channels_are_averaged(folder: Path, smelt_here: Smelt, tmp_path: Path) -> None:
    mono, rate = soundfile.read(folder / "b.flac")
    offset = 0.1 * np.sin(np.arange(len(mono)))
    soundfile.write(tmp_path / "b.wav", np.stack([mono + offset, mono - offset], axis=1), rate, subtype="DOUBLE")
    files = [str(folder / "b.flac"), str(tmp_path / "b.wav")]
    done = smelt_here("transcribe", str(folder / "model"), *files, "--json", str(tmp_path / "result.json"))
    assert done.code == 0, done.err
    mono_text, stereo_text = (
        each["text"] for each in json.loads((tmp_path / "result.json").read_text())["transcripts"]
    )
    assert mono_text == stereo_text


def test_bad_recordings_are_one_sentence(folder: Path, smelt_here: Smelt, place: Place, tmp_path: Path) -> None:
    model = str(folder / "model")
    soundfile.write(tmp_path / "empty.wav", np.zeros(0), RATE)
    soundfile.write(tmp_path / "short.wav", np.zeros(319), RATE)  # 320 at half the rate are half a frame
    soundfile.write(tmp_path / "nan.wav", np.array([0.1, np.nan] * 400), RATE, subtype="FLOAT")
    (tmp_path / "text.wav").write_text("no recording")
    (tmp_path / "zero.wav").touch()
    reasons = {
        "empty.wav": "empty.wav is empty",
        "zero.wav": "zero.wav is empty",
        "short.wav": "short.wav has 20.0 milliseconds, and one frame of this model has 40.0",
        "nan.wav": "nan.wav contains samples that are NaN or infinite",
        "text.wav": "text.wav cannot be decoded as audio",
        "none.wav": "none.wav",
    }
    for name, reason in reasons.items():
        smelt_here("transcribe", model, str(tmp_path / name)).refused(reason)
    smelt_here("transcribe", place / "llama", str(folder / "a.wav")).refused("is a model for language")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"file": "nan.wav", "text": "one"}))
    smelt_here("eval", model, "--data", str(tmp_path / "rows.jsonl")).refused("NaN or infinite")
