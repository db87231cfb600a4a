"""The section of a network that runs as an integer graph: what was checked, and the noise of every layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from smelt.report.markup import Markup, details, join, note, section, table
from smelt.report.rows import Run

SQNR = "sqnr_db"  # the fact of a step: decibels by layer
_SHOWN = 8  # layers with the most noise, above the folded list of all
_HEADINGS = ("layer", "signal to quantization noise")
_SQNR_NOTE = (
    "Power of the float output over the power of its difference from the integer one, on a calibration batch, with the "
    "noise of all layers before it. The layers with the lowest ratios:"
)


def integer_graph(run: Run) -> Markup | None:
    """Say what the checker saw in the graph, and list the signal-to-noise ratio of its layers, the lowest first."""
    sentence = checked_sentence(run)
    return section("Integer graph", note(sentence), _noise(layer_sqnr(run))) if sentence else None


def checked_sentence(run: Run) -> str:
    """Say the dtypes of all tensors in the graph; empty for other networks. The run may come from an untrusted file."""
    graph = run.get("integer_graph")
    tensors = graph.get("tensors") if isinstance(graph, Mapping) else None
    if not isinstance(tensors, Mapping) or not all(isinstance(count, int) for count in tensors.values()):
        return ""
    counts = ", ".join(f"{count:,} {dtype}" for dtype, count in tensors.items())
    floats = [dtype for dtype in tensors if not dtype.startswith(("int", "uint"))]
    verdict = f"floating point: {', '.join(floats)}" if floats else "none is floating point"
    return (
        f"The checker saw {sum(tensors.values()):,} tensors (inputs, constants and results of operators) between input "
        f"and output, and {verdict}: {counts}."
    )


def layer_sqnr(run: Run) -> dict[str, float]:
    """Return the ratio of every layer in decibels; empty if no step measured it. The run may be untrusted."""
    steps = run.get("steps")
    for step in steps if isinstance(steps, list) else []:
        facts = step.get("facts") if isinstance(step, Mapping) else None
        ratios = facts.get(SQNR) if isinstance(facts, Mapping) else None
        if isinstance(ratios, Mapping):
            return {str(layer): value for layer, value in ratios.items() if isinstance(value, int | float)}
    return {}


def _noise(ratios: Mapping[str, float]) -> Markup:
    if not ratios:
        return join()
    lowest = sorted(ratios.items(), key=lambda row: row[1])
    content = [note(_SQNR_NOTE), table(_HEADINGS, _rows(lowest[:_SHOWN]))]
    if len(ratios) > _SHOWN:
        content.append(details(f"all {len(ratios)} layers", table(_HEADINGS, _rows(list(ratios.items())))))
    return join(*content)


def _rows(ratios: Sequence[tuple[str, float]]) -> list[tuple[str, str]]:
    return [(layer, f"{decibels:.1f} dB") for layer, decibels in ratios]
