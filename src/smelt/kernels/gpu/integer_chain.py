"""Constants of integer kernels in Triton: steps as the arguments of a chain, and which arithmetic they need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from smelt.kernels.integer_interface import (
    Add,
    Gelu,
    Requantize,
    SoftmaxConstants,
    Step,
    Steps,
    TableLookup,
    Tanh,
)

# Codes of the kernels' constants. A sum: as it is, or requantized (PLAIN more than the requantization's code). An
# activation.
NONE = 0
PLAIN = 1
_GELU, _TABLE, _NARROW_GELU, _TANH = 1, 2, 3, 4
# A requantization is 1 plus bits: one multiplier per channel; how it computes; whether clamping changes nothing.
_PER_CHANNEL = 1
_WIDE, _NARROW, _LIMITED, _HIGH = 0, 2, 4, 6
_UNCLAMPED = 8
_INT32_MAX = 2**31 - 1


@dataclass
class Chain:
    """The arguments of `apply_chain`, and how many steps and operands it takes."""

    arguments: dict[str, Any]
    steps: int = 0
    operands: int = 0


@dataclass(frozen=True)
class PreparedStep:
    """A step as its device function reads it; `form` is its code, `channels` the number of its multipliers."""

    constants: Tensor
    form: int
    channels: int = 1


def chain_of(steps: Steps, operands: Sequence[Tensor], device: torch.device) -> Chain:
    """Return the chain of the first steps, as many as it has places for."""
    empty = _empty(device)
    chain = Chain(
        {
            "first": empty, "first_channels": 1, "add1": empty, "add1_rows": 1, "add1_constants": empty,
            "add1_channels": 1, "add2": empty, "add2_rows": 1, "add2_constants": empty, "add2_channels": 1,
            "activation": empty, "entries": 0, "last": empty, "last_channels": 1, "FIRST": NONE, "ADD1": NONE,
            "ADD2": NONE, "ACTIVATION": NONE, "LAST": NONE,
        }
    )  # fmt: skip
    places = iter(("first", "add1", "add2", "activation", "last"))
    for step, prepared in zip(steps.steps, prepare(steps, device), strict=True):
        place = next((name for name in places if _fits(step, name)), None)
        if place is None:
            return chain
        _set_place(chain, place, step, prepared, operands)
        chain.steps += 1
    return chain


def prepare(steps: Steps, device: torch.device) -> list[PreparedStep]:
    """Return the constants of every step on a device, where they are copied once."""
    if device not in steps.prepared:
        steps.prepared[device] = [_prepare(step, device) for step in steps.steps]
    prepared: list[PreparedStep] = steps.prepared[device]
    return prepared


def softmax_tensor(softmax: SoftmaxConstants, device: torch.device) -> Tensor:
    """Return the constants of a softmax as its kernels read them, copied once."""
    return _softmax_tensor(softmax, device)


def softmax_form(softmax: SoftmaxConstants, length: int) -> int:
    """Return 1 or 2 if exps, their sum over a row and its reciprocal fit 32 bits (2: exact reciprocal), else 0."""
    one = (softmax.q_c << softmax.lift) >> softmax.drop  # the largest exp
    limit = max(softmax.q_c << softmax.lift, softmax.max_halvings * softmax.q_ln2, softmax.q_b, one * length)
    if limit > _INT32_MAX or one < 1 or softmax.drop > 31 or not 33 <= softmax.reciprocal_bits <= 63:
        return 0
    if (softmax.levels << softmax.reciprocal_bits) // one > _INT32_MAX:
        return 0
    return 2 if _has_exact_reciprocal(softmax) else 1


def _fits(step: Step, place: str) -> bool:
    if isinstance(step, Requantize):
        return place in ("first", "last")
    return place.startswith("add") if isinstance(step, Add) else place == "activation"


def _set_place(chain: Chain, place: str, step: Step, prepared: PreparedStep, operands: Sequence[Tensor]) -> None:
    arguments = chain.arguments
    arguments |= {place.upper(): prepared.form}
    if isinstance(step, Requantize):
        arguments |= {place: prepared.constants, f"{place}_channels": prepared.channels}
    elif isinstance(step, Add):
        if chain.operands >= len(operands):
            raise ValueError(f"the steps add more operands than the {len(operands)} given")
        operand = operands[chain.operands].contiguous()
        chain.operands += 1
        arguments |= {place: operand, f"{place}_rows": operand.numel() // operand.shape[-1]}
        arguments |= {f"{place}_constants": prepared.constants, f"{place}_channels": prepared.channels}
    else:
        entries = step.breakpoints.numel() if isinstance(step, TableLookup) else 0
        arguments |= {"activation": prepared.constants, "entries": entries}


def _prepare(step: Step, device: torch.device) -> PreparedStep:
    if isinstance(step, Add):
        if step.requantize is None:
            return PreparedStep(_empty(device), PLAIN)
        prepared = _prepare(step.requantize, device)
        return PreparedStep(prepared.constants, PLAIN + prepared.form, prepared.channels)
    if isinstance(step, Requantize):
        return _prepare_requantize(step, device)
    if isinstance(step, Gelu):
        form = _NARROW_GELU if max(step.q_c, step.q_b**2) <= _INT32_MAX else _GELU
        return PreparedStep(torch.tensor([step.q_b, step.q_c, step.q_one, step.shift]).to(device), form)
    if isinstance(step, Tanh):
        return PreparedStep(torch.tensor(list(vars(step).values())).to(device), _TANH)
    parts = (step.breakpoints, step.slopes, step.intercepts)
    return PreparedStep(torch.cat([tensor.to("cpu", torch.int64) for tensor in parts]).to(device), _TABLE)


def _prepare_requantize(step: Requantize, device: torch.device) -> PreparedStep:
    """Choose the arithmetic: the upper half of the product, 32 bits of it, those of a limited input, or all of it."""
    multiplier, shift = torch.broadcast_tensors(step.multiplier.flatten().cpu(), step.shift.flatten().cpu())
    numbers = list(zip(multiplier.tolist(), shift.tolist(), strict=True))
    smallest, largest = min(m / 2.0**s for m, s in numbers), max(m / 2.0**s for m, s in numbers)
    least, limit = min(shift.tolist()), 0
    if least >= 32:
        form = _HIGH if least >= 33 else _NARROW
        form += _UNCLAMPED * (largest * 2**31 + 1 <= min(-step.minimum, step.maximum))
    else:
        reach = max(abs(step.minimum), abs(step.maximum)) + 1
        form, limit = _WIDE, int(reach / smallest) + 1 if smallest > 0 else 2**31
        if least > 0 and limit <= _INT32_MAX and 2 * (limit * largest + 1) <= _INT32_MAX:
            form = _LIMITED
    header = torch.tensor([step.minimum, step.maximum, min(limit, _INT32_MAX), 0], dtype=torch.int32)
    constants = torch.cat([header, multiplier.to(torch.int32), shift.to(torch.int32)]).to(device)
    channels = multiplier.numel()
    return PreparedStep(constants, 1 + form + _PER_CHANNEL * (channels > 1), channels)


@lru_cache(maxsize=1024)
def _softmax_tensor(softmax: SoftmaxConstants, device: torch.device) -> Tensor:
    names = ("levels", "reciprocal_bits", "q_ln2", "q_b", "q_c", "max_halvings", "lift", "drop")
    furthest = max(min(softmax.max_halvings, 31 - softmax.drop), 0) * softmax.q_ln2  # beyond it 31 bits are shifted out
    rounded_up = _has_exact_reciprocal(softmax)
    reciprocal = -(-(2**32) // softmax.q_ln2) if rounded_up else (2**32 - 1) // softmax.q_ln2
    values = [*(getattr(softmax, name) for name in names), furthest, reciprocal]
    return torch.tensor(values, dtype=torch.int64, device=device)


def _has_exact_reciprocal(softmax: SoftmaxConstants) -> bool:
    """Return whether `x * ceil(2**32 / q_ln2) >> 32` is `x // q_ln2` for all distances."""
    if softmax.q_ln2 < 2:
        return False
    error = -(-(2**32) // softmax.q_ln2) * softmax.q_ln2 - 2**32
    return softmax.max_halvings * softmax.q_ln2 * error < 2**32


@lru_cache
def _empty(device: torch.device) -> Tensor:
    return torch.zeros(4, dtype=torch.int32, device=device)
