"""`smelt sensitivity`: what each layer, head, group of channels and expert of a model costs to remove."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

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
from smelt.report.page import write_page
from smelt.report.sensitivity import SHORT_HEADINGS, cheapest_rows, conditions, render_sensitivity

PageOption = Annotated[Path, typer.Option("-o", "--out", help="Write this HTML page.", rich_help_panel=RUN)]
DataOption = Annotated[
    str, typer.Option("--data", help="Labeled data or text: a file, a hub id, or default.", rich_help_panel=DATA)
]
SamplesOption = Annotated[
    int, typer.Option("--samples", min=2, help="Samples that every loss is the mean of.", rich_help_panel=DATA)
]
SeqLenOption = Annotated[
    int, typer.Option("--seq-len", min=2, help="Tokens of a sample of text.", rich_help_panel=DATA)
]
KindsOption = Annotated[
    str | None,
    typer.Option("--only", help="Remove only these: a list of layers, parts, heads, channels and experts."),
]
MeasureOption = Annotated[
    str,
    typer.Option(
        "--measure", help="removal: the loss without each; or hessian: an estimate from Hessian traces (HAP)."
    ),
]
ProbesOption = Annotated[int, typer.Option("--probes", min=2, help="Random vectors per sample, for --measure hessian.")]
GroupsOption = Annotated[
    int, typer.Option("--channel-groups", min=1, help="Groups that the channels of a part are removed in.")
]


def run(
    model: ModelArgument,
    out: PageOption,
    data: DataOption = "default",
    text: Annotated[str | None, typer.Option(help="Column with the text.", rich_help_panel=DATA)] = None,
    pair: Annotated[str | None, typer.Option(help="Column with the second text.", rich_help_panel=DATA)] = None,
    label: Annotated[str | None, typer.Option(help="Column with the label.", rich_help_panel=DATA)] = None,
    samples: SamplesOption = 8,
    seq_len: SeqLenOption = 128,
    only: KindsOption = None,
    measure: MeasureOption = "removal",
    probes: ProbesOption = 20,
    channel_groups: GroupsOption = 4,
    device: DeviceOption = "auto",
    json_file: JsonOption = None,
    seed: SeedOption = 0,
) -> None:
    from smelt.compression.calibration.sensitivity import (
        HESSIAN_KINDS,
        KINDS,
        MEASURES,
        REMOVAL,
        check_kinds,
        estimate_sensitivity,
        measure_sensitivity,
    )
    from smelt.compression.recipe.inputs import calibration_batches, load_calibration_data
    from smelt.compression.recipe.recipe import CalibrationSettings
    from smelt.measure.machine import machine
    from smelt.models.load import load, skeleton
    from smelt.models.model import Model

    check_writable(out)
    if measure not in MEASURES:
        raise DataError(f"--measure is one of {', '.join(MEASURES)}, not {measure!r:.40}.")
    all_kinds = KINDS if measure == REMOVAL else HESSIAN_KINDS
    kinds = all_kinds if only is None else check_kinds([kind.strip() for kind in only.split(",")], all_kinds)
    outline = Model(skeleton(model), source=model)
    if outline.task not in ("language", "classification", "images"):
        raise DataError(
            f"{model} is a model for {outline.task}, and its loss on data is not known; give a language model, a "
            "classifier of texts or one of images."
        )
    settings = CalibrationSettings(
        source=data, samples=samples, seq_len=seq_len, batch_size=1, text=text, pair=pair, label=label
    )
    loaded_data = load_calibration_data(settings, outline)
    loaded = load(model, device=device)
    batches = calibration_batches(settings, loaded_data, loaded, seed)
    with progress_bars() as progress:
        if measure == REMOVAL:
            result = measure_sensitivity(
                loaded.anatomy, batches, kinds=kinds, channel_groups=channel_groups, progress=progress
            )
        else:
            result = estimate_sensitivity(
                loaded.anatomy, batches, kinds=kinds, channel_groups=channel_groups, probes=probes, seed=seed,
                progress=progress,
            )  # fmt: skip
    content: dict[str, Any] = {
        "model": model,
        "data": data,
        "sample": "images" if "pixel_values" in batches[0] else "texts",
        "seq_len": seq_len,
        "seed": seed,
        "channel_groups": channel_groups,
        "measure": measure,
        **({} if measure == REMOVAL else {"probes": probes}),
        **result.to_json(),
        "machine": machine(),
    }
    title = f"{model}: {conditions(content)}; increase of the loss, cheapest to remove first"
    console.print(table(title, SHORT_HEADINGS, cheapest_rows(content)))
    write_json(json_file, content)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_page(render_sensitivity(content), out)
    say(f"{out} is written.")
