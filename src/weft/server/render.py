"""How answers look on the wire: one style for each of OpenAI's two endpoints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from weft.engine.request import Output, TokenLogprob
from weft.server.answers import Choice


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
    """/v1/chat/completions."""

    id_prefix, name, chunk_name = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, tokenizer: Any, logprobs: bool):
        self._tokenizer, self._logprobs = tokenizer, logprobs

    def whole(self, index: int, choice: Choice) -> dict[str, Any]:
        assert choice.last is not None
        message = {"role": "assistant", "content": choice.text}
        return {"index": index, "message": message} | self._rest(choice.logprobs, choice.last)

    def chunks(self, index: int, output: Output, begins: bool) -> Iterator[dict[str, Any]]:
        if begins:
            role = {"index": index, "delta": {"role": "assistant", "content": ""}}
            yield role | {"logprobs": None, "finish_reason": None}
        if output.text or output.logprobs or output.finish_reason:
            delta = {"content": output.text} if output.text else {}
            yield {"index": index, "delta": delta} | self._rest(output.logprobs, output)

    def _rest(self, logprobs: Sequence[TokenLogprob], output: Output) -> dict[str, Any]:
        return {
            "logprobs": {"content": [self._token(p) for p in logprobs]} if self._logprobs else None,
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
        }

    def _token(self, p: TokenLogprob) -> dict[str, Any]:
        return self._entry(p.token_id, p.logprob) | {"top_logprobs": [self._entry(t, value) for t, value in p.top]}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._tokenizer.decode([token])
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}
