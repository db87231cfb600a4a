"""A sparse mean is written where gradients lie, whatever their order, shape and type."""

from __future__ import annotations

import weakref

import torch

from smelt.train.gradients.comm import Workers
from smelt.train.gradients.compression import Compression
from smelt.train.gradients.compressors import TopK
from smelt.train.gradients.means import Few, Whole


def test_parts_of_a_sparse_mean_are_those_of_the_whole_one() -> None:
    generator = torch.Generator().manual_seed(0)
    indices = torch.randperm(60, generator=generator)[:17]
    values = torch.randn(17, generator=generator)
    whole = torch.zeros(60)
    whole[indices] = values
    mean = Few.of(indices, values, 60)
    assert torch.equal(mean.dense(), whole) and mean.indices.tolist() == sorted(indices.tolist())
    for found in (mean, Whole(whole)):
        plain, crossed, half = torch.full((5, 4), 7.0), torch.full((4, 5), 7.0).t(), torch.full((3,), 7.0).half()
        found.into(0, plain)
        found.into(20, crossed)
        found.into(57, half)
        assert torch.equal(plain.flatten(), whole[:20]) and torch.equal(crossed, whole[20:40].view(5, 4))
        assert torch.equal(half, whole[57:].half())
        assert torch.equal(found.scaled(torch.tensor(2.0)).dense(), 2 * whole)


def test_what_nobody_sent_is_zero() -> None:
    gradient = torch.ones(6)
    Few.of(torch.tensor([9]), torch.tensor([3.0]), 10).into(0, gradient)
    assert not gradient.any()
    Few.of(torch.empty(0, dtype=torch.int64), torch.empty(0), 6).into(0, gradient.fill_(1.0))
    assert not gradient.any()


def test_a_gradient_is_not_held_once_it_is_reduced() -> None:
    compression = Compression([("a", torch.zeros(4))], TopK(density=0.5), Workers())
    gradient, mean = torch.tensor([1.0, 4.0, -3.0, 2.0]), torch.empty(4)
    held = weakref.ref(gradient)
    compression.put("a", gradient)
    assert torch.equal(gradient, torch.tensor([1.0, 4.0, -3.0, 2.0]))  # taken where it is, and left as it is
    del gradient
    compression.give("a", mean)
    assert held() is None and mean.tolist() == [0.0, 4.0, -3.0, 0.0]
