"""Write the GGUF container, version 3: the inverse of `models/gguf/reader.py`.

Tensors are converted one at a time, so that the model is never in memory twice.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from smelt.models.gguf.blocks import FORMATS, BlockFormat, Bytes

ALIGNMENT = 32
_MAX_NAME_BYTES = 63  # bytes; readers use 64 with the terminator
_MAGIC, _VERSION = b"GGUF", 3
_SCALAR_TYPES = {bool: (7, "<?"), int: (4, "<I"), float: (6, "<f")}
_STRING, _ARRAY = 8, 9
_ARRAY_TYPES = {"i": (5, "<i4"), "f": (6, "<f4")}
GGML_TYPES = {block_format.name: number for number, block_format in FORMATS.items()}


@dataclass(frozen=True)
class TensorToWrite:
    """A tensor's name, shape (slowest dimension first) and type, and a function that returns its bytes."""

    name: str
    shape: tuple[int, ...]
    ggml_type: str
    to_bytes: Callable[[], Bytes]

    @property
    def format(self) -> BlockFormat:
        return FORMATS[GGML_TYPES[self.ggml_type]]

    @property
    def size(self) -> int:
        return math.prod(self.shape) // self.format.weights * self.format.bytes


def write_gguf(path: Path, metadata: dict[str, Any], tensors: Sequence[TensorToWrite]) -> None:
    """Write a file with metadata (strings, numbers, booleans, lists of strings, arrays of numbers) and tensors."""
    with path.open("wb") as file:
        file.write(_MAGIC + struct.pack("<IQQ", _VERSION, len(tensors), len(metadata)))
        for key, value in metadata.items():
            file.write(_string_bytes(key) + _value_bytes(value))
        offset = 0
        for tensor in tensors:
            assert len(tensor.name.encode()) <= _MAX_NAME_BYTES and tensor.shape[-1] % tensor.format.weights == 0
            dimensions = struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *reversed(tensor.shape))
            file.write(
                _string_bytes(tensor.name) + dimensions + struct.pack("<IQ", GGML_TYPES[tensor.ggml_type], offset)
            )
            offset += tensor.size + -tensor.size % ALIGNMENT
        _pad(file)
        for tensor in tensors:
            data = tensor.to_bytes()
            assert data.nbytes == tensor.size, f"{tensor.name} has {data.nbytes} bytes and not {tensor.size}"
            file.write(data.tobytes())
            _pad(file)


def _pad(file: BinaryIO) -> None:
    file.write(bytes(-file.tell() % ALIGNMENT))


def _string_bytes(text: str) -> bytes:
    raw = text.encode("utf-8")
    return struct.pack("<Q", len(raw)) + raw


def _value_bytes(value: Any) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _string_bytes(value)
    if isinstance(value, list):
        return struct.pack("<IIQ", _ARRAY, _STRING, len(value)) + b"".join(map(_string_bytes, value))
    if isinstance(value, np.ndarray):
        type_id, layout = _ARRAY_TYPES[value.dtype.kind]
        return struct.pack("<IIQ", _ARRAY, type_id, len(value)) + value.astype(layout).tobytes()
    type_id, layout = _SCALAR_TYPES[type(value)]
    return struct.pack("<I", type_id) + struct.pack(layout, value)
