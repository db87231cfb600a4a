"""The source keeps to docs/architecture.md: dependencies, no cycles, walkthroughs; and the front door stays light."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import smelt

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "smelt"
FILES = sorted(SOURCE.rglob("*.py"))
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")

# Public class names that two modules may define, because each is the standard name in its own field. At most eight.
REPEATED_CLASSES: set[str] = set()
WALKTHROUGHS = {"smelt compress": 25, "one chat request": 20, "one gradient bucket": 14}  # files, at most


@cache
def source() -> Any:
    """The parsed source, as the script that counts it reads it."""
    spec = importlib.util.spec_from_file_location("code_structure", ROOT / "benchmarks" / "code_structure.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module.Source(ROOT / "src")


def package_of(module: str) -> str:
    """Return the first name below `smelt`: a package or a single module; empty for the front door."""
    return module.split(".")[1] if "." in module else ""


def documented_dependencies() -> dict[str, set[str]]:
    """Read the block of dependencies on the page, in its order."""
    block = re.search(r"```text\n(cli .*?)```", PAGE, re.DOTALL)
    assert block is not None, "the block of dependencies is missing"
    lines = (line.partition("->") for line in block[1].splitlines())
    return {package.strip(): set(re.findall(r"\w+", below)) for package, _, below in lines}


def actual_dependencies() -> dict[str, set[str]]:
    dependencies: dict[str, set[str]] = {package_of(module): set() for module in source().trees if package_of(module)}
    for module, targets in source().imports.items():
        if package_of(module):
            dependencies[package_of(module)] |= {package_of(name) for name in targets} - {package_of(module), ""}
    return dependencies


def reached(module: str) -> set[str]:
    """Return all modules that importing this one imports, with the packages around them."""
    seen: set[str] = set()
    waiting = [module]
    while waiting:
        name = waiting.pop()
        if name not in seen and name != "smelt":
            seen.add(name)
            waiting += [*source().imports[name], name.rpartition(".")[0]]
    return seen


def test_the_page_lists_the_actual_dependencies() -> None:
    documented, actual = documented_dependencies(), actual_dependencies()
    assert documented.keys() == actual.keys()
    for package, below in actual.items():
        assert documented[package] == below, f"docs/architecture.md must say what {package} imports"


def test_dependencies_point_downward() -> None:
    packages = list(documented_dependencies())
    for position, (package, below) in enumerate(documented_dependencies().items()):
        assert below <= set(packages[position + 1 :]), f"{package} points upward"


def test_there_are_no_import_cycles() -> None:
    """Function-local imports included."""
    assert source().cycles() == []


def test_class_names_are_unique_but_for_the_listed_ones() -> None:
    assert len(REPEATED_CLASSES) <= 8
    assert set(source().repeated_classes()) == REPEATED_CLASSES


def test_targets_never_reach_a_model_or_data() -> None:
    for module in source().trees:
        if package_of(module) == "targets":
            assert not {package_of(name) for name in reached(module)} & {"models", "data"}, module


def test_training_never_reaches_compression() -> None:
    for module in source().trees:
        if package_of(module) == "train":
            assert "compression" not in {package_of(name) for name in reached(module)}, module


def test_a_method_imports_no_other_method() -> None:
    methods = {
        name for name, text in source().texts.items() if re.search(r"^@(METHODS\.register|method)\(", text, re.M)
    }
    assert len(methods) >= 20
    for module in methods:
        assert not source().imports[module] & methods, module


def test_nothing_inside_the_package_imports_the_front_door() -> None:
    for module, targets in source().imports.items():
        assert "smelt" not in targets, module


@pytest.mark.parametrize("title", WALKTHROUGHS)
def test_a_walkthrough_names_real_files_and_is_short(title: str) -> None:
    section = re.search(rf"^## Walkthrough: {title}$(.*?)^## ", PAGE, re.M | re.S)
    assert section is not None, f"the page has no walkthrough of {title}"
    files = set(re.findall(r"`([\w/]+\.py)`", section[1]))
    assert files and len(files) <= WALKTHROUGHS[title], sorted(files)
    assert [file for file in sorted(files) if not (SOURCE / file).is_file()] == []


def test_importing_smelt_loads_nothing_heavy() -> None:
    code = "import sys, smelt; sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'smelt.models')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("name", smelt.__all__)
def test_the_front_door_has_every_public_name(name: str) -> None:
    assert name == "__version__" or getattr(smelt, name).__name__ == name
    assert name in dir(smelt)
    assert f"smelt.{name}" in (ROOT / "docs" / "api.md").read_text(encoding="utf-8")


def test_the_front_door_has_no_other_name() -> None:
    with pytest.raises(AttributeError, match="no attribute 'melt'"):
        _ = smelt.melt  # type: ignore[attr-defined]


def test_no_file_can_run_foreign_code() -> None:
    """No pickle, no torch.load, no eval or exec, and `trust_remote_code` only to say no."""
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import | ast.ImportFrom):
                assert getattr(node, "level", 0) == 0, f"{file} imports relatively, which the other tests do not follow"
                names = {alias.name for alias in node.names} | {getattr(node, "module", None) or ""}
                assert not names & {"pickle", "dill", "joblib", "marshal", "shelve"}, file
            if isinstance(node, ast.Call):
                assert ast.unparse(node.func) not in ("torch.load", "eval", "exec"), f"{file}:{node.lineno}"
            if isinstance(node, ast.keyword) and node.arg == "trust_remote_code":
                assert ast.unparse(node.value) == "False", file
