"""What Smelt does with every architecture: load, prune, quantize, serve, export, on tiny random networks.

    python benchmarks/architectures.py [NAME ...] [--update]

Every cell is checked, not only run:
- load: the outputs equal those of the network that transformers saved;
- prune: `magnitude` with 85 % of the block parameters left, and then every second unit of each part removed: the
  result computes what the network with masked units computes, and is the same after saving and loading;
- quantize: 8-bit `rtn` and, with data, 4-bit `gptq` of the linear layers are the same after saving and loading;
- serve: greedy tokens of two requests at once equal those of transformers' `generate`; the cell names the path;
- export: the formats that are written and read back.
A refusal is written as it is.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from common import RESULTS, previous_rows, table, write
from torch import Tensor
from transformers import PreTrainedModel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.architectures import ARCHITECTURES, Architecture

from smelt.compression.base import METHODS, MethodContext
from smelt.compression.calibration.masks import masked, unit_masks
from smelt.compression.methods import METHODS as _REGISTERED  # noqa: F401  (registers the methods)
from smelt.errors import SmeltError
from smelt.export.run import EXPORTS, export
from smelt.models.artifact import load_artifact, save_artifact
from smelt.models.inputs import random_inputs
from smelt.models.load import load
from smelt.models.model import Model
from smelt.models.surgery import keep_units
from smelt.serve.engine.engine import Engine
from smelt.serve.engine.sampling_params import SamplingParams

CHECKS = ("load", "prune", "quantize", "serve", "export")
KEEP, PROMPTS, NEW_TOKENS = 0.85, ((3, 30), (5, 21)), 12  # share of parameters; first token and length of prompts


@torch.no_grad()
def outputs(network: PreTrainedModel) -> list[Tensor]:
    """Return all floating-point outputs on fixed inputs."""
    result = network(**random_inputs(network))
    return [value.float() for value in result.values() if isinstance(value, Tensor) and value.is_floating_point()]


def difference(first: Sequence[Tensor], second: Sequence[Tensor]) -> float:
    """Return the largest difference, relative to the spread of the outputs."""
    pairs = list(zip(first, second, strict=True))
    return max(float((a - b).abs().max() / (a.std() + 1e-12)) for a, b in pairs)


def check_load(row: Architecture, folder: Path) -> dict[str, Any]:
    original = row.save(folder)
    error = difference(outputs(original), outputs(load(folder).network))
    return {"ok": error < 1e-4, "error": error}


def check_prune(row: Architecture, folder: Path) -> dict[str, Any]:
    model = load(folder)
    step = METHODS.build({"method": "magnitude", "budget": {"parameters": KEEP}, "alignment": 1})
    dense = copy.deepcopy(model.network)
    facts = step.apply(model, MethodContext())
    for part in model.anatomy.parts:
        if part.fixed is None:
            keep_units(model.network, part, range(0, part.units, 2))
    anatomy = Model(dense).anatomy
    kept = {part.name: part.kept for part in model.anatomy.parts}
    masks = unit_masks(anatomy)
    for part, mask in zip(anatomy.parts, masks, strict=True):
        mask.zero_()[list(kept[part.name])] = 1
    with masked(anatomy, masks):
        error = difference(outputs(dense), outputs(model.network))
    kinds = sorted({part.kind for part in model.anatomy.parts if part.units < part.original_units})
    return {
        "ok": error < 1e-3 and saves(model) and bool(kinds), "error": error, "what": ", ".join(kinds),
        "removed": facts["parameters_removed"],
    }  # fmt: skip


def check_quantize(row: Architecture, folder: Path) -> dict[str, Any]:
    model = load(folder)
    before, size = outputs(model.network), model.network.get_memory_footprint()
    facts = METHODS.build({"method": "rtn", "bits": 8, "group_size": -1}).apply(model, MethodContext())
    error = difference(before, outputs(model.network))
    result = {"ok": saves(model), "error": error, "layers": facts["layers_quantized"], "size": size}
    calibrated = load(folder)
    inputs = random_inputs(calibrated.network)
    step = METHODS.build({"method": "gptq", "bits": 4, "group_size": -1, "damping": 0.1})
    try:
        layers = step.apply(calibrated, MethodContext(batches=[inputs]))["layers_quantized"]
        result["what"] = "rtn, gptq" if layers == facts["layers_quantized"] and saves(calibrated) else "rtn"
    except SmeltError as refusal:
        result |= {"what": "rtn", "gptq": str(refusal)}
    return result


def saves(model: Model) -> bool:
    """Return whether the model computes the same bits after saving and loading."""
    with tempfile.TemporaryDirectory() as folder:
        save_artifact(model, Path(folder))
        return difference(outputs(model.network), outputs(load_artifact(Path(folder)).network)) == 0


def check_serve(row: Architecture, folder: Path) -> dict[str, Any]:
    model = load(folder)
    if model.task != "language":
        return {"ok": False, "refusal": "not a language model"}
    vocabulary = model.network.config.get_text_config().vocab_size
    prompts = [[(first + 7 * i) % (vocabulary - 10) + 3 for i in range(length)] for first, length in PROMPTS]
    expected = [greedy(model.network, prompt) for prompt in prompts]
    engine = Engine(load(folder), max_model_len=96, max_num_batched_tokens=16)
    answers = engine.generate(prompts, SamplingParams(max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True))
    tokens = [answer.tokens for answer in answers]
    return {"ok": tokens == expected, "what": engine.runner.backend, "tokens": tokens, "expected": expected}


@torch.no_grad()
def greedy(network: PreTrainedModel, prompt: list[int]) -> list[int]:
    """Generate greedily with transformers."""
    network.generation_config.eos_token_id = None
    ids = torch.tensor([prompt])
    tokens = network.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0
    )
    return list(tokens[0, len(prompt) :].tolist())


def check_export(row: Architecture, folder: Path) -> dict[str, Any]:
    written, refusals = [], {}
    for name in EXPORTS:
        try:
            with tempfile.TemporaryDirectory() as out:
                model = replace(load(folder), tokenizer=None)  # GGUF takes few tokenizers, and not this one
                if name == "compressed-tensors":
                    METHODS.build({"method": "rtn", "bits": 8, "group_size": -1, "symmetric": True}).apply(
                        model, MethodContext()
                    )
                export(model, name, Path(out) / "out")
            written.append(name)
        except SmeltError as refusal:
            refusals[name] = str(refusal)
    return {"ok": bool(written), "what": ", ".join(written), "refusals": refusals}


def measure(row: Architecture) -> dict[str, Any]:
    results: dict[str, Any] = {"architecture": row.model_type}
    with tempfile.TemporaryDirectory() as folder:
        for name in CHECKS:
            results[name] = attempt(globals()[f"check_{name}"], row, Path(folder))
            if name == "load" and not results[name]["ok"]:
                break
    return results


def attempt(check: Callable[[Architecture, Path], dict[str, Any]], row: Architecture, folder: Path) -> dict[str, Any]:
    try:
        return check(row, folder)
    except SmeltError as refusal:
        return {"ok": False, "refusal": str(refusal).replace(str(folder), "MODEL")}
    except Exception as error:  # a bug, which the table shows instead of hiding the other rows
        return {"ok": False, "bug": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}


def report(rows: list[dict[str, Any]]) -> str:
    def cell(row: dict[str, Any], check: str) -> str:
        result = row.get(check, {"ok": False})
        if "bug" in result:
            return "bug"
        return (result.get("what") or "yes") if result["ok"] else "no"

    counts = {check: sum(row.get(check, {"ok": False})["ok"] for row in rows) for check in CHECKS}
    total = ", ".join(f"{check} {count}" for check, count in counts.items())
    cells = [[row["architecture"], *(cell(row, check) for check in CHECKS)] for row in rows]
    return (
        f"# Architectures\n\nTiny random networks of {len(rows)} architectures; {total}.\n\n"
        "A cell says what was done and checked (see the script); `serve` names the path that computes a step.\n\n"
        + table(["architecture", *CHECKS], cells)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="model types; all by default, which also writes the results")
    parser.add_argument("--update", action="store_true", help="replace the rows of these types in the results")
    arguments = parser.parse_args()
    names = arguments.names
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    rows = []
    for row in [ARCHITECTURES[name] for name in names or ARCHITECTURES]:
        rows.append(measure(row))
        line = {check: _short(rows[-1].get(check, {"ok": False})) for check in CHECKS}
        print(f"{row.model_type:16}", json.dumps(line), flush=True)
    if arguments.update:
        measured = {row["architecture"]: row for row in rows}
        rows = [measured.get(row["architecture"], row) for row in previous_rows("architectures", resume=True)]
    if not names or arguments.update:
        write("architectures", rows, report(rows))
        print((RESULTS / "architectures.md").read_text())


def _short(result: dict[str, Any]) -> str:
    if result["ok"]:
        return result.get("what") or "yes"
    return str(result.get("bug") or result.get("refusal") or result.get("refusals") or "no")


if __name__ == "__main__":
    main()
