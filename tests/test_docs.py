"""The docs match the code: commands parse, recipes are accepted, snippets use existing names or run."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
import shlex
import sys
from collections.abc import Collection
from dataclasses import fields
from functools import reduce
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from typer.main import get_command

import smelt.compression.base
from smelt.cli.app import app_with
from smelt.compression.base import METHODS
from smelt.compression.method_docs import parameter_meaning
from smelt.compression.recipe.recipe import CalibrationSettings, EvaluationSettings, Recipe
from smelt.config import parse
from smelt.models import families
from smelt.registry import Registry
from smelt.serve.server.settings import ServeConfig
from smelt.strict_yaml import load_yaml
from smelt.train.trainer.config import TrainConfig

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
WORKED_EXAMPLE = ROOT / "docs" / "adding-a-method.md"
FAMILY_EXAMPLE = ROOT / "docs" / "adding-a-family.md"
RUN_ELSEWHERE = [WORKED_EXAMPLE, FAMILY_EXAMPLE, *(ROOT / "docs" / "tutorials").glob("*.md")]  # snippets run as tests
COMMANDS: dict[str, Any] = get_command(app_with()).commands  # type: ignore[attr-defined]


def blocks(page: Path, language: str) -> list[str]:
    """Return the fenced blocks of a language on a page."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def all_blocks(language: str, *, but: Collection[Path] = ()) -> list[Any]:
    results = [
        (page, number, text) for page in PAGES if page not in but for number, text in enumerate(blocks(page, language))
    ]
    assert results, f"no {language} on any page: the pattern no longer finds the blocks"
    return [pytest.param(text, id=f"{page.name}-{number}") for page, number, text in results]


def module_from(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_methods_page_is_up_to_date() -> None:
    generator = module_from(ROOT / "docs" / "make_methods.py")
    assert generator.PAGE.read_text(encoding="utf-8") == generator.page(), "docs/methods.md is stale: run `make docs`"


def test_every_parameter_is_documented() -> None:
    for cls in METHODS.values():
        for field in fields(cls):  # type: ignore[arg-type]
            assert parameter_meaning(cls, field.name), f"{cls.__name__}.{field.name} has no comment behind it"


def shell_commands() -> list[Any]:
    lines = [line for param in all_blocks("sh") for line in param.values[0].replace("\\\n", " ").splitlines()]
    return [call for line in lines if (call := smelt_call(line))]


def smelt_call(line: str) -> str:
    """Return the call of `smelt` in a line of shell, without pipes, redirections and `&`; empty if there is none."""
    words = shlex.shlex(line, posix=True, punctuation_chars=True)
    words.whitespace_split = True
    groups: list[list[str]] = [[]]
    for word in words:
        if set(word) <= set("|&;<>"):
            groups.append([])
        else:
            groups[-1].append(word)
    return next((shlex.join(group) for group in groups if group[:1] == ["smelt"]), "")


@pytest.mark.parametrize("line", shell_commands())
def test_a_command_in_a_block_parses(line: str) -> None:
    _, name, *arguments = shlex.split(line, comments=True)
    context = COMMANDS[name].make_context(name, arguments)
    for value in context.params.values():
        if isinstance(value, Path) and value.parts[0] == "examples":
            assert (ROOT / value).is_file(), value


def test_the_commands_page_is_up_to_date() -> None:
    generator = module_from(ROOT / "docs" / "make_commands.py")
    assert generator.PAGE.read_text(encoding="utf-8") == generator.page(), "docs/commands.md is stale: run `make docs`"


def test_the_support_matrix_is_up_to_date() -> None:
    generator = module_from(ROOT / "docs" / "make_families.py")
    assert generator.PAGE.read_text(encoding="utf-8") == generator.page(), "docs/families.md is stale: run `make docs`"
    assert generator.README.read_text(encoding="utf-8") == generator.readme(), "README.md is stale: run `make docs`"


def test_the_tour_shows_every_command() -> None:
    lines = [line for text in blocks(ROOT / "docs" / "tour.md", "sh") for line in text.splitlines()]
    without_bundled_model = {"transcribe"}
    shown = {shlex.split(call)[1] for line in lines if (call := smelt_call(line))}
    assert shown == set(COMMANDS) - without_bundled_model


def test_the_site_has_every_page() -> None:
    names = set(re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text(encoding="utf-8")))
    assert names == {str(page.relative_to(ROOT / "docs")) for page in PAGES if page != ROOT / "README.md"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_command_in_a_sentence_exists(page: Path) -> None:
    for span in re.findall(r"`smelt ([^`]+)`", page.read_text(encoding="utf-8")):
        name, *words = span.split()
        known = {
            option for parameter in COMMANDS[name].params for option in (*parameter.opts, *parameter.secondary_opts)
        }
        assert {word for word in words if word.startswith("-")} <= known, span


@pytest.mark.parametrize("text", all_blocks("yaml"))
def test_a_configuration_is_accepted(text: str) -> None:
    content = load_yaml(text)
    if "precision" in content:
        parse(TrainConfig, {"model": "a-model", **content}, "the configuration")
        return
    if "steps" not in content:
        assert parse(ServeConfig, content, "the server configuration") != ServeConfig()
        return
    recipe = Recipe.parse(content)
    assert Recipe.parse(load_yaml(recipe.to_yaml())) == recipe


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda path: path.name)
def test_an_example_is_accepted(path: Path) -> None:
    assert Recipe.load(path).steps


def test_the_recipes_page_lists_exactly_the_keys() -> None:
    page = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    shown = [set(re.findall(r"^\| `(\w+)` \|", table, re.M)) for table in page.split("| key | default | meaning |")[1:]]
    shown[-1] -= {"parameters", "macs", "bytes", "latency"}  # budget metrics follow the last heading
    assert shown == [{field.name for field in fields(cls)} for cls in (Recipe, CalibrationSettings, EvaluationSettings)]


def resolved(node: ast.expr, names: dict[str, Any]) -> Any:
    """Resolve an expression like `smelt.Recipe.load`; None if it is not a chain of known names."""
    chain = ast.unparse(node).split(".")
    if not all(part.isidentifier() for part in chain) or chain[0] not in names:
        return None
    return reduce(getattr, chain[1:], names[chain[0]])


@pytest.mark.parametrize("text", all_blocks("python", but=RUN_ELSEWHERE))
def test_a_snippet_uses_existing_names(text: str) -> None:
    tree = ast.parse(text)
    names: dict[str, Any] = {}
    imports: list[ast.stmt] = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    exec(compile(ast.Module(imports, []), "snippet", "exec"), names)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            resolved(node, names)  # AttributeError if a name no longer exists
        if isinstance(node, ast.Call) and callable(function := resolved(node.func, names)):
            inspect.signature(function).bind(*node.args, **{str(one.arg): one.value for one in node.keywords})


def test_python_in_the_readme_is_under_ten_lines() -> None:
    (text,) = blocks(ROOT / "README.md", "python")
    assert len([line for line in text.splitlines() if line.strip()]) < 10


def test_the_worked_example_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's example method, placed where the page says, passes the page's test."""
    method_text, test_text = blocks(WORKED_EXAMPLE, "python")
    example, its_test = ModuleType("smelt.compression.pruning.activation"), ModuleType("test_activation")
    monkeypatch.setattr(
        "smelt.compression.base.METHODS", Registry("method")
    )  # so that the example does not stay registered
    for module, text in ((example, method_text), (its_test, test_text)):
        monkeypatch.setitem(sys.modules, module.__name__, module)
        exec(compile(text, module.__name__, "exec", dont_inherit=True), module.__dict__)
    assert list(smelt.compression.base.METHODS) == ["activation"]
    for family in its_test.test_silent_units_go_first.pytestmark[0].args[1]:
        its_test.test_silent_units_go_first(family)


def test_the_list_of_features_names_every_method() -> None:
    (line,) = re.findall(r"^\| methods \|.*", (ROOT / "docs" / "features.md").read_text(encoding="utf-8"), re.M)
    assert [name for name in METHODS if f"`{name}`" not in line] == []


def test_the_example_of_a_family_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's row makes the page's network prunable, and passes the page's check."""
    row_text, check_text = blocks(FAMILY_EXAMPLE, "python")
    names: dict[str, Any] = {}
    exec(compile(row_text, "row", "exec", dont_inherit=True), names)
    exec(compile(check_text, "check", "exec", dont_inherit=True), names)
    assert not families.has_family("arcee")
    monkeypatch.setattr(families, "FAMILIES", (*families.FAMILIES, names["ROW"]))
    names["test_removed_units_are_masked_units"]()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_resolve(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
        assert target.startswith("https://") or (page.parent / target).exists(), target


def test_results_name_no_folder_of_a_machine() -> None:
    results = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
    assert results
    assert [path.name for path in results if re.search(r'"/[^"/]+/', path.read_text())] == []


def test_the_results_page_names_existing_files() -> None:
    names = re.findall(r"`(\w+\.md)`", (ROOT / "docs" / "results.md").read_text(encoding="utf-8"))
    assert names
    assert [name for name in names if not (ROOT / "benchmarks" / "results" / name).is_file()] == []
