"""Write small GGUF files byte by byte, valid or deliberately invalid."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

F32, Q4_0 = 0, 2
_KINDS = {bool: (7, "<?"), int: (4, "<I"), float: (6, "<f")}


@dataclass
class Tensor:
    """A tensor to write; `shape` is in GGUF order, fastest dimension first; `offset` overrides the correct one."""

    name: str
    shape: Sequence[int]
    data: bytes
    kind: int = F32
    offset: int | None = None


@dataclass
class Gguf:
    """A file to write; omitted fields get correct values."""

    metadata: dict[str, Any] = field(default_factory=dict)
    tensors: list[Tensor] = field(default_factory=list)
    magic: bytes = b"GGUF"
    version: int = 3
    tensor_count: int | None = None
    pair_count: int | None = None
    raw_pairs: bytes = b""
    alignment: int = 32

    def to_bytes(self) -> bytes:
        counts = (self.tensor_count, len(self.tensors)), (self.pair_count, len(self.metadata))
        head = self.magic + struct.pack("<I", self.version)
        head += b"".join(struct.pack("<Q", right if given is None else given) for given, right in counts)
        head += b"".join(text(key) + value(item) for key, item in self.metadata.items()) + self.raw_pairs
        body = b""
        for tensor in self.tensors:
            offset = len(body) if tensor.offset is None else tensor.offset
            head += text(tensor.name) + struct.pack("<I", len(tensor.shape))
            head += b"".join(struct.pack("<Q", size) for size in tensor.shape)
            head += struct.pack("<IQ", tensor.kind, offset)
            body += tensor.data + bytes(-len(tensor.data) % self.alignment)
        return head + bytes(-len(head) % self.alignment) + body

    def write(self, path: Path) -> Path:
        path.write_bytes(self.to_bytes())
        return path


def text(content: str) -> bytes:
    raw = content.encode()
    return struct.pack("<Q", len(raw)) + raw


def value(item: Any) -> bytes:
    """Return a metadata value, prefixed by its type."""
    if isinstance(item, str):
        return struct.pack("<I", 8) + text(item)
    if isinstance(item, list):
        if item and isinstance(item[0], str):
            return struct.pack("<IIQ", 9, 8, len(item)) + b"".join(text(element) for element in item)
        type_id, layout = _KINDS[type(item[0])]
        return struct.pack("<IIQ", 9, type_id, len(item)) + b"".join(struct.pack(layout, element) for element in item)
    type_id, layout = _KINDS[type(item)]
    return struct.pack("<I", type_id) + struct.pack(layout, item)


def matrix(name: str, values: np.ndarray) -> Tensor:
    """Return a float32 tensor from an array in PyTorch's dimension order."""
    return Tensor(name, values.shape[::-1], values.astype("<f4").tobytes())
