"""Speed of an integer-only encoder: BERT-base shape, against float32 and onnxruntime's int8, in one run.

    python benchmarks/integer_speed.py --work FOLDER [--shapes 1x128,8x128,32x128] [--threads N] [--prepare]
    python benchmarks/integer_speed.py --device cuda [--tune] [--compile]

All sides run the same classifier with random weights (fine for time, never for quality) and take turns in every round.
Models are prepared in the work folder once; onnxruntime gets its own fused operators (`onnxruntime.transformers`), then
its dynamic and its static (QDQ) quantization with scales per channel. With one thread, CPU time is measured instead of
wall time, so that other processes count less. On a GPU (`integer_speed_gpu.py`) the baseline is bfloat16, both sides
are captured CUDA graphs, and the time of every kernel is measured too; `--tune` tries other tiles first, and
`--compile` adds a baseline from torch.compile.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import previous_rows, table, write
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification

from smelt.compression.calibration.ranges import observe_ranges
from smelt.runtime.integer.encoders import convert_encoder, observed_modules
from smelt.runtime.integer.fused import ReferenceCall
from smelt.runtime.integer.graph import GRAPH_FILE, IntegerGraph
from smelt.runtime.integer.run import Interpreter

INTEGER, FLOAT32, ORT_FLOAT32 = "integer graph", "torch float32", "onnxruntime float32"
DYNAMIC, STATIC = "onnxruntime int8, dynamic", "onnxruntime int8, static (QDQ)"
CHEAP = {"embedding", "positions", "reshape", "permute", "slice", "tanh"}  # operators that need no kernel
ROUNDS, PAUSE = 5, 0.05  # seconds between two sides, so that no thread of the last one still spins
Call = Callable[[], Any]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", type=Path, default=Path("integer_speed"), help="folder of the prepared models")
    parser.add_argument("--shapes", default="1x128,8x128,32x128", help="batch x sequence length, separated by commas")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--name", help="of the results file")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--prepare", action="store_true", help="only prepare the models")
    parser.add_argument("--resume", action="store_true", help="keep the other rows of earlier runs")
    parser.add_argument("--tune", action="store_true", help="on a GPU: time several tiles per product, use the fastest")
    parser.add_argument("--compile", action="store_true", help="on a GPU: also time a compiled bfloat16 network")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    arguments.work.mkdir(exist_ok=True)
    network = bert_base()
    graph = integer_graph(network, arguments.work)
    if arguments.device == "cpu":
        models = onnx_models(network, arguments.work)
    if arguments.prepare:
        return
    if arguments.device == "cuda":
        import integer_speed_gpu as gpu  # needs Triton
    name = arguments.name or ("integer_speed" if arguments.device == "cpu" else "integer_speed_gpu")
    shapes = [tuple(int(size) for size in shape.split("x")) for shape in arguments.shapes.split(",")]
    rows = [
        row
        for row in previous_rows(name, arguments.resume)
        if row["threads"] != arguments.threads or (row["batch"], row["length"]) not in shapes
    ]
    for batch, length in shapes:
        inputs = token_batch(batch, length)
        settings: dict[str, Any] = {}
        if arguments.device == "cpu":
            calls = cpu_calls(network, graph, models, inputs)
        else:
            interpreter = checked_interpreter(graph.to(torch.device("cuda")), "gpu", inputs)
            settings["tiles"] = gpu.tune(interpreter, gpu.on_device(inputs)) if arguments.tune else {}
            settings["kernels"] = gpu.kernel_times(interpreter, gpu.on_device(inputs))
            calls = {INTEGER: gpu.integer_call(interpreter, inputs)}
            calls |= gpu.bfloat16_calls(network, inputs, arguments.compile)
        is_wall_time = arguments.threads > 1 or arguments.device == "cuda"
        repeats = 1 if arguments.device == "cpu" else gpu.REPLAYS
        clock = time.perf_counter if is_wall_time else time.process_time
        comparison = compare(calls, arguments.rounds, clock, repeats)
        settings |= {"batch": batch, "length": length, "threads": arguments.threads, "load": os.getloadavg()[0]}
        rows.append(settings | comparison)
        print({key: value for key, value in rows[-1].items() if key not in ("kernels", "rounds")}, flush=True)
        rows.sort(key=lambda row: (-row["threads"], row["batch"], row["length"]))
        write(name, rows, _text(rows, arguments.device))


def bert_base() -> nn.Module:
    """Return BERT-base with random weights."""
    torch.manual_seed(0)
    return BertForSequenceClassification(BertConfig(num_labels=2)).eval()


def token_batch(batch: int, length: int) -> dict[str, Tensor]:
    ids = torch.randint(1000, 30000, (batch, length), generator=torch.Generator().manual_seed(batch))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "token_type_ids": torch.zeros_like(ids)}


def integer_graph(network: Any, work: Path) -> IntegerGraph:
    """Convert the network, or load the graph from the work folder."""
    if not (work / GRAPH_FILE).exists():
        convert_encoder(network, observe_ranges(network, observed_modules(network), [token_batch(4, 64)])).save(work)
    return IntegerGraph.load(work)


def onnx_models(network: nn.Module, work: Path) -> dict[str, Path]:
    """Export to ONNX, fuse and quantize with onnxruntime's tools, unless the work folder has the models."""
    from onnxruntime.quantization import (
        CalibrationDataReader,
        QuantFormat,
        QuantType,
        quantize_dynamic,
        quantize_static,
    )
    from onnxruntime.transformers import optimizer

    class Batches(CalibrationDataReader):
        def __init__(self) -> None:
            self.batches = iter([{name: x.numpy() for name, x in token_batch(4, 64).items()}])

        def get_next(self) -> Any:
            return next(self.batches, None)

    fused_results = {"DefaultTensorType": 1}  # float32: shapes of fused operators are not inferred
    exported, fused = work / "exported.onnx", work / "float32.onnx"
    models = {ORT_FLOAT32: fused, DYNAMIC: work / "dynamic.onnx", STATIC: work / "static.onnx"}
    if not fused.exists():
        network.set_attn_implementation("eager")  # the attention that onnxruntime's optimizer recognizes
        inputs, axes = token_batch(2, 16), {0: "batch", 1: "length"}
        torch.onnx.export(
            _Logits(network), tuple(inputs.values()), str(exported), input_names=list(inputs), output_names=["logits"],
            dynamic_axes=dict.fromkeys(inputs, axes), opset_version=17, dynamo=False,
        )  # fmt: skip
        network.set_attn_implementation("sdpa")
        optimized = optimizer.optimize_model(str(exported), "bert", num_heads=12, hidden_size=768, opt_level=1)
        assert optimized.get_fused_operator_statistics()["Attention"] == 12
        optimized.save_model_to_file(str(fused))
    if not models[DYNAMIC].exists():
        quantize_dynamic(
            fused, models[DYNAMIC], per_channel=True, weight_type=QuantType.QInt8, extra_options=fused_results
        )
    if not models[STATIC].exists():
        quantize_static(  # the two small layers of the head stay in float32
            fused, models[STATIC], Batches(), quant_format=QuantFormat.QDQ, per_channel=True,
            op_types_to_quantize=["MatMul", "Attention"],
            activation_type=QuantType.QInt8, weight_type=QuantType.QInt8, extra_options=fused_results,
        )  # fmt: skip
    return models


class _Logits(nn.Module):
    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor) -> Tensor:
        logits: Tensor = self.network(input_ids, attention_mask=attention_mask, token_type_ids=token_type_ids).logits
        return logits


def cpu_calls(
    network: nn.Module, graph: IntegerGraph, models: dict[str, Path], inputs: dict[str, Tensor]
) -> dict[str, Call]:
    """Return what is timed, by name."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    arrays = {name: tensor.numpy() for name, tensor in inputs.items()}
    interpreter = checked_interpreter(graph, "cpu")

    def run_float() -> None:
        with torch.inference_mode():
            network(**inputs)

    calls: dict[str, Call] = {INTEGER: lambda: interpreter.run(inputs), FLOAT32: run_float}
    for name, path in models.items():
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        calls[name] = lambda session=session: session.run(None, arrays)
    return calls


def checked_interpreter(graph: IntegerGraph, backend: str, batch: dict[str, Tensor] | None = None) -> Interpreter:
    """Return an interpreter whose products, attention and norms are kernels, with the bits of the reference."""
    interpreter = Interpreter(graph, backend)
    others = {call.node.op for call in interpreter.program.calls if isinstance(call, ReferenceCall)}
    assert others <= CHEAP, others - CHEAP
    device = "cuda" if backend == "gpu" else "cpu"
    for tokens in (token_batch(2, 9), batch or {}):
        if tokens:
            inputs = {name: tensor.to(device) for name, tensor in tokens.items()}
            expected = Interpreter(graph).run(inputs)
            assert all(torch.equal(tensor, expected[name]) for name, tensor in interpreter.run(inputs).items())
    return interpreter


def compare(calls: dict[str, Call], rounds: int, clock: Callable[[], float], repeats: int = 1) -> dict[str, Any]:
    """Return milliseconds of every side, round by round, and the median of its ratios to the integer graph.

    `repeats`: the runs of the network in one call.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(rounds):
        for name, call in calls.items():
            time.sleep(PAUSE)
            start = clock()
            call()
            times[name].append(1e3 * (clock() - start) / repeats)
    medians = {name: statistics.median(values) for name, values in times.items()}
    ratios = {
        name: statistics.median(other / ours for other, ours in zip(values, times[INTEGER], strict=True))
        for name, values in times.items()
    }
    return {"milliseconds": medians, "speedup": ratios, "rounds": times}


def _text(rows: list[dict[str, Any]], device: str) -> str:
    sides = list(rows[0]["milliseconds"])
    lines = [
        [f"{row['batch']} x {row['length']}", *([_threads(row), f"{row['load']:.0f}"] if device == "cpu" else []),
         *(f"{row['milliseconds'][side]:.4g} ms" for side in sides),
         *(f"{row['speedup'][side]:.2f}" for side in sides if side != INTEGER)]
        for row in rows
    ]  # fmt: skip
    headings = [
        "batch x length", *(["threads", "load average"] if device == "cpu" else []), *sides,
        *(f"speed-up over {side}" for side in sides if side != INTEGER),
    ]  # fmt: skip
    how = "medians of wall time, or of CPU time with one thread" if device == "cpu" else "CUDA graphs"
    kernels = "" if device == "cpu" else _kernel_tables(rows)
    return (
        f"# An integer-only encoder of BERT-base shape ({device})\n\n"
        f"12 layers of width 768, random weights, all tokens visible; {how}; sides take turns in every round, and a "
        "speed-up is the median of the ratios of the rounds.\n\n" + table(headings, lines) + kernels
    )


def _kernel_tables(rows: list[dict[str, Any]]) -> str:
    parts = []
    for row in rows:
        lines = [
            [each["call"], f"{each['count']}", f"{each['microseconds']:.1f}", each["rate"]] for each in row["kernels"]
        ]
        parts.append(
            f"\n\n## {row['batch']} x {row['length']}\n\nKernels, each repeated in a CUDA graph of its own:\n\n"
            + table(["call", "calls", "microseconds each", "TOP/s"], lines)
        )
    return "".join(parts)


def _threads(row: dict[str, Any]) -> str:
    return f"{row['threads']}" if row["threads"] > 1 else "1 (CPU time)"


if __name__ == "__main__":
    main()
