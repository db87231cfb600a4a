"""Families that differ from Llama in the GPU runner: transformers' log-probabilities and tokens.

On a CUDA device with CUDA graphs, elsewhere under Triton's interpreter.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.kernels.triton_device import DEVICE  # isort: skip  (before anything imports Triton)

from smelt.models.load import load
from smelt.runtime.gpu_experts import unsupported_reason
from smelt.serve.engine.engine import Engine
from smelt.serve.engine.sampling_params import SamplingParams
from tests.architectures import ARCHITECTURES
from tests.serve.gpu_runner import small_tiles  # noqa: F401  (a fixture)

_PROMPTS = [[(7 * i + 3) % 80 + 5 for i in range(19)], [(5 * i + 11) % 80 + 5 for i in range(9)]]


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
