"""Without DDP: gradients become their means over all ranks before the optimizer step."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as distributed
from torch.nn.functional import cross_entropy

from smelt.train.gradients.compressors import MiCRO, TopK
from smelt.train.gradients.settings import CompressionSettings
from smelt.train.gradients.step import CompressedStep
from tests.train.parallel import outcomes, run
from tests.train.synthetic import rank
from tests.train.test_ddp import Net, make_data


def train(kind: str, branches: list[str]) -> Any:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.5)
    compressor = "micro" if kind == "named" else TopK(density=1.0) if kind == "all" else MiCRO(density=0.1)
    step = (
        None
        if kind == "plain"
        else CompressedStep(model, compressor, CompressionSettings(check_conservation=True), bucket_cap_mb=0.01)
    )
    for number, branch in enumerate(branches):
        inputs, labels = make_data(number, rank())
        optimizer.zero_grad()
        cross_entropy(model(inputs, branch), labels).backward()
        if step is not None:
            step.reduce()
        else:
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                distributed.all_reduce(parameter.grad)
                parameter.grad /= distributed.get_world_size()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()]).numpy()


def test_density_one_is_the_plain_mean_also_where_a_gradient_is_missing() -> None:
    branches = ["both", "left", "both", "right"]
    assert abs(run(3, train, "all", branches)[0] - run(3, train, "plain", branches)[0]).max() < 1e-6


def test_all_ranks_end_with_the_same_parameters() -> None:
    for mode in ("sparse", "named"):
        first, *others = run(3, train, mode, ["both"] * 6)
        assert all((first == other).all() for other in others)


def mismatched() -> None:
    torch.manual_seed(0)
    CompressedStep(torch.nn.Linear(4, 5 + rank()), TopK())


def test_differing_models_raise_one_sentence_on_every_rank() -> None:
    for _, error in outcomes(2, mismatched):
        assert error.startswith("ConfigError: the ranks do not have the same model")
