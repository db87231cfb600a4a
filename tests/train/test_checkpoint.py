"""Resuming is bit-identical; with another world size no pending residual is lost."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as distributed
from safetensors.torch import load_file, save_file
from torch import nn

from smelt.train.gradients.checkpoint import load, save
from smelt.train.gradients.comm import Comm
from smelt.train.gradients.compression import BucketedCompression
from smelt.train.gradients.compressor import Compressor
from smelt.train.gradients.compressors import DGC, SAGE, ExDyna, MiCRO, PowerSGD, TopK
from smelt.train.gradients.ddp import compress_gradients
from smelt.train.gradients.settings import CompressionSettings
from tests.train.parallel import outcomes, run
from tests.train.synthetic import every_compressor, make_gradient, make_layout, rank
from tests.train.test_ddp import make_data, many_buckets

LAYOUT = make_layout()
PARAMETERS = [(piece.name, torch.zeros(piece.shape)) for piece in LAYOUT.slices]


def make_compression(
    compressor: Compressor, settings: CompressionSettings | None = None, bucket_cap_mb: float | None = None
) -> BucketedCompression:
    return BucketedCompression(PARAMETERS, compressor, Comm(), settings, bucket_cap_mb=bucket_cap_mb)


def advance(compression: BucketedCompression, numbers: range) -> torch.Tensor:
    """Return the [elements] update of the last step."""
    for number in numbers:
        for entry, view in LAYOUT.views(make_gradient(LAYOUT, number, rank())):
            compression.add(entry.name, view.view(entry.shape))
        taken = torch.empty(LAYOUT.numel)
        for entry, view in LAYOUT.views(taken):
            compression.write_back(entry.name, view)
    return taken


def all_tensors(compression: BucketedCompression) -> dict[str, Any]:
    return {
        f"{position}.{key}": value.clone().numpy()
        for position, reducer in enumerate(compression.reducers)
        for key, value in reducer.tensors().items()
    }


def save_and_resume(compressors: list[Compressor], folder: Path) -> list[tuple[str, bool]]:
    results = []
    for compressor in compressors:
        uninterrupted = make_compression(compressor, bucket_cap_mb=0.01)
        expected = advance(uninterrupted, range(8))
        first = make_compression(compressor, bucket_cap_mb=0.01)
        advance(first, range(5))
        save(first, folder / compressor.name)
        second = make_compression(compressor, bucket_cap_mb=0.01)
        load(second, folder / compressor.name)
        same = torch.equal(advance(second, range(5, 8)), expected)
        actual, theirs = all_tensors(second), all_tensors(uninterrupted)
        same &= actual.keys() == theirs.keys() and all((actual[key] == theirs[key]).all() for key in theirs)
        results.append((compressor.name, same and second.num_steps == 8))
    return results


def test_every_compressor_resumes_bit_identically(tmp_path: Path) -> None:
    for worker in run(2, save_and_resume, every_compressor(0.02), tmp_path):
        assert len(worker) == 15
        assert all(same for _, same in worker), worker
    assert sorted(path.name for path in (tmp_path / "exdyna").iterdir()) == [
        "gradients-00000.safetensors",
        "gradients-00001.safetensors",
        "gradients.json",
    ]


def train(folder: Path, numbers: range, keep: bool) -> dict[str, Any]:
    """Train a real model under DDP, from and to a checkpoint folder."""
    model = many_buckets()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    compression = compress_gradients(model, ExDyna(density=0.05, sampled_steps=3), bucket_cap_mb=0.008)
    if numbers.start:
        model.module.load_state_dict(load_file(folder / "model.safetensors"))
        load(compression, folder / "state")
    for number in numbers:
        inputs, labels = make_data(number, rank())
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    if keep:
        save(compression, folder / "state")
        if rank() == 0:
            save_file(model.module.state_dict(), folder / "model.safetensors")
    parameters = {name: value.numpy() for name, value in model.module.state_dict().items()}
    return parameters | all_tensors(compression)


def test_ddp_training_resumes_bit_identically_in_new_processes(tmp_path: Path) -> None:
    """New processes start with first-iteration buckets; the state must not depend on them."""
    uninterrupted = run(2, train, tmp_path, range(9), False)
    run(2, train, tmp_path, range(5), True)
    for expected, result in zip(uninterrupted, run(2, train, tmp_path, range(5, 9), False), strict=True):
        assert expected.keys() == result.keys()
        assert all((expected[key] == result[key]).all() for key in expected)


def resume_old_format(folder: Path) -> bool:
    """Save, rewrite the metadata as version 0.1 wrote it, and resume."""
    first = make_compression(DGC(density=0.05, steps_per_epoch=3))
    advance(first, range(4))
    save(first, folder)
    distributed.barrier()
    if rank() == 0:
        path = folder / "gradients.json"
        metadata = json.loads(path.read_text())
        compressor = {"name": "dgc", "density": 0.05, "agreement": "own", "momentum": 0.9, "nesterov": False}
        compressor |= {"masking": True, "clip": None, "warm_up": 4, "epoch": 3, "seed": 0}
        settings = {"form": "code", "beta": 1.0, "values": "float32", "slots": None, "node": None, "check": False}
        old = {"format": 1, "workers": 2, "shards": 1, "steps": 4, "compressor": compressor, "settings": settings}
        path.write_text(json.dumps({**old, "vectors": metadata["buckets"]}))
    distributed.barrier()
    second = make_compression(DGC(density=0.05, steps_per_epoch=3))
    load(second, folder)
    return torch.equal(advance(second, range(4, 6)), advance(first, range(4, 6)))


def test_a_checkpoint_of_version_0_1_resumes(tmp_path: Path) -> None:
    assert run(2, resume_old_format, tmp_path / "state") == [True, True]


def leave(compressor: Compressor, folder: Path) -> Any:
    compression = make_compression(compressor, CompressionSettings(check_conservation=True))
    advance(compression, range(6))
    save(compression, folder)
    return compression.reducers[0].residual.numpy()


def take_over(compressor: Compressor, folder: Path) -> tuple[Any, Any, int]:
    compression = make_compression(compressor, CompressionSettings(check_conservation=True))
    load(compression, folder, resplit=True)
    before = compression.reducers[0].residual.clone().numpy()
    small = {key: value.tolist() for key, value in compression.reducers[0].state.items() if value.numel() < 10}
    advance(compression, range(6, 9))  # the debug mode counts the loaded residuals
    return before, small, compression.reducers[0].iteration


@pytest.mark.parametrize(
    ("compressor", "before", "after"),
    [
        (ExDyna(density=0.05), 3, 2),
        (ExDyna(density=0.05), 2, 3),
        (DGC(density=0.05), 3, 2),
        (SAGE(density=0.05), 2, 3),
        (PowerSGD(warmup_steps=2), 3, 2),
    ],
)
def test_another_world_size_keeps_the_mean_residual(
    tmp_path: Path, compressor: Compressor, before: int, after: int
) -> None:
    old = run(before, leave, compressor, tmp_path / "state")
    new = run(after, take_over, compressor, tmp_path / "state")
    pending = sum(each.astype("float64") for each in old) / before
    assert abs(sum(residual for residual, _, _ in new) / after - pending).max() < 1e-7
    assert pending.any()
    assert all(number == 9 for _, _, number in new)
    if compressor.name == "exdyna":
        assert [len(small["partition"]) for _, small, _ in new] == [after] * after
        assert new[0][1]["threshold"] == new[1][1]["threshold"]


def go_on(compressor: Compressor, folder: Path, bucket_cap_mb: float | None = None) -> None:
    load(make_compression(compressor, bucket_cap_mb=bucket_cap_mb), folder)


def keep(compressor: Compressor, folder: Path) -> None:
    compression = make_compression(compressor)
    advance(compression, range(2))
    save(compression, folder)


@pytest.mark.parametrize(
    ("spoil", "workers", "arguments", "sentence"),
    [
        ("", 3, (MiCRO(density=0.05),), "was written by 2 ranks and there are 3; start as many"),
        ("", 2, (MiCRO(density=0.06),), "was written with another compressor"),
        ("", 2, (MiCRO(density=0.05), 0.01), "was written with another model"),
        ("gradients.json", 2, (MiCRO(density=0.05),), "gradients.json cannot be read"),
        ("gradients-00001.safetensors", 2, (MiCRO(density=0.05),), "gradients-00001.safetensors cannot be read"),
    ],
)
def test_an_incompatible_checkpoint_raises_one_sentence_on_every_rank(
    tmp_path: Path, spoil: str, workers: int, arguments: tuple[Any, ...], sentence: str
) -> None:
    run(2, keep, MiCRO(density=0.05), tmp_path / "state")
    if spoil:
        (tmp_path / "state" / spoil).write_bytes(b"{")
    compressor, *rest = arguments
    errors = [error for _, error in outcomes(workers, go_on, compressor, tmp_path / "state", *rest)]
    assert all(error.startswith(("ConfigError", "DataError", "ResourceError")) for error in errors)
    assert any(sentence in error for error in errors)
    if not spoil:
        assert all(sentence in error for error in errors)


def test_a_checkpoint_is_never_overwritten(tmp_path: Path) -> None:
    run(2, keep, TopK(density=0.05), tmp_path / "state")
    for _, error in outcomes(2, keep, TopK(density=0.05), tmp_path / "state"):
        assert "exists already; give every checkpoint its own name" in error
    assert [path.name for path in tmp_path.iterdir()] == ["state"]


def lose_the_disk(folder: Path) -> None:
    compression = make_compression(TopK(density=0.05))
    if rank() == 1:
        shutil.rmtree(folder, ignore_errors=True)
        folder.write_text("a file where a folder should be")
    distributed.barrier()
    save(compression, folder / "state")


def test_an_unwritable_folder_raises_on_every_rank(tmp_path: Path) -> None:
    for _, error in outcomes(2, lose_the_disk, tmp_path / "place"):
        assert error.startswith("ResourceError")
