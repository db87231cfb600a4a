"""Where things are kept that were fetched or made once: models, and code compiled for this machine."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """SMELT_CACHE, or `smelt` in the user's cache folder."""
    if given := os.environ.get("SMELT_CACHE"):
        return Path(given).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "smelt"
