"""`guard: speed` of a recipe: leave those layers unquantized that quantization would make slower.

The decision precedes rounding: a layer that stays keeps the weights that the step found, and the layers after it are
calibrated on its outputs. Layers that share an input are decided together, because the engine runs them as one product.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from smelt.compression.base import MethodContext
from smelt.compression.quantization.layers import LayerGroup
from smelt.errors import RecipeError
from smelt.models.quantized import LinearGroupSpec, QuantizationScheme
from smelt.report.layers import name_in_block
from smelt.report.numbers import size as format_size

TOLERANCE = 0.02  # a layer is slower if it takes longer than the unquantized one by more than this
CHOICE = "speed_guard"  # the name of the decision in the checkpoint and in the passport


@dataclass(frozen=True)
class SpeedGuardResult:
    """Which layers stay unquantized, and how long each layer would take relative to the unquantized one."""

    device: str
    workload: str
    unquantized: tuple[str, ...]  # paths of layers
    time_ratios: Mapping[str, float]

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "unquantized": list(self.unquantized)}

    def facts(self, schemes: Sequence[tuple[LayerGroup, QuantizationScheme]]) -> dict[str, Any]:
        """Return the decision with its cost in bytes and a sentence about it; take it before layers are replaced."""
        stay = [(group, scheme) for group, scheme in schemes if group.path in self.unquantized]
        extra_bytes = round(sum(_saving(group, scheme) for group, scheme in stay))
        return {**self.to_json(), "extra_bytes": extra_bytes, "sentence": self._sentence(extra_bytes)}

    def _sentence(self, extra_bytes: int) -> str:
        total, where = len(self.time_ratios), f"on {self.device} for the workload {self.workload}"
        if not self.unquantized:
            return f"guard: none of the {total} layers would be slower quantized {where}"
        names_by_ratio: dict[str, list[str]] = {}
        for name in dict.fromkeys(map(name_in_block, self.unquantized)):
            names_by_ratio.setdefault(self._ratios(name), []).append(name)
        listed = "; ".join(f"{', '.join(names)} ({ratio} the time)" for ratio, names in names_by_ratio.items())
        every = "all" if len(self.unquantized) == total else f"{len(self.unquantized)} of"
        return (
            f"guard: {every} {total} layers stay unquantized, because they would be slower {where}: {listed}; this "
            f"takes {format_size(extra_bytes)} more"
            + (": choose another format, or remove the guard" if len(self.unquantized) == total else "")
        )

    def _ratios(self, name: str) -> str:
        """Return the range of the ratios of a layer over the blocks."""
        ratios = [self.time_ratios[path] for path in self.unquantized if name_in_block(path) == name]
        low, high = f"{min(ratios):.2f}", f"{max(ratios):.2f}"
        return f"{low}x" if low == high else f"{low} to {high}x"


def _saving(group: LayerGroup, scheme: QuantizationScheme) -> float:
    """Return the bytes that quantization would save on the weights of a group."""
    weights = [layer.weight for layer in group.layers]
    return sum(w.nbytes - w.numel() * scheme.weight.bits_per_value(w.shape[1], w.shape[0]) / 8 for w in weights)


def apply_speed_guard(
    schemes: Sequence[tuple[LayerGroup, QuantizationScheme]], context: MethodContext
) -> SpeedGuardResult | None:
    """Decide which layers stay unquantized; None if the recipe has no guard.

    A decision of the run to repeat, or of the interrupted run, is kept, because measuring again could change it.
    """
    if context.speed_guard is None:
        return None
    plain = context.choices.recorded(CHOICE)
    plain = context.checkpoint.load_facts(CHOICE) if plain is None else plain
    result = _measure(schemes, context) if plain is None else _parse(plain, [group for group, _ in schemes])
    context.checkpoint.save_facts(CHOICE, result.to_json())
    context.choices.record(CHOICE, result.to_json())
    return result


def _measure(schemes: Sequence[tuple[LayerGroup, QuantizationScheme]], context: MethodContext) -> SpeedGuardResult:
    guard = context.speed_guard
    assert guard is not None
    specs = {group.path: group_spec(group, scheme) for group, scheme in schemes}
    distinct = list(dict.fromkeys(specs.values()))
    ratio_of = {spec: guard.time_ratio(spec) for spec in context.progress.track(distinct, "timing layers")}
    ratios = {layer.path: ratio_of[specs[group.path]] for group, _ in schemes for layer in group.layers}
    slower = tuple(path for path, ratio in ratios.items() if ratio > 1 + TOLERANCE)
    rounded = {path: round(ratio, 4) for path, ratio in ratios.items()}
    return SpeedGuardResult(guard.device, guard.workload, slower, rounded)


def group_spec(group: LayerGroup, scheme: QuantizationScheme) -> LinearGroupSpec:
    """Describe layers that share an input, for timing."""
    mixture = group.part.mixture
    return LinearGroupSpec(
        in_features=group.columns,
        out_features=tuple(layer.weight.shape[0] for layer in group.layers),
        bias=any(layer.module.bias is not None for layer in group.layers),
        scheme=scheme,
        token_share=1.0 if mixture is None else mixture.top_k / mixture.num_experts,
        fused_input=group.is_input_group or group.part.kind == "ffn_channels",
    )


def _parse(plain: Any, groups: Sequence[LayerGroup]) -> SpeedGuardResult:
    """Parse a recorded decision, which comes from a file, and check that it fits this network."""
    fields = plain if isinstance(plain, dict) else {}
    device, workload = fields.get("device"), fields.get("workload")
    unquantized, ratios = fields.get("unquantized"), fields.get("time_ratios")
    if not (isinstance(device, str) and isinstance(workload, str) and isinstance(ratios, dict)):
        raise RecipeError("the recorded decision of the speed guard is damaged.")
    paths = [[layer.path for layer in group.layers] for group in groups]
    known = {path for group in paths for path in group}
    if not isinstance(unquantized, list) or not known.issuperset(map(str, unquantized)) or set(ratios) != known:
        raise RecipeError("the recorded decision of the speed guard does not fit this network.")
    if any(0 < len(set(group) & set(unquantized)) < len(group) for group in paths):
        raise RecipeError("the recorded decision of the speed guard separates layers that share an input.")
    if any(type(ratio) not in (int, float) for ratio in ratios.values()):
        raise RecipeError("the recorded times of the speed guard must be numbers.")
    return SpeedGuardResult(device, workload, tuple(unquantized), ratios)
