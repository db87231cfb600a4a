"""Integer-only speech recognition: WER of a QuartzNet by bits and by what its ranges are calibrated on (Q-ASR).

    python benchmarks/integer_asr.py [--model FOLDER] [--steps 2000] [--seeds 0 1 2] [--smoke] [--resume]

Without --model, the network is first trained on spoken digits (`quartznet_fsdd.py`). Then it is converted with ranges
from recordings, from inputs synthesized from its batch norms, from Gaussian noise and from uniform noise; the seed
draws the recordings, the noise or the start of the synthesis. Integer networks run the test recordings one by one.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import previous_rows, table, write
from quartznet_fsdd import EXTRACTOR, TRAIN_SAMPLES, Digits, test_data, train

from smelt.compression.calibration.zero_shot import noise_inputs, statistics_loss, synthesize_inputs
from smelt.compression.quantization.integer_convolutions import integer_convolutions
from smelt.data import SpeechData
from smelt.measure.evaluate import evaluate
from smelt.measure.paired import compare
from smelt.models.load import load
from smelt.models.model import Model
from smelt.runtime.integer.convolutions import BitWidths

FRAMES = TRAIN_SAMPLES // EXTRACTOR.hop_length + 1  # as many as the training sequences have
SAMPLES, BATCH_SIZE = 32, 8
SQNR_RECORDINGS = 20
BITS = (8, 6, 4)
DATA = ("recordings", "synthetic", "gaussian", "uniform")
PERCENTILES = (99.996, 99.9)  # the first: of the paper's code
Row = dict[str, Any]


def calibration(model: Model, kind: str, seed: int, samples: int) -> list[dict[str, torch.Tensor]]:
    """Return the inputs from which ranges are taken."""
    network, shape = model.network, (model.network.config.num_mel_bins, FRAMES)
    if kind == "synthetic":
        return synthesize_inputs(network, shape, samples=samples, batch_size=BATCH_SIZE, seed=seed)
    if kind != "recordings":
        return noise_inputs(network, shape, kind, samples=samples, seed=seed)
    generator, digits = np.random.Generator(np.random.PCG64([seed, 1])), Digits.load(test=False)
    sequences = [digits.training_sequence(generator)[0] for _ in range(samples)]
    return [{"input_features": EXTRACTOR(sequences).input_features}]


@torch.no_grad()
def logit_sqnr(network: Any, integer: Any, data: SpeechData) -> float:
    """Return the signal-to-noise ratio of the logits in decibels, on the first test recordings."""
    signal = noise = 0.0
    for index in range(min(SQNR_RECORDINGS, len(data))):
        features = EXTRACTOR([data.decode(index, EXTRACTOR.sampling_rate)]).input_features
        expected, actual = (each(input_features=features).logits.double() for each in (network, integer))
        signal, noise = signal + float(expected.square().sum()), noise + float((expected - actual).square().sum())
    return 10 * math.log10(signal / noise)


def measure(model: Model, data: SpeechData, options: argparse.Namespace) -> list[Row]:
    rows = previous_rows("integer_asr", options.resume)
    done = {(row["bits"], row["data"], row["percentile"], row["seed"]) for row in rows}
    base = evaluate(model, data, batch_size=1)
    if not rows:
        rows.append({"bits": 32, "data": "float", "percentile": None, "seed": None, "wer": base.value, **base.settings})
    for seed in options.seeds:
        for kind in DATA:
            wanted = [(bits, kind, percent, seed) for bits in BITS for percent in PERCENTILES]
            if done.issuperset(wanted):
                continue
            start = time.process_time()
            batches = calibration(model, kind, seed, 8 if options.smoke else SAMPLES)
            seconds = time.process_time() - start
            with torch.no_grad():
                loss = statistics.mean(statistics_loss(model.network, batch).item() for batch in batches)
            for bits, _, percent, _ in wanted:
                network, _ = integer_convolutions(model, batches, bits=BitWidths(bits, bits), percentile=percent)
                quality = evaluate(replace(model, network=network), data, batch_size=1)
                difference = compare(quality, base, seed=seed)
                rows.append(
                    {
                        "bits": bits, "data": kind, "percentile": percent, "seed": seed, "wer": quality.value,
                        "difference": difference.difference, "interval": difference.interval,
                        "divergence_of_statistics": loss, "seconds_of_calibration_data": seconds,
                        "sqnr_of_logits_db": logit_sqnr(model.network, network, data),
                    }
                )  # fmt: skip
                print(rows[-1], flush=True)
            if not options.smoke:
                write("integer_asr", rows, text(rows))
    return rows


def text(rows: list[Row]) -> str:
    base, others = rows[0], rows[1:]
    cells = []
    for bits, percent, kind in [(b, p, k) for b in BITS for p in PERCENTILES for k in DATA]:
        same = [r for r in others if (r["bits"], r["percentile"], r["data"]) == (bits, percent, kind)]
        if not same:
            continue
        rates = [100 * row["wer"] for row in same]
        spread = f" ± {statistics.stdev(rates):.2f}" if len(rates) > 1 else ""
        cells.append([
            f"W{bits}A{bits}", f"{percent} %", kind,
            f"{statistics.mean(rates):.2f}{spread}", ", ".join(f"{rate:.2f}" for rate in rates),
            f"{statistics.mean(rates) - 100 * base['wer']:+.2f}",
            f"{statistics.mean(row['sqnr_of_logits_db'] for row in same):.1f}",
            f"{statistics.mean(row['divergence_of_statistics'] for row in same):.3g}",
        ])  # fmt: skip
    headings = ["bits", "range", "calibrated on", "WER, %", "by seed", "against float", "SQNR of logits, dB", "KL"]
    seeds = len({row["seed"] for row in others})
    return (
        "# Integer-only speech recognition\n\nA QuartzNet of 0.1 million parameters on sequences of two to five spoken "
        f"digits (FSDD, held-out recordings): {base['items']} sequences, {base['words']} words. The float network has "
        f"a WER of {100 * base['wer']:.2f} %. Everything after the log-mel spectrogram, which is float, is integers. "
        f"Mean and standard deviation over {seeds} seeds of calibration data ({SAMPLES} inputs of {FRAMES} frames); "
        "one trained network. The range of an activation is a percentile of its magnitudes. The SQNR of the "
        "logits is that on test recordings; KL is the divergence of the statistics at batch norms on the calibration "
        "data.\n\n"
    ) + table(headings, cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="a folder that quartznet_fsdd.py wrote")
    parser.add_argument("--steps", type=int, default=2_000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--device", default="cpu", help="of the training")
    parser.add_argument("--smoke", action="store_true", help="train for some steps; write no results")
    parser.add_argument("--resume", action="store_true", help="keep the rows of a run that was cut off")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        steps = 20 if options.smoke else options.steps
        folder = options.model or train(Path(temporary) / "model", steps, 0, options.device)
        data = test_data(Path(temporary) / "test")
        data = data.take(range(4)) if options.smoke else data
        rows = measure(load(folder), data, options)
    print(text(rows))


if __name__ == "__main__":
    main()
