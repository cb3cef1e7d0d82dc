"""Request bodies of the OpenAI API, checked. Unknown fields are ignored; known ones that Weft lacks are refused."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from weft.engine.request import SamplingParams
from weft.server.errors import ApiError

MOST_ITEMS = 2**16
"""Messages of a chat, or prompts of a completion."""


def _encodable(text: str) -> str:
    """JSON can hold half of a surrogate pair, which is no character: a tokenizer fails on it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError("half of a surrogate pair is no text") from error
    return text


Text = Annotated[str, AfterValidator(_encodable)]


def _not_too_many(values: Any) -> Any:
    """Before each is looked at: a long list of little takes much more memory than its text."""
    if isinstance(values, list) and len(values) > MOST_ITEMS:
        raise ValueError(f"{len(values)} items; at most {MOST_ITEMS}")
    return values


class StreamOptions(BaseModel):
    """include_usage: send a last chunk with token counts."""

    include_usage: bool = False


class CommonRequest(BaseModel):
    """What both kinds of completion share. top_k, min_tokens, ignore_eos, stop_token_ids are extensions."""

    model_config = ConfigDict(extra="allow")
    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {
        "presence_penalty": (0,),
        "frequency_penalty": (0,),
        "repetition_penalty": (1,),
        "min_p": (0,),
        "logit_bias": ({},),
    }

    model: str | None = None
    user: Text | None = None
    n: int = Field(1, ge=1, le=128)
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    stop: Text | list[Text] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    top_k: int = 0
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: list[int] = []

    @model_validator(mode="before")
    @classmethod
    def _null_is_left_out(cls, body: Any) -> Any:
        return {k: v for k, v in body.items() if v is not None} if isinstance(body, dict) else body

    def refuse_unsupported(self) -> None:
        """ApiError 400 for a parameter that asks for something Weft cannot do."""
        for name, neutral in self.unsupported.items():
            value = (self.model_extra or {}).get(name)
            if value is not None and value not in neutral:
                raise ApiError(400, f"{name} is not supported; leave it out", param=name)

    def sampling(self, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
        """The engine's parameters. ApiError 400 for a value out of range."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if len(stop) > 16:
            raise ApiError(400, f"{len(stop)} stop strings; at most 16", param="stop")
        try:
            return SamplingParams(
                max_tokens=max_tokens,
                min_tokens=self.min_tokens,
                temperature=self.temperature,
                top_p=self.top_p,
                top_k=max(self.top_k, 0),  # -1 is some clients' word for off
                seed=self.seed,
                stop=tuple(stop),
                stop_token_ids=tuple(self.stop_token_ids),
                ignore_eos=self.ignore_eos,
                logprobs=logprobs,
            )
        except ValueError as error:
            raise ApiError(400, str(error), param=str(error).split(" ")[0]) from error


class CompletionRequest(CommonRequest):
    """POST /v1/completions. prompt: text or token ids, one or several."""

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = CommonRequest.unsupported | {"suffix": ("",)}

    prompt: Text | list[int] | list[Text] | list[list[int]]
    max_tokens: int = 16
    logprobs: int | None = None
    echo: bool = False
    best_of: int = 1

    def refuse_unsupported(self) -> None:
        super().refuse_unsupported()
        if self.best_of > self.n:
            message = f"best_of={self.best_of} above n={self.n} is not supported; leave it out"
            raise ApiError(400, message, param="best_of")


class TextPart(BaseModel):
    """A part of a message; text is all that Weft reads."""

    type: Literal["text"]
    text: Text


class Message(BaseModel):
    """One message of a chat."""

    model_config = ConfigDict(extra="allow")
    role: Text
    content: Text | list[TextPart] | None = None

    @property
    def characters(self) -> int:
        """Length of its text."""
        parts = self.content or ""
        return len(self.role) + (len(parts) if isinstance(parts, str) else sum(len(p.text) for p in parts))

    def plain(self) -> dict[str, str]:
        """As chat templates take it."""
        content = self.content or ""
        return {"role": self.role, "content": content if isinstance(content, str) else "".join(p.text for p in content)}


class ChatRequest(CommonRequest):
    """POST /v1/chat/completions."""

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = CommonRequest.unsupported | {
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "modalities": (["text"],),
        "response_format": ({"type": "text"},),
    }

    messages: Annotated[list[Message], Field(min_length=1), BeforeValidator(_not_too_many)]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
