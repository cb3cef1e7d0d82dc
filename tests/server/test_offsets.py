"""Offsets of each token's text in a completion, also after bytes that are no text."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer

from weft.engine.messages.request import Output, TokenLogprob
from weft.engine.output.detokenizer import Detokenizer, TextStream
from weft.engine.output.text_processor import TextProcessor
from weft.serve.chat.protocol import CompletionRequest
from weft.serve.dialects.completions import CompletionReply

PIECES = [b"a", "é".encode(), "€".encode(), "😀".encode(), b"\xe2\x82", b"\xf0\x9f", b"\xc3", b"\x80", b"\xf8", b"xy"]


def reply_to(text_processor: Any, prompt: list[int], echoed: str | None = None, **fields: Any) -> CompletionReply:
    engine, prompts = SimpleNamespace(text_processor=text_processor), SimpleNamespace(text=lambda tokens: echoed)
    service: Any = SimpleNamespace(model_name="m", engine=engine, prompts=prompts)
    body = CompletionRequest(prompt=prompt, logprobs=0, echo=echoed is not None, **fields)
    return CompletionReply(service, [prompt], body)


@pytest.mark.parametrize("seed", range(20))
def test_every_token_is_found_where_it_is_said_to_be(chat_model_dir: Path, seed: int) -> None:
    """Tokens of one byte each, whole characters and broken ones in any order, in one completion and in a stream."""
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
    whole_reply, reply = reply_to(text_processor, []), reply_to(text_processor, [])
    for output in outputs:
        whole_reply.outputs[0].add(output)
    whole = whole_reply.choice(0, whole_reply.outputs[0].whole)
    chunks = [chunk for at, output in enumerate(outputs) for chunk in reply.chunks(0, output, (), at == 0)]
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


@pytest.mark.parametrize("pieces", [1, 3], ids=["whole", "streamed"])
def test_offsets_count_returned_text_alone(chat_model_dir: Path, pieces: int) -> None:
    """Not special tokens, which the text does not hold, nor what a stop string cut off; an echoed prompt has all."""
    tokenizer = AutoTokenizer.from_pretrained(chat_model_dir)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|x|>"]})
    text_processor = TextProcessor(tokenizer, chat_model_dir, len(tokenizer), (0,))
    special, [letter] = tokenizer.convert_tokens_to_ids("<|x|>"), tokenizer.encode("a", add_special_tokens=False)
    assert special in text_processor.special_ids and letter not in text_processor.special_ids
    for hidden, echoed, wanted in [
        (True, None, [0, 0, 1, 1, 2, 2]),
        (False, None, [0, 5, 6, 11, 12, 12]),
        (True, "<|x|>a", [0, 5, 6, 6, 7, 7, 8, 8]),
    ]:
        text = "<|x|>a<|x|>a" if not hidden else "aa"
        reply = reply_to(text_processor, [special, letter], echoed, skip_special_tokens=hidden)
        scores = [TokenLogprob(token, -1.0) for token in (special, letter, special, letter, letter, special)]
        scored = (TokenLogprob(letter, -1.0),)
        offsets = []
        for at in range(pieces):
            last = at == pieces - 1
            some = tuple(scores[at * 6 // pieces : (at + 1) * 6 // pieces])
            piece = text if last else ""
            ids = tuple(p.token_id for p in some)
            output = Output(piece, ids, some, "stop" if last else None, None, 1, 0, 1, prompt_logprobs=scored)
            offsets += [o for chunk in reply.chunks(0, output, (), at == 0) for o in chunk["logprobs"]["text_offset"]]
        assert offsets == wanted


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
