"""What the kernels may use here: a real chip or Triton's interpreter, and which chip."""

from __future__ import annotations

import torch
import triton
from triton.runtime.interpreter import InterpretedFunction


@triton.jit
def _nothing() -> None:
    pass


PTX = not isinstance(_nothing, InterpretedFunction)  # instructions written out by hand
PDL = PTX and torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)  # begin before the last ends

# Arguments that are read a number at a time and may begin anywhere: nothing is gained by a kernel for each alignment.
UNALIGNED_ARGS = [
    "tables", "shifts", "cluster", "column", "work", "slots", "lengths", "starts", "tile_request", "tile_first",
    "positions", "places", "known",
]  # fmt: skip


def num_sms(device: torch.device) -> int:
    """Multiprocessors of a device; under the interpreter there is none, and some number will do."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8
