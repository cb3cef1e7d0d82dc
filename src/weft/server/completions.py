"""POST /v1/completions and POST /v1/chat/completions."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import Response

from weft.engine.controller.engine import Engine
from weft.engine.grammar.grammar import either, json_grammar
from weft.engine.messages.request import Output, SamplingParams, Sharing
from weft.server import render
from weft.server.bodies import JsonRoute, work_on
from weft.server.chats import ChatRequest
from weft.server.engine_client import Choice, EngineClient, usage
from weft.server.errors import ApiError, client_names, unknown_model
from weft.server.options import Options
from weft.server.parsers import EndingParser, parser
from weft.server.prompts import Prompts
from weft.server.protocol import CommonRequest, CompletionRequest, SharedRequest, StreamOptions
from weft.server.reasoning import BEGIN, END, Start, ThoughtParser, WithoutThought, after_thought, start_of
from weft.server.record import as_api_error
from weft.server.structure import Asked, grammar_of
from weft.server.templates import Templates
from weft.server.tool_formats import ToolFormat, tool_format_of
from weft.server.tools import ChannelParser, Parser
from weft.server.wire import EventStream, event, json_response

QUICK_LOGPROBS = 256
"""Logprobs that are written on the event loop; a thread writes more."""
Job = tuple[list[list[int]], SamplingParams, render.Style]
"""Prompts, the sampling parameters of all, and the style of the response."""


class OutputFormat(NamedTuple):
    """How a chat's output is parsed.

    Attributes:
        form: of tool calls; None: there are none.
        start: where a thought begins; None: there is none.
        bare: the text follows a grammar of its own, so that calls stand at its beginning or nowhere.
        begun: the message that the output continues, with its header, in a form with channels.
    """

    form: ToolFormat | None
    start: Start | None
    bare: bool = False
    begun: str = ""


class ChatJob(NamedTuple):
    """A chat for the engine. parsers: makes a parser of an output; None: the output is all text."""

    prompt: list[int]
    params: SamplingParams
    parsers: Callable[[], Parser] | None


@dataclass(frozen=True)
class Service:
    """Serves both endpoints for one engine. model_names: those of its model. templates: as in `Prompts`."""

    engine_client: EngineClient
    model_names: tuple[str, ...]
    templates: Templates
    options: Options

    @property
    def model_name(self) -> str:
        """The model's name in responses."""
        return self.model_names[0]

    @property
    def engine(self) -> Engine:
        """What generates."""
        return self.engine_client.engine

    @cached_property
    def prompts(self) -> Prompts:
        """What makes tokens of requests."""
        return Prompts(self.engine, self.templates, self.options.trust_request_chat_template)

    def router(self) -> APIRouter:
        """The two routes."""
        router = APIRouter(route_class=JsonRoute)

        @router.post("/v1/completions", response_model=None)
        async def completions(body: CompletionRequest, request: Request) -> Response:
            return await self.complete(body, request)

        @router.post("/v1/chat/completions", response_model=None)
        async def chat(body: ChatRequest, request: Request) -> Response:
            return await self.chat(body, request)

        return router

    async def complete(self, body: CompletionRequest, request: Request) -> Response:
        """Text in, text out."""
        prompts, params, style = await work_on(request, self._completion, body)
        return await self._respond(body, request, prompts, params, style)

    async def chat(self, body: ChatRequest, request: Request) -> Response:
        """Messages in, a message out."""
        with client_names(body.names):
            prompts, params, style = await work_on(request, self._chat, body)
            return await self._respond(body, request, prompts, params, style)

    def _completion(self, body: CompletionRequest) -> Job:
        self._check(body)
        prompts = self.prompts.of_completion(body)
        scored = [k for k in (body.prompt_logprobs, body.logprobs if body.echo else None) if k is not None]
        params = self._params(
            body,
            max_tokens=body.max_tokens,
            logprobs=body.logprobs,
            prompt_logprobs=max(scored, default=None),
        )
        echoed = [text for text in map(self.prompts.text, prompts) for _ in range(body.n)] if body.echo else []
        wanted = render.Wanted(body.logprobs, body.prompt_logprobs, body.return_token_ids)
        each = [prompt for prompt in prompts for _ in range(body.n)]
        hidden = self.engine.text_processor.special_ids if body.skip_special_tokens else ()
        return prompts, params, render.Completion(self.engine.text_processor, each, wanted, echoed, hidden)

    def _chat(self, body: ChatRequest) -> Job:
        self._check(body)
        job = self.chat_job(body)
        wanted = render.Wanted(job.params.logprobs, job.params.prompt_logprobs, body.return_token_ids)
        return [job.prompt], job.params, render.Chat(self.engine.text_processor, job.prompt, wanted, job.parsers)

    def prompts_of(self, body: CompletionRequest | ChatRequest) -> list[list[int]]:
        """The tokens of a request's prompts. ApiError for what would not be served."""
        self._check(body)
        return [self.prompts.of_chat(body)] if isinstance(body, ChatRequest) else self.prompts.of_completion(body)

    def chat_job(self, body: ChatRequest) -> ChatJob:
        """The engine's part of a chat. ApiError 400."""
        text = self.prompts.chat_text(body)
        parts = self._parts(body, text)
        params = self._chat_params(body, parts)
        parsers = self._parsers(body, parts)
        if parsers is not None and (params.stop or not body.parallel_tool_calls):
            ended = partial(self._ending, parsers, params)
            params = replace(params, stop=(), watch=lambda: ended().watch)
            parsers = ended
        return ChatJob(self.prompts.of_chat_text(text, body), params, parsers)

    @staticmethod
    def _ending(parsers: Callable[[], Parser], params: SamplingParams) -> EndingParser:
        return EndingParser(parsers(), params.stop, params.keep_stop, params.min_tokens)

    def _parts(self, body: ChatRequest, prompt: str) -> OutputFormat:
        template = body.template(self.engine.tokenizer)
        form = tool_format_of(template)
        bare = not body.must_call and grammar_of(body) is not None
        if form and form.channels:
            if not body.separate_reasoning:
                message = "separate_reasoning must be true: the output of this model has a channel for it"
                raise ApiError(400, message, param="separate_reasoning")
            begun = prompt.rpartition(ChannelParser.START)[2] if body.continue_final_message else ""
            return OutputFormat(None if bare else form, None, begun=begun)  # such a grammar has no channels
        begun = body.messages[-1].text if body.continue_final_message else ""
        start = start_of(prompt, begun) if self._thinks(template) and body.separate_reasoning else None
        form = form if body.offered else None
        return OutputFormat(form if form and (form.begin or not bare) else None, start, bare)

    def _thinks(self, template: str) -> bool:
        """Whether the model's thoughts are parsed, apart from text."""
        if self.options.reasoning_parser != "auto":
            return self.options.reasoning_parser == "think"
        return BEGIN in template or END in template or END in self._added

    @cached_property
    def _added(self) -> frozenset[str]:
        return frozenset(self.engine.tokenizer.get_added_vocab())

    def _parsers(self, body: ChatRequest, parts: OutputFormat) -> Callable[[], Parser] | None:
        """What makes a parser for each choice; None where it is all text."""
        form, start, bare, begun = parts
        hidden = self.engine.text_processor.special if body.skip_special_tokens else ()

        def made() -> Parser:
            one_call = not body.parallel_tool_calls
            found = parser(form, body.offered, hidden, one_call=one_call, bare=bare)
            if begun:
                found.push(begun, last=False)
            if start:
                found = ThoughtParser(found, start, hidden)
            return found if body.include_reasoning else WithoutThought(found)

        return made if form or start else None

    def _chat_params(self, body: ChatRequest, parts: OutputFormat) -> SamplingParams:
        logprobs, form = (body.top_logprobs or 0) if body.logprobs else None, parts.form
        more = {"logprobs": logprobs, "prompt_logprobs": body.prompt_logprobs}
        params = self._params(body, form=form, start=parts.start, max_tokens=body.output_limit, **more)
        marks = (form.tokens if form else ()) + ((BEGIN, END) if parts.start else ())
        if not self.engine.text_processor.special.isdisjoint(marks):
            params = replace(params, keep_special=True)  # the parser finds the parts by them
        return params

    def check_model(self, asked: str | None) -> None:
        """ApiError 404 for a model that is not the one here."""
        if asked is not None and asked not in self.model_names:
            raise unknown_model(asked, self.model_name)

    def sharing(self, body: SharedRequest, request: Request) -> Sharing:
        """How it shares the engine with others: clients are distinguished by `user`, else by their address."""
        client = body.user or (request.client.host if request.client else "")
        return Sharing(client, body.priority, body.cache_salt)

    # --- shared -----------------------------------------------------------------------------------------------

    def _check(self, body: CommonRequest) -> None:
        self.check_model(body.model)
        if body.stream_options and not body.stream:
            raise ApiError(400, "stream_options needs stream to be true", param="stream_options")
        body.refuse_unsupported()

    def _params(
        self, body: CommonRequest, *, form: ToolFormat | None = None, start: Start | None = None, **more: Any
    ) -> SamplingParams:
        """Return the sampling parameters. Calls that must be made have precedence over another grammar, and calls that
        may be made are an alternative to it.

        Args:
            body: of the request.
            form: of calls.
            start: where the output has a thought.
            more: parameters as they are.
        """
        grammars = self.engine.text_processor.grammars
        asked = grammar_of(body, any_whitespace=self.options.any_whitespace)
        grammar = asked and asked.grammar
        if isinstance(body, ChatRequest):
            calls = body.calls_grammar(form, grammars, bare=bool(asked), any_whitespace=self.options.any_whitespace)
            grammar = either(calls, grammar) if calls and grammar and not body.must_call else calls or grammar
        if grammar and start:
            grammar = after_thought(grammar, start, grammars.named)
        try:  # here, as this may be on a thread: the engine is handed requests on the event loop
            compiled = grammars.compiled(grammar) if grammar else None
        except ValueError as error:
            field = self._blamed(body, asked)
            raise ApiError(400, f"{field}: {error}", param=field) from error
        return body.sampling(self.engine.text_processor, grammar=compiled, **more)

    def _blamed(self, body: CommonRequest, asked: Asked | None) -> str:
        """Return the field of a grammar that cannot be used: the first that cannot by itself."""
        fields = {asked.field: asked.grammar} if asked else {}
        for at, tool in enumerate(body.tools if isinstance(body, ChatRequest) else ()):
            fields[f"tools.{at}.function.parameters"] = json_grammar(tool.function.parameters or {})
        for field, one in fields.items():
            try:
                self.engine.text_processor.grammars.compiled(one)
            except ValueError:
                return field
        return "tools" if asked is None else asked.field

    async def _respond(
        self,
        body: CommonRequest,
        request: Request,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        style: render.Style,
    ) -> Response:
        choice_params = [
            params if params.seed is None else replace(params, seed=params.seed + i) for i in range(body.n)
        ]
        jobs = [(prompt, each) for prompt in prompts for each in choice_params]
        head = {"id": f"{style.id_prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": self.model_name}
        sharing = self.sharing(body, request)
        stream = self.engine_client.generate(request, [p for p, _ in jobs], [each for _, each in jobs], sharing)
        choices = [Choice() for _ in jobs]
        if body.stream:
            # Fetch the first increment before the headers go out: a refusal must still be an HTTP status.
            first = await anext(stream, None)
            options = body.stream_options or StreamOptions()
            return EventStream(self._events(request, head, first, stream, choices, prompts, style, options))
        async with aclosing(stream):
            async for index, output in stream:
                choices[index].add(output)
        if any(c.last is None or c.last.finish_reason is None for c in choices):
            return Response(status_code=499)  # the client has gone: nobody reads this

        def whole() -> Response:
            made = [style.whole(i, c) for i, c in enumerate(choices)]
            body = {"object": style.name, "choices": made, "usage": usage(prompts, choices)}
            return json_response(head | style.beside | body)

        # Tables of logprobs may take seconds.
        small = sum(len(c.logprobs) + len(c.prompt_logprobs) for c in choices) <= QUICK_LOGPROBS
        return whole() if small else await run_in_threadpool(whole)

    async def _events(
        self,
        request: Request,
        head: dict[str, Any],
        first: tuple[int, Output] | None,
        stream: AsyncGenerator[tuple[int, Output], None],
        choices: list[Choice],
        prompts: Sequence[Sequence[int]],
        style: render.Style,
        options: StreamOptions,
    ) -> AsyncIterator[bytes]:
        head = head | {"object": style.chunk_name}
        blank = {"usage": None} if options.include_usage else {}
        increment, beside = first, style.beside
        try:
            async with aclosing(stream):
                while increment is not None:
                    index, output = increment
                    begins = choices[index].last is None
                    choices[index].add(output)
                    counts = {"usage": usage(prompts, choices)} if options.continuous_usage_stats else blank
                    made: Iterable[dict[str, Any]] = style.chunks(index, output, begins)
                    if len(output.prompt_logprobs) > QUICK_LOGPROBS:
                        made = await run_in_threadpool(list, made)
                    for choice in made:
                        yield event(head | beside | {"choices": [choice]} | counts)
                        beside = {}
                    increment = await anext(stream, None)
            if options.include_usage:
                yield event(head | {"choices": [], "usage": usage(prompts, choices)})
        except Exception as error:  # the headers are gone: say it in the stream
            yield event(as_api_error(error, request.scope["state"]).body())
        yield b"data: [DONE]\n\n"
