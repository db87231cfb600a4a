"""Run tasks with lm-eval and keep one score per item, so that two models can be compared on the same items."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from smelt.errors import DataError
from smelt.harness.task_files import check_installed, isolated, load_tasks, template_error
from smelt.measure.eval_result import EvalResult
from smelt.measure.gate import GateResult, Margins, gate
from smelt.measure.paired import PairedComparison, compare
from smelt.models.model import Model
from smelt.progress import Progress


@dataclass(frozen=True)
class TaskMetric:
    """A metric of a task with its standard error; `scores` holds the score of each item where the metric has one."""

    name: str  # as lm-eval names it: acc, acc_norm, word_perplexity
    filter: str  # the filter of the answers that it was computed with; none without one
    value: float
    stderr: float | None
    higher_is_better: bool | None
    scores: EvalResult | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "metric": self.name,
            "filter": self.filter,
            "value": self.value,
            "stderr": self.stderr,
            "higher_is_better": self.higher_is_better,
        }


@dataclass(frozen=True)
class TaskResult:
    """The metrics of one task or group, in its own order."""

    name: str
    items: int | None  # None for a group
    num_fewshot: int | None
    version: Any
    metrics: tuple[TaskMetric, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "task": self.name,
            "items": self.items,
            "num_fewshot": self.num_fewshot,
            "version": self.version,
            "metrics": [metric.to_json() for metric in self.metrics],
        }


@dataclass(frozen=True)
class HarnessResult:
    """The tasks of one run, and how the model computed them."""

    lm_eval: str  # its version
    log_likelihoods: str  # module: the network itself; engine: the serving engine
    generation: str
    tasks: tuple[TaskResult, ...]
    settings: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {
            "lm_eval": self.lm_eval,
            "log_likelihoods": self.log_likelihoods,
            "generation": self.generation,
            "settings": dict(self.settings),
            "tasks": [task.to_json() for task in self.tasks],
        }


def evaluate_tasks(
    model: Model,
    names: list[str],
    *,
    tasks_path: Path | None = None,
    allow_task_code: bool = False,
    limit: int | None = None,
    num_fewshot: int | None = None,
    batch_size: int = 8,
    seed: int = 0,
    progress: Progress | None = None,
) -> HarnessResult:
    """Evaluate a language model on tasks of lm-eval, offline, on at most `limit` items each.

    `tasks_path` is a folder of task files; without `allow_task_code` they may hold plain data only. `num_fewshot`
    replaces the number of examples of tasks that do not fix it to 0.
    """
    check_installed()
    with isolated(allow_task_code):
        import lm_eval
        from jinja2 import TemplateError
        from lm_eval.evaluator import evaluate

        from smelt.harness.adapter import HarnessModel

        adapter = HarnessModel(model, batch_size=batch_size, seed=seed, progress=progress)
        loaded = load_tasks(names, tasks_path, allow_task_code)
        _configure(loaded["tasks"], num_fewshot, seed)
        try:
            results = evaluate(adapter, loaded, limit=limit, log_samples=True, bootstrap_iters=1000)
        except TemplateError as error:
            raise template_error(error) from error
    assert results is not None
    settings = {"limit": limit, "num_fewshot": num_fewshot, "seed": seed}
    order = [*loaded["groups"], *loaded["tasks"]]
    return HarnessResult(
        lm_eval=lm_eval.__version__,
        log_likelihoods=adapter.log_likelihood_backend,
        generation=adapter.generation_backend,
        tasks=tuple(_task_result(name, loaded["tasks"].get(name), results, settings) for name in order),
        settings=settings,
    )


def _configure(tasks: dict[str, Any], num_fewshot: int | None, seed: int) -> None:
    """Set the number of few-shot examples and all seeds, as lm-eval's own command does."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    for task in tasks.values():
        own = task.get_config("num_fewshot")
        if num_fewshot is not None and own != 0:
            task.set_config(key="num_fewshot", value=num_fewshot)
        elif own is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=seed)


def _task_result(name: str, task: Any, results: dict[str, Any], settings: dict[str, Any]) -> TaskResult:
    samples = results.get("samples", {}).get(name, [])
    metrics = []
    for key, value in results["results"].get(name, {}).items():
        metric, _, filter_name = key.partition(",")
        if not filter_name or metric.endswith("_stderr") or not isinstance(value, int | float):
            continue
        stderr = results["results"][name].get(f"{metric}_stderr,{filter_name}")
        better = results.get("higher_is_better", {}).get(name, {}).get(metric)
        scores = None
        if task is not None and better is not None:
            chosen = [sample[metric] for sample in samples if sample["filter"] == filter_name and metric in sample]
            scores = _scores(name, metric, chosen, task.aggregation().get(metric), better, settings)
        metrics.append(TaskMetric(metric, filter_name, float(value), _finite(stderr), better, scores))
    return TaskResult(
        name=name,
        items=results.get("n-samples", {}).get(name, {}).get("effective"),
        num_fewshot=results.get("n-shot", {}).get(name),
        version=results.get("versions", {}).get(name),
        metrics=tuple(metrics),
    )


def _finite(value: Any) -> float | None:
    """Return lm-eval's standard error, which is "N/A" where it has none."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _scores(
    task: str, metric: str, values: list[Any], aggregation: Any, higher_is_better: bool, settings: dict[str, Any]
) -> EvalResult | None:
    """Return one score per item if the metric is their mean or a perplexity; None for a metric of the whole corpus."""
    from lm_eval.api import metrics

    common: dict[str, Any] = {"data": f"{task}, {metric}", "settings": settings}
    if aggregation is metrics.mean and all(isinstance(value, int | float) for value in values):
        items = np.array(values, dtype=np.float64)
        common |= {"value": float(items.mean()), "higher_is_better": higher_is_better, "items": items}
        if higher_is_better and set(items) <= {0.0, 1.0}:  # an item is right or wrong
            return EvalResult("accuracy", predictions=items, labels=np.ones(len(items)), **common)
        return EvalResult(metric, predictions=items, **common)
    if aggregation is metrics.perplexity:
        values = [(value, 1) for value in values]
    elif aggregation is not metrics.weighted_perplexity:
        return None
    likelihoods, weights = np.array(values, dtype=np.float64).T
    perplexity = float(np.exp(-likelihoods.sum() / weights.sum()))
    return EvalResult("perplexity", perplexity, False, items=-likelihoods / weights, weights=weights, **common)


@dataclass(frozen=True)
class TaskComparison:
    """A task's metric of two models, compared item by item, with the gate if there is a margin."""

    task: str
    metric: str
    comparison: PairedComparison
    gate: GateResult | None = None

    @property
    def passed(self) -> bool:
        return self.comparison.verdict != "worse" if self.gate is None else self.gate.passed

    def to_json(self) -> dict[str, Any]:
        tested = {} if self.gate is None else {"gate": self.gate.to_json()}
        return {**self.comparison.to_json(), "task": self.task, "metric": self.metric, **tested}


def compare_tasks(
    new: HarnessResult,
    base: HarnessResult,
    *,
    metric: str | None = None,
    margins: Margins | None = None,
    seed: int = 0,
) -> tuple[TaskComparison, ...]:
    """Compare each task by `metric`, or by its first metric with a score per item; test it against its margin."""
    comparisons = []
    for task, before in zip(new.tasks, base.tasks, strict=True):
        pairs = zip(task.metrics, before.metrics, strict=True)
        scored = [
            (first.name, first.scores, second.scores)
            for first, second in pairs
            if metric in (None, first.name) and first.scores is not None and second.scores is not None
        ]
        if scored:
            name, scores, scores_before = scored[0]
            compared = compare(scores, scores_before, seed=seed)
            tested = gate(scores, scores_before, margins.of(scores.metric), seed=seed) if margins is not None else None
            comparisons.append(TaskComparison(task.name, name, compared, tested))
        elif task.items is not None:
            wanted = "a score per item" if metric is None else f"the metric '{metric}' per item"
            names = ", ".join(value.name for value in task.metrics)
            raise DataError(f"the task '{task.name}' has no metric with {wanted} to compare by; it has {names}.")
    return tuple(comparisons)
