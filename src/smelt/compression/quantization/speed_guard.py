"""`guard: speed` of a recipe: layers that quantization would make slower get another format, or stay unquantized.

The decision precedes rounding: a layer that stays keeps the weights that the step found, and the layers after it are
calibrated on its outputs. Layers that share an input are decided together, because the engine runs them as one product.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from smelt.compression.base import MethodContext, SpeedGuard
from smelt.compression.quantization.layers import LayerGroup
from smelt.errors import RecipeError
from smelt.models.quantization_scheme import LinearGroupSpec, QuantizationScheme
from smelt.numerics.catalog import format_name, get_format
from smelt.report.layers import name_in_block
from smelt.report.numbers import size as format_size

TOLERANCE = 0.02  # a layer is slower if it takes longer than the unquantized one by more than this
CHOICE = "speed_guard"  # the name of the decision in the checkpoint and in the passport
UNQUANTIZED = "unquantized"  # what a layer became that no format would make faster

Schemes = Sequence[tuple[LayerGroup, QuantizationScheme]]


@dataclass(frozen=True)
class SpeedGuardResult:
    """What becomes of the layers that would be slower, and how long each takes relative to the unquantized one."""

    device: str
    workload: str
    unquantized: tuple[str, ...]  # paths of layers
    time_ratios: Mapping[str, float]  # of all layers, in the format of the step
    formats: Mapping[str, str] = field(default_factory=dict)  # other formats, by path
    other_ratios: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # by path and format, of all tried

    @property
    def slower(self) -> tuple[str, ...]:
        """Return the paths of all layers that are not quantized as the step says."""
        return tuple(path for path in self.time_ratios if path in self.formats or path in self.unquantized)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "unquantized": list(self.unquantized)}

    def facts(self, schemes: Schemes) -> dict[str, Any]:
        """Return the decision with its cost in bytes and a sentence about it; take it before layers are replaced."""
        final = final_schemes(schemes, self)
        saved = sum(_saving(group, scheme) - _saving(group, final.get(group.path)) for group, scheme in schemes)
        layers = self._layers({layer.path: scheme for group, scheme in schemes for layer in group.layers})
        return {
            **self.to_json(),
            "layers": layers,
            "extra_bytes": round(saved),
            "sentence": self._sentence(round(saved), len(final)),
        }

    def _layers(self, schemes: Mapping[str, QuantizationScheme]) -> dict[str, Any]:
        """Return what each slower layer became, with its times by format."""
        own = {path: {format_name(schemes[path].weight): self.time_ratios[path]} for path in self.slower}
        return {
            path: {
                "became": self.formats.get(path, UNQUANTIZED),
                "time_ratios": own[path] | dict(self.other_ratios.get(path, {})),
            }
            for path in self.slower
        }

    def _sentence(self, extra_bytes: int, quantized: int) -> str:
        total, where = len(self.time_ratios), f"on {self.device} for the workload {self.workload}"
        if not self.slower:
            return f"guard: none of the {total} layers would be slower quantized {where}"
        outcomes = Counter(self.formats.values())
        parts = [f"{_share(number, total)} layers become {name}" for name, number in outcomes.items()]
        parts += [f"{_share(len(self.unquantized), total)} layers stay unquantized"] if self.unquantized else []
        size = f"{format_size(abs(extra_bytes))} {'more' if extra_bytes >= 0 else 'less'}"
        advice = "" if quantized else ": choose another format, or remove the guard"
        return (
            f"guard: {' and '.join(parts)}, because they would be slower {where}: {self._listed()}; this takes "
            f"{size}{advice}"
        )

    def _listed(self) -> str:
        """List the slower layers with their times; the same layer in several blocks is listed once per outcome."""
        blocks: dict[tuple[str, str], list[str]] = {}
        for path in self.slower:
            blocks.setdefault((name_in_block(path), self.formats.get(path, "")), []).append(path)
        names_by_time: dict[str, list[str]] = {}
        for (name, _), paths in blocks.items():
            names_by_time.setdefault(self._times(paths), []).append(name)
        return "; ".join(f"{', '.join(names)} ({times})" for times, names in names_by_time.items())

    def _times(self, paths: Sequence[str]) -> str:
        """Return the relative times of a layer over the blocks; those in another format first, if it got one."""
        times, name = f"{_range([self.time_ratios[path] for path in paths])} the time", self.formats.get(paths[0])
        if name is None:
            return times
        return f"{name}: {_range([self.other_ratios[path][name] for path in paths])} instead of {times}"


def final_schemes(schemes: Schemes, guarded: SpeedGuardResult | None) -> dict[str, QuantizationScheme]:
    """Return how each layer is quantized, by path, after the guard; a layer that stays unquantized is not in it."""
    by_path = {layer.path: scheme for group, scheme in schemes for layer in group.layers}
    if guarded is None:
        return by_path
    others = {path: replace(by_path[path], weight=get_format(name)) for path, name in guarded.formats.items()}
    return {path: others.get(path, scheme) for path, scheme in by_path.items() if path not in guarded.unquantized}


def _share(number: int, total: int) -> str:
    return f"all {total}" if number == total else f"{number} of {total}"


def _range(ratios: Sequence[float]) -> str:
    low, high = f"{min(ratios):.2f}", f"{max(ratios):.2f}"
    return f"{low}x" if low == high else f"{low} to {high}x"


def _saving(group: LayerGroup, scheme: QuantizationScheme | None) -> float:
    """Return the bytes that quantization saves on the weights of a group."""
    if scheme is None:
        return 0.0
    weights = [layer.weight for layer in group.layers]
    return sum(w.nbytes - w.numel() * scheme.weight.bits_per_value(w.shape[1], w.shape[0]) / 8 for w in weights)


def apply_speed_guard(schemes: Schemes, context: MethodContext) -> SpeedGuardResult | None:
    """Decide what becomes of layers that would be slower; None if the recipe has no guard.

    A decision of the run to repeat, or of the interrupted run, is kept, because measuring again could change it.
    """
    if context.speed_guard is None:
        return None
    plain = context.choices.recorded(CHOICE)
    plain = context.checkpoint.load_facts(CHOICE) if plain is None else plain
    if plain is None:
        result = _measure(schemes, context, context.speed_guard)
    else:
        result = _parse(plain, [group for group, _ in schemes], context.speed_guard.formats)
    context.checkpoint.save_facts(CHOICE, result.to_json())
    context.choices.record(CHOICE, result.to_json())
    return result


def _measure(schemes: Schemes, context: MethodContext, guard: SpeedGuard) -> SpeedGuardResult:
    specs = {layer.path: group_spec(group, scheme) for group, scheme in schemes for layer in group.layers}
    distinct = list(dict.fromkeys(specs.values()))
    tried = {spec: time_formats(spec, guard) for spec in context.progress.track(distinct, "timing layers")}
    slower = {path: spec for path, spec in specs.items() if _is_slower(next(iter(tried[spec].values())))}
    accepted = {path: next(reversed(tried[spec].items())) for path, spec in slower.items()}
    return SpeedGuardResult(
        guard.device,
        guard.workload,
        unquantized=tuple(path for path, (_, ratio) in accepted.items() if _is_slower(ratio)),
        time_ratios={path: round(next(iter(tried[spec].values())), 4) for path, spec in specs.items()},
        formats={path: name for path, (name, ratio) in accepted.items() if not _is_slower(ratio)},
        other_ratios={
            path: {name: round(ratio, 4) for name, ratio in list(tried[spec].items())[1:]}
            for path, spec in slower.items()
            if len(tried[spec]) > 1
        },
    )


def time_formats(spec: LinearGroupSpec, guard: SpeedGuard) -> dict[str, float]:
    """Return the relative time of layers in their own format and, while they are slower, in the guard's formats.

    A format whose groups do not divide the inputs is not tried. Only the last one can be fast enough.
    """
    scheme = spec.scheme
    assert scheme is not None
    formats = [scheme.weight, *map(get_format, guard.formats)]
    ratios: dict[str, float] = {}
    for position, number_format in enumerate(formats):
        name, size = format_name(number_format), number_format.group_size
        if name in ratios or (position and size > 0 and spec.in_features % size):
            continue
        ratios[name] = guard.time_ratio(replace(spec, scheme=replace(scheme, weight=number_format)))
        if not _is_slower(ratios[name]):
            break
    return ratios


def _is_slower(ratio: float) -> bool:
    return ratio > 1 + TOLERANCE


def group_spec(group: LayerGroup, scheme: QuantizationScheme) -> LinearGroupSpec:
    """Describe layers that share an input, for timing."""
    mixture = group.mixture
    return LinearGroupSpec(
        in_features=group.columns,
        out_features=tuple(layer.weight.shape[0] for layer in group.layers),
        bias=any(layer.module.bias is not None for layer in group.layers),
        scheme=scheme,
        token_share=1.0 if mixture is None else mixture.top_k / mixture.num_experts,
        fused_input=group.is_input_group or (group.part is not None and group.part.kind == "ffn_channels"),
    )


def _parse(plain: Any, groups: Sequence[LayerGroup], known_formats: Sequence[str]) -> SpeedGuardResult:
    """Parse a recorded decision, which comes from a file, and check that it fits this network and this guard."""
    fields = plain if isinstance(plain, dict) else {}
    device, workload, unquantized = fields.get("device"), fields.get("workload"), fields.get("unquantized")
    ratios, formats, others = fields.get("time_ratios"), fields.get("formats"), fields.get("other_ratios")
    if not (isinstance(device, str) and isinstance(workload, str)):
        raise RecipeError("the recorded decision of the speed guard is damaged.")
    if not (isinstance(ratios, dict) and isinstance(formats, dict) and isinstance(others, dict)):
        raise RecipeError("the recorded decision of the speed guard is damaged.")
    paths = [[layer.path for layer in group.layers] for group in groups]
    known = {path for group in paths for path in group}
    stay = [str(path) for path in unquantized] if isinstance(unquantized, list) else [""]
    changed = [*stay, *formats]
    if not known.issuperset([*changed, *others]) or set(ratios) != known or len(set(changed)) < len(changed):
        raise RecipeError("the recorded decision of the speed guard does not fit this network.")
    if any(len({formats.get(path, path in changed) for path in group}) > 1 for group in paths):
        raise RecipeError("the recorded decision of the speed guard separates layers that share an input.")
    names = {format_name(get_format(name)) for name in known_formats}
    if any(not isinstance(tried, dict) or not names.issuperset(tried) for tried in others.values()):
        raise RecipeError("the recorded decision of the speed guard has formats that the recipe does not name.")
    if any(name not in others.get(path, {}) for path, name in formats.items()):
        raise RecipeError("the recorded decision of the speed guard has formats that were not timed.")
    times = [*ratios.values(), *(ratio for tried in others.values() for ratio in tried.values())]
    if any(type(ratio) not in (int, float) for ratio in times):
        raise RecipeError("the recorded times of the speed guard must be numbers.")
    return SpeedGuardResult(device, workload, tuple(stay), ratios, formats, others)
