"""The artifact: the model folder that Smelt writes and reads.

`config.json`, `model.safetensors` and the tokenizer are in transformers' format; `smelt.json` holds the history, the
shape of every layer and the KV cache format. Saving is deterministic: the same model gives the same bytes. If layer
widths differ, they are also written as `per_layer_config`; if they are equal, as the plain config fields, so that
transformers itself can load the folder.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from smelt.errors import ModelError
from smelt.files import json_text
from smelt.models.anatomy import Anatomy, Part
from smelt.models.anatomy_builder import anatomy_of
from smelt.models.attention_reuse import restore_attention_reuse, reused_maps
from smelt.models.batch_norm import folded_norms, restore_folded_norms
from smelt.models.carved_experts import describe_carving, restore_carving
from smelt.models.config import EXPERT_COUNTS, config_from, read_generation_config
from smelt.models.expert_surgery import checked_experts, restore_experts
from smelt.models.feature_extractor import load_feature_extractor, save_feature_extractor
from smelt.models.image_processor import ImageProcessor
from smelt.models.implants import implants_of, restore_implants
from smelt.models.json_file import read_object
from smelt.models.kv_cache import KVCacheFormat
from smelt.models.model import Model
from smelt.models.network import check_buffers, empty_network, parameters_on_meta
from smelt.models.program_network import ProgramNetwork, load_program_network
from smelt.models.quantized import LOW_RANK_NAMES, QuantizedEmbedding, quantized_layers
from smelt.models.quantized_network import prepare_quantized_layers, tie_layers, tied_layers
from smelt.models.surgery import restore_shape
from smelt.models.token_pruning import install_token_pruning, token_pruning_of
from smelt.models.token_rules import token_rule_from_json
from smelt.models.tokenizer import load_tokenizer, save_tokenizer
from smelt.models.weights import TensorHeader, read_headers, read_safetensors
from smelt.version import __version__

FORMAT = 2
MAX_EXPANSION = 16  # times the channels that a convolution block had
_TEXT_CONFIG = "text_config"
_OLD_FORMAT = 1  # calls the part kind "ffn_channels" "filters"


def save_artifact(model: Model, folder: Path, record: dict[str, Any] | None = None) -> None:
    """Write a model into an existing, empty folder; `record` (reproducible measurements) is added to `smelt.json`."""
    network = model.network
    anatomy = model.anatomy
    packed, token_pruning = quantized_layers(network), token_pruning_of(network)
    write_json(folder / "config.json", shaped_config(anatomy))
    if isinstance(network, ProgramNetwork):
        network.save_program(folder)
    else:
        save_file(distinct_tensors(network), folder / "model.safetensors", metadata={"format": "pt"})
    if network.can_generate():
        network.generation_config.save_pretrained(folder)
    if model.tokenizer is not None:
        save_tokenizer(model.tokenizer, folder)
    if model.image_processor is not None:
        model.image_processor.save(folder)
    if model.feature_extractor is not None:
        save_feature_extractor(model.feature_extractor, folder)
    content = {
        "format": FORMAT,
        "smelt": __version__,
        "source": model.source,
        "history": model.history,
        "shape": anatomy.shape(),
        **({"experts": experts} if (experts := anatomy.expert_shape()) else {}),
        **({"attention_reuse": reused} if (reused := reused_maps(anatomy)) else {}),
        **({"implants": implants} if (implants := implants_of(anatomy)) else {}),
        **({"folded_norms": folded} if (folded := folded_norms(network)) else {}),
        **({"carved_experts": carved} if (carved := describe_carving(network)) else {}),
        **({"program": network.program} if isinstance(network, ProgramNetwork) else {}),
        **({"quantized": {path: layer.scheme.to_json() for path, layer in packed.items()}} if packed else {}),
        **({"tied": tied} if (tied := tied_layers(network)) else {}),
        **({"kv": model.kv.to_json()} if model.kv else {}),
        **({"token_pruning": token_pruning.rule.to_json()} if token_pruning else {}),
        **(record or {}),
    }
    write_json(folder / "smelt.json", content)


def load_artifact(folder: Path, *, dtype: torch.dtype | None = None, device: str = "cpu") -> Model:
    """Load a model that `save_artifact` wrote."""
    content = read_object(folder / "smelt.json")
    if "program" in content:
        network = load_program_network(content["program"], folder, shaped_network(folder, content)).to(device)
        _load_generation_config(network, folder)
        return _loaded_model(network, folder, content)
    headers = read_headers(folder)
    outline = shaped_network(folder, content)
    for path, source in _tied(content, outline, folder).items():  # stored once
        names = [name for name, _ in outline.get_submodule(source).named_buffers() if f"{source}.{name}" in headers]
        headers |= {f"{path}.{name}": headers[f"{source}.{name}"] for name in names}
    shapes = {name: header.shape for name, header in headers.items()}
    check_shapes(outline, shapes, folder)  # before allocating memory
    check_buffers(outline, sum(math.prod(shape) for shape in shapes.values()), str(folder))
    _check_packed(outline, headers, folder)
    with parameters_on_meta():
        network = shaped_network(folder, content, device="cpu")
    _add_biases(network, shapes)
    packed = tuple(f"{path}." for path in quantized_layers(network))
    tensors = {
        name: tensor.to(dtype) if dtype and not name.startswith(packed) else tensor
        for name, tensor in read_safetensors(folder).items()
    }
    network.load_state_dict(tensors, strict=False, assign=True)
    network.tie_weights()
    tied = _tied(content, network, folder)
    tie_layers(network, tied)
    network.to(device)
    tie_layers(network, tied)  # again: each layer was moved by itself
    network.config.dtype = next(network.parameters()).dtype
    for layer in quantized_layers(network).values():
        if isinstance(layer, QuantizedEmbedding):
            layer.dtype = network.config.dtype
    _load_generation_config(network, folder)
    return _loaded_model(network, folder, content)


def _load_generation_config(network: PreTrainedModel, folder: Path) -> None:
    generation = read_generation_config(folder)
    if generation is not None and network.can_generate():
        network.generation_config = generation


def is_artifact(folder: Path) -> bool:
    """Return whether `save_artifact` wrote a folder."""
    return (folder / "smelt.json").is_file()


def has_program(folder: Path) -> bool:
    """Return whether a folder is an artifact that holds a program instead of weights."""
    return is_artifact(folder) and "program" in read_object(folder / "smelt.json")


def _loaded_model(network: PreTrainedModel, folder: Path, content: dict[str, Any]) -> Model:
    history = content.get("history")
    return Model(
        network.eval(),
        load_tokenizer(folder, network.config),
        source=str(folder),
        history=history if isinstance(history, list) else [],
        kv=_kv_format(content, folder),
        image_processor=ImageProcessor.from_folder(folder),
        feature_extractor=load_feature_extractor(folder),
    )


def read_kv_cache_format(folder: str | Path) -> KVCacheFormat | None:
    """Return the KV cache format saved in an artifact; None if it has none or the folder is not an artifact."""
    file = Path(folder).expanduser() / "smelt.json"
    return _kv_format(read_object(file), file.parent) if file.is_file() else None


def _kv_format(content: dict[str, Any], folder: Path) -> KVCacheFormat | None:
    return KVCacheFormat.from_json(content["kv"], str(folder / "smelt.json")) if "kv" in content else None


def shaped_network(folder: Path, content: dict[str, Any] | None = None, device: str = "meta") -> PreTrainedModel:
    """Build the network of an artifact in its saved shape, without its weights."""
    content = content if content is not None else read_object(folder / "smelt.json")
    shape = _current_shape(content, folder)
    values = read_object(folder / "config.json")
    for config in (values, values.get(_TEXT_CONFIG)):
        if isinstance(config, dict):
            config.pop("per_layer_config", None)
    network = empty_network(config_from(values, str(folder / "config.json")), str(folder), device)
    anatomy = anatomy_of(network)
    if (experts := checked_experts(anatomy, content.get("experts"), str(folder))) != []:
        restore_experts(anatomy, experts)
        anatomy = anatomy_of(network)
    if "carved_experts" in content:
        restore_carving(anatomy, content["carved_experts"], str(folder))
        anatomy = anatomy_of(network)
    restore_shape(anatomy, checked_shape(anatomy, shape, folder))
    if "attention_reuse" in content:
        restore_attention_reuse(anatomy_of(network), content["attention_reuse"], str(folder))
    if "implants" in content:
        restore_implants(anatomy_of(network), content["implants"], str(folder))
    if "folded_norms" in content:
        restore_folded_norms(network, content["folded_norms"], str(folder))
    prepare_quantized_layers(network, content.get("quantized", {}), str(folder))
    tie_layers(network, _tied(content, network, folder))
    if "token_pruning" in content:
        rule = token_rule_from_json(content["token_pruning"], len(anatomy.blocks), str(folder))
        install_token_pruning(anatomy, rule)
    return network


def _tied(content: dict[str, Any], network: nn.Module, folder: Path) -> dict[str, str]:
    """Return which quantized layers use the tensors of which embeddings, from an untrusted file."""
    tied, layers = content.get("tied", {}), quantized_layers(network)
    for path, source in tied.items() if isinstance(tied, dict) else [("", None)]:
        layer, table = layers.get(path), layers.get(source) if isinstance(source, str) else None
        if layer is None or not isinstance(table, QuantizedEmbedding) or isinstance(layer, QuantizedEmbedding):
            raise ModelError(f"{folder}: the tied layers in smelt.json are not a head and its embeddings.")
        if (layer.scheme, layer.out_features, layer.in_features) != (
            table.scheme, table.out_features, table.in_features,
        ):  # fmt: skip
            raise ModelError(f"{folder}: the tied layers in smelt.json differ in format or shape.")
    return dict(tied)


def _current_shape(content: dict[str, Any], folder: Path) -> Any:
    """Return the `shape` of a smelt.json in current names, for any supported format version."""
    format_version, shape = content.get("format"), content.get("shape")
    if format_version == FORMAT:
        return shape
    if format_version != _OLD_FORMAT:
        raise ModelError(
            f"{folder} was written in format {format_version!r:.40}; "
            f"this Smelt reads formats {_OLD_FORMAT} to {FORMAT}."
        )
    if not isinstance(shape, list) or not all(isinstance(entry, dict) for entry in shape):
        return shape
    return [{**entry, "part": _current_part_name(entry.get("part"))} for entry in shape]


def _current_part_name(name: Any) -> Any:
    if isinstance(name, str) and name.endswith(".filters"):
        return f"{name.removesuffix('filters')}ffn_channels"
    return name


def checked_shape(anatomy: Anatomy, shape: Any, folder: Path) -> list[dict[str, Any]]:
    """Return the shape from an untrusted file after checking that every entry fits this network."""
    parts = {part.name: part for part in anatomy.parts}
    names = (
        [entry.get("part") if isinstance(entry, dict) else None for entry in shape] if isinstance(shape, list) else []
    )
    if sorted(name for name in names if isinstance(name, str)) != sorted(parts) or len(names) != len(parts):
        raise ModelError(f"{folder}: the shape in smelt.json does not name the parts of this network.")
    for entry in shape:
        units, original, kept = entry.get("units"), entry.get("of"), entry.get("kept")
        current = parts[entry["part"]].units
        fits = (
            isinstance(units, int)
            and isinstance(original, int)
            and 0 <= units <= _most_units(parts[entry["part"]], original)
            and current in (units, original)
        )
        if fits and kept is not None:
            numbers = isinstance(kept, list) and all(type(i) is int and 0 <= i < original for i in kept)
            fits = numbers and len(kept) == units and kept == sorted(set(kept))
        if not fits:
            raise ModelError(f"{folder}: the shape of {entry['part']} in smelt.json does not fit this network.")
    return shape


def _most_units(part: Part, original: int) -> int:
    """Return how many units a part may have; channels can be added, too."""
    return original * (MAX_EXPANSION if part.kind == "channels" else 1)


def check_shapes(network: nn.Module, shapes: dict[str, tuple[int, ...]], folder: Path) -> None:
    """Check that the file holds every tensor of the network, except tied ones, in the right shape."""
    _add_biases(network, shapes)
    tied = set(getattr(network, "all_tied_weights_keys", {}))
    for name, tensor in network.state_dict().items():
        if name not in shapes and name not in tied:
            raise ModelError(f"{folder}: the weights lack {name}.")
        if name in shapes and shapes[name] != tuple(tensor.shape):
            raise ModelError(
                f"{folder}: {name} is {list(shapes[name])} and not {list(tensor.shape)} as smelt.json says."
            )


def _check_packed(network: nn.Module, headers: dict[str, TensorHeader], folder: Path) -> None:
    """Check that codes and scales have the dtypes of their format and that no layer has extra tensors."""
    for path, layer in quantized_layers(network).items():
        for name, tensor in layer.named_buffers():
            dtype = headers[f"{path}.{name}"].torch_dtype
            if dtype != tensor.dtype and name not in LOW_RANK_NAMES:
                raise ModelError(f"{folder}: {path}.{name} is {dtype} and not {tensor.dtype} as smelt.json says.")
        known = {f"{path}.{name}" for name in layer.state_dict()}
        unknown = next((name for name in headers if name.startswith(f"{path}.") and name not in known), None)
        if unknown is not None:
            raise ModelError(f"{folder}: the weights contain {unknown}, which smelt.json does not describe.")


def _add_biases(network: nn.Module, shapes: dict[str, tuple[int, ...]]) -> None:
    """Add the biases that are in the file but not in the network: a repair may have added them."""
    for part in anatomy_of(network).parts:
        module = part.output.module
        if module.bias is None and f"{part.output.path}.bias" in shapes:
            module.bias = nn.Parameter(torch.empty(part.output.out_features, device="meta"))
            module.smelt_added_bias = True


def distinct_tensors(network: nn.Module) -> dict[str, Tensor]:
    """Return the state dict on CPU, with shared storage included only once."""
    seen: set[tuple[int, int]] = set()
    tensors = {}
    for name, tensor in network.state_dict().items():
        span = (tensor.data_ptr(), tensor.numel())
        if tensor.numel() and span in seen:
            continue
        seen.add(span)
        tensors[name] = tensor.detach().cpu().contiguous()
    return tensors


def plain_config(network: PreTrainedModel) -> dict[str, Any]:
    values = network.config.to_dict()
    values.pop("_name_or_path", None)
    values.pop("transformers_version", None)
    values["architectures"] = [type(network).__name__]
    values["dtype"] = str(next(network.parameters()).dtype).removeprefix("torch.")
    encoded: dict[str, Any] = network.config._encode_special_floats(values)  # infinity, as transformers writes it
    return {name: encoded[name] for name in sorted(encoded)}


def shaped_config(anatomy: Anatomy) -> dict[str, Any]:
    """Return the config with the widths of the layers; those of a vision-language model are in its text config."""
    values, fields = plain_config(anatomy.network), layer_fields(anatomy)
    if fields and not isinstance(values.get(_TEXT_CONFIG), dict):
        return {**values, **fields}
    return {**values, _TEXT_CONFIG: {**values[_TEXT_CONFIG], **fields}} if fields else values


def layer_fields(anatomy: Anatomy) -> dict[str, Any]:
    """Return widths as transformers config fields: one value if all layers agree, else one entry per layer."""
    names = anatomy.family.config_names
    counts = expert_counts(anatomy)
    layers: dict[str, dict[str, Any]] = {}
    for block in anatomy.blocks:
        sizes: dict[str, Any] = {}
        for part in block.parts:
            if part.kind == "heads":
                sizes["heads"], sizes["kv_heads"] = part.units * part.heads_per_unit, part.units
            elif part.mixture is not None:
                sizes.setdefault("experts", []).append(part.units)
            elif not part.carved:
                sizes[part.kind] = part.units
        if len(set(sizes.get("experts", []))) == 1:  # otherwise keep the list, for which transformers has no field
            sizes["experts"] = sizes["experts"][0]
        layers[str(block.index)] = {names[size_name]: size for size_name, size in sizes.items() if size_name in names}
    reused = {part.block: part.map_of for part in anatomy.parts if part.map_of is not None}
    if reused:
        for block in anatomy.blocks:
            layers[str(block.index)] |= {"attention_map_of": reused[block.index]} if block.index in reused else {}
        return {"per_layer_config": layers}
    if (carved := describe_carving(anatomy.network)) is not None:
        for block, layer in zip(anatomy.blocks, carved["layers"], strict=True):
            layers[str(block.index)] |= {"carved_experts": layer["experts"]}
        return {"per_layer_config": layers}
    if not names or not is_pruned(anatomy):
        return {}
    if counts and not _lost_units(anatomy) and len(set(counts.values())) == 1:
        return {_expert_count_name(anatomy): next(iter(counts.values()))}
    for block in anatomy.blocks:
        layers[str(block.index)] |= {
            _expert_count_name(anatomy): counts[part.mixture.path]
            for part in block.parts
            if part.mixture is not None and counts
        }
    first = layers["0"]
    equal = all(layer == first for layer in layers.values())
    if equal and not any(isinstance(size, list) for size in first.values()) and _plain_fields_suffice(anatomy):
        return dict(first)
    return {"per_layer_config": layers}


def expert_counts(anatomy: Anatomy) -> dict[str, int]:
    """Return the number of experts of each mixture by its path, if any has lost some."""
    pruned = any(mixture.num_experts != mixture.original_experts for mixture in anatomy.mixtures)
    return {mixture.path: mixture.num_experts for mixture in anatomy.mixtures} if pruned else {}


def _expert_count_name(anatomy: Anatomy) -> str:
    """Return the config field with the number of experts."""
    config = anatomy.network.config.get_text_config()
    return next((name for name in EXPERT_COUNTS if name in config.to_dict()), EXPERT_COUNTS[0])


def is_pruned(anatomy: Anatomy) -> bool:
    """Return whether a part has lost units or a mixture experts."""
    return _lost_units(anatomy) or bool(expert_counts(anatomy))


def _lost_units(anatomy: Anatomy) -> bool:
    return any(part.units != part.original_units for part in anatomy.parts)


def _plain_fields_suffice(anatomy: Anatomy) -> bool:
    """Return whether the plain config fields describe the network.

    After removing heads they do only if the config has its own `head_dim` and the number of heads divides the hidden
    size, which transformers requires. A bias added by a repair has no field: transformers would silently drop it.
    """
    if any(hasattr(part.output.module, "smelt_added_bias") for part in anatomy.parts):
        return False
    pruned = [part for part in anatomy.parts if part.units != part.original_units]
    return all(has_plain_field(anatomy, part, part.units) for part in pruned)


def has_plain_field(anatomy: Anatomy, part: Part, units: int) -> bool:
    """Return whether a plain config field can say that all parts like this one have this many units."""
    if part.kind != "heads":
        return units > 0 and ("experts" if part.mixture is not None else part.kind) in anatomy.family.config_names
    config, heads = anatomy.network.config.get_text_config(), units * part.heads_per_unit
    named = "heads" in anatomy.family.config_names and getattr(config, "head_dim", None) is not None
    return named and heads > 0 and anatomy.hidden_size % heads == 0


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json_text(content, ensure_ascii=False), encoding="utf-8")
