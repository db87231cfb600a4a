"""`smelt link`: between real workers under torchrun, and one sentence where there are none."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Smelt


def test_under_torchrun_it_measures_and_writes_what_it_shows(tmp_path: Path) -> None:
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    options = ["--parameters", "1e5", "--density", "0.01", "--backward-ms", "2", "--methods", "bf16,micro"]
    call = [*start, "-m", "smelt.cli.main", "link", *options, "--json", str(tmp_path / "link.json")]
    done = subprocess.run(call, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Link of 2 ranks, gloo") == 1  # only the first worker speaks
    found = json.loads((tmp_path / "link.json").read_text())
    assert (found["parameters"], found["density"], found["backward_ms"]) == (100_000, 0.01, 2)
    assert (
        all(line["alpha"] >= 0 for line in found["link"]["collectives"].values())
        and len(found["link"]["collectives"]) == 4
    )
    methods = {each["method"]: each for each in found["methods"]}
    assert list(methods) == ["ddp", "ddp, bf16 hook", "bf16", "micro"]
    assert methods["ddp"]["bytes"] == 400_000 and methods["micro"]["bytes"] < 20_000
    assert all(name in done.stdout for name in methods if "," not in name)


@pytest.mark.slow  # four torch imports; two ranks are covered above, nodes in tests/train/test_hierarchy.py
def test_methods_are_tried_between_nodes(tmp_path: Path) -> None:
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    options = ["--parameters", "1e5", "--density", "0.01", "--methods", "bf16", "--node-size", "2"]
    call = [*start, "-m", "smelt.cli.main", "link", *options, "--json", str(tmp_path / "link.json")]
    done = subprocess.run(call, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Link of 2 nodes of 2 ranks, gloo") == 1
    found = json.loads((tmp_path / "link.json").read_text())
    methods = {each["method"]: each for each in found["methods"]}
    assert (found["node_size"], found["link"]["world_size"], methods["ddp"]["bytes"]) == (2, 2, 600_000)
    assert methods["bf16"]["bytes"] == 100_004  # half of a share to the one who adds, half back, and a mark


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "start it with `torchrun --nproc-per-node 2 -m smelt.cli.main link`"),
        (["--parameters", "0"], "--parameters is 0"),
        (["--density", "2"], "density is 2"),
        (["--methods", "zip"], "no gradient compressor 'zip'"),
    ],
)
def test_what_cannot_be_measured_is_one_sentence(options: list[str], words: str, smelt_here: Smelt) -> None:
    smelt_here("link", *options).refused(words)
