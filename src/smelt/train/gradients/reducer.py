"""The frame around a compressor: one flat vector of gradients in, its mean over all workers out, the rest remembered.

Error feedback (Stich 2018, Karimireddy 2019) in two forms. Code form: memory += g; what is sent leaves the memory; the
mean of what was sent is the gradient that the optimiser sees. Paper form: memory += lr g, and the optimiser sees the
mean over lr, so that a changed learning rate does not rescale what is old.

Two ways of agreeing on indices. Without `slots` the counts travel first and the gather is padded to the longest. With
`slots` every worker sends as many as was fixed beforehand, in one message, and the host learns the counts only
when the next step begins: no step waits for the device. A selection past its slots stays in the memory.

A gradient that is not finite travels as a mark beside the count. Without `rollback` it is an error on every worker;
with it (for loss scaling) the step's result is infinite on all of them and `undo` puts everything back. With `slots`
the error comes when the next step begins, and the result until then is zero.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil

import torch
from torch import Tensor

from smelt.errors import ConfigError, DataError
from smelt.train.gradients.comm import Workers
from smelt.train.gradients.compressor import Coder, Compressor, Sparsifier, State, Step
from smelt.train.gradients.conservation import Conservation
from smelt.train.gradients.control_flags import Late, Marks
from smelt.train.gradients.gradient_views import Given, Pieces, all_finite, flat_of
from smelt.train.gradients.index_exchange import Agreed, agree, agree_in_slots
from smelt.train.gradients.indices import blocks_of
from smelt.train.gradients.layout import Layout
from smelt.train.gradients.means import Few, Mean, Whole
from smelt.train.gradients.messages import gather_messages, gather_pairs
from smelt.train.gradients.settings import Settings
from smelt.train.gradients.traffic import Traffic
from smelt.train.gradients.values import sum_values


class Reducer:
    """Compresses one flat vector, step after step."""

    def __init__(
        self,
        compressor: Compressor,
        layout: Layout,
        workers: Workers,
        settings: Settings | None = None,
        *,
        device: torch.device | str = "cpu",
        learning_rate: Callable[[], float] | None = None,
        rollback: bool = False,
    ) -> None:
        self.compressor, self.layout, self.workers = compressor, layout, workers
        self.settings = settings or Settings()
        self.learning_rate, self.rollback = learning_rate, rollback
        if not layout.size:
            raise ConfigError("there is no gradient to compress; the model has no parameter that is trained.")
        self.settings.require_fit(compressor, learning_rate is not None)
        workers.require_equal(str(layout), "model")
        workers.require_equal(f"{compressor} {self.settings}", "gradient compression")
        workers.arrived.clear()
        self._memory = torch.zeros(layout.size + 1, device=device)  # the last one is where empty slots point
        self.room: Tensor | None = None  # [elements + 1]: a result may stand there until the next; None: each is new
        self.state: State = compressor.start(layout, workers.size)
        self.number = 0
        self.counts: list[int] = []
        self.traffic = Traffic()  # of the last step
        self.total = Traffic()  # of all steps, also of those that were undone
        self.conservation = Conservation(self.residual) if self.settings.check else None
        self._late: Late | None = None
        self._before: dict[str, Tensor] | None = None

    @property
    def residual(self) -> Tensor:
        """[elements] float32: what this worker has not sent yet."""
        return self._memory[: self.layout.size]

    def reduce(self, gradient: Given, *, used: Tensor | None = None) -> Tensor:
        """The mean over all workers of what was sent, [elements] float32."""
        return self.mean(gradient, used=used).dense()

    def mean(self, gradient: Given, *, used: Tensor | None = None) -> Mean:
        """The same, as it comes.

        `used`: [pieces] bool, false where this worker had no gradient; what nobody has a gradient for is not sent.
        """
        if not self.settle():
            self.undo()
        if self.rollback:
            self._before = {name: tensor.clone() for name, tensor in self.tensors().items()}
        rate = self._rate()
        given, finite = self._joining(gradient)
        given = given if rate == 1 else flat_of(given) * rate
        old = self.residual.clone() if self.settings.beta != 1 else None
        found = self._reduce(given, Marks(finite, used), self.workers.size * rate)
        if found is None:  # somebody's gradient is not finite
            self._refuse(self.number)
            return Whole(torch.full_like(self.residual, torch.inf))
        added, sent = found
        mean = sent if isinstance(sent, Few) else Whole(sent)
        if old is not None:
            self.residual.sub_(old).mul_(self.settings.beta).add_(old)
        if not self.compressor.feeds_back:
            self.residual.zero_()
        self.number += 1
        if self.conservation is not None and self.compressor.feeds_back and self.settle():
            self.conservation.add(flat_of(added), mean.dense() * (self.workers.size * rate))
            self.conservation.require(self.residual / self.settings.beta, self.workers)
        return mean

    def settle(self) -> bool:
        """Read what the last step left to be read late; whether its gradients were finite on all workers."""
        if self._late is not None:
            found, self._late = self._late.read(), None
            *self.counts, chosen, finite = found.tolist()
            self.traffic = self._account(chosen, self._slots() * self.workers.size, self.traffic.padding)
            if not finite:
                self._refuse(self.number - 1)
        return self._before is None or "failed" not in self._before

    def undo(self) -> None:
        """Put back what was before the last step (with `rollback`)."""
        assert self._before is not None
        before = {name: tensor for name, tensor in self._before.items() if name != "failed"}
        self.restore(before)
        self._before = None

    def tensors(self) -> dict[str, Tensor]:
        """All that must be kept to go on exactly from here."""
        small = {"step": torch.tensor(self.number), "counts": torch.tensor(self.counts, dtype=torch.int64)}
        state = {f"state.{key}": value for key, value in self.state.items()}
        checked = {} if self.conservation is None else self.conservation.tensors()
        return {"residual": self.residual, **small, **state, **checked}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Go on from what `tensors` gave."""
        self._late = None
        self.residual.copy_(tensors["residual"])
        self.number, self.counts = int(tensors["step"]), tensors["counts"].tolist()
        for key in self.state:
            self.state[key] = tensors[f"state.{key}"].to(self.state[key].device, copy=True)
        if self.conservation is not None:
            self.conservation.restore(tensors)

    def _reduce(self, given: Given, marks: Marks, divisor: float) -> tuple[Given, Tensor | Few] | None:
        """What this worker added to its memory, and what all have sent, summed and divided: [elements] each.

        None when somebody's gradient is not finite.
        """
        step = self._open(given)
        made = self._sparse if isinstance(self.compressor, Sparsifier) else self._coded
        mean = made(step, marks, divisor)
        return None if mean is None else (step.given, mean)

    def _open(self, given: Given) -> Step:
        slots = self._slots() if self.settings.slots is not None else None
        parts = (self.number, given, self.residual, self.layout, self.workers, self.state, self.counts, slots)
        step = Step(*parts)
        step.given = self.compressor.contribution(step)
        return step

    def _sparse(self, step: Step, marks: Marks, divisor: float) -> Tensor | Few | None:
        """The mean over all workers of the chosen elements, zero elsewhere."""
        sparsifier = self.compressor
        assert isinstance(sparsifier, Sparsifier)
        chosen = sparsifier.choose(step)
        if step.slots is not None:
            return self._in_slots(step, sparsifier, agree_in_slots(chosen, step, marks), divisor)
        blocks = blocks_of(self.layout.size, self.workers_target() if sparsifier.route != "known" else 0)
        agreed = agree(chosen, sparsifier.route, step, marks, blocks)
        if not agreed.finite:
            return None
        self.counts = agreed.counts
        if sparsifier.route == "own":
            summed, sent, number, padding = gather_pairs(agreed, step, self.settings.values)
            mean: Tensor | Few = summed.div_(divisor)
            if len(agreed.common):
                summed.add_(self._scattered(agreed.common, self._shared(agreed.common, divisor)))
            number += len(agreed.common)
        else:
            sent, padding, number = torch.cat([agreed.indices, agreed.common]), 0, len(agreed.indices)
            values = self._shared(sent, divisor)
            on_cpu = values.device.type == "cpu"
            mean = Few.of(sent, values, self.layout.size) if on_cpu else self._scattered(sent, values)
            number += len(agreed.common)
        sparsifier.settle(step, sent)
        self.traffic = self._account(number, agreed.slots, agreed.padding + padding)
        return mean

    def _shared(self, indices: Tensor, divisor: float) -> Tensor:
        """All workers send these elements [count]; their means, and the memory keeps what rounding lost."""
        values, error = sum_values(self._memory.index_select(0, indices), self.workers, self.settings.values)
        self._memory[indices] = error
        return values.div_(divisor)

    def _scattered(self, indices: Tensor, values: Tensor) -> Tensor:
        """[elements], zero but for these."""
        mean = torch.zeros_like(self._memory) if self.room is None else self.room.zero_()
        mean[indices] = values
        return mean[: self.layout.size]

    def _in_slots(self, step: Step, sparsifier: Sparsifier, agreed: Agreed, divisor: float) -> Tensor:
        mean = self._scattered(agreed.indices, self._shared(agreed.indices, divisor))
        sparsifier.settle(step, agreed.indices)
        self._late = Late(agreed.late)
        self.traffic = Traffic(padding=agreed.padding)
        return torch.where(agreed.late[-1] > 0, mean, torch.inf if self.rollback else 0.0)

    def _coded(self, step: Step, marks: Marks, divisor: float) -> Tensor | None:
        """The mean over all workers of what their messages say."""
        coder = self.compressor
        assert isinstance(coder, Coder)
        message = coder.encode(step)
        found = gather_messages(message, coder, step, marks)
        if found is None:
            return None
        summed, own, chosen, padding = found
        self.residual.sub_(own)
        self.traffic = self._account(chosen, 0, padding)
        return summed.div_(divisor)

    def _refuse(self, number: int) -> None:
        if self._before is None:
            raise DataError(
                f"the gradients of step {number} are not finite on at least one worker; lower the learning rate, "
                "or give the gradient scaler if the loss is scaled."
            )
        self._before["failed"] = torch.tensor(True)

    def _account(self, chosen: int, slots: int, padding: int) -> Traffic:
        arrived = dict(self.workers.arrived)
        self.workers.arrived.clear()
        target = self.compressor.target(self.layout.size)
        parts = {key: arrived.get(key, 0) for key in ("counts", "plan", "indices", "values")}
        traffic = Traffic(
            **parts, padding=padding, elements=self.layout.size, target=target, chosen=chosen, slots=slots
        )
        self.total = self.total + traffic
        return traffic

    def workers_target(self) -> float:
        """How many elements one worker means to choose."""
        exclusive = isinstance(self.compressor, Sparsifier) and self.compressor.route == "exclusive"
        return self.compressor.target(self.layout.size) / (self.workers.size if exclusive else 1)

    def _slots(self) -> int:
        assert self.settings.slots is not None
        return min(ceil(self.settings.slots * self.workers_target()), self.layout.size)

    def _joining(self, gradient: Given) -> tuple[Given, Callable[[], Tensor]]:
        """Zeros in place of what is not finite, so that this worker can still join the others until all know of it; and
        whether it is, which pieces find out while they are added."""
        if isinstance(gradient, Pieces):
            return gradient, gradient.all_finite
        finite = all_finite(gradient)
        if self._memory.device.type == "cpu":
            return gradient.float() if finite else torch.zeros_like(self.residual), lambda: finite
        return torch.where(finite, gradient.float(), 0.0), lambda: finite  # the host does not wait for the answer

    def _rate(self) -> float:
        if self.settings.form == "code":
            return 1.0
        assert self.learning_rate is not None
        rate = self.learning_rate()
        if not rate > 0:
            raise ConfigError(f"the learning rate is {rate:g}; form='paper' needs one above 0, form='code' does not.")
        return rate
