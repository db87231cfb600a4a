"""`smelt eval`: measure quality, compare it with a base model; exit code 3 when the gate fails."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from smelt.cli.harness import (
    FewshotOption,
    HarnessOption,
    HarnessOptions,
    TaskCodeOption,
    TasksOption,
    TasksPathOption,
    run_harness,
)
from smelt.cli.junit import GateCase, JunitOption, write_junit
from smelt.cli.output import DATA, DeviceOption, JsonOption, ModelArgument, SeedOption, console, table, write_json
from smelt.cli.robustness import (
    BerOption,
    ReportOption,
    RobustnessOption,
    SeedsOption,
    TriggerOption,
    robustness_run,
    show_robustness,
)
from smelt.errors import ConfigError
from smelt.progress import Progress, progress_bars
from smelt.report.numbers import metric as format_metric

if TYPE_CHECKING:
    from smelt.measure.eval_result import EvalResult
    from smelt.measure.evaluate import Data
    from smelt.measure.gate import Margins
    from smelt.models.model import Model

    Result = tuple[EvalResult, dict[str, Any], list[str]]

GATE = "Comparison and gate"

DataOption = Annotated[
    list[str] | None,
    typer.Option(
        "--data", help="A file, a hub id, or default; may be repeated, then all must pass.", rich_help_panel=DATA
    ),
]
AgainstOption = Annotated[
    str | None,
    typer.Option(
        "--against",
        metavar="BASE",
        help="Compare with this model; exit with 3 if MODEL is worse.",
        rich_help_panel=GATE,
    ),
]
MaxDropOption = Annotated[
    list[str] | None,
    typer.Option(
        "--max-drop",
        metavar="[METRIC=]1pt|1%",
        help="Exit with 3 unless MODEL is worse than BASE by less than this, with 95 % confidence: points (1pt), "
        "for perplexity percent (1%). May be repeated.",
        rich_help_panel=GATE,
    ),
]
MinOption = Annotated[
    float | None, typer.Option("--min", help="Exit with 3 if the value is below this.", rich_help_panel=GATE)
]
MaxOption = Annotated[
    float | None, typer.Option("--max", help="Exit with 3 if the value is above this.", rich_help_panel=GATE)
]
KvOption = Annotated[
    str | None, typer.Option("--kv-cache-dtype", help="Evaluate MODEL with this KV cache format; none: unquantized.")
]
NormalizeOption = Annotated[
    str | None,
    typer.Option(
        "--normalize", help="For multiple choice: none (default), characters, bytes or tokens.", rich_help_panel=DATA
    ),
]
LimitOption = Annotated[
    int | None,
    typer.Option("--limit", min=1, help="Use at most this many tokens of text, or rows.", rich_help_panel=DATA),
]


def run(
    model: ModelArgument,
    data: DataOption = None,
    against: AgainstOption = None,
    max_drop: MaxDropOption = None,
    minimum: MinOption = None,
    maximum: MaxOption = None,
    metric: Annotated[
        str | None, typer.Option(help="accuracy, f1, matthews, spearman, pearson.", rich_help_panel=DATA)
    ] = None,
    text: Annotated[str | None, typer.Option(help="Column with the text.", rich_help_panel=DATA)] = None,
    pair: Annotated[str | None, typer.Option(help="Column with the second text.", rich_help_panel=DATA)] = None,
    label: Annotated[str | None, typer.Option(help="Column with the label.", rich_help_panel=DATA)] = None,
    normalize: NormalizeOption = None,
    context: Annotated[
        int | None,
        typer.Option(min=2, help="Tokens per window, for perplexity.", show_default="1024", rich_help_panel=DATA),
    ] = None,
    limit: LimitOption = None,
    kv: KvOption = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Batch size.")] = 8,
    robustness: RobustnessOption = False,
    ber: BerOption = None,
    seeds: SeedsOption = 3,
    trigger: TriggerOption = None,
    report: ReportOption = None,
    device: DeviceOption = "auto",
    json_file: JsonOption = None,
    junit_file: JunitOption = None,
    seed: SeedOption = 0,
    harness: HarnessOption = False,
    tasks: TasksOption = None,
    tasks_path: TasksPathOption = None,
    num_fewshot: FewshotOption = None,
    allow_task_code: TaskCodeOption = False,
) -> None:
    from smelt.compression.passport.origin import calibration_warning
    from smelt.data import load_data
    from smelt.measure.evaluate import measure_quality
    from smelt.measure.multiple_choice import check_normalization
    from smelt.models.load import load

    faults = robustness_run(robustness, ber, seeds, trigger, report)
    if harness:
        options = HarnessOptions(
            tasks, tasks_path, allow_task_code, num_fewshot, limit, metric, max_drop, batch_size, seed
        )
        options.refuse(data=data or None, min=minimum, max=maximum, text=text, pair=pair, label=label, context=context)
        options.refuse(normalize=normalize, kv_cache_dtype=kv, robustness=robustness or None)
        run_harness(model, against, options, device, json_file, junit_file)
        return
    settings: dict[str, Any] = {
        "metric": metric, "normalize": normalize, "context": context or 1024, "limit": limit, "batch_size": batch_size
    }  # fmt: skip
    if normalize is not None:
        check_normalization(normalize)
    sources = [load_data(name, text=text, pair=pair, label=label) for name in _checked_data(data, tasks, robustness)]
    margins = _checked_margins(max_drop, against, sources, metric)
    with progress_bars() as progress:
        new = load(model, device=device)
        base = load(against, device=device) if against is not None else None
        results = []
        for loaded in sources:
            quality = measure_quality(new, loaded, **settings, kv=kv, progress=progress)
            quality.check_finite(model)
            kv_format = kv or (str(new.kv) if new.kv else None)
            content: dict[str, Any] = {
                "model": model,
                "quality": quality.to_json(),
                **({"kv": kv_format} if kv_format else {}),
            }
            warning = calibration_warning(model, loaded)
            if warning is not None:
                content["warnings"] = [warning]
            if base is not None and against is not None:
                content |= _compare_with(against, base, new, quality, loaded, settings, seed, progress, kv, margins)
            if faults is not None:
                content["robustness"] = faults.measure(new, base, loaded, {**settings, "kv": kv}, progress)
            results.append((quality, content, _failures(quality, minimum, maximum, content)))
    for quality, content, _ in results:
        _show(model, quality, against, content)
        if faults is not None:
            show_robustness(content["robustness"])
    _finish(model, results, json_file, junit_file)


def _checked_data(data: list[str] | None, tasks: str | None, robustness: bool) -> list[str]:
    """Return the names of the data sets to evaluate on."""
    if tasks is not None:
        raise ConfigError("--tasks names tasks of lm-eval: add --harness to run them.")
    if not data:
        raise ConfigError("there is nothing to evaluate on: add --data, or --harness with --tasks.")
    if robustness and len(data) > 1:
        raise ConfigError("--robustness measures on one data set: give --data once.")
    return data


def _checked_margins(
    max_drop: list[str] | None, against: str | None, sources: list[Data], metric: str | None
) -> Margins | None:
    """Return the margins of the gate after checking that each data set has one, before the models are loaded."""
    from smelt.measure.evaluate import expected_metric
    from smelt.measure.gate import parse_margins

    if not max_drop:
        return None
    if against is None:
        raise ConfigError("--max-drop is the drop below a base model; name it with --against BASE.")
    margins = parse_margins(max_drop)
    for loaded in sources:
        margins.of(expected_metric(loaded, metric))
    return margins


def _finish(model: str, results: list[Result], json_file: Path | None, junit_file: Path | None) -> None:
    """Write the verdicts and exit with 3 unless every condition on every data set holds."""
    contents = [{**content, "passed": not failures} for _, content, failures in results]
    passed = all(content["passed"] for content in contents)
    write_json(
        json_file, contents[0] if len(contents) == 1 else {"model": model, "results": contents, "passed": passed}
    )
    write_junit(junit_file, model, [_case(*result) for result in results])
    for _, content, failures in results:
        if "gate" in content and content["gate"]["verdict"] == "pass":
            console.print(f"gate passed: {content['gate']['sentence']}", soft_wrap=True)
        for failure in failures:
            console.print(f"failed: {failure}", soft_wrap=True)
    if not passed:
        raise typer.Exit(3)


def _case(quality: EvalResult, content: dict[str, Any], failures: list[str]) -> GateCase:
    tested = content.get("gate", {})
    verdict = tested.get("verdict", "pass")
    if failures and verdict == "pass":
        verdict = "fail"
    details = tested.get("sentence", f"{quality.metric} {format_metric(quality.value)}")
    return GateCase(quality.metric, quality.data, verdict, failures, details)


def _failures(quality: EvalResult, minimum: float | None, maximum: float | None, content: dict[str, Any]) -> list[str]:
    """List the conditions of the gate that the model does not meet."""
    from smelt.measure.eval_result import meets_threshold

    failures = []
    if not meets_threshold(quality, minimum, maximum):
        bound = f"below the minimum {minimum:g}" if minimum is not None else f"above the maximum {maximum:g}"
        failures.append(f"{quality.metric} {format_metric(quality.value)} is {bound}")
    if "gate" in content:
        if content["gate"]["verdict"] != "pass":
            failures.append(content["gate"]["sentence"])
    elif content.get("comparison", {}).get("verdict") == "worse":
        failures.append(f"{quality.metric} is worse than that of {content['against']}")
    return failures


def _compare_with(
    base_name: str, base: Model, new: Model, quality: EvalResult, data: Data, settings: dict[str, Any], seed: int,
    progress: Progress, kv: str | None, margins: Margins | None,
) -> dict[str, Any]:  # fmt: skip
    from smelt.data import TextData
    from smelt.measure.divergence import logit_divergence
    from smelt.measure.evaluate import measure_quality
    from smelt.measure.gate import gate
    from smelt.measure.paired import compare

    base_quality = measure_quality(base, data, **settings, progress=progress)
    base_quality.check_finite(base_name)
    comparison = compare(quality, base_quality, seed=seed)
    content = {"against": base_name, "base_quality": base_quality.to_json(), "comparison": comparison.to_json()}
    if margins is not None:
        content["gate"] = gate(quality, base_quality, margins.of(quality.metric), seed=seed).to_json()
    if isinstance(data, TextData):
        context = quality.settings["context"]
        divergence = logit_divergence(new, base, data, context=context, limit=16 * context, kv=kv, progress=progress)
        content["divergence"] = divergence.to_json()
    return content


def _show(model: str, quality: EvalResult, against: str | None, content: dict[str, Any]) -> None:
    settings = ", ".join(f"{name} {value}" for name, value in quality.settings.items())
    name = f"{model}, KV cache in {content['kv']}" if "kv" in content else model
    rows = [[name, format_metric(quality.value)]]
    if against is not None:
        rows.append([against, format_metric(content["base_quality"]["value"])])
    console.print(table(f"{quality.metric} on {quality.data}", ["model", quality.metric], rows))
    if settings:
        console.print(settings)
    if quality.by_normalization is not None:
        values = (f"{name} {format_metric(value)}" for name, value in quality.by_normalization.items())
        console.print(f"{quality.metric} by normalization: {', '.join(values)}")
    if against is not None:
        for line in _comparison_lines(content):
            console.print(line)
    for warning in content.get("warnings", []):
        console.print(f"warning: {warning}", soft_wrap=True)


def _comparison_lines(content: dict[str, Any]) -> list[str]:
    comparison = content["comparison"]
    percent = f"{comparison['confidence']:.0%}"
    interval = f"{percent} interval {_interval(comparison['interval'], '+.4g')}"
    lines = [f"difference {comparison['difference']:+.4g}, {interval}: {comparison['verdict']}"]
    if comparison["ratio"] is not None:
        interval = _interval(comparison["ratio_interval"], ".4f")
        lines.append(f"ratio {comparison['ratio']:.4f}, {percent} interval {interval}")
    if comparison["mcnemar"] is not None:
        lines.append(
            f"gained {comparison['gained']}, lost {comparison['lost']} items, McNemar p = {comparison['mcnemar']:.3g}"
        )
    if comparison["flips"] is not None:
        lines.append(f"predictions changed on {comparison['flips']:.2%} of the items")
    divergence = content.get("divergence")
    if divergence is not None:
        lines.append(
            f"KL {divergence['kl']:.4f} nats per token, same top token on {divergence['agreement']:.2%} of tokens"
        )
    return lines


def _interval(bounds: list[float | None], style: str) -> str:
    """Format an interval; one item has none."""
    low, high = bounds
    return "unbounded" if low is None or high is None else f"[{low:{style}}, {high:{style}}]"
