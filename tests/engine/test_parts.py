"""The engine's parts by themselves: pages, prefix tree, text, messages."""

from __future__ import annotations

import random
import sys
from types import SimpleNamespace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders
from tokenizers.decoders import DecodeStream
from tokenizers.models import BPE
from transformers.convert_slow_tokenizer import bytes_to_unicode

from engine.conftest import byte_tokenizer
from weft.engine.kv.cache_spec import CacheGroup, Rule
from weft.engine.kv.manager import CacheManager
from weft.engine.kv.pages import PagePool
from weft.engine.kv.prefix import PrefixTree
from weft.engine.kv.prefix_run import ABSENT
from weft.engine.kv.tokens import token_array, token_bytes
from weft.engine.messages.rank_messages import (
    Adjust,
    Chunk,
    Entries,
    GroupRows,
    Join,
    Ran,
    Result,
    Sampling,
    Scored,
    Step,
    decode_from_rank,
    decode_to_rank,
    encode,
)
from weft.engine.messages.request import SamplingParams, Sequence
from weft.engine.output.detokenizer import Detokenizer, TextStream
from weft.engine.scheduler.scheduler import Scheduler

PAGE = 4


def sequence(request: int, tokens: list[int], max_tokens: int) -> Sequence:
    return Sequence(
        request, token_array(tokens), len(tokens), SamplingParams(max_tokens=max_tokens), 0, max_tokens, frozenset()
    )


def test_prompts_share_pages_and_the_oldest_prefix_is_evicted_first() -> None:
    pool = PagePool(4)
    tree = PrefixTree([Rule()], [pool], 2)
    one, two = pool.take(2), pool.take(2)
    tree.insert([1, 2, 3, 4], [one])
    tree.insert([5, 6, 7, 8], [two])
    pool.release(one + two)
    assert pool.free == 0 and tree.longest([1, 2, 3, 4, 9]) == 4 and tree.longest([1, 2, 9]) == 2
    held = tree.match([1, 2, 3, 4])
    assert held == (4, [one], 0, ABSENT)
    assert tree.evict(0, 4) == 2 and tree.longest([5, 6, 7, 8]) == 0, "pages in use must stay"
    pool.release(held.tables[0])
    assert tree.evict(0, 1) == 1 and tree.longest([1, 2, 3, 4]) == 2, "leaves go first"
    assert tree.evict(0, 9) == 1 and pool.free == 4


def test_pages_are_counted() -> None:
    pool = PagePool(2)
    pages = pool.take(2)
    assert pool.take(1) is None and pool.free == 0
    pool.hold(pages[:1])
    pool.release(pages)
    assert pool.free == 1 and pool.holders(pages[0]) == 1
    with pytest.raises(ValueError, match="more often"):
        pool.release(pages[1:])
    for share in (pool.hold, pool.cache):
        with pytest.raises(ValueError, match="is free"):
            share(pages[1:])


def test_pages_of_the_prefix_tree_alone_are_not_used() -> None:
    pool = PagePool(3)
    pages = pool.take(2)
    pool.cache(pages)
    assert (pool.used, pool.free) == (2, 1)
    pool.release(pages)
    assert (pool.used, pool.free) == (0, 1)
    with pytest.raises(ValueError, match="more often"):
        pool.release(pages[:1])
    pool.hold(pages[:1])
    pool.hold(pages[:1])
    pool.uncache(pages)
    assert (pool.used, pool.free) == (1, 2)
    with pytest.raises(ValueError, match="more often than it was cached"):
        pool.uncache(pages)
    pool.release(pages[:1])
    assert pool.used == 1
    pool.release(pages[:1])
    assert (pool.used, pool.free) == (0, 3)


def test_a_request_that_can_never_fit_is_refused() -> None:
    scheduler = Scheduler(CacheManager([CacheGroup(Rule(), 2)], PAGE), max_batch_tokens=8, max_running=2)
    with pytest.raises(ValueError, match="may take 9 tokens"):
        scheduler.add(sequence(1, [1, 2, 3], 6))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory):
    from transformers import AutoTokenizer

    directory = tmp_path_factory.mktemp("tokenizer")
    byte_tokenizer(directory)
    return AutoTokenizer.from_pretrained(directory)


@settings(max_examples=60, deadline=None)
@example(text="aba", stops=["b", "aba"])
@given(
    text=st.text(alphabet="abé漢😀 .", max_size=20), stops=st.lists(st.text(alphabet="ab漢 ", min_size=1, max_size=4))
)
def test_text_comes_whole_and_stop_strings_never_leak(tokenizer, text: str, stops: list[str]) -> None:
    stream, out, stopped = TextStream(Detokenizer(tokenizer), stops), "", None
    for token in tokenizer.encode(text):
        piece, stopped = stream.push(token)
        out += piece
        assert "\ufffd" not in out and not any(s in out for s in stops)
        if stopped:
            break
    else:
        out += stream.flush()
    # The first stop string to be complete ends the output, also where one that began earlier is still incomplete.
    complete = next((text[:end] for end in range(len(text) + 1) if any(s in text[:end] for s in stops)), None)
    assert bool(stopped) == (complete is not None)
    assert out == (text if complete is None else complete[: min(complete.find(s) for s in stops if s in complete)])


def test_half_a_character_is_shown_at_the_end(tokenizer) -> None:
    stream = TextStream(Detokenizer(tokenizer), [])
    assert [stream.push(t)[0] for t in tokenizer.encode("a漢")[:-1]] == ["a", "", ""]
    assert stream.flush() == "\ufffd"


@pytest.mark.parametrize("skip", [False, True])
def test_texts_of_single_tokens_add_up_to_those_of_the_tokenizers_own_stream(tokenizer, skip: bool) -> None:
    """Token by token, of bytes in any order: characters, parts of such, special tokens."""
    shared, rng, names = Detokenizer(tokenizer), random.Random(1), bytes_to_unicode()
    assert shared.by_bytes
    pieces = [list("aé漢😀".encode()), list("漢".encode()[:2]), [0x80], [0xF8], [0xF0, 0x9F], [None]]
    for _ in range(200):
        written = [byte for piece in rng.choices(pieces, k=8) for byte in piece]
        tokens = [0 if byte is None else tokenizer.convert_tokens_to_ids(names[byte]) for byte in written]
        ours, theirs = TextStream(shared, [], keep_special=not skip), DecodeStream(skip_special_tokens=skip)
        texts = [ours.push(token)[0] for token in tokens]
        assert texts == [theirs.step(shared.tokenizer, token) or "" for token in tokens]
        assert "".join(texts) + ours.flush() == shared.tokenizer.decode(tokens, skip_special_tokens=skip)


def test_bytes_that_are_no_text_do_not_end_a_stream() -> None:
    """A run of bytes that is not UTF-8 as a whole is all replaced, also a part that was text before, as Llama's and
    Gemma's tokenizers decode. The text handed out stays, and the stream goes on.
    """
    a, e2, x = 0x41, 0xE2, 256
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"x": x}
    decoded = Tokenizer(BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    decoded.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    detokenizer = Detokenizer(SimpleNamespace(backend_tokenizer=decoded))
    stream = TextStream(detokenizer, ["xx"])
    assert [stream.push(token)[0] for token in (a, e2, x, a, a)] == ["A", "", "\ufffd", "xA", "A"]
    assert [stream.push(token) for token in (x, x)] == [("", None), ("", "xx")]
    rng = random.Random(0)
    for _ in range(100):
        stream, tokens = TextStream(detokenizer, []), rng.choices((a, e2, 0x82, x), k=9)
        out = "".join(stream.push(token)[0] for token in tokens) + stream.flush()
        assert out.replace("\ufffd", "").count("x") == tokens.count(x)


def test_a_prompt_is_one_object_in_a_message_however_long_it_is() -> None:
    """A rank that makes a number of each of 8,192 tokens takes a millisecond before its step begins."""
    blocks = []
    for tokens in ([300], list(range(300, 8492))):
        message = encode(Step(1, (GroupRows(chunks=(Chunk(0, token_bytes(tokens), True),)),)))
        decode_to_rank(message)
        before = sys.getallocatedblocks()
        step = decode_to_rank(message)
        blocks.append(sys.getallocatedblocks() - before)
        assert step.counts == (len(tokens),) and list(token_array(step.groups[0].chunks[0].tokens)) == tokens
    assert blocks[1] - blocks[0] < 10


def test_messages_survive_the_wire() -> None:
    group = GroupRows(
        (4, 2),
        chunks=(Chunk(3, token_bytes([5, 6]), True), Chunk(1, token_bytes([9]), False)),
        joins=(Join(3, 17, 5, ((1, 9), (4, 2)), Sampling(top_p=0.9, top_k=7, seed=2**62 - 1), (8, 9)),),
        entries=(Entries(4, 0, 2, (8,)),),
        adjust=((2, Adjust(2, (0,), mask=b"\x01")),),
        decode_tokens=(1, 3),
        drafts=token_bytes([8, 9]),
    )
    step = Step(8, (group, GroupRows()))
    assert decode_to_rank(encode(step)) == step and step.counts == (7, 0) and group.sampled_rows == [4, 2, 2, 2, 3]
    assert [list(drafts) for drafts in group.drafts_each] == [[], [8, 9]]
    best = (-0.25, ((17, -0.25),))
    result = Result(1, Ran(8, (2, 0), 2**32 - 1, 7), (17, 2, 5), (best, best, None), (Scored(1, (best,)),), (2, 1))
    assert decode_from_rank(encode(result)) == result
