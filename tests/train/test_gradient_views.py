"""Gradient views give the same bits as one flat bucket, and nonfinite gradients leave no residual."""

from __future__ import annotations

import pytest
import torch

from smelt.errors import DataError
from smelt.train.gradients.comm import Comm
from smelt.train.gradients.compression import BucketedCompression, reducer_class
from smelt.train.gradients.gradient_views import GradientViews
from smelt.train.gradients.layout import BucketLayout
from tests.train.parallel import run
from tests.train.synthetic import every_compressor, make_gradient, make_layout, rank

PARAMETERS = [(piece.name, torch.zeros(piece.shape)) for piece in make_layout().slices]


def both_ways(steps: int) -> list[tuple[str, bool]]:
    """Return, per compressor, whether all means and residuals are bit-identical."""
    results = []
    for compressor in every_compressor(0.05):
        separate = BucketedCompression(PARAMETERS, compressor, Comm())
        layout = separate.layouts[0]
        plain = reducer_class(compressor)(compressor, layout, Comm())
        same = True
        for number in range(steps):
            gradient, mean = make_gradient(layout, number, rank()), torch.empty(layout.numel)
            for entry, view in layout.views(gradient.clone()):
                separate.add(entry.name, view.view(entry.shape))
            for entry, view in layout.views(mean):
                separate.write_back(entry.name, view.view(entry.shape))
            same &= torch.equal(mean, plain.reduce(gradient))
        results.append((compressor.name, same and torch.equal(separate.reducers[0].residual, plain.residual)))
    return results


def test_gradient_views_match_one_flat_vector_bit_for_bit() -> None:
    for worker in run(2, both_ways, 5):
        assert len(worker) > 10 and all(same for _, same in worker), worker


def broken() -> list[tuple[str, str, bool]]:
    """Run with one rank whose gradient is nonfinite in one tensor."""
    results = []
    for compressor in every_compressor(0.1):
        compression = BucketedCompression(PARAMETERS, compressor, Comm())
        layout, error = compression.layouts[0], ""
        gradient = make_gradient(layout, 0, rank())
        gradient[layout.slices[1].start] = torch.nan if rank() == 1 else 1.0
        try:
            for entry, view in layout.views(gradient):
                compression.add(entry.name, view.view(entry.shape))
        except DataError as told:
            error = str(told)
        kept = compression.reducers[0].tensors()
        results.append((compressor.name, error, all(bool(tensor.isfinite().all()) for tensor in kept.values())))
    return results


def test_a_nonfinite_tensor_raises_on_all_ranks_and_leaves_no_residual() -> None:
    for worker in run(2, broken):
        for name, error, finite in worker:
            assert "not finite on at least one rank" in error and finite, name


@pytest.mark.parametrize("looked", [False, True])
@pytest.mark.parametrize("place", [None, 0, 1 << 17, 399_999, 400_007])
def test_gradient_views_are_added_and_checked_for_nonfinite_values(place: int | None, looked: bool) -> None:
    """A long tensor, which is added in chunks, and a noncontiguous one."""
    layout = BucketLayout.from_tensors([("long", torch.empty(4, 100_000)), ("turned", torch.empty(20, 30))])
    flat, memory = torch.randn(layout.numel), torch.randn(layout.numel)
    if place is not None:
        flat[place] = torch.inf
    transposed = flat[400_000:].view(20, 30).T.contiguous().T
    views = GradientViews(layout, [flat[:400_000].view(4, 100_000), transposed])
    if looked:
        assert bool(views.all_finite()) is (place is None)
    expected, before = memory + flat, memory.clone()
    views.add_to(memory)
    assert bool(views.all_finite()) is (place is None)
    if place is None:
        assert torch.equal(memory, expected) and torch.equal(views.flatten(), flat)
        return
    assert not views.flatten().any()
    added = 0 if looked else int((memory != before).nonzero()[-1]) + 1 if bool((memory != before).any()) else 0
    assert torch.equal(memory[:added], expected[:added]) and torch.equal(memory[added:], before[added:])
    assert added <= place and (looked or place - added < 1 << 17)
