"""`smelt export`: write a model in another format, and verify it by reading it back."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from smelt.cli.output import JsonOption, ModelArgument, SeedOption, console, write_json
from smelt.report.numbers import size

ToOption = Annotated[str, typer.Option("--to", metavar="FORMAT", help="compressed-tensors, gguf, onnx, onnx-int or c.")]
OutOption = Annotated[
    Path, typer.Option("-o", "--out", help="Output folder, or a .gguf file for gguf; it must not exist yet.")
]
TypeOption = Annotated[
    str | None,
    typer.Option(
        "--type", help="gguf: type of the matrices that are not quantized, such as q4_k; by default unchanged."
    ),
]
TokenizerOption = Annotated[
    bool | None, typer.Option("--tokenizer/--no-tokenizer", help="gguf: include the tokenizer in the file.")
]
LengthOption = Annotated[
    int | None, typer.Option("--length", help="c: tokens per sequence, 128 by default; shorter ones are masked.")
]
QdqOption = Annotated[
    bool | None,
    typer.Option("--qdq", help="onnx-int: write QuantizeLinear and DequantizeLinear, for speed instead of equal bits."),
]


def run(
    model: ModelArgument,
    to: ToOption,
    out: OutOption,
    type_: TypeOption = None,
    tokenizer: TokenizerOption = None,
    length: LengthOption = None,
    qdq: QdqOption = None,
    json_file: JsonOption = None,
    seed: SeedOption = 0,
) -> None:
    from smelt.export import export

    result = export(model, to, out, type=type_, tokenizer=tokenizer, length=length, qdq=qdq)
    summary = ", ".join(f"{count} {dtype}" for dtype, count in result["tensors"].items())
    console.print(f"{to}: {summary}; {size(result['bytes'])} in {len(result['files'])} files", soft_wrap=True)
    for note in result["notes"]:
        console.print(f"note: {note}", soft_wrap=True)
    console.print(f"written and read back: {out}", soft_wrap=True)
    write_json(json_file, result)
