"""Parsers of streamed outputs that wrap others: around a thought, around calls without a mark, and around ends.

A thought stands between <think> and </think> at the start, and is not part of the text or its grammar.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal, NamedTuple

from weft.engine.grammar.grammar import followed
from weft.engine.output.detokenizer import begun
from weft.serve.chat.tool_formats import ToolFormat
from weft.serve.chat.tool_grammars import Functions, literals
from weft.serve.chat.tools import CallParser, ChannelParser, OutputDelta, Parser, TextParser, any_of

BEGIN, END = "<think>", "</think>"
Start = Literal["inside", "free"]
"""Start of an output: inside a thought that the prompt opens, or free to begin with a thought."""


class OutputSyntax(NamedTuple):
    """Syntax of a chat's output.

    Attributes:
        form: form of tool calls; None without calls.
        start: start of the output if it may have a thought, otherwise None.
        bare: the text follows the request's grammar, so that calls are at its beginning or nowhere.
        begun: message with its header that the output continues, in a form with channels.
        thoughts: the thought is returned.
    """

    form: ToolFormat | None = None
    start: Start | None = None
    bare: bool = False
    begun: str = ""
    thoughts: bool = True


ALL_TEXT = OutputSyntax()


def parser(
    syntax: OutputSyntax, functions: Functions = (), hidden: Collection[str] = (), *, one_call: bool = False
) -> Parser:
    """Return the parser of one output. functions: functions that it may call. hidden: special tokens that no client
    sees; each arrives in one piece. one_call: the output ends with its first call."""
    form, start, bare, begun, thoughts = syntax
    made: Parser = TextParser(hidden)
    if form is not None and form.channels:
        made = ChannelParser(functions, one_call)
        made.push(begun, last=False)
    elif form is not None:
        calls = CallParser(form, functions, hidden, one_call)
        made = BareParser(calls, form.begin, hidden) if bare else calls
    if start:
        made = ReasoningSplitter(made, start, hidden)
    return made if thoughts else ReasoningFilter(made)


class OuterParser:
    """Parser that passes an output, or a part of it, on to an inner parser."""

    def __init__(self, inner: Parser):
        self._inner = inner

    @property
    def ended(self) -> bool:
        """See `Parser`."""
        return self._inner.ended


class BareParser(OuterParser):
    """Parser that reads an output by `calls` after the mark `begin`, otherwise as text without the tokens `hidden`."""

    def __init__(self, calls: Parser, begin: str, hidden: Collection[str]):
        super().__init__(calls)
        self._begin, self._hidden = begin, hidden
        self._held: str | None = ""  # the output up to its mark; None once it is known

    def push(self, text: str, last: bool) -> OutputDelta:
        if self._held is not None:
            self._held += text
            start = self._held.lstrip()
            if not last and self._begin.startswith(start):
                return OutputDelta()
            if start == self._begin or not start.startswith(self._begin):
                self._inner = TextParser(self._hidden)
            text, self._held = self._held, None
        return self._inner.push(text, last)


class EndingParser(OuterParser):
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
        super().__init__(inner)
        self._stop, self._keep_stop, self._to_come = stop, keep_stop, min_tokens
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


def start_of(prompt: str, continued: str = "") -> Start | None:
    """Return the start of an output; None if the prompt allows no thought. continued: the message to continue."""
    if continued:
        return "inside" if continued.rfind(BEGIN) > continued.rfind(END) else None
    end = prompt.rstrip()
    if end.endswith(BEGIN):
        return "inside"
    return None if end.endswith(END) else "free"


def after_reasoning(grammar: str, start: Start, named: Collection[str]) -> str:
    """Return the grammar of an output that follows `grammar` after its thought, if any. named: see `Grammars.named`."""
    literal = literals({BEGIN, END} & set(named))
    # If the end is a token that no text matches, it ends the text by itself.
    inside = f"inside: /(?s:.*)/ {END}" if END in named else f'inside[suffix="{END}"]: /(?s:.*)/'
    thought = "thought" if start == "inside" else f"({literal(BEGIN)} thought)?"
    return followed(f"start: {thought} @output\nthought: inside /\\n{{0,2}}/\n{inside}\n", grammar)


class ReasoningSplitter(OuterParser):
    """Parser that splits off the thought and passes the rest to the inner parser, without line breaks in between.

    hidden: special tokens that no client sees; each arrives in one piece.
    """

    def __init__(self, inner: Parser, start: Start, hidden: Collection[str] = ()):
        super().__init__(inner)
        self._hidden = any_of(hidden)
        self._without: Literal["inside", "content"] = "inside" if start == "inside" else "content"
        self._state: Literal["free", "inside", "behind", "content"] = "free"
        self._held = ""
        self._thought = False  # True once the thought has text

    def push(self, text: str, last: bool) -> OutputDelta:
        self._held += text
        parts = OutputDelta()
        if self._state == "free":
            beginning = self._held.lstrip()
            if beginning.startswith(BEGIN):
                self._state, self._held = "inside", beginning.removeprefix(BEGIN)
            elif last or not BEGIN.startswith(beginning):
                self._state = self._without
        if self._state == "inside":
            thought, end, rest = self._held.partition(END)
            kept = 0 if end or last else begun(thought, END)
            sure = thought[: len(thought) - kept].rstrip("\n")
            self._held = rest if end else thought[len(sure) :]
            if end:
                self._state = "behind"
            sure = self._hidden.sub("", sure if self._thought else sure.lstrip("\n"))
            self._thought = self._thought or bool(sure)
            parts = OutputDelta(thought=sure)
        if self._state == "behind":
            self._held = self._held.lstrip("\n")
            if self._held:
                self._state = "content"
        if self._state == "content" or last:
            content, self._held = ("" if self._state == "inside" else self._held), ""
            parts += self._inner.push(content, last)
        return parts


class ReasoningFilter(OuterParser):
    """Parser that drops the thought of an output."""

    def push(self, text: str, last: bool) -> OutputDelta:
        return self._inner.push(text, last)._replace(thought="")
