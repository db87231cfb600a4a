"""`smelt env`: what this machine has that matters to Smelt, to choose a method or to report a bug."""

from __future__ import annotations

import importlib.util
import platform
import subprocess
from importlib import metadata
from typing import Any

from smelt.cache import cache_folder
from smelt.cli.output import JsonOption, console, table, write_json
from smelt.errors import DISTRIBUTION
from smelt.report.numbers import size

PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "triton")
# Packages behind each extra of the distribution.
EXTRAS = {
    "serve": ("fastapi", "uvicorn", "llguidance"),
    "parquet": ("pyarrow",),
    "datasets": ("datasets",),
    "images": ("PIL",),
    "audio": ("soundfile",),
    "policies": ("gymnasium",),
    "compressed-tensors": ("compressed_tensors",),
    "harness": ("lm_eval",),
    "onnx": ("onnx", "onnxruntime", "onnxscript"),
    "signing": ("cryptography",),
    "ray": ("ray",),
    "otel": ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"),
    "docs": ("mkdocs", "material"),
}
# Instruction sets that decide which kernels run and how fast.
FEATURES = (
    *("avx2", "fma", "f16c", "avx512f", "avx512_vnni", "avx512_bf16", "avx_vnni", "amx_tile", "amx_int8", "amx_bf16"),
    *("asimd", "asimddp", "asimdhp", "i8mm", "bf16", "sve", "sve2"),
)


def run(json_file: JsonOption = None) -> None:
    content = describe_environment()
    rows = [
        ["smelt", f"{content['machine']['smelt']} ({DISTRIBUTION})"],
        ["Python", content["machine"]["python"]],
        *([name, version or "not installed"] for name, version in content["packages"].items()),
        ["extras installed", ", ".join(content["extras"]) or "none"],
        ["system", content["machine"]["os"]],
        ["CPU", f"{content['machine']['cpu']}, {content['machine']['cores']} cores"],
        ["CPU features", " ".join(content["cpu_features"]) or "unknown"],
        ["memory", size(content["machine"]["memory_bytes"])],
        *([f"GPU {index}", gpu] for index, gpu in enumerate(content["gpus"])),
        *([["GPU", "none that PyTorch can use"]] if not content["gpus"] else []),
        ["C++ compiler", content["compiler"] or "none"],
        *([f"{name} kernels", state] for name, state in content["kernels"].items()),
        ["cache", content["cache"]],
    ]
    console.print(table("Environment", ["", ""], rows))
    write_json(json_file, content)


def describe_environment() -> dict[str, Any]:
    from smelt.measure.machine import machine

    return {
        "machine": machine(),
        "packages": {name: _version(name) for name in PACKAGES},
        "extras": [extra for extra, names in EXTRAS.items() if all(map(_is_installed, names))],
        "cpu_features": _cpu_features(),
        "gpus": _gpus(),
        "compiler": _compiler(),
        "kernels": {"CPU": _cpu_kernels(), "GPU": _gpu_kernels()},
        "cache": str(cache_folder()),
    }


def _is_installed(module: str) -> bool:
    """Return whether a module can be imported; it may be in a package that is not installed."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu_features() -> list[str]:
    from smelt.kernels.cpu.build import cpu_features

    try:
        known = set(cpu_features().decode(errors="replace").split())
    except OSError:  # not Linux
        return [platform.machine()]
    return [name for name in FEATURES if name in known]


def _gpus() -> list[str]:
    import torch

    if not torch.cuda.is_available():
        return []
    properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [f"{gpu.name}, sm_{gpu.major}{gpu.minor}, {size(gpu.total_memory)}" for gpu in properties]


def _compiler() -> str | None:
    from smelt.kernels.cpu.build import compiler_version

    try:
        return compiler_version()
    except (OSError, subprocess.SubprocessError):
        return None


def _cpu_kernels() -> str:
    """Load the compiled kernels, which the first call compiles."""
    from smelt.kernels.cpu.build import load_library

    library = load_library()
    if library is None:
        return "PyTorch only: the compiled ones need Linux and a C++ compiler (and not SMELT_COMPILE=0)"
    return f"compiled, {library.smelt_simd_target().decode()}"


def _gpu_kernels() -> str:
    import torch

    from smelt.kernels.dispatch import has_triton

    if not torch.cuda.is_available():
        return "none without a GPU"
    if not has_triton():
        return "PyTorch only: Triton is not installed"
    hopper = torch.cuda.get_device_capability() >= (9, 0)
    return "Triton and CUDA C++ (Hopper)" if hopper else "Triton"
