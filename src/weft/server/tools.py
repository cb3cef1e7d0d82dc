"""Tools: the calls in what a model answers, told apart from its text."""

from __future__ import annotations

from weft.server.forms import Call, Form, Functions


class CallParser:
    """Splits one answer, as it comes, into text and calls. What is no call in the end is text."""

    def __init__(self, form: Form, functions: Functions = ()) -> None:
        self._form, self._functions = form, functions
        self._held = ""
        self._after_call = False
        self.calls = 0

    def push(self, text: str, last: bool) -> tuple[str, list[Call]]:
        """(text, calls) that are whole now; last: nothing more comes. Line breaks after a call are no text."""
        begin, end = self._form.begin, self._form.end
        self._held += text
        content, calls = "", []
        while begin in self._held:
            before, _, inside = self._held.partition(begin)
            body, ended, rest = inside.partition(end)
            if not ended and not last:
                break
            found = self._form.read(body, self._functions)
            content += self._text(before if found else before + begin + body + ended)
            if found:
                calls += found
                self._after_call = True
            self._held = rest
        self.calls += len(calls)
        kept = 0 if last else self._undecided()
        content += self._text(self._held[: len(self._held) - kept])
        self._held = self._held[len(self._held) - kept :]
        return content, calls

    def _text(self, text: str) -> str:
        text = text.lstrip("\n") if self._after_call else text
        self._after_call = self._after_call and not text
        return text

    def _undecided(self) -> int:
        """Length of the end that is, or may become, a call."""
        if (at := self._held.find(self._form.begin)) >= 0:
            return len(self._held) - at
        lengths = range(min(len(self._form.begin) - 1, len(self._held)), 0, -1)
        return next((n for n in lengths if self._form.begin.startswith(self._held[-n:])), 0)
