"""Data files that decode to far more than their size, never end, or are not what they say: one sentence each."""

from __future__ import annotations

import gzip
import io
import json
import os
import struct
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from smelt.compression.pruning.repair import reconstruct
from smelt.data import limits, load_data, load_text
from smelt.data.batches import pad_batch, text_batches
from smelt.data.files import read_rows, read_text
from smelt.data.images import load_images
from smelt.data.limits import LIMIT_VARIABLE, max_decoded_bytes
from smelt.errors import DataError
from tests.character_tokenizer import character_tokenizer
from tests.security.limits import refused

MIB = 2**20


def outcome(path: Path, limit: int, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the sentence with which the rows of a file are refused, in little more memory than the limit."""
    monkeypatch.setenv(LIMIT_VARIABLE, str(limit))
    return refused(lambda: read_rows(path), headroom=limit + 200 * MIB, cpu_seconds=120)


def repeated(value: str, rows: int) -> Any:
    """Return a dictionary column with the same value in each row."""
    return pa.DictionaryArray.from_arrays(pa.array(np.zeros(rows, dtype=np.int8)), pa.array([value]))


def write_parquet(path: Path, **columns: Any) -> Path:
    pq.write_table(pa.table(columns), path, compression="zstd", store_schema=False, write_statistics=False)
    return path


def parquet_bomb(path: Path) -> Path:
    """300 bytes: one string of 1 MiB in a dictionary, and 2,000 rows that refer to it; 2 GiB when decoded."""
    write_parquet(path, text=repeated("x" * MIB, 2000))
    assert path.stat().st_size < 1000
    return path


def test_a_parquet_dictionary_bomb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The footer's sizes are those of the encoded pages: only counting what is decoded stops it."""
    sentence = outcome(parquet_bomb(tmp_path / "a.parquet"), 64 * MIB, monkeypatch)
    assert "decodes to more than 0.0625 GiB" in sentence and LIMIT_VARIABLE in sentence


def test_a_parquet_file_of_many_equal_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_parquet(tmp_path / "a.parquet", text=repeated("", 2_000_000))
    assert path.stat().st_size < 10_000
    assert "decodes to more than 0.25 GiB" in outcome(path, 256 * MIB, monkeypatch)


def test_a_parquet_page_that_expands_inside_the_decoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One value of 128 MiB: no count between batches can stop it, the subprocess's memory limit does."""
    path = write_parquet(tmp_path / "a.parquet", text=pa.array(["x" * (128 * MIB)]))
    assert path.stat().st_size < MIB
    assert "decodes to more than 0.0625 GiB" in outcome(path, 64 * MIB, monkeypatch)


def test_nested_parquet_lists_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A list of nulls takes no bytes in Arrow and 8 per element in Python."""
    path = write_parquet(tmp_path / "a.parquet", text=pa.array([[None] * 2_000_000], pa.list_(pa.null())))
    monkeypatch.setenv(LIMIT_VARIABLE, str(64 * MIB))
    with pytest.raises(DataError, match="decodes to more than"):
        read_rows(path)


def test_honest_parquet_files_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several row groups, dictionaries, lists and nulls, plain and gzipped; more rows than a batch has."""
    rows = [{"text": f"row {n % 7}", "tags": [n, None], "label": n / 2 if n % 5 else None} for n in range(3000)]
    table = pa.Table.from_pylist(rows)
    table = table.set_column(0, "text", table["text"].dictionary_encode())
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=700)
    monkeypatch.setenv(LIMIT_VARIABLE, str(8 * MIB))
    assert read_rows(tmp_path / "a.parquet") == rows
    (tmp_path / "b.parquet.gz").write_bytes(gzip.compress((tmp_path / "a.parquet").read_bytes()))
    assert read_rows(tmp_path / "b.parquet.gz") == rows
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "none.parquet")
    with pytest.raises(DataError, match="is empty"):
        read_rows(tmp_path / "none.parquet")


GZIPPED = {
    "objects.jsonl.gz": b"{}\n" * 2_000_000,
    "lists.jsonl.gz": b'{"":[' + b"[]," * 2_000_000 + b"[]]}\n",
    "list.json.gz": b"[" + b"{}," * 2_000_000 + b"{}]",
    "rows.csv.gz": b"a,b\n" + b"a,b\n" * 1_000_000,
    "open quote.csv.gz": b"a,b\n" + b'"' + (b'","' * 999 + b"\n") * 3000,
    "one line.jsonl.gz": b" " * (80 * MIB),
    "one line.json.gz": b"[" + b" " * (80 * MIB) + b"]",
}


@pytest.mark.parametrize("name", GZIPPED)
def test_gzipped_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Rows of a few characters take hundreds of bytes each in memory."""
    monkeypatch.setattr(limits, "MAX_RECORD_BYTES", 8 * MIB)
    path = tmp_path / name
    path.write_bytes(gzip.compress(GZIPPED[name]))
    assert path.stat().st_size < 0.25 * MIB
    sentence = outcome(path, 64 * MIB, monkeypatch)
    assert "decodes to more than 0.0625 GiB" in sentence or "a row of more than 8 MiB" in sentence


def test_gzipped_text_and_wide_characters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One character outside of the Basic Multilingual Plane makes every other one four bytes wide."""
    monkeypatch.setenv(LIMIT_VARIABLE, str(20 * MIB))
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"x" * 10 * MIB))
    assert len(read_text(tmp_path / "a.txt.gz")) == 10 * MIB
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"x" * 10 * MIB + "😀".encode()))
    (tmp_path / "c.txt.gz").write_bytes(gzip.compress(b"x" * 30 * MIB))
    for name in ("b.txt.gz", "c.txt.gz"):
        with pytest.raises(DataError, match="decodes to more than"):
            read_text(tmp_path / name)


def test_the_limit_can_be_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(LIMIT_VARIABLE, raising=False)
    assert max_decoded_bytes() == 4 * 2**30
    monkeypatch.setenv(LIMIT_VARIABLE, "123")
    assert max_decoded_bytes() == 123
    for wrong in ("4 GB", "-1", "0", "1e9", "9" * 5000):
        monkeypatch.setenv(LIMIT_VARIABLE, wrong)
        with pytest.raises(DataError, match="must be a number of bytes"):
            max_decoded_bytes()


def test_bytes_are_counted_up_to_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LIMIT_VARIABLE, "100")
    budget = limits.DecodedBytes("a.csv")
    budget.require(100)  # not counted
    budget.add(60)
    budget.add(40)
    for refused_call in (budget.add, budget.require):
        with pytest.raises(DataError, match=r"a\.csv decodes to more than 100 bytes"):
            refused_call(1)


@pytest.mark.parametrize("values", ["[]", "1234", '""', "{}", "[1, [2.5, null]]", '{"a": [], "b": 1e3}'])
def test_the_bytes_of_json_are_never_underestimated(values: str) -> None:
    def size(value: Any) -> int:
        parts = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else []
        return sys.getsizeof(value) + sum(map(size, parts))

    text = "[" + ",".join([values] * 200) + "]"
    assert size(json.loads(text)) <= limits.json_bytes(text)


def test_a_broken_parquet_file_is_refused_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1" + bytes(100))
    sentence = outcome(tmp_path / "a.parquet", 8 * MIB, monkeypatch)
    assert "is not a readable Parquet file (" in sentence and "magic bytes" in sentence


def test_a_gzipped_parquet_file_is_refused_while_it_is_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.parquet.gz").write_bytes(gzip.compress(b"PAR1" + bytes(20 * MIB)))
    assert "decodes to more than 0.00781 GiB" in outcome(tmp_path / "a.parquet.gz", 8 * MIB, monkeypatch)


# ---- images ----


def npy(shape: tuple[int, ...], dtype: str = "|u1", data: bytes = b"") -> bytes:
    header = repr({"descr": dtype, "fortran_order": False, "shape": shape}).encode()
    header += b" " * (-(len(header) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + data


def archive(path: Path, images: bytes) -> Path:
    labels = io.BytesIO()
    np.save(labels, np.zeros(4, dtype=np.int64))
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("images.npy", images)
        file.writestr("labels.npy", labels.getvalue())
    return path


def test_image_archives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LIMIT_VARIABLE, str(8 * MIB))
    assert load_images(archive(tmp_path / "good.npz", npy((4, 8, 8), data=bytes(256)))) is not None
    for name, images, words in (
        ("huge claim", npy((4, 2**40), data=bytes(256)), "which is not its size"),
        ("negative", npy((-4, 8, 8), data=bytes(256)), "which is not its size"),
        ("zeros", npy((4, 4 * MIB), data=bytes(16 * MIB)), "decodes to more than"),
        ("cut off", npy((4, 8, 8))[:40], "cannot be read as images"),
        ("not an array", b"abc", "cannot be read as images"),
        ("huge header", b"\x93NUMPY\x02\x00" + struct.pack("<I", 2**31) + b" " * 9, "cannot be read as images"),
    ):
        with pytest.raises(DataError, match=words):
            load_images(archive(tmp_path / f"{name}.npz", images))


def test_gzipped_idx_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LIMIT_VARIABLE, str(8 * MIB))
    labels = struct.pack(">HBBI", 0, 8, 1, 4) + bytes(4)
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(labels)
    images = tmp_path / "train-images-idx3-ubyte.gz"
    for shape, data, words in (
        ((4, 2**16, 2**16), bytes(64), "decodes to more than"),
        ((4, 2, 2), bytes(64 * MIB), "but holds more than 16 values"),
        ((4, 4, 4), bytes(63), "but holds 63 values"),
    ):
        images.write_bytes(gzip.compress(struct.pack(">HBBIII", 0, 8, 3, *shape) + data))
        with pytest.raises(DataError, match=words):
            load_images(tmp_path)
    images.write_bytes(b"\x1f\x8b")
    with pytest.raises(DataError, match="cannot be read as images"):
        load_images(tmp_path)


# ---- odd files and odd values ----


@pytest.mark.parametrize("suffix", [".txt", ".jsonl", ".json", ".csv", ".tsv", ".parquet", ".txt.gz", ".jsonl.gz"])
def test_odd_files(tmp_path: Path, suffix: str) -> None:
    """A folder, a pipe (opening it would block), a device without end, nothing, zeros, UTF-16 and broken gzip."""
    for name in ("folder", "pipe", "device", "nothing", "zeros", "utf16", "gzip", "link"):
        (tmp_path / name).mkdir()
    (tmp_path / f"folder/a{suffix}").mkdir()
    os.mkfifo(tmp_path / f"pipe/a{suffix}")
    (tmp_path / f"device/a{suffix}").symlink_to("/dev/zero")
    (tmp_path / f"link/a{suffix}").symlink_to(tmp_path / f"link/a{suffix}")
    (tmp_path / f"nothing/a{suffix}").touch()
    (tmp_path / f"zeros/a{suffix}").write_bytes(bytes(5000))
    (tmp_path / f"utf16/a{suffix}").write_text('{"text": "some words"}\n' * 9, encoding="utf-16")
    (tmp_path / f"gzip/a{suffix}").write_bytes(gzip.compress(os.urandom(5000))[:3000])
    for path in sorted(tmp_path.glob("*/a*")):
        with pytest.raises(DataError) as caught:
            load_data(path)
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 600


VALUES = {
    "lone surrogate.jsonl": (
        b'{"text": "fine \\ud83d\\ude00"}\n{"text": "bad \\ud800"}\n',
        r"line 2 has \\ud800 alone",
    ),
    "lone surrogate.json": (b'[{"text": "a"}, {"text": ["\\uDFFF"]}]', r"row 2 has \\udfff alone"),
    "key.jsonl": (b'{"\\udc00": "a"}', r"line 1 has \\udc00 alone"),
    "blank.jsonl": (b'{"text": ""}\n{"text": " \\n"}\n', "every text in it is blank"),
    "columns.csv": (",".join(f"c{n}" for n in range(100_000)).encode() + b"\n", "has 100,000 columns"),
    "many columns.csv": (",".join(f"c{n}" for n in range(9000)).encode() + b"\n" + b"1," * 8999 + b"1\n", "8,980 more"),
    "large class.jsonl": (b'{"text": "a", "label": 1e300}\n', "has the class 1e"),
    "choices.jsonl": (b'{"query": "q", "choices": ["a", "b"], "gold": "' + b"x" * 10**6 + b'"}', "index of an option"),
    "null byte.csv": (b"text,label\na\0,1\n\0", "different number of fields|NUL"),
}


@pytest.mark.parametrize("name", VALUES)
def test_odd_values(tmp_path: Path, name: str) -> None:
    content, words = VALUES[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=words) as caught:
        load_data(tmp_path / name)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 1200
    assert "\\ud83d" not in str(caught.value)


def test_constant_and_blank_texts(tmp_path: Path) -> None:
    """Constant text ended in a failed Cholesky factorization after minutes of work; blank texts in empty tensors."""
    (tmp_path / "a.txt").write_text("a" * 5000)
    with pytest.raises(DataError, match="repeats one token"):
        text_batches(load_text(tmp_path / "a.txt"), character_tokenizer(), samples=4, length=8, batch_size=2, seed=0)
    (tmp_path / "blank.jsonl").write_text('{"text": " ", "label": 0}\n{"text": "", "label": 1}\n')
    with pytest.raises(DataError, match="every text in it is blank"):
        load_data(tmp_path / "blank.jsonl")
    assert pad_batch({"input_ids": [[], []]}, padding=7)["input_ids"].tolist() == [[7], [7]]


def test_a_repair_without_variation() -> None:
    """Equations whose matrix is zero but for rounding errors are refused by name, not by the factorization."""
    zeros = torch.zeros(3, 3, dtype=torch.float64)
    equations = SimpleNamespace(gram=zeros - 1e-9 * torch.eye(3), cross=zeros)
    with pytest.raises(DataError, match="nearly the same activations"):
        reconstruct(equations, torch.ones(3, 3), damping=1e-3, intercept=False)  # type: ignore[arg-type]


def test_many_classes_take_linear_time(tmp_path: Path) -> None:
    """Looking each of 50,000 names up in a list would take minutes."""
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": "a", "label": f"class {n}"}) + "\n" for n in range(50_000)))
    data = load_data(path)
    assert data.labels.max() == 49_999  # type: ignore[union-attr]


def test_surrogate_pairs_and_ordinary_escapes_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": "é 😀 \ud7ff"}) + "\n")
    assert load_text(path).documents == ("é 😀 \ud7ff",)
