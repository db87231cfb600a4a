"""No request causes a 5xx: schemathesis in negative mode over the server's own OpenAPI description."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode

from tests.serve.server_process import Server

MAX_SECONDS = 1.5  # per route
POSTS = ("/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/tokenize", "/detokenize")


class TimeUpError(Exception):
    """The time is up."""


def is_short(case: Any) -> bool:
    """Keep accidentally valid requests from generating for seconds."""
    return not (isinstance(case.body, dict) and isinstance(case.body.get("max_tokens"), int))


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize("mode", [GenerationMode.NEGATIVE, GenerationMode.POSITIVE])
def test_no_request_causes_a_5xx(server: Server, path: str, mode: GenerationMode) -> None:
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    operation = schema[path]["POST"]
    until, statuses = time.monotonic() + MAX_SECONDS, []

    @settings(
        max_examples=60, deadline=None, database=None, phases=[Phase.generate], derandomize=True,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(case=operation.as_strategy(generation_mode=mode))
    def ask(case: Any) -> None:
        if len(statuses) >= 5 and time.monotonic() > until:
            raise TimeUpError
        if is_short(case):
            answer = case.call(timeout=120)
            statuses.append(answer.status_code)
            assert answer.status_code < 500, (answer.status_code, answer.text)
            if answer.status_code >= 400:
                assert set(answer.json()["error"]) == {"message", "type", "param", "code"}

    with suppress(TimeUpError):
        ask()
    assert len(statuses) >= 5
    if mode is GenerationMode.NEGATIVE:
        assert any(400 <= status < 500 for status in statuses)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=8,
)
FIELDS = (
    *(
        "prompt",
        "messages",
        "stop",
        "logit_bias",
        "stream_options",
        "n",
        "logprobs",
        "tools",
        "response_format",
        "seed",
    ),
    *("stop_token_ids", "model", "temperature", "cache_salt", "echo", "best_of", "modalities", "tool_choice"),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=4), chat=st.booleans(), stream=st.booleans())
def test_no_field_value_causes_a_5xx(server: Server, body: dict[str, Any], chat: bool, stream: bool) -> None:
    needed: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]} if chat else {"prompt": "x"}
    path = "/v1/chat/completions" if chat else "/v1/completions"
    answer = server.post(path, {**needed, **body, "max_tokens": 2, "stream": stream})
    assert answer.status_code < 500, answer.text


def test_the_server_still_works(server: Server) -> None:
    server.wait_until_idle()
    assert server.state()["restarts"] == 0 and "a request failed" not in server.log.read_text()
