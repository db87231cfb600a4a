"""`smelt compress --method ltp`: an artifact that drops tokens, which later steps quantize; what cannot work."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from smelt.models.load import load
from smelt.models.quantized import quantized_layers
from smelt.models.token_pruning import token_pruning_of
from smelt.models.token_rules import ThresholdRule
from tests.cli.conftest import Place, Smelt, bert_recipe

QUICK = ["--set", "soft_epochs=1", "--set", "epochs=1", "--set", "trials=1", "--set", "batch_size=8"]


def test_compress_then_eval_inspect_and_export(place: Place, smelt_here: Smelt, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    data = ["--data", place / "rows.jsonl", "--samples", "48", "--no-speed"]
    done = smelt_here("compress", place / "bert", "--method", "ltp", "--budget", "macs=0.6", *QUICK, *data, "-o", out)
    assert done.code == 0 and "saved and verified" in done.out, done
    assert "MACs per text, tokens dropped" in done.out
    facts = json.loads((tmp_path / "out" / "measurements.json").read_text())["steps"][0]["facts"]
    encoder = token_pruning_of(load(out).network)
    assert encoder is not None and isinstance(encoder.rule, ThresholdRule) and facts["macs_kept"] <= 0.6
    assert (
        encoder.rule.to_json()
        == facts["rule"]
        == json.loads((tmp_path / "out" / "smelt.json").read_text())["token_pruning"]
    )
    done = smelt_here("eval", out, "--data", place / "rows.jsonl", "--min", "0.6")
    assert done.code == 0, done
    smelt_here("export", out, "--to", "onnx", "-o", str(tmp_path / "onnx")).refused("drops tokens")
    arguments = ["--method", "ltp", "--budget", "macs=0.6", *data, "-o", str(tmp_path / "again")]
    smelt_here("compress", out, *arguments).refused("drops tokens already")


def test_later_steps_quantize_and_keep_the_rule(place: Place, smelt_here: Smelt, quick: None, tmp_path: Path) -> None:
    content = bert_recipe(place, method="token-ratio", budget={"macs": 0.6}, epochs=0)
    content["steps"].append({"method": "gptq", "bits": 8, "group_size": -1})
    arguments = ["-r", place.recipe("tokens.yaml", content), "-o", str(tmp_path / "out"), "--no-speed"]
    done = smelt_here("compress", place / "bert", *arguments)
    assert done.code == 0, done
    network = load(tmp_path / "out").network
    assert token_pruning_of(network) is not None and len(quantized_layers(network)) == 18
    content["steps"][1] = {"method": "qat"}
    refused = smelt_here(
        "compress", place / "bert", "-r", place.recipe("tokens.yaml", content), "-o", str(tmp_path / "x")
    )
    refused.refused("step 2 (qat): this model drops tokens")


@pytest.mark.parametrize(
    ("model", "budget", "words"),
    [("llama", "macs=0.5", "encoders of the types bert"), ("bert", "macs=0.01", "allow at least macs="),
     ("bert", "latency=0.5", "give a budget of macs")],
)  # fmt: skip
def test_what_cannot_work(
    model: str, budget: str, words: str, place: Place, smelt_here: Smelt, quick: None, tmp_path: Path
) -> None:
    data = place / ("text.txt" if model == "llama" else "rows.jsonl")
    arguments = ["--budget", budget, "--data", data, "--samples", "24", "-o", str(tmp_path / "out")]
    smelt_here("compress", place / model, "--method", "ltp", *arguments).refused(words)
