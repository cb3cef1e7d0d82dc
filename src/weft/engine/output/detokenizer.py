"""From tokens to text as they come: incremental decoding and stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers.decoders import ByteLevel, DecodeStream

UNDECODED = "\ufffd"
"""What stands for bytes that are no character, or not yet one."""


class TokenTexts(dict[int, str]):
    """The text of each token by itself, found when it is first asked for. skip: special tokens have none."""

    def __init__(self, tokenizer: Any, skip: bool):
        self._tokenizer, self._skip = tokenizer, skip

    def of(self, tokens: Sequence[int]) -> str:
        """The text of tokens that follow one another."""
        # As tokenizers' streams decode: transformers' own decode may also tidy spaces, and lengths would not agree.
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=self._skip)
        return text

    def __missing__(self, token: int) -> str:
        text = self[token] = self.of([token])
        return text


class Detokenizer:
    """What all outputs share. tokenizer: a transformers fast tokenizer.

    by_bytes: its tokens stand for bytes whatever comes before them, so that a token that begins and ends with a
    character has one text.
    """

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer.backend_tokenizer
        self.by_bytes = isinstance(self.tokenizer.decoder, ByteLevel)
        self.texts = {skip: TokenTexts(self.tokenizer, skip) for skip in (True, False)}


class TextStream:
    """The text of one output, token by token.

    Text is returned once it is final: an incomplete character waits for its other bytes, and an end that may become a
        stop
    string waits until that is decided.

    Args:
        detokenizer: of the model.
        stop: strings that end the text.
        keep_stop: the stop string is a part of the text.
        keep_special: special tokens are a part of the text.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        stop: Sequence[str],
        keep_stop: bool = False,
        keep_special: bool = False,
    ):
        self._shared, self._skip = detokenizer, not keep_special
        self._texts = detokenizer.texts[self._skip]
        self.stops, self._keep_stop = tuple(stop), keep_stop
        self._decoder = DecodeStream(skip_special_tokens=self._skip)
        self._ids: list[int] = []  # with text that is not all returned, and its returned length
        self._decoded = 0
        self._held = ""

    def push(self, token: int, check_stop: bool = True) -> tuple[str, str | None]:
        """(newly final text, the stop string that ended it or None)."""
        piece = self._decode(token)
        if not self.stops:  # then nothing is ever held
            return piece, None
        self._held += piece
        if not check_stop:
            return self._release(len(self._held)), None
        found = [(at, s) for s in self.stops if (at := self._held.find(s)) >= 0]
        if found:
            at, stop = min(found)
            text, self._held = self._held[: at + len(stop) * self._keep_stop], ""
            self._ids, self._decoded = [], 0  # nothing follows, not even what is left to flush
            return text, stop
        return self._release(len(self._held) - self._undecided()), None

    def flush(self) -> str:
        """The rest of the text when the output ends without a stop string, half a character included."""
        return self._release(len(self._held)) + self._undecoded()

    def _decode(self, token: int) -> str:
        """The text that a token makes final."""
        if not self._shared.by_bytes:
            return self._stream(token)
        text = "" if self._ids else self._texts[token]
        if self._ids or text.endswith(UNDECODED):
            self._ids.append(token)
            text = self._texts.of(self._ids)
            if text.endswith(UNDECODED):
                return ""
            self._ids = []
        return text

    def _stream(self, token: int) -> str:
        """The same for tokenizers with tokens that have other texts after other tokens."""
        before = ""
        try:
            piece = self._decoder.step(self._shared.tokenizer, token) or ""
        except Exception:
            # Tokenizers that fall back to bytes write a run of bytes anew where a later one makes it invalid. The
            # stream gives up where text that it has handed out would change; that text stays, and a new stream goes on.
            before, self._ids, self._decoded = self._undecoded(), [], 0
            self._decoder = DecodeStream(skip_special_tokens=self._skip)
            piece = self._decoder.step(self._shared.tokenizer, token) or ""
        self._ids.append(token)
        self._decoded += len(piece)
        return before + piece

    def _undecoded(self) -> str:
        """What the stream holds back of its tokens: an incomplete character, or bytes that are none."""
        return self._texts.of(self._ids)[self._decoded :]

    def _release(self, length: int) -> str:
        text, self._held = self._held[:length], self._held[length:]
        return text

    def _undecided(self) -> int:
        """Length of the longest end that begins a stop string."""
        longest = max((len(s) for s in self.stops), default=1) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            if any(s.startswith(self._held[-length:]) for s in self.stops):
                return length
        return 0
