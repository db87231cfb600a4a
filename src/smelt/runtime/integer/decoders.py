"""Convert decoders of the Llama type (Llama, Mistral, Qwen2) to an integer graph with an int8 KV cache.

Bit widths: 8 for weights, embeddings, keys, values, queries and the input of every linear layer; 16 for attention
probabilities, queries and keys before their rotation, and both factors of the gated product; 22 for the residual
stream, rescaled before every norm. The logits are int32 with one scale.

The graph takes the KV cache as inputs and returns it longer: keys [batch, KV heads, tokens, head_dim] after rotation,
and values. Their scales are static, one per channel: those of keys are part of the queries' scale, those of values part
of the output projection's weight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from smelt.errors import ConversionError
from smelt.models.anatomy import Block, Part
from smelt.models.anatomy_builder import anatomy_of
from smelt.runtime.integer.builder import SCORE_SCALE, GraphBuilder, QTensor
from smelt.runtime.integer.conversion import (
    DECODERS,
    ActivationRange,
    Conversion,
    NewBuilder,
    channel_scales,
    positive,
)
from smelt.runtime.integer.graph import IntegerGraph

POSITIONS = "position_ids"
_ANGLE_BITS = 14  # of cosines and sines, sign excluded
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")  # whose angles do not depend on the length of the text
_BALANCE = 0.75  # exponent of the activations in the scales that weights absorb (SmoothQuant)


def past_names(layer: int) -> tuple[str, str]:
    """Return the names of a layer's inputs for the KV cache of earlier tokens."""
    return f"past_key_values.{layer}.key", f"past_key_values.{layer}.value"


def present_names(layer: int) -> tuple[str, str]:
    """Return the names of a layer's outputs for the KV cache of all tokens."""
    return f"present.{layer}.key", f"present.{layer}.value"


def is_decoder(network: PreTrainedModel) -> bool:
    """Return whether `convert_decoder` knows the type of a network."""
    return network.config.model_type in DECODERS


def check_decoder(network: PreTrainedModel) -> None:
    """Raise if the network has no integer form, naming operator and layer; weights may be on the meta device."""
    config, name = network.config, type(network).__name__
    if not name.endswith("ForCausalLM"):
        raise ConversionError(f"{name} has no integer form; of decoders, language models with a head have one.")
    if config.hidden_act not in ("silu", "swish"):
        path = next((path for path, _ in network.named_modules() if path.endswith("act_fn")), "config")
        raise ConversionError(f"{path}: the activation {config.hidden_act} has no integer form; silu has one.")
    rope = config.rope_parameters["rope_type"]
    if rope not in _ROPE_TYPES:
        raise ConversionError(
            f"rotary embeddings of type {rope} have no integer form: their angles depend on the length of the text; "
            f"use one of {', '.join(_ROPE_TYPES)}."
        )
    window = getattr(config, "sliding_window", None)
    slides = any("sliding" in kind for kind in getattr(config, "layer_types", None) or ["sliding"])
    if window is not None and slides and window < config.max_position_embeddings:
        raise ConversionError(
            f"attention in a sliding window of {window} tokens has no integer form; "
            "set max_position_embeddings in config.json to at most that."
        )
    for path, module in network.named_modules():
        is_leaf = not any(True for _ in module.children())
        known = isinstance(module, nn.Linear | nn.Embedding) or type(module).__name__.endswith("RMSNorm")
        if is_leaf and not known and any(True for _ in module.parameters()):
            raise ConversionError(f"{path}: {type(module).__name__} has no integer form.")
    for block in anatomy_of(network).blocks:
        if [part.kind for part in block.parts if part.units] != ["heads", "ffn_channels"]:
            raise ConversionError(f"{block.path}: a block without attention or feed-forward has no integer form.")


def observed_modules(network: PreTrainedModel) -> dict[str, nn.Module]:
    """Return the modules whose ranges the conversion needs, by path."""
    return {
        path: module
        for path, module in network.named_modules()
        if isinstance(module, nn.Linear) or type(module).__name__.endswith("RMSNorm")
    }


def convert_decoder(
    network: PreTrainedModel, ranges: Mapping[str, ActivationRange], new_builder: NewBuilder = GraphBuilder
) -> IntegerGraph:
    """Return the integer graph of a decoder, with static scales from the ranges of calibration data.

    `new_builder` makes the builder from the graph's inputs, and with it decides how functions are approximated.
    """
    check_decoder(network)
    return _Conversion(network, ranges, new_builder).convert()


class _Conversion(Conversion):
    cos: QTensor
    sin: QTensor

    def __init__(
        self, network: PreTrainedModel, ranges: Mapping[str, ActivationRange], new_builder: NewBuilder
    ) -> None:
        super().__init__(network, ranges)
        self.blocks = anatomy_of(network).blocks
        self.max_length = int(network.config.max_position_embeddings)
        cache = dict.fromkeys([name for block in self.blocks for name in past_names(block.index)], "int8")
        tokens = dict.fromkeys(["input_ids", "attention_mask", POSITIONS], "int32")
        self.builder = new_builder({**tokens, **cache})
        self.masks: dict[int, QTensor] = {}
        self.present: dict[str, QTensor] = {}

    def convert(self) -> IntegerGraph:
        builder = self.builder
        norms = [f"{block.path}.{norm}" for block in self.blocks for norm in ("input_layernorm", _SECOND_NORM)]
        norms.append("model.norm")
        self.cos, self.sin = self._angles()
        residual = builder.embedding(
            builder.input("input_ids"), self._module("model.embed_tokens").weight, "model.embed_tokens"
        )
        residual = self._to_norm_input(residual, norms[0], "model.embed_tokens")
        for block in self.blocks:
            residual = self._block(block, residual, norms[2 * block.index + 1], norms[2 * block.index + 2])
        logits = self._linear(self._norm(residual, norms[-1], ["lm_head"]), "lm_head")
        scale = float((logits.scale * logits.bound).max()) / 2**30  # the finest that int32 permits
        logits = builder.requantize(logits, scale, "lm_head", dtype="int32")
        return builder.finish({"logits": logits, **self.present})

    def _angles(self) -> tuple[QTensor, QTensor]:
        """Look the cosines and sines of all tokens up in tables of all positions."""
        path = "model.rotary_emb"
        rotary = self._module(path)
        angles = torch.arange(self.max_length, dtype=torch.float64)[:, None] * rotary.inv_freq.detach().double().cpu()
        scale, positions = float(rotary.attention_scaling) * 2.0**-_ANGLE_BITS, self.builder.input(POSITIONS)
        cos, sin = (
            self.builder.node(
                "embedding", [positions], f"{path}.{name}", dtype="int16", scale=scale, bound=2**_ANGLE_BITS,
                constants={"table": (values * 2**_ANGLE_BITS).round().to(torch.int16)},
            )
            for name, values in (("cos", angles.cos()), ("sin", angles.sin()))
        )  # fmt: skip
        return cos, sin

    def _block(self, block: Block, residual: QTensor, second_norm: str, next_norm: str) -> QTensor:
        heads, feed_forward = block.parts
        projections = [projection.path for projection in heads.input_projections]
        hidden = self._norm(residual, f"{block.path}.input_layernorm", projections)
        residual = self._residual(heads.output.path, self._attention(heads, hidden), residual, second_norm)
        hidden = self._norm(residual, second_norm, [projection.path for projection in feed_forward.input_projections])
        return self._residual(feed_forward.output.path, self._gated(feed_forward, hidden), residual, next_norm)

    def _attention(self, part: Part, hidden: QTensor) -> QTensor:
        """Return the input of the output projection; queries that share a key are rows of one product."""
        builder, layer, units, group, width = (
            self.builder, part.path, part.units, part.heads_per_unit, part.head_dim,
        )  # fmt: skip
        query, key, value = (projection.path for projection in part.input_projections)
        key_scale = channel_scales(self._rotated(key, width), key)
        query_amax = self._rotated(query, width) * _repeat_heads(key_scale, units, group)
        score_scale = positive(query_amax.max(), query) / 127  # of queries that are multiplied by the keys' scale
        queries = builder.requantize(
            self._rotate(hidden, query, units * group, width),
            score_scale / _repeat_heads(key_scale, units, group), query,
        )  # fmt: skip
        queries = builder.reshape(queries, [0, 0, units, group, width], layer)
        queries = builder.reshape(builder.permute(queries, [0, 2, 3, 1, 4], layer), [0, 0, -1, width], layer)
        keys = builder.requantize(self._rotate(hidden, key, units, width), key_scale, key)
        value_scale = channel_scales(self._range(value).outputs, value)
        values = builder.requantize(self._linear(hidden, value), value_scale, value)
        keys, values = (self._cached(tensor, part, index) for index, tensor in enumerate((keys, values)))
        scores = builder.matmul(
            builder.rescale(queries, score_scale), keys, width, layer, transpose_b=True,
            factor=float(self._module(layer).scaling),
        )  # fmt: skip
        scores = builder.requantize(scores, SCORE_SCALE, layer, dtype="int32")
        probabilities = builder.softmax(scores, self._mask(group), self.max_length, layer, dtype="int16")
        context = builder.node(
            "matmul", [probabilities, values], layer, dtype="int32", scale=probabilities.scale,
            bound=(probabilities.bound + self.max_length) * values.bound, attributes={"transpose_b": 0},
        )  # fmt: skip  # the probabilities of a row have the sum 1, and each is rounded
        context = builder.reshape(context, [0, 0, group, -1, width], layer, dtype="int32")
        context = builder.permute(context, [0, 3, 1, 2, 4], layer, dtype="int32")
        context = builder.reshape(context, [0, 0, units * group * width], layer, dtype="int32")
        context = builder.rescale(context, probabilities.scale * _repeat_heads(value_scale, units, group))
        output = part.output.path
        return builder.requantize(context, self._balanced_scales(self._range(output).inputs, [output]), layer)

    def _rotate(self, hidden: QTensor, path: str, heads: int, width: int) -> QTensor:
        """Project to queries or keys and rotate them. [batch, tokens, heads * head_dim], int32"""
        builder = self.builder
        scale = positive(self._range(path).outputs.max(), path) / 32767
        rows = builder.requantize(self._linear(hidden, path), scale, path, dtype="int16")
        rows = builder.reshape(rows, [0, 0, heads, width], path, dtype="int16")
        return builder.reshape(builder.rope(rows, self.cos, self.sin, path), [0, 0, heads * width], path, dtype="int32")

    def _rotated(self, path: str, width: int) -> Tensor:
        """Return the largest magnitude that each channel of a projection can have after rotation."""
        amax = self._range(path).outputs.double().cpu().reshape(-1, 2, width // 2)
        return torch.hypot(amax[:, :1], amax[:, 1:]).expand(-1, 2, -1).flatten()

    def _cached(self, x: QTensor, part: Part, index: int) -> QTensor:
        """Append keys (index 0) or values (index 1) to those of earlier tokens. [batch, KV heads, tokens, head_dim]"""
        builder, layer = self.builder, part.path
        x = builder.reshape(builder.rescale(x, 1.0), [0, 0, part.units, part.head_dim], layer)
        x = builder.permute(x, [0, 2, 1, 3], layer)
        past = builder.input(past_names(part.block)[index], bound=127)
        x = builder.concat(past, x, 2, layer)
        self.present[present_names(part.block)[index]] = x
        return x

    def _mask(self, group: int) -> QTensor:
        """Return the causal mask of attention with as many queries per key."""
        if group not in self.masks:
            inputs = [self.builder.input(name) for name in ("attention_mask", "input_ids")]
            self.masks[group] = self.builder.node(
                "causal_mask", inputs, "model.mask", dtype="int8", scale=1.0, bound=1, attributes={"repeats": group}
            )
        return self.masks[group]

    def _gated(self, part: Part, hidden: QTensor) -> QTensor:
        """Return silu(gate) * up as int8, for the output projection."""
        builder, output = self.builder, part.output.path
        gate, up = (next(p.path for p in part.input_projections if p.path.endswith(name)) for name in _GATED)
        scales = [positive(self._range(path).outputs.max(), path) / 32767 for path in (gate, up)]
        gates, ups = (
            builder.requantize(self._linear(hidden, path), scale, path, dtype="int16")
            for path, scale in zip((gate, up), scales, strict=True)
        )
        gates = builder.requantize(builder.silu(gates, gate), scales[0], gate, dtype="int16")
        product = builder.multiply(gates, ups, part.path)
        return builder.requantize(product, self._balanced_scales(self._range(output).inputs, [output]), part.path)

    def _residual(self, path: str, x: QTensor, residual: QTensor, norm: str) -> QTensor:
        """Add the output of a projection to the residual stream, at the scale of the norm that reads it next."""
        projected = self._to_norm_input(self._linear(x, path), norm, path)
        return self.builder.add(projected, self._to_norm_input(residual, norm, norm), norm)

    def _norm(self, x: QTensor, path: str, readers: Sequence[str]) -> QTensor:
        """Normalize and requantize to int8 for the layers that read it."""
        module = self._module(path)
        normalized = self.builder.rms_norm(x, module.weight, module.variance_epsilon, path)
        return self.builder.requantize(normalized, self._balanced_scales(self._range(path).outputs, readers), path)

    def _balanced_scales(self, amax: Tensor, readers: Sequence[str]) -> Tensor:
        """Return int8 scales per channel that make outliers smaller and the weights that read them larger.

        The outlier channels of decoders are so large that weights cannot absorb them alone: a channel's scale is
        proportional to `activation**a / weight**(1 - a)` of its largest magnitudes (Xiao et al., 2023).
        """
        layer = readers[0]
        positive(amax.max(), layer)
        activations = amax.double().cpu()
        weights = torch.stack(
            [self._module(path).weight.detach().abs().amax(0).double().cpu() for path in readers]
        ).amax(0)
        floors = [part.clamp(min=max(float(part.max()) * 1e-5, 1e-30)) for part in (activations, weights)]
        factors = floors[0] ** _BALANCE / floors[1] ** (1 - _BALANCE)
        return factors * float((activations / factors).max()) / 127

    def _module(self, path: str) -> Any:
        return self.network.get_submodule(path)


_SECOND_NORM = "post_attention_layernorm"
_GATED = ("gate_proj", "up_proj")


def _repeat_heads(scale: Tensor, units: int, group: int) -> Tensor:
    """Repeat the scales of KV heads for the query heads that read them."""
    return scale.reshape(units, 1, -1).expand(-1, group, -1).flatten()
