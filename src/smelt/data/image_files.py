"""Load labeled images for calibration and evaluation: class folders, tables of paths or encoded images, and arrays.

A folder has one subfolder of images per class (or `train` and `test` folders of that form); a folder of images alone is
unlabeled, which suffices for calibration. A table (CSV, JSONL, Parquet and others) has a column `image`, `path` or
`file` and a column `label`; paths are relative to the table. Parquet may hold the encoded images themselves, as bytes
or as the `{bytes, path}` of the datasets package. Arrays are those of `smelt.data.images`.

Images stay encoded until they are needed. Their size is read from their header and limited before they are decoded.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from smelt.data.files import Row, column_names, column_values
from smelt.data.images import ImageData, load_images
from smelt.data.labeled import as_labels
from smelt.data.limits import MAX_RECORD_BYTES, check_regular_file, list_names
from smelt.errors import DataError, install_command

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp")
IMAGE_COLUMNS = ("image", "img", "path", "file", "filename")
MAX_IMAGE_PIXELS = 2**26  # of one image: 64 megapixels, 192 MiB decoded
_FORMATS = ("JPEG", "PNG", "WEBP", "BMP")
_SPLIT_FOLDERS = {"calibration": ("train",), "evaluation": ("test", "validation", "val")}


@dataclass(frozen=True, eq=False)
class LabeledImages:
    """Images with classes. `classes` are the class names in label order, if the source has names."""

    name: str
    sources: Sequence[Path | bytes] | np.ndarray  # files, encoded images, or pixels [images, channels, height, width]
    labels: np.ndarray | None  # [images] int64; None: unlabeled
    classes: tuple[str, ...] | None = None

    def __len__(self) -> int:
        return len(self.sources)

    def take(self, indices: Sequence[int] | np.ndarray) -> LabeledImages:
        """Return the images at these indices, in this order."""
        index = np.asarray(indices, dtype=np.int64)
        chosen = self.sources[index] if isinstance(self.sources, np.ndarray) else [self.sources[i] for i in index]
        return replace(self, sources=chosen, labels=None if self.labels is None else self.labels[index])

    def content(self, index: int) -> bytes:
        """Return an image as it is stored."""
        source = self.sources[index]
        if isinstance(source, np.ndarray):
            return source.tobytes()
        return source if isinstance(source, bytes) else read_encoded(source)

    def decode(self, index: int) -> Any:
        """Return an image as a PIL image."""
        image = _pillow()
        source = self.sources[index]
        if isinstance(source, np.ndarray):  # [channels, height, width]
            return image.fromarray(source[0] if len(source) == 1 else source.transpose(1, 2, 0))
        where = str(source) if isinstance(source, Path) else f"image {index + 1} of {self.name}"
        return _decode(self.content(index), where, image)


def load_image_folder(folder: Path, split: str = "evaluation") -> LabeledImages:
    """Load the images of a folder: class subfolders, its `train` or `test` folder, arrays, or unlabeled images."""
    for name in _SPLIT_FOLDERS[split]:
        if (folder / name).is_dir() and any(_class_folders(folder / name)):
            return load_image_folder(folder / name, split)
    by_class = {child.name: _image_files(child) for child in _class_folders(folder)}
    if by_class:
        classes = tuple(sorted(by_class))
        labels = np.repeat(np.arange(len(classes)), [len(by_class[name]) for name in classes])
        files = [file for name in classes for file in by_class[name]]
        return LabeledImages(str(folder), files, labels, classes)
    files = _image_files(folder)
    if files:
        return LabeledImages(str(folder), files, None)
    return images_from_arrays(load_images(folder, _array_split(split)), folder, split)


def load_image_archive(path: Path, split: str = "evaluation") -> LabeledImages:
    """Load the images of a NumPy archive."""
    return images_from_arrays(load_images(path, _array_split(split)), path, split)


def images_from_arrays(data: ImageData | None, source: Path, split: str) -> LabeledImages:
    """Convert arrays of one split; without a test split, the only split serves for both."""
    if data is None:
        data = load_images(source, "train")
    assert data is not None
    return LabeledImages(str(source), data.pixels, data.labels)


def images_from_rows(
    rows: list[Row], source: str, folder: Path, *, image: str | None = None, label: str = "label"
) -> LabeledImages:
    """Convert the rows of a table; relative paths are relative to `folder`."""
    columns = column_names(rows)
    image = image or next((name for name in IMAGE_COLUMNS if name in columns), None)
    if image is None:
        raise DataError(
            f"{source} has no column {', '.join(IMAGE_COLUMNS)}: name the column of images, one of "
            f"{list_names(columns)}."
        )
    encoded = [
        encoded_source(value, folder, f"{source}, row {number}", "image")
        for number, value in enumerate(column_values(rows, image, source), start=1)
    ]
    if label not in columns:
        return LabeledImages(source, encoded, None)
    labels, classes = as_labels(column_values(rows, label, source), f"{source}, column '{label}'")
    if labels.dtype != np.int64:
        raise DataError(f"{source}, column '{label}' has fractions as labels: expected classes.")
    return LabeledImages(source, encoded, labels, classes)


def has_images(rows: list[Row]) -> bool:
    """Return whether the first row of a table names or holds an image."""
    return holds_media(rows[0], IMAGE_COLUMNS, IMAGE_SUFFIXES, _looks_like_image)


def holds_media(
    row: Row, columns: Sequence[str], suffixes: Collection[str], is_encoded: Callable[[bytes], bool]
) -> bool:
    """Return whether one of the columns has a path with one of the suffixes, or encoded bytes."""
    for value in (row.get(name) for name in columns):
        content = value.get("bytes") if isinstance(value, dict) else value
        if isinstance(content, bytes):
            return is_encoded(content)
        if isinstance(content, str) and Path(content).suffix.lower() in suffixes:
            return True
    return False


def encoded_source(value: Any, folder: Path, where: str, noun: str) -> Path | bytes:
    """Return what a cell of a table holds: an encoded image or recording, or its path relative to `folder`."""
    if isinstance(value, dict):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str) or not value:
        raise DataError(f"{where} holds no {noun} and no path of one but {str(value)[:40]!r}.")
    return folder / value


def _array_split(split: str) -> str:
    return "train" if split == "calibration" else "test"


def _class_folders(folder: Path) -> Iterator[Path]:
    for child in sorted(folder.iterdir()):
        if child.is_dir() and not child.name.startswith(".") and _image_files(child):
            yield child


def _image_files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.iterdir() if file.suffix.lower() in IMAGE_SUFFIXES)


def read_encoded(path: Path) -> bytes:
    """Read an encoded image or recording of limited size."""
    check_regular_file(path)
    try:
        with path.open("rb") as file:
            content = file.read(MAX_RECORD_BYTES + 1)
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror or error}).") from error
    if len(content) > MAX_RECORD_BYTES:
        raise DataError(f"{path} is larger than {MAX_RECORD_BYTES // 2**20} MiB: give smaller files.")
    return content


def _looks_like_image(content: bytes) -> bool:
    return content.startswith((b"\xff\xd8", b"\x89PNG", b"BM")) or content[8:12] == b"WEBP"


def _decode(content: bytes, where: str, image: Any) -> Any:
    """Decode an image after checking the size in its header."""
    try:
        opened = image.open(io.BytesIO(content), formats=_FORMATS)
        width, height = opened.size
        if width * height > MAX_IMAGE_PIXELS:
            raise DataError(f"{where} has {width} x {height} pixels, more than {MAX_IMAGE_PIXELS:,}: make it smaller.")
        opened.load()
    except DataError:
        raise
    except Exception as error:  # decoders of untrusted bytes raise many types
        raise DataError(f"{where} cannot be decoded as an image ({' '.join(str(error).split())[:200]}).") from error
    return opened


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise DataError(f"images need one more package: {install_command('images')}.") from error
    return Image
