"""`smelt sensitivity`: page, JSON and table for decoder, encoder and mixture; one sentence for what cannot be."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests import mixtures
from tests.character_tokenizer import character_tokenizer
from tests.cli.conftest import Place, Smelt
from tests.tiny import BUILDS


def test_a_decoder(place: Place, tmp_path: Path, smelt_here: Smelt) -> None:
    page, result = tmp_path / "page.html", tmp_path / "result.json"
    done = smelt_here(
        "sensitivity", place / "llama", "--data", place / "text.txt", "--samples", "3", "--seq-len", "24",
        "-o", str(page), "--json", str(result),
    )  # fmt: skip
    assert done.code == 0, done.err
    content = json.loads(result.read_text())
    kinds = [removal["kind"] for removal in content["removals"]]
    assert {kind: kinds.count(kind) for kind in kinds} == {"layers": 3, "parts": 6, "heads": 6, "channels": 12}
    layers = [removal["increase"] for removal in content["removals"] if removal["kind"] == "layers"]
    assert max(layers) > 0.1  # the model is trained, so a layer is worth something
    text = page.read_text()
    assert text.count("<td") > 27 and "Experts" not in text and "cheapest to remove" in done.out
    for removal in content["removals"]:
        assert f"{removal['increase']:+.4f}".replace("-", "−") in text
    assert str(place.folder) not in text and "/llama costs to remove" in text, "paths are shortened"
    assert "http" not in text.replace("http-equiv", "") and "<script" not in text


def test_a_classifier_and_a_choice(place: Place, tmp_path: Path, smelt_here: Smelt) -> None:
    done = smelt_here(
        "sensitivity", place / "bert", "--data", place / "rows.jsonl", "--samples", "6", "--only", "heads,layers",
        "-o", str(tmp_path / "page.html"), "--json", str(tmp_path / "result.json"),
    )  # fmt: skip
    assert done.code == 0, done.err
    kinds = {removal["kind"] for removal in json.loads((tmp_path / "result.json").read_text())["removals"]}
    assert kinds == {"heads", "layers"}


def test_hessian_traces(place: Place, tmp_path: Path, smelt_here: Smelt) -> None:
    page, result = tmp_path / "page.html", tmp_path / "result.json"
    done = smelt_here(
        "sensitivity", place / "bert", "--data", place / "rows.jsonl", "--samples", "4", "--measure", "hessian",
        "--probes", "3", "-o", str(page), "--json", str(result),
    )  # fmt: skip
    assert done.code == 0, done.err
    content, text = json.loads(result.read_text()), page.read_text()
    assert {removal["kind"] for removal in content["removals"]} == {"parts", "heads", "channels"}
    assert content["measure"] == "hessian" and "Hessian traces with 3 random vectors each" in text
    assert "Nothing is removed here" in text and "Layers" not in text


def test_a_mixture(tmp_path: Path, smelt_here: Smelt, place: Place) -> None:
    mixtures.saved("olmoe", tmp_path / "olmoe")
    character_tokenizer().save_pretrained(tmp_path / "olmoe")
    done = smelt_here(
        "sensitivity", str(tmp_path / "olmoe"), "--data", place / "text.txt", "--samples", "2", "--seq-len", "16",
        "--only", "experts,heads", "-o", str(tmp_path / "page.html"),
    )  # fmt: skip
    assert done.code == 0, done.err
    text = (tmp_path / "page.html").read_text()
    assert "expert 3 of model.layers.1.mlp.experts" in text
    assert re.search(r"its heads share one norm", text)


@pytest.mark.parametrize(
    ("model", "arguments", "words"),
    [
        ("llama", ("--only", "neurons"), "there are no 'neurons' to remove"),
        ("llama", ("--data", "missing.txt"), "missing.txt"),
        ("bert", (), "default has no labels"),
        ("llama", ("--measure", "taylor"), "--measure is one of removal, hessian"),
        ("llama", ("--measure", "hessian", "--only", "layers"), "use --measure removal"),
        ("llama", ("--measure", "hessian", "--probes", "1"), "--probes"),
    ],
)
def test_bad_input(
    model: str, arguments: tuple[str, ...], words: str, place: Place, tmp_path: Path, smelt_here: Smelt
) -> None:
    smelt_here("sensitivity", place / model, "-o", str(tmp_path / "page.html"), *arguments).refused(words)
    assert not (tmp_path / "page.html").exists()


def test_a_model_without_a_loss_is_refused(tmp_path: Path, smelt_here: Smelt) -> None:
    BUILDS["bert"]().bert.save_pretrained(tmp_path / "embedding")
    smelt_here("sensitivity", str(tmp_path / "embedding"), "-o", str(tmp_path / "page.html")).refused(
        "is a model for embedding, and its loss on data is not known"
    )
