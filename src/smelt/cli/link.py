"""`smelt link`: how fast the workers talk, and what each gradient compressor would gain for a model of a given size."""

from __future__ import annotations

import os
from typing import Annotated, Any

import torch
import torch.distributed as distributed
import typer
from torch.nn import functional

from smelt.cli.output import DeviceOption, JsonOption, SeedOption, console, say, table, write_json
from smelt.errors import ConfigError, DataError, ResourceError
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
from smelt.train.gradients.autotune.timed_comm import max_over_ranks, synchronized_time
from smelt.train.gradients.comm import Workers
from smelt.train.gradients.compressors import COMPRESSORS, SAGE, HardThreshold
from smelt.train.gradients.hierarchy import Nodes

_MOST = 2**31 - 1  # elements of a flat vector
_UNSETTLED = (HardThreshold.name, SAGE.name)  # begin at thresholds that must fit the model; tried only when asked for

ParametersOption = Annotated[float, typer.Option("--parameters", help="Parameters of the model, such as 25e6.")]
DensityOption = Annotated[float, typer.Option("--density", help="The share of gradients that sparsifiers send.")]
BackwardOption = Annotated[
    float,
    typer.Option("--backward-ms", min=0, help="How long backward takes; plain DDP hides its communication behind it."),
]
NodeOption = Annotated[
    int | None,
    typer.Option("--node-size", min=2, help="Workers of a node: dense inside it, methods are tried between nodes."),
]
MethodsOption = Annotated[
    str | None, typer.Option("--methods", help="Only these, with commas between them: bf16,exdyna,powersgd.")
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
    if not 1 <= parameters <= _MOST:
        raise ConfigError(f"--parameters is {parameters:g}; it must lie between 1 and {_MOST:,}.")
    names = ["bf16", *COMPRESSORS] if methods is None else [name.strip() for name in methods.split(",")]
    compressors = [build_candidate(name, density) for name in names if methods is not None or name not in _UNSETTLED]
    place = _join(device)
    try:
        workers = Workers()
        nodes = None if node is None else Nodes.of(workers, node)
        link = measure_link(workers, place)
        layout = synthetic_layout(int(parameters))
        gradient = synthetic_gradient(layout, workers, place, seed)
        plain = predict_ddp(layout.size, link, backward_ms / 1000)
        rounding = max_over_ranks([_rounding(gradient)], workers, place)[0]
        half = predict_ddp(layout.size, link, backward_ms / 1000, 2, rounding, "ddp, bf16 hook")
        found, handling, between = [plain, half], 0.0, workers
        if nodes is not None:
            gradient, handling = _inside(gradient, nodes)
            layout, between = nodes.share(layout), nodes.peers
            link = measure_link(between, place)
        for compressor in compressors:
            if not workers.rank:
                say(f"trying {method_label(compressor)}")
            made = predict_compressor(dry_run_compressor(compressor, gradient, layout, between, link), handling)
            found.append(agree_on_prediction(made, workers, place))
        if not workers.rank:
            show(link, found, int(parameters), node)
            write_json(json_file, _content(link, found, int(parameters), density, backward_ms, node))
    finally:
        distributed.destroy_process_group()


def show(link: Link, found: list[CostPrediction], parameters: int, node: int | None) -> None:
    rows = [
        [
            name,
            f"{1e6 * line.alpha:.1f}",
            f"{line.bandwidth / 1e6:.1f}",
            f"{100 * line.spread:.0f}",
            f"{line.sizes[0]:,} to {line.sizes[-1]:,}",
        ]
        for name, line in link.collectives.items()
    ]
    title = f"Link of {link.workers} {'workers' if node is None else f'nodes of {node} workers'}, {link.backend}"
    console.print(table(title, ["collective", "alpha, us", "MB/s", "spread, %", "bytes"], rows))
    console.print(
        table(f"A step's gradients, {count(parameters)} parameters, ms", TABLE_COLUMNS, table_rows(found, found[0]))
    )
    best = min(found, key=lambda each: each.exposed)
    gain = found[0].exposed / max(best.exposed, 1e-9)
    console.print(
        f"Shortest wait: {best.method}, {gain:.2f}x against plain DDP. Only time is compared, not the loss."
        if best is not found[0]
        else "No method pays here: plain DDP has the shortest wait."
    )


def _inside(gradient: torch.Tensor, nodes: Nodes) -> tuple[torch.Tensor, float]:
    """This worker's share of its node's mean, and the seconds that a step spends inside the node."""
    whole = functional.pad(gradient, (0, -len(gradient) % nodes.inside.size))
    nodes.gather(nodes.reduce(whole))  # opens connections
    start = synchronized_time(gradient.device)
    share = nodes.reduce(whole)
    nodes.gather(share)
    return share, synchronized_time(gradient.device) - start


def _rounding(gradient: torch.Tensor) -> float:
    """Seconds to 16 bits and back."""
    start = synchronized_time(gradient.device)
    gradient.to(torch.bfloat16).float()
    return synchronized_time(gradient.device) - start


def _content(
    link: Link, found: list[CostPrediction], parameters: int, density: float, backward_ms: float, node: int | None
) -> dict[str, Any]:
    return {
        "parameters": parameters,
        "density": density,
        "backward_ms": backward_ms,
        "node": node,
        "link": link.to_json(),
        "methods": [each.to_json() for each in found],
    }


def _join(device: str) -> torch.device:
    """Meet the workers that torchrun has started."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        raise ConfigError(
            "smelt link measures between workers; start it with `torchrun --nproc-per-node 2 -m smelt.cli.main link`."
        )
    cuda = device.startswith("cuda")
    if cuda and not torch.cuda.is_available():
        raise ResourceError("there is no GPU here; leave --device at cpu.")
    place = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(place)
    try:
        # What workers agree on lies in the CPU's memory, whatever the device.
        distributed.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    except (ValueError, RuntimeError) as error:
        raise DataError(f"the workers could not find each other ({error}); start them with torchrun.") from error
    return place
