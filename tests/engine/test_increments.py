"""Increments are the same wherever they are taken: at once, on another thread, or when the output has ended."""

from __future__ import annotations

import queue
import random
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer

from engine.conftest import WAIT_S
from weft.engine.assets import embedded_model_dir
from weft.engine.controller.output_processor import OutputProcessor
from weft.engine.controller.request_queue import RequestQueue
from weft.engine.messages.rank_messages import GroupRows, Ran, Result, Scored
from weft.engine.messages.request import Output, SamplingParams, Sequence
from weft.engine.output.detokenizer import TextStream
from weft.engine.output.request_output import RequestOutput, prepare
from weft.engine.output.text_processor import TextProcessor
from weft.engine.scheduler.scheduled import Scheduled

TEXT_PROCESSOR = TextProcessor(AutoTokenizer.from_pretrained(embedded_model_dir()), embedded_model_dir(), 1024, (2,))
TEXT = TEXT_PROCESSOR.tokenizer.encode("The 漢 stop 😀 é is here. ", add_special_tokens=False)
PROMPT = [5, 6, 7]
HOWS: dict[str, tuple[dict[str, Any], list[int]]] = {
    "length": ({}, TEXT),
    "half a character at the end": (
        {},
        TEXT[: TEXT.index(TEXT_PROCESSOR.tokenizer.encode("😀", add_special_tokens=False)[-1])],
    ),
    "end": ({"max_tokens": 99, "keep_special": True}, [*TEXT, 2]),
    "end that is a part of the text": ({"max_tokens": 99, "keep_stop": True, "keep_special": True}, [*TEXT, 2]),
    "end too early": ({"min_tokens": 5}, [2, *TEXT[1:]]),
    "stop token": ({"max_tokens": 99, "stop_token_ids": (9,)}, [*TEXT, 9]),
    "stop string": ({"stop": ("sto", "never")}, TEXT),
    "stop string that stays": ({"stop": ("is h",), "keep_stop": True}, TEXT),
    "stop string that does not come": ({"stop": (". x",)}, TEXT),
    "stop string too early": ({"stop": ("he",), "min_tokens": 6}, TEXT),
    "stop string and end": ({"max_tokens": 99, "stop": (". x",)}, [*TEXT, 2]),
    "logprobs": ({"logprobs": 1}, TEXT),
    "nothing sampled": ({"max_tokens": 0}, TEXT[:1]),
    "cut": ({"max_tokens": 99, "stop": (". x",)}, TEXT),
}


def made(how: str) -> tuple[RequestOutput, list[int]]:
    changes, tokens = HOWS[how]
    params = SamplingParams(**{"max_tokens": len(tokens), "prompt_logprobs": 0} | changes)
    output = prepare(PROMPT, params, lambda output: None, 0, 400, TEXT_PROCESSOR)
    output.score(Scored(1, ((-1.0, ()), (-2.0, ()))))
    return output, tokens


def give(output: RequestOutput, token: int, at: int) -> None:
    """Give an output its token as the engine's thread does."""
    output.accept(token, None if output.sequence.params.logprobs is None else (-float(at), ((token, -float(at)),)))


def taken_at_once(how: str) -> list[Output]:
    output, tokens = made(how)
    increments = []
    for at, token in enumerate(tokens):
        give(output, token, at)
        increments.append(output.take())
        if output.end is not None:
            return increments
    output.cut("abort")
    return [*increments, output.take()]


def same(one: list[Output], other: list[Output]) -> None:
    assert all(increment.queue_s > 0 for increment in (*one, *other)), "it goes on: nobody has admitted these"
    assert [without_wait(increment) for increment in one] == [without_wait(increment) for increment in other]


def without_wait(increment: Output) -> dict[str, Any]:
    return {name: getattr(increment, name) for name in increment.__struct_fields__ if name != "queue_s"}


SAID = TEXT_PROCESSOR.tokenizer.decode(TEXT)
TEXTS = {
    "half a character at the end": SAID[: SAID.index("😀")] + "\ufffd",
    "end that is a part of the text": SAID + TEXT_PROCESSOR.tokenizer.decode([2]),
    "end too early": SAID.removeprefix(TEXT_PROCESSOR.tokenizer.decode(TEXT[:1])),
    "stop string": SAID[: SAID.index("sto")],
    "stop string that stays": SAID[: SAID.index("is h") + 4],
    "stop string too early": SAID[: SAID.rindex("he")],
    "nothing sampled": "",
}
"""Cases whose text is not all that was sampled."""


@pytest.mark.parametrize("how", HOWS)
def test_what_is_taken_when_all_has_come(how: str) -> None:
    increments = taken_at_once(how)
    assert "".join(increment.text for increment in increments) == TEXTS.get(how, SAID)
    output, tokens = made(how)
    for at, token in enumerate(tokens):
        if output.end is None:
            give(output, token, at)
    if output.end is None:
        output.cut("abort")
    later = []
    while not output.over:
        later.append(output.take())
    same(increments, later)
    assert len(later) == len(tokens) + (how == "cut") or how.startswith("stop string")
    assert [bool(o.finish_reason) for o in later] == [False] * (len(later) - 1) + [True]
    assert [len(o.prompt_logprobs) for o in later] == [2] + [0] * (len(later) - 1)
    assert [o.completion_tokens for o in later] == [
        len(later[0].token_ids) + at for at in range(len(later) - (how == "cut"))
    ] + [len(tokens)] * (how == "cut")


@pytest.mark.parametrize("how", HOWS)
def test_what_is_taken_on_another_thread(how: str) -> None:
    """It lags behind by some increments, another number each time."""
    rng = random.Random(how)
    output, tokens = made(how)
    group_rows: queue.SimpleQueue[bool] = queue.SimpleQueue()
    may, increments = threading.Semaphore(0), []

    def callback_for() -> None:
        while not increments or not increments[-1].finish_reason:
            assert may.acquire(timeout=WAIT_S) and group_rows.get(timeout=WAIT_S)
            increments.append(output.take())

    thread = threading.Thread(target=callback_for)
    thread.start()
    for at, token in enumerate(tokens):
        give(output, token, at)
        group_rows.put(True)
        may.release(1) if rng.random() < 0.4 else None
        if output.end is not None:
            break
    else:
        output.cut("abort")
        group_rows.put(True)
    may.release(len(tokens) + 1)
    thread.join(WAIT_S)
    same(taken_at_once(how), increments)


@pytest.mark.parametrize("how", HOWS)
def test_increments_that_wait_are_taken_as_one(how: str) -> None:
    each = taken_at_once(how)
    output, tokens = made(how)
    for at, token in enumerate(tokens):
        if output.end is None:
            give(output, token, at)
    if output.end is None:
        output.cut("abort")
    one = output.take(len(each))
    assert output.over and one.text == "".join(o.text for o in each)
    for name in ("token_ids", "logprobs", "prompt_logprobs"):
        assert getattr(one, name) == sum((getattr(o, name) for o in each), ())
    for name in ("finish_reason", "stop_reason", "completion_tokens", "error"):
        assert getattr(one, name) == getattr(each[-1], name)


def test_what_is_never_taken_has_no_text_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless a stop string may be in it."""
    decoded: list[int] = []
    push = TextStream.push
    monkeypatch.setattr(TextStream, "push", lambda s, token, **how: (decoded.append(token), push(s, token, **how))[1])
    monkeypatch.setattr(TextStream, "push_all", lambda s, tokens: decoded.extend(tokens))
    for how, expected in (("length", []), ("stop string that does not come", TEXT)):
        output, tokens = made(how)
        for token in tokens:
            output.accept(token)
        assert decoded == expected and output.end is not None and output.end.reason == "length"


def test_a_fault_that_is_found_late_ends_the_output_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The taker lags behind the engine: what came before the fault is whole, and one increment says so."""
    output, tokens = made("stop string that does not come")
    for token in tokens[:4]:
        output.accept(token)
    for name in ("push", "push_all"):
        monkeypatch.setattr(TextStream, name, lambda *_, **__: 1 / 0)
    output.accept(tokens[4])
    increments = [output.take() for _ in range(5)]
    assert [o.token_ids for o in increments] == [*((token,) for token in tokens[:4]), ()]
    assert increments[-1].error == "internal error: ZeroDivisionError" and output.over
    assert [o.finish_reason for o in increments] == [None] * 4 + ["error"]
    output, tokens = made("length")  # where the fault is the callback's, it ends with its next token
    output.accept(tokens[0])
    assert output.take().finish_reason == "error" and output.end is None
    output.accept(tokens[1])
    assert output.end is not None and output.end.reason == "error"
    heard: list[RequestOutput] = []
    output.callback = heard.append
    assert output.notify() and not heard, "its callback was called already"
    output.end_seen = True
    assert not output.notify()


@pytest.mark.parametrize("stops", [("t", "e"), ("e", "t"), ("he", "th"), ("th", "he")])
def test_of_stop_strings_that_one_token_ends_the_first_in_the_text_counts(stops: tuple[str, ...]) -> None:
    [token] = TEXT_PROCESSOR.tokenizer.encode(" the", add_special_tokens=False)
    first = min(stops, key=" the".index)
    stream = TextStream(TEXT_PROCESSOR.detokenizer, stops)
    assert stream.push(token) == (" the"[: " the".index(first)], first)


@pytest.mark.parametrize("minimum", [0, 1, 2, 3, 4])
def test_an_end_counts_from_min_tokens_on(minimum: int) -> None:
    """It is one of them: as token number `minimum` it ends the output, before it does not."""
    output = prepare(
        PROMPT, SamplingParams(max_tokens=9, min_tokens=minimum), lambda output: None, 0, 400, TEXT_PROCESSOR
    )
    ended = []
    for at in range(4):
        output.accept(2 if at else TEXT[0])
        ended.append(output.end is not None)
        if ended[-1]:
            break
    assert ended == [False] * max(1, minimum - 1) + [True] * (minimum <= 4)


@pytest.mark.parametrize("seed", [0, 1 << 16, (1 << 40) + 3, (1 << 61) + 5])
def test_all_bits_of_a_requests_seed_are_kept(seed: int) -> None:
    output = prepare(PROMPT, SamplingParams(seed=seed), lambda output: None, 77, 400, TEXT_PROCESSOR)
    assert output.sequence.seed == seed


def test_first_tokens_of_a_step_are_handed_out_before_its_others() -> None:
    called: list[int] = []
    processor, sequences = OutputProcessor(RequestQueue(4)), []
    for number in range(4):
        params = SamplingParams(max_tokens=9)
        output = prepare(PROMPT, params, lambda output: called.append(output.sequence.request), 0, 400, TEXT_PROCESSOR)
        output.sequence.request, output.sequence.allocation = number, object()
        output.scheduler = SimpleNamespace(finish=Sequence.forget_pages)
        processor.begin(output)
        sequences.append(output.sequence)

    def run(*numbers: int, count: int = 1) -> None:
        sampled: list[Any] = [(sequences[number], sequences[number].allocation) for number in numbers]
        tokens, accepted = (TEXT[0],) * count * len(numbers), (count,) * len(numbers) if count > 1 else ()
        result = Result(0, Ran(1, (len(numbers),), 0, 0), tokens, accepted=accepted)
        rows = GroupRows(numbers, decode_tokens=(count,) * len(accepted))
        processor.take(Scheduled(rows, sampled, []), result)

    def step(*numbers: int, count: int = 1) -> list[int]:
        called.clear()
        run(*numbers, count=count)
        processor.notify()
        return called

    assert step(0, 1) == [0, 1]
    assert step(0, 1, 2, 3) == [2, 3, 0, 1]
    assert step(0, 1, 2, 3) == [0, 1, 2, 3]
    assert step(0, 3, count=3) == [0, 0, 0, 3, 3, 3] and processor.generated_tokens == 2 + 4 + 4 + 6
    assert step(0, 2, count=4) == [0, 0, 0, 2, 2, 2, 2] and len(processor) == 3, "the last token of a row is dropped"
    run(1, 2, 3)  # two steps come in at once where the next one has drafts and this one had none
    assert step(2, 3, count=3) == [1, 2, 3, 2, 2, 3, 3, 3] and len(processor) == 1, "the last increment is called too"
