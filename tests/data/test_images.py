"""Images from every supported format, and one sentence for broken files."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from smelt.data.images import load_images
from smelt.errors import DataError

GENERATOR = np.random.Generator(np.random.PCG64(0))
PIXELS = GENERATOR.integers(0, 256, (5, 4, 6)).astype(np.uint8)
LABELS = np.array([0, 2, 1, 2, 0], dtype=np.uint8)


def idx(values: np.ndarray, kind: int = 8) -> bytes:
    return struct.pack(f">HBB{values.ndim}I", 0, kind, values.ndim, *values.shape) + values.tobytes()


def test_idx(tmp_path: Path) -> None:
    (tmp_path / "train-images-idx3-ubyte").write_bytes(idx(PIXELS))
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx(LABELS))
    images = load_images(tmp_path)
    assert images is not None
    assert images.pixels.shape == (5, 1, 4, 6) and (images.pixels[:, 0] == PIXELS).all()
    assert images.labels.tolist() == LABELS.tolist() and images.classes == 3 and len(images) == 5
    assert load_images(tmp_path, "test") is None


def test_archives(tmp_path: Path) -> None:
    colored = GENERATOR.integers(0, 256, (5, 4, 6, 3)).astype(np.uint8)
    np.savez(tmp_path / "keras.npz", x_train=colored, y_train=LABELS[:, None], x_test=colored[:2], y_test=LABELS[:2])
    train, test = load_images(tmp_path), load_images(tmp_path / "keras.npz", "test")
    assert train is not None and test is not None
    assert train.pixels.shape == (5, 3, 4, 6) and train.pixels[1, 2, 3, 4] == colored[1, 3, 4, 2]
    assert len(test) == 2
    np.savez(tmp_path / "own.npz", images=PIXELS, labels=LABELS)
    assert load_images(tmp_path / "own.npz") is not None and load_images(tmp_path / "own.npz", "test") is None


def test_cifar(tmp_path: Path) -> None:
    rows = GENERATOR.integers(0, 10, (4, 3073)).astype(np.uint8)
    rows[:2].tofile(tmp_path / "data_batch_1.bin")
    rows[2:].tofile(tmp_path / "data_batch_2.bin")
    images = load_images(tmp_path)
    assert images is not None
    assert images.labels.tolist() == rows[:, 0].tolist()
    assert images.pixels[3, 1, 0, 5] == rows[3, 1 + 1024 + 5]
    (tmp_path / "test_batch.bin").write_bytes(b"123")
    with pytest.raises(DataError, match="not a multiple of"):
        load_images(tmp_path, "test")


def test_a_name_inside_the_data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "few").mkdir()
    np.savez(tmp_path / "few" / "few.npz", images=PIXELS, labels=LABELS)
    monkeypatch.setenv("SMELT_DATA", str(tmp_path))
    assert load_images("few") is not None


def test_unreadable_files_raise_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there are no images at"):
        load_images(tmp_path / "nowhere")
    with pytest.raises(DataError, match="contains no images"):
        load_images(tmp_path)
    pickled, bare = tmp_path / "a" / "pickled.npz", tmp_path / "bare.npz"
    pickled.parent.mkdir()
    np.savez(pickled, images=np.array([{}], dtype=object), labels=LABELS[:1])
    with pytest.raises(DataError, match=r"holds Python objects, which Smelt never unpickles"):
        load_images(pickled)
    np.savez(bare, blob=PIXELS)
    with pytest.raises(DataError, match="has the arrays blob: expected x_train"):
        load_images(bare)
    bare.write_bytes(b"PK nothing")
    with pytest.raises(DataError, match="cannot be read as images"):
        load_images(bare)
    np.savez(bare, images=PIXELS, labels=LABELS[:3])
    with pytest.raises(DataError, match="5 images and 3 labels"):
        load_images(bare)
    np.savez(bare, images=PIXELS.astype(np.float32), labels=LABELS)
    with pytest.raises(DataError, match="expected bytes"):
        load_images(bare)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (idx(PIXELS)[:-1], "but holds 119 values"),
        (idx(PIXELS, kind=13), "not an IDX file of bytes"),
        (b"12", "cannot be read"),
    ],
)
def test_a_broken_idx_file(content: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / "train-images-idx3-ubyte").write_bytes(content)
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx(LABELS))
    with pytest.raises(DataError, match=words):
        load_images(tmp_path)


@pytest.mark.shared
def test_the_real_digits(shared: Path) -> None:
    images = load_images(shared / "data" / "mnist", "test")
    assert images is not None and images.pixels.shape == (10_000, 1, 28, 28) and images.classes == 10
