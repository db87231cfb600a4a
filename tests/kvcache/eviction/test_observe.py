"""Prefill that records attention inputs, and answers after heads have lost some of the prompt."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from smelt.errors import ModelError
from smelt.kvcache.eviction.prefill import decode_logits, record_prefill
from smelt.kvcache.eviction.reconstruction import record_reconstruction
from smelt.models.model import Model
from tests.models.test_surgery import cut, random_masks
from tests.tiny import BUILDS

PROMPT, MORE = 20, 5


def build_inputs(name: str = "llama") -> tuple[Model, Tensor, Tensor]:
    ids = torch.randint(3, 99, (2, PROMPT + MORE), generator=torch.Generator().manual_seed(1))
    return Model(BUILDS[name]()), ids[:, :PROMPT], ids[:, PROMPT:]


def some(model: Model, count: int) -> Tensor:
    """Return a mask in which each head keeps different tokens, all heads the same number. [layers, batch, kv_heads,
    tokens]
    """
    parts = [part for part in model.anatomy.parts if part.kind == "heads"]
    draw = torch.rand(len(parts), 2, parts[0].units, PROMPT, generator=torch.Generator().manual_seed(2))
    return draw.argsort(-1).argsort(-1) < count


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2"])
@torch.no_grad()
def test_observing_changes_nothing_and_records_all_attention_inputs(name: str) -> None:
    model, prompt, more = build_inputs(name)
    plain = model.network(torch.cat((prompt, more), dim=1)).logits
    prefill = record_prefill(model, prompt)
    assert torch.allclose(prefill.logits, plain[:, PROMPT - 1], atol=1e-5)
    assert torch.allclose(decode_logits(model, prefill, None, more), plain[:, PROMPT:], atol=1e-5)
    assert torch.allclose(decode_logits(model, prefill, None, more), plain[:, PROMPT:], atol=1e-5)  # unchanged cache
    assert prefill.seq_len == PROMPT and len(prefill.layers) == 3
    for inputs in prefill.layers:
        keys, queries = inputs.keys, inputs.rotate(inputs.queries, 0)
        products = queries @ keys.repeat_interleave(inputs.num_queries_per_kv, dim=1).transpose(-1, -2) * inputs.scale
        assert products.shape == (2, inputs.queries.shape[1], PROMPT, PROMPT) and bool(products.isfinite().all())


@torch.no_grad()
def test_rope_on_queries_is_inverted_and_reapplied() -> None:
    """The first layer's queries are a projection of the embeddings, known without any attention."""
    model, prompt, _ = build_inputs()
    network: Any = model.network
    layer = network.model.layers[0]
    raw = layer.self_attn.q_proj(layer.input_layernorm(network.model.embed_tokens(prompt)))
    keys = layer.self_attn.k_proj(layer.input_layernorm(network.model.embed_tokens(prompt)))
    inputs = record_prefill(model, prompt).layers[0]
    assert torch.allclose(inputs.queries, raw.unflatten(-1, (-1, 8)).transpose(1, 2), atol=1e-5)
    assert torch.allclose(inputs.keys, inputs.rotate(keys.unflatten(-1, (-1, 8)).transpose(1, 2), 0), atol=1e-5)
    rotated = inputs.rotate(inputs.queries[:, :, 3:4], 3)
    assert torch.allclose(
        rotated, inputs.rotate(inputs.queries, 0)[:, :, 3:4], atol=1e-5
    )  # positions count from `first`


@torch.no_grad()
def test_masking_tokens_equals_evicting_them() -> None:
    model, prompt, more = build_inputs()
    prefill, kept = record_prefill(model, prompt), some(model, 7)
    actual = decode_logits(model, prefill, kept, more)
    cache = DynamicCache(config=model.network.config)
    for layer, inputs in enumerate(prefill.layers):
        indices = kept[layer].nonzero()[:, 2].view(2, -1, 7)[..., None].expand(-1, -1, -1, inputs.keys.shape[-1])
        cache.update(inputs.keys.gather(2, indices), inputs.values.gather(2, indices), layer)
    positions = torch.arange(PROMPT, PROMPT + MORE)[None].expand(2, -1)
    expected = model.network(more, past_key_values=cache, position_ids=positions).logits
    assert torch.allclose(actual, expected, atol=1e-5)
    assert not torch.allclose(actual, decode_logits(model, prefill, None, more), atol=1e-3)


@torch.no_grad()
def test_one_prompt_under_many_masks_in_one_batch() -> None:
    model, prompt, more = build_inputs()
    prefill, masks = record_prefill(model, prompt[:1]), some(model, 7)
    batched = decode_logits(model, prefill, masks, more[:1])
    alone = [decode_logits(model, prefill, masks[:, index : index + 1], more[:1]) for index in range(2)]
    assert torch.allclose(batched, torch.cat(alone), atol=1e-5)


@torch.no_grad()
def test_masked_tokens_have_no_effect() -> None:
    model, prompt, more = build_inputs()
    prefill, kept = record_prefill(model, prompt), some(model, 12)
    before = decode_logits(model, prefill, kept, more)
    for layer in range(3):
        prefill.layers[layer].keys[~kept[layer]], prefill.layers[layer].values[~kept[layer]] = 50.0, -50.0
    assert torch.equal(decode_logits(model, prefill, kept, more), before)


@torch.no_grad()
def test_attention_while_the_prompt_is_repeated() -> None:
    """Against loops over one long text: the prompt, the request, and the prompt's chunks again."""
    model, prompt, _ = build_inputs()
    prompt, ask, chunk = prompt[:1], torch.tensor([5, 6]), 12
    layers = record_reconstruction(model, record_prefill(model, prompt), prompt, ask, chunk=chunk, sink=2).layers
    for begin, end in ((0, 12), (12, 20)):
        words = torch.cat((ask, prompt[0, max(begin - 8, 0) : begin]))[None]
        full = record_prefill(model, torch.cat((prompt, words, prompt[:, begin:end]), dim=1))
        for inputs, long in zip(layers, full.layers, strict=True):
            queries = long.rotate(long.queries, 0)
            columns = [*range(min(2, begin)), *range(begin, end)]
            for head in range(inputs.keys.shape[1]):
                largest = torch.zeros(end - begin)
                for row in range(PROMPT, long.seq_len):
                    seen_by_row = [*columns, *range(PROMPT, row + 1)]
                    for member in range(head * inputs.num_queries_per_kv, (head + 1) * inputs.num_queries_per_kv):
                        weights = (long.keys[0, head, seen_by_row] @ queries[0, member, row] * long.scale).softmax(0)
                        largest = torch.maximum(largest, weights[min(2, begin) : min(2, begin) + end - begin])
                assert inputs.reconstruction is not None
                assert torch.allclose(inputs.reconstruction[0, head, begin:end], largest, atol=1e-5)


def test_unsupported_models_are_refused() -> None:
    ids = torch.ones(1, 4, dtype=torch.int64)
    with pytest.raises(ModelError, match="sliding"):
        record_prefill(Model(BUILDS["mistral"]()), ids)
    with pytest.raises(ModelError, match="only causal language models"):
        record_prefill(Model(BUILDS["bert"]()), ids)
    network = BUILDS["llama"]()
    cut(network, random_masks(network, empty=("heads0",)))
    with pytest.raises(ModelError, match="different numbers of KV heads"):
        record_prefill(Model(network), ids)
