"""Load GPT-OSS checkpoints as they are published: experts in MXFP4, everything else in bfloat16.

The experts of a layer are stored together: blocks of 32 values as 16 bytes [experts, rows, blocks, 16], and an exponent
for each block [experts, rows, blocks]. The rows of the gate and up projections alternate. Loading rounds nothing: every
expert gets its own packed layers with the same codes and exponents.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from smelt.errors import ModelError
from smelt.models.artifact import check_shapes
from smelt.models.config import read_config, read_generation_config
from smelt.models.experts import Expert, SeparateExperts
from smelt.models.network import empty_network, parameters_on_meta
from smelt.models.quantization_scheme import QuantizationScheme
from smelt.models.quantized import quantized_layers
from smelt.models.quantized_network import prepare_quantized_layers
from smelt.models.weights import TensorHeader, check_header, float_dtype, read_headers, read_safetensors
from smelt.numerics.catalog import FORMATS

_FORMAT = FORMATS["mxfp4"]
_BLOCK_SIZE, _BLOCK_BYTES = 32, 16


@dataclass(frozen=True)
class _Layer:
    """A linear layer of an expert and where the file has it: some rows of one expert of a stored tensor."""

    path: str
    stored: str  # name of the tensors of all experts, without "_blocks", "_scales" or "_bias"
    expert: int
    rows: slice


def mxfp4_skeleton(folder: Path) -> PreTrainedModel:
    """Build the network of a folder on the meta device, with its packed layers."""
    return _build_skeleton(folder, "meta")[0]


def load_mxfp4(folder: Path, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """Load the network of a folder in eval mode, with packed experts."""
    headers = read_headers(folder)
    outline, layers = _build_skeleton(folder, "meta")
    _check_layers(outline, layers, headers, folder)
    with parameters_on_meta():
        network, _ = _build_skeleton(folder, "cpu")
    tensors = read_safetensors(folder)
    stored = {f"{layer.stored}_{part}" for layer in layers for part in ("blocks", "scales", "bias")}
    plain = dtype or float_dtype({name: header for name, header in headers.items() if name not in stored})
    state = {name: tensor.to(plain) for name, tensor in tensors.items() if name not in stored}
    for layer in layers:
        state |= _split(layer, tensors, plain)
    network.load_state_dict(state, strict=False, assign=True)
    network.tie_weights()
    network.config.dtype = plain
    generation = read_generation_config(folder)
    if generation is not None and network.can_generate():
        network.generation_config = generation
    return network.eval()


def _split(layer: _Layer, tensors: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the state of one layer."""
    blocks, scales, bias = (
        tensors[f"{layer.stored}_{part}"][layer.expert, layer.rows].contiguous()
        for part in ("blocks", "scales", "bias")
    )
    return {
        f"{layer.path}.codes": blocks.flatten(1),
        f"{layer.path}.scale": scales[..., None],
        f"{layer.path}.bias": bias.to(dtype),
    }


def _build_skeleton(folder: Path, device: str) -> tuple[PreTrainedModel, list[_Layer]]:
    """Build the network without tensors; also return the layers that the file has in MXFP4."""
    where = str(folder)
    network = empty_network(read_config(folder), where, device)
    layers = list(_expert_layers(network))
    if not layers:
        raise ModelError(f"{where}: the config says MXFP4, but the network has no experts, which alone are stored so.")
    scheme = QuantizationScheme(_FORMAT).to_json()
    prepare_quantized_layers(network, {layer.path: scheme for layer in layers}, where)
    return network, layers


def _expert_layers(network: nn.Module) -> Iterator[_Layer]:
    every, gate, up = slice(None), slice(0, None, 2), slice(1, None, 2)
    for path, module in network.named_modules():
        for index, expert in enumerate(module) if isinstance(module, SeparateExperts) else ():
            assert isinstance(expert, Expert)
            names = expert.names
            for name, stored, rows in (
                (names.gate, "gate_up_proj", gate),
                (names.up, "gate_up_proj", up),
                (names.down, "down_proj", every),
            ):
                yield _Layer(f"{path}.{index}.{name}", f"{path}.{stored}", index, rows)


def _check_layers(
    outline: PreTrainedModel, layers: list[_Layer], headers: dict[str, TensorHeader], folder: Path
) -> None:
    """Check the shapes and dtypes of all tensors, before memory is allocated."""
    modules, num_experts = quantized_layers(outline), 1 + max(layer.expert for layer in layers)
    shapes = {name: header.shape for name, header in headers.items()}
    for layer in layers:
        module = modules[layer.path]
        rows, columns = module.out_features * (layer.rows.step or 1), module.in_features
        if columns % _BLOCK_SIZE:
            raise ModelError(f"{folder}: blocks of {_BLOCK_SIZE} do not divide the {columns} inputs of {layer.path}.")
        blocks = (num_experts, rows, columns // _BLOCK_SIZE)
        for part, shape, dtypes in (
            ("blocks", (*blocks, _BLOCK_BYTES), ("U8",)),
            ("scales", blocks, ("U8",)),
            ("bias", (num_experts, rows), ("BF16", "F16", "F32")),
        ):
            check_header(headers, f"{layer.stored}_{part}", shape, dtypes, folder)
        shapes |= {f"{layer.path}.{name}": tuple(tensor.shape) for name, tensor in module.state_dict().items()}
        shapes[f"{layer.path}.bias"] = (module.out_features,)
    check_shapes(outline, shapes, folder)
