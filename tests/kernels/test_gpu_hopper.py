"""Kernels for Hopper GPUs. Without a GPU: the layout of shuffled weights, and that all kernels compile if NVRTC is
installed. With one: every format against the reference."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest
import torch

from smelt.kernels.gpu import hopper, hopper_config, hopper_layout, hopper_source, nvrtc
from smelt.kernels.gpu.hopper_config import Config, GemvConfig, StreamKConfig, fit_stages
from smelt.kernels.gpu.hopper_layout import Layout
from smelt.kernels.gpu.matrix import Matrix, describe
from smelt.kernels.linear import ActivationQuant, PackedMatrix
from smelt.models.gguf import gguf_config, gguf_packed, read_gguf
from smelt.models.quantization_scheme import QuantizationScheme
from smelt.models.quantized import QuantizedLinear
from smelt.numerics import QuantizedTensor, get_format
from smelt.numerics.packing import unpack
from tests.kernels.ptxas import problems

BF16, FP16, INT8, E4M3 = torch.bfloat16, torch.float16, torch.int8, torch.float8_e4m3fn
HALF_FORMATS = [
    ("int4/128@float16", BF16), ("int4/128@float16", FP16), ("int4/128@bfloat16", BF16), ("int4-asym/128", BF16),
    ("int4/row@float16", BF16), ("int4/32", BF16), ("int4/256", BF16), ("int4-asym/row", BF16), ("int8/128", BF16),
    ("int8-asym/64", BF16), ("int8-asym/64", FP16), ("int3/128@float16", BF16), ("int3-asym/64", BF16),
    ("int2/128", BF16), ("int2-asym/64", FP16), ("mxfp4", BF16), ("nvfp4", BF16), ("nvfp4", FP16),
    ("int5/32@float16", BF16), ("int5-asym/128", FP16), ("int6/64", BF16), ("int7/128@float16", BF16),
]  # fmt: skip
TABLE_FORMATS = [
    ("nf4", BF16), ("nf4", FP16), ("nf4/128@float16", BF16), ("nf4/row", BF16), ("nf3", BF16), ("fp4", BF16),
]  # fmt: skip
# Scales in float16 with a factor per row. Q4_K, Q5_K and Q6_K of GGUF are the first three, Q4_1 and Q5_1 the next.
FOLDED_FORMATS = [
    ("int4-float32-zero/32", BF16), ("int5-float32-zero/32", BF16), ("int6/16", BF16),
    ("int4-float32-zero/32@float16", BF16), ("int5-float32-zero/32@float16", FP16), ("int6/16", FP16),
    ("int4-float-zero/128", BF16), ("int3-float-zero/64", FP16), ("int8-float32-zero/32", BF16),
    ("int2-float-zero/row", BF16), ("int4-asym/16", BF16), ("int4-float-zero/16", BF16),
]  # fmt: skip
EIGHT_BIT_FORMATS = [("fp8-e4m3", "fp8-e4m3"), ("int8/row", "int8"), ("int4/row", "int8"), ("int4/128@float16", "int8")]
on_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)


def packed_matrix(name: str, rows: int, columns: int, device: str = "cpu") -> tuple[PackedMatrix, QuantizedTensor]:
    number_format = get_format(name)
    quantized = number_format.quantize(torch.randn(rows, columns, device=device) * 0.05)
    return PackedMatrix(number_format, rows, columns, quantized.pack()), quantized


def shuffled(matrix: Matrix, operands: torch.dtype) -> hopper_layout.ShuffledMatrix:
    layout = hopper_layout.layout_of(matrix, operands)
    assert layout is not None
    return hopper_layout.shuffle(matrix, layout)


def code_at(tile: torch.Tensor, layout: Layout, row: int, column: int) -> int:
    """Read one code of a tile, as a thread of the kernel does: from its words, which it reads 16 bytes at a time."""
    per_register = 4 // layout.operand_bytes
    warp, half, group = row // 16, row % 16 // 8, row % 8
    step, rest = divmod(column, 8 * per_register)
    column_half, rest = divmod(rest, 4 * per_register)
    quad, place = divmod(rest, per_register)
    thread, register = 32 * warp + 4 * group + quad, 2 * column_half + half

    def word(index: int, start: int = 0, size: int = 4) -> int:
        chunk, within = divmod(index, size)
        at = start + (chunk * 128 + thread) * 4 * size + 4 * within
        return int.from_bytes(bytes(tile[at : at + 4].tolist()), "little")

    if layout.operand_bytes == 1:
        if layout.bits == 8:
            return word(4 * step + register) >> (8 * place) & 255
        return word(2 * step + register // 2) >> (8 * place + 4 * (register & 1)) & 15
    if layout.bits == 8:
        return word(2 * step + register // 2) >> (16 * (register & 1) + 8 * place) & 255
    if layout.element == "table":
        return word(step) >> (8 * register + 4 * place) & 15
    byte = 16 * place + 8 * column_half
    low_bits = 2 if layout.bits < 4 else 4
    if low_bits == 4:
        low = word(step) >> (byte + 4 * half) & 15
    else:
        low = word(step // 2) >> (byte + 4 * (step & 1) + 2 * half) & 3
    if layout.bits == 6:
        return low | (word(step // 2, 4096) >> (byte + 4 * (step & 1) + 2 * half) & 3) << 4
    if layout.bits == low_bits:
        return low
    return low | (word(step // 4, 1024 * low_bits, 2) >> (byte + 2 * (step & 3) + half) & 1) << low_bits


@pytest.mark.parametrize(
    ("name", "operands"),
    [*HALF_FORMATS, *TABLE_FORMATS, *FOLDED_FORMATS, ("fp8-e4m3", E4M3), ("int8/row", INT8), ("int4/row", INT8)],
)
def test_every_code_is_where_the_kernel_reads_it(name: str, operands: torch.dtype) -> None:
    packed, _ = packed_matrix(name, 100, 256)
    matrix = describe(packed)
    weights = shuffled(matrix, operands)
    codes = unpack(matrix.codes, matrix.bits, matrix.columns)
    flip = 1 << (matrix.bits - 1) if operands == INT8 else 0  # two's complement
    assert weights.tiles.shape[:2] == (2, 2)
    for row, column in itertools.product(range(0, 100, 7), range(0, 256, 5)):
        tile = weights.tiles[row // 64, column // 128]
        assert code_at(tile, weights.layout, row % 64, column % 128) == int(codes[row, column]) ^ flip


def test_scales_and_zero_points_follow_the_codes() -> None:
    packed, _ = packed_matrix("int4-asym/64@float16", 70, 256)
    matrix = describe(packed)
    weights = shuffled(matrix, BF16)
    assert weights.layout == Layout("int", 4, "bfloat16", 2, "float16", True, 8)
    tile = weights.tiles[1, 1]
    scales = tile[4096 : 4096 + 256].view(torch.float16).reshape(64, 2)
    zeros = tile[4352 : 4352 + 128].reshape(64, 2)
    assert matrix.zero is not None
    for row, group in itertools.product(range(64, 70), range(2)):
        assert scales[row - 64, group] == matrix.scale.reshape(70, 4)[row, 2 + group]
        assert zeros[row - 64, group] == matrix.zero.reshape(70, 4)[row, 2 + group]


def folded_weights(weights: hopper_layout.ShuffledMatrix, columns: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """Return the weights [rows, columns] that codes and the stored scales and shifts stand for."""
    layout, rows = weights.layout, weights.rows
    start, per_group = layout.code_bytes, 1 + layout.shifts
    stored = weights.tiles[..., start : start + 128 * layout.groups * per_group].contiguous().view(FP16).float()
    stored = stored.unflatten(2, (64, layout.groups, per_group)).transpose(1, 2).flatten(0, 1)[:rows]
    scale = stored[..., 0].flatten(1)[:, columns * layout.groups // 128]
    shift = stored[..., 1].flatten(1)[:, columns * layout.groups // 128] if layout.shifts else 0
    assert weights.row_scale is not None
    return ((codes.float() - layout.default_zero) * scale + shift) * weights.row_scale[:, None]


@pytest.mark.parametrize(("name", "operands"), [each for each in FOLDED_FORMATS if "asym" not in each[0]])
@pytest.mark.parametrize("size", [1e-12, 1e-4, 1.0, 1e12])
def test_scales_in_float16_stand_for_the_same_weights(name: str, operands: torch.dtype, size: float) -> None:
    """Rows of very different magnitude, groups with one code, groups far from zero."""
    number_format = get_format(name)
    if number_format.scale_dtype == "float16" and size != 1.0:
        pytest.skip("float16 has no such scales")
    weight = torch.randn(70, 320) * size * torch.logspace(-3, 3, 70)[:, None]
    weight[3, 64:128] = 0
    weight[4] = weight[4].abs() + 10 * size
    quantized = number_format.quantize(weight)
    if "zero" in name:
        assert quantized.qparams.zero is not None
        quantized.qparams.zero[5] += 40.5  # weights that are all far from zero
        one_code = slice(0, number_format.effective_group_size(320))
        quantized.codes[7, one_code] = 0  # a constant group of a GGUF file
        quantized.qparams.scale[7, 0], quantized.qparams.zero[7, 0] = 100 * weight[7].abs().amax(), -0.01
    packed = PackedMatrix(number_format, 70, 320, quantized.pack())
    weights = shuffled(describe(packed), operands)
    ours = folded_weights(weights, torch.arange(320), quantized.codes).double()
    expected = packed.unpack().dequantize().double()
    assert relative_error(ours, expected) < 3e-4
    for row in range(70):
        assert relative_error(ours[row], expected[row]) < 1e-3, row
    if "zero" in name:
        torch.testing.assert_close(ours[7, one_code], expected[7, one_code], rtol=1e-3, atol=0)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"])
def test_every_type_of_gguf_files_has_a_layout(kind: str, tmp_path: Path) -> None:
    from tests.models.test_packed import llama_file  # needs more than a machine for GPU tests has

    file = read_gguf(llama_file(tmp_path / "m.gguf", kind, flat=True))
    packed = gguf_packed(file, gguf_config(file))
    for quantized in packed.values():
        rows, columns = quantized.codes.shape
        weights = shuffled(describe(PackedMatrix(quantized.format, rows, columns, quantized.pack())), BF16)
        if weights.layout.normalized:
            ours = folded_weights(weights, torch.arange(columns), quantized.codes).reshape(rows, -1, 16)
            expected = quantized.dequantize().reshape_as(ours)
            error = (ours - expected).abs().amax(-1) / expected.abs().amax(-1).clamp(min=1e-9)
            assert float(error.max()) < 2e-3


@pytest.mark.parametrize(
    ("name", "columns", "operands"),
    [
        ("int4/128", 4000, BF16),  # x is copied in panels of 128 bytes
        ("int4/48", 4032, BF16),  # groups that tiles do not contain
        ("int4/8", 256, BF16),
        ("int5/128", 256, INT8),
        ("int4/16", 256, INT8),
        ("dint4/128", 256, BF16),
        ("amxfp4", 256, BF16),
        ("mxfp4", 256, FP16),  # powers of two that float16 does not have
        ("int4-asym/128", 256, INT8),
        ("nf4/16", 256, BF16),
        ("fp8-e4m3", 256, BF16),
    ],
)
def test_other_matrices_are_refused(name: str, columns: int, operands: torch.dtype) -> None:
    assert hopper_layout.layout_of(describe(packed_matrix(name, 64, columns)[0]), operands) is None


def test_matrices_are_stacked_only_along_whole_tiles() -> None:
    first, second = (describe(packed_matrix("nvfp4", rows, 256)[0]) for rows in (128, 40))
    parts = [shuffled(matrix, BF16) for matrix in (first, second)]
    assert parts[0].factor != parts[1].factor
    both = hopper_layout.concatenate(parts)
    assert both is not None and both.rows == 168 and both.factor == 1.0 and both.row_scale is not None
    assert both.row_scale[127] == parts[0].factor and both.row_scale[128] == parts[1].factor
    assert hopper_layout.concatenate(parts[::-1]) is None


def test_matrices_of_experts_are_stacked() -> None:
    """Experts of 100 rows, which end within a tile; each keeps the scale of its tensor."""
    parts = [shuffled(describe(packed_matrix("nvfp4", 100, 256)[0]), BF16) for _ in range(3)]
    both = hopper_layout.stack(parts)
    assert both.rows == 100 and both.tiles.shape[0] == 6 and both.factor == 1.0 and both.row_scale is not None
    assert torch.equal(both.tiles[2:4], parts[1].tiles)
    assert both.row_scale[[99, 100, 200]].tolist() == pytest.approx([part.factor for part in parts])
    plain = hopper_layout.stack([shuffled(describe(packed_matrix("int4/128", 64, 256)[0]), BF16) for _ in range(2)])
    assert plain.row_scale is None


def test_a_layer_without_its_weights_computes_with_the_product() -> None:
    packed, quantized = packed_matrix("int4/128", 24, 128)
    scheme = QuantizationScheme(packed.format)
    layer = QuantizedLinear.from_quantized(quantized, scheme, bias=torch.ones(24), dtype=torch.float32)
    x = torch.randn(2, 3, 128)
    expected = layer(x)
    weight = torch.cat([torch.zeros(8, 128), layer.weight])
    layer.move_weights(lambda inputs: inputs @ weight.T, slice(8, 32), "elsewhere")
    torch.testing.assert_close(layer(x), expected)
    assert layer.codes.numel() == 0 and layer.backend == "elsewhere"
    with pytest.raises(Exception, match="rearranged"):
        layer.weight  # noqa: B018


def layouts() -> list[Layout]:
    found = []
    eight_bit = [("fp8-e4m3", E4M3), ("int8/row", INT8), ("int4/128@float16", INT8)]
    for name, operands in [*HALF_FORMATS, *TABLE_FORMATS, *FOLDED_FORMATS, *eight_bit]:
        layout = hopper_layout.layout_of(describe(packed_matrix(name, 64, 256)[0]), operands)
        assert layout is not None
        found.append(layout)
    return found


def test_shared_memory_and_stages_fit() -> None:
    batches = (1, 16, 64, 130, 300)
    for layout, rows, columns, batch in itertools.product(layouts(), (64, 4096, 28672), (256, 14336), batches):
        tiles = torch.empty(rows // 64, columns // 128, 0, dtype=torch.uint8)
        weights = hopper_layout.ShuffledMatrix(layout, tiles, None, 1.0, rows, columns)
        config = hopper_config.choose_config(batch, weights, 132)
        assert config.shared_bytes(layout) <= 227 * 1024
        if isinstance(config, StreamKConfig):
            assert config.stages >= 2, "a stage is given back when the next one is in use"
        else:
            assert config.stages % config.k_groups == 0
        assert hopper_config.choose_gemv_config(weights, 132).shared_bytes(layout, columns // 128) <= 227 * 1024


def test_kernels_of_all_batch_sizes_are_known_before_any_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    hopper_linear = pytest.importorskip("smelt.kernels.gpu.hopper_linear")
    monkeypatch.setattr(hopper_linear, "num_sms", lambda _: 132)
    for name, operands, inputs in (("int4/128@float16", BF16, None), ("fp8-e4m3", E4M3, "fp8-e4m3")):
        weights = shuffled(describe(packed_matrix(name, 6144, 1024)[0]), operands)
        product = hopper_linear.HopperLinear(weights, inputs and ActivationQuant(get_format(inputs)))
        known = product.kernel_sources(BF16)
        for batch in (2, 3, 17, 33, 90, 128, 129, 143, 145, 200, 255, 257, 300, 512, 1000, 1025, 2047, 2048):
            config = hopper_config.choose_config(batch, weights, 132)
            taken = product.path(batch) == "gemm"
            assert not taken or hopper_source.kernel_source(weights.layout, config, BF16) in known, batch


def test_all_kernels_compile(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        nvrtc._nvrtc()
    except nvrtc.CudaError:
        pytest.skip("NVRTC is not installed")
    monkeypatch.setenv("SMELT_CACHE", str(tmp_path))
    for layout in layouts():
        sources = [hopper_source.dequantize_source(layout)]
        for config in (Config(16, 1, 1, 2, 2, 8, 2, mma=True), Config(128, 4, 2, 1, 1, 8, 1, flush=False)):
            sources.append(hopper_source.kernel_source(layout, fit_stages(config, layout, 32), BF16))
        for tile_n, grouping in ((8, "early"), (128, "grouped")):
            grouped_config = hopper_config.choose_grouped_config(tile_n, 64, layout, 24, 16, 132)
            sources.append(hopper_source.kernel_source(layout, grouped_config, BF16, grouping))  # type: ignore[arg-type]
        if not (layout.grouped and layout.operands == "int8"):
            sources.append(hopper_source.kernel_source(layout, hopper_config.stream_k_config(128, layout), BF16))
        if hopper.supports_gemv(layout):
            sources.append(hopper_source.gemv_source(layout, GemvConfig(2, 3, 9, 2), residual=True))
            sources.append(hopper_source.gemv_source(layout, GemvConfig(1, 3, 9, 1, gated=True), norm=True))
        for source in sources:
            assert nvrtc.compile_to_cubin(source, "kernel", "sm_90a")
    with pytest.raises(nvrtc.CudaError, match="cannot be compiled"):
        nvrtc.compile_to_cubin("this is not CUDA", "kernel", "sm_90a")


@pytest.mark.parametrize(("name", "dtype"), TABLE_FORMATS)
def test_a_gemv_has_the_values_of_a_table_in_float16(name: str, dtype: torch.dtype) -> None:
    layout = hopper_layout.layout_of(describe(packed_matrix(name, 64, 256)[0]), dtype)
    assert layout is not None
    values = torch.tensor(layout.table).to(FP16).view(torch.uint16).tolist()
    line = "#define TABLE_VALUES " + ", ".join(f"0x{value:04X}" for value in values)
    assert line in hopper_source.gemv_source(layout, GemvConfig(2, 3, 9, 2)).splitlines()


REPORTED_FORMATS = [
    *((name, BF16) for name in ("int4/128@float16", "int3/128@float16", "int2/128@float16", "int8/128@float16")),
    *((name, BF16) for name in ("int4-asym/128", "mxfp4", "nvfp4", "nf4", *(name for name, _ in FOLDED_FORMATS[:3]))),
    ("fp8-e4m3", E4M3), ("int8/row", INT8), ("int4/row", INT8), ("int4/128@float16", INT8),
]  # fmt: skip


# Bytes that these kernels load back, with CUDA 13.0. With half as many weight tiles in a block, those for batches would
# not spill; which is faster has not been measured.
KNOWN_SPILLS = {
    ("int8/128@float16", BF16, "batch 128"): 36,
    ("int4/128@float16", INT8, "batch 64"): 32,
    ("int4/128@float16", INT8, "batch 128"): 652,
    ("int4/128@float16", INT8, "batch 512"): 652,
}


def engine_sources(layout: Layout) -> dict[str, str]:
    """Return the kernels that the engine uses for a layer of a Llama 8B on an H200, at all kinds of batch sizes."""
    weights = hopper_layout.ShuffledMatrix(layout, torch.empty(448, 32, 0), None, 1.0, 28672, 4096)
    sources = {"dequantize": hopper_source.dequantize_source(layout)}
    for batch in (8, 64, 128, 512):
        config = hopper_config.choose_config(batch, weights, 132)
        sources[f"batch {batch}"] = hopper_source.kernel_source(layout, config, BF16)
    if hopper.supports_gemv(layout):
        config = hopper_config.choose_gemv_config(weights, 132)
        sources["gemv"] = hopper_source.gemv_source(layout, config, norm=True)
    return sources


@pytest.mark.parametrize(("name", "operands"), REPORTED_FORMATS)
def test_no_kernel_spills_registers_or_serializes_products(name: str, operands: torch.dtype) -> None:
    if not nvrtc.is_available():
        pytest.skip("NVRTC is not installed")
    layout = hopper_layout.layout_of(describe(packed_matrix(name, 64, 256)[0]), operands)
    assert layout is not None
    for kernel, source in engine_sources(layout).items():
        report = nvrtc.compiler_report(source, "kernel", "sm_90a")
        lines = problems(report, KNOWN_SPILLS.get((name, operands, kernel), 0))
        assert not lines, f"{kernel}: {lines}"


def test_spills_are_reported() -> None:
    """A kernel with too few registers for what it keeps is not fine."""
    if not nvrtc.is_available():
        pytest.skip("NVRTC is not installed")
    source = """extern "C" __global__ __launch_bounds__(1024, 2) void kernel(float* x) {
        float values[64];
        for (int i = 0; i < 64; ++i) values[i] = x[1024 * i + threadIdx.x];
        __syncthreads();
        for (int i = 0; i < 64; ++i) x[1024 * i + threadIdx.x] = values[i] * values[63 - i];
    }"""
    assert problems(nvrtc.compiler_report(source, "kernel", "sm_90a"))
    fine = "ptxas info    : Used 168 registers\n"
    for warning in (
        "Potential Performance Loss: wgmma.mma_async instructions are serialized due to",
        "(C7514) Potential",
    ):
        assert problems(fine + warning) == [warning]
    assert not problems(fine + "0 bytes spill stores")


def relative_error(y: torch.Tensor, expected: torch.Tensor) -> float:
    return float((y.double() - expected).norm() / expected.norm())


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize(("name", "dtype"), [*HALF_FORMATS, *TABLE_FORMATS, *FOLDED_FORMATS])
def test_products_equal_the_reference(name: str, dtype: torch.dtype) -> None:
    """Random shapes that fill no tile, batches on both sides of every tile size, outliers in x, with a bias."""
    generator = random.Random(name)
    for batch in (1, 2, 8, 9, 16, 31, 64, 65, 129, 700):
        rows, columns = generator.randrange(1, 700), 64 * generator.randrange(1, 40)
        packed, quantized = packed_matrix(name, rows, columns, "cuda")
        matrix = describe(packed)
        if hopper_layout.layout_of(matrix, dtype) is None:  # columns that groups do not divide
            continue
        weights = shuffled(matrix, dtype)
        x, bias = torch.randn(batch, columns, device="cuda", dtype=dtype), torch.randn(rows, device="cuda", dtype=dtype)
        x[:, :: columns // 3] *= 50
        expected = x.double() @ quantized.dequantize().double().T + bias.double()
        products = [hopper.gemm(x, weights, bias)]
        if batch == 1 and hopper.supports_gemv(weights.layout):
            products.append(hopper.gemv(x, weights, bias))
        for y in products:
            assert relative_error(y, expected) < 4e-3, (batch, rows, columns)
        if weights.layout.normalized:
            assert relative_error(hopper.dequantize(weights), quantized.dequantize().double()) < 2e-3
        else:
            assert torch.equal(hopper.dequantize(weights), quantized.dequantize().to(dtype))


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("name", ["int4-float32-zero/32", "int6/16", "int4/128@float16"])
@pytest.mark.parametrize("batch", [1, 20, 70, 600])
def test_products_are_written_into_columns_of_a_matrix(name: str, batch: int) -> None:
    x = torch.randn(batch, 512, device="cuda", dtype=BF16)
    for rows, start, width in ((256, 64, 512), (100, 3, 512), (64, 8, 77)):
        weights = shuffled(describe(packed_matrix(name, rows, 512, "cuda")[0]), BF16)
        y = torch.full((batch, width), 7.0, device="cuda", dtype=BF16)
        configs = [None, *[hopper_config.stream_k_config(128, weights.layout)] * (batch > 1)]
        for config in configs:
            part = hopper.gemm(x, weights, config=config, out=y[:, start : start + rows])
            assert torch.equal(part, hopper.gemm(x, weights, config=config))
            assert (y[:, :start] == 7).all() and (y[:, start + rows :] == 7).all()
        if batch == 1:
            assert torch.equal(hopper.gemv(x, weights, out=y[:, start : start + rows]), hopper.gemv(x, weights))


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize(("name", "dtype"), [*HALF_FORMATS, *TABLE_FORMATS, *FOLDED_FORMATS])
def test_gemv_is_fused_with_norm_gate_and_residual(name: str, dtype: torch.dtype) -> None:
    for rows, columns in ((128, 256), (384, 4096), (28672, 2048)):
        packed, quantized = packed_matrix(name, rows, columns, "cuda")
        weights = shuffled(describe(packed), dtype)
        x, norm = (torch.randn(1, columns, device="cuda", dtype=dtype) for _ in range(2))
        matrix, x64 = quantized.dequantize().double(), x.double()
        normed = x64 * torch.rsqrt(x64.square().mean() + 1e-5) * norm.double()
        assert relative_error(hopper.gemv(x, weights, norm=norm, epsilon=1e-5), normed @ matrix.T) < 4e-3
        gate, up = (normed @ matrix.T).chunk(2, dim=1)
        gated = hopper.gemv(x, weights, norm=norm, epsilon=1e-5, gated=True)
        assert relative_error(gated, torch.nn.functional.silu(gate) * up) < 4e-3
        hidden = torch.randn(1, rows, device="cuda", dtype=dtype)
        expected = hidden.double() + x64 @ matrix.T
        assert hopper.gemv(x, weights, residual=hidden) is hidden and relative_error(hidden, expected) < 4e-3


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize(("name", "inputs"), EIGHT_BIT_FORMATS)
def test_eight_bit_products_equal_the_reference(name: str, inputs: str) -> None:
    from smelt.kernels.gpu.hopper_linear import HopperLinear

    rule = ActivationQuant(get_format(inputs))
    for batch in (1, 7, 16, 40, 64, 100, 300):
        packed, quantized = packed_matrix(name, 16 * random.Random(batch).randrange(1, 60), 1152, "cuda")
        product = HopperLinear.prepare([packed], rule, BF16)
        assert product is not None
        x = torch.randn(batch, 1152, device="cuda", dtype=BF16)
        expected = rule.fake_quantize(x.float()).double() @ quantized.dequantize().double().T
        assert relative_error(product(x), expected) < 4e-3, batch


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize(("name", "inputs"), [("fp8-e4m3", "fp8-e4m3"), ("int8/row", "int8"), ("int4/row", "int8")])
@pytest.mark.parametrize("static", [False, True])
def test_a_quantized_gemv_is_fused_with_norm_gate_and_residual(name: str, inputs: str, static: bool) -> None:
    from smelt.kernels.gpu.hopper_linear import HopperLinear

    rule = ActivationQuant(get_format(inputs), torch.full((1,), 0.02, device="cuda") if static else None)
    for rows, columns in ((128, 256), (384, 14336), (28672, 2048)):
        packed, quantized = packed_matrix(name, rows, columns, "cuda")
        product = HopperLinear.prepare([packed], rule, BF16)
        assert product is not None and product.path(1) == "gemv"
        weights, quant = product.weights, product.quant
        x, norm = (torch.randn(1, columns, device="cuda", dtype=BF16) for _ in range(2))
        normed = (x.float() * torch.rsqrt(x.float().square().mean() + 1e-5) * norm.float()).to(BF16)
        matrix = quantized.dequantize().double()
        expected = rule.fake_quantize(normed.float()).double() @ matrix.T
        fused = {"quant": quant, "norm": norm, "epsilon": 1e-5}
        assert relative_error(hopper.gemv(x, weights, **fused), expected) < 1e-2  # a rounded x may have another code
        gate, up = expected.chunk(2, dim=1)
        gated = hopper.gemv(x, weights, **fused, gated=True)
        assert relative_error(gated, torch.nn.functional.silu(gate) * up) < 2e-2
        hidden = torch.randn(1, rows, device="cuda", dtype=BF16)
        added = hidden.double() + rule.fake_quantize(x.float()).double() @ matrix.T
        assert hopper.gemv(x, weights, quant=quant, residual=hidden) is hidden and relative_error(hidden, added) < 4e-3
        for value in (float("nan"), float("inf")):
            x[0, 5] = value
            codes = product(x.repeat(2, 1))[0]  # the GEMM, after a kernel that quantizes
            assert torch.equal(product(x)[0].isnan(), codes.isnan())
            assert value != value or relative_error(product(x)[0], codes.double()) < 4e-3


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("batch", [1, 5, 40, 90, 100])
def test_every_configuration_gives_the_same(batch: int) -> None:
    """Teams, splits, stages and both places of the scales: all within rounding, and each the same twice."""
    packed, quantized = packed_matrix("int4-asym/64@float16", 448, 2176, "cuda")
    weights = shuffled(describe(packed), BF16)
    x = torch.randn(batch, 2176, device="cuda", dtype=BF16)
    expected = x.double() @ quantized.dequantize().double().T
    tile_n = next(size for size in hopper_config.TILE_N if size >= batch)
    mma = tile_n <= 32
    for rows, k_tiles, teams, split, flush in itertools.product((1, 2, 3), (1, 2), (1, 2, 3), (1, 2, 4), (True, False)):
        config = fit_stages(Config(tile_n, rows, 1, k_tiles, teams, 6, split, flush, mma), weights.layout, 17)
        most = 2 if tile_n > 64 and flush else 4 if tile_n > 64 else 6
        if config.shared_bytes(weights.layout) > 227 * 1024 or rows * teams > most:
            continue
        y = hopper.gemm(x, weights, config=config)
        assert relative_error(y, expected) < 4e-3, config
        assert torch.equal(y, hopper.gemm(x, weights, config=config)), config


STREAM_K_SHAPES = [  # batch, rows, columns
    (1, 64, 128), (130, 449, 2176), (256, 100, 14336), (500, 6144, 1024), (700, 28672, 512), (192, 1000, 4096),
]  # fmt: skip


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize(
    ("name", "operands"),
    [("int4-asym/64@float16", BF16), ("nvfp4", BF16), ("nf4", BF16), ("int8/128", FP16), ("int3/128", BF16),
     ("int4-float32-zero/32", BF16), ("int5-float32-zero/32", BF16), ("int6/16", BF16),
     ("fp8-e4m3", E4M3), ("int8/row", INT8), ("int4/row", INT8)],
)  # fmt: skip
def test_stream_k_equals_the_reference(name: str, operands: torch.dtype) -> None:
    """Tiles of one block and of many, blocks with several tiles, rows that fill no tile; launches right after another,
    which share flags, give the same again."""
    for (batch, rows, columns), tile_n in itertools.product(STREAM_K_SHAPES, hopper_config.STREAM_K_N):
        packed, quantized = packed_matrix(name, rows, columns, "cuda")
        weights = shuffled(describe(packed), operands)
        config = hopper_config.stream_k_config(tile_n, weights.layout)
        if operands == INT8:
            x = torch.randint(-127, 128, (batch, columns), device="cuda", dtype=INT8)
        else:
            x = torch.randn(batch, columns, device="cuda").to(operands)
        by_token = torch.rand(batch, device="cuda") if operands.itemsize == 1 else None
        bias = torch.randn(rows, device="cuda", dtype=BF16 if operands.itemsize == 1 else operands)
        expected = x.double() @ quantized.dequantize().double().T
        expected = (expected if by_token is None else by_token[:, None].double() * expected) + bias.double()
        results = [hopper.gemm(x, weights, bias, by_token, bias.dtype, config) for _ in range(3)]
        assert relative_error(results[0], expected) < 4e-3, (batch, rows, columns, tile_n)
        assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("name", ["int4/128@float16", "int4-float32-zero/32", "int6/16", "nf4"])
def test_extreme_inputs(name: str) -> None:
    packed, _ = packed_matrix(name, 256, 512, "cuda")
    weights = shuffled(describe(packed), BF16)
    assert hopper.gemm(torch.empty(0, 512, device="cuda", dtype=BF16), weights).shape == (0, 256)
    for value in (0.0, 1e-30, 1e30, float("inf"), float("nan")):
        x = torch.zeros(3, 512, device="cuda", dtype=BF16)
        x[1, 17] = value
        expected = x.float() @ hopper.dequantize(weights).float().T
        y = hopper.gemm(x, weights)
        assert (y[0] == 0).all() and (y[2] == 0).all(), "other rows are changed"
        for ours in (y[1], hopper.gemv(x[1:2].contiguous(), weights)[0]):
            if abs(value) < 1e38:
                assert (value == 0 and not ours.any()) or relative_error(ours, expected[1].double()) < 1e-2
            else:
                assert not torch.isfinite(ours).any()


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize(
    ("scheme", "other", "bias"),
    [
        ("int4/128@float16", None, False), ("nvfp4", None, False), ("nf4", None, False), ("nf3", None, True),
        ("fp8-e5m2", None, False), ("fp8-e4m3 fp8-e4m3", None, False), ("int8/row int8", None, False),
        ("int4-float32-zero/32", "int6/16", False),  # as in Q4_K_M of GGUF
        ("int4-float32-zero/32", "int6/16", True), ("int5/32@float16", "nvfp4", True),
    ],
)  # fmt: skip
def test_an_engine_gives_the_tokens_of_the_other_kernels(scheme: str, other: str | None, bias: bool) -> None:
    """Layers in one format, or with `other` for values and down projections: products of one input in two formats."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from smelt.kernels.dispatch import use_backend
    from smelt.models.model import Model
    from smelt.serve.engine.engine import Engine
    from smelt.serve.engine.sampling_params import SamplingParams

    weight, _, inputs = scheme.partition(" ")
    formats = QuantizationScheme(get_format(weight), get_format(inputs) if inputs else None)
    others = formats if other is None else QuantizationScheme(get_format(other))

    def tokens(backend: str | None) -> list[list[int]]:
        torch.manual_seed(0)
        config = LlamaConfig(
            hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            vocab_size=512, max_position_embeddings=512, attention_bias=bias,
        )  # fmt: skip
        network = LlamaForCausalLM(config).to("cuda", BF16).eval()
        for layer in network.model.layers:
            for parent in (layer.self_attn, layer.mlp):
                for name, module in list(parent.named_children()):
                    if isinstance(module, torch.nn.Linear):
                        chosen = others if name in ("v_proj", "down_proj") else formats
                        quantized = chosen.weight.quantize(module.weight.data.float())
                        added = None if module.bias is None else torch.randn_like(module.bias) * 0.1
                        packed = QuantizedLinear.from_quantized(quantized, chosen, bias=added, dtype=BF16)
                        setattr(parent, name, packed)
        with use_backend(backend) if backend else torch.no_grad():
            engine = Engine(Model(network), max_model_len=256, max_num_seqs=8, kv_cache_bytes=10**8)
            layers = [module for module in network.modules() if isinstance(module, QuantizedLinear)]
            assert [layer.moved for layer in layers] == [backend is None] * 14
            kernel = "dequantized at load" if scheme == "fp8-e5m2" else "hopper"  # no kernel multiplies by E5M2
            assert backend or all(layer.backend == kernel for layer in layers)
            sampling = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
            draw = random.Random(0)
            prompts = [[draw.randrange(512) for _ in range(draw.randrange(1, 40))] for _ in range(60)]
            requests = [engine.submit(prompt, sampling)[0] for prompt in prompts]
            while engine.busy:
                engine.step()
        return [request.output for request in requests]

    ours, theirs = tokens(None), tokens("triton-eight-bit" if inputs else "triton-weight-only")
    # Random weights: a few of the largest logits are closer than rounding. A prompt, then one step of decoding.
    assert sum(one == other for one, other in zip(ours, theirs, strict=True)) >= 45
