"""HSDP: dense inside a replica, compressed between replicas; density 1 equals training on the full batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

from smelt.train.gradients.autotune.auto import Auto
from smelt.train.gradients.checkpoint import load, save
from smelt.train.gradients.compressor import Compressor
from smelt.train.gradients.compressors import ExDyna, TopK
from smelt.train.gradients.hsdp import AutoHSDPCompression, HSDPCompression, compress_hsdp
from smelt.train.gradients.settings import CompressionSettings
from tests.train.parallel import outcomes, run
from tests.train.simulated_link import BANDWIDTH, simulate_link
from tests.train.synthetic import rank
from tests.train.test_ddp import Net, make_data


def build(compressor: Compressor, seed: int = 0) -> tuple[Net, HSDPCompression | AutoHSDPCompression]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    model = Net()
    with torch.no_grad():
        model.first.bias += seed  # replicas start unequal
    for layer in (model.left, model.right):
        fully_shard(layer, mesh=mesh["shards"])
    fully_shard(model, mesh=mesh["shards"])
    return model, compress_hsdp(
        model, compressor, mesh["replicas"].get_group(), CompressionSettings(check_conservation=True)
    )


def steps(model: Net, numbers: range) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for number in numbers:
        inputs, labels = make_data(number, rank())
        cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([parameter.detach().full_tensor().flatten() for parameter in model.parameters()]).numpy()


def sharded(compressor: Compressor, number: int) -> tuple[Any, int]:
    model, replicas = build(compressor, seed=rank() // 2)
    return steps(model, range(number)), replicas.traffic.bytes


def plain(number: int) -> Any:
    """Train one rank on the batches of all four."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for step in range(number):
        optimizer.zero_grad()
        for worker in range(4):
            inputs, labels = make_data(step, worker)
            (cross_entropy(model(inputs), labels) / 4).backward()
        optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).numpy()


def test_density_one_trains_like_one_rank_with_all_batches() -> None:
    results = run(4, sharded, TopK(density=1.0), 4)
    assert abs(results[0][0] - plain(4)).max() < 1e-6
    assert all((parameters == results[0][0]).all() for parameters, _ in results)


def save_and_resume(folder: Path) -> bool:
    compressor = ExDyna(density=0.05)
    model, replicas = build(compressor)
    steps(model, range(3))
    save(replicas, folder / "state")
    kept = {name: value.to_local().clone() for name, value in model.state_dict().items()}
    expected = steps(model, range(3, 6))
    second, repeated = build(compressor)
    for name, value in second.state_dict().items():
        value.to_local().copy_(kept[name])
    load(repeated, folder / "state")
    return bool((steps(second, range(3, 6)) == expected).all()) and replicas.num_steps == repeated.num_steps == 6


def test_replicas_stay_equal_and_resume_bit_identically(tmp_path: Path) -> None:
    assert run(4, save_and_resume, tmp_path) == [True] * 4
    assert len(list((tmp_path / "state").glob("*.safetensors"))) == 4


def chosen_by_auto() -> tuple[list[str], Any, list[list[int]]]:
    """Return auto's choices for a large unit, a small one and the rest, and the bytes of each before and after.

    Only the second shard has a slow link; the first one, by itself, would send everything.
    """
    simulate_link(bandwidth=BANDWIDTH if rank() % 2 else 1000 * BANDWIDTH)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    model = torch.nn.Sequential(torch.nn.Linear(6, 900), torch.nn.Linear(900, 900), torch.nn.Linear(900, 3))
    for layer in (model[1], model[2]):
        fully_shard(layer, mesh=mesh["shards"])
    fully_shard(model, mesh=mesh["shards"])
    auto = Auto(density=0.01, methods=("micro",))
    replicas = compress_hsdp(model, auto, mesh["replicas"].get_group(), CompressionSettings(check_conservation=True))
    assert isinstance(replicas, AutoHSDPCompression)
    optimizer, sent = torch.optim.SGD(model.parameters(), lr=0.01), []
    for number in range(auto.steps + 4):
        inputs = torch.randn(8, 6, generator=torch.Generator().manual_seed(10 * number + rank()))
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        sent.append([reducer.traffic.bytes for reducer in replicas.reducers])
    assert replicas.decision is not None and replicas.num_steps == auto.steps + 4
    weights = torch.cat([parameter.detach().full_tensor().flatten() for parameter in model.parameters()]).numpy()
    names = [layout.slices[0].name for layout in replicas.layouts]
    order = [names.index(name) for name in ("1", "2", "root")]
    choices = replicas.decision.to_json()["choices"]
    return [choices[unit] for unit in order], weights, [[sent[step][unit] for step in (0, -1)] for unit in order]


def test_auto_chooses_a_method_for_each_unit_and_all_shards_agree() -> None:
    results = run(4, chosen_by_auto)
    for choices, weights, ((before, after), *others) in results:
        assert choices == ["micro", "dense", "dense"]  # only the large matrix gains
        assert after < 0.2 * before
        assert all(before == after for before, after in others)
        assert (weights == results[0][1]).all()


def unsharded() -> None:
    compress_hsdp(Net(), TopK(), distributed.group.WORLD)


def with_two_dimensions() -> None:
    model = fully_shard(Net(), mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicas", "shards")))
    compress_hsdp(model, TopK(), distributed.group.WORLD)


def test_invalid_sharding_raises_one_sentence() -> None:
    for work, sentence in ((unsharded, "fully_shard was applied to"), (with_two_dimensions, "a mesh of one dimension")):
        for _, error in outcomes(2, work):
            assert error.startswith("ConfigError")
            assert sentence in error
