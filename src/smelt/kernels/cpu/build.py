"""The compiled library: made once by the system's C++ compiler, kept in the cache, loaded by every later process.

Its name holds a hash of the source, the compiler and the processor, so that nothing stale is ever loaded. Whatever
fails (no compiler, another architecture, a cache that cannot be written) means that there is no library, and the plain
paths are taken. `SMELT_COMPILE=0` asks for that.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from smelt.cache import cache_folder

SOURCE = Path(__file__).parent / "source"
NATIVE = "-march=native"
# Threads come from the OpenMP runtime that PyTorch has loaded: the library is not linked with one of its own, since two
# pools of threads would fight for the cores.
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fopenmp", "-w")
UNITS: dict[str, tuple[str, ...]] = {"linear": (), "program": ()}  # what is compiled, with flags of its own
X86 = ("x86_64", "AMD64")
_PATIENCE = 300  # seconds for the compiler


def load_library(machine: str = NATIVE) -> ctypes.CDLL | None:
    """The library for this machine, compiled if it is not in the cache; None where that cannot be."""
    return load_units(UNITS, _declared, machine)


def load_units(
    units: Mapping[str, tuple[str, ...]], declared: Callable[[ctypes.CDLL], ctypes.CDLL], machine: str = NATIVE,
    *, portable: bool = False,
) -> ctypes.CDLL | None:  # fmt: skip
    """A library of other units, in the same manner; on any processor, if they are written for none in particular."""
    if os.environ.get("SMELT_COMPILE") == "0" or not (portable or platform.machine() in X86):
        return None
    try:
        path = ensure_compiled(machine, units)
        _show_openmp()
        return declared(ctypes.CDLL(str(path)))
    except (OSError, subprocess.SubprocessError, AttributeError):
        return None


def ensure_compiled(machine: str = NATIVE, units: Mapping[str, tuple[str, ...]] = UNITS) -> Path:
    """The library's file."""
    compiler = _compiler()
    path = cache_folder() / "kernels" / f"smelt-{_fingerprint(compiler, machine, units)}.so"
    if not path.is_file():  # it got this name by a rename, so it is whole
        _compile(compiler, machine, path, units)
    owner = path.stat()
    if owner.st_uid not in (os.geteuid(), 0) or owner.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"{path} could have been written by another user")
    return path


def _show_openmp() -> None:
    """On ARM PyTorch loads its OpenMP runtime for itself alone: what is loaded is opened once more, for all to see."""
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if ".so" in line}
    for path in (Path(name) for name in sorted(mapped)):
        if path.name.startswith(("libgomp", "libomp", "libiomp")) and "torch" in path.parent.parts[-2:]:
            with suppress(OSError):
                ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL | os.RTLD_NOLOAD)


def _compiler() -> str:
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        if name and (found := shutil.which(name)):
            return found
    raise FileNotFoundError("there is no C++ compiler")


def _fingerprint(compiler: str, machine: str, units: Mapping[str, tuple[str, ...]]) -> str:
    """Of all that the library depends on."""
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True, timeout=_PATIENCE).stdout
    parts = [version, " ".join((*FLAGS, machine)).encode(), str(units).encode(), _processor()]
    sources = (file for file in sorted(SOURCE.iterdir()) if file.suffix != ".cpp" or file.stem in units)
    parts += [file.read_bytes() for file in sources]
    return hashlib.sha256(b"\0".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()[:16]


def _processor() -> bytes:
    """The name and the abilities of the processor, which `-march=native` stands for."""
    lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    wanted = (b"model name", b"flags", b"CPU implementer", b"CPU part", b"Features")  # on x86, on ARM
    return b"\n".join(next((line for line in lines if line.startswith(word)), b"") for word in wanted)


def _compile(compiler: str, machine: str, path: Path, units: Mapping[str, tuple[str, ...]]) -> None:
    """Beside its place, then renamed: two processes that compile at once both end with a whole file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".compiling-") as folder:
        parts, made = [Path(folder) / f"{name}.o" for name in units], Path(folder) / "smelt.so"
        commands = [
            [compiler, *FLAGS, *flags, machine, "-c", str(SOURCE / f"{name}.cpp"), "-o", str(part)]
            for (name, flags), part in zip(units.items(), parts, strict=True)
        ]
        for command in (*commands, [compiler, "-shared", *map(str, parts), "-o", str(made)]):
            subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=True, timeout=_PATIENCE)
        made.chmod(0o755)
        made.replace(path)


def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    pointer, integer, whole = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    library.smelt_plan_size.argtypes, library.smelt_plan_size.restype = [], integer
    library.smelt_has_int8.argtypes, library.smelt_has_int8.restype = [pointer], whole
    library.smelt_has_gemm.argtypes, library.smelt_has_gemm.restype = [pointer], whole
    library.smelt_linear.argtypes, library.smelt_linear.restype = [pointer] * 3 + [integer] * 2 + [whole], None
    library.smelt_program_sizes.argtypes, library.smelt_program_sizes.restype = [whole], integer
    library.smelt_run.argtypes, library.smelt_run.restype = [pointer, integer, pointer], None
    library.smelt_attend.argtypes, library.smelt_attend.restype = [pointer, pointer, whole], None
    library.smelt_dequantize.argtypes, library.smelt_dequantize.restype = (
        [pointer] + [integer] * 2 + [pointer, whole],
        None,
    )
    return library
