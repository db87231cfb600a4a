"""Kill runs at random moments, resume them, and compare every byte with uninterrupted runs, for every method.

    python benchmarks/interrupt.py --kills 60 --seed 0
    python benchmarks/interrupt.py --resume      # go on with the recipes that are not in the results yet
    python benchmarks/interrupt.py --resume --recipes ltp       # only these

A run is killed (SIGKILL) at a moment drawn uniformly over the time of the uninterrupted run; half of the resumed runs
are killed once more. Every registered method is covered, and a recipe of three steps. The model is tiny and random:
only bytes matter. Runs are forked from one process with all imports done, in one thread; the check of the result in a
new process is left out, because it writes nothing.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import string
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import torch
import yaml
from common import previous_rows, table, write
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

import smelt.compression.recipe.plan
import smelt.compression.recipe.run
from smelt.cli.main import main as smelt_main
from smelt.compression.methods import METHODS

PRUNE = {"budget": {"parameters": 0.8}}
GROUP = {"group_size": 16}
INPUTS = {**GROUP, "input_activations": "int8"}
RECIPES: dict[str, tuple[str, list[dict[str, Any]]]] = {
    **{
        name: ("pruning", [{"method": name, **PRUNE}]) for name in ("magnitude", "random", "taylor", "wanda-sp", "flap")
    },
    "attention-reuse": ("attention maps", [{"method": "attention-reuse", "separate": 0}]),
    "attention-reuse, distilled": (
        "attention maps, distilled",
        [{"method": "attention-reuse", "separate": 0, "epochs": 4, "batch_size": 4, "checkpoint_every": 3}],
    ),
    **{name: ("depth and width", [{"method": name, **PRUNE}]) for name in ("shortgpt", "minitron-depth", "slicegpt")},
    "minitron": ("depth and width", [{"method": "minitron", **PRUNE}]),
    "ltp": (
        "token pruning",
        [{"method": "ltp", "budget": {"macs": 0.7}, "epochs": 2, "batch_size": 4, "trials": 2, "checkpoint_every": 3}],
    ),
    **{
        name: ("token pruning", [{"method": name, "budget": {"macs": 0.8}, "epochs": 2, "checkpoint_every": 3}])
        for name in ("token-topk", "token-ratio")
    },
    "fisher, full repair": ("pruning", [{"method": "fisher", **PRUNE, "repair": "full"}]),
    "fisher, tuned": ("pruning", [{"method": "fisher", **PRUNE, "repair": "tune"}]),
    **{name: ("quantization", [{"method": name, **GROUP}]) for name in ("rtn", "gptq", "hqq")},
    **{name: ("quantization, scales searched", [{"method": name, **GROUP}]) for name in ("awq", "aqas")},
    "smoothquant": ("quantization, scales searched", [{"method": "smoothquant", **INPUTS}]),
    "omniquant": ("quantization, learned", [{"method": "omniquant", **GROUP, "epochs": 2}]),
    "flexround": ("quantization, learned", [{"method": "flexround", **GROUP, "iterations": 6}]),
    "mixed": ("bit-width search", [{"method": "mixed", **GROUP, "bits": 4.5}]),
    "rotate, rtn": ("rotation", [{"method": "rotate"}, {"method": "rtn", **GROUP}]),
    "quarot": ("rotation", [{"method": "quarot", **INPUTS}]),
    "spinquant": ("rotation, learned", [{"method": "spinquant", **INPUTS, "steps": 6}]),
    "rtn, rilq": (
        "adapters, distilled",
        [{"method": "rtn", **GROUP}, {"method": "rilq", "rank": 2, "updates": 6, "validate_every": 2}],
    ),
    "kv-cache": ("KV cache", [{"method": "kv-cache", "format": "int4-asym/8@float16"}]),
    "wanda-sp, gptq, kv-cache": (
        "three steps",
        [
            {"method": "wanda-sp", **PRUNE, "ffn_multiple": 16, "head_multiple": 2},
            {"method": "gptq", **GROUP},
            {"method": "kv-cache", "format": "int4-asym/8@float16"},
        ],
    ),
}
WITH_TIMES = ("measurements.json", "report.html", "passport.json")
PHASES = ("starting", "measuring the source", "inside a step", "between steps", "measuring and saving the result")


def check_coverage() -> None:
    """Raise if a registered method is in no recipe."""
    missing = set(METHODS) - {step["method"] for _, steps in RECIPES.values() for step in steps}
    if missing:
        raise SystemExit(f"no recipe uses {', '.join(sorted(missing))}")


def build_model(folder: Path) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4}
    config = LlamaConfig(**sizes, num_hidden_layers=4, head_dim=8, vocab_size=100, max_position_embeddings=128)
    LlamaForCausalLM(config).save_pretrained(folder)
    _tokenizer().save_pretrained(folder)


def build_classifier(folder: Path, data: Path) -> None:
    """Write a classifier of text, and labeled rows."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 6}
    BertForSequenceClassification(BertConfig(**sizes, vocab_size=100, max_position_embeddings=64)).save_pretrained(
        folder
    )
    _tokenizer().save_pretrained(folder)
    draw = random.Random(0)
    words = ("fox", "dog", "quick", "lazy", "brown")
    rows = [(" ".join(draw.choices(words, k=draw.randint(2, 6))), draw.randint(0, 1)) for _ in range(80)]
    data.write_text("text,label\n" + "".join(f"{text},{label}\n" for text, label in rows))


def _tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {token: number for number, token in enumerate(["[UNK]", *string.ascii_lowercase, " ", "."])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="[UNK]", eos_token=".", pad_token=" ")


def start(arguments: list[str], log: Path) -> int:
    """Fork a run of `smelt`; return its process id."""
    process = os.fork()
    if process:
        return process
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    smelt.compression.recipe.run.verify = lambda *_: None
    smelt.compression.recipe.plan.matrix_speed = lambda *_: 1e10
    try:
        smelt_main(arguments)
    except SystemExit as ended:
        os._exit(int(ended.code or 0))
    os._exit(1)


def run(arguments: list[str], log: Path, seconds: float | None = None) -> tuple[bool, float]:
    """Run to the end, or kill after some seconds; return whether it was killed, and the time."""
    began = time.perf_counter()
    process = start(arguments, log)
    if seconds is not None:
        while time.perf_counter() - began < seconds:
            if os.waitpid(process, os.WNOHANG)[0]:
                return False, time.perf_counter() - began
            time.sleep(0.001)
        os.kill(process, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    if code not in (0, -signal.SIGKILL):
        raise SystemExit(f"{' '.join(arguments)} ended with {code}:\n{log.read_text()}")
    return code == -signal.SIGKILL, time.perf_counter() - began


def phase(work: Path, steps: int) -> str:
    """Return what the killed run was doing, from what it left."""
    if not (work / "run.json").exists():
        return PHASES[0]
    finished = sum((work / f"step-{position}.json").exists() for position in range(steps))
    if finished == steps:
        return PHASES[4]
    if (work / f"step-{finished}-work").exists() or (work / f"step-{finished}").exists():
        return PHASES[2]
    return PHASES[3] if finished else PHASES[1]


def contents(folder: Path) -> dict[str, bytes]:
    files = [file for file in folder.rglob("*") if file.is_file() and file.name not in WITH_TIMES]
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in files}


def interrupted(arguments: list[str], out: Path, log: Path, seconds: float, draw: random.Random) -> Counter[str]:
    """Run to the end with one or two kills; count them by what the run was doing."""
    work = out.with_name(out.name + ".partial")
    steps = len(yaml.safe_load(Path(arguments[arguments.index("-r") + 1]).read_text())["steps"])
    limits = [draw.uniform(0, seconds), *([draw.uniform(0, seconds)] if draw.random() < 0.5 else [])]
    kills: Counter[str] = Counter()
    for limit in [*limits, None]:
        resume = ["--resume"] if (work / "run.json").exists() else []
        killed, _ = run([*arguments, "-o", str(out), *resume], log, limit)
        kills.update([PHASES[4] if out.exists() else phase(work, steps)] if killed else [])
        if out.exists():
            break
    return kills


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--kills", type=int, default=60)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--resume", action="store_true")
    options.add_argument("--recipes", nargs="+", choices=list(RECIPES), help="run only these")
    chosen = options.parse_args()
    if chosen.recipes is None:
        check_coverage()
    torch.set_num_threads(1)
    per_recipe = -(-chosen.kills // len(RECIPES))
    rows = previous_rows("interrupt", chosen.resume)
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        build_model(root / "model")
        build_classifier(root / "classifier", root / "rows.csv")
        (root / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
        for number, (name, (kind, steps)) in enumerate(RECIPES.items()):
            if name in {row["recipe"] for row in rows} or name not in (chosen.recipes or RECIPES):
                continue
            draw = random.Random(f"{chosen.seed} {name}")
            same, found = compare(root, number, kind, steps, per_recipe, draw)
            counts = {"kills": sum(found.values()), "runs compared": len(same), "same bytes": sum(same)}
            rows.append({"recipe": name, "kind": kind, "seed": chosen.seed, **counts, "moments": dict(found)})
            report(rows)
    if any(row["same bytes"] != row["runs compared"] for row in rows):
        sys.exit("a resumed run differs from the uninterrupted one")


def compare(
    root: Path, number: int, kind: str, steps: list[dict[str, Any]], kills: int, draw: random.Random
) -> tuple[list[bool], Counter[str]]:
    """Kill runs of one recipe so many times; return whether each result was equal, and when they were killed."""
    folder = root / str(number)
    folder.mkdir()
    model = root / ("classifier" if kind == "token pruning" else "model")
    data: dict[str, Any] = {"source": str(root / "text.txt"), "samples": 12, "seq_len": 32, "batch_size": 2}
    if kind == "token pruning":
        data |= {"source": str(root / "rows.csv"), "samples": 40}
    recipe = {"data": data, "evaluate": {"context": 64, "limit": 1000}, "steps": steps}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    arguments = ["compress", str(model), "-r", str(folder / "recipe.yaml"), "--no-speed"]
    _, seconds = run([*arguments, "-o", str(folder / "whole")], folder / "log")
    whole = contents(folder / "whole")
    same, found = list[bool](), Counter[str]()
    while sum(found.values()) < kills:
        out = folder / f"out-{len(same)}"
        found.update(interrupted(arguments, out, folder / "log", seconds, draw))
        same.append(contents(out) == whole)
    return same, found


def report(rows: list[dict[str, Any]]) -> None:
    """Write the results up to now, by kind of step and by moment."""
    columns = ("kills", "runs compared", "same bytes")
    kinds: dict[str, Counter[str]] = defaultdict(Counter)
    for row in rows:
        for kind in (row["kind"], "all"):
            kinds[kind].update({column: row[column] for column in columns})
    kinds["all"] = kinds.pop("all")
    moments = sum((Counter(row["moments"]) for row in rows), Counter[str]())
    left = [name for name in RECIPES if name not in {row["recipe"] for row in rows}]
    text = [
        "# Killed at random moments",
        "`benchmarks/interrupt.py`: SIGKILL at moments drawn uniformly over the time of the uninterrupted run, then "
        "`--resume`. Same bytes: of every file but those with times.",
        table(["steps", *columns], [[kind, *(str(n[column]) for column in columns)] for kind, n in kinds.items()]),
        table(["killed while", "kills"], [[name, str(moments[name])] for name in PHASES]),
        *([f"Not run yet: {', '.join(left)}."] if left else []),
    ]
    write("interrupt", rows, "\n\n".join(text))


if __name__ == "__main__":
    main()
