"""Compile CUDA C++ at run time with NVRTC, which comes with PyTorch, and launch it through the CUDA driver.

Triton cannot feed dequantized registers to Hopper's matrix instructions; CUDA C++ can. Machine code is cached on disk,
by a hash of the source and the compiler's version.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from smelt.cache import cache_folder

_CLUSTER_DIMENSION, _PROGRAMMATIC_SERIALIZATION = 4, 6  # CUlaunchAttributeID
_MAX_DYNAMIC_SHARED_SIZE = 8  # CUfunction_attribute


class CudaError(RuntimeError):
    """A call of the CUDA driver or of NVRTC failed."""


def compile_to_cubin(source: str, name: str, architecture: str) -> bytes:
    """Compile CUDA C++ to machine code for an architecture such as `sm_90a`; CudaError has the compiler's log."""
    nvrtc = _nvrtc()
    fingerprint = hashlib.sha256(f"{_version(nvrtc)}{architecture}{source}".encode()).hexdigest()
    cached = cache_folder() / "cuda" / f"{fingerprint}.cubin"
    if cached.is_file():
        return cached.read_bytes()
    cubin, _ = _compile(nvrtc, source, name, architecture)
    _write_atomically(cached, cubin)
    return cubin


def compiler_report(source: str, name: str, architecture: str) -> str:
    """Compile without the cache; return what ptxas says about registers and spills, with all warnings."""
    return _compile(_nvrtc(), source, name, architecture, "--ptxas-options=-v")[1]


def _compile(nvrtc: Any, source: str, name: str, architecture: str, *more: str) -> tuple[bytes, str]:
    """Return machine code and the compiler's log."""
    program = ctypes.c_void_p()
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), f"{name}.cu".encode(), 0, None, None)
    options = [
        text.encode() for text in (f"--gpu-architecture={architecture}", "--std=c++17", "-default-device", *more)
    ]
    try:
        result = nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
        log = _fetch(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program).rstrip(b"\0").decode()
        if result != 0:
            raise CudaError(f"The kernel {name} cannot be compiled for {architecture}: {log}")
        return _fetch(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program), log
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _fetch(get_size: Any, get: Any, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    get_size(program, ctypes.byref(size))
    content = ctypes.create_string_buffer(size.value)
    get(program, content)
    return content.raw


def compile_all(sources: Iterable[str], name: str, architecture: str) -> Iterator[bytes]:
    """Compile many sources into the cache, in parallel; yield as they are done."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield from pool.map(lambda source: compile_to_cubin(source, name, architecture), sources)


@dataclass(frozen=True)
class CudaKernel:
    """A kernel that was loaded on a device, with the size of its dynamic shared memory."""

    handle: ctypes.c_void_p
    device: torch.device
    shared_bytes: int

    @classmethod
    def load(cls, cubin: bytes, name: str, device: torch.device, shared_bytes: int = 0) -> CudaKernel:
        driver, module, handle = _driver(), ctypes.c_void_p(), ctypes.c_void_p()
        with torch.cuda.device(device):
            _check(driver.cuModuleLoadData(ctypes.byref(module), cubin))
            _check(driver.cuModuleGetFunction(ctypes.byref(handle), module, name.encode()))
            _check(driver.cuFuncSetAttribute(handle, _MAX_DYNAMIC_SHARED_SIZE, shared_bytes))
        return cls(handle, device, shared_bytes)

    def launch(
        self,
        grid: tuple[int, int, int],
        threads: int,
        arguments: Sequence[Any],
        *,
        cluster: tuple[int, int, int] | None,
        dependent: bool = True,
    ) -> None:
        """Launch on the current stream of the device.

        A dependent kernel may start before the previous one ends, and must wait for it itself. Arguments are ctypes
        values, or structures passed by value.
        """
        attributes, count = (_LaunchAttribute * 2)(), 0
        if dependent:
            attributes[count].id, attributes[count].value.words[0] = _PROGRAMMATIC_SERIALIZATION, 1
            count += 1
        if cluster is not None:
            attributes[count].id, attributes[count].value.words[:3] = _CLUSTER_DIMENSION, cluster
            count += 1
        stream = torch.cuda.current_stream(self.device)
        config = _LaunchConfig(*grid, threads, 1, 1, self.shared_bytes, stream.cuda_stream)
        config.attributes, config.num_attributes = attributes, count
        pointers = (ctypes.c_void_p * len(arguments))(*[ctypes.addressof(argument) for argument in arguments])
        _check(_driver().cuLaunchKernelEx(ctypes.byref(config), self.handle, pointers, None))


class TensorMap(ctypes.Structure):
    """An opaque descriptor of a tensor for the copy engine, passed to a kernel by value."""

    _fields_ = (("words", ctypes.c_uint64 * 16),)
    _align_ = 64


def tensor_map(x: Tensor, box_rows: int, panels: int) -> TensorMap:
    """Describe x [rows, columns] for copies of `panels` panels of `box_rows` rows x 128 bytes, swizzled for wgmma; what
    lies outside reads as zero. Rows must start at multiples of 16 bytes."""
    size = x.element_size()
    width = 128 // size
    count, rest = divmod(x.shape[1], width)
    assert rest == 0
    return encode_tensor_map(
        x.data_ptr(), x.dtype, (width, x.shape[0], count), (x.stride(0) * size, 128), (width, box_rows, panels)
    )


@lru_cache(maxsize=4096)  # buffers of an engine stay where they are, and encoding takes longer than a launch
def encode_tensor_map(
    pointer: int, dtype: torch.dtype, sizes: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...]
) -> TensorMap:
    """Describe a tensor for copies of boxes, the first dimension contiguous and swizzled in 128 bytes; what lies
    outside reads as zero. `strides` are those of the other dimensions, in bytes."""
    map_, rank = TensorMap(), len(sizes)
    kind = {torch.bfloat16: 9, torch.float16: 6}.get(dtype, 0)  # CUtensorMapDataType; bytes otherwise
    swizzle_128, promote_256 = 3, 3
    _check(
        _driver().cuTensorMapEncodeTiled(
            ctypes.byref(map_), kind, rank, ctypes.c_void_p(pointer), (ctypes.c_uint64 * rank)(*sizes),
            (ctypes.c_uint64 * (rank - 1))(*strides), (ctypes.c_uint32 * rank)(*box),
            (ctypes.c_uint32 * rank)(*[1] * rank), 0, swizzle_128, promote_256, 0,
        )
    )  # fmt: skip
    return map_


class _AttributeValue(ctypes.Union):
    _fields_ = (("words", ctypes.c_uint32 * 16), ("alignment", ctypes.c_uint64))


class _LaunchAttribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("padding", ctypes.c_char * 4), ("value", _AttributeValue))


class _LaunchConfig(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_LaunchAttribute)),
        ("num_attributes", ctypes.c_uint),
    )


def _check(result: int) -> None:
    if result != 0:
        name = ctypes.c_char_p()
        _driver().cuGetErrorString(result, ctypes.byref(name))
        raise CudaError(f"The CUDA driver refused a call: {(name.value or b'unknown').decode()} ({result}).")


@cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


@cache
def is_available() -> bool:
    """Return whether NVRTC is installed."""
    try:
        _nvrtc()
    except CudaError:
        return False
    return True


@cache
def _nvrtc() -> Any:
    """Return NVRTC of PyTorch's CUDA version: loaded already, beside PyTorch, or installed in the system."""
    major = (torch.version.cuda or "12").partition(".")[0]
    site = Path(sysconfig.get_paths()["purelib"]) / "nvidia"
    candidates = [f"libnvrtc.so.{major}", *sorted(site.glob(f"*/lib/libnvrtc.so.{major}")),
                  f"/usr/local/cuda/lib64/libnvrtc.so.{major}"]  # fmt: skip
    for candidate in candidates:
        try:
            return ctypes.CDLL(str(candidate))
        except OSError:
            continue
    raise CudaError(f"NVRTC of CUDA {major} is not installed; install the package nvidia-cuda-nvrtc.")


def _version(nvrtc: Any) -> str:
    major, minor = ctypes.c_int(), ctypes.c_int()
    nvrtc.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return f"{major.value}.{minor.value}"


def _write_atomically(path: Path, content: bytes) -> None:
    """Write through a temporary file; a folder that cannot be written costs a compilation, not the run."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(content)
        Path(file.name).replace(path)
    except OSError:
        return
