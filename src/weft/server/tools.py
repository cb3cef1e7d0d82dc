"""The parts of what a model answers, told apart as it comes: text, calls of tools, and what it thought before."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import NamedTuple, Protocol

from weft.server.forms import Call, Form, Functions


class Parts(NamedTuple):
    """What has become clear of an answer. thought: not meant for the user."""

    text: str = ""
    calls: tuple[Call, ...] = ()
    thought: str = ""

    def __add__(self, other: object) -> Parts:
        assert isinstance(other, Parts)
        return Parts(self.text + other.text, self.calls + other.calls, self.thought + other.thought)


class Parser(Protocol):
    """Splits one answer. What is no call in the end is text."""

    def push(self, text: str, last: bool) -> Parts:
        """What is whole now; last: nothing more comes."""
        ...


def parser(form: Form | None, functions: Functions = (), hidden: Collection[str] = ()) -> Parser:
    """For one answer in this form; None: it is all text. hidden: special tokens, which no client sees; each comes in
    one piece."""
    if form is None:
        return TextParser(hidden)
    if form.channels:
        return ChannelParser(form, functions)
    return TaggedParser(form, functions, hidden) if form.begin else BareParser(form, functions)


def any_of(tokens: Collection[str]) -> re.Pattern[str]:
    """Matches each of these, and nothing where there are none."""
    return re.compile("|".join(map(re.escape, tokens)) or "(?!)")


class TextParser:
    """There are no parts."""

    def __init__(self, hidden: Collection[str] = ()):
        self._hidden = any_of(hidden)

    def push(self, text: str, last: bool) -> Parts:
        return Parts(self._hidden.sub("", text))


class TaggedParser:
    """Calls stand between tags. Line breaks after a call are no text."""

    def __init__(self, form: Form, functions: Functions, hidden: Collection[str] = ()):
        self._form, self._functions = form, functions
        self._hidden = any_of(hidden)
        self._held = ""
        self._after_call = False

    def push(self, text: str, last: bool) -> Parts:
        begin, end = self._form.begin, self._form.end
        self._held += text
        parts = Parts()
        while begin in self._held:
            before, _, inside = self._held.partition(begin)
            body, ended, rest = inside.partition(end)
            if not ended and not last:
                break
            found = self._form.read(body, self._functions)
            parts += Parts(self._text(before if found else before + begin + body + ended), tuple(found))
            self._after_call = self._after_call or bool(found)
            self._held = rest
        kept = 0 if last else self._undecided()
        parts += Parts(self._text(self._held[: len(self._held) - kept]))
        self._held = self._held[len(self._held) - kept :]
        return parts

    def _text(self, text: str) -> str:
        text = self._hidden.sub("", text)
        text = text.lstrip("\n") if self._after_call else text
        self._after_call = self._after_call and not text
        return text

    def _undecided(self) -> int:
        """Length of the end that is, or may become, a call."""
        if (at := self._held.find(self._form.begin)) >= 0:
            return len(self._held) - at
        return begun(self._held, self._form.begin)


class BareParser:
    """A call is the whole answer, which then begins as JSON; until its end nobody can know."""

    def __init__(self, form: Form, functions: Functions):
        self._form, self._functions = form, functions
        self._held = ""
        self._is_text = False

    def push(self, text: str, last: bool) -> Parts:
        self._held += text
        answer = self._held.strip()
        self._is_text = self._is_text or answer[:1] not in ("", "{")
        if not (self._is_text or last):
            return Parts()
        found = [] if self._is_text else self._form.read(answer, self._functions)
        text, self._held = self._held, ""
        return Parts("" if found else text, tuple(found))


class ChannelParser:
    """GPT-OSS writes messages to several readers: `HEADER<|message|>BODY<|end|>`, where the header says to whom.

    Channel analysis is its thought; what is addressed to a function is a call; the rest is text.
    https://github.com/openai/harmony
    """

    HEADER = re.compile(r"<\|message\|>")
    END = re.compile(r"<\|(?:end|call|return|start)\|>")
    MARKS = ("<|message|>", "<|end|>", "<|call|>", "<|return|>", "<|start|>")

    def __init__(self, form: Form, functions: Functions):
        self._form, self._functions = form, {f["name"]: f for f in functions}
        self._header: str | None = None
        self._held = ""

    def push(self, text: str, last: bool) -> Parts:
        self._held += text
        parts = Parts()
        while (found := (self.HEADER if self._header is None else self.END).search(self._held)) is not None:
            before, self._held = self._held[: found.start()], self._held[found.end() :]
            if self._header is None:
                self._header = before
            else:
                parts += self._body(before, ended=True)
                self._header = None
        if self._header is None:
            if last and "<|" not in self._held:  # it does not write messages, or was cut short in a header
                parts += Parts("" if parts != Parts() else self._held)
            return parts
        kept = 0 if last else max(begun(self._held, mark) for mark in self.MARKS)
        if last or self._called is None:
            parts += self._body(self._held[: len(self._held) - kept], ended=last)
            self._held = self._held[len(self._held) - kept :]
        return parts

    @property
    def _called(self) -> str | None:
        """The function that the message is addressed to."""
        named = re.search(r"to=functions\.([\w.-]+)", self._header or "")
        return named[1] if named and named[1] in self._functions else None

    def _body(self, body: str, ended: bool) -> Parts:
        if (name := self._called) is not None and ended:
            calls = self._form.read(body, [self._functions[name]])
            return Parts("" if calls else body, tuple(calls))
        return Parts(thought=body) if "<|channel|>analysis" in (self._header or "") else Parts(body)


def begun(text: str, mark: str) -> int:
    """Length of the text's longest end that the mark begins with, short of the whole."""
    lengths = range(min(len(mark) - 1, len(text)), 0, -1)
    return next((n for n in lengths if mark.startswith(text[-n:])), 0)
