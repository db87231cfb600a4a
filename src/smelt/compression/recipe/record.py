"""The record of a run: measurements before and after as plain data, for the report and the JSON result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from smelt.compression.methods import METHODS
from smelt.compression.recipe.recipe import Recipe
from smelt.data import LabeledData, TextData
from smelt.export.opens import opens_in
from smelt.measure.cost import Workload, block_macs, block_parameters, count_bytes, count_parameters
from smelt.measure.divergence import logit_divergence
from smelt.measure.eval_result import EvalResult
from smelt.measure.evaluate import Data
from smelt.measure.latency import LatencyComparison, compare_latency
from smelt.measure.machine import machine
from smelt.measure.paired import PairedComparison, compare
from smelt.models.artifact import is_pruned
from smelt.models.model import Model
from smelt.models.quantized import QuantizedLinear, quantized_layers
from smelt.numerics.catalog import format_name
from smelt.report.rows import short_path
from smelt.runtime.integer.network import IntegerNetwork
from smelt.serve.engine.throughput import Throughput, ThroughputRow, paired_rows

TIMED_TOKENS = 128
DEFAULT_PROMPT = "Once upon a time"  # completed before and after if no prompt is given
SHOWN_ITEMS = 6  # of labeled data, with the predictions before and after


@dataclass(frozen=True)
class Before:
    """Measurements of the source model."""

    size: dict[str, float]
    quality: EvalResult | None
    sentences: list[str]


@dataclass(frozen=True)
class After:
    """Measurements of the result, and its comparison with the source model."""

    size: dict[str, float]
    quality: EvalResult | None
    comparison: dict[str, Any] | None
    predictions: list[dict[str, Any]]
    speed: list[dict[str, Any]]
    sentences: list[str]

    @property
    def reproducible(self) -> dict[str, Any]:
        """Return what is the same in every run with the same seed, and so may go into smelt.json."""
        quality = None if self.quality is None else {**self.quality.to_json(), "comparison": self.comparison}
        return {"size": self.size, **({"quality": quality} if quality else {})}


def measure_size(model: Model, recipe: Recipe) -> dict[str, float]:
    anatomy = model.anatomy
    return {
        "parameters": count_parameters(model.network),
        "block_parameters": block_parameters(anatomy),
        "bytes": count_bytes(model.network),
        "macs": block_macs(anatomy, Workload(tokens=_tokens(model), image_size=_image_size(model))),
    }


def _tokens(model: Model) -> int:
    """Return the tokens for which MACs are counted; a policy reads one observation."""
    return 1 if model.task == "policy" else TIMED_TOKENS


def _image_size(model: Model) -> int:
    """Return the height and width of the images for which MACs are counted."""
    return getattr(model.network.config, "image_size", None) or Workload.image_size


def after_record(
    model: Model, base: Model | None, before: Before, quality: EvalResult | None, data: Data | None,
    recipe: Recipe, speed: bool, prompts: list[str],
) -> After:  # fmt: skip
    comparison, predictions = None, []
    if quality is not None and before.quality is not None and base is not None:
        comparison = comparison_record(compare(quality, before.quality, seed=recipe.seed))
        if isinstance(data, TextData):
            context = quality.settings["context"]
            divergence = logit_divergence(model, base, data, context=context, limit=4 * context)
            comparison |= {"kl": divergence.kl, "agreement": divergence.agreement}
        if isinstance(data, LabeledData):
            predictions = _sample_predictions(data, before.quality, quality, model.network.config.id2label or {})
    timings = []
    if speed and base is not None:
        length = min(TIMED_TOKENS, getattr(base.network.config, "max_position_embeddings", TIMED_TOKENS))
        timings = [_timing(compare_latency(model, base, length=length, seed=recipe.seed), model.task)]
    completions = [model.generate(prompt) for prompt in prompts]
    return After(measure_size(model, recipe), quality, comparison, predictions, timings, completions)


def _sample_predictions(
    data: LabeledData, before: EvalResult, after: EvalResult, names: Mapping[int, str]
) -> list[dict[str, Any]]:
    """Return the first items with their label and what both models predict, as class names where there are some."""
    if before.predictions is None or after.predictions is None or after.labels is None:
        return []

    def text(value: Any) -> Any:
        return names.get(int(value), int(value)) if value.dtype.kind == "i" else round(float(value), 3)

    return [
        {
            "text": data.first[item] if data.second is None else f"{data.first[item]}\n{data.second[item]}",
            "label": text(after.labels[item]),
            "before": text(before.predictions[item]),
            "after": text(after.predictions[item]),
        }
        for item in range(min(SHOWN_ITEMS, len(after.predictions)))
    ]


def comparison_record(comparison: PairedComparison) -> dict[str, Any]:
    """Return a paired comparison as plain data, with the keys of the report."""
    low, high = comparison.interval
    ratio_low, ratio_high = comparison.ratio_interval or (None, None)
    values = {
        "difference": comparison.difference,
        "low": low,
        "high": high,
        "confidence": comparison.confidence,
        "ratio": comparison.ratio,
        "ratio_low": ratio_low,
        "ratio_high": ratio_high,
        "mcnemar_p": comparison.mcnemar,
        "flips": comparison.flips,
        "kl": comparison.divergence,
    }
    return {name: value for name, value in values.items() if value is not None}


def engine_timings(new: Throughput, base: Throughput) -> list[dict[str, Any]]:
    """Return an entry of the report for every batch size: the time per output token of a stream, prompts included."""
    return [
        {
            "name": f"served, {row.streams} {'stream' if row.streams == 1 else 'streams'}, {new.workload}",
            "device": new.device,
            "before": _served(reference),
            "after": _served(row),
            "ratio": row.tokens_per_second / reference.tokens_per_second,
        }
        for row, reference in paired_rows(new, base)
    ]


def _served(row: ThroughputRow) -> dict[str, Any]:
    return {"median_ms": 1e3 * row.streams / row.tokens_per_second, **asdict(row)}


def _timing(comparison: LatencyComparison, task: str) -> dict[str, Any]:
    new, base = comparison.new, comparison.base
    length = f"{new.length} {'frames' if task == 'speech' else 'tokens'}"
    inputs = {"images": "images", "policy": "observations"}.get(task, length)
    return {
        "name": f"forward, batch {new.batch}, {inputs}",
        "device": new.device,
        "before": asdict(base),
        "after": asdict(new),
        "ratio": comparison.ratio,
        "ratio_low": comparison.ratio_low,
        "ratio_high": comparison.ratio_high,
    }


def run_record(
    source: str,
    folder: str,
    recipe: Recipe,
    before: Before,
    after: After,
    steps: list[dict[str, Any]],
    model: Model,
    prompts: list[str],
) -> dict[str, Any]:
    """Return the record of the run, as the report reads it."""
    record: dict[str, Any] = {
        "title": f"{short_path(source)}, compressed",
        "model": source,
        "result": folder,
        "created": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "size": {name: {"before": before.size[name], "after": after.size[name]} for name in before.size},
        "steps": steps,
        "recipe": recipe.to_yaml(),
        "machine": machine(),
        "opens_in": [str(opener) for opener in opens_in(model)],
        "papers": [{"method": step.name, "citation": METHODS[step.name].paper} for step in recipe.steps],
    }
    images = model.task == "images"
    record["size"]["macs"] |= {"image_size": _image_size(model)} if images else {"tokens": _tokens(model)}
    if is_pruned(model.anatomy):
        record["kept"] = kept_units(model)
    layers = {path: layer for step in steps for path, layer in step.get("layers", {}).items()}
    if layers:
        record["precision"] = precision(model, layers)
    if isinstance(model.network, IntegerNetwork):
        record["integer_graph"] = {"tensors": model.network.graph.count_dtypes()}
    few_tokens = [expert for step in steps for expert in step.get("few_tokens", [])]
    if few_tokens:
        record["few_tokens"] = few_tokens
    if after.quality is not None and before.quality is not None:
        record["quality"] = {
            "metric": after.quality.metric,
            "higher_is_better": after.quality.higher_is_better,
            "before": before.quality.value,
            "after": after.quality.value,
            "data": after.quality.data,
            "settings": after.quality.settings,
            "comparison": after.comparison,
        }
    if after.speed:
        record["speed"] = after.speed
    if after.predictions:
        record["predictions"] = after.predictions
    if before.sentences:
        record["samples"] = [
            {"who": who, "prompt": prompt, "text": text}
            for who, texts in (("before", before.sentences), ("after", after.sentences))
            for prompt, text in zip(prompts, texts, strict=True)
        ]
    return record


def precision(model: Model, layers: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the format and error of each quantized layer by block; the experts of a mixture are averaged."""
    quantized = quantized_layers(model.network)
    rows = []
    for block in model.anatomy.blocks:
        experts = {part.path: part.mixture.path for part in block.parts if part.mixture is not None}
        paths_by_name: dict[str, list[str]] = {}
        for path in (path for path in layers if path.startswith(f"{block.path}.") and path in quantized):
            parent, _, name = path.rpartition(".")
            name_in_block = f"{experts[parent]}.*.{name}" if parent in experts else path
            paths_by_name.setdefault(name_in_block.removeprefix(f"{block.path}."), []).append(path)
        row = {
            name_in_block: _precision([quantized[path] for path in paths], [layers[path] for path in paths])
            for name_in_block, paths in paths_by_name.items()
        }
        rows.append({"block": block.index, "layers": row})
    return rows


def _precision(quantized: list[QuantizedLinear], layers: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the mean bits and error of one layer, or of the same layer of several experts."""
    formats = dict.fromkeys(format_name(layer.scheme.weight) for layer in quantized)
    return {
        "bits": round(sum(layer.bits_per_weight for layer in quantized) / len(quantized), 2),
        "format": ", ".join(formats),
        "error": sum(layer["relative_error"] for layer in layers) / len(layers),
    }


def kept_units(model: Model) -> list[dict[str, Any]]:
    """Return the units kept in each block, for the heat map."""
    rows = []
    for block in model.anatomy.blocks:
        row: dict[str, Any] = {"block": block.index}
        for part in block.parts:
            if part.kind == "heads":
                row["heads"] = {"of": part.original_units, "kept": list(part.kept)}
                row["unit"] = "kv group" if part.heads_per_unit > 1 else "head"
            elif part.mixture is not None:
                row.setdefault("ffn_channels", []).append({"of": part.original_units, "kept": part.units})
                if part.mixture.num_experts != part.mixture.original_experts:
                    row["experts"] = {"of": part.mixture.original_experts, "kept": list(part.mixture.kept)}
            elif part.kind == "ffn_channels":
                row["ffn_channels"] = {"of": part.original_units, "kept": part.units}
            else:
                row.setdefault("channels", []).append({"of": part.original_units, "kept": part.units})
        rows.append(row)
    return rows
