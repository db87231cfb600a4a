"""`smelt inspect`: show the anatomy of a model without loading its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from smelt.cli.output import JsonOption, ModelArgument, SeedOption, console, table, write_json
from smelt.report.numbers import count, macs, size


def run(
    model: ModelArgument,
    tokens: Annotated[int, typer.Option(min=1, help="Sequence length for counting MACs.")] = 128,
    json_file: JsonOption = None,
    seed: SeedOption = 0,
) -> None:
    from smelt.compression.passport.document import PASSPORT, passport_lines, read_passport
    from smelt.measure.structure import describe_structure
    from smelt.models.anatomy import anatomy_of
    from smelt.models.artifact import read_kv_cache_format
    from smelt.models.load import skeleton

    content = describe_structure(anatomy_of(skeleton(model)), tokens)
    rows = [
        [str(row["block"]), row["attention"], row["feed_forward"], count(row["parameters"]), macs(row["macs"])]
        for row in content["blocks"]
    ]
    title = f"{model}: {content['family']}, {count(content['parameters'])} parameters, {size(content['bytes'])}"
    console.print(table(title, ["block", "attention", "feed-forward or channels", "parameters", "MACs"], rows))
    console.print(
        f"blocks {count(content['block_parameters'])} parameters, {macs(content['macs'])} "
        f"for {tokens} tokens (one image for vision models)"
    )
    kv = read_kv_cache_format(model)
    if kv is not None:
        console.print(f"KV cache in {kv}")
    passport = read_passport(Path(model)) if (Path(model) / PASSPORT).is_file() else None
    if passport is not None:
        for line in passport_lines(passport):
            console.print(line)
    described = {"fingerprint": passport.fingerprint, "source": passport.source} if passport else None
    extra = {"kv": kv and kv.to_json(), "passport": described}
    write_json(json_file, {"model": model, **content, **{name: value for name, value in extra.items() if value}})
