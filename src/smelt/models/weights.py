"""Read weights from safetensors files, after checking the header of each file."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from smelt.errors import ModelError
from smelt.models.json_file import one_line, parse_object, read_object

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_MAX_HEADER_BYTES = 32 * 2**20  # about 200,000 tensors
_MAX_SHARDS = 2**12
_MAX_TENSORS = 2**20  # in all shards
_MAX_RANK = 16

_BYTES_OF_DTYPE = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip
_FLOATS = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}
_PACKED = {"U8": torch.uint8, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}


@dataclass(frozen=True)
class TensorHeader:
    """The header entry of one tensor; `begin` and `end` are byte offsets after the header."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def torch_dtype(self) -> torch.dtype | None:
        """The torch dtype, or None if no layer can hold it."""
        return (_FLOATS | _PACKED).get(self.dtype)


def check_safetensors(path: Path) -> dict[str, TensorHeader]:
    """Return the header of a safetensors file by tensor name, after checking that it matches the file exactly."""
    entries, data_bytes = _read_header(path)
    headers = {name: _tensor_header(entry, f"{path}: tensor {name!r:.200}") for name, entry in entries.items()}
    _check_layout(headers, data_bytes, path)
    return headers


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    """Return the header's entries and the number of bytes after it."""
    try:
        if not path.is_file():  # opening a named pipe would block
            raise ModelError(f"{path} is missing or not a regular file.")
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > size - 8:
                raise ModelError(f"{path} is not a safetensors file or is cut off: its header does not fit into it.")
            if length > _MAX_HEADER_BYTES:
                raise ModelError(f"{path} has a header of {length} bytes; at most {_MAX_HEADER_BYTES} are accepted.")
            raw = file.read(length)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}.") from error
    entries = parse_object(raw, f"the header of {path}")
    entries.pop("__metadata__", None)
    return entries, size - 8 - length


def _tensor_header(entry: Any, where: str) -> TensorHeader:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise ModelError(f"{where} must have a dtype, a shape and data_offsets.")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _BYTES_OF_DTYPE:
        raise ModelError(f"{where} has the dtype {_quote(dtype)}, which Smelt does not read.")
    if not _are_sizes(shape) or len(shape) > _MAX_RANK:
        raise ModelError(f"{where} has an impossible shape.")
    if not _are_sizes(offsets) or len(offsets) != 2:
        raise ModelError(f"{where} has impossible data_offsets.")
    begin, end = offsets
    if end - begin != math.prod(shape) * _BYTES_OF_DTYPE[dtype]:
        raise ModelError(f"{where} has {end - begin} bytes, which does not match its shape and dtype.")
    return TensorHeader(dtype, tuple(shape), begin, end)


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 2**63 for value in values)


def _quote(value: Any) -> str:
    """Format an untrusted value for a message; only strings are shown, since repr of nested lists can fail."""
    return f"{value!r:.100}" if isinstance(value, str) else f"of type {type(value).__name__}"


def _check_layout(headers: dict[str, TensorHeader], data_bytes: int, path: Path) -> None:
    """Check that the tensors cover the data exactly: no overlaps, no gaps, no extra bytes."""
    position = 0
    for name, header in sorted(headers.items(), key=lambda item: (item[1].begin, item[1].end)):
        if header.begin != position:
            raise ModelError(f"{path}: tensor {name!r:.200} overlaps another or leaves a gap before it.")
        position = header.end
    if position != data_bytes:
        raise ModelError(f"{path} is cut off or damaged: its header describes {position} bytes, it has {data_bytes}.")


def check_header(
    headers: dict[str, TensorHeader], name: str, shape: tuple[int, ...], dtypes: tuple[str, ...], folder: Path
) -> None:
    """Raise if a tensor is missing or has another shape or dtype than the config of its folder says."""
    header = headers.get(name)
    if header is None:
        raise ModelError(f"{folder}: the weights lack {name}.")
    if header.shape != shape or header.dtype not in dtypes:
        mismatch = f"{header.dtype} {list(header.shape)} and not {' or '.join(dtypes)} {list(shape)}"
        raise ModelError(f"{folder}: {name} is {mismatch} as the quantization_config says.")


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a folder: a single file, or those listed in its index."""
    if (folder / INDEX).is_file():
        return _indexed_files(folder)
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if pickles:
        raise ModelError(
            f"{folder} holds only pickled weights ({pickles[0]}), which can run code when opened; "
            "convert it to safetensors first."
        )
    raise ModelError(f"{folder} holds no weights: neither {WEIGHTS} nor {INDEX} exists.")


def _indexed_files(folder: Path) -> list[Path]:
    weight_map = read_object(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{folder / INDEX} has no weight_map that says which file holds which tensor.")
    names = {name for name in weight_map.values() if isinstance(name, str)}
    if not all(isinstance(name, str) for name in weight_map.values()):
        raise ModelError(
            f"{folder / INDEX} names something else than text, which is not a safetensors file in this folder."
        )
    if len(names) > _MAX_SHARDS:
        raise ModelError(f"{folder / INDEX} names {len(names)} files; at most {_MAX_SHARDS} are accepted.")
    for name in names:
        # Plain file names only: an index must not point outside its folder.
        plain = len(name) < 200 and "\0" not in name and Path(name).name == name
        if not plain or not name.endswith(".safetensors"):
            raise ModelError(f"{folder / INDEX} names {name!r:.100}, which is not a safetensors file in this folder.")
        if not (folder / name).is_file():
            raise ModelError(f"{folder / INDEX} names {name!r:.100}, which is missing.")
    return [folder / name for name in sorted(names)]


def read_headers(folder: Path) -> dict[str, TensorHeader]:
    """Return the checked headers of all safetensors files of a folder, merged."""
    headers: dict[str, TensorHeader] = {}
    for path in weight_files(folder):
        for name, header in check_safetensors(path).items():
            if name in headers:
                raise ModelError(f"{folder}: tensor {name!r:.200} is in more than one file.")
            headers[name] = header
        if len(headers) > _MAX_TENSORS:
            raise ModelError(f"{folder} holds more than {_MAX_TENSORS} tensors.")
    return headers


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """Read all tensors of a file or folder, memory-mapped where possible."""
    files = weight_files(path) if path.is_dir() else [path]
    tensors: dict[str, Tensor] = {}
    for file in files:
        check_safetensors(file)
        try:
            with safe_open(str(file), framework="pt") as opened:
                tensors.update({name: opened.get_tensor(name) for name in opened.keys()})  # noqa: SIM118
        except (SafetensorError, OSError, TypeError) as error:
            raise ModelError(f"{file} cannot be read ({one_line(error)}).") from error
    return tensors


def float_dtype(headers: dict[str, TensorHeader]) -> torch.dtype:
    """Return the float dtype of most elements."""
    elements: Counter[str] = Counter()
    for header in headers.values():
        if header.dtype in _FLOATS:
            elements[header.dtype] += math.prod(header.shape)
    return _FLOATS[elements.most_common(1)[0][0]] if elements else torch.float32
