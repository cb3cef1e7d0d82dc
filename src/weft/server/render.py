"""How answers look on the wire: one style for each of OpenAI's two endpoints."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from llguidance import LLTokenizer

from weft.engine.request import Output, TokenLogprob
from weft.server.answers import Choice
from weft.server.tools import Call, CallParser


class Style(Protocol):
    """Names and bodies of an endpoint's answers."""

    id_prefix: str
    name: str
    chunk_name: str

    def whole(self, index: int, choice: Choice) -> dict[str, Any]:
        """A finished choice."""
        ...

    def chunks(self, index: int, output: Output, begins: bool) -> Iterator[dict[str, Any]]:
        """An increment as zero or more streamed choices; begins: it is the choice's first."""
        ...


class Completion:
    """/v1/completions. lead: text to put before each choice (echo)."""

    id_prefix, name, chunk_name = "cmpl", "text_completion", "text_completion"

    def __init__(self, tokenizer: Any, lead: Sequence[str], logprobs: bool):
        self._tokenizer, self._lead, self._logprobs = tokenizer, lead, logprobs
        self._offsets = [len(text) for text in lead]

    def whole(self, index: int, choice: Choice) -> dict[str, Any]:
        assert choice.last is not None
        return self._body(index, self._lead[index] + choice.text, choice.logprobs, choice.last)

    def chunks(self, index: int, output: Output, begins: bool) -> Iterator[dict[str, Any]]:
        text = (self._lead[index] if begins else "") + output.text
        if text or output.logprobs or output.finish_reason:
            yield self._body(index, text, output.logprobs, output)

    def _body(self, index: int, text: str, logprobs: Sequence[TokenLogprob], output: Output) -> dict[str, Any]:
        return {
            "index": index,
            "text": text,
            "logprobs": self._table(index, logprobs) if self._logprobs else None,
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
        }

    def _table(self, index: int, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        tokens = [self._tokenizer.decode([p.token_id]) for p in logprobs]
        offsets = []
        for token in tokens:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [p.logprob for p in logprobs],
            "top_logprobs": [{self._tokenizer.decode([t]): value for t, value in p.top} for p in logprobs],
            "text_offset": offsets,
        }


class Chat:
    """/v1/chat/completions. calls: the text may hold calls of tools, which are told apart from it."""

    id_prefix, name, chunk_name = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, tokens: LLTokenizer, logprobs: bool, calls: bool = False):
        self._tokens, self._logprobs, self._calls = tokens, logprobs, calls
        self._parsers: defaultdict[int, CallParser] = defaultdict(CallParser)

    def whole(self, index: int, choice: Choice) -> dict[str, Any]:
        assert choice.last is not None
        text, calls = CallParser().push(choice.text, last=True) if self._calls else (choice.text, [])
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if calls:
            message |= {"content": text or None, "tool_calls": [call.plain() for call in calls]}
        return {"index": index, "message": message} | self._rest(choice.logprobs, choice.last, bool(calls))

    def chunks(self, index: int, output: Output, begins: bool) -> Iterator[dict[str, Any]]:
        if begins:
            role = {"index": index, "delta": {"role": "assistant", "content": ""}}
            yield role | {"logprobs": None, "finish_reason": None}
        text, called = output.text, 0
        calls: list[Call] = []
        if self._calls:
            called = self._parsers[index].calls
            text, calls = self._parsers[index].push(text, last=output.finish_reason is not None)
        delta: dict[str, Any] = {"content": text} if text else {}
        if calls:
            delta["tool_calls"] = [{"index": called + i} | call.plain() for i, call in enumerate(calls)]
        if delta or output.logprobs or output.finish_reason:
            rest = self._rest(output.logprobs, output, called + len(calls) > 0)
            yield {"index": index, "delta": delta} | rest

    def _rest(self, logprobs: Sequence[TokenLogprob], output: Output, called: bool) -> dict[str, Any]:
        reason = "tool_calls" if called and output.finish_reason == "stop" else output.finish_reason
        return {
            "logprobs": {"content": [self._token(p) for p in logprobs]} if self._logprobs else None,
            "finish_reason": reason,
            "stop_reason": output.stop_reason,
        }

    def _token(self, p: TokenLogprob) -> dict[str, Any]:
        return self._entry(p.token_id, p.logprob) | {"top_logprobs": [self._entry(t, value) for t, value in p.top]}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        # A token may be a part of a character, or hold none at all: its bytes are told apart from its text.
        raw = self._tokens.decode_bytes([token])
        return {"token": raw.decode(errors="replace"), "logprob": logprob, "bytes": list(raw)}
