"""`smelt compress` with HAP, implants, fine-tuning and quantization after it: an artifact like any other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from smelt.measure.cost import block_parameters
from smelt.models.implants import implants_of
from smelt.models.load import load
from smelt.models.quantized import quantized_layers
from tests.cli.conftest import Place, Smelt, bert_recipe

TRAINING = {"method": "finetune", "epochs": 4, "batch_size": 8, "checkpoint_every": 12, "optimizer": {"lr": 1e-3}}


def recipe(place: Place, *more: dict[str, Any], **step: Any) -> str:
    content = bert_recipe(place, method="hap", budget={"parameters": 0.6}, **{"probes": 2, "implant": 0.3, **step})
    content["steps"] += more
    return place.recipe("hap.yaml", content)


def test_pruned_implanted_fine_tuned_and_quantized(place: Place, smelt_here: Smelt, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    steps = recipe(place, TRAINING, {"method": "rtn", "bits": 8, "group_size": -1})
    done = smelt_here("compress", place / "bert", "-r", steps, "-o", out, "--no-speed")
    assert done.code == 0 and "saved and verified" in done.out, done
    pruning, training, _ = (
        step["facts"] for step in json.loads((tmp_path / "out/measurements.json").read_text())["steps"]
    )
    model = load(out)
    assert pruning["implanted_units"] > 0 and implants_of(model.anatomy)
    assert training["loss_curve"][-1][1] < training["loss_curve"][0][1] and "bits" not in training
    assert any(
        float(part.implant.up.weight.abs().sum()) > 0 for part in model.anatomy.parts if part.implant is not None
    )
    assert any(path.endswith(".base") for path in quantized_layers(model.network))
    dense = load(place / "bert")
    assert block_parameters(model.anatomy) <= 0.6 * block_parameters(dense.anatomy)
    for command in (("eval", out, "--data", place / "rows.jsonl"), ("inspect", out), ("verify", out)):
        again = smelt_here(*command)
        assert again.code == 0, again


def test_an_implant_is_exported_or_refused(place: Place, smelt_here: Smelt, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    done = smelt_here("compress", place / "bert", "-r", recipe(place), "-o", out, "--no-speed")
    assert done.code == 0, done
    assert json.loads((tmp_path / "out/measurements.json").read_text())["opens_in"] == ["Smelt"]
    smelt_here("export", out, "--to", "compressed-tensors", "-o", str(tmp_path / "x")).refused("has a neural implant")
    pytest.importorskip("onnx")
    done = smelt_here("export", out, "--to", "onnx", "-o", str(tmp_path / "onnx"))
    assert done.code == 0, done  # the export compares its logits with those of the network


@pytest.mark.parametrize(
    ("model", "arguments", "words"),
    [
        ("bert", ("--budget", "parameters=0.02"), "the budget cannot be met"),
        ("bert", ("--budget", "parameters=0.5", "--set", "implant=2"), "implant of hap must lie between 0 and 1"),
        ("llama", ("--budget", "parameters=0.8", "--set", "implant=0.1"), "decoders are served by programs"),
    ],
)
def test_what_cannot_work(
    model: str, arguments: tuple[str, ...], words: str, place: Place, smelt_here: Smelt, tmp_path: Path
) -> None:
    data = ["--data", place / ("rows.jsonl" if model == "bert" else "text.txt"), "--samples", "8", "--set", "probes=2"]
    done = smelt_here("compress", place / model, "--method", "hap", *arguments, *data, "-o", str(tmp_path / "out"))
    done.refused(words)


def test_fine_tuning_quantizes_nothing(place: Place, smelt_here: Smelt, tmp_path: Path) -> None:
    step = {**TRAINING, "weights": {"quantizer": "minmax", "weight_format": "int4/row"}}
    done = smelt_here("compress", place / "bert", "-r", recipe(place, step), "-o", str(tmp_path / "out"))
    done.refused("finetune quantizes nothing")
