"""Gradients that are taken where they lie give the bits of those side by side, and what is not finite is not kept."""

from __future__ import annotations

import torch

from smelt.errors import DataError
from smelt.train.compression import Compression, reducer_kind
from smelt.train.compressors import MiCRO
from smelt.train.workers import Workers
from tests.train.parallel import run
from tests.train.synthetic import every_compressor, gradient_of, layout_of, rank

PARAMETERS = [(piece.name, torch.zeros(piece.shape)) for piece in layout_of().pieces]


def both_ways(steps: int) -> list[tuple[str, bool]]:
    """Of each compressor whether the means of all steps, and what is left, are the same bits."""
    found = []
    for compressor in every_compressor(0.05):
        pieces = Compression(PARAMETERS, compressor, Workers())
        layout = pieces.layouts[0]
        plain = reducer_kind(compressor)(compressor, layout, Workers())
        same = True
        for number in range(steps):
            gradient, mean = gradient_of(layout, number, rank()), torch.empty(layout.size)
            for piece, view in layout.views(gradient.clone()):
                pieces.put(piece.name, view.view(piece.shape))
            for piece, view in layout.views(mean):
                pieces.give(piece.name, view.view(piece.shape))
            same &= torch.equal(mean, plain.reduce(gradient))
        found.append((compressor.name, same and torch.equal(pieces.reducers[0].residual, plain.residual)))
    return found


def test_the_bits_are_those_of_one_vector() -> None:
    for worker in run(2, both_ways, 5):
        assert len(worker) > 10 and all(same for _, same in worker), worker


def broken() -> tuple[str, bool]:
    """One worker has a gradient that is not finite in one of its tensors."""
    compression = Compression(PARAMETERS, MiCRO(density=0.1), Workers())
    layout, error = compression.layouts[0], ""
    gradient = gradient_of(layout, 0, rank())
    gradient[layout.pieces[1].start] = torch.nan if rank() == 1 else 1.0
    try:
        for piece, view in layout.views(gradient):
            compression.put(piece.name, view.view(piece.shape))
    except DataError as found:
        error = str(found)
    return error, bool(compression.reducers[0].residual.isfinite().all())


def test_what_is_not_finite_in_one_tensor_is_told_to_all_and_not_kept() -> None:
    for error, finite in run(2, broken):
        assert "not finite on at least one worker" in error and finite
