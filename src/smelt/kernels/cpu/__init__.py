"""Linear layers with packed matrices on CPUs, compiled on first use. See `source/linear.cpp`."""

from __future__ import annotations


def register_kernels() -> None:
    """Register the kernels; there are none without a compiler."""
    from smelt.kernels.cpu.build import load_library
    from smelt.kernels.cpu.kernels import FloatLinear, Int8Linear
    from smelt.kernels.linear import register

    library = load_library()
    if library is not None:
        register(Int8Linear(library))
        register(FloatLinear(library))
