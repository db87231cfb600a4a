"""How bits, indices and values are encoded for sending.

Indices are int32, or 16 bits inside blocks of 65,536 elements with a count per block. Blocks are smaller as soon as a
rank sends more than two indices per block; the choice depends on the target count alone, so all ranks decide alike.

Values are float32, 16 bits, or int8 with scales; rounding is to nearest even, and the residual keeps the rounding
error. 16 bits: float16 (clamped to 65504) or bfloat16. int8: -127 to 127 times one float32 scale per 256 values, their
absolute maximum over 127.

A sum of rounded values must not be rounded again at every hop of a ring, since no rank could keep that error. So rank j
receives all values of the j-th chunk, sums them in float32, and sends the sum rounded once more; it keeps the error of
that rounding (after the compressed all-reduce of 1-bit Adam, Tang et al., ICML 2021).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from smelt.numerics.integer import quantize_int8
from smelt.train.gradients.comm import Comm

INDEX_BLOCK = 1 << 16
WIRE_DTYPES = ("float32", "float16", "bfloat16", "int8")
_GROUP_SIZE = 256  # int8 values that share a scale
_HALF = {"float16": torch.float16, "bfloat16": torch.bfloat16}


def pack_bits(bits: Tensor) -> Tensor:
    """[count] bool -> [ceil(count / 8)] uint8, the first bit lowest"""
    rows = functional.pad(bits.to(torch.uint8), (0, -len(bits) % 8)).view(-1, 8)
    return (rows << torch.arange(8, dtype=torch.uint8, device=bits.device)).sum(dim=1, dtype=torch.uint8)


def unpack_bits(data: Tensor, count: int) -> Tensor:
    """[bytes] uint8 -> [count] bool"""
    return (data[:, None] >> torch.arange(8, dtype=torch.uint8, device=data.device) & 1).bool().flatten()[:count]


def packed_size(count: int) -> int:
    """Bytes of `count` packed bits."""
    return -(-count // 8)


def num_index_blocks(numel: int, expected: float) -> int:
    """Return how many block counts are sent with `expected` indices per rank; 0: plain int32 is smaller."""
    blocks = -(-numel // INDEX_BLOCK)
    return blocks if 4 * expected > 2 * expected + 4 * blocks else 0


def count_per_block(indices: Tensor, blocks: int) -> Tensor:
    """Count the ascending indices in each block: [blocks] int64"""
    return torch.bincount(indices // INDEX_BLOCK, minlength=blocks)[:blocks]


def encode_indices(indices: Tensor, capacity: int, blocks: int) -> Tensor:
    """[count] int64, ascending -> [capacity * index_width(blocks)] uint8, padded with zeros"""
    padded = functional.pad(indices, (0, capacity - len(indices)))
    if not blocks:
        return padded.to(torch.int32).view(torch.uint8)
    return (padded % INDEX_BLOCK - INDEX_BLOCK // 2).to(torch.int16).view(torch.uint8)


def decode_indices(data: Tensor, count: int, block_counts: Tensor) -> Tensor:
    """Decode what `encode_indices` wrote: [count] int64. `block_counts` is empty for plain int32."""
    if not len(block_counts):
        return data.view(torch.int32)[:count].long()
    offsets = data.view(torch.int16)[:count].long() + INDEX_BLOCK // 2
    starts = torch.arange(len(block_counts), device=data.device) * INDEX_BLOCK
    return torch.repeat_interleave(starts, block_counts.to(data.device)) + offsets


def index_width(blocks: int) -> int:
    """Bytes per index."""
    return 2 if blocks else 4


def encode_values(values: Tensor, wire_dtype: str) -> Tensor:
    """[count] float32 -> [encoded_size(count, wire_dtype)] uint8"""
    if wire_dtype == "float32":
        return values.contiguous().view(torch.uint8)
    if wire_dtype in _HALF:
        half = _HALF[wire_dtype]
        limit = torch.finfo(half).max
        return values.clamp(-limit, limit).to(half).view(torch.uint8)
    groups = functional.pad(values, (0, -len(values) % _GROUP_SIZE)).view(-1, _GROUP_SIZE)  # [groups, 256]
    codes, scales = quantize_int8(groups, min_scale=torch.finfo(torch.float32).tiny)
    return torch.cat([scales.flatten().view(torch.uint8), codes.flatten()[: len(values)].view(torch.uint8)])


def decode_values(data: Tensor, count: int, wire_dtype: str) -> Tensor:
    """Decode what `encode_values` wrote: [count] float32"""
    if wire_dtype == "float32":
        return data.view(torch.float32)
    if wire_dtype in _HALF:
        return data.view(_HALF[wire_dtype]).float()
    groups = -(-count // _GROUP_SIZE)
    scales = data[: 4 * groups].clone().view(torch.float32)
    steps = data[4 * groups :].view(torch.int8).float()
    return steps * scales.repeat_interleave(_GROUP_SIZE)[:count]


def encoded_size(count: int, wire_dtype: str) -> int:
    """Bytes of `count` encoded values."""
    if wire_dtype == "int8":
        return count + 4 * -(-count // _GROUP_SIZE)
    return count * (4 if wire_dtype == "float32" else 2)


def all_reduce_values(values: Tensor, comm: Comm, wire_dtype: str) -> tuple[Tensor, Tensor]:
    """Sum [count] values over all ranks; return the sum and the rounding error that this rank must keep."""
    if wire_dtype == "float32" or not len(values):
        return comm.all_reduce(values.clone(), "values"), torch.zeros_like(values)
    count = len(values)
    chunk = -(-count // comm.world_size)
    rows = functional.pad(values, (0, chunk * comm.world_size - count)).view(comm.world_size, chunk)
    encoded = torch.stack([encode_values(row, wire_dtype) for row in rows])  # [world_size, bytes]
    error = rows - torch.stack([decode_values(row, chunk, wire_dtype) for row in encoded])
    received = comm.all_to_all(encoded, "values")
    own_sum = torch.stack([decode_values(row, chunk, wire_dtype) for row in received]).sum(dim=0)  # [chunk]
    encoded_sum = encode_values(own_sum, wire_dtype)
    error[comm.rank] += own_sum - decode_values(encoded_sum, chunk, wire_dtype)
    gathered = comm.all_gather(encoded_sum, "values")
    summed = torch.cat([decode_values(row, chunk, wire_dtype) for row in gathered])
    return summed[:count], error.flatten()[:count]
