"""Service of all APIs: prompts, sampling parameters and parsers of outputs for the engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

from fastapi import Request
from fastapi.responses import Response

from weft.engine.grammar.grammar import either, json_grammar
from weft.engine.messages.request import SamplingParams, Sharing
from weft.serve.chat.chats import ChatRequest
from weft.serve.chat.parsed_output import ParsedOutput, Reply, respond
from weft.serve.chat.parsers import ALL_TEXT, BEGIN, END, EndingParser, OutputSyntax, after_reasoning, parser, start_of
from weft.serve.chat.prompts import Prompts
from weft.serve.chat.protocol import CommonRequest, RequestedGrammar, grammar_of
from weft.serve.chat.templates import Templates
from weft.serve.chat.tool_formats import tool_format_of
from weft.serve.chat.tools import ChannelParser, Parser
from weft.serve.http.engine_client import EngineClient
from weft.serve.http.errors import ApiError, bad_field, client_names
from weft.serve.http.options import Options
from weft.serve.http.remote_engine import AnyEngine, AnyShared


class ChatJob(NamedTuple):
    """Chat for the engine. parsers: returns a new parser of an output; None if the output is all text."""

    chat: ChatRequest
    prompt: list[int]
    params: SamplingParams
    parsers: Callable[[], Parser] | None

    def outputs(self) -> list[ParsedOutput]:
        """Return an empty output per choice."""
        return [ParsedOutput(self.parsers and self.parsers()) for _ in range(self.chat.n)]


@dataclass(frozen=True)
class Service:
    """Service of requests by one engine. model_names: names of its model. templates: see `Prompts`."""

    engine_client: EngineClient
    model_names: tuple[str, ...]
    templates: Templates
    options: Options
    shared: AnyShared

    @property
    def model_name(self) -> str:
        """Name of the model in responses."""
        return self.model_names[0]

    @property
    def engine(self) -> AnyEngine:
        """Engine of the client."""
        return self.engine_client.engine

    @cached_property
    def prompts(self) -> Prompts:
        """Tokeniser of requests' prompts."""
        return Prompts(self.engine, self.templates, self.options.trust_request_chat_template)

    def chat_job(self, body: ChatRequest) -> ChatJob:
        """Check a chat, and return its job for the engine. ApiError 400 or 404, with the client's names."""
        with client_names(body.names):
            self.check(body)
            text = self.prompts.chat_text(body)
            syntax = self._syntax(body, text)
            params = self._chat_params(body, syntax)
            parsers = self._parsers(body, syntax)
            if parsers is not None and (params.stop or not body.parallel_tool_calls):
                ended = partial(self._ending, parsers, params)
                params = replace(params, stop=(), watch=lambda: ended().watch)
                parsers = ended
            return ChatJob(body, self.prompts.of_chat(body, text), params, parsers)

    @staticmethod
    def _ending(parsers: Callable[[], Parser], params: SamplingParams) -> EndingParser:
        return EndingParser(parsers(), params.stop, params.keep_stop, params.min_tokens)

    def _syntax(self, body: ChatRequest, prompt: str) -> OutputSyntax:
        template = body.template(self.engine.tokenizer)
        form = tool_format_of(template)
        bare = not body.must_call and grammar_of(body) is not None
        if form and form.channels:
            if not body.separate_reasoning:
                raise bad_field("separate_reasoning", " must be true: the output of this model has a channel for it")
            begun = prompt.rpartition(ChannelParser.START)[2] if body.continue_final_message else ""
            form = None if bare else form  # a request's grammar has no channels
            return OutputSyntax(form, begun=begun, thoughts=body.include_reasoning)
        begun = body.messages[-1].text if body.continue_final_message else ""
        start = start_of(prompt, begun) if self._thinks(template) and body.separate_reasoning else None
        form = form if body.offered else None
        form = form if form and (form.begin or not bare) else None
        return OutputSyntax(form, start, bare, thoughts=body.include_reasoning)

    def _thinks(self, template: str) -> bool:
        """Return whether thoughts are split off from the text."""
        if self.options.reasoning_parser != "auto":
            return self.options.reasoning_parser == "think"
        return BEGIN in template or END in template or END in self._added

    @cached_property
    def _added(self) -> frozenset[str]:
        return frozenset(self.engine.tokenizer.get_added_vocab())

    def _parsers(self, body: ChatRequest, syntax: OutputSyntax) -> Callable[[], Parser] | None:
        """Return the function that makes a choice's parser; None if all is text."""
        hidden = self.engine.text_processor.special if body.skip_special_tokens else ()
        made = partial(parser, syntax, body.offered, hidden, one_call=not body.parallel_tool_calls)
        return made if syntax.form or syntax.start else None

    def _chat_params(self, body: ChatRequest, syntax: OutputSyntax) -> SamplingParams:
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        more = {"logprobs": logprobs, "prompt_logprobs": body.prompt_logprobs}
        params = self.params(body, syntax, max_tokens=body.output_limit, **more)
        marks = (syntax.form.tokens if syntax.form else ()) + ((BEGIN, END) if syntax.start else ())
        if not self.engine.text_processor.special.isdisjoint(marks):
            params = replace(params, keep_special=True)  # the parser finds parts by special tokens
        return params

    def check_model(self, asked: str | None) -> None:
        """Raise ApiError 404 for a model that this server does not have."""
        if asked is not None and asked not in self.model_names:
            message = f"the model {asked!r} is not served here; this is {self.model_name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    def check(self, body: CommonRequest) -> None:
        """Raise ApiError 400 or 404 for an unsupported request."""
        self.check_model(body.model)
        if body.stream_options and not body.stream:
            raise bad_field("stream_options", " needs stream to be true")
        body.refuse_unsupported()

    def params(self, body: CommonRequest, syntax: OutputSyntax = ALL_TEXT, **more: Any) -> SamplingParams:
        """Return the sampling parameters of a request, with `more` of them. Required calls replace another grammar;
        optional calls are its alternative."""
        grammars = self.engine.text_processor.grammars
        requested = grammar_of(body, any_whitespace=self.options.any_whitespace)
        grammar = requested and requested.grammar
        if isinstance(body, ChatRequest):
            whitespace, bare = self.options.any_whitespace, bool(requested)
            calls = body.calls_grammar(syntax.form, grammars, bare=bare, any_whitespace=whitespace)
            grammar = either(calls, grammar) if calls and grammar and not body.must_call else calls or grammar
        if grammar and syntax.start:
            grammar = after_reasoning(grammar, syntax.start, grammars.named)
        try:  # here, perhaps on a thread: requests are submitted to the engine on the event loop
            compiled = grammars.compiled(grammar) if grammar else None
        except ValueError as error:
            field = self._name_field(body, requested)
            raise bad_field(field, f": {error}") from error
        return body.sampling(self.engine.text_processor, grammar=compiled, **more)

    def _name_field(self, body: CommonRequest, asked: RequestedGrammar | None) -> str:
        """Return the field of an unusable grammar: the first that is unusable by itself."""
        fields = {asked.field: asked.grammar} if asked else {}
        for at, tool in enumerate(body.tools if isinstance(body, ChatRequest) else ()):
            fields[f"tools.{at}.function.parameters"] = json_grammar(tool.function.parameters or {})
        for field, one in fields.items():
            try:
                self.engine.text_processor.grammars.compiled(one)
            except ValueError:
                return field
        return "tools" if asked is None else asked.field

    async def respond_chat(self, request: Request, job: ChatJob, reply: Reply) -> Response:
        """Generate the outputs of a chat, and return its response."""
        with client_names(job.chat.names):
            return await self.respond(request, job.chat, job.params, reply)

    async def respond(self, request: Request, body: CommonRequest, params: SamplingParams, reply: Reply) -> Response:
        """Generate the outputs of a request, and return its response."""
        each = [params if params.seed is None else replace(params, seed=params.seed + i) for i in range(body.n)]
        prompts = [prompt for prompt in reply.prompts for _ in each]
        client = body.user or (request.client.host if request.client else "")
        sharing = Sharing(client, body.priority, body.cache_salt)
        stream = self.engine_client.generate(request, prompts, each * len(reply.prompts), sharing)
        return await respond(request, stream, reply, body.stream)
