"""Reference semantics of every integer operator: plain PyTorch on integer tensors, with int64 where a product needs it.

Kernels and exports must give the same bits. Every function takes the inputs of its node, then constants and attributes
by name. The interpreter casts the result to the dtype of the node; conversion has proved that it fits. `>>` is
arithmetic: it rounds toward minus infinity.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from smelt.runtime.integer.shift_ops import gelu_shift, layer_norm_shift, softmax_shift
from smelt.runtime.integer.table_ops import layer_norm_table, rms_norm_table, softmax_table, table

# --- Linear operators: int8 operands, int32 sums. ---


def linear(x: Tensor, *, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply by an int8 weight [out, in] and add an int32 bias [out]."""
    product = _matmul(x, weight.T)
    return product if bias is None else product + bias


def matmul(a: Tensor, b: Tensor, *, transpose_b: int = 0) -> Tensor:
    """Multiply batches of matrices: a [..., m, k] and b [..., k, n], or [..., n, k] if it is transposed."""
    return _matmul(a, b.transpose(-1, -2) if transpose_b else b)


def conv1d(
    x: Tensor, *, weight: Tensor, bias: Tensor | None = None, stride: int = 1, padding: int = 0, dilation: int = 1,
    groups: int = 1,
) -> Tensor:  # fmt: skip
    """Convolve [batch, channels, frames] with an int8 weight [out, in / groups, kernel] and add an int32 bias [out]."""
    return _convolve(x, weight, bias, [stride], [padding], [dilation], groups)


def conv2d(
    x: Tensor, *, weight: Tensor, bias: Tensor | None = None, stride: Sequence[int] = (1, 1),
    padding: Sequence[int] = (0, 0), dilation: Sequence[int] = (1, 1), groups: int = 1,
) -> Tensor:  # fmt: skip
    """Convolve [batch, channels, height, width] with an int8 weight and add an int32 bias [out]."""
    return _convolve(x, weight, bias, stride, padding, dilation, groups)


def embedding(ids: Tensor, *, table: Tensor) -> Tensor:
    """Return the row of the table [rows, width] for every id."""
    return F.embedding(ids.to(torch.int64), table)


def positions(ids: Tensor, *, padding_index: int) -> Tensor:
    """Return the position of every token [batch, tokens]: 0, 1, ...; with a padding index (not -1) as in RoBERTa, where
    padding tokens have that index and the others count on from it."""
    if padding_index < 0:
        return torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    visible = (ids != padding_index).to(torch.int64)
    return visible.cumsum(1) * visible + padding_index


def add_positions(x: Tensor, *, table: Tensor) -> Tensor:
    """Add a table [tokens, width] to patches [batch, patches, width], after rows of zeros for the tokens before them.

    The first rows of the table are class tokens with their positions.
    """
    before = table.shape[0] - x.shape[1]
    return F.pad(x.to(torch.int64), (0, 0, before, 0)) + table.to(torch.int64)


def relative_bias(x: Tensor, *, table: Tensor) -> Tensor:
    """Add to scores [batch, heads, queries, keys] a bias per head and distance: table [heads, 2 * length - 1].

    The column of distance zero is `length - 1`; keys after the query are to its right.
    """
    queries, keys = x.shape[-2:]
    distances = torch.arange(keys, device=x.device) - torch.arange(queries, device=x.device)[:, None]
    return x.to(torch.int64) + table[:, distances + table.shape[1] // 2].to(torch.int64)


def causal_mask(mask: Tensor, ids: Tensor, *, repeats: int) -> Tensor:
    """Return where a token attends: 1 at visible keys up to its own, else 0. [batch, 1, repeats * queries, keys]

    `mask` [batch, keys] is zero at padding, and the tokens `ids` [batch, queries] are the last of the keys. The rows
    repeat, as queries do that share a key in grouped-query attention.
    """
    queries, keys = ids.shape[1], mask.shape[1]
    last_key = torch.arange(queries, device=mask.device)[:, None] + (keys - queries)
    visible = (torch.arange(keys, device=mask.device) <= last_key) & (mask != 0)[:, None]
    return visible.to(torch.int8).repeat(1, repeats, 1).unsqueeze(1)


# --- Elementwise operators. ---


def requantize(x: Tensor, *, multiplier: Tensor, shift: Tensor, minimum: int, maximum: int, axis: int = -1) -> Tensor:
    """Multiply by `multiplier / 2**shift`, round half up and clamp.

    `multiplier` (int32, not negative) and `shift` (0 to 62) have one element, or one per channel of `axis`.
    """
    scale = _along(multiplier.to(torch.int64), x, axis)
    bits = _along(shift.to(torch.int64), x, axis)
    half = torch.where(bits > 0, 1 << (bits - 1).clamp(min=0), 0)
    return ((x.to(torch.int64) * scale + half) >> bits).clamp(minimum, maximum)


def add(a: Tensor, b: Tensor) -> Tensor:
    """Add two tensors of the same scale; shapes are broadcast."""
    return a.to(torch.int64) + b.to(torch.int64)


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """Multiply element by element; shapes are broadcast."""
    return a.to(torch.int64) * b.to(torch.int64)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [batch, tokens, heads, head_dim]: its first and second half by angles [batch, tokens, head_dim / 2]."""
    first, second = x.to(torch.int64).chunk(2, -1)
    cos, sin = (part.to(torch.int64).unsqueeze(2) for part in (cos, sin))
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def silu(x: Tensor, *, bits: int, **exp_constants: int) -> Tensor:
    """i-SiLU: `x * sigmoid(x)`, the sigmoid in units of `2**-bits`: 1 / (1 + e) or e / (1 + e) with e = i-exp(-|x|)."""
    x = x.to(torch.int64)
    exp = _exp(-x.abs(), **exp_constants)
    one = _exp(torch.zeros_like(x), **exp_constants)
    return x * ((torch.where(x < 0, exp, one) << bits) // (one + exp))


def gelu(x: Tensor, *, q_b: int, q_c: int, q_one: int, shift: int) -> Tensor:
    """i-GELU: `x * (erf + q_one)` with `erf = (sign(x) * (q_c - (q_b - min(|x|, q_b))**2)) >> shift`."""
    x = x.to(torch.int64)
    erf = x.sign() * (q_c - (q_b - x.abs().clamp(max=q_b)) ** 2)
    return x * ((erf >> shift) + q_one)


def tanh(x: Tensor, *, levels: int, **exp_constants: int) -> Tensor:
    """Return `levels * tanh(x)`, rounded half away from zero: (1 - e) / (1 + e) with e = i-exp(-2|x|).

    The constants of i-exp are those for twice the scale of x.
    """
    x = x.to(torch.int64)
    exp = _exp(-x.abs(), **exp_constants)
    one = _exp(torch.zeros_like(x), **exp_constants)
    numerator, denominator = one - exp, one + exp
    return x.sign() * ((2 * levels * numerator + denominator) // (2 * denominator))


# --- Operators along an axis. ---


def softmax(
    x: Tensor, mask: Tensor | None = None, *, levels: int, reciprocal_bits: int, **exp_constants: int
) -> Tensor:
    """i-softmax over the last axis: probabilities in units of `1 / levels`, rounded half up.

    `mask` is broadcast against x; where it is zero, a position counts neither in the maximum nor in the sum, and its
    probability is zero. The sum is inverted once per row: `factor = floor((levels << reciprocal_bits) / sum)`.
    """
    x = x.to(torch.int64)
    if mask is None:
        exp = _exp(x - x.amax(-1, keepdim=True), **exp_constants)
    else:
        visible = (mask != 0).expand_as(x)
        peak = x.masked_fill(~visible, torch.iinfo(torch.int32).min).amax(-1, keepdim=True)
        exp = _exp((x - peak).clamp(max=0), **exp_constants).masked_fill(~visible, 0)
    factor = (levels << reciprocal_bits) // exp.sum(-1, keepdim=True).clamp(min=1)
    return (exp * factor + (1 << (reciprocal_bits - 1))) >> reciprocal_bits


def layer_norm(
    x: Tensor, *, weight: Tensor, bias: Tensor, epsilon: int, shift: int, reciprocal_bits: int, output_bits: int
) -> Tensor:
    """i-LayerNorm over the last axis of length d: `normalized * weight + bias`.

    `normalized` is `(x - mean) / sqrt(sum((x - mean)**2) + epsilon)` in units of `2**-output_bits`. The mean is rounded
    half up, `shift` bits are dropped before squaring, and `epsilon` is d times that of the float layer in these units.
    """
    x = x.to(torch.int64)
    length = x.shape[-1]
    centered = x - (2 * x.sum(-1, keepdim=True) + length) // (2 * length)
    return _normalize(centered, epsilon, shift, reciprocal_bits, output_bits) * weight.to(torch.int64) + bias.to(
        torch.int64
    )


def rms_norm(x: Tensor, *, weight: Tensor, epsilon: int, shift: int, reciprocal_bits: int, output_bits: int) -> Tensor:
    """i-RMSNorm over the last axis: `layer_norm` without mean and bias."""
    normalized = _normalize(x.to(torch.int64), epsilon, shift, reciprocal_bits, output_bits)
    return normalized * weight.to(torch.int64)


def sqrt(x: Tensor) -> Tensor:
    """Return floor(sqrt(x)) of values from 0 to 2**62, by Newton's iteration from a power of two above the root."""
    positive = x.to(torch.int64).clamp(min=1)
    root = torch.ones_like(positive)
    for bits in range(1, 32):
        root = torch.where(positive >> (2 * bits - 2) != 0, 1 << bits, root)
    while True:
        smaller = (root + positive // root) >> 1
        if not bool((smaller < root).any()):
            return torch.where(x > 0, root, 0)
        root = torch.minimum(root, smaller)


def mean(x: Tensor, *, axis: int) -> Tensor:
    """Sum over an axis, which is dropped; the requantization that follows divides by its length."""
    return x.to(torch.int64).sum(axis)


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of x [batch, tokens, width] over the tokens whose mask is not zero, rounded half up."""
    visible = (mask != 0).to(torch.int64).unsqueeze(-1)
    count = visible.sum(1).clamp(min=1)
    return (2 * (x.to(torch.int64) * visible).sum(1) + count) // (2 * count)


def avg_pool(x: Tensor, *, kernel: Sequence[int], stride: Sequence[int]) -> Tensor:
    """Sum over windows of the last one or two axes; the requantization that follows divides by the window's size."""
    return _windows(x.to(torch.int64), kernel, stride).sum(-1)


def max_pool(x: Tensor, *, kernel: Sequence[int], stride: Sequence[int]) -> Tensor:
    """Return the largest value of every window of the last one or two axes."""
    return _windows(x, kernel, stride).amax(-1)


def argmax(x: Tensor, *, axis: int = -1) -> Tensor:
    """Return the first index of the largest value along an axis, which is dropped."""
    size = x.shape[axis]
    positions = _along(torch.arange(size, device=x.device), x, axis)
    return torch.where(x == x.amax(axis, keepdim=True), positions, size).amin(axis)


# --- Operators that move values. ---


def reshape(x: Tensor, *, shape: Sequence[int]) -> Tensor:
    """Reshape; 0 keeps the axis of the same index and one -1 is inferred, as in ONNX."""
    return x.reshape([x.shape[index] if size == 0 else size for index, size in enumerate(shape)])


def permute(x: Tensor, *, axes: Sequence[int]) -> Tensor:
    """Reorder the axes."""
    return x.permute(list(axes))


def slice_(x: Tensor, *, axis: int, start: int, stop: int) -> Tensor:
    """Keep the positions from `start` to before `stop` of an axis."""
    return x.narrow(axis, start, stop - start)


def concat(a: Tensor, b: Tensor, *, axis: int) -> Tensor:
    """Concatenate two tensors along an axis."""
    return torch.cat((a, b), axis)


OPERATORS: dict[str, Callable[..., Tensor]] = {
    "linear": linear, "matmul": matmul, "conv1d": conv1d, "conv2d": conv2d, "embedding": embedding,
    "positions": positions, "add_positions": add_positions, "relative_bias": relative_bias, "causal_mask": causal_mask,
    "requantize": requantize, "add": add, "multiply": multiply, "rope": rope,
    "gelu": gelu, "silu": silu, "tanh": tanh, "table": table,
    "softmax": softmax, "layer_norm": layer_norm, "rms_norm": rms_norm, "sqrt": sqrt,
    "softmax_table": softmax_table, "layer_norm_table": layer_norm_table, "rms_norm_table": rms_norm_table,
    "gelu_shift": gelu_shift, "softmax_shift": softmax_shift, "layer_norm_shift": layer_norm_shift,
    "mean": mean, "masked_mean": masked_mean, "avg_pool": avg_pool, "max_pool": max_pool, "argmax": argmax,
    "reshape": reshape, "permute": permute, "slice": slice_, "concat": concat,
}  # fmt: skip


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    if a.is_cuda:  # no integer GEMM there; float64 holds every int32 sum exactly
        return (a.to(torch.float64) @ b.to(torch.float64)).to(torch.int32)
    return a.to(torch.int32) @ b.to(torch.int32)


def _convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int], groups: int,
) -> Tensor:  # fmt: skip
    """Convolve as a matrix product of unfolded windows, because torch has no dilated convolution of integers."""
    kernel = weight.shape[2:]
    x = F.pad(x, [amount for size in reversed(padding) for amount in (size, size)])
    spans = [spacing * (size - 1) + 1 for spacing, size in zip(dilation, kernel, strict=True)]
    for axis, (span, step, spacing) in enumerate(zip(spans, stride, dilation, strict=True)):
        x = x.unfold(2 + axis, span, step)[..., ::spacing]
    batch, channels, *positions = x.shape[: 2 + len(kernel)]
    rows = x.reshape(batch, groups, channels // groups, math.prod(positions), math.prod(kernel)).transpose(2, 3)
    columns = weight.reshape(groups, weight.shape[0] // groups, -1)
    product = _matmul(columns, rows.flatten(-2).transpose(-1, -2)).reshape(batch, weight.shape[0], *positions)
    return product if bias is None else product + _along(bias, product, 1)


def _exp(x: Tensor, *, q_ln2: int, q_b: int, q_c: int, max_halvings: int, lift: int, drop: int) -> Tensor:
    """i-exp of x <= 0: `x = -halvings * q_ln2 + r`, a quadratic polynomial of r, then one right shift per halving.

    The polynomial is lifted or drops bits so that exp(0) has the width that the conversion chose.
    """
    x = x.clamp(min=-max_halvings * q_ln2)
    halvings = -x // q_ln2
    rest = x + halvings * q_ln2
    return ((rest * (rest + q_b) + q_c) << lift) >> (drop + halvings)


def _normalize(x: Tensor, epsilon: int, shift: int, reciprocal_bits: int, output_bits: int) -> Tensor:
    root = sqrt(((x >> shift) ** 2).sum(-1, keepdim=True) + epsilon) << shift
    factor = (1 << reciprocal_bits) // root.clamp(min=1)
    excess = reciprocal_bits - output_bits
    return (x * factor + (1 << (excess - 1))) >> excess


def _along(values: Tensor, x: Tensor, axis: int) -> Tensor:
    """Give values [1 or channels] the shape that broadcasts along an axis of x."""
    shape = [1] * x.dim()
    shape[axis] = values.numel()
    return values.reshape(shape)


def _windows(x: Tensor, kernel: Sequence[int], stride: Sequence[int]) -> Tensor:
    """Return the windows of the last `len(kernel)` axes with their elements in one last axis."""
    first = x.dim() - len(kernel)
    for offset, (size, step) in enumerate(zip(kernel, stride, strict=True)):
        x = x.unfold(first + offset, size, step)
    return x.flatten(-len(kernel))
