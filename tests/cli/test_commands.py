"""Every command runs, prints sensible output, and writes correct numbers with --json."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import smelt
from smelt.cli.app import COMMANDS, GROUPS
from smelt.compression.base import METHODS
from smelt.measure.cost import block_parameters, count_bytes, count_parameters
from smelt.models.load import load
from tests.cli.conftest import Place, Smelt


def result(path: Path) -> Any:
    return json.loads(path.read_text())


WITHOUT_JSON = {"batch", "cache", "train", "serve", "kv", "migrate", "schema", "sign"}


@pytest.mark.parametrize("command", ["kv profile", *sorted(set(COMMANDS) - WITHOUT_JSON)])
def test_help(command: str, smelt_here: Smelt) -> None:
    done = smelt_here(*command.split(), "--help")
    assert (done.code, done.err) == (0, "")
    unseeded = ("verify", "env", "compare", "transcribe")  # one repeats a recorded seed, the others draw nothing
    assert "--json" in done.out and ("--seed" in done.out or command in unseeded)


@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_without_a_command_the_commands_are_listed(arguments: list[str], smelt_here: Smelt) -> None:
    done = smelt_here(*arguments)
    assert done.code == 0
    assert all(command in done.out for command in COMMANDS)


def test_no_help_imports_torch() -> None:
    """One process for all of them; whatever a command imports for its options stays in `sys.modules`."""
    code = """
import sys
from smelt.cli.main import _call
for command in sys.argv[1:]:
    assert _call([*command.split(), "--help"]) == 0
    heavy = {"torch", "transformers", "scipy", "numpy", "fastapi", "pyarrow"} & sys.modules.keys()
    assert not heavy, f"smelt {command} --help imports {heavy}"
"""
    command = [sys.executable, "-c", code, "", "kv profile", *COMMANDS]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_help_lists_commands_in_groups_and_options_in_panels(smelt_here: Smelt) -> None:
    text = smelt_here("--help").out
    places = [text.index(f"─ {group} ─") for group in GROUPS]
    assert places == sorted(places)
    compress = smelt_here("compress", "-h").out
    assert all(f"─ {panel} ─" in compress for panel in ("Method", "Data and quality", "Speed", "Run and output"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["comprss"], "there is no command 'comprss'; did you mean 'compress'?"),
        (["bench", "x", "--agianst", "y"], "smelt bench has no option '--agianst'; did you mean '--against'?"),
        (["compress", "x", "-o", "y", "--method", "gptk"], "there is no method 'gptk'; did you mean 'gptq'?"),
        (["inspect", "smolm2-135m"], "did you mean smollm2-135m? Otherwise give"),
        (["kv", "profil"], "No such command 'profil'"),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest(arguments: list[str], words: str, smelt_here: Smelt) -> None:
    smelt_here(*arguments).refused(words)


def test_an_unknown_folder_is_answered_with_its_neighbor(place: Place, smelt_here: Smelt) -> None:
    smelt_here("inspect", place / "lama").refused(f"did you mean {place / 'llama'}?")


@pytest.mark.parametrize(
    ("typed", "expected"),
    [("smelt compr", "compress"), ("smelt compress --max-d", "--max-drop"), ("smelt kv ", "profile")],
)
def test_the_shell_completes_commands_and_options(typed: str, expected: str) -> None:
    asked = {"_SMELT_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" "))}
    command = [sys.executable, "-m", "smelt.cli.main"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **asked})
    assert done.stdout.split() == [expected], done


def test_a_closed_output_pipe_is_not_an_error() -> None:
    command = f"set -o pipefail; {shlex.quote(sys.executable)} -m smelt.cli.main methods | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout


@pytest.mark.parametrize("flag", ["-V", "--version"])
def test_the_version(flag: str, smelt_here: Smelt) -> None:
    assert smelt_here(flag).out.strip() == smelt.__version__


def test_as_a_separate_process() -> None:
    command = [sys.executable, "-m", "smelt.cli.main"]
    done = subprocess.run([*command, "inspect", "nowhere"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("smelt: no model at nowhere; give") and done.stderr.count("\n") == 1


def test_methods(smelt_here: Smelt, tmp_path: Path) -> None:
    done = smelt_here("methods", "--json", str(tmp_path / "r.json"), "--seed", "3")
    rows = result(tmp_path / "r.json")
    assert {row["name"] for row in rows} == set(METHODS)
    for row in rows:
        assert row["name"] in done.out and row["paper"] and row["summary"] in done.out
    assert "calibration data" in next(row["needs"] for row in rows if row["name"] == "fisher")


def test_the_parameters_of_one_method(smelt_here: Smelt, tmp_path: Path) -> None:
    done = smelt_here("methods", "gptq", "--json", str(tmp_path / "r.json"))
    described = result(tmp_path / "r.json")
    assert described["parameters"] == {field.name: field.default for field in fields(METHODS["gptq"])}  # type: ignore[arg-type]
    for row in described["parameter_details"]:
        assert row["name"] in done.out and row["type"] in done.out and row["meaning"] in done.out
    assert described["paper"] in done.out and "calibration data" in done.out
    assert re.search(r"budget .* Budget .* required", smelt_here("methods", "fisher").out)
    smelt_here("methods", "gptk").refused("did you mean 'gptq'?")


@pytest.mark.parametrize("model", ["llama", "bert"])
def test_inspect(model: str, place: Place, smelt_here: Smelt, tmp_path: Path) -> None:
    done = smelt_here("inspect", place / model, "--json", str(tmp_path / "r.json"), "--seed", "3")
    report, network = result(tmp_path / "r.json"), load(place / model).network
    assert report["parameters"] == sum(parameter.numel() for parameter in network.parameters())
    assert report["bytes"] == 4 * report["parameters"]
    assert report["block_parameters"] == sum(row["parameters"] for row in report["blocks"])
    assert report["macs"] == pytest.approx(sum(row["macs"] for row in report["blocks"]))
    assert len(report["blocks"]) == 3 and "48 FFN channels" in done.out
    assert ("4 heads of 8 in 2 KV groups" if model == "llama" else "4 heads of 8") in done.out


def test_inspect_counts_macs_for_the_requested_tokens(place: Place, smelt_here: Smelt, tmp_path: Path) -> None:
    """By hand, without embeddings and head: projections per token, and products of causal attention."""
    smelt_here("inspect", place / "llama", "--tokens", "64", "--json", str(tmp_path / "r.json"))
    attention = 32 * (32 + 16 + 16) + 32 * 32
    by_hand = 64 * (attention + 3 * 32 * 48) + 2 * 32 * 64 * 64 / 2
    assert result(tmp_path / "r.json")["macs"] == 3 * by_hand


def test_plan(place: Place, smelt_here: Smelt, tmp_path: Path) -> None:
    arguments = ["-r", place / "llama.yaml", "--json", str(tmp_path / "r.json"), "--seed", "3"]
    done = smelt_here("plan", place / "llama", *arguments)
    report, model = result(tmp_path / "r.json"), load(place / "llama")
    assert done.code == 0 and "fisher" in done.out and "parameters 0.8" in done.out
    assert report["parameters"] == count_parameters(model.network)
    assert report["bytes"] == count_bytes(model.network)
    before = block_parameters(model.anatomy)
    assert (report["block_parameters"], report["block_parameters_after"]) == (before, int(0.8 * before))
    assert 0 < report["seconds"] < 60
    assert report["bytes"] < report["peak_memory"] < report["available_memory"]


def test_eval_of_text(place: Place, smelt_here: Smelt, tmp_path: Path) -> None:
    arguments = ["--data", place / "text.txt", "--limit", "2000", "--context", "64", "--json", str(tmp_path / "r.json")]
    done = smelt_here("eval", place / "llama", "--seed", "3", *arguments)
    report = result(tmp_path / "r.json")
    assert done.code == 0 and "perplexity" in done.out and report["passed"]
    assert report["quality"]["metric"] == "perplexity" and report["quality"]["settings"]["context"] == 64
    assert (
        1.0 < report["quality"]["value"] < 2.0
    )  # it was trained on this text; guessing among its characters gives about 20


def test_eval_against_a_baseline(place: Place, smelt_here: Smelt, pruned: Path, tmp_path: Path) -> None:
    arguments = ["--data", place / "text.txt", "--limit", "3000", "--context", "64", "--json", str(tmp_path / "r.json")]
    done = smelt_here("eval", str(pruned), "--against", place / "llama", *arguments)
    report = result(tmp_path / "r.json")
    comparison, (low, high) = report["comparison"], report["comparison"]["interval"]
    assert comparison["difference"] == pytest.approx(report["quality"]["value"] - report["base_quality"]["value"])
    assert low < comparison["difference"] < high and comparison["ratio"] > 1
    assert report["divergence"]["kl"] > 0
    assert "95% interval" in done.out and "worse" in done.out
    assert done.code == 3 and report["passed"] is False and "failed: perplexity is worse than that of" in done.out


def test_eval_of_a_classifier_against_itself(place: Place, smelt_here: Smelt, tmp_path: Path) -> None:
    arguments = ["--data", place / "rows.jsonl", "--json", str(tmp_path / "r.json")]
    done = smelt_here("eval", place / "bert", "--against", place / "bert", *arguments)
    report = result(tmp_path / "r.json")
    assert report["quality"]["metric"] == "accuracy" and report["quality"]["value"] > 0.9
    assert (report["comparison"]["flips"], report["comparison"]["mcnemar"]) == (0, 1)
    assert "no clear difference" in done.out and done.code == 0 and report["passed"] is True


@pytest.mark.parametrize(
    ("model", "data", "bar", "code"),
    [
        ("bert", "rows.jsonl", ["--min", "0.9"], 0),
        ("bert", "rows.jsonl", ["--min", "1.1"], 3),
        ("bert", "rows.jsonl", ["--min", "0.9", "--metric", "matthews"], 0),
        ("llama", "text.txt", ["--max", "3", "--limit", "500"], 0),
        ("llama", "text.txt", ["--max", "1.01", "--limit", "500"], 3),
    ],
)
def test_eval_exits_with_3_past_a_bound(
    model: str, data: str, bar: list[str], code: int, place: Place, smelt_here: Smelt, tmp_path: Path
) -> None:
    done = smelt_here("eval", place / model, "--data", place / data, *bar, "--json", str(tmp_path / "r.json"))
    assert done.code == code, done
    assert result(tmp_path / "r.json")["passed"] == (code == 0)
    bound = "is below the minimum" if "--min" in bar else "is above the maximum"
    assert (bound in done.out) == (code == 3)


def test_bench(place: Place, smelt_here: Smelt, pruned: Path, tmp_path: Path) -> None:
    arguments = [
        "--seq-len",
        "16",
        "--batch-size",
        "2",
        "--repeats",
        "5",
        "--json",
        str(tmp_path / "r.json"),
        "--seed",
        "3",
    ]
    done = smelt_here("bench", str(pruned), "--against", place / "llama", *arguments)
    report = result(tmp_path / "r.json")
    forward, decode = report["latency"]["forward"], report["latency"]["decode step"]
    assert 0 < forward["median_ms"] < 1000 and 0 < decode["median_ms"] < 1000
    assert (forward["batch"], forward["length"], forward["repeats"]) == (2, 16, 5)
    assert forward["tokens_per_second"] == pytest.approx(2 * 16 / forward["median_ms"] * 1000)
    assert report["peak_bytes"] > 10**8  # torch alone takes more
    compared = report["comparison"]
    assert compared["ratio_low"] <= compared["ratio"] <= compared["ratio_high"] and math.isfinite(compared["ratio"])
    assert "median" in done.out and "times the speed of" in done.out


def test_bench_in_the_engine(place: Place, smelt_here: Smelt, pruned: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"prompt_tokens": 12, "output_tokens": 6}\n{"prompt_tokens": 5, "output_tokens": 3}\n')
    arguments = ["--engine", "--workload", str(trace), "--seconds", "600", "--json", str(tmp_path / "r.json")]
    done = smelt_here("bench", str(pruned), "--against", place / "llama", *arguments)
    report = result(tmp_path / "r.json")
    assert [row["streams"] for row in report["engine"]["rows"]] == [1, 8, 64, 256]
    assert [row["streams"] for row in report["comparison"]] == [1, 8, 64, 256]
    assert report["engine"]["backend"] in done.out and "time to first token" in done.out
    assert (report["slowdown"] or "not slower at any batch size").split()[0] in done.out
    refused = smelt_here("bench", place / "bert", "--engine")
    assert refused.code == 2 and len(refused.err.strip().splitlines()) <= 2, refused.err
    unknown = smelt_here("bench", place / "llama", "--engine", "--workload", "cat")
    assert unknown.code == 2 and "no workload" in unknown.err


def test_bench_of_a_classifier_decodes_nothing(place: Place, smelt_here: Smelt, tmp_path: Path) -> None:
    smelt_here("bench", place / "bert", "--repeats", "3", "--json", str(tmp_path / "r.json"))
    assert list(result(tmp_path / "r.json")["latency"]) == ["forward"]


def test_names_that_look_like_markup_are_printed_verbatim(place: Place, smelt_here: Smelt, tmp_path: Path) -> None:
    """An unmatched closing tag would be a Rich markup error."""
    model = tmp_path / "[red]llama[" / "b]"
    model.parent.mkdir()
    model.symlink_to(place / "llama")
    done = smelt_here("inspect", str(model))
    assert done.code == 0 and "[red]llama[/b]" in done.out
