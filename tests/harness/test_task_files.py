"""Task files of lm-eval may not run code or use the network unless the user allows their code."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("lm_eval", reason="needs lm-eval: pip install 'smeltml[harness]'")

from smelt.errors import ConfigError, DataError
from smelt.harness.task_files import check_task_folder, isolated, load_tasks

ROWS = [
    {"query": "The sky is", "choices": ["blue", "a very long answer", "x"], "gold": 0},
    {"query": "Question: 2 + 2?", "choices": ["22", "4"], "gold": 1},
]


def task(folder: Path, **changes: Any) -> dict[str, Any]:
    """Return a task over two rows in a file beside it, with changed keys."""
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    return {
        "task": "two",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"validation": str(data)}, "cache_dir": str(folder / "cache")},
        "output_type": "multiple_choice",
        "validation_split": "validation",
        "doc_to_text": "{{query}}",
        "doc_to_target": "gold",
        "doc_to_choice": "choices",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
        **changes,
    }


def write(folder: Path, content: dict[str, Any], name: str = "two.yaml") -> None:
    (folder / name).write_text(yaml.safe_dump(content), encoding="utf-8")


def test_a_plain_folder_is_loaded(tmp_path: Path) -> None:
    write(tmp_path, task(tmp_path))
    with isolated():
        loaded = load_tasks(["two"], tmp_path)
    assert list(loaded["tasks"]) == ["two"] and len(loaded["tasks"]["two"].eval_docs) == 2


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("process_docs: !function code.run", r"runs Python code \(!function\)"),
        ("process_docs: !<!function> code.run", r"runs Python code \(!function\)"),
        ("metric_list: [{metric: !function code.run}]", r"runs Python code \(!function\)"),
        ("doc_to_text: !!python/name:os.system ''", "could not determine a constructor for the tag"),
    ],
)
def test_a_tag_is_code(tmp_path: Path, line: str, reason: str) -> None:
    (tmp_path / "two.yaml").write_text(f"task: two\n{line}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=reason):
        check_task_folder(tmp_path)
    check_task_folder(tmp_path, allow_code=True)


def test_a_tag_under_another_name_is_code(tmp_path: Path) -> None:
    (tmp_path / "two.yaml").write_text("%TAG !f! !func\n---\ntask: two\nprocess_docs: !f!tion code.run\n")
    with pytest.raises(ConfigError, match=r"runs Python code \(!function\)"):
        check_task_folder(tmp_path)


def test_an_included_file_is_checked(tmp_path: Path) -> None:
    folder = tmp_path / "tasks"
    folder.mkdir()
    (tmp_path / "base.txt").write_text("process_docs: !function code.run\n", encoding="utf-8")
    write(folder, task(folder, include="../base.txt"))
    with pytest.raises(ConfigError, match=r"base\.txt runs Python code"):
        check_task_folder(folder)


def test_allowed_code_runs_and_other_code_does_not(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text(
        "from pathlib import Path\n"
        "Path(__file__).with_name('ran').touch()\n"
        "def run(documents):\n    return documents\n", encoding="utf-8",
    )  # fmt: skip
    text = yaml.safe_dump(task(tmp_path)) + "process_docs: !function code.run\n"
    (tmp_path / "two.yaml").write_text(text, encoding="utf-8")
    with isolated(), pytest.raises(ConfigError, match="runs Python code"):
        load_tasks(["two"], tmp_path)
    assert not (tmp_path / "ran").exists()
    with isolated(allow_code=True):
        load_tasks(["two"], tmp_path, allow_code=True)
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"metric_list": [{"metric": "./metric"}]}, "would be run from a Python file"),
        ({"metric_list": [{"metric": "acc", "hf_evaluate": True}]}, "would be run from a Python file"),
        ({"dataset_kwargs": {"data_files": {"validation": "https://example.org/a.jsonl"}}}, "from the network"),
        ({"dataset_kwargs": {"data_files": "zip://a.jsonl::b.zip"}}, "from the network"),
        ({"dataset_path": "."}, "dataset_path"),
        ({"dataset_path": ["json"]}, "dataset_path"),
    ],
)
def test_keys_that_reach_outside_are_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    write(tmp_path, {"group": "outer", "task": [task(tmp_path, **changes)]})  # also inside of a group
    with pytest.raises(ConfigError, match=words):
        check_task_folder(tmp_path)


def test_templates_are_sandboxed(tmp_path: Path) -> None:
    write(tmp_path, task(tmp_path, doc_to_text="{{ query.__class__.__mro__[1].__subclasses__() | length }}"))
    with isolated(), pytest.raises(ConfigError, match="unsafe"):
        load_tasks(["two"], tmp_path)


def test_code_that_the_model_writes_is_never_run(tmp_path: Path) -> None:
    write(tmp_path, task(tmp_path, unsafe_code=True))
    with isolated(allow_code=True), pytest.raises(ConfigError, match="runs code that the model writes"):
        load_tasks(["two"], tmp_path, allow_code=True)


def test_data_that_is_not_here_is_not_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def refuse(*arguments: Any, **_: Any) -> None:
        tried.append(arguments)
        raise OSError("no network in this test")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    write(tmp_path, task(tmp_path, dataset_path="someone/nothing-of-this-name", dataset_kwargs=None))
    with isolated(), pytest.raises(DataError, match="cannot be loaded offline"):
        load_tasks(["two"], tmp_path)
    assert tried == []


def test_folders_and_names_that_do_not_exist(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no folder of task files"):
        check_task_folder(tmp_path / "none")
    with pytest.raises(ConfigError, match="no task files"):
        check_task_folder(tmp_path)
