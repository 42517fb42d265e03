"""OpenTelemetry traces: one trace per request, from the gateway through its legs. When disabled, calls do nothing.

    gateway.request ─┬─ admission        waiting for capacity
                     ├─ route            choosing a worker
                     ├─ leg.prefill ──>  the prefill worker's spans
                     ├─ transfer         from the end of prefill to decode's first byte
                     └─ leg.decode ───>  the decode worker's spans; a unified worker has only this leg

The trace continues a client's `traceparent`, and each leg's own `traceparent` is sent to its worker. The SDK is imported only
if tracing is enabled. Its own thread sends spans over OTLP/HTTP, and drops them rather than delay a request.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from stoker.base.errors import ConfigError
from stoker.base.extras import install_command
from stoker.gateway.records.record_settings import TracingSettings

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor
    from opentelemetry.trace import Span as OtelSpan
    from opentelemetry.trace import Tracer

_QUEUE_SPANS = 16_384


class TraceSpan(Protocol):
    """One span. `traceparent` is sent to the worker; None means that the client's header is forwarded unchanged."""

    @property
    def traceparent(self) -> bytes | None: ...

    def end(self, error: str | None = None) -> None: ...


class RequestTrace(Protocol):
    """The trace of one request."""

    def begin(self, name: str) -> TraceSpan: ...

    def end(self, status: int, error: str | None = None) -> None: ...


class Tracing(Protocol):
    """Creates the traces of requests."""

    def request(
        self, traceparent: bytes | None, tracestate: bytes | None, *, request_id: str, endpoint: str
    ) -> RequestTrace: ...

    def close(self) -> None: ...


class _NoSpan:
    traceparent: bytes | None = None

    def end(self, error: str | None = None) -> None:
        pass


_NO_SPAN = _NoSpan()


class _NoTrace:
    def begin(self, name: str) -> TraceSpan:
        return _NO_SPAN

    def end(self, status: int, error: str | None = None) -> None:
        pass


_NO_TRACE = _NoTrace()


class NoTracing:
    """Tracing is disabled: every call returns the same objects, which do nothing."""

    def request(
        self, traceparent: bytes | None, tracestate: bytes | None, *, request_id: str, endpoint: str
    ) -> RequestTrace:
        return _NO_TRACE

    def close(self) -> None:
        pass


class _LiveSpan:
    __slots__ = ("_span",)

    def __init__(self, span: OtelSpan) -> None:
        self._span = span

    @property
    def traceparent(self) -> bytes | None:
        context = self._span.get_span_context()
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}".encode()

    def end(self, error: str | None = None) -> None:
        from opentelemetry.trace import StatusCode

        if error is not None:
            self._span.set_attribute("error.type", error)
            self._span.set_status(StatusCode.ERROR, error)
        self._span.end()


class _LiveTrace:
    """The trace of one request. Ending it ends its open children, so the trace is complete however the request ends."""

    __slots__ = ("_children", "_context", "_root", "_tracer")

    def __init__(self, tracer: Tracer, root: OtelSpan) -> None:
        from opentelemetry.trace import set_span_in_context

        self._tracer = tracer
        self._root = root
        self._context = set_span_in_context(root)
        self._children: list[OtelSpan] = []

    def begin(self, name: str) -> TraceSpan:
        child = self._tracer.start_span(name, context=self._context)
        self._children.append(child)
        return _LiveSpan(child)

    def end(self, status: int, error: str | None = None) -> None:
        for child in self._children:
            if child.is_recording():
                child.end()
        self._root.set_attribute("http.response.status_code", status)
        _LiveSpan(self._root).end(error if error is not None or status < 500 else str(status))


class LiveTracing:
    """Sends traces with the OpenTelemetry SDK."""

    def __init__(self, settings: TracingSettings, processors: Sequence[SpanProcessor]) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        # A private provider, so that no process-wide state is changed.
        self._provider = TracerProvider(
            resource=Resource.create({"service.name": settings.service_name}),
            sampler=ParentBasedTraceIdRatio(settings.sample),
            shutdown_on_exit=False,
        )
        for processor in processors:
            self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("stoker.gateway")
        self._propagator = TraceContextTextMapPropagator()

    def request(
        self, traceparent: bytes | None, tracestate: bytes | None, *, request_id: str, endpoint: str
    ) -> RequestTrace:
        from opentelemetry.context import Context
        from opentelemetry.trace import SpanKind

        context = Context()
        if traceparent is not None:
            carrier = {"traceparent": traceparent.decode("latin-1")}
            if tracestate is not None:
                carrier["tracestate"] = tracestate.decode("latin-1")
            context = self._propagator.extract(carrier, context)
        attributes: dict[str, Any] = {"stoker.request_id": request_id, "stoker.endpoint": endpoint}
        root = self._tracer.start_span("gateway.request", context, SpanKind.SERVER, attributes)
        return _LiveTrace(self._tracer, root)

    def close(self) -> None:
        """Send the remaining spans. An unreachable collector delays this by a few seconds at most."""
        self._provider.shutdown()


def make_tracing(settings: TracingSettings) -> Tracing:
    if settings.otlp_endpoint is None:
        return NoTracing()
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigError(
            f"tracing.otlp_endpoint={settings.otlp_endpoint} needs the OpenTelemetry packages: {install_command('tracing')}"
        ) from error
    exporter = OTLPSpanExporter(endpoint=settings.otlp_endpoint, timeout=5)
    return LiveTracing(settings, [BatchSpanProcessor(exporter, max_queue_size=_QUEUE_SPANS)])
