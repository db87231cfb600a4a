"""Hierarchical reduction on nodes of two: nothing is lost, ranks agree bit for bit, each node acts as one rank."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as distributed
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from smelt.errors import ConfigError
from smelt.train.gradients.autotune.auto import Auto, AutoCompression
from smelt.train.gradients.checkpoint import load, save
from smelt.train.gradients.comm import Comm, group_timeout
from smelt.train.gradients.compression import BucketedCompression
from smelt.train.gradients.compressor import Compressor
from smelt.train.gradients.compressors import DGC, ExDyna, HardThreshold, MiCRO, PowerSGD, TopK
from smelt.train.gradients.ddp import compress_gradients
from smelt.train.gradients.hsdp import compress_hsdp
from smelt.train.gradients.settings import CompressionSettings
from tests.train.parallel import GROUP_TIMEOUT, outcomes, run
from tests.train.simulated_link import simulate_link
from tests.train.synthetic import every_compressor, make_gradient, make_layout, rank
from tests.train.test_ddp import Net, make_data

LAYOUT = make_layout()
PARAMETERS = [(piece.name, torch.zeros(piece.shape)) for piece in reversed(LAYOUT.slices)]  # split in this order again


def make_compression(
    compressor: Compressor, ranks_per_node: int | str | None = 2, **settings: Any
) -> BucketedCompression:
    return BucketedCompression(
        PARAMETERS, compressor, Comm(), CompressionSettings(ranks_per_node=ranks_per_node, **settings)
    )


def advance(compression: BucketedCompression, gradients: list[Tensor]) -> list[Tensor]:
    """Return the [elements] update of every step."""
    results = []
    for gradient in gradients:
        for entry, view in LAYOUT.views(gradient):
            compression.add(entry.name, view.view(entry.shape))
        results.append(torch.empty(LAYOUT.numel))
        for entry, view in LAYOUT.views(results[-1]):
            compression.write_back(entry.name, view)
    return results


def own_gradients(steps: int) -> list[Tensor]:
    return [make_gradient(LAYOUT, number, rank()) for number in range(steps)]


def pending(compression: BucketedCompression) -> Tensor:
    """Return the [elements] float64 sum of all nodes' residuals."""
    (reducer,) = compression.reducers
    size, place = reducer.layout.numel, rank() % 2
    dense = torch.zeros(2 * size, dtype=torch.float64)
    dense[place * size : (place + 1) * size] = reducer.residual
    distributed.all_reduce(dense)
    return dense[: LAYOUT.numel]


def account(cases: list[tuple[Compressor, dict[str, Any]]]) -> list[tuple[str, float, Any]]:
    """Return the name, the error of the sums over all steps, and the results."""
    values = []
    gradients = own_gradients(8)
    for compressor, settings in cases:
        compression = make_compression(compressor, check_conservation=True, **settings)
        results = advance(compression, gradients)
        given = torch.stack(gradients).double().sum(dim=0)
        distributed.all_reduce(given)
        compression.resolve_deferred()
        lost = given / 2 - 2 * torch.stack(results).double().sum(dim=0) - pending(compression)
        values.append((compressor.name, float(lost.abs().max() / given.abs().max()), torch.stack(results).numpy()))
    return values


def test_no_gradient_is_lost_and_all_ranks_agree() -> None:
    compressors = [compressor for compressor in every_compressor(0.02) if compressor.name != "dgc"] + [
        DGC(density=0.02, momentum=0.0)
    ]
    cases: list[tuple[Compressor, dict[str, Any]]] = [(compressor_type, {}) for compressor_type in compressors]
    cases += [
        (compressor_type(density=0.02), compressor)
        for compressor_type in (ExDyna, MiCRO)
        for compressor in ({"wire_dtype": "int8"}, {"fixed_capacity": 3.0})
    ]
    first, *others = run(4, account, cases)
    assert len(first) == 19
    for name, error, results in first:
        assert error < 1e-5, name
        assert results.any(), name
    for compressor in others:
        assert all((mine[2] == peer_result[2]).all() for mine, peer_result in zip(first, compressor, strict=True))


def in_nodes(compressor: Compressor) -> Any:
    return torch.stack(advance(make_compression(compressor), own_gradients(6))).numpy()


def one_a_node(compressor: Compressor) -> Any:
    """Run two ranks, each with the mean gradient of one node."""
    means = [(make_gradient(LAYOUT, n, 2 * rank()) + make_gradient(LAYOUT, n, 2 * rank() + 1)) / 2 for n in range(6)]
    return torch.stack(advance(make_compression(compressor, ranks_per_node=None), means)).numpy()


def test_between_nodes_each_node_acts_as_one_rank() -> None:
    """A fixed threshold does not depend on how the vector is split."""
    compressor = HardThreshold(density=0.02, threshold=0.02)
    (expected, _), (results, *_) = run(2, one_a_node, compressor), run(4, in_nodes, compressor)
    assert 0 < (expected != 0).mean() < 0.5
    assert (results == expected).all()


def test_density_one_is_the_plain_mean() -> None:
    result = torch.from_numpy(run(4, in_nodes, TopK(density=1.0))[0])
    expected = torch.stack([sum(make_gradient(LAYOUT, n, worker) for worker in range(4)) / 4 for n in range(6)])  # type: ignore[misc]
    assert (result - expected).abs().max() < 1e-6


def save_and_resume(compressors: list[Compressor], folder: Path) -> list[bool]:
    gradients, results = own_gradients(8), []
    for compressor in compressors:
        expected = advance(make_compression(compressor), gradients)[-1]
        first = make_compression(compressor)
        advance(first, gradients[:5])
        save(first, folder / compressor.name)
        second = make_compression(compressor)
        load(second, folder / compressor.name)
        results.append(torch.equal(advance(second, gradients[5:])[-1], expected))
    return results


def of_another_size(folder: Path) -> None:
    load(make_compression(ExDyna(density=0.02)), folder, resplit=True)


def test_a_resumed_run_is_bit_identical(tmp_path: Path) -> None:
    compressors = [ExDyna(density=0.02), DGC(density=0.02), PowerSGD(warmup_steps=3)]
    assert run(4, save_and_resume, compressors, tmp_path) == [[True] * 3] * 4
    for _, error in outcomes(6, of_another_size, tmp_path / "exdyna"):
        assert "4 ranks that hold shards of the model; start as many again" in error


def spoil(settings: dict[str, Any], value: float) -> None:
    gradients = own_gradients(3)
    if rank() == 3:
        gradients[1][5] = value  # in a parameter that lies in one share only
    advance(make_compression(MiCRO(density=0.02), **settings), gradients)


@pytest.mark.parametrize(("settings", "value"), [({}, torch.nan), ({"fixed_capacity": 2.0}, torch.inf)], ids=str)
def test_nonfinite_gradients_raise_one_sentence_on_every_rank(settings: dict[str, Any], value: float) -> None:
    for result, error in outcomes(4, spoil, settings, value):
        assert result is None
        assert error.startswith("DataError: the gradients of step 1 are not finite")


class Scaler(torch.amp.GradScaler):
    """A loss scale of 1."""

    def scale(self, outputs: Any) -> Any:
        return outputs


def skip_a_step() -> tuple[bool, bool]:
    """A step that is nonfinite on one rank is skipped on all and changes no state."""
    scaler, gradients = Scaler("cpu"), own_gradients(3)
    compression = BucketedCompression(
        PARAMETERS, MiCRO(density=0.02), Comm(), CompressionSettings(ranks_per_node=2), scaler=scaler
    )
    expected = advance(make_compression(MiCRO(density=0.02)), [gradients[0], gradients[2]])
    spoilt = gradients[1].clone()
    if rank() == 3:
        spoilt[5] = torch.inf
    first, skipped, last = advance(compression, [gradients[0], spoilt, gradients[2]])
    same = torch.equal(first, expected[0]) and torch.equal(last, expected[1])
    return bool(skipped.isinf().all()), same


def test_a_step_skipped_by_the_scaler_changes_no_state() -> None:
    assert run(4, skip_a_step) == [(True, True)] * 4


def trained(node: int | None, branches: list[str]) -> tuple[Any, int, int, int]:
    model = DistributedDataParallel(Net(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.5)
    compression = compress_gradients(
        model, MiCRO(density=0.05, sampled_steps=0), CompressionSettings(ranks_per_node=node, check_conservation=True)
    )
    for number, branch in enumerate(branches):
        inputs, labels = make_data(number, rank())
        optimizer.zero_grad()
        cross_entropy(model(inputs, branch), labels).backward()
        optimizer.step()
    parameters = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).numpy()
    traffic = compression.traffic
    return parameters, traffic.bytes, traffic.intra_node, len(compression.reducers[0].residual)


def test_under_ddp_with_unused_parameters() -> None:
    branches = ["both", "left", "left", "right", "both"]
    results = run(4, trained, 2, branches)
    parameters, _, inside, share = results[0]
    elements = len(parameters)
    assert share == -(-elements // 2)
    assert inside == 4 * share + 4 + 4 * share  # half of the sum, whether it is finite, and the other half
    assert all((result[0] == parameters).all() for result in results)
    flat = run(4, trained, None, branches)
    assert flat[0][2] == 0
    assert sum(result[1] for result in results) < 0.6 * sum(result[1] for result in flat)


def leave_out() -> tuple[bool, bool]:
    """Return whether the branch unused in step two has a residual, and whether that step left it unchanged."""
    model = DistributedDataParallel(Net(), find_unused_parameters=True)
    (reducer,) = compress_gradients(model, TopK(density=0.5), CompressionSettings(ranks_per_node=2)).reducers
    waiting = []
    for branch in ("both", "left"):
        inputs, labels = make_data(0, rank())
        model.zero_grad()
        cross_entropy(model(inputs, branch), labels).backward()
        views = [view for entry, view in reducer.layout.views(reducer.residual) if entry.name.startswith("right")]
        waiting.append(torch.cat([torch.zeros(1), *views]))
    return bool(waiting[0].any()), torch.equal(*waiting)


def test_residuals_of_unused_parameters_stay_pending() -> None:
    results = run(4, leave_out)
    assert any(some for some, _ in results)
    assert all(same for _, same in results)


def by_itself() -> tuple[Any, Any, int, int]:
    simulate_link(bandwidth=2e6, ranks_per_node=2)
    torch.manual_seed(1)
    model = DistributedDataParallel(torch.nn.Linear(500, 200))
    compression = compress_gradients(
        model, Auto(density=0.01, methods=("micro",), steps=2), CompressionSettings(ranks_per_node=2)
    )
    assert isinstance(compression, AutoCompression)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(5):
        optimizer.zero_grad()
        model(
            torch.randn(4, 500, generator=torch.Generator().manual_seed(10 * number + rank()))
        ).square().mean().backward()
        optimizer.step()
    assert compression.decision is not None
    decision = compression.decision.to_json()
    return model.module.weight.detach().numpy(), decision, compression.traffic.bytes, compression.traffic.intra_node


def test_auto_measures_between_nodes() -> None:
    results = run(4, by_itself)
    weight, decision, size, inside = results[0]
    assert decision["choices"] == ["micro"]
    assert decision["link"]["world_size"] == 2
    assert decision["uncompressed"]["bytes"] == 2 * 3 * 4 * (500 * 200 + 200) // 4  # of plain DDP between all four
    assert size < 0.1 * decision["uncompressed"]["bytes"] / 2
    assert inside == 4 * (500 * 200 + 200) + 4
    for other in results[1:]:
        assert (other[0] == weight).all()
        assert other[1]["buckets"] == decision["buckets"]


def of_shards() -> None:
    model = fully_shard(Net(), mesh=init_device_mesh("cpu", (2,)))
    compress_hsdp(model, TopK(), distributed.group.WORLD, CompressionSettings(ranks_per_node=2))


def test_sharded_models_are_already_reduced_inside_nodes() -> None:
    for _, error in outcomes(2, of_shards):
        assert "is reduced inside its nodes already; leave ranks_per_node at None" in error


def tiny() -> list[float]:
    """One element, two ranks per node: one share is only padding."""
    compression = BucketedCompression(
        [("a", torch.zeros(1))],
        TopK(density=1.0),
        Comm(),
        CompressionSettings(ranks_per_node=2, check_conservation=True),
    )
    compression.add("a", torch.tensor([float(rank())]))
    mean = torch.empty(1)
    compression.write_back("a", mean)
    return mean.tolist()


def test_a_vector_shorter_than_a_node() -> None:
    assert run(4, tiny) == [[1.5]] * 4


def refusals(cases: list[tuple[int | str, str | None]]) -> list[str]:
    """Return the error for each ranks_per_node and the value torchrun sets."""
    results = []
    for node, local_world_size in cases:
        os.environ.pop("LOCAL_WORLD_SIZE", None)
        if local_world_size is not None:
            os.environ["LOCAL_WORLD_SIZE"] = local_world_size
        try:
            make_compression(TopK(), node)
            results.append("")
        except ConfigError as error:
            results.append(str(error))
    return results


def test_invalid_nodes_raise_one_sentence() -> None:
    cases = {
        (3, None): "4 ranks cannot be split into nodes of 3",
        (4, None): "all 4 ranks are in one node",
        ("local", None): "LOCAL_WORLD_SIZE is not set",
        ("local", "4"): "all 4 ranks are in one node",
        ("local", "2"): "",
    }
    for result in run(4, refusals, list(cases)):
        for fragment, sentence in zip(cases.values(), result, strict=True):
            assert fragment in sentence
            assert bool(fragment) == bool(sentence)


@pytest.mark.parametrize("node", [1, 0, "all"])
def test_an_invalid_node_size(node: Any) -> None:
    with pytest.raises(ConfigError, match='at least 2, or "local"'):
        CompressionSettings(ranks_per_node=node)


@given(st.integers(1, 7), st.lists(st.integers(0, 3), min_size=1, max_size=3))
def test_shares_tile_the_vector(parts: int, sides: list[int]) -> None:
    layout = make_layout({"a": (3, *sides), "b": (4,), "c": (2, 5)})
    size = -(-layout.numel // parts)
    results = [layout.cut(number * size, size) for number in range(parts)]
    assert {part.numel for part in results} == {size}
    flat = [name for part in results for entry in part.slices for name in [entry.name] * entry.numel]
    expected = [name for entry in layout.slices for name in [entry.name] * entry.numel]
    assert flat == expected + [""] * (parts * size - layout.numel)
    for part in results:
        assert [entry.start for entry in part.slices] == [
            sum(p.numel for p in part.slices[:n]) for n in range(len(part.slices))
        ]


def waits() -> list[float]:
    nodes = make_compression(MiCRO()).nodes
    assert nodes is not None
    return [group_timeout(group).total_seconds() for group in (None, nodes.intra_node.group, nodes.inter_node.group)]


def test_node_groups_use_the_timeout_of_the_run() -> None:
    """PyTorch's default would wait half an hour for a frozen worker."""
    assert run(4, waits) == [[GROUP_TIMEOUT.total_seconds()] * 3] * 4
