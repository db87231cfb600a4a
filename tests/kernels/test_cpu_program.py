"""Operations of compiled programs against float64: products with dense matrices on every code path."""

from __future__ import annotations

import itertools
import subprocess
import sys
from typing import Any

import pytest
import torch

from smelt.kernels.attention_metadata import AttentionMetadata, AttentionVariant, LayerKVPages
from smelt.kernels.cpu import program as compiled
from smelt.kernels.cpu.program import Program, attention, can_run
from smelt.kernels.gated_activation import SILU, GatedActivation
from smelt.kernels.kv_quant import KV_QUANT_DTYPES, KVQuantFormat
from smelt.kernels.paged import paged_attention_reference
from tests.kernels.instruction_sets import MACHINES, NEEDS_COMPILER, library_for

pytestmark = NEEDS_COMPILER


@pytest.fixture(params=MACHINES)
def library(request: pytest.FixtureRequest) -> Any:
    """Return the library compiled for one instruction set."""
    built = library_for(request.param)
    assert can_run(built)
    return built


def run(program: Program, tokens: int, positions: torch.Tensor | None = None) -> None:
    nothing = torch.zeros(1, dtype=torch.int32)
    pages = AttentionMetadata(nothing, nothing[:0], nothing[:0, None], torch.zeros(tokens, dtype=torch.int64))
    ids = torch.arange(tokens)
    program.run(ids, ids if positions is None else positions, torch.zeros(0, dtype=torch.int64), pages)


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("inputs", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("outputs", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "columns"), [(64, 96), (33, 50), (1, 1), (160, 32)])
@pytest.mark.parametrize("tokens", [1, 3, 5, 16, 40])
def test_products(
    weights: torch.dtype, inputs: torch.dtype, outputs: torch.dtype, rows: int, columns: int, tokens: int, library: Any
) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(rows, columns).to(weights), torch.randn(tokens, columns).to(inputs)
    bias = torch.randn(rows).to(weights) if tokens != 3 else None
    y = torch.full((tokens, rows), torch.nan, dtype=outputs)
    program = Program(library)
    program.dense(weight, bias, x, y)
    run(program, tokens)
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    tolerance = 1e-5 if outputs == torch.float32 else 1e-2
    assert torch.allclose(y.double(), expected, rtol=tolerance, atol=tolerance * columns**0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 16, 50])
def test_norm_and_gate(dtype: torch.dtype, width: int, library: Any) -> None:
    torch.manual_seed(1)
    hidden, residual = torch.randn(5, width), torch.randn(5, width).to(dtype)
    weight, y = torch.randn(width), torch.empty(5, width, dtype=dtype)
    gate_up, gated = (3 * torch.randn(5, 2 * width)).to(dtype), torch.empty(5, width, dtype=dtype)
    total = hidden + 0.7 * residual.float()
    program = Program(library)
    program.add(
        compiled.ADD_RMS_NORM, x=hidden, other=residual, y=y, weight=weight, weight_type=weight.dtype, dtype=dtype,
        width=width, epsilon=1e-5, scale=0.7,
    )  # fmt: skip
    up = gate_up.view(-1)[width:]
    program.act_and_mul(SILU, gate_up, up, 2 * width, gated, width)
    run(program, 5)
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-2}
    assert torch.allclose(hidden, total, atol=1e-6)
    expected = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + 1e-5) * weight
    assert torch.allclose(y.float(), expected, **tolerance)
    wide = gate_up.float()
    assert torch.allclose(gated.float(), torch.nn.functional.silu(wide[:, :width]) * wide[:, width:], **tolerance)


@pytest.mark.parametrize("activation", [GatedActivation("gelu_tanh"), GatedActivation("swiglu_oai", 1.7, 2.0)])
def test_activations(activation: GatedActivation, library: Any) -> None:
    """Far beyond the limit as well, on both sides."""
    gate, up = torch.linspace(-9, 9, 70).view(2, 35), torch.linspace(5, -5, 70).view(2, 35)
    gate_up, gated = torch.cat([gate, up], dim=1), torch.empty(2, 35)
    program = Program(library)
    program.act_and_mul(activation, gate_up, gate_up.view(-1)[35:], 70, gated, 35)
    run(program, 2)
    assert torch.allclose(gated, activation(gate, up), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(8, 8), (24, 24), (64, 64), (64, 24), (48, 36)])
def test_rope(dtype: torch.dtype, interleaved: bool, head_dim: int, rotary_dim: int, library: Any) -> None:
    """In place, in two heads of rows that are wider, at positions in any order."""
    torch.manual_seed(4)
    x, cosines, sines = torch.randn(5, 2 * head_dim + 7).to(dtype), *torch.randn(2, 30, head_dim)
    cosines[:, rotary_dim:], sines[:, rotary_dim:] = 1, 0
    heads, positions = x[:, : 2 * head_dim].double().view(5, 2, head_dim), torch.tensor([17, 0, 29, 3, 3])
    turned, half = torch.zeros_like(heads), rotary_dim // 2
    if interleaved:
        first, second = slice(0, rotary_dim, 2), slice(1, rotary_dim, 2)
    else:
        first, second = slice(half), slice(half, rotary_dim)
    turned[..., first], turned[..., second] = -heads[..., second], heads[..., first]
    expected = heads * cosines[positions][:, None] + turned * sines[positions][:, None]
    rest, program = x[:, 2 * head_dim :].clone(), Program(library)
    operand = {"x": x, "y": x, "dtype": dtype, "x_stride": x.stride(0), "count": 2, "width": head_dim}
    rotary = compiled.RotaryStruct(cosines.data_ptr(), sines.data_ptr(), rotary_dim, interleaved)
    program.add(compiled.ROPE, **operand, params=rotary)
    run(program, 5, positions)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    assert torch.allclose(x[:, : 2 * head_dim].double().view(5, 2, head_dim), expected, rtol=tolerance, atol=tolerance)
    assert torch.equal(x[:, 2 * head_dim :], rest)


@pytest.mark.parametrize("head_dim", [8, 32, 128])
def test_hadamard(head_dim: int, library: Any) -> None:
    torch.manual_seed(5)
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < head_dim:
        matrix = torch.cat([torch.cat([matrix, matrix]), torch.cat([matrix, -matrix])], dim=1)
    x = torch.randn(3, 2, head_dim)
    expected, program = x.double() @ matrix / head_dim**0.5, Program(library)
    program.add(compiled.HADAMARD, x=x, y=x, dtype=x.dtype, x_stride=2 * head_dim, count=2, width=head_dim)
    run(program, 3)
    assert torch.allclose(x.double(), expected, atol=1e-5)


def test_exponentials_far_from_zero(library: Any) -> None:
    """The gate at its extremes: silu(x) is 0 for large negative x and x for large positive x."""
    x = torch.tensor([[-1e30, -100.0, -88.5, -87.0, -20.0, 20.0, 88.0, 1e30]])
    gate_up, gated = torch.cat([x, torch.ones_like(x)], dim=1), torch.empty_like(x)
    program = Program(library)
    program.act_and_mul(SILU, gate_up, gate_up.view(-1)[8:], 16, gated, 8)
    run(program, 1)
    assert torch.allclose(gated, torch.nn.functional.silu(x), rtol=1e-5, atol=1e-30)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("head_dim", "window"), [(64, None), (24, None), (48, 20)])
def test_attention(dtype: torch.dtype, head_dim: int, window: int | None, library: Any) -> None:
    torch.manual_seed(2)
    queries = torch.randn(9, 6, head_dim).to(dtype)
    keys, values = (torch.randn(30, 16, 2, head_dim).to(dtype) for _ in range(2))
    starts, lengths = torch.tensor([0, 1, 9], dtype=torch.int32), torch.tensor([300, 40], dtype=torch.int32)
    tables = torch.randperm(30)[:20].int().repeat(2, 1)
    metadata = AttentionMetadata(starts, lengths, tables, torch.zeros(9, dtype=torch.int64))
    actual = attention(library, queries, keys, values, metadata, 0.2, window)
    expected = paged_attention_reference(queries.float(), keys.float(), values.float(), metadata, 0.2, window)
    assert torch.allclose(actual.float(), expected, atol=1e-5 if dtype == torch.float32 else 2e-2)
    sinks = torch.linspace(-2, 6, 6)
    actual = attention(library, queries, keys, values, metadata, 0.2, window, sinks=sinks)
    variant = AttentionVariant(sinks=sinks)
    expected = paged_attention_reference(
        queries.float(), keys.float(), values.float(), metadata, 0.2, window, variant=variant
    )
    assert torch.allclose(actual.float(), expected, atol=1e-5 if dtype == torch.float32 else 2e-2)


CROSSING = """
import torch
from smelt.kernels.attention_metadata import AttentionMetadata
from smelt.kernels.cpu.build import load_library
from smelt.kernels.cpu.program import attention
queries, pages = torch.randn(16, 1, 32), torch.randn(17, 16, 1, 32)
starts, lengths = torch.tensor([0, 16], dtype=torch.int32), torch.tensor([257], dtype=torch.int32)
metadata = AttentionMetadata(starts, lengths, torch.arange(17, dtype=torch.int32)[None], torch.zeros(16).long())
attention(load_library(), queries, pages, pages, metadata, 0.2)
"""


def test_queries_on_both_sides_of_a_span_stay_in_their_buffers() -> None:
    """In a process of its own: glibc finds the heap damaged when the process frees it."""
    subprocess.run([sys.executable, "-c", CROSSING], check=True, capture_output=True)


@pytest.mark.parametrize(("name", "head_dim"), [*itertools.product(KV_QUANT_DTYPES, [64]), ("int3", 24), ("int3", 80)])
def test_quantized_kv_rows(name: str, head_dim: int, library: Any) -> None:
    """The rows that a program stores, and attention over them."""
    torch.manual_seed(3)
    kv_quant = KVQuantFormat(name, head_dim)
    keys, values = torch.randn(40, 2, head_dim), torch.randn(40, 2, head_dim)
    pages = [torch.zeros(3, 16, 2, kv_quant.row_bytes, dtype=torch.uint8) for _ in range(2)]
    layer = LayerKVPages(*pages, num_kv_heads=2, kv_quant=kv_quant)
    queries, results = torch.randn(40, 4, head_dim), torch.empty(40, 4, head_dim)
    program = Program(library)
    params = program.attention(queries, 4 * head_dim, layer, results, heads=4, scale=0.2, window=None)
    for x, y in ((keys, pages[0]), (values, pages[1])):
        program.add(
            compiled.STORE_KV, x=x, dtype=torch.float32, x_stride=2 * head_dim, y=y, weight_type=params.page_type,
            width=2 * head_dim, params=params,
        )  # fmt: skip
    program.add(compiled.ATTENTION, params=params)
    positions = torch.arange(40)
    starts, lengths = torch.tensor([0, 40], dtype=torch.int32), torch.tensor([40], dtype=torch.int32)
    metadata = AttentionMetadata(starts, lengths, torch.arange(3, dtype=torch.int32)[None], positions)
    program.run(positions, positions, torch.zeros(0, dtype=torch.int64), metadata)
    for x, y in ((keys, pages[0]), (values, pages[1])):
        assert torch.equal(y.view(48, 2, -1)[:40], kv_quant.quantize(x))
    expected = paged_attention_reference(queries, *pages, metadata, 0.2, None, kv_quant)
    assert torch.allclose(results, expected, atol=1e-4)
