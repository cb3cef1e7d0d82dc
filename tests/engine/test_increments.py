"""Increments are the same wherever they are taken: at once, on another thread, or when the answer has ended."""

from __future__ import annotations

import queue
import random
import threading
from typing import Any

import pytest
from transformers import AutoTokenizer

from engine.conftest import WAIT_S
from weft.assets import embedded_model_dir
from weft.engine.messages import Scored
from weft.engine.output.detokenizer import TextStream
from weft.engine.output.language import Language
from weft.engine.output.request_output import Answer, prepare
from weft.engine.request import Output, SamplingParams

LANGUAGE = Language(AutoTokenizer.from_pretrained(embedded_model_dir()), embedded_model_dir(), 1024, (2,))
TEXT = LANGUAGE.tokenizer.encode("The 漢 stop 😀 é is here. ", add_special_tokens=False)
PROMPT = [5, 6, 7]
HOWS: dict[str, tuple[dict[str, Any], list[int]]] = {
    "length": ({}, TEXT),
    "half a character at the end": (
        {},
        TEXT[: TEXT.index(LANGUAGE.tokenizer.encode("😀", add_special_tokens=False)[-1])],
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
    "nothing drawn": ({"max_tokens": 0}, TEXT[:1]),
    "cut": ({"max_tokens": 99, "stop": (". x",)}, TEXT),
}


def made(how: str) -> tuple[Answer, list[int]]:
    changes, tokens = HOWS[how]
    params = SamplingParams(**{"max_tokens": len(tokens), "prompt_logprobs": 0} | changes)
    answer = prepare(PROMPT, params, lambda answer: None, 0, 400, LANGUAGE)
    answer.score(Scored(1, ((-1.0, ()), (-2.0, ()))))
    return answer, tokens


def give(answer: Answer, token: int, at: int) -> None:
    """As the engine's thread does."""
    answer.accept(token, None if answer.sequence.params.logprobs is None else (-float(at), ((token, -float(at)),)))


def taken_at_once(how: str) -> list[Output]:
    answer, tokens = made(how)
    outputs = []
    for at, token in enumerate(tokens):
        give(answer, token, at)
        outputs.append(answer.take())
        if answer.end is not None:
            return outputs
    answer.cut("abort")
    return [*outputs, answer.take()]


def same(one: list[Output], other: list[Output]) -> None:
    assert all(output.queue_s > 0 for output in (*one, *other)), "it goes on: nobody has admitted these"
    assert [without_wait(output) for output in one] == [without_wait(output) for output in other]


def without_wait(output: Output) -> dict[str, Any]:
    return {name: getattr(output, name) for name in output.__struct_fields__ if name != "queue_s"}


SAID = LANGUAGE.tokenizer.decode(TEXT)
TEXTS = {
    "half a character at the end": SAID[: SAID.index("😀")] + "\ufffd",
    "end that is a part of the text": SAID + LANGUAGE.tokenizer.decode([2]),
    "end too early": SAID.removeprefix(LANGUAGE.tokenizer.decode(TEXT[:1])),
    "stop string": SAID[: SAID.index("sto")],
    "stop string that stays": SAID[: SAID.index("is h") + 4],
    "stop string too early": SAID[: SAID.rindex("he")],
    "nothing drawn": "",
}
"""Where the text is not all that was drawn."""


@pytest.mark.parametrize("how", HOWS)
def test_what_is_taken_when_all_has_come(how: str) -> None:
    outputs = taken_at_once(how)
    assert "".join(output.text for output in outputs) == TEXTS.get(how, SAID)
    answer, tokens = made(how)
    for at, token in enumerate(tokens):
        if answer.end is None:
            give(answer, token, at)
    if answer.end is None:
        answer.cut("abort")
    later = []
    while not answer.over:
        later.append(answer.take())
    same(outputs, later)
    assert len(later) == len(tokens) + (how == "cut") or how.startswith("stop string")
    assert [bool(o.finish_reason) for o in later] == [False] * (len(later) - 1) + [True]
    assert [len(o.prompt_logprobs) for o in later] == [2] + [0] * (len(later) - 1)
    assert [o.completion_tokens for o in later] == [
        len(later[0].token_ids) + at for at in range(len(later) - (how == "cut"))
    ] + [len(tokens)] * (how == "cut")


@pytest.mark.parametrize("how", HOWS)
def test_what_is_taken_on_another_thread(how: str) -> None:
    """It lags behind by some increments, another number each time."""
    draws = random.Random(how)
    answer, tokens = made(how)
    news: queue.SimpleQueue[bool] = queue.SimpleQueue()
    may, outputs = threading.Semaphore(0), []

    def listen() -> None:
        while not outputs or not outputs[-1].finish_reason:
            assert may.acquire(timeout=WAIT_S) and news.get(timeout=WAIT_S)
            outputs.append(answer.take())

    thread = threading.Thread(target=listen)
    thread.start()
    for at, token in enumerate(tokens):
        give(answer, token, at)
        news.put(True)
        may.release(1) if draws.random() < 0.4 else None
        if answer.end is not None:
            break
    else:
        answer.cut("abort")
        news.put(True)
    may.release(len(tokens) + 1)
    thread.join(WAIT_S)
    same(taken_at_once(how), outputs)


def test_what_is_never_taken_has_no_text_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless a stop string may be in it."""
    decoded: list[int] = []
    push = TextStream.push
    monkeypatch.setattr(TextStream, "push", lambda s, token, **how: (decoded.append(token), push(s, token, **how))[1])
    for how, expected in (("length", []), ("stop string that does not come", TEXT)):
        answer, tokens = made(how)
        for token in tokens:
            answer.accept(token)
        assert decoded == expected and answer.end is not None and answer.end.reason == "length"


def test_a_fault_that_is_found_late_ends_the_answer_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The listener lags behind the engine: what came before the fault is whole, and one increment says so."""
    answer, tokens = made("stop string that does not come")
    for token in tokens[:4]:
        answer.accept(token)
    monkeypatch.setattr(TextStream, "push", lambda *_, **__: 1 / 0)
    answer.accept(tokens[4])
    outputs = [answer.take() for _ in range(5)]
    assert [o.token_ids for o in outputs] == [*((token,) for token in tokens[:4]), ()]
    assert outputs[-1].error == "internal error: ZeroDivisionError" and answer.over
    assert [o.finish_reason for o in outputs] == [None] * 4 + ["error"]
    answer, tokens = made("length")  # where the fault is the listener's, it ends with its next token
    answer.accept(tokens[0])
    assert answer.take().finish_reason == "error" and answer.end is None
    answer.accept(tokens[1])
    assert answer.end is not None and answer.end.reason == "error"
    heard: list[Answer] = []
    answer.on_output = heard.append
    assert answer.tell() and not answer.tell() and not heard, "its listener knows already"


@pytest.mark.parametrize("stops", [("t", "e"), ("e", "t"), ("he", "th"), ("th", "he")])
def test_of_stop_strings_that_one_token_ends_the_first_in_the_text_counts(stops: tuple[str, ...]) -> None:
    [token] = LANGUAGE.tokenizer.encode(" the", add_special_tokens=False)
    first = min(stops, key=" the".index)
    stream = TextStream(LANGUAGE.detokenizer, stops)
    assert stream.push(token) == (" the"[: " the".index(first)], first)


@pytest.mark.parametrize("least", [0, 1, 2, 3, 4])
def test_an_end_counts_from_min_tokens_on(least: int) -> None:
    """It is one of them: as the least-th token it ends the answer, before it does not."""
    answer = prepare(PROMPT, SamplingParams(max_tokens=9, min_tokens=least), lambda answer: None, 0, 400, LANGUAGE)
    ended = []
    for at in range(4):
        answer.accept(2 if at else TEXT[0])
        ended.append(answer.end is not None)
        if ended[-1]:
            break
    assert ended == [False] * max(1, least - 1) + [True] * (least <= 4)


@pytest.mark.parametrize("seed", [0, 1 << 16, (1 << 40) + 3, (1 << 61) + 5])
def test_all_bits_of_a_requests_seed_are_kept(seed: int) -> None:
    answer = prepare(PROMPT, SamplingParams(seed=seed), lambda answer: None, 77, 400, LANGUAGE)
    assert answer.sequence.seed == seed
