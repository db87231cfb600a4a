"""User errors: exit code 2, one sentence that names the cause, no traceback, and nothing written."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.cli.conftest import Place, Smelt, bert_recipe, llama_recipe

pytestmark = pytest.mark.usefixtures("quick")


@pytest.fixture
def broken(place: Place, tmp_path: Path) -> Path:
    """Return a copy of the language model to corrupt."""
    return Path(shutil.copytree(place / "llama", tmp_path / "model"))


def tree(folder: Path) -> list[str]:
    return sorted(str(path) for path in folder.rglob("*"))


class TestModels:
    """Every command reports the same error for an unreadable model."""

    def refused_everywhere(
        self, model: str, words: str, place: Place, smelt_here: Smelt, folder: Path,
        commands: tuple[str, ...] = ("inspect", "bench", "eval", "plan", "compress"),
    ) -> None:  # fmt: skip
        here = tree(folder)
        for command in commands:
            more = ["--data", place / "text.txt"] if command == "eval" else []
            more += ["-r", place / "llama.yaml", "-o", str(folder / "out")] if command in ("plan", "compress") else []
            smelt_here(command, model, *more).refused(words)
        assert tree(folder) == here

    def test_a_missing_folder(self, place: Place, smelt_here: Smelt, tmp_path: Path) -> None:
        self.refused_everywhere(str(tmp_path / "nowhere"), "no model at", place, smelt_here, tmp_path)

    def test_a_broken_config(self, broken: Path, place: Place, smelt_here: Smelt, tmp_path: Path) -> None:
        (broken / "config.json").write_text('{"model_type": "llama", ')
        self.refused_everywhere(str(broken), "config.json", place, smelt_here, tmp_path)

    def test_an_unknown_family(self, broken: Path, place: Place, smelt_here: Smelt, tmp_path: Path) -> None:
        sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
        config = transformers.GPTNeoXConfig(**sizes, vocab_size=99, max_position_embeddings=128)
        transformers.GPTNeoXForCausalLM(config).save_pretrained(broken)
        fields = json.loads((broken / "config.json").read_text())
        (broken / "config.json").write_text(json.dumps({**fields, "model_type": "gpt_neoxx"}))
        self.refused_everywhere(str(broken), "the model_type 'gpt_neoxx'", place, smelt_here, tmp_path)

    def test_a_single_file(self, broken: Path, place: Place, smelt_here: Smelt, tmp_path: Path) -> None:
        file = broken / "pytorch_model.bin"
        file.write_bytes(b"anything")
        self.refused_everywhere(str(file), "a file that Smelt does not load", place, smelt_here, tmp_path)

    def test_a_hub_id_without_a_network(
        self, place: Place, smelt_here: Smelt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        self.refused_everywhere("nobody/no-such-model", "nobody/no-such-model", place, smelt_here, tmp_path)

    def test_truncated_weights(self, broken: Path, place: Place, smelt_here: Smelt, tmp_path: Path) -> None:
        content = (broken / "model.safetensors").read_bytes()
        (broken / "model.safetensors").write_bytes(content[: len(content) // 2])
        arguments = ["compress", str(broken), "-r", place / "llama.yaml", "-o", str(tmp_path / "out")]
        smelt_here(*arguments).refused("model.safetensors")
        assert not list(tmp_path.glob("out*"))

    def test_a_pickle(self, broken: Path, place: Place, smelt_here: Smelt, tmp_path: Path) -> None:
        (broken / "model.safetensors").unlink()
        torch.save({"weight": torch.zeros(2)}, broken / "pytorch_model.bin")
        arguments = ["compress", str(broken), "-r", place / "llama.yaml", "-o", str(tmp_path / "out")]
        smelt_here(*arguments).refused("safetensors")
        assert not list(tmp_path.glob("out*"))


RECIPES = {
    "not YAML": ("steps: [", "not valid YAML"),
    "a date that is none": ("seed: 2020-99-99", "not valid YAML"),
    "a list": ("[1, 2]", "must be a mapping"),
    "empty": ("", "must be a mapping"),
    "no steps": ("seed: 1", "needs `steps`"),
    "an unknown key": ("stepz: []", "no key 'stepz'"),
    "an unknown method": ("steps: [{method: shrink}]", "no method 'shrink'"),
    "a method that is a list": ("steps: [{method: [fisher]}]", "name of a method"),
    "a step that is a word": ("steps: [fisher]", "mapping with a `method`"),
    "an unknown parameter": ("steps: [{method: random, budget: {macs: 0.5}, speed: 9}]", "no parameter 'speed'"),
    "no budget": ("steps: [{method: random}]", "needs `budget`"),
    "two budgets": ("steps: [{method: random, budget: {macs: 0.5, bytes: 0.5}}]", "one measure"),
    "an unknown budget": ("steps: [{method: random, budget: {joules: 0.5}}]", "parameters, macs, bytes, latency"),
    "keep nothing": ("steps: [{method: random, budget: {macs: 0}}]", "above 0"),
    "keep too much": ("steps: [{method: random, budget: {macs: 1.5}}]", "at most 1"),
    "keep a word": ("steps: [{method: random, budget: {macs: a}}]", "'a'"),
    "keep no number": ("steps: [{method: random, budget: {macs: .nan}}]", "nan"),
    "a wrong type": ("steps: [{method: random, budget: {macs: 0.5}, ffn_multiple: 1.5}]", "must be an integer"),
    "a cap past all": ("steps: [{method: random, budget: {macs: 0.5}, max_sparsity: 2}]", "between 0 and 1"),
    "a multiple of none": ("steps: [{method: random, budget: {macs: 0.5}, ffn_multiple: 0}]", "between 1 and"),
    "an unknown repair": ("steps: [{method: random, budget: {macs: 0.5}, repair: glue}]", "none, tune, full"),
    "a seed below zero": ("seed: -1\nsteps: [{method: random, budget: {macs: 0.5}}]", "seed"),
    "samples below zero": ("data: {samples: -4}\nsteps: [{method: random, budget: {macs: 0.5}}]", "samples"),
    "samples past counting": (
        f"data: {{samples: {10**30}}}\nsteps: [{{method: random, budget: {{macs: 0.5}}}}]",
        "10^9",
    ),
    "samples as a word": ("data: {samples: many}\nsteps: [{method: random, budget: {macs: 0.5}}]", "'many'"),
    "unknown data": ("data: {file: a.txt}\nsteps: [{method: random, budget: {macs: 0.5}}]", "no key 'file'"),
    "data that is a word": ("data: a.txt\nsteps: [{method: random, budget: {macs: 0.5}}]", "`data` of the recipe"),
    "a size that is none": ("memory_limit: much\nsteps: [{method: random, budget: {macs: 0.5}}]", "2 GB"),
}


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe(name: str, place: Place, smelt_here: Smelt, tmp_path: Path) -> None:
    text, message = RECIPES[name]
    (tmp_path / "recipe.yaml").write_text(text)
    arguments = [place / "llama", "-r", str(tmp_path / "recipe.yaml"), "-o", str(tmp_path / "out")]
    for command in ("plan", "compress"):
        done = smelt_here(command, *arguments)
        done.refused(message)
        assert "recipe.yaml" in done.err and done.err.count("\n") == 1
    assert tree(tmp_path) == [str(tmp_path / "recipe.yaml")]


def test_a_missing_recipe(place: Place, smelt_here: Smelt, tmp_path: Path) -> None:
    arguments = [place / "llama", "-r", str(tmp_path / "none.yaml"), "-o", str(tmp_path / "out")]
    smelt_here("compress", *arguments).refused("there is no recipe at")


def llama(place: Place, data: dict[str, Any] | None = None, **step: Any) -> dict[str, Any]:
    content = llama_recipe(place, **step)
    content["data"] |= data or {}
    return content


def bert(place: Place, data: dict[str, Any] | None = None, **step: Any) -> dict[str, Any]:
    content = bert_recipe(place, **step)
    content["data"] |= data or {}
    return content


def refused_run(model: str, content: Any, words: str, place: Place, smelt_here: Smelt, folder: Path) -> None:
    """Check that the run is refused and leaves no output and no work folder."""
    recipe = place.recipe("bad.yaml", content)
    smelt_here("compress", place / model, "-r", recipe, "-o", str(folder / "out")).refused(words)
    assert not list(folder.glob("*out*")) and not list(folder.glob(".*"))


def test_a_budget_that_cannot_be_met(place: Place, smelt_here: Smelt, tmp_path: Path) -> None:
    content = llama(place, budget={"parameters": 0.01}, max_sparsity=0.5)
    refused_run("llama", content, "budget cannot be met", place, smelt_here, tmp_path)


def test_samples_longer_than_the_context(place: Place, smelt_here: Smelt, tmp_path: Path) -> None:
    refused_run("llama", llama(place, {"seq_len": 500}), "context is 128", place, smelt_here, tmp_path)


def test_a_prompt_for_a_model_without_generation(place: Place, smelt_here: Smelt, tmp_path: Path) -> None:
    arguments = ["-r", place / "bert.yaml", "-o", str(tmp_path / "out"), "--prompt", "hello"]
    smelt_here("compress", place / "bert", *arguments).refused("cannot generate text")
    assert tree(tmp_path) == []


def test_gradients_of_a_model_without_a_head(place: Place, smelt_here: Smelt, tmp_path: Path) -> None:
    shutil.copytree(place / "bert", tmp_path / "headless")
    config = json.loads((tmp_path / "headless" / "config.json").read_text())
    (tmp_path / "headless" / "config.json").write_text(json.dumps({**config, "architectures": ["BertModel"]}))
    arguments = ["compress", str(tmp_path / "headless"), "-o", str(tmp_path / "out"), "--no-speed", "-r"]
    smelt_here(*arguments, place / "bert.yaml").refused("needs a head with a loss")
    recipe = place.recipe("headless.yaml", bert(place, method="wanda-sp"))
    assert smelt_here(*arguments, recipe).code == 0


DATA = {
    "a missing file": ("text.txt", None, "does not exist"),
    "an empty file": ("text.txt", "", "empty"),
    "a file of spaces": ("text.txt", " \n\n ", "empty"),
    "too short a text": ("text.txt", "the cat sees the dog.", "too few for 24 windows"),
    "text that is no text": ("text.txt", b"\xff\xfe\x00\x80", "not UTF-8"),
    "a broken line": ("text.jsonl", '{"text": "a"}\n{"text": "b"\n', "line 2"),
    "no column of text": ("text.jsonl", '{"number": 1}\n', "'text'"),
    "labeled rows": ("text.jsonl", '{"sentence": "a", "label": 1}\n', "language model"),
    "an unknown kind of file": ("text.xyz", "what is this", ".jsonl"),
}


@pytest.mark.parametrize("name", DATA)
def test_text(name: str, place: Place, smelt_here: Smelt, tmp_path: Path) -> None:
    file, text, message = DATA[name]
    if text is not None:
        (tmp_path / file).write_bytes(text if isinstance(text, bytes) else text.encode())
    refused_run("llama", llama(place, {"source": str(tmp_path / file)}), message, place, smelt_here, tmp_path)


ROWS = {
    "plain text": ("rows.txt", "no labels here", {}, "no labels"),
    "a label that is missing": ("rows.jsonl", '{"sentence": "a", "label": 1}\n{"sentence": "b"}\n', {}, "row 2"),
    "no column of labels": ("rows.jsonl", '{"sentence": "a"}\n{"sentence": "b"}\n', {}, "has no labels"),
    "a column that is not there": ("rows.jsonl", '{"sentence": "a", "label": 1}\n', {"label": "class"}, "'class'"),
    "a class too many": ("rows.jsonl", '{"sentence": "a", "label": 0}\n{"sentence": "b", "label": 2}\n', {}, "label 2"),
    "numbers": ("rows.jsonl", '{"sentence": "a", "label": 0.5}\n{"sentence": "b", "label": 1}\n', {}, "numbers"),
    "one row": ("rows.jsonl", '{"sentence": "a", "label": 1}\n', {}, "too few rows"),
    "empty": ("rows.jsonl", "", {}, "empty"),
}


@pytest.mark.parametrize("name", ROWS)
def test_labeled_rows(name: str, place: Place, smelt_here: Smelt, tmp_path: Path) -> None:
    file, text, columns, message = ROWS[name]
    (tmp_path / file).write_text(text)
    refused_run("bert", bert(place, {"source": str(tmp_path / file), **columns}), message, place, smelt_here, tmp_path)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--data", "text.txt", "--min", "3"], "give a maximum"),
        (["--data", "text.txt", "--metric", "beauty"], "'beauty'"),
        (["--data", "text.txt", "--device", "abacus"], "'abacus'"),
        (["--data", "text.txt", "--device", "meta"], "'meta'"),
        (["--data", "text.txt", "--limit", "1"], "at least two"),
        (["--data", "text.txt", "--against", "nowhere"], "nowhere"),
        (["--data", "rows.jsonl"], "labeled rows"),
        (["--data", "nothing.txt"], "does not exist"),
        (["--data", "text.txt", "--seed", "-1"], "--seed"),
        (["--data", "text.txt", "--seed", str(2**70)], "--seed"),
        (["--data", "text.txt", "--json", "text.txt/result.json"], "is not a folder"),
        (["--data", "text.txt", "--json", "."], "is a folder"),
        (["--data", "text.txt", "--wisdom"], "--wisdom"),
        ([], "--data"),
    ],
)
def test_eval(
    arguments: list[str], words: str, place: Place, smelt_here: Smelt, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place.folder)
    here = tree(place.folder)
    smelt_here("eval", "llama", *arguments).refused(words)
    assert tree(place.folder) == here


def test_an_unknown_metric_of_a_classifier(place: Place, smelt_here: Smelt) -> None:
    smelt_here("eval", place / "bert", "--data", place / "rows.jsonl", "--metric", "beauty").refused("accuracy")


def test_an_unknown_command(smelt_here: Smelt) -> None:
    smelt_here("forge").refused("forge")


class TestPlaces:
    """An unwritable output is reported before any work is done."""

    def refused(self, out: Path, words: str, place: Place, smelt_here: Smelt) -> None:
        done = smelt_here("compress", place / "llama", "-r", place / "llama.yaml", "-o", str(out))
        done.refused(words)
        assert "loading" not in done.err

    def test_it_exists(self, place: Place, smelt_here: Smelt, tmp_path: Path) -> None:
        self.refused(tmp_path, "exists already", place, smelt_here)

    def test_a_dangling_symlink(self, place: Place, smelt_here: Smelt, tmp_path: Path) -> None:
        (tmp_path / "out").symlink_to(tmp_path / "gone")
        self.refused(tmp_path / "out", "exists already", place, smelt_here)

    def test_inside_a_file(self, place: Place, smelt_here: Smelt, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        self.refused(tmp_path / "file" / "out", "is not a folder", place, smelt_here)

    def test_a_name_that_is_too_long(self, place: Place, smelt_here: Smelt, tmp_path: Path) -> None:
        self.refused(tmp_path / ("x" * 300), "name too long", place, smelt_here)

    def test_a_folder_without_write_permission(
        self, place: Place, smelt_here: Smelt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Root may write everywhere, so the OS error is faked."""
        monkeypatch.setattr("os.access", lambda path, mode: not mode & os.W_OK)
        self.refused(tmp_path / "out", "may not be written to", place, smelt_here)
        assert tree(tmp_path) == []


def test_an_internal_error_is_one_sentence_too(
    place: Place, smelt_here: Smelt, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise KeyError("oops")

    monkeypatch.setattr("smelt.models.load.skeleton", fail)
    smelt_here("inspect", place / "llama").refused("this is a bug; run again with --debug", code=1)
    with pytest.raises(KeyError, match="oops"):
        smelt_here("inspect", place / "llama", "--debug")


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried")]
)
def test_too_little_memory(error: Exception, place: Place, smelt_here: Smelt, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr("smelt.models.load.skeleton", fail)
    smelt_here("inspect", place / "llama").refused("out of memory")


def test_debug_shows_the_traceback_of_a_user_error(smelt_here: Smelt) -> None:
    from smelt.errors import ModelError

    with pytest.raises(ModelError, match="no model at"):
        smelt_here("--debug", "inspect", "nowhere")
