"""No process that Smelt starts imports a file of the working directory or of a model folder."""

from __future__ import annotations

import ast
import os
import subprocess
from pathlib import Path

import pytest

from smelt.models.artifact import save_artifact
from smelt.models.chat_template import ChatTemplateRenderer
from smelt.models.model import Model
from smelt.models.verify import verify
from smelt.subprocesses import python_command, python_environment
from tests.serve.server_process import tokenizer
from tests.tiny import BUILDS

SOURCE = Path(__file__).parents[2] / "src" / "smelt"
_NAMES = (
    *("safetensors", "torch", "json", "pip", "sitecustomize", "usercustomize", "jinja2", "numpy", "transformers"),
    *("resource", "smelt", "tokenizers", "select", "encodings"),
)
# Every module that Smelt runs in a process of its own, with arguments that make it end after its imports.
_MODULES = {
    "smelt.models.verify": [],
    "smelt.models.template_worker": [],
    "smelt.serve.worker.loop": ["1000000"],
    "smelt.serve.engine.tensor_parallel": [],
    "pip": ["--version"],
}
# Files that start processes which are not Python: compilers, and the program that was compiled.
_COMPILER = {"kernels/cpu/build.py", "export/integer.py"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model folder that is the working directory, and full of modules that leave a mark when they are imported."""
    save_artifact(Model(BUILDS["resnet"]()), tmp_path)
    for name in _NAMES:
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'marker')!r}, 'w').close()\nraise SystemExit(7)\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("path", [None, "", ".", f"{os.pathsep}."])
@pytest.mark.parametrize("module", _MODULES)
def test_a_started_module_imports_nothing_from_there(
    module: str, path: str | None, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if path is not None and module != "pip" and module != "smelt.models.template_worker":
        pytest.skip("the path is handled in one place; the others import PyTorch, which takes long")
    if path is not None:
        monkeypatch.setenv("PYTHONPATH", path)
    command = python_command("-m", module, *_MODULES[module])
    subprocess.run(command, env=python_environment(), stdin=subprocess.DEVNULL, capture_output=True, check=False)
    assert not (folder / "marker").exists()


def test_plain_python_would_import_them(folder: Path) -> None:
    """Otherwise the tests above prove nothing."""
    command = [argument for argument in python_command("-m", "json.tool") if argument != "-P"]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONSAFEPATH"}
    subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    assert (folder / "marker").exists()


def test_verifying_and_rendering_run_in_such_processes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep)
    verify(Model(BUILDS["resnet"]()), folder)
    renderer = ChatTemplateRenderer(tokenizer())
    assert renderer.render([{"role": "user", "content": "hi"}])
    renderer.close()
    assert not (folder / "marker").exists()


def test_every_process_is_started_this_way() -> None:
    """A call that starts a process passes `env`, and its file builds the command with `python_command`."""
    starts = 0
    for file in sorted(SOURCE.rglob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = {alias.name for alias in node.names} | {getattr(node, "module", "") or ""}
                assert not names & {"multiprocessing", "multiprocessing.pool", "pty", "ProcessPoolExecutor"}, file
            name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            assert not name.startswith(("os.exec", "os.spawn", "os.system", "os.popen", "os.posix_spawn")), file
            if not name.startswith("subprocess.") or str(file.relative_to(SOURCE)) in _COMPILER:
                continue
            assert name in ("subprocess.run", "subprocess.Popen"), f"{file}: {name}"
            assert isinstance(node, ast.Call) and "env" in {keyword.arg for keyword in node.keywords}, file
            text = file.read_text(encoding="utf-8")
            assert "python_command(" in text and "python_environment()" in text, file
            starts += 1
    assert starts >= 5
