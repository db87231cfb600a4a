"""Per-layer gradient reduction in a real pipeline: two stages, two replicas each, PyTorch's schedules."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as distributed
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.functional import cross_entropy

from smelt.train.gradients.checkpoint import load, save
from smelt.train.gradients.comm import group_timeout
from smelt.train.gradients.compressor import Compressor
from smelt.train.gradients.compressors import ExDyna, MiCRO, TopK
from smelt.train.gradients.layers import find_layers
from smelt.train.gradients.pipeline.stage import StageCompression, compress_stage
from smelt.train.gradients.settings import CompressionSettings
from tests.train.parallel import GROUP_TIMEOUT, outcomes, run
from tests.train.synthetic import rank

PARTS = 4  # micro-batches
SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


class Block(nn.Module):
    def __init__(self, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(12, inner), nn.Linear(inner, 12)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def stages() -> list[nn.Sequential]:
    torch.manual_seed(0)
    return [nn.Sequential(*(Block(20 + 4 * (2 * stage + part)) for part in range(3))) for stage in range(2)]


def make_batch(number: int, replica: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * number + replica)
    return torch.randn(16, 12, generator=generator), torch.randint(12, (16,), generator=generator)


class Worker:
    """One of four ranks: a stage of a replica, with its schedule and its compression."""

    def __init__(self, compressor: Compressor, schedule: str = "1f1b", **options: Any) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "stages"))
        self.replica, self.place = divmod(rank(), 2)
        self.module = stages()[self.place]
        self.module[0].up.bias.data += self.replica  # replicas start unequal
        group = mesh["replicas"].get_group()
        options = {"settings": CompressionSettings(check_conservation=True), "microbatches": PARTS, **options}
        self.compression: StageCompression = compress_stage(self.module, compressor, group, **options)
        stage = PipelineStage(self.module, self.place, 2, torch.device("cpu"), group=mesh["stages"].get_group())
        self.schedule = SCHEDULES[schedule](stage, PARTS, loss_fn=cross_entropy)
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.2)

    def steps(self, numbers: range) -> Any:
        """Train for these steps and return the stage's parameters."""
        for number in numbers:
            inputs, labels = make_batch(number, self.replica)
            self.optimizer.zero_grad()
            self.schedule.step(*([inputs] if self.place == 0 else []), target=labels if self.place else None)
            self.compression.finish()
            self.optimizer.step()
        return flat(self.module)


def flat(module: nn.Module) -> Any:
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()]).numpy()


def pipelined(compressor: Compressor, schedule: str, steps: int, options: dict[str, Any]) -> tuple[Any, list[int]]:
    worker = Worker(compressor, schedule, **options)
    result = worker.steps(range(steps))
    return result, [reducer.iteration for reducer in worker.compression.reducers]


def alone(steps: int) -> list[Any]:
    """Train the full model in one process on both replicas' batches; return each stage's parameters."""
    parts = stages()
    model = nn.Sequential(*parts)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for number in range(steps):
        optimizer.zero_grad()
        for replica in range(2):
            inputs, labels = make_batch(number, replica)
            (cross_entropy(model(inputs), labels) / 2).backward()
        optimizer.step()
    return [flat(part) for part in parts]


@pytest.mark.parametrize(
    ("schedule", "options"),
    [("gpipe", {}), ("1f1b", {}), ("1f1b", {"densities": [1.0, 1.0], "stage": 0, "dense_parameters": ["1.up.weight"]})],
)
def test_density_one_is_the_plain_mean(schedule: str, options: dict[str, Any]) -> None:
    expected = alone(4)
    for position, (parameters, reductions) in enumerate(run(4, pipelined, TopK(density=1.0), schedule, 4, options)):
        assert abs(parameters - expected[position % 2]).max() < 1e-6
        assert reductions == [4] * (3 + len(options.get("dense_parameters", ())))  # per step, not per micro-batch


def beside_the_pipeline(compressor: Compressor, steps: int) -> tuple[Any, Any]:
    """Train with the same densities and layers on two ranks with the full model and no pipeline."""
    parts = stages()
    model = nn.Sequential(*parts[0], *parts[1])
    group = distributed.group.WORLD
    compression = compress_stage(model, compressor, group, microbatches=PARTS, scale_grads=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for number in range(steps):
        inputs, labels = make_batch(number, rank())
        optimizer.zero_grad()
        for some, targets in zip(inputs.chunk(PARTS), labels.chunk(PARTS), strict=True):
            (cross_entropy(model(some), targets) / PARTS).backward()
        compression.finish()
        optimizer.step()
    return flat(parts[0]), flat(parts[1])


def test_sparse_stages_learn_like_data_parallel() -> None:
    """The reducer's debug check fails a rank that loses gradients; replicas agree bit for bit."""
    compressor = MiCRO(density=0.1)
    results = [parameters for parameters, _ in run(4, pipelined, compressor, "1f1b", 6, {})]
    assert (results[0] == results[2]).all() and (results[1] == results[3]).all()
    expected = run(2, beside_the_pipeline, compressor, 6)[0]
    assert abs(results[0] - expected[0]).max() < 1e-5 and abs(results[1] - expected[1]).max() < 1e-5


def conserved() -> list[float]:
    """Per layer, compare the gradients of a copy without hooks with applied updates plus residuals."""
    module, twin = stages()[0], stages()[0]
    compression = compress_stage(module, MiCRO(density=0.05), distributed.group.WORLD, microbatches=PARTS)
    total = applied = torch.zeros(sum(parameter.numel() for parameter in twin.parameters()))
    for number in range(5):
        module.zero_grad()
        for some in make_batch(number, rank())[0].chunk(PARTS):
            module(some).square().sum().backward()
        compression.finish()
        applied = applied + 2 * torch.cat([parameter.grad.flatten() for parameter in module.parameters()])
        twin.zero_grad()
        twin(make_batch(number, rank())[0]).square().sum().div(PARTS).backward()
        total = total + torch.cat([parameter.grad.flatten() for parameter in twin.parameters()])
    left = {
        entry.name: view
        for vector in compression.buckets
        for entry, view in vector.layout.views(vector.reducer.residual)
    }
    both = torch.stack([total, torch.cat([left[name] for name, _ in module.named_parameters()])])
    distributed.all_reduce(both)
    assert 0 < applied.count_nonzero() < 0.5 * applied.numel()
    return float((both[0] - both[1] - applied).abs().max() / both[0].abs().max())


def test_no_gradient_is_lost() -> None:
    assert max(run(2, conserved)) < 1e-5


def overlapping() -> list[str]:
    """Backward of the first layer waits until the last layer has been reduced."""
    worker = Worker(TopK(density=0.1))
    events: list[str] = []
    reduced = threading.Event()
    last, first = worker.compression.buckets[0], worker.module[0]
    plain = last.reduce

    def noted(*arguments: Any, **options: Any) -> None:
        plain(*arguments, **options)
        events.append("the last layer is reduced")
        reduced.set()

    last.reduce = noted  # type: ignore[method-assign]

    def held(*_: Any) -> None:
        if all(worker.compression._num_backwards[name] == PARTS for name in last.names):  # the last micro-batch
            assert reduced.wait(20), "no reduction began before backward had ended"
            events.append("the first layer goes backward")

    first.register_full_backward_pre_hook(held)
    worker.steps(range(1))
    return events


def test_late_layers_are_reduced_during_backward_of_early_ones() -> None:
    for events in run(4, overlapping):
        assert events == ["the last layer is reduced", "the first layer goes backward"]


def save_and_resume(folder: Path) -> bool:
    worker = Worker(ExDyna(density=0.1))
    worker.steps(range(3))
    place = folder / f"stage-{worker.place}"
    save(worker.compression, place)
    kept = {name: value.clone() for name, value in worker.module.state_dict().items()}
    expected = worker.steps(range(3, 5))
    repeated = Worker(ExDyna(density=0.1))
    repeated.module.load_state_dict(kept)
    load(repeated.compression, place)
    return bool((repeated.steps(range(3, 5)) == expected).all())


def test_a_resumed_stage_is_bit_identical(tmp_path: Path) -> None:
    assert run(4, save_and_resume, tmp_path) == [True] * 4


def spoiled() -> None:
    module = stages()[0]
    compression = compress_stage(module, MiCRO(density=0.1), distributed.group.WORLD, microbatches=1)
    (module(make_batch(0, 0)[0]).sum() * (torch.inf if rank() else 1.0)).backward()
    compression.finish()


def miscounted() -> None:
    module = stages()[0]
    compression = compress_stage(module, MiCRO(), distributed.group.WORLD, microbatches=3)
    for _ in range(2):
        module(make_batch(0, 0)[0]).sum().backward()
    compression.finish()


def unknown() -> None:
    compress_stage(stages()[0], MiCRO(), distributed.group.WORLD, microbatches=1, dense_parameters=["nothing"])


def without_a_density() -> None:
    compress_stage(stages()[0], "efsign", distributed.group.WORLD, microbatches=1, densities=[0.5])


@pytest.mark.parametrize(
    ("work", "sentence"),
    [
        (spoiled, "DataError: the gradients of step 0 are not finite on at least one rank"),
        (miscounted, "ConfigError: 2 backward passes ran in a step of 3 micro-batches"),
        (unknown, "ConfigError: the stage has no trainable parameter 'nothing'"),
        (without_a_density, "ConfigError: efsign has no density"),
    ],
)
def test_errors_are_one_sentence_on_every_replica(work: Any, sentence: str) -> None:
    for _, error in outcomes(2, work):
        assert error.startswith(sentence)


def waits() -> list[float]:
    module = stages()[0]
    compression = compress_stage(module, MiCRO(), distributed.group.WORLD, microbatches=1)
    return [group_timeout(group).total_seconds() for group in (None, compression.reducers[0].comm.group)]


def test_its_process_group_uses_the_timeout_of_the_run() -> None:
    assert run(2, waits) == [[GROUP_TIMEOUT.total_seconds()] * 2] * 2


def test_layers_are_the_blocks_and_the_modules_around_them() -> None:
    model = nn.ModuleDict({"inner": nn.Module(), "head": nn.Linear(2, 2)})
    model["inner"].embed = nn.Embedding(3, 2)
    model["inner"].turn = nn.Tanh()
    model["inner"].blocks = nn.ModuleList(Block(3) for _ in range(2))
    assert list(find_layers(model)) == ["inner.embed", "inner.blocks.0", "inner.blocks.1", "head"]
    assert list(find_layers(Block(2))) == ["up", "down"]
    assert not find_layers(nn.Linear(2, 2))
