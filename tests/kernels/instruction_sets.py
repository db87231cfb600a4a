"""Instruction sets that this CPU can run: the compiled library is tested with each of them, by compiler flag.

Tests are skipped where there is no compiler, not where one cannot compile the kernels: that is a bug.
"""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import pytest

from smelt.kernels.cpu.build import NATIVE, find_compiler, load_library

AVX2 = frozenset({"avx2", "bmi1", "bmi2", "f16c", "fma"})
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
# The SIMD target that the library reports, and the CPU features that it needs.
X86: dict[str, tuple[str, frozenset[str]]] = {
    "-march=haswell": ("AVX2", AVX2),
    "-march=skylake-avx512": ("AVX3", AVX512),
    "-march=x86-64": ("SSE2", frozenset()),
}
ARM: dict[str, tuple[str, frozenset[str]]] = {
    "-march=armv8-a": ("NEON_WITHOUT_AES", frozenset({"asimd"})),
    "-march=armv8.2-a+dotprod": ("NEON_WITHOUT_AES", frozenset({"asimddp"})),
}
TARGETS = X86 if platform.machine() == "x86_64" else ARM if platform.machine() == "aarch64" else {}


def cpu_features() -> set[str]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return set(next((line for line in lines if line.startswith(("flags", "Features"))), "").split())


def runs_here(machine: str) -> bool:
    return TARGETS[machine][1] <= cpu_features()


def has_compiler() -> bool:
    try:
        return bool(find_compiler())
    except FileNotFoundError:
        return False


LIBRARY = load_library()
NEEDS_COMPILER = pytest.mark.skipif(not has_compiler(), reason="needs a C++ compiler")
MACHINES = (NATIVE, *(machine for machine in TARGETS if runs_here(machine)))


def library_for(machine: str) -> Any:
    """Return the library for a compiler flag; with a compiler, there always is one."""
    library = LIBRARY if machine == NATIVE else load_library(machine)
    assert library is not None, machine
    return library
