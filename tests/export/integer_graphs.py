"""An integer graph with every operator on random values of many scales, for exports that must give the same bits."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from smelt.numerics.nn_lut import default_table
from smelt.runtime.integer.constants import (
    exp_constants,
    gelu_constants,
    norm_constants,
    softmax_constants,
    tanh_constants,
)
from smelt.runtime.integer.dyadic import dyadic_tensors
from smelt.runtime.integer.graph import IntegerGraph, Node
from smelt.runtime.integer.ops import OPERATORS
from smelt.runtime.integer.shift_constants import gelu_shift_constants, softmax_shift_constants
from smelt.runtime.integer.table_constants import norm_table_constants, softmax_table_constants, table_constants

SCALES = [1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1.0]


class GraphOfOperators:
    """Collects nodes that read graph inputs; every result is an output of the graph."""

    def __init__(self, seed: int) -> None:
        self.scale = 1.0
        self.generator = torch.Generator().manual_seed(seed)
        self.inputs: dict[str, Tensor] = {}
        self.dtypes: dict[str, str] = {}
        self.nodes: list[Node] = []

    def integers(self, *shape: int, low: int = -128, high: int = 128, dtype: torch.dtype = torch.int8) -> Tensor:
        return torch.randint(low, high, shape, generator=self.generator).to(dtype)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    def activations(self, *shape: int, scale: float | None = None) -> str:
        """Add an int32 input whose real values have a standard deviation of 3."""
        values = self.normal(*shape).double() * 3 / (scale or self.scale)
        return self.input(values.round().clamp(-(2**30), 2**30).to(torch.int32))

    def input(self, values: Tensor) -> str:
        name = f"input.{len(self.inputs)}"
        self.inputs[name], self.dtypes[name] = values, str(values.dtype).removeprefix("torch.")
        return name

    def node(
        self, op: str, *inputs: str, dtype: str = "int64", constants: Mapping[str, Tensor] | None = None,
        **attributes: int | list[int],
    ) -> None:  # fmt: skip
        name = f"{op}.{len(self.nodes)}"
        self.nodes.append(Node(op, inputs, name, dtype, attributes, dict(constants or {}), f"layer.{op}"))

    def graph(self) -> IntegerGraph:
        graph = IntegerGraph(self.dtypes, self.nodes, [node.output for node in self.nodes])
        graph.check()
        return graph


def all_operators(seed: int = 0) -> tuple[IntegerGraph, dict[str, Tensor]]:
    """Return a graph of every operator, with its variants and at every scale, and its inputs."""
    build = GraphOfOperators(seed)
    _linear_operators(build)
    _moves(build)
    _decoder_operators(build)
    for build.scale in SCALES:
        _elementwise_operators(build)
        _row_operators(build)
    graph = build.graph()
    assert {node.op for node in graph.nodes} == set(OPERATORS), "an operator has no case here"
    return graph, build.inputs


def _linear_operators(build: GraphOfOperators) -> None:
    bias = build.integers(6, low=-(2**20), high=2**20, dtype=torch.int32)
    for x in (build.integers(2, 3, 10), build.integers(2, 3, 10, low=0, high=256, dtype=torch.uint8)):
        build.node("linear", build.input(x), dtype="int32", constants={"weight": build.integers(6, 10), "bias": bias})
    build.node("linear", build.input(build.integers(4, 9)), dtype="int32", constants={"weight": build.integers(3, 9)})
    a = build.input(build.integers(2, 3, 4, 5))
    build.node("matmul", a, build.input(build.integers(2, 3, 5, 7)), dtype="int32")
    build.node("matmul", a, build.input(build.integers(2, 3, 7, 5)), dtype="int32", transpose_b=1)
    frames = build.input(build.integers(2, 4, 21))
    build.node("conv1d", frames, dtype="int32", constants={"weight": build.integers(6, 4, 3), "bias": bias},
               stride=2, padding=3, dilation=2)  # fmt: skip
    build.node("conv1d", frames, dtype="int32", constants={"weight": build.integers(8, 1, 5)}, padding=2, groups=4)
    images = build.input(build.integers(2, 4, 9, 7))
    build.node("conv2d", images, dtype="int32", constants={"weight": build.integers(6, 2, 3, 2), "bias": bias},
               stride=[2, 1], padding=[1, 2], dilation=[1, 2], groups=2)  # fmt: skip
    ids = build.input(build.integers(2, 5, low=0, high=11, dtype=torch.int64))
    for dtype in ("int8", "int16", "int32"):
        table = build.integers(11, 6).to(getattr(torch, dtype))
        build.node("embedding", ids, dtype=dtype, constants={"table": table})
    patches = build.integers(3, 5, 6, low=-(2**20), high=2**20, dtype=torch.int32)
    for tokens in (5, 7):
        table = build.integers(tokens, 6, low=-(2**20), high=2**20, dtype=torch.int32)
        build.node("add_positions", build.input(patches), constants={"table": table})
    if "positions" in OPERATORS:
        for padding_index in (-1, 1):
            build.node("positions", ids, dtype="int32", padding_index=padding_index)
        scores = build.activations(2, 3, 5, 5)
        build.node("relative_bias", scores, constants={"table": build.integers(3, 15, dtype=torch.int32)})


def _decoder_operators(build: GraphOfOperators) -> None:
    heads = build.input(build.integers(2, 3, 4, 10, low=-(2**15), high=2**15, dtype=torch.int16))
    angles = [build.input(build.integers(2, 3, 5, low=-(2**14), high=2**14, dtype=torch.int16)) for _ in range(2)]
    build.node("rope", heads, *angles, dtype="int32")
    mask = build.input(build.integers(2, 7, low=0, high=2, dtype=torch.int32))
    for queries, repeats in ((7, 1), (2, 3)):
        ids = build.input(build.integers(2, queries, dtype=torch.int32))
        build.node("causal_mask", mask, ids, dtype="int8", repeats=repeats)
    for axis, shape in ((2, (2, 3, 1, 4)), (-1, (2, 3, 5, 2))):
        new = build.input(build.integers(*shape))
        build.node("concat", build.input(build.integers(2, 3, 5, 4)), new, dtype="int8", axis=axis)
    wide = build.integers(2, 3, 4, 5, low=-(2**15), high=2**15, dtype=torch.int16)
    build.node("matmul", build.input(wide), build.input(build.integers(2, 3, 5, 7)), dtype="int32")
    build.node("multiply", build.input(wide), build.input(wide[0, :, :, :1]), dtype="int32")


def _elementwise_operators(build: GraphOfOperators) -> None:
    x = build.activations(3, 4, 5)
    limits = {"int8": (-128, 127), "uint8": (0, 255), "int16": (-(2**15), 2**15 - 1), "int32": (-(2**31), 2**31 - 1)}
    for dtype, (minimum, maximum) in limits.items():
        ratio = build.scale * maximum / 20
        multiplier, shift = dyadic_tensors([min(ratio, 1e5)], "layer")
        build.node("requantize", x, dtype=dtype, constants={"multiplier": multiplier, "shift": shift},
                   minimum=minimum, maximum=maximum)  # fmt: skip
    for axis, channels in ((-1, 5), (1, 4)):
        multiplier, shift = dyadic_tensors([build.scale * 4 / (channel + 1) for channel in range(channels)], "layer")
        build.node("requantize", x, dtype="int8", constants={"multiplier": multiplier, "shift": shift},
                   minimum=-128, maximum=127, axis=axis)  # fmt: skip
    whole = {"multiplier": torch.tensor([3], dtype=torch.int32), "shift": torch.tensor([0], dtype=torch.int32)}
    wide = build.input(build.integers(7, low=-(2**40), high=2**40, dtype=torch.int64))
    build.node("requantize", wide, constants=whole, minimum=-(2**62), maximum=2**62)
    build.node("add", x, build.activations(3, 4, 5))
    build.node("add", x, build.activations(4, 1))
    limit = int(build.inputs[x].abs().max())
    build.node("gelu", x, **gelu_constants(build.scale, limit, "layer", maximum=2**62)[0])
    build.node("gelu_shift", x, **gelu_shift_constants(build.scale, limit, "layer", maximum=2**40)[0])
    tanh_scale = min(build.scale, 0.3)
    build.node("silu", build.activations(40, scale=tanh_scale), bits=15, **exp_constants(tanh_scale, 20, "layer"))
    build.node("tanh", build.activations(40, scale=tanh_scale), dtype="int8", **tanh_constants(tanh_scale, "layer")[0])
    constants, _ = table_constants(default_table("silu"), build.scale, "layer", limit)
    build.node("table", x, dtype="int32", constants=constants)
    build.node("sqrt", build.input(build.integers(50, low=0, high=2**62, dtype=torch.int64)))
    build.node("sqrt", build.input(torch.tensor([0, 1, 2, 3, 4, 8, 9, 15, 16, 2**31 - 1, 2**32, 2**62])))


def _row_operators(build: GraphOfOperators) -> None:
    scale = min(build.scale, 0.5)
    scores = build.activations(2, 3, 4, 9, scale=scale)
    mask = (build.integers(2, 1, 1, 9, low=0, high=4) > 0).to(torch.int32)
    mask[1] = 0
    masked = build.input(mask)
    for inputs in ((scores,), (scores, masked)):
        build.node("softmax", *inputs, dtype="int8", **softmax_constants(scale, 9, "layer")[0])
        build.node("softmax_shift", *inputs, dtype="int8", **softmax_shift_constants(scale, 9, "layer")[0])
        attributes, constants, _ = softmax_table_constants(scale, 9, "layer")
        build.node("softmax_table", *inputs, dtype="int8", constants=constants, **attributes)
    rows = build.activations(5, 24)
    limit = int(build.inputs[rows].abs().max())
    weight, bias = build.normal(24), build.normal(24)
    for name, constants_of in (("{}", norm_constants), ("{}_table", norm_table_constants)):
        for op, shift in (("layer_norm", bias), ("rms_norm", None)):
            attributes, constants, _ = constants_of(build.scale, limit, weight, shift, 1e-5, "layer")
            build.node(name.format(op), rows, constants=constants, **attributes)
    attributes, constants, _ = norm_constants(build.scale, limit, weight, bias, 1e-5, "layer")
    build.node("layer_norm_shift", rows, constants=constants, **attributes)
    zeros = build.input(torch.zeros(2, 24, dtype=torch.int32))
    build.node("layer_norm_shift", zeros, constants=constants, **attributes | {"epsilon": 0})
    for axis in (0, 1, -1):
        build.node("mean", scores, axis=axis)
        build.node("argmax", scores, dtype="int32", axis=axis)
    tokens = build.activations(2, 6, 5)
    visible = build.integers(2, 6, low=0, high=2, dtype=torch.int32)
    visible[1] = 0
    build.node("masked_mean", tokens, build.input(visible))
    for op in ("avg_pool", "max_pool"):
        build.node(op, build.input(build.integers(2, 3, 7, 8)), dtype="int32", kernel=[3, 2], stride=[2, 2])
        build.node(op, build.input(build.integers(2, 3, 9)), dtype="int32", kernel=[4], stride=[3])


def _moves(build: GraphOfOperators) -> None:
    x = build.activations(2, 3, 4)
    build.node("reshape", x, dtype="int32", shape=[0, -1])
    build.node("reshape", x, shape=[4, 6])
    build.node("permute", x, dtype="int32", axes=[2, 0, 1])
    build.node("slice", x, dtype="int32", axis=1, start=1, stop=3)
    build.node("slice", x, dtype="int32", axis=-1, start=0, stop=1)
