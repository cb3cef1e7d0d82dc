"""Parsers of streamed outputs, and the ends of outputs."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from weft.engine.output.detokenizer import begun
from weft.serve.chat.tool_formats import ToolFormat
from weft.serve.chat.tool_grammars import Functions
from weft.serve.chat.tools import CallParser, ChannelParser, OutputDelta, Parser, TextParser


def parser(
    form: ToolFormat | None,
    functions: Functions = (),
    hidden: Collection[str] = (),
    *,
    one_call: bool = False,
    bare: bool = False,
) -> Parser:
    """Return the parser of one output.

    Args:
        form: form of calls; None if all is text.
        functions: functions that the output may call.
        hidden: special tokens that no client sees; each arrives in one piece.
        one_call: the output ends with its first call.
        bare: calls are at the beginning or nowhere; tags in other outputs are text.
    """
    if form is None:
        return TextParser(hidden)
    if form.channels:
        return ChannelParser(functions, one_call)
    calls = CallParser(form, functions, hidden, one_call)
    return BareParser(calls, form.begin, hidden) if bare else calls


class BareParser:
    """Parser that reads an output by `calls` after the mark `begin`, otherwise as text without the tokens `hidden`."""

    def __init__(self, calls: Parser, begin: str, hidden: Collection[str]):
        self._calls, self._begin, self._text = calls, begin, TextParser(hidden)
        self._held, self._parser = "", None

    _parser: Parser | None

    @property
    def ended(self) -> bool:
        return self._parser is not None and self._parser.ended

    def push(self, text: str, last: bool) -> OutputDelta:
        if self._parser is None:
            self._held += text
            start = self._held.lstrip()
            if not last and self._begin.startswith(start):
                return OutputDelta()
            calls = len(start) > len(self._begin) and start.startswith(self._begin)
            self._parser = self._calls if calls else self._text
            text = self._held
        return self._parser.push(text, last)


class EndingParser:
    """Parser that ends an output at its first call, or at a stop string in its text, not in a thought or a call.

    Args:
        inner: finds the parts.
        stop: strings that end the text.
        keep_stop: the text includes the stop string.
        min_tokens: pushes, of one token each, that ignore stop strings.

    Attributes:
        end: stop string that has ended the output; empty if a call has; None if the output continues.
    """

    def __init__(self, inner: Parser, stop: Sequence[str], keep_stop: bool = False, min_tokens: int = 0):
        self._inner, self._stop, self._keep_stop, self._to_come = inner, stop, keep_stop, min_tokens
        self._held = ""  # end of the text that may become a stop string
        self.end: str | None = None

    @property
    def ended(self) -> bool:
        return self.end is not None

    def push(self, text: str, last: bool) -> OutputDelta:
        if self.ended:
            return OutputDelta()
        parts = self._inner.push(text, last)
        self._to_come -= 1
        self._held += parts.text
        found = [(at, stop) for stop in self._stop if (at := self._held.find(stop)) >= 0]
        if found and self._to_come <= 0:
            at, self.end = min(found)
            self._held = self._held[: at + len(self.end) * self._keep_stop]
            return parts._replace(text=self._held)
        self.end = "" if self._inner.ended else None
        goes_on = not (last or self.ended or parts.calls or parts.thought or found)
        kept = max((begun(self._held, stop) for stop in self._stop), default=0) if goes_on else 0
        said, self._held = self._held[: len(self._held) - kept], self._held[len(self._held) - kept :]
        return parts._replace(text=said)

    def watch(self, text: str) -> str | None:
        """Return the string that ends the output, or None; see `weft.engine.messages.request.SamplingParams.watch`."""
        self.push(text, last=False)
        return self.end
