"""Train a QuartzNet on spoken digits (FSDD), and write it with test recordings of several digits.

    python benchmarks/quartznet_fsdd.py OUT [--steps 2000] [--seed 0] [--device cpu]

OUT/model is the model folder, OUT/test.jsonl names FLAC files with their transcripts. Recordings 0 to 4 of each speaker
and digit are for tests, as the data's README says; the others are for training. A sequence is a few recordings of one
speaker with noise of low level between them, so that CTC has something to align.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import shared
from torch import Tensor

from smelt.compression.distillation.training_run import process_group
from smelt.data import SpeechData, load_data
from smelt.measure.evaluate import evaluate
from smelt.models.feature_extractor import LogMelFeatureExtractor, save_feature_extractor
from smelt.models.load import load
from smelt.models.quartznet import IGNORED_LABEL, QuartzNetConfig, QuartzNetForCTC, ctc_tokenizer
from smelt.train.trainer.config import (
    CheckpointConfig,
    EvaluateConfig,
    OptimizerConfig,
    ScheduleConfig,
    TrainConfig,
)
from smelt.train.trainer.tasks import TrainingTask
from smelt.train.trainer.trainer import Trainer

RATE = 8_000
WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
TEST_INDICES = 5  # of the 50 recordings of each speaker and digit
TRAIN_SAMPLES = int(2.56 * RATE)  # of each training sequence, so that none is padded
GAP = (0.02, 0.2)  # seconds between two digits
NOISE = 20 / 2**15  # standard deviation of the noise between digits
EXTRACTOR = LogMelFeatureExtractor(sampling_rate=RATE, hop_length=80, win_length=200)
BATCH_SIZE = 16


@dataclass(frozen=True)
class Digits:
    """Recordings of one split, by speaker."""

    pcm: np.ndarray
    offset: np.ndarray
    digit: np.ndarray
    by_speaker: list[np.ndarray]  # indices of recordings

    @classmethod
    def load(cls, *, test: bool) -> Digits:
        with np.load(shared() / "data" / "fsdd" / "fsdd.npz") as file:
            chosen = (file["index"] < TEST_INDICES) == test
            speakers = [np.flatnonzero(chosen & (file["speaker"] == name)) for name in np.unique(file["speaker"])]
            return cls(file["pcm"], file["offset"], file["digit"], speakers)

    def samples(self, index: int) -> np.ndarray:
        return self.pcm[self.offset[index] : self.offset[index + 1]] / np.float32(2**15)

    def join(self, indices: list[int], generator: np.random.Generator) -> tuple[np.ndarray, str]:
        """Return recordings with noise around and between them, and what is said."""
        parts = [self._gap(generator)]
        for index in indices:
            parts += [self.samples(index), self._gap(generator)]
        joined = np.concatenate(parts)
        return joined + self._noise(len(joined), generator), " ".join(WORDS[self.digit[i]] for i in indices)

    def _gap(self, generator: np.random.Generator) -> np.ndarray:
        return np.zeros(int(generator.uniform(*GAP) * RATE), dtype=np.float32)

    @staticmethod
    def _noise(length: int, generator: np.random.Generator) -> np.ndarray:
        return generator.normal(0, NOISE, length).astype(np.float32)

    def training_sequence(self, generator: np.random.Generator) -> tuple[np.ndarray, str]:
        """Return one to eight random recordings of one speaker that fit into `TRAIN_SAMPLES`, filled up with noise."""
        speaker = self.by_speaker[generator.integers(len(self.by_speaker))]
        indices = [int(generator.choice(speaker)) for _ in range(generator.integers(1, 9))]
        joined, text = self.join(indices, generator)
        while len(joined) > TRAIN_SAMPLES and len(indices) > 1:
            indices.pop()
            joined, text = self.join(indices, generator)
        joined = joined[:TRAIN_SAMPLES]  # a single recording may be longer
        before = int(generator.integers(TRAIN_SAMPLES - len(joined) + 1))
        filled = self._noise(TRAIN_SAMPLES, generator)
        filled[before : before + len(joined)] = joined
        return filled, text

    def test_sequences(self, rounds: int) -> list[tuple[np.ndarray, str]]:
        """Return sequences in which every recording occurs once a round, two to five of them in each."""
        generator = np.random.Generator(np.random.PCG64(0))
        sequences = []
        for _ in range(rounds):
            for speaker in self.by_speaker:
                indices = generator.permutation(speaker).tolist()
                while indices:
                    count = int(generator.integers(2, 6))
                    sequences.append(self.join(indices[:count], generator))
                    del indices[:count]
        return sequences


class Spectrograms:
    """Training sequences as spectrograms in memory."""

    def __init__(self, digits: Digits, count: int, seed: int) -> None:
        generator, tokenizer = np.random.Generator(np.random.PCG64(seed)), ctc_tokenizer()
        sequences = [digits.training_sequence(generator) for _ in range(count)]
        self.features: Tensor = torch.cat([EXTRACTOR([samples])["input_features"] for samples, _ in sequences])
        ids = [torch.tensor(tokenizer(text).input_ids) for _, text in sequences]
        self.labels = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=IGNORED_LABEL)

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, indices: np.ndarray) -> dict[str, Tensor]:
        return {"input_features": self.features[indices], "labels": self.labels[indices]}


def train(folder: Path, steps: int, seed: int, device: str) -> Path:
    """Train a network with the trainer of the package, and save it as a model folder."""
    digits = Digits.load(test=False)
    data, held_out = Spectrograms(digits, min(6_000, steps * BATCH_SIZE), seed), Spectrograms(digits, 64, seed + 1_000)
    torch.manual_seed(seed)
    network = QuartzNetForCTC(QuartzNetConfig())
    config = TrainConfig(
        model="quartznet", batch_size=BATCH_SIZE, steps=steps, seed=seed, gradients="none", max_grad_norm=1.0,
        optimizer=OptimizerConfig(lr=3e-3, weight_decay=1e-3), schedule=ScheduleConfig(warmup_steps=steps // 10),
        evaluate=EvaluateConfig(every=250), checkpoint=CheckpointConfig(every=None), device=device,
    )  # fmt: skip
    task = TrainingTask(network, data, held_out, is_classifier=False, saves_model=False)
    where = torch.device(device)
    with tempfile.TemporaryDirectory() as temporary, process_group(where):
        Trainer(config, Path(temporary) / "run", where, resume=False, resplit=False, task=task).train()
    network.eval().cpu().save_pretrained(folder)
    ctc_tokenizer().save_pretrained(folder)
    save_feature_extractor(EXTRACTOR, folder)
    return folder


def write_test(folder: Path, rounds: int = 3) -> Path:
    """Write the test sequences as FLAC files with a table of their transcripts."""
    import soundfile

    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for number, (samples, text) in enumerate(Digits.load(test=True).test_sequences(rounds)):
        soundfile.write(folder / f"{number:03d}.flac", samples, RATE, subtype="PCM_16")
        rows.append({"file": f"{number:03d}.flac", "text": text})
    table = folder / "test.jsonl"
    table.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return table


def test_data(folder: Path) -> SpeechData:
    data = load_data(write_test(folder))
    assert isinstance(data, SpeechData)
    return data


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=2_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    options: Any = parser.parse_args()
    start = time.monotonic()
    model = train(options.out / "model", options.steps, options.seed, options.device)
    seconds = time.monotonic() - start
    quality = evaluate(load(model), test_data(options.out / "test"), batch_size=32)
    print({"seconds": round(seconds), "wer": quality.value, **quality.settings})


if __name__ == "__main__":
    main()
