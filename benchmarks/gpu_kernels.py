"""Speed of packed matrix products on a GPU, against bfloat16 and PyTorch's own kernels in the same run.

    PYTHONPATH=src python benchmarks/gpu_kernels.py

Every time is the median of replays of a CUDA graph, divided by the calls in it; each call has its own copy of the
matrix and of x, together far larger than the cache. Bytes count codes, scales, x and y; bandwidth is relative to a
large copy (bytes read and written), measured first. Random data, never zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
from common import copy_bandwidth, graph_seconds, table, write
from torch import Tensor
from torch.nn import functional as F

from smelt.kernels.gpu import launch
from smelt.kernels.gpu.gptq import gptq_block
from smelt.kernels.gpu.matrix import Matrix, describe
from smelt.kernels.linear import ActivationQuant, PackedMatrix, select_kernel
from smelt.numerics import QuantizedTensor, get_format

SEED, REPEATS, AT_LEAST = 0, 20, 600e6  # bytes of matrices that the calls of a graph rotate over
SHAPES = [(4096, 4096), (14336, 4096), (4096, 14336)]  # rows, columns
DECODING = {  # format: batches
    "int4/128@float16": (1, 2, 4, 8, 16, 32, 64),
    "int4-asym/128@float16": (1, 16),
    "int4/row@float16": (1, 16),
    "int8/128@float16": (1, 16),
    "int3/128@float16": (1,),
    "int2/128@float16": (1, 16),
    "mxfp4": (1, 16),
    "nvfp4": (1, 16),
    "amxfp4": (1, 16),
}
EIGHT = {"int8/row": "int8", "int4/row": "int8", "dint4": "int8"}  # matrix, inputs
PREFILL = (128, 512, 4096)
Row = dict[str, Any]


def main() -> None:
    torch.manual_seed(SEED)
    copy = copy_bandwidth()
    print(f"copy {copy / 1e12:.2f} TB/s", flush=True)
    rows: list[Row] = [{"kind": "copy", "bytes_per_second": copy}]
    for shape in SHAPES:
        rows += decoding(shape, copy)
    rows += prefill() + cube() + errors() + gptq()
    write("gpu_kernels", rows, text(rows, copy))


def microseconds(calls: list[Callable[[], Any]]) -> float:
    return 1e6 * graph_seconds(calls, REPEATS)


def packed(name: str, rows: int, columns: int) -> tuple[PackedMatrix, QuantizedTensor]:
    number_format = get_format(name)
    quantized = number_format.quantize(torch.randn(rows, columns, device="cuda") * 0.05)
    return PackedMatrix(number_format, rows, columns, quantized.pack()), quantized


def copies(tensors: list[Tensor]) -> list[list[Tensor]]:
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    return [[tensor.clone() for tensor in tensors] for _ in range(max(4, int(AT_LEAST / size)))]


def vectors(batch: int, columns: int, count: int) -> list[Tensor]:
    return [torch.randn(batch, columns, device="cuda", dtype=torch.bfloat16) for _ in range(count)]


def decoding(shape: tuple[int, int], copy: float) -> list[Row]:
    rows, columns = shape
    results, dense = [], {}
    weights = copies([torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)])
    for batch in DECODING["int4/128@float16"]:
        xs = vectors(batch, columns, len(weights))
        time = microseconds([lambda x=x, w=w: F.linear(x, w[0]) for x, w in zip(xs, weights, strict=True)])
        dense[batch] = time
        results.append(decoding_row("bfloat16", shape, batch, "cublas", time, 2 * rows * columns, copy, time))
    del weights
    results += tinygemm(shape, copy, dense)
    for name, batches in DECODING.items():
        example, _ = packed(name, rows, columns)
        names = list(example.tensors)
        matrices = [PackedMatrix(example.format, rows, columns, dict(zip(names, part, strict=True)))
                for part in copies(list(example.tensors.values()))]  # fmt: skip
        size = sum(tensor.numel() * tensor.element_size() for tensor in example.tensors.values())
        for batch in batches:
            path = launch.weight_only_path(batch, describe(example))
            time = microseconds(
                linear_calls(matrices, None, vectors(batch, columns, len(matrices)), "triton-weight-only")
            )
            results.append(decoding_row(name, shape, batch, path, time, size, copy, dense[batch]))
    for name, inputs in EIGHT.items():
        example, _ = packed(name, rows, columns)
        names = list(example.tensors)
        matrices = [PackedMatrix(example.format, rows, columns, dict(zip(names, part, strict=True)))
                for part in copies(list(example.tensors.values()))]  # fmt: skip
        size = sum(tensor.numel() * tensor.element_size() for tensor in example.tensors.values())
        for batch in (1, 16):
            calls = linear_calls(
                matrices,
                ActivationQuant(get_format(inputs)),
                vectors(batch, columns, len(matrices)),
                "triton-eight-bit",
            )
            path = launch.eight_bit_path(batch, describe(example))
            row = decoding_row(
                f"{name}, {inputs} inputs", shape, batch, path, microseconds(calls), size, copy, dense[batch]
            )
            results.append(row)
    for row in results:
        print(row, flush=True)
    return results


def decoding_row(
    name: str, shape: tuple[int, int], batch: int, path: str, time: float, size: int, copy: float, dense: float
) -> Row:
    moved = size + 2 * batch * sum(shape)
    return {
        "kind": "decoding", "format": name, "rows": shape[0], "columns": shape[1], "batch": batch, "path": path,
        "microseconds": time, "share_of_copy": moved / (time * 1e-6) / copy, "against_bfloat16": dense / time,
    }  # fmt: skip


def linear_calls(
    held: list[PackedMatrix], inputs: ActivationQuant | None, xs: list[Tensor], expected: str
) -> list[Callable[[], Tensor]]:
    """Dispatch like a layer, and check that the expected kernel is chosen."""
    calls = []
    for matrix, x in zip(held, xs, strict=True):
        kernel = select_kernel(matrix, inputs, x.dtype)
        assert kernel.name == expected, f"{matrix.format} took {kernel.name}"
        prepared = kernel.prepare(matrix, inputs)
        calls.append(lambda x=x, m=matrix, k=kernel, p=prepared: k.run(x, m, inputs, None, p))
    return calls


def tinygemm(shape: tuple[int, int], copy: float, dense: dict[int, float]) -> list[Row]:
    """PyTorch's own int4 product, groups of 128."""
    rows, columns = shape
    codes = torch.randint(0, 256, (rows, columns // 2), device="cuda", dtype=torch.uint8)
    weight = torch.ops.aten._convert_weight_to_int4pack(codes, 8)
    grid = torch.rand(columns // 128, rows, 2, device="cuda", dtype=torch.bfloat16) + 0.1
    matrices = copies([weight, grid])
    size = weight.numel() * weight.element_size() + grid.numel() * 2
    results = []
    for batch in (1, 16):
        xs = vectors(batch, columns, len(matrices))
        calls = [
            lambda x=x, h=h: torch.ops.aten._weight_int4pack_mm(x, h[0], 128, h[1])
            for x, h in zip(xs, matrices, strict=True)
        ]
        time = microseconds(calls)
        results.append(decoding_row("PyTorch int4/128", shape, batch, "aten", time, size, copy, dense[batch]))
    return results


def prefill() -> list[Row]:
    """Many vectors at once, 4096 x 4096."""
    size, results = 4096, []
    weights = [torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    for batch in PREFILL:
        xs = vectors(batch, size, 4)
        dense = microseconds([lambda x=x, w=w: F.linear(x, w) for x, w in zip(xs, weights, strict=True)])
        for name in ("int4/128@float16", "int8/128@float16", "mxfp4"):
            matrices = [packed(name, size, size)[0] for _ in range(4)]
            path = launch.weight_only_path(batch, describe(matrices[0]))
            time = microseconds(linear_calls(matrices, None, xs, "triton-weight-only"))
            results.append({"kind": "prefill", "format": name, "batch": batch, "path": path, "microseconds": time,
                          "bfloat16_microseconds": dense, "against_bfloat16": dense / time})  # fmt: skip
            print(results[-1], flush=True)
    return results


def cube() -> list[Row]:
    """4096 x 4096 x 4096: the product alone, and with quantization of the inputs."""
    size, count = 4096, 3
    xs = vectors(size, size, count)
    weights = [torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(count)]
    plain = [lambda x=x, w=w: F.linear(x, w) for x, w in zip(xs, weights, strict=True)]
    dense = min(microseconds(plain) for _ in range(3))  # the baseline: it varies by a few percent
    results: list[Row] = []

    def add(name: str, calls: list[Callable[[], Any]], what: str) -> None:
        time = min(microseconds(calls) for _ in range(3))
        results.append({"kind": "cube", "product": name, "what": what, "microseconds": time,
                      "teraops": 2 * size**3 / time / 1e6, "against_bfloat16": dense / time})  # fmt: skip
        print(results[-1], flush=True)

    add("bfloat16 (cuBLAS)", plain, "product")
    rounded = [launch.quantize_rows(x, torch.int8, 127.0, "float32") for x in xs]
    whole = [torch.randint(-127, 128, (size, size), device="cuda", dtype=torch.int8) for _ in range(count)]
    add("torch._int_mm", [lambda r=r, w=w: torch._int_mm(r[0], w.t()) for r, w in zip(rounded, whole, strict=True)],
        "product, no scales")  # fmt: skip
    for name, inputs in EIGHT.items():
        held = [packed(name, size, size)[0] for _ in range(count)]
        matrices = [describe(matrix) for matrix in held]
        path = launch.eight_bit_path(size, matrices[0])
        add(name, [lambda r=r, m=m: int8_product(r, m) for r, m in zip(rounded, matrices, strict=True)],
            f"product with scales ({path})")  # fmt: skip
        add(name, linear_calls(held, ActivationQuant(get_format(inputs)), xs, "triton-eight-bit"), "with rounding of x")
    held = [packed("fp8-e4m3", size, size)[0] for _ in range(count)]
    eighths = [launch.quantize_rows(x, torch.float8_e4m3fn, 448.0, "float32") for x in xs]
    calls = []
    for (codes, scales), matrix in zip(eighths, held, strict=True):
        weight = matrix.tensors["codes"].view(torch.float8_e4m3fn).t()
        across = matrix.tensors["scale"].reshape(1, -1).float().contiguous()
        calls.append(
            lambda a=codes, s=scales, w=weight, t=across: torch._scaled_mm(
                a, w, s[:, None], t, out_dtype=torch.bfloat16, use_fast_accum=True
            )
        )
    add("torch._scaled_mm, row-wise", calls, "product with scales")
    add(
        "fp8-e4m3",
        linear_calls(held, ActivationQuant(get_format("fp8-e4m3")), xs, "triton-eight-bit"),
        "with rounding of x",
    )
    return results


def int8_product(rounded: tuple[Tensor, Tensor], matrix: Matrix) -> Tensor:
    return launch.int8_product(rounded[0], rounded[1], matrix, None, torch.bfloat16)


def errors() -> list[Row]:
    """Relative error against float64, on a shape that fills no tile."""
    results = []
    names = [*DECODING, "int4/32", "int4-float-zero/64", "int8-asym/64", "int5/64", "dint4", "nf4", "mxfp6-e3m2"]
    for name in names:
        matrix, quantized = packed(name, 1000, 1088)
        for batch in (1, 5, 100):
            x = torch.randn(batch, 1088, device="cuda", dtype=torch.bfloat16)
            expected = x.double() @ quantized.dequantize().double().T
            y = linear_calls([matrix], None, [x], "triton-weight-only")[0]()
            error = float((y.double() - expected).norm() / expected.norm())
            rounding = float((expected.bfloat16().double() - expected).norm() / expected.norm())
            path = launch.weight_only_path(batch, describe(matrix))
            results.append({"kind": "error", "format": name, "batch": batch, "path": path, "error": error,
                          "of_rounding_alone": rounding})  # fmt: skip
    for name, inputs in {**EIGHT, "int4-asym/128": "int8", "dint4/128": "int8", "fp8-e4m3": "fp8-e4m3"}.items():
        matrix, quantized = packed(name, 1008, 1088)
        rule = ActivationQuant(get_format(inputs))
        for batch in (1, 100, 1500):
            x = torch.randn(batch, 1088, device="cuda", dtype=torch.bfloat16)
            expected = rule.fake_quantize(x.float()).double() @ quantized.dequantize().double().T
            y = linear_calls([matrix], rule, [x], "triton-eight-bit")[0]()
            error = float((y.double() - expected).norm() / expected.norm())
            rounding = float((expected.bfloat16().double() - expected).norm() / expected.norm())
            path = launch.eight_bit_path(batch, describe(matrix))
            results.append({"kind": "error", "format": f"{name}, {inputs} inputs", "batch": batch, "path": path,
                          "error": error, "of_rounding_alone": rounding})  # fmt: skip
    worst = max(results, key=lambda row: row["error"])
    print("worst", worst, flush=True)
    assert worst["error"] < 4e-3
    return results


def gptq() -> list[Row]:
    """GPTQ rounding of the 128 columns of a block in sequence."""
    results = []
    factor = torch.triu(torch.randn(128, 128, device="cuda") * 0.1) + torch.eye(128, device="cuda")
    for rows in (4096, 14336):
        weight, scale = torch.randn(rows, 128, device="cuda"), torch.rand(rows, 128, device="cuda") * 0.1 + 0.2
        time = microseconds([lambda w=weight, s=scale: gptq_block(w, factor, s, None, 15, default_zero=8.0)] * 8)
        results.append({"kind": "gptq", "rows": rows, "microseconds": time})
        print(results[-1], flush=True)
    return results


def text(rows: list[Row], copy: float) -> str:
    def of(kind: str) -> list[Row]:
        return [row for row in rows if row["kind"] == kind]

    lines = [
        [row["format"], f"{row['rows']} x {row['columns']}", str(row["batch"]), row["path"],
         f"{row['microseconds']:.2f} us", f"{row['share_of_copy']:.0%}", f"{row['against_bfloat16']:.2f} x"]
        for row in of("decoding")
    ]  # fmt: skip
    many = [
        [row["format"], str(row["batch"]), row["path"], f"{row['microseconds']:.1f} us",
         f"{row['bfloat16_microseconds']:.1f} us", f"{row['against_bfloat16']:.2f} x"]
        for row in of("prefill")
    ]  # fmt: skip
    cubes = [
        [row["product"], row["what"], f"{row['microseconds']:.1f} us", f"{row['teraops']:.0f}",
         f"{row['against_bfloat16']:.2f} x"]
        for row in of("cube")
    ]  # fmt: skip
    far = [
        [row["format"], str(row["batch"]), row["path"], f"{row['error']:.2e}", f"{row['of_rounding_alone']:.2e}"]
        for row in of("error")
    ]
    blocks = [[str(row["rows"]), f"{row['microseconds']:.0f} us"] for row in of("gptq")]
    return (
        "# Products with packed matrices on a GPU\n\n"
        f"Inputs in bfloat16, seed {SEED}, Triton {triton.__version__}. Times of single calls inside a captured graph, "
        f"matrices and inputs rotated (see the script). Copy bandwidth: {copy / 1e12:.2f} TB/s, read and written.\n\n"
        "Small batches; `rows x columns` of the matrix (columns are summed over), the bytes of codes, scales, x and y "
        "over the time as a share of the copy bandwidth, and the speed against bfloat16. Rows with `int8 inputs` "
        "include quantizing x.\n\n"
        + table(["format", "matrix", "batch", "path", "time", "of copy bandwidth", "against bfloat16"], lines)
        + "\n\nLarge batches, 4096 x 4096:\n\n"
        + table(["format", "batch", "path", "time", "bfloat16", "against bfloat16"], many)
        + "\n\n4096 x 4096 x 4096:\n\n"
        + table(["product", "what", "time", "TFLOPS or TOPS", "against bfloat16"], cubes)
        + "\n\nError against float64 (1000 or 1008 rows, 1088 columns), and what rounding the true result to bfloat16 "
        "alone would give:\n\n"
        + table(["format", "batch", "path", "relative error", "of bfloat16 alone"], far)
        + "\n\nGPTQ's inner loop, 128 columns of a block in one launch:\n\n"
        + table(["rows", "time"], blocks)
    )


if __name__ == "__main__":
    main()
