"""Networks that share attention maps in the GPU runner: transformers' log-probabilities.

On a CUDA device with CUDA graphs, elsewhere under Triton's interpreter.
"""

from __future__ import annotations

import copy

import pytest
import torch

from tests.kernels.triton_device import DEVICE  # isort: skip  (before anything imports Triton)

from smelt.models.model import Model
from smelt.serve.engine.engine import Engine
from smelt.serve.engine.sampling_params import SamplingParams
from tests.character_tokenizer import character_tokenizer
from tests.serve.gpu_runner import small_tiles  # noqa: F401  (a fixture)
from tests.serve.test_attention_reuse import deep_llama, shared
from tests.tiny import BUILDS

_PROMPTS = [[(7 * i + 3) % 25 for i in range(19)], [(5 * i + 11) % 25 for i in range(9)]]


def check(model: Model, tolerance: float = 1e-3, kv_cache_dtype: str | None = None) -> None:
    """Compare two prompts at once and in chunks, then one from the prefix cache, whose steps have one token."""
    network = copy.deepcopy(model.network)
    model = Model(model.network.to(DEVICE), character_tokenizer())
    engine = Engine(
        model, max_model_len=64, max_num_seqs=4, block_size=4, prefill_chunk_size=12, max_num_batched_tokens=32,
        kv_cache_dtype=kv_cache_dtype,
    )  # fmt: skip
    assert engine.runner.backend.startswith("fused-gpu")
    sampling = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True, logprobs=8)
    answers = [*engine.generate(_PROMPTS, sampling), *engine.generate(_PROMPTS[:1], sampling)]
    for prompt, answer in zip([*_PROMPTS, _PROMPTS[0]], answers, strict=True):
        with torch.no_grad():
            ids = torch.tensor([prompt + answer.tokens])
            expected = network(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
        for row, step in zip(expected, answer.logprobs, strict=True):
            for token, logprob in step.top:
                assert logprob == pytest.approx(float(row[token]), abs=tolerance)


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3"])
def test_log_probabilities_match_transformers(name: str) -> None:
    check(shared(BUILDS[name]()))


def test_interleaved_groups() -> None:
    """Each layer has the queries of its own leader, also if another leader has run in between."""
    check(shared(deep_llama(), {2: 0, 3: 1, 5: 4}))


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "int4"])
def test_keys_that_are_stored_again_are_the_same_quantized(kv_cache_dtype: str) -> None:
    check(shared(deep_llama(), {1: 0, 3: 2}), 0.5 if kv_cache_dtype == "int4" else 0.1, kv_cache_dtype)
