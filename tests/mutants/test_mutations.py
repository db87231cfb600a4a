"""The list of mutations fits the source: every line still exists once, and the changed file compiles."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.mutants.propose import SOURCE, propose
from tests.mutants.run import (
    LIST,
    MAX_SURVIVORS,
    ROOT,
    Mutation,
    Outcome,
    _result,
    _Results,
    read_mutations,
    summarize,
)

MUTATIONS, KERNEL_MUTATIONS = read_mutations(), read_mutations(LIST.with_name("kernels.yaml"))


def test_there_are_enough_and_few_are_excused() -> None:
    assert len(set(MUTATIONS)) == len(MUTATIONS) >= 150
    assert sum(bool(mutation.reason) for mutation in MUTATIONS) <= MAX_SURVIVORS * len(MUTATIONS)


@pytest.mark.parametrize("file", dict.fromkeys(mutation.file for mutation in MUTATIONS + KERNEL_MUTATIONS))
def test_every_mutation_applies_once_and_compiles(file: str) -> None:
    source = (SOURCE / file).read_text()
    for mutation in MUTATIONS + KERNEL_MUTATIONS:
        if mutation.file == file:
            changed = mutation.apply(source)
            if file.endswith(".py"):
                compile(changed, file, "exec")
            assert mutation.old != mutation.new
            assert all((ROOT / word).exists() for word in mutation.tests.split() if word.startswith("tests/"))


def test_a_line_that_is_gone_or_repeated_is_named() -> None:
    mutation = Mutation("x.py", "a = 1", "a = 2", "tests")
    assert mutation.apply("if b:\n    a = 1\n") == "if b:\n    a = 2\n"
    for source in ("a = 3\n", "a = 1\na = 1\n"):
        with pytest.raises(ValueError, match=r"x\.py: [02] lines are 'a = 1'; update the list"):
            mutation.apply(source)


def test_a_mutation_survives_only_if_tests_passed(tmp_path: Path) -> None:
    """If a kernel does not compile, all its tests are skipped, and nothing was tested."""
    results = _Results(tmp_path)
    skipped, failed, passed = (
        SimpleNamespace(failed=name == "failed", passed=name == "passed", when="call", nodeid="test_it")
        for name in ("skipped", "failed", "passed")
    )
    results.pytest_runtest_logreport(skipped)
    assert _result(0, tmp_path) == ("not importable", "")
    results.pytest_runtest_logreport(passed)
    assert _result(0, tmp_path) == ("survived", "")
    results.pytest_runtest_logreport(failed)
    assert _result(int(pytest.ExitCode.TESTS_FAILED) << 8, tmp_path) == ("killed", "test_it")
    assert _result(0, _Results(tmp_path).failures.parent) == ("not importable", "")  # of the next run


def test_proposals_are_the_same_in_every_run_and_leave_settings_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = ["LIMIT = 2", "def f(a, b=1):", "    print('no')", "    if not a < LIMIT or g(a)[40]:", "        h(a)"]
    (tmp_path / "x.py").write_text("\n".join(lines))
    monkeypatch.setattr("tests.mutants.propose.SOURCE", tmp_path)
    assert [old for old, _ in propose("x.py", 9)] == ["if not a < LIMIT or g(a)[40]:", "h(a)"]
    assert propose("x.py", 1) == propose("x.py", 1) and len(propose("x.py", 1)) == 1


def test_the_table_counts_per_file_and_gives_reasons() -> None:
    changed = Mutation("x.py", "a = 1", "a = 2", "tests", "the same value")
    text = summarize([Outcome(changed, "survived"), Outcome(Mutation("x.py", "b", "c", "tests"), "killed", "test")], 2)
    assert "| x.py | 2 | 1 | 1 |" in text and "| all files | 2 | 1 | 1 |" in text
    assert "x.py, survived: the same value" in text and "- a = 1\n+ a = 2" in text
