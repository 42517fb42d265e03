"""OpenTelemetry traces: one trace a request, from the gateway through its legs. Off, it costs a call that does nothing.

    gateway.request ─┬─ admission        waiting for room
                     ├─ route            conversation keys and the choice
                     ├─ leg.prefill ──>  the prefill worker's own spans
                     ├─ transfer         prefill's ticket to decode's first byte
                     └─ leg.decode ───>  the decode worker's own spans; a unified worker has only this one

A client's `traceparent` is taken up, and each leg's own is passed on to its worker. The SDK is imported when tracing is on;
spans go out over OTLP/HTTP from a thread of the SDK's, which drops them rather than hold up a request.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from stoker.base.errors import ConfigError
from stoker.base.extras import install_command
from stoker.gateway.config import TracingSettings

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor
    from opentelemetry.trace import Span as OtelSpan
    from opentelemetry.trace import Tracer

_QUEUE_SPANS = 16_384
Value = str | int | float | bool


class Span(Protocol):
    """`traceparent` is what a worker gets; None: whatever the client sent is passed on as it is."""

    @property
    def traceparent(self) -> bytes | None: ...

    def set(self, key: str, value: Value) -> None: ...

    def end(self, error: str | None = None) -> None: ...


class RequestTrace(Protocol):
    def begin(self, name: str) -> Span: ...

    def set(self, key: str, value: Value) -> None: ...

    def end(self, status: int, error: str | None = None) -> None: ...


class Tracing(Protocol):
    def request(
        self, traceparent: bytes | None, tracestate: bytes | None, *, request_id: str, endpoint: str
    ) -> RequestTrace: ...

    def close(self) -> None: ...


class _NoSpan:
    traceparent: bytes | None = None

    def set(self, key: str, value: Value) -> None:
        pass

    def end(self, error: str | None = None) -> None:
        pass


_NO_SPAN = _NoSpan()


class _NoTrace:
    def begin(self, name: str) -> Span:
        return _NO_SPAN

    def set(self, key: str, value: Value) -> None:
        pass

    def end(self, status: int, error: str | None = None) -> None:
        pass


_NO_TRACE = _NoTrace()


class NoTracing:
    """Off: every call gives the same objects, which do nothing."""

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

    def set(self, key: str, value: Value) -> None:
        self._span.set_attribute(key, value)

    def end(self, error: str | None = None) -> None:
        from opentelemetry.trace import StatusCode

        if error is not None:
            self._span.set_attribute("error.type", error)
            self._span.set_status(StatusCode.ERROR, error)
        self._span.end()


class _LiveTrace:
    """Ending it ends the children that are still open: whatever road a request takes, its trace is whole."""

    __slots__ = ("_children", "_context", "_root", "_tracer")

    def __init__(self, tracer: Tracer, root: OtelSpan) -> None:
        from opentelemetry.trace import set_span_in_context

        self._tracer = tracer
        self._root = root
        self._context = set_span_in_context(root)
        self._children: list[OtelSpan] = []

    def begin(self, name: str) -> Span:
        child = self._tracer.start_span(name, context=self._context)
        self._children.append(child)
        return _LiveSpan(child)

    def set(self, key: str, value: Value) -> None:
        self._root.set_attribute(key, value)

    def end(self, status: int, error: str | None = None) -> None:
        for child in self._children:
            if child.is_recording():
                child.end()
        self._root.set_attribute("http.response.status_code", status)
        _LiveSpan(self._root).end(error if error is not None or status < 500 else str(status))


class LiveTracing:
    def __init__(self, settings: TracingSettings, processors: Sequence[SpanProcessor]) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        # A provider of our own: nothing of it is process-wide.
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
        """Sends what is left; a collector that is gone costs seconds at most."""
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
