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
    sqnr = _layer_sqnr(Path(model) / "measurements.json")
    if sqnr:
        rows = [[layer, f"{decibels:.1f} dB"] for layer, decibels in sqnr.items()]
        console.print(table("signal to quantization noise", ["layer", "ratio"], rows))
    kv = read_kv_cache_format(model)
    if kv is not None:
        console.print(f"KV cache in {kv}")
    passport = read_passport(Path(model)) if (Path(model) / PASSPORT).is_file() else None
    if passport is not None:
        for line in passport_lines(passport):
            console.print(line)
    described = {"fingerprint": passport.fingerprint, "source": passport.source} if passport else None
    extra = {"sqnr_db": sqnr, "kv": kv and kv.to_json(), "passport": described}
    write_json(json_file, {"model": model, **content, **{name: value for name, value in extra.items() if value}})


def _layer_sqnr(file: Path) -> dict[str, float]:
    """Return the ratio of every layer that the conversion to integers measured; empty for other models."""
    from smelt.models.json_file import read_object

    steps = read_object(file).get("steps") if file.is_file() else None
    for step in steps if isinstance(steps, list) else []:
        facts = step.get("facts") if isinstance(step, dict) else None
        ratios = facts.get("sqnr_db") if isinstance(facts, dict) else None
        if isinstance(ratios, dict):
            return {str(layer): value for layer, value in ratios.items() if isinstance(value, int | float)}
    return {}
