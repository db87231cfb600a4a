"""Quantized policies in closed loop: post-training, QAT, QAIL with QBC, and SQIL at 4, 3 and 2 bits, three seeds each.

    PYTHONPATH=src:benchmarks python benchmarks/qat_policy.py [--environments CartPole-v1 ...] [--resume] [--smoke]

Experts are controllers: a linear one for CartPole, energy-based swing-up with a PD controller for Pendulum, and
gymnasium's heuristic for LunarLander. A tenth of the executed actions are random, so that the expert also shows how to
recover. The float policy is an MLP cloned from these demonstrations, and every other row starts from it: two hidden
layers of 32 units are quantized, the first and the last layer stay in float. Each seed has its own demonstrations and
float policy. The return is the mean of 20 episodes, the same for all rows. The action error is measured on held-out
demonstrations against the float policy: the share of other actions, or the root mean squared difference.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from common import previous_rows, table, write

from smelt.compression.base import MethodContext
from smelt.compression.methods import METHODS
from smelt.data import Demonstrations, Environment, demonstration_batches
from smelt.measure.machine import machine
from smelt.measure.policies import evaluate_demonstrations, evaluate_episodes
from smelt.models.mlp_policy import MlpPolicy, MlpPolicyConfig
from smelt.models.model import Model

HIDDEN_SIZE, HIDDEN_LAYERS = 32, 2
EPISODES, FIRST_SEED = 20, 1_000_000  # the demonstrations' episodes have other seeds than those that are evaluated
RANDOM_ACTIONS = 0.1
OPTIMIZER, BATCH_SIZE = {"name": "adamw", "lr": 3e-3}, 512
Row = dict[str, Any]
Expert = Callable[[Any, np.ndarray], Any]


def balance(environment: Any, state: np.ndarray) -> int:
    """Push the cart to the side to which the pole falls, and back to the middle."""
    return int(state @ np.array([0.1, 0.3, 1.0, 1.0]) > 0)


def swing_up(environment: Any, state: np.ndarray) -> np.ndarray:
    """Pump energy into the pendulum until it is upright, then hold it there."""
    cosine, sine, velocity = (float(value) for value in state)
    angle = math.atan2(sine, cosine)
    if cosine > 0.9 and abs(velocity) < 3:
        return np.clip(np.array([-10 * angle - 2 * velocity]), -2, 2)
    missing_energy = 5 - (velocity**2 / 6 + 5 * cosine)
    return np.clip(np.array([2 * missing_energy * (math.copysign(1, velocity))]), -2, 2)


def land(environment: Any, state: np.ndarray) -> int:
    from gymnasium.envs.box2d.lunar_lander import heuristic

    return int(heuristic(environment.unwrapped, state))


EXPERTS: dict[str, Expert] = {"CartPole-v1": balance, "Pendulum-v1": swing_up, "LunarLander-v3": land}
ROWS = ("PTQ", "QAT", "QAIL + QBC", "SQIL")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--environments", nargs="+", default=list(EXPERTS), choices=list(EXPERTS))
    parser.add_argument("--steps", type=int, default=20_000, help="of demonstrations")
    parser.add_argument(
        "--epochs", type=float, default=10, help="of each quantized policy; the float policy has three times as many"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--bits", type=int, nargs="+", default=[4, 3, 2])
    parser.add_argument("--resume", action="store_true", help="keep the environments and seeds that are in the results")
    parser.add_argument("--name", default="qat_policy", help="of the results file")
    parser.add_argument("--smoke", action="store_true", help="a short run of one seed that writes no results")
    parser.add_argument("--cell", help=argparse.SUPPRESS)  # run one environment and seed in this process
    options = parser.parse_args()
    if options.smoke:
        options.steps, options.epochs, options.seeds, options.bits = 2_000, 2, [0], [2]
    if options.cell is not None:
        print("ROWS" + json.dumps(run_cell(*json.loads(options.cell), options)), flush=True)
        return
    rows: list[Row] = previous_rows(options.name, options.resume)
    finished = {(row["environment"], row["seed"]) for row in rows}
    for name in options.environments:
        for seed in options.seeds:
            if (name, seed) in finished:
                continue
            rows += start_cell(name, seed, options)
            if not options.smoke:
                write(options.name, rows, text(rows, options), {**machine(), "gymnasium": gymnasium.__version__})
    print(text(rows, options))


def start_cell(name: str, seed: int, options: argparse.Namespace) -> list[Row]:
    """Run all rows of an environment and a seed in a process of their own."""
    flags = ["--steps", str(options.steps), "--epochs", str(options.epochs), "--bits", *map(str, options.bits)]
    command = [sys.executable, __file__, "--cell", json.dumps([name, seed]), *flags]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    found = [line for line in process.stdout.splitlines() if line.startswith("ROWS")]
    if not found:
        raise SystemExit(f"{name}, seed {seed} failed:\n{process.stderr[-3000:]}")
    rows: list[Row] = json.loads(found[0][4:])
    for row in rows:
        print(row, flush=True)
    return rows


def run_cell(name: str, seed: int, options: argparse.Namespace) -> list[Row]:
    torch.manual_seed(seed)
    data, expert_return = demonstrate(name, options.steps, seed)
    cut = int(0.9 * len(data))
    order = np.random.default_rng(seed).permutation(len(data))
    train, held_out = data.take(order[:cut]), data.take(order[cut:])
    dense = clone(train, options.epochs)
    rows = [{"row": "expert", "bits": 64, "return": expert_return}]
    rows.append({"row": "float", "bits": 32, **measure(dense, dense, name, held_out)})
    for bits in options.bits:
        for row in ROWS:
            model = Model(copy.deepcopy(dense.network), source=row)
            begun = time.monotonic()
            batches = demonstration_batches(train, samples=None, batch_size=1024, seed=seed)
            with tempfile.TemporaryDirectory() as folder:
                context = MethodContext(batches=batches, seed=seed, folder=Path(folder))
                METHODS.build(step(row, bits, options)).apply(model, context)
            seconds = time.monotonic() - begun
            rows.append({"row": row, "bits": bits, **measure(model, dense, name, held_out), "seconds": seconds})
    return [{"environment": name, "seed": seed, **row} for row in rows]


def demonstrate(name: str, steps: int, seed: int) -> tuple[Demonstrations, float]:
    """Return steps of the expert with some random actions, and its mean return without these."""
    environment, expert = gymnasium.make(name), EXPERTS[name]
    environment.action_space.seed(seed)
    generator = np.random.default_rng(seed)
    states, actions = [], []
    episode = FIRST_SEED * (1 + seed)
    while len(states) < steps:
        state, done = environment.reset(seed=episode)[0], False
        while not done:
            action = expert(environment, state)
            states.append(state)
            actions.append(action)
            executed = environment.action_space.sample() if generator.random() < RANDOM_ACTIONS else action
            state, _, terminated, truncated, _ = environment.step(executed)
            done = terminated or truncated
        episode += 1
    labels = np.array(actions[:steps])
    labels = labels.astype(np.int64) if labels.ndim == 1 else labels.astype(np.float32)
    return Demonstrations(name, np.array(states[:steps], dtype=np.float32), labels), expert_return(environment, expert)


def expert_return(environment: Any, expert: Expert) -> float:
    """Return the mean return of the expert in the episodes in which policies are evaluated."""
    total = 0.0
    for seed in range(EPISODES):
        state, done = environment.reset(seed=seed)[0], False
        while not done:
            state, reward, terminated, truncated, _ = environment.step(expert(environment, state))
            total, done = total + float(reward), terminated or truncated
    return total / EPISODES


def clone(data: Demonstrations, epochs: float) -> Model:
    """Return a float policy that imitates the demonstrations."""
    discrete = data.action_space == "discrete"
    network = MlpPolicy(
        MlpPolicyConfig(
            data.observations.shape[1], int(data.actions.max()) + 1 if discrete else data.actions.shape[1],
            data.action_space, HIDDEN_SIZE, HIDDEN_LAYERS,
        )
    )  # fmt: skip
    network.observation_mean.copy_(torch.from_numpy(data.observations.mean(0)))
    network.observation_std.copy_(torch.from_numpy(data.observations.std(0)).clamp(min=1e-3))
    batch_size = BATCH_SIZE // 2
    steps = int(3 * epochs * len(data)) // batch_size
    optimizer = torch.optim.AdamW(network.parameters(), lr=OPTIMIZER["lr"], weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    batch = demonstration_batches(data, samples=None, batch_size=len(data), seed=0)[0]
    for _ in range(steps):
        rows = torch.randint(len(data), (batch_size,))
        optimizer.zero_grad()
        network(**{name: tensor[rows] for name, tensor in batch.items()}).loss.backward()
        optimizer.step()
        schedule.step()
    return Model(network.eval(), source="float")


def step(row: str, bits: int, options: argparse.Namespace) -> Row:
    """Return the step of the recipe of a row, with so many bits for weights and activations."""
    weights, inputs = f"int{bits}/row", f"uint{bits}/tensor"
    if row == "PTQ":
        return {"method": "rtn", "format": weights, "input_activations": inputs, "static_activations": True}
    quantizers = {
        "weights": {"quantizer": "lsq", "weight_format": weights},
        "inputs": {"quantizer": "lsq", "bits": bits},
    }
    training = {"epochs": options.epochs, "batch_size": BATCH_SIZE, "optimizer": OPTIMIZER}
    losses = {"losses": [{"loss": "labels"}]} if row == "QAT" else {}
    return {"method": "sqil" if row == "SQIL" else "qail", **quantizers, **training, **losses}


@torch.no_grad()
def measure(model: Model, dense: Model, name: str, held_out: Demonstrations) -> Row:
    returns = evaluate_episodes(model, Environment(name, EPISODES)).items
    states = torch.from_numpy(held_out.observations)
    ours, theirs = (each.network(states).logits for each in (model, dense))
    discrete = held_out.action_space == "discrete"
    error = (
        (ours.argmax(-1) != theirs.argmax(-1)).float().mean() if discrete else (ours - theirs).square().mean().sqrt()
    )
    return {
        "return": float(returns.mean()),
        "returns": returns.tolist(),
        "action_error": float(error),
        "against_expert": evaluate_demonstrations(model, held_out).value,
    }


def text(rows: list[Row], options: argparse.Namespace) -> str:
    parts = ["# Quantized policies in closed loop\n"]
    for name in dict.fromkeys(row["environment"] for row in rows):
        cells = []
        here = [row for row in rows if row["environment"] == name]
        for bits, label in dict.fromkeys((row["bits"], row["row"]) for row in here):
            same = [row for row in here if (row["bits"], row["row"]) == (bits, label)]
            returns = [row["return"] for row in same]
            errors = [row["action_error"] for row in same if "action_error" in row]
            spread = f" ± {statistics.stdev(returns):.1f}" if len(returns) > 1 else ""
            cells.append([
                f"W{bits}A{bits}" if bits < 32 else "", label, f"{statistics.mean(returns):.1f}{spread}",
                ", ".join(f"{value:.1f}" for value in returns), f"{statistics.mean(errors):.4f}" if errors else "",
            ])  # fmt: skip
        parts.append(f"## {name}\n\n{table(['bits', 'policy', 'return', 'by seed', 'action error'], cells)}\n")
    cells_expected, cells_run = len(EXPERTS) * len(options.seeds), len({(r["environment"], r["seed"]) for r in rows})
    missing = (
        "" if cells_run >= cells_expected else f" {cells_run} of {cells_expected} environments and seeds were run."
    )
    parts.insert(
        1,
        f"Mean return of {EPISODES} episodes, with the standard deviation over {len(options.seeds)} seeds; higher is "
        f"better. {options.steps:,} steps of demonstrations, MLPs of {HIDDEN_LAYERS} quantized hidden layers of "
        f"{HIDDEN_SIZE} units, {options.epochs:g} epochs. The action error is against the float policy: share of other "
        f"actions, or root mean squared difference.{missing}\n",
    )
    return "\n".join(parts)


if __name__ == "__main__":
    main()
