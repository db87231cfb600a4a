"""Mixtures of experts on a GPU: routing against PyTorch, grouped GEMMs against a loop over experts.

On a CUDA device, elsewhere under Triton's interpreter.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from tests.kernels.triton_device import DEVICE, HALF, TOLERANCE, distance  # isort: skip  (chooses the interpreter)

from smelt.kernels.gpu import experts as experts_module
from smelt.kernels.gpu import grouped, launch
from smelt.kernels.gpu.activations import QuantizedRows
from smelt.kernels.gpu.experts import Routing, combine, gather_rows, max_tiles, route
from smelt.kernels.gpu.fused_ops import act_and_mul_quantize
from smelt.kernels.gpu.grouped import TILE_SIZES, GroupedDense, GroupedPacked, choose_tile_size
from smelt.kernels.linear import ActivationQuant, PackedMatrix
from smelt.numerics import get_format

EXPERTS, TOP_K = 5, 2
WEIGHT_ONLY = ["int4/32@float16", "int4-asym/32", "int8/32", "int2-asym/64", "int4/row", "nvfp4", "mxfp4", "amxfp4"]
EIGHT_BIT = [("int8/row", "int8"), ("int4/row", "int8"), ("int4/64", "int8"), ("int8-asym/row", "int8"),
             ("fp8-e4m3", "fp8-e4m3"), ("fp8-e4m3/tensor", "fp8-e4m3")]  # fmt: skip


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cpu":
        monkeypatch.setattr(launch, "gemm_config", lambda batch, matrix, integer: (16, 16, 4, 1))
        monkeypatch.setattr(grouped, "dense_config", lambda tile_size: (16, 32, 4, 1))


def logits_for(chosen: Tensor, num_experts: int = EXPERTS) -> Tensor:
    """Return logits that select these experts [tokens, top_k], in order."""
    steps = torch.arange(chosen.shape[1], 0, -1, dtype=torch.float32).expand(chosen.shape)
    return torch.zeros(len(chosen), num_experts).scatter(1, chosen, steps).to(DEVICE)


def routed(chosen: Tensor, tile_size: int = 16, active: Tensor | None = None, num_experts: int = EXPERTS) -> Routing:
    return route(
        logits_for(chosen, num_experts), chosen.shape[1], normalize=True, weight_dtype=torch.float32,
        tile_size=tile_size, active=active,
    )  # fmt: skip


def routings() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    random = torch.rand(24, EXPERTS, generator=generator).argsort(dim=1)[:, :TOP_K]
    return {
        "random": random,
        "empty": random % 2 * 3 + torch.tensor([0, 1]),  # experts 0 to 4, of which 2 has no token
        "one takes all": torch.full((20, 1), 3),
        "single token": torch.tensor([[4, 1]]),
    }


def check_sorted(routing: Routing, chosen: Tensor, active: Tensor | None = None) -> None:
    """Compare the order and the tiles with a stable sort of the pairs."""
    tokens, top_k = chosen.shape
    keep = torch.ones(tokens, dtype=torch.bool) if active is None else active.cpu()
    flat = torch.where(keep[:, None], chosen, EXPERTS).flatten()
    order = torch.argsort(flat, stable=True)
    count = int(keep.sum()) * top_k
    assert routing.pairs[:count].tolist() == order[:count].tolist()
    assert bool((routing.pairs[count:] == -1).all())
    assert torch.equal(routing.row_experts[:count].cpu().long(), flat[order[:count]])
    places = torch.full_like(flat, -1)
    places[order[:count]] = torch.arange(count)
    assert torch.equal(routing.rows.cpu().flatten().long(), places)
    tiles = []
    for expert in range(EXPERTS):
        rows = (flat[order] == expert).nonzero().flatten().tolist()
        size = routing.tile_size
        tiles += [[expert, rows[start], len(rows[start : start + size])] for start in range(0, len(rows), size)]
    assert int(routing.num_tiles) == len(tiles) <= routing.max_tiles
    assert routing.tiles[: len(tiles), :3].tolist() == tiles


def test_many_pairs_are_sorted() -> None:
    """More pairs than a program reads at a time."""
    chosen = torch.rand(550, EXPERTS).argsort(dim=1)[:, :TOP_K]
    logits = torch.zeros(550, EXPERTS).scatter(1, chosen, 1.0)
    routing = route(logits.to(DEVICE), TOP_K, normalize=True, weight_dtype=torch.float32, tile_size=64)
    check_sorted(routing, chosen.sort(dim=1).values)


@pytest.mark.parametrize("ranked", [True, False])
@pytest.mark.parametrize("name", routings())
def test_pairs_are_sorted_by_expert_in_tiles(name: str, ranked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways to sort, some tokens padding, tiles smaller and larger than the pairs of an expert."""
    monkeypatch.setattr(experts_module, "MAX_RANKED_PAIRS", 64 if ranked else 0)
    chosen = routings()[name]
    for tile_size in (8, 16, 64):
        check_sorted(routed(chosen, tile_size), chosen)
        active = torch.arange(len(chosen), device=DEVICE) % 3 != 1
        check_sorted(routed(chosen, tile_size, active), chosen, active)
    nothing = torch.zeros(len(chosen), dtype=torch.bool, device=DEVICE)
    check_sorted(routed(chosen, 16, nothing), chosen, nothing)


@pytest.mark.parametrize("tokens", [1, 3, 40])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(("num_experts", "top_k"), [(60, 4), (128, 8), (3, 3)])
def test_weights_are_those_of_transformers(tokens: int, normalize: bool, num_experts: int, top_k: int) -> None:
    logits = torch.randn(tokens, num_experts).to(HALF)
    values, index = torch.topk(torch.softmax(logits.float(), dim=-1), top_k, dim=-1)
    values = values / values.sum(dim=-1, keepdim=True) if normalize else values
    distinct = (logits.float().sort(dim=-1).values.diff(dim=-1) != 0).all(dim=-1)  # others have ties
    routing = route(logits.to(DEVICE), top_k, normalize=normalize, weight_dtype=HALF, tile_size=16)
    assert torch.equal(routing.experts.cpu()[distinct].long(), index[distinct])
    torch.testing.assert_close(routing.weights.cpu(), values.to(HALF).float(), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("tokens", [1, 100])
def test_ties_go_to_the_first_experts_and_nan_stays_in_range(tokens: int) -> None:
    logits = torch.zeros(tokens, 6, device=DEVICE)
    logits[:, 4:] = 1.0
    routing = route(logits, 4, normalize=True, weight_dtype=torch.float32, tile_size=16)
    assert routing.experts.tolist() == [[4, 5, 0, 1]] * tokens
    logits[0] = float("nan")
    routing = route(logits, 4, normalize=False, weight_dtype=torch.float32, tile_size=16)
    assert routing.experts[0].tolist() == [0, 1, 2, 3] and routing.experts[1:].tolist() == [[4, 5, 0, 1]] * (tokens - 1)


def test_results_are_weighted_and_added() -> None:
    torch.manual_seed(0)
    chosen = routings()["random"]
    active = torch.arange(24, device=DEVICE) != 7
    routing = routed(chosen, active=active)
    y, hidden = torch.randn(48, 70, device=DEVICE), torch.randn(24, 70, device=DEVICE)
    y[routing.num_pairs - TOP_K :] = float("nan")  # rows of padding
    expected = hidden + (y[routing.rows.clamp(min=0).long()] * routing.weights[:, :, None]).sum(dim=1)
    expected[7] = hidden[7]
    combine(y, routing, hidden)
    torch.testing.assert_close(hidden, expected)


def reference(x: Tensor, matrices: Tensor, routing: Routing) -> Tensor:
    """Multiply each sorted row with the matrix of its expert, in float64."""
    return torch.einsum("pc,prc->pr", x.double(), matrices.double()[routing.row_experts.long()])


@pytest.mark.parametrize("name", routings())
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_dense_grouped_gemm(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    matrices = torch.randn(EXPERTS, 40, 72, device=DEVICE, dtype=dtype)
    for tile_size in TILE_SIZES[:2] if DEVICE == "cpu" else TILE_SIZES:
        routing = routed(routings()[name], tile_size)
        x = torch.randn(routing.num_pairs, 72, device=DEVICE, dtype=dtype)
        actual = GroupedDense(matrices)(x, routing)
        assert distance(actual, reference(x, matrices, routing)) < TOLERANCE.get(dtype, 1e-6)
        if routing.num_tokens == 1:
            same = x[:1].expand_as(x)
            assert torch.equal(
                GroupedDense(matrices)(x[:1], routing, shared=True), GroupedDense(matrices)(same.contiguous(), routing)
            )


def packed_experts(name: str, rows: tuple[int, ...], columns: int) -> tuple[list[list[PackedMatrix]], Tensor]:
    """Return the packed parts of the experts, of different magnitudes, and the dequantized matrices."""
    number_format = get_format(name)
    parts = [
        [number_format.quantize(torch.randn(count, columns, device=DEVICE) * 0.1 * (1 + expert)) for count in rows]
        for expert in range(EXPERTS)
    ]
    packed = [
        [PackedMatrix(number_format, len(part.codes), columns, part.pack()) for part in expert] for expert in parts
    ]
    return packed, torch.stack([torch.cat([part.dequantize() for part in expert]) for expert in parts])


@pytest.mark.parametrize("name", WEIGHT_ONLY)
def test_packed_grouped_gemm(name: str) -> None:
    torch.manual_seed(0)
    packed, matrices = packed_experts(name, (24, 8), 192)
    product = GroupedPacked.stack(packed, None, HALF)
    assert product is not None and product.rows == 32 and product.quant is None
    for chosen in routings().values():
        routing = routed(chosen)
        x = torch.randn(routing.num_pairs, 192, device=DEVICE, dtype=HALF)
        assert distance(product(x, routing), reference(x, matrices, routing)) < TOLERANCE[HALF]


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize(("name", "inputs"), EIGHT_BIT)
def test_grouped_gemm_with_eight_bit_inputs(name: str, inputs: str, static: bool) -> None:
    """Inputs are quantized while they are gathered; with static scales, by that of their expert."""
    torch.manual_seed(0)
    packed, matrices = packed_experts(name, (16, 16), 128)
    scale = torch.rand(EXPERTS + 1, device=DEVICE) * 0.05 + 0.01 if static else None
    quantization = ActivationQuant(get_format(inputs), scale)
    product = GroupedPacked.stack(packed, quantization, HALF)
    assert product is not None and product.quant is not None
    for chosen in routings().values():
        routing = routed(chosen)
        x = torch.randn(routing.num_tokens, 128, device=DEVICE, dtype=HALF)
        gathered = gather_rows(x, routing, product.quant)
        assert isinstance(gathered, QuantizedRows)
        rounded = gathered.codes.float() * gathered.scales[:, None]
        rows = x[routing.pairs.long() // chosen.shape[1]].float()
        for expert in range(EXPERTS) if DEVICE == "cuda" or inputs == "int8" else ():  # the interpreter truncates E4M3
            mine = routing.row_experts == expert
            alone = (
                quantization if scale is None else ActivationQuant(quantization.format, scale[expert].reshape(1, 1, 1))
            )
            torch.testing.assert_close(rounded[mine], alone.fake_quantize(rows[mine]), rtol=1e-5, atol=1e-6)
        assert distance(product(gathered, routing), reference(rounded, matrices, routing)) < TOLERANCE[HALF]


def test_gates_are_quantized_by_the_scale_of_the_expert() -> None:
    torch.manual_seed(0)
    routing, scale = routed(routings()["random"]), torch.rand(EXPERTS + 1, device=DEVICE) * 0.05 + 0.01
    quant = grouped.row_quant(ActivationQuant(get_format("int8"), scale))
    gate_up = torch.randn(routing.num_pairs, 64, device=DEVICE, dtype=HALF)
    actual = act_and_mul_quantize(gate_up, quant, row_experts=routing.row_experts)
    assert torch.equal(actual.scales, scale[routing.row_experts.long()])
    gate, up = gate_up.float().chunk(2, dim=1)
    values = torch.nn.functional.silu(gate) * up
    codes = (values / actual.scales[:, None]).round().clamp(-128, 127)
    assert float((codes - actual.codes.float()).abs().max()) <= 1


HOPPER = [("int4/128@float16", None), ("int4-asym/64@float16", None), ("int8/128", None), ("int3/128", None),
          ("int2/128", None), ("nvfp4", None), ("mxfp4", None), ("nf4", None), ("int4/row", None),
          ("fp8-e4m3", "fp8-e4m3"), ("int8/row", "int8"), ("int4/row", "int8"),
          ("int4/128@float16", "int8")]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu" or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU")
@pytest.mark.parametrize(("name", "inputs"), HOPPER)
def test_grouped_gemm_on_hopper(name: str, inputs: str | None) -> None:
    """All tile sizes, experts that end within a tile of weights, rows behind a tile that belong to another expert."""
    from smelt.kernels.gpu.hopper import ARCHITECTURE, GEMM_KERNEL
    from smelt.kernels.gpu.hopper_grouped import GroupedHopper
    from smelt.kernels.gpu.nvrtc import compile_all

    torch.manual_seed(0)
    packed, matrices = packed_experts(name, (128, 80), 1152)
    quantization = None if inputs is None else ActivationQuant(get_format(inputs))
    product = GroupedHopper.stack(packed, quantization, HALF)
    assert product is not None and product.rows == 208
    counts = itertools.product((1, 240, 288), (1, 2), product.tile_sizes)  # tokens, top_k
    sources = {source for count in counts for source in product.kernel_sources(*count, HALF)}
    list(compile_all(sources, GEMM_KERNEL, ARCHITECTURE))
    for chosen, tile_size in itertools.product(routings().values(), product.tile_sizes):
        repeated = chosen.repeat(1 if len(chosen) == 1 else 12, 1)
        routing = routed(repeated, tile_size)
        x = torch.randn(routing.num_tokens, 1152, device=DEVICE, dtype=HALF)
        gathered = gather_rows(x, routing, product.quant)
        rows = x[routing.pairs.long() // chosen.shape[1]].float()
        expected = reference(rows if quantization is None else quantization.fake_quantize(rows), matrices, routing)
        y = product(gathered, routing)
        assert distance(y, expected) < 6e-3, (tile_size, len(repeated))
        assert torch.equal(y, product(gather_rows(x, routing, product.quant), routing))
        if len(chosen) == 1 and quantization is None:
            assert torch.equal(product(x, routed(repeated, tile_size), shared=True), y)


def test_matrices_that_the_kernel_does_not_support() -> None:
    for name, inputs in (("int3/32", None), ("dint4", None), ("nf4", None), ("fp8-e4m3", None), ("nvfp4", "int8")):
        quantization = None if inputs is None else ActivationQuant(get_format(inputs))
        assert GroupedPacked.stack(packed_experts(name, (16,), 64)[0], quantization, HALF) is None


def test_the_list_of_tiles_is_bounded_and_tiles_fit_most_experts() -> None:
    assert max_tiles(8, 128, 8) == 8 and max_tiles(512, 128, 16) == 160 and max_tiles(0, 8, 16) == 1
    sizes = [choose_tile_size(tokens, 8, 128, TILE_SIZES) for tokens in (1, 64, 100, 256, 1024, 8192)]
    assert sizes == [16, 16, 16, 32, 128, 128]
