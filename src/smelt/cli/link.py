"""`smelt link`: measure the link between ranks, and predict what each gradient compressor gains on it."""

from __future__ import annotations

import os
from typing import Annotated, Any

import torch
import torch.distributed as distributed
import typer
from torch.nn import functional

from smelt.cli.output import DeviceOption, JsonOption, SeedOption, console, say, table, write_json
from smelt.errors import ConfigError
from smelt.report.numbers import count
from smelt.train.gradients.autotune.auto import build_candidate
from smelt.train.gradients.autotune.cost_model import (
    TABLE_COLUMNS,
    CostPrediction,
    agree_on_prediction,
    predict_compressor,
    predict_ddp,
    table_rows,
)
from smelt.train.gradients.autotune.dry_run import (
    dry_run_compressor,
    method_label,
    synthetic_gradient,
    synthetic_layout,
)
from smelt.train.gradients.autotune.link import Link, measure_link
from smelt.train.gradients.autotune.timed_comm import max_over_ranks
from smelt.train.gradients.comm import Comm
from smelt.train.gradients.compressors import COMPRESSORS, SAGE, HardThreshold
from smelt.train.gradients.hierarchy import NodeTopology
from smelt.train.timing import synchronized_time
from smelt.train.trainer.distributed import init_distributed

_MAX_ELEMENTS = 2**31 - 1  # of a flat bucket
_NEED_TUNING = (HardThreshold.name, SAGE.name)  # their first threshold must fit the model; tried only on request
_TIMEOUT = 1800.0  # seconds

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
    parameters: ParametersOption = 25e6,
    density: DensityOption = 0.001,
    backward_ms: BackwardOption = 0.0,
    methods: MethodsOption = None,
    node: NodeOption = None,
    device: DeviceOption = "cpu",
    json_file: JsonOption = None,
    seed: SeedOption = 0,
) -> None:
    if not 1 <= parameters <= _MAX_ELEMENTS:
        raise ConfigError(f"--parameters is {parameters:g}; it must lie between 1 and {_MAX_ELEMENTS:,}.")
    names = ["bf16", *COMPRESSORS] if methods is None else [name.strip() for name in methods.split(",")]
    compressors = [build_candidate(name, density) for name in names if methods is not None or name not in _NEED_TUNING]
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        raise ConfigError(
            "smelt link measures between ranks; start it with `torchrun --nproc-per-node 2 -m smelt.cli.main link`."
        )
    local_device = init_distributed("cuda" if device.startswith("cuda") else "cpu", _TIMEOUT)
    try:
        comm = Comm()
        nodes = None if node is None else NodeTopology.create(comm, node)
        link = measure_link(comm, local_device)
        layout = synthetic_layout(int(parameters))
        gradient = synthetic_gradient(layout, comm, local_device, seed)
        ddp = predict_ddp(layout.numel, link, backward_ms / 1000)
        cast_seconds = max_over_ranks([_cast_seconds(gradient)], comm, local_device)[0]
        ddp_bf16 = predict_ddp(layout.numel, link, backward_ms / 1000, 2, cast_seconds, "ddp, bf16 hook")
        predictions, copy_seconds, between = [ddp, ddp_bf16], 0.0, comm
        if nodes is not None:
            gradient, copy_seconds = _reduce_within_node(gradient, nodes)
            layout, between = nodes.shard(layout), nodes.inter_node
            link = measure_link(between, local_device)
        for compressor in compressors:
            if not comm.rank:
                say(f"trying {method_label(compressor)}")
            result = dry_run_compressor(compressor, gradient, layout, between, link)
            predictions.append(agree_on_prediction(predict_compressor(result, copy_seconds), comm, local_device))
        if not comm.rank:
            show(link, predictions, int(parameters), node)
            write_json(json_file, _content(link, predictions, int(parameters), density, backward_ms, node))
    finally:
        distributed.destroy_process_group()


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


def _reduce_within_node(gradient: torch.Tensor, nodes: NodeTopology) -> tuple[torch.Tensor, float]:
    """Return this rank's share of its node's mean, and the seconds that a step spends inside the node."""
    padded = functional.pad(gradient, (0, -len(gradient) % nodes.intra_node.world_size))
    nodes.all_gather(nodes.reduce_scatter(padded))  # opens connections
    start = synchronized_time(gradient.device)
    share = nodes.reduce_scatter(padded)
    nodes.all_gather(share)
    return share, synchronized_time(gradient.device) - start


def _cast_seconds(gradient: torch.Tensor) -> float:
    """Measure the cast to bfloat16 and back."""
    start = synchronized_time(gradient.device)
    gradient.to(torch.bfloat16).float()
    return synchronized_time(gradient.device) - start


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
