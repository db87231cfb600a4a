"""Read the GGUF container as untrusted input: each count, length and offset is checked before use.

Layout (little-endian): magic, version, number of tensors, number of metadata pairs; the pairs; one record per tensor
(name, dimensions, type, offset); padding to the alignment; the tensor data.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from smelt.errors import ModelError
from smelt.models.gguf.blocks import FORMATS, BlockFormat, Bytes, Floats, dequantize

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_TENSORS = 2**16
_MAX_METADATA_KEYS = 2**12
_MAX_STRINGS = 2**20  # in all arrays; the largest vocabularies and merge lists together have three quarters of that
_MAX_TEXT_BYTES = 2**26  # of all strings; large vocabularies, merge lists and templates have a quarter of that
_MAX_DIMENSIONS = 4
_MAX_ALIGNMENT = 2**16

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING = 8
_ARRAY = 9


@dataclass(frozen=True)
class TensorEntry:
    """The location of a tensor in the file. The shape is in PyTorch's order, slowest dimension first."""

    name: str
    shape: tuple[int, ...]
    format: BlockFormat
    begin: int
    end: int


@dataclass(frozen=True)
class GgufFile:
    """A checked GGUF file: its metadata and the locations of its tensors."""

    path: Path
    metadata: dict[str, Any]
    entries: dict[str, TensorEntry]
    data: Bytes

    def tensor(self, name: str) -> Floats:
        """Return the tensor, dequantized to float32."""
        entry = self.entries[name]
        return dequantize(self.bytes(name), entry.format, entry.shape)

    def bytes(self, name: str) -> Bytes:
        """Return the raw bytes of the tensor."""
        entry = self.entries[name]
        return self.data[entry.begin : entry.end]


class _DamagedFileError(Exception):
    """The file is damaged; `read_gguf` adds its name."""


class _Cursor:
    """A bounds-checked reader of the file's bytes."""

    def __init__(self, data: Bytes):
        self.data = memoryview(data)  # type: ignore[arg-type]  # slices of it are much cheaper than NumPy's
        self.position = 0
        self.strings_left, self.text_bytes_left = _MAX_STRINGS, _MAX_TEXT_BYTES

    def take(self, count: int) -> memoryview:
        if count > len(self.data) - self.position:
            raise _DamagedFileError("it is cut off, or a length in it is wrong")
        self.position += count
        return self.data[self.position - count : self.position]

    def number(self, layout: str) -> Any:
        return struct.unpack(layout, self.take(struct.calcsize(layout)))[0]

    def text(self) -> str:
        raw = self.take(self.number("<Q"))
        self.text_bytes_left -= len(raw)
        if self.text_bytes_left < 0:
            raise _DamagedFileError(f"its strings have more than {_MAX_TEXT_BYTES} bytes")
        try:
            return str(raw, "utf-8")
        except UnicodeDecodeError:
            raise _DamagedFileError("a string in it is not UTF-8") from None

    def count(self, limit: int, what: str) -> int:
        value = int(self.number("<Q"))
        if value > limit:
            raise _DamagedFileError(f"it claims {value} {what}; at most {limit} are accepted")
        return value


def read_gguf(path: Path) -> GgufFile:
    """Read the metadata and tensor entries; tensor data is memory-mapped."""
    try:
        data: Bytes = np.memmap(path, dtype=np.uint8, mode="r") if path.stat().st_size else np.empty(0, np.uint8)
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read ({error}).") from error
    try:
        metadata, entries = _read_header(_Cursor(data))
    except _DamagedFileError as error:
        raise ModelError(f"{path} is not a usable GGUF file: {error}.") from None
    return GgufFile(path, metadata, entries, data)


def _read_header(cursor: _Cursor) -> tuple[dict[str, Any], dict[str, TensorEntry]]:
    if cursor.take(4).tobytes() != _MAGIC:
        raise _DamagedFileError("it does not begin with GGUF")
    version = cursor.number("<I")
    if version not in _VERSIONS:
        raise _DamagedFileError(f"its version is {version}; versions 2 and 3 are supported")
    tensor_count = cursor.count(_MAX_TENSORS, "tensors")
    metadata = _read_metadata(cursor, cursor.count(_MAX_METADATA_KEYS, "metadata pairs"))
    entries = _read_entries(cursor, tensor_count, _alignment(metadata))
    return metadata, entries


def _read_metadata(cursor: _Cursor, count: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for _ in range(count):
        key = cursor.text()
        if key in metadata:
            raise _DamagedFileError(f"the metadata key {key!r:.80} appears twice")
        metadata[key] = _read_value(cursor, cursor.number("<I"))
    return metadata


def _read_value(cursor: _Cursor, kind: int) -> Any:
    if kind == _STRING:
        return cursor.text()
    if kind == _ARRAY:
        return _read_array(cursor)
    if kind not in _SCALARS:
        raise _DamagedFileError(f"a metadata value has the unknown type {kind}")
    return cursor.number(_SCALARS[kind])


def _read_array(cursor: _Cursor) -> Any:
    """Read a list of strings or a NumPy view of numbers. Nested arrays are not supported."""
    element_type = cursor.number("<I")
    if element_type == _STRING:
        length = cursor.count(cursor.strings_left, "strings in arrays")
        cursor.strings_left -= length
        return [cursor.text() for _ in range(length)]
    if element_type not in _SCALARS:
        raise _DamagedFileError(f"an array in its metadata has elements of the unsupported type {element_type}")
    layout = np.dtype(_SCALARS[element_type])
    length = int(cursor.number("<Q"))
    return np.asarray(cursor.take(length * layout.itemsize)).view(layout)


def _alignment(metadata: dict[str, Any]) -> int:
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 8 <= alignment <= _MAX_ALIGNMENT or alignment % 8:
        raise _DamagedFileError(
            f"its alignment is {alignment!r:.40}; a multiple of 8 up to {_MAX_ALIGNMENT} is expected"
        )
    return alignment


def _read_entries(cursor: _Cursor, count: int, alignment: int) -> dict[str, TensorEntry]:
    records = [_read_line(cursor) for _ in range(count)]
    data_start = cursor.position + -cursor.position % alignment
    entries: dict[str, TensorEntry] = {}
    for name, shape, block_format, offset in records:
        begin = data_start + offset
        end = begin + math.prod(shape) // block_format.weights * block_format.bytes
        if name in entries:
            raise _DamagedFileError(f"the tensor {name!r:.80} appears twice")
        if offset % alignment or end > len(cursor.data):
            raise _DamagedFileError(f"the tensor {name!r:.80} is outside of the file or violates the alignment")
        entries[name] = TensorEntry(name, shape, block_format, begin, end)
    _check_overlap(entries)
    return entries


def _read_line(cursor: _Cursor) -> tuple[str, tuple[int, ...], BlockFormat, int]:
    name = cursor.text()
    rank = cursor.number("<I")
    if not 1 <= rank <= _MAX_DIMENSIONS:
        raise _DamagedFileError(f"the tensor {name!r:.80} has {rank} dimensions; 1 to {_MAX_DIMENSIONS} are expected")
    shape = tuple(int(cursor.number("<Q")) for _ in range(rank))[::-1]
    tensor_type, offset = cursor.number("<I"), int(cursor.number("<Q"))
    if tensor_type not in FORMATS:
        known = ", ".join(block_format.name for block_format in FORMATS.values())
        raise _DamagedFileError(f"the tensor {name!r:.80} has the type {tensor_type}; Smelt reads {known}")
    if 0 in shape or math.prod(shape) >= 2**63 or shape[-1] % FORMATS[tensor_type].weights:
        raise _DamagedFileError(f"the tensor {name!r:.80} has the impossible shape {list(shape)} for its type")
    return name, shape, FORMATS[tensor_type], offset


def _check_overlap(entries: dict[str, TensorEntry]) -> None:
    """Check that no tensors overlap: otherwise a small file could allocate a lot of memory."""
    position = 0
    for entry in sorted(entries.values(), key=lambda entry: entry.begin):
        if entry.begin < position:
            raise _DamagedFileError(f"the tensor {entry.name!r:.80} overlaps another")
        position = entry.end
