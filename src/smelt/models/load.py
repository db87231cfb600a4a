"""Load models from a bundled name, a folder, a GGUF file or a hub id, never running code that comes with them."""

from __future__ import annotations

import logging
import platform
import re
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from smelt.errors import ModelError, ResourceError
from smelt.models.artifact import has_program, is_artifact, load_artifact, shaped_network
from smelt.models.bundled import BUNDLED, bundled_gguf, ensure_bundled
from smelt.models.compressed_tensors import compressed_skeleton, load_compressed
from smelt.models.config import COMPRESSED_TENSORS, MXFP4, quant_method, read_config, read_generation_config
from smelt.models.feature_extractor import load_feature_extractor
from smelt.models.gguf import GgufFile, gguf_config, gguf_packed, gguf_shapes, gguf_tensors, gguf_tokenizer, read_gguf
from smelt.models.image_processor import FILE as IMAGE_PROCESSOR_FILE
from smelt.models.image_processor import ImageProcessor
from smelt.models.json_file import one_line
from smelt.models.model import Model
from smelt.models.mxfp4 import load_mxfp4, mxfp4_skeleton
from smelt.models.network import empty_network, fill_network, matching_network, parameters_on_meta
from smelt.models.quantization_scheme import QuantizationScheme
from smelt.models.quantized import QuantizedLinear
from smelt.models.quantized_network import replace_module
from smelt.models.tokenizer import TOKENIZER_FILES, load_tokenizer
from smelt.models.weights import float_dtype, read_headers, read_safetensors, weight_files

logger = logging.getLogger(__name__)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_FILE_SUFFIXES = {".gguf", ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".json", ".yaml"}
_SKELETONS = {COMPRESSED_TENSORS: compressed_skeleton, MXFP4: mxfp4_skeleton}  # by quant_method
_LOADERS = {COMPRESSED_TENSORS: load_compressed, MXFP4: load_mxfp4}
_FROM_HUB = [
    IMAGE_PROCESSOR_FILE,
    *("config.json", "generation_config.json", "model*.safetensors", "model.safetensors.index.json"),
    *(*TOKENIZER_FILES, "merges.txt", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja"),
]


def load(spec: str | Path, *, dtype: torch.dtype | None = None, device: str = "cpu", packed: bool = False) -> Model:
    """Load the model that `spec` names in eval mode, in the float dtype of its file unless `dtype` is set.

    `packed` keeps the quantized matrices of a GGUF file (or bundled GGUF model) quantized instead of dequantizing them.
    """
    _check_device(device)
    path = resolve(spec)
    logger.debug("loading %s from %s on %s", spec, path, device)
    if packed and str(spec) in BUNDLED:
        path = bundled_gguf(str(spec)) or path
    if is_artifact(path):
        model = load_artifact(path, dtype=dtype, device=device)
        _settle_arithmetic(model.network.dtype, device)
        return model
    if packed and dtype is None and device.startswith("cuda"):
        dtype = torch.bfloat16 if path.is_file() else None  # packed matmuls run in half precision on GPU
    network, tokenizer = _load_gguf(path, dtype, packed) if path.is_file() else _load_folder(path, dtype)
    _settle_arithmetic(network.dtype, device)
    try:
        return Model(
            network.to(device),
            tokenizer,
            source=str(spec),
            image_processor=ImageProcessor.from_folder(path),
            feature_extractor=load_feature_extractor(path),
        )
    except torch.OutOfMemoryError as error:
        raise ResourceError(f"{spec} does not fit into the memory of {device}; load it on the CPU.") from error


def load_config(spec: str | Path) -> PreTrainedConfig:
    """Load the config of the model that `spec` names, without its weights."""
    path = resolve(spec, config_only=True)
    if path.is_file():
        return gguf_config(read_gguf(path))
    return read_config(path)


def skeleton(spec: str | Path) -> PreTrainedModel:
    """Build the network that `spec` names on the meta device, without allocating memory."""
    path = resolve(spec, config_only=True)
    if is_artifact(path):
        return shaped_network(path).to("meta")
    if (method := quant_method(path)) in _SKELETONS:
        return _SKELETONS[method](path)
    return empty_network(load_config(path), str(spec))


def resolve(spec: str | Path, *, config_only: bool = False) -> Path:
    """Return the folder or GGUF file that `spec` names, downloading it if necessary (`config_only`: from the hub)."""
    if str(spec) in BUNDLED:
        return ensure_bundled(str(spec))
    path = Path(spec).expanduser()
    if path.is_dir() or (path.is_file() and path.suffix.lower() == ".gguf"):
        return path
    if path.exists():
        raise ModelError(f"{spec} is a file that Smelt does not load; give the model's folder or a .gguf file.")
    if isinstance(spec, str) and _HUB_ID.fullmatch(spec) and path.suffix.lower() not in _FILE_SUFFIXES:
        return _fetch_from_hub(spec, ["config.json"] if config_only else _FROM_HUB)
    bundled = ", ".join(BUNDLED)
    raise ModelError(
        f"no model at {spec}; {_nearest_name(path)}give a bundled name ({bundled}), a folder, a .gguf file or a hub id."
    )


def _nearest_name(path: Path) -> str:
    """Return a hint at the bundled model, folder or GGUF file whose name is nearest; empty if none is near."""
    beside: list[Path] = []
    with suppress(OSError):
        beside = [file for file in path.parent.iterdir() if file.is_dir() or file.suffix.lower() == ".gguf"]
    matches = get_close_matches(str(path), [*BUNDLED, *map(str, beside)], n=1, cutoff=0.8)
    return f"did you mean {matches[0]}? Otherwise " if matches else ""


def source_files(spec: str | Path) -> dict[str, Path]:
    """Return the files that `load` reads for `spec`, by name: the weights and the text files beside them."""
    path = resolve(spec)
    if path.is_file():
        return {path.name: path}
    texts = [file for pattern in ("*.json", "*.txt", "*.model", "*.jinja") for file in path.glob(pattern)]
    weights = path.glob("*.safetensors") if has_program(path) else weight_files(path)
    return {file.name: file for file in sorted({*weights, *texts}) if file.is_file()}


def _fetch_from_hub(hub_id: str, patterns: list[str]) -> Path:
    logger.debug("asking the hub for %s, unless it is in the cache", hub_id)
    try:
        return Path(snapshot_download(hub_id, allow_patterns=patterns))
    except LocalEntryNotFoundError as error:
        raise ModelError(f"there is no local folder {hub_id}, and the hub cannot be reached.") from error
    except GatedRepoError as error:
        raise ModelError(f"{hub_id} is gated: accept its terms on the hub and log in with `hf auth login`.") from error
    except RepositoryNotFoundError as error:
        raise ModelError(
            f"there is no local folder {hub_id}, and the hub has no model of that name (or it is private)."
        ) from error
    except Exception as error:  # network stacks raise many exception types
        raise ModelError(f"{hub_id} could not be fetched from the hub ({one_line(error)}).") from error


def _check_device(device: str) -> None:
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ModelError(f"the device {device!r} is not usable here ({one_line(error)}); use cpu.") from error


def _settle_arithmetic(dtype: torch.dtype, device: str) -> None:
    """Disable oneDNN for bfloat16 on ARM CPUs without bfloat16 instructions.

    PyTorch does so itself when the first such product fails, with a long warning, and from then on results in float32
    differ in the last bits: a resumed run would not give the bytes of an uninterrupted one.
    """
    arm = platform.machine() in ("aarch64", "arm64")
    if dtype == torch.bfloat16 and device == "cpu" and arm and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        torch.backends.mkldnn.set_flags(False)


def _load_folder(folder: Path, dtype: torch.dtype | None) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    if (method := quant_method(folder)) in _LOADERS:
        packed = _LOADERS[method](folder, dtype)
        return packed, load_tokenizer(folder, packed.config)
    config = read_config(folder)
    headers = read_headers(folder)
    empty = matching_network(config, {name: header.shape for name, header in headers.items()}, str(folder))
    network = fill_network(empty, read_safetensors(folder), dtype or float_dtype(headers), str(folder))
    generation = read_generation_config(folder)
    if generation is not None and network.can_generate():
        network.generation_config = generation
    return network, load_tokenizer(folder, config)


def _load_gguf(
    path: Path, dtype: torch.dtype | None, packed: bool
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    file = read_gguf(path)
    config = gguf_config(file)
    tokenizer = gguf_tokenizer(file)
    if packed:
        return _packed_network(file, config, dtype or torch.float32), tokenizer
    empty = matching_network(config, gguf_shapes(file), str(path))
    return fill_network(empty, gguf_tensors(file, config), dtype or torch.float32, str(path)), tokenizer


def _packed_network(file: GgufFile, config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Build a network in eval mode with packed quantized matrices.

    Float tensors and the embedding table are dense, in `dtype`. A tied quantized head becomes a separate layer, and the
    config is updated accordingly.
    """
    where = str(file.path)
    matching_network(config, gguf_shapes(file), where)  # before allocating memory
    packed = gguf_packed(file, config)
    config.tie_word_embeddings = config.tie_word_embeddings and "lm_head" not in packed
    with parameters_on_meta():
        network = empty_network(config, where, "cpu")
    tensors = gguf_tensors(file, config, exclude={f"{path}.weight" for path in packed})
    state = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    for path in list(packed):
        bias = state.pop(f"{path}.bias", None)
        quantized = packed.pop(path)  # do not keep two copies
        layer = QuantizedLinear.from_quantized(quantized, QuantizationScheme(quantized.format), bias=bias, dtype=dtype)
        replace_module(network, path, layer)
    network.load_state_dict(state, strict=False, assign=True)
    network.tie_weights()
    missing = sorted(name for name, parameter in network.named_parameters() if parameter.is_meta)
    if missing:
        raise ModelError(f"{where}: {missing[0]} is missing from the weights; Smelt does not make up weights.")
    network.config.dtype = dtype
    return network.eval()
