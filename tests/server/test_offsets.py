"""Where each token's text begins in a completion, also after bytes that are no text."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from weft.engine.output.detokenizer import Detokenizer, TextStream
from weft.engine.output.text_processor import TextProcessor
from weft.engine.request import Output, TokenLogprob
from weft.server.engine_client import Choice
from weft.server.render import Completion, Wanted

PIECES = [b"a", "é".encode(), "€".encode(), "😀".encode(), b"\xe2\x82", b"\xf0\x9f", b"\xc3", b"\x80", b"\xf8", b"xy"]


@pytest.mark.parametrize("seed", range(20))
def test_every_token_is_found_where_it_is_said_to_be(chat_model_dir: Path, seed: int) -> None:
    """Of tokens of one byte each, whole characters and broken ones in any order, in one completion and in a stream."""
    tokenizer, draw = AutoTokenizer.from_pretrained(chat_model_dir), random.Random(seed)
    text_processor = TextProcessor(tokenizer, chat_model_dir, 257, (0,))
    token_of = {text_processor.grammars.tokens.decode_bytes([token]): token for token in range(1, 257)}
    written = b"".join(draw.choices(PIECES, k=12)) + b"end"
    tokens = [token_of[bytes([byte])] for byte in written]
    stream = TextStream(Detokenizer(tokenizer), ())
    texts = [stream.push(token)[0] for token in tokens]
    texts[-1] += stream.flush()
    text, scores = "".join(texts), [TokenLogprob(token, -1.0) for token in tokens]
    ends = [None] * (len(tokens) - 1) + ["length"]
    outputs = [
        Output(piece, (score.token_id,), (score,), end, None, 1, 0, 1)  # type: ignore[arg-type]
        for piece, score, end in zip(texts, scores, ends, strict=True)
    ]
    whole = Completion(text_processor, [], Wanted(0)).whole(0, Choice(text, tokens, scores, (), outputs[-1]))
    style = Completion(text_processor, [], Wanted(0))
    chunks = [chunk for at, output in enumerate(outputs) for chunk in style.chunks(0, output, at == 0)]
    offsets = whole["logprobs"]["text_offset"]
    assert [at for chunk in chunks for at in chunk["logprobs"]["text_offset"]] == offsets
    # What a decoder that knows the whole text says: each byte belongs to the character that it became a part of.
    expected: list[int] = []
    at = 0
    while at < len(written):
        length = next((n for n in (1, 2, 3, 4) if is_text(written[at : at + n])), 0) or broken(written[at:])
        expected += [len(set(expected))] * length
        at += length
    assert text == written.decode(errors="replace") and offsets == expected
    assert text[offsets[-3] :] == "end"


def is_text(some: bytes) -> bool:
    try:
        some.decode()
    except UnicodeDecodeError:
        return False
    return True


def broken(rest: bytes) -> int:
    """Bytes at the beginning that one replacement character stands for."""
    limit = max(n for n in (1, 2, 3, 4) if len(rest[:n].decode(errors="replace")) == 1)
    return min(limit, len(rest))
