"""Whisper with integer linear layers: calibrated on recordings, saved, inspected, transcribed and evaluated."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from smelt.models.feature_extractor import save_feature_extractor
from smelt.models.load import load
from smelt.models.quantized import STATIC_SCALE, QuantizedLinear, quantized_layers
from tests.cli.conftest import Smelt

soundfile = pytest.importorskip("soundfile", reason="soundfile is not installed")

RATE = 16_000
RECIPE = Path(__file__).parents[2] / "examples" / "w8a8-static.yaml"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a tiny Whisper and a table of recordings."""
    from tests.measure.test_speech import whisper

    folder, model = tmp_path_factory.mktemp("whisper"), whisper()
    model.network.save_pretrained(folder / "model")
    assert model.tokenizer is not None and model.feature_extractor is not None
    model.tokenizer.save_pretrained(folder / "model")
    save_feature_extractor(model.feature_extractor, folder / "model")
    generator, rows = np.random.default_rng(0), []
    for index in range(4):
        soundfile.write(folder / f"{index}.flac", generator.normal(0, 0.1, RATE // 2), RATE)
        rows.append({"file": f"{index}.flac", "text": "some words"})
    (folder / "calibration.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:3]))
    (folder / "test.jsonl").write_text(json.dumps(rows[3]))
    return folder


def test_integer_linear_layers_with_static_scales(folder: Path, smelt_here: Smelt, tmp_path: Path) -> None:
    out = str(tmp_path / "integer")
    data = ("--data", str(folder / "calibration.jsonl"), "--eval-data", str(folder / "test.jsonl"))
    done = smelt_here("compress", str(folder / "model"), "-r", str(RECIPE), *data, "-o", out)
    assert done.code == 0, done.err
    assert "forward, batch 1, 100 frames" in done.out
    inspected = smelt_here("inspect", out, "--json", str(tmp_path / "inspect.json"))
    assert "16 layers with weights in int8" in inspected.out and "(static scale)" in inspected.out, inspected.err
    precision = json.loads((tmp_path / "inspect.json").read_text())["precision"]
    assert [row["layers"] for row in precision["quantized"]] == [16]
    assert precision["float"]["Conv1d"] == 2 and precision["float"]["Embedding"] == 2
    check_product(quantized_layers(load(out).network)["model.encoder.layers.0.fc1"])
    text = smelt_here("transcribe", out, str(folder / "3.flac"))
    quality = smelt_here("eval", out, "--data", str(folder / "test.jsonl"))
    assert text.code == quality.code == 0 and "wer" in quality.out, text.err + quality.err


def check_product(layer: QuantizedLinear) -> None:
    """Compare a layer with sums of products of integers, scaled once by its static scale and the weights' scales."""
    scale, weight_scale = getattr(layer, STATIC_SCALE).flatten(), layer.packed.tensors["scale"].float().flatten()
    weight = (layer.weight / weight_scale[:, None]).round().long()
    codes = torch.randint(-127, 128, (5, layer.in_features), generator=torch.Generator().manual_seed(0))
    assert layer.bias is not None and weight.abs().max() == 127
    expected = (codes @ weight.T) * scale * weight_scale + layer.bias
    torch.testing.assert_close(layer((codes * scale)[None])[0], expected, rtol=1e-5, atol=1e-6)


def test_integer_only_names_the_way_out(folder: Path, smelt_here: Smelt, tmp_path: Path) -> None:
    data = ("--data", str(folder / "calibration.jsonl"), "-o", str(tmp_path / "out"))
    done = smelt_here("compress", str(folder / "model"), "--method", "integer-only", *data)
    done.refused("no integer form of whisper networks")
    done.refused("input_activations")
    done = smelt_here("compress", str(folder / "model"), "-r", str(RECIPE), *data, "--data", "none")
    done.refused("needs the statistics of batch norms, and this network has none")
