"""`auto`: measure the link and the step, predict the cost of every method, and use the cheapest per bucket if it pays.

The first steps send everything. In the last of them the link is measured and every candidate is dry-run on the real
gradients of every bucket (`dry_run.py`); from the next step on each bucket uses the method with the least predicted
exposed time. If nothing pays, nothing is compressed: DDP then sends its buckets as if there were no hook, so that
`auto` costs only its measuring. The decision goes to the log "smelt.train" and to `AutoCompression.decision`.

Only time is compared. The effect of a method on the loss at the given density is not considered.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf
from statistics import median
from time import perf_counter
from typing import Any, ClassVar

import torch
from torch import Tensor

from smelt.errors import ConfigError
from smelt.train.gradients.autotune.cost_model import (
    AutoDecision,
    CostPrediction,
    agree_on_prediction,
    choose_methods,
    predict_compressor,
    predict_ddp,
)
from smelt.train.gradients.autotune.dry_run import dry_run_compressor
from smelt.train.gradients.autotune.link import Link, measure_link
from smelt.train.gradients.autotune.timed_comm import max_over_ranks
from smelt.train.gradients.bucket import GradientBucket
from smelt.train.gradients.comm import Comm, Traffic
from smelt.train.gradients.compression import BucketedCompression, build_reducer
from smelt.train.gradients.compressor import Compressor
from smelt.train.gradients.compressors import COMPRESSORS, PowerSGD, create_compressor
from smelt.train.gradients.dense import Dense, DenseReducer
from smelt.train.gradients.gradient_views import BucketGradient, flatten_gradient
from smelt.train.gradients.layout import BucketLayout
from smelt.train.gradients.reducer import MeanGradient, Reducer
from smelt.train.gradients.settings import CompressionSettings
from smelt.train.timing import synchronized_time

logger = logging.getLogger(__name__)

_BF16 = "bf16"
_LINK_REPEATS = 2  # per message: a running training should not wait long for the measurement
_UNDECIDED = -1


@dataclass(frozen=True)
class Auto(Compressor):
    """Choose among `methods` per bucket after `steps` uncompressed steps."""

    name: ClassVar[str] = "auto"
    paper: ClassVar[str] = "none: the alpha-beta cost model and measurements"

    density: float = 0.001  # of the methods that have one
    methods: tuple[str, ...] = (_BF16, "exdyna", "micro", "powersgd", "qsgd")  # besides dense
    steps: int = 2  # that send everything before the measuring

    def __post_init__(self) -> None:
        if self.steps < 2:
            raise ConfigError(f"auto: steps is {self.steps}; it must be at least 2, as the first step is warmup.")
        self.candidates()

    def candidates(self) -> list[Compressor]:
        """Return the compressors to compare; the first is dense."""
        return [Dense(), *(build_candidate(name, self.density) for name in self.methods)]

    def check_optimizer(self, optimizer: torch.optim.Optimizer | None) -> None:
        for compressor in self.candidates():
            compressor.check_optimizer(optimizer)

    def target_count(self, numel: int) -> float:
        return numel


def build_candidate(name: str, density: float) -> Compressor:
    """Build a method by name, with the density if it has one."""
    if name == _BF16:
        return Dense(wire_dtype="bfloat16")
    if name == PowerSGD.name:  # `auto` itself has sent everything long enough
        return PowerSGD(warmup_steps=2)
    has_density = name in COMPRESSORS and "density" in COMPRESSORS[name].__dataclass_fields__
    return create_compressor(name, **({"density": density} if has_density else {}))


def resolve_compressor(name: str) -> Compressor:
    """Build a compressor or `auto` by name, with default parameters."""
    return Auto() if name == Auto.name else create_compressor(name)


def compression_class(compressor: Compressor) -> type[BucketedCompression]:
    return AutoCompression if isinstance(compressor, Auto) else BucketedCompression


class AutoCompression(BucketedCompression):
    """Compression that chooses its methods after several steps."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.decision: AutoDecision | None = None  # None: not yet, or made by the run that was resumed
        self.overlaps_backward = False  # whether uncompressed gradients are sent while backward runs
        self._link: Link | None = None
        self._ddp_link: Link | None = None  # of DDP itself, which ignores nodes
        self._predictions: dict[int, tuple[CostPrediction, ...]] = {}  # by bucket index
        self._candidate_indices: list[int] = []  # of the candidates that were tried
        self._finite = True
        self._timer = _StepTimer()
        super().__init__(*args, **kwargs)

    @property
    def decided(self) -> bool:
        return all(reducer.decided for reducer in self._auto_reducers())

    @property
    def uses_plain_ddp(self) -> bool:
        return self.overlaps_backward and all(reducer.choice == 0 for reducer in self._auto_reducers())

    def record_external_step(self) -> None:
        """Account for a step whose gradients DDP has sent itself."""
        world_size = self.comm.world_size
        for reducer, layout in zip(self._auto_reducers(), self.layouts, strict=True):
            reducer.record_external_step(2 * (world_size - 1) * 4 * layout.numel // world_size)

    def make_reducer(
        self,
        layout: BucketLayout,
        device: torch.device,
        learning_rate: Callable[[], float] | None,
        allow_rollback: bool,
    ) -> AutoReducer:
        assert isinstance(self.compressor, Auto)
        candidates, settings = self.compressor.candidates(), replace(self.settings, ranks_per_node=None)
        return AutoReducer(
            self.compressor,
            candidates,
            layout,
            self.reduction_comm,
            settings,
            device,
            learning_rate=learning_rate,
            allow_rollback=allow_rollback,
        )

    def add(self, name: str, gradient: Tensor) -> bool:
        if not self.decided and not self._next and not any(bucket.received for bucket in self.buckets):
            self.begin_step()
        return super().add(name, gradient)

    def begin_step(self) -> None:
        """Record that the first gradient of a step before the decision is ready."""
        self._predictions.clear()
        self._timer.begin_step()

    def reduce_bucket(self, bucket: GradientBucket) -> None:
        if self.decided:
            super().reduce_bucket(bucket)
            return
        assert isinstance(self.compressor, Auto)
        last = self.is_last(bucket)
        start = perf_counter()
        measuring = self._timer.steps > self.compressor.steps
        if measuring:
            self._try_candidates(bucket)
        super().reduce_bucket(bucket)
        self._timer.record_reduction(start, last)
        if measuring and last:
            self._decide()

    def is_last(self, bucket: GradientBucket) -> bool:
        """Return whether all other buckets of this step have been reduced."""
        return bucket is self.buckets[-1]

    def _auto_reducers(self) -> list[AutoReducer]:
        return [bucket.reducer for bucket in self.buckets if isinstance(bucket.reducer, AutoReducer)]

    def _try_candidates(self, bucket: GradientBucket) -> None:
        """Dry-run all candidates on a bucket, if its gradients are finite on all ranks."""
        if self.comm.world_size == 1:
            return
        gradient = flatten_gradient(bucket.gradient(self._loss_scale()))
        finite = self.comm.all_gather(gradient.isfinite().all().view(1), "agreement")
        self._finite &= bool(finite.all())
        if not self._finite:
            return
        assert isinstance(self.compressor, Auto)
        if self._link is None:
            self._link = measure_link(self.reduction_comm, gradient.device, _LINK_REPEATS)
            one_level = self.nodes is None
            self._ddp_link = self._link if one_level else measure_link(self.comm, gradient.device, _LINK_REPEATS)
        copy_seconds = max_over_ranks([_copy_seconds(bucket)], self.comm, gradient.device)[0]
        predictions: dict[int, CostPrediction] = {}
        for index, compressor in enumerate(self.compressor.candidates()):
            settings = settings_for(compressor, replace(self.settings, check_conservation=False, ranks_per_node=None))
            try:
                layout = bucket.reducer.layout
                best_seconds = min((prediction.exposed for prediction in predictions.values()), default=inf)
                result = dry_run_compressor(
                    compressor, gradient, layout, self.reduction_comm, self._link, settings, best_seconds
                )
            except ConfigError as error:  # the same on every rank: incompatible with the settings
                logger.info("auto leaves %s out: %s", compressor.name, error)
                continue
            prediction = predict_compressor(result, copy_seconds)
            if self.reduction_comm is not self.comm:
                prediction = agree_on_prediction(prediction, self.comm, gradient.device)
            predictions[index] = prediction
        self._candidate_indices = list(predictions)
        self._predictions[self.buckets.index(bucket)] = tuple(predictions.values())

    def _decide(self) -> None:
        if self.comm.world_size == 1:
            logger.warning("auto: there is a single rank, so nothing is sent and nothing is compressed.")
            self._use([0] * len(self.buckets))
            return
        if not self._finite:  # a step that the gradient scaler will skip; measure the next one
            self._finite, self._predictions = True, {}
            return
        assert self._link is not None
        assert self._ddp_link is not None
        device = self.buckets[0].device
        buckets = tuple(self._predictions[index] for index in range(len(self.buckets)))
        timings = [median(self._timer.backward), median(self._timer.other)]
        backward, other = max_over_ranks(timings, self.comm, device)
        elements = sum(layout.numel for layout in self.layouts)
        uncompressed = predict_ddp(elements, self._ddp_link, backward, name="dense by DDP")
        if not self.overlaps_backward:
            uncompressed = _sum_predictions([methods[0] for methods in buckets])
        chosen = torch.tensor(choose_methods(buckets, uncompressed, other), device=device)
        choices = tuple(self.comm.broadcast(chosen, 0, "agreement").tolist())
        self.decision = AutoDecision(self._link, buckets, uncompressed, backward, other, choices)
        if self.comm.rank == 0:
            logger.info("auto: %s", self.decision.text())
            if not any(choices):
                logger.warning("auto: on this link no method is predicted to pay; gradients are sent uncompressed.")
        self._use([self._candidate_indices[choice] for choice in choices])
        self._predictions = {}

    def _use(self, choices: list[int]) -> None:
        for reducer, choice in zip(self._auto_reducers(), choices, strict=True):
            reducer.use(choice)


class AutoReducer(Reducer):
    """Delegates to the reducer of the chosen method, dense until there is one, and mirrors its counters.

    The choice is part of the checkpoint beside the method's state, so that a resumed run does not measure again.
    """

    def __init__(
        self,
        compressor: Compressor,
        candidates: list[Compressor],
        layout: BucketLayout,
        comm: Comm,
        settings: CompressionSettings,
        device: torch.device,
        *,
        learning_rate: Callable[[], float] | None,
        allow_rollback: bool,
    ) -> None:
        own = Comm(comm.group)
        without_capacity = replace(settings, fixed_capacity=None)
        super().__init__(compressor, layout, own, without_capacity, device=device, learning_rate=learning_rate)
        self._candidates, self._inner_settings, self._allow_rollback = candidates, settings, allow_rollback
        self.choice = _UNDECIDED
        self._steps_before, self._traffic_before = 0, Traffic()  # the choice
        self._inner = self._build(0)
        self._mirror()

    @property
    def decided(self) -> bool:
        return self.choice != _UNDECIDED

    def use(self, choice: int) -> None:
        """Use a candidate from the next step on; everything was sent so far, so there is no residual."""
        self.choice = choice
        if choice:
            self._steps_before, self._traffic_before = self.iteration, self.total_traffic
            self._inner = self._build(choice)
            self._inner.traffic = self.traffic  # of the last step, until there is another
        self._mirror()

    def record_external_step(self, size: int) -> None:
        assert isinstance(self._inner, DenseReducer)
        self._inner.record_external_step(size)
        self._mirror()

    def mean(self, gradient: BucketGradient, *, used: Tensor | None = None) -> MeanGradient:
        mean = self._inner.mean(gradient, used=used)
        self._mirror()
        return mean

    def resolve_deferred(self) -> bool:
        finite = self._inner.resolve_deferred()
        self._mirror()
        return finite

    def rollback(self) -> None:
        self._inner.rollback()
        self._mirror()

    def tensors(self) -> dict[str, Tensor]:
        return {**self._inner.tensors(), "auto": torch.tensor([self.choice, self._steps_before])}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        self.choice, self._steps_before = tensors["auto"].tolist()
        self._inner = self._build(max(self.choice, 0))
        self._inner.restore({**self._inner.tensors(), **tensors})
        self._mirror()

    def _build(self, choice: int) -> Reducer:
        compressor, device = self._candidates[choice], self.residual.device
        settings, rate = settings_for(compressor, self._inner_settings), self.learning_rate
        reducer = build_reducer(compressor, self.layout, self.comm, settings, device, rate, self._allow_rollback)
        reducer.output_buffer = self.output_buffer
        return reducer

    def _mirror(self) -> None:
        self._buffer, self.state = self._inner._buffer, self._inner.state
        self.iteration, self.counts = self._steps_before + self._inner.iteration, self._inner.counts
        self.traffic, self.total_traffic = self._inner.traffic, self._traffic_before + self._inner.total_traffic


def settings_for(compressor: Compressor, settings: CompressionSettings) -> CompressionSettings:
    """Drop settings that do not apply: a dense exchange has no fixed capacity."""
    return replace(settings, fixed_capacity=None) if isinstance(compressor, Dense) else settings


class _StepTimer:
    """Times uncompressed steps: how long backward runs while gradients arrive, and everything but communication."""

    def __init__(self) -> None:
        self.steps = 0
        self.backward: list[float] = []
        self.other: list[float] = []
        self._first_gradient = 0.0
        self._reduce_seconds = 0.0

    def begin_step(self) -> None:
        """Record that the first gradient of a step is ready."""
        start = perf_counter()
        if self.steps > 1:  # the step before was not the first
            self.other.append(start - self._first_gradient - self._reduce_seconds)
        self.steps += 1
        self._first_gradient, self._reduce_seconds = start, 0.0

    def record_reduction(self, since: float, last: bool) -> None:
        """Record that a bucket was reduced; `last`: the last one of the step."""
        if last and self.steps > 1:
            self.backward.append(max(since - self._first_gradient - self._reduce_seconds, 0.0))
        self._reduce_seconds += perf_counter() - since


def _copy_seconds(bucket: GradientBucket) -> float:
    """Measure how long copying a bucket in and out takes, within a node too."""
    flat, device = bucket.flat, bucket.device
    other = flat.clone()
    start = synchronized_time(device)
    other.copy_(flat)
    if device.type != "cpu" or bucket.nodes is not None:  # otherwise gradients are read in place
        flat.copy_(other)
        other.copy_(flat)
    if bucket.nodes is not None:
        bucket.nodes.all_gather(flatten_gradient(bucket.gradient(None)))
    return synchronized_time(device) - start


def _sum_predictions(predictions: list[CostPrediction]) -> CostPrediction:
    total, *others = predictions
    for other in others:
        times = (total.communication + other.communication, 0.0, total.compute + other.compute)
        total = CostPrediction(total.method, total.bytes + other.bytes, total.calls + other.calls, *times)
    return total
