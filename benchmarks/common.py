"""Shared by the benchmarks: the folder of real data, base models, timing, and results files."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import BertConfig, BertForSequenceClassification

from smelt.compression.checkpoint import Checkpoint
from smelt.measure.machine import machine
from smelt.models.load import load, resolve
from smelt.models.model import Model

RESULTS = Path(__file__).parent / "results"


SHARED = Path(os.environ.get("SMELT_SHARED", Path(__file__).resolve().parents[2] / "shared"))


def shared() -> Path:
    """Return the folder with real data and weights: SMELT_SHARED, or `shared` next to the checkout."""
    if not (SHARED / "data").is_dir():
        raise SystemExit("the real data is not here; set SMELT_SHARED to its folder")
    return SHARED


def minilm_sst2(device: str = "cpu") -> Model:
    """Return the bundled MiniLM with the encoder and head fine-tuned on SST-2."""
    base = load("minilm-l6")
    config = BertConfig.from_pretrained(resolve("minilm-l6"), num_labels=2)
    network = BertForSequenceClassification(config).eval()
    weights = {f"bert.{name}": tensor for name, tensor in base.network.state_dict().items()}
    tuned = load_file(shared() / "weights" / "minilm-sst2" / "encoder_and_head.safetensors")
    network.load_state_dict({**weights, **{name: tensor.float() for name, tensor in tuned.items()}})
    return Model(network.to(device), base.tokenizer, source="minilm-sst2")


def copy_bandwidth() -> float:
    """Return the GPU's bytes read and written per second by a copy of 4 GiB."""
    source = torch.empty(2**30, device="cuda").normal_()
    target = torch.empty_like(source)
    times = []
    for _ in range(10):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        target.copy_(source)
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / 1e3)
    return 2 * source.nbytes / statistics.median(times)


def graph_seconds(calls: Sequence[Callable[[], Any]], repeats: int = 20) -> float:
    """Return the median time per call in a captured CUDA graph."""
    calls[0]()
    calls[-1]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [call() for call in calls]
    graph.replay()
    times = []
    for _ in range(repeats):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / 1e3)
    del kept
    return statistics.median(times) / len(calls)


@contextmanager
def record_triton_compiles() -> Iterator[list[str]]:
    """Record the kernels that Triton compiles, or loads from its cache, inside the context."""
    from triton import knobs

    results: list[str] = []
    before = knobs.runtime.jit_post_compile_hook
    knobs.runtime.jit_post_compile_hook = lambda **event: results.append(str(event["repr"]))
    try:
        yield results
    finally:
        knobs.runtime.jit_post_compile_hook = before


class GradientCache(Checkpoint):
    """Keeps mask gradients in memory: they depend on data and seed alone, so many settings share one pass."""

    def __init__(self) -> None:
        super().__init__(None)
        self.kept: dict[str, dict[str, Tensor]] = {}

    def load(self, name: str) -> dict[str, Tensor] | None:
        return self.kept.get(name)

    def save(self, name: str, tensors: dict[str, Tensor]) -> None:
        if name.startswith("gradients"):
            self.kept[name] = tensors


def write(name: str, rows: list[dict[str, Any]], text: str, where: dict[str, Any] | None = None) -> None:
    """Write the results as JSON and as a table, with the machine and versions (default: this machine)."""
    RESULTS.mkdir(exist_ok=True)
    where = where or machine()
    content = json.dumps({"machine": where, "rows": rows}, indent=1).replace(f'"{SHARED}/', '"shared/')
    (RESULTS / f"{name}.json").write_text(content + "\n")
    facts = ", ".join(f"{key} {value}" for key, value in where.items() if value is not None)
    (RESULTS / f"{name}.md").write_text(f"{text.strip()}\n\nMachine: {facts}.\n")
    print(text)


def previous_rows(name: str, resume: bool) -> list[dict[str, Any]]:
    """Return the rows of an interrupted run to continue from; none without `resume`."""
    file = RESULTS / f"{name}.json"
    return json.loads(file.read_text())["rows"] if resume and file.exists() else []


def previous_machine(name: str) -> dict[str, Any]:
    """Return the machine of an earlier run's rows."""
    report: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())["machine"]
    return report


def table(headings: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(headings) + " |", "|" + "---|" * len(headings)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def mean(values: list[float]) -> float:
    return float(torch.tensor(values, dtype=torch.float64).mean())
