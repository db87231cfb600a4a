"""The engine on CPU: SmolLM2-135M in its own 4-bit format, beside llama.cpp, OpenVINO GenAI and transformers.

    PYTHONPATH=benchmarks python benchmarks/serve/cpu_engine.py --gguf FILE [--llama-cpp PYTHON] [--openvino PYTHON]

FILE is the bundled model's GGUF file; PYTHON are interpreters of environments with those packages. Greedy, no early
stop; one stream and sixteen, all from the same file and prompts. Nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from common import table, write

from smelt.data.default import default_documents
from smelt.models.load import load
from smelt.models.model import Model
from smelt.serve.engine.engine import Engine
from smelt.serve.engine.sampling_params import SamplingParams

PROMPT, ANSWER, STREAMS = 64, 128, (1, 16)


def main() -> None:
    options = _options()
    tokenizer = load("smollm2-135m").tokenizer
    tokens = tokenizer("\n".join(default_documents("evaluation").values()), verbose=False)["input_ids"]
    batches = [[tokens[row * 997 : row * 997 + PROMPT] for row in range(streams)] for streams in STREAMS]
    texts = [[tokenizer.decode(prompt) for prompt in batch] for batch in batches]
    job = {"batches": batches, "texts": texts, "answer": ANSWER}
    rows: list[dict[str, Any]] = []
    for turn in range(options.rounds):
        result: list[dict[str, Any]] = []
        for name, interpreter in (("llama.cpp", options.llama_cpp), ("OpenVINO GenAI", options.openvino)):
            if interpreter:
                result += _peer(name, interpreter, options, job)
        for dtype in (torch.bfloat16, torch.float32):
            result += _ours(options.gguf, batches, dtype)
        result += _ours(options.gguf, batches, torch.float32, activation_dtype="int8")
        result += _transformers(batches)
        rows += [{"round": turn, **row} for row in result]
        write(f"serve_cpu_{platform.machine()}", rows, _text(rows))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gguf", required=True)
    parser.add_argument("--rounds", type=int, default=3, help="alternating rounds over all engines")
    parser.add_argument("--llama-cpp", help="an interpreter with llama-cpp-python")
    parser.add_argument("--openvino", help="an interpreter with openvino-genai")
    return parser.parse_args()


def _row(who: str, streams: int, seconds: float, **more: Any) -> dict[str, Any]:
    return {"who": who, "streams": streams, "tokens_per_second": streams * ANSWER / seconds, **more}


def _peer(name: str, interpreter: str, options: argparse.Namespace, asked: dict[str, Any]) -> list[dict[str, Any]]:
    script = {"llama.cpp": "llamacpp_generate.py", "OpenVINO GenAI": "openvino_generate.py"}[name]
    with tempfile.TemporaryDirectory() as folder:
        prompts, result = Path(folder) / "prompts.json", Path(folder) / "result.json"
        prompts.write_text(json.dumps(asked))
        path = Path(__file__).parents[1] / "peers" / script
        subprocess.run([interpreter, path, options.gguf, prompts, result, str(os.cpu_count())], check=True)
        rows = json.loads(result.read_text())
    return [
        _row(f"{name} {rows['version']}", streams, row["seconds"], decoding=row.get("decoding"))
        for streams, row in zip(STREAMS, rows["rows"], strict=True)
    ]


def _ours(
    source: str, batches: list[list[list[int]]], dtype: torch.dtype, activation_dtype: str | None = None
) -> list[dict[str, Any]]:
    model = load(source, packed=True, dtype=dtype)
    limits: dict[str, Any] = {"max_model_len": 1024, "max_num_seqs": max(STREAMS)}
    engine = Engine(model, **limits, enable_prefix_caching=False, activation_dtype=activation_dtype)
    assert engine.runner.backend == "compiled-cpu", engine.runner.backend
    rows = []
    for batch in batches:
        _generate(engine, batch, 4)
        seconds, decoding = _generate(engine, batch, ANSWER)
        name = f"Smelt, activations in {activation_dtype or str(dtype).removeprefix('torch.')}"
        rows.append(_row(name, len(batch), seconds, decoding=decoding, path=engine.runner.backend))
    return rows


def _generate(engine: Engine, batch: list[list[int]], answer: int) -> tuple[float, float]:
    sampling = SamplingParams(max_tokens=answer, temperature=0, ignore_eos=True)
    start = time.perf_counter()
    requests = [engine.submit(prompt, sampling)[0] for prompt in batch]
    while any(not request.output for request in requests):
        engine.step()
    decoding = time.perf_counter()
    while engine.busy:
        engine.step()
    assert all(len(request.output) == answer for request in requests)
    end = time.perf_counter()
    return end - start, end - decoding


def _transformers(batches: list[list[list[int]]]) -> list[dict[str, Any]]:
    model: Model = load("smollm2-135m")
    model.network.generation_config.eos_token_id = None
    rows = []
    for batch in batches:
        ids = torch.tensor(batch)
        settings = {"do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(ids)}
        with torch.no_grad():
            model.network.generate(ids, max_new_tokens=4, **settings)
            start = time.perf_counter()
            model.network.generate(ids, max_new_tokens=ANSWER, **settings)
        rows.append(_row("transformers, float32", len(batch), time.perf_counter() - start))
    return rows


def _text(rows: list[dict[str, Any]]) -> str:
    names = list(dict.fromkeys(row["who"] for row in rows))

    def cell(who: str, streams: int) -> str:
        matches = [row for row in rows if row["who"] == who and row["streams"] == streams]
        if not matches:
            return ""
        middle = statistics.median(row["tokens_per_second"] for row in matches)
        decoding = [streams * (ANSWER - 1) / row["decoding"] for row in matches if row.get("decoding")]
        more = f" ({statistics.median(decoding):.0f})" if decoding else ""
        return f"{middle:.0f}{more}"

    cells = [[name, *(cell(name, streams) for streams in STREAMS)] for name in names]
    return (
        "# The engine on CPU: SmolLM2-135M in its own 4-bit format\n\n"
        f"Tokens generated per second, prompts of {PROMPT} tokens included (in parentheses: decode only), medians "
        f"of {1 + max(row['round'] for row in rows)} alternating rounds; {ANSWER} "
        "tokens per answer, greedy, the same GGUF file (Q4_1, head Q8_0) and prompts for all; transformers from the "
        "same weights in float32. llama.cpp and OpenVINO quantize the inputs of quantized layers to int8 (per block of "
        "32 and per group), Smelt with `activation_dtype` int8 (per token).\n\n"
        + table(["", *(f"{streams} streams" for streams in STREAMS)], cells)
    )


if __name__ == "__main__":
    main()
