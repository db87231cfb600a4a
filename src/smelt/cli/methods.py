"""`smelt methods`: list the compression methods, what each needs, and its paper."""

from __future__ import annotations

import dataclasses
from typing import Any

from smelt.cli.output import JsonOption, SeedOption, console, table, write_json


def run(json_file: JsonOption = None, seed: SeedOption = 0) -> None:
    from smelt.compression.methods import METHODS

    rows = [describe(name) for name in sorted(METHODS)]
    cells = [[row["name"], row["summary"], ", ".join(row["needs"]) or "nothing", row["paper"]] for row in rows]
    console.print(table("Methods", ["method", "when to use it", "needs", "paper"], cells))
    write_json(json_file, rows)


def describe(name: str) -> dict[str, Any]:
    from smelt.compression.methods import METHODS

    cls = METHODS[name]
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]
    parameters = {f.name: None if f.default is dataclasses.MISSING else f.default for f in fields}
    return {"name": name, "summary": cls.summary, "needs": cls.needs, "paper": cls.paper, "parameters": parameters}
