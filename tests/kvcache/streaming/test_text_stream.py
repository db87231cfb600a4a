"""A text stream: against the plain network while everything fits, against loops and masks when it does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor
from transformers import DynamicCache

from smelt.errors import ConfigError, DataError, ModelError, RequestError
from smelt.kvcache.eviction.attention import masked_attention
from smelt.kvcache.eviction.prefill import decode_logits, record_prefill
from smelt.kvcache.eviction.scorer import AttentionInputs
from smelt.kvcache.eviction.scorers.snapkv import SnapKV
from smelt.kvcache.rope import position_remapper
from smelt.kvcache.streaming import InfiniPot, TextStream
from smelt.kvcache.streaming.novelty import NoveltyTracker, token_novelty
from smelt.models.kv_cache import KVCacheFormat
from smelt.models.model import Model
from tests.kvcache.streaming.test_bounded_cache import everything, same
from tests.serve.test_detokenizer import byte_tokenizer
from tests.tiny import BUILDS, DECODER, build_network

CAP, KEEP, ROOM = 40, 14, 8
FULL = CAP - ROOM  # tokens after which the cache is compressed
PROMPT = (5, 6, 7)


def stream_of(name: str = "llama", **changes: Any) -> TextStream:
    rule = {"prompt": PROMPT, **changes.pop("rule", {})}
    return TextStream(
        Model(BUILDS[name]()), CAP, **{"keep": KEEP, "reserved": ROOM, **changes}, method=InfiniPot(**rule)
    )


def words(count: int, seed: int = 1) -> Tensor:
    return torch.randint(3, 99, (count,), generator=torch.Generator().manual_seed(seed))


def numbers(stream: TextStream) -> Tensor:
    """Return which tokens of the stream each head holds: [layers, kv_heads, length]"""
    return torch.stack([layer.token_indices[:, : stream.length] for layer in stream.cache.layers])


# While everything fits


@pytest.mark.parametrize("name", ["llama", "qwen3"])
@torch.no_grad()
def test_a_stream_that_fits_matches_the_plain_network(name: str) -> None:
    stream, ids = stream_of(name, chunk_size=7), words(FULL)
    plain = stream.model.network(ids[None]).logits[0]
    stream.push(ids[:11])
    stream.push(ids[11:20].tolist())
    assert torch.allclose(stream.logits(ids[20:30]), plain[19:29], atol=1e-4)
    stream.push(ids[20:])
    expected = ids
    for _ in range(5):
        expected = torch.cat((expected, stream.model.network(expected[None]).logits[0, -1:].argmax(-1)))
    assert torch.equal(stream.answer(ids[:0], 5), expected[FULL:])
    assert stream.num_compressions == 0 and stream.num_seen == stream.length == FULL


@torch.no_grad()
def test_an_empty_stream_matches_the_plain_network() -> None:
    stream, ids = stream_of(), words(8)
    assert torch.allclose(stream.logits(ids), stream.model.network(ids[None]).logits[0, :-1], atol=1e-4)
    end = int(stream.answer(ids[:4], 1))
    stream.model.network.generation_config.eos_token_id = [end]
    assert stream.answer(ids[:4], 4).tolist() == []


# Capacity


def test_a_stream_of_fifty_times_the_capacity_stays_bounded() -> None:
    stream, ids = stream_of(), words(50 * CAP)
    size, addresses = stream.nbytes, [tensor.data_ptr() for layer in stream.cache.layers for tensor in layer.tensors()]
    longest = 0
    seen_positions: list[int] = []
    network: Any = stream.model.network

    def note(_: Any, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        seen_positions.append(int((kwargs["position_ids"] if kwargs else args[1]).max()))

    network.model.rotary_emb.register_forward_pre_hook(note, with_kwargs=True)
    generator = torch.Generator().manual_seed(3)
    while len(ids):
        count = int(torch.randint(1, 60, (), generator=generator))
        stream.push(ids[:count])
        ids = ids[count:]
        longest = max(longest, stream.length)
        assert stream.nbytes == size
    assert stream.num_seen == 50 * CAP and longest <= FULL and max(seen_positions) < CAP
    assert [tensor.data_ptr() for layer in stream.cache.layers for tensor in layer.tensors()] == addresses
    layers, heads, width = 3, 2, 8
    assert size == layers * heads * CAP * (2 * width * 4 + 8) + CAP * (8 + 4)


def test_pushing_in_chunks_equals_pushing_at_once() -> None:
    one, other, ids = stream_of(), stream_of(chunk_size=5), words(4 * CAP)
    one.push(ids)
    for start in range(0, len(ids), 3):
        other.push(ids[start : start + 3])
    assert one.num_compressions == other.num_compressions > 3 and torch.equal(numbers(one), numbers(other))
    assert torch.allclose(one.logits(ids[:4]), other.logits(ids[:4]), atol=1e-4)


# Eviction


def by_hand(stream: TextStream, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Compute attention [layers, kv_heads, tokens] of the prompt's tokens and -log p of each token with loops over the
    plain network.
    """
    full = torch.cat((ids, torch.tensor(PROMPT)))[None]
    count, prefill = len(ids), record_prefill(stream.model, full)
    with torch.no_grad():
        rows = stream.model.network(ids[None]).logits[0].log_softmax(-1)
    novelty = torch.tensor([torch.inf, *(-float(rows[t - 1, ids[t]]) for t in range(1, count))])
    attention = torch.zeros(len(prefill.layers), prefill.layers[0].keys.shape[1], count)
    for layer, inputs in enumerate(prefill.layers):
        queries = inputs.rotate(inputs.queries, 0)
        for head in range(queries.shape[1]):
            for position in range(count, count + len(PROMPT)):
                row = (
                    inputs.keys[0, head // inputs.num_queries_per_kv, : position + 1]
                    @ queries[0, head, position]
                    * inputs.scale
                ).softmax(0)
                attention[layer, head // inputs.num_queries_per_kv] += row[:count] / (
                    len(PROMPT) * inputs.num_queries_per_kv
                )
    return attention, novelty


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.5, 1.0])
def test_novel_tokens_stay_in_all_heads_and_others_by_attention(alpha: float) -> None:
    stream, ids = stream_of(rule={"alpha": alpha}), words(FULL + 1)
    stream.push(ids)
    attention, novelty = by_hand(stream, ids[:FULL])
    novel = set(novelty.argsort(descending=True)[: round(alpha * KEEP)].tolist())
    for layer in range(3):
        for head in range(2):
            others = [int(t) for t in attention[layer, head].argsort(descending=True) if int(t) not in novel]
            expected = sorted(novel | set(others[: KEEP - len(novel)]))
            assert stream.cache.layers[layer].token_indices[head, :KEEP].tolist() == expected
    assert stream.length == KEEP + 1 and stream.num_compressions == 1


@torch.no_grad()
def test_without_renumbering_compression_equals_masking_evicted_tokens() -> None:
    stream, ids = stream_of(rule={"renumber": False}), words(FULL + 6)
    stream.push(ids[:FULL])
    stream._compress()
    kept = torch.zeros(3, 1, 2, FULL, dtype=torch.bool).scatter_(-1, numbers(stream)[:, None], True)
    expected = decode_logits(stream.model, record_prefill(stream.model, ids[None, :FULL]), kept, ids[None, FULL:])[0]
    assert torch.allclose(stream.logits(ids[FULL:])[1:], expected[:-1], atol=1e-4)


def test_a_token_kept_for_novelty_stays_in_every_head() -> None:
    stream, ids = stream_of(), words(9 * CAP)
    for start in range(0, len(ids), 5):
        stream.push(ids[start : start + 5])
        novel = set(stream._novelty.token_indices[: stream._novelty.length].tolist())
        assert all(novel <= set(row.tolist()) for row in numbers(stream).flatten(0, 1))
        assert bool((numbers(stream).diff(dim=-1) > 0).all())  # in time order, each once
    assert {0} < novel  # the first token has no prediction and is always novel


def snapkv_in_chunks(model: Model, ids: Tensor, kernel: int) -> Tensor:
    """Run the plain equivalent: a growing cache, compressed by the SnapKV scorer whenever it holds `FULL` tokens."""
    network: Any = model.network
    prompt, scorer = torch.tensor(PROMPT)[None], SnapKV(sink=0, window=len(PROMPT), kernel=kernel)
    cache, which = DynamicCache(config=network.config), torch.zeros(3, 2, 0, dtype=torch.int64)
    recorded: dict[int, AttentionInputs] = {}

    def listen(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> None:
        before = queries.new_zeros(1, queries.shape[1], keys.shape[2] - queries.shape[2], queries.shape[3])
        recorded[layer] = AttentionInputs(
            keys, values, torch.cat((before, queries), dim=2), lambda x, _: x, queries.shape[-1] ** -0.5
        )

    begin = 0
    while begin < len(ids):
        if which.shape[-1] == FULL:
            with masked_attention(network, hook=listen):
                network(prompt, past_key_values=cache, position_ids=begin + torch.arange(len(PROMPT))[None])
            kept = torch.stack([scorer.scores(recorded[layer])[0, :, :FULL] for layer in range(3)])
            kept = kept.argsort(dim=-1, descending=True, stable=True)[..., :KEEP].sort(-1).values
            cache, which = DynamicCache(config=network.config), which.gather(-1, kept)
            for layer, inputs in recorded.items():
                index = kept[layer][None, :, :, None].expand(-1, -1, -1, inputs.keys.shape[-1])
                cache.update(inputs.keys.gather(2, index), inputs.values.gather(2, index), layer)
        new = ids[begin : begin + FULL - which.shape[-1]]
        positions = torch.arange(begin, begin + len(new))
        network(new[None], past_key_values=cache, position_ids=positions[None])
        which = torch.cat((which, positions.expand(3, 2, -1)), dim=-1)
        begin += len(new)
    return which


@pytest.mark.parametrize("kernel", [1, 5])
@torch.no_grad()
def test_without_novelty_it_equals_chunked_snapkv(kernel: int) -> None:
    ids = words(FULL + 3 * (FULL - KEEP))
    stream = stream_of(rule={"alpha": 0.0, "kernel": kernel, "renumber": False})
    stream.push(ids)
    assert stream.num_compressions == 3
    assert torch.equal(numbers(stream), snapkv_in_chunks(stream.model, ids, kernel))


# Novelty


@torch.no_grad()
def test_novelty_is_the_negative_log_probability() -> None:
    network: Any = BUILDS["llama"]()
    ids = words(100)
    states = network.model(ids[None]).last_hidden_state[0]
    expected = -network(ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
    rows: list[int] = []

    def head(states: Tensor) -> Tensor:
        rows.append(len(states))
        logits: Tensor = network.lm_head(states)
        return logits

    assert torch.allclose(token_novelty(states[:-1], ids[1:], head), expected, atol=1e-5)  # type: ignore[arg-type]
    assert max(rows) <= 64 and sum(rows) == 99


@torch.no_grad()
def test_novelty_continues_across_pushes() -> None:
    stream, ids = stream_of(), words(20)
    for chunk in (ids[:1], ids[1:8], ids[8:9], ids[9:]):
        stream.push(chunk)
    _, novelty = by_hand(stream, ids)
    assert torch.allclose(stream._novelty.novelty[:20], novelty, atol=1e-4)


def test_the_tracker_drops_less_novel_tokens() -> None:
    tracker = NoveltyTracker(8, torch.device("cpu"))
    tracker.add(0, torch.tensor([3.0, 1.0, 4.0, 1.5]))
    assert tracker.keep_top(2).tolist() == [0, 2]
    tracker.add(4, torch.tensor([9.0, 3.5]))
    assert tracker.keep_top(3).tolist() == [2, 4, 5]
    assert tracker.novelty[:3].tolist() == [4.0, 9.0, 3.5] and tracker.nbytes == 8 * 12


# Renumbering positions


def _keys_at(network: Any, ids: Tensor, positions: Tensor) -> Tensor:
    """Return the first layer's keys, [kv_heads, tokens, head_dim], as the network computes them at these positions."""
    cache = DynamicCache(config=network.config)
    network(ids[None], position_ids=positions[None], past_key_values=cache)
    keys: Tensor = cache.layers[0].keys[0]
    return keys


YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize("rope", [None, YARN])
@torch.no_grad()
def test_rerotated_keys_equal_keys_computed_at_the_new_position(rope: dict[str, Any] | None) -> None:
    network = build_network(hf.LlamaForCausalLM, hf.LlamaConfig(**DECODER, rope_parameters=rope))
    ids = words(12)
    old, new = torch.arange(40, 100, 5), torch.arange(12)
    moved = position_remapper(network)(_keys_at(network, ids, old), old, new)
    assert torch.allclose(moved, _keys_at(network, ids, new), atol=1e-5)
    assert not torch.allclose(moved, _keys_at(network, ids, old), atol=1e-2)
    assert torch.equal(position_remapper(network)(moved, new, new), moved)  # unmoved keys are exact


@torch.no_grad()
def test_after_many_rounds_every_key_has_the_position_of_its_slot() -> None:
    """Keys of the first layer depend only on their token and position."""
    stream, ids = stream_of(), words(8 * CAP)
    stream.push(ids)
    layer = stream.cache.layers[0]
    assert stream.num_compressions > 10
    for head in range(2):
        expected = _keys_at(
            stream.model.network, ids[layer.token_indices[head, : stream.length]], torch.arange(stream.length)
        )
        assert torch.allclose(layer.keys[head, : stream.length], expected[head], atol=1e-4)


# Asking


@pytest.mark.parametrize("pushed", [5, 3 * CAP + 1])
def test_asking_leaves_the_cache_bit_identical(pushed: int) -> None:
    stream = stream_of()
    stream.push(words(pushed))
    before, length, num_seen = everything(stream.cache), stream.length, stream.num_seen
    first = stream.answer(words(4), 4)
    stream.logits(words(5))
    assert same(everything(stream.cache), before) and (stream.length, stream.num_seen) == (length, num_seen)
    assert torch.equal(stream.answer(words(4), 4), first)


def test_text_in_and_out_and_remembered_answers() -> None:
    network = build_network(hf.LlamaForCausalLM, hf.LlamaConfig(**{**DECODER, "vocab_size": 300}))
    model = Model(network, byte_tokenizer())

    def fresh() -> TextStream:
        stream = TextStream(model, CAP, keep=KEEP, reserved=ROOM, method=InfiniPot(prompt="sum"))
        stream.push("the color of the sea is a matter of taste")
        return stream

    one, other = fresh(), fresh()
    first_answer = one.answer([5, 6], 3)
    assert one.ask("why", 3) == model.tokenizer.decode(one.answer(byte_tokenizer()("why")["input_ids"], 3))
    assert one.num_seen == other.num_seen
    one.ask("why", 3, remember=True)
    answer = other.answer(byte_tokenizer()("why")["input_ids"], 3)
    other.push("why")
    other.push(answer)
    assert one.num_seen == other.num_seen and torch.equal(numbers(one), numbers(other)) and len(first_answer) <= 3


# Refusals


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"alpha": 1.5}, "alpha is 1.5; it is a share"),
        ({"alpha": -0.1}, "alpha is -0.1; it is a share"),
        ({"kernel": 4}, "kernel is 4; it must be odd"),
        ({"prompt": ""}, "the prompt is empty"),
    ],
)
def test_impossible_rules_are_refused(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        InfiniPot(**change)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"keep": 32}, "cannot keep 32 and read more"),
        ({"keep": 0}, "cannot keep 0"),
        ({"reserved": 2}, "2 tokens are reserved, and the catalyst prompt has 3"),
        ({"reserved": 40}, "with 40 reserved"),
        ({"chunk_size": 0}, "chunk_size is 0"),
    ],
)
def test_impossible_sizes_are_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        stream_of(**changes)


def test_a_cap_past_the_trained_window_is_refused() -> None:
    with pytest.raises(ConfigError, match="the cap is 4096 tokens, and this model was trained for 128"):
        TextStream(Model(BUILDS["llama"]()), method=InfiniPot(prompt=PROMPT))


def test_unsupported_models_are_refused() -> None:
    for name, sentence in (("mistral", "sliding"), ("gpt2", "no rotary positions"), ("bert", "only causal language")):
        with pytest.raises(ModelError, match=sentence):
            stream_of(name)
    model = Model(BUILDS["llama"](), kv=KVCacheFormat("int8"))
    with pytest.raises(ModelError, match=r"quantized KV cache \(.*int8"):
        TextStream(model, CAP, method=InfiniPot(prompt=PROMPT))
    with pytest.raises(ModelError, match="no tokenizer"):
        TextStream(Model(BUILDS["llama"]()), CAP)


def refusals() -> list[tuple[Callable[[TextStream], Any], type[Exception], str]]:
    return [
        (lambda stream: stream.answer([5] * 9, 32), RequestError, "a question of 9 tokens and an answer of 32"),
        (lambda stream: stream.answer([5], -1), RequestError, "an answer of -1"),
        (lambda stream: stream.push([99]), DataError, "from 0 to 98"),
        (lambda stream: stream.push(torch.ones(2, 2)), DataError, "one row"),
        (lambda stream: stream.answer([], 3), RequestError, "nothing to continue"),
        (lambda stream: stream.logits([]), RequestError, "nothing to continue"),
        (lambda stream: stream.push("text"), ModelError, "no tokenizer"),
    ]


@pytest.mark.parametrize("at", range(7))
def test_impossible_requests_are_refused_and_change_nothing(at: int) -> None:
    stream = stream_of()
    before = everything(stream.cache)
    call, error, sentence = refusals()[at]
    with pytest.raises(error, match=sentence):
        call(stream)
    assert same(everything(stream.cache), before) and stream.num_seen == 0
