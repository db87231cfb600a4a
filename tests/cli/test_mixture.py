"""A mixture of experts from the command line: inspect, plan, quantize, verify; the unreached expert is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from smelt.models.load import load
from smelt.models.quantized import quantized_layers
from tests.character_tokenizer import character_tokenizer
from tests.cli.conftest import Smelt
from tests.mixtures import saved
from tests.trained import sentences

MAGNITUDE = "method: magnitude, budget: {parameters: 0.7}"
LOST = "model.layers.1.mlp.experts.3"


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixture")
    saved("qwen3-moe", folder / "model", starved=True)
    character_tokenizer().save_pretrained(folder / "model")
    (folder / "text.txt").write_text(sentences(400))
    (folder / "recipe.yaml").write_text(
        "data: {source: text.txt, samples: 8, length: 32}\n"
        "evaluate: {context: 32, limit: 256}\n"
        "steps: [{method: gptq, bits: 4, group: 16}]\n".replace("text.txt", str(folder / "text.txt"))
    )
    return folder


def test_inspect_reports_the_experts(mixture: Path, smelt_here: Smelt, tmp_path: Path) -> None:
    done = smelt_here("inspect", str(mixture / "model"), "--tokens", "10", "--json", str(tmp_path / "told.json"))
    assert done.code == 0 and "4 experts of 48 FFN channels, 2 per token" in done.out
    report = json.loads((tmp_path / "told.json").read_text())
    attention = 10 * (2 * 64 * 64 + 2 * 32 * 64) + 2 * 64 * 100 / 2
    assert report["macs"] == 2 * (attention + 10 * 2 * 3 * 64 * 48)
    assert report["parameters"] == sum(p.numel() for p in load(mixture / "model").parameters())


def test_compress_end_to_end(mixture: Path, smelt_here: Smelt, tmp_path: Path) -> None:
    """With a clean process; the report and the terminal name the expert that no token reached."""
    out = tmp_path / "small"
    recipe = ["--recipe", str(mixture / "recipe.yaml")]
    assert smelt_here("plan", str(mixture / "model"), *recipe).code == 0
    done = smelt_here("compress", str(mixture / "model"), *recipe, "-o", str(out), "--no-speed")
    assert done.code == 0, done.err
    assert f"{LOST} (never reached)" in done.out
    page = (out / "report.html").read_text()
    assert "Undercalibrated experts" in page and LOST in page and "never reached" in page
    assert "mlp.experts.*.up_proj" in page
    record = json.loads((out / "measurements.json").read_text())
    assert {"expert": LOST, "tokens": 0, "inputs": 64} in record["few_tokens"]
    assert record["steps"][0]["layers"][f"{LOST}.up_proj"]["tokens"] == 0
    assert len(quantized_layers(load(out).network)) == 2 * (4 + 3 * 4)


def test_a_pruned_mixture_is_reported(mixture: Path, smelt_here: Smelt, quick: None, tmp_path: Path) -> None:
    out = tmp_path / "small"
    (tmp_path / "recipe.yaml").write_text(
        (mixture / "recipe.yaml").read_text().replace("method: gptq, bits: 4, group: 16", MAGNITUDE)
    )
    done = smelt_here(
        "compress", str(mixture / "model"), "--recipe", str(tmp_path / "recipe.yaml"), "-o", str(out), "--no-speed"
    )
    assert done.code == 0, done.err
    kept = json.loads((out / "measurements.json").read_text())["kept"]
    assert [len(row["ffn_channels"]) for row in kept] == [4, 4]
    assert "FFN channels, 2 per token" in smelt_here("inspect", str(out)).out


def test_experts_are_removed_from_the_command_line(
    mixture: Path, smelt_here: Smelt, quick: None, tmp_path: Path
) -> None:
    """The command of the documentation: another number in each layer, in terminal, page and record."""
    out, text = tmp_path / "small", str(mixture / "text.txt")
    settings = ("--data", text, "--eval-data", text, "--samples", "8", "--length", "32", "--no-speed")
    done = smelt_here(
        "compress", str(mixture / "model"), "--method", "reap", "--budget", "parameters=0.8", "-o", str(out), *settings
    )
    assert done.code == 0, done.err
    record = json.loads((out / "measurements.json").read_text())
    numbers = [mixture.num_experts for mixture in load(out).anatomy.mixtures]
    assert min(numbers) >= 2 and sum(numbers) < 8
    assert [len(row["experts"]["kept"]) for row in record["kept"]] == numbers
    page = (out / "report.html").read_text()
    assert f"{numbers[0]} of 4 experts kept" in page
    assert f"{numbers[1]} experts of 48 FFN channels" in smelt_here("inspect", str(out)).out
    assert smelt_here("verify", str(out)).code == 0
    refused = smelt_here(
        "compress",
        str(mixture / "model"),
        "--method",
        "reap",
        "--budget",
        "macs=0.5",
        "-o",
        str(tmp_path / "no"),
        *settings,
    )
    assert refused.code == 2 and "a budget of macs has no effect" in refused.err
