"""The distribution: its name, its extras, every message that tells how to install it, and the wheel itself."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest
import transformers

import smelt
from smelt.errors import DISTRIBUTION, install_command
from tests.character_tokenizer import VOCABULARY, character_tokenizer
from tests.tiny import DECODER, build_network

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
SOURCES = sorted((ROOT / "src").rglob("*.py"))


def test_messages_name_our_distribution() -> None:
    assert PROJECT["name"] == DISTRIBUTION
    assert install_command() == "pip install smeltml"
    assert install_command("serve") == "pip install 'smeltml[serve]'"


def test_every_extra_in_a_message_exists() -> None:
    named = {
        extra
        for path in SOURCES
        for extra in re.findall(r"install_command\(['\"]([\w-]+)['\"]\)", path.read_text(encoding="utf-8"))
    }
    assert named >= {"serve", "ray", "parquet"}
    assert named <= set(PROJECT["optional-dependencies"])


def test_no_message_installs_a_package_of_somebody_else() -> None:
    """`smelt` on PyPI is not ours, so only `install_command` writes such a line."""
    pages = [ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")]
    for path in (*SOURCES, *pages):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"pip install ['\"]?smelt(?!ml)", text), path
        assert not re.search(r"\bsmelt\[[a-z]", text), path


def test_the_release_lock_has_every_dependency() -> None:
    """`make lock` was run after the last change of pyproject.toml, and the file names no server."""
    lock = (ROOT / "requirements-release.lock").read_text(encoding="utf-8")
    locked = dict(re.findall(r"^([\w.-]+)==(\S+)", lock, re.M))
    extras = [name for names in PROJECT["optional-dependencies"].values() for name in names]
    needed = {re.split(r"[\[<>=~ ]", name)[0].lower() for name in (*PROJECT["dependencies"], *extras)} - {DISTRIBUTION}
    assert needed <= locked.keys() and "://" not in lock
    torch_pin = re.search(r"^torch==(\S+)", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.M)
    assert torch_pin is not None and locked["torch"] == torch_pin[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of what a source distribution has."""
    folder = tmp_path_factory.mktemp("wheel")
    names = ("pyproject.toml", "README.md", "LICENSE")
    for name in names:
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder / "dist"), "."]
    done = subprocess.run(build, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode and "No matching distribution" in done.stderr:
        pytest.skip("setuptools, which builds the wheel, cannot be downloaded here")
    assert done.returncode == 0, done.stderr
    (built,) = (folder / "dist").glob("*.whl")
    return built


@pytest.mark.slow
def test_the_wheel_contains_every_file_of_the_package(wheel: Path) -> None:
    """Sources of kernels and pages of the server are data, which setuptools leaves out unless they are listed."""
    assert wheel.name.startswith(f"{DISTRIBUTION}-{smelt.__version__}")
    files = [path for path in (ROOT / "src" / "smelt").rglob("*") if path.is_file() and path.suffix != ".pyc"]
    with zipfile.ZipFile(wheel) as archive:
        packed = set(archive.namelist())
    assert {str(path.relative_to(ROOT / "src")) for path in files} <= packed


@pytest.mark.slow
def test_the_installed_wheel_works_without_the_repository(wheel: Path, tmp_path: Path) -> None:
    """In a new environment, which takes only the dependencies from this one."""
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv" / "bin" / "python"
    here, there = (subprocess_output([each, "-c", PURELIB], tmp_path) for each in (sys.executable, python))
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", str(wheel)]
    subprocess.run(install, check=True)
    # Such a path follows the packages of the environment itself; .pth files in it (editable installs) are not read.
    (Path(there) / "dependencies.pth").write_text(here + "\n")
    config = transformers.LlamaConfig(**{**DECODER, "vocab_size": len(VOCABULARY)})
    build_network(transformers.LlamaForCausalLM, config).save_pretrained(tmp_path / "model")
    character_tokenizer().save_pretrained(tmp_path / "model")
    installed = subprocess_output([python, "-c", "import smelt; print(smelt.__file__)"], tmp_path)
    assert installed.startswith(there)
    command = tmp_path / "venv" / "bin" / "smelt"
    assert subprocess_output([command, "-V"], tmp_path) == smelt.__version__
    assert "compiled" in subprocess_output([command, "env"], tmp_path) or shutil.which("c++") is None
    options = ["--method", "rtn", "--group-size", "-1", "--no-speed", "-o", "small"]
    assert "saved and verified" in subprocess_output([command, "compress", "model", *options], tmp_path)
    assert "all" in subprocess_output([command, "verify", "small"], tmp_path)


PURELIB = "import sysconfig; print(sysconfig.get_path('purelib'))"


def subprocess_output(command: Sequence[str | Path], folder: Path) -> str:
    """Run a command in a folder, without the variables that lead to the checkout; return what it prints."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "COV"))}
    environment["SMELT_CACHE"] = str(folder / "cache")
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
