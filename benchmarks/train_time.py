"""Time to a fixed held-out loss on slow links: plain DDP, bf16, PowerSGD, sparsifiers and `auto`.

    PYTHONPATH=src:benchmarks python benchmarks/train_time.py [--links 100mbit,1gbit,unlimited] \
        [--sizes small,large] [--methods none,exdyna@0.01,auto@0.01] [--seeds 0,1] [--seconds 900] [--name train_time]

Four ranks, each in a network namespace of its own, joined by a bridge; each link is limited with tc's token bucket in
both directions, and the bandwidth that an all-reduce reaches is measured and shown. All of it is created inside one new
user and network namespace, which the kernel removes with its last process: nothing is visible outside. Skipped where
such namespaces are not permitted.

The target is plain DDP's loss after a fixed number of steps, for each seed; the link does not change what plain DDP
computes, so the target is determined once on the unlimited link, at several learning rates for the first seed, to show
what the one in use costs plain DDP. Every cell then trains until an evaluation reaches the target. Time is that of
training steps, with the measuring of `auto` and without evaluations. Finished cells are kept in results/NAME.json and
not run again; another machine needs another name.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

from common import mean, previous_rows, shared, table, write
from train_runs import WORKERS, Cell, make_parser, run_workers, words

NAME = "train_time"
RATES = {"100mbit": 100e6, "1gbit": 1e9, "unlimited": None}  # bits per second of each rank's link, each way
RATE, OTHER_RATES = 0.001, (0.0003, 0.003)  # of learning
BASE, BEGIN = 120, "unlimited"  # steps of plain DDP that set the target, and the link it is determined on
LONGEST = 480  # steps after which a cell gives up
EVERY = 5  # steps between evaluations
SIZES = {"small": 384, "large": 1024}  # width of the model
METHODS = [
    *("none", "bf16", "powersgd", "exdyna@0.05", "exdyna@0.01", "exdyna@0.001", "micro@0.01", "deft@0.01"),
    *("topk@0.01", "auto@0.05", "auto@0.01", "auto@0.001"),
]
INSIDE = "SMELT_BENCHMARK_NAMESPACE"  # set in the process that is in the new namespace
BRIDGE, NETWORK = "smelt-bridge", "10.77.0"
Row = dict[str, Any]


def main() -> None:
    options = _options()
    if INSIDE not in os.environ and not options.text:
        _enter_namespace()
    rows: list[Row] = previous_rows(options.name, True)
    end = perf_counter() + options.seconds
    if not options.text:
        _run("ip", "link", "add", BRIDGE, "type", "bridge")
        _run("ip", "link", "set", BRIDGE, "up")
        places = [(size, seed) for size in options.sizes for seed in options.seeds]
        begin = [cell_of(BEGIN, size, "none", seed, None) for size, seed in places]
        begin += [cell_of(BEGIN, size, "none", 0, None, rate) for size in options.sizes for rate in OTHER_RATES]
        _work(BEGIN, begin, rows, end, options.name)
        targets = {(row["size"], row["seed"]): row["curve"][-1]["loss"] for row in _targets(rows)}
        for link in options.links:
            cells = [
                cell_of(link, size, method, seed, targets[size, seed])
                for size, seed in places
                for method in options.methods
                if (size, seed) in targets
            ]
            _work(link, cells, rows, end, options.name)
    write(options.name, rows, _text(rows))


def _options() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--links", type=words, default=list(RATES))
    parser.add_argument("--sizes", type=words, default=list(SIZES))
    parser.add_argument("--methods", type=words, default=METHODS)
    parser.add_argument("--name", default=NAME, help="of the file of results")
    return parser.parse_args()


def _enter_namespace() -> None:
    """Start this script again as root of a new user and network namespace; ends this process."""
    allowed = subprocess.run(["unshare", "-rn", "true"], capture_output=True, check=False).returncode == 0
    if not allowed:
        raise SystemExit("network namespaces are not permitted here, so nothing was measured")
    os.execvpe("unshare", ["unshare", "-rn", sys.executable, *sys.argv], {**os.environ, INSIDE: "1"})


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


def _work(link: str, cells: list[Cell], rows: list[Row], end: float, file: str) -> None:
    """Run the cells that are not finished."""
    done = {row["name"] for row in rows}
    cells = [cell for cell in cells if cell["name"] not in done]
    if not cells or perf_counter() > end:
        return
    targets = {cell["name"]: cell["stop_at"] for cell in cells}
    for result in _on_link(link, cells):
        name, target = result["name"], targets[result["name"]]
        result.pop("build_ups")
        words = name.split()
        parts = {"link": words[0], "size": words[1], "method": words[2], "seed": int(words[4]), "rate": float(words[6])}
        parts["target"] = target
        rows.append({**result, **parts, "reached": target is not None and result["curve"][-1]["loss"] <= target})
        write(file, rows, _text(rows))
        if perf_counter() > end:
            return


def _on_link(link: str, cells: list[Cell]) -> Iterator[Cell]:
    wait = ["unshare", "-n", "sh", "-c", 'read go && exec "$@"', "sh"]  # until its link is up
    more = {"GLOO_SOCKET_IFNAME": "eth0"}
    yield from run_workers(cells, f"{NETWORK}.1", 29_500, lambda rank: wait, more, lambda pids: _plug_in(pids, link))


def _plug_in(pids: list[int], link: str) -> None:
    """Link each rank's namespace to the bridge; the link disappears with the namespace when the rank ends."""
    own = Path("/proc/self/ns/net").readlink()
    for number, pid in enumerate(pids):
        while Path(f"/proc/{pid}/ns/net").readlink() == own:  # `unshare` has not done its work yet
            sleep(0.01)
        end, inside = f"smelt{pid}", ["nsenter", "-n", "-t", str(pid)]
        _run("ip", "link", "add", end, "type", "veth", "peer", "name", "eth0", "netns", str(pid))
        _run("ip", "link", "set", end, "master", BRIDGE, "up")
        _run(*inside, "ip", "link", "set", "lo", "up")
        _run(*inside, "ip", "address", "add", f"{NETWORK}.{number + 1}/24", "dev", "eth0")
        _run(*inside, "ip", "link", "set", "eth0", "up")
        rate = RATES[link]
        if rate is not None:
            bucket = max(int(rate / 8 * 0.004), 2**16)  # bytes: what may leave at once, four milliseconds
            limit = ["root", "tbf", "rate", f"{rate:.0f}bit", "burst", str(bucket), "latency", "50ms"]
            _run("tc", "qdisc", "add", "dev", end, *limit)
            _run(*inside, "tc", "qdisc", "add", "dev", "eth0", *limit)


def cell_of(link: str, size: str, method: str, seed: int, target: float | None, rate: float = RATE) -> Cell:
    """`method`: its name, with the density behind an @ if it has one."""
    name, _, density = method.partition("@")
    gradients: dict[str, Any] = {"method": name}
    if density:
        gradients["density"] = float(density)
    if name == "powersgd":
        gradients["plain"] = 2
    model = {  # its one patch is the whole image
        "model_type": "vit",
        "image_size": 28,
        "patch_size": 28,
        "hidden_size": SIZES[size],
        "intermediate_size": 4 * SIZES[size],
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    config = {
        "task": "images",
        "model": model,
        "data": {"train": str(shared() / "data/mnist/mnist.npz")},
        "batch_size": 8,
        "steps": BASE if target is None else LONGEST,
        "seed": seed,
        "device": "cpu",
        "gradients": gradients,
        "optimizer": {"name": "sgd", "lr": rate, "momentum": 0.9, "nesterov": True},
        "schedule": {"name": "constant", "warmup_steps": 10},
        "evaluate": {"every": EVERY, "samples": 512},
        "checkpoint": {"every": None, "keep": 1},
        "timeout": 300.0,
    }
    kind = "target" if target is None else "seed"
    return {"name": f"{link} {size} {method} {kind} {seed} rate {rate:g}", "config": config, "stop_at": target}


def _targets(rows: list[Row]) -> list[Row]:
    return [row for row in rows if row["target"] is None and row["rate"] == RATE]


def _text(rows: list[Row]) -> str:
    cells = [row for row in rows if row["target"] is not None]
    parts = ["# Time to a loss on slow links", _introduction(), _rates(rows)]
    for link in RATES:
        for size in SIZES:
            own = [row for row in cells if row["link"] == link and row["size"] == size]
            if own:
                parts += [f"## {link}, {size} model", _link_words(own), _table(own)]
    return "\n\n".join(parts)


def _introduction() -> str:
    return (
        f"{WORKERS} ranks, each in a network namespace with a link of its own to one bridge, limited both ways by "
        "tc's token bucket; gloo, one thread per rank. A Vision Transformer whose one patch is the whole image, which "
        "makes it a deep residual network of two tokens: much to send, little to compute. 8 MNIST images per rank and "
        f"step, SGD with Nesterov momentum 0.9, learning rate {RATE:g} for all, constant after 10 steps. The loss to "
        f"reach is plain DDP's after {BASE} steps, on 512 held-out images, looked at every {EVERY} steps. Seconds are "
        "of training steps, without evaluations; those of `auto` hold its measuring, which stands by itself too: the "
        "step in which it measures. The time of a step is the median of the second half of a cell. CPU ms: "
        f"milliseconds of a core that one rank uses per step; {WORKERS} of them share the machine's cores."
    )


def _rates(rows: list[Row]) -> str:
    """What plain DDP loses by a learning rate that all methods can use."""
    goals = {row["size"]: row["curve"][-1]["loss"] for row in _targets(rows) if row["seed"] == 0}
    results = []
    for row in rows:
        if row["target"] is None and row["seed"] == 0 and row["size"] in goals:
            losses = [point["loss"] for point in row["curve"]]
            there = [point["step"] for point in row["curve"] if point["loss"] <= goals[row["size"]]]
            words = [row["size"], f"{row['parameters']:,}", f"{row['rate']:g}", f"{losses[-1]:.3f}"]
            results.append([*words, f"{mean(losses[-5:]):.3f}", f"{there[0]}" if there else f"not in {BASE}"])
    headings = ["model", "parameters", "learning rate", f"plain DDP, step {BASE}", "mean of its last five"]
    return table([*headings, f"steps to the loss of {RATE:g}"], sorted(results, reverse=True))


def _link_words(own: list[Row]) -> str:
    rates = sorted(row["bits_per_second"] / 1e6 for row in own)
    loads = sorted(row["load"] for row in own)
    return (
        f"Measured by an all-reduce of 8 MiB before the first cell of each start: {rates[0]:,.0f} to {rates[-1]:,.0f} "
        f"Mb/s at each worker. Load of the machine when cells began, their own four workers among it: {loads[0]:.1f} "
        f"to {loads[-1]:.1f}."
    )


def _table(own: list[Row]) -> str:
    plain = {row["seed"]: row for row in own if row["method"] == "none" and row["reached"]}
    cells = []
    for method in METHODS:
        rows = [row for row in own if row["method"] == method]
        if not rows:
            continue
        there = [row for row in rows if row["reached"]]
        pairs = [(row, plain[row["seed"]]) for row in there if row["seed"] in plain]
        measuring = [row["longest_step_seconds"] for row in rows if row["chosen"] is not None]
        cells.append(
            [
                _label(rows), str(len(rows)), f"{mean([row['bytes_a_step'] / 1e6 for row in rows]):,.3g}",
                f"{1000 * mean([row['step_seconds'] for row in rows]):,.0f}",
                f"{1000 * mean([row['cpu_seconds'] for row in rows]):,.0f}",
                _span([base["step_seconds"] / row["step_seconds"] for row, base in pairs], "x"),
                _span([row["steps"] for row in there], "", 0) if there else f"not in {rows[0]['steps']}",
                _span([_seconds(row) for row in there], "", 1), _span(measuring, "", 1),
                _span([_seconds(base) / _seconds(row) for row, base in pairs], "x"),
            ]
        )  # fmt: skip
    headings = ["method", "seeds", "MB per step", "ms per step", "CPU ms", "faster steps", "steps to it"]
    return table([*headings, "seconds to it", "of them measuring", "sooner there"], cells)


def _label(rows: list[Row]) -> str:
    name = rows[0]["method"].replace("@", " ")
    chosen = sorted({choice for row in rows for choice in row["chosen"] or []})
    label = "plain DDP" if name == "none" else name
    return f"{label} (took {', '.join(chosen)})" if chosen else label


def _span(values: list[float], unit: str, digits: int = 2) -> str:
    if not values:
        return "-"
    if len(values) == 1:
        return f"{values[0]:.{digits}f}{unit}"
    return f"{mean(values):.{digits}f}{unit} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def _seconds(row: Row) -> float:
    return row["curve"][-1]["seconds"]


if __name__ == "__main__":
    main()
