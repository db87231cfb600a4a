"""Load folders in compressed-tensors format directly into packed layers.

The format stores the same codes as Smelt in another layout: 32-bit words instead of bytes, signed instead of unsigned
bytes, zero points packed along the output dimension. Loading rounds nothing: codes and scales are taken over exactly.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from smelt.errors import ModelError
from smelt.models.artifact import check_shapes
from smelt.models.config import read_config, read_generation_config
from smelt.models.json_file import read_object
from smelt.models.network import empty_network, parameters_on_meta
from smelt.models.quantization_scheme import QuantizationScheme
from smelt.models.quantized import STATIC_SCALE, QuantizedLinear, quantized_layers
from smelt.models.quantized_network import prepare_quantized_layers
from smelt.models.weights import TensorHeader, check_header, float_dtype, read_headers, read_safetensors
from smelt.numerics.catalog import FORMATS
from smelt.numerics.elements import E4M3
from smelt.numerics.format import PER_ROW, PER_TENSOR, Format
from smelt.numerics.integer import Integer
from smelt.numerics.packing import pack, packed_columns, unpack
from smelt.numerics.scaled import Scaled
from smelt.numerics.scales import ScaleDtype

PACKED, INTEGERS, FLOATS = "pack-quantized", "int-quantized", "float-quantized"
NVFP4, MXFP4 = "nvfp4-pack-quantized", "mxfp4-pack-quantized"
MIXED = "mixed-precision"
_SCALE_DTYPES: dict[str, ScaleDtype] = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_MAX_PATTERN_LENGTH = 200
_MAX_REPEATS = 4  # per pattern: more can make a failing match take exponential time


def compressed_skeleton(folder: Path) -> PreTrainedModel:
    """Build the network of a folder on the meta device, with its packed layers."""
    return _build_skeleton(folder, "meta")[0]


def load_compressed(folder: Path, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """Load the network of a folder in eval mode, with packed quantized layers."""
    headers = read_headers(folder)
    outline, storage = _build_skeleton(folder, "meta")
    layers = quantized_layers(outline)
    shapes = {name: header.shape for name, header in headers.items()}
    for path, layer in layers.items():
        _check_layer(path, layer, storage[path], headers, folder)
        shapes |= {f"{path}.{name}": tuple(tensor.shape) for name, tensor in layer.named_buffers()}
    check_shapes(outline, shapes, folder)  # before allocating memory
    with parameters_on_meta():
        network, _ = _build_skeleton(folder, "cpu")
    tensors = read_safetensors(folder)
    plain = float_dtype({name: header for name, header in headers.items() if not _is_packed_tensor(name, layers)})
    state = {name: tensor.to(dtype or plain) for name, tensor in tensors.items() if not _is_packed_tensor(name, layers)}
    for path, layer in layers.items():
        stored = {name: tensors[f"{path}.{name}"] for name in _expected_tensors(layer, storage[path])}
        packed = _to_packed_tensors(layer, storage[path], stored, f"{folder}: {path}")
        state |= {f"{path}.{name}": tensor for name, tensor in packed.items()}
    network.load_state_dict(state, strict=False, assign=True)
    network.tie_weights()
    network.config.dtype = dtype or plain
    generation = read_generation_config(folder)
    if generation is not None and network.can_generate():
        network.generation_config = generation
    return network.eval()


def _build_skeleton(folder: Path, device: str) -> tuple[PreTrainedModel, dict[str, str]]:
    """Build the network without tensors; also return the storage format of each quantized layer."""
    where, headers = str(folder), read_headers(folder)
    network = empty_network(read_config(folder), where, device)
    quantization = read_object(folder / "config.json")["quantization_config"]
    groups = dict(_targets(network, quantization, where))
    if not groups:
        raise ModelError(f"{where}: no linear layer is a target of the quantization_config.")
    schemes = {path: _scheme(group, path, headers, where).to_json() for path, group in groups.items()}
    prepare_quantized_layers(network, schemes, where)
    return network, {path: str(group["format"]) for path, group in groups.items()}


def _is_packed_tensor(name: str, layers: dict[str, QuantizedLinear]) -> bool:
    """Return whether a tensor belongs to a packed weight (codes, scales); a bias is an ordinary tensor."""
    path, _, leaf = name.rpartition(".")
    return path in layers and leaf != "bias"


def _targets(network: nn.Module, quantization: Any, where: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the path of each quantized linear layer with the first config group that targets it."""
    groups = quantization.get("config_groups")
    if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()):
        raise ModelError(f"{where}: the quantization_config has no config_groups.")
    for part in ("kv_cache_scheme", "transform_config", "sparsity_config"):
        if quantization.get(part):
            raise ModelError(f"{where}: the quantization_config has a {part}, which Smelt does not read.")
    ignored = _names(quantization.get("ignore") or [], where)
    for path, module in network.named_modules():
        if isinstance(module, nn.Linear | Conv1D) and not _matches(path, module, ignored):
            for group in groups.values():
                if _matches(path, module, _names(group.get("targets"), where)):
                    yield path, {"format": quantization.get("format"), **{k: v for k, v in group.items() if v}}
                    break


def _names(names: Any, where: str) -> list[str]:
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ModelError(f"{where}: the targets in the quantization_config are not a list of names.")
    for name in names:
        pattern = name.removeprefix("re:")
        risky = len(re.findall(r"[*+{]", pattern)) > _MAX_REPEATS or re.search(r"\)[*+{?]", pattern)
        if name.startswith("re:") and (risky or len(pattern) > _MAX_PATTERN_LENGTH or not _compiles(pattern)):
            raise ModelError(
                f"{where}: the quantization_config has the pattern {pattern!r:.80}, which is not supported."
            )
    return names


def _compiles(pattern: str) -> bool:
    try:
        re.compile(pattern)
    except re.error:
        return False
    return True


def _matches(path: str, module: nn.Module, names: list[str]) -> bool:
    class_names = {base.__name__ for base in type(module).__mro__}
    return any(
        re.match(name.removeprefix("re:"), path) is not None
        if name.startswith("re:")
        else name == path or name in class_names
        for name in names
    )


def _scheme(group: dict[str, Any], path: str, headers: dict[str, TensorHeader], where: str) -> QuantizationScheme:
    """Return the quantization scheme that a config group gives a layer."""
    weights, inputs = group.get("weights"), group.get("input_activations")
    if not isinstance(weights, dict) or group.get("output_activations"):
        raise ModelError(f"{where}: {path} quantizes outputs or no weights, which Smelt does not read.")
    header = headers.get(f"{path}.weight_scale")
    if header is None:
        raise ModelError(f"{where}: the weights lack {path}.weight_scale.")
    weight_format = _weight_format(weights, group.get("format"), header.dtype)
    if weight_format is None:
        raise ModelError(f"{where}: {path} has weights quantized as {_describe(weights)}, which Smelt does not read.")
    if not inputs:
        return QuantizationScheme(weight_format)
    input_format = _input_format(inputs) if isinstance(inputs, dict) else None
    if input_format is None:
        raise ModelError(f"{where}: {path} has inputs quantized as {_describe(inputs)}, which Smelt does not read.")
    return QuantizationScheme(weight_format, input_format, static=inputs.get("dynamic", False) is False)


def _describe(arguments: Any) -> str:
    present = (
        {key: value for key, value in arguments.items() if value is not None} if isinstance(arguments, dict) else {}
    )
    return str(present)[:200]


def _weight_format(weights: dict[str, Any], storage: Any, scale: str) -> Format | None:
    """Return the number format of a weight, or None if it is not supported."""
    number_type, bits, strategy = weights.get("type", "int"), weights.get("num_bits", 8), weights.get("strategy")
    size = weights.get("group_size")
    if strategy is None:
        strategy = "tensor" if size is None else "channel" if size == -1 else "group"
    if weights.get("dynamic") or weights.get("actorder") not in (None, "weight", "static"):
        return None
    symmetric = weights.get("symmetric", True)
    if (number_type, bits, strategy, size, storage) == ("float", 4, "tensor_group", 16, NVFP4) and symmetric is True:
        return FORMATS["nvfp4"]
    if (number_type, bits, strategy, size, storage) == ("float", 4, "group", 32, MXFP4) and symmetric is True:
        return FORMATS["mxfp4"]
    group = {"tensor": PER_TENSOR, "channel": PER_ROW, "group": size}.get(strategy)
    if type(group) is not int or group < PER_ROW or scale not in _SCALE_DTYPES or type(symmetric) is not bool:
        return None
    if number_type == "float" and bits == 8 and storage == FLOATS and group in (PER_TENSOR, PER_ROW) and symmetric:
        return Scaled(group, _SCALE_DTYPES[scale], E4M3)
    if number_type == "int" and type(bits) is int and 2 <= bits <= 8 and storage in (PACKED, INTEGERS):
        if group == PER_TENSOR and not symmetric:
            return None
        return Integer(group, _SCALE_DTYPES[scale], bits, symmetric)
    return None


def _input_format(inputs: dict[str, Any]) -> Format | None:
    """Return the number format of inputs, or None if it is not supported.

    Dynamic scales follow the compressed-tensors rule: the full code range is used, and MXFP4 scales are rounded up
    where the largest value would be clipped.
    """
    number_type, bits, strategy = inputs.get("type", "int"), inputs.get("num_bits", 8), inputs.get("strategy")
    dynamic, symmetric = inputs.get("dynamic", False), inputs.get("symmetric", True)
    if type(dynamic) is not bool or symmetric is not True:
        return None
    if (number_type, bits, strategy, inputs.get("group_size"), dynamic) == ("float", 4, "group", 32, True):
        return FORMATS["mxfp4-up"]
    group = {"token": PER_ROW, "tensor": PER_TENSOR}.get(strategy or "tensor")
    if group is None or (group == PER_ROW and not dynamic) or bits != 8:
        return None
    if number_type == "int":
        return Integer(group, bits=8, full_range=dynamic)
    return Scaled(group, elements=E4M3) if number_type == "float" else None


def _expected_tensors(layer: QuantizedLinear, storage: str) -> dict[str, tuple[tuple[int, ...], tuple[str, ...]]]:
    """Return the shape and accepted dtypes of each tensor that the file must contain for a layer."""
    rows, columns, weight_format = layer.out_features, layer.in_features, layer.scheme.weight
    groups, zeros = -(-columns // weight_format.effective_group_size(columns)), _has_zero_points(weight_format)
    floats = tuple(_SCALE_DTYPES)
    scale = (1,) if weight_format.group_size == PER_TENSOR else (rows, groups)
    tensors: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {"weight_scale": (scale, floats)}
    if storage == PACKED:
        tensors["weight_packed"] = ((rows, -(-columns * weight_format.bits // 32)), ("I32",))
        tensors["weight_shape"] = ((2,), ("I64",))
        if zeros:
            tensors["weight_zero_point"] = ((-(-rows * weight_format.bits // 32), groups), ("I32",))
    elif storage == INTEGERS:
        tensors["weight"] = ((rows, columns), ("I8",))
        if zeros:
            tensors["weight_zero_point"] = (scale, ("I8",))
    elif storage == FLOATS:
        tensors["weight"] = ((rows, columns), ("F8_E4M3",))
    else:
        tensors["weight_packed"] = ((rows, columns // 2), ("U8",))
        tensors["weight_scale"] = ((rows, groups), ("F8_E4M3",) if storage == NVFP4 else ("U8",))
        if storage == NVFP4:
            tensors["weight_global_scale"] = ((1,), ("F32",))
    if layer.scheme.static:
        tensors["input_scale"] = ((1,), floats)
    return tensors


def _has_zero_points(number_format: Format) -> bool:
    return isinstance(number_format, Integer) and not number_format.symmetric


def _check_layer(
    path: str, layer: QuantizedLinear, storage: str, headers: dict[str, TensorHeader], folder: Path
) -> None:
    if layer.scheme.weight.group_size > 0 and layer.in_features % layer.scheme.weight.group_size:
        raise ModelError(f"{folder}: groups of {layer.scheme.weight.group_size} do not divide the inputs of {path}.")
    for name, (shape, dtypes) in _expected_tensors(layer, storage).items():
        check_header(headers, f"{path}.{name}", shape, dtypes, folder)


def _to_packed_tensors(
    layer: QuantizedLinear, storage: str, stored: dict[str, Tensor], where: str
) -> dict[str, Tensor]:
    """Convert the file's tensors to those of a QuantizedLinear."""
    weight_format, rows, columns = layer.scheme.weight, layer.out_features, layer.in_features
    midpoint = 1 << (weight_format.bits - 1)
    scale = (
        stored["weight_scale"].reshape(-1, 1, 1)
        if weight_format.group_size == PER_TENSOR
        else stored["weight_scale"][..., None]
    )
    converted = {"scale": scale.contiguous()}
    if storage == PACKED:
        if stored["weight_shape"].tolist() != [rows, columns]:
            raise ModelError(f"{where} has a weight_shape of {stored['weight_shape'].tolist()}, not {[rows, columns]}.")
        packed_bytes = stored["weight_packed"].contiguous().view(torch.uint8)  # [rows, 4 * words]
        converted["codes"] = packed_bytes[:, : packed_columns(columns, weight_format.bits)].contiguous()
        if _has_zero_points(weight_format):
            packed_zeros = stored["weight_zero_point"].T.contiguous().view(torch.uint8)  # [groups, 4 * words]
            converted["zero"] = (
                unpack(packed_zeros, weight_format.bits, rows).T.unsqueeze(-1).contiguous()
            )  # [rows, groups, 1]
    elif storage == INTEGERS:
        converted["codes"] = _pack_signed(stored["weight"], midpoint, weight_format, where)
        if _has_zero_points(weight_format):
            converted["zero"] = (stored["weight_zero_point"].int() + midpoint).to(torch.uint8)[..., None].contiguous()
    elif storage == FLOATS:
        converted["codes"] = stored["weight"].view(torch.uint8).contiguous()
    else:
        converted["codes"] = stored["weight_packed"].contiguous()
        if storage == NVFP4:
            converted["tensor"] = stored["weight_global_scale"].reshape(1, 1, 1)
    if layer.scheme.static:
        converted[STATIC_SCALE] = stored["input_scale"].float().reshape(1, 1, 1)
    return converted


def _pack_signed(signed: Tensor, middle: int, number_format: Format, where: str) -> Tensor:
    """Convert signed int8 codes to packed unsigned codes."""
    codes = signed.to(torch.int16) + middle
    if codes.numel() and not 0 <= int(codes.min()) <= int(codes.max()) < 2 * middle:
        raise ModelError(f"{where} holds codes that do not fit into {number_format.bits} bits; the file is damaged.")
    return pack(codes.to(torch.uint8), number_format.bits)
