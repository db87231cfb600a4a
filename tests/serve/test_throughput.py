"""Throughput in the engine: workloads, batch sizes, time limits, and the sentence about a slower model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from smelt.errors import ConfigError, SmeltError
from smelt.serve.engine import throughput
from smelt.serve.engine.throughput import (
    WORKLOADS,
    RequestWorkload,
    Throughput,
    ThroughputRow,
    compare_throughput,
    explain_slowdown,
    measure_throughput,
    parse_workload,
)
from tests.models.test_packed import llama_file
from tests.serve.server_process import write_model

SHORT = RequestWorkload("short", ((24, 8),))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_model(tmp_path_factory.mktemp("throughput") / "model", 128))


def test_named_workloads_and_traces(tmp_path: Path) -> None:
    assert parse_workload("chat").lengths == ((512, 256),) and parse_workload("long") is WORKLOADS["long"]
    trace = tmp_path / "trace.jsonl"
    trace.write_text(
        '{"prompt_tokens": 5, "output_tokens": 6}\n\n{"output_tokens": 1, "prompt_tokens": 2, "at": 0.5}\n'
    )
    assert parse_workload(str(trace)) == RequestWorkload("trace.jsonl", ((5, 6), (2, 1)))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no workload"),
        ("", "no request"),
        ("{}", "line 1 is no request"),
        ("[" * 9000, "line 1 is no request"),
        ('{"prompt_tokens": 5, "output_tokens": 6}\n{"prompt_tokens": -5, "output_tokens": 6}', "line 2.*positive"),
        ('{"prompt_tokens": true, "output_tokens": 6}', "positive"),
    ],
)
def test_a_bad_trace_is_one_sentence(content: str | None, message: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    if content is not None:
        trace.write_text(content)
    with pytest.raises(ConfigError, match=message):
        parse_workload(str(trace))


def test_requests_are_shortened_to_the_context() -> None:
    assert WORKLOADS["chat"].fit(768) is WORKLOADS["chat"]
    shortened = RequestWorkload("mixed", ((600, 200), (10, 10))).fit(80)
    assert shortened.lengths == ((60, 20), (1, 1)) and "80 tokens" in shortened.name


def test_all_batch_sizes_are_timed(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(throughput, "STREAMS", (1, 3))
    said: list[str] = []
    result = measure_throughput(model, SHORT, seconds=600, say=said.append)
    assert [row.streams for row in result.rows] == [1, 3, 256] and not result.skipped
    assert said == ["timing 1 stream", "timing 3 streams", "timing 256 streams"]
    for row in result.rows:
        assert row.complete and row.first_token_ms > 0 and row.share_of_roofline > 0
        assert row.streams * 8 / row.tokens_per_second >= row.first_token_ms / 1e3
    assert result.backend and result.copy_bandwidth > 1e6
    assert result.layers == {"dense float32": len(result.layer_backends)}
    assert {"lm_head", "model.layers.0.mlp.up_proj"} <= result.layer_backends.keys()
    assert result.to_json()["layers"] == result.layers


def test_without_time_batches_are_cut_off_and_skipped(model: str) -> None:
    result = measure_throughput(model, RequestWorkload("longer", ((8, 100),)), seconds=1e-6, streams=(1, 2))
    assert [row.streams for row in result.rows] == [1] and result.skipped == (2,)
    (row,) = result.rows
    assert not row.complete
    assert row.tokens_per_second < 1.2 * 1e3 / row.decode_ms  # at least 90 steps like the few that were seen


def test_a_quantized_source_is_timed_as_served_or_as_compressed(tmp_path: Path) -> None:
    """`smelt serve` keeps the matrices of a GGUF file packed; a run dequantizes them before it compresses."""
    file = llama_file(tmp_path / "m.gguf", "Q8_0")
    served = measure_throughput(str(file), SHORT, streams=(1,))
    compressed = measure_throughput(str(file), SHORT, streams=(1,), packed=False)
    assert not all(name.startswith("dense") for name in served.layers)
    assert all(name.startswith("dense") for name in compressed.layers)


@pytest.mark.parametrize("tied", [False, True])
def test_a_step_reads_all_weights_but_an_embedding_table_that_is_not_the_output_layer(tied: bool) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    network = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=50, tie_word_embeddings=tied))
    block = 4 * (4 * 16 * 16 + 3 * 16 * 24 + 2 * 16) + 4 * 16  # with the final norm
    rotary = sum(buffer.nbytes for buffer in network.buffers())
    assert throughput._weight_bytes(network) == block + 4 * 50 * 16 + rotary


def test_a_model_that_does_not_generate_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SmeltError):
        measure_throughput(str(tmp_path), SHORT)


def timed(speeds: dict[int, float], backend: str = "fused", layers: dict[str, int] | None = None) -> Throughput:
    rows = tuple(ThroughputRow(streams, speed, 10.0, 1.0, 0.5, True) for streams, speed in speeds.items())
    return Throughput("chat", "cuda", backend, backends(layers or {"dense bfloat16": 9}), 1.0, 1e12, rows, ())


def backends(layers: dict[str, int]) -> dict[str, str]:
    return {f"{backend} {index}": backend for backend, number in layers.items() for index in range(number)}


def test_a_slower_model_is_explained() -> None:
    base = timed({1: 100.0, 64: 1000.0, 256: 2000.0})
    assert explain_slowdown(timed({1: 150.0, 64: 990.0}), base) is None  # within the tolerance
    assert [row["streams"] for row in compare_throughput(timed({1: 150.0, 4: 1.0}), base)] == [1]
    slow = timed({1: 150.0, 64: 900.0}, layers={"hopper": 8, "dense bfloat16": 1})
    sentence = explain_slowdown(slow, base)
    assert sentence is not None and "0.90x with 64 at a time" in sentence and "input_activations" in sentence
    assert "guard: speed" in sentence
    assert "guard: speed" not in str(explain_slowdown(slow, base, guarded=True))  # it is no remedy any more
    slow_alone = timed({1: 80.0, 64: 900.0}, layers={"hopper": 8})
    sentence = explain_slowdown(slow_alone, base)
    assert sentence is not None and "another format" in sentence and "many tokens" not in sentence
    for changed, cause in (
        (replace(slow, layer_backends=backends({"dequantized at load": 8})), "8 layers have no kernel"),
        (replace(slow, backend="eager"), "runs as 'eager'"),
        (replace(slow, layer_backends=backends({"dense bfloat16": 9})), "ffn_multiple"),
    ):
        sentence = explain_slowdown(changed, base)
        assert sentence is not None and cause in sentence
