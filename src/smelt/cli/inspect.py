"""`smelt inspect`: show the anatomy of a model without loading its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from smelt.cli.output import JsonOption, ModelArgument, SeedOption, console, table, write_json
from smelt.report.integer import checked_sentence, layer_sqnr
from smelt.report.numbers import count, macs, size


def run(
    model: ModelArgument,
    tokens: Annotated[int, typer.Option(min=1, help="Sequence length for counting MACs.")] = 128,
    json_file: JsonOption = None,
    seed: SeedOption = 0,
) -> None:
    from smelt.compression.passport.document import PASSPORT, passport_lines, read_passport
    from smelt.measure.structure import describe_precision, describe_structure
    from smelt.models.anatomy_builder import anatomy_of
    from smelt.models.artifact import read_kv_cache_format
    from smelt.models.load import skeleton

    network = skeleton(model)
    content = describe_structure(anatomy_of(network), tokens)
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
    precision = describe_precision(network)
    for line in _precision_lines(precision):
        console.print(line, soft_wrap=True)
    record = _record(Path(model) / "measurements.json")
    if checked := checked_sentence(record):
        console.print(checked, soft_wrap=True)
    sqnr = layer_sqnr(record)
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
    extra = {
        "precision": precision["quantized"] and precision,
        "integer_graph": checked and record["integer_graph"],
        "sqnr_db": sqnr,
        "kv": kv and kv.to_json(),
        "passport": described,
    }
    write_json(json_file, {"model": model, **content, **{name: value for name, value in extra.items() if value}})


def _precision_lines(precision: dict[str, Any]) -> list[str]:
    """Say which layers are quantized and which stay in float; nothing of a network that is not quantized."""
    lines = []
    for row in precision["quantized"]:
        scale = "static scale" if row["static"] else "scale per token"
        inputs = f"inputs in {row['inputs']} ({scale})" if row["inputs"] else "inputs in float"
        lines.append(f"{row['layers']} layers with weights in {row['weights']}, {inputs}")
    if lines and precision["float"]:
        lines.append(f"in float: {', '.join(f'{count} {name}' for name, count in precision['float'].items())}")
    return lines


def _record(file: Path) -> dict[str, Any]:
    """Return the measurements of an artifact; empty for other models."""
    from smelt.models.json_file import read_object

    return read_object(file) if file.is_file() else {}
