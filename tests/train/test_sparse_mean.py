"""A sparse mean is written into the gradients in place, whatever their order, shape and dtype."""

from __future__ import annotations

import weakref

import torch

from smelt.train.gradients.comm import Comm
from smelt.train.gradients.compression import BucketedCompression
from smelt.train.gradients.compressors import TopK
from smelt.train.gradients.reducer import DenseMean, SparseMean


def test_slices_of_a_sparse_mean_match_the_dense_mean() -> None:
    generator = torch.Generator().manual_seed(0)
    indices = torch.randperm(60, generator=generator)[:17]
    values = torch.randn(17, generator=generator)
    dense = torch.zeros(60)
    dense[indices] = values
    mean = SparseMean.from_unsorted(indices, values, 60)
    assert torch.equal(mean.to_dense(), dense) and mean.indices.tolist() == sorted(indices.tolist())
    for result in (mean, DenseMean(dense)):
        plain, crossed, half = torch.full((5, 4), 7.0), torch.full((4, 5), 7.0).t(), torch.full((3,), 7.0).half()
        result.copy_into(0, plain)
        result.copy_into(20, crossed)
        result.copy_into(57, half)
        assert torch.equal(plain.flatten(), dense[:20]) and torch.equal(crossed, dense[20:40].view(5, 4))
        assert torch.equal(half, dense[57:].half())
        assert torch.equal(result.scale(torch.tensor(2.0)).to_dense(), 2 * dense)


def test_unsent_elements_are_zero() -> None:
    gradient = torch.ones(6)
    SparseMean.from_unsorted(torch.tensor([9]), torch.tensor([3.0]), 10).copy_into(0, gradient)
    assert not gradient.any()
    SparseMean.from_unsorted(torch.empty(0, dtype=torch.int64), torch.empty(0), 6).copy_into(0, gradient.fill_(1.0))
    assert not gradient.any()


def test_a_gradient_is_released_once_reduced() -> None:
    compression = BucketedCompression([("a", torch.zeros(4))], TopK(density=0.5), Comm())
    gradient, mean = torch.tensor([1.0, 4.0, -3.0, 2.0]), torch.empty(4)
    reference = weakref.ref(gradient)
    compression.add("a", gradient)
    assert torch.equal(gradient, torch.tensor([1.0, 4.0, -3.0, 2.0]))  # read in place and not modified
    del gradient
    compression.write_back("a", mean)
    assert reference() is None and mean.tolist() == [0.0, 4.0, -3.0, 0.0]
