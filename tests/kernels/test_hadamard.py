"""The fast transform against the full matrix, and the matrix against the definition of a Hadamard matrix."""

from __future__ import annotations

import math

import pytest
import torch

from smelt.kernels.hadamard import hadamard_matrix, hadamard_order, hadamard_transform

# Paley's first and second construction, Williamson's, powers of two, and factors of common hidden sizes.
ORDERS = (1, 2, 4, 12, 20, 28, 36, 44, 52, 60, 76, 92, 100, 108, 140, 148, 172)
SIZES = (1, 2, 8, 64, 48, 128, 172, 344, 576, 1536, 2048)


@pytest.mark.parametrize("size", (*ORDERS, 24, 64, 576, 688))
def test_a_matrix_has_only_signs_and_orthogonal_rows(size: int) -> None:
    matrix = hadamard_matrix(size)
    assert torch.equal((matrix * math.sqrt(size)).round().abs(), torch.ones(size, size, dtype=torch.float64))
    assert torch.allclose(matrix @ matrix.T, torch.eye(size, dtype=torch.float64), atol=1e-12)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-6), (torch.bfloat16, 1e-2)]
)
def test_the_transform_equals_the_matrix_product(size: int, dtype: torch.dtype, tolerance: float) -> None:
    x = torch.randn(3, 5, size).to(dtype)
    for inverse in (False, True):
        matrix = hadamard_matrix(size).T if inverse else hadamard_matrix(size)
        expected, actual = x.double() @ matrix, hadamard_transform(x, inverse=inverse)
        assert actual.dtype == dtype and actual.shape == x.shape
        assert (actual.double() - expected).norm() <= tolerance * expected.norm()


def test_the_inverse_undoes_it_where_the_matrix_is_not_symmetric() -> None:
    x = torch.randn(4, 48, dtype=torch.float64)
    assert torch.allclose(hadamard_transform(hadamard_transform(x), inverse=True), x, atol=1e-13)
    assert not torch.allclose(hadamard_transform(hadamard_transform(x)), x, atol=1e-3)


def test_odd_shapes_and_extreme_values() -> None:
    assert hadamard_transform(torch.zeros(0, 64)).shape == (0, 64)
    assert hadamard_transform(torch.zeros(2, 0, 576)).shape == (2, 0, 576)
    assert hadamard_transform(torch.randn(64)).shape == (64,)
    assert hadamard_transform(torch.randn(64, 3).T).shape == (3, 64)  # not contiguous
    large = torch.full((1, 4096), 1000.0, dtype=torch.float16)  # the plain sum would overflow
    assert hadamard_transform(large)[0, 0] == 64000
    assert bool(hadamard_transform(torch.full((1, 64), math.nan)).isnan().all())


def test_an_outlier_is_spread_evenly() -> None:
    x = torch.zeros(1, 576)
    x[0, 17] = 24.0
    assert torch.allclose(hadamard_transform(x).abs(), torch.ones(1, 576), atol=1e-5)


@pytest.mark.parametrize("size", [0, 3, 6, 58, 86, 116, 1423])
def test_sizes_without_a_matrix_are_refused(size: int) -> None:
    assert hadamard_order(size) is None
    if size:
        with pytest.raises(ValueError, match=f"order {size}"):
            hadamard_transform(torch.zeros(2, size))


@pytest.mark.parametrize(
    "size", [11008, 13824, 14336, 18944, 4864, 8960, 5632, 6656, 9728, 17408, 25600, 960, 2560, 12288]
)
def test_common_hidden_sizes_have_a_matrix(size: int) -> None:
    assert hadamard_order(size) is not None


def test_gradients_flow_even_if_the_first_call_had_none() -> None:
    with torch.inference_mode():
        hadamard_transform(torch.zeros(1, 320))
    x = torch.randn(2, 320, requires_grad=True)
    target = torch.randn(2, 320)
    (hadamard_transform(x) * target).sum().backward()
    assert x.grad is not None and torch.allclose(x.grad, hadamard_transform(target, inverse=True), atol=1e-5)


def test_it_compiles_to_one_graph() -> None:
    compiled = torch.compile(hadamard_transform, backend="eager", fullgraph=True)
    x = torch.randn(3, 1536)
    assert torch.equal(compiled(x), hadamard_transform(x))


@pytest.mark.gpu
@pytest.mark.parametrize("size", SIZES)
def test_gpu_and_cpu_agree(size: int) -> None:
    x = torch.randn(7, size)
    assert torch.allclose(hadamard_transform(x.cuda()).cpu(), hadamard_transform(x), atol=1e-4)
