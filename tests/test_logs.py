"""Log lines: which are shown, where they go, and that library code uses loggers of its own module."""

from __future__ import annotations

import ast
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import smelt
from smelt.cli.main import main
from smelt.logs import LEVEL_VARIABLE, show_logs

SOURCE = Path(smelt.__file__).parent
# Programs of their own, whose output is read by their parent or by people.
PROGRAMS = {"models/verify.py", "data/parquet_process.py", "train/trainer/distributed.py", "progress.py", "logs.py"}


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    logger = logging.getLogger("smelt")
    handlers, level = logger.handlers, logger.level
    yield
    logger.handlers = handlers
    logger.setLevel(level)


@pytest.mark.parametrize(
    ("level", "shown"),
    [
        ("", ["> a phase", "> a fallback"]),
        ("WARNING", ["> a fallback"]),
        ("debug", ["> smelt.some.module: a choice", "> a phase", "> a fallback"]),
    ],
)
def test_the_environment_decides_what_is_shown(
    level: str, shown: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(LEVEL_VARIABLE, level)
    show_logs(prefix="never: ")  # replaced: no line is shown twice
    show_logs(prefix="> ")
    logger = logging.getLogger("smelt.some.module")
    logger.debug("a choice")
    logger.info("a phase")
    logger.warning("a %s", "fallback")
    assert capsys.readouterr().err.splitlines() == shown


@pytest.mark.parametrize(
    ("arguments", "variable", "level"),
    [(["-V"], "", logging.INFO), (["-V", "--debug"], None, logging.DEBUG), (["--debug", "-V"], "error", logging.ERROR)],
)
def test_a_command_shows_debug_lines_with_debug_unless_the_environment_says_otherwise(
    arguments: list[str], variable: str | None, level: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(LEVEL_VARIABLE, raising=False)
    if variable is not None:
        monkeypatch.setenv(LEVEL_VARIABLE, variable)
    with pytest.raises(SystemExit) as exited:
        main(arguments)
    assert exited.value.code == 0 and logging.getLogger("smelt").level == level
    assert os.environ.get(LEVEL_VARIABLE) == variable


def test_a_command_refuses_an_unknown_level(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(LEVEL_VARIABLE, "loud")
    with pytest.raises(SystemExit) as exited:
        main(["-V"])
    assert exited.value.code == 2 and capsys.readouterr().err.startswith("smelt: SMELT_LOG_LEVEL is 'loud'; use one of")


def test_a_library_prints_nothing_and_logs_as_its_module() -> None:
    for path in sorted(SOURCE.rglob("*.py")):
        name = path.relative_to(SOURCE).as_posix()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func)
            if called == "print":
                assert name in PROGRAMS or name.startswith("cli/"), f"{name} prints in line {node.lineno}"
            if called == "logging.getLogger" and isinstance(node.args[0], ast.Constant):
                other = not str(node.args[0].value).startswith("smelt")
                assert other or name == "logs.py", f"{name}: use logging.getLogger(__name__)"
