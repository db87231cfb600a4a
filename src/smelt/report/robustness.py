"""The robustness section: quality against the bit error rate, with and without clipping, and attacks, side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from smelt.report import numbers
from smelt.report.markup import Markup, join, note, section, table, tag
from smelt.report.page import page
from smelt.report.plots import Scale, Series, legend, lines

Run = Mapping[str, Any]
BACKDOOR_ALARM = "Alarm: the trigger works on the compressed model and not on the dense one."


def render_robustness(content: Run) -> str:
    """Render a page with the robustness of one model, or of a compressed model beside its dense one."""
    names = [str(model["name"] or role) for role, model in _models(content)]
    title = f"Robustness of {names[-1]}"
    header = tag("header", tag("h1", title), tag("div", " and ".join(names), class_="soft"))
    return page(title, header, robustness(content), tag("footer", "Written by Smelt."))


def robustness(content: Run | None) -> Markup | None:
    """Draw all measurements of the `robustness` part of a JSON result."""
    if not content:
        return None
    return join(
        section(
            "Quality under bit errors",
            note(_conditions(content)),
            _plots(content),
            _fault_table(content),
            _tolerated_table(content),
        ),
        section("Range clipping", note(_CLIPPING), _clipping_table(content)),
        _attack_section(content),
        _other_section(content),
    )


_CLIPPING = (
    "Activations are clamped to the range seen on held-out data. Its cost without flips: the change of the metric and "
    "its 95 % interval, and the time with clipping over the time without."
)


def _models(content: Run) -> list[tuple[str, Run]]:
    """Return the models, dense first, with their roles."""
    pairs = (("dense", content.get("base")), ("compressed", content["model"]))
    return [(role, model) for role, model in pairs if model]


def fault_key(point: Run) -> tuple[str, float, bool]:
    return point["target"], point["ber"], point["clipped"]


def fault_keys(content: Run) -> list[tuple[str, float, bool]]:
    """Return target, rate and clipping of all measurements in the order of tables: as measured, clipped last."""
    points = [point for model in (content["model"], content.get("base")) if model for point in model["faults"]]
    targets = list(dict.fromkeys(point["target"] for point in points))
    return sorted({fault_key(point) for point in points}, key=lambda key: (targets.index(key[0]), key[2], key[1]))


def _conditions(content: Run) -> str:
    clean = content["model"]["clean"]
    settings = content["settings"]
    values = ", ".join(
        f"{model['name'] or role} {numbers.metric(model['clean']['value'])}" for role, model in _models(content)
    )
    return (
        f"{clean['metric']} on {clean['items']} items of {clean['data']}, mean of {settings['seeds']} seeds. "
        f"Without flips: {values}. Flips hit the bits as stored; an item without a finite output counts as wrong."
    )


def _label(role: str, model: Run) -> str:
    return str(model["name"] or role)


def _plots(content: Run) -> Markup:
    """Draw one graph per target that is measured, with a line per model and clipping."""
    models = _models(content)
    targets = list(dict.fromkeys(point["target"] for _, model in models for point in model["faults"]))
    bers = [ber for ber in content["settings"]["bers"] if ber > 0]  # the axis is logarithmic
    if len(bers) < 2:
        return join()
    names = [f"{_label(role, model)}{suffix}" for role, model in models for suffix in ("", ", clipped")]
    values = [model["clean"]["value"] for _, model in models]
    higher = content["model"]["clean"]["higher_is_better"]
    graphs = []
    for target in targets:
        series = [
            Series(f"{_label(role, model)}{', clipped' if clipped else ''}", _points(model, target, clipped))
            for role, model in models
            for clipped in (False, True)
        ]
        drawn = [value for each in series for _, value in each.points]
        top = max([*values, *drawn]) if higher else min(max([*values, *drawn]), 10 * max(values))
        metric = content["model"]["clean"]["metric"]
        y = Scale(metric, 0.0, 1.0 if higher and top <= 1 else top)
        x = Scale("bit error rate", min(bers), max(bers), logarithmic=True)
        graphs.append(lines(f"{metric}, flips in: {target}", series, x, y))
    return join(legend(names), tag("div", *graphs, class_="graphs"))


def _points(model: Run, target: str, clipped: bool) -> list[tuple[float, float]]:
    chosen = [
        (point["ber"], point["mean"])
        for point in model["faults"]
        if (point["target"], point["clipped"]) == (target, clipped) and point["mean"] is not None and point["ber"] > 0
    ]
    return sorted(chosen)


def _fault_table(content: Run) -> Markup:
    models = _models(content)
    compared = {fault_key(row): row for row in (content.get("comparison") or {}).get("faults", [])}
    headings = ["flips in", "bit error rate", *(_label(role, model) for role, model in models)]
    headings += ["difference, 95 % interval"] if compared else []
    clean = [numbers.metric(model["clean"]["value"]) for _, model in models]
    rows: list[list[object]] = [["nothing", "0", *clean, *([_clean_difference(content)] if compared else [])]]
    for key in fault_keys(content):
        target, ber, clipped = key
        row: list[object] = [f"{target}, clipped" if clipped else target, numbers.rate(ber)]
        row += [_value_text(model, key) for _, model in models]
        if compared:
            row.append(_difference_text(compared.get(key)))
        rows.append(row)
    return table(headings, rows)


def _value_text(model: Run, key: tuple[str, float, bool]) -> str:
    point = next((point for point in model["faults"] if fault_key(point) == key), None)
    if point is None:
        return "–"
    values = [value for value in point["values"] if value is not None]
    if point["mean"] is None or not values:
        return "not finite"
    spread = f" ({numbers.metric(min(values))} to {numbers.metric(max(values))})" if len(values) > 1 else ""
    return numbers.metric(point["mean"]) + spread


def _clean_difference(content: Run) -> str:
    return numbers.signed(content["comparison"]["difference"])


def _difference_text(row: Run | None) -> str:
    if row is None or row["difference"] is None:
        return "–"
    low, high = row["interval"]
    return f"{numbers.signed(row['difference'])} [{numbers.signed(low)}, {numbers.signed(high)}]"


def _tolerated_table(content: Run) -> Markup:
    """List the rates that cost one point and half of the metric, where the measured rates show them."""
    rows = [
        [
            f"{entry['target']}, clipped" if entry["clipped"] else entry["target"],
            _label(role, model),
            *("–" if entry.get(name) is None else numbers.rate(entry[name]) for name in ("ber_1", "ber_50")),
        ]
        for role, model in _models(content)
        for entry in model["tolerated"]
        if entry.get("ber_1") is not None or entry.get("ber_50") is not None
    ]
    return table(["flips in", "model", "bit error rate that costs one point", "half"], rows) if rows else join()


def _clipping_table(content: Run) -> Markup:
    rows = []
    for role, model in _models(content):
        clipping = model["clipping"]
        change, (low, high) = clipping["comparison"]["difference"], clipping["comparison"]["interval"]
        between = "–" if low is None else f"[{numbers.signed(low)}, {numbers.signed(high)}]"
        first, last = clipping["latency_interval"]
        time = f"{clipping['latency_ratio']:.2f} [{first:.2f}, {last:.2f}]"
        rows.append([_label(role, model), clipping["layers"], f"{numbers.signed(change)} {between}", time])
    return table(["model", "clipped outputs", "change of the metric", "time ratio"], rows)


def _attack_section(content: Run) -> Markup | None:
    rows = [
        [_label(role, model), f"{attack['eps']:g}", *(_share(attack[name]) for name in ATTACKS)]
        for role, model in _models(content)
        for attack in model["attacks"]
    ]
    if not rows:
        return None
    text = (
        "Accuracy when the embeddings of the tokens may move by eps standard deviations of the embedding table. "
        "Transfer: inputs made on the dense model. Robust: right under every attack. "
        f"On {content['model']['attacks'][0]['items']} items."
    )
    return section("Adversarial inputs", note(text), table(["model", "eps", *ATTACKS.values()], rows))


ATTACKS = {"clean": "no attack", "fgsm": "FGSM", "pgd": "PGD", "transfer": "transfer", "robust": "robust"}


def _share(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f} %"


def _other_section(content: Run) -> Markup | None:
    parts: list[Markup] = []
    searches: Sequence[list[object]] = [
        [
            _label(role, model),
            model["bit_search"]["flips"],
            numbers.count(model["bit_search"]["bits"]),
            _share(model["bit_search"]["accuracy"]),
            _share((model["bit_search"]["steps"] or [model["bit_search"]])[-1]["accuracy"]),
        ]
        for role, model in _models(content)
        if model["bit_search"]
    ]
    if searches:
        headings = ["chosen flips (progressive bit search)", "flips", "of bits", "accuracy before", "after"]
        parts.append(table(headings, searches))
    doors = [
        [_label(role, model), _share(model["backdoor"]["success"]), _share(model["backdoor"]["without_trigger"])]
        for role, model in _models(content)
        if model["backdoor"]
    ]
    if doors:
        parts.append(table(["back door", "target predicted with the trigger", "without"], doors))
    if (content.get("comparison") or {}).get("backdoor_alarm"):
        parts.append(tag("p", BACKDOOR_ALARM))
    return section("Chosen flips and back doors", *parts) if parts else None
