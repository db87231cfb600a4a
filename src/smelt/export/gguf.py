"""GGUF: one file for llama.cpp and related programs, for Llama, Mistral, Qwen 2 and Qwen 3 networks.

A quantized layer is converted code by code if a GGML type represents it exactly, and refused otherwise. An unquantized
matrix keeps its dtype, or is quantized to the requested type.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from smelt.errors import FormatError
from smelt.export.format import Export, ExportFormat
from smelt.export.gguf_blocks import (
    check_format,
    has_float_zero_points,
    quantize_q4_0,
    quantize_q4_1,
    quantize_q4_k,
    quantize_q5_0,
    quantize_q6_k,
    quantize_q8_0,
    to_exact_blocks,
)
from smelt.export.gguf_metadata import PROBE, mismatched_fields, network_metadata, tokenizer_metadata, validated_config
from smelt.export.gguf_writer import GGML_TYPES, TensorToWrite, write_gguf
from smelt.models.artifact import distinct_tensors
from smelt.models.gguf import GgufFile, gguf_config, gguf_tensors, gguf_tokenizer, read_gguf
from smelt.models.gguf.blocks import FORMATS, Bytes
from smelt.models.gguf.llama import BLOCK_NAMES, OUTER_NAMES, ROPE_FACTORS, llama3_factors
from smelt.models.model import Model
from smelt.models.quantized import QuantizedLinear, quantized_layers
from smelt.numerics.error import signal_to_noise

_FLOATS = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_QUANTIZERS = {
    "Q4_0": quantize_q4_0, "Q4_1": quantize_q4_1, "Q5_0": quantize_q5_0, "Q8_0": quantize_q8_0,
    "Q4_K": quantize_q4_k, "Q6_K": quantize_q6_k,
}  # fmt: skip
_FALLBACK = {"Q4_K": "Q5_0", "Q6_K": "Q8_0"}  # if 256 does not divide the rows
_LOW_BIT_TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q4_K")
_TYPE_OPTIONS = (
    *(ggml_type.lower() for ggml_type in _FLOATS.values()),
    *(ggml_type.lower() for ggml_type in _QUANTIZERS),
)
_FILE_TYPES = {
    "F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q4_K": 14, "Q6_K": 18, "BF16": 32,
}  # fmt: skip
_QUANTIZATION_VERSION = 2
_FLOAT32_SNR_DB = 120.0  # dB; float32 zero points and minima give the same weights up to the last bits of float32
_MIN_SNR_DB = 10.0  # dB; every type is far above it on any weights, and a wrong byte order far below


@dataclass(frozen=True)
class Gguf(ExportFormat):
    """A GGUF file. `type` is the type of unquantized matrices; None: keep their dtype."""

    name = "gguf"
    file = "model.gguf"
    type: str | None = None
    tokenizer: bool = True

    def __post_init__(self) -> None:
        if self.type is not None and self.type.lower() not in _TYPE_OPTIONS:
            raise FormatError(f"there is no GGUF type {self.type!r}; choose one of {', '.join(_TYPE_OPTIONS)}.")

    def check(self, model: Model) -> None:
        validated_config(model)
        for path, layer in quantized_layers(model.network).items():
            check_format(path, layer)

    def write(self, model: Model, folder: Path) -> Export:
        config, tensors = validated_config(model), list(self._tensors(model))
        type_counts = Counter(tensor.ggml_type for tensor in tensors)
        metadata = network_metadata(config, model.source)
        metadata["general.file_type"] = _FILE_TYPES[_main_type(tensors)]
        if any(tensor.format.weights > 1 for tensor in tensors):
            metadata["general.quantization_version"] = _QUANTIZATION_VERSION
        if model.tokenizer is None or not self.tokenizer:
            metadata["tokenizer.ggml.model"] = "none"
        else:
            metadata |= tokenizer_metadata(model.tokenizer, int(config["vocab_size"]))
        write_gguf(folder / "model.gguf", metadata, tensors)
        return Export(dict(type_counts), self._notes(model, type_counts))

    def _tensors(self, model: Model) -> Iterator[TensorToWrite]:
        """Yield every tensor under its GGUF name, rows of q and k in GGUF order where the architecture needs it."""
        config, layers = validated_config(model), quantized_layers(model.network)
        gguf_names = {ours: name for name, ours in OUTER_NAMES.items()}
        for name, tensor in distinct_tensors(model.network).items():
            path, _, part = name.rpartition(".")
            if path in layers:
                continue
            gguf_name = gguf_names.get(name) or _block_name(path, part)
            yield self._unquantized(gguf_name, tensor, _row_order(path, tensor.shape[0], config), config)
        for path, layer in layers.items():
            name = gguf_names.get(f"{path}.weight") or _block_name(path, "weight")
            yield _convert_exactly(name, path, layer, _row_order(path, layer.out_features, config))
            if layer.bias is not None:
                order = _row_order(path, layer.out_features, config)
                yield self._unquantized(_block_name(path, "bias"), layer.bias.detach(), order, config)
        rope = config["rope_parameters"]
        if rope["rope_type"] == "llama3":
            factors = llama3_factors(rope["factor"], rope["rope_theta"], config["head_dim"])
            yield TensorToWrite(ROPE_FACTORS, factors.shape, "F32", lambda: factors.view(np.uint8))

    def _unquantized(self, name: str, tensor: Tensor, order: Tensor | None, config: dict[str, Any]) -> TensorToWrite:
        ggml_type = "F32" if tensor.dim() == 1 else self._select_type(name, tensor, config)

        def to_bytes() -> Bytes:
            values = tensor if order is None else tensor[order]
            return _encode(name, values.detach().float().numpy(), ggml_type)

        return TensorToWrite(name, tuple(tensor.shape), ggml_type, to_bytes)

    def _select_type(self, name: str, tensor: Tensor, config: dict[str, Any]) -> str:
        """Return the requested type, or a fallback whose blocks divide the rows. As in llama.cpp, the output matrix has
        six bits (or eight, if those do not fit) when the others have four or five."""
        if self.type is None:
            return _FLOATS[tensor.dtype]
        ggml_type = self.type.upper()
        is_output = name == ("token_embd.weight" if config["tie_word_embeddings"] else "output.weight")
        if ggml_type in _LOW_BIT_TYPES and is_output:
            ggml_type = "Q6_K"
        if tensor.shape[1] % FORMATS[GGML_TYPES[ggml_type]].weights:
            ggml_type = _FALLBACK.get(ggml_type, "F16")
        return ggml_type if tensor.shape[1] % FORMATS[GGML_TYPES[ggml_type]].weights == 0 else "F16"

    def _notes(self, model: Model, type_counts: Counter[str]) -> list[str]:
        notes = []
        requested = (self.type or "").upper()
        others = sorted(ggml_type for ggml_type in type_counts if ggml_type not in (requested, "F32"))
        if requested in _QUANTIZERS and others and not quantized_layers(model.network):
            counts = ", ".join(f"{type_counts[ggml_type]} in {ggml_type}" for ggml_type in others)
            notes.append(f"the output matrix, and rows that its blocks do not divide, are more precise: {counts}.")
        if any(layer.scheme.inputs is not None for layer in quantized_layers(model.network).values()):
            notes.append("GGUF does not define how inputs are quantized; every reader has its own way.")
        return notes

    def verify(self, model: Model, folder: Path) -> None:
        file = read_gguf(folder / "model.gguf")
        config = gguf_config(file)
        mismatched = mismatched_fields(validated_config(model), config)
        layers, read_tensors = quantized_layers(model.network), gguf_tensors(file, config)
        quantized = {f"{path}.weight": layer for path, layer in layers.items()}
        tensors = {n: t for n, t in distinct_tensors(model.network).items() if n.rpartition(".")[0] not in layers}
        lossy = {name for name in tensors if self._may_be_lossy(file, name)}
        for name in (*tensors, *quantized):
            expected = quantized[name].weight if name in quantized else tensors[name].float()
            threshold = (
                _FLOAT32_SNR_DB
                if name in quantized and has_float_zero_points(quantized[name])
                else _MIN_SNR_DB
                if name in lossy
                else None
            )
            if (
                name not in read_tensors
                or read_tensors[name].shape != expected.shape
                or not _matches(expected, read_tensors[name], threshold)
            ):
                mismatched.append(name)
        if mismatched or len(read_tensors) != len(tensors) + len(quantized) + sum(
            layer.bias is not None for layer in layers.values()
        ):
            raise FormatError(
                f"the export could not be verified: {mismatched[:3] or 'its list of tensors'} differs when read."
            )
        if model.tokenizer is not None and self.tokenizer:
            _check_tokenizer(model, file)

    def _may_be_lossy(self, file: GgufFile, name: str) -> bool:
        """Return whether a tensor may have another type than in the model."""
        if self.type is None:
            return False
        source = next((gguf for gguf, ours in OUTER_NAMES.items() if ours == name), None)
        entry = file.entries.get(source or _block_name(*name.rsplit(".", 1)))
        return entry is not None and len(entry.shape) > 1


def _main_type(tensors: list[TensorToWrite]) -> str:
    """Return the most common type of the matrices."""
    return Counter(tensor.ggml_type for tensor in tensors if len(tensor.shape) > 1).most_common(1)[0][0]


def _block_name(path: str, part: str) -> str:
    """Return `blk.3.attn_q.weight` for `model.layers.3.self_attn.q_proj` and `weight`."""
    _, _, rest = path.partition("layers.")
    number, _, inner = rest.partition(".")
    gguf_names = {ours: name for name, ours in BLOCK_NAMES.items()}
    return f"blk.{number}.{gguf_names[inner]}.{part}"


def _row_order(path: str, rows: int, config: dict[str, Any]) -> Tensor | None:
    """Return the row order of q and k in GGUF: Llama interleaves the two rows of a RoPE pair, which are in separate
    halves in transformers."""
    if config["model_type"] not in ("llama", "mistral") or not path.endswith(("q_proj", "k_proj")):
        return None
    heads = config["num_attention_heads" if path.endswith("q_proj") else "num_key_value_heads"]
    return torch.arange(rows).reshape(heads, 2, -1).transpose(1, 2).reshape(-1)


def _convert_exactly(name: str, path: str, layer: QuantizedLinear, order: Tensor | None) -> TensorToWrite:
    """Return a quantized layer in the type that represents it exactly."""
    ggml_type = to_exact_blocks(path, layer).ggml_type
    shape = (layer.out_features, layer.in_features)
    return TensorToWrite(name, shape, ggml_type, lambda: to_exact_blocks(path, layer).to_bytes(order))


def _encode(name: str, values: Any, ggml_type: str) -> Bytes:
    if not np.isfinite(values).all():
        raise FormatError(f"{name} contains NaN or infinity; repair the model first.")
    if ggml_type == "BF16":
        return np.ascontiguousarray(torch.from_numpy(values).bfloat16().view(torch.uint8).numpy())
    if ggml_type in ("F32", "F16"):
        if ggml_type == "F16" and values.size and np.abs(values).max() > np.finfo(np.float16).max:
            raise FormatError(f"{name} has weights that are too large for f16; use --type bf16 or f32.")
        return np.ascontiguousarray(values.astype("<f4" if ggml_type == "F32" else "<f2")).view(np.uint8)
    return _QUANTIZERS[ggml_type](values.reshape(-1, FORMATS[GGML_TYPES[ggml_type]].weights))


def _matches(expected: Tensor, actual: Tensor, min_snr_db: float | None) -> bool:
    """Return whether tensors are equal, or above `min_snr_db` of signal-to-noise ratio if the type is lossy."""
    if torch.equal(expected, actual):
        return True
    return min_snr_db is not None and signal_to_noise(expected, actual) > min_snr_db


def _check_tokenizer(model: Model, file: GgufFile) -> None:
    """Raise unless the tokenizer of the file gives the same tokens."""
    assert model.tokenizer is not None
    read = gguf_tokenizer(file)
    if read is None or read(PROBE)["input_ids"] != model.tokenizer(PROBE)["input_ids"]:
        raise FormatError(
            "GGUF cannot express this tokenizer: read back, it gives other tokens; export with "
            "--no-tokenizer to leave it out, and keep the original beside the file."
        )
