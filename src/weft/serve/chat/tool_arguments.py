"""Streamed arguments of calls: their structure, not the first tag, ends them, and they become valid JSON."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import regex

from weft.engine.output.detokenizer import begun
from weft.serve.chat.tool_values import SchemaCheck, property_schema, value_for, write_json, write_scalar

SPACE = r"\s{0,64}"
"""Whitespace between tags. Without a bound, each token would search an output of whitespace again."""
NAME = r'[^"\\<>{}\n]{1,256}'
"""Name of a function or a parameter."""
IN_STRING = re.compile(r'[^"\\\x00-\x1f]+')
SCALAR = re.compile(r'[^\s"{}\[\],:<]+')
ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')


class Arguments(Protocol):
    """Reader of the arguments of one call. closed: the arguments have ended."""

    closed: bool

    def read(self, text: str, last: bool) -> tuple[str, str]:
        """Read text, and return more JSON of the arguments and the unread text, to pass again before the next.

        last: no text follows.
        """
        ...


class JsonArguments:
    """Arguments in JSON, which end where the brackets close.

    Invalid JSON is repaired: control characters in strings, unknown escapes, NaN and other bare words. depth: number of
    brackets that are already open.
    """

    def __init__(self, depth: int = 0):
        self.closed = False
        self._depth, self._in_string = depth, False

    def read(self, text: str, last: bool) -> tuple[str, str]:
        """See `Arguments`. A tag outside a string ends the arguments too, as no JSON contains it."""
        made: list[str] = []
        at, end = -1, 0
        while at < end < len(text) and not self.closed:
            at = end
            end = self._string(text, at, last, made) if self._in_string else self._outside(text, at, last, made)
        return "".join(made), text[end:]

    def _string(self, text: str, at: int, last: bool, made: list[str]) -> int:
        character = text[at]
        if (run := IN_STRING.match(text, at)) is not None:
            made.append(run[0])
            return run.end()
        if character == "\\":
            if (escape := ESCAPE.match(text, at)) is not None:
                made.append(escape[0])
                return escape.end()
            begun = len(text) - at == 1 or re.fullmatch(r"\\u[0-9a-fA-F]{0,3}", text[at:])
            if begun and not last:
                return at
            made.append(character if begun else "\\\\")
            return at + 1
        self._in_string = character != '"'
        made.append(json.dumps(character)[1:-1] if self._in_string else character)
        return at + 1

    def _outside(self, text: str, at: int, last: bool, made: list[str]) -> int:
        character = text[at]
        if (scalar := SCALAR.match(text, at)) is not None:
            if scalar.end() == len(text) and not last:
                return at
            made.append(write_scalar(scalar[0]) if scalar.end() < len(text) else scalar[0])
            return scalar.end()
        if character == "<":
            self.closed = True
            return at
        self._in_string = character == '"'
        self._depth += (character in "{[") - (character in "}]")
        self.closed = self._depth == 0 and character in "}]"
        made.append(character)
        return at + 1


@dataclass(frozen=True)
class Tags:
    """Tags around each parameter of a call.

    A value may contain any tag, so it ends at a closing tag followed by another parameter or the end of the call.
    Published parsers cut it at the first closing tag.

    Attributes:
        open: pattern of a value's beginning; its group `key` is the parameter's name.
        close: end of a value.
        call_end: end of a call; empty if a call ends with its block.
        call: pattern of a call's beginning, with the groups of `ToolFormat.opening`; a block has several calls if
            `call_end` is not empty.
        begin, end: beginning and end of a block.
        lines: a value is on separate lines, without the line break before and after it.
    """

    open: str
    close: str
    call_end: str
    call: str
    begin: str
    end: str
    lines: bool = False

    @cached_property
    def opening(self) -> Any:
        """Pattern of a value's beginning."""
        return regex.compile(SPACE + self.open)

    @cached_property
    def ends(self) -> tuple[Any, Any]:
        """Patterns of a value's end with the tag after it: within a line, and on separate lines."""
        block_end = f"{re.escape(self.end)}{SPACE}{self._block}"
        following = f"{self.open}|{block_end}"
        if self.call_end:
            following += f"|{re.escape(self.call_end)}{SPACE}(?:{self._another}|{block_end})"
        line = r"[ \t]{0,64}\n"
        return tuple(regex.compile(f"{re.escape(self.close)}{own}{SPACE}(?:{following})") for own in ("", line))

    @cached_property
    def ends_before_text(self) -> tuple[Any, Any]:
        """Patterns of the end of a value, its call and the block before any text: in one line, on separate lines."""
        tags = [re.escape(tag) for tag in (self.close, self.call_end, self.end) if tag]
        return regex.compile(SPACE.join(tags)), regex.compile(rf"[ \t]{{0,64}}\n{SPACE}".join(tags))

    @cached_property
    def inside(self) -> Any:
        """Pattern of another call's beginning: a value that contains it may contain a whole call."""
        return regex.compile("|".join([re.escape(self.begin), self.open] + [self.call] * bool(self.call_end)))

    @cached_property
    def loose_ends(self) -> Any:
        """Pattern of a value's end in a call with missing tags."""
        close, end = re.escape(self.close), re.escape(self.end) + SPACE
        call_end = re.escape(self.call_end) + SPACE if self.call_end else ""
        followed = f"(?:{end})?(?:{self._another})"
        ends = [f"{close}{SPACE}(?:{self.open}|(?:{call_end})?{followed})"]
        ends += [f"{end}{self._block}"] + [f"{call_end}{followed}"] * bool(call_end)
        return regex.compile("|".join(f"(?:{pattern})" for pattern in ends))

    @property
    def closing(self) -> tuple[str, ...]:
        """Tags that may end a value."""
        return tuple(tag for tag in (self.close, self.call_end, self.end) if tag)

    @property
    def _block(self) -> str:
        return f"{re.escape(self.begin)}{SPACE}{self.call}"

    @property
    def _another(self) -> str:
        return "|".join([self._block] + [self.call] * bool(self.call_end))


class TaggedArguments:
    """Arguments between tags, each written as JSON once it is complete.

    parameters: JSON schema of the function's parameters, which decides the types of values.
    """

    def __init__(self, tags: Tags, parameters: Any):
        self.closed = False
        self._tags, self._parameters = tags, parameters
        self._begun = False  # True once the JSON object has its opening bracket
        self._key: str | None = None  # of the unfinished value
        self._value: list[str] = []  # pieces of the unfinished value

    def read(self, text: str, last: bool) -> tuple[str, str]:
        """See `Arguments`."""
        made = ""
        while not self.closed:
            if self._key is None:
                found = self._tags.opening.match(text, partial=True)
                if found is not None and found.partial and not last:
                    return made, text
                if found is None or found.partial:
                    self.closed = True
                    made += "}" if self._begun else "{}"
                    return made, text if found is None else ""
                self._key, self._value, text = found["key"].strip(), [], text[found.end() :]
                continue
            at, is_end = self._search(text, last)
            if not is_end and not last:
                self._value += [text[:at]] if at else []
                return made, text[at:]
            value = "".join(self._value) + text[:at]
            if is_end:
                made, text = made + self._argument(value), text[at + len(self._tags.close) :]
            else:
                more, text = self._unended(value + text[at:])
                made += more
        return made, text

    def _search(self, text: str, last: bool) -> tuple[int, bool]:
        """Return the place of the value's end and True, or the length of its certain part and False."""
        close = self._tags.close
        first = self._value[0] if self._value else text
        ends = self._tags.ends[self._tags.lines and first.startswith("\n")]
        at = text.find(close)
        while at >= 0:
            found = ends.match(text, at, partial=True)
            if found is not None:
                return at, last or not found.partial
            if self._tags.ends_before_text[1].match(text, at) and self._has_no_call("".join(self._value) + text[:at]):
                return at, True
            at = text.find(close, at + 1)
        return len(text) - begun(text, close), False

    def _has_no_call(self, value: str) -> bool:
        return self._tags.inside.search(value) is None

    def _unended(self, text: str) -> tuple[str, str]:
        """Return the JSON of a value without a proper end, in the last text of an output, and the text after it."""
        close, own_line = self._tags.close, self._tags.lines and text.startswith("\n")
        for tag in re.finditer("|".join(map(re.escape, self._tags.closing)), text):
            at = tag.start()
            is_end = self._tags.loose_ends.match(text, at, partial=True) is not None
            if not is_end and not own_line and self._tags.ends_before_text[0].match(text, at):
                is_end = self._has_no_call(text[:at])
            if is_end:
                return self._argument(text[:at]), text[tag.end() if tag[0] == close else at :]
        cut = begun(text, "\n" * own_line + close)
        return self._argument(text[: len(text) - cut], whole=False), ""

    def _argument(self, text: str, whole: bool = True) -> str:
        """Return the JSON of the ended value; of a cut value (not `whole`) its part, if the schema allows it."""
        key, self._key = self._key or "", None
        if self._tags.lines:
            text = text.removeprefix("\n").removesuffix("\n")
        schema = property_schema(self._parameters, key)
        value = value_for(schema, text, self._parameters)
        if not whole and not (text and SchemaCheck(self._parameters, exact=False).allows(schema, value)):
            return ""
        before, self._begun = ", " if self._begun else "{", True
        return f"{before}{write_json(key)}: {write_json(value)}"
