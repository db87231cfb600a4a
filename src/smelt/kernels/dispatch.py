"""Choose the kernel that runs an operation: by device and inputs, or the one that a caller forces.

Every operation has a plain PyTorch reference, and fast kernels that agree with it. Tests and benchmarks force a
backend with `use_backend`.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, lru_cache

logger = logging.getLogger(__name__)
REFERENCE = "reference"
CPU, GPU = "cpu-compiled", "gpu-triton"
_forced: list[str] = []


def select_backend(operation: str, backends: Iterable[tuple[str, Callable[[], bool]]]) -> str:
    """Return the first backend whose check passes, or the reference.

    A forced backend is the only one considered by operations that have it; the reference can be forced for all.
    """
    forced = forced_backend()
    if forced == REFERENCE:
        return REFERENCE
    backends = list(backends)
    if any(name == forced for name, _ in backends):
        backends = [(name, supports) for name, supports in backends if name == forced]
    for name, supports in backends:
        if supports():
            return name
    if any(name == forced for name, _ in backends):
        raise LookupError(f"The backend {forced!r} does not support this {operation}; use another one.")
    return REFERENCE


def forced_backend() -> str | None:
    """Return the backend that `use_backend` forces, if any."""
    return _forced[-1] if _forced else None


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Force a backend inside the context."""
    _forced.append(name)
    try:
        yield
    finally:
        _forced.pop()


@cache
def warn_of_fallback(sentence: str) -> None:
    """Log once per process that slower kernels are used, and why."""
    logger.warning(sentence)


@lru_cache(maxsize=1)
def has_triton() -> bool:
    """Return whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None
