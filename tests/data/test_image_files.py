"""Labeled images from folders, tables, Parquet and archives, and one sentence for what cannot be read."""

from __future__ import annotations

import csv
import io
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest

from smelt.data import LabeledImages, load_data
from smelt.data.batches import image_batches
from smelt.data.overlap import overlap
from smelt.errors import DataError

Image = pytest.importorskip("PIL.Image", reason="pillow is not installed")

GENERATOR = np.random.Generator(np.random.PCG64(0))
PIXELS = GENERATOR.integers(0, 256, (6, 5, 7, 3)).astype(np.uint8)
CLASSES = ("cat", "dog", "cat", "bird", "dog", "cat")


def png(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def load(source: Path, split: str = "evaluation", **options: str) -> LabeledImages:
    data = load_data(source, split=split, **options)
    assert isinstance(data, LabeledImages)
    return data


def class_folders(folder: Path, count: int = 6) -> Path:
    for index in range(count):
        (folder / CLASSES[index]).mkdir(parents=True, exist_ok=True)
        (folder / CLASSES[index] / f"{index}.png").write_bytes(png(PIXELS[index]))
    (folder / "notes.txt").write_text("not an image")
    return folder


def decoded(data: LabeledImages) -> dict[bytes, str]:
    """Return the class of each image by its pixels."""
    assert data.labels is not None and data.classes is not None
    return {np.asarray(data.decode(i)).tobytes(): data.classes[data.labels[i]] for i in range(len(data))}


EXPECTED = {PIXELS[index].tobytes(): CLASSES[index] for index in range(6)}


def test_class_folders(tmp_path: Path) -> None:
    data = load(class_folders(tmp_path))
    assert data.classes == ("bird", "cat", "dog") and len(data) == 6
    assert decoded(data) == EXPECTED


def test_folders_of_two_splits(tmp_path: Path) -> None:
    class_folders(tmp_path / "train")
    class_folders(tmp_path / "test", count=2)
    assert len(load(tmp_path, "calibration")) == 6 and len(load(tmp_path, "evaluation")) == 2


def test_images_without_classes(tmp_path: Path) -> None:
    for index in range(3):
        (tmp_path / f"{index}.png").write_bytes(png(PIXELS[index]))
    data = load(tmp_path)
    assert len(data) == 3 and data.labels is None


def test_tables_with_paths_relative_to_them(tmp_path: Path) -> None:
    class_folders(tmp_path / "images")
    with (tmp_path / "table.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["path", "label"])
        writer.writerows([[f"images/{name}/{index}.png", name] for index, name in enumerate(CLASSES)])
    assert decoded(load(tmp_path / "table.csv")) == EXPECTED


@pytest.mark.parametrize("nested", [False, True])
def test_parquet_with_encoded_images(nested: bool, tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    images = [png(pixels) for pixels in PIXELS]
    column = [{"bytes": image, "path": None} for image in images] if nested else images
    parquet.write_table(pyarrow.table({"image": column, "label": list(CLASSES)}), tmp_path / "rows.parquet")
    assert decoded(load(tmp_path / "rows.parquet")) == EXPECTED


def test_archives_of_arrays(tmp_path: Path) -> None:
    labels = np.arange(6)
    np.savez(tmp_path / "a.npz", x_train=PIXELS, y_train=labels, x_test=PIXELS[:2], y_test=labels[:2])
    train, test = load(tmp_path / "a.npz", "calibration"), load(tmp_path / "a.npz")
    assert len(train) == 6 and len(test) == 2 and train.classes is None
    assert (np.asarray(train.decode(4)) == PIXELS[4]).all()


def test_batches_have_the_labels_of_their_images(tmp_path: Path) -> None:
    data = load(class_folders(tmp_path))
    assert data.labels is not None

    def prepare(images: list[object]) -> object:
        import torch

        return torch.stack([torch.from_numpy(np.array(image)) for image in images])

    for samples in (None, 4):
        batches = list(image_batches(data, prepare, samples=samples, batch_size=3, seed=1))  # type: ignore[arg-type]
        assert sum(len(batch["labels"]) for batch in batches) == (samples or 6)
        for batch in batches:
            for pixels, label in zip(batch["pixel_values"], batch["labels"], strict=True):
                assert EXPECTED[pixels.numpy().tobytes()] == ("bird", "cat", "dog")[int(label)]


def test_the_same_image_in_both_splits_is_found(tmp_path: Path) -> None:
    data = load(class_folders(tmp_path))
    assert overlap(data.take([0, 1]), data.take([1, 2, 3])) == 0.5


def bomb(side: int) -> bytes:
    """Return a small PNG whose header names a huge size."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 100)) + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (bomb(60_000), "exceeds limit"),
        (bomb(9_000), "9000 x 9000 pixels"),
        (b"\x89PNG\r\n\x1a\n broken", "cannot be decoded as an image"),
        (png(PIXELS[0])[:60], "cannot be decoded as an image"),
        (b"GIF89a" + b"\0" * 40, "cannot be decoded as an image"),
    ],
    ids=["huge", "large", "broken", "truncated", "gif"],
)
def test_what_cannot_be_decoded_is_one_sentence(content: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "a.png").write_bytes(content)
    with pytest.raises(DataError, match=words) as caught:
        load(tmp_path).decode(0)
    assert "a.png" in str(caught.value) and "\n" not in str(caught.value)


def test_wrong_sources_are_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "table.csv").write_text("path,label\nmissing.png,1\n,2\n")
    with pytest.raises(DataError, match="row 2 holds no image"):
        load(tmp_path / "table.csv")
    (tmp_path / "one.csv").write_text("path,label\nmissing.png,1\n")
    with pytest.raises(DataError, match="cannot be read"):
        load(tmp_path / "one.csv").decode(0)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="contains no images"):
        load(tmp_path / "empty")
    with pytest.raises(DataError, match="holds images and cannot be read as text"):
        load_data(tmp_path / "empty", kind="text")
