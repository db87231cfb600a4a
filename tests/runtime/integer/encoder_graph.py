"""An integer graph with the structure of a converted encoder, with random weights: for kernels, not for quality."""

from __future__ import annotations

import torch
from torch import Tensor

from smelt.runtime.integer.constants import gelu_constants, norm_constants, softmax_constants
from smelt.runtime.integer.dyadic import dyadic_tensors
from smelt.runtime.integer.graph import Attribute, IntegerGraph, Node

NORM_LIMIT = 2**21 - 1


class RandomEncoder:
    """Appends the nodes of a post-LayerNorm encoder; scales are those of unit variance."""

    def __init__(self, width: int, heads: int, inner: int, vocabulary: int = 50, positions: int = 512) -> None:
        self.width, self.heads, self.inner, self.positions = width, heads, inner, positions
        self.generator = torch.Generator().manual_seed(0)
        self.nodes: list[Node] = []
        ids = {"input_ids": vocabulary, "token_type_ids": 2}
        tables = {name: self._int8(rows, width) for name, rows in ids.items()}
        self.graph = IntegerGraph({**dict.fromkeys(ids, "int32"), "attention_mask": "int32"}, self.nodes)
        terms = []
        for name, table in tables.items():
            rows = self._add("embedding", [name], "int8", constants={"table": table})
            terms.append(self._requantize(rows, 3e4, width, "int32", NORM_LIMIT))
        self.mask = self._add("reshape", ["attention_mask"], "int32", {"shape": [0, 1, 1, -1]})
        self.hidden, self.residual = self._norm(self._add("add", terms, "int32"))

    def block(self) -> None:
        width, heads = self.width, self.heads
        projections = []
        for _ in range(3):
            rows = self._requantize(self._linear(self.hidden, width, width), 30 / (900 * width**0.5), width)
            rows = self._add("reshape", [rows], "int8", {"shape": [0, 0, heads, width // heads]})
            projections.append(self._add("permute", [rows], "int8", {"axes": [0, 2, 1, 3]}))
        query, key, value = projections
        scores = self._add("matmul", [query, key], "int32", {"transpose_b": 1})
        scores = self._requantize(scores, 3000 / (900 * (width / heads) ** 0.5), 1, "int32", 2**31 - 1)
        constants, _ = softmax_constants(0.7 / 1024, self.positions, "softmax")
        weights = self._add("softmax", [scores, self.mask], "int8", {**constants})
        context = self._requantize(self._add("matmul", [weights, value], "int32", {"transpose_b": 0}), 0.02)
        context = self._add("permute", [context], "int8", {"axes": [0, 2, 1, 3]})
        context = self._add("reshape", [context], "int8", {"shape": [0, 0, width]})
        self._residual(self._linear(context, width, width))
        inner = self._linear(self.hidden, self.inner, width)
        inner = self._requantize(inner, 1e4 / (900 * width**0.5), self.inner, "int16", 32767)
        gelu, _ = gelu_constants(1e-4, 32767, "gelu")
        inner = self._add("gelu", [inner], "int32", {**gelu})
        self._residual(self._linear(self._requantize(inner, 5e-8, self.inner), width, self.inner))

    def finish(self) -> IntegerGraph:
        """Return the graph, with a classification head."""
        first = self._add("slice", [self.hidden], "int8", {"axis": 1, "start": 0, "stop": 1})
        first = self._add("reshape", [first], "int8", {"shape": [0, self.width]})
        self._add(
            "requantize", [self._linear(first, 3, self.width)], "int32", *self._dyadic(0.01, 3, 2**31 - 1), "logits"
        )
        self.graph.outputs = ["logits", self.residual]
        self.graph.check()
        return self.graph

    def _residual(self, projected: str) -> None:
        terms = [self._requantize(projected, 20.0, self.width, "int32", NORM_LIMIT)]
        terms.append(self._requantize(self.residual, 2e-4, 1, "int32", NORM_LIMIT))
        self.hidden, self.residual = self._norm(self._add("add", terms, "int32"))

    def _norm(self, x: str) -> tuple[str, str]:
        weight, bias = (1 + 0.1 * torch.randn(self.width, generator=self.generator) for _ in range(2))
        attributes, constants, scale = norm_constants(1e-5, 2 * NORM_LIMIT, weight, bias - 1, 1e-12, "norm")
        normalized = self._add("layer_norm", [x], "int32", {**attributes}, constants)
        return self._requantize(normalized, 30 * scale, self.width), normalized

    def _linear(self, x: str, channels: int, columns: int) -> str:
        bias = torch.randint(-1000, 1000, (channels,), generator=self.generator, dtype=torch.int32)
        return self._add("linear", [x], "int32", {}, {"weight": self._int8(channels, columns), "bias": bias})

    def _requantize(self, x: str, ratio: float, channels: int = 1, dtype: str = "int8", limit: int = 127) -> str:
        return self._add("requantize", [x], dtype, *self._dyadic(ratio, channels, limit))

    def _dyadic(self, ratio: float, channels: int, limit: int) -> tuple[dict[str, Attribute], dict[str, Tensor]]:
        ratios = ratio * (0.75 + 0.5 * torch.rand(channels, generator=self.generator, dtype=torch.float64))
        multiplier, shift = dyadic_tensors(ratios.tolist(), "requantize")
        return {"minimum": -limit, "maximum": limit, "axis": -1}, {"multiplier": multiplier, "shift": shift}

    def _int8(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator).mul(30).clamp(-127, 127).to(torch.int8)

    def _add(
        self, op: str, inputs: list[str], dtype: str, attributes: dict[str, Attribute] | None = None,
        constants: dict[str, Tensor] | None = None, name: str = "",
    ) -> str:  # fmt: skip
        name = name or f"{op}.{len(self.nodes)}"
        self.nodes.append(Node(op, tuple(inputs), name, dtype, attributes or {}, constants or {}, op))
        return name


def random_encoder(layers: int, width: int, heads: int, inner: int, positions: int = 512) -> IntegerGraph:
    """Return the graph of an encoder with a classification head."""
    encoder = RandomEncoder(width, heads, inner, positions=positions)
    for _ in range(layers):
        encoder.block()
    return encoder.finish()


def token_batch(batch: int, length: int, vocabulary: int = 50) -> dict[str, Tensor]:
    """Return token ids and a mask; the last rows are padded to half their length."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(vocabulary, (batch, length), generator=generator, dtype=torch.int32)
    mask = torch.ones(batch, length, dtype=torch.int32)
    mask[batch // 2 :, length // 2 :] = 0
    return {"input_ids": ids, "token_type_ids": ids % 2, "attention_mask": mask}
