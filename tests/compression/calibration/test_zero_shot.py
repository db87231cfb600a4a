"""Synthetic inputs give the statistics that batch norms recorded; percentiles come from histograms."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from smelt.compression.calibration.observers import HistogramObserver
from smelt.compression.calibration.zero_shot import noise_inputs, statistics_loss, synthesize_inputs
from smelt.errors import ModelError
from smelt.models.batch_norm import batch_norms
from smelt.models.quartznet import QuartzNetForCTC
from tests.models.test_quartznet import quartznet
from tests.tiny import BUILDS

FRAMES = 120


def trained_statistics() -> tuple[QuartzNetForCTC, Tensor]:
    """Return a network whose batch norms saw correlated inputs, and these inputs."""
    network = quartznet()
    torch.manual_seed(1)
    low = torch.randn(32, 4, FRAMES // 4).repeat_interleave(4, -1)
    data = torch.einsum("ij,bjt->bit", torch.randn(16, 4), low) + 0.1 * torch.randn(32, 16, FRAMES) + 0.5
    for norm in batch_norms(network).values():
        norm.momentum = None  # type: ignore[assignment]  # the mean over all batches
        norm.reset_running_stats()  # type: ignore[operator]
    network.train()
    for part in data.split(16):
        network(part)
    return network.eval(), data


def test_the_loss_is_the_divergence_of_gaussians() -> None:
    network, data = trained_statistics()
    seen: dict[nn.Module, Tensor] = {}
    norms = batch_norms(network).values()
    handles = [norm.register_forward_pre_hook(lambda norm, args: seen.update({norm: args[0]})) for norm in norms]
    with torch.no_grad():
        loss = statistics_loss(network, {"input_features": data + 1})
    for handle in handles:
        handle.remove()
    expected = 0.0
    for norm, x in seen.items():
        assert isinstance(norm, nn.BatchNorm1d) and norm.running_mean is not None and norm.running_var is not None
        channels = x.transpose(0, 1).flatten(1)
        measured = torch.distributions.Normal(channels.mean(1), channels.std(1, correction=0))
        wanted = torch.distributions.Normal(norm.running_mean, norm.running_var.sqrt())
        expected += torch.distributions.kl_divergence(wanted, measured).mean().item()
    assert loss.item() == pytest.approx(expected, rel=1e-3)


def test_synthesis_lowers_the_divergence_tenfold_and_below_that_of_noise() -> None:
    network, data = trained_statistics()
    shape = (16, FRAMES)
    [synthetic] = synthesize_inputs(network, shape, samples=8, batch_size=8, seed=0)
    with torch.no_grad():
        [uniform] = noise_inputs(network, shape, "uniform", samples=8, seed=0)
        [gaussian] = noise_inputs(network, shape, "gaussian", samples=8, seed=0)
        losses = [statistics_loss(network, batch).item() for batch in (synthetic, gaussian, uniform)]
        real = statistics_loss(network, {"input_features": data}).item()
    assert real < losses[0] < losses[2] / 10 and losses[0] < losses[1] / 3, (losses, real)
    assert synthetic["input_features"].shape == (8, *shape) and not synthetic["input_features"].requires_grad
    assert all(parameter.requires_grad for parameter in network.parameters())


def test_batches_depend_on_the_seed_alone_and_the_last_is_smaller() -> None:
    network = quartznet()
    first, second = (synthesize_inputs(network, (16, 40), samples=5, batch_size=4, seed=0) for _ in range(2))
    assert [len(batch["input_features"]) for batch in first] == [4, 1]
    assert all(torch.equal(a["input_features"], b["input_features"]) for a, b in zip(first, second, strict=True))


def test_noise_has_the_range_or_the_variance_of_its_kind() -> None:
    network = quartznet()
    [uniform] = noise_inputs(network, (16, 500), "uniform", samples=4, seed=0)
    [gaussian] = noise_inputs(network, (16, 500), "gaussian", samples=4, seed=0)
    x = uniform["input_features"]
    assert x.min().item() == pytest.approx(-0.3, abs=1e-3) and x.max().item() == pytest.approx(0.3, abs=1e-3)
    assert gaussian["input_features"].std().item() == pytest.approx(1.0, abs=0.02)


def test_a_network_without_batch_norm_is_refused() -> None:
    with pytest.raises(ModelError, match="this network has none; name data"):
        synthesize_inputs(BUILDS["bert"](), (4,), samples=1, batch_size=1, seed=0)


def test_percentiles_of_a_histogram() -> None:
    torch.manual_seed(0)
    parts = [torch.randn(5_000) * scale for scale in (0.1, 3.0, 0.5)]
    observer = HistogramObserver()
    for part in parts:
        observer(part.reshape(50, 100))
    values = torch.cat(parts)
    assert (observer.minimum, observer.maximum) == (values.min(), values.max())
    assert observer.percentile(100) == pytest.approx(values.abs().max().item())
    for percent in (50.0, 99.0, 99.9):
        expected = torch.quantile(values.abs(), percent / 100).item()
        assert observer.percentile(percent) == pytest.approx(expected, abs=2 * observer.limit / 8192 + 1e-2 * expected)
    assert int(observer.counts.sum()) == len(values)
    silent = HistogramObserver()
    silent(torch.zeros(10))
    silent(torch.empty(0))
    assert silent.percentile(99.0) == 0 == silent.percentile(100)
