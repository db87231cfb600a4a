"""Measure the robustness of a model: bit errors, range clipping, chosen bit flips, adversarial inputs, a back door."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from smelt.data import LabeledData, MultipleChoiceData, TextData
from smelt.errors import ConfigError, DataError
from smelt.measure.clock import stopwatch
from smelt.measure.eval_result import EvalResult
from smelt.measure.evaluate import Data, measure_quality
from smelt.measure.latency import ratio_interval
from smelt.measure.logits import eval_mode
from smelt.measure.paired import compare
from smelt.measure.robustness.adversarial import AttackSettings, RobustAccuracy, robust_accuracy
from smelt.measure.robustness.backdoor import backdoor_success
from smelt.measure.robustness.bit_flips import check_ber
from smelt.measure.robustness.bit_search import (
    BitSearchResult,
    classification_loss,
    integer_layers,
    progressive_bit_search,
)
from smelt.measure.robustness.clipping import ActivationRanges, profile_ranges, range_clipping
from smelt.measure.robustness.encoder_inputs import EncoderBatch, encoder_batches
from smelt.measure.robustness.kv_flips import BitErrors, FaultyKVCacheFormat
from smelt.measure.robustness.result import ClippingCost, ModelRobustness, RobustnessReport
from smelt.measure.robustness.storage import PARTS, StoredTensor, select, stored_tensors
from smelt.measure.robustness.straight_through import straight_through
from smelt.measure.robustness.sweep import FaultPoint, bit_error_sweep, fault_point
from smelt.models.kv_cache import KVCacheFormat
from smelt.models.model import Model
from smelt.models.quantized import quantized_layers
from smelt.progress import NullProgress, Progress

DEFAULT_BERS = (1e-6, 1e-5, 1e-4)
ALL, LAYERS, CODES, QPARAMS, KV_CACHE = "all", "quantized layers", "codes", "scales", "KV cache"
_TIMED_ROUNDS, _WARMUP_ROUNDS = 10, 2
_CALIBRATION_ROWS = 256
_SEARCH_BATCH, _SEARCH_STEPS, _SEARCH_LAYERS = 32, 10, 8


@dataclass(frozen=True)
class RobustnessSettings:
    """What is measured: rates and seeds of bit errors, the margin of clipping, attacks on classifiers of text.

    `eps` is in standard deviations of the embedding table. `trigger` is a text and the class that it shall cause.
    """

    bers: tuple[float, ...] = DEFAULT_BERS
    seeds: int = 3
    margin: float = 1.25
    eps: tuple[float, ...] = (0.05, 0.1, 0.2)
    attacked_items: int = 64
    pgd_steps: int = 10
    trigger: tuple[str, int] | None = None

    def __post_init__(self) -> None:
        for ber in self.bers:
            check_ber(ber)
        if not self.bers or self.seeds < 1:
            raise ConfigError("robustness needs at least one bit error rate and one seed.")


def measure_robustness(
    model: Model,
    data: Data,
    *,
    against: Model | None = None,
    settings: RobustnessSettings = RobustnessSettings(),  # noqa: B008
    progress: Progress = NullProgress(),  # noqa: B008
    **evaluation: Any,
) -> RobustnessReport:
    """Measure `model` and, on the same items, the dense model `against`.

    The last fifth of the data is held out to profile activation ranges. `evaluation` are the settings of
    `measure_quality`: metric, context, limit, batch_size and kv.
    """
    evaluated, calibration = hold_out(data)
    evaluation = {"metric": None, "context": 1024, "limit": None, "batch_size": 8} | evaluation
    layers = set(quantized_layers(model.network))
    kv = evaluation.pop("kv", None)

    def measure(each: Model, dense: Model | None, cache: str | None) -> ModelRobustness:
        kv_format = KVCacheFormat(cache) if cache else each.kv
        prepared = replace(each, kv=kv_format)
        measurement = _Measurement(prepared, evaluated, calibration, dense, settings, evaluation, progress)
        with eval_mode(each.network):
            return measurement.run(layers)

    result = measure(model, against, kv)
    base = None if against is None else measure(against, None, None)
    described = {
        "bers": list(settings.bers),
        "seeds": settings.seeds,
        "margin": settings.margin,
        "eps": list(settings.eps),
        "attacked_items": settings.attacked_items,
        "pgd_steps": settings.pgd_steps,
    }
    return RobustnessReport(result, base, described)


def hold_out(data: Data) -> tuple[Data, Data]:
    """Split off the last fifth: return the data to evaluate and the data to profile activation ranges on."""
    if isinstance(data, TextData):
        text = data.joined
        cut = text.rfind(" ", 0, len(text) * 4 // 5) + 1 or len(text) * 4 // 5
        parts: tuple[Data, Data] = (replace(data, documents=(text[:cut],)), replace(data, documents=(text[cut:],)))
        return parts
    count = len(data)
    if count < 5:
        raise DataError(f"{data.name} has {count} items: measuring robustness needs at least five.")
    cut = count - count // 5
    if isinstance(data, LabeledData):
        return data.take(range(cut)), data.take(range(cut, count))
    assert isinstance(data, MultipleChoiceData)
    return replace(data, items=data.items[:cut]), replace(data, items=data.items[cut:])


class _Measurement:
    """The measurements of one model, which share the evaluation, the calibration data and the clean result."""

    def __init__(
        self,
        model: Model,
        data: Data,
        calibration: Data,
        dense: Model | None,
        settings: RobustnessSettings,
        evaluation: dict[str, Any],
        progress: Progress,
    ) -> None:
        self.model, self.data, self.calibration, self.dense = model, data, calibration, dense
        self.settings, self.evaluation, self.progress = settings, evaluation, progress
        self.tensors = stored_tensors(model.network)

    def run(self, layers: Collection[str]) -> ModelRobustness:
        clean = self.evaluate()
        ranges = self._ranges().widened(self.settings.margin)
        faults: list[FaultPoint] = []
        for target, tensors in self._targets(layers).items():
            faults += self._sweep(target, tensors, clean)
        if self.model.task == "language" and isinstance(self.data, TextData):
            faults += [self._kv_faults(ber, clean) for ber in self.settings.bers]
        with range_clipping(self.model.network, ranges):
            clipped = self.evaluate()
            for target, tensors in self._targets(layers).items():
                if target in (ALL, LAYERS):
                    faults += self._sweep(target, tensors, clipped, clipped=True)
        cost = self._clipping_cost(clipped, clean, ranges)
        classifies = (
            self.model.task == "classification"
            and isinstance(self.data, LabeledData)
            and not self.data.regression
            and self.model.network.config.num_labels > 1
        )
        return ModelRobustness(
            name=self.model.source,
            clean=clean,
            bits={part: sum(entry.num_bits for entry in select(self.tensors, parts=[part])) for part in PARTS},
            faults=tuple(faults),
            clipping=cost,
            bit_search=self._bit_search() if classifies else None,
            attacks=tuple(self._attack(eps) for eps in self.settings.eps) if classifies else (),
            backdoor=self._backdoor() if classifies and self.settings.trigger else None,
        )

    def evaluate(self, model: Model | None = None) -> EvalResult:
        return measure_quality(model or self.model, self.data, **self.evaluation)

    def _targets(self, layers: Collection[str]) -> dict[str, list[StoredTensor]]:
        """Return what is hit; `layers` are those that are quantized in the compressed model, for both models."""
        targets = {ALL: self.tensors}
        if layers:
            targets[LAYERS] = [entry for entry in select(self.tensors, layers=layers) if entry.attribute != "bias"]
        for name, part in ((CODES, "codes"), (QPARAMS, "qparams")):
            chosen = [entry for entry in self.tensors if entry.part == part]
            targets |= {name: chosen} if chosen else {}
        return targets

    def _sweep(
        self, target: str, tensors: Sequence[StoredTensor], clean: EvalResult, clipped: bool = False
    ) -> list[FaultPoint]:
        return bit_error_sweep(
            tensors,
            self.evaluate,
            bers=self.settings.bers,
            seeds=self.settings.seeds,
            target=target,
            clipped=clipped,
            clean=clean,
            progress=self.progress,
        )

    def _kv_faults(self, ber: float, clean: EvalResult) -> FaultPoint:
        results, sources = [], [BitErrors(ber, seed) for seed in range(self.settings.seeds)]
        for errors in self.progress.track(sources, f"bit errors in the KV cache at {ber:g}"):
            faulty = replace(self.model, kv=FaultyKVCacheFormat.of(self.model.kv, errors))
            results.append(self.evaluate(faulty))
        flips = [errors.flips for errors in sources]
        return fault_point(results, clean, target=KV_CACHE, ber=ber, clipped=False, bits=sources[0].bits, flips=flips)

    def _ranges(self) -> ActivationRanges:
        limit = 4 * self.evaluation["context"] if isinstance(self.calibration, TextData) else _CALIBRATION_ROWS
        forward = lambda: measure_quality(self.model, self.calibration, **{**self.evaluation, "limit": limit})  # noqa: E731
        return profile_ranges(self.model.network, [forward])

    def _clipping_cost(self, clipped: EvalResult, clean: EvalResult, ranges: ActivationRanges) -> ClippingCost:
        with_clipping, without = self._clipping_seconds(ranges)
        low, high = ratio_interval(without, with_clipping, confidence=0.95, seed=0)
        return ClippingCost(
            comparison=compare(clipped, clean),
            latency_ratio=float(np.median(with_clipping) / np.median(without)),
            latency_interval=(low, high),
            layers=len(ranges.bounds),
            margin=self.settings.margin,
        )

    def _clipping_seconds(self, ranges: ActivationRanges) -> tuple[np.ndarray, np.ndarray]:
        """Time evaluations of a few items alternately with clipping and without. Both [rounds]"""
        few = {**self.evaluation, "limit": self.evaluation["context"] if isinstance(self.data, TextData) else 8}
        call: Callable[[], object] = lambda: measure_quality(self.model, self.data, **few)  # noqa: E731
        clock, seconds = stopwatch(self.model.device), []
        for _ in range(_WARMUP_ROUNDS + _TIMED_ROUNDS):
            with range_clipping(self.model.network, ranges):
                with_clipping = clock(call)
            seconds.append((with_clipping, clock(call)))
        timed = np.array(seconds[_WARMUP_ROUNDS:])
        return timed[:, 0], timed[:, 1]

    def _bit_search(self) -> BitSearchResult | None:
        if not integer_layers(self.model.network):
            return None
        assert isinstance(self.data, LabeledData)
        batch = encoder_batches(self.model, self.data.take(range(min(_SEARCH_BATCH, len(self.data)))), _SEARCH_BATCH)[0]
        network = self.model.network
        return progressive_bit_search(
            network,
            classification_loss(lambda: network(**batch.inputs).logits, batch.labels),
            classes=network.config.num_labels,
            max_steps=_SEARCH_STEPS,
            max_layers=_SEARCH_LAYERS,
        )

    def _attack(self, eps: float) -> RobustAccuracy:
        assert isinstance(self.data, LabeledData)
        count = min(self.settings.attacked_items, len(self.data), self.evaluation["limit"] or len(self.data))
        items = self.data.take(range(count))
        batches = encoder_batches(self.model, items, self.evaluation["batch_size"])
        attack = AttackSettings(eps * _embedding_std(self.model), steps=self.settings.pgd_steps)
        dense = self.dense if self.dense is not None and _same_width(self.dense, self.model) else None
        with straight_through(self.model.network):
            result = robust_accuracy([self._attacked(batch, dense) for batch in batches], attack)
        return replace(result, eps=eps)

    def _attacked(self, batch: EncoderBatch, dense: Model | None) -> Any:
        transfer = None if dense is None else batch.logits_of(dense)
        return batch.embeddings, batch.labels, batch.mask, batch.logits_of(self.model), transfer

    def _backdoor(self) -> Any:
        assert self.settings.trigger is not None and isinstance(self.data, LabeledData)
        trigger, target = self.settings.trigger
        return backdoor_success(self.model, self.data, trigger=trigger, target=target, limit=self.evaluation["limit"])


def _embedding_std(model: Model) -> float:
    weight: torch.Tensor = model.network.get_input_embeddings().weight
    return float(weight.detach().float().std())


def _same_width(first: Model, second: Model) -> bool:
    shapes = [model.network.get_input_embeddings().weight.shape for model in (first, second)]
    return bool(shapes[0] == shapes[1])
