"""The cache folder for downloaded models and compiled kernels."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return SMELT_CACHE, or `smelt` in the user's cache folder."""
    if folder := os.environ.get("SMELT_CACHE"):
        return Path(folder).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "smelt"
