"""Load labeled images from NumPy archives without pickles, IDX files (MNIST), or CIFAR-10's binary files.

An archive holds `x_train`, `y_train`, `x_test`, `y_test` as in Keras, or `images` and `labels` of one split. IDX is a
folder with `train-images-idx3-ubyte`, `train-labels-idx1-ubyte` and the same for `t10k`, optionally gzipped. CIFAR is a
folder with `data_batch_1.bin` to `5` and `test_batch.bin`; its Python version is a pickle and is not supported.
"""

from __future__ import annotations

import gzip
import math
import os
import struct
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from smelt.data.limits import DecodedBytes, list_names
from smelt.errors import DataError

_IDX_PREFIXES = {"train": "train", "test": "t10k"}
_IDX_UINT8 = 8  # the type code of an IDX file
_CIFAR_FILES = {"train": "data_batch_*.bin", "test": "test_batch.bin"}
_CIFAR_SHAPE = (3, 32, 32)


@dataclass(frozen=True)
class ImageData:
    """Images and their classes. `name` is their source."""

    name: str
    pixels: np.ndarray  # [images, channels, height, width] uint8
    labels: np.ndarray  # [images] int64

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def classes(self) -> int:
        return int(self.labels.max()) + 1


def load_images(source: str | Path, split: str = "train") -> ImageData | None:
    """Load the train or test split of a data set; None if the source has no test split.

    `source` is a file, a folder, or the name of a folder in SMELT_DATA.
    """
    path = _resolve_path(source)
    try:
        arrays = _read_archive(path, split) if path.suffix == ".npz" else _read_folder(path, split)
    except (OSError, EOFError, ValueError, KeyError, struct.error, zlib.error, zipfile.BadZipFile) as error:
        raise DataError(f"{source} cannot be read as images ({' '.join(str(error).split())[:200]}).") from error
    if arrays is None:
        return None
    return _validate(f"{source}/{split}", *arrays)


def _resolve_path(source: str | Path) -> Path:
    path = Path(source).expanduser()
    if not path.exists():
        path = Path(os.environ.get("SMELT_DATA", ".")) / str(source)
    if not path.exists():
        raise DataError(
            f"there are no images at {source}: give an .npz file, a folder with IDX files or with CIFAR-10's binary "
            "files, or the name of a folder in SMELT_DATA."
        )
    archives = sorted(path.glob("*.npz")) if path.is_dir() else []
    return archives[0] if len(archives) == 1 else path


def _read_archive(path: Path, split: str) -> tuple[np.ndarray, np.ndarray] | None:
    _check_regular(path)
    with zipfile.ZipFile(path) as archive:
        names = {name.removesuffix(".npy") for name in archive.namelist()}
        budget = DecodedBytes(path)
        if {f"x_{split}", f"y_{split}"} <= names:
            return read_member(archive, f"x_{split}", budget), read_member(archive, f"y_{split}", budget)
        if {"images", "labels"} <= names:
            if split != "train":
                return None
            return read_member(archive, "images", budget), read_member(archive, "labels", budget)
    expected = f"x_{split} and y_{split}, or images and labels"
    raise DataError(f"{path} has the arrays {list_names(sorted(names))}: expected {expected}.")


def read_member(archive: zipfile.ZipFile, name: str, budget: DecodedBytes) -> np.ndarray:
    """Read one array of an archive, after comparing the shape in its header with the size of the member."""
    size = archive.getinfo(f"{name}.npy").file_size
    budget.add(size)
    with archive.open(f"{name}.npy") as file:
        version = np.lib.format.read_magic(file)
        read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read_header(file)
        if dtype.hasobject:
            raise DataError(f"{budget.path}: {name} holds Python objects, which Smelt never unpickles.")
        if math.prod(shape) * dtype.itemsize != size - file.tell():
            raise DataError(f"{budget.path}: {name} says it is {dtype} {list(shape)}, which is not its size.")
    with archive.open(f"{name}.npy") as file:
        array: np.ndarray = np.lib.format.read_array(file, allow_pickle=False)
    return array


def _check_regular(path: Path) -> None:
    if not path.is_file():
        raise DataError(f"{path} is not a regular file: expected images.")


def _read_folder(path: Path, split: str) -> tuple[np.ndarray, np.ndarray] | None:
    batches = sorted(path.glob(_CIFAR_FILES[split])) if path.is_dir() else []
    if batches:
        rows = np.concatenate([_cifar_rows(batch) for batch in batches])
        return rows[:, 1:].reshape(-1, *_CIFAR_SHAPE), rows[:, 0]
    stem = _IDX_PREFIXES[split]
    images, labels = (_read_idx(path, f"{stem}-{suffix}-ubyte") for suffix in ("images-idx3", "labels-idx1"))
    if images is not None and labels is not None:
        return images, labels
    if split == "test":
        return None
    raise DataError(
        f"{path} contains no images: expected one .npz, {stem}-images-idx3-ubyte with its labels, or data_batch_1.bin."
    )


def _cifar_rows(path: Path) -> np.ndarray:
    """Read rows of a label and the pixels. [images, 3073] uint8"""
    row = 1 + math.prod(_CIFAR_SHAPE)
    _check_regular(path)
    DecodedBytes(path).add(path.stat().st_size)
    content = np.fromfile(path, dtype=np.uint8)
    if not len(content) or len(content) % row:
        raise DataError(f"{path} has {len(content)} bytes, which is not a multiple of {row} bytes per image.")
    return content.reshape(-1, row)


def _read_idx(folder: Path, name: str) -> np.ndarray | None:
    """Read an IDX file: two zero bytes, type, number of dimensions, big-endian 32-bit dimensions, values."""
    path = next((candidate for candidate in (folder / name, folder / f"{name}.gz") if candidate.is_file()), None)
    if path is None:
        return None
    with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
        zero, type_code, dimensions = struct.unpack(">HBB", file.read(4))
        if zero or type_code != _IDX_UINT8:
            raise DataError(f"{path} is not an IDX file of bytes.")
        shape = struct.unpack(f">{dimensions}I", file.read(4 * dimensions))
        DecodedBytes(path).add(math.prod(shape))
        values = np.frombuffer(file.read(math.prod(shape) + 1), dtype=np.uint8)
    if len(values) != math.prod(shape):
        held = f"more than {math.prod(shape):,}" if len(values) > math.prod(shape) else f"{len(values):,}"
        raise DataError(f"{path} says it is {list(shape)} but holds {held} values.")
    return values.reshape(shape)


def _validate(name: str, pixels: np.ndarray, labels: np.ndarray) -> ImageData:
    if pixels.dtype != np.uint8 or pixels.ndim not in (3, 4):
        raise DataError(f"{name} holds {pixels.dtype} {list(pixels.shape)}: expected bytes, one image per row.")
    if not np.issubdtype(labels.dtype, np.integer) or labels.size != len(pixels) or not len(pixels):
        raise DataError(f"{name} has {len(pixels):,} images and {labels.size:,} labels: expected one class per image.")
    if pixels.ndim == 3:
        pixels = pixels[:, None]
    elif pixels.shape[1] not in (1, 3) and pixels.shape[-1] in (1, 3):
        pixels = pixels.transpose(0, 3, 1, 2)
    if int(labels.min()) < 0:
        raise DataError(f"{name} has negative labels: classes are numbered from 0.")
    return ImageData(name, np.ascontiguousarray(pixels), labels.reshape(-1).astype(np.int64))
