"""Files of every format round-trip, and broken ones raise one sentence."""

from __future__ import annotations

import builtins
import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from smelt.data import files
from smelt.data.files import column_names, read_rows, read_text
from smelt.errors import DataError

ROWS: list[dict[str, Any]] = [
    {"text": 'a "quoted", line\nand more', "label": "0"},
    {"text": "Größe — ok", "label": "1"},
]


def written(path: Path, content: bytes) -> Path:
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


@pytest.mark.parametrize("name", ["a.txt", "a.md", "a.txt.gz", "a.gz"])
def test_text_is_kept_exactly(tmp_path: Path, name: str) -> None:
    text = " first\r\nsecond  \n\n\n= end = \n"
    assert read_text(written(tmp_path / name, text.encode())) == text


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.jsonl.gz"])
def test_json_lines(tmp_path: Path, name: str) -> None:
    rows = [*ROWS, {"text": "a line separator \u2028 inside a string", "label": "1"}]
    content = "\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n"
    assert read_rows(written(tmp_path / name, content.encode())) == rows


def test_json_list(tmp_path: Path) -> None:
    assert read_rows(written(tmp_path / "a.json", json.dumps(ROWS, indent=1).encode())) == ROWS


def test_csv_quotes_and_long_fields(tmp_path: Path) -> None:
    long = "x" * 300_000
    content = f'text,label\r\n"a ""quoted"", line\nand more",0\r\nGröße — ok,1\r\n{long},1\r\n'
    path = written(tmp_path / "a.csv.gz", content.encode())
    assert read_rows(path) == [*ROWS, {"text": long, "label": "1"}]


def test_a_lone_quote_in_tsv_is_a_character(tmp_path: Path) -> None:
    path = written(tmp_path / "a.tsv", b'sentence\tlabel\n"so it begins\t1\nhe said "no"\t0\n')
    assert read_rows(path) == [{"sentence": '"so it begins', "label": "1"}, {"sentence": 'he said "no"', "label": "0"}]


def test_parquet(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    assert read_rows(path) == ROWS


def test_parquet_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_import = builtins.__import__

    def without_pyarrow(name: str, *arguments: Any, **options: Any) -> Any:
        if name.startswith("pyarrow"):
            raise ImportError(name)
        return real_import(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without_pyarrow)
    with pytest.raises(DataError, match=r"pip install 'smeltml\[parquet\]'"):
        read_rows(written(tmp_path / "a.parquet", b"PAR1"))


def test_columns_of_uneven_rows() -> None:
    assert column_names([{"a": 1}, {"b": 2, "a": 3}]) == ["a", "b"]


BROKEN = {
    "line.jsonl": (b'{"text": "a"}\n\n{"text": \n', r"line\.jsonl line 3 is not valid JSON"),
    "list.json": (b'[{"text": "a"},\n {]', r"list\.json line 2 is not valid JSON"),
    "deep.jsonl": (b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", r"line 1 holds JSON that cannot be read"),
    "number.jsonl": (b'{"a": 1}\n5\n', r"row 2 is a int: expected an object"),
    "short.csv": (b"text,label\na,1\nb\n", r"line 3 has a different number of fields"),
    "long.csv": (b"text,label\na,1,2\n", r"line 2 has a different number of fields"),
    "latin.txt": ("Größe".encode("latin-1"), r"not UTF-8 text \(byte 2\)"),
    "latin.csv": ("text\nGröße".encode("latin-1"), r"not UTF-8"),
    "empty.txt": (b" \n", r"empty\.txt is empty"),
    "empty.jsonl": (b"\n", r"empty\.jsonl is empty"),
    "empty.csv": (b"text,label\n", r"empty\.csv is empty"),
    "cut.txt.gz": (gzip.compress(b"text " * 1000)[:-30], r"broken gzip"),
    "noise.parquet": (b"PAR1 not really", r"not a readable Parquet file"),
    "picture.npz": (b"abc", r"has no columns"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_files(tmp_path: Path, name: str) -> None:
    content, sentence = BROKEN[name]
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError, match=sentence) as caught:
        read_text(path) if ".txt" in name else read_rows(path)
    assert "\n" not in str(caught.value)


def test_missing_file_and_folder(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        read_text(tmp_path / "none.txt")
    with pytest.raises(DataError, match="is a folder"):
        read_text(tmp_path)


def test_a_decompression_bomb_is_stopped_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMELT_MAX_DECODED_BYTES", str(2**20))
    monkeypatch.setattr(files, "_CHUNK_BYTES", 2**16)
    path = written(tmp_path / "bomb.txt.gz", b"0" * 2**24)
    with pytest.raises(DataError, match="decodes to more than"):
        read_text(path)
    table = pyarrow.Table.from_pylist([{"text": "0" * 2**21}])
    pyarrow.parquet.write_table(table, tmp_path / "bomb.parquet", compression="zstd", use_dictionary=False)
    assert (tmp_path / "bomb.parquet").stat().st_size < 2**16
    with pytest.raises(DataError, match="decodes to more than"):
        read_rows(tmp_path / "bomb.parquet")
