"""`smelt accumulator-bits`: predict how many accumulator bits every GEMM of a model needs in training."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from smelt.cli.output import (
    DATA,
    RUN,
    DeviceOption,
    JsonOption,
    ModelArgument,
    SeedOption,
    console,
    say,
    table,
    write_json,
)
from smelt.errors import DataError
from smelt.files import check_writable
from smelt.progress import progress_bars
from smelt.report.accumulator_bits import conditions, headings, layer_rows, render_accumulator_bits, widest_sentence
from smelt.report.page import write_page

if TYPE_CHECKING:
    from smelt.measure.accumulator_bits import LayerStatistics

DataOption = Annotated[
    str | None,
    typer.Option("--data", help="Measure zeros on this data: a file, a hub id, or default.", rich_help_panel=DATA),
]
BatchSizeOption = Annotated[int, typer.Option("--batch-size", min=1, help="Samples of a training batch.")]
SeqLenOption = Annotated[
    int | None,
    typer.Option("--seq-len", min=1, help="Tokens of a sample of text.", show_default="512, or the model's context"),
]
ImageSizeOption = Annotated[
    int | None, typer.Option("--image-size", min=1, help="Pixels of an image, if the model does not say.")
]
ProductBitsOption = Annotated[
    int,
    typer.Option("--product-bits", min=1, max=48, help="Mantissa bits of a product: 5 for E5M2, 7 for E4M3."),
]
ChunkSizeOption = Annotated[int, typer.Option("--chunk-size", min=1, help="Products of a chunk.")]
SamplesOption = Annotated[
    int, typer.Option("--samples", min=1, help="Samples on which zeros are measured.", rich_help_panel=DATA)
]
ReportOption = Annotated[
    Path | None, typer.Option("-o", "--report", help="Also write a page with plots.", rich_help_panel=RUN)
]


def run(
    model: ModelArgument,
    data: DataOption = None,
    text: Annotated[str | None, typer.Option(help="Column with the text.", rich_help_panel=DATA)] = None,
    pair: Annotated[str | None, typer.Option(help="Column with the second text.", rich_help_panel=DATA)] = None,
    label: Annotated[str | None, typer.Option(help="Column with the label.", rich_help_panel=DATA)] = None,
    samples: SamplesOption = 4,
    batch_size: BatchSizeOption = 32,
    seq_len: SeqLenOption = None,
    image_size: ImageSizeOption = None,
    product_bits: ProductBitsOption = 5,
    chunk_size: ChunkSizeOption = 64,
    report: ReportOption = None,
    device: DeviceOption = "auto",
    json_file: JsonOption = None,
    seed: SeedOption = 0,
) -> None:
    from smelt.measure.accumulator_bits import accumulator_bits, bits_by_length

    if report is not None:
        check_writable(report)
    if data is None and (text, pair, label) != (None, None, None):
        raise DataError("--text, --pair and --label name columns of --data: add it.")
    if data is None:
        statistics, sample = _shapes(model, seq_len, image_size, device)
    else:
        columns = {"text": text, "pair": pair, "label": label}
        statistics, sample = _measured(model, data, columns, samples, seq_len, device, seed)
    layers = accumulator_bits(statistics, batch_size=batch_size, product_bits=product_bits, chunk_size=chunk_size)
    content: dict[str, Any] = {
        "model": model,
        "data": data,
        "product_bits": product_bits,
        "chunk_size": chunk_size,
        "batch_size": batch_size,
        "sample": sample,
        "layers": [asdict(layer) for layer in layers],
        "curve": bits_by_length(layers, product_bits, chunk_size),
    }
    console.print(table(f"{model}: {conditions(content)}", headings(content), layer_rows(content)))
    console.print(widest_sentence(content))
    write_json(json_file, content)
    if report is not None:
        report.parent.mkdir(parents=True, exist_ok=True)
        write_page(render_accumulator_bits(content), report)
        say(f"{report} is written.")


def _shapes(model: str, seq_len: int | None, image_size: int | None, device: str) -> tuple[list[LayerStatistics], str]:
    """Find the layers without data: on the meta device, or with weights if an operation depends on values."""
    from smelt.measure.accumulator_bits import example_inputs, layer_shapes, resolve_seq_len
    from smelt.models.load import load, skeleton

    network = skeleton(model)
    seq_len = resolve_seq_len(network, seq_len)
    inputs = example_inputs(network, seq_len=seq_len, image_size=image_size)
    sample = f"sequences of {seq_len} tokens" if "input_ids" in inputs else "recordings"
    if "pixel_values" in inputs:
        sample = f"images of {inputs['pixel_values'].shape[-1]} pixels"
    try:
        return layer_shapes(network, inputs), sample
    except (RuntimeError, NotImplementedError):
        say("some shapes of this model depend on values, so it is loaded")
        return layer_shapes(load(model, device=device).network, inputs), sample


def _measured(
    model: str, source: str, columns: dict[str, str | None], samples: int, seq_len: int | None, device: str, seed: int
) -> tuple[list[LayerStatistics], str]:
    """Find the layers and measure zeros on data."""
    from smelt.compression.recipe.inputs import calibration_batches, load_calibration_data
    from smelt.compression.recipe.recipe import CalibrationSettings
    from smelt.data import LabeledData
    from smelt.measure.accumulator_bits import layer_statistics, resolve_seq_len
    from smelt.models.load import load, skeleton
    from smelt.models.model import Model

    outline = Model(skeleton(model), source=model)
    seq_len = resolve_seq_len(outline.network, seq_len)
    batch_size = samples if outline.task == "images" else 1  # batch norms need several images, long texts memory
    settings = CalibrationSettings(source=source, samples=samples, seq_len=seq_len, batch_size=batch_size, **columns)
    data = load_calibration_data(settings, outline)
    with progress_bars() as progress:
        loaded = load(model, device=device)
        if loaded.task != "images" and loaded.tokenizer is None:
            raise DataError(f"{model} has no tokenizer, so zeros cannot be measured on text; leave --data out.")
        batches = calibration_batches(settings, data, loaded, seed)
        most = "at most " if isinstance(data, LabeledData) else ""
        sample = "images" if "pixel_values" in batches[0] else f"sequences of {most}{seq_len} tokens"
        return layer_statistics(loaded.network, batches, progress), sample
