"""Every method computes on the device of the network: nothing is left on the CPU, as a fake accelerator notices."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from smelt.compression.methods import METHODS

ROOT = Path(__file__).parents[2]
PRUNED, GROUPS = {"budget": {"parameters": 0.8}}, {"group_size": 16}
TRAINED = {"epochs": 1, "batch_size": 4}
INT4 = {"quantizer": "lsq", "weight_format": "int4/16"}
MINMAX = {"quantizer": "minmax", "weight_format": "int4/16"}
NESTED = {"quantizer": "nested", "weight_format": "int8/row@float32"}
CARVED = {"samples": 16, "seq_len": 32, "router_epochs": 1, "router_layers": 1, "router_width": 16}
INPUTS = {**GROUPS, "input_activations": "int8"}
CASES: list[tuple[str, str, dict[str, Any]]] = [
    *(
        ("llama", name, PRUNED)
        for name in ("magnitude", "random", "taylor", "wanda-sp", "flap", "shortgpt", "minitron")
    ),
    *(("llama", name, PRUNED) for name in ("minitron-depth", "slicegpt")),
    ("llama", "fisher", {**PRUNED, "repair": "tune"}),
    ("bert", "fisher", {**PRUNED, "repair": "full"}),
    ("resnet", "fisher", PRUNED),
    ("bert", "hap", {**PRUNED, "probes": 2, "implant": 0.1}),
    ("resnet", "hap", {**PRUNED, "probes": 2, "implant": 0.1}),
    *(("mixtral", name, PRUNED) for name in ("expert-frequency", "expert-merging", "expert-random", "reap")),
    *(("llama", name, GROUPS) for name in ("rtn", "gptq", "hqq")),
    *(("llama", name, {**GROUPS, "search_tokens": 16}) for name in ("awq", "aqas")),
    *(("resnet", name, {}) for name in ("rtn", "gptq")),
    ("llama", "smoothquant", INPUTS),
    ("llama", "omniquant", {**GROUPS, "epochs": 1}),
    ("llama", "flexround", {**GROUPS, "iterations": 2}),
    ("llama", "mixed", {**GROUPS, "bits": 4.5}),
    ("llama", "rotate", {}),
    ("llama", "quarot", INPUTS),
    ("llama", "spinquant", {**INPUTS, "steps": 1}),
    ("llama", "kv-cache", {"format": "int4-asym/8@float16"}),
    ("resnet", "brecq", {"bits": 2, "input_activations": "int4", "iterations": 2, "activation_iterations": 2}),
    ("bert", "integer-only", {}),
    ("llama", "finetune", TRAINED),
    ("resnet", "finetune", TRAINED),
    ("llama", "qat", {**TRAINED, "weights": INT4}),
    ("bert", "qat", {**TRAINED, "weights": INT4}),
    ("resnet", "qat", {**TRAINED, "weights": {"quantizer": "dorefa"}, "inputs": {"quantizer": "dorefa"}}),
    ("resnet", "qat", {**TRAINED, "weights": {"quantizer": "sawb"}, "inputs": {"quantizer": "pact"}}),
    ("llama", "tsld", TRAINED),
    ("resnet", "speq", TRAINED),
    ("bert", "teacher-intervention", {**TRAINED, "intervention_steps": 2}),
    ("llama", "efficientqat", {**TRAINED, "weights": MINMAX}),
    ("llama", "matquant", {**TRAINED, "weights": NESTED}),
    ("bert", "integer-qat", TRAINED),
    ("resnet", "nce", {**TRAINED, "budget": "macs=0.8"}),
    ("llama", "attention-reuse", {"separate": 0}),
    ("llama", "attention-reuse", {"separate": 0, **TRAINED}),
    ("characters", "carve-experts", CARVED),
    ("llama", "head-gates", {**TRAINED, "budget": {"heads": 0.5}}),
    ("bert", "ltp", {**TRAINED, "budget": {"macs": 0.7}, "trials": 1}),
    ("bert", "token-ratio", {**TRAINED, "budget": {"macs": 0.7}}),
    ("bert", "token-topk", {**TRAINED, "budget": {"macs": 0.9}, "dense_layers": 1}),
]
# Steps after another one, and policies: their trainers and losses are those of methods above.
NOT_COVERED = {"rilq", "slice", "qlora", "qdpo", "qail", "sqil"}


def test_every_method_is_covered() -> None:
    assert {name for _, name, _ in CASES} | NOT_COVERED == set(METHODS)


def test_the_fake_accelerator_notices_what_a_gpu_would() -> None:
    """Each line raises; without the device all of them would pass."""
    lines = (
        "torch.ones(3, device='fake') + torch.ones(3)",
        "torch.ones(3)[torch.tensor([0], device='fake')]",
        "torch.rand(3, device='fake', generator=torch.Generator())",
        "torch.ones(3, device='fake').numpy()",
        "torch.nn.Linear(3, 3).to('fake')(torch.ones(1, 3))",
    )
    code = (
        "from tests.fake_accelerator import install; install(); import torch\n"
        "assert (torch.ones(3, device='fake') * 2).cpu().tolist() == [2, 2, 2]\n"
        f"for line in {lines!r}:\n"
        "    try:\n        eval(line)\n"
        "    except (RuntimeError, TypeError) as error:\n        assert 'fake' in str(error), error\n"
        "    else:\n        raise AssertionError(line)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(CASES)), ids=[f"{network}-{name}" for network, name, _ in CASES])
def test_methods_leave_nothing_on_the_cpu(number: int) -> None:
    error = failures()[number]
    assert error is None, error


@cache
def failures() -> list[str | None]:
    """Apply all methods in one process and return the error of each case."""
    command = [sys.executable, "-m", "tests.compression.test_devices"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: list[str | None] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    import contextlib
    import tempfile
    import traceback

    import torch

    from tests.fake_accelerator import install

    device = install()
    torch.set_num_threads(1)
    errors: list[str | None] = []
    for network, name, settings in CASES:
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
            try:
                apply_on(device, network, {"method": name, **settings}, Path(folder))
                errors.append(None)
            except Exception:
                errors.append(traceback.format_exc()[-2000:])
    print(json.dumps(errors))


def apply_on(device: Any, name: str, step: dict[str, Any], folder: Path) -> None:
    import torch

    from smelt.compression.base import MethodContext
    from smelt.models.model import Model
    from tests import mixtures
    from tests.tiny import BUILDS, inputs, labeled
    from tests.trained import character_batches, character_model

    if name == "characters":
        model, batches = character_model(), character_batches()
        texts = {"numbers.txt": " ".join(map(str, range(2000))), "words.txt": "the cat sat on the mat and ate " * 200}
        for file, text in texts.items():
            (folder / file).write_text(text)
        step["domains"] = [str(folder / file) for file in texts]
    elif name == "mixtral":
        model, batches = mixtures.loaded("mixtral", folder), mixtures.batches()
    elif name == "resnet":
        model = Model(BUILDS[name]())
        batches = [{**inputs(name, seed=seed), "labels": torch.tensor([0, 1, 4])} for seed in range(4)]
    else:
        model, batches = Model(BUILDS[name]()), [labeled(name, seed=seed) for seed in range(6)]
    model.network.to(device)
    METHODS.build(step).apply(model, MethodContext(batches=batches, folder=folder / "work", device=device))
    with torch.no_grad():
        model.network(**{key: tensor.to(device) for key, tensor in batches[0].items() if key != "labels"})


if __name__ == "__main__":
    main()
