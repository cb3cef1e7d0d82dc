"""Thoughts of models, between <think> and </think> at the start, which are not part of the text or its grammar."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

from weft.engine.grammar.grammar import followed
from weft.engine.output.detokenizer import begun
from weft.serve.chat.tool_grammars import literals
from weft.serve.chat.tools import OutputDelta, Parser, any_of

BEGIN, END = "<think>", "</think>"
Start = Literal["inside", "free"]
"""Start of an output: inside a thought that the prompt opens, or free to begin with a thought."""


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


class ReasoningSplitter:
    """Parser that splits off the thought and passes the rest to the inner parser, without line breaks in between.

    hidden: special tokens that no client sees; each arrives in one piece.
    """

    def __init__(self, inner: Parser, start: Start, hidden: Collection[str] = ()):
        self._inner = inner
        self._hidden = any_of(hidden)
        self._without: Literal["inside", "content"] = "inside" if start == "inside" else "content"
        self._state: Literal["free", "inside", "behind", "content"] = "free"
        self._held = ""
        self._thought = False  # True once the thought has text

    @property
    def ended(self) -> bool:
        return self._inner.ended

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


class ReasoningFilter:
    """Parser that drops the thought of an output."""

    def __init__(self, inner: Parser):
        self._inner = inner

    @property
    def ended(self) -> bool:
        return self._inner.ended

    def push(self, text: str, last: bool) -> OutputDelta:
        return self._inner.push(text, last)._replace(thought="")
