"""`smelt accumulator-bits`: without and with data, its page, and one sentence for what cannot be."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from smelt.report.accumulator_bits import layer_rows, render_accumulator_bits
from tests import mixtures
from tests.cli.conftest import Place, Smelt
from tests.tiny import BUILDS


def test_without_data(place: Place, tmp_path: Path, smelt_here: Smelt) -> None:
    done = smelt_here(
        "accumulator-bits", place / "llama", "--seq-len", "32", "--batch-size", "1000",
        "--json", str(tmp_path / "bits.json"), "-o", str(tmp_path / "page.html"),
    )  # fmt: skip
    assert done.code == 0, done.err
    content = json.loads((tmp_path / "bits.json").read_text())
    gemms = {gemm["name"]: gemm for gemm in content["layers"][0]["gemms"]}
    assert gemms["gradient"] == {
        "name": "gradient", "length": 32_000, "nonzero_ratio": None, "bits": 11, "chunked_bits": 6,
    }  # fmt: skip
    assert "batches of 1000 sequences of 32 tokens" in done.out.replace(
        "\n", " "
    ) and "11 mantissa bits" in done.out.replace("\n", " ")
    page = (tmp_path / "page.html").read_text()
    assert page.count("<circle") == 2 * sum(len(layer["gemms"]) for layer in content["layers"])
    assert "http" not in page.replace("http-equiv", "") and "<script" not in page


def test_with_data(place: Place, tmp_path: Path, smelt_here: Smelt) -> None:
    done = smelt_here(
        "accumulator-bits", place / "bert", "--data", place / "rows.jsonl", "--samples", "3", "--seq-len", "16",
        "--json", str(tmp_path / "bits.json"),
    )  # fmt: skip
    assert done.code == 0, done.err
    content = json.loads((tmp_path / "bits.json").read_text())
    ratios = [gemm["nonzero_ratio"] for layer in content["layers"] for gemm in layer["gemms"]]
    assert all(0 < ratio <= 1 for ratio in ratios) and min(ratios) < 1
    assert "sequences of at most 16 tokens" in done.out.replace("\n", " ")


def test_a_mixture_is_loaded(tmp_path: Path, smelt_here: Smelt) -> None:
    mixtures.saved("mixtral", tmp_path / "mixtral")
    done = smelt_here("accumulator-bits", str(tmp_path / "mixtral"), "--seq-len", "16")
    assert done.code == 0, done.err
    assert "depend on values" in done.err and "experts" in done.out


def test_images(tmp_path: Path, smelt_here: Smelt) -> None:
    BUILDS["resnet"]().save_pretrained(tmp_path / "resnet")
    done = smelt_here("accumulator-bits", str(tmp_path / "resnet"), "--image-size", "32", "--batch-size", "128")
    assert done.code == 0, done.err
    assert "batches of 128 images of 32 pixels" in done.out.replace("\n", " ")
    assert "32768" in done.out  # 128 * 16 * 16 in the first convolution


def test_images_as_data(tmp_path: Path, smelt_here: Smelt) -> None:
    image = pytest.importorskip("PIL.Image", reason="pillow is not installed")
    BUILDS["resnet"]().save_pretrained(tmp_path / "resnet")
    values = {"do_resize": True, "size": {"height": 32, "width": 32}, "image_mean": [0.5], "image_std": [0.5]}
    (tmp_path / "resnet" / "preprocessor_config.json").write_text(json.dumps(values))
    for index in range(6):
        (tmp_path / "images" / "ab"[index % 2]).mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(index).integers(0, 256, (32, 32, 3)).astype(np.uint8)
        image.fromarray(pixels).save(tmp_path / "images" / "ab"[index % 2] / f"{index}.png")
    call = ("accumulator-bits", str(tmp_path / "resnet"), "--data", str(tmp_path / "images"))
    done = smelt_here(*call, "--json", str(tmp_path / "bits.json"))
    assert done.code == 0, done.err
    layers = json.loads((tmp_path / "bits.json").read_text())["layers"]
    assert [gemm["name"] for gemm in layers[0]["gemms"]] == ["forward", "gradient"]
    assert layers[0]["gemms"][1]["length"] == 32 * 16 * 16
    assert all(gemm["nonzero_ratio"] is not None for layer in layers for gemm in layer["gemms"])
    smelt_here(*call, "--samples", "1").refused("need at least two samples per batch")


def test_equal_layers_are_one_row_and_names_are_escaped() -> None:
    gemm = {"name": "forward", "length": 8, "nonzero_ratio": 0.5, "bits": 5, "chunked_bits": 5}
    names = ["a.0.<b>", "a.1.<b>", "a.2.<b>"]
    layers = [{"name": name, "kind": "linear", "gemms": [gemm]} for name in names]
    layers[2] = {**layers[2], "gemms": [{**gemm, "bits": 6}]}
    content = {
        "model": "<m>", "data": None, "product_bits": 5, "chunk_size": 64, "batch_size": 2, "sample": "images",
        "curve": [(16, 5, 5), (32, 5, 5)], "layers": layers,
    }  # fmt: skip
    assert [row[0] for row in layer_rows(content)] == ["a.*.<b> (2)", "a.2.<b>"]
    page = render_accumulator_bits(content)
    assert "<b>" not in page and "<m>" not in page


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("MODEL", "--seq-len", "100000"), "this model's context is"),
        (("MODEL", "--data", "missing.txt"), "missing.txt"),
        (("MODEL", "--label", "x"), "name columns of --data: add it"),
        (("MODEL", "--product-bits", "0"), "--product-bits"),
        (("MODEL", "-o", "/dev/null/page.html"), "/dev/null is not a folder"),
        (("nothing",), "nothing"),
    ],
)
def test_bad_input(arguments: tuple[str, ...], words: str, place: Place, smelt_here: Smelt) -> None:
    smelt_here("accumulator-bits", *(place / "llama" if part == "MODEL" else part for part in arguments)).refused(words)


def test_a_classifier_needs_labels(place: Place, smelt_here: Smelt) -> None:
    smelt_here("accumulator-bits", place / "bert", "--data", place / "text.txt").refused("has no labels")
