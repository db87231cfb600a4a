"""Latency: the right call runs the right number of times, and the summary reports it."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
    ResNetConfig,
    ResNetForImageClassification,
    ViTConfig,
    ViTForImageClassification,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

from smelt.errors import ModelError
from smelt.measure.latency import compare_latency, decode_latency, latency, ratio_interval, time_call
from smelt.models.model import Model
from smelt.models.quartznet import QuartzNetConfig, QuartzNetForCTC

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}


def bert() -> PreTrainedModel:
    return BertForSequenceClassification(BertConfig(**SIZES, vocab_size=50, max_position_embeddings=64))


def llama(hidden_size: int = 32) -> PreTrainedModel:
    sizes = {**SIZES, "hidden_size": hidden_size, "intermediate_size": 2 * hidden_size}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=50, max_position_embeddings=64))


def gpt2() -> PreTrainedModel:
    return GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=50, n_positions=64))


def opt() -> PreTrainedModel:
    config = OPTConfig(
        hidden_size=32, word_embed_proj_dim=32, num_hidden_layers=2, num_attention_heads=4, ffn_dim=64, vocab_size=50
    )
    return OPTForCausalLM(config)


def vit() -> PreTrainedModel:
    return ViTForImageClassification(ViTConfig(**SIZES, image_size=32, patch_size=8))


def resnet() -> PreTrainedModel:
    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic")
    return ResNetForImageClassification(config)


def test_time_call_warms_up_and_repeats() -> None:
    calls: list[int] = []
    readings = time_call(lambda: calls.append(len(calls)), warmup=4, repeats=7, min_seconds=0.0)
    assert len(calls) == 11 and readings.shape == (7,)


def test_time_call_repeats_until_the_minimum_time() -> None:
    readings = time_call(lambda: time.sleep(0.004), warmup=0, repeats=1, min_seconds=0.03)
    assert readings.min() >= 0.004 and readings.sum() >= 0.03
    assert readings[:-1].sum() < 0.03


@pytest.mark.parametrize("build", [bert, gpt2, llama, opt])
def test_forward_over_tokens(build: object) -> None:
    model = Model(build())  # type: ignore[operator]
    model.network.train()
    seen: list[tuple[int, ...]] = []
    model.network.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append((*kwargs["input_ids"].shape, module.training)), with_kwargs=True
    )
    result = latency(model, batch=3, length=16, warmup=2, repeats=5)
    assert seen == [(3, 16, False)] * 7
    assert model.network.training, "the network's own mode comes back"
    assert (result.batch, result.length, result.repeats, result.warmup) == (3, 16, 5, 2)
    assert (result.device, result.dtype) == ("cpu", "float32")
    assert result.tokens_per_second == pytest.approx(3 * 16 / (result.median_ms / 1000))
    assert result.median_ms > 0 and result.spread_ms >= 0


@pytest.mark.parametrize(("build", "side"), [(vit, 32), (resnet, 224)])
def test_forward_over_images(build: object, side: int) -> None:
    model = Model(build())  # type: ignore[operator]
    seen: list[tuple[int, ...]] = []
    model.network.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(tuple(kwargs["pixel_values"].shape)), with_kwargs=True
    )
    result = latency(model, batch=2, repeats=2, warmup=0)
    assert seen == [(2, 3, side, side)] * 2
    assert result.length == 1 and result.tokens_per_second == pytest.approx(2 / (result.median_ms / 1000))


def whisper() -> PreTrainedModel:
    size = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "num_mel_bins": 8}
    tokens = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 2}
    return WhisperForConditionalGeneration(
        WhisperConfig(vocab_size=30, max_source_positions=50, **size, **heads, **tokens)
    )


def quartznet() -> PreTrainedModel:
    sizes = {"hidden_sizes": (8,), "kernel_sizes": (3,), "stem_channels": 8, "head_channels": 8}
    return QuartzNetForCTC(QuartzNetConfig(num_mel_bins=8, **sizes))  # type: ignore[arg-type]


@pytest.mark.parametrize(("build", "frames"), [(whisper, 100), (quartznet, 64)])
def test_forward_over_spectrograms(build: object, frames: int) -> None:
    model = Model(build())  # type: ignore[operator]
    seen: list[tuple[int, ...]] = []
    model.network.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(tuple(kwargs["input_features"].shape)), with_kwargs=True
    )
    result = latency(model, batch=2, length=64, repeats=2, warmup=0)
    assert seen == [(2, 8, frames)] * 2
    assert result.length == frames
    assert result.tokens_per_second == pytest.approx(2 * frames / (result.median_ms / 1000))


@pytest.mark.parametrize("build", [gpt2, llama, opt])
def test_decoding_runs_one_token_per_step_and_matches_generate(build: object) -> None:
    model = Model(build())  # type: ignore[operator]
    fed: list[torch.Tensor] = []
    hook = model.network.register_forward_pre_hook(
        lambda module, args, kwargs: fed.append(kwargs["input_ids"].clone()), with_kwargs=True
    )
    result = decode_latency(model, prompt=10, tokens=6, warmup=2)
    hook.remove()
    assert [tuple(ids.shape) for ids in fed] == [(1, 10)] + [(1, 1)] * 8
    model.network.eval()
    model.network.generation_config.eos_token_id = None  # never stop early
    expected = model.network.generate(fed[0], max_new_tokens=8, do_sample=False)
    assert torch.equal(torch.cat(fed, dim=1), expected)
    assert (result.repeats, result.length) == (6, 10)
    assert result.tokens_per_second == pytest.approx(1000 / result.median_ms)


def test_decoding_needs_a_language_head_and_free_context() -> None:
    with pytest.raises(ModelError, match="no language head"):
        decode_latency(Model(bert()))
    with pytest.raises(ModelError, match="at most 64 tokens"):
        decode_latency(Model(llama()), prompt=60, tokens=10)


def test_a_length_beyond_the_context_raises_one_sentence() -> None:
    with pytest.raises(ModelError, match="at most 64 tokens, not 65"):
        latency(Model(bert()), length=65)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Use one thread: on a busy machine, threads waiting for each other would dominate the time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
def test_comparison_alternates_and_favors_the_smaller_model() -> None:
    small, large = Model(llama(16)), Model(llama(1024))
    order: list[str] = []
    small.network.register_forward_pre_hook(lambda *_: order.append("new"))
    large.network.register_forward_pre_hook(lambda *_: order.append("base"))
    result = compare_latency(small, large, length=32, warmup=1, repeats=8)
    assert order == ["new", "base"] * 9
    assert result.ratio == pytest.approx(result.base.median_ms / result.new.median_ms)
    assert 1 < result.ratio_low <= result.ratio <= result.ratio_high


def test_interval_pairs_the_rounds() -> None:
    drift = np.linspace(1.0, 5.0, 30)  # the machine becomes five times slower for both models
    assert ratio_interval(drift, 2 * drift, confidence=0.95, seed=0) == pytest.approx((2.0, 2.0))


def test_interval_widens_with_noise_and_covers_the_ratio() -> None:
    random = np.random.default_rng(1)
    new, base = 1 + 0.1 * random.random(40), 1.3 + 0.1 * random.random(40)
    low, high = ratio_interval(new, base, confidence=0.95, seed=0)
    assert low < np.median(base) / np.median(new) < high
    assert low > 1.1 and high - low < 0.1


@pytest.mark.gpu
def test_cuda_timing_synchronizes_the_device() -> None:
    matrix = torch.randn(8192, 8192, device="cuda")
    seconds = float(np.median(time_call(lambda: matrix @ matrix, warmup=3, repeats=5, device="cuda")))
    assert seconds > 2 * 8192**3 / 2e15, "faster than any device: only the launch was timed"
