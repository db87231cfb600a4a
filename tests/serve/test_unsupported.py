"""No field is ignored that could change an answer; clients of OpenAI, vLLM and llama.cpp are answered all the same."""

from __future__ import annotations

from typing import Any

import pytest

from tests.serve.server_process import Server

# What clients send without being asked, with their default values.
NEUTRAL: dict[str, dict[str, Any]] = {
    "openai": {
        "user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "modalities": ["text"],
        "prediction": {"type": "content", "content": "x"}, "safety_identifier": "1", "prompt_cache_key": "k",
        "verbosity": "medium", "audio": None, "logit_bias": {}, "stop": None,
    },
    "vllm": {
        "best_of": 1, "use_beam_search": False, "length_penalty": 1.0, "early_stopping": False, "bad_words": [],
        "prompt_logprobs": None, "min_tokens": 0, "guided_decoding_backend": "auto", "guided_json": None,
        "kv_transfer_params": None, "return_tokens_as_token_ids": False, "priority": 0, "vllm_xargs": None,
    },
    "llama.cpp": {
        "cache_prompt": True, "id_slot": -1, "samplers": [], "dynatemp_range": 0.0, "dynatemp_exponent": 1.0,
        "typical_p": 1.0, "repeat_penalty": 1.0, "repeat_last_n": 64, "mirostat": 0, "mirostat_tau": 5.0,
        "mirostat_eta": 0.1, "dry_multiplier": 0.0, "dry_base": 1.75, "dry_allowed_length": 2, "xtc_probability": 0,
        "xtc_threshold": 0.1, "n_probs": 0, "min_keep": 0, "n_predict": -1, "grammar": "", "json_schema": None,
        "timings_per_token": False, "lora": [], "top_n_sigma": -1.0, "t_max_predict_ms": 0, "n_keep": 0,
    },
}  # fmt: skip
CHANGING: dict[str, Any] = {
    "typical_p": 0.5, "mirostat": 2, "dry_multiplier": 0.8, "xtc_probability": 0.5, "dynatemp_range": 1.0,
    "repeat_penalty": 1.1, "grammar": "root ::= x", "samplers": ["top_k"],
    "n_predict": 5, "length_penalty": 0.5, "early_stopping": True, "store": True, "modalities": ["audio"],
    "verbosity": "low", "guided_json": {"type": "object"}, "chat_template": "x", "logits_processors": ["f"],
    "suffix": "x", "top_n_sigma": 1.0, "n_probs": 3, "max_new_tokens": 4, "num_beams": 2, "do_sample": False,
    "return_tokens_as_token_ids": True, "kv_transfer_params": {"a": 1}, "web_search_options": {"a": 1},
}  # fmt: skip


@pytest.mark.parametrize("client", NEUTRAL)
def test_neutral_values_change_nothing(server: Server, client: str) -> None:
    plain = server.complete("hello", max_tokens=4)["choices"]
    assert server.complete("hello", max_tokens=4, **NEUTRAL[client])["choices"] == plain
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, **NEUTRAL[client]}
    assert server.post("/v1/chat/completions", body).status_code == 200


@pytest.mark.parametrize("name", CHANGING)
def test_a_field_that_would_change_the_answer_is_refused(server: Server, name: str) -> None:
    response = server.post("/v1/completions", {"prompt": "hello", "max_tokens": 4, name: CHANGING[name]})
    error = response.json()["error"]
    assert response.status_code == 400 and error["param"] == name and error["message"].startswith(f"{name}: ")


def test_an_unknown_field_is_refused_by_name(server: Server) -> None:
    for path, content in (
        ("/v1/completions", {"prompt": "hello"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
    ):
        error = server.post(path, {**content, "temprature": 0}).json()["error"]
        assert error["message"] == "temprature: unknown field; did you mean temperature?"
        assert (error["param"], error["code"]) == ("temprature", "unknown_field")
    hidden = server.post("/v1/completions", {"prompt": "hello", "a secret text": 1})
    assert hidden.status_code == 400 and "secret" not in hidden.text


def test_stream_options_need_a_stream(server: Server) -> None:
    body = {"prompt": "hello", "max_tokens": 1, "stream_options": {"include_usage": True}}
    error = server.post("/v1/completions", body).json()["error"]
    assert error["param"] == "stream_options" and "stream" in error["message"]


@pytest.mark.parametrize(
    ("fields", "limit"),
    [({"prompt": ["x"] * 257}, 256), ({"prompt": [[1]] * 257}, 256), ({"stop": ["x"] * 17}, 16)],
    ids=["texts", "tokens", "stop"],
)  # fmt: skip
def test_an_error_says_the_limit(server: Server, fields: dict[str, Any], limit: int) -> None:
    error = server.post("/v1/completions", {"prompt": "hello", "max_tokens": 1, **fields}).json()["error"]
    assert error["param"] == next(iter(fields)) and f"at most {limit} items" in error["message"]


def test_the_fingerprint_is_stable(server: Server) -> None:
    first, second = (server.complete("hello", max_tokens=1)["system_fingerprint"] for _ in range(2))
    chat = server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1})
    assert first == second == chat.json()["system_fingerprint"] and first.startswith("fp_")


def test_allowed_tokens_are_the_only_ones(server: Server) -> None:
    allowed = [40, 41, 77]
    for fields in ({"temperature": 0}, {"temperature": 1.0, "seed": 1}, {"temperature": 1.0, "top_p": 0.5, "n": 2}):
        choices = server.complete(max_tokens=12, allowed_token_ids=allowed, return_token_ids=True, **fields)["choices"]
        assert all(set(choice["token_ids"]) <= set(allowed) for choice in choices)
    single = server.complete(max_tokens=3, allowed_token_ids=[77], return_token_ids=True)["choices"][0]
    assert single["token_ids"] == [77] * 3
    for wrong, param in (([257], "allowed_token_ids"), ([], "allowed_token_ids"), ([-1], "allowed_token_ids.0")):
        response = server.post("/v1/completions", {"prompt": "hello", "allowed_token_ids": wrong})
        assert response.status_code == 400 and response.json()["error"]["param"] == param
    body = {"prompt": "hello", "allowed_token_ids": [256], "min_tokens": 2, "max_tokens": 4}
    assert "min_tokens leaves none" in server.post("/v1/completions", body).json()["error"]["message"]


def test_bad_words_are_not_written(server: Server) -> None:
    """One token per byte: a word of one letter is a token, of two letters a sequence; a third letter is no match."""
    plain = server.complete(max_tokens=12, ignore_eos=True, return_token_ids=True)["choices"][0]
    bias = {"logit_bias": {"64": 100, "65": 90}, "max_tokens": 6}  # a, b
    assert server.complete(**bias)["choices"][0]["text"] == "aaaaaa"
    assert server.complete(**bias, bad_words=["a"])["choices"][0]["text"] == "bbbbbb"
    assert server.complete(**bias, bad_words=["aa"])["choices"][0]["text"] == "ababab"
    assert server.complete(**bias, bad_words=["aab"])["choices"][0]["text"] == "aaaaaa"
    unrelated = server.complete(max_tokens=12, ignore_eos=True, return_token_ids=True, bad_words=["zzzz"])["choices"][0]
    assert unrelated["token_ids"] == plain["token_ids"]
    for wrong in ([""], ["x" * 65], ["x"] * 65, [1]):
        assert server.post("/v1/completions", {"prompt": "hello", "bad_words": wrong}).status_code == 400
    both = {"prompt": "hello", "bad_words": ["a"], "allowed_token_ids": [5]}
    assert server.post("/v1/completions", both).json()["error"]["param"] == "bad_words"


def test_completions_know_the_newer_name_of_max_tokens(server: Server) -> None:
    """guidellm sends both."""
    for fields in ({"max_completion_tokens": 3}, {"max_tokens": 9, "max_completion_tokens": 3}):
        assert server.complete("hello", ignore_eos=True, **fields)["usage"]["completion_tokens"] == 3
