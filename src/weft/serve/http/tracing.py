"""Spans of requests by OpenTelemetry (extra otel), sent to a collector over OTLP."""

from __future__ import annotations

from fastapi import FastAPI
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.instrumentation.fastapi import FastAPIInstrumentor
from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor


def trace(app: FastAPI, endpoint: str) -> None:
    """Send a span of each request, except probes and scrapes, to a collector; it continues the client's traceparent.

    endpoint: the collector's URL for traces, such as http://127.0.0.1:4318/v1/traces.
    """
    named = Resource({SERVICE_NAME: "weft"}).merge(OTELResourceDetector().detect())
    provider = TracerProvider(resource=named)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
    FastAPIInstrumentor.instrument_app(
        app, tracer_provider=provider, excluded_urls="/health$,/metrics$", exclude_spans=["receive", "send"]
    )
