"""Run an export: load the model, write into a temporary folder, read it back, move it into place."""

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
from smelt.export.integer import CSourceExport, OnnxInteger
from smelt.export.onnx import Onnx
from smelt.files import atomic_folder, check_writable, explain_disk_errors, write_atomically
from smelt.models.carved_experts import refuse_carved_experts
from smelt.models.implants import refuse_implants
from smelt.models.load import load
from smelt.models.model import Model
from smelt.models.token_pruning import refuse_token_pruning

EXPORTS: dict[str, type[ExportFormat]] = {
    export.name: export for export in (CompressedTensors, Gguf, Onnx, OnnxInteger, CSourceExport)
}


def export(model: Model | str | Path, to: str, folder: str | Path, **options: Any) -> dict[str, Any]:
    """Write a model in another program's format, verify it by reading it back, and report what was written.

    A single-file format (GGUF) is written without a folder if `folder` has the extension of the format.
    """
    target, export_format = Path(folder), _format(to, options)
    if target.exists():
        raise FormatError(f"{target} exists already; choose another name or remove it.")
    check_writable(target)
    if not isinstance(model, Model):
        model = load(model)
    refuse_token_pruning(model.network, f"{to} has no operator for that")
    if to != "onnx":
        refuse_implants(model.network, f"{to} has no operator for that")
    refuse_carved_experts(model.network, f"{to} has no router ahead of the layers; serve this folder with Smelt")
    single_file = export_format.file is not None and target.suffix == Path(export_format.file).suffix
    with _single_file(target, str(export_format.file)) if single_file else atomic_folder(target) as temporary:
        written = export_format.write(model, temporary)
        export_format.verify(model, temporary)
        files = {
            str(file.relative_to(temporary)): file.stat().st_size
            for file in sorted(temporary.rglob("*"))
            if file.is_file()
        }
    return {
        "source": model.source,
        "format": to,
        "out": str(target),
        "tensors": written.tensor_types,
        "files": files,
        "bytes": sum(files.values()),
        "notes": [*written.notes, *_left_out(model)],
    }


def _left_out(model: Model) -> list[str]:
    """Return notes about what no export format can express."""
    if model.kv is None:
        return []
    return [f"the KV cache format {model.kv} is left out: set it in the program that reads the export."]


@contextmanager
def _single_file(out: Path, name: str) -> Iterator[Path]:
    """Create a temporary folder next to `out`; without an error, the file `name` in it becomes `out`."""
    with explain_disk_errors(out):
        out.absolute().parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=out.absolute().parent, prefix=f".{out.name}.") as temporary:
            yield Path(temporary)
            write_atomically(out, (Path(temporary) / name).replace)


def _format(to: str, options: dict[str, Any]) -> ExportFormat:
    if to not in EXPORTS:
        raise FormatError(f"there is no export to {to!r}; there are {', '.join(EXPORTS)}.")
    known = {field.name for field in fields(EXPORTS[to])}
    selected = {name: value for name, value in options.items() if value is not None}
    if unknown := sorted(selected.keys() - known):
        raise FormatError(f"an export to {to} has no option {unknown[0]}.")
    return EXPORTS[to](**selected)
