"""`smelt compress` with `alignment: measured` and a kernel that is slow for odd widths on purpose."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from smelt.compression.pruning import alignment
from smelt.kernels.cpu.build import load_library
from smelt.kernels.cpu.program import Program
from smelt.models.load import load
from smelt.serve.engine import layer_timing
from smelt.serve.engine.layer_timing import LayerTimer
from tests.cli.conftest import Done, Place, Smelt

TRACE = '{"prompt_tokens": 8, "output_tokens": 4}\n'
REPEATS = 300  # of the product in the slow kernel
FAST = 16  # widths in multiples of this are not slow
PRUNING = {"method": "magnitude", "budget": {"parameters": 0.8}, "head_multiple": 1, "max_sparsity": 1.0}
needs_library = pytest.mark.skipif(load_library() is None, reason="needs the compiled CPU kernels")


def compress(smelt: Smelt, place: Place, out: Path, *, model: str = "llama", **settings: Any) -> Done:
    trace = place.folder / "trace.jsonl"
    trace.write_text(TRACE)
    content = {
        "evaluate": {"source": place / "text.txt", "context": 64, "limit": 1500},
        "steps": [{**PRUNING, **settings}],
    }
    recipe = place.recipe("aligned.yaml", content)
    return smelt("compress", place / model, "-r", recipe, "-o", str(out), "--workload", str(trace), "--no-speed")


@pytest.fixture
def slow_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Repeat the product of odd shapes in the compiled program; with a wide tolerance the clock cannot matter."""
    dense = Program.dense

    def slow(self: Program, weight: Any, *arguments: Any, **more: Any) -> None:
        for _ in range(REPEATS if any(size % FAST for size in weight.shape) else 1):
            dense(self, weight, *arguments, **more)

    monkeypatch.setattr(Program, "dense", slow)
    monkeypatch.setattr(alignment, "TOLERANCE", 20.0)
    monkeypatch.setattr(alignment, "ALIGNED_FROM", 1)
    monkeypatch.setattr(layer_timing, "MAX_COPIES", 2)
    monkeypatch.setattr(layer_timing, "MIN_SECONDS", 0.0)


@needs_library
def test_the_multiple_of_a_slow_kernel_is_found_and_written(
    place: Place, smelt_here: Smelt, quick: None, slow_kernel: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    done = compress(smelt_here, place, tmp_path / "measured", alignment="measured")
    assert done.code == 0, done
    assert f"widths in multiples of {FAST}, measured on" in done.err + done.out
    described = json.loads((tmp_path / "measured" / "smelt.json").read_text())
    step = described["history"][0]
    assert step["alignment"] == step["measured_alignment"]["multiple"] == FAST
    (times,) = step["measured_alignment"]["microseconds"].values()
    slow, fast = ([time for width, time in times.items() if bool(int(width) % FAST) is odd] for odd in (True, False))
    assert min(slow) > 3 * max(fast)
    parts = load(tmp_path / "measured").anatomy.parts
    assert all(part.units % FAST == 0 for part in parts if part.kind == "ffn_channels")

    def refuse(self: LayerTimer, specs: object) -> list[float]:
        raise AssertionError("widths were timed again")

    monkeypatch.setattr(LayerTimer, "mean_seconds", refuse)
    repeated = smelt_here("verify", str(tmp_path / "measured"), "--reproduce")
    assert repeated.code == 0, repeated
    assert compress(smelt_here, place, tmp_path / "given", alignment=FAST).code == 0
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("measured", "given")]
    assert files[0] == files[1]


def test_what_cannot_be_measured_is_one_sentence(place: Place, smelt_here: Smelt, quick: None, tmp_path: Path) -> None:
    out = tmp_path / "out"
    compress(smelt_here, place, out, alignment="fast").refused(
        "alignment of magnitude must be one of measured, not 'fast'"
    )
    compress(smelt_here, place, out, model="bert", alignment="measured").refused("no language model; give a number")
    assert not list(tmp_path.iterdir())
