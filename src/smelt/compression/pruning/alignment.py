"""`alignment: measured` of a pruning step: the smallest multiple of widths at which the kernels of a device are fast.

For each shape of attention and feed-forward, layers of neighboring widths are timed: two multiples of the largest
alignment, and between them one odd multiple of every smaller one. A width is on the fast path if its layers take no
longer than the line through the two predicts for their size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from smelt.compression.base import MethodContext, WidthTimer
from smelt.errors import RecipeError
from smelt.models.anatomy import Part
from smelt.models.quantization_scheme import LinearGroupSpec

MEASURED = "measured"  # the value of the setting
MULTIPLES = (1, 8, 16, 32, 64, 128)  # to choose from
TOLERANCE = 0.02  # of the time of a width on the fast path
ALIGNED_FROM = 8  # times the alignment: narrower parts would lose too much choice
CHOICE = "alignment"  # the name of the decision in the checkpoint and in the passport


@dataclass(frozen=True)
class MeasuredAlignment:
    """The multiple, and the times that led to it."""

    multiple: int
    device: str
    workload: str
    microseconds: Mapping[str, Mapping[str, float]]  # by part and width, a mean over the steps of the workload

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def measured_alignment(parts: Sequence[Part], keep: float, context: MethodContext) -> MeasuredAlignment:
    """Measure the alignment of parts of which about `keep` will remain.

    A decision of the run to repeat, or of the interrupted run, is kept, because measuring again could change it.
    """
    plain = context.choices.recorded(CHOICE)
    plain = context.checkpoint.load_facts(CHOICE) if plain is None else plain
    if plain is not None:
        result = _parse(plain)
    elif context.width_timer is None:
        raise RecipeError("`alignment: measured` times layers in the engine, and there is none here; give a number.")
    else:
        result = _measure(parts, keep, context, context.width_timer)
    context.checkpoint.save_facts(CHOICE, result.to_json())
    context.choices.record(CHOICE, result.to_json())
    return result


def _measure(parts: Sequence[Part], keep: float, context: MethodContext, timer: WidthTimer) -> MeasuredAlignment:
    shapes: dict[Any, Part] = {}
    for part in parts:
        shapes.setdefault(tuple(part_specs(part, part.units)), part)
    seconds: dict[str, dict[int, float]] = {}
    slow: set[int] = set()
    for part in context.progress.track(list(shapes.values()), "timing widths"):
        widths = neighboring_widths(part, keep)
        if len(widths) < 3:
            continue
        specs = {width: part_specs(part, width // part.columns_per_unit) for width in widths.values()}
        times = timer.seconds([spec for group in specs.values() for spec in group])
        pairs = zip(times[::2], times[1::2], strict=True)
        seconds[part.name] = {width: sum(pair) for width, pair in zip(specs, pairs, strict=True)}
        slow |= slow_multiples(widths, seconds[part.name])
    multiple = next(m for m in MULTIPLES if not any(other >= m for other in slow))
    rounded = {
        name: {str(width): round(1e6 * time, 3) for width, time in sorted(times.items())}
        for name, times in seconds.items()
    }
    return MeasuredAlignment(multiple, timer.device, timer.workload, rounded)


def unit_multiple(part: Part, alignment: int) -> int:
    """Return the number of which the kept units of a part are a multiple under an alignment of its columns."""
    multiple = alignment // math.gcd(alignment, part.columns_per_unit)
    return multiple if part.units >= ALIGNED_FROM * multiple and part.kind != "channels" else 1


def neighboring_widths(part: Part, keep: float) -> dict[int, int]:
    """Return widths of a part to compare, by multiple: 0 is the lower one of the largest multiple.

    Multiples that mean the same number of units, or more units than the part can align to, are left out.
    """
    fitting = [m for m in MULTIPLES if m == 1 or unit_multiple(part, m) > 1]
    columns = {m: unit_multiple(part, m) * part.columns_per_unit for m in fitting}
    largest = max(columns, key=lambda m: columns[m])
    step = columns[largest]
    low = max(1, round(keep * part.units * part.columns_per_unit / step) - 1) * step
    return {0: low, largest: low + step, **{m: low + size for m, size in columns.items() if size < step}}


def slow_multiples(widths: Mapping[int, int], seconds: Mapping[int, float]) -> set[int]:
    """Return the multiples whose width takes longer than the line through the outer two predicts."""
    low, high = min(widths.values()), max(widths.values())
    slope = (seconds[high] - seconds[low]) / (high - low)
    return {
        multiple
        for multiple, width in widths.items()
        if low < width < high and seconds[width] > (1 + TOLERANCE) * (seconds[low] + slope * (width - low))
    }


def part_specs(part: Part, units: int) -> list[LinearGroupSpec]:
    """Describe the input projections of a part with this number of units, and its output projection."""
    rows: dict[str, int] = {}
    for projection, per_unit in zip(part.input_projections, part.rows_per_unit, strict=True):
        rows[projection.path] = rows.get(projection.path, 0) + units * per_unit
    first = part.input_projections[0]
    bias = any(projection.bias is not None for projection in part.input_projections)
    return [
        LinearGroupSpec(first.in_features, tuple(rows.values()), bias, None, part.token_fraction),
        LinearGroupSpec(
            units * part.columns_per_unit, (part.output.out_features,), part.output.bias is not None, None,
            part.token_fraction, fused_input=part.kind == "ffn_channels",
        ),
    ]  # fmt: skip


def _parse(plain: Any) -> MeasuredAlignment:
    """Parse a recorded decision, which comes from a file."""
    fields = plain if isinstance(plain, dict) else {}
    multiple, device, workload = fields.get("multiple"), fields.get("device"), fields.get("workload")
    times = fields.get("microseconds")
    if type(multiple) is not int or multiple not in MULTIPLES:
        raise RecipeError(f"the recorded alignment must be one of {', '.join(map(str, MULTIPLES))}.")
    if not (isinstance(device, str) and isinstance(workload, str) and isinstance(times, dict)):
        raise RecipeError("the recorded alignment is damaged.")
    if any(not isinstance(by_width, dict) for by_width in times.values()):
        raise RecipeError("the recorded alignment is damaged.")
    if any(type(time) not in (int, float) for by_width in times.values() for time in by_width.values()):
        raise RecipeError("the recorded times of the alignment must be numbers.")
    return MeasuredAlignment(multiple, device, workload, times)
