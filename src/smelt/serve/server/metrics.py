"""The server's metrics under vLLM's names, and a history of the last two minutes."""

from __future__ import annotations

from collections import deque
from typing import Any

from smelt.serve.server.prometheus import Counter, Gauge, Histogram, render
from smelt.serve.server.shared_table import SharedTable

FIRST_TOKEN_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
)
TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
REQUEST_BUCKETS = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
STEP_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
HISTORY_SECONDS = 120


def length_buckets(max_model_len: int) -> list[int]:
    """Return 1, 2, 5, 10, 20, ... up to `max_model_len`."""
    buckets = [digit * 10**power for power in range(len(str(max_model_len))) for digit in (1, 2, 5)]
    return [bound for bound in buckets if bound <= max_model_len] or [1]


class ServerMetrics:
    """All metrics of one server, whose processes count in a table that they share."""

    def __init__(self, model: str, max_model_len: int, table: SharedTable | None = None) -> None:
        self.model = model
        lengths = length_buckets(max_model_len)
        self.running = Gauge("vllm:num_requests_running", "Sequences in the running batch.")
        self.waiting = Gauge("vllm:num_requests_waiting", "Sequences that wait to be scheduled.")
        self.kv_cache_usage = Gauge("vllm:kv_cache_usage_perc", "Fraction of KV cache blocks in use; 1 is all.")
        self.prompt_tokens = Counter("vllm:prompt_tokens", "Prompt tokens of accepted requests.")
        self.generated_tokens = Counter("vllm:generation_tokens", "Generated tokens.")
        self.preemptions = Counter("vllm:num_preemptions", "Preempted sequences.")
        self.finished = Counter(
            "vllm:request_success", "Finished sequences by reason.", "finished_reason",
            ("stop", "length", "abort", "error"),
        )  # fmt: skip
        self.prefix_cache_queries = Counter("vllm:prefix_cache_queries", "Tokens looked up in the prefix cache.")
        self.prefix_cache_hits = Counter("vllm:prefix_cache_hits", "Tokens found in the prefix cache.")
        self.time_to_first_token = Histogram(
            "vllm:time_to_first_token_seconds", "Time from arrival to the first token.", FIRST_TOKEN_BUCKETS
        )
        self.inter_token_latency = Histogram(
            "vllm:inter_token_latency_seconds", "Time between two tokens of a sequence.", TOKEN_BUCKETS
        )
        self.time_per_output_token = Histogram(
            "vllm:request_time_per_output_token_seconds",
            "Mean time per token of a sequence after its first.",
            TOKEN_BUCKETS,
        )
        self.e2e_latency = _request_time("e2e_request_latency", "arrival to the end of a sequence")
        self.queue_time = _request_time("request_queue_time", "arrival to the first step")
        self.inference_time = _request_time("request_inference_time", "the first step to the end")
        self.prefill_time = _request_time("request_prefill_time", "the first step to the first token")
        self.decode_time = _request_time("request_decode_time", "the first token to the last")
        self.request_prompt_tokens = Histogram("vllm:request_prompt_tokens", "Tokens per prompt.", lengths)
        self.request_generation_tokens = Histogram("vllm:request_generation_tokens", "Tokens per sequence.", lengths)
        self.iteration_tokens = Histogram("vllm:iteration_tokens_total", "Tokens computed per step.", STEP_BUCKETS)
        self.request_n = Histogram("vllm:request_params_n", "The requests' n.", (1, 2, 5, 10, 20))
        self.request_max_tokens = Histogram("vllm:request_params_max_tokens", "The requests' max_tokens.", lengths)
        self.blocks = Gauge("smelt:kv_blocks", "KV cache blocks.")
        self.blocks_used = Gauge("smelt:kv_blocks_used", "KV cache blocks in use.")
        self.kv_bytes = Gauge("smelt:kv_cache_bytes", "Bytes of the KV cache.")
        self.kv_bytes_used = Gauge("smelt:kv_cache_bytes_used", "Bytes of the KV cache in use.")
        self.kv_bytes_per_token = Gauge(
            "smelt:kv_cache_bytes_per_token", "Bytes in use per token that running sequences have read or written."
        )
        self.expert_uses = Counter("smelt:expert_uses", "Carved experts that each step used, summed over steps.")
        self.expert_hits = Counter("smelt:expert_cache_hits", "Those that were on the device, with expert slots.")
        self.expert_misses = Counter("smelt:expert_cache_misses", "Those that had to be loaded, with expert slots.")
        self.expert_bytes_loaded = Counter("smelt:expert_bytes_loaded", "Bytes of experts loaded from host memory.")
        self.restarts = Counter("smelt:engine_restarts", "Restarts of the engine's process.")
        self.refused = Counter("smelt:requests_refused", "Requests refused because the queue was full.")
        self.embeddings = Counter("smelt:embeddings", "Texts that were embedded.")
        self._last_state: dict[str, int] = {}
        self.history: deque[dict[str, float]] = deque(maxlen=HISTORY_SECONDS)
        self._last_tokens = 0.0
        if table is not None:
            for metric in self._metrics():
                metric.cells = table.allocate(metric.num_cells)

    def update_engine_state(self, state: dict[str, int]) -> None:
        """Take a state that the engine reported; its counts restart at 0 with its process."""
        self.running.set(state["running"])
        self.waiting.set(state["waiting"])
        self.blocks.set(state["blocks"])
        self.blocks_used.set(state["blocks_used"])
        self.kv_cache_usage.set(state["blocks_used"] / max(state["blocks"], 1))
        used = state.get("kv_bytes_used", 0)
        self.kv_bytes.set(state.get("kv_bytes", 0))
        self.kv_bytes_used.set(used)
        self.kv_bytes_per_token.set(used / tokens if (tokens := state.get("kv_tokens", 0)) else 0)
        last = self._last_state if self._last_state.get("steps", 0) <= state["steps"] else {}
        increase = {name: value - last.get(name, 0) for name, value in state.items()}
        self.preemptions.inc(increase["preemptions"])
        self.prefix_cache_queries.inc(increase["prompt_tokens"])
        self.prefix_cache_hits.inc(increase["cached_tokens"])
        for name in (
            "expert_uses",
            "expert_hits",
            "expert_misses",
            "expert_bytes_loaded",
        ):  # of a model with carved experts
            getattr(self, name).inc(increase.get(name, 0))
        if increase["steps"] and increase["computed_tokens"]:
            self.iteration_tokens.observe(increase["computed_tokens"] / increase["steps"], increase["steps"])
        self._last_state = dict(state)

    def reset_engine_state(self) -> None:
        """Zero the gauges when the engine has ended."""
        for gauge in (
            self.running, self.waiting, self.blocks_used, self.kv_cache_usage, self.kv_bytes_used,
            self.kv_bytes_per_token,
        ):  # fmt: skip
            gauge.set(0)
        self._last_state = {}

    def record_history(self) -> None:
        """Append one second to the history; called once per second."""
        tokens = self.generated_tokens.value + self.prompt_tokens.value * (self.blocks.value == 0)
        self.history.append({
            "tokens": tokens - self._last_tokens, "running": self.running.value, "waiting": self.waiting.value,
            "kv_cache_usage": self.kv_cache_usage.value,
        })  # fmt: skip
        self._last_tokens = tokens

    def render(self) -> str:
        """Return the response of /metrics."""
        return render(self._metrics(), {"model_name": self.model})

    def _metrics(self) -> list[Counter | Gauge | Histogram]:
        return [metric for metric in vars(self).values() if isinstance(metric, Counter | Gauge | Histogram)]

    def snapshot(self) -> dict[str, Any]:
        """Return plain values for the live page."""
        values = ("running", "waiting", "blocks", "blocks_used", "kv_bytes", "kv_bytes_used", "kv_bytes_per_token",
                  "prompt_tokens", "generated_tokens", "preemptions", "prefix_cache_queries", "prefix_cache_hits",
                  "restarts", "refused", "embeddings")  # fmt: skip
        latencies = ("time_to_first_token", "inter_token_latency", "e2e_latency", "queue_time")
        return {
            **{name: _plain(getattr(self, name).value) for name in values},
            "finished": self.finished.values,
            "latency": {name: getattr(self, name).snapshot() for name in latencies},
            "history": list(self.history),
        }


def _plain(value: float) -> float:
    return int(value) if value.is_integer() else value


def _request_time(name: str, interval: str) -> Histogram:
    return Histogram(f"vllm:{name}_seconds", f"Time from {interval}.", REQUEST_BUCKETS)
