"""GGUF: one file for llama.cpp and its kin, of Llama, Mistral, Qwen 2 and Qwen 3 networks.

A quantized layer is carried over code by code where a GGML type holds its grid exactly, and refused where none does. A
matrix that is not quantized stays what it is, or is rounded by the rule of the type that is asked for.
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
from smelt.export.gguf_blocks import round_q4_0, round_q4_1, round_q5_0, round_q8_0
from smelt.export.gguf_file import TYPES, TensorToWrite, write_gguf
from smelt.export.gguf_levels import exact_blocks, has_fractions
from smelt.export.gguf_metadata import checked_config, differing, network_metadata
from smelt.export.gguf_search import round_q4_k, round_q6_k
from smelt.export.gguf_tokenizer import PROBE, tokenizer_metadata
from smelt.models.artifact import distinct_tensors
from smelt.models.gguf import GgufFile, gguf_config, gguf_tensors, gguf_tokenizer, read_gguf
from smelt.models.gguf.blocks import FORMATS, Bytes
from smelt.models.gguf.llama import BLOCK_NAMES, OUTER_NAMES, ROTARY_FACTORS, llama3_factors
from smelt.models.model import Model
from smelt.models.quantized import QuantizedLinear, quantized_layers
from smelt.numerics.error import signal_to_noise

_FLOATS = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_ROUND = {
    "Q4_0": round_q4_0, "Q4_1": round_q4_1, "Q5_0": round_q5_0, "Q8_0": round_q8_0,
    "Q4_K": round_q4_k, "Q6_K": round_q6_k,
}  # fmt: skip
_FALLBACK = {"Q4_K": "Q5_0", "Q6_K": "Q8_0"}  # where rows are not made of whole blocks of 256
_COARSE = ("Q4_0", "Q4_1", "Q5_0", "Q4_K")
_CHOICES = (*(kind.lower() for kind in _FLOATS.values()), *(kind.lower() for kind in _ROUND))
_FILE_TYPES = {
    "F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q4_K": 14, "Q6_K": 18, "BF16": 32,
}  # fmt: skip
_QUANTIZATION_VERSION = 2
_LAST_BITS = 120.0  # decibel; a zero point in float32 and a minimum give the same weights to the last bits of a float32
_LEAST_SIGNAL = 10.0  # decibel; every type is far above it on any weights, and a wrong byte order far below


@dataclass(frozen=True)
class Gguf(ExportFormat):
    """A GGUF file. `type` is that of matrices which are not quantized; without it they stay as they are."""

    name = "gguf"
    file = "model.gguf"
    type: str | None = None
    tokenizer: bool = True

    def __post_init__(self) -> None:
        if self.type is not None and self.type.lower() not in _CHOICES:
            raise FormatError(f"there is no GGUF type {self.type!r} here; there are {', '.join(_CHOICES)}.")

    def write(self, model: Model, folder: Path) -> Export:
        config, tensors = checked_config(model), list(self._tensors(model))
        kinds = Counter(tensor.kind for tensor in tensors)
        metadata = network_metadata(config, model.source)
        metadata["general.file_type"] = _FILE_TYPES[_main_kind(tensors)]
        if any(tensor.format.weights > 1 for tensor in tensors):
            metadata["general.quantization_version"] = _QUANTIZATION_VERSION
        if model.tokenizer is None or not self.tokenizer:
            metadata["tokenizer.ggml.model"] = "none"
        else:
            metadata |= tokenizer_metadata(model.tokenizer, int(config["vocab_size"]))
        write_gguf(folder / "model.gguf", metadata, tensors)
        return Export(dict(kinds), self._notes(model, kinds))

    def _tensors(self, model: Model) -> Iterator[TensorToWrite]:
        """Every tensor under its name in GGUF, rows of q and k in GGUF's order where the architecture asks for it."""
        config, layers = checked_config(model), quantized_layers(model.network)
        theirs = {ours: name for name, ours in OUTER_NAMES.items()}
        for name, tensor in distinct_tensors(model.network).items():
            path, _, part = name.rpartition(".")
            if path in layers:
                continue
            gguf_name = theirs.get(name) or _block_name(path, part)
            yield self._plain(gguf_name, tensor, _row_order(path, tensor.shape[0], config), config)
        for path, layer in layers.items():
            name = theirs.get(f"{path}.weight") or _block_name(path, "weight")
            yield _carried(name, path, layer, _row_order(path, layer.out_features, config))
            if layer.bias is not None:
                order = _row_order(path, layer.out_features, config)
                yield self._plain(_block_name(path, "bias"), layer.bias.detach(), order, config)
        rotary = config["rope_parameters"]
        if rotary["rope_type"] == "llama3":
            factors = llama3_factors(rotary["factor"], rotary["rope_theta"], config["head_dim"])
            yield TensorToWrite(ROTARY_FACTORS, factors.shape, "F32", lambda: factors.view(np.uint8))

    def _plain(self, name: str, tensor: Tensor, order: Tensor | None, config: dict[str, Any]) -> TensorToWrite:
        kind = "F32" if tensor.dim() == 1 else self._kind(name, tensor, config)

        def make() -> Bytes:
            values = tensor if order is None else tensor[order]
            return _rounded(name, values.detach().float().numpy(), kind)

        return TensorToWrite(name, tuple(tensor.shape), kind, make)

    def _kind(self, name: str, tensor: Tensor, config: dict[str, Any]) -> str:
        """The type asked for, or the nearest one whose blocks fit into a row. As llama.cpp does, the matrix that gives
        the logits has six bits (or eight, where those do not fit) when the others have four or five."""
        if self.type is None:
            return _FLOATS[tensor.dtype]
        kind = self.type.upper()
        gives_logits = name == ("token_embd.weight" if config["tie_word_embeddings"] else "output.weight")
        if kind in _COARSE and gives_logits:
            kind = "Q6_K"
        if tensor.shape[1] % FORMATS[TYPES[kind]].weights:
            kind = _FALLBACK.get(kind, "F16")
        return kind if tensor.shape[1] % FORMATS[TYPES[kind]].weights == 0 else "F16"

    def _notes(self, model: Model, kinds: Counter[str]) -> list[str]:
        notes = []
        asked = (self.type or "").upper()
        others = sorted(kind for kind in kinds if kind not in (asked, "F32"))
        if asked in _ROUND and others and not quantized_layers(model.network):
            told = ", ".join(f"{kinds[kind]} in {kind}" for kind in others)
            notes.append(f"rows that its blocks do not divide, and the matrix of the logits, are finer: {told}.")
        if any(layer.scheme.inputs is not None for layer in quantized_layers(model.network).values()):
            notes.append("GGUF does not say how inputs are rounded; a reader does that in its own way.")
        return notes

    def verify(self, model: Model, folder: Path) -> None:
        file = read_gguf(folder / "model.gguf")
        config = gguf_config(file)
        wrong = differing(checked_config(model), config)
        layers, found = quantized_layers(model.network), gguf_tensors(file, config)
        own = {f"{path}.weight": layer for path, layer in layers.items()}
        tensors = {n: t for n, t in distinct_tensors(model.network).items() if n.rpartition(".")[0] not in layers}
        lossy = {name for name in tensors if self._is_rounded(file, name)}
        for name in (*tensors, *own):
            true = own[name].weight if name in own else tensors[name].float()
            near = _LAST_BITS if name in own and has_fractions(own[name]) else _LEAST_SIGNAL if name in lossy else None
            if name not in found or found[name].shape != true.shape or not _same(true, found[name], near):
                wrong.append(name)
        if wrong or len(found) != len(tensors) + len(own) + sum(layer.bias is not None for layer in layers.values()):
            raise FormatError(
                f"the export could not be verified: {wrong[:3] or 'its list of tensors'} differs when read."
            )
        if model.tokenizer is not None and self.tokenizer:
            _check_tokenizer(model, file)

    def _is_rounded(self, file: GgufFile, name: str) -> bool:
        """Whether a tensor is in another type than the model has it in."""
        if self.type is None:
            return False
        source = next((gguf for gguf, ours in OUTER_NAMES.items() if ours == name), None)
        entry = file.entries.get(source or _block_name(*name.rsplit(".", 1)))
        return entry is not None and len(entry.shape) > 1


def _main_kind(tensors: list[TensorToWrite]) -> str:
    """The type of most matrices."""
    return Counter(tensor.kind for tensor in tensors if len(tensor.shape) > 1).most_common(1)[0][0]


def _block_name(path: str, part: str) -> str:
    """`blk.3.attn_q.weight` for `model.layers.3.self_attn.q_proj` and `weight`."""
    _, _, rest = path.partition("layers.")
    number, _, inner = rest.partition(".")
    theirs = {ours: name for name, ours in BLOCK_NAMES.items()}
    return f"blk.{number}.{theirs[inner]}.{part}"


def _row_order(path: str, rows: int, config: dict[str, Any]) -> Tensor | None:
    """GGUF's Llama has the two rows that rotate together side by side; transformers has first halves, second halves."""
    if config["model_type"] not in ("llama", "mistral") or not path.endswith(("q_proj", "k_proj")):
        return None
    heads = config["num_attention_heads" if path.endswith("q_proj") else "num_key_value_heads"]
    return torch.arange(rows).reshape(heads, 2, -1).transpose(1, 2).reshape(-1)


def _carried(name: str, path: str, layer: QuantizedLinear, order: Tensor | None) -> TensorToWrite:
    """A quantized layer in the type that holds it exactly."""
    kind = exact_blocks(path, layer).kind
    shape = (layer.out_features, layer.in_features)
    return TensorToWrite(name, shape, kind, lambda: exact_blocks(path, layer).to_bytes(order))


def _rounded(name: str, values: Any, kind: str) -> Bytes:
    if not np.isfinite(values).all():
        raise FormatError(f"{name} holds NaN or infinity; mend the model first.")
    if kind == "BF16":
        return np.ascontiguousarray(torch.from_numpy(values).bfloat16().view(torch.uint8).numpy())
    if kind in ("F32", "F16"):
        if kind == "F16" and values.size and np.abs(values).max() > np.finfo(np.float16).max:
            raise FormatError(f"{name} has weights that are too large for f16; use --type bf16 or f32.")
        return np.ascontiguousarray(values.astype("<f4" if kind == "F32" else "<f2")).view(np.uint8)
    return _ROUND[kind](values.reshape(-1, FORMATS[TYPES[kind]].weights))


def _same(true: Tensor, found: Tensor, decibel: float | None) -> bool:
    """Bit for bit; or so near, where a type rounds."""
    if torch.equal(true, found):
        return True
    return decibel is not None and signal_to_noise(true, found) > decibel


def _check_tokenizer(model: Model, file: GgufFile) -> None:
    """The tokenizer of the file must give the same tokens."""
    assert model.tokenizer is not None
    read = gguf_tokenizer(file)
    if read is None or read(PROBE)["input_ids"] != model.tokenizer(PROBE)["input_ids"]:
        raise FormatError(
            "GGUF has no words for what this tokenizer does: read back, it gives other tokens; export with "
            "--no-tokenizer to leave it out, and keep the original beside the file."
        )
