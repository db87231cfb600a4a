"""Every compiled kernel matches the reference: all formats, odd shapes, extreme values, any number of threads."""

from __future__ import annotations

import copy
import ctypes
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from smelt.kernels.cpu import kernels, operator
from smelt.kernels.cpu.build import NATIVE
from smelt.kernels.cpu.plan import make_linear_plan
from smelt.kernels.dispatch import use_backend
from smelt.kernels.linear import (
    REFERENCE,
    ActivationQuant,
    LinearKernel,
    PackedMatrix,
    ZeroPointLinear,
    select_kernel,
)
from smelt.models.quantization_scheme import QuantizationScheme
from smelt.models.quantized import QuantizedLinear
from smelt.numerics.catalog import get_format
from tests.kernels.instruction_sets import LIBRARY, MACHINES, TARGETS, library_for
from tests.kernels.instruction_sets import NEEDS_COMPILER as compiled

FORMATS = (
    *("int8", "int8/64@float16", "int8-asym/32@float16", "int8-float-zero/128@float16", "int8/tensor", "int8/48"),
    *("int4", "int4/64@float16", "int4-asym/32@float16", "int4-asym@bfloat16", "int4-float-zero/64@float16"),
    *("int4-wide/128", "int3/64@float16", "int3-asym", "int2-asym/64@float16", "int2", "int5/64", "int6-asym", "int7"),
    *("int4-float32-zero/32@float16", "int5-float32-zero/32@float16", "int6/16", "int5/32@float16", "int8/32@float16"),
    *("dint4/64@float16", "dint4/32", "dint4-sym/64@float16", "dint3", "dint8-sym", "mxfp4", "nvfp4", "amxfp4", "fp4"),
    *("nf4", "nf3", "nf2", "fp8-e4m3", "fp8-e5m2", "mxfp6-e2m3", "mxfp8-e5m2", "mxint8", "mxint4", "ternary/64"),
)
INTEGERS = (
    *("int8", "int8-asym/32@float16", "int8-float-zero/128@float16", "int8/tensor", "int4-asym/32@float16"),
    *("int4/64@float16", "int4-float-zero/64@float16", "dint4/64@float16", "dint4/32", "dint4-sym/64@float16"),
    "int4-float32-zero/32@float16",
)
FAST = (
    *("int8", "int8-asym/32@float16", "int8/48", "int4", "int4-asym/32@float16", "int4/64@float16", "int3-asym"),
    *("int2-asym/64@float16", "dint4/64@float16", "dint4-sym/64@float16", "mxfp4", "nvfp4", "nf4", "ternary/64"),
)
# The SIMD targets of Highway on x86 and on ARM, from slow to fast; not EMU128, which has no vector instructions.
RANKS = (
    *("SSE2", "SSSE3", "SSE4", "AVX2", "AVX3", "AVX3_DL", "AVX3_ZEN4", "AVX3_SPR", "AVX10_2"),
    *("NEON_WITHOUT_AES", "NEON", "NEON_BF16"),
)
SHAPES = ((33, 576), (5, 100), (17, 31), (1, 1), (70, 128))
TOKENS = (1, 2, 3, 4, 5, 33, 97)
# The largest error in units of sum |x| |w|: for float32 sums, and for weights and outputs rounded to bfloat16.
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2.1 * 2.0**-8}
INPUTS = {
    "int8": ActivationQuant(get_format("int8")),
    "int4": ActivationQuant(get_format("int4")),
    "clipped": ActivationQuant(get_format("int8-wide"), clip_ratio=0.5),
    "fixed": ActivationQuant(get_format("int8/tensor"), torch.full((1, 1, 1), 0.02)),
}


def with_zero_point(name: str, scale: float, zero: int) -> ActivationQuant:
    code = torch.full((1, 1, 1), zero, dtype=torch.uint8)
    return ActivationQuant(get_format(name), torch.full((1, 1, 1), scale), zero=code)


@pytest.fixture(params=MACHINES)
def library(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Return the library compiled for one instruction set."""
    yield library_for(request.param)
    operator.set_library(LIBRARY)


class NoGemm:
    """Stand in for a library without a GEMM of its own."""

    def smelt_has_gemm(self, address: int) -> int:
        return 0


def packed(name: str, rows: int, columns: int, scale: float = 0.05) -> PackedMatrix:
    number_format = get_format(name)
    quantized = number_format.quantize(torch.randn(rows, columns) * scale)
    return PackedMatrix(number_format, rows, columns, {key: t.contiguous() for key, t in quantized.pack().items()})


def product(
    kernel: LinearKernel, x: Tensor, matrix: PackedMatrix, inputs: ActivationQuant | None, bias: Tensor | None = None
) -> Tensor:
    assert kernel.supports(matrix, inputs, x.dtype)
    return kernel.run(x, matrix, inputs, bias, kernel.prepare(matrix, inputs))


def error(
    x: Tensor, y: Tensor, matrix: PackedMatrix, inputs: ActivationQuant | None, bias: Tensor | None = None
) -> float:
    """Return the largest difference from float64, in units of sum |x| |w| + |b|."""
    exact = x.double() if inputs is None else inputs.fake_quantize(x.float()).double()
    weight = matrix.unpack().dequantize().double()
    added = torch.zeros(matrix.rows, dtype=torch.float64) if bias is None else bias.double()
    size = exact.abs() @ weight.abs().T + added.abs() + 1e-30
    return float(((y.double() - F.linear(exact, weight, added)).abs() / size).max())


def check(kernel: LinearKernel, name: str, inputs: ActivationQuant | None) -> None:
    for position, (rows, columns) in enumerate(SHAPES):
        matrix = packed(name, rows, columns)
        for dtype, tolerance in TOLERANCE.items():
            if not kernel.supports(matrix, inputs, dtype):
                assert kernel.quantizes_inputs
                continue
            bias = torch.randn(rows).to(dtype) if position % 2 else None
            for tokens in TOKENS:
                x = torch.randn(tokens, columns).to(dtype)
                y = product(kernel, x, matrix, inputs, bias)
                assert y.dtype == dtype
                assert y.shape == (tokens, rows)
                assert error(x, y, matrix, inputs, bias) < tolerance, (rows, columns, tokens, dtype)


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@compiled
@pytest.mark.parametrize("name", FORMATS)
def test_float_inputs(name: str, library: Any) -> None:
    check(kernels.FloatLinear(library), name, None)


@compiled
@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("name", INTEGERS)
def test_integer_inputs(name: str, inputs: str, library: Any) -> None:
    check(kernels.Int8Linear(library), name, INPUTS[inputs])


@compiled
@pytest.mark.parametrize("name", ["int8", "int4-asym/32@float16", "dint4/32"])
def test_a_static_zero_point_is_folded_into_the_bias(name: str, library: Any) -> None:
    for inputs in (with_zero_point("int8-asym/tensor", 0.02, 20), with_zero_point("int4-asym/tensor", 0.2, 15)):
        check(ZeroPointLinear(kernels.Int8Linear(library)), name, inputs)


@compiled
def test_a_static_zero_point_keeps_the_integer_product() -> None:
    matrix, inputs = packed("int4/row", 40, 96), with_zero_point("int8-asym/tensor", 0.02, 3)
    kernel = select_kernel(matrix, inputs, torch.float32)
    assert kernel.name == "cpu-integer" and kernel.quantizes_inputs
    with use_backend("reference"):
        assert select_kernel(matrix, inputs, torch.float32) is REFERENCE
    layer = QuantizedLinear.from_quantized(
        matrix.unpack(), QuantizationScheme(matrix.format, inputs.format, static=True), bias=None, dtype=torch.float32
    )
    layer.set_static_inputs(inputs.scale, inputs.zero)
    x = torch.randn(2, 5, 96)
    y = layer(x)
    assert layer.backend == "cpu-integer" and error(x, y, matrix, inputs) < 1e-6
    restored = QuantizationScheme.from_json(layer.scheme.to_json(), "a file")
    assert restored == layer.scheme and layer.input_zero.dtype == torch.uint8
    assert layer.bfloat16().input_zero.dtype == torch.uint8 and int(layer.input_zero) == 3


@compiled
def test_input_formats_the_kernel_cannot_quantize() -> None:
    for inputs in (
        ActivationQuant(get_format("int8-asym")),
        ActivationQuant(get_format("mxfp8-e4m3")),
        ActivationQuant(get_format("int4/32")),
    ):
        matrix = packed("int4-asym/32@float16", 40, 96)
        kernel = select_kernel(matrix, inputs, torch.float32)
        assert kernel.name == "cpu-float"
        x = torch.randn(3, 96)
        assert error(x, product(kernel, x, matrix, inputs), matrix, inputs) < 1e-6


@compiled
@pytest.mark.parametrize("machine", MACHINES)
def test_the_library_uses_the_instructions_it_was_compiled_for(machine: str) -> None:
    target = library_for(machine).smelt_simd_target().decode()
    best = max((TARGETS[known][0] for known in MACHINES if known != NATIVE), key=RANKS.index, default=target)
    assert target == TARGETS[machine][0] if machine != NATIVE else RANKS.index(target) >= RANKS.index(best)


@compiled
@pytest.mark.parametrize("name", FAST)
def test_common_formats_have_vectorized_code(name: str, library: Any) -> None:
    """The reference dequantizes a row at a time: a library that falls back to it would still be correct."""
    matrix = packed(name, 48, 128)
    for inputs in (INPUTS["int8"] if name in INTEGERS else None, None):
        plan = make_linear_plan(matrix.format, 48, 128, matrix.tensors, inputs, torch.float32)
        if inputs is not None or name != "dint4/64@float16":  # dINT with zero points: only in integers
            assert library.smelt_is_vectorized(ctypes.addressof(plan))
    slow = packed("amxfp4", 48, 128)
    plan = make_linear_plan(slow.format, 48, 128, slow.tensors, None, torch.float32)
    assert not library.smelt_is_vectorized(ctypes.addressof(plan))


@compiled
@pytest.mark.parametrize("name", FAST)
def test_many_tokens(name: str, library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a dense product: every result is close to float64, and without AMX the same as that of a token alone."""
    monkeypatch.setattr(operator, "MIN_DENSE_TOKENS", operator.UNLIMITED)
    for kernel, inputs in ((kernels.FloatLinear(library), None), (kernels.Int8Linear(library), INPUTS["int8"])):
        for rows, columns in ((33, 576), (5, 100), (17, 31), (48, 1040), (20, 4160)):
            matrix = packed(name, rows, columns)
            if not kernel.supports(matrix, inputs, torch.float32):
                continue
            bias, prepared = torch.randn(rows), kernel.prepare(matrix, inputs)
            has_amx = library.smelt_has_gemm(prepared.tasks[torch.float32].address)
            for tokens in (5, 16, 18, 40, 100):  # 100 of the widest do not fit into the cache
                x = torch.randn(tokens, columns)
                y = kernel.run(x, matrix, inputs, bias, prepared)
                assert error(x, y, matrix, inputs, bias) < 1e-6, (rows, columns, tokens)
                if not has_amx:
                    alone = [kernel.run(row[None], matrix, inputs, bias, prepared) for row in x]
                    assert torch.equal(y, torch.cat(alone)), (rows, columns, tokens)


@compiled
def test_any_shape_of_x() -> None:
    matrix, bias = packed("int4-asym/64@float16", 48, 128), torch.randn(48)
    kernel = select_kernel(matrix, None, torch.float32)
    x = torch.randn(2, 3, 128)
    flat = product(kernel, x.flatten(0, 1), matrix, None, bias)
    assert torch.equal(product(kernel, x, matrix, None, bias), flat.unflatten(0, (2, 3)))
    crooked = torch.randn(128, 3, 2).transpose(0, 2)
    assert torch.equal(
        product(kernel, crooked, matrix, None, bias), product(kernel, crooked.contiguous(), matrix, None, bias)
    )
    assert product(kernel, x[..., 0, :], matrix, None).shape == (2, 48)
    assert product(kernel, x[0, 0], matrix, None).shape == (48,)
    for inputs in (None, INPUTS["int8"]):
        kernel = select_kernel(matrix, inputs, torch.float32)
        assert product(kernel, x[:, :0], matrix, inputs, bias).shape == (2, 0, 48)


@compiled
@pytest.mark.parametrize("name", ["int4-asym/64@float16", "int8/64@float16", "nvfp4", "amxfp4"])
@pytest.mark.parametrize("inputs", [None, "int8"])
def test_thread_count_changes_no_bit(name: str, inputs: str | None) -> None:
    matrix = packed(name, 1000, 576)  # not a multiple of any block
    input_format = INPUTS[inputs] if inputs else None
    kernel = select_kernel(matrix, input_format, torch.float32)
    for tokens in (1, 3, 16):
        x = torch.randn(tokens, 576)
        with threads(1):
            alone = product(kernel, x, matrix, input_format)
        with threads(2):
            batched = product(kernel, x, matrix, input_format)
        assert torch.equal(alone, batched)


@compiled
def test_a_token_is_independent_of_its_small_batch() -> None:
    matrix = packed("int4-asym/64@float16", 100, 192)
    kernel, x = select_kernel(matrix, None, torch.float32), torch.randn(4, 192)
    for count in (2, 3, 4):
        assert torch.equal(product(kernel, x[:count], matrix, None)[0], product(kernel, x[:1], matrix, None)[0])


@compiled
@pytest.mark.parametrize("tokens", [1, 5, 13])
def test_extreme_scales(tokens: int) -> None:
    for value in (0.0, 2.0**-24, 6e-8, 65504.0, math.nan):
        for name in ("int8-asym/32@float16", "int4/32@float16", "int3/32@float16", "dint4/32@float16"):
            for inputs in (None, INPUTS["int8"]):
                matrix = packed(name, 20, 96)
                matrix.tensors["scale"][3, 1] = value
                x = torch.randn(tokens, 96)
                y = product(select_kernel(matrix, inputs, torch.float32), x, matrix, inputs)
                if math.isnan(value):
                    assert bool(y[:, 3].isnan().all())
                    y, matrix.tensors["scale"][3, 1] = torch.where(y.isnan(), 0, y), 0.0
                    y[:, 3] = F.linear(x if inputs is None else inputs.fake_quantize(x), matrix.unpack().dequantize())[
                        :, 3
                    ]
                assert error(x, y, matrix, inputs) < 1e-6, (name, value)


@compiled
@pytest.mark.parametrize("tokens", [1, 7, 13])
def test_extreme_inputs(tokens: int) -> None:
    """Zeros, subnormal and huge numbers, infinities (which saturate when quantized) and NaN (which propagates)."""
    matrix = packed("int8/32@float16", 24, 64)
    for value in (0.0, 1e-40, 1e-30, 1e30, 1e35):
        x = torch.full((tokens, 64), value)
        x[:, 5] *= -0.5
        for inputs in (None, INPUTS["int8"]):
            y = product(select_kernel(matrix, inputs, torch.float32), x, matrix, inputs)
            expected = REFERENCE.run(x, matrix, inputs, None, None)
            assert torch.allclose(y, expected, rtol=1e-4, atol=1e-37), value
    x = torch.randn(tokens, 64)
    x[0, 3], x[0, 4] = math.inf, -math.inf
    inputs = INPUTS["int8"]
    y = product(select_kernel(matrix, inputs, torch.float32), x, matrix, inputs)
    assert error(x, y, matrix, inputs) < 1e-6
    x[0, 3], x[0, 4] = math.nan, 0.0
    for input_format in (None, inputs):
        y = product(select_kernel(matrix, input_format, torch.float32), x, matrix, input_format)
        assert bool(y[0].isnan().all())
        assert not bool(y[1:].isnan().any())


@compiled
@pytest.mark.parametrize("has_arithmetic", [True, False])
def test_dense_products_in_bfloat16(has_arithmetic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without bfloat16 arithmetic, weights and products are in float32, and only the results are rounded."""
    monkeypatch.setattr(operator, "has_bfloat16_arithmetic", lambda: has_arithmetic)
    monkeypatch.setattr(operator, "MIN_DENSE_TOKENS", 5)
    dtypes, plain = [], F.linear

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        dtypes.append((x.dtype, weight.dtype))
        return plain(x, weight, bias)

    monkeypatch.setattr(operator.F, "linear", linear)
    matrix, bias, x = packed("int4/32@float16", 40, 96), torch.randn(40).bfloat16(), torch.randn(7, 96).bfloat16()
    task = operator.Task(NoGemm(), make_linear_plan(matrix.format, 40, 96, matrix.tensors, None, torch.bfloat16))
    y = operator.run(LIBRARY, task, x, bias)
    monkeypatch.undo()
    assert dtypes == [(torch.bfloat16 if has_arithmetic else torch.float32,) * 2]
    assert y.dtype == torch.bfloat16
    assert error(x, y, matrix, None, bias) < (TOLERANCE[torch.bfloat16] if has_arithmetic else 2.0**-8)


@compiled
def test_a_bias_is_not_cached() -> None:
    matrix, x = packed("int4/32@float16", 24, 64), torch.randn(3, 64)
    tensors = (matrix.tensors["codes"], matrix.tensors["scale"], None, None, None)
    plain = torch.ops.smelt.cpu_linear(x, *tensors, None, None, "int4/32@float16")
    bias = torch.randn(24)
    added = torch.ops.smelt.cpu_linear(x, *tensors, bias, None, "int4/32@float16")
    assert torch.allclose(added, plain + bias, atol=1e-6)
    assert torch.equal(torch.ops.smelt.cpu_linear(x, *tensors, None, None, "int4/32@float16"), plain)


@compiled
def test_inputs_of_the_wrong_width_are_refused() -> None:
    matrix = packed("int4/32@float16", 24, 64)
    with pytest.raises(ValueError, match="63 columns"):
        product(select_kernel(matrix, None, torch.float32), torch.randn(3, 63), matrix, None)


@compiled
def test_qparams_of_other_dtypes_fall_back_to_the_reference() -> None:
    """As after `network.to(torch.bfloat16)`, which also converts the qparams of a quantized layer."""
    matrix = packed("nvfp4", 24, 64)
    matrix.tensors["tensor"] = matrix.tensors["tensor"].bfloat16()
    assert select_kernel(matrix, None, torch.float32).name == "reference"
    matrix = packed("int4/32@float16", 24, 64)
    matrix.tensors["scale"] = matrix.tensors["scale"].bfloat16()
    x = torch.randn(3, 64)
    assert error(x, product(select_kernel(matrix, None, torch.float32), x, matrix, None), matrix, None) < 1e-6


@compiled
def test_dense_products_between_kernel_calls_stay_correct() -> None:
    """The matrix units are shared with PyTorch's own kernels."""
    matrix, x = packed("int4/32@float16", 96, 64), torch.randn(40, 64).bfloat16()
    kernel, weight = select_kernel(matrix, None, torch.bfloat16), torch.randn(96, 64).bfloat16()
    ours, dense = product(kernel, x, matrix, None), F.linear(x, weight)
    for _ in range(3):
        assert torch.equal(product(kernel, x, matrix, None), ours)
        assert torch.equal(F.linear(x, weight), dense)


@compiled
def test_gradients_reach_the_inputs() -> None:
    matrix = packed("int4/32@float16", 24, 64)
    x = torch.randn(3, 64, requires_grad=True)
    product(select_kernel(matrix, None, torch.float32), x, matrix, None).square().sum().backward()
    weight = matrix.unpack().dequantize()
    expected = 2 * (x.detach() @ weight.T) @ weight
    assert x.grad is not None
    assert torch.allclose(x.grad, expected, atol=1e-5)


def layer(
    name: str = "int4-asym/32@float16", inputs: ActivationQuant | None = None, bias: bool = True
) -> QuantizedLinear:
    number_format = get_format(name)
    scheme = QuantizationScheme(number_format, None if inputs is None else inputs.format)
    matrix = number_format.quantize(torch.randn(40, 96))
    return QuantizedLinear.from_quantized(matrix, scheme, bias=torch.randn(40) if bias else None, dtype=torch.float32)


@compiled
def test_a_layer_reports_its_backend() -> None:
    x = torch.randn(2, 96)
    plain, rounded = layer(), layer(inputs=INPUTS["int8"])
    for module, backend in ((plain, "cpu-float"), (rounded, "cpu-integer")):
        y = module(x)
        assert module.backend == backend
        with use_backend("reference"):
            assert torch.allclose(module(x), y, atol=1e-4)
            assert module.backend == "reference"
        assert torch.equal(module(x), y)
        assert module.backend == backend
    with pytest.raises(LookupError, match="cpu-integer"), use_backend("cpu-integer"):
        plain(x)


@compiled
def test_a_layer_notices_changed_tensors() -> None:
    module, x = layer(), torch.randn(2, 96)
    module(x)
    for change in (lambda: module.codes.random_(0, 256), lambda: setattr(module, "scale", module.scale * 2)):
        change()
        with use_backend("reference"):
            expected = module(x)
        assert torch.allclose(module(x), expected, atol=1e-4)


@compiled
def test_a_copy_of_a_layer_has_its_own_tensors() -> None:
    module, x = layer(), torch.randn(2, 96)
    before = module(x)
    copied = copy.deepcopy(module)
    copied.scale.mul_(2)
    assert torch.equal(module(x), before)
    assert torch.allclose(copied(x) - copied.bias, 2 * (before - module.bias), atol=1e-4)


@compiled
@pytest.mark.parametrize("inputs", [None, "int8"])
def test_torch_compile(inputs: str | None) -> None:
    """The kernel is chosen at the first trace, there is one graph, and the operator reports correct shapes."""
    module = layer(inputs=INPUTS[inputs] if inputs else None)
    graph = torch.compile(lambda x: torch.relu(module(x)) + 1, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        for shape in ((2, 96), (1, 3, 96)):
            x = torch.randn(shape)
            assert torch.equal(graph(x), torch.relu(module(x)) + 1)
    assert module.backend == ("cpu-integer" if inputs else "cpu-float")
    scheme = "int4-asym/32@float16" + (" int8 1.0" if inputs else "")
    arguments = (torch.randn(2, 96), module.codes, module.scale, module.zero, None, None, module.bias, None, scheme)
    torch.library.opcheck(torch.ops.smelt.cpu_linear.default, arguments)
