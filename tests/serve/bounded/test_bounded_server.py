"""`smelt serve MODEL --kv-token-cap N` over HTTP: texts longer than the model's context in constant memory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serve.server_process import CONTEXT, Server, read_events, start

CAP, BLOCK = 256, 16
MOST = CAP // BLOCK
CONTEXT_GIVEN = 40_000
TEXT = "once upon a time there was a cache that forgot what nobody looked at. " * 90


@pytest.fixture(scope="module")
def small(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("capped")
    options = ("--max-num-seqs", "4", "--max-num-batched-tokens", "64", "--max-model-len", str(CONTEXT_GIVEN))
    running = start(model_folder, folder, "--kv-token-cap", str(CAP), *options)
    yield running
    running.wait_until_idle()
    assert running.end() == 0, running.log.read_text()


def test_a_prompt_longer_than_the_models_context(small: Server) -> None:
    assert len(TEXT) > 3 * CONTEXT and small.state()["backend"].endswith(f"KV cache of {CAP} tokens")
    assert small.state()["blocks"] == 4 * MOST  # four requests of any length
    answer = small.complete(TEXT, max_tokens=300, ignore_eos=True)
    assert answer["usage"]["prompt_tokens"] == len(TEXT) and answer["usage"]["completion_tokens"] == 300
    assert small.complete(TEXT, max_tokens=300, ignore_eos=True)["choices"] == answer["choices"]


def test_a_conversation_continues_from_its_session_cache(small: Server) -> None:
    prompt = list(TEXT.encode()[:3000])
    for turn in range(3):
        answer = small.complete(prompt, max_tokens=8, ignore_eos=True, return_token_ids=True)
        cached_tokens = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached_tokens == (0 if turn == 0 else len(prompt) - 101)
        prompt += [*answer["choices"][0]["token_ids"], *b"x" * 100]


def test_an_answer_without_a_limit_ends(small: Server) -> None:
    body = {"messages": [{"role": "user", "content": TEXT[:3000]}], "temperature": 0, "ignore_eos": True}
    answer = small.post("/v1/chat/completions", body).json()
    assert answer["usage"]["completion_tokens"] == CAP and answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["prompt_tokens"] > 3000


def test_several_clients_at_once_and_one_that_disconnects(small: Server) -> None:
    body = {"prompt": TEXT, "max_tokens": 30_000, "temperature": 0, "ignore_eos": True, "stream": True}
    with small.http.stream("POST", small.url + "/v1/completions", json=body) as response:
        lines = response.iter_lines()  # keep a reference: when it is collected, the client disconnects
        first = json.loads(next(lines).removeprefix("data: "))
        assert first["choices"][0]["finish_reason"] is None, first
        assert 0 < small.state()["blocks_used"] <= MOST
    small.wait_until_idle()
    with small.http.stream("POST", small.url + "/v1/completions", json={**body, "max_tokens": 20, "n": 3}) as response:
        events = read_events(response)
    texts = ["".join(c["text"] for e in events for c in e["choices"] if c["index"] == index) for index in range(3)]
    assert texts[0] and len(set(texts)) == 1
    small.wait_until_idle()


def test_only_an_explicit_max_model_len_limits(small: Server) -> None:
    assert small.get("/v1/models").json()["data"][0]["max_model_len"] == CONTEXT_GIVEN
    refused = small.post("/v1/completions", {"prompt": TEXT * 7, "max_tokens": 1})
    assert refused.status_code == 400 and refused.json()["error"]["code"] == "context_length_exceeded"
