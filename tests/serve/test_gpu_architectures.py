"""Families that differ from Llama in the GPU runner: transformers' log-probabilities and tokens.

On a CUDA device with CUDA graphs, elsewhere under Triton's interpreter.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kernels.triton_device import DEVICE  # isort: skip  (before anything imports Triton)

from smelt.kernels import linear
from smelt.kernels.gpu import grouped, launch
from smelt.kernels.gpu.linear import EightBit, WeightOnly
from smelt.models.load import load
from smelt.runtime.gpu_experts import unsupported_reason
from smelt.serve.engine import factory
from smelt.serve.engine.engine import Engine
from smelt.serve.engine.factory import paged_gpu_runner, paged_runner
from smelt.serve.engine.sampling_params import SamplingParams
from tests.architectures import ARCHITECTURES

_PROMPTS = [[(7 * i + 3) % 80 + 5 for i in range(19)], [(5 * i + 11) % 80 + 5 for i in range(9)]]


@pytest.fixture(autouse=True)
def _gpu_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    """Enable the GPU runner also without a CUDA device, with small tiles for the interpreter."""

    def select_runner(resolved: Any, num_blocks: int) -> Any:
        return (paged_gpu_runner if resolved.config.compiled else paged_runner)(resolved, num_blocks)

    monkeypatch.setattr(factory, "paged_runner", select_runner)
    if DEVICE == "cpu":
        monkeypatch.setattr(launch, "gemm_config", lambda batch, matrix, integer: (64, 16, 4, 1))
        monkeypatch.setattr(grouped, "dense_config", lambda tile_size: (64, 64, 4, 1))
        monkeypatch.setattr(linear, "_kernels", {kernel.name: kernel for kernel in (WeightOnly(), EightBit())})
        monkeypatch.setattr(linear, "_unloaded", [])


@pytest.mark.parametrize(
    ("name", "kv_cache_dtype"),
    [*((name, None) for name in ("gemma3_text", "olmo2", "granite", "phi3", "glm4", "gpt_oss")), ("gpt_oss", "int8")],
)
def test_log_probabilities_match_transformers(name: str, kv_cache_dtype: str | None, tmp_path: Path) -> None:
    """Two prompts at once and in chunks, then one alone, whose steps have one token."""
    network = ARCHITECTURES[name].save(tmp_path)
    model = load(tmp_path, device=DEVICE)
    assert unsupported_reason(model) is None
    engine = Engine(
        model, max_model_len=64, max_num_seqs=4, block_size=16, prefill_chunk_size=12, max_num_batched_tokens=32,
        enable_prefix_caching=False, kv_cache_dtype=kv_cache_dtype,
    )  # fmt: skip
    assert engine.runner.backend.startswith("fused-gpu")
    sampling = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True, logprobs=8)
    answers = [*engine.generate(_PROMPTS, sampling), *engine.generate(_PROMPTS[1:], sampling)]
    tolerance = 1e-3 if kv_cache_dtype is None else 0.1
    for prompt, answer in zip([*_PROMPTS, _PROMPTS[1]], answers, strict=True):
        with torch.no_grad():
            ids = torch.tensor([prompt + answer.tokens])
            expected = network(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
        for row, step in zip(expected, answer.logprobs, strict=True):
            for token, logprob in step.top:
                assert logprob == pytest.approx(float(row[token]), abs=tolerance)
