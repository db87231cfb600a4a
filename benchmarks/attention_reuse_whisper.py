"""Attention map reuse in the encoder of Whisper tiny.en: how similar its maps are, and what sharing one costs.

    PYTHONPATH=src:benchmarks python benchmarks/attention_reuse_whisper.py CHECKPOINT RANKS [--recordings 20] [--resume]

CHECKPOINT and RANKS are those of `whisper_model.py`. Divergences of neighboring layers are measured on the last
recordings of LibriSpeech test-other in the shared folder, to which the output projections are fitted, too; word error
rates are on the first ones. The encoder has 4 layers, of which one uses the map of another; nothing is trained. Times
are CPU time of one thread of one pass of the encoder, dense with eager attention and shared in turns.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from common import previous_rows, shared, table, write
from whisper_model import write_model

from smelt.compression.base import MethodContext
from smelt.compression.calibration.attention_similarity import LN2
from smelt.compression.methods import METHODS
from smelt.compression.recipe.inputs import calibration_batches
from smelt.compression.recipe.recipe import CalibrationSettings
from smelt.data import SpeechData, load_data
from smelt.measure.evaluate import evaluate
from smelt.models.load import load

CALIBRATION_RECORDINGS = 16
REPEATS = 5
ROWS: dict[str, dict[str, Any] | None] = {
    "dense": None,
    "one of 4 layers shares, as it is": {"repair": "none"},
    "one of 4 layers shares, output projection fitted": {"repair": "full"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("ranks", type=Path)
    parser.add_argument("--recordings", type=int, default=20)
    parser.add_argument("--resume", action="store_true", help="keep the rows of the results file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    data = load_data(shared() / "data" / "librispeech_test_other_100" / "transcripts.jsonl")
    assert isinstance(data, SpeechData)
    rows = previous_rows("attention_reuse_whisper", options.resume)
    with tempfile.TemporaryDirectory() as temporary:
        source = write_model(Path(temporary) / "whisper", options.checkpoint, options.ranks)
        for name, settings in ROWS.items():
            if name not in {row["row"] for row in rows}:
                rows.append({"row": name, **measure(source, settings, data, options.recordings)})
                write("attention_reuse_whisper", rows, text(rows))


def measure(source: Path, settings: dict[str, Any] | None, data: SpeechData, recordings: int) -> dict[str, Any]:
    model, facts = load(source), {}
    if settings is not None:
        last = data.take(range(len(data) - CALIBRATION_RECORDINGS, len(data)))
        config = CalibrationSettings(samples=CALIBRATION_RECORDINGS, batch_size=2)
        batches = calibration_batches(config, last, model, seed=0)
        step = METHODS.build({"method": "attention-reuse", "layers": 0.25, **settings})
        facts = step.apply(model, MethodContext(batches=batches))
    quality = evaluate(model, data, limit=recordings, batch_size=1)
    return {
        "wer": quality.value, "words": quality.settings["words"], "recordings": len(quality.items),
        "maps_of": facts.get("maps_of"), "divergence": facts.get("map_divergence"),
        "encoder_seconds": seconds(source, model.network),
    }  # fmt: skip


@torch.inference_mode()
def seconds(source: Path, network: Any) -> list[float]:
    """Return the median CPU time of a pass of the encoder: of the dense one, and of this one."""
    dense: Any = load(source).network
    dense.set_attn_implementation("eager")
    network.set_attn_implementation("eager")
    features = torch.randn(1, 80, 3000, generator=torch.Generator().manual_seed(0))
    samples: list[list[float]] = [[], []]
    for _ in range(REPEATS):
        for each, times in zip((dense, network), samples, strict=True):
            start = time.process_time()
            each.model.encoder(features)
            times.append(time.process_time() - start)
    return [statistics.median(times) for times in samples]


def text(rows: list[dict[str, Any]]) -> str:
    cells = []
    for row in rows:
        dense, ours = row["encoder_seconds"]
        groups = " ".join(f"{layer}:{leader}" for layer, leader in (row["maps_of"] or {}).items())
        cells.append([row["row"], f"{100 * row['wer']:.2f} %", groups or "-", f"{ours:.2f} ({dense / ours:.2f}x)"])
    divergence = next((row["divergence"] for row in rows if row["divergence"]), [])
    similarity = ", ".join(f"{i - 1} and {i}: {value:.3f}" for i, value in enumerate(divergence) if i)
    return (
        f"# Sharing an attention map in the encoder of Whisper tiny.en\n\nWord error rate on the first "
        f"{rows[0]['recordings']} recordings ({rows[0]['words']:,} words) of LibriSpeech test-other, greedy. "
        f"Jensen-Shannon divergence of the maps of neighboring layers (0: equal, {LN2:.3f}: disjoint), on the last "
        f"{CALIBRATION_RECORDINGS} recordings: {similarity}. Nothing is trained.\n\n"
        + table(["row", "WER", "layer:map of", "CPU seconds of the encoder (against dense, eager)"], cells)
    )


if __name__ == "__main__":
    main()
