"""Parsers of a model's output as it streams: text, tool calls, and the thought before them."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import replace
from typing import NamedTuple, Protocol

from weft.server.tool_formats import Call, Functions, ToolFormat


class OutputDelta(NamedTuple):
    """What an increment of the output adds. arguments: more of those of the call that began last; the calls come after
    it. thought: not meant for the user."""

    text: str = ""
    calls: tuple[Call, ...] = ()
    thought: str = ""
    arguments: str = ""

    def __add__(self, other: object) -> OutputDelta:
        assert isinstance(other, OutputDelta)
        calls, arguments = self.calls, self.arguments
        if calls:
            calls = (*calls[:-1], replace(calls[-1], arguments=calls[-1].arguments + other.arguments))
        else:
            arguments += other.arguments
        return OutputDelta(self.text + other.text, calls + other.calls, self.thought + other.thought, arguments)


class Parser(Protocol):
    """Splits one output into its parts. What is no call in the end is text."""

    def push(self, text: str, last: bool) -> OutputDelta:
        """What is whole now; last: nothing more comes."""
        ...


def parser(form: ToolFormat | None, functions: Functions = (), hidden: Collection[str] = ()) -> Parser:
    """For one output in this form; None: it is all text. hidden: special tokens, which no client sees; each comes in
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

    def push(self, text: str, last: bool) -> OutputDelta:
        return OutputDelta(self._hidden.sub("", text))


class ArgumentStream:
    """Calls with JSON arguments, which are passed on as they come. rest: what was not read yet.

    opening: as in `ToolFormat`. names: of the functions that may be called; None: of any. name: of the only one, which
    the opening leaves out. begun: a call has. open: more of its arguments may come.
    """

    def __init__(self, opening: re.Pattern[str] | None, names: Collection[str] | None = None, name: str = ""):
        self._opening, self._names, self.name = opening, names, name
        self.rest = ""
        self.begun = self.open = False

    def push(self, text: str) -> OutputDelta:
        """The calls that begin, and more of their arguments."""
        self.rest += text
        parts = self._arguments() if self.open else OutputDelta()
        while not self.open and self._opening and (found := self._opening.match(self.rest)):
            name = self.name or found["name"].strip()
            if self._names is not None and name not in self._names:
                break
            self.rest = self.rest[found.end() :]
            self.begun = self.open = True
            self._depth, self._in_string, self._escaped = 0, False, False
            parts += OutputDelta(calls=(Call(name, ""),))
            parts += self._arguments()
        return parts

    def _arguments(self) -> OutputDelta:
        """Up to the end of the object, or where a tag shows that it will not be one."""
        end = len(self.rest)
        for at, character in enumerate(self.rest):
            if self._in_string:
                self._in_string = self._escaped or character != '"'
                self._escaped = not self._escaped and character == "\\"
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]<":
                self._depth -= 1
                if self._depth == 0 or character == "<":
                    self.open, end = False, at + (character != "<")
                    break
        read, self.rest = self.rest[:end], self.rest[end:]
        return OutputDelta(arguments=read)


class TaggedParser:
    """Calls stand between tags. Line breaks after a call are no text."""

    def __init__(self, form: ToolFormat, functions: Functions, hidden: Collection[str] = ()):
        self._form, self._functions = form, functions
        self._hidden = any_of(hidden)
        self._held = ""
        self._inside: ArgumentStream | None = None
        self._after_call = False

    def push(self, text: str, last: bool) -> OutputDelta:
        self._held += text
        parts = OutputDelta()
        while self._inside or self._form.begin in self._held:
            if self._inside is None:
                before, _, self._held = self._held.partition(self._form.begin)
                parts += OutputDelta(self._text(before))
                self._inside = ArgumentStream(self._form.opening)
            parts += self._inside.push(self._held)
            body, ended, self._held = self._inside.rest.partition(self._form.end)
            if not ended and not last:
                self._held = ""
                return parts
            found = self._form.read(body, self._functions)
            if found or self._inside.begun:
                parts += OutputDelta(calls=tuple(found))
                self._after_call = True
            else:
                parts += OutputDelta(self._text(self._form.begin + body + ended))
            self._inside = None
        kept = 0 if last else begun(self._held, self._form.begin)
        parts += OutputDelta(self._text(self._held[: len(self._held) - kept]))
        self._held = self._held[len(self._held) - kept :]
        return parts

    def _text(self, text: str) -> str:
        text = self._hidden.sub("", text)
        text = text.lstrip("\n") if self._after_call else text
        self._after_call = self._after_call and not text
        return text


class BareParser:
    """Calls are the whole output, which then begins as JSON; until a call has begun nobody can know."""

    def __init__(self, form: ToolFormat, functions: Functions):
        self._form, self._functions = form, functions
        self._calls = ArgumentStream(form.opening, {f["name"] for f in functions})
        self._is_text = False

    def push(self, text: str, last: bool) -> OutputDelta:
        if self._is_text:
            return OutputDelta(text)
        beginning = (self._calls.rest + text).lstrip()[:1]
        if not self._calls.begun and beginning not in ("", "{"):
            self._is_text = True
            return OutputDelta(self._calls.rest + text)
        parts = self._calls.push(text)
        if not last:
            return parts
        rest = self._calls.rest
        if self._calls.begun:
            rest = rest.strip("}; \n")
        found = self._form.read(rest.strip(), self._functions)
        return parts + OutputDelta("" if found else rest, tuple(found))


class ChannelParser:
    """GPT-OSS writes messages to several readers: `HEADER<|message|>BODY<|end|>`, where the header says to whom.

    Channel analysis is its thought; what is addressed to a function is a call; the rest is text.
    https://github.com/openai/harmony
    """

    HEADER = re.compile(r"<\|message\|>")
    END = re.compile(r"<\|(?:end|call|return|start)\|>")
    MARKS = ("<|message|>", "<|end|>", "<|call|>", "<|return|>", "<|start|>")

    def __init__(self, form: ToolFormat, functions: Functions):
        self._form, self._functions = form, {f["name"]: f for f in functions}
        self._header: str | None = None
        self._held = ""
        self._begun = False  # a message has
        self._call: ArgumentStream | None = None

    def push(self, text: str, last: bool) -> OutputDelta:
        self._held += text
        parts = OutputDelta()
        while (found := (self.HEADER if self._header is None else self.END).search(self._held)) is not None:
            before, self._held = self._held[: found.start()], self._held[found.end() :]
            if self._header is None:
                self._header, self._begun = before, True
                name = self._called()
                self._call = ArgumentStream(self._form.opening, name=name) if name else None
            else:
                parts += self._body(before, ended=True)
                self._header = None
        if self._header is None:
            if last and not self._begun and "<|" not in self._held:
                parts += OutputDelta(self._held)  # it does not write messages
            return parts
        kept = 0 if last else max(begun(self._held, mark) for mark in self.MARKS)
        parts += self._body(self._held[: len(self._held) - kept], ended=last)
        self._held = self._held[len(self._held) - kept :]
        return parts

    def _called(self) -> str | None:
        """The function that the message is addressed to."""
        named = re.search(r"to=functions\.([\w.-]+)", self._header or "")
        return named[1] if named and named[1] in self._functions else None

    def _body(self, body: str, ended: bool) -> OutputDelta:
        if self._call is not None:
            parts, rest = self._call.push(body), self._call.rest
            if not ended or self._call.begun:
                return parts
            calls = self._form.read(rest, [self._functions[self._call.name]])
            return OutputDelta("" if calls else rest, tuple(calls))
        return OutputDelta(thought=body) if "<|channel|>analysis" in (self._header or "") else OutputDelta(body)


def begun(text: str, mark: str) -> int:
    """Length of the text's longest end that the mark begins with, short of the whole."""
    lengths = range(min(len(mark) - 1, len(text)), 0, -1)
    return next((n for n in lengths if mark.startswith(text[-n:])), 0)
