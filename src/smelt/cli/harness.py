"""`smelt eval --harness`: run tasks of lm-eval on a model, and compare two models item by item."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from smelt.cli.junit import GateCase, write_junit
from smelt.cli.output import console, table, write_json
from smelt.errors import ConfigError
from smelt.progress import progress_bars
from smelt.report.numbers import metric as format_metric

if TYPE_CHECKING:
    from smelt.harness.run import HarnessResult, TaskComparison

HARNESS = "Tasks of lm-eval"

HarnessOption = Annotated[
    bool,
    typer.Option(
        "--harness", help="Run --tasks with lm-eval, offline (needs the extra harness).", rich_help_panel=HARNESS
    ),
]
TasksOption = Annotated[
    str | None, typer.Option("--tasks", help="Tasks of lm-eval, separated by commas.", rich_help_panel=HARNESS)
]
TasksPathOption = Annotated[
    Path | None,
    typer.Option("--tasks-path", metavar="DIR", help="A folder of task files for --tasks.", rich_help_panel=HARNESS),
]
FewshotOption = Annotated[
    int | None,
    typer.Option(
        "--num-fewshot", min=0, help="Examples in the prompt of each task of --tasks.", rich_help_panel=HARNESS
    ),
]
TaskCodeOption = Annotated[
    bool,
    typer.Option(
        "--allow-task-code",
        help="Run the Python code that task files name; only if you trust it.",
        rich_help_panel=HARNESS,
    ),
]


@dataclass(frozen=True)
class HarnessOptions:
    """The options of `smelt eval` that matter for tasks of lm-eval."""

    tasks: str | None
    tasks_path: Path | None
    allow_task_code: bool
    num_fewshot: int | None
    limit: int | None
    metric: str | None
    max_drop: list[str] | None
    batch_size: int
    seed: int

    @property
    def names(self) -> list[str]:
        names = [name.strip() for name in (self.tasks or "").split(",") if name.strip()]
        if not names:
            raise ConfigError("--harness needs the names of tasks: add --tasks NAME,NAME.")
        return list(dict.fromkeys(names))

    def refuse(self, **others: Any) -> None:
        """Raise if an option is given that tasks of lm-eval do not have; it must not be ignored in silence."""
        given = [name.replace("_", "-") for name, value in others.items() if value is not None]
        if given:
            raise ConfigError(f"--{given[0]} does not apply to tasks of lm-eval: leave it out, or leave out --harness.")

    def settings(self) -> dict[str, Any]:
        """Return the keyword arguments of `evaluate_tasks`."""
        names = ("tasks_path", "allow_task_code", "num_fewshot", "limit", "batch_size", "seed")
        return {name: getattr(self, name) for name in names}


def run_harness(
    model: str, against: str | None, options: HarnessOptions, device: str, json_file: Path | None,
    junit_file: Path | None = None,
) -> None:  # fmt: skip
    """Evaluate the tasks, compare with a base model if there is one, print and write the results."""
    from smelt.harness.run import compare_tasks, evaluate_tasks
    from smelt.harness.task_files import check_installed, check_task_folder
    from smelt.measure.gate import parse_margins
    from smelt.models.load import load

    names = options.names
    if options.max_drop and against is None:
        raise ConfigError("--max-drop is the drop below a base model; name it with --against BASE.")
    if junit_file is not None and against is None:
        raise ConfigError("--junit writes the comparison of two models; name the other one with --against BASE.")
    margins = parse_margins(options.max_drop) if options.max_drop else None
    check_installed()  # before any weight is read
    if options.tasks_path is not None:
        check_task_folder(options.tasks_path, options.allow_task_code)
    with progress_bars() as progress:
        new = evaluate_tasks(load(model, device=device), names, **options.settings(), progress=progress)
        base = None
        if against is not None:
            base = evaluate_tasks(load(against, device=device), names, **options.settings(), progress=progress)
    comparisons = (
        () if base is None else compare_tasks(new, base, metric=options.metric, margins=margins, seed=options.seed)
    )
    console.print(_table(model, new, against, base))
    for comparison in comparisons:
        console.print(_sentence(comparison))
    failed = [comparison for comparison in comparisons if not comparison.passed]
    content = {"model": model, **new.to_json(), "passed": not failed}
    if base is not None:
        results = [comparison.to_json() for comparison in comparisons]
        content |= {"against": against, "base": base.to_json(), "comparisons": results}
    write_json(json_file, content)
    write_junit(junit_file, model, [_case(comparison, against) for comparison in comparisons])
    for comparison in comparisons:
        if comparison.gate is not None and comparison.passed:
            console.print(f"gate passed: {comparison.gate.sentence}", soft_wrap=True)
    for comparison in failed:
        console.print(f"failed: {_failure(comparison, against)}", soft_wrap=True)
    if failed:
        raise typer.Exit(3)


def _failure(result: TaskComparison, against: str | None) -> str:
    return f"{result.task} is worse than with {against}" if result.gate is None else result.gate.sentence


def _case(result: TaskComparison, against: str | None) -> GateCase:
    verdict = result.gate.verdict if result.gate is not None else "pass" if result.passed else "fail"
    failures = [] if result.passed else [_failure(result, against)]
    return GateCase(result.metric, result.task, verdict, failures, _sentence(result))


def _table(model: str, new: HarnessResult, against: str | None, base: HarnessResult | None) -> Any:
    rows = []
    for index, task in enumerate(new.tasks):
        for position, value in enumerate(task.metrics):
            name = value.name if value.filter == "none" else f"{value.name} ({value.filter})"
            shown = [task.name, "-" if task.items is None else f"{task.items:,}", name, format_metric(value.value)]
            shown.append("-" if value.stderr is None else format_metric(value.stderr))
            if base is not None:
                shown.append(format_metric(base.tasks[index].metrics[position].value))
            rows.append(shown)
    headings = ["task", "items", "metric", model, "stderr", *([] if against is None else [against])]
    return table(f"lm-eval {new.lm_eval}", headings, rows)


def _sentence(result: TaskComparison) -> str:
    comparison = result.comparison
    low, high = comparison.interval
    interval = f"{comparison.confidence:.0%} interval [{low:+.4g}, {high:+.4g}]"
    difference = f"{result.task}, {result.metric}: difference {comparison.difference:+.4g}, {interval}"
    changed = "" if comparison.gained is None else f", gained {comparison.gained}, lost {comparison.lost} items"
    return f"{difference}{changed}: {comparison.verdict}"
