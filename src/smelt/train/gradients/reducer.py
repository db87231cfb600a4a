"""Reduce one bucket of gradients with a compressor and error feedback.

Error feedback (Stich 2018, Karimireddy 2019) comes in two forms. "gradient": residual += g; what is sent leaves the
residual; the mean of what was sent is the gradient that the optimizer gets. "lr_scaled": residual += lr g, and the
optimizer gets the mean over lr, so that a changed learning rate does not rescale old gradients.

Indices are exchanged in two ways. Without `fixed_capacity` counts are sent first and the all-gather is padded to the
longest selection. With it every rank sends a fixed number of indices in one message, and the host learns the counts
only when the next step begins, so no step synchronizes. Selected elements beyond the capacity stay in the residual.

A flag beside the counts tells whether a gradient is finite. If not, without `allow_rollback` every rank raises an
error; with it (for loss scaling) the result is infinite on all ranks and `rollback` restores the state before the step.
With a fixed capacity the error is raised when the next step begins, and the result until then is zero.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil

import torch
from torch import Tensor

from smelt.errors import ConfigError, DataError
from smelt.train.gradients.comm import Comm, Traffic
from smelt.train.gradients.compressor import CompressionStep, Compressor, CompressorState, GradientEncoder, Sparsifier
from smelt.train.gradients.conservation import ConservationCheck
from smelt.train.gradients.encoding import all_reduce_values, num_index_blocks
from smelt.train.gradients.gradient_views import BucketGradient, GradientViews, all_finite, flatten_gradient
from smelt.train.gradients.index_exchange import (
    DeferredStatus,
    ExchangedIndices,
    StatusFlags,
    all_gather_encoded,
    all_gather_pairs,
    exchange_fixed_capacity,
    exchange_indices,
)
from smelt.train.gradients.layout import BucketLayout
from smelt.train.gradients.settings import CompressionSettings


@dataclass(frozen=True)
class DenseMean:
    """The mean gradient of a bucket as one flat vector."""

    flat: Tensor  # [numel]

    def to_dense(self) -> Tensor:
        return self.flat

    def scale(self, factor: Tensor) -> DenseMean:
        return DenseMean(self.flat * factor)

    def copy_into(self, start: int, gradient: Tensor) -> None:
        """Overwrite a gradient with the part of the mean that begins at `start`."""
        gradient.copy_(self.flat[start : start + gradient.numel()].view_as(gradient))


@dataclass(frozen=True)
class SparseMean:
    """The mean gradient of a bucket as indices and values.

    Never made dense on CPU, where a pass over memory costs more than writing the few values: each gradient is zeroed in
    place and the values are written into it.
    """

    indices: Tensor  # [count] int64, ascending
    values: Tensor  # [count]
    numel: int

    @classmethod
    def from_unsorted(cls, indices: Tensor, values: Tensor, numel: int) -> SparseMean:
        """Sort unique indices, unless they are sorted."""
        if not bool((indices[1:] > indices[:-1]).all()):
            indices, order = indices.sort()
            values = values[order]
        return cls(indices, values, numel)

    def to_dense(self) -> Tensor:
        return self._part(0, self.numel)

    def scale(self, factor: Tensor) -> SparseMean:
        return SparseMean(self.indices, self.values * factor, self.numel)

    def copy_into(self, start: int, gradient: Tensor) -> None:
        """Overwrite a gradient with the part of the mean that begins at `start`."""
        if not gradient.is_contiguous():
            gradient.copy_(self._part(start, gradient.numel()).view_as(gradient))
            return
        gradient.zero_()
        self._write_values(start, gradient.view(-1))

    def _part(self, start: int, numel: int) -> Tensor:
        part = torch.zeros(numel, dtype=self.values.dtype, device=self.values.device)
        self._write_values(start, part)
        return part

    def _write_values(self, start: int, flat: Tensor) -> None:
        ends = torch.tensor([start, start + len(flat)], device=self.indices.device)
        first, last = torch.searchsorted(self.indices, ends).tolist()
        flat[self.indices[first:last] - start] = self.values[first:last].to(flat.dtype)


MeanGradient = DenseMean | SparseMean


class Reducer:
    """Reduce one bucket, step after step."""

    def __init__(
        self,
        compressor: Compressor,
        layout: BucketLayout,
        comm: Comm,
        settings: CompressionSettings | None = None,
        *,
        device: torch.device | str = "cpu",
        learning_rate: Callable[[], float] | None = None,
        allow_rollback: bool = False,
    ) -> None:
        self.compressor, self.layout, self.comm = compressor, layout, comm
        self.settings = settings or CompressionSettings()
        self.learning_rate, self.allow_rollback = learning_rate, allow_rollback
        if not layout.numel:
            raise ConfigError("there is no gradient to compress; the model has no trainable parameter.")
        self._check_settings()
        comm.require_equal(str(layout), "model")
        comm.require_equal(f"{compressor} {self.settings}", "gradient compression")
        comm.bytes_received.clear()
        self._buffer = torch.zeros(layout.numel + 1, device=device)  # padding indices point at the last element
        self.output_buffer: Tensor | None = None  # [numel + 1], reused for every result; None: allocate each
        self.state: CompressorState = compressor.init_state(layout, comm.world_size)
        self.iteration = 0
        self.counts: list[int] = []
        self.traffic = Traffic()  # of the last step
        self.total_traffic = Traffic()  # of all steps, also those rolled back
        self.conservation = ConservationCheck(self.residual) if self.settings.check_conservation else None
        self._deferred_status: DeferredStatus | None = None
        self._before: dict[str, Tensor] | None = None  # tensors before the last step
        self._failed = False  # the last step was not finite

    def _check_settings(self) -> None:
        self.settings.require_compatible(self.compressor, has_learning_rate=self.learning_rate is not None)

    @property
    def residual(self) -> Tensor:
        """[numel] float32: gradients that this rank has not sent yet."""
        return self._buffer[: self.layout.numel]

    def reduce(self, gradient: BucketGradient, *, used: Tensor | None = None) -> Tensor:
        """Return the mean over all ranks of what was sent, [numel] float32."""
        return self.mean(gradient, used=used).to_dense()

    def mean(self, gradient: BucketGradient, *, used: Tensor | None = None) -> MeanGradient:
        """Return the mean over all ranks of what was sent.

        `used`: [slices] bool, false where this rank had no gradient; a slice that no rank used is not sent.
        """
        if not self.resolve_deferred():
            self.rollback()
        if self.allow_rollback:
            self._before = {name: tensor.clone() for name, tensor in self.tensors().items()}
        rate = self._current_rate()
        gradient, finite = self._prepare(gradient)
        gradient = gradient if rate == 1 else flatten_gradient(gradient) * rate
        old = self.residual.clone() if self.settings.residual_momentum != 1 else None
        reduced = self._reduce(gradient, StatusFlags(finite, used), self.comm.world_size * rate)
        if reduced is None:  # not finite on some rank
            self._reject(self.iteration)
            return DenseMean(torch.full_like(self.residual, torch.inf))
        accumulated, sent = reduced
        mean = sent if isinstance(sent, SparseMean) else DenseMean(sent)
        if old is not None:
            self.residual.sub_(old).mul_(self.settings.residual_momentum).add_(old)
        if not self.compressor.uses_error_feedback:
            self.residual.zero_()
        self.iteration += 1
        if self.conservation is not None and self.compressor.uses_error_feedback and self.resolve_deferred():
            self.conservation.add(flatten_gradient(accumulated), mean.to_dense() * (self.comm.world_size * rate))
            self.conservation.require(self.residual / self.settings.residual_momentum, self.comm)
        return mean

    def resolve_deferred(self) -> bool:
        """Read the deferred status of the last step; return whether its gradients were finite on all ranks."""
        if self._deferred_status is not None:
            status, self._deferred_status = self._deferred_status.read(), None
            *self.counts, num_selected, finite = status.tolist()
            padded_count = self._capacity() * self.comm.world_size
            self.traffic = self._account(num_selected, padded_count, self.traffic.padding)
            if not finite:
                self._reject(self.iteration - 1)
        return not self._failed

    def rollback(self) -> None:
        """Restore the state before the last step (with `allow_rollback`)."""
        assert self._before is not None
        self.restore(self._before)
        self._before, self._failed = None, False

    def tensors(self) -> dict[str, Tensor]:
        """Return everything that is needed to resume bit-exactly."""
        small = {"step": torch.tensor(self.iteration), "counts": torch.tensor(self.counts, dtype=torch.int64)}
        state = {f"state.{key}": value for key, value in self.state.items()}
        check = {} if self.conservation is None else self.conservation.tensors()
        return {"residual": self.residual, **small, **state, **check}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Resume from what `tensors` returned."""
        self._deferred_status = None
        self.residual.copy_(tensors["residual"])
        self.iteration, self.counts = int(tensors["step"]), tensors["counts"].tolist()
        for key in self.state:
            self.state[key] = tensors[f"state.{key}"].to(self.state[key].device, copy=True)
        if self.conservation is not None:
            self.conservation.restore(tensors)

    def target_per_rank(self) -> float:
        """Return how many elements one rank should select."""
        exclusive = isinstance(self.compressor, Sparsifier) and self.compressor.exchange_mode == "exclusive"
        return self.compressor.target_count(self.layout.numel) / (self.comm.world_size if exclusive else 1)

    def _reduce(
        self, gradient: BucketGradient, flags: StatusFlags, divisor: float
    ) -> tuple[BucketGradient, Tensor | SparseMean] | None:
        """Return what this rank added to its residual, and the sum of what all ranks sent over the divisor.

        None if a gradient is not finite on some rank.
        """
        step = self._begin(gradient)
        reduce = self._reduce_sparse if isinstance(self.compressor, Sparsifier) else self._reduce_encoded
        mean = reduce(step, flags, divisor)
        return None if mean is None else (step.gradient, mean)

    def _begin(self, gradient: BucketGradient) -> CompressionStep:
        capacity = self._capacity() if self.settings.fixed_capacity is not None else None
        step = CompressionStep(
            self.iteration, gradient, self.residual, self.layout, self.comm, self.state, self.counts, capacity
        )
        step.gradient = self.compressor.correct_gradient(step)
        return step

    def _reduce_sparse(self, step: CompressionStep, flags: StatusFlags, divisor: float) -> Tensor | SparseMean | None:
        """Return the mean over all ranks of the selected elements, zero elsewhere."""
        sparsifier = self.compressor
        assert isinstance(sparsifier, Sparsifier)
        selected, mode = sparsifier.select(step), sparsifier.exchange_mode
        if step.capacity is not None:
            exchanged = exchange_fixed_capacity(selected, step, flags)
            return self._reduce_fixed_capacity(step, sparsifier, exchanged, divisor)
        blocks = num_index_blocks(self.layout.numel, self.target_per_rank() if mode != "known" else 0)
        exchanged = exchange_indices(selected, mode, step, flags, blocks)
        if not exchanged.finite:
            return None
        self.counts = exchanged.counts
        if mode == "own":
            summed, sent, num_selected, padding = all_gather_pairs(exchanged, step, self.settings.wire_dtype)
            mean: Tensor | SparseMean = summed.div_(divisor)
            if len(exchanged.dense):
                summed.add_(self._scatter(exchanged.dense, self._all_reduce_at(exchanged.dense, divisor)))
        else:
            sent, padding = torch.cat([exchanged.indices, exchanged.dense]), 0
            num_selected = len(exchanged.indices)
            values = self._all_reduce_at(sent, divisor)
            on_cpu = values.device.type == "cpu"
            numel = self.layout.numel
            mean = SparseMean.from_unsorted(sent, values, numel) if on_cpu else self._scatter(sent, values)
        num_selected += len(exchanged.dense)
        sparsifier.on_sent(step, sent)
        self.traffic = self._account(num_selected, exchanged.padded_count, exchanged.padding + padding)
        return mean

    def _reduce_fixed_capacity(
        self, step: CompressionStep, sparsifier: Sparsifier, exchanged: ExchangedIndices, divisor: float
    ) -> Tensor:
        mean = self._scatter(exchanged.indices, self._all_reduce_at(exchanged.indices, divisor))
        sparsifier.on_sent(step, exchanged.indices)
        self._deferred_status = DeferredStatus(exchanged.deferred)
        self.traffic = Traffic(padding=exchanged.padding)
        return torch.where(exchanged.deferred[-1] > 0, mean, torch.inf if self.allow_rollback else 0.0)

    def _reduce_encoded(self, step: CompressionStep, flags: StatusFlags, divisor: float) -> Tensor | None:
        """Return the mean over all ranks of the decoded gradients."""
        encoder = self.compressor
        assert isinstance(encoder, GradientEncoder)
        gathered = all_gather_encoded(encoder.encode(step), encoder, step, flags)
        if gathered is None:
            return None
        summed, own, num_selected, padding = gathered
        self.residual.sub_(own)
        self.traffic = self._account(num_selected, 0, padding)
        return summed.div_(divisor)

    def _all_reduce_at(self, indices: Tensor, divisor: float) -> Tensor:
        """Return the means [count] of the elements at `indices`; the residual there becomes the rounding error."""
        values, error = all_reduce_values(self._buffer.index_select(0, indices), self.comm, self.settings.wire_dtype)
        self._buffer[indices] = error
        return values.div_(divisor)

    def _scatter(self, indices: Tensor, values: Tensor) -> Tensor:
        """[numel], zero except at `indices`"""
        mean = torch.zeros_like(self._buffer) if self.output_buffer is None else self.output_buffer.zero_()
        mean[indices] = values
        return mean[: self.layout.numel]

    def _reject(self, iteration: int) -> None:
        if self._before is None:
            raise DataError(
                f"the gradients of step {iteration} are not finite on at least one rank; lower the learning rate, "
                "or pass the gradient scaler if the loss is scaled."
            )
        self._failed = True

    def _account(self, num_selected: int, padded_count: int, padding: int) -> Traffic:
        received = dict(self.comm.bytes_received)
        self.comm.bytes_received.clear()
        traffic = Traffic(
            **{key: received.get(key, 0) for key in ("counts", "plan", "indices", "values")},
            padding=padding,
            numel=self.layout.numel,
            target_count=self.compressor.target_count(self.layout.numel),
            num_selected=num_selected,
            padded_count=padded_count,
        )
        self.total_traffic = self.total_traffic + traffic
        return traffic

    def _capacity(self) -> int:
        assert self.settings.fixed_capacity is not None
        return min(ceil(self.settings.fixed_capacity * self.target_per_rank()), self.layout.numel)

    def _prepare(self, gradient: BucketGradient) -> tuple[BucketGradient, Callable[[], Tensor]]:
        """Replace a gradient that is not finite by zeros, so that this rank still joins the collectives.

        Also return whether it is finite; views find out while they are accumulated.
        """
        if isinstance(gradient, GradientViews):
            return gradient, gradient.all_finite
        finite = all_finite(gradient)
        if self._buffer.device.type == "cpu":
            return gradient.float() if finite else torch.zeros_like(self.residual), lambda: finite
        return torch.where(finite, gradient.float(), 0.0), lambda: finite  # no sync

    def _current_rate(self) -> float:
        if self.settings.error_feedback == "gradient":
            return 1.0
        assert self.learning_rate is not None
        rate = self.learning_rate()
        if not rate > 0:
            raise ConfigError(
                f"the learning rate is {rate:g}; error_feedback='lr_scaled' needs one above 0, 'gradient' does not."
            )
        return rate
