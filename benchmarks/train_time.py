"""Time to a fixed held-out loss on slow links: plain DDP, bf16, PowerSGD, sparsifiers and `auto`.

    PYTHONPATH=src:benchmarks python benchmarks/train_time.py [--links 100mbit,1gbit,unlimited] \
        [--methods none,exdyna@0.01,auto] [--seeds 0,1] [--seconds 900]

Four workers, each in a network namespace of its own, joined by a bridge; each one's cable is limited with tc's token
bucket in both directions, and the bandwidth that an all-reduce reaches is measured and shown. All of it is made inside
one new user and network namespace, which the kernel removes with its last process: nothing of it is ever seen outside.
It is skipped where such namespaces are not permitted.

The loss to reach is the one that plain DDP has after a fixed number of steps, for each seed; how it is sent does not
change what plain DDP computes, so this is found once on the link without a limit. Every cell then trains until an
evaluation is at that loss or below. Time is that of training steps, with what `auto` spends on measuring and without
evaluations. Finished cells stand in results/train_time.json and are not run again.
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

from common import kept_rows, mean, shared, table, write
from train_cells import WORKERS, Cell, run_workers

NAME = "train_time"
RATES = {"100mbit": 100e6, "1gbit": 1e9, "unlimited": None}  # bits a second of each worker's cable, each way
RATE = 0.003  # of learning: the best of 0.003, 0.01, 0.03 and 0.1 for plain DDP
BASE, BEGIN = 60, "unlimited"  # steps of plain DDP that set the loss, and the link that it is found on
LIMIT = {"none": 90, "bf16": 90}  # steps after which a cell gives up
LONGEST = 600
EVERY = 5  # steps between evaluations
METHODS = [
    *("none", "exdyna@0.01", "exdyna@0.001", "auto", "powersgd", "micro@0.01", "micro@0.001"),
    *("deft@0.01", "topk@0.01", "bf16", "deft@0.001", "topk@0.001", "auto@0.01"),
]
INSIDE = "SMELT_BENCHMARK_NAMESPACE"  # set in the process that is in the new namespace
BRIDGE, NETWORK = "smelt-bridge", "10.77.0"
Row = dict[str, Any]


def main() -> None:
    options = _options()
    if INSIDE not in os.environ and not options.text:
        _enter_namespace()
    rows: list[Row] = kept_rows(NAME, True)
    end = perf_counter() + options.seconds
    if not options.text:
        _run("ip", "link", "add", BRIDGE, "type", "bridge")
        _run("ip", "link", "set", BRIDGE, "up")
        begin = [_cell(BEGIN, "none", seed, None) for seed in options.seeds]
        _work(BEGIN, begin, rows, end)
        for link in options.links:
            targets = {row["seed"]: row["curve"][-1]["loss"] for row in rows if row["target"] is None}
            pairs = [(seed, method) for seed in options.seeds if seed in targets for method in options.methods]
            _work(link, [_cell(link, method, seed, targets[seed]) for seed, method in pairs], rows, end)
    write(NAME, rows, _text(rows))


def _options() -> argparse.Namespace:
    def words(text: str) -> list[str]:
        return text.split(",")

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--links", type=words, default=list(RATES))
    parser.add_argument("--methods", type=words, default=METHODS)
    parser.add_argument("--seeds", type=lambda text: list(map(int, words(text))), default=[0, 1, 2])
    parser.add_argument("--seconds", type=float, default=1e9, help="no cell is begun after so many")
    parser.add_argument("--text", action="store_true", help="run nothing, write the tables anew")
    return parser.parse_args()


def _enter_namespace() -> None:
    """Start this script again as root of a new user and network namespace; ends this process."""
    allowed = subprocess.run(["unshare", "-rn", "true"], capture_output=True, check=False).returncode == 0
    if not allowed:
        raise SystemExit("network namespaces are not permitted here, so nothing was measured")
    os.execvpe("unshare", ["unshare", "-rn", sys.executable, *sys.argv], {**os.environ, INSIDE: "1"})


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


def _work(link: str, cells: list[Cell], rows: list[Row], end: float) -> None:
    """Run what is not done yet."""
    done = {row["name"] for row in rows}
    cells = [cell for cell in cells if cell["name"] not in done]
    if not cells or perf_counter() > end:
        return
    targets = {cell["name"]: cell["stop_at"] for cell in cells}
    for found in _on_link(link, cells):
        name, target = found["name"], targets[found["name"]]
        words = name.split()
        found.pop("build_ups")
        parts = {"link": words[0], "method": words[1], "seed": int(words[3]), "target": target}
        rows.append({**found, **parts, "reached": target is not None and found["curve"][-1]["loss"] <= target})
        write(NAME, rows, _text(rows))
        if perf_counter() > end:
            return


def _on_link(link: str, cells: list[Cell]) -> Iterator[Cell]:
    wait = ["unshare", "-n", "sh", "-c", 'read go && exec "$@"', "sh"]  # until its cable is plugged in
    more = {"GLOO_SOCKET_IFNAME": "eth0"}
    yield from run_workers(cells, f"{NETWORK}.1", 29_500, lambda rank: wait, more, lambda pids: _plug_in(pids, link))


def _plug_in(pids: list[int], link: str) -> None:
    """A cable from each worker's namespace to the bridge. It goes with the namespace, when the worker has ended."""
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


def _cell(link: str, method: str, seed: int, target: float | None) -> Cell:
    """`method`: its name, with the density behind an @ if it has one."""
    name, _, density = method.partition("@")
    gradients: dict[str, Any] = {"method": name}
    if density:
        gradients["density"] = float(density)
    if name == "powersgd":
        gradients["plain"] = 2
    steps = BASE if target is None else LIMIT.get(name, LONGEST)
    model = {  # its one patch is the whole image
        "model_type": "vit",
        "image_size": 28,
        "patch_size": 28,
        "hidden_size": 384,
        "intermediate_size": 1536,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    config = {
        "task": "images",
        "model": model,
        "data": {"train": str(shared() / "data/mnist/mnist.npz")},
        "batch": 8,
        "steps": steps,
        "seed": seed,
        "device": "cpu",
        "gradients": gradients,
        "optimizer": {"name": "sgd", "lr": RATE, "momentum": 0.9, "nesterov": True},
        "schedule": {"name": "constant", "warm_up": 10},
        "evaluate": {"every": BASE if target is None else EVERY, "samples": 512},
        "checkpoint": {"every": None, "keep": 1},
        "timeout": 300.0,
    }
    kind = "target" if target is None else "seed"
    return {"name": f"{link} {method} {kind} {seed}", "config": config, "stop_at": target}


def _text(rows: list[Row]) -> str:
    cells = [row for row in rows if row["target"] is not None]
    parts = ["# Time to a loss on slow links"]
    if cells:
        parts.append(_introduction(cells[0]))
    for link in RATES:
        own = [row for row in cells if row["link"] == link]
        if own:
            parts += [f"## {link}", _link_words(own), _table(own, _processor(cells))]
    return "\n\n".join(parts)


def _introduction(row: Row) -> str:
    return (
        f"{WORKERS} workers, each in a network namespace with a cable of its own to one bridge, limited both ways by "
        f"tc's token bucket; gloo, one thread a worker. A Vision Transformer of {row['parameters']:,} parameters "
        f"({row['parameters'] * 4 / 1e6:.1f} MB of gradients) whose one patch is the whole image, which makes it a "
        "deep residual network of two tokens: much to send, little to compute. 8 MNIST images a worker and step, SGD "
        f"with Nesterov momentum 0.9, learning rate {RATE:g}, constant after 10 steps. The loss to reach is plain "
        f"DDP's after {BASE} steps, on 512 held-out images, looked at every {EVERY} steps. Seconds are of training "
        "steps, without evaluations; those of `auto` hold its measuring. The time of a step is the median of the "
        "second half of a cell. Four workers share the machine's cores with each other and with other work, so that "
        "computing takes a larger part of a step than it would with a machine each. Quiet is what is least disturbed "
        "by other work: of a step the tenth percentile of the second half, of a run that times its steps, and for "
        "`auto` the step in which it measures as it was. Processor: milliseconds of a core that one worker uses in a "
        "step, mean over links. A core each is arithmetic, not a measurement: a step as long as its processor time and "
        "its bytes at the measured bandwidth, of plain DDP the longer of the two, as if the shorter were hidden, "
        "and no longer than it was measured."
    )


def _link_words(own: list[Row]) -> str:
    rates = sorted(row["bits_per_second"] / 1e6 for row in own)
    loads = sorted(row["load"] for row in own)
    return (
        f"Measured by an all-reduce of 8 MiB before the first cell of each start: {rates[0]:,.0f} to {rates[-1]:,.0f} "
        f"Mb/s at each worker. Load of the machine when cells began: {loads[0]:.1f} to {loads[-1]:.1f}."
    )


def _processor(cells: list[Row]) -> dict[str, float]:
    """Of each method the seconds of a core that a worker uses in a step, which do not depend on the link."""
    found: dict[str, list[float]] = {}
    for row in cells:
        if "processor_seconds" in row:
            found.setdefault(_label([row]), []).append(row["processor_seconds"])
    return {label: mean(values) for label, values in found.items()}


def _table(own: list[Row], processor: dict[str, float]) -> str:
    plain = {row["seed"]: row for row in own if row["method"] == "none" and row["reached"]}
    cells = []
    for method in METHODS:
        rows = [row for row in own if row["method"] == method]
        if not rows:
            continue
        there = [row for row in rows if row["reached"]]
        pairs = [(row, plain[row["seed"]]) for row in there if row["seed"] in plain]
        gains = [_seconds(base) / _seconds(row) for row, base in pairs]
        quiet = [_quiet_seconds(base) / _quiet_seconds(row) for row, base in pairs]
        label = _label(rows)
        known = label in processor and _label([*plain.values()]) in processor if plain else False
        alone = [_alone(base, processor) / _alone(row, processor) for row, base in pairs] if known else []
        cells.append(
            [
                label, str(len(rows)), f"{mean([row['bytes_a_step'] / 1e6 for row in rows]):,.3g}",
                f"{1000 * mean([row['step_seconds'] for row in rows]):,.0f}",
                f"{1000 * mean([row['quiet_step_seconds'] for row in rows]):,.0f}",
                f"{1000 * processor[label]:,.0f}" if label in processor else "-",
                _span([row["steps"] for row in there], "", 0) if there else f"not in {rows[0]['steps']}",
                _span([_seconds(row) for row in there], "", 1) if there else "-",
                _span(gains, "x"), _span(quiet, "x"), _span(alone, "x"),
            ]
        )  # fmt: skip
    headings = ["method", "seeds", "MB a step", "ms a step", "quiet", "processor", "steps to it", "seconds to it"]
    return table([*headings, "sooner there", "quiet", "a core each"], cells)


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


def _alone(row: Row, processor: dict[str, float]) -> float:
    """Seconds to the loss if no worker waited for a core."""
    computing, wire = processor[_label([row])], 8 * row["bytes_a_step"] / row["bits_per_second"]
    if row["method"] == "none":
        return row["steps"] * min(max(computing, wire), row["quiet_step_seconds"])
    measuring = row["longest_step_seconds"] if row["chosen"] is not None else 0.0
    return row["steps"] * (computing + wire) + measuring


def _quiet_seconds(row: Row) -> float:
    measuring = row["longest_step_seconds"] if row["chosen"] is not None else 0.0
    return row["quiet_step_seconds"] * row["steps"] + measuring


if __name__ == "__main__":
    main()
