"""`smelt inspect`: show the anatomy of a model without loading its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from smelt.cli.output import JsonOption, ModelArgument, SeedOption, console, table, write_json
from smelt.compression.passport.document import PASSPORT, passport_lines, read_passport
from smelt.measure.cost import (
    Workload,
    block_cost,
    block_parameters,
    count_bytes,
    count_parameters,
    shared_macs,
    unit_costs,
)
from smelt.models.anatomy import Anatomy, Block, Part, anatomy_of
from smelt.models.artifact import read_kv_cache_format
from smelt.models.load import skeleton
from smelt.report.numbers import count, macs, size


def run(
    model: ModelArgument,
    tokens: Annotated[int, typer.Option(min=1, help="Sequence length for counting MACs.")] = 128,
    json_file: JsonOption = None,
    seed: SeedOption = 0,
) -> None:
    anatomy = anatomy_of(skeleton(model))
    content = describe(anatomy, tokens)
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


def describe(anatomy: Anatomy, tokens: int) -> dict[str, Any]:
    image_size = getattr(anatomy.network.config, "image_size", None)
    workload = Workload(tokens=tokens, image_size=image_size if isinstance(image_size, int) else 224)
    prices = zip(anatomy.parts, unit_costs(anatomy, "macs", workload), strict=True)
    costs = {part.name: part.units * price + shared_macs(part, workload) for part, price in prices}
    return {
        "family": anatomy.family.name,
        "parameters": count_parameters(anatomy.network),
        "block_parameters": block_parameters(anatomy),
        "bytes": count_bytes(anatomy.network),
        "macs": block_cost(anatomy, "macs", workload),
        "tokens": tokens,
        "blocks": [_block(block, costs) for block in anatomy.blocks],
        "shape": anatomy.shape(),
    }


_UNIT_NAMES = {"ffn_channels": "FFN channels", "channels": "channels"}


def _block(block: Block, costs: dict[str, float]) -> dict[str, Any]:
    heads = next((part for part in block.parts if part.kind == "heads"), None)
    others = [part for part in block.parts if part.kind != "heads"]
    attention = "-"
    if heads is not None:
        attention = f"{heads.units * heads.heads_per_unit} heads of {heads.head_dim}"
        attention += f" in {heads.units} KV groups" if heads.heads_per_unit > 1 else ""
    return {
        "block": block.index,
        "attention": attention,
        "feed_forward": _experts(others) or ", ".join(f"{part.units} {_UNIT_NAMES[part.kind]}" for part in others),
        "parameters": count_parameters(block.module),
        "macs": sum(costs[part.name] for part in block.parts),
    }


def _experts(parts: list[Part]) -> str:
    """Describe a mixture of experts; empty for a dense feed-forward."""
    mixture = parts[0].mixture if parts else None
    if mixture is None:
        return ""
    widths = sorted({part.units for part in parts})
    spread = f"{widths[0]} to {widths[-1]}" if len(widths) > 1 else str(widths[0])
    return f"{mixture.num_experts} experts of {spread} FFN channels, {mixture.top_k} per token"
