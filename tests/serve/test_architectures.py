"""Language models of many families: what the engine computes, compiled or not, equals what transformers computes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from smelt.errors import ModelError
from smelt.kernels.attention_metadata import AttentionMetadata, AttentionVariant
from smelt.kernels.paged import paged_attention
from smelt.models.load import load
from smelt.serve.engine.attention import unpaged_reason
from smelt.serve.engine.engine import Engine
from smelt.serve.engine.sampling_params import SamplingParams
from tests.architectures import ARCHITECTURES, VOCABULARY, Architecture

_PROMPTS = [[(7 * i + 3) % 80 + 5 for i in range(41)], [(5 * i + 11) % 80 + 5 for i in range(18)]]
_NEW_TOKENS = 8
_OWN_CACHE = "eager, cache of the network's own"
# Norms with an offset, norms around or only behind the parts, multipliers, fused projections, RoPE of a part of a head
# or of neighbors, sinks with windows, experts; then soft-capping, latent attention, chunks, parallel blocks, a
# vision-language model and a type without a row; then layers with a state, ALiBi, and a type without a row that cannot
# be paged.
_COMPILED = [
    *("gemma", "gemma3_text", "olmo2", "olmo3", "granite", "phi3", "glm", "glm4", "gpt_oss", "olmoe", "mixtral"),
    *("seed_oss", "ministral", "ernie4_5", "helium"),
]
_EAGER = ["gemma2", "deepseek_v2", "deepseek_v3", "llama4_text", "cohere2", "llava", "apertus"]
_BACKENDS = {
    **dict.fromkeys(_COMPILED, "compiled-cpu"),
    **dict.fromkeys(_EAGER, "eager"),
    **dict.fromkeys(["lfm2", "mamba2", "bloom", "codegen", "all_attention"], _OWN_CACHE),
}


@pytest.mark.parametrize("name", _BACKENDS)
def test_logits_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    """Two requests at once, with prompts in chunks and longer than windows and chunks of attention: every logit of
    every step equals that of the network without a cache."""
    network = ARCHITECTURES[name].save(tmp_path)
    engine = Engine(load(tmp_path), max_model_len=64, max_num_batched_tokens=16)
    assert engine.runner.backend == _BACKENDS[name]
    sampling = SamplingParams(max_tokens=_NEW_TOKENS, temperature=0, ignore_eos=True, logprobs=20)
    for prompt, answer in zip(_PROMPTS, engine.generate(_PROMPTS, sampling), strict=True):
        assert len(answer.tokens) == _NEW_TOKENS
        with torch.no_grad():
            ids = torch.tensor([prompt + answer.tokens])
            expected = network(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
        assert answer.tokens == expected.argmax(-1).tolist()
        for row, step in zip(expected, answer.logprobs, strict=True):
            for token, logprob in step.top:
                assert logprob == pytest.approx(float(row[token]), abs=2e-4)


@pytest.mark.parametrize(("max_model_len", "tokens"), [(64, 50), (128, 80)])
def test_rope_for_long_contexts(max_model_len: int, tokens: int, tmp_path: Path) -> None:
    """The length that the engine allows decides between the factors of short and of long contexts."""
    factors = {"short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7], "long_factor": [2.0 + i for i in range(8)]}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64, **factors}
    fields = {"original_max_position_embeddings": 64, "rope_parameters": rope}
    network = Architecture("phi3", fields=fields).save(tmp_path)
    engine = Engine(load(tmp_path), max_model_len=max_model_len)
    assert engine.runner.backend == "compiled-cpu"
    prompt = [(7 * i + 3) % 80 + 5 for i in range(tokens)]
    sampling = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True, logprobs=20)
    (answer,) = engine.generate([prompt], sampling)
    with torch.no_grad():
        expected = network(input_ids=torch.tensor([prompt]), use_cache=False).logits[0, -1].log_softmax(-1)
    for token, logprob in answer.logprobs[0].top:
        assert logprob == pytest.approx(float(expected[token]), abs=2e-4)


def test_more_requests_than_slots_and_repeated_prompts(tmp_path: Path) -> None:
    """Requests with a cache of their own wait for a slot, share no prefix, and give the same answer twice."""
    ARCHITECTURES["mamba2"].save(tmp_path)
    engine = Engine(load(tmp_path), max_model_len=64, max_num_seqs=2)
    sampling = SamplingParams(max_tokens=_NEW_TOKENS, temperature=0, ignore_eos=True)
    alone = [engine.generate([prompt], sampling)[0].tokens for prompt in _PROMPTS]
    together = engine.generate([*_PROMPTS, *_PROMPTS], sampling)
    assert [answer.tokens for answer in together] == [*alone, *alone]
    assert not any(answer.cached_tokens for answer in together)


def test_several_samples_of_a_prompt_with_an_own_cache(tmp_path: Path) -> None:
    ARCHITECTURES["mamba2"].save(tmp_path)
    engine = Engine(load(tmp_path), max_model_len=64)
    answers = engine.generate([_PROMPTS[0]], SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, n=2))
    assert len(answers) == 2 and answers[0].tokens == answers[1].tokens


def test_settings_of_a_paged_cache_are_refused(tmp_path: Path) -> None:
    ARCHITECTURES["bloom"].save(tmp_path)
    with pytest.raises(ModelError, match="bloom in the network itself, so its KV cache is not paged"):
        Engine(load(tmp_path), max_model_len=64, kv_cache_dtype="int8")


def test_a_network_that_mixes_positions_elsewhere_is_not_paged(tmp_path: Path) -> None:
    """Such a network would read tokens of other requests: a convolution over time in a type without a row."""
    ARCHITECTURES["apertus"].save(tmp_path)
    model = load(tmp_path)
    assert unpaged_reason(model.anatomy) is None
    model.network.model.layers[0].mlp.register_forward_hook(lambda _, args, output: output + output.roll(1, dims=1))
    reason = unpaged_reason(model.anatomy)
    assert reason is not None and "something else" in reason


def test_a_vision_language_model_that_attends_in_both_directions_is_not_paged(tmp_path: Path) -> None:
    ARCHITECTURES["paligemma"].save(tmp_path)
    engine = Engine(load(tmp_path), max_model_len=64)
    assert engine.runner.backend == _OWN_CACHE
    network = load(tmp_path).network
    network.generation_config.eos_token_id = None
    expected = network.generate(torch.tensor([_PROMPTS[0]]), max_new_tokens=_NEW_TOKENS, do_sample=False)
    (answer,) = engine.generate(_PROMPTS[:1], SamplingParams(max_tokens=_NEW_TOKENS, temperature=0, ignore_eos=True))
    assert answer.tokens == expected[0, len(_PROMPTS[0]) :].tolist()


def test_an_attention_variant_by_hand() -> None:
    """Scores of one query over three positions, written out: soft-capped, with a sink, and in chunks of two."""
    queries, sinks = torch.tensor([[[2.0]], [[2.0]], [[2.0]]]), torch.tensor([0.3])
    keys = values = torch.tensor([[[[1.0]], [[-1.0]], [[0.5]]]])  # one block of three positions
    metadata = AttentionMetadata(
        cu_seqlens_q=torch.tensor([0, 3]), seq_lens=torch.tensor([3]), block_tables=torch.tensor([[0]]),
        slot_mapping=torch.arange(3), max_seq_len=3, query_lens=[3],
    )  # fmt: skip

    def attend(variant: AttentionVariant) -> list[float]:
        return paged_attention(queries, keys, values, metadata, 1.0, None, None, variant).flatten().tolist()

    capped = 1.5 * torch.tanh(torch.tensor([2.0, -2.0, 1.0]) / 1.5)
    weights = torch.cat([capped, sinks]).softmax(0)
    by_hand = float(weights[0] - weights[1] + 0.5 * weights[2])
    assert attend(AttentionVariant(softcap=1.5, sinks=sinks))[2] == pytest.approx(by_hand, abs=1e-6)
    assert attend(AttentionVariant(chunk=2))[2] == pytest.approx(0.5)  # alone in its chunk


def test_prompts_hold_no_image_token() -> None:
    assert max(max(prompt) for prompt in _PROMPTS) < 90 < VOCABULARY
