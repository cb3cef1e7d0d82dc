"""Incremental decoding of tokens to text, and stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers.decoders import ByteLevel, DecodeStream

UNDECODED = "\ufffd"
"""Replacement character for invalid or incomplete bytes."""


class TokenTexts(dict[int, str]):
    """Cache of the text of each single token. skip: special tokens have none."""

    def __init__(self, tokenizer: Any, skip: bool):
        self._tokenizer, self._skip = tokenizer, skip

    def of(self, tokens: Sequence[int]) -> str:
        """Return the text of consecutive tokens."""
        # Use tokenizers' decode, as streams do: transformers' decode may also tidy spaces, so lengths would differ.
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=self._skip)
        return text

    def __missing__(self, token: int) -> str:
        text = self[token] = self.of([token])
        return text


class Detokenizer:
    """State shared by all outputs. tokenizer: a transformers fast tokenizer.

    by_bytes: a token's bytes do not depend on the tokens before it, so a token of whole characters has one text.
    """

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer.backend_tokenizer
        self.by_bytes = isinstance(self.tokenizer.decoder, ByteLevel)
        self.texts = {skip: TokenTexts(self.tokenizer, skip) for skip in (True, False)}


class TextStream:
    """The text of one output, token by token.

    Text is returned once it is final: an incomplete character waits for its other bytes, and text that may begin a stop
    string waits until that is decided.

    stop, keep_stop, keep_special: as in `SamplingParams`.
    """

    def __init__(
        self, detokenizer: Detokenizer, stop: Sequence[str], keep_stop: bool = False, keep_special: bool = False
    ):
        self._shared, self._skip = detokenizer, not keep_special
        self._texts = detokenizer.texts[self._skip]
        self.stops, self._keep_stop = tuple(stop), keep_stop
        self._decoder = DecodeStream(skip_special_tokens=self._skip)
        self._ids: list[int] = []  # tokens with text that is not all returned, and its returned length
        self._decoded = 0
        self._held = ""

    def push(self, token: int, check_stop: bool = True) -> tuple[str, str | None]:
        """Add a token. Returns (newly final text, the stop string that ended it or None)."""
        piece = self._decode(token)
        if not self.stops:  # no text is held back
            return piece, None
        self._held += piece
        if not check_stop:
            return self._release(len(self._held)), None
        found = [(at, s) for s in self.stops if (at := self._held.find(s)) >= 0]
        if found:
            at, stop = min(found)
            text, self._held = self._held[: at + len(stop) * self._keep_stop], ""
            self._ids, self._decoded = [], 0  # the text ends here: leave nothing to flush
            return text, stop
        undecided = max(begun(self._held, stop) for stop in self.stops)
        return self._release(len(self._held) - undecided), None

    def push_all(self, tokens: Sequence[int]) -> str:
        """Add tokens without a look for stop strings, and return the newly final text."""
        if self.stops:
            return "".join([self.push(token, check_stop=False)[0] for token in tokens])
        if len(tokens) > 1 and self._shared.by_bytes and not self._ids:
            texts = [self._texts[token] for token in tokens]
            if not any(text.endswith(UNDECODED) for text in texts):
                return "".join(texts)
        return "".join([self._decode(token) for token in tokens])

    def flush(self) -> str:
        """Return the rest of the text, incomplete characters included, of an output that ends without a stop string."""
        return self._release(len(self._held)) + self._undecoded()

    def _decode(self, token: int) -> str:
        """Return the text that a token makes final."""
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
        """Decode a token of a tokenizer with texts that depend on the tokens before."""
        before = ""
        try:
            piece = self._decoder.step(self._shared.tokenizer, token) or ""
        except Exception:
            # Tokenizers with byte fallback rewrite a run of bytes if a later byte makes it invalid. The stream fails if
            # text already returned would change: keep that text, and continue with a new stream.
            before, self._ids, self._decoded = self._undecoded(), [], 0
            self._decoder = DecodeStream(skip_special_tokens=self._skip)
            piece = self._decoder.step(self._shared.tokenizer, token) or ""
        self._ids.append(token)
        self._decoded += len(piece)
        return before + piece

    def _undecoded(self) -> str:
        """Return the text held back by the stream: an incomplete character, or invalid bytes."""
        return self._texts.of(self._ids)[self._decoded :]

    def _release(self, length: int) -> str:
        text, self._held = self._held[:length], self._held[length:]
        return text


def begun(text: str, mark: str) -> int:
    """Return the length of the text's longest end that is a beginning of the mark, shorter than the mark."""
    lengths = range(min(len(mark) - 1, len(text)), 0, -1)
    return next((n for n in lengths if mark.startswith(text[-n:])), 0)
