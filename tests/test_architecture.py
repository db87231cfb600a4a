"""The arrows between rooms are those that docs/architecture.md shows, go down only, and the front door is light."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import smelt

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "smelt"
FILES = sorted(SOURCE.rglob("*.py"))
FRONT_DOOR = SOURCE / "__init__.py"


def module_of(file: Path) -> str:
    return ".".join(file.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_of(file): file for file in FILES}


def imported(file: Path) -> Iterator[str]:
    """The modules of ours that a file imports anywhere; `from a.b import c` is `a.b.c` where that is a module."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.partition(".")[0] == "smelt")
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file} imports relatively, which this test does not follow"
            if (node.module or "").partition(".")[0] == "smelt":
                whole = [f"{node.module}.{alias.name}" for alias in node.names]
                yield from (name if name in MODULES else str(node.module) for name in whole)


def room_of(module: str) -> str:
    """The first name below `smelt`: a folder or a single file; the front door itself is no room."""
    return module.split(".")[1] if "." in module else ""


def documented_arrows() -> dict[str, set[str]]:
    """The block of arrows on the page, in its order."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    block = re.search(r"```text\n(cli .*?)```", page, re.DOTALL)
    assert block is not None, "the block of arrows is missing"
    lines = (line.partition("->") for line in block[1].splitlines())
    return {room.strip(): set(re.findall(r"\w+", below)) for room, _, below in lines}


def true_arrows() -> dict[str, set[str]]:
    arrows: dict[str, set[str]] = {room_of(module): set() for module in MODULES if room_of(module)}
    for module, file in MODULES.items():
        if file != FRONT_DOOR:
            arrows[room_of(module)] |= {room_of(name) for name in imported(file)} - {room_of(module), ""}
    return arrows


def reached(module: str) -> set[str]:
    """All modules of ours that importing this one brings along, the packages around them included."""
    seen, waiting = set(), [module]
    while waiting:
        name = waiting.pop()
        if name in seen or name == "smelt":
            continue
        seen.add(name)
        waiting += [*imported(MODULES[name]), name.rpartition(".")[0]]
    return seen


def test_the_page_shows_the_true_arrows() -> None:
    documented, true = documented_arrows(), true_arrows()
    assert documented.keys() == true.keys()
    for room, below in true.items():
        assert documented[room] == below, f"docs/architecture.md must say what {room} imports"


def test_arrows_go_down_only() -> None:
    rooms = list(documented_arrows())
    for position, (room, below) in enumerate(documented_arrows().items()):
        assert below <= set(rooms[position + 1 :]), f"{room} points upwards"


def test_targets_never_reach_a_model_or_data() -> None:
    for module in MODULES:
        if room_of(module) == "targets":
            assert not {room_of(name) for name in reached(module)} & {"models", "data"}, module


def test_a_method_imports_no_other_method() -> None:
    methods = {name for name, file in MODULES.items() if "\n@METHODS.register(" in file.read_text(encoding="utf-8")}
    assert len(methods) >= 6
    for module in methods:
        assert not set(imported(MODULES[module])) & methods, module


def test_nothing_inside_the_package_imports_the_front_door() -> None:
    for module in MODULES:
        assert "smelt" not in set(imported(MODULES[module])) or module == "smelt", module


def test_importing_smelt_loads_nothing_heavy() -> None:
    code = "import sys, smelt; sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'smelt.models')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("name", smelt.__all__)
def test_the_front_door_hands_out_every_name_it_lists(name: str) -> None:
    assert name == "__version__" or getattr(smelt, name).__name__ == name
    assert name in dir(smelt)


def test_the_front_door_knows_no_other_name() -> None:
    with pytest.raises(AttributeError, match="no attribute 'melt'"):
        _ = smelt.melt  # type: ignore[attr-defined]


def test_no_file_can_run_foreign_code() -> None:
    """No pickle, no torch.load, no eval or exec, and `trust_remote_code` only to say no."""
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = {alias.name for alias in node.names} | {getattr(node, "module", None) or ""}
                assert not names & {"pickle", "dill", "joblib", "marshal", "shelve"}, file
            if isinstance(node, ast.Call):
                assert ast.unparse(node.func) not in ("torch.load", "eval", "exec"), f"{file}:{node.lineno}"
            if isinstance(node, ast.keyword) and node.arg == "trust_remote_code":
                assert ast.unparse(node.value) == "False", file
