"""Chunks with nothing but text, made from one chunk and a text each, are what encoding each chunk gives."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from weft.engine.messages.request import Output, SamplingParams, TokenLogprob
from weft.serve.chat.chats import ChatRequest
from weft.serve.chat.protocol import CompletionRequest
from weft.serve.chat.service import ChatJob
from weft.serve.dialects.completions import ChatReply, ChoicesReply, CompletionReply
from weft.serve.http.wire import event

TEXTS = ("a", 'quote " and \\', "é\n\u2028", "", "\0", "b", "c", "")
OPTIONS: tuple[dict[str, Any], ...] = ({}, {"include_usage": True}, {"continuous_usage_stats": True})
SERVICE: Any = SimpleNamespace(
    model_name='name "of" it',
    engine=SimpleNamespace(text_processor=SimpleNamespace(special_ids=(), token_name=str)),
)


def outputs(logprobs: bool = False) -> list[Output]:
    """An increment for each text, the last with the end."""
    made = []
    for at, text in enumerate(TEXTS, 1):
        scores = (TokenLogprob(7, -0.5 * at),) if logprobs else ()
        made.append(Output(text, (7,), scores, "stop" if at == len(TEXTS) else None, None, 1, 0, at, None))
    return made


def streamed(reply: ChoicesReply, made: list[Output], index: int = 0) -> list[bytes]:
    """Each increment's events."""
    found = []
    for output in made:
        begins = reply.outputs[index].last is None
        found.append(b"".join(reply.increment(index, output, reply.outputs[index].add(output), begins)))
    return found


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("more", [{}, {"n": 2}, {"return_token_ids": True}])
def test_completions(options: dict[str, Any], more: dict[str, Any]) -> None:
    body = CompletionRequest.model_validate({"prompt": [1], "stream": True, "stream_options": options} | more)
    reply = CompletionReply(SERVICE, [[1]], body)
    for index in range(body.n):
        found = streamed(reply, outputs(), index)
        for at, (text, raw) in enumerate(zip(TEXTS, found, strict=True)):
            reason = "stop" if at == len(TEXTS) - 1 else None
            choice: dict[str, Any] = {"index": index, "text": text, "logprobs": None, "finish_reason": reason}
            choice |= {"stop_reason": None}
            if "return_token_ids" in more:
                choice |= {"token_ids": (7,)} | ({} if at else {"prompt_token_ids": [1]})
            usage: dict[str, Any] = {"usage": None} if "include_usage" in options else {}
            if "continuous_usage_stats" in options:
                tokens = at + 1 + index * len(TEXTS)
                usage = {"usage": {"prompt_tokens": 1, "completion_tokens": tokens, "total_tokens": tokens + 1}}
                usage["usage"]["prompt_tokens_details"] = {"cached_tokens": 0}
            assert raw == event({**reply._chunk_head, "choices": [choice], **usage})


@pytest.mark.parametrize("logprobs", [False, True])
def test_chats_with_thoughts(logprobs: bool) -> None:
    thoughts = TEXTS[:3]

    def push(text: str, last: bool) -> Any:
        thought = text in thoughts
        return SimpleNamespace(thought=text * thought, text=text * (not thought), arguments="", calls=[])

    chat = ChatRequest.model_validate(
        {"messages": [{"role": "user", "content": "x"}], "stream": True, "logprobs": logprobs}
    )
    parsers: Any = lambda: SimpleNamespace(push=push)  # noqa: E731
    SERVICE.engine.text_processor.grammars = SimpleNamespace(tokens=SimpleNamespace(decode_bytes=lambda tokens: b"t"))
    reply = ChatReply(SERVICE, ChatJob(chat, [1], SamplingParams(), parsers))
    found = streamed(reply, outputs(logprobs))
    role = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    begun = event({**reply._chunk_head, "choices": [role]})
    for at, (text, raw) in enumerate(zip(TEXTS, found, strict=True)):
        delta = {"reasoning_content": text, "reasoning": text} if text in thoughts else {"content": text}
        entry = {"token": "t", "logprob": -0.5 * (at + 1), "bytes": [116], "top_logprobs": []}
        choice: dict[str, Any] = {"index": 0, "delta": delta if text else {}}
        choice["logprobs"] = {"content": [entry]} if logprobs else None
        choice |= {"finish_reason": "stop" if at == len(TEXTS) - 1 else None, "stop_reason": None}
        said = text or logprobs or choice["finish_reason"]
        expected = event({**reply._chunk_head, "choices": [choice]}) if said else b""
        assert raw == (begun if at == 0 else b"") + expected
