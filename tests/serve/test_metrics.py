"""/metrics and /state report what clients saw."""

from __future__ import annotations

import re
from typing import Any

import pytest

from smelt.serve.server.metrics import ServerMetrics, length_buckets
from smelt.serve.server.prometheus import Counter, Histogram, render
from tests.serve.server_process import NAME, Server, read_events

NAMES = {
    "gauge": ["num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"],
    "counter": [
        "prompt_tokens_total", "generation_tokens_total", "num_preemptions_total", "request_success_total",
        "prefix_cache_queries_total", "prefix_cache_hits_total",
    ],
    "histogram": [
        "time_to_first_token_seconds", "inter_token_latency_seconds", "request_time_per_output_token_seconds",
        "e2e_request_latency_seconds", "request_queue_time_seconds", "request_inference_time_seconds",
        "request_prefill_time_seconds", "request_decode_time_seconds", "request_prompt_tokens",
        "request_generation_tokens", "iteration_tokens_total", "request_params_n", "request_params_max_tokens",
    ],
}  # fmt: skip


def metrics(server: Server) -> dict[str, float]:
    answer = server.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    samples = {}
    for line in answer.text.splitlines():
        if not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            samples[name.replace(f'model_name="{NAME}",', "").replace(f'{{model_name="{NAME}"}}', "")] = float(value)
    return samples


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in NAMES.items() for name in names])
def test_every_metric_is_exposed_with_its_type(server: Server, kind: str, name: str) -> None:
    text = server.get("/metrics").text
    assert f"# TYPE vllm:{name} {kind}\n" in text and f"# HELP vllm:{name} " in text
    assert re.search(rf'^vllm:{name}(_sum)?{{model_name="{NAME}"', text, re.MULTILINE)


def test_counters_match_the_clients(server: Server) -> None:
    server.wait_until_idle()
    before = metrics(server)
    usages: list[dict[str, Any]] = [
        server.complete("metrics " * 5, max_tokens=7, n=2, ignore_eos=True)["usage"],
        server.complete(["one", "two"], max_tokens=3, ignore_eos=True)["usage"],
        server.complete("ends", max_tokens=9, logit_bias={"256": 100})["usage"],
    ]
    body = {"prompt": "streamed", "max_tokens": 6, "ignore_eos": True, "stream": True}
    events = read_events(server.post("/v1/completions", {**body, "stream_options": {"include_usage": True}}))
    usages.append(events[-1]["usage"])
    server.wait_until_idle()
    after = metrics(server)

    def grown(name: str) -> float:
        return after[f"vllm:{name}"] - before[f"vllm:{name}"]

    tokens = sum(usage["completion_tokens"] for usage in usages)
    assert grown("prompt_tokens_total") == sum(usage["prompt_tokens"] for usage in usages)
    assert grown("generation_tokens_total") == tokens == 14 + 6 + 1 + 6
    assert grown('request_success_total{finished_reason="length"}') == 5
    assert grown('request_success_total{finished_reason="stop"}') == 1
    assert grown('request_success_total{finished_reason="abort"}') == 0
    assert grown("time_to_first_token_seconds_count") == grown("e2e_request_latency_seconds_count") == 6
    assert grown("inter_token_latency_seconds_count") == tokens - 6
    assert grown("request_generation_tokens_sum") == tokens
    assert grown("request_prompt_tokens_count") == 5
    assert grown("request_params_n_sum") == 5 and grown("request_params_max_tokens_sum") == 7 + 3 + 9 + 6
    assert grown("iteration_tokens_total_sum") > 0
    latency, queue = grown("e2e_request_latency_seconds_sum"), grown("request_queue_time_seconds_sum")
    assert latency == pytest.approx(queue + grown("request_inference_time_seconds_sum"), abs=1e-3)
    assert after["vllm:num_requests_running"] == after["smelt:kv_blocks_used"] == 0
    assert all(value >= before[name] for name, value in after.items() if "_total" in name or "_bucket" in name)


def test_running_requests_and_cache_usage_are_reported_live(server: Server) -> None:
    body = {"prompt": "x" * 64, "max_tokens": 1900, "ignore_eos": True, "n": 3, "stream": True}
    with server.http.stream("POST", server.url + "/v1/completions", json=body, timeout=300) as answer:
        lines = answer.iter_lines()
        assert next(lines)
        server.wait_until(lambda state: state["running"] == 3)
        with server.paused():
            state = server.state()
            assert 0 < state["blocks_used"] <= state["blocks"] and state["admitted"] == state["running"] == 3
            assert metrics(server)["vllm:num_requests_running"] == 3
    server.wait_until_idle()


def test_the_text_format() -> None:
    counter, histogram = Counter("x", "Told.", "why", ("a", 'b"\n\\')), Histogram("y", "Told.", (1, 2.5))
    counter.inc(2, 'b"\n\\')
    for value in (0.5, 1, 2, 3):
        histogram.observe(value)
    assert render([counter, histogram], {"m": "n"}).splitlines() == [
        "# HELP x_total Told.", "# TYPE x_total counter", 'x_total{m="n",why="a"} 0',
        'x_total{m="n",why="b\\"\\n\\\\"} 2', "# HELP y Told.", "# TYPE y histogram", 'y_bucket{m="n",le="1"} 2',
        'y_bucket{m="n",le="2.5"} 3', 'y_bucket{m="n",le="+Inf"} 4', 'y_sum{m="n"} 6.5', 'y_count{m="n"} 4',
    ]  # fmt: skip
    assert length_buckets(2048) == [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000]


def test_counters_continue_after_an_engine_restart() -> None:
    metrics = ServerMetrics("x", 128)
    state = {"running": 1, "waiting": 0, "blocks": 10, "blocks_used": 5, "steps": 4, "computed_tokens": 40,
             "preemptions": 2, "prompt_tokens": 30, "cached_tokens": 10, "generated_tokens": 4}  # fmt: skip
    metrics.update_engine_state(state)
    assert metrics.kv_cache_usage.value == 0.5 and metrics.iteration_tokens.count == 4
    metrics.reset_engine_state()
    assert metrics.running.value == metrics.blocks_used.value == 0
    metrics.update_engine_state({**state, "steps": 5, "prompt_tokens": 7})
    assert metrics.preemptions.value == 4 and metrics.prefix_cache_queries.value == 37
