"""The GPU architecture that kernels run on: a real GPU or Triton's interpreter."""

from __future__ import annotations

import torch
import triton
from triton.runtime.interpreter import InterpretedFunction


@triton.jit
def _empty_kernel() -> None:
    pass


PTX = not isinstance(_empty_kernel, InterpretedFunction)  # inline PTX is available
PDL = PTX and torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)  # dependent launch

# Arguments read element by element at any alignment: specializing kernels on it gains nothing.
UNALIGNED_ARGS = [
    "block_tables", "seq_len_offsets", "head_cluster", "head_column", "split_work", "slots", "seq_lens", "cu_seqlens_q",
    "tile_request", "tile_first", "positions", "slot_mapping", "token_ids",
]  # fmt: skip


def num_sms(device: torch.device) -> int:
    """Return the number of multiprocessors of a device; an arbitrary one under the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8
