"""The option `--robustness` of `smelt eval`: its settings, the measurement, its tables and its report."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from smelt.cli.output import console, table
from smelt.errors import ConfigError
from smelt.files import check_writable
from smelt.measure.evaluate import Data
from smelt.measure.robustness.measure import DEFAULT_BERS, RobustnessSettings, measure_robustness
from smelt.models.model import Model
from smelt.progress import Progress
from smelt.report.numbers import metric as format_metric
from smelt.report.page import write_page
from smelt.report.robustness import render_robustness

RobustnessOption = Annotated[
    bool, typer.Option("--robustness", help="Also measure bit errors, range clipping and attacks.")
]
BerOption = Annotated[
    str | None, typer.Option("--ber", help="Bit error rates for --robustness, as in 1e-6,1e-5,1e-4 (the default).")
]
SeedsOption = Annotated[int, typer.Option("--seeds", min=1, help="Seeds per bit error rate.")]
TriggerOption = Annotated[
    str | None, typer.Option("--trigger", metavar="CLASS:TEXT", help="A suspected back door: TEXT causes CLASS.")
]
ReportOption = Annotated[Path | None, typer.Option("--report", help="Write the robustness report to this HTML file.")]


@dataclass(frozen=True)
class RobustnessRun:
    """The checked options."""

    settings: RobustnessSettings
    report: Path | None

    def measure(
        self, new: Model, base: Model | None, data: Data, evaluation: dict[str, Any], progress: Progress
    ) -> dict[str, Any]:
        """Measure, show the tables, write the report, and return the part `robustness` of the JSON result."""
        result = measure_robustness(new, data, against=base, settings=self.settings, progress=progress, **evaluation)
        content = result.to_json()
        if self.report is not None:
            write_page(render_robustness(content), self.report)
        return content


def robustness_run(
    enabled: bool, ber: str | None, seeds: int, trigger: str | None, report: Path | None
) -> RobustnessRun | None:
    """Check the options before any work; None without `--robustness`."""
    if not enabled:
        if ber is not None or trigger is not None or report is not None:
            raise ConfigError("--ber, --trigger and --report belong to --robustness: add it.")
        return None
    if report is not None:
        check_writable(report)
    settings = RobustnessSettings(bers=_rates(ber), seeds=seeds, trigger=_trigger(trigger))
    return RobustnessRun(settings, report)


def show_robustness(content: dict[str, Any]) -> None:
    """Print the tables."""
    models = [model for model in (content["base"], content["model"]) if model]
    names = [model["name"] for model in models]
    keys = list(dict.fromkeys(_key(point) for model in models for point in model["faults"]))
    rows = [
        [
            f"{target}{', clipped' if clipped else ''}",
            f"{ber:g}",
            *(_mean(model, (target, ber, clipped)) for model in models),
        ]
        for target, ber, clipped in sorted(keys, key=lambda key: (key[0], key[2], key[1]))
    ]
    metric = content["model"]["clean"]["metric"]
    console.print(table(f"{metric} under bit errors", ["flips in", "bit error rate", *names], rows))
    for model in models:
        for line in _lines(model):
            console.print(f"{model['name']}: {line}")


def _lines(model: dict[str, Any]) -> list[str]:
    clipping = model["clipping"]
    low, high = clipping["comparison"]["interval"]
    between = "" if low is None else f", 95% interval [{low:+.4g}, {high:+.4g}]"
    lines = [
        f"range clipping without faults: {clipping['comparison']['difference']:+.4g}{between}; "
        f"{clipping['latency_ratio']:.2f} times the time"
    ]
    for attack in model["attacks"]:
        transfer = "" if attack["transfer"] is None else f", transfer {attack['transfer']:.1%}"
        lines.append(
            f"accuracy at eps {attack['eps']:g}: FGSM {attack['fgsm']:.1%}, PGD {attack['pgd']:.1%}{transfer}, "
            f"all attacks {attack['robust']:.1%}"
        )
    search = model["bit_search"]
    if search:
        last = (search["steps"] or [search])[-1]
        lines.append(f"{search['flips']} chosen bit flips: accuracy {search['accuracy']:.1%} to {last['accuracy']:.1%}")
    door = model["backdoor"]
    if door:
        lines.append(f"back door: {door['success']:.1%} with the trigger, {door['without_trigger']:.1%} without")
    return lines


def _key(point: dict[str, Any]) -> tuple[str, float, bool]:
    return point["target"], point["ber"], point["clipped"]


def _mean(model: dict[str, Any], key: tuple[str, float, bool]) -> str:
    point = next((point for point in model["faults"] if _key(point) == key), None)
    if point is None:
        return "-"
    return "not finite" if point["mean"] is None else format_metric(point["mean"])


def _rates(text: str | None) -> tuple[float, ...]:
    if text is None:
        return DEFAULT_BERS
    try:
        return tuple(sorted({float(part) for part in text.split(",")}))
    except ValueError as error:
        raise ConfigError(f"--ber {text!r} is not a list of rates; write it as 1e-6,1e-5,1e-4.") from error


def _trigger(text: str | None) -> tuple[str, int] | None:
    if text is None:
        return None
    target, colon, trigger = text.partition(":")
    if not colon or not target.isdecimal() or not trigger.strip():
        raise ConfigError(f"--trigger {text!r} must be a class number, a colon and a text, as in 1:cf.")
    return trigger, int(target)
