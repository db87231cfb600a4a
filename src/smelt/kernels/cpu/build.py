"""Build the compiled library with the system's C++ compiler on first use, cache it, and load it.

Its file name contains a hash of the source, the compiler and the CPU, so that a stale library is never loaded. If
anything fails (no compiler, an architecture that it does not know, a cache that is not writable), there is no library
and the reference is used, as with `SMELT_COMPILE=0`.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from smelt.cache import cache_folder
from smelt.kernels.dispatch import warn_of_fallback

logger = logging.getLogger(__name__)
SOURCE = Path(__file__).parent / "source"
HIGHWAY = Path("third_party") / "highway"  # in SOURCE; the portable SIMD instructions
# Threads come from the OpenMP runtime that PyTorch has loaded: the library links none of its own, as two thread pools
# would compete for the cores.
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fopenmp", "-w")
UNITS: dict[str, tuple[str, ...]] = {"linear": (), "program": ()}  # source files, with extra flags
_COMPILE_TIMEOUT = 300  # seconds


def native_flag(architecture: str) -> str:
    """Return the compiler flag that enables every instruction of this CPU."""
    return "-mcpu=native" if architecture in ("aarch64", "arm64") else "-march=native"


NATIVE = native_flag(platform.machine())


def load_library(machine: str = NATIVE) -> ctypes.CDLL | None:
    """Return the library for this machine, compiled if not cached; None if that is not possible."""
    return load_units(UNITS, _declare, machine)


def load_units(
    units: Mapping[str, tuple[str, ...]], declare: Callable[[ctypes.CDLL], ctypes.CDLL], machine: str = NATIVE
) -> ctypes.CDLL | None:
    """Return a library of other units."""
    if os.environ.get("SMELT_COMPILE") == "0":
        return None
    try:
        return _load(ensure_compiled(machine, units), declare)
    except (OSError, subprocess.SubprocessError, AttributeError) as error:
        warn_of_fallback(f"the CPU kernels cannot be compiled or loaded, so slower ones are used ({error!s:.200})")
        return None


@lru_cache
def _load(path: Path, declare: Callable[[ctypes.CDLL], ctypes.CDLL]) -> ctypes.CDLL:
    _export_openmp()
    return declare(ctypes.CDLL(str(path)))


def ensure_compiled(machine: str = NATIVE, units: Mapping[str, tuple[str, ...]] = UNITS) -> Path:
    """Return the path of the library, compiled if necessary."""
    compiler = find_compiler()
    path = cache_folder() / "kernels" / f"smelt-{_fingerprint(SOURCE, compiler, machine, tuple(units.items()))}.so"
    if not path.is_file():  # complete if it exists, since it is created by a rename
        logger.info("compiling %s for this CPU, once", " and ".join(units))
        _compile(compiler, machine, path, units)
    status = path.stat()
    if status.st_uid not in (os.geteuid(), 0) or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"{path} could have been written by another user")
    return path


def _export_openmp() -> None:
    """Reopen PyTorch's OpenMP runtime with global symbols: on ARM, PyTorch loads it locally."""
    libraries = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if ".so" in line}
    for path in (Path(name) for name in sorted(libraries)):
        if path.name.startswith(("libgomp", "libomp", "libiomp")) and "torch" in path.parent.parts[-2:]:
            with suppress(OSError):
                ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL | os.RTLD_NOLOAD)


def find_compiler() -> str:
    """Return the path of the C++ compiler: CXX, or the first one on PATH."""
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        if name and (path := shutil.which(name)):
            return path
    raise FileNotFoundError("no C++ compiler found")


def compiler_version() -> str:
    """Return the path of the C++ compiler and the first line of its version."""
    path = find_compiler()
    return ": ".join([path, *_version(path).decode(errors="replace").splitlines()[:1]])


def _version(compiler: str) -> bytes:
    return subprocess.run([compiler, "--version"], capture_output=True, check=True, timeout=_COMPILE_TIMEOUT).stdout


@lru_cache
def _fingerprint(source: Path, compiler: str, machine: str, units: tuple[tuple[str, tuple[str, ...]], ...]) -> str:
    """Return a hash of everything that the library depends on: taken once, as the source of a process is fixed."""
    parts = [_version(compiler), " ".join((*FLAGS, machine)).encode(), str(dict(units)).encode(), cpu_features()]
    headers = sorted(source.rglob("*.h"))
    parts += [file.read_bytes() for file in (*headers, *(source / f"{name}.cpp" for name, _ in units))]
    return hashlib.sha256(b"\0".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()[:16]


def cpu_features() -> bytes:
    """Return the CPU model and its features, which `-march=native` depends on."""
    lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    keys = (b"model name", b"flags", b"CPU implementer", b"CPU part", b"Features")  # on x86, on ARM
    return b"\n".join(next((line for line in lines if line.startswith(key)), b"") for key in keys)


@lru_cache(maxsize=1)
def has_bfloat16_arithmetic() -> bool:
    """Return whether the CPU multiplies bfloat16; otherwise PyTorch emulates it, slower than float32."""
    try:
        features = set(cpu_features().split())
    except OSError:
        return False
    return not features.isdisjoint((b"avx512_bf16", b"amx_bf16", b"bf16"))


def _compile(compiler: str, machine: str, path: Path, units: Mapping[str, tuple[str, ...]]) -> None:
    """Compile to a temporary file, then rename it: processes that compile at once all see a complete file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".compiling-") as folder:
        objects, library = [Path(folder) / f"{name}.o" for name in units], Path(folder) / "smelt.so"
        include = ("-I", str(SOURCE / HIGHWAY))
        commands = [
            [compiler, *FLAGS, *flags, machine, *include, "-c", str(SOURCE / f"{name}.cpp"), "-o", str(object_file)]
            for (name, flags), object_file in zip(units.items(), objects, strict=True)
        ]
        for command in (*commands, [compiler, "-shared", *map(str, objects), "-o", str(library)]):
            subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=True, timeout=_COMPILE_TIMEOUT)
        library.chmod(0o755)
        library.replace(path)


def _declare(library: ctypes.CDLL) -> ctypes.CDLL:
    pointer, int64, int32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    library.smelt_simd_target.argtypes, library.smelt_simd_target.restype = [], ctypes.c_char_p
    library.smelt_plan_size.argtypes, library.smelt_plan_size.restype = [], int64
    library.smelt_has_int8.argtypes, library.smelt_has_int8.restype = [pointer], int32
    library.smelt_is_vectorized.argtypes, library.smelt_is_vectorized.restype = [pointer], int32
    library.smelt_has_gemm.argtypes, library.smelt_has_gemm.restype = [pointer], int32
    library.smelt_linear.argtypes, library.smelt_linear.restype = [pointer] * 3 + [int64] * 2 + [int32], None
    library.smelt_conv_plan_size.argtypes, library.smelt_conv_plan_size.restype = [], int64
    library.smelt_has_conv.argtypes, library.smelt_has_conv.restype = [pointer], int32
    library.smelt_conv.argtypes, library.smelt_conv.restype = [pointer] * 4 + [int32], None
    library.smelt_program_sizes.argtypes, library.smelt_program_sizes.restype = [int32], int64
    library.smelt_run.argtypes, library.smelt_run.restype = [pointer, int64, pointer], None
    library.smelt_attend.argtypes, library.smelt_attend.restype = [pointer, pointer, int32], None
    library.smelt_dequantize.argtypes, library.smelt_dequantize.restype = (
        [pointer] + [int64] * 2 + [pointer, int32],
        None,
    )
    return library
