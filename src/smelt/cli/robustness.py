"""The option `--robustness` of `smelt eval`: its settings, the measurement, its tables and its report."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from smelt.cli.output import console, table
from smelt.errors import ConfigError
from smelt.files import check_writable
from smelt.progress import Progress
from smelt.report.numbers import metric as format_metric
from smelt.report.numbers import rate
from smelt.report.page import write_page
from smelt.report.robustness import ATTACKS, BACKDOOR_ALARM, fault_key, fault_keys, render_robustness

if TYPE_CHECKING:
    from smelt.measure.evaluate import Data
    from smelt.measure.robustness.measure import RobustnessSettings
    from smelt.models.model import Model

ROBUSTNESS = "Robustness"

RobustnessOption = Annotated[
    bool,
    typer.Option(
        "--robustness", help="Also measure bit errors, range clipping and attacks.", rich_help_panel=ROBUSTNESS
    ),
]
BerOption = Annotated[
    str | None,
    typer.Option(
        "--ber",
        help="Bit error rates for --robustness, as in 1e-6,1e-5,1e-4 (the default).",
        rich_help_panel=ROBUSTNESS,
    ),
]
SeedsOption = Annotated[
    int, typer.Option("--seeds", min=1, help="Seeds per bit error rate.", rich_help_panel=ROBUSTNESS)
]
TriggerOption = Annotated[
    str | None,
    typer.Option(
        "--trigger", metavar="CLASS:TEXT", help="A suspected back door: TEXT causes CLASS.", rich_help_panel=ROBUSTNESS
    ),
]
ReportOption = Annotated[
    Path | None,
    typer.Option("--report", help="Write the robustness report to this HTML file.", rich_help_panel=ROBUSTNESS),
]


@dataclass(frozen=True)
class RobustnessRun:
    """The checked options."""

    settings: RobustnessSettings
    report: Path | None

    def measure(
        self, new: Model, base: Model | None, data: Data, evaluation: dict[str, Any], progress: Progress
    ) -> dict[str, Any]:
        """Measure, show the tables, write the report, and return the part `robustness` of the JSON result."""
        from smelt.measure.robustness.measure import measure_robustness

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
    from smelt.measure.robustness.measure import RobustnessSettings

    settings = RobustnessSettings(bers=_rates(ber), seeds=seeds, trigger=_trigger(trigger))
    return RobustnessRun(settings, report)


def show_robustness(content: dict[str, Any]) -> None:
    """Print the tables."""
    models = [model for model in (content["base"], content["model"]) if model]
    names = [model["name"] for model in models]
    metric = content["model"]["clean"]["metric"]
    rows = [["nothing", "0", *(format_metric(model["clean"]["value"]) for model in models)]]
    rows += [
        [
            f"{target}{', clipped' if clipped else ''}",
            rate(ber),
            *(_mean(model, (target, ber, clipped)) for model in models),
        ]
        for target, ber, clipped in fault_keys(content)
    ]
    console.print(table(f"{metric} under bit errors", ["flips in", "bit error rate", *names], rows))
    if any(_is_partly_nonfinite(point) for model in models for point in model["faults"]):
        console.print("* with items whose output is not finite; they count as wrong")
    _show_attacks(models)
    for model in models:
        for line in _lines(model):
            console.print(f"{model['name']}: {line}")
    if (content["comparison"] or {}).get("backdoor_alarm"):
        console.print(BACKDOOR_ALARM, style="bold red")


def _show_attacks(models: list[dict[str, Any]]) -> None:
    rows = [
        [
            model["name"],
            f"{attack['eps']:g}",
            *("-" if attack[name] is None else f"{attack[name]:.1%}" for name in ATTACKS),
        ]
        for model in models
        for attack in model["attacks"]
    ]
    if rows:
        items = models[-1]["attacks"][0]["items"]
        title = f"accuracy on {items} items with embeddings moved by eps standard deviations"
        console.print(table(title, ["model", "eps", *ATTACKS.values()], rows))


def _lines(model: dict[str, Any]) -> list[str]:
    lines = []
    for entry in model["tolerated"]:
        losses = {"one point": entry.get("ber_1"), "half": entry.get("ber_50")}
        known = " and ".join(
            f"{loss} is lost at a bit error rate of about {rate(ber)}"
            for loss, ber in losses.items()
            if ber is not None
        )
        if known:
            lines.append(f"flips in {entry['target']}{', clipped' if entry['clipped'] else ''}: {known}")
    clipping = model["clipping"]
    low, high = clipping["comparison"]["interval"]
    between = "" if low is None else f", 95% interval [{low:+.4g}, {high:+.4g}]"
    metric = model["clean"]["metric"]
    lines.append(
        f"range clipping without flips: {metric} {clipping['comparison']['difference']:+.4g}{between}; "
        f"{clipping['latency_ratio']:.2f} times the time"
    )
    search = model["bit_search"]
    if search:
        last = (search["steps"] or [search])[-1]
        lines.append(
            f"{search['flips']} chosen bit flips: accuracy on the attacked batch falls from {search['accuracy']:.1%} "
            f"to {last['accuracy']:.1%}"
        )
    door = model["backdoor"]
    if door:
        lines.append(f"back door: {door['success']:.1%} with the trigger, {door['without_trigger']:.1%} without")
    return lines


def _mean(model: dict[str, Any], key: tuple[str, float, bool]) -> str:
    point = next((point for point in model["faults"] if fault_key(point) == key), None)
    if point is None:
        return "-"
    if point["mean"] is None:
        return "not finite"
    return format_metric(point["mean"]) + ("*" if _is_partly_nonfinite(point) else "")


def _is_partly_nonfinite(point: dict[str, Any]) -> bool:
    return point["mean"] is not None and any(point["nonfinite"])


def _rates(text: str | None) -> tuple[float, ...]:
    from smelt.measure.robustness.measure import DEFAULT_BERS

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
