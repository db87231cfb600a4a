"""Kill runs at random moments, resume them, and compare every byte with uninterrupted runs, for every method.

    python benchmarks/interrupt.py --kills 60 --seed 0
    python benchmarks/interrupt.py --resume      # go on with the recipes that are not in the results yet
    python benchmarks/interrupt.py --resume --recipes ltp       # only these

A run is killed (SIGKILL) at a moment drawn uniformly over the time of the uninterrupted run or, with equal chances, of
its steps, which are a small part of it if a method is fast; half of the resumed runs are killed once more. Every
registered method is covered, and a recipe of three steps. The models are tiny and random: only bytes matter. Runs are
forked from one process with all imports done, in one thread; the check of the result in a new process is left out,
because it writes nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import string
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from common import previous_rows, table, write
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedTokenizerFast,
    ResNetConfig,
    ResNetForImageClassification,
)

import smelt.compression.recipe.plan
import smelt.compression.recipe.run
from smelt.cli.main import main as smelt_main
from smelt.compression.methods import METHODS
from smelt.models.mlp_policy import MlpPolicy, MlpPolicyConfig

PRUNE = {"budget": {"parameters": 0.8}}
GROUP = {"group_size": 16}
INPUTS = {**GROUP, "input_activations": "int8"}
TRAIN = {"epochs": 2, "batch_size": 4, "checkpoint_every": 2}
INT4 = {**TRAIN, "weights": {"quantizer": "minmax", "weight_format": "int4/row"}}
BRECQ = {"iterations": 6, "activation_iterations": 6}
LSQ = {"weights": {"quantizer": "lsq", "weight_format": "int4/row"}, "inputs": {"quantizer": "lsq", "bits": 4}}
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
    **{
        name: ("experts", [{"method": name, "budget": {"parameters": 0.8}}])
        for name in ("reap", "expert-frequency", "expert-merging", "expert-random")
    },
    "carve-experts": (
        "experts, carved",
        [
            {
                "method": "carve-experts",
                "domains": ["ROOT/text.txt", "ROOT/sums.txt"],
                "samples": 8,
                "seq_len": 32,
                "router_epochs": 2.0,
                **TRAIN,
            }
        ],
    ),
    "hap": ("Hessian", [{"method": "hap", **PRUNE, "probes": 4, "implant": 0.1}]),
    "head-gates": ("gates", [{"method": "head-gates", "budget": {"heads": 0.5}, **TRAIN}]),
    "magnitude, finetune": ("training", [{"method": "magnitude", **PRUNE}, {"method": "finetune", **TRAIN}]),
    **{name: ("training", [{"method": name, **INT4}]) for name in ("qat", "qlora", "tsld")},
    "efficientqat": ("training", [{"method": "efficientqat", **INT4, "block_epochs": 2}]),
    "teacher-intervention": ("training", [{"method": "teacher-intervention", **INT4, "intervention_steps": 2}]),
    "matquant, slice": (
        "training",
        [
            {"method": "matquant", **TRAIN, "weights": {"quantizer": "nested", "weight_format": "int8/row"}},
            {"method": "slice", "bits": 4},
        ],
    ),
    "qdpo": (
        "preferences",
        [
            {
                "method": "qdpo",
                **TRAIN,
                "max_new_tokens": 8,
                "weights": {"quantizer": "minmax", "weight_format": "int2-asym/16"},
            }
        ],
    ),
    **{name: ("policies", [{"method": name, **LSQ, **TRAIN}]) for name in ("qail", "sqil")},
    "integer-only": ("integer networks", [{"method": "integer-only"}]),
    "integer-qat": ("integer networks", [{"method": "integer-qat", **TRAIN}]),
    "speq": ("convolutions", [{"method": "speq", **TRAIN}]),
    "brecq": ("convolutions", [{"method": "brecq", "bits": 4, "input_activations": "int8", **BRECQ}]),
    "qdrop": ("convolutions", [{"method": "brecq", "bits": 4, "input_activations": "int8", **BRECQ, "qdrop": 0.5}]),
    "nce, qat": (
        "convolutions",
        [
            {
                "method": "nce",
                "budget": {"macs": 1.0},
                "epochs": 3,
                "batch_size": 16,
                "width_lr": 0.2,
                "threshold": 0.14,
            },
            {"method": "qat", "weights": {"quantizer": "sawb"}, "inputs": {"quantizer": "pact"}, **TRAIN},
        ],
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
# By kind: the model, and the data that differs from the usual text. ROOT stands for the folder of both.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "token pruning": ("classifier", {"source": "ROOT/rows.csv", "samples": 40}),
    "Hessian": ("classifier", {"source": "ROOT/rows.csv", "samples": 40}),
    "integer networks": ("classifier", {"source": "ROOT/rows.csv", "samples": 40}),
    "experts": ("mixture", {}),
    "preferences": ("model", {"source": "ROOT/prompts.jsonl"}),
    "policies": ("policy", {"source": "ROOT/demonstrations.npz", "samples": 40}),
    "convolutions": ("resnet", {"source": "ROOT/images.npz", "samples": 40}),
}
WITH_TIMES = ("measurements.json", "report.html", "passport.json")
PHASES = ("starting", "measuring the source", "inside a step", "between steps", "measuring and saving the result")


_DECODER = {
    "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 100,
    "max_position_embeddings": 128,
}  # fmt: skip


def check_coverage() -> None:
    """Raise if a registered method is in no recipe."""
    missing = set(METHODS) - {step["method"] for _, steps in RECIPES.values() for step in steps}
    if missing:
        raise SystemExit(f"no recipe uses {', '.join(sorted(missing))}")


def build_model(folder: Path) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(**_DECODER, num_hidden_layers=4, head_dim=8)
    LlamaForCausalLM(config).save_pretrained(folder)
    _tokenizer().save_pretrained(folder)


def build_mixture(folder: Path) -> None:
    torch.manual_seed(0)
    config = MixtralConfig(**_DECODER, num_hidden_layers=2, num_local_experts=4, num_experts_per_tok=2)
    MixtralForCausalLM(config).save_pretrained(folder)
    _tokenizer().save_pretrained(folder)


def build_resnet(folder: Path, data: Path) -> None:
    """Write a classifier of images, and labeled images."""
    torch.manual_seed(0)
    sizes = {"embedding_size": 8, "hidden_sizes": [16, 24], "depths": [1, 2], "layer_type": "basic", "num_labels": 5}
    ResNetForImageClassification(ResNetConfig(**sizes, image_size=32)).save_pretrained(folder)
    processor = {"do_resize": False, "do_normalize": True, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    draw = np.random.Generator(np.random.PCG64(0))
    arrays = {}
    for split, count in (("train", 80), ("test", 20)):
        arrays[f"x_{split}"] = draw.integers(0, 256, (count, 32, 32, 3)).astype(np.uint8)
        arrays[f"y_{split}"] = np.arange(count) % 5
    np.savez(data, **arrays)


def build_policy(folder: Path, data: Path) -> None:
    """Write a policy, and demonstrations."""
    torch.manual_seed(0)
    MlpPolicy(MlpPolicyConfig(action_size=3, hidden_size=16)).save_pretrained(folder)
    observations = np.random.Generator(np.random.PCG64(0)).standard_normal((80, 4)).astype(np.float32)
    np.savez(data, observations=observations, actions=observations[:, :3].argmax(-1))


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


def run_whole(arguments: list[str], out: Path, log: Path, steps: int) -> tuple[float, float]:
    """Run to the end; return the seconds it took, and those from the first sign of a step to the end of the last."""
    began, work = time.perf_counter(), out.with_name(out.name + ".partial")
    process = start([*arguments, "-o", str(out)], log)
    inside: list[float] = []
    while not os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT):
        if phase(work, steps) in PHASES[2:4]:
            inside.append(time.perf_counter() - began)
        time.sleep(0.001)
    seconds = time.perf_counter() - began
    check_exit(arguments, os.waitpid(process, 0)[1], log)
    return seconds, inside[-1] - inside[0] if inside else 0.0


def run(
    arguments: list[str], log: Path, seconds: float | None = None, begun: Callable[[], bool] = lambda: True
) -> bool:
    """Run to the end, or kill so many seconds after something has begun; return whether it was killed."""
    process = start(arguments, log)
    began = None
    while seconds is not None:
        began = time.perf_counter() if began is None and begun() else began
        if began is not None and time.perf_counter() - began >= seconds:
            os.kill(process, signal.SIGKILL)
            break
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            return check_exit(arguments, status, log)
        time.sleep(0.001)
    return check_exit(arguments, os.waitpid(process, 0)[1], log)


def check_exit(arguments: list[str], status: int, log: Path) -> bool:
    """Return whether a process was killed; stop if it ended with an error."""
    code = os.waitstatus_to_exitcode(status)
    if code not in (0, -signal.SIGKILL):
        raise SystemExit(f"{' '.join(arguments)} ended with {code}:\n{log.read_text()}")
    return code == -signal.SIGKILL


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


def interrupted(
    arguments: list[str], out: Path, log: Path, steps: int, times: tuple[float, float], draw: random.Random
) -> Counter[str]:
    """Run to the end with one or two kills; count them by what the run was doing.

    `times` are the seconds of a whole run and of its steps; the first kill is drawn from one of them.
    """
    work = out.with_name(out.name + ".partial")
    in_step = draw.random() < 0.5
    limits = [draw.uniform(0, times[in_step]), *([draw.uniform(0, times[0])] if draw.random() < 0.5 else [])]
    kills: Counter[str] = Counter()
    for number, limit in enumerate([*limits, None]):
        resume = ["--resume"] if (work / "run.json").exists() else []
        begun = (lambda: phase(work, steps) in PHASES[2:4]) if in_step and number == 0 else lambda: True
        killed = run([*arguments, "-o", str(out), *resume], log, limit, begun)
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
        build_mixture(root / "mixture")
        build_classifier(root / "classifier", root / "rows.csv")
        build_resnet(root / "resnet", root / "images.npz")
        build_policy(root / "policy", root / "demonstrations.npz")
        text = "the quick brown fox jumps over the lazy dog. "
        (root / "text.txt").write_text(text * 200)
        (root / "sums.txt").write_text("one and two is three. two and two is four. " * 200)
        prompts = [{"prompt": text[start : start + 10]} for start in range(30)]
        (root / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)))
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
    model, more = MODELS.get(kind, ("model", {}))
    data = {"source": "ROOT/text.txt", "samples": 12, "seq_len": 32, "batch_size": 2, **more}
    evaluate = {"context": 64, "limit": 1000, **({"source": "ROOT/text.txt"} if kind == "preferences" else {})}
    recipe = yaml.safe_dump({"data": data, "evaluate": evaluate, "steps": steps}).replace("ROOT", str(root))
    (folder / "recipe.yaml").write_text(recipe)
    arguments = ["compress", str(root / model), "-r", str(folder / "recipe.yaml"), "--no-speed"]
    times = run_whole(arguments, folder / "whole", folder / "log", len(steps))
    whole = contents(folder / "whole")
    same, found = list[bool](), Counter[str]()
    while sum(found.values()) < kills:
        out = folder / f"out-{len(same)}"
        found.update(interrupted(arguments, out, folder / "log", len(steps), times, draw))
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
        "`benchmarks/interrupt.py`: SIGKILL at moments drawn uniformly over the time of the uninterrupted run or of "
        "its steps, then `--resume`. Same bytes: of every file but those with times.",
        table(["steps", *columns], [[kind, *(str(n[column]) for column in columns)] for kind, n in kinds.items()]),
        table(["killed while", "kills"], [[name, str(moments[name])] for name in PHASES]),
        *([f"Not run yet: {', '.join(left)}."] if left else []),
    ]
    write("interrupt", rows, "\n\n".join(text))


if __name__ == "__main__":
    main()
