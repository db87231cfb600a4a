"""Attention over a paged KV cache on Hopper GPUs: prefill of unquantized pages, decode of quantized ones, and of others
for few requests.

`paged.py` has the same in Triton, for all GPUs and pages; `smelt.kernels.paged` has the reference.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeGuard

import torch
from torch import Tensor

from smelt.kernels.attention_metadata import SHORT_CONTEXT, AttentionMetadata
from smelt.kernels.gpu.arch import num_sms
from smelt.kernels.gpu.nvrtc import CudaKernel, TensorMap, compile_to_cubin, encode_tensor_map, is_available
from smelt.kernels.gpu.paged import LOG2_E, NO_WINDOW, DecodeMetadata
from smelt.kernels.gpu.rope import RotaryParams
from smelt.kernels.kv_quant import INT3, KVQuantFormat

MAX_PACK = 16  # query heads of one KV head that share a tile of a prompt
DECODE_TOKENS, MAX_HEADS, MAX_GROUP = 16, 8, 8  # decode: keys per tile, KV heads per block, query heads per KV head
# With fewer requests Triton's kernel is faster, which needs no other kernel for RoPE; with long contexts not as soon.
MIN_DECODE_REQUESTS, MIN_LONG_DECODE_REQUESTS, LONG_CONTEXT = 32, 16, 8192
MIN_SPLIT, MAX_SPLITS = 64, 64  # keys of a split; splits of a request, which one block merges
FEW_THREADS = 256  # of `decode_few`
INFINITY = "__int_as_float(0x7f800000)"
_HALF_SHARED_BYTES = 113 * 1024


def supports_prefill(queries: Tensor, key_pages: Tensor) -> bool:
    """Return whether the kernel computes these pages."""
    _, block_size, _, head_dim = key_pages.shape
    power_of_two = block_size >= 8 and block_size & (block_size - 1) == 0
    return _is_hopper_half(queries) and queries.dtype == key_pages.dtype and power_of_two and head_dim in (64, 128)


def _is_hopper_half(x: Tensor) -> bool:
    half = x.is_cuda and x.dtype in (torch.bfloat16, torch.float16)
    return half and torch.cuda.get_device_capability(x.device) == (9, 0) and is_available()


@dataclass(frozen=True)
class PrefillTiles:
    """The tiles of a prefill launch."""

    warpgroups: int  # 64 rows of queries each: a row is a query head of a token
    keys: int
    stages: int  # tiles of K and V in shared memory

    def tokens(self, heads: int, kv_heads: int) -> int:
        """Return how many tokens a block computes; they share it with the query heads of a KV head."""
        return 64 * self.warpgroups // _pack(heads // kv_heads)

    def shared_bytes(self, head_dim: int) -> int:
        return 2 * head_dim * (64 * self.warpgroups + 2 * self.stages * self.keys) + 8 + 32 * self.stages


LONG, SHORT = PrefillTiles(2, 128, 2), PrefillTiles(1, 64, 2)


def _pack(group: int) -> int:
    return group if group & (group - 1) == 0 and group <= MAX_PACK else 1


def prefill(
    queries: Tensor, key_pages: Tensor, value_pages: Tensor, metadata: AttentionMetadata, tile_requests: Tensor,
    tile_first: Tensor, scale: float, window: int | None = None, tiles: PrefillTiles = LONG,
) -> Tensor:  # fmt: skip
    """Attend with many query tokens per request: [tokens, heads, head_dim] -> the same shape.

    `tile_requests` and `tile_first` are the request of each tile of queries and its first token, int32, as are all of
    the metadata.
    """
    _, heads, head_dim = queries.shape
    num_blocks, block_size, kv_heads, _ = key_pages.shape
    group = heads // kv_heads
    pack = _pack(group)
    kernel = _load_prefill(queries.dtype, head_dim, pack, block_size, tiles, queries.device)
    output = torch.empty_like(queries)
    arguments = (
        _query_map(queries, pack), _page_map(key_pages, tiles.keys), _page_map(value_pages, tiles.keys),
        _pointer(metadata.block_tables), _pointer(metadata.seq_lens), _pointer(metadata.cu_seqlens_q),
        _pointer(tile_requests), _pointer(tile_first), _pointer(output), ctypes.c_float(scale * LOG2_E),
        ctypes.c_int(window or NO_WINDOW), ctypes.c_int(metadata.block_tables.stride(0)), ctypes.c_int(num_blocks),
        ctypes.c_int(group // pack),
    )  # fmt: skip
    kernel.launch((len(tile_requests), heads // pack, 1), 128 * (tiles.warpgroups + 1), arguments, cluster=None)
    return output


def supports_decode(
    kv_quant: KVQuantFormat | None, qkv: Tensor, heads: int, kv_heads: int, block_size: int, max_seq_len: int
) -> TypeGuard[KVQuantFormat]:
    """Return whether the kernel computes, and is faster for, the queries of `qkv` [requests, ...] over such pages."""
    fewest = MIN_DECODE_REQUESTS if max_seq_len < LONG_CONTEXT else MIN_LONG_DECODE_REQUESTS
    return (
        kv_quant is not None and kv_quant.head_dim in decode_head_dims(kv_quant)
        and heads // kv_heads <= MAX_GROUP
        and (kv_heads <= MAX_HEADS or kv_heads % MAX_HEADS == 0) and block_size % DECODE_TOKENS == 0
        and len(qkv) >= fewest and _is_hopper_half(qkv)
    )  # fmt: skip


def decode_head_dims(kv_quant: KVQuantFormat) -> tuple[int, ...]:
    """Return the head_dims of the kernel; each of four lanes takes a group of 32 codes of int3, 128 in all."""
    return (128,) if kv_quant.name == INT3 else (64, 128)


def decode(
    queries: Tensor, key_pages: Tensor, value_pages: Tensor, kv_quant: KVQuantFormat, metadata: DecodeMetadata,
    scale: float, window: int | None = None, splits: int | None = None,
) -> Tensor:  # fmt: skip
    """Attend with one query token per request, whose key and value are stored: [requests, heads, head_dim] -> the same.

    Queries are rotated if the format's keys are; the output is not.
    """
    requests, heads, head_dim = queries.shape
    _, block_size, kv_heads, _ = key_pages.shape
    per_block = min(kv_heads, MAX_HEADS)
    groups = kv_heads // per_block
    if splits is None:
        most = 2 * num_sms(queries.device) // max(requests * groups, 1)
        splits = max(1, min(most, metadata.max_seq_len // MIN_SPLIT, MAX_SPLITS))
    kernel = _load_decode(kv_quant, queries.dtype, heads // kv_heads, kv_heads, block_size, queries.device)
    output = torch.empty_like(queries)
    partial = torch.empty(requests * heads * splits * head_dim, dtype=torch.float32, device=queries.device)
    stats = torch.empty(requests * heads * splits * 2, dtype=torch.float32, device=queries.device)
    arguments = (
        _pointer(queries), _pointer(key_pages), _pointer(value_pages), _pointer(metadata.block_tables),
        _pointer(metadata.slots), _pointer(metadata.seq_lens), _pointer(output), _pointer(partial), _pointer(stats),
        _pointer(metadata.split_counters), ctypes.c_float(scale * LOG2_E), ctypes.c_int(window or NO_WINDOW),
        ctypes.c_int(metadata.block_tables.stride(0)), ctypes.c_int(kv_heads),
    )  # fmt: skip
    kernel.launch((splits, requests, groups), 32 * (per_block + 1), arguments, cluster=None)
    return output


@dataclass(frozen=True)
class FewTiles:
    """The tiles of a decode launch for few requests."""

    heads: int  # query heads of a block, all of one KV head
    splits: int  # blocks of a cluster, each with a part of the keys


def supports_decode_few(
    qkv: Tensor, key_pages: Tensor, kv_quant: KVQuantFormat | None, max_seq_len: int, rotary: RotaryParams
) -> bool:
    """Return whether `decode_few` computes, and is faster for, `qkv` [requests, ...] over such pages."""
    if rotary.interleaved or 2 * rotary.half != key_pages.shape[3]:
        return False
    if rotary.qk_norms is not None and rotary.qk_norms[0].dtype != qkv.dtype:
        return False
    fast = len(qkv) == 1 and max_seq_len <= SHORT_CONTEXT
    half = qkv.dtype == key_pages.dtype and _is_hopper_half(qkv)
    return fast and half and kv_quant is None and key_pages.shape[3] in (64, 128)


def few_tiles(group: int) -> FewTiles:
    """Return the tiles for one request, tuned on an H200."""
    return FewTiles(2 if group % 2 == 0 else 1, 8)


def decode_few(
    qkv: Tensor, key_pages: Tensor, value_pages: Tensor, metadata: DecodeMetadata, rotary: RotaryParams, scale: float,
    window: int | None = None, tiles: FewTiles | None = None,
) -> Tensor:  # fmt: skip
    """Apply RoPE to `qkv` [requests, (heads + 2 * KV heads) * head_dim], store K and V, and attend.

    Returns [requests, heads * head_dim].
    """
    requests = len(qkv)
    _, block_size, kv_heads, head_dim = key_pages.shape
    heads = qkv.shape[1] // head_dim - 2 * kv_heads
    group = heads // kv_heads
    tiles = tiles or few_tiles(group)
    kernel = _load_decode_few(tiles, qkv.dtype, head_dim, group, block_size, rotary.qk_norms is not None, qkv.device)
    output = torch.empty(requests, heads * head_dim, dtype=qkv.dtype, device=qkv.device)
    query_norm, key_norm = rotary.qk_norms or (rotary.cos, rotary.cos)
    arguments = (
        *map(_pointer, (qkv, rotary.cos, rotary.sin, query_norm, key_norm, key_pages, value_pages)),
        *map(_pointer, (metadata.block_tables, metadata.slots, metadata.seq_lens, output)),
        ctypes.c_float(scale * LOG2_E), ctypes.c_float(rotary.eps), ctypes.c_int(window or NO_WINDOW),
        ctypes.c_int(qkv.stride(0)), ctypes.c_int(metadata.block_tables.stride(0)), ctypes.c_int(kv_heads),
    )  # fmt: skip
    cluster = (tiles.splits, 1, 1) if tiles.splits > 1 else None
    kernel.launch((tiles.splits, heads // tiles.heads, requests), FEW_THREADS, arguments, cluster=cluster)
    return output


@cache
def _load_decode_few(
    tiles: FewTiles, dtype: torch.dtype, head_dim: int, group: int, block_size: int, norm: bool, device: torch.device
) -> CudaKernel:
    source = decode_few_source(tiles, dtype, head_dim, group, block_size, norm)
    return CudaKernel.load(compile_to_cubin(source, "hopper_decode_few", "sm_90a"), "hopper_decode_few", device)


def decode_few_source(
    tiles: FewTiles, dtype: torch.dtype, head_dim: int, group: int, block_size: int, norm: bool
) -> str:
    bf16 = dtype == torch.bfloat16
    definitions: dict[str, object] = {
        "HEAD_DIM": head_dim, "HEADS": tiles.heads, "GROUP": group, "SPLITS": tiles.splits, "BLOCK_SIZE": block_size,
        "NORM": int(norm), "PAIR": '"bf16x2"' if bf16 else '"f16x2"', "HALF_IS_BF16": int(bf16),
    }  # fmt: skip
    return _source(definitions, _read("hopper_decode_few.cu"))


@cache
def _load_decode(
    kv_quant: KVQuantFormat, dtype: torch.dtype, group: int, kv_heads: int, block_size: int, device: torch.device
) -> CudaKernel:
    cubin = compile_to_cubin(decode_source(kv_quant, dtype, group, kv_heads, block_size), "hopper_decode", "sm_90a")
    tile, stages = _decode_stages(kv_quant, kv_heads)
    return CudaKernel.load(cubin, "hopper_decode", device, stages * (2 * tile + 16))


def _decode_stages(kv_quant: KVQuantFormat, kv_heads: int) -> tuple[int, int]:
    """Return the bytes of a tile and how many pairs of them fit, with two blocks on a multiprocessor."""
    tile = DECODE_TOKENS * min(kv_heads, MAX_HEADS) * kv_quant.row_bytes
    return tile, min(8, _HALF_SHARED_BYTES // (2 * tile + 16))


def decode_source(kv_quant: KVQuantFormat, dtype: torch.dtype, group: int, kv_heads: int, block_size: int) -> str:
    bf16 = dtype == torch.bfloat16
    definitions: dict[str, object] = {
        "INT8": 1, "FP8": 2, "INT4": 3, "INT3": 4, "FORMAT": kv_quant.name.upper(), "ROW_BYTES": kv_quant.row_bytes,
        "ROTATED": int(kv_quant.hadamard),
        "HEAD_DIM": kv_quant.head_dim, "HEADS": min(kv_heads, MAX_HEADS), "GROUP": group, "BLOCK_SIZE": block_size,
        "STAGES": _decode_stages(kv_quant, kv_heads)[1], "MIN_TILES": MIN_SPLIT // DECODE_TOKENS,
        "WHOLE": int(kv_heads <= MAX_HEADS), "PAIR": '"bf16x2"' if bf16 else '"f16x2"', "HALF_IS_BF16": int(bf16),
        "INFINITY": INFINITY,
    }  # fmt: skip
    return _source(definitions, _read("hopper_decode.cu"))


def _source(definitions: dict[str, object], kernel: str) -> str:
    lines = [f"#define {name} {value}" for name, value in definitions.items()]
    return "\n".join([*lines, _read("hopper_common.cuh"), kernel])


def _pointer(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def _query_map(queries: Tensor, pack: int) -> TensorMap:
    """Describe queries for copies of 64 rows: `pack` heads of each token."""
    tokens, heads, head_dim = queries.shape
    token, head = 2 * queries.stride(0), 2 * head_dim
    return encode_tensor_map(
        queries.data_ptr(), queries.dtype, (64, pack, tokens, head_dim // 64, heads // pack),
        (head, token, 128, pack * head), (64, pack, 64 // pack, 1, 1),
    )  # fmt: skip


def _page_map(pages: Tensor, keys: int) -> TensorMap:
    """Describe pages for copies of one head of a page, or of `keys` tokens of it."""
    blocks, block_size, kv_heads, head_dim = pages.shape
    head = 2 * head_dim
    return encode_tensor_map(
        pages.data_ptr(), pages.dtype, (64, block_size, head_dim // 64, kv_heads, blocks),
        (kv_heads * head, 128, head, block_size * kv_heads * head), (64, min(block_size, keys), 1, 1, 1),
    )  # fmt: skip


@cache
def _load_prefill(
    dtype: torch.dtype, head_dim: int, pack: int, block_size: int, tiles: PrefillTiles, device: torch.device
) -> CudaKernel:
    cubin = compile_to_cubin(prefill_source(dtype, head_dim, pack, block_size, tiles), "hopper_prefill", "sm_90a")
    return CudaKernel.load(cubin, "hopper_prefill", device, tiles.shared_bytes(head_dim))


def prefill_source(dtype: torch.dtype, head_dim: int, pack: int, block_size: int, tiles: PrefillTiles) -> str:
    definitions: dict[str, object] = {
        "WARPGROUPS": tiles.warpgroups, "KEYS": tiles.keys, "STAGES": tiles.stages, "HEAD_DIM": head_dim,
        "PACK": pack, "BLOCK_SIZE": block_size, "INFINITY": INFINITY,
        "HALF_IS_BF16": int(dtype == torch.bfloat16), "PAIR": '"bf16x2"' if dtype == torch.bfloat16 else '"f16x2"',
    }  # fmt: skip
    element = "bf16" if dtype == torch.bfloat16 else "f16"
    products = _wgmma("wgmma_scores", tiles.keys, element, False) + _wgmma("wgmma_values", head_dim, element, True)
    return _source(definitions, _read("hopper_prefill.cu").replace("@PRODUCTS@", products))


def _wgmma(name: str, columns: int, element: str, weighted: bool) -> str:
    """Return a function that adds a product [64, columns] to accumulators: of two operands in shared memory, or
    (`weighted`) of four registers with the rows of an operand in shared memory."""
    count = columns // 2
    sums = ", ".join(f"%{i}" for i in range(count))
    outputs = ", ".join(f'"+f"(sums[{i}])' for i in range(count))
    instruction = f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{element}.{element} {{{sums}}}"
    if weighted:
        registers = ", ".join(f"%{count + i}" for i in range(4))
        return (
            f"__device__ __forceinline__ void {name}(float (&sums)[{count}], const u32* a, u64 b) {{\n"
            f'    asm volatile("{instruction}, {{{registers}}}, %{count + 4}, 1, 1, 1, 1;"\n'
            f'        : {outputs} : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));\n}}\n\n'
        )
    return (
        f"__device__ __forceinline__ void {name}(float (&sums)[{count}], u64 a, u64 b, int add) {{\n"
        f'    asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{count + 2}, 0;\\n"\n'
        f'        "{instruction}, %{count}, %{count + 1}, p, 1, 1, 0, 0;\\n}}"\n'
        f'        : {outputs} : "l"(a), "l"(b), "r"(add));\n}}\n\n'
    )


@cache
def _read(name: str) -> str:
    return (Path(__file__).parent / "source" / name).read_text()
