"""One way from a model to a folder for others: load, write into a temporary folder, read it back, give it its name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from smelt.errors import FormatError
from smelt.export.compressed_tensors import CompressedTensors
from smelt.export.format import ExportFormat
from smelt.export.gguf import Gguf
from smelt.export.onnx import Onnx
from smelt.files import atomic_folder, check_writable, explain_disk_errors, write_atomically
from smelt.models.load import load
from smelt.models.model import Model

EXPORTS: dict[str, type[ExportFormat]] = {export.name: export for export in (CompressedTensors, Gguf, Onnx)}


def export(model: Model | str | Path, to: str, folder: str | Path, **options: Any) -> dict[str, Any]:
    """Write a model in another program's format, verify it by reading it back, and report what was written.

    A format that is a single file (GGUF) is also written without a folder around it, where the name says so.
    """
    out, chosen = Path(folder), _format(to, options)
    if out.exists():
        raise FormatError(f"{out} exists already; choose another name or remove it.")
    check_writable(out)
    if not isinstance(model, Model):
        model = load(model)
    alone = chosen.file is not None and out.suffix == Path(chosen.file).suffix
    with _single_file(out, str(chosen.file)) if alone else atomic_folder(out) as temporary:
        written = chosen.write(model, temporary)
        chosen.verify(model, temporary)
        files = {
            str(file.relative_to(temporary)): file.stat().st_size
            for file in sorted(temporary.rglob("*"))
            if file.is_file()
        }
    return {
        "source": model.source,
        "format": to,
        "out": str(out),
        "tensors": written.kinds,
        "files": files,
        "bytes": sum(files.values()),
        "notes": [*written.notes, *_left_out(model)],
    }


def _left_out(model: Model) -> list[str]:
    """What no format here expresses."""
    if model.kv is None:
        return []
    return [f"the KV cache format {model.kv} is left out: set it in the program that reads the export."]


@contextmanager
def _single_file(out: Path, name: str) -> Iterator[Path]:
    """A temporary folder beside `out`, of which one file becomes `out` when the block ends well."""
    with explain_disk_errors(out):
        out.absolute().parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=out.absolute().parent, prefix=f".{out.name}.") as temporary:
            yield Path(temporary)
            write_atomically(out, (Path(temporary) / name).replace)


def _format(to: str, options: dict[str, Any]) -> ExportFormat:
    if to not in EXPORTS:
        raise FormatError(f"there is no export to {to!r}; there are {', '.join(EXPORTS)}.")
    known = {field.name for field in fields(EXPORTS[to])}
    given = {name: value for name, value in options.items() if value is not None}
    if unknown := sorted(given.keys() - known):
        raise FormatError(f"an export to {to} has no option {unknown[0]}.")
    return EXPORTS[to](**given)
