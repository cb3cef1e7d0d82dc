"""From tokens to text as they come: incremental decoding and stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers.decoders import DecodeStream


class TextStream:
    """The text of one answer. tokenizer: a transformers fast tokenizer.

    Text is handed out once it is final: an incomplete character waits for its other bytes, and an end that may become
    a stop string waits until it is decided. keep_stop: the stop string is a part of the text; those of stop_after
    always are. keep_special: so are special tokens.
    """

    def __init__(
        self,
        tokenizer: Any,
        stop: Sequence[str],
        keep_stop: bool = False,
        keep_special: bool = False,
        stop_after: Sequence[str] = (),
    ):
        self._tokenizer = tokenizer
        self._stop = dict.fromkeys(stop, keep_stop) | dict.fromkeys(stop_after, True)  # whether it stays in the text
        self._skip = not keep_special
        self._decoder = DecodeStream(skip_special_tokens=self._skip)
        self._ids: list[int] = []  # that the decoder was given, and how much of their text it gave back
        self._decoded = 0
        self._held = ""

    def push(self, token: int, check_stop: bool = True) -> tuple[str, str | None]:
        """(newly final text, the stop string that ended it or None)."""
        piece = self._decode(token)
        if not self._stop:  # then nothing is ever held
            return piece, None
        self._held += piece
        if not check_stop:
            return self._release(len(self._held)), None
        found = [(at, s) for s in self._stop if (at := self._held.find(s)) >= 0]
        if found:
            at, stop = min(found)
            text, self._held = self._held[: at + len(stop) * self._stop[stop]], ""
            return text, stop
        return self._release(len(self._held) - self._undecided()), None

    def flush(self) -> str:
        """What is left when the answer ends without a stop string, half a character included."""
        return self._release(len(self._held)) + self._undecoded()

    def _decode(self, token: int) -> str:
        """The text that a token makes final."""
        before = ""
        try:
            piece = self._decoder.step(self._tokenizer.backend_tokenizer, token) or ""
        except Exception:
            # Tokenizers that fall back to bytes write a run of bytes anew where a later one makes it invalid. The
            # stream gives up where text that it has handed out would change; that text stays, and a new stream goes on.
            before, self._ids, self._decoded = self._undecoded(), [], 0
            self._decoder = DecodeStream(skip_special_tokens=self._skip)
            piece = self._decoder.step(self._tokenizer.backend_tokenizer, token) or ""
        self._ids.append(token)
        self._decoded += len(piece)
        return before + piece

    def _undecoded(self) -> str:
        """What the stream holds back of its tokens: an incomplete character, or bytes that are none."""
        # As the stream decodes: transformers' own decode may also tidy spaces, and lengths would not agree.
        whole: str = self._tokenizer.backend_tokenizer.decode(self._ids, skip_special_tokens=self._skip)
        return whole[self._decoded :]

    def _release(self, length: int) -> str:
        text, self._held = self._held[:length], self._held[length:]
        return text

    def _undecided(self) -> int:
        """Length of the longest end that begins a stop string."""
        longest = max((len(s) for s in self._stop), default=1) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            if any(s.startswith(self._held[-length:]) for s in self._stop):
                return length
        return 0
