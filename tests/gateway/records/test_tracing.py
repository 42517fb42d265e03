"""Traces: one per request, connected with the client's trace and the workers' spans."""

from __future__ import annotations

import asyncio
import subprocess
import sys

from fake_stoker import FakeStoker
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from world import World

from stoker.fleet.spec import Role
from stoker.gateway.records.record_settings import TracingSettings
from stoker.gateway.records.tracing import LiveTracing, NoTracing, make_tracing

CLIENT = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
SETTINGS = TracingSettings(otlp_endpoint="http://127.0.0.1:1/v1/traces")


def live(settings: TracingSettings = SETTINGS) -> tuple[LiveTracing, InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    return LiveTracing(settings, [SimpleSpanProcessor(exporter)]), exporter


def test_a_request_through_two_legs_is_one_trace() -> None:
    tracing, exporter = live()
    trace = tracing.request(CLIENT, b"vendor=1", request_id="r1", endpoint="chat")
    passed_on = {}
    for name in ("admission", "route", "leg.prefill", "transfer", "leg.decode"):
        span = trace.begin(name)
        passed_on[name] = span.traceparent
        span.end()
    trace.end(200)
    spans = {span.name: span for span in exporter.get_finished_spans()}
    assert set(spans) == {"gateway.request", "admission", "route", "leg.prefill", "transfer", "leg.decode"}
    root = spans["gateway.request"]
    assert root.parent is not None
    assert f"{root.parent.span_id:016x}" == "b7ad6b7169203331"
    assert root.attributes is not None
    assert dict(root.attributes) == {
        "stoker.request_id": "r1",
        "stoker.endpoint": "chat",
        "http.response.status_code": 200,
    }
    for name, span in spans.items():
        assert f"{span.context.trace_id:032x}" == "0af7651916cd43dd8448eb211c80319c"
        if name != "gateway.request":
            assert span.parent is not None
            assert span.parent.span_id == root.context.span_id
            sent = f"00-{span.context.trace_id:032x}-{span.context.span_id:016x}-01".encode()
            assert passed_on[name] == sent


def test_a_transfer_ends_with_the_first_byte_that_decode_sends() -> None:
    async def main() -> None:
        tracing, exporter = live()
        async with World(tracing=tracing, prompt_tokens=1000) as world:
            await world.add("p", FakeStoker(), role=Role.PREFILL, dialect="stoker")
            await world.add("d", FakeStoker(), role=Role.DECODE, dialect="stoker")
            await world.ask({"model": "m", "messages": [], "stream": True, "max_tokens": 8})
            await world.settled()
        names = [span.name for span in exporter.get_finished_spans()]
        assert names == ["admission", "route", "leg.prefill", "transfer", "leg.decode", "gateway.request"]

    asyncio.run(main())


def test_without_a_client_trace_a_new_one_is_started() -> None:
    tracing, exporter = live()
    for bad in (None, b"nonsense", b"00-00000000000000000000000000000000-0000000000000000-01"):
        tracing.request(bad, None, request_id="r", endpoint="chat").end(200)
    spans = exporter.get_finished_spans()
    assert [span.parent for span in spans] == [None, None, None]
    assert len({span.context.trace_id for span in spans}) == 3


def test_a_client_that_does_not_sample_is_obeyed() -> None:
    tracing, exporter = live()
    trace = tracing.request(CLIENT[:-2] + b"00", None, request_id="r", endpoint="chat")
    leg = trace.begin("leg.decode")
    assert leg.traceparent is not None
    assert leg.traceparent.startswith(b"00-0af7651916cd43dd8448eb211c80319c-")
    assert leg.traceparent.endswith(b"-00")
    leg.end()
    trace.end(200)
    assert exporter.get_finished_spans() == ()


def test_none_are_sampled_at_zero() -> None:
    tracing, exporter = live(TracingSettings("http://127.0.0.1:1", sample=0.0))
    tracing.request(None, None, request_id="r", endpoint="chat").end(200)
    assert exporter.get_finished_spans() == ()


def test_whatever_is_open_at_the_end_is_ended_and_errors_are_marked() -> None:
    tracing, exporter = live()
    trace = tracing.request(None, None, request_id="r", endpoint="chat")
    trace.begin("leg.prefill").end("worker_lost")
    trace.begin("leg.decode")
    trace.end(503)
    spans = {span.name: span for span in exporter.get_finished_spans()}
    assert len(spans) == 3
    assert not spans["leg.prefill"].status.is_ok
    assert not spans["gateway.request"].status.is_ok
    assert spans["leg.decode"].status.is_ok


def test_off_is_objects_that_do_nothing() -> None:
    tracing = make_tracing(TracingSettings())
    assert isinstance(tracing, NoTracing)
    trace = tracing.request(CLIENT, None, request_id="r", endpoint="chat")
    span = trace.begin("leg.decode")
    assert span.traceparent is None
    span.end()
    trace.end(200)
    tracing.close()
    assert tracing.request(None, None, request_id="s", endpoint="chat") is trace


def test_off_the_sdk_is_not_even_imported() -> None:
    code = (
        "import sys, stoker.gateway.records.tracing as t\n"
        "t.make_tracing(t.TracingSettings())\n"
        "sys.exit('opentelemetry' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_an_unreachable_collector_delays_no_request() -> None:
    tracing = make_tracing(SETTINGS)
    for number in range(10):
        tracing.request(None, None, request_id=str(number), endpoint="chat").end(200)
    tracing.close()
