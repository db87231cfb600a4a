"""Perplexity against the network's own loss, brute force, and closed forms."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import transformers as hf

from smelt.data import TextData
from smelt.errors import DataError
from smelt.measure import logits as logits_module
from smelt.measure.divergence import logit_divergence
from smelt.measure.perplexity import perplexity, windows_over
from smelt.models.model import Model
from tests.character_tokenizer import character_tokenizer
from tests.tiny import BUILDS, DECODER, DECODERS

TEXT = TextData("fox", ("The quick brown fox jumps over the lazy dog. " * 3, "And once more, with feeling: " * 4))


def decoder(name: str = "llama") -> Model:
    return Model(BUILDS[name](), character_tokenizer(), source=name)


def ids(model: Model, text: TextData = TEXT) -> torch.Tensor:
    assert model.tokenizer is not None
    return torch.tensor(model.tokenizer("\n\n".join(text.documents))["input_ids"])


@torch.no_grad()
def brute_force(model: Model, context: int, stride: int, limit: int) -> float:
    """Score each token from the full logits of the first window that contains it."""
    tokens, losses = ids(model)[:limit], []
    for position in range(1, len(tokens)):
        begin = max(0, math.ceil((position + 1 - context) / stride)) * stride
        if begin == position:  # the first of its window
            continue
        window = tokens[begin : begin + context][None]
        probabilities = model.network(input_ids=window).logits[0, position - begin - 1].double().log_softmax(-1)
        losses.append(-float(probabilities[tokens[position]]))
    return math.exp(np.mean(losses))


@pytest.mark.parametrize("name", DECODERS)
def test_matches_the_loss_of_the_network(name: str) -> None:
    model = decoder(name)
    tokens = ids(model)[:120].view(5, 24)
    with torch.no_grad():
        losses = [float(model.network(input_ids=row[None], labels=row[None]).loss) for row in tokens]
    result = perplexity(model, TEXT, context=24, limit=120)
    assert np.allclose(result.items, losses, rtol=1e-5)
    assert result.value == pytest.approx(math.exp(np.mean(losses)), rel=1e-5)
    assert result.settings == {"context": 24, "stride": 24, "tokens_scored": 5 * 23, "windows": 5}


@pytest.mark.parametrize(("context", "stride"), [(32, 32), (32, 16), (32, 5), (32, 1), (70, 60)])
def test_strided_matches_brute_force(context: int, stride: int) -> None:
    model = decoder("gpt2")
    result = perplexity(model, TEXT, context=context, stride=stride, batch_size=3, limit=75)
    assert result.value == pytest.approx(brute_force(model, context, stride, limit=75), rel=1e-5)


def test_overlapping_windows_score_every_token_once() -> None:
    for context, stride in ((7, 3), (8, 8), (5, 1)):
        scored = [
            position
            for window in windows_over(50, context, stride)
            for position in range(window.scored_from, window.end)
        ]
        expected = (
            [position for position in range(50) if position % context] if context == stride else list(range(1, 50))
        )
        assert scored == expected


def test_a_uniform_network_scores_at_chance() -> None:
    model = decoder()
    model.network.get_output_embeddings().weight.data.zero_()
    assert perplexity(model, TEXT, context=32).value == pytest.approx(99, rel=1e-6)


def test_batch_size_and_slices_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = decoder()
    alone = perplexity(model, TEXT, context=16)
    together = perplexity(model, TEXT, context=16, batch_size=7)
    monkeypatch.setattr(logits_module, "_MAX_LOGITS_BYTES", 3 * 4 * 99)
    sliced = perplexity(model, TEXT, context=16, batch_size=7)
    for other in (together, sliced):
        assert np.abs(other.items - alone.items).max() < 1e-6
    assert together.weights is not None and together.weights.sum() == together.settings["tokens_scored"]


def test_logits_are_never_materialized_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logits_module, "_MAX_LOGITS_BYTES", 5 * 4 * 99)
    model, sizes = decoder(), []
    model.network.get_output_embeddings().register_forward_hook(
        lambda _, __, output: sizes.append(output.numel() // 99)
    )
    perplexity(model, TEXT, context=64, limit=64)
    assert max(sizes) == 5 and sum(sizes) >= 63


def test_a_nonlinear_head_is_supported() -> None:
    config = hf.Gemma2Config(**DECODER, final_logit_softcapping=0.5)
    torch.manual_seed(0)
    model = Model(hf.Gemma2ForCausalLM(config).eval(), character_tokenizer())
    row = ids(model)[None, :40]
    with torch.no_grad():
        loss = float(model.network(input_ids=row, labels=row).loss)
    assert perplexity(model, TEXT, context=40, limit=40).value == pytest.approx(math.exp(loss), rel=1e-5)


def test_dropout_is_off_and_the_mode_is_restored() -> None:
    model = decoder("gpt2")
    expected = perplexity(model, TEXT, context=32).value
    model.network.train()
    assert perplexity(model, TEXT, context=32).value == expected
    assert model.network.training


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"context": 129}, "context of 129 is longer than the model's 128 positions"),
        ({"context": 16, "stride": 17}, "do not fit"),
        ({"context": 16, "stride": 0}, "do not fit"),
        ({"context": 1}, "do not fit"),
        ({"context": 16, "limit": 1}, "needs at least two"),
        ({"context": 16, "limit": 0}, "Limit must be at least 1"),
        ({"context": 16, "batch_size": 0}, "Batch size must be at least 1"),
    ],
)
def test_invalid_settings(settings: dict[str, int], sentence: str) -> None:
    with pytest.raises(DataError, match=sentence):
        perplexity(decoder(), TEXT, **settings)  # type: ignore[arg-type]


def test_models_without_language_head_or_tokenizer() -> None:
    with pytest.raises(DataError, match="not a language model"):
        perplexity(Model(BUILDS["bert"](), character_tokenizer()), TEXT, context=16)
    with pytest.raises(DataError, match="no tokenizer"):
        perplexity(Model(BUILDS["llama"]()), TEXT, context=16)


@torch.no_grad()
def test_divergence_matches_its_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logits_module, "_MAX_LOGITS_BYTES", 10 * 4 * 99)
    base, new = decoder(), decoder()
    for parameter in new.network.parameters():
        parameter.add_(0.1 * torch.randn_like(parameter))
    rows = ids(base)[:96].view(3, 32)
    log_base, log_new = (model.network(input_ids=rows).logits[:, :-1].double().log_softmax(-1) for model in (base, new))
    result = logit_divergence(new, base, TEXT, context=32, limit=96, batch_size=2)
    assert result.tokens == 3 * 31
    assert result.kl == pytest.approx(float((log_base.exp() * (log_base - log_new)).sum(-1).mean()), rel=1e-4)
    assert result.agreement == pytest.approx(float((log_base.argmax(-1) == log_new.argmax(-1)).double().mean()))
    same = logit_divergence(base, base, TEXT, context=32)
    assert abs(same.kl) < 1e-9 and same.agreement == 1


def test_divergence_needs_a_shared_vocabulary() -> None:
    other = Model(hf.LlamaForCausalLM(hf.LlamaConfig(**{**DECODER, "vocab_size": 50})), character_tokenizer())
    with pytest.raises(DataError, match="50 and 99 tokens"):
        logit_divergence(other, decoder(), TEXT, context=32)
