"""Routes for routers in front of several servers: the served model, the load, and a test of generation."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from weft import __version__
from weft.serve.chat.protocol import CompletionRequest
from weft.serve.chat.service import Service
from weft.serve.dialects.completions import complete


def router(service: Service) -> APIRouter:
    """Return the routes in SGLang's shapes for `sglang-router` and `vllm-router`, under today's and earlier names."""
    routes, engine, config = APIRouter(), service.engine, service.engine.config

    @routes.get("/server_info")
    @routes.get("/get_server_info")
    async def server_info() -> dict[str, Any]:
        return {
            "served_model_name": service.model_name,
            "model_path": str(config.model.resolve()),
            "tokenizer_path": str(config.tokenizer.resolve()),
            "version": __version__,
            "dp_size": 1,  # the engine itself distributes requests over its data-parallel groups
            "max_running_requests": config.batch_sequences * config.attn_dp,
            "max_total_num_tokens": config.cached_tokens * config.attn_dp,
        }

    @routes.get("/model_info")
    @routes.get("/get_model_info")
    async def model_info() -> dict[str, Any]:
        paths = {"model_path": str(config.model.resolve()), "tokenizer_path": str(config.tokenizer.resolve())}
        return paths | {"is_generation": True, "max_model_len": engine.max_model_len}

    @routes.get("/get_load")
    async def load() -> list[dict[str, int]]:
        return [{"dp_rank": 0} | await service.shared.ask("load")]

    @routes.get("/health_generate")
    async def health_generate(request: Request) -> Response:
        """Return status 200 once a token has been generated, else the status of a completion's error."""
        request.state.small = True
        probe = CompletionRequest.model_validate({"prompt": [0], "max_tokens": 1, "temperature": 0})
        response = await complete(service, probe, request)
        return Response() if response.status_code == 200 else response

    return routes
