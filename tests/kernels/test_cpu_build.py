"""The library is compiled once and installed atomically; without a compiler everything falls back to the reference."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from smelt.kernels.cpu import build, gptq_rounding
from smelt.kernels.cpu.build import ensure_compiled, find_compiler, load_library, load_units
from tests.kernels.instruction_sets import NEEDS_COMPILER as compiled
from tests.kernels.instruction_sets import has_compiler

MADE = ensure_compiled() if has_compiler() else None
STEPS = len(build.UNITS) + 1  # each unit is compiled, then all are linked
# CPUs with instructions that the machine of a test rarely has: their sources are checked, not run.
RARE_CPUS = {"x86_64": "-march=sapphirerapids", "aarch64": "-march=armv8.4-a+sve"}

PRODUCT = """
import torch
from smelt.models.quantization_scheme import QuantizationScheme
from smelt.models.quantized import QuantizedLinear
from smelt.numerics.catalog import get_format
number_format = get_format("int4/32@float16")
matrix = number_format.quantize(torch.randn(32, 64))
layer = QuantizedLinear.from_quantized(matrix, QuantizationScheme(number_format), bias=None, dtype=torch.float32)
x = torch.randn(2, 64)
assert torch.allclose(layer(x), x @ layer.weight.T, atol=1e-4)
print(layer.backend)
"""
COMPILE = "from smelt.kernels.cpu.build import ensure_compiled; ensure_compiled()"
# Fake compiler: record the call, then copy the real compiler's output.
COMPILER = """#!{python}
import shutil, sys, time
if "--version" in sys.argv:
    sys.exit(print("copy 1.0"))
with open({log!r}, "a") as log:
    log.write("called\\n")
time.sleep(0.3)
shutil.copy({library!r}, sys.argv[sys.argv.index("-o") + 1])
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty cache directory."""
    monkeypatch.setenv("SMELT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kernels"


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a fast fake compiler that records its calls."""
    script = tmp_path / "compiler"
    script.write_text(COMPILER.format(python=sys.executable, log=str(tmp_path / "calls"), library=str(MADE)))
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    return script


def calls(folder: Path) -> int:
    return (folder / "calls").read_text().count("called") if (folder / "calls").exists() else 0


@compiled
def test_a_second_process_does_not_compile(tmp_path: Path, compiler: Path, cache: Path) -> None:
    for _ in range(2):
        subprocess.run([sys.executable, "-c", COMPILE], check=True)
        assert calls(tmp_path) == STEPS
    assert load_library() is not None
    assert calls(tmp_path) == STEPS
    assert [file.suffix for file in cache.iterdir()] == [".so"]


@compiled
def test_concurrent_processes_compile_once(tmp_path: Path, compiler: Path, cache: Path) -> None:
    running = [subprocess.Popen([sys.executable, "-c", COMPILE]) for _ in range(3)]
    assert [process.wait() for process in running] == [0, 0, 0]
    assert calls(tmp_path) > STEPS  # they did compile concurrently
    assert len(list(cache.iterdir())) == 1
    assert load_library() is not None


@compiled
def test_a_changed_source_is_recompiled(tmp_path: Path, compiler: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = ensure_compiled()
    source = tmp_path / "source"
    shutil.copytree(build.SOURCE, source)
    monkeypatch.setattr(build, "SOURCE", source)
    assert ensure_compiled() == first
    seen = {first}
    for number, header in enumerate(("plan.h", build.HIGHWAY / "hwy" / "base.h")):  # a process hashes a folder once
        changed = tmp_path / f"changed-{number}"
        shutil.copytree(source, changed)
        (changed / header).write_text((source / header).read_text() + "\n")
        monkeypatch.setattr(build, "SOURCE", changed)
        seen.add(ensure_compiled())
    assert len(seen) == 3
    assert ensure_compiled("-march=x86-64") not in seen
    assert calls(tmp_path) == 4 * STEPS


@compiled
def test_a_library_is_hashed_and_loaded_once(compiler: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Later calls read no source; another compiler, cache folder or setting is still noticed."""
    first = load_library()
    assert first is not None and load_units(build.UNITS, build._declare) is first
    with monkeypatch.context() as unreadable:
        unreadable.setattr(Path, "read_bytes", lambda self: pytest.fail(f"{self} was read again"))
        assert load_library() is first
        unreadable.setenv("SMELT_COMPILE", "0")
        assert load_library() is None
    for file in cache.iterdir():
        file.rename(file.with_suffix(".gone"))
    assert load_library() is first and len(list(cache.glob("*.so"))) == 1  # compiled again
    compiler.write_text(compiler.read_text().replace("copy 1.0", "copy 2.0"))
    other = compiler.with_name("other")
    compiler.rename(other)
    monkeypatch.setenv("CXX", str(other))
    assert load_library() is not None and len(list(cache.glob("*.so"))) == 2


def test_kernels_can_be_disabled(tmp_path: Path) -> None:
    """With kernels disabled, a fresh process uses the reference, prints nothing and writes nothing."""
    environment = {**os.environ, "SMELT_COMPILE": "0", "SMELT_CACHE": str(tmp_path / "untouched")}
    outcome = subprocess.run(
        [sys.executable, "-c", PRODUCT], env=environment, capture_output=True, text=True, check=True
    )
    assert (outcome.stdout.strip(), outcome.stderr) == ("reference", "")
    assert not list(tmp_path.iterdir())


def test_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert load_library() is None


def test_a_failing_compiler(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "compiler"
    broken.write_text(f"#!{sys.executable}\nimport sys\nsys.exit('--version' not in sys.argv)\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    assert load_library() is None and load_units(gptq_rounding.UNITS, gptq_rounding._declare) is None
    assert not list(cache.iterdir())


def test_an_unwritable_cache(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file, not a folder")
    assert load_library() is None


@compiled
def test_other_architectures_are_compiled_too(compiler: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No architecture is refused before the compiler has tried, each with the flag for all of its instructions."""
    monkeypatch.setattr(build.platform, "machine", lambda: "aarch64")
    assert load_library() is not None
    assert build.native_flag("aarch64") == "-mcpu=native"
    assert build.native_flag("x86_64") == "-march=native"


@compiled
@pytest.mark.parametrize("source", sorted(path.name for path in build.SOURCE.glob("*.cpp")))
def test_the_sources_compile_for_cpus_that_are_not_here(source: str) -> None:
    """AMX code is compiled where a CPU has AMX only; an error in it leaves such a machine without any kernel."""
    machine = RARE_CPUS.get(platform.machine())
    check = [find_compiler(), *build.FLAGS, "-fsyntax-only", f"-I{build.SOURCE / build.HIGHWAY}", str(machine)]
    if machine is None or subprocess.run([*check, "-x", "c++", os.devnull], capture_output=True).returncode:
        pytest.skip("this compiler does not know the CPU")
    result = subprocess.run([*check, str(build.SOURCE / source)], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[:2000]


def test_the_sources_need_no_x86() -> None:
    """Intrinsics of one architecture stand only behind a check for them."""
    allowed = {"amx_inputs.h", "amx_tiles.h", "dense_amx.h"}  # each within `#if` for AMX
    for file in (*build.SOURCE.glob("*.h"), *build.SOURCE.glob("*.cpp")):
        text = re.sub(r"#ifdef __AVX512VNNI__.*?#endif", "", file.read_text(), flags=re.S)
        assert file.name in allowed or not re.search(r"\b_mm\w*\(|immintrin|__m\d+|arm_neon", text), file.name
    for name in allowed:
        assert "#if" in (build.SOURCE / name).read_text()


@compiled
def test_a_library_writable_by_others_is_not_loaded(compiler: Path) -> None:
    assert load_library() is not None
    ensure_compiled().chmod(0o777)
    assert load_library() is None


@compiled
def test_a_broken_library_is_not_loaded(compiler: Path) -> None:
    ensure_compiled().write_bytes(b"not a library")
    assert load_library() is None
