"""Request bodies of the OpenAI API, checked. An unsupported field is refused by its name, unless it changes no
output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, NamedTuple

from pydantic import BeforeValidator, Field

from weft.engine.grammar.grammar import Kind, grammar
from weft.engine.messages.request import SamplingParams
from weft.engine.output.text_processor import TextProcessor
from weft.serve.http.bodies import Body
from weft.serve.http.errors import ApiError, bad_field, of_value

MAX_ITEMS = 2**16
"""Maximum messages of a chat, items of a response, choices of a grammar, tokens of a mask or to detokenise."""
MAX_NAMED = 1024
"""Maximum tokens and words that each step of a request checks, and functions that a chat template renders."""
MAX_STOPS, MAX_STOP_TEXT = 16, 4096
"""Maximum stop strings of a request, and characters of each: every increment is compared with all."""
MAX_WORDS_TEXT = 2**16
"""Maximum characters of all bad words."""
MAX_PAIRS = 16
"""Maximum pairs of metadata, as in OpenAI's API: the events of a stream repeat them."""
MAX_NAME = 1024
"""Maximum characters of `user` and `cache_salt`, which are stored with the request."""


Text = str
"""Client's text. `weft.serve.http.bodies.decode` has refused lone surrogates."""


def limited_to(limit: int) -> BeforeValidator:
    """Return a validator that counts items or members before checking each, as a long list of small items needs far
    more memory than its text."""

    def check(values: Any) -> Any:
        if isinstance(values, list | dict) and len(values) > limit:
            raise ValueError(f"{len(values)} items; at most {limit}")
        return values

    return BeforeValidator(check)


Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]
"""Integer that messages between processes hold."""
Texts = Annotated[list[Text], Field(fail_fast=True)]
Tokens = Annotated[list[int], Field(fail_fast=True)]
Metadata = Annotated[dict[str, Text], limited_to(MAX_PAIRS)]
ANY_OBJECT = {"type": "object"}
SCHEMA_FIELD = "response_format.json_schema.schema"
GRAMMAR_FIELDS: dict[str, Kind] = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json",
    "regex": "regex",
    "ebnf": "grammar",
}
"""Older name of vLLM or name of SGLang → kind of grammar."""
HARMLESS = frozenset({"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"})
HARMLESS |= {"prompt_cache_retention", "request_id", "parallel_tool_calls", "spaces_between_special_tokens"}
"""Accepted fields of a request that change no output."""


class StreamOptions(Body):
    """Options of streams. include_usage: counts in a last chunk; continuous_usage_stats: counts in each chunk."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False


class StructuredOutputs(Body):
    """Constraint of the output: one of these fields; see `weft.engine.grammar.grammar`."""

    json_: Any = Field(None, alias="json")
    regex: Text | None = None
    choice: Annotated[Texts, limited_to(MAX_ITEMS)] | None = None
    grammar: Text | None = None
    json_object: bool | None = None


class JsonSchema(Body):
    """JSON schema, which outputs follow even if it is not strict. Its name and description have no effect."""

    name: Text | None = None
    description: Text | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """Format of the output. type: text, json_object or json_schema."""

    type: Text
    json_schema: JsonSchema | None = None


class SharedRequest(Body):
    """Fields of a request's share of the engine (`weft.engine.messages.request.Sharing`)."""

    user: Text | None = Field(None, max_length=MAX_NAME)
    priority: Int64 = 0
    cache_salt: Text = Field("", min_length=1, max_length=MAX_NAME)


class OutputRequest(Body):
    """Fields of an output that every API has. Translations to a chat copy them by name."""

    model: str | None = None
    stream: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None


class SamplingFields(OutputRequest):
    """Fields of sampling and of the output's end: OpenAI's parameters, then vLLM's and SGLang's."""

    seed: Int64 | None = None
    stop: Text | Texts | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Annotated[dict[int, float], limited_to(MAX_NAMED)] = Field({})
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: Int64 = 0
    ignore_eos: bool = False
    stop_token_ids: Annotated[Tokens, limited_to(MAX_NAMED)] = Field([])
    bad_words: Annotated[Texts, limited_to(MAX_NAMED)] = Field([])
    allowed_token_ids: Annotated[Tokens, limited_to(MAX_ITEMS)] | None = None
    include_stop_str_in_output: bool = False
    no_stop_trim: bool = False
    skip_special_tokens: bool = True

    def sampling(self, text_processor: TextProcessor, **more: Any) -> SamplingParams:
        """Return the engine's parameters: fields of the same names, and `more`. ApiError 400 for a bad value."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if len(stop) > MAX_STOPS:
            raise bad_field("stop", f": {len(stop)} strings are given; at most {MAX_STOPS}")
        if (longest := max(map(len, stop), default=0)) > MAX_STOP_TEXT:
            raise bad_field("stop", f": a string of {longest} characters; at most {MAX_STOP_TEXT}")
        if (characters := sum(map(len, self.bad_words))) > MAX_WORDS_TEXT:
            raise bad_field("bad_words", f": {characters} characters; at most {MAX_WORDS_TEXT}")
        params: dict[str, Any] = dict(text_processor.defaults)
        for name in SamplingFields.model_fields.keys() & SamplingParams.__dataclass_fields__.keys():
            if (value := getattr(self, name)) is not None:
                params[name] = tuple(value) if isinstance(value, list) else value
        params["top_k"] = max(int(params.get("top_k", 0)), 0)  # some clients send -1 for off
        params |= {"stop": tuple(stop), "logit_bias": tuple(self.logit_bias.items())}
        params["bad_words"] = _spellings(self.bad_words, text_processor.tokenizer)
        params["keep_stop"] = self.include_stop_str_in_output or self.no_stop_trim
        try:
            return SamplingParams(keep_special=not self.skip_special_tokens, **params, **more)
        except ValueError as error:
            raise of_value(error) from error


class GrammarFields(Body):
    """Fields for the grammar of the output, under all of clients' names; see `grammar_of`."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Any = None
    guided_regex: Text | None = None
    guided_choice: Annotated[Texts, limited_to(MAX_ITEMS)] | None = None
    guided_grammar: Text | None = None
    json_schema: Any = None
    regex: Text | None = None
    ebnf: Text | None = None


class RequestedGrammar(NamedTuple):
    """Requested grammar, for `SamplingParams.grammar`, and the field that requests it."""

    grammar: str
    field: str


def grammar_of(body: GrammarFields, *, any_whitespace: bool = False) -> RequestedGrammar | None:
    """Return the grammar of a request's output; None if it is free. ApiError 400.

    any_whitespace: of JSON, as in `weft.engine.grammar.grammar.schema_text`.
    """
    requests: list[tuple[str, Kind, Any]] = [
        (name, kind, getattr(body, name)) for name, kind in GRAMMAR_FIELDS.items() if getattr(body, name) is not None
    ]
    if body.response_format is not None:
        requests += _response_format(body.response_format)
    if (structured := body.structured_outputs) is not None:
        named: tuple[tuple[str, Kind, Any], ...] = (
            ("json", "json", structured.json_),
            ("json_object", "json", ANY_OBJECT if structured.json_object else None),
            ("regex", "regex", structured.regex),
            ("choice", "choice", structured.choice),
            ("grammar", "grammar", structured.grammar),
        )
        requests += [(f"structured_outputs.{name}", kind, what) for name, kind, what in named if what is not None]
    if not requests:
        return None
    if len(requests) > 1:
        names = " and ".join(name for name, _, _ in requests)
        raise ApiError(400, f"{names} ask for two grammars; ask for one", param=requests[1][0])
    [(name, kind, what)] = requests
    if what == []:
        raise bad_field(name, " has no choice; give one or more")
    try:
        return RequestedGrammar(grammar(kind, what, any_whitespace=any_whitespace), name)
    except ValueError as error:
        raise bad_field(name, f": {str(error).splitlines()[0]}") from error


def _response_format(form: ResponseFormat) -> list[tuple[str, Kind, Any]]:
    if form.type == "json_schema":
        if form.json_schema is None or form.json_schema.schema_ is None:
            rest = ": the type json_schema needs a schema; give one, or use the type json_object"
            raise bad_field(SCHEMA_FIELD, rest)
        return [(SCHEMA_FIELD, "json", form.json_schema.schema_)]
    if form.type not in ("text", "json_object"):
        rest = f": {form.type!r} is not supported; use text, json_object or json_schema"
        raise bad_field("response_format.type", rest)
    if form.json_schema is not None:
        rest = f" has no meaning for the type {form.type}; use the type json_schema"
        raise bad_field("response_format.json_schema", rest)
    return [("response_format", "json", ANY_OBJECT)] if form.type == "json_object" else []


class CommonRequest(SharedRequest, SamplingFields, GrammarFields):
    """Fields that both kinds of completion share."""

    harmless = HARMLESS
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {
        "use_beam_search": (False,),
        "length_penalty": (1,),
        "modalities": (["text"],),
        "return_tokens_as_token_ids": (False,),
        "return_hidden_states": (False,),
        "separate_reasoning": (True,),
        "stream_reasoning": (True,),
        "include_reasoning": (True,),
        "data_parallel_rank": (0,),  # `weft.serve.dialects.extras` reports one rank
    }

    @property
    def slow(self) -> bool:
        """True with bad words, as each is encoded, and with a grammar, which may take a second to compile."""
        return bool(self.bad_words) or not self.model_fields_set.isdisjoint(GrammarFields.model_fields)

    @property
    def output_limit(self) -> int | None:
        """Maximum tokens of a choice; None: all that fit into the context."""
        return None

    n: int = Field(1, ge=1, le=128)
    stream_options: StreamOptions | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool = False
    truncate_prompt_tokens: int | None = Field(None, ge=-1)


def _spellings(words: Sequence[str], tokenizer: Any) -> tuple[tuple[int, ...], ...]:
    """Return the tokens of each word at the start of a text and after a space."""
    texts = [space + word.lstrip() for word in words for space in ("", " ")]
    made = tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []
    return tuple(dict.fromkeys(map(tuple, made)))


class CompletionRequest(CommonRequest):
    """Body of POST /v1/completions. prompt: one or several texts or lists of token ids."""

    neutral: ClassVar[dict[str, tuple[Any, ...]]] = CommonRequest.neutral | {"suffix": ("",)}

    prompt: Text | Tokens | Texts | Annotated[list[Tokens], Field(fail_fast=True)]
    max_tokens: int = 16
    logprobs: int | None = None
    echo: bool = False
    best_of: int | None = None
    add_special_tokens: bool = True

    @property
    def output_limit(self) -> int | None:
        return self.max_tokens

    @property
    def tokenised(self) -> bool:
        return isinstance(self.prompt, list) and not (self.echo or isinstance(next(iter(self.prompt), ""), str))

    def refuse_unsupported(self, place: str = "") -> None:
        super().refuse_unsupported(place)
        if self.best_of not in (None, self.n):
            side = "above" if self.best_of > self.n else "below"
            raise bad_field("best_of", f"={self.best_of} {side} n={self.n} is not supported; leave it out")


class TokenizeRequest(Body):
    """Body of POST /tokenize for a text; for a chat, the body is a `ChatRequest`."""

    harmless = HARMLESS
    model: str | None = None
    prompt: Text
    add_special_tokens: bool = True
    return_token_strs: bool = False


class DetokenizeRequest(Body):
    """Body of POST /detokenize."""

    harmless = HARMLESS
    model: str | None = None
    tokens: Annotated[Tokens, limited_to(MAX_ITEMS)]
