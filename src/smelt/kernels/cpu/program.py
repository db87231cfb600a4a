"""A network as a list of operations for the compiled code: the same structures as in `source/program.cpp`.

A program points into tensors and keeps them alive. Buffers are sized for the largest step.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from smelt.kernels.attention_metadata import AttentionMetadata, LayerKVPages
from smelt.kernels.cpu.operator import MAX_GEMV_TOKENS, MAX_INT8_GEMV_TOKENS
from smelt.kernels.cpu.plan import DTYPE_CODES, FLOAT_INPUTS, LinearPlan
from smelt.kernels.gated_activation import GatedActivation
from smelt.kernels.kv_quant import FP8, INT3, INT4, INT8, KVQuantFormat

EMBED, ADD_RMS_NORM, PACKED_LINEAR, DENSE_LINEAR, RMS_NORM, ROPE = range(6)
HADAMARD, STORE_KV, ATTENTION, ACT_AND_MUL, GATHER_ROWS, EXPERTS = range(6, 12)
_ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "swiglu_oai": 2}
ROW_TYPES = {INT8: 16, FP8: 17, INT4: 18, INT3: 19}  # page types of quantized rows
LOGITS_TOKENS_ONLY = -1  # in `count`: the operation runs only on tokens that need logits
_pointer, _long, _int, _float = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float


class Operation(ctypes.Structure):
    _fields_ = [
        ("op_type", _int),
        ("dtype", _int),
        *((name, _pointer) for name in ("params", "x", "other", "weight", "y")),
        *((name, _long) for name in ("width", "x_stride", "count")),
        ("epsilon", _float),
        ("scale", _float),
        ("weight_type", _int),
    ]


class RotaryStruct(ctypes.Structure):
    _fields_ = [("cosines", _pointer), ("sines", _pointer), ("rotary_dim", _long), ("interleaved", _long)]


class ExpertsStruct(ctypes.Structure):
    _fields_ = [
        *((name, _long) for name in ("count", "top_k", "normalize")),
        *((name, _pointer) for name in ("first_operation", "operations", "router_logits", "inputs", "outputs")),
    ]


class _Metadata(ctypes.Structure):
    _fields_ = [
        ("requests", _long),
        *((name, _pointer) for name in ("cu_seqlens_q", "seq_lens", "block_tables")),
        ("table_stride", _long),
        *((name, _pointer) for name in ("request_slots", "seq_len_offsets")),
        *((name, _long) for name in ("cluster_stride", "offset_stride")),
    ]


class _Step(ctypes.Structure):
    _fields_ = [
        ("tokens", _long),
        ("num_logits", _long),
        *((name, _pointer) for name in ("ids", "positions", "slot_mapping", "rows")),
        ("metadata", _Metadata),
        ("threads", _int),
    ]


class DenseMatrix(ctypes.Structure):
    _fields_ = [
        ("rows", _long),
        ("columns", _long),
        *((name, _int) for name in ("weight_type", "bias_type", "x_type", "y_type")),
        ("weight", _pointer),
        ("bias", _pointer),
    ]


class AttentionStruct(ctypes.Structure):
    _fields_ = [
        *((name, _long) for name in ("heads", "kv_heads", "head_dim", "block_size", "query_stride", "window")),
        ("scale", _float),
        *((name, _int) for name in ("dtype", "page_type")),
        *((name, _pointer) for name in ("queries", "key_pages", "value_pages", "results")),
        *((name, _pointer) for name in ("head_cluster", "head_column")),
        ("heads_per_page", _long),
        *((name, _long) for name in ("half_dim", "row_bytes")),
        ("sinks", _pointer),
    ]


def can_run(library: Any) -> bool:
    """Return whether the library supports programs on this machine, with the same struct layout."""
    structs = (Operation, _Step, DenseMatrix, AttentionStruct, RotaryStruct, ExpertsStruct)
    return all(library.smelt_program_sizes(index) == ctypes.sizeof(struct) for index, struct in enumerate(structs))


class Program:
    """A sequence of operations and the objects they point to."""

    def __init__(self, library: Any) -> None:
        self.library = library
        self._operations: list[Operation] = []
        self._alive: list[Any] = []
        self._array: Any = None

    def add(self, op_type: int, **fields: Any) -> None:
        """Append an operation. Tensors and structures become pointers, torch dtypes their codes."""
        converted = {name: self._to_field(value) for name, value in fields.items()}
        self._operations.append(Operation(op_type=op_type, **converted))

    @contextmanager
    def collect(self) -> Iterator[list[Operation]]:
        """Inside, append operations to a list of their own, for `experts`."""
        outer, self._operations = self._operations, []
        try:
            yield self._operations
        finally:
            self._operations = outer

    def experts(self, operations: list[list[Operation]], fields: dict[str, Any], **op_fields: Any) -> None:
        """Append a mixture: the operations of each expert, and the other fields of `ExpertsStruct`."""
        ends = itertools.accumulate((len(each) for each in operations), initial=0)
        flat = [operation for each in operations for operation in each]
        params = ExpertsStruct(
            count=len(operations),
            first_operation=self._to_field(torch.tensor(list(ends), dtype=torch.int64)),
            operations=self._to_field((Operation * len(flat))(*flat)),
            **{name: self._to_field(value) for name, value in fields.items()},
        )
        self.add(EXPERTS, params=params, **op_fields)

    def act_and_mul(
        self, activation: GatedActivation, gate: Tensor, up: Tensor, stride: int, y: Tensor, width: int
    ) -> None:
        """Append activation(gate) * up; gate and up have `stride` values from token to token."""
        self.add(
            ACT_AND_MUL, x=gate, other=up, y=y, dtype=y.dtype, x_stride=stride, width=width,
            count=_ACTIVATIONS[activation.name], scale=activation.alpha, epsilon=activation.limit,
        )  # fmt: skip

    def keep_alive(self, owner: Any) -> None:
        """Keep an object alive that operations point into."""
        self._alive.append(owner)

    def packed(self, plan: LinearPlan, x: Tensor, y: Tensor, count: int = 0) -> None:
        """Append a product of x with a packed matrix."""
        max_gemv_tokens = MAX_GEMV_TOKENS if plan.inputs == FLOAT_INPUTS else MAX_INT8_GEMV_TOKENS
        self.add(PACKED_LINEAR, params=plan, x=x, y=y, width=max_gemv_tokens, count=count)

    def dense(self, weight: Tensor, bias: Tensor | None, x: Tensor, y: Tensor, count: int = 0) -> None:
        matrix = DenseMatrix(
            rows=weight.shape[0], columns=weight.shape[1],
            weight=self._to_field(weight), weight_type=DTYPE_CODES[weight.dtype],
            bias_type=0 if bias is None else DTYPE_CODES[bias.dtype],
            bias=None if bias is None else self._to_field(bias),
            x_type=DTYPE_CODES[x.dtype], y_type=DTYPE_CODES[y.dtype],
        )  # fmt: skip
        self.add(DENSE_LINEAR, params=matrix, x=x, y=y, count=count)

    def attention(
        self, queries: Tensor, stride: int, pages: LayerKVPages, results: Tensor, *, heads: int, scale: float,
        window: int | None, sinks: Tensor | None = None,
    ) -> AttentionStruct:  # fmt: skip
        """Return the `params` of an attention operation, and of the operations that write to its pages."""
        _, block_size, _, head_dim = pages.keys.shape
        page_fields: dict[str, Any] = _page_fields(pages.keys, pages.kv_quant)
        if pages.head_cluster is not None and pages.head_column is not None:
            page_fields |= {
                "head_cluster": self._to_field(pages.head_cluster),
                "head_column": self._to_field(pages.head_column),
            }
            page_fields |= {"heads_per_page": pages.heads_per_page}
        if sinks is not None:
            page_fields["sinks"] = self._to_field(sinks)
        return AttentionStruct(
            heads=heads, kv_heads=pages.num_kv_heads,
            head_dim=head_dim if pages.kv_quant is None else pages.kv_quant.head_dim, block_size=block_size,
            query_stride=stride, window=window or 0, scale=scale, dtype=DTYPE_CODES[queries.dtype],
            queries=self._to_field(queries), key_pages=self._to_field(pages.keys),
            value_pages=self._to_field(pages.values), results=self._to_field(results), **page_fields,
        )  # fmt: skip

    def run(self, ids: Tensor, positions: Tensor, rows: Tensor, metadata: AttentionMetadata) -> None:
        """Run one step with all of its tokens; `rows` are the tokens that need logits."""
        if self._array is None or len(self._array) != len(self._operations):
            self._array = (Operation * len(self._operations))(*self._operations)
        step = _Step(
            tokens=ids.numel(), num_logits=rows.numel(), ids=ids.data_ptr(), positions=positions.data_ptr(),
            slot_mapping=metadata.slot_mapping.data_ptr(), rows=rows.data_ptr(), metadata=_metadata_struct(metadata),
            threads=torch.get_num_threads(),
        )  # fmt: skip
        self.library.smelt_run(ctypes.addressof(self._array), len(self._array), ctypes.addressof(step))

    def _to_field(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            self._alive.append(value)
            return value.data_ptr()
        if isinstance(value, ctypes.Structure | ctypes.Array):
            self._alive.append(value)
            return ctypes.addressof(value)
        return DTYPE_CODES[value] if isinstance(value, torch.dtype) else value


def attention(
    library: Any, queries: Tensor, key_pages: Tensor, value_pages: Tensor, metadata: AttentionMetadata, scale: float,
    window: int | None = None, kv_quant: KVQuantFormat | None = None, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Compute `smelt.kernels.paged.paged_attention_reference` with the compiled code."""
    tokens, heads, head_dim = queries.shape
    queries = queries.contiguous()
    results = torch.empty_like(queries)
    params = AttentionStruct(
        heads=heads, kv_heads=key_pages.shape[2], head_dim=head_dim, block_size=key_pages.shape[1],
        query_stride=heads * head_dim,
        window=window or 0, scale=scale, dtype=DTYPE_CODES[queries.dtype], queries=queries.data_ptr(),
        key_pages=key_pages.data_ptr(), value_pages=value_pages.data_ptr(), results=results.data_ptr(),
        sinks=None if sinks is None else sinks.data_ptr(), **_page_fields(key_pages, kv_quant),
    )  # fmt: skip
    threads = torch.get_num_threads() if tokens * heads * metadata.max_seq_len > 1 << 12 else 1
    struct = _metadata_struct(metadata)
    library.smelt_attend(ctypes.addressof(params), ctypes.addressof(struct), threads)
    return results if kv_quant is None else kv_quant.unrotate(results)


def _page_fields(pages: Tensor, kv_quant: KVQuantFormat | None) -> dict[str, int]:
    if kv_quant is None:
        return {"page_type": DTYPE_CODES[pages.dtype]}
    return {"page_type": ROW_TYPES[kv_quant.name], "half_dim": kv_quant.half_dim, "row_bytes": kv_quant.row_bytes}


def _metadata_struct(metadata: AttentionMetadata) -> _Metadata:
    cluster_fields = {}
    if metadata.request_slots is not None and metadata.seq_len_offsets is not None:
        cluster_fields = {
            "request_slots": metadata.request_slots.data_ptr(),
            "seq_len_offsets": metadata.seq_len_offsets.data_ptr(),
            "cluster_stride": metadata.block_tables.stride(1), "offset_stride": metadata.seq_len_offsets.stride(0),
        }  # fmt: skip
    return _Metadata(
        requests=len(metadata.seq_lens), cu_seqlens_q=metadata.cu_seqlens_q.data_ptr(),
        seq_lens=metadata.seq_lens.data_ptr(), block_tables=metadata.block_tables.data_ptr(),
        table_stride=metadata.block_tables.stride(0), **cluster_fields,
    )  # fmt: skip
