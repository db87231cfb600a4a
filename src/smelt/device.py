"""Choose the device of `auto` without importing torch, which takes seconds and which a server process does without."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
from functools import cache
from pathlib import Path


def resolve_device(name: str) -> str:
    """Replace `auto` by cuda if there is a GPU that the installed torch can use, else by cpu."""
    return name if name != "auto" else "cuda" if has_gpu() else "cpu"


@cache
def has_gpu() -> bool:
    return _torch_has_cuda() and _visible() and _count_gpus() > 0


def _torch_has_cuda() -> bool:
    """Return whether torch was built for CUDA, as its version file says."""
    found = importlib.util.find_spec("torch")
    folders = [] if found is None else found.submodule_search_locations or []
    files = [path for folder in folders if (path := Path(folder) / "version.py").is_file()]
    return any(re.search(r"^cuda\b[^=]*=\s*['\"]\d", file.read_text(), re.MULTILINE) for file in files)


def _visible() -> bool:
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() not in ("", "-1")


def _count_gpus() -> int:
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
        count = ctypes.c_uint(0)
        if library.nvmlInit_v2() != 0 or library.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
            return 0
        library.nvmlShutdown()
    except (OSError, AttributeError):
        return 0
    return count.value
