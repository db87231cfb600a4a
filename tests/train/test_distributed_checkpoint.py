"""Compression state in torch.distributed.checkpoint: resuming is bit-identical, without pickle."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as checkpoint
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.stateful import Stateful

from smelt.errors import ConfigError
from smelt.train.gradients.autotune.auto import Auto, AutoCompression
from smelt.train.gradients.checkpoint import CompressionState
from smelt.train.gradients.comm import Comm
from smelt.train.gradients.compression import BucketedCompression
from smelt.train.gradients.compressor import Compressor
from smelt.train.gradients.compressors import ExDyna, PowerSGD
from smelt.train.gradients.settings import CompressionSettings
from tests.train.parallel import outcomes, run
from tests.train.synthetic import every_compressor
from tests.train.test_checkpoint import PARAMETERS, advance, all_tensors, make_compression


def save(compression: BucketedCompression, model: dict[str, torch.Tensor], folder: Path) -> None:
    state = {"model": model, "gradients": CompressionState(compression)}
    checkpoint.save(state, storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True))


def load(compression: BucketedCompression, model: dict[str, torch.Tensor], folder: Path) -> None:
    state = {"model": model, "gradients": CompressionState(compression)}
    checkpoint.load(state, storage_reader=HuggingFaceStorageReader(str(folder)))


def save_and_resume(
    compressors: list[Compressor], folder: Path, settings: CompressionSettings | None = None
) -> list[tuple[str, bool]]:
    results = []
    for compressor in compressors:
        uninterrupted = make_compression(compressor, settings, bucket_cap_mb=0.01)
        expected = advance(uninterrupted, range(8))
        first, model = make_compression(compressor, settings, bucket_cap_mb=0.01), {"weight": torch.arange(12.0)}
        advance(first, range(5))
        save(first, model, folder / compressor.name)
        second, other = make_compression(compressor, settings, bucket_cap_mb=0.01), {"weight": torch.zeros(12)}
        load(second, other, folder / compressor.name)
        same = torch.equal(advance(second, range(5, 8)), expected) and torch.equal(other["weight"], model["weight"])
        actual, theirs = all_tensors(second), all_tensors(uninterrupted)
        same &= actual.keys() == theirs.keys() and all((actual[key] == theirs[key]).all() for key in theirs)
        results.append((compressor.name, same and second.num_steps == 8))
    return results


def test_every_compressor_resumes_bit_identically(tmp_path: Path) -> None:
    compressors = [compressor for compressor in every_compressor(0.02) if not isinstance(compressor, PowerSGD)]
    for worker in run(2, save_and_resume, compressors, tmp_path):
        assert len(worker) == 14
        assert all(same for _, same in worker), worker
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) == 28 and all(path.suffix == ".safetensors" for path in files)


def test_deferred_counts_are_kept(tmp_path: Path) -> None:
    results = run(
        2, save_and_resume, [ExDyna(density=0.02, sampled_steps=0)], tmp_path, CompressionSettings(fixed_capacity=2.0)
    )
    assert results == [[("exdyna", True)]] * 2


def before_the_first_step(folder: Path) -> bool:
    compression = make_compression(ExDyna(density=0.02))
    save(compression, {}, folder)
    repeated = make_compression(ExDyna(density=0.02))
    load(repeated, {}, folder)
    return torch.equal(advance(repeated, range(3)), advance(compression, range(3)))


def test_a_checkpoint_from_before_the_first_step(tmp_path: Path) -> None:
    assert run(2, before_the_first_step, tmp_path / "early") == [True, True]


def test_a_checkpoint_of_version_0_1_is_recognized() -> None:
    """Its identity was a hash over the old names of parameters and settings."""
    compression = make_compression(ExDyna(density=0.02))
    compressor = {"name": "exdyna", "density": 0.02, "sampled": 200, "seed": 0, "blocks": 1024, "balance": True}
    settings = {"form": "code", "beta": 1.0, "values": "float32", "slots": None, "node": None, "check": False}
    vectors = [[[part.name, list(part.shape)] for part in layout.slices] for layout in compression.layouts]
    identity = {"compressor": compressor, "settings": settings, "vectors": vectors}
    text = json.dumps([[1, 1], identity], sort_keys=True)
    state = CompressionState(compression).state_dict()
    state["worker-0.identity"] = torch.tensor(list(hashlib.sha256(text.encode()).digest()), dtype=torch.uint8)
    CompressionState(make_compression(ExDyna(density=0.02))).load_state_dict(state)
    with pytest.raises(ConfigError, match="written with another compressor"):
        CompressionState(make_compression(ExDyna(density=0.03))).load_state_dict(state)


def refuse(folder: Path) -> None:
    compression = make_compression(ExDyna(density=0.02))
    advance(compression, range(2))
    save(compression, {}, folder)
    load(make_compression(ExDyna(density=0.03)), {}, folder)


def test_another_density_is_refused_on_every_worker(tmp_path: Path) -> None:
    results = outcomes(2, refuse, tmp_path / "two")
    assert all("written with another compressor, other settings" in error for _, error in results)


def shapeless() -> None:
    for wrapper, compressor in ((BucketedCompression, PowerSGD()), (AutoCompression, Auto())):
        compression = wrapper(PARAMETERS, compressor, Comm(), CompressionSettings())
        with pytest.raises(ConfigError, match="use save and load of"):
            CompressionState(compression)


def test_a_changed_shape_is_refused() -> None:
    run(2, shapeless)


def test_pytorch_recognizes_it_as_stateful() -> None:
    assert isinstance(CompressionState(make_compression(ExDyna())), Stateful)
