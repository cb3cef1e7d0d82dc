"""Parsers of streamed outputs into text and tool calls."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

from weft.engine.output.detokenizer import begun
from weft.serve.chat.tool_arguments import Arguments, JsonArguments, TaggedArguments
from weft.serve.chat.tool_formats import Call, ToolFormat
from weft.serve.chat.tool_grammars import Functions
from weft.serve.chat.tool_values import parse_json, write_json


class OutputDelta(NamedTuple):
    """Additions of an increment. arguments: continue the last call of earlier increments, before `calls`. thought: text
    that is not meant for the user."""

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
    """Parser of one output into its parts. Incomplete calls that cannot be recognised become text."""

    @property
    def ended(self) -> bool:
        """True once the output has all allowed calls. Later text is dropped."""
        ...

    def push(self, text: str, last: bool) -> OutputDelta:
        """Return the parts completed by `text`. last: true for the final increment."""
        ...


def any_of(tokens: Collection[str]) -> re.Pattern[str]:
    """Return a pattern of these tokens, which matches nothing without any."""
    return re.compile("|".join(map(re.escape, tokens)) or "(?!)")


class TextParser:
    """Parser of an output that is all text."""

    ended = False

    def __init__(self, hidden: Collection[str] = ()):
        self._hidden = any_of(hidden)

    def push(self, text: str, last: bool) -> OutputDelta:
        return OutputDelta(self._hidden.sub("", text))


class StateParser:
    """Parser with states. Each state reads some held text, and returns False if it needs more or none is left."""

    def __init__(self, state: Callable[[bool], bool]):
        self._state, self._held, self._parts, self.ended = state, "", OutputDelta(), False

    def push(self, text: str, last: bool) -> OutputDelta:
        self._held += text
        self._parts = OutputDelta()
        while not self.ended and self._state(last):
            pass
        return self._parts

    def _go(self, state: Callable[[bool], bool]) -> bool:
        self._state = state
        return True


class CallParser(StateParser):
    """Parser that finds calls by their structure: the arguments of a call decide where they end.

    A cut call is returned as far as it goes. Cut or missing tags are not shown. Line breaks after a call are not text.
    """

    def __init__(self, form: ToolFormat, functions: Functions, hidden: Collection[str] = (), one_call: bool = False):
        super().__init__(self._at_start if form.objects or form.only_known else self._in_text)
        self._form, self._one_call = form, one_call
        self._parameters = {f["name"]: f.get("parameters") for f in functions}
        self._hidden = any_of(hidden)
        self._before = "\n"  # the character before the held text
        self._begun, self._tag = 0, 0  # length of the text if no call follows, and of the tag in it
        self._arguments: Arguments = JsonArguments()  # of the call, or of an object that may be a call
        self._object: list[tuple[str, str]] = []  # pieces of this object: as written, and as JSON
        self._ids: set[str] = set()
        self._after_call = False

    def _at_start(self, last: bool) -> bool:
        """Read the start of the output, where a call may begin without a tag."""
        match, held = self._opening(last), self._held.strip()
        if match and not match.partial and match["name"].strip() in self._parameters:
            return self._open(match)
        if match and match.partial and not last:
            return False
        if not self._form.begin:
            if match and match.partial and len(held) > 1:
                return self._cut(match)
            if held.startswith("{"):
                return self._go(self._in_object)
        return self._go(self._in_text)

    def _in_text(self, last: bool) -> bool:
        match = self._form.begins.search(self._before + self._held, 1, partial=True)
        end = len(self._held) if match is None else match.start() - 1
        unknown = match and not match.partial and match.re.groupindex.get("name") and match["name"]
        if unknown and match["name"].strip() not in self._parameters:
            self._text(match.end() - 1)
            return True
        self._text(end)
        if match is None or match.partial:
            if last and self._held:
                cut_tag = len(self._held) > 1 and self._form.begin.startswith(self._held)
                self._text(0 if cut_tag else len(self._held))
                self._held = ""
            return False
        self._begun = match.end() - match.start()
        self._tag = self._begun if self._form.begin and match["begin"] else 0
        return self._go(self._in_block)

    def _in_block(self, last: bool) -> bool:
        """Read the beginning of a call after a tag."""
        match = self._opening(last)
        if match and not match.partial and self._known(match["name"].strip()):
            return self._open(match)
        if match and match.partial:
            return last and self._cut(match)
        if self._form.objects and self._held[self._tag :].lstrip().startswith("{"):
            self._object, self._held = [(self._held[: self._tag], "")], self._held[self._tag :]
            return self._go(self._in_object)
        self._text(self._begun)
        return self._go(self._in_text)

    def _in_arguments(self, last: bool) -> bool:
        arguments, self._held = self._arguments.read(self._held, last)
        self._parts += OutputDelta(arguments=arguments)
        if not self._arguments.closed:
            return False
        if self._form.objects:
            self._arguments = JsonArguments(depth=1)
            return self._go(self._in_rest)
        return self._whole()

    def _in_rest(self, last: bool) -> bool:
        """Skip to the end of the object that contains the arguments."""
        self._held = self._arguments.read(self._held, last)[1]
        return self._arguments.closed and self._whole()

    def _in_object(self, last: bool) -> bool:
        """Read an object that is a call once complete: its keys are in another order, or its arguments are text."""
        arguments, rest = self._arguments.read(self._held, last)
        self._object.append((self._held[: len(self._held) - len(rest)], arguments))
        self._held = rest
        if not self._arguments.closed and not last:
            return False
        written, arguments = ("".join(parts) for parts in zip(*self._object, strict=True))
        closed = self._arguments.closed
        call = self._call_of(arguments) if closed else None
        self._arguments, self._object = JsonArguments(), []
        if call is not None:
            self._parts += OutputDelta(calls=(call,))
            return self._whole()
        if closed or not self._tag:  # otherwise it is a cut call
            self._held = written + rest
            self._text(len(written))
        return self._go(self._in_text)

    def _after_arguments(self, last: bool) -> bool:
        found = self._form.closes.match(self._held, partial=True), self._opening(last)
        closed, opened = (match if match and not match.partial else None for match in found)
        if closed:
            self._held = self._held[closed.end() :]
            return True
        if opened and self._known(opened["name"].strip()):
            return self._open(opened)
        begin, rest = self._form.begin, self._held.lstrip()
        if begin and rest.startswith(begin):
            self._held, self._begun, self._tag = rest, len(begin), len(begin)
            return self._go(self._in_block)
        if any(match and match.partial for match in found) or (begin and begin.startswith(rest)):
            return last and self._cut(found[1])
        return self._go(self._in_text)

    # Actions of the states

    def _text(self, length: int) -> None:
        """Return `length` characters of the held text as text."""
        text, self._held = self._held[:length], self._held[length:]
        self._before = text[-1:] or self._before
        text = self._hidden.sub("", text)
        text = text.lstrip("\n") if self._after_call else text
        self._after_call = self._after_call and not text
        self._parts += OutputDelta(text)

    def _opening(self, last: bool) -> Any:
        """Match the complete or partial beginning of a call after the tag."""
        match = self._form.opens.match(self._held, self._tag, partial=True)
        if match and match.partial and self._form.tags and self._form.only_known:  # only the name decides then
            held = self._held[self._tag :].strip()
            if last and not self._tag and "<" not in held:
                return None
            rests = [held.removeprefix(name).lstrip() for name in self._parameters if held.startswith(name)]
            begun = any(name.startswith(held) for name in self._parameters)
            return match if begun or any(rest[:1] in ("", "<") for rest in rests) else None
        return match

    def _known(self, name: str) -> bool:
        return name in self._parameters or not self._parameters or not self._form.only_known

    def _open(self, found: Any) -> bool:
        """Start a call."""
        name, groups = found["name"].strip(), found.re.groupindex
        self._held = self._held[found.start("open") if "open" in groups else found.end() :]
        written = found["id"] if "id" in groups and found["id"] not in self._ids else ""
        self._ids.add(written)
        self._parts += OutputDelta(calls=(Call(name, "", written) if written else Call(name, ""),))
        tags = self._form.tags
        self._arguments = TaggedArguments(tags, self._parameters.get(name)) if tags else JsonArguments()
        return self._go(self._in_arguments)

    def _cut(self, found: Any) -> bool:
        """End an output before a call's arguments: it is a call if its name is complete."""
        name = (found["name"] if found else "") or (self._held[self._tag :] if self._form.only_known else "")
        name = name.strip()
        begins_another = any(known != name and known.startswith(name) for known in self._parameters)
        complete = found and 0 < found.end("name") < len(self._held)
        complete = complete or (name in self._parameters and not begins_another)
        if name and complete and self._known(name):
            self._parts += OutputDelta(calls=(Call(name, "{}" if self._form.tags else ""),))
        self._held = ""
        return False

    def _whole(self) -> bool:
        """End a call."""
        self._after_call, self._before, self.ended = True, "\n", self._one_call
        self._arguments, self._tag = JsonArguments(), 0
        return self._go(self._after_arguments)

    def _call_of(self, text: str) -> Call | None:
        """Return the call of a JSON object, or None; its arguments may be JSON text."""
        try:
            read = parse_json(text)
            arguments = read.get("arguments", read.get("parameters"))
            arguments = parse_json(arguments) if isinstance(arguments, str) else arguments
            arguments = {} if arguments is None and self._tag else arguments
        except (ValueError, AttributeError):
            return None
        name = read.get("name")
        is_call = isinstance(name, str) and name and isinstance(arguments, dict) and self._known(name)
        return Call(name, write_json(arguments)) if is_call else None


class ChannelParser(StateParser):
    """Parser of GPT-OSS's messages, `HEADER<|message|>BODY<|end|>`, with the reader's name in the header.

    Channel analysis is the thought, messages to a function are calls, and other messages are text.
    https://github.com/openai/harmony
    """

    START, HEADER_END = "<|start|>", "<|message|>"
    END = re.compile(r"<\|(?:end|call|return|start)\|>")
    MARKS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
    CALLED = re.compile(r"to=functions\.([\w.-]+)(?=[\s<])")

    def __init__(self, functions: Functions, one_call: bool = False):
        super().__init__(self._in_header)
        self._functions, self._one_call = {f["name"] for f in functions}, one_call
        self._searched = 0
        self._begun = False  # True once a message has begun
        self._thinks = False
        self._name = ""  # of the function that the message calls
        self._arguments = JsonArguments()  # of this call

    def _in_header(self, last: bool) -> bool:
        end = self._held.find(self.HEADER_END, self._searched)
        if end < 0:
            self._searched = max(0, len(self._held) - len(self.HEADER_END))
            if last and (name := self._called(self._held)):
                self._parts += OutputDelta(calls=(Call(name, ""),))
            elif last and not self._begun and "<|" not in self._held:
                self._parts += OutputDelta(self._held)  # the model does not write messages
            return False
        header, self._held, self._searched = self._held[:end], self._held[end + len(self.HEADER_END) :], 0
        self._begun, self._thinks = True, "<|channel|>analysis" in header
        self._name = self._called(f"{header} ")
        return self._go(self._before_arguments if self._name else self._in_body)

    def _called(self, header: str) -> str:
        """Return the function in a message's header; empty if it names none."""
        named = self.CALLED.search(header)
        return named[1] if named and named[1] in self._functions else ""

    def _before_arguments(self, last: bool) -> bool:
        body = self._held.lstrip()
        if body.startswith("{") or (last and not body):
            self._parts += OutputDelta(calls=(Call(self._name, ""),))
            self._arguments, self._held = JsonArguments(), body
            return self._go(self._in_arguments)
        if self.END.match(body):
            self._parts += OutputDelta(calls=(Call(self._name, "{}"),))
            self.ended = self._one_call
            return self._go(self._in_rest)
        if not last and any(mark.startswith(body) for mark in self.MARKS):
            return False
        return self._go(self._in_body)  # a body without an object is no call

    def _in_arguments(self, last: bool) -> bool:
        arguments, self._held = self._arguments.read(self._held, last)
        self._parts += OutputDelta(arguments=arguments)
        self.ended = self._arguments.closed and self._one_call
        return self._arguments.closed and self._go(self._in_rest)

    def _in_rest(self, last: bool) -> bool:
        """Skip the rest of a message after a call's arguments."""
        return self._until_end(last)[1]

    def _in_body(self, last: bool) -> bool:
        text, ended = self._until_end(last)
        self._parts += OutputDelta(thought=text) if self._thinks else OutputDelta(text)
        return ended

    def _until_end(self, last: bool) -> tuple[str, bool]:
        """Return the certain text of the message, and whether the message has ended."""
        match = self.END.search(self._held)
        partial = max(begun(self._held, mark) for mark in self.MARKS)
        partial = 0 if last and partial == 1 else partial  # a cut mark is hidden, but a single < may be intended
        text = self._held[: match.start() if match else len(self._held) - partial]
        self._held = self._held[match.end() :] if match else self._held[len(text) :]
        if match:
            self._go(self._in_header)
        return text, match is not None
