"""`smelt link`: measure the link between ranks, and predict what each gradient compressor gains on it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from smelt.cli.output import DeviceOption, JsonOption, SeedOption, console, say, table, write_json
from smelt.cli.workers import WorkersOption, in_worker, run_workers
from smelt.report.numbers import count

if TYPE_CHECKING:
    from smelt.train.gradients.autotune.cost_model import CostPrediction
    from smelt.train.gradients.autotune.link import Link

ParametersOption = Annotated[float, typer.Option("--parameters", help="Parameters of the model, such as 25e6.")]
DensityOption = Annotated[float, typer.Option("--density", help="The fraction of gradients that sparsifiers send.")]
BackwardOption = Annotated[
    float,
    typer.Option("--backward-ms", min=0, help="Duration of backward, which plain DDP overlaps with communication."),
]
NodeOption = Annotated[
    int | None,
    typer.Option("--node-size", min=2, help="Ranks per node: dense inside, compressors are tried between nodes."),
]
MethodsOption = Annotated[
    str | None, typer.Option("--methods", help="Only these methods, separated by commas: bf16,exdyna,powersgd.")
]


def run(
    context: typer.Context,
    parameters: ParametersOption = 25e6,
    density: DensityOption = 0.001,
    backward_ms: BackwardOption = 0.0,
    methods: MethodsOption = None,
    node: NodeOption = None,
    workers: WorkersOption = 2,
    device: DeviceOption = "cpu",
    json_file: JsonOption = None,
    seed: SeedOption = 0,
) -> None:
    from smelt.train.gradients.autotune.survey import LinkSurvey

    survey = LinkSurvey(parameters, density, backward_ms, methods, node)
    if not in_worker():
        raise typer.Exit(run_workers(context.obj.again, workers))
    measured = survey.run(device, seed, say)
    if measured is not None:
        show(*measured, int(parameters), node)
        write_json(json_file, _content(*measured, int(parameters), density, backward_ms, node))


def show(link: Link, predictions: list[CostPrediction], parameters: int, node: int | None) -> None:
    rows = [
        [
            name,
            f"{1e6 * fit.alpha:.1f}",
            f"{fit.bandwidth / 1e6:.1f}",
            f"{100 * fit.spread:.0f}",
            f"{fit.sizes[0]:,} to {fit.sizes[-1]:,}",
        ]
        for name, fit in link.collectives.items()
    ]
    from smelt.train.gradients.autotune.cost_model import TABLE_COLUMNS, table_rows

    ranks = "ranks" if node is None else f"nodes of {node} ranks"
    title = f"Link of {link.world_size} {ranks}, {link.backend}"
    console.print(table(title, ["collective", "alpha, us", "MB/s", "spread, %", "bytes"], rows))
    title = f"Gradients of one step, {count(parameters)} parameters, ms"
    ddp = predictions[0]
    console.print(table(title, TABLE_COLUMNS, table_rows(predictions, ddp)))
    best = min(predictions, key=lambda prediction: prediction.exposed)
    gain = ddp.exposed / max(best.exposed, 1e-9)
    console.print(
        f"Least exposed time: {best.method}, {gain:.2f}x against plain DDP. Only time is compared, not the loss."
        if best is not ddp
        else "No method pays here: plain DDP has the least exposed time."
    )


def _content(
    link: Link,
    predictions: list[CostPrediction],
    parameters: int,
    density: float,
    backward_ms: float,
    node: int | None,
) -> dict[str, Any]:
    return {
        "parameters": parameters,
        "density": density,
        "backward_ms": backward_ms,
        "node_size": node,
        "link": link.to_json(),
        "methods": [prediction.to_json() for prediction in predictions],
    }
