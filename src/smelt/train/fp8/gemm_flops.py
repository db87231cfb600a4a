"""Count the FLOPs of the GEMMs that a training step runs, by precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

_NATIVE = ("_scaled_mm", "_scaled_mm_v2")
_NATIVE_IN_BLOCKS = "blockwise_scaled_mm"  # its third argument is the second operand, [out, in]
_EMULATED = {"emulated_scaled_mm": 2, "chunked_gemm": 1}  # the argument that is the second operand, [out, in]
_ATTENTION = "_scaled_dot_product_"  # fused; PyTorch's formula has no CPU operator and no grouped queries


class GemmFlops(TorchDispatchMode):
    """Counts, while it is entered, the FLOPs of matrix products, convolutions and attention: in FP8, emulated, others.

    Operators are counted as they are dispatched, so that a layer that fell back to bf16 counts as such. What
    `torch.compile` has compiled is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fp8 = self.emulated = self.other = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        packet = func.overloadpacket
        name = packet.__name__
        if name in _NATIVE:
            self.fp8 += 2 * args[0].numel() * args[1].shape[1]
        elif name == _NATIVE_IN_BLOCKS:
            self.fp8 += 2 * args[0].numel() * len(args[2])
        elif name in _EMULATED:
            self.emulated += 2 * args[0].numel() * len(args[_EMULATED[name]])
        elif name.startswith(_ATTENTION):
            backward = "_backward" in name  # recomputes one product and adds four
            query, key = args[1:3] if backward else args[:2]
            self.other += (5 if backward else 2) * 2 * query.numel() * key.shape[-2]
        elif packet in flop_registry:
            self.other += flop_registry[packet](*args, **kwargs, out_val=out)
        return out

    def to_json(self) -> dict[str, float]:
        """Return the number of FLOPs, and the shares with FP8 operands on FP8 hardware and emulated."""
        total = self.fp8 + self.emulated + self.other
        return {"gemm_flops": total, "fp8": self.fp8 / max(total, 1), "emulated": self.emulated / max(total, 1)}


def count_gemm_flops(step: Callable[[], Any]) -> dict[str, float]:
    """Run a function in eager mode; return the FLOPs of its GEMMs and the shares of FP8."""
    with torch.compiler.set_stance("force_eager"), GemmFlops() as flops:
        step()
    return flops.to_json()
