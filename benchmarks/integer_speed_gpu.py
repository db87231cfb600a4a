"""The GPU side of `integer_speed.py`: captured graphs, the time of every kernel, and tiles to choose from."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor

from smelt.kernels.gpu import integer as kernels
from smelt.kernels.gpu.integer import TILES, Tile
from smelt.runtime.integer.fused import AttentionCall, NormCall
from smelt.runtime.integer.kernel_call import KernelCall, LinearCall, ReferenceCall
from smelt.runtime.integer.run import Interpreter

BFLOAT16, COMPILED = "torch bfloat16", "torch bfloat16, compiled"
REPEATS, REPLAYS = 20, 10  # calls in the graph of one kernel; replays of a graph that are timed together
CANDIDATES = [
    Tile(rows, columns, depth, warps, stages, tma, splits, registers)
    for rows, columns, depth, warps, stages, splits, registers in (
        (128, 128, 128, 4, 3, 4, None), (128, 128, 128, 8, 3, 2, 128), (128, 256, 128, 8, 3, 4, None),
        (256, 128, 128, 8, 3, 4, None), (64, 256, 128, 4, 2, 4, None), (64, 128, 128, 4, 3, 2, None),
    )
    for tma in (False, True)
]  # fmt: skip
Inputs = dict[str, Tensor]


def on_device(inputs: Inputs) -> Inputs:
    return {name: tensor.cuda().int() for name, tensor in inputs.items()}


def integer_call(interpreter: Interpreter, inputs: Inputs) -> Callable[[], None]:
    ids = on_device(inputs)
    return captured(lambda: interpreter.run(ids), replays=REPLAYS)


def bfloat16_calls(network: Any, inputs: Inputs, with_compiled: bool) -> dict[str, Callable[[], None]]:
    """Return replays of the bfloat16 network; all tokens are visible, and checking a mask would wait for the GPU."""
    half = network.to("cuda", torch.bfloat16)
    ids = {name: inputs[name].cuda() for name in ("input_ids", "token_type_ids")}

    def replay_of(module: Any) -> Callable[[], None]:
        def run() -> None:
            with torch.inference_mode():
                module(**ids)

        return captured(run, replays=REPLAYS)

    calls = {BFLOAT16: replay_of(half)}
    if with_compiled:
        calls[COMPILED] = replay_of(torch.compile(half, dynamic=False))
    return calls


def captured(call: Callable[[], Any], repeats: int = 1, replays: int = 1) -> Callable[[], None]:
    """Return replays of a CUDA graph with some repeats of a call, which wait until all have finished."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            call()

    def replay(call: Any = call) -> None:  # keeps the inputs, which the call holds, from being freed
        for _ in range(replays):
            graph.replay()
        torch.cuda.synchronize()

    return replay


def kernel_times(interpreter: Interpreter, inputs: Inputs) -> list[dict[str, Any]]:
    """Return the time of every kind of call, its number of calls, and what they are of the whole."""
    kinds: dict[str, dict[str, Any]] = {}
    for call, tensors in calls_with_inputs(interpreter, inputs):
        label, operations = describe(call, tensors)
        if label not in kinds:
            microseconds = time_of(interpreter, call, tensors)
            rate = f"{operations / microseconds / 1e6:.0f}" if operations else ""
            kinds[label] = {"call": label, "count": 0, "microseconds": microseconds, "rate": rate}
        kinds[label]["count"] += 1
    for kind in kinds.values():
        print(f"{kind['call']:45} {kind['count']:3} x {kind['microseconds']:7.1f} us  {kind['rate']}", flush=True)
    total = sum(kind["count"] * kind["microseconds"] for kind in kinds.values())
    print(f"sum of all calls: {total:.0f} us", flush=True)
    return list(kinds.values())


def calls_with_inputs(interpreter: Interpreter, inputs: Inputs) -> list[tuple[KernelCall, list[Tensor]]]:
    """Return every call that is no view, with the tensors that it reads."""
    program, values, calls = interpreter.program, dict(inputs), []
    for call in program.calls:
        tensors = [values[name] for name in call.inputs]
        values.update(zip(call.outputs, call.run(program.kernels, *tensors), strict=True))
        if not isinstance(call, ReferenceCall) or call.node.op not in ("reshape", "permute", "slice"):
            calls.append((call, tensors))
    return calls


def describe(call: KernelCall, tensors: Sequence[Tensor]) -> tuple[str, int]:
    """Return a name of a call and the operations of its products."""
    shape = "x".join(str(size) for size in tensors[0].shape)
    if isinstance(call, LinearCall):
        m, n, k = product_shape(call, tensors)
        steps = "+".join(type(step).__name__ for step in call.steps.steps)
        return f"linear {m}x{n}x{k} {steps} {str(call.dtype)[6:]}", 2 * m * n * k
    if isinstance(call, AttentionCall):
        batch, heads, queries, head_dim = tensors[0].shape
        return f"attention {shape}", 4 * batch * heads * queries * tensors[1].shape[2] * head_dim
    if isinstance(call, ReferenceCall):
        return f"{call.node.op} {shape}", 0
    return f"{type(call).__name__} {shape}", 0


def product_shape(call: LinearCall, tensors: Sequence[Tensor]) -> tuple[int, int, int]:
    return tensors[0].numel() // call.weight.columns, call.weight.channels, call.weight.columns


def time_of(interpreter: Interpreter, call: KernelCall, tensors: Sequence[Tensor]) -> float:
    """Return microseconds of a call, the smallest of several measurements."""
    replay = captured(lambda: call.run(interpreter.program.kernels, *tensors), REPEATS)
    times = []
    for _ in range(5):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        replay()
        stop.record()
        stop.synchronize()
        times.append(1e3 * start.elapsed_time(stop) / REPEATS)
    return min(times)


def tune(interpreter: Interpreter, inputs: Inputs) -> dict[str, Any]:
    """Set and return the fastest tile of every large product, and what is fastest for attention and norms."""
    first: dict[str, tuple[KernelCall, list[Tensor]]] = {}
    for call, tensors in calls_with_inputs(interpreter, inputs):
        first.setdefault(describe(call, tensors)[0], (call, tensors))
    best: dict[str, Any] = {}
    for label, (call, tensors) in first.items():
        if isinstance(call, LinearCall) and product_shape(call, tensors)[0] >= 64:
            shape = product_shape(call, tensors)
            candidates = [tile for tile in CANDIDATES if tile.rows <= shape[0]]
            tile = fastest(interpreter, label, call, tensors, candidates, partial(TILES.__setitem__, shape))
            best[label] = list(vars(tile).values())
        elif isinstance(call, AttentionCall):
            options = [(rows, warps) for rows in (64, 128) for warps in (4, 8) if (rows, warps) != (64, 8)]
            best[label] = fastest(interpreter, label, call, tensors, options, _set_attention)
        elif isinstance(call, NormCall) and not any(key.startswith("Norm") for key in best):
            best[label] = fastest(interpreter, label, call, tensors, [1, 2, 4, 8], _set_norm_warps)
    return best


def fastest(
    interpreter: Interpreter, label: str, call: KernelCall, tensors: Sequence[Tensor], options: Sequence[Any],
    choose: Callable[[Any], None],
) -> Any:  # fmt: skip
    """Time a call with every option, print the times, and leave the fastest chosen."""
    expected = call.run(interpreter.program.kernels, *tensors)[0]
    compile_all(interpreter, call, tensors, options)
    times: dict[Any, float] = {}
    for option in options:
        choose(option)
        try:
            assert torch.equal(call.run(interpreter.program.kernels, *tensors)[0], expected), option
            times[option] = time_of(interpreter, call, tensors)
        except Exception as error:  # too much shared memory, say: the others are still of interest
            print(f"tune {label}: {option}: {type(error).__name__} {error}"[:300], flush=True)
    for option, microseconds in sorted(times.items(), key=lambda item: item[1])[:6]:
        print(f"tune {label}: {option} {microseconds:.1f} us", flush=True)
    winner = min(times, key=lambda option: times[option])
    choose(winner)
    return winner


def compile_all(interpreter: Interpreter, call: KernelCall, tensors: Sequence[Tensor], options: Sequence[Any]) -> None:
    """Compile a product with every tile at once, in threads."""
    if not isinstance(call, LinearCall):
        return
    chosen, tile_for = threading.local(), kernels.tile_for

    def build(tile: Tile) -> None:
        torch.cuda.set_device(0)
        chosen.tile = tile
        with contextlib.suppress(Exception):  # reported when it is timed
            call.run(interpreter.program.kernels, *tensors)

    kernels.tile_for = lambda *shape: getattr(chosen, "tile", None) or tile_for(*shape)
    try:
        with ThreadPoolExecutor(len(options)) as pool:
            list(pool.map(build, options))
    finally:
        kernels.tile_for = tile_for
    torch.cuda.synchronize()


def _set_attention(option: tuple[int, int]) -> None:
    kernels.attention_tile = lambda keys: option


def _set_norm_warps(option: int) -> None:
    kernels.NORM_WARPS = option
