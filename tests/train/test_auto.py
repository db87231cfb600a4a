"""`auto` in real training: compresses on a slow link, leaves DDP alone on a fast one, and reports why."""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from smelt.errors import ConfigError
from smelt.train import Auto, CompressedStep, CompressionSettings, compress_gradients
from smelt.train.gradients import checkpoint
from smelt.train.gradients.autotune.auto import AutoCompression
from smelt.train.gradients.compressor import Compressor
from tests.train.parallel import run
from tests.train.simulated_link import simulate_link
from tests.train.synthetic import rank

LOOK = Auto().steps  # before measuring


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []
        log = logging.getLogger("smelt.train")
        log.addHandler(self)
        log.setLevel(logging.INFO)

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    def of(self, level: int) -> str:
        return "\n".join(record.getMessage() for record in self.records if record.levelno == level)


def network(width: int) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(12, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 4))


def make_data(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * number + rank())
    inputs = torch.randn(16, 12, generator=generator)
    return inputs, (inputs[:, :4] + inputs[:, 4:8] * inputs[:, 8:]).argmax(dim=1)


def train(model: nn.Module, steps: range) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in steps:
        inputs, labels = make_data(number)
        cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        optimizer.zero_grad()


def flat(model: nn.Module) -> Any:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).numpy()


def on_a_slow_link(folder: str) -> dict[str, Any]:
    """Train, save, continue training; then resume from the saved state."""
    simulate_link()
    lines = Lines()
    auto = Auto(density=0.01, methods=("micro", "bf16"))
    model = DistributedDataParallel(network(400))
    compression = compress_gradients(model, auto, CompressionSettings(check_conservation=True))
    train(model, range(LOOK + 1))
    assert isinstance(compression, AutoCompression) and compression.decision is not None
    before = compression.traffic.bytes
    train(model, range(LOOK + 1, LOOK + 3))
    after, steps = compression.traffic.bytes, compression.num_steps
    checkpoint.save(compression, Path(folder) / "state")
    weights = {name: tensor.clone() for name, tensor in model.module.state_dict().items()}
    train(model, range(LOOK + 3, LOOK + 5))

    resumed = DistributedDataParallel(network(400))
    resumed.module.load_state_dict(weights)
    repeated = compress_gradients(resumed, auto, CompressionSettings(check_conservation=True))
    checkpoint.load(repeated, Path(folder) / "state")
    train(resumed, range(LOOK + 3, LOOK + 5))
    return {
        "decision": compression.decision.to_json(),
        "bytes": (before, after),
        "steps": (steps, repeated.num_steps),
        "info": lines.of(logging.INFO),
        "warnings": lines.of(logging.WARNING),
        "weights": flat(model),
        "resumed": flat(resumed),
        "measured again": repeated.decision is not None,  # type: ignore[attr-defined]
    }


def test_a_slow_link_is_compressed_and_a_resumed_run_is_bit_identical() -> None:
    with tempfile.TemporaryDirectory() as folder:
        first, second = run(2, on_a_slow_link, folder)
    dense, micro = first["decision"]["buckets"][0][:2]
    assert first["decision"] == second["decision"]
    assert first["decision"]["choices"] == ["micro"]
    assert first["decision"]["exposed"] == micro["exposed"] < dense["exposed"] / 2
    assert first["bytes"][0] == dense["bytes"] and first["bytes"][1] < 0.05 * dense["bytes"]
    assert "bucket 0: micro" in first["info"] and "without compression" in first["info"] and not first["warnings"]
    assert not second["info"]  # rank 0 logs for all
    assert first["steps"] == (LOOK + 3, LOOK + 5)
    assert (first["weights"] == second["weights"]).all() and (first["weights"] == first["resumed"]).all()
    assert not first["measured again"]


def on_a_fast_link(compressor: Compressor | str | None) -> dict[str, Any]:
    simulate_link(alpha=1e-5, bandwidth=1e10)
    lines = Lines()
    model = DistributedDataParallel(network(400), bucket_cap_mb=0.1)
    compression = None if compressor is None else compress_gradients(model, compressor)
    train(model, range(10))
    result = {"weights": flat(model), "warnings": lines.of(logging.WARNING)}
    if compression is not None:
        return {
            **result,
            "plain": compression.uses_plain_ddp,
            "steps": compression.num_steps,
            "bytes": compression.traffic.bytes,
        }
    return result


def test_ddp_is_left_alone_with_a_warning_where_nothing_gains() -> None:
    plain = run(2, on_a_fast_link, None)[0]
    auto = run(2, on_a_fast_link, "auto")
    assert auto[0]["plain"] and auto[1]["plain"]
    assert "no method is predicted to pay" in auto[0]["warnings"]
    assert torch.allclose(torch.from_numpy(auto[0]["weights"]), torch.from_numpy(plain["weights"]), atol=1e-6)
    assert (auto[0]["weights"] == auto[1]["weights"]).all()
    assert auto[0]["steps"] == 10 and auto[0]["bytes"] == 4 * len(plain["weights"])


def with_a_bad_step() -> tuple[int, list[str], list[bool]]:
    """Without DDP: several buckets, loss scaling, and nonfinite gradients at the step that measures."""
    simulate_link()
    model = network(900)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    settings = CompressionSettings()
    auto = Auto(density=0.01, methods=("micro",))
    step = CompressedStep(model, auto, settings, bucket_cap_mb=0.3, scaler=scaler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    decided = -1
    compression = step.compression
    assert isinstance(compression, AutoCompression)
    for number in range(LOOK + 3):
        inputs, labels = make_data(number)
        loss = cross_entropy(model(inputs), labels) * (float("inf") if number == LOOK and rank() == 1 else 1)
        scaler.scale(loss).backward()
        step.reduce()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if compression.decided and decided < 0:
            decided = number
    assert compression.decision is not None and torch.tensor(flat(model)).isfinite().all()
    compressed = [2 * reducer.traffic.bytes < 4 * reducer.layout.numel for reducer in compression.reducers]
    return decided, compression.decision.to_json()["choices"], compressed


def test_each_bucket_has_its_own_method_and_a_skipped_step_is_not_measured() -> None:
    first, second = run(2, with_a_bad_step)
    assert first == second
    decided, choices, compressed = first
    assert decided == LOOK + 1
    assert compressed == [choice == "micro" for choice in choices]
    assert set(choices) == {"dense", "micro"} and choices.count("micro") == 1  # only the large matrix gains


@pytest.mark.parametrize(
    ("options", "words"),
    [({"steps": 1}, "at least 2"), ({"density": 2.0}, "above 0"), ({"methods": ("zip",)}, "no gradient compressor")],
)
def test_bad_options_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Auto(**options)
