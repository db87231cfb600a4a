"""The reducer of a vector whose method is found while training: everything is sent until it is told which one to use.

Its choice stands in the checkpoint beside the state of the method, so that a resumed run goes on without measuring.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from smelt.train.gradients.comm import Workers
from smelt.train.gradients.compression import reducer_of
from smelt.train.gradients.compressor import Compressor
from smelt.train.gradients.dense import Dense, DenseReducer
from smelt.train.gradients.gradient_views import Given
from smelt.train.gradients.layout import Layout
from smelt.train.gradients.means import Mean
from smelt.train.gradients.reducer import Reducer
from smelt.train.gradients.settings import Settings
from smelt.train.gradients.traffic import Traffic

_UNDECIDED = -1


class AutoReducer(Reducer):
    """Stands before the reducer that does the work, and shows its numbers as its own."""

    def __init__(
        self,
        compressor: Compressor,
        candidates: list[Compressor],
        layout: Layout,
        workers: Workers,
        settings: Settings,
        device: torch.device,
        *,
        rate: Callable[[], float] | None,
        rollback: bool,
    ) -> None:
        own = Workers(workers.group)
        super().__init__(compressor, layout, own, replace(settings, slots=None), device=device, learning_rate=rate)
        self._candidates, self._wanted, self._rollback = candidates, settings, rollback
        self.choice = _UNDECIDED
        self._done, self._sent = 0, Traffic()  # steps, and what they sent, before the choice
        self._inner = self._made(0)
        self._show()

    @property
    def decided(self) -> bool:
        return self.choice != _UNDECIDED

    def use(self, choice: int) -> None:
        """From the next step on; until now everything was sent, so no residual is left behind."""
        self.choice = choice
        if choice:
            self._done, self._sent = self.number, self.total
            self._inner = self._made(choice)
            self._inner.traffic = self.traffic  # of the last step, until there is another
        self._show()

    def pass_by(self, size: int) -> None:
        assert isinstance(self._inner, DenseReducer)
        self._inner.pass_by(size)
        self._show()

    def mean(self, gradient: Given, *, used: Tensor | None = None) -> Mean:
        reduced = self._inner.mean(gradient, used=used)
        self._show()
        return reduced

    def settle(self) -> bool:
        finite = self._inner.settle()
        self._show()
        return finite

    def undo(self) -> None:
        self._inner.undo()
        self._show()

    def tensors(self) -> dict[str, Tensor]:
        return {**self._inner.tensors(), "auto": torch.tensor([self.choice, self._done])}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        self.choice, self._done = tensors["auto"].tolist()
        self._inner = self._made(max(self.choice, 0))
        self._inner.restore({**self._inner.tensors(), **tensors})
        self._show()

    def _made(self, choice: int) -> Reducer:
        compressor, device = self._candidates[choice], self.residual.device
        settings, rate = settings_for(compressor, self._wanted), self.learning_rate
        made = reducer_of(compressor, self.layout, self.workers, settings, device, rate, self._rollback)
        made.room = self.room
        return made

    def _show(self) -> None:
        self._memory, self.state = self._inner._memory, self._inner.state
        self.number, self.counts = self._done + self._inner.number, self._inner.counts
        self.traffic, self.total = self._inner.traffic, self._sent + self._inner.total


def settings_for(compressor: Compressor, settings: Settings) -> Settings:
    """What sends everything has no slots to fill."""
    return replace(settings, slots=None) if isinstance(compressor, Dense) else settings
