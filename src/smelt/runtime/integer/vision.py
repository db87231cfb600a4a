"""Convert vision transformers with pre-LayerNorm blocks (ViT, DeiT) to an integer graph.

The input is the image in int8. Patches do not overlap, so that their convolution is a product of rows of pixels. Class
tokens and position embeddings are constants. The residual stream has the widths of `encoders.py`, of which all parts of
a block are: 22 bits at the input of every LayerNorm, and 8 for the inputs of matrix products.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from smelt.errors import ConversionError
from smelt.models.anatomy import Block
from smelt.runtime.integer.builder import GraphBuilder, QTensor
from smelt.runtime.integer.conversion import VISION_TYPES, ActivationRange, NewBuilder, positive
from smelt.runtime.integer.encoders import HIDDEN, LOGITS, EncoderConversion, EncoderLayout, check_activation
from smelt.runtime.integer.graph import IntegerGraph

PIXELS = "pixel_values"
_LEAVES = (nn.Linear, nn.LayerNorm, nn.Conv2d)  # with parameters
_CLASS_TOKENS = ("cls_token", "distillation_token")
_LAYOUT = EncoderLayout(("layernorm_before", "layernorm_after"), False, (("classifier", ""),))


def is_vision_transformer(network: PreTrainedModel) -> bool:
    """Return whether a network is a ViT or DeiT, with any head."""
    return network.config.model_type in VISION_TYPES


def check_vision(network: PreTrainedModel) -> None:
    """Raise if the network has no integer form, naming operator and layer; weights may be on the meta device."""
    name = type(network).__name__
    if not name.endswith(("ForImageClassification", "Model")):
        raise ConversionError(f"the head of {name} has no integer form; use an encoder or an image classifier.")
    check_activation(network)
    for path, module in network.named_modules():
        is_leaf = not any(True for _ in module.children())
        if is_leaf and not isinstance(module, _LEAVES) and any(True for _ in module.parameters()):
            raise ConversionError(f"{path}: {type(module).__name__} has no integer form.")


def observed_vision_modules(network: PreTrainedModel) -> dict[str, nn.Module]:
    """Return the modules whose ranges the conversion needs, by path."""
    types = nn.Linear | nn.LayerNorm | nn.Conv2d
    return {path: module for path, module in network.named_modules() if isinstance(module, types)}


def convert_vision(
    network: PreTrainedModel, ranges: Mapping[str, ActivationRange], new_builder: NewBuilder = GraphBuilder
) -> IntegerGraph:
    """Return the integer graph of a vision transformer, as `convert_encoder` does for texts."""
    check_vision(network)
    return _VisionConversion(network, ranges, new_builder).convert()


class _VisionConversion(EncoderConversion):
    def convert(self) -> IntegerGraph:
        residual = self._patches()
        norms = [f"{block.path}.{norm}" for block in self.anatomy.blocks for norm in self.layout.norms]
        following = [*norms[1:], self._base("layernorm")]
        for index, block in enumerate(self.anatomy.blocks):
            residual = self._pre_norm_block(block, residual, following[2 * index : 2 * index + 2])
        hidden, normalized = self._norm(residual, following[-1])
        outputs = {HIDDEN: normalized}
        if self.network is not self.network.base_model:
            outputs = {LOGITS: self._head(hidden), **outputs}
        return self.builder.finish(outputs)

    def _layout(self) -> tuple[EncoderLayout, int]:
        return _LAYOUT, int(self._embeddings_module.position_embeddings.shape[1])

    def _inputs(self) -> dict[str, str]:
        return {PIXELS: "int8"}

    @property
    def _embeddings_module(self) -> Any:
        return self.network.base_model.embeddings

    def _patches(self) -> QTensor:
        """Return class tokens and embedded patches with their positions, at the scale of the first LayerNorm."""
        builder, embeddings = self.builder, self._embeddings_module
        layer, patch_embeddings = self._base("embeddings.patch_embeddings"), embeddings.patch_embeddings
        projection: nn.Conv2d = patch_embeddings.projection
        scale = positive(self._range(f"{layer}.projection").inputs.max(), layer) / 127
        builder.graph.scales[PIXELS] = scale
        pixels = builder.input(PIXELS, scale, 127)
        channels = projection.in_channels
        (height, width), (patch_height, patch_width) = patch_embeddings.image_size, projection.kernel_size
        rows, columns = height // patch_height, width // patch_width
        pixels = builder.reshape(pixels, [0, channels, rows, patch_height, columns, patch_width], layer)
        pixels = builder.permute(pixels, [0, 2, 4, 1, 3, 5], layer)
        pixels = builder.reshape(pixels, [0, rows * columns, channels * patch_height * patch_width], layer)
        pixels = replace(pixels, bound=128)  # unlike the result of a node, an input may be -128
        patches = builder.linear(pixels, projection.weight.flatten(1), projection.bias, layer)
        norm = f"{self.anatomy.blocks[0].path}.{self.layout.norms[0]}"
        patches = self._to_norm_input(patches, norm, layer)
        tokens = [getattr(embeddings, name) for name in _CLASS_TOKENS if hasattr(embeddings, name)]
        table = embeddings.position_embeddings.detach().double()[0]
        table[: len(tokens)] += torch.cat(tokens, 1).detach().double()[0]
        return builder.add_positions(patches, table, self._base("embeddings"))

    def _pre_norm_block(self, block: Block, residual: QTensor, following: list[str]) -> QTensor:
        """Append a block; `following` are the LayerNorms that read the residual stream after each of its halves."""
        before_attention, before_feed_forward = (f"{block.path}.{norm}" for norm in self.layout.norms)
        heads = next(part for part in block.parts if part.kind == "heads")
        feed_forward = next(part for part in block.parts if part.kind == "ffn_channels")
        up, down = feed_forward.input_projections[0].path, feed_forward.output.path
        hidden, _ = self._norm(residual, before_attention)
        residual = self._sum(heads.output.path, self._attention(heads, hidden, None), residual, following[0])
        hidden, _ = self._norm(residual, before_feed_forward)
        inner = self._activate(self._linear(hidden, up), up, str(self.network.config.hidden_act), down)
        return self._sum(down, inner, residual, following[1])
