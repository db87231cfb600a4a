"""OpenTelemetry spans, one per request, sent only to the endpoint that the operator names. Attributes as in vLLM.

Imported only with --otlp-endpoint; the extra `otel` has what it needs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from smelt.errors import SmeltError, install_command
from smelt.serve.server.request_record import RequestRecord

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

_HEADERS = (b"traceparent", b"tracestate")


class Tracer:
    """Makes spans of requests that have ended, children of the caller's span if it sent a `traceparent`. Close it."""

    def __init__(self, endpoint: str, exporter: SpanExporter | None = None) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ModuleNotFoundError as error:
            raise SmeltError(f"--otlp-endpoint needs {error.name}; `{install_command('otel')}`.") from error
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = TracerProvider(resource=Resource.create({"service.name": "smelt"}))
        exporter = exporter or OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces")
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("smelt.serve")
        self._propagator = TraceContextTextMapPropagator()

    def record(self, record: RequestRecord, headers: Iterable[tuple[bytes, bytes]]) -> None:
        from opentelemetry.trace import SpanKind, StatusCode

        carrier = {name.decode(): value.decode("latin-1") for name, value in headers if name in _HEADERS}
        start = int(record.wall_time * 1e9)
        attributes = {
            "http.request.method": record.method, "url.path": record.path,
            "http.response.status_code": record.status, "gen_ai.request.id": record.id,
            "gen_ai.response.model": record.model, "gen_ai.usage.prompt_tokens": record.prompt_tokens,
            "gen_ai.usage.completion_tokens": record.output_tokens,
            "gen_ai.response.finish_reason": record.finish_reason,
            "gen_ai.latency.time_in_queue": record.queue_time,
            "gen_ai.latency.time_to_first_token": record.time_to_first_token,
            "gen_ai.latency.e2e": record.duration,
        }  # fmt: skip
        span = self._tracer.start_span(
            f"{record.method} {record.path}", context=self._propagator.extract(carrier), kind=SpanKind.SERVER,
            start_time=start, attributes={name: value for name, value in attributes.items() if value not in (None, "")},
        )  # fmt: skip
        if record.time_to_first_token is not None:
            span.add_event("first token", timestamp=start + int(record.time_to_first_token * 1e9))
        if record.status >= 500:
            span.set_status(StatusCode.ERROR)
        span.end(start + int(record.duration * 1e9))

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()
