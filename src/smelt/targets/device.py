"""Targets: hardware with operator latencies. `Device` measures the hardware of this machine."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from smelt.errors import ResourceError
from smelt.measure.clock import time_call
from smelt.measure.machine import cpu_model, gpu_model
from smelt.measure.memory import available_memory
from smelt.targets.operators import AttentionOp, FeedForwardOp, Operator

_ALIGNMENT = 64  # elements; a tensor that starts inside a cache line would be slower than an allocated one
_MAX_TENSORS = 7  # per block: input, weights, LayerNorm


class Target(Protocol):
    """Hardware as a search sees it."""

    @property
    def name(self) -> str: ...

    def latency(self, operator: Operator) -> float:
        """Return the latency of one call of the operator in seconds."""
        ...

    def fits(self, size: int) -> bool:
        """Return whether this many bytes fit into memory."""
        ...


class Device:
    """The CPU (`cpu`) or the first GPU (`cuda`) of this machine, measured on stand-alone blocks."""

    def __init__(self, device_type: str = "cpu", *, warmup: int = 1, repeats: int = 3, seed: int = 0) -> None:
        if device_type not in ("cpu", "cuda"):
            raise ResourceError(f"Unknown device {device_type!r}: use cpu or cuda.")
        if device_type == "cuda" and not torch.cuda.is_available():
            raise ResourceError("This machine has no CUDA device: measure on cpu instead.")
        self.device_type = device_type
        self._warmup = warmup
        self._repeats = repeats
        self._pool = _RandomPool(device_type, seed)

    def __repr__(self) -> str:
        return f"Device({self.device_type!r})"

    @property
    def name(self) -> str:
        """The hardware and what else determines its speed: threads and torch version."""
        if self.device_type == "cuda":
            return f"{gpu_model()}, torch {torch.__version__}"
        return f"{cpu_model()}, {torch.get_num_threads()} threads, torch {torch.__version__}"

    def latency(self, operator: Operator) -> float:
        """Return the median latency of the operator's block in seconds; 0 for a block without units."""
        if operator.parameters() == 0:
            return 0.0
        self._pool.start(operator)
        block = _block(operator, self._pool)
        with torch.inference_mode():
            seconds = time_call(block, warmup=self._warmup, repeats=self._repeats, device=self.device_type)
        return float(np.median(seconds))

    def fits(self, size: int) -> bool:
        """Return whether this many bytes fit into the memory that is free now."""
        if self.device_type == "cuda":
            idle_in_torch = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
            return size <= torch.cuda.mem_get_info()[0] + idle_in_torch
        return size <= available_memory()


class _RandomPool:
    """A pool of random numbers that weights and inputs are slices of, so that a new width needs no new random numbers.

    Tensors of a block do not overlap: shared memory would stay in the cache and look fast.
    """

    def __init__(self, device: str, seed: int) -> None:
        self._device = device
        self._generator = torch.Generator(device).manual_seed(seed)
        self._numbers = torch.empty(0, device=device)
        self._used = 0

    def start(self, operator: Operator) -> None:
        """Grow the pool for all tensors of an operator and restart at its beginning."""
        dtype: torch.dtype = getattr(torch, operator.dtype)
        norm_and_input = operator.hidden * (2 + operator.batch * operator.tokens)
        needed = operator.parameters() + norm_and_input + _MAX_TENSORS * _ALIGNMENT
        if self._numbers.dtype != dtype or len(self._numbers) < needed:
            # Scaled like trained weights, so that activations do not overflow.
            numbers = torch.randn(needed, generator=self._generator, device=self._device) / operator.hidden**0.5
            self._numbers = numbers.to(dtype)
        self._used = 0

    def allocate(self, *shape: int) -> Tensor:
        start, end = self._used, self._used + prod(shape)
        self._used = -(-end // _ALIGNMENT) * _ALIGNMENT
        return self._numbers[start:end].view(shape)


def _block(operator: Operator, pool: _RandomPool) -> Callable[[], Tensor]:
    return _attention(operator, pool) if isinstance(operator, AttentionOp) else _feed_forward(operator, pool)


def _attention(operator: AttentionOp, pool: _RandomPool) -> Callable[[], Tensor]:
    """Return a block of Q/K/V projections, attention, output projection, residual, LayerNorm."""
    hidden, q_dim, kv_dim = operator.hidden, operator.heads * operator.head_dim, operator.kv_heads * operator.head_dim
    states = pool.allocate(operator.batch, operator.tokens, hidden)  # [batch, tokens, hidden]
    query, key, value = pool.allocate(q_dim, hidden), pool.allocate(kv_dim, hidden), pool.allocate(kv_dim, hidden)
    output = pool.allocate(hidden, q_dim)
    scale, shift = pool.allocate(hidden), pool.allocate(hidden)

    def split(flat: Tensor, heads: int) -> Tensor:
        return flat.view(operator.batch, operator.tokens, heads, operator.head_dim).transpose(1, 2)

    def block() -> Tensor:
        context = functional.scaled_dot_product_attention(
            split(functional.linear(states, query), operator.heads),
            split(functional.linear(states, key), operator.kv_heads),
            split(functional.linear(states, value), operator.kv_heads),
            is_causal=operator.causal,
            enable_gqa=operator.kv_heads != operator.heads,
        )  # [batch, heads, tokens, head_dim]
        joined = context.transpose(1, 2).reshape(operator.batch, operator.tokens, q_dim)
        return functional.layer_norm(states + functional.linear(joined, output), (hidden,), scale, shift)

    return block


def _feed_forward(operator: FeedForwardOp, pool: _RandomPool) -> Callable[[], Tensor]:
    """Return a block of linear, GELU (or SiLU with a gate), linear, residual, LayerNorm."""
    hidden, ffn_channels = operator.hidden, operator.ffn_channels
    states = pool.allocate(operator.batch, operator.tokens, hidden)  # [batch, tokens, hidden]
    up, down = pool.allocate(ffn_channels, hidden), pool.allocate(hidden, ffn_channels)
    gate = pool.allocate(ffn_channels, hidden) if operator.gated else None
    scale, shift = pool.allocate(hidden), pool.allocate(hidden)

    def block() -> Tensor:
        inner = functional.linear(states, up)  # [batch, tokens, ffn_channels]
        if gate is None:
            inner = functional.gelu(inner)
        else:
            inner = functional.silu(functional.linear(states, gate)) * inner
        return functional.layer_norm(states + functional.linear(inner, down), (hidden,), scale, shift)

    return block
