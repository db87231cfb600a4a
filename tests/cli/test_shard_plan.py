"""`smelt shard-plan`: a real model under torchrun, one sentence without ranks, and the page itself."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from smelt.report.sharding import render_shard_plan, step_rows, unit_rows
from tests.cli.conftest import Smelt

CONFIG = """
model: {model_type: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 3, num_attention_heads: 2,
        max_position_embeddings: 64, tie_word_embeddings: true}
data: {train: DATA, seq_len: 16}
batch_size: 2
optimizer: {name: sgd}
device: cpu
"""


def written(folder: Path) -> Path:
    (folder / "prose.txt").write_text("What is said once is soon forgotten; what is said twice is not. " * 200)
    (folder / "tiny.yaml").write_text(CONFIG.replace("DATA", str(folder / "prose.txt")))
    return folder / "tiny.yaml"


def test_under_torchrun_it_plans_shards_and_measures(tmp_path: Path) -> None:
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    options = ["--memory-gb", "0.002", "-o", str(tmp_path / "plan.html"), "--json", str(tmp_path / "plan.json")]
    call = [*start, "-m", "smelt.cli.main", "shard-plan", str(written(tmp_path)), *options]
    done = subprocess.run(call, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("tiny on 2 ranks: predicted / measured") == 1  # only rank 0 prints
    report = json.loads((tmp_path / "plan.json").read_text())
    assert [name for unit in report["units"] for name in unit["layers"]] == [
        *(f"model.layers.{number}" for number in range(3)),
        "model.norm",
    ]
    assert report["root"]["bytes"] > 0 and report["cluster"]["state_factor"] == 2.0  # tied; plain SGD keeps no state
    assert report["predicted"]["peak_memory"] <= report["memory"] == 2e6 and report["measured"]["peak_memory"] is None
    for which in ("predicted", "measured"):
        ops = [op for op, *_ in report[which]["events"]]
        assert ops.count("reduce-scatter") == len(report["units"]) + 1 and report[which]["exposed_seconds"] > 0
    page = (tmp_path / "plan.html").read_text()
    assert page.count("<rect") == sum(len(report[which]["events"]) for which in ("predicted", "measured"))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--workers", "1"], "give --workers 2 or more, or start it with torchrun"),
        (["--seed", "-1"], "seed"),
    ],
)
def test_invalid_setups_raise_one_sentence(options: list[str], words: str, tmp_path: Path, smelt_here: Smelt) -> None:
    smelt_here("shard-plan", str(written(tmp_path)), *options).refused(words)


def plan_of(name: str) -> dict[str, Any]:
    events = [
        ["all-gather", 0, 0.0, 1.0],
        ["forward", 0, 1.0, 2.0],
        ["backward", 0, 2.0, 3.0],
        ["reduce-scatter", 0, 3.0, 4.0],
    ]
    timeline = {"seconds": 4.0, "exposed_seconds": 2.0, "peak_memory": 3e6, "events": events}
    again = {
        **timeline,
        "peak_memory": None,
        "events": [*events, ["all-gather", 0, 2.0, 2.5], ["forward", -1, 2.0, 2.0]],
    }
    line = {"alpha": 0.001, "beta": 2e-9}
    return {
        "name": name, "world_size": 2, "memory": None, "forward_prefetch": 1, "backward_prefetch": 1,
        "exhaustive": False,
        "units": [{"name": "all", "bytes": 1000, "reshard_after_forward": True}], "root": {"name": "root", "bytes": 0},
        "predicted": timeline, "measured": again,
        "cluster": {"all_gather": line, "reduce_scatter": line, "overlap": True},
    }  # fmt: skip


def test_the_page_adds_up_and_names_are_escaped() -> None:
    plan = plan_of("<b>bold</b>")
    assert unit_rows(plan) == [["all", "1 kB", "resharded", "1000.000 / 1500.000", *["1000.000 / 1000.000"] * 3]]
    assert step_rows(plan)[2] == ["peak memory per rank", "3 MB", "not measured"]
    page = render_shard_plan(plan)
    assert "<b>bold" not in page and "&lt;b&gt;bold" in page
    assert 'x="25.000%"' in page and 'width="25.000%"' in page and page.count("<rect") == 10
