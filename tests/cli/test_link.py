"""`smelt link`: between real ranks, started by itself or by torchrun."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Smelt

WORKERS = [sys.executable]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.mark.parametrize(
    "start", [pytest.param(WORKERS, id="workers"), pytest.param(TORCHRUN, id="torchrun", marks=pytest.mark.slow)]
)
def test_it_measures_and_writes_the_shown_numbers(start: list[str], tmp_path: Path) -> None:
    options = ["--parameters", "1e5", "--density", "0.01", "--backward-ms", "2", "--methods", "bf16,micro"]
    call = [*start, "-m", "smelt.cli.main", "link", *options, "--json", str(tmp_path / "link.json")]
    done = subprocess.run(call, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Link of 2 ranks, gloo") == 1  # only rank 0 prints
    report = json.loads((tmp_path / "link.json").read_text())
    assert (report["parameters"], report["density"], report["backward_ms"]) == (100_000, 0.01, 2)
    assert (
        all(line["alpha"] >= 0 for line in report["link"]["collectives"].values())
        and len(report["link"]["collectives"]) == 4
    )
    methods = {result["method"]: result for result in report["methods"]}
    assert list(methods) == ["ddp", "ddp, bf16 hook", "bf16", "micro"]
    assert methods["ddp"]["bytes"] == 400_000 and methods["micro"]["bytes"] < 20_000
    assert all(name in done.stdout for name in methods if "," not in name)


@pytest.mark.slow  # four torch imports; two ranks are covered above, nodes in tests/train/test_hierarchy.py
def test_methods_are_measured_between_nodes(tmp_path: Path) -> None:
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    options = ["--parameters", "1e5", "--density", "0.01", "--methods", "bf16", "--node-size", "2"]
    call = [*start, "-m", "smelt.cli.main", "link", *options, "--json", str(tmp_path / "link.json")]
    done = subprocess.run(call, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Link of 2 nodes of 2 ranks, gloo") == 1
    report = json.loads((tmp_path / "link.json").read_text())
    methods = {result["method"]: result for result in report["methods"]}
    assert (report["node_size"], report["link"]["world_size"], methods["ddp"]["bytes"]) == (2, 2, 600_000)
    assert methods["bf16"]["bytes"] == 100_004  # half of a share to the reducing rank, half back, and a flag


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--workers", "1"], "give --workers 2 or more, or start it with torchrun"),
        (["--parameters", "0"], "--parameters is 0"),
        (["--density", "2"], "density is 2"),
        (["--methods", "zip"], "no gradient compressor 'zip'"),
    ],
)
def test_invalid_setups_raise_one_sentence(options: list[str], words: str, smelt_here: Smelt) -> None:
    smelt_here("link", *options).refused(words)
