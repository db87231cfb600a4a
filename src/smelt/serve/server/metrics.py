"""What the server counts and times, under the names that vLLM gave these things, and its last two minutes."""

from __future__ import annotations

from collections import deque
from typing import Any

from smelt.serve.server.prometheus import Histogram, Single, exposition

FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
)
BETWEEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
WHOLE = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
STEP = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
REMEMBERED = 120  # seconds


def one_two_five(most: int) -> list[int]:
    """1, 2, 5, 10, 20, ... up to `most`."""
    found = [digit * 10**power for power in range(len(str(most))) for digit in (1, 2, 5)]
    return [value for value in found if value <= most] or [1]


class Meters:
    """All of them. `context` is the longest a request can be."""

    def __init__(self, model: str, context: int) -> None:
        self.model = model
        lengths = one_two_five(context)
        self.running = Single("gauge", "vllm:num_requests_running", "Answers that are being computed.")
        self.waiting = Single("gauge", "vllm:num_requests_waiting", "Answers that wait for their turn.")
        self.cache_use = Single("gauge", "vllm:kv_cache_usage_perc", "Share of the cache's blocks in use; 1 is all.")
        self.prompt_tokens = Single("counter", "vllm:prompt_tokens", "Tokens of prompts that were answered.")
        self.generated_tokens = Single("counter", "vllm:generation_tokens", "Tokens that were generated.")
        self.preemptions = Single("counter", "vllm:num_preemptions", "Requests that gave their blocks back.")
        self.ended = Single(
            "counter", "vllm:request_success", "Answers that ended, by the reason.", "finished_reason",
            ("stop", "length", "abort", "error"),
        )  # fmt: skip
        self.cache_asked = Single("counter", "vllm:prefix_cache_queries", "Tokens looked for in the prefix cache.")
        self.cache_found = Single("counter", "vllm:prefix_cache_hits", "Tokens found there.")
        self.first_token = Histogram(
            "vllm:time_to_first_token_seconds", "From arrival to the first token.", FIRST_TOKEN
        )
        self.between = Histogram("vllm:inter_token_latency_seconds", "Between two tokens of an answer.", BETWEEN)
        self.per_token = Histogram(
            "vllm:request_time_per_output_token_seconds", "Mean time of an answer's tokens after the first.", BETWEEN
        )
        self.whole = Histogram("vllm:e2e_request_latency_seconds", "From arrival to the end of an answer.", WHOLE)
        self.queued = Histogram("vllm:request_queue_time_seconds", "From arrival to the first step.", WHOLE)
        self.computing = Histogram("vllm:request_inference_time_seconds", "From the first step to the end.", WHOLE)
        self.prefill = Histogram("vllm:request_prefill_time_seconds", "From the first step to the first token.", WHOLE)
        self.decode = Histogram("vllm:request_decode_time_seconds", "From the first token to the last.", WHOLE)
        self.prompt_length = Histogram("vllm:request_prompt_tokens", "Tokens of a prompt.", lengths)
        self.answer_length = Histogram("vllm:request_generation_tokens", "Tokens of an answer.", lengths)
        self.step_tokens = Histogram("vllm:iteration_tokens_total", "Tokens computed in a step.", STEP)
        self.asked_samples = Histogram("vllm:request_params_n", "What requests asked for as n.", (1, 2, 5, 10, 20))
        self.asked_tokens = Histogram("vllm:request_params_max_tokens", "What they asked for as max_tokens.", lengths)
        self.blocks = Single("gauge", "smelt:kv_blocks", "Blocks of the cache.")
        self.blocks_used = Single("gauge", "smelt:kv_blocks_used", "Blocks of the cache in use.")
        self.restarts = Single("counter", "smelt:engine_restarts", "Times the engine's process was started again.")
        self.refused = Single("counter", "smelt:requests_refused", "Requests refused because the queue was full.")
        self.embedded = Single("counter", "smelt:embeddings", "Texts that were turned into vectors.")
        self._before: dict[str, int] = {}
        self.history: deque[dict[str, float]] = deque(maxlen=REMEMBERED)
        self._tokens_before = 0.0

    def observe_engine(self, state: dict[str, int]) -> None:
        """The engine told its state; its own counts begin again at 0 when its process does."""
        self.running.set(state["running"])
        self.waiting.set(state["waiting"])
        self.blocks.set(state["blocks"])
        self.blocks_used.set(state["blocks_used"])
        self.cache_use.set(state["blocks_used"] / max(state["blocks"], 1))
        before = self._before if self._before.get("steps", 0) <= state["steps"] else {}
        new = {name: value - before.get(name, 0) for name, value in state.items()}
        self.preemptions.add(new["preemptions"])
        self.cache_asked.add(new["prompt_tokens"])
        self.cache_found.add(new["cached_tokens"])
        if new["steps"] and new["computed_tokens"]:
            self.step_tokens.observe(new["computed_tokens"] / new["steps"], new["steps"])
        self._before = dict(state)

    def engine_lost(self) -> None:
        for gauge in (self.running, self.waiting, self.blocks_used, self.cache_use):
            gauge.set(0)
        self._before = {}

    def remember(self) -> None:
        """Once a second."""
        tokens = self.generated_tokens.total + self.prompt_tokens.total * (self.blocks.total == 0)
        self.history.append({
            "tokens": tokens - self._tokens_before, "running": self.running.total, "waiting": self.waiting.total,
            "cache": self.cache_use.total,
        })  # fmt: skip
        self._tokens_before = tokens

    def text(self) -> str:
        meters = [each for each in vars(self).values() if isinstance(each, Single | Histogram)]
        return exposition(meters, {"model_name": self.model})

    def plain(self) -> dict[str, Any]:
        """For the page."""
        counts = ("running", "waiting", "blocks", "blocks_used", "prompt_tokens", "generated_tokens", "preemptions",
                  "cache_asked", "cache_found", "restarts", "refused", "embedded")  # fmt: skip
        times = ("first_token", "between", "whole", "queued")
        return {
            **{name: getattr(self, name).total for name in counts},
            "ended": self.ended.values,
            "latency": {name: getattr(self, name).plain() for name in times},
            "history": list(self.history),
        }
