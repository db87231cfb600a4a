"""The passport: what it says about a run, that the run can be repeated from it, and that it trusts no file."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import smelt.compression.pruning.base as pruning
import smelt.compression.recipe.plan
import smelt.compression.recipe.run
from smelt.compression.passport.document import MAX_FILES, PASSPORT, read_passport
from smelt.compression.passport.origin import calibration_warning, describe_data, license_of
from smelt.compression.passport.reproduce import Inputs, Reproduction, reproduce
from smelt.compression.pruning import selection
from smelt.compression.recipe.recipe import Recipe
from smelt.compression.recipe.run import compress
from smelt.data import LabeledData, TextData
from smelt.errors import DataError, ModelError, RecipeError, SmeltError
from smelt.fingerprint import fingerprint_of
from smelt.models.load import load
from smelt.models.model import Model
from smelt.models.verify import outputs, probe
from smelt.progress import NullProgress
from tests.character_tokenizer import character_tokenizer
from tests.tiny import BUILDS
from tests.trained import sentences

PRUNING = {"method": "fisher", "budget": {"parameters": 0.8}}
GPTQ = {"method": "gptq", "bits": 4, "group_size": 16}
SEARCH = {"method": "mixed", "bits": 4.5, "group_size": 16, "rounding": "rtn"}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Skip what other tests cover: the clean process, and timing the machine for the plan."""

    def verify_here(model: Model, folder: Path) -> None:
        inputs = probe(model)
        assert torch.equal(outputs(load(folder), inputs), outputs(model, inputs))

    monkeypatch.setattr(smelt.compression.recipe.run, "verify", verify_here)
    monkeypatch.setattr(smelt.compression.recipe.plan, "matrix_speed", lambda *_: 1e10)
    monkeypatch.setenv("SMELT_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random language model and a text."""
    folder = tmp_path_factory.mktemp("passport")
    BUILDS["llama"]().save_pretrained(folder / "llama")
    character_tokenizer().save_pretrained(folder / "llama")
    (folder / "text.txt").write_text(sentences(300))
    return folder


def recipe(place: Path, *steps: dict[str, Any], **data: Any) -> Recipe:
    return Recipe.parse(
        {
            "data": {"source": str(place / "text.txt"), "samples": 4, "seq_len": 16, "batch_size": 2, **data},
            "evaluate": {"context": 32, "limit": 200},
            "steps": list(steps),
        }
    )


def made(place: Path, out: Path, *steps: dict[str, Any], **data: Any) -> Path:
    return compress(str(place / "llama"), recipe(place, *steps, **data), out, speed=False).folder


def repeat(folder: Path, **inputs: str) -> Reproduction:
    return reproduce(
        read_passport(folder), Inputs(**inputs), progress=NullProgress(), say=lambda _: None, work_folder=None
    )


@pytest.fixture(scope="module")
def pruned(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(place, tmp_path_factory.mktemp("out") / "pruned", PRUNING)


def test_it_describes_files_source_data_and_versions(place: Path, pruned: Path) -> None:
    passport = read_passport(pruned)
    files = {path.name for path in pruned.iterdir()} - {PASSPORT}
    assert set(passport.files) == files
    for name, facts in passport.files.items():
        content = (pruned / name).read_bytes()
        assert (facts.bytes, facts.sha256) == (len(content), hashlib.sha256(content).hexdigest())
    assert set(passport.reproducible) == files - {"measurements.json", "report.html"}
    weights = hashlib.sha256((place / "llama" / "model.safetensors").read_bytes()).hexdigest()
    assert passport.source["files"]["model.safetensors"] == weights
    assert passport.source["sha256"] == fingerprint_of(passport.source["files"])
    assert passport.source["license"] == "not stated"
    assert passport.recipe == recipe(place, PRUNING).for_device("cpu").to_json() and passport.seeds == {"recipe": 0}
    assert passport.recipe["steps"][0]["alignment"] == 32
    text = (place / "text.txt").read_text()
    cut = int(len(text) * 0.8)
    assert passport.data["calibration"]["sha256"] == describe_data(TextData("", (text[:cut],)))["sha256"]
    assert passport.data["evaluation"]["sha256"] == describe_data(TextData("", (text[cut:],)))["sha256"]
    comparison = passport.measurements["quality"]["comparison"]
    assert comparison["low"] <= comparison["difference"] <= comparison["high"]
    assert set(passport.run["versions"]) >= {"smelt", "torch", "transformers", "tokenizers", "safetensors", "python"}
    parts = load(pruned).anatomy.parts
    original = load(place / "llama").anatomy.parts
    for part, full, text in zip(parts, original, passport.choices["steps"]["step-0"]["choice"], strict=True):
        assert len(selection.parse_ranges(text, full)) == part.units


def test_the_report_shows_the_hashes_and_the_record_has_no_choices(pruned: Path) -> None:
    passport, page = read_passport(pruned), (pruned / "report.html").read_text()
    assert all(hashed in page for hashed in (*passport.reproducible.values(), passport.fingerprint))
    assert passport.source["sha256"] in page and passport.data["calibration"]["sha256"] in page
    assert "choices" not in json.loads((pruned / "measurements.json").read_text())["steps"][0]


@pytest.mark.parametrize("steps", [(PRUNING,), (GPTQ,), (SEARCH,), (PRUNING, {**GPTQ, "group_size": -1})])
def test_a_repeated_run_writes_the_same_bytes(place: Path, tmp_path: Path, steps: tuple[dict[str, Any], ...]) -> None:
    folder = made(place, tmp_path / "out", *steps)
    result = repeat(folder)
    assert result.changes.none and result.files == 6, result


def test_a_repeated_run_does_not_search_again(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A latency budget measures the machine: a second search would decide differently."""
    calls = []

    def search(anatomy: Any, *_: Any) -> list[np.ndarray]:
        calls.append(1)
        return [np.arange(len(calls), part.units) for part in anatomy.parts]

    monkeypatch.setattr(pruning, "search_under_latency", search)
    folder = made(place, tmp_path / "out", {"method": "fisher", "budget": {"latency": 0.8}, "repair": "none"})
    assert repeat(folder).changes.none
    assert len(calls) == 1


def test_a_repeated_run_takes_the_recorded_batch_size(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`auto` depends on the memory of the machine."""
    folder = made(place, tmp_path / "out", GPTQ, batch_size="auto")
    chosen = read_passport(folder).choices["batch_size"]
    monkeypatch.setattr("smelt.compression.recipe.batch.MAX_BATCH_SIZE", chosen // 2)
    assert repeat(folder).changes.none


def test_the_inputs_may_have_moved(place: Path, pruned: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "llama", tmp_path / "moved")
    shutil.copy(place / "text.txt", tmp_path / "other.txt")
    assert repeat(pruned, source=str(tmp_path / "moved"), data=str(tmp_path / "other.txt")).changes.none


def test_a_moved_run_is_not_timed_and_needs_no_recorded_evaluation(place: Path, pruned: Path, tmp_path: Path) -> None:
    content = json.loads((pruned / PASSPORT).read_text())
    content["data"]["evaluation"] = None  # as nobody vouches for a passport
    (tmp_path / PASSPORT).write_text(json.dumps(content))
    said: list[str] = []
    result = reproduce(
        read_passport(tmp_path), Inputs(), progress=NullProgress(), say=said.append, work_folder=tmp_path
    )
    assert result.changes.none and said and not any("timing" in line for line in said)


def test_another_source_model_is_refused(place: Path, pruned: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "llama", tmp_path / "llama")
    weights = tmp_path / "llama" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(ModelError, match="is not the model that the artifact was made from"):
        repeat(pruned, source=str(tmp_path / "llama"))


def test_other_data_is_refused(place: Path, pruned: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text((place / "text.txt").read_text().replace("cat", "cow", 1))
    with pytest.raises(DataError, match=r"the calibration data .* is not that of the run"):
        repeat(pruned, data=str(tmp_path / "text.txt"))


def test_other_bytes_are_named_with_the_reason(place: Path, pruned: Path, tmp_path: Path) -> None:
    content = json.loads((pruned / PASSPORT).read_text())
    content["files"]["config.json"]["sha256"] = "0" * 64
    content["run"]["versions"]["torch"] = "1.0"
    (tmp_path / PASSPORT).write_text(json.dumps(content))
    result = repeat(tmp_path)
    assert result.changes.different == ("config.json",) and not result.changes.missing
    assert any(reason.startswith("torch 1.0 then") for reason in result.reasons)


@pytest.mark.parametrize(
    "choices",
    [
        {"step-0": {"choice": ["0-1"]}},
        {"step-0": {"choice": ["0-99"] * 6}},
        {"step-0": {"choice": ["1,0"] * 6}},
        {"step-0": {"choice": ["0,0"] * 6}},
        {"step-0": {"choice": ["-1"] * 6}},
        {"step-0": {"choice": [[0]] * 6}},
        {"step-0": {"choice": 1}},
        {"step-0": []},
        [],
    ],
)
def test_choices_that_do_not_fit_are_refused(place: Path, tmp_path: Path, choices: Any) -> None:
    with pytest.raises(RecipeError, match="the recorded choice"):
        compress(
            str(place / "llama"), recipe(place, PRUNING), tmp_path / "out", speed=False, choices={"steps": choices}
        )


@pytest.mark.parametrize("widths", [{}, {"x": 4}, [], "4"])
def test_bit_widths_that_do_not_fit_are_refused(place: Path, tmp_path: Path, widths: Any) -> None:
    steps = {"steps": {"step-0": {"bit_widths": widths}}}
    with pytest.raises(RecipeError, match="the recorded bit widths"):
        compress(str(place / "llama"), recipe(place, SEARCH), tmp_path / "out", speed=False, choices=steps)


@pytest.mark.parametrize(
    "change",
    [
        {"files": {"../x": {"bytes": 1, "sha256": "0" * 64}}},
        {"files": {"/etc/passwd": {"bytes": 1, "sha256": "0" * 64}}},
        {"files": {"a/../../x": {"bytes": 1, "sha256": "0" * 64}}},
        {"files": {"./x": {"bytes": 1, "sha256": "0" * 64}}},
        {"files": {"a//x": {"bytes": 1, "sha256": "0" * 64}}},
        {"files": {"a\\x": {"bytes": 1, "sha256": "0" * 64}}},
        {"files": {"a\nx": {"bytes": 1, "sha256": "0" * 64}}},
        {"files": {PASSPORT: {"bytes": 1, "sha256": "0" * 64}}},
        {"files": {"x": {"bytes": -1, "sha256": "0" * 64}}},
        {"files": {"x": {"bytes": True, "sha256": "0" * 64}}},
        {"files": {"x": {"bytes": 1, "sha256": "0" * 63}}},
        {"files": {"x": 1}},
        {"files": {}},
        {"files": []},
        {"files": {str(number): {"bytes": 1, "sha256": "0" * 64} for number in range(MAX_FILES + 1)}},
        {"passport": 2},
        {"run": []},
        {"source": None},
    ],
)
def test_a_malformed_passport_is_refused(pruned: Path, tmp_path: Path, change: dict[str, Any]) -> None:
    content = json.loads((pruned / PASSPORT).read_text())
    (tmp_path / PASSPORT).write_text(json.dumps({**content, **change}))
    with pytest.raises(ModelError, match=r"passport\.json (lists|is damaged|has an unknown version)"):
        read_passport(tmp_path)


@pytest.mark.parametrize(
    "change",
    [{"probe": {"threads": 10**6}}, {"probe": {}}, {"source": {}}, {"run": {}}, {"recipe": {"steps": [{}]}}],
)
def test_claims_that_cannot_be_repeated_are_one_sentence(pruned: Path, tmp_path: Path, change: dict[str, Any]) -> None:
    content = json.loads((pruned / PASSPORT).read_text())
    (tmp_path / PASSPORT).write_text(json.dumps({**content, **change}))
    with pytest.raises(SmeltError):
        repeat(tmp_path)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, "not stated"),
        ({"README.md": "---\nlicense: mit\ntags: [a]\n---\n# Card"}, "mit"),
        ({"README.md": "---\nlicense: other\nlicense_name: llama3\n---\n"}, "llama3"),
        ({"README.md": "---\nlicense: [mit, apache-2.0]\n---\n"}, "mit, apache-2.0"),
        ({"README.md": "---\nlicense: {a: b}\n---\n"}, "not stated"),
        ({"README.md": "---\nlicense: [\n---\n"}, "not stated"),
        ({"README.md": "license: mit\n"}, "not stated"),
        ({"LICENSE": "\n  Apache License\n Version 2.0"}, "LICENSE: Apache License"),
        ({"config.json": '{"license": "bsd"}'}, "bsd"),
        ({"passport.json": '{"source": {"license": "gpl-3.0"}}', "LICENSE": "x"}, "gpl-3.0"),
    ],
)
def test_the_license_is_what_the_folder_says(tmp_path: Path, files: dict[str, str], expected: str) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert license_of(str(tmp_path)) == expected


def test_the_license_of_a_bundled_model_is_known() -> None:
    assert license_of("minilm-l6") == "Apache-2.0"


def test_the_hash_of_data_depends_on_every_item_and_label() -> None:
    def labeled(first: tuple[str, ...], labels: list[int]) -> LabeledData:
        return LabeledData("x", first, None, np.array(labels), False)

    data = [
        TextData("x", ("a", "b")),
        TextData("x", ("ab",)),
        TextData("x", ("b", "a")),
        labeled(("a", "b"), [0, 1]),
        labeled(("a", "b"), [1, 0]),
        labeled(("a", "\ud800"), [1, 0]),
    ]
    assert len({describe_data(entry)["sha256"] for entry in data}) == len(data)
    assert describe_data(TextData("y", ("a", "b")))["sha256"] == describe_data(data[0])["sha256"]
    assert describe_data(data[3])["items"] == 2 and describe_data(None) is None


@pytest.mark.parametrize(
    ("calibration", "warned"),
    [
        ({"name": "y", "sha256": describe_data(TextData("x", ("a",)))["sha256"]}, True),  # the same texts, renamed
        ({"name": "x", "sha256": "0"}, True),  # another part of the same data
        ({"name": "y", "sha256": "0"}, False),
        ("x", False),
        (None, False),
    ],
)
def test_evaluating_on_the_calibration_data_is_warned_about(tmp_path: Path, calibration: Any, warned: bool) -> None:
    data = TextData("x", ("a",))
    assert calibration_warning(str(tmp_path), data) is None
    (tmp_path / PASSPORT).write_text(json.dumps({"data": {"calibration": calibration}}))
    assert ("was calibrated on x" in (calibration_warning(str(tmp_path), data) or "")) == warned
