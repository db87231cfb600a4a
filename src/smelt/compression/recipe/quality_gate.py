"""The quality gate at the end of a run, and what each step cost if it fails."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from smelt.compression.recipe.recipe import Recipe
from smelt.errors import ConfigError, QualityGateError
from smelt.files import json_text, write_atomically
from smelt.measure.eval_result import EvalResult
from smelt.measure.evaluate import Data, expected_metric
from smelt.measure.gate import RELATIVE_METRICS, GateResult, gate, parse_margins
from smelt.models.artifact import load_artifact
from smelt.models.model import Model
from smelt.report.page import write_report

Measure = Callable[[Model], EvalResult]


def check_gate(recipe: Recipe, evaluation: Data | None) -> None:
    """Raise if the recipe has a gate that cannot be applied to its evaluation data."""
    if recipe.evaluate.max_drop is None:
        return
    if evaluation is None:
        raise ConfigError("max_drop needs evaluation data, which this recipe has not for this model; name it.")
    parse_margins([recipe.evaluate.max_drop]).of(expected_metric(evaluation, recipe.evaluate.metric))


def run_gate(recipe: Recipe, quality: EvalResult | None, before: EvalResult | None) -> GateResult | None:
    """Test the result against the source model; None if the recipe has no gate."""
    if recipe.evaluate.max_drop is None or quality is None or before is None:
        return None
    margin = parse_margins([recipe.evaluate.max_drop]).of(quality.metric)
    return gate(quality, before, margin, seed=recipe.seed)


def step_costs(
    work: Path, steps: list[dict[str, Any]], before: EvalResult, after: EvalResult, measure: Measure, device: str
) -> list[dict[str, Any]]:
    """Measure the model after each step; return each step's record with its quality and the drop that it caused.

    The drop of a score is a difference, that of perplexity and of a return relative to the model before the step.
    """
    records = []
    value = before.value
    for position, step in enumerate(steps):
        last = position == len(steps) - 1
        quality = after if last else measure(load_artifact(work / f"step-{position}", device=device))
        relative = quality.metric in RELATIVE_METRICS
        drop = (value - quality.value if quality.higher_is_better else quality.value - value) / (
            abs(value) if relative else 1.0
        )
        measured = {
            "metric": quality.metric,
            "value": quality.value,
            "drop": drop,
            "relative": relative,
        }
        records.append({**step, "quality": measured})
        value = quality.value
    return records


def refuse(result: GateResult, record: dict[str, Any], work: Path) -> QualityGateError:
    """Write the report of a run that failed its gate to the work folder, and return the error to raise."""
    write_atomically(work / "measurements.json", lambda temporary: temporary.write_text(json_text(record)))
    write_report(record, work / "report.html")
    costs = ", ".join(
        f"step {number} ({step['name']}) {_drop_text(step['quality'])}"
        for number, step in enumerate(record["steps"], start=1)
    )
    return QualityGateError(
        f"the quality gate failed: {result.sentence}; drop by step: {costs}; nothing was written to the output folder, "
        f"the steps and report.html are in {work}: correct a step or change --max-drop and add --resume, or remove it."
    )


def _drop_text(quality: dict[str, Any]) -> str:
    drop = quality["drop"]
    return f"{100 * drop:+.3g}{'%' if quality['relative'] else 'pt'}" if math.isfinite(drop) else "not finite"
