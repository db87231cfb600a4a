"""compressed-tensors: a folder for transformers and vLLM, with the unchanged codes and scales of the artifact.

A layer's scheme becomes the `QuantizationArgs` of a config group, its packed tensors those of the format; layers with
the same scheme share a group. What the format cannot express is refused. How scales of dynamic inputs are computed is
not part of the format: every reader has its own rule, and they differ by less than half a step.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from smelt.errors import FormatError
from smelt.export.format import Export, ExportFormat
from smelt.models.anatomy import Mixture
from smelt.models.artifact import distinct_tensors, is_pruned, layer_fields, shaped_config, write_json
from smelt.models.compressed_tensors import FLOATS, INTEGERS, MIXED, MXFP4, NVFP4, PACKED
from smelt.models.config import COMPRESSED_TENSORS
from smelt.models.experts import Expert, split_experts
from smelt.models.load import load
from smelt.models.model import Model
from smelt.models.quantization_scheme import QuantizationScheme
from smelt.models.quantized import STATIC_SCALE, QuantizedLinear, quantized_layers
from smelt.models.tokenizer import save_tokenizer
from smelt.numerics.catalog import FORMATS, format_name
from smelt.numerics.elements import E4M3
from smelt.numerics.format import PER_ROW, PER_TENSOR, Format
from smelt.numerics.integer import DenormalInteger, Integer
from smelt.numerics.packing import pack, unpack
from smelt.numerics.scaled import Scaled

Arguments = dict[str, Any]
_MX = (FORMATS["mxfp4"], FORMATS["mxfp4-up"])


@dataclass(frozen=True)
class CompressedTensors(ExportFormat):
    """The folder format of vLLM and transformers."""

    name = COMPRESSED_TENSORS

    def check(self, model: Model) -> None:
        _config_groups(model)

    def write(self, model: Model, folder: Path) -> Export:
        network, layers = model.network, quantized_layers(model.network)
        groups, mixtures = _config_groups(model), _mixtures(model)
        plain = [path for path, module in network.named_modules() if isinstance(module, nn.Linear)]
        plain += dict.fromkeys(mixture.router_path for mixture in mixtures.values())
        config = shaped_config(model.anatomy)
        config["quantization_config"] = _quantization_config(groups, plain)
        if any(group["format"] in (NVFP4, MXFP4) for group, _ in groups):
            config["dtype"] = "bfloat16"  # readers dequantize these to bfloat16, whatever the dtype of the network
        write_json(folder / "config.json", config)
        save_file(_tensors(network, layers), folder / "model.safetensors", metadata={"format": "pt"})
        if network.can_generate():
            network.generation_config.save_pretrained(folder)
        if model.tokenizer is not None:
            save_tokenizer(model.tokenizer, folder)
        format_counts = Counter(group["format"] for group, paths in groups for _ in paths)
        expert_notes = ["transformers dequantizes the experts of a mixture when it loads them."] if mixtures else []
        return Export(dict(format_counts), [*_notes(network, layers), *expert_notes])

    def verify(self, model: Model, folder: Path) -> None:
        network, read = model.network, load(folder).network
        layers, read_layers = quantized_layers(network), quantized_layers(read)
        plain = {name: tensor for name, tensor in distinct_tensors(network).items() if not _is_packed(name, layers)}
        state = read.state_dict()
        differing = [name for name, tensor in plain.items() if not torch.equal(state[name], tensor)]
        differing += [path for path, layer in layers.items() if not torch.equal(read_layers[path].weight, layer.weight)]
        scales = {path: getattr(layer, STATIC_SCALE, None) for path, layer in layers.items()}
        differing += [
            path for path, scale in scales.items()
            if scale is not None and not torch.equal(getattr(read_layers[path], STATIC_SCALE), scale)
        ]  # fmt: skip
        if differing or layers.keys() != read_layers.keys():
            raise FormatError(
                f"the export could not be verified: {differing or 'its list of layers'} differs when read."
            )


def _config_groups(model: Model) -> list[tuple[Arguments, list[str]]]:
    """Return the config groups with their layers, or raise FormatError if the format cannot express the model."""
    layers, mixtures = quantized_layers(model.network), _mixtures(model)
    _check(model, layers)
    groups: dict[str, tuple[Arguments, list[str]]] = {}
    for path, layer in layers.items():
        group = _group(layer.scheme, path)
        _check_groups(layer, path)
        if path.rpartition(".")[0] in mixtures:
            _check_expert(group, path)
        groups.setdefault(str(group), (group, []))[1].append(path)
    if mixtures and len(groups) > 1:
        raise FormatError(
            "the layers of this mixture of experts are quantized in several ways, and transformers reads one for all "
            "of them; quantize all layers alike, or keep the artifact."
        )
    return list(groups.values())


def _mixtures(model: Model) -> dict[str, Mixture]:
    """Return the mixture of each expert by its path."""
    return {part.path: part.mixture for part in model.anatomy.parts if part.mixture is not None}


def _check(model: Model, layers: dict[str, QuantizedLinear]) -> None:
    """Raise FormatError if the format cannot express the model."""
    if not layers:
        raise FormatError(
            "this model is not quantized, so it needs no compressed-tensors export; transformers and vLLM open its "
            "own folder."
        )
    if "per_layer_config" in layer_fields(model.anatomy):
        raise FormatError(
            "the layers of this model have different widths or biases that a repair added, and compressed-tensors "
            "describes one width for all of them; keep the artifact, or for an encoder export to onnx."
        )
    if any(isinstance(module, Expert) and not module.names.published for module in model.network.modules()):
        raise FormatError(
            f"checkpoints of {model.network.config.model_type} hold the experts of a layer in one tensor, which Smelt "
            "does not write as compressed-tensors; keep the artifact."
        )
    if is_pruned(model.anatomy) and not layer_fields(model.anatomy):
        raise FormatError(
            f"the config of {model.network.config.model_type} has no fields for the widths of pruned layers; keep the "
            "artifact."
        )
    with torch.device("meta"):
        original = split_experts(type(model.network)(model.network.config))  # the original modules
    for path, layer in layers.items():
        module_type, scheme = type(original.get_submodule(path)).__name__, layer.scheme
        if not isinstance(original.get_submodule(path), nn.Linear):
            raise FormatError(
                f"{path} is a {module_type}, and compressed-tensors supports only Linear; keep the artifact."
            )
        if scheme.hadamard:
            raise FormatError(
                f"{path} rotates its inputs online, which Smelt cannot write as compressed-tensors; quantize "
                "without that rotation."
            )
        if scheme.rank:
            raise FormatError(
                f"{path} has low-rank factors beside its codes, which compressed-tensors cannot store; quantize "
                "without them, or keep the artifact."
            )


def _check_groups(layer: QuantizedLinear, path: str) -> None:
    size = layer.scheme.weight.group_size
    if size > 0 and layer.in_features % size:
        raise FormatError(
            f"the last group of {path} is shorter than the others, and compressed-tensors needs groups that divide its "
            f"{layer.in_features} inputs; quantize with another group_size, or -1."
        )


def _check_expert(group: Arguments, path: str) -> None:
    """Raise unless transformers can fuse the experts of a mixture: it supports symmetric weights with scales only."""
    symmetric = group["weights"]["symmetric"] and group["format"] in (PACKED, FLOATS)
    if not symmetric or group["input_activations"] is not None:
        raise FormatError(
            f"{path} belongs to an expert, and transformers reads experts only as symmetric integers or FP8, with "
            "unquantized inputs; quantize with symmetric: true, or keep the artifact."
        )


def _quantization_config(groups: list[tuple[Arguments, list[str]]], plain: list[str]) -> dict[str, Any]:
    """Return the `quantization_config`: a single group targets all linear layers, several list their layers."""
    formats = sorted({group["format"] for group, _ in groups})
    return {
        "quant_method": COMPRESSED_TENSORS,
        "format": formats[0] if len(formats) == 1 else MIXED,
        "quantization_status": "compressed",
        "config_groups": {
            f"group_{index}": {"targets": ["Linear"] if len(groups) == 1 else paths, **group}
            for index, (group, paths) in enumerate(groups)
        },
        "ignore": plain,
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def _group(scheme: QuantizationScheme, path: str) -> Arguments:
    """Return the config group of a scheme."""
    if scheme.clip != 1.0 and not scheme.static:
        raise FormatError(
            f"{path} clips the range of its inputs, which compressed-tensors cannot express; quantize with a clip "
            "ratio of 1, or with static activations, whose scale includes it."
        )
    storage, weights = _weight_arguments(scheme.weight, scheme.inputs is not None, path)
    inputs = None if scheme.inputs is None else _input_arguments(scheme.inputs, scheme.static, path)
    if inputs is not None and (inputs["type"], inputs["num_bits"] == 8) != (weights["type"], storage != MXFP4):
        raise FormatError(
            f"{path} has {format_name(scheme.weight)} weights and {format_name(scheme.inputs)} inputs, a pair that no "  # type: ignore[arg-type]
            "reader of compressed-tensors runs; use inputs of the same kind as the weights."
        )
    return {"weights": weights, "input_activations": inputs, "output_activations": None, "format": storage}


def _weight_arguments(number_format: Format, quantizes_inputs: bool, path: str) -> tuple[str, Arguments]:
    """Return the storage format of a weight and its `QuantizationArgs`."""
    shared: Arguments = {"symmetric": True, "dynamic": False}
    groups = (
        {"strategy": "group", "group_size": number_format.group_size}
        if number_format.group_size > 0
        else {"strategy": "channel"}
    )
    if type(number_format) is Integer and number_format.zero_dtype == "code":
        shared["symmetric"] = number_format.symmetric
        return INTEGERS if quantizes_inputs else PACKED, {
            "num_bits": number_format.bits,
            "type": "int",
            **shared,
            **groups,
        }
    if (
        type(number_format) is Scaled
        and number_format.elements == E4M3
        and number_format.group_size in (PER_ROW, PER_TENSOR)
    ):
        strategy = "tensor" if number_format.group_size == PER_TENSOR else "channel"
        return FLOATS, {"num_bits": 8, "type": "float", **shared, "strategy": strategy}
    if number_format in _MX:
        return MXFP4, {"num_bits": 4, "type": "float", **shared, **groups, "scale_dtype": "torch.uint8"}
    if number_format == FORMATS["nvfp4"] and not quantizes_inputs:
        groups = {"strategy": "tensor_group", "group_size": number_format.group_size}
        return NVFP4, {"num_bits": 4, "type": "float", **shared, **groups, "scale_dtype": "torch.float8_e4m3fn"}
    raise FormatError(f"{path} is in {format_name(number_format)}, {_unsupported_reason(number_format)}.")


def _unsupported_reason(number_format: Format) -> str:
    known = "quantize to int2 to int8, fp8-e4m3 (row or tensor), mxfp4 or nvfp4"
    if isinstance(number_format, DenormalInteger):
        return f"whose two codes near zero no reader of compressed-tensors knows; {known}"
    if isinstance(number_format, Integer):
        return f"whose zero points are not integers, as compressed-tensors needs; {known}"
    if number_format == FORMATS["nvfp4"]:
        return (
            "and its inputs are quantized: compressed-tensors needs one static global scale of the inputs for that, "
            "which this model does not have; quantize the weights only"
        )
    return f"for which compressed-tensors has no scheme; {known}"


def _input_arguments(number_format: Format, static: bool, path: str) -> Arguments:
    """Return the `QuantizationArgs` of inputs: one static scale, or dynamic scales per token or block."""
    dynamic: Arguments = {"symmetric": True, "dynamic": not static}
    strategy = {PER_ROW: "token", PER_TENSOR: "tensor"}.get(number_format.group_size, "group")
    if number_format in _MX and not static:
        blocks = {"strategy": "group", "group_size": number_format.group_size, "scale_dtype": "torch.uint8"}
        return {"num_bits": 4, "type": "float", **dynamic, **blocks}
    if type(number_format) is Integer and number_format.bits == 8 and number_format.symmetric and strategy != "group":
        return {"num_bits": 8, "type": "int", **dynamic, "strategy": strategy}
    if type(number_format) is Scaled and number_format.elements == E4M3 and strategy != "group":
        return {"num_bits": 8, "type": "float", **dynamic, "strategy": strategy}
    raise FormatError(
        f"{path} quantizes its inputs to {format_name(number_format)}, which compressed-tensors has no scheme "
        "for; use int8, fp8-e4m3 or mxfp4 inputs, or quantize the weights only."
    )


def _is_packed(name: str, layers: dict[str, QuantizedLinear]) -> bool:
    path, _, tensor_name = name.rpartition(".")
    return path in layers and tensor_name != "bias"


def _tensors(network: nn.Module, layers: dict[str, QuantizedLinear]) -> dict[str, Tensor]:
    """Return all tensors of the network under the names of the format."""
    tensors = {name: tensor for name, tensor in distinct_tensors(network).items() if not _is_packed(name, layers)}
    dtype = next(network.parameters()).dtype
    for path, layer in layers.items():
        tensors |= {f"{path}.{name}": tensor.cpu().contiguous() for name, tensor in layer_tensors(layer, dtype).items()}
    return tensors


def layer_tensors(layer: QuantizedLinear, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the tensors of a layer in the layout of the format."""
    number_format, stored = layer.scheme.weight, layer.packed.tensors
    storage, _ = _weight_arguments(number_format, layer.scheme.inputs is not None, "a layer")
    tensors: dict[str, Tensor] = {}
    if layer.scheme.static:
        tensors["input_scale"] = _cast_if_exact(getattr(layer, STATIC_SCALE).reshape(1), dtype)
    if storage in (NVFP4, MXFP4):
        tensors |= {"weight_packed": stored["codes"], "weight_scale": stored["scale"].squeeze(-1)}
        if storage == NVFP4:
            tensors["weight_global_scale"] = stored["tensor"].reshape(1)
        return tensors
    scale = _cast_if_exact(stored["scale"].squeeze(-1), dtype)  # [rows, groups]
    if storage == FLOATS:
        scale = scale.reshape(1) if number_format.group_size == PER_TENSOR else scale
        return {**tensors, "weight": stored["codes"].view(torch.float8_e4m3fn), "weight_scale": scale}
    # A per-tensor scale is repeated for every row: the same values, and every reader supports it.
    tensors["weight_scale"] = scale.expand(layer.out_features, -1)
    zero = stored["zero"].squeeze(-1).expand(layer.out_features, -1) if "zero" in stored else None
    if storage == PACKED:
        tensors["weight_packed"] = _to_int32_words(stored["codes"])
        tensors["weight_shape"] = torch.tensor([layer.out_features, layer.in_features])
        if zero is not None:
            tensors["weight_zero_point"] = _to_int32_words(
                pack(zero.T.contiguous(), number_format.bits)
            ).T  # [words of rows, groups]
        return tensors
    middle = 1 << (number_format.bits - 1)
    tensors["weight"] = (unpack(stored["codes"], number_format.bits, layer.in_features).short() - middle).to(torch.int8)
    if zero is not None:
        tensors["weight_zero_point"] = (zero.short() - middle).to(torch.int8)
    return tensors


def _to_int32_words(octets: Tensor) -> Tensor:  # uint8 [..., bytes] -> int32 [..., words]
    padded = F.pad(octets, (0, -octets.shape[-1] % 4)).contiguous()
    # Flat first: the stride of a dimension of size 1 is arbitrary, and `view` insists that it be a multiple of 4.
    return padded.reshape(-1).view(torch.int32).reshape(*padded.shape[:-1], padded.shape[-1] // 4)


def _cast_if_exact(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast scales to the dtype of the network, as the format expects, if that is exact; else keep their own."""
    cast = scale.to(dtype)
    return cast if torch.equal(cast.double(), scale.double()) else scale


def _notes(network: nn.Module, layers: dict[str, QuantizedLinear]) -> list[str]:
    dtype = next(network.parameters()).dtype
    notes = []
    scales = [layer.packed.tensors["scale"] for layer in layers.values() if layer.scheme.weight not in _MX]
    if any(_cast_if_exact(scale, dtype).dtype != dtype for scale in scales if scale.dtype.itemsize > 1):
        dtype_name = str(dtype).removeprefix("torch.")
        notes.append(
            f"scales are not exact in {dtype_name}, the dtype of the model, and keep their own; a reader that casts "
            f"them to {dtype_name} rounds them (quantize with scales in {dtype_name} to avoid that)."
        )
    if dtype != torch.bfloat16 and any(layer.scheme.weight in (*_MX, FORMATS["nvfp4"]) for layer in layers.values()):
        notes.append(
            "config.json says bfloat16, because readers dequantize 4-bit floats to that; tensors are unchanged."
        )
    if any(layer.scheme.inputs is not None and not layer.scheme.static for layer in layers.values()):
        notes.append("the format does not define how scales of dynamic inputs are computed: readers differ.")
    return notes
