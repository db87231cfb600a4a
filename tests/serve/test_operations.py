"""What operators of a server need: request ids, an access log, probes, TLS, a root path, CORS, traces."""

from __future__ import annotations

import http.server
import json
import re
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from smelt.errors import ConfigError, SmeltError
from smelt.serve.server.access_log import AccessLog
from smelt.serve.server.http_server import tls_context
from smelt.serve.server.request_record import RequestRecord, request_id
from smelt.serve.server.settings import ServeConfig, TlsFiles
from tests.serve.certificates import write_certificate
from tests.serve.server_process import NAME, PATIENCE, Server, read_events, start

KEY, PASSWORD, SECRET = "a-key-of-the-test", b"a password", "do not log this prompt"
ORIGIN = "https://app.example.org"
PREFLIGHT = {"origin": ORIGIN, "access-control-request-method": "POST",
             "access-control-request-headers": "authorization,content-type"}  # fmt: skip


@dataclass
class Operated:
    server: Server
    access_log: Path
    certificate: Path
    collector: Collector
    bearer: dict[str, str] = field(default_factory=lambda: {"authorization": f"Bearer {KEY}"})

    def logged(self, request: str) -> dict[str, Any]:
        """Wait for the line of a request in the access log."""
        until = time.monotonic() + PATIENCE
        while True:
            lines = [json.loads(line) for line in self.access_log.read_text().splitlines()]
            if found := [line for line in lines if line["request_id"] == request]:
                assert len(found) == 1
                return found[0]
            assert time.monotonic() < until, lines
            time.sleep(0.05)


class Collector(threading.Thread):
    """A receiver of OTLP over HTTP."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.bodies: list[bytes] = []
        bodies = self.bodies

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                assert self.path == "/v1/traces"
                bodies.append(self.rfile.read(int(self.headers["content-length"])))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
        self.start()

    def run(self) -> None:
        self.server.serve_forever()

    def spans(self) -> list[Any]:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        requests = [ExportTraceServiceRequest.FromString(body) for body in list(self.bodies)]
        return [
            span for request in requests for group in request.resource_spans for scope in group.scope_spans
            for span in scope.spans
        ]  # fmt: skip


def traces() -> bool:
    try:
        import opentelemetry.exporter.otlp.proto.http  # noqa: F401
    except ImportError:
        return False
    return True


@pytest.fixture(scope="module")
def operated(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operated]:
    """Start one server with everything."""
    folder = tmp_path_factory.mktemp("operated")
    (folder / "keys").write_text(f"{KEY} name=team\n")
    (folder / "password").write_bytes(PASSWORD + b"\n")
    certificate, key = write_certificate(folder, PASSWORD)
    collector = Collector()
    options = (
        "--kv-cache-gib", "0.01", "--api-key-file", str(folder / "keys"), "--access-log", str(folder / "access.jsonl"),
        "--root-path", "/llm", "--allowed-origins", ORIGIN, "--ssl-certfile", str(certificate), "--ssl-keyfile",
        str(key), "--ssl-keyfile-password-file", str(folder / "password"), "--client-timeout", "1",
    )  # fmt: skip
    if traces():
        options += ("--otlp-endpoint", f"http://127.0.0.1:{collector.server.server_port}")
    server = start(model_folder, folder, *options)
    yield Operated(server, folder / "access.jsonl", certificate, collector)
    assert server.end() == 0, server.log.read_text()
    collector.server.shutdown()
    if traces():
        spans = collector.spans()
        assert {span.name for span in spans} >= {"POST /v1/completions", "GET /health"}, "sent before the exit"


def test_a_completion_is_logged_without_its_text(operated: Operated) -> None:
    server = operated.server
    body = {"prompt": SECRET, "max_tokens": 5, "ignore_eos": True}
    answer = server.post("/v1/completions?key=in-the-query", body, headers={**operated.bearer, "x-request-id": "my-1"})
    assert answer.status_code == 200 and answer.headers["x-request-id"] == "my-1"
    line = operated.logged("my-1")
    assert {name: line[name] for name in ("client", "key", "method", "path", "status", "model", "finish_reason")} == {
        "client": "127.0.0.1", "key": "team", "method": "POST", "path": "/v1/completions", "status": 200,
        "model": NAME, "finish_reason": "length",
    }  # fmt: skip
    assert (line["prompt_tokens"], line["output_tokens"]) == (len(SECRET), 5)
    assert 0 <= line["queue_time"] <= line["time_to_first_token"] <= line["duration"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line["time"])
    text = operated.access_log.read_text() + server.log.read_text()
    assert not any(word in text for word in (SECRET, KEY, "in-the-query", PASSWORD.decode()))


def test_streams_and_errors_have_ids_too(operated: Operated) -> None:
    server, url = operated.server, operated.server.url + "/v1/completions"
    body = {"prompt": "x", "max_tokens": 3, "ignore_eos": True, "stream": True}
    with server.http.stream("POST", url, json=body, headers=operated.bearer) as stream:
        request = stream.headers["x-request-id"]
        read_events(stream)
    assert re.fullmatch("[0-9a-f]{32}", request) and operated.logged(request)["output_tokens"] == 3
    for answer, status in (
        (server.post("/v1/completions", {"prompt": "x"}), 401),
        (server.post("/v1/completions", {"prompt": []}, headers=operated.bearer), 400),
        (server.get("/nothing", headers=operated.bearer), 404),
    ):
        assert answer.status_code == status == operated.logged(answer.headers["x-request-id"])["status"]


def test_an_aborted_stream_is_logged(operated: Operated) -> None:
    server, url = operated.server, operated.server.url + "/v1/completions"
    body = {"prompt": "x", "max_tokens": 1900, "ignore_eos": True, "stream": True}
    headers = {**operated.bearer, "x-request-id": "left-early"}
    with server.http.stream("POST", url, json=body, headers=headers) as stream:
        next(stream.iter_lines())
    line = operated.logged("left-early")
    assert line["finish_reason"] == "abort" and line["status"] == 200 and line["output_tokens"] < 1900


@pytest.mark.parametrize("value", ["", "a" * 129, "with space", 'quote"', "a/b", "ä"])
def test_a_strange_request_id_is_replaced(value: str) -> None:
    assert re.fullmatch("[0-9a-f]{32}", request_id([(b"x-request-id", value.encode())]))


def test_two_request_ids_are_none() -> None:
    assert request_id([(b"x-request-id", b"a")]) == "a"
    assert request_id([(b"x-request-id", b"a"), (b"x-request-id", b"b")]) not in ("a", "b")


def test_the_root_path_is_a_prefix_that_a_proxy_may_remove(operated: Operated) -> None:
    server = operated.server
    for path in ("/llm/health", "/health", "/llm/ping"):
        assert server.get(path).json() == {"status": "ok"}
    assert server.get("/llm/v1/models").status_code == 401, "only probes are public"
    assert server.get("/llm/v1/models", headers=operated.bearer).json()["data"][0]["id"] == NAME
    assert server.get("/llmx/health", headers=operated.bearer).status_code == 404
    assert server.get("/llm/openapi.json", headers=operated.bearer).json()["servers"] == [{"url": "/llm"}]
    assert 'request("state")' in server.get("/llm/", headers=operated.bearer).text, "the page reads paths below its own"


def test_only_allowed_origins_may_read_answers(operated: Operated) -> None:
    server = operated.server
    preflight = server.http.options(server.url + "/v1/completions", headers=PREFLIGHT)
    assert preflight.status_code == 200 and preflight.headers["access-control-allow-origin"] == ORIGIN
    assert "POST" in preflight.headers["access-control-allow-methods"]
    assert "authorization" in preflight.headers["access-control-allow-headers"].lower()
    assert "access-control-allow-credentials" not in preflight.headers
    answer = server.get("/v1/models", headers={**operated.bearer, "origin": ORIGIN})
    assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == ORIGIN
    assert "x-request-id" in answer.headers["access-control-expose-headers"]
    assert server.get("/v1/models", headers={"origin": ORIGIN}).status_code == 401, "an origin is no key"
    for origin in ("https://evil.example", "http://app.example.org", f"{ORIGIN}.evil.example", "null"):
        refused = server.http.options(server.url + "/v1/completions", headers={**PREFLIGHT, "origin": origin})
        assert refused.status_code == 403 and "access-control-allow-origin" not in refused.headers
        assert server.get("/v1/models", headers={**operated.bearer, "origin": origin}).status_code == 403


def test_tls(operated: Operated) -> None:
    context = ssl.create_default_context(cafile=operated.certificate)
    assert httpx.get(f"{operated.server.url}/health", verify=context, timeout=PATIENCE).status_code == 200
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
    old.set_ciphers("DEFAULT:@SECLEVEL=0")
    with pytest.warns(DeprecationWarning):
        old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{operated.server.url}/health", verify=old, timeout=PATIENCE)
    with pytest.raises(httpx.HTTPError):
        httpx.get(operated.server.url.replace("https", "http") + "/health", timeout=PATIENCE)


def test_tls_files_that_cannot_be_used(tmp_path: Path) -> None:
    certificate, key = write_certificate(tmp_path, PASSWORD)
    (tmp_path / "wrong").write_text("wrong")
    for files in (
        TlsFiles(str(certificate), str(key)),  # never prompts
        TlsFiles(str(certificate), str(key), str(tmp_path / "wrong")),
        TlsFiles(str(certificate), str(certificate)),
        TlsFiles(str(tmp_path / "nothing"), str(key)),
    ):
        with pytest.raises(SmeltError, match="cannot be used"):
            tls_context(files)


@pytest.mark.skipif(not traces(), reason="the extra otel is not installed")
def test_a_span_per_request(operated: Operated) -> None:
    trace, parent = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
    headers = {**operated.bearer, "x-request-id": "traced", "traceparent": f"00-{trace}-{parent}-01"}
    body = {"prompt": SECRET, "max_tokens": 5, "ignore_eos": True}
    assert operated.server.post("/v1/completions", body, headers=headers).status_code == 200
    until = time.monotonic() + PATIENCE
    while not (found := [span for span in operated.collector.spans() if span.trace_id.hex() == trace]):
        assert time.monotonic() < until
        time.sleep(0.1)
    (span,) = found
    attributes = {entry.key: entry.value for entry in span.attributes}
    assert span.parent_span_id.hex() == parent and span.name == "POST /v1/completions"
    assert attributes["gen_ai.request.id"].string_value == "traced"
    assert attributes["gen_ai.usage.prompt_tokens"].int_value == len(SECRET)
    assert attributes["gen_ai.usage.completion_tokens"].int_value == 5
    assert 0 <= attributes["gen_ai.latency.time_in_queue"].double_value <= attributes["gen_ai.latency.e2e"].double_value
    (event,) = span.events
    assert event.name == "first token" and span.start_time_unix_nano <= event.time_unix_nano <= span.end_time_unix_nano
    assert not any(SECRET.encode() in body or KEY.encode() in body for body in operated.collector.bodies)


def test_nothing_of_opentelemetry_is_imported_without_the_option() -> None:
    names = "{'opentelemetry.sdk', 'opentelemetry.exporter', 'smelt.serve.server.tracing'}"  # FastAPI has the API
    code = f"import sys, smelt.serve.server.server; sys.exit(bool({names} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=PATIENCE).returncode == 0


def test_a_rotated_access_log_goes_on_in_a_new_file(tmp_path: Path) -> None:
    path = tmp_path / "access.jsonl"
    log = AccessLog(str(path))
    log.write(RequestRecord("first", "127.0.0.1", "GET", "/"))
    while not path.read_text():
        time.sleep(0.01)
    path.rename(tmp_path / "old.jsonl")
    log.write(RequestRecord("second", "127.0.0.1", "GET", '/"\n'))
    log.close()
    assert [json.loads(line)["request_id"] for line in path.read_text().splitlines()] == ["second"]
    assert json.loads((tmp_path / "old.jsonl").read_text())["request_id"] == "first"
    with pytest.raises(SmeltError, match="cannot be written"):
        AccessLog(str(tmp_path))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"root_path": "llm"}, "must begin with /"), ({"root_path": "/llm/"}, "not end with it"),
        ({"allowed_origins": ("*",)}, "not an origin"), ({"allowed_origins": ("https://a.b/",)}, "not an origin"),
        ({"ssl_certfile": "x"}, "together"), ({"access_log": "/there/is/no/folder"}, "existing folder"),
        ({"otlp_endpoint": "127.0.0.1:4318"}, "not a URL"),
    ],
)  # fmt: skip
def test_invalid_options_are_refused_before_anything_is_loaded(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises((ConfigError, SmeltError), match=sentence):
        ServeConfig(**options).resolve("x")
