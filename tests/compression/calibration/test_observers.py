"""The Gram matrix of the inputs, computed in strips."""

from __future__ import annotations

import pytest
import torch

from smelt.compression.calibration.observers import STRIP, gram


@pytest.mark.parametrize("columns", [1, STRIP - 1, STRIP, STRIP + 1, 2 * STRIP + 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gram(columns: int, dtype: torch.dtype) -> None:
    x = torch.randn(columns, 40).to(dtype).T  # a view
    result, expected = gram(x), x.double().T @ x.double()
    assert result.dtype == torch.float32
    assert torch.equal(result, result.T)
    assert torch.allclose(result.double(), expected, rtol=1e-5, atol=1e-4)
