"""Request bodies of the OpenAI API, checked. A field is served, or refused by its name; none is ignored silently, but
for those that change no output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field

from weft.engine.messages.request import SamplingParams
from weft.engine.output.text_processor import TextProcessor
from weft.serve.http.bodies import Body
from weft.serve.http.errors import ApiError, of_value

MAX_ITEMS = 2**16
"""Messages of a chat, items of a response, choices of a grammar, tokens that a mask allows or that are made text."""
MAX_NAMED = 1024
"""Tokens and words that each step of a request looks at, and functions that a chat template writes."""
MAX_STOPS, MAX_STOP_TEXT = 16, 4096
"""Stop strings of a request, and characters of each: every increment is compared with all of them."""
MAX_WORDS_TEXT = 2**16
"""Characters of all bad words."""
MAX_PAIRS = 16
"""Pairs of metadata, as in OpenAI's API: the events of a stream repeat them."""
MAX_NAME = 1024
"""Characters of `user` and `cache_salt`, which are kept with the request."""


Text = str
"""What clients write. Halves of surrogate pairs are refused before (`weft.serve.http.bodies.decode`)."""


def limited_to(limit: int) -> BeforeValidator:
    """Counts a list's items, or an object's members, before each is looked at: a long list of little takes much more
    memory than its text."""

    def check(values: Any) -> Any:
        if isinstance(values, list | dict) and len(values) > limit:
            raise ValueError(f"{len(values)} items; at most {limit}")
        return values

    return BeforeValidator(check)


Texts = Annotated[list[Text], Field(fail_fast=True)]
Tokens = Annotated[list[int], Field(fail_fast=True)]
Metadata = Annotated[dict[str, Text], limited_to(MAX_PAIRS)]
HARMLESS = frozenset({"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"})
HARMLESS |= {"prompt_cache_retention", "request_id", "parallel_tool_calls", "spaces_between_special_tokens"}
"""Fields of a request that are accepted and change no output."""


class StreamOptions(Body):
    """include_usage: send a last chunk with token counts. continuous_usage_stats: counts so far in each chunk."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False


class StructuredOutputs(Body):
    """One of these; see `weft.engine.grammar.grammar`."""

    json_: Any = Field(None, alias="json")
    regex: Text | None = None
    choice: Annotated[Texts, limited_to(MAX_ITEMS)] | None = None
    grammar: Text | None = None
    json_object: bool | None = None


class JsonSchema(Body):
    """Its name and description change nothing; it is followed whether strict or not."""

    name: Text | None = None
    description: Text | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """type: text, json_object or json_schema."""

    type: Text
    json_schema: JsonSchema | None = None


class SharedRequest(Body):
    """What says how a request shares the engine with others (`weft.engine.messages.request.Sharing`)."""

    user: Text | None = Field(None, max_length=MAX_NAME)
    priority: int = 0
    cache_salt: Text = Field("", min_length=1, max_length=MAX_NAME)


class OutputRequest(Body):
    """Fields that every API has for an output. A chat's translation takes them over by their names."""

    model: str | None = None
    stream: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None


class SamplingFields(OutputRequest):
    """How tokens are sampled, and where the output ends: OpenAI's parameters, then vLLM's and SGLang's."""

    seed: int | None = None
    stop: Text | Texts | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Annotated[dict[int, float], limited_to(MAX_NAMED)] = Field({})
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: Annotated[Tokens, limited_to(MAX_NAMED)] = Field([])
    bad_words: Annotated[Texts, limited_to(MAX_NAMED)] = Field([])
    allowed_token_ids: Annotated[Tokens, limited_to(MAX_ITEMS)] | None = None
    include_stop_str_in_output: bool = False
    no_stop_trim: bool = False
    skip_special_tokens: bool = True

    @property
    def heavy(self) -> bool:
        """Each bad word is encoded."""
        return bool(self.bad_words)

    def sampling(self, text_processor: TextProcessor, **more: Any) -> SamplingParams:
        """Return the engine's parameters: fields that it has by the same name, and `more` as they are.

        ApiError 400 for a value out of range.
        """
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if len(stop) > MAX_STOPS:
            raise ApiError(400, f"stop: {len(stop)} strings are given; at most {MAX_STOPS}", param="stop")
        if (longest := max(map(len, stop), default=0)) > MAX_STOP_TEXT:
            raise ApiError(400, f"stop: a string of {longest} characters; at most {MAX_STOP_TEXT}", param="stop")
        if (characters := sum(map(len, self.bad_words))) > MAX_WORDS_TEXT:
            raise ApiError(400, f"bad_words: {characters} characters; at most {MAX_WORDS_TEXT}", param="bad_words")
        params: dict[str, Any] = dict(text_processor.defaults)
        for name in SamplingFields.model_fields.keys() & SamplingParams.__dataclass_fields__.keys():
            if (value := getattr(self, name)) is not None:
                params[name] = tuple(value) if isinstance(value, list) else value
        params["top_k"] = max(int(params.get("top_k", 0)), 0)  # -1 is some clients' word for off
        params |= {"stop": tuple(stop), "logit_bias": tuple(self.logit_bias.items())}
        params["bad_words"] = _spellings(self.bad_words, text_processor.tokenizer)
        params["keep_stop"] = self.include_stop_str_in_output or self.no_stop_trim
        try:
            return SamplingParams(keep_special=not self.skip_special_tokens, **params, **more)
        except ValueError as error:
            raise of_value(error) from error


class GrammarFields(Body):
    """The grammar that the output follows, by any of the names that clients have for it; see `structure.grammar_of`."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Any = None
    guided_regex: Text | None = None
    guided_choice: Annotated[Texts, limited_to(MAX_ITEMS)] | None = None
    guided_grammar: Text | None = None
    json_schema: Any = None
    regex: Text | None = None
    ebnf: Text | None = None

    @property
    def slow(self) -> bool:
        """A grammar may take a second to compile."""
        return not self.model_fields_set.isdisjoint(GrammarFields.model_fields)


class CommonRequest(SharedRequest, SamplingFields, GrammarFields):
    """What both kinds of completion share."""

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
        "data_parallel_rank": (0,),  # of the one that `weft.serve.dialects.router_routes` reports
    }

    @property
    def output_limit(self) -> int | None:
        """Most tokens of a choice; None: what fits into the context."""
        return None

    n: int = Field(1, ge=1, le=128)
    stream_options: StreamOptions | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool = False
    truncate_prompt_tokens: int | None = Field(None, ge=-1)


def _spellings(words: Sequence[str], tokenizer: Any) -> tuple[tuple[int, ...], ...]:
    """Tokens of each word at the start of a text and after a space."""
    texts = [space + word.lstrip() for word in words for space in ("", " ")]
    made = tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []
    return tuple(dict.fromkeys(map(tuple, made)))


class CompletionRequest(CommonRequest):
    """POST /v1/completions. prompt: text or token ids, one or several."""

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
            message = f"best_of={self.best_of} {side} n={self.n} is not supported; leave it out"
            raise ApiError(400, message, param="best_of")


class TokenizeRequest(Body):
    """POST /tokenize, of a text; of a chat, it takes what the chat takes."""

    harmless = HARMLESS
    model: str | None = None
    prompt: Text
    add_special_tokens: bool = True
    return_token_strs: bool = False


class DetokenizeRequest(Body):
    """POST /detokenize."""

    harmless = HARMLESS
    model: str | None = None
    tokens: Annotated[Tokens, limited_to(MAX_ITEMS)]
