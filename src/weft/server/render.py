"""How completions look on the wire: one style for each of OpenAI's two endpoints."""

from __future__ import annotations

import codecs
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from weft.engine.messages.request import Output, TokenLogprob
from weft.engine.output.text_processor import TextProcessor
from weft.server.engine_client import Choice
from weft.server.tools import OutputDelta, Parser

UTF8 = codecs.getincrementaldecoder("utf-8")


class Style(Protocol):
    """Names and bodies of an endpoint's responses."""

    id_prefix: str
    name: str
    chunk_name: str
    beside: dict[str, Any]
    """What stands beside the choices; in a stream, in its first chunk."""

    def whole(self, index: int, choice: Choice) -> dict[str, Any]:
        """A finished choice."""
        ...

    def chunks(self, index: int, output: Output, begins: bool) -> Iterator[dict[str, Any]]:
        """An increment as zero or more streamed choices; begins: it is the choice's first."""
        ...


@dataclass(frozen=True)
class Wanted:
    """Which logprobs go out: how many alternatives of each token of the output, and of the prompt; None for none.
    tokens: whether token ids of prompt and output go out."""

    output: int | None = None
    prompt: int | None = None
    tokens: bool = False


class Completion:
    """/v1/completions.

    Args:
        prompts: of each choice.
        echoed: the text of each prompt, where it stands before the choice and has logprobs as that does.
        hidden: tokens that no output's text holds.
    """

    id_prefix, name, chunk_name = "cmpl", "text_completion", "text_completion"

    def __init__(
        self,
        text_processor: TextProcessor,
        prompts: Sequence[Sequence[int]],
        wanted: Wanted,
        echoed: Sequence[str] = (),
        hidden: Collection[int] = (),
    ):
        self._text_processor, self._prompts, self._wanted, self._echoed = text_processor, prompts, wanted, echoed
        self._hidden = hidden
        self._returned: Counter[int] = Counter()  # characters of each choice's text
        self.beside: dict[str, Any] = {}
        self._offsets: defaultdict[int, int] = defaultdict(int)
        self._characters: defaultdict[int, codecs.IncrementalDecoder] = defaultdict(lambda: UTF8("replace"))

    def whole(self, index: int, choice: Choice) -> dict[str, Any]:
        assert choice.last is not None
        return self._body(index, choice, choice.last, True)

    def chunks(self, index: int, output: Output, begins: bool) -> Iterator[dict[str, Any]]:
        # A token without whole text yet has its event too, as in vLLM: clients that measure count events.
        if output.token_ids or output.text or output.finish_reason or (begins and self._echoed):
            yield self._body(index, output, output, begins)

    def _body(self, index: int, what: Choice | Output, last: Output, begins: bool) -> dict[str, Any]:
        text, prompt, echoed = what.text, what.prompt_logprobs, list[TokenLogprob | int]()
        if begins and self._echoed:
            text, echoed = self._echoed[index] + text, [self._prompts[index][0], *prompt]
        self._returned[index] += len(text)
        logprobs = None
        if self._wanted.output is not None:
            logprobs = self._table(index, echoed, what.logprobs, self._wanted.output)
            if last.finish_reason:  # a stop string may have cut off the text of some tokens
                logprobs["text_offset"] = [min(at, self._returned[index]) for at in logprobs["text_offset"]]
        body = {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": last.finish_reason,
            "stop_reason": last.stop_reason,
        }
        if self._wanted.tokens:
            body["token_ids"] = what.token_ids
            if begins:
                body["prompt_token_ids"] = self._prompts[index]
        if begins and self._wanted.prompt is not None:
            body["prompt_logprobs"] = prompt_table(self._text_processor, prompt, self._wanted.prompt)
        return body

    def _table(
        self, index: int, echoed: Sequence[TokenLogprob | int], output: Sequence[TokenLogprob], limit: int
    ) -> dict[str, Any]:
        """A prompt's first token is a number alone: nothing comes before it that could say how likely it is."""
        scores = [TokenLogprob(e, None) if isinstance(e, int) else e for e in (*echoed, *output)]
        offsets, characters = [], self._characters[index]
        for number, p in enumerate(scores):
            raw = b""
            if number < len(echoed) or p.token_id not in self._hidden:
                raw = self._text_processor.grammars.tokens.decode_bytes([p.token_id])
            # Where it does not go on with a character that was begun, one replacement character stands for that.
            offsets.append(self._offsets[index] + _breaks(characters.getstate()[0], raw))
            self._offsets[index] += len(characters.decode(raw))
        names = self._text_processor.token_name
        tops = [{names(t): value for t, value in p.top[:limit]} for p in scores]
        return {
            "tokens": [names(p.token_id) for p in scores],
            "token_logprobs": [p.logprob for p in scores],
            "top_logprobs": [None if p.logprob is None else top for p, top in zip(scores, tops, strict=True)],
            "text_offset": offsets,
        }


def _breaks(begun: bytes, more: bytes) -> bool:
    """Whether a character that is begun cannot go on with these bytes."""
    try:
        UTF8("strict").decode(begun + more[:1])
    except UnicodeDecodeError:
        return bool(begun)
    return False


def prompt_table(
    text_processor: TextProcessor, scores: Sequence[TokenLogprob], limit: int
) -> list[dict[str, Any] | None]:
    """In vLLM's shape, but for ranks: of a prompt's each token, and the best in its place, the logprob."""
    return [None] + [
        {
            str(token): {"logprob": value, "decoded_token": text_processor.token_name(token)}
            for token, value in [(p.token_id, p.logprob), *p.top[:limit]]
        }
        for p in scores
    ]


def _reasoning(thought: str) -> dict[str, str]:
    """By the name that most clients know, and by vLLM's newer one."""
    return {"reasoning_content": thought, "reasoning": thought}


class Chat:
    """/v1/chat/completions. prompt: its tokens. parsers: makes a parser of an output; None: the output is all text."""

    id_prefix, name, chunk_name = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(
        self,
        text_processor: TextProcessor,
        prompt: Sequence[int],
        wanted: Wanted,
        parsers: Callable[[], Parser] | None = None,
    ):
        self.beside = {"prompt_token_ids": prompt} if wanted.tokens else {}
        self._text_processor, self._wanted, self._new_parser = text_processor, wanted, parsers
        self._parsers: defaultdict[int, Parser] = defaultdict(parsers)
        self._called: Counter[int] = Counter()

    def whole(self, index: int, choice: Choice) -> dict[str, Any]:
        assert choice.last is not None
        parts = OutputDelta(choice.text)
        if self._new_parser:
            found = self._new_parser()
            pieces = [found.push(piece, last=False) for piece in choice.pieces[:-1]]
            parts = sum([*pieces, found.push(choice.pieces[-1], last=True)], OutputDelta())
        message: dict[str, Any] = {"role": "assistant", "content": parts.text}
        if parts.thought:
            message |= _reasoning(parts.thought)
        if parts.calls:
            message |= {"content": parts.text or None, "tool_calls": [call.plain() for call in parts.calls]}
        body = {"index": index, "message": message} | self._rest(choice, choice.last, bool(parts.calls))
        if self._wanted.prompt is not None:
            body["prompt_logprobs"] = prompt_table(self._text_processor, choice.prompt_logprobs, self._wanted.prompt)
        return body

    def chunks(self, index: int, output: Output, begins: bool) -> Iterator[dict[str, Any]]:
        if begins:
            role = {"index": index, "delta": {"role": "assistant", "content": ""}}
            yield role | {"logprobs": None, "finish_reason": None}
        parts = OutputDelta(output.text)
        if self._new_parser:
            parts = self._parsers[index].push(output.text, last=output.finish_reason is not None)
        delta: dict[str, Any] = {"content": parts.text} if parts.text else {}
        if parts.thought:
            delta |= _reasoning(parts.thought)
        calls: list[dict[str, Any]] = []
        if parts.arguments:
            calls.append({"index": self._called[index] - 1, "function": {"arguments": parts.arguments}})
        calls += [{"index": i} | call.plain() for i, call in enumerate(parts.calls, self._called[index])]
        self._called[index] += len(parts.calls)
        if calls:
            delta["tool_calls"] = calls
        if delta or output.logprobs or output.finish_reason or (self._wanted.tokens and output.token_ids):
            yield {"index": index, "delta": delta} | self._rest(output, output, self._called[index] > 0)

    def _rest(self, what: Choice | Output, last: Output, called: bool) -> dict[str, Any]:
        reason = "tool_calls" if called and last.finish_reason == "stop" else last.finish_reason
        logprobs = {"content": [self._token(p) for p in what.logprobs]} if self._wanted.output is not None else None
        rest = {"logprobs": logprobs, "finish_reason": reason, "stop_reason": last.stop_reason}
        return rest | ({"token_ids": what.token_ids} if self._wanted.tokens else {})

    def _token(self, p: TokenLogprob) -> dict[str, Any]:
        return self._entry(p.token_id, p.logprob) | {"top_logprobs": [self._entry(t, value) for t, value in p.top]}

    def _entry(self, token: int, logprob: float | None) -> dict[str, Any]:
        # A token may be a part of a character, or hold none at all: so its bytes are given beside its text.
        raw = self._text_processor.grammars.tokens.decode_bytes([token])
        return {"token": raw.decode(errors="replace"), "logprob": logprob, "bytes": list(raw)}
