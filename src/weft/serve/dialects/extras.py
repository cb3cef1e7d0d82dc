"""Further routes: tokens of a text and text of tokens, versions, the prefix cache, and routes for routers in front of
several servers."""

from __future__ import annotations

import uuid
from typing import Any

from fastapi import APIRouter, Request, Response

from weft import __version__
from weft.serve.chat.chats import ChatRequest
from weft.serve.chat.protocol import CommonRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from weft.serve.chat.service import Service
from weft.serve.dialects.completions import complete
from weft.serve.http.bodies import JsonRoute
from weft.serve.http.wire import json_response


def router(service: Service) -> APIRouter:
    """Return the routes, in vLLM's shapes."""
    routes, engine, prompts = APIRouter(route_class=JsonRoute), service.engine, service.prompts

    @routes.get("/version")
    async def version() -> dict[str, Any]:
        return {"version": __version__}

    def rendered(body: CommonRequest, token_ids: list[int]) -> dict[str, Any]:
        named = {"model": service.model_name, "cache_salt": body.cache_salt or None}
        return {"request_id": uuid.uuid4().hex, "token_ids": token_ids} | named

    # Routers that know the cached tokens of each server use these to tokenise requests.

    @routes.post("/v1/completions/render", response_model=None)
    def render_completion(body: CompletionRequest) -> Response:
        service.check(body)
        return json_response([rendered(body, token_ids) for token_ids in prompts.of_completion(body)])

    @routes.post("/v1/chat/completions/render", response_model=None)
    def render_chat(body: ChatRequest) -> Response:
        service.check(body)
        return json_response(rendered(body, prompts.of_chat(body)))

    # The body is a chat with messages or a text with a prompt.

    @routes.post("/tokenize", response_model=None)
    def tokenize(body: ChatRequest | TokenizeRequest) -> Response:
        body.refuse_unsupported()
        if isinstance(body, ChatRequest):
            tokens, wants_names = prompts.of_chat(body), False
        else:
            prompts.check_length(len(body.prompt), "prompt")
            tokens, wants_names = prompts.encode(body.prompt, body.add_special_tokens), body.return_token_strs
        strings = [engine.text_processor.token_name(t) for t in tokens] if wants_names else None
        shape = {"count": len(tokens), "max_model_len": engine.max_model_len, "tokens": tokens}
        return json_response(shape | {"token_strs": strings})

    @routes.post("/detokenize", response_model=None)
    def detokenize(body: DetokenizeRequest) -> Response:
        body.refuse_unsupported()
        return json_response({"prompt": prompts.text(body.tokens)})

    @routes.post("/reset_prefix_cache")
    @routes.post("/flush_cache")  # SGLang's name
    async def reset_prefix_cache() -> Response:
        await service.shared.ask("reset_cache")
        return Response()

    return routes


def balancer_router(service: Service) -> APIRouter:
    """Return the routes in SGLang's shapes for `sglang-router` and `vllm-router`, under today's and earlier names."""
    routes, engine, config = APIRouter(), service.engine, service.engine.config

    def paths() -> dict[str, str]:
        return {"model_path": str(config.model.resolve()), "tokenizer_path": str(config.tokenizer.resolve())}

    @routes.get("/server_info")
    @routes.get("/get_server_info")
    async def server_info() -> dict[str, Any]:
        return {
            "served_model_name": service.model_name,
            **paths(),
            "version": __version__,
            "dp_size": 1,  # the engine itself distributes requests over its data-parallel groups
            "max_running_requests": config.batch_sequences * config.attn_dp,
            "max_total_num_tokens": config.cached_tokens * config.attn_dp,
        }

    @routes.get("/model_info")
    @routes.get("/get_model_info")
    async def model_info() -> dict[str, Any]:
        return paths() | {"is_generation": True, "max_model_len": engine.max_model_len}

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
