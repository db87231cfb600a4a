"""Compressed gradients under DDP: rebuilt buckets, accumulation, unused parameters, loss scaling."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as distributed
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from smelt.errors import ConfigError
from smelt.train.gradients.compressor import Compressor
from smelt.train.gradients.compressors import DEFT, EFSign, ExDyna, PowerSGD, TopK
from smelt.train.gradients.ddp import compress_gradients
from smelt.train.gradients.settings import CompressionSettings
from tests.train.parallel import outcomes, run
from tests.train.synthetic import rank

CHECKED = CompressionSettings(check_conservation=True)


class Net(nn.Module):
    """Two branches in the middle, one of which may be unused."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.left, self.right, self.last = (
            nn.Linear(*size) for size in ((12, 40), (40, 40), (40, 40), (40, 4))
        )

    def forward(self, inputs: Tensor, branch: str = "both") -> Tensor:
        hidden = self.first(inputs).relu()
        parts = [getattr(self, name)(hidden) for name in ("left", "right") if branch in (name, "both")]
        return self.last(sum(parts).relu())


def make_data(number: int, worker: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * number + worker)
    inputs = torch.randn(16, 12, generator=generator)
    return inputs, (inputs[:, :4] + inputs[:, 4:8] * inputs[:, 8:]).argmax(dim=1)


def many_buckets(device: str = "cpu", **options: bool) -> DistributedDataParallel:
    return DistributedDataParallel(Net().to(device), bucket_cap_mb=0.005, **options)  # type: ignore[arg-type]


def flat_gradients(model: nn.Module) -> Tensor:
    parts = [
        torch.zeros_like(parameter) if parameter.grad is None else parameter.grad for parameter in model.parameters()
    ]
    return torch.cat([part.flatten() for part in parts]).clone()


def train(
    compressor: Compressor | None,
    steps: int,
    bucket_cap_mb: float | None = None,
    accumulate: int = 1,
    device: str = "cpu",
    settings: CompressionSettings = CHECKED,
) -> tuple[list[float], Tensor, int]:
    """Return the losses, the final parameters and the number of compressed steps."""
    model = many_buckets(device, gradient_as_bucket_view=accumulate > 1)
    compression = (
        None if compressor is None else compress_gradients(model, compressor, settings, bucket_cap_mb=bucket_cap_mb)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.5)
    losses = []
    for number in range(steps):
        for part in range(accumulate):
            inputs, labels = make_data(number * accumulate + part, rank())
            with nullcontext() if part == accumulate - 1 else model.no_sync():
                loss = cross_entropy(model(inputs.to(device)), labels.to(device))
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    parameters = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).cpu()
    return losses, parameters.numpy(), 0 if compression is None else compression.num_steps


@pytest.mark.parametrize("bucket_cap_mb", [None, 0.008])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_density_one_trains_like_plain_ddp(bucket_cap_mb: float | None, accumulate: int) -> None:
    _, plain, _ = run(2, train, None, 5, None, accumulate)[0]
    results = run(2, train, TopK(density=1.0), 5, bucket_cap_mb, accumulate)
    for _, parameters, steps in results:
        assert abs(parameters - plain).max() < 1e-6
        assert steps == 5
    assert (results[0][1] == results[1][1]).all()


@pytest.mark.parametrize(
    ("compressor", "bucket_cap_mb"),
    [(ExDyna(density=0.05), 0.008), (DEFT(density=0.05), None), (EFSign(), 0.008), (PowerSGD(warmup_steps=2), None)],
)
def test_all_gradients_are_applied_eventually_and_the_loss_falls(
    compressor: Compressor, bucket_cap_mb: float | None
) -> None:
    """The debug mode raises if a rebuilt bucket loses anything; with one bucket or several."""
    results = run(2, train, compressor, 20, bucket_cap_mb)
    losses, parameters, _ = results[0]
    assert sum(losses[-5:]) < 0.93 * sum(losses[:5])
    assert (parameters == results[1][1]).all()


BRANCHES = ["both", "left", "left", "right", "both", "left", "left", "right"]


def leave_out(differ: bool, static: bool) -> float:
    """Compare the summed local gradients of a model copy with the applied updates plus residuals."""
    branches = ["left"] * 6 if static else BRANCHES
    model = many_buckets(static_graph=True) if static else many_buckets(find_unused_parameters=True)
    compression = compress_gradients(model, TopK(density=0.05))
    twin = Net()
    total = applied = torch.zeros(sum(parameter.numel() for parameter in twin.parameters()))
    for number, branch in enumerate(branches):
        if differ and rank() == 1:
            branch = "both"
        inputs, labels = make_data(number, rank())
        for network in (model, twin):
            network.zero_grad()
            cross_entropy(network(inputs, branch), labels).backward()
        total = total + flat_gradients(twin)
        applied = applied + flat_gradients(model) * 2
    names = [name for name, _ in twin.named_parameters()]
    residual = {
        name: view
        for entry, view in compression.reducers[0].layout.views(compression.reducers[0].residual)
        for name in [entry.name]
    }
    left = torch.cat([residual[name] for name in names])
    both = torch.stack([total, left])
    distributed.all_reduce(both)
    return float((both[0] - both[1] - applied).abs().max() / both[0].abs().max())


@pytest.mark.parametrize(("differ", "static"), [(False, False), (True, False), (False, True)])
def test_unused_parameters_keep_their_residual(differ: bool, static: bool) -> None:
    assert max(run(2, leave_out, differ, static)) < 1e-5


def scaled(
    overflows: list[int], bucket_cap_mb: float | None, settings: CompressionSettings
) -> tuple[Tensor, list[float], Tensor, int]:
    """Train with a scaled loss; in the given steps, rank 1 has an infinite gradient in its last layer."""
    model = many_buckets()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    compression = compress_gradients(model, ExDyna(density=0.05), settings, bucket_cap_mb=bucket_cap_mb, scaler=scaler)
    scales, number = [], 0
    for attempt in range(12):
        inputs, labels = make_data(number, rank())
        loss = cross_entropy(model(inputs), labels)
        if attempt in overflows and rank() == 1:
            loss = loss + model.module.last.bias.sum() * torch.inf
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        number += attempt not in overflows
        if number == 8:
            break
    compression.resolve_deferred()
    parameters = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    residual = torch.cat([reducer.residual for reducer in compression.reducers])
    return parameters.numpy(), scales, residual.numpy(), compression.reducers[0].iteration


@pytest.mark.parametrize(
    ("bucket_cap_mb", "settings"),
    [
        (None, CompressionSettings()),
        (0.008, CompressionSettings()),
        (None, CompressionSettings(fixed_capacity=2.0)),
        (0.008, CompressionSettings(check_conservation=True)),
    ],
    ids=["one", "several", "slots", "checked"],
)
def test_a_skipped_step_changes_no_state(bucket_cap_mb: float | None, settings: CompressionSettings) -> None:
    """Scales are powers of two, so changing the scale changes no bit."""
    plain, _, plain_residual, _ = run(2, scaled, [], bucket_cap_mb, settings)[0]
    results = run(2, scaled, [2, 5], bucket_cap_mb, settings)
    for parameters, scales, _, number in results:
        assert scales[:6] == [1024, 1024, 512, 512, 512, 256]
        assert (parameters == plain).all()
        assert number == 8
    assert (results[0][2] == plain_residual).all()


def spoiled() -> None:
    model = many_buckets()
    compress_gradients(model, ExDyna(density=0.05))
    for number in range(3):
        inputs, labels = make_data(number, rank())
        inputs[0, 0] = torch.nan if number == 1 and rank() == 0 else 0.0
        cross_entropy(model(inputs), labels).backward()


def test_nonfinite_gradients_raise_one_sentence_on_every_rank() -> None:
    for _, error in outcomes(2, spoiled):
        assert error.startswith("DataError: the gradients of step 1 are not finite on at least one rank")


def different_models() -> None:
    torch.manual_seed(rank())
    wide = nn.Linear(4, 5 + rank())
    compress_gradients(DistributedDataParallel(wide), TopK())


def test_differing_models_fail_on_every_rank() -> None:
    for _, error in outcomes(2, different_models):
        assert error  # DDP itself compares shapes at construction


def test_a_model_without_ddp_is_refused() -> None:
    with pytest.raises(ConfigError, match="takes a DistributedDataParallel, not Net"):
        compress_gradients(Net(), TopK())  # type: ignore[arg-type]


def lr_scaled() -> float:
    model = many_buckets()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    compress_gradients(
        model,
        TopK(density=0.05),
        CompressionSettings(error_feedback="lr_scaled", check_conservation=True),
        optimizer=optimizer,
    )
    for number in range(4):
        optimizer.param_groups[0]["lr"] = 0.2 / (number + 1)
        inputs, labels = make_data(number, rank())
        loss = cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
    return loss.item()


def test_the_paper_form_of_error_feedback_reads_the_learning_rate() -> None:
    run(2, lr_scaled)
