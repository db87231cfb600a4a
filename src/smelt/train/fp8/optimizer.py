"""Weight updates in FP16 (1,6,9), rounded stochastically so that small updates are not lost (Wang et al., 2018).

Random bits follow from the seed and the step, so that all ranks round alike and a resumed run rounds as before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from smelt.numerics.float_format import DLFLOAT16


class Fp16Rounding:
    """Rounds to FP16: stochastically with random bits of a step, or to nearest."""

    def __init__(self, seed: int, *, stochastic: bool) -> None:
        self._seed, self._stochastic = seed, stochastic
        self._generators: dict[torch.device, torch.Generator] = {}
        self._step = 0

    def start_step(self, step: int) -> None:
        """Use the random bits of this step."""
        self._step, self._generators = step, {}

    def __call__(self, x: Tensor) -> Tensor:
        if not self._stochastic:
            return DLFLOAT16.round(x)
        if x.device not in self._generators:
            generator = torch.Generator(x.device)
            generator.manual_seed((self._seed * 1_000_003 + self._step) % (1 << 63))
            self._generators[x.device] = generator
        return DLFLOAT16.round(x, "stochastic", generator=self._generators[x.device])


class Fp16SGD(torch.optim.SGD):
    """SGD whose three updates (weight decay, momentum, weight) are each rounded to FP16."""

    def __init__(self, params: Iterable[Any], rounding: Fp16Rounding, **options: Any) -> None:
        super().__init__(params, **options)
        self._round = rounding

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        assert closure is None
        self._round.start_step(_count_step(self))
        for group in self.param_groups:
            momentum, decay = group["momentum"], group["weight_decay"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                update = self._round(parameter.grad + decay * parameter)
                if momentum:
                    state = self.state[parameter]
                    buffer = state.get("momentum_buffer")
                    buffer = update if buffer is None else self._round(momentum * buffer + update)
                    state["momentum_buffer"] = buffer
                    update = self._round(update + momentum * buffer) if group["nesterov"] else buffer
                parameter.copy_(self._round(parameter - group["lr"] * update))
        return None


class Fp16AdamW(torch.optim.AdamW):
    """AdamW whose weights are rounded to FP16; the paper does not have its moments, which stay in float32."""

    def __init__(self, params: Iterable[Any], rounding: Fp16Rounding, **options: Any) -> None:
        super().__init__(params, **options)
        self._round = rounding

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        assert closure is None
        super().step()
        self._round.start_step(max([0, *(int(state["step"]) for state in self.state.values())]))
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.copy_(self._round(parameter))
        return None


def _count_step(optimizer: torch.optim.Optimizer) -> int:
    """Count a step in the state of every parameter, which checkpoints keep; return its number."""
    number = 0
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            state["step"] = state.get("step", torch.zeros(())) + 1
            number = int(state["step"])
    return number
