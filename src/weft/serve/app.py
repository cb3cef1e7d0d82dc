"""HTTP application and its routes."""

from __future__ import annotations

import time
from typing import Any

import anyio
from fastapi import APIRouter, FastAPI, Response
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST

from weft import __version__
from weft.engine.models.config_json.fields import ModelError
from weft.serve.chat.service import Service
from weft.serve.chat.templates import Templates
from weft.serve.dialects import anthropic_messages, completions, extras, responses
from weft.serve.http import errors
from weft.serve.http.bodies import LARGE_AT_ONCE, SLOW_AT_ONCE
from weft.serve.http.engine_client import EngineClient
from weft.serve.http.errors import ApiError, bad_field
from weft.serve.http.guard import Guard
from weft.serve.http.options import Options
from weft.serve.http.remote_engine import AnyShared

MAX_PLANNED = 2**20
"""Maximum tokens of a requested plan: far above any step, and within the cost model's numbers."""


def create_app(
    engine_client: EngineClient,
    shared: AnyShared,
    model_name: str,
    options: Options,
    templates: Templates | None = None,
) -> FastAPI:
    """Return the OpenAI-compatible application. ModelError for a chat template that takes too long.

    The path of its schema requires the key too. It has no pages about the schema, as they would load foreign code.

    Args:
        model_name: name of the model, unless the options have one.
        templates: templates of this tokenizer from another application.
    """
    engine = engine_client.engine
    app = FastAPI(
        title="Weft",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,  # redirects would go to the client's Host header
        responses=errors.described(errors.ErrorBody),
    )
    app.root_path = options.root_path  # uvicorn's own option would refuse paths with the prefix
    app.add_middleware(Guard, options=options, metrics=engine_client.metrics)
    if options.cors_origins:  # outermost: a browser asks without the key whether it may ask
        app.add_middleware(
            CORSMiddleware,
            allow_origins=options.cors_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id"],
        )
    app.state.slow, app.state.large = anyio.CapacityLimiter(SLOW_AT_ONCE), anyio.CapacityLimiter(LARGE_AT_ONCE)
    errors.install(app)
    templates = templates or Templates(engine.tokenizer.special_tokens_map)
    _probe(engine.tokenizer, templates)
    service = Service(engine_client, options.served_model_name or (model_name,), templates, options, shared)
    apis = (completions.router, responses.router, anthropic_messages.router, extras.router, extras.balancer_router)
    for router in (*apis, _status_routes, _step_routes):
        app.include_router(router(service))
    nowhere = {"type": "http", "path": "", "root_path": "", "method": "GET", "headers": []}
    for route in app.router.routes:
        route.matches(nowhere)  # FastAPI prepares a route at its first use: now, not in a burst of requests
    if options.otlp_traces_endpoint is not None:
        _trace(app, options.otlp_traces_endpoint)
    return app


def _trace(app: FastAPI, endpoint: str) -> None:
    """Send a span of each request, except probes and scrapes, to a collector; it continues the client's traceparent."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.instrumentation.fastapi import FastAPIInstrumentor
    from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    named = Resource({SERVICE_NAME: "weft"}).merge(OTELResourceDetector().detect())
    provider = TracerProvider(resource=named)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
    excluded: dict[str, Any] = {"excluded_urls": "/health$,/metrics$", "exclude_spans": ["receive", "send"]}
    FastAPIInstrumentor.instrument_app(app, tracer_provider=provider, **excluded)


def _probe(tokenizer: Any, templates: Templates) -> None:
    """Find the shapes of the model's chat templates at the start, so that no request waits for it."""
    named = tokenizer.chat_template if isinstance(tokenizer.chat_template, dict) else {"": tokenizer.chat_template}
    try:
        for template in filter(None, named.values()):
            templates.shape(template)
    except ApiError as error:
        raise ModelError(f"the model's {error.message}; mend it in the model's directory") from error


def _status_routes(service: Service) -> APIRouter:
    """Return the routes that respond even while a step hangs: health, models and metrics."""
    made, engine_client, engine = APIRouter(), service.engine_client, service.engine
    created = int(time.time())
    card = {"object": "model", "created": created, "owned_by": "weft", "max_model_len": engine.max_model_len}
    cards = {name: {"id": name} | card for name in service.model_names}

    @made.head("/health", include_in_schema=False)
    @made.get("/health")
    async def health() -> Response:
        state = "draining" if engine_client.closed else engine.state
        if state == "failed":
            return ApiError(503, engine.error or "the engine has failed").response()
        serves = state in ("serving", "degraded")
        return JSONResponse({"status": "ok" if state == "serving" else state}, 200 if serves else 503)

    @made.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": list(cards.values())}

    @made.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        service.check_model(name)
        return cards[name]

    # Not on a thread, as all threads may be waiting for the engine (`_step_routes`).
    @made.get("/metrics")
    async def prometheus() -> Response:
        return Response(await service.shared.ask("metrics"), media_type=CONTENT_TYPE_LATEST)

    return made


def _step_routes(service: Service) -> APIRouter:
    """Return the routes about the exchanges and times of steps."""
    made, shared = APIRouter(), service.shared

    @made.get("/weft/plan")
    async def plan(tokens: int = 1) -> Response:
        if not 0 <= tokens <= MAX_PLANNED:
            raise bad_field("tokens", f" is {tokens}; it must be between 0 and {MAX_PLANNED}")
        return PlainTextResponse(await shared.ask("plan", tokens))

    @made.get("/weft/report")
    async def report() -> Any:
        return await shared.ask("report")

    @made.post("/weft/profile")
    async def profile(steps: int = 20) -> Any:
        if service.options.profile_dir is None:
            raise ApiError(400, "start weft serve with --profile-dir FOLDER, where the trace goes")
        return await shared.ask("profile", steps)

    return made
