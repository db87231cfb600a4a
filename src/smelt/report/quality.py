"""The quality section: the paired comparison of both models on the same items, with intervals."""

from __future__ import annotations

from collections.abc import Callable

from smelt.report import numbers
from smelt.report.charts import Interval, interval_plot
from smelt.report.markup import Markup, note, section, table, tag
from smelt.report.rows import Run, confidence_text, interval_text, short_path

_SETTINGS = {
    "context": "context of {} tokens",
    "max_length": "up to {} tokens per item",
    "stride": "stride of {} tokens",
    "tokens": "{} tokens",
    "tokens_scored": "{} tokens scored",
    "windows": "{} windows",
    "normalize": "normalized by {}",
    "items": "{} items",
    "pooling": "{} pooling",
}


def quality(run: Run) -> Markup | None:
    """Draw where quality was measured and how the two models compare."""
    measured = run.get("quality") or {}
    if not measured:
        return None
    compared = measured.get("comparison") or {}
    facts = _facts(compared)
    comparison_table = table(("paired comparison", "after against before"), facts) if facts else None
    plots = _plots(measured, compared)
    content = tag("div", tag("div", *plots), comparison_table, class_="pair") if plots else comparison_table
    verdict = _gate(measured)
    return section("Quality", note(_conditions(measured)), note(verdict) if verdict else None, content)


def _conditions(measured: Run) -> str:
    settings = {key: value for key, value in (measured.get("settings") or {}).items() if value is not None}
    facts = [_setting(str(key), numbers.plain(value)) for key, value in settings.items()]
    data = f"on {short_path(str(measured['data']))}" if measured.get("data") else ""
    measured_on = f"{measured.get('metric', 'quality')} {data}".strip()
    return ", ".join([measured_on, *facts])


def _setting(key: str, value: str) -> str:
    known = _SETTINGS.get(key)
    return known.replace("{}", value) if known else f"{key.replace('_', ' ')} {value}"


def _gate(measured: Run) -> str:
    """Say the verdict of the quality gate; empty without one."""
    gate = measured.get("gate") or {}
    words = {"pass": "Gate passed", "fail": "Gate failed", "inconclusive": "Gate failed"}
    return f"{words[gate['verdict']]}: {gate.get('sentence', '')}." if gate.get("verdict") in words else ""


def _plots(measured: Run, compared: Run) -> list[Markup]:
    metric, higher_is_better = str(measured.get("metric", "quality")), bool(measured.get("higher_is_better", True))
    plots: list[Markup] = []
    for key, prefix, reference, label in (
        ("difference", "", 0.0, "after − before"),
        ("ratio", "ratio_", 1.0, "after ÷ before"),
    ):
        value, low, high = (compared.get(name) for name in (key, f"{prefix}low", f"{prefix}high"))
        if value is None or low is None or high is None:
            continue
        interval = Interval(value, low, high, reference, higher_is_better)
        if interval.finite:
            title = f"{key[:1].upper()}{key[1:]}, with its {confidence_text(compared)}"
            plots += [tag("h3", title), interval_plot(interval, title, f"{metric}, {label}")]
    return plots


def _share(value: float) -> str:
    return f"{100 * value:.2f} %"


def _facts(compared: Run) -> list[tuple[str, str]]:
    writers: dict[str, tuple[str, Callable[[float], str]]] = {
        "difference": ("difference", numbers.signed),
        "ratio": ("ratio", lambda value: f"{value:.4f}"),
        "agreement": ("same predictions", _share),
        "flips": (
            "flipped answers",
            lambda value: numbers.plain(value) if isinstance(value, int) else _share(value),
        ),
        "mcnemar_p": ("McNemar test, p", numbers.probability),
        "kl": ("KL divergence of logits", lambda value: f"{value:.4g}"),
    }
    between = confidence_text(compared)
    ends = {
        "difference": (between, interval_text(compared, numbers.signed)),
        "ratio": (between, interval_text(compared, lambda value: f"{value:.4f}", "ratio_")),
    }
    facts: list[tuple[str, str]] = []
    for key, (label, write) in writers.items():
        if compared.get(key) is not None:
            facts.append((label, write(compared[key])))
            facts += [ends[key]] if key in ends and ends[key][1] else []
    return facts
