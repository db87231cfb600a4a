"""A speech model becomes integers without data, is saved, verified, evaluated and transcribes."""

from __future__ import annotations

import json
from pathlib import Path

from smelt.models.load import load
from smelt.runtime.integer.network import IntegerNetwork
from tests.cli.conftest import Smelt
from tests.cli.test_transcribe import folder

__all__ = ["folder"]  # a fixture


def test_integer_only_without_data(folder: Path, smelt_here: Smelt, tmp_path: Path) -> None:
    model, out = str(folder / "model"), str(tmp_path / "integer")
    (folder / "eval.jsonl").write_text(json.dumps({"file": "b.flac", "text": "some words"}) + "\n")
    recipe = {
        "steps": [{"method": "integer-only", "percentile": 99.9}],
        "data": {"source": "none", "samples": 4, "seq_len": 40, "batch_size": 2},
        "evaluate": {"source": str(folder / "eval.jsonl")},
    }
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    done = smelt_here("compress", model, "-r", str(tmp_path / "recipe.yaml"), "-o", out, "--no-speed")
    assert done.code == 0, done.err
    record = json.loads((tmp_path / "integer" / "measurements.json").read_text())
    assert "log-mel spectrogram in float" in json.dumps(record["steps"][0])
    loaded = load(out)
    assert loaded.task == "speech" and isinstance(loaded.network, IntegerNetwork)
    assert not list(loaded.network.parameters())
    assert all(not buffer.is_floating_point() for buffer in loaded.network.buffers())
    text = smelt_here("transcribe", out, str(folder / "b.flac"))
    assert text.code == 0, text.err
    both = smelt_here("transcribe", out, str(folder / "a.wav"), str(folder / "b.flac"))
    assert both.out.splitlines()[1] == f"{folder / 'b.flac'}: {text.out.strip()}"
    quality = smelt_here("eval", out, "--data", str(folder / "eval.jsonl"), "--against", model)
    assert quality.code in (0, 3) and "wer" in quality.out, quality.err
    inspected = smelt_here("inspect", out)
    assert "none is floating point" in inspected.out and "signal to quantization noise" in inspected.out, inspected.err
    verified = smelt_here("verify", out)
    assert verified.code == 0 and "same logits" in verified.out, verified.err
    timed = smelt_here("bench", out, "--repeats", "3", "--seq-len", "40", "--against", model)
    assert timed.code == 0 and "times the speed of" in timed.out, timed.err


def test_missing_data_and_bad_parameters_are_one_sentence(folder: Path, smelt_here: Smelt, tmp_path: Path) -> None:
    arguments = ("--method", "integer-only", "-o", str(tmp_path / "out"))
    smelt_here("compress", str(folder / "model"), *arguments).refused("needs recordings, and there are no default ones")
    smelt_here("compress", str(folder / "model"), *arguments, "--data", "none", "--set", "bits=9").refused(
        "bits of integer-only"
    )
