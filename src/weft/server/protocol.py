"""Request bodies of the OpenAI API, checked. Unknown fields are ignored; known ones that Weft lacks are refused."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from weft.engine.request import SamplingParams
from weft.server.errors import ApiError


class StreamOptions(BaseModel):
    """include_usage: send a last chunk with token counts."""

    include_usage: bool = False


class CommonRequest(BaseModel):
    """What both kinds of completion share. top_k, min_tokens, ignore_eos, stop_token_ids are extensions."""

    model_config = ConfigDict(extra="allow")
    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {
        "presence_penalty": (0,),
        "frequency_penalty": (0,),
        "logit_bias": ({},),
    }

    model: str | None = None
    n: int = Field(1, ge=1, le=128)
    temperature: float | None = 1.0
    top_p: float | None = 1.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    top_k: int = 0
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: list[int] = []

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
                temperature=1.0 if self.temperature is None else self.temperature,
                top_p=1.0 if self.top_p is None else self.top_p,
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

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = CommonRequest.unsupported | {"suffix": ("",), "best_of": (1,)}

    prompt: str | list[int] | list[str] | list[list[int]]
    max_tokens: int | None = 16
    logprobs: int | None = None
    echo: bool = False


class TextPart(BaseModel):
    """A part of a message; text is all that Weft reads."""

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """One message of a chat."""

    model_config = ConfigDict(extra="allow")
    role: str
    content: str | list[TextPart] | None = None

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
        "response_format": ({"type": "text"},),
    }

    messages: list[Message] = Field(min_length=1)
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = None
