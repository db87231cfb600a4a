"""Verify a saved folder: a new process loads it and must compute the same logits, bit for bit."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from smelt.errors import ModelError
from smelt.models.finite import is_finite
from smelt.models.inputs import random_inputs
from smelt.models.model import Model
from smelt.subprocesses import python_command, python_environment

_EXPECTED = "expected"


@torch.no_grad()
def probe(model: Model, batch: int = 2, length: int = 24) -> dict[str, Tensor]:
    """Make fixed pseudo-random inputs that the model accepts."""
    return random_inputs(model.network, batch, length)


@torch.no_grad()
def outputs(model: Model, inputs: dict[str, Tensor]) -> Tensor:
    """Return the logits, or the last hidden state of a network without a head, on CPU."""
    cache = {} if model.kv is None else {"past_key_values": model.new_cache()}
    result = model.network(**{name: tensor.to(model.device) for name, tensor in inputs.items()}, **cache)
    first: Tensor = result[0]
    return first.float().cpu().contiguous()


def verify(model: Model, folder: Path) -> None:
    """Reload `folder` in a new process and compare with `model`, bit for bit; raise where they differ."""
    inputs = probe(model)
    expected = outputs(model, inputs)
    if not is_finite(expected):
        raise ModelError(
            "the model computes NaN or infinity, so it cannot be verified; check its weights and its dtype."
        )
    with tempfile.TemporaryDirectory() as temporary:
        file = Path(temporary) / "probe.safetensors"
        save_file({**inputs, _EXPECTED: expected}, file)
        _run_clean(folder, _settings(model), temporary, str(file))


def describe_probe(model: Model) -> dict[str, Any]:
    """Return the hash of the model's outputs on the fixed inputs, and the settings that their last bits depend on."""
    device, threads, onednn = _settings(model)
    settings = {"device": device, "threads": int(threads), "onednn": onednn == "1"}
    return {**_describe_outputs(outputs(model, probe(model))), **settings}


def probe_folder(folder: Path, *, device: str, threads: int, onednn: bool) -> dict[str, Any]:
    """Load a folder in a new process and describe its outputs on the fixed inputs: sha256, shape, finite."""
    with tempfile.TemporaryDirectory() as temporary:
        answer = _run_clean(folder, [device, str(threads), str(int(onednn))], temporary)
    described: dict[str, Any] = json.loads(answer.splitlines()[-1])
    return described


def _settings(model: Model) -> list[str]:
    return [str(model.device), str(torch.get_num_threads()), str(int(_uses_onednn()))]


def _describe_outputs(result: Tensor) -> dict[str, Any]:
    return {
        "sha256": hashlib.sha256(result.numpy().tobytes()).hexdigest(),
        "shape": list(result.shape),
        "finite": bool(result.isfinite().all()),
    }


def _run_clean(folder: Path, settings: list[str], working_folder: str, *files: str) -> str:
    """Run this module on a folder in a new process and return what it prints."""
    command = python_command("-m", "smelt.models.verify", str(folder.resolve()), *settings, *files)
    result = subprocess.run(
        command, cwd=working_folder, env=python_environment(), capture_output=True, text=True, check=False
    )
    if result.returncode != 0:
        detail = (result.stderr.strip() or result.stdout.strip()).splitlines()[-1:]
        raise ModelError(
            f"the saved model could not be verified after reloading: {' '.join(detail) or 'no reason given'}"
        )
    return result.stdout


def _uses_onednn() -> bool:
    """Return whether oneDNN is enabled. PyTorch disables it for good when it meets a dtype that the CPU lacks, which
    changes the last bits of all later results, so the verifying process must start in the same state."""
    return bool(torch.backends.mkldnn.enabled)


def _main(folder: str, device: str, threads: str, onednn: str, file: str | None = None) -> int:
    """Compare with the outputs in `file`, or print a description of the outputs."""
    from smelt.models.load import load

    torch.set_num_threads(int(threads))
    torch.backends.mkldnn.enabled = onednn == "1"  # type: ignore[assignment]
    model = load(folder, device=device)
    if file is None:
        print(json.dumps(_describe_outputs(outputs(model, probe(model)))))
        return 0
    tensors = load_file(file)
    expected = tensors.pop(_EXPECTED)
    actual = outputs(model, tensors)
    if actual.shape != expected.shape:
        print(f"outputs of shape {list(actual.shape)} instead of {list(expected.shape)}.", file=sys.stderr)
        return 1
    if not torch.equal(actual, expected):
        print(f"logits differ by up to {float((actual - expected).abs().max()):.3g}.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
