"""POST /v1/completions and POST /v1/chat/completions."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, Response, StreamingResponse
from jinja2 import TemplateError

from weft.engine.engine import Engine
from weft.engine.request import Output, SamplingParams
from weft.server import render
from weft.server.answers import Choice, Intake, usage
from weft.server.errors import ApiError, unknown_model
from weft.server.protocol import ChatRequest, CommonRequest, CompletionRequest


@dataclass(frozen=True)
class Service:
    """Answers both endpoints for one engine and the one model name that it serves."""

    intake: Intake
    model_name: str

    @property
    def engine(self) -> Engine:
        """What answers."""
        return self.intake.engine

    @cached_property
    def _longest_token(self) -> int:
        """Characters of the longest token, which no token of a text exceeds."""
        return max(map(len, self.engine.tokenizer.get_vocab()))

    def router(self) -> APIRouter:
        """The two routes."""
        router = APIRouter()

        @router.post("/v1/completions", response_model=None)
        async def completions(body: CompletionRequest, request: Request) -> Response:
            return await self.complete(body, request)

        @router.post("/v1/chat/completions", response_model=None)
        async def chat(body: ChatRequest, request: Request) -> Response:
            return await self.chat(body, request)

        return router

    async def complete(self, body: CompletionRequest, request: Request) -> Response:
        """Text in, text out."""
        self._check(body)
        if body.echo and body.logprobs is not None:
            raise ApiError(400, "echo with logprobs is not supported; leave one out", param="echo")
        several = isinstance(body.prompt, list) and not isinstance(next(iter(body.prompt), 0), int)
        self._check_choices(len(body.prompt) * body.n if several else body.n)
        prompts = await run_in_threadpool(self._prompts, body.prompt)  # long texts must not hold up other streams
        params = body.sampling(body.max_tokens, body.logprobs)
        lead = [self._echo(p) if body.echo else "" for p in prompts for _ in range(body.n)]
        style = render.Completion(self.engine.tokenizer, lead, body.logprobs is not None)
        return await self._answer(body, request, prompts, params, style)

    async def chat(self, body: ChatRequest, request: Request) -> Response:
        """Messages in, a message out."""
        self._check(body)
        if body.top_logprobs and not body.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
        prompt = await run_in_threadpool(self._chat_prompt, body)
        most = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        params = body.sampling(most, (body.top_logprobs or 0) if body.logprobs else None)
        style = render.Chat(self.engine.tokenizer, bool(body.logprobs))
        return await self._answer(body, request, [prompt], params, style)

    # --- shared -----------------------------------------------------------------------------------------------

    def _check(self, body: CommonRequest) -> None:
        if body.model is not None and body.model != self.model_name:
            raise unknown_model(body.model, self.model_name)
        if body.stream_options and not body.stream:
            raise ApiError(400, "stream_options needs stream to be true", param="stream_options")
        body.refuse_unsupported()

    def _check_choices(self, count: int) -> None:
        most = self.engine.config.max_choices
        if count > most:
            raise ApiError(400, f"{count} answers are asked for at once (prompts × n); at most {most} are given")

    def _echo(self, prompt: Sequence[int]) -> str:
        vocabulary = self.engine.model_config.vocab_size
        if not all(0 <= token < vocabulary for token in prompt):  # the tokenizer would fail on some of them
            raise ApiError(400, f"prompt tokens must be between 0 and {vocabulary - 1}", param="prompt")
        return str(self.engine.tokenizer.decode(prompt))

    def _prompts(self, prompt: Any) -> list[list[int]]:
        if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
            prompt = [prompt]
        if not prompt:
            raise ApiError(400, "the prompt is empty", param="prompt")
        self._check_length(sum(len(p) for p in prompt if isinstance(p, str)), "prompt", len(prompt))
        return [self.engine.tokenizer.encode(p) if isinstance(p, str) else p for p in prompt]

    def _check_length(self, characters: int, param: str, prompts: int = 1) -> None:
        """Refuses text that cannot fit, before it is encoded: that takes a hundred times its size of memory."""
        most = prompts * self.engine.max_model_len * self._longest_token
        if characters > most:
            message = f"{characters} characters cannot fit into the context of {self.engine.max_model_len} tokens"
            raise ApiError(400, message, param=param, code="context_length_exceeded")

    def _chat_prompt(self, body: ChatRequest) -> list[int]:
        self._check_length(sum(m.characters for m in body.messages), "messages")
        try:
            text = self.engine.tokenizer.apply_chat_template(
                [m.plain() for m in body.messages], tokenize=False, add_generation_prompt=True
            )
        except (ValueError, TemplateError) as error:
            raise ApiError(400, f"the model's chat template refuses the messages: {error}", param="messages") from error
        return list(self.engine.tokenizer.encode(text, add_special_tokens=False))

    async def _answer(
        self,
        body: CommonRequest,
        request: Request,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        style: render.Style,
    ) -> Response:
        each = [replace(params, seed=None if params.seed is None else params.seed + i) for i in range(body.n)]
        jobs = [(prompt, how) for prompt in prompts for how in each]
        head = {"id": f"{style.id_prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": self.model_name}
        client = body.user or (request.client.host if request.client else "")
        stream = self.intake.answers(request, [p for p, _ in jobs], [how for _, how in jobs], client)
        choices = [Choice() for _ in jobs]
        if body.stream:
            # Fetch the first increment before the headers go out: a refusal must still be an HTTP status.
            first = await anext(stream, None)
            with_usage = bool(body.stream_options and body.stream_options.include_usage)
            events = self._events(head, first, stream, choices, prompts, style, with_usage)
            return StreamingResponse(events, media_type="text/event-stream")
        async with aclosing(stream):
            async for index, output in stream:
                choices[index].add(output)
        if any(c.last is None or c.last.finish_reason is None for c in choices):
            return Response(status_code=499)  # the client has gone: nobody reads this
        whole = [style.whole(i, c) for i, c in enumerate(choices)]
        return JSONResponse(head | {"object": style.name, "choices": whole, "usage": usage(prompts, choices)})

    async def _events(
        self,
        head: dict[str, Any],
        first: tuple[int, Output] | None,
        stream: AsyncGenerator[tuple[int, Output], None],
        choices: list[Choice],
        prompts: Sequence[Sequence[int]],
        style: render.Style,
        with_usage: bool,
    ) -> AsyncIterator[str]:
        head = head | {"object": style.chunk_name}

        def event(chunk: dict[str, Any]) -> str:
            return f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n"

        async def increments() -> AsyncIterator[tuple[int, Output]]:
            if first is not None:
                yield first
                async with aclosing(stream):
                    async for item in stream:
                        yield item

        blank = {"usage": None} if with_usage else {}
        try:
            async for index, output in increments():
                begins = choices[index].last is None
                choices[index].add(output)
                for choice in style.chunks(index, output, begins):
                    yield event(head | {"choices": [choice]} | blank)
            if with_usage:
                yield event(head | {"choices": [], "usage": usage(prompts, choices)})
        except ApiError as error:  # the headers are gone: say it in the stream
            yield f"data: {bytes(error.response().body).decode()}\n\n"
        yield "data: [DONE]\n\n"
