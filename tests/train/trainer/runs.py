"""Small training runs for tests: a config, its data, and ranks that run the trainer."""

from __future__ import annotations

import gzip
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as distributed
import yaml

from smelt.config import parse
from smelt.train.trainer.config import TrainConfig
from smelt.train.trainer.entrypoint import main
from smelt.train.trainer.run_folder import RunFolder
from smelt.train.trainer.trainer import Trainer
from tests.train import parallel

parallel._CONTEXT.set_forkserver_preload(["tests.train.parallel", "tests.train.preload", "tests.train.trainer.preload"])

TEXT = "".join(f"{number} times {number % 7} is {number * (number % 7)}.\n" for number in range(400))
LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "attention_dropout": 0.1,  # so that a resumed run must restore the RNG state
}
RESNET = {
    "model_type": "resnet",
    "embedding_size": 8,
    "hidden_sizes": [8, 12],
    "depths": [1, 1],
    "layer_type": "basic",
}


def language(folder: Path, **changes: Any) -> dict[str, Any]:
    """Return the config keys of a run on text, and write the text."""
    (folder / "text.txt").write_text(TEXT)
    return {
        "model": LLAMA,
        "data": {"train": str(folder / "text.txt"), "seq_len": 32},
        "batch_size": 4,
        "steps": 6,
        "optimizer": {"lr": 5e-3},
        "gradients": "exdyna:density=0.05,sampled_steps=2",
        "evaluate": {"every": 3, "samples": 16},
        "checkpoint": {"every": 3},
        "device": "cpu",
        **changes,
    }


def images(folder: Path, **changes: Any) -> dict[str, Any]:
    """Return the config keys of a run that classifies squares by position, in IDX files."""
    generator = np.random.Generator(np.random.PCG64(0))
    for stem, count in (("train", 256), ("t10k", 64)):
        labels = generator.integers(0, 2, count).astype(np.uint8)
        pixels = generator.integers(0, 60, (count, 16, 16)).astype(np.uint8)
        for image, label in zip(pixels, labels, strict=True):
            image[8 * label : 8 * label + 8, 4:12] += 150
        write_idx(folder / f"{stem}-images-idx3-ubyte.gz", pixels)
        write_idx(folder / f"{stem}-labels-idx1-ubyte", labels)
    return {
        "task": "images",
        "model": RESNET,
        "data": {"train": str(folder)},
        "batch_size": 16,
        "steps": 20,
        "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9},
        "gradients": "none",
        "device": "cpu",
        **changes,
    }


def write_idx(path: Path, values: np.ndarray) -> None:
    head = struct.pack(f">HBB{values.ndim}I", 0, 8, values.ndim, *values.shape)
    content = head + values.tobytes()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def parse_config(content: dict[str, Any]) -> TrainConfig:
    return parse(TrainConfig, content, "the configuration")


def write_config(path: Path, content: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(content))
    return path


def train_rank(content: dict[str, Any], out: Path, resume: bool = False, resplit: bool = False) -> None:
    """Run one rank; all ranks share the GPU if there is one."""
    device = torch.device("cuda", 0) if content["device"] == "cuda" else torch.device("cpu")
    Trainer(parse_config(content), out, device, resume=resume, resplit=resplit).train()


def run_training(workers: int, content: dict[str, Any], out: Path, **options: bool) -> list[dict[str, Any]]:
    """Return the log lines of a completed run."""
    parallel.run(workers, _train_rank, content, out, options)
    return RunFolder(out).read_log()


def run_refused(workers: int, content: dict[str, Any], out: Path, **options: bool) -> list[str]:
    """Return the error of each rank."""
    return [error.partition("\n")[0] for _, error in parallel.outcomes(workers, _train_rank, content, out, options)]


def _train_rank(content: dict[str, Any], out: Path, options: dict[str, bool]) -> None:
    train_rank(content, out, **options)


def run_command(
    workers: int, words: list[str], folder: Path, command: Callable[[list[str]], None] = main
) -> list[tuple[int, str]]:
    """Return the exit code and stderr of each rank of a command, started in `folder` as torchrun starts it."""
    store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # outlives every rank
    outputs = [folder / f"said-{rank}.txt" for rank in range(workers)]
    environments = [
        {} if workers == 1 else {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": workers, "MASTER_PORT": store.port}
        for rank in range(workers)
    ]
    processes = [
        parallel._CONTEXT.Process(target=_command, args=(command, words, environment, output, folder), daemon=True)
        for environment, output in zip(environments, outputs, strict=True)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(parallel._PATIENCE)
    codes = [process.exitcode for process in processes]
    assert None not in codes, "a rank did not end"
    return [(code or 0, output.read_text()) for code, output in zip(codes, outputs, strict=True)]


def _command(
    command: Callable[[list[str]], None], words: list[str], environment: dict[str, int], output: Path, folder: Path
) -> None:
    os.environ.update({key: str(value) for key, value in environment.items()}, MASTER_ADDR="127.0.0.1")
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # the store of the process that started the ranks
    os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    os.chdir(folder)
    torch.set_num_threads(1)
    command(words)
