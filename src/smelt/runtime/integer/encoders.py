"""Convert encoders with post-LayerNorm blocks (BERT, RoBERTa, DistilBERT, MPNet) to an integer graph (I-BERT).

Bit widths: 8 for weights, for embeddings and for the input of every matrix product; 22 for the sums that enter a
LayerNorm; 16 for the input of GELU and tanh. Scores enter the softmax with a fixed scale. The classification head is
part of the graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from smelt.errors import ConversionError
from smelt.models.anatomy import Block, Part
from smelt.models.anatomy_builder import anatomy_of
from smelt.models.families import family_of
from smelt.models.implants import refuse_implants
from smelt.models.token_pruning import refuse_token_pruning
from smelt.runtime.integer.builder import SCORE_SCALE, GraphBuilder, QTensor
from smelt.runtime.integer.conversion import (
    DECODERS,
    VISION_TYPES,
    ActivationRange,
    Conversion,
    NewBuilder,
    channel_scales,
)
from smelt.runtime.integer.graph import IntegerGraph

LOGITS, HIDDEN = "logits", "last_hidden_state"

_GELU = ("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "gelu_python")  # forms of one function
_LEAVES = (nn.Linear, nn.Embedding, nn.LayerNorm, nn.Dropout, nn.Tanh, nn.ReLU, nn.GELU)


@dataclass(frozen=True)
class EncoderLayout:
    """Where an encoder has what anatomies do not name."""

    norms: tuple[str, str]  # of a block: after attention, after the feed-forward
    padded_positions: bool  # positions count from the padding index, without padding tokens
    head: tuple[tuple[str, str], ...]  # linear layers of the classification head, each with its activation


def _norms(model_type: str) -> tuple[str, str]:
    norms = family_of(model_type).post_norms
    assert norms is not None
    return norms


_POOLED = (("{base}.pooler.dense", "tanh"), ("classifier", ""))
_TWO_LAYERS = (("classifier.dense", "tanh"), ("classifier.out_proj", ""))
_LAYOUTS = {
    "bert": EncoderLayout(_norms("bert"), False, _POOLED),
    "roberta": EncoderLayout(_norms("bert"), True, _TWO_LAYERS),
    "xlm-roberta": EncoderLayout(_norms("bert"), True, _TWO_LAYERS),
    "camembert": EncoderLayout(_norms("bert"), True, _TWO_LAYERS),
    "distilbert": EncoderLayout(_norms("distilbert"), False, (("pre_classifier", "relu"), ("classifier", ""))),
    "mpnet": EncoderLayout(_norms("mpnet"), True, _TWO_LAYERS),
}  # fmt: skip


def check_encoder(network: PreTrainedModel) -> None:
    """Raise if the network has no integer form, naming operator and layer; weights may be on the meta device."""
    refuse_token_pruning(network, "integer graphs compute all of them")
    refuse_implants(network, "integer graphs do not compute it")
    kind = network.config.model_type
    if kind not in _LAYOUTS:
        raise ConversionError(
            f"there is no integer form of {kind} networks; it exists for the encoders "
            f"{', '.join(sorted([*_LAYOUTS, *VISION_TYPES]))}, and for the decoders {', '.join(DECODERS)}. For "
            "integer linear layers alone use rtn with `input_activations: int8` and `static_activations: true`."
        )
    name = type(network).__name__
    if not name.endswith(("ForSequenceClassification", "Model")):
        raise ConversionError(f"the head of {name} has no integer form; use an encoder or a sequence classifier.")
    if getattr(network.config, "is_decoder", False):
        raise ConversionError(f"{name} is a decoder, whose causal attention has no integer form here.")
    check_activation(network)
    for path, module in network.named_modules():
        is_leaf = not any(True for _ in module.children())
        known = isinstance(module, _LEAVES) or type(module).__module__ == "transformers.activations"
        if is_leaf and not known and any(True for _ in module.parameters()):
            raise ConversionError(f"{path}: {type(module).__name__} has no integer form.")


def check_activation(network: PreTrainedModel) -> None:
    """Raise if the activation of the blocks has no integer form, naming its layer."""
    activation = _activation(network)
    if activation not in (*_GELU, "relu"):
        endings = ("act_fn", "activation", "activation_fn")
        path = next((path for path, _ in network.named_modules() if path.endswith(endings)), "config")
        raise ConversionError(f"{path}: the activation {activation} has no integer form; gelu and relu have one.")


def observed_modules(network: PreTrainedModel) -> dict[str, nn.Module]:
    """Return the modules whose ranges the conversion needs, by path."""
    return {path: module for path, module in network.named_modules() if isinstance(module, nn.Linear | nn.LayerNorm)}


def convert_encoder(
    network: PreTrainedModel, ranges: Mapping[str, ActivationRange], new_builder: NewBuilder = GraphBuilder
) -> IntegerGraph:
    """Return the integer graph of an encoder, with static scales from the ranges of calibration data.

    `new_builder` makes the builder from the graph's inputs, and with it decides how functions are approximated.
    """
    check_encoder(network)
    return EncoderConversion(network, ranges, new_builder).convert()


class EncoderConversion(Conversion):
    """Appends the nodes of an encoder to a builder; its parts are methods that other conversions use."""

    def __init__(
        self, network: PreTrainedModel, ranges: Mapping[str, ActivationRange], new_builder: NewBuilder
    ) -> None:
        super().__init__(network, ranges)
        self.layout, self.max_length = self._layout()
        self.anatomy = anatomy_of(network)
        self.base_path = next((path for path, module in network.named_modules() if module is network.base_model), "")
        self.builder = new_builder(self._inputs())

    def convert(self) -> IntegerGraph:
        hidden, residual = self._embeddings()
        mask = self.builder.reshape(self.builder.input("attention_mask"), [0, 1, 1, -1], self._base("mask"), "int32")
        for block in self.anatomy.blocks:
            hidden, residual = self._block(block, hidden, residual, mask)
        outputs = {HIDDEN: residual}
        if self.network is not self.network.base_model:
            outputs = {LOGITS: self._head(hidden), **outputs}
        return self.builder.finish(outputs)

    def _layout(self) -> tuple[EncoderLayout, int]:
        """Return the layout of the network and the largest number of its tokens."""
        config = self.network.config
        return _LAYOUTS[config.model_type], int(config.max_position_embeddings)

    def _inputs(self) -> dict[str, str]:
        names = ["input_ids", "attention_mask"]
        if hasattr(self.network.base_model.embeddings, "token_type_embeddings"):
            names.append("token_type_ids")
        return dict.fromkeys(names, "int32")

    def _embeddings(self) -> tuple[QTensor, QTensor]:
        builder, embeddings = self.builder, self.network.base_model.embeddings
        ids, norm = builder.input("input_ids"), self._base("embeddings.LayerNorm")
        padding = int(embeddings.position_embeddings.padding_idx) if self.layout.padded_positions else -1
        positions = builder.node(
            "positions", [ids], self._base("embeddings.position_embeddings"), dtype="int32", scale=1.0,
            bound=self.max_length, attributes={"padding_index": padding},
        )  # fmt: skip
        indices = {"word_embeddings": ids, "position_embeddings": positions}
        if "token_type_ids" in builder.graph.inputs:
            indices["token_type_embeddings"] = builder.input("token_type_ids")
        total: QTensor | None = None
        for name, index in indices.items():
            layer = self._base(f"embeddings.{name}")
            rows = builder.embedding(index, getattr(embeddings, name).weight, layer)
            rows = self._to_norm_input(rows, norm, layer)
            total = rows if total is None else builder.add(total, rows, layer)
        assert total is not None
        return self._norm(total, norm)

    def _block(self, block: Block, hidden: QTensor, residual: QTensor, mask: QTensor) -> tuple[QTensor, QTensor]:
        heads = next(part for part in block.parts if part.kind == "heads")
        feed_forward = next(part for part in block.parts if part.kind == "ffn_channels")
        up, down = feed_forward.input_projections[0].path, feed_forward.output.path
        after_attention, after_feed_forward = (f"{block.path}.{norm}" for norm in self.layout.norms)
        context = self._attention(heads, hidden, mask)
        hidden, residual = self._residual(heads.output.path, context, residual, after_attention)
        inner = self._activate(self._linear(hidden, up), up, _activation(self.network), down)
        return self._residual(down, inner, residual, after_feed_forward)

    def _attention(self, part: Part, hidden: QTensor, mask: QTensor | None) -> QTensor:
        builder, layer, output = self.builder, part.path, part.output.path
        heads = []
        for projection in part.input_projections:
            rows = builder.requantize(self._linear(hidden, projection.path), self._output_scale(projection.path), layer)
            rows = builder.reshape(rows, [0, 0, part.units, part.head_dim], layer)
            heads.append(builder.permute(rows, [0, 2, 1, 3], layer))
        queries, keys, values = heads
        scores = builder.matmul(queries, keys, part.head_dim, layer, transpose_b=True, factor=part.head_dim**-0.5)
        scores = self._position_bias(builder.requantize(scores, SCORE_SCALE, layer, dtype="int32"), layer)
        probabilities = builder.softmax(scores, mask, self.max_length, layer)
        context = builder.matmul(probabilities, values, self.max_length, layer)
        context = builder.requantize(context, self._input_scale(output), layer)
        context = builder.permute(context, [0, 2, 1, 3], layer)
        return builder.reshape(context, [0, 0, part.units * part.head_dim], layer)

    def _position_bias(self, scores: QTensor, layer: str) -> QTensor:
        """Add MPNet's bias of relative positions to the scores."""
        encoder: Any = getattr(self.network.base_model, "encoder", None)
        if not hasattr(encoder, "relative_attention_bias"):
            return scores
        distances = torch.arange(1 - self.max_length, self.max_length)
        buckets = encoder.relative_position_bucket(
            distances, num_buckets=self.network.config.relative_attention_num_buckets
        )
        table = (
            encoder.relative_attention_bias.weight.detach().double().cpu()[buckets].T / scores.per_tensor_scale
        ).round()
        return self.builder.node(
            "relative_bias", [scores], layer, dtype="int32", scale=scores.scale,
            bound=scores.bound + int(table.abs().max()), constants={"table": table.to(torch.int32)},
        )  # fmt: skip

    def _residual(self, path: str, x: QTensor, residual: QTensor, norm: str) -> tuple[QTensor, QTensor]:
        """Multiply by the output projection, add the residual, and normalize."""
        return self._norm(self._sum(path, x, residual, norm), norm)

    def _sum(self, path: str, x: QTensor, residual: QTensor, norm: str) -> QTensor:
        """Multiply by the output projection and add the residual, at the scale of the LayerNorm that reads the sum."""
        projected = self._to_norm_input(self._linear(x, path), norm, path)
        return self.builder.add(projected, self._to_norm_input(residual, norm, norm), norm)

    def _norm(self, x: QTensor, path: str) -> tuple[QTensor, QTensor]:
        """Return the normalized values as int8, for matrix products, and as int32, for the residual."""
        module: Any = self.network.get_submodule(path)
        normalized = self.builder.layer_norm(x, module.weight, module.bias, module.eps, path)
        return self.builder.requantize(normalized, channel_scales(self._range(path).outputs, path), path), normalized

    def _activate(self, x: QTensor, layer: str, activation: str, reader: str) -> QTensor:
        """Apply an activation and requantize to int8 for the layer that reads it."""
        scale = channel_scales(self._range(reader).inputs, reader)
        if activation == "relu":
            return self.builder.requantize(x, scale, layer, minimum=0)
        narrow = self.builder.requantize(x, float(self._range(layer).outputs.max()) / 32767, layer, dtype="int16")
        if activation == "tanh":
            return self.builder.tanh(narrow, layer)
        return self.builder.requantize(self.builder.gelu(narrow, layer), scale, layer)

    def _head(self, hidden: QTensor) -> QTensor:
        """Apply the classification head to the first token; the logits have a common scale."""
        layers = [(path.format(base=self.base_path), activation) for path, activation in self.layout.head]
        x = self.builder.slice(hidden, 1, 0, 1, layers[0][0])
        x = self.builder.reshape(x, [0, int(self.network.config.hidden_size)], layers[0][0])
        for position, (path, activation) in enumerate(layers):
            x = self._linear(x, path)
            if activation:
                x = self._activate(x, path, activation, layers[position + 1][0])
        return self.builder.requantize(x, float(x.scale.max()), layers[-1][0], dtype="int32")

    def _base(self, path: str) -> str:
        return f"{self.base_path}.{path}".lstrip(".")


def _activation(network: PreTrainedModel) -> str:
    config = network.config
    return str(getattr(config, "hidden_act", None) or getattr(config, "activation", ""))
