"""Start Python subprocesses that import only installed code, never a file from the working directory."""

from __future__ import annotations

import os
import site
import sys
from pathlib import Path

_PACKAGE_PARENT = Path(__file__).resolve().parents[1]


def python_command(*arguments: str) -> list[str]:
    """Return the command line for `python *arguments`, e.g. `python_command("-m", "smelt.models.verify", folder)`.

    `-P` keeps the working directory off `sys.path`. Plain `python -m` puts it first, so a downloaded model folder that
    contains a file such as `safetensors.py` would run that file.
    """
    return [sys.executable, "-P", *arguments]


def python_environment() -> dict[str, str]:
    """Return a copy of the environment in which Python and its subprocesses import nothing from the working directory.

    Empty and relative entries of PYTHONPATH mean the working directory and are dropped. The folder of this package is
    added unless it is in site-packages, so that a source checkout works in the subprocess too.
    """
    environment = dict(os.environ)
    paths = [path for path in environment.pop("PYTHONPATH", "").split(os.pathsep) if Path(path).is_absolute()]
    if not _is_site_packages(_PACKAGE_PARENT) and str(_PACKAGE_PARENT) not in paths:
        paths.append(str(_PACKAGE_PARENT))
    if paths:
        environment["PYTHONPATH"] = os.pathsep.join(paths)
    environment["PYTHONSAFEPATH"] = "1"
    return environment


def _is_site_packages(folder: Path) -> bool:
    installed = [*site.getsitepackages(), site.getusersitepackages()]
    return any(Path(path).resolve() == folder for path in installed)
