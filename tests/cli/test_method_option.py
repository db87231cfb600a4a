"""One method on the command line instead of a recipe file."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.conftest import Done, Place, Smelt


def compress(smelt_here: Smelt, place: Place, out: Path, *more: str) -> Done:
    data = ["--data", place / "text.txt", "--set", "ragged=true", "--no-speed"]
    return smelt_here("compress", place / "llama", "-o", str(out), *data, *more)


def test_a_method_and_its_parameters(place: Place, smelt_here: Smelt, quick: None, tmp_path: Path) -> None:
    done = compress(smelt_here, place, tmp_path / "out", "--method", "rtn", "--bits", "3", "--group-size", "16")
    assert done.code == 0, done.err
    content = json.loads((tmp_path / "out" / "smelt.json").read_text())
    [step] = content["recipe"]["steps"]
    assert (step["method"], step["bits"], step["group_size"], step["allow_partial_group"]) == ("rtn", 3, 16, True)
    assert {scheme["weight"] for scheme in content["quantized"].values()} == {"int3-asym/16@float16"}


def test_a_budget_samples_and_length(place: Place, smelt_here: Smelt, quick: None, tmp_path: Path) -> None:
    data = ["--data", place / "text.txt", "--samples", "6", "--length", "24", "--no-speed"]
    options = ["--method", "wanda-sp", "--budget", "parameters=0.7", "--set", "alignment=1"]
    done = smelt_here("compress", place / "llama", "-o", str(tmp_path / "out"), *options, *data)
    assert done.code == 0, done.err
    content = json.loads((tmp_path / "out" / "smelt.json").read_text())
    assert content["recipe"]["steps"][0]["budget"] == {"parameters": 0.7}
    assert (content["recipe"]["data"]["samples"], content["recipe"]["data"]["seq_len"]) == (6, 24)


def test_a_budget_replaces_that_of_a_recipe(place: Place, smelt_here: Smelt, quick: None, tmp_path: Path) -> None:
    plan = ["plan", place / "llama", "-r", place / "llama.yaml", "--json", str(tmp_path / "r.json")]
    assert smelt_here(*plan, "--budget", "macs=0.6").code == 0
    assert json.loads((tmp_path / "r.json").read_text())["steps"][0]["budget"] == {"macs": 0.6}
    none = place.recipe("rtn.yaml", {"steps": [{"method": "rtn", "group_size": 16}]})
    smelt_here("plan", place / "llama", "-r", none, "--budget", "macs=0.6").refused("no step of this recipe has one")


def test_invalid_budgets(place: Place, smelt_here: Smelt) -> None:
    plan = ["plan", place / "llama", "--method"]
    smelt_here(*plan, "gptq", "--budget", "bytes=0.3").refused("gptq removes nothing, so it takes no --budget")
    smelt_here(*plan, "fisher", "--budget", "0.8").refused("such as {macs: 0.6} or macs=0.6, not '0.8'")
    smelt_here(*plan, "fisher", "--budget", "size=0.8").refused("limits one of parameters, macs, bytes, latency")
    smelt_here(*plan, "fisher", "--budget", "macs=80%").refused("macs=0.6")
    smelt_here(*plan, "fishr", "--budget", "macs=0.8").refused("did you mean 'fisher'?")


def test_invalid_combinations(place: Place, smelt_here: Smelt, tmp_path: Path) -> None:
    out = tmp_path / "out"
    compress(smelt_here, place, out).refused("either a recipe (-r FILE) or one method")
    both = ["--method", "rtn", "-r", place / "llama.yaml"]
    compress(smelt_here, place, out, *both).refused("either a recipe (-r FILE) or one method")
    recipe = ["compress", place / "llama", "-o", str(out), "-r", place / "llama.yaml"]
    smelt_here(*recipe, "--bits", "4").refused("--bits goes with --method")
    compress(smelt_here, place, out, "--method", "rtm").refused("there is no method 'rtm'")
    compress(smelt_here, place, out, "--method", "rtn", "--bits", "9").refused("2 to 8 bits, not 9")
    compress(smelt_here, place, out, "--method", "rtn", "--set", "bits").refused("name=value")
    compress(smelt_here, place, out, "--method", "rtn", "--set", "color=red").refused("no parameter 'color'")
    assert not out.exists()


def test_heads_leave_by_gates(place: Place, smelt_here: Smelt, quick: None, tmp_path: Path) -> None:
    """Planned, compressed, inspected and verified by commands."""
    method = ["--method", "head-gates", "--budget", "heads=0.5", "--set", "epochs=2", "--set", "batch_size=4"]
    data = ["--data", place / "text.txt", "--samples", "12", "--length", "24"]
    planned = smelt_here("plan", place / "llama", *method, *data, "--json", str(tmp_path / "plan.json"))
    assert planned.code == 0 and json.loads((tmp_path / "plan.json").read_text())["steps"][0]["budget"] == {
        "heads": 0.5
    }
    out = str(tmp_path / "out")
    done = smelt_here("compress", place / "llama", "-o", out, *method, *data, "--no-speed")
    assert done.code == 0, done.err
    facts = json.loads((tmp_path / "out" / "measurements.json").read_text())["steps"][0]["facts"]
    assert facts["heads_kept"] == 0.5 and facts["removal_error"] < 1e-5
    assert smelt_here("verify", out).code == 0 and smelt_here("inspect", out).code == 0
    fewer = [*method[:3], "heads=0.1", *method[4:]]
    smelt_here("compress", place / "llama", "-o", str(tmp_path / "no"), *fewer, *data).refused("cannot reach heads=0.1")


def test_attention_maps_are_shared(place: Place, smelt_here: Smelt, quick: None, tmp_path: Path) -> None:
    """Planned, compressed, inspected and verified by commands."""
    method = ["--method", "attention-reuse", "--set", "layers=0.34"]
    data = ["--data", place / "text.txt", "--samples", "6", "--length", "24"]
    assert smelt_here("plan", place / "llama", *method, *data).code == 0
    out = str(tmp_path / "out")
    done = smelt_here("compress", place / "llama", "-o", out, *method, *data, "--no-speed")
    assert done.code == 0, done.err
    record = json.loads((tmp_path / "out" / "measurements.json").read_text())
    assert record["steps"][0]["facts"]["maps_of"] == {"2": 1} and "parameters" in done.out
    assert smelt_here("verify", out).code == 0 and smelt_here("inspect", out).code == 0
    smelt_here("export", out, "--to", "gguf", "-o", str(tmp_path / "gguf")).refused("different widths")
