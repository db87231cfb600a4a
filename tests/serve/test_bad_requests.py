"""Bad input gets a 4xx with a sentence; afterwards the server answers as before. Many of these once crashed a server:
the numbers are those of the reports (shared/field.md, F2).
"""

from __future__ import annotations

import json
import socket
from contextlib import suppress
from typing import Any

import httpx
import pytest

from tests.serve.server_process import CONTEXT, Server

SECRET = "zebra-secret"
MESSAGES = [{"role": "user", "content": SECRET}]


def completion(**fields: Any) -> tuple[str, Any]:
    return "/v1/completions", {"prompt": SECRET, "max_tokens": 4, **fields}


def chat(**fields: Any) -> tuple[str, Any]:
    return "/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 4, **fields}


def user_message(**fields: Any) -> tuple[str, Any]:
    return chat(messages=[{"role": "user", **fields}])


URL = "http://169.254.169.254/latest/meta-data"
BAD = {
    "CVE-2024-8768 an empty prompt": completion(prompt=""),
    "an empty list of prompts": completion(prompt=[]),
    "an empty list of tokens among others": completion(prompt=[[1], []]),
    "CVE-2024-8939 a huge best_of": completion(best_of=10**9),
    "#37952 a huge n": completion(n=10**9),
    "n above the room": completion(n=128, prompt=[SECRET] * 100),
    "#47845 a list of prompts without end": completion(prompt=[SECRET] * 100_000),
    "CVE-2025-29770 a grammar": completion(structured_outputs={"grammar": "root ::= " + "x " * 1000}),
    "CVE-2025-48942 a bad JSON schema": chat(
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "strange"}}}
    ),
    "CVE-2025-48943 a bad regex": completion(guided_regex="(((((a*)*)*)*)*)*$"),
    "CVE-2025-48944 a bad type in tools": chat(
        tools=[{"type": "function", "function": {"name": "f", "parameters": {"type": "x", "pattern": "*"}}}]
    ),
    "CVE-2025-9141 a tool call that looks like code": user_message(
        content=None, tool_calls=[{"function": "__import__('os')"}]
    ),
    "CVE-2025-61620 a chat template": chat(chat_template="{% for i in range(10**9) %}x{% endfor %}"),
    "CVE-2025-62426 messages as an argument of a chat template": chat(chat_template_kwargs={"messages": []}),
    "large arguments of a chat template": chat(chat_template_kwargs={"x": "y" * 5000}),
    "an argument of a chat template that is no name": chat(chat_template_kwargs={"__class__": 1}),
    "CVE-2026-5760 an unsandboxed template": chat(chat_template="{{ ''.__class__.__mro__ }}"),
    "CVE-2025-62164 prompt_embeds": completion(prompt_embeds="gAJ9cQAu"),
    "CVE-2025-62164 prompt_embeds without a prompt": ("/v1/completions", {"prompt_embeds": "gAJ9cQAu"}),
    "CVE-2025-62372 vectors for a prompt": completion(prompt=[[0.5, 0.25]]),
    "CVE-2026-22773 a 1x1 image": user_message(
        content=[{"type": "image_url", "image_url": {"url": "data:image/png;base64,aa"}}]
    ),
    "#47010 an image bomb": user_message(content=[{"type": "image_url", "image_url": {"url": "data:," + "A" * 10**6}}]),
    "#44970 an audio bomb": user_message(content=[{"type": "input_audio", "input_audio": {"data": "A" * 10**5}}]),
    "#38636 a video": user_message(content=[{"type": "video_url", "video_url": {"url": URL}}]),
    "CVE-2025-6242 a URL inside the network": user_message(content=[{"type": "image_url", "image_url": {"url": URL}}]),
    "CVE-2026-24779 a URL read in two ways": user_message(
        content=[{"type": "image_url", "image_url": {"url": "http://good\\@evil"}}]
    ),
    "#47007 truncation": completion(truncate_prompt_tokens=-2),
    "#46588 a prompt that is too long": completion(prompt="x" * (CONTEXT + 1)),
    "#46588 tokens that are too many": completion(prompt=[5] * CONTEXT),
    "#3910 of SGLang, a far too long prompt": completion(prompt="x" * 3_000_000),
    "prompt and answer together": completion(max_tokens=CONTEXT),
    "#44744 a token that does not exist": completion(prompt=[5, 257]),
    "a negative token": completion(prompt=[5, -1]),
    "a token beyond 64 bits": completion(prompt=[5, 2**70]),
    "many stop strings": completion(stop=["x"] * 17),
    "an empty stop string": completion(stop=[""]),
    "a long stop string": completion(stop="x" * 10_000),
    "a stop token that does not exist": completion(stop_token_ids=[10**6]),
    "a negative stop token": completion(stop_token_ids=[-1]),
    "duplicate bad words": completion(bad_words=["x"] * 10_000),
    "beam width": completion(use_beam_search=True, n=17),
    "a bias for a token that does not exist": completion(logit_bias={"257": 1}),
    "a bias for no token": completion(logit_bias={SECRET: 1}),
    "a bias out of range": completion(logit_bias={"5": 1000}),
    "many biases": completion(logit_bias={str(token): 1 for token in range(2000)}),
    "many logprobs": completion(logprobs=21),
    "many top_logprobs": chat(logprobs=True, top_logprobs=21),
    "top_logprobs alone": chat(top_logprobs=2),
    "a seed beyond 64 bits": completion(seed=2**64),
    "a negative temperature": completion(temperature=-1),
    "a word for a number": completion(temperature=SECRET),
    "true for a number": completion(max_tokens=True),
    "negative tokens": completion(max_tokens=-1),
    "log-probabilities of a prompt in a stream": completion(prompt_logprobs=1, stream=True),
    "more at least than at most": completion(max_tokens=2, min_tokens=3),
    "top_p zero": completion(top_p=0),
    "suffix": completion(suffix=SECRET),
    "prompt logprobs": completion(prompt_logprobs=21),
    "a long cache salt": completion(cache_salt="x" * 1000),
    "a priority out of range": completion(priority=10**9),
    "a request id with a line break": completion(request_id="a\nb"),
    "an unknown role": chat(messages=[{"role": SECRET, "content": "x"}]),
    "no messages": chat(messages=[]),
    "a long history": chat(messages=MESSAGES * 3000),
    "too many parts": user_message(content=[{"type": "text", "text": "x"}] * 3000),
    "a message that is no object": chat(messages=[SECRET]),
    "no body fields": ("/v1/completions", {}),
    "a list": ("/v1/completions", [SECRET]),
    "tokens that do not exist": ("/detokenize", {"tokens": [10**9]}),
    "tokens beyond 32 bits": ("/detokenize", {"tokens": [2**40]}),
    "nothing to tokenize": ("/tokenize", {}),
    "embeddings of a language model": ("/v1/embeddings", {"input": SECRET}),
    "a lone surrogate": completion(prompt="\ud800"),
    "a lone surrogate in a message": user_message(content="\ud800"),
    "a lone surrogate to stop at": completion(stop="\ud800"),
    "a lone surrogate in a field that is ignored": completion(prompt="", user="\ud800"),
    "a lone surrogate as salt": completion(cache_salt="\udfff"),
}


def is_error(answer: httpx.Response) -> bool:
    error = answer.json()["error"]
    return set(error) == {"message", "type", "param", "code"} and len(error["message"]) > 10


@pytest.mark.parametrize(("path", "body"), BAD.values(), ids=BAD)
def test_a_bad_field_gets_a_sentence(server: Server, path: str, body: Any) -> None:
    answer = server.http.post(
        server.url + path, content=json.dumps(body), headers={"content-type": "application/json"}, timeout=20
    )
    assert 400 <= answer.status_code < 500, answer.text
    assert is_error(answer) and SECRET not in answer.text


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize("field", ["temperature", "repetition_penalty", "top_p"])
def test_non_finite_numbers(server: Server, field: str, value: str, stream: bool) -> None:
    """#45116 of vLLM."""
    body = f'{{"prompt": "x", "stream": {str(stream).lower()}, "{field}": {value}}}'
    answer = server.http.post(
        server.url + "/v1/completions", content=body, headers={"content-type": "application/json"}
    )
    assert answer.status_code == 400 and is_error(answer)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"\xff\xfe", b"[" * 100_000, b'{"prompt": "x", "prompt": ' + b"[" * 5000, b"null", b'"x"', b"5"],
    ids=lambda content: repr(content[:12]),
)
def test_bodies_that_are_not_a_json_object(server: Server, content: bytes) -> None:
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/v1/embeddings"):
        answer = server.http.post(server.url + path, content=content, headers={"content-type": "application/json"})
        assert answer.status_code == 400 and is_error(answer)


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", None])
def test_only_json_is_accepted(server: Server, kind: str | None) -> None:
    """Another site's page can send the other content types without a preflight request."""
    headers = {"content-type": kind} if kind else {}
    answer = server.http.post(server.url + "/v1/completions", content=b'{"prompt": "x"}', headers=headers)
    assert answer.status_code == 400 and is_error(answer)


def test_a_large_body_is_refused_with_and_without_its_length(server: Server) -> None:
    """CVE-2025-33201; #45510 of vLLM."""
    large = b'{"prompt": "' + b"x" * (5 << 20) + b'"}'
    headers = {"content-type": "application/json"}
    answer = server.http.post(server.url + "/v1/completions", content=large, headers=headers)
    assert answer.status_code == 413 and is_error(answer)

    def endless() -> Any:
        while True:
            yield b"x" * 65536

    with suppress(
        httpx.WriteError, httpx.ReadError, httpx.RemoteProtocolError
    ):  # the server may close it while we write
        assert server.http.post(server.url + "/v1/completions", content=endless(), headers=headers).status_code == 413
    received = raw(
        server, b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999999999999\r\n\r\n"
    )
    assert received.startswith(b"HTTP/1.1 413")


def raw(server: Server, request: bytes) -> bytes:
    host, _, port = server.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=120) as connection:
        received = b""
        try:
            connection.sendall(request)
            while part := connection.recv(65536):
                received += part
                if b"\r\n\r\n" in received and b"}" in received:
                    break
        except (ConnectionResetError, BrokenPipeError):
            pass
        return received


@pytest.mark.parametrize("size", [40_000, 200_000, 5_000_000])
def test_a_huge_header(server: Server, size: int) -> None:
    """CVE-2025-48956."""
    received = raw(server, b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Long: " + b"x" * size + b"\r\n\r\n")
    assert received[:12] in (b"HTTP/1.1 400", b"HTTP/1.1 431") or received == b""
    many = b"".join(b"X-%d: x\r\n" % number for number in range(size // 10))
    received = raw(server, b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + many + b"\r\n")
    assert received[:12] in (b"HTTP/1.1 400", b"HTTP/1.1 431") or received == b""
    assert server.get("/health").status_code == 200


@pytest.mark.parametrize(
    "request_",
    [
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\nx\r\n",
        b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nFFFFFFFFF\r\n" + b"x" * (5 << 20),
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3\r\nContent-Length: 5\r\n\r\nxxxxx",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: other\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET /../../etc/passwd HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /%2e%2e/%2e%2e/etc/passwd HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ],
    ids=lambda request: repr(request[:70]),
)
def test_broken_http(server: Server, request_: bytes) -> None:
    """CVE-2025-23310 and CVE-2026-24208 of Triton's server: chunked bodies, and path traversal."""
    assert raw(server, request_ + b"\r\n\r\n")[:10] in (b"HTTP/1.1 4", b"")
    assert server.get("/health").status_code == 200


def test_unknown_routes(server: Server) -> None:
    """Endpoints of other servers: weights, RPC, adapters, jobs."""
    for path in ("/update_weights_from_tensor", "/pause", "/invocations",
                 "/docs", "/v1/completions/", "//v1/models", "/collective_rpc", "/api/jobs/"):  # fmt: skip
        answer = server.post(path, {})
        assert answer.status_code in (404, 405) and is_error(answer) and "location" not in answer.headers
    assert server.get("/v1/completions").status_code == 405
    assert server.http.delete(server.url + "/v1/models").status_code == 405
    assert server.http.options(server.url + "/v1/completions").status_code == 405


def test_afterwards_nothing_leaked_and_nothing_was_logged(server: Server) -> None:
    server.wait_until_idle()
    assert server.state()["restarts"] == 0 and server.complete("hello")["choices"][0]["text"]
    log = server.log.read_text()
    assert SECRET not in log and "Traceback" not in log and "a request failed" not in log
