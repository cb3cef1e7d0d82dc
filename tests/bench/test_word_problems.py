"""The problem generator: right arithmetic, splits that share neither phrases nor numbers, strict reading of answers."""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence

import pytest

from weft_bench.phrases import (
    CONTAINERS,
    CURRENCIES,
    DOMAINS,
    NAMES,
    OBJECTS,
    PLACE_NAMES,
    PURCHASES,
    STOPS,
    VEHICLES,
    WHENS,
    WORKS,
    Phrase,
)
from weft_bench.word_problems import LIMIT, extract, generate, number_split, number_words, prompt

OPERATIONS = {"+": operator.add, "-": operator.sub, "×": operator.mul, "÷": operator.floordiv}


@pytest.fixture(scope="module")
def train() -> list:
    return generate("train", 2000, seed=1)


@pytest.fixture(scope="module")
def heldout() -> list:
    return generate("heldout", 1000, seed=1)


def said(phrase: Phrase) -> str:
    """A pattern of all that the phrase can say."""
    words: dict[str, Sequence[str]] = {
        "n": NAMES,
        "m": NAMES,
        "o": OBJECTS,
        "k": CONTAINERS,
        "c": CURRENCIES,
        "t": PURCHASES,
        "v": VEHICLES,
    }
    words |= {"does": [does for does, _ in WORKS], "w": [work for _, work in WORKS], "when": WHENS, "stop": STOPS}
    words |= {"p": [f"in the {place}" for place in PLACE_NAMES], "a": [r"\d+"], "b": [r"\d+"]}
    slots = {slot: f"(?:{'|'.join(choices)})" for slot, choices in words.items()}
    text = re.escape(phrase.text).replace(r"\{", "{").replace(r"\}", "}")
    text = text.replace(r"\[", "(?:").replace(r"\]", ")").replace(r"\|", "|")
    return rf"(?:^|(?<=[.?] )){text.format(**slots)}(?= |$)"


def phrases(*, heldout: bool) -> list[re.Pattern[str]]:
    every = [p for d in DOMAINS for kind in (d.starts, d.events, d.ends) for p in kind]
    return [re.compile(said(p), re.IGNORECASE) for p in every if p.heldout is heldout]


def test_there_are_many_phrases_in_both_splits() -> None:
    assert len(phrases(heldout=False)) >= 150
    assert len(phrases(heldout=True)) >= 50


def test_no_training_question_has_a_heldout_phrase(train: list) -> None:
    unseen = phrases(heldout=True)
    for problem in train:
        assert not [p.pattern for p in unseen if p.search(problem.question)], problem.question


def test_every_heldout_question_has_a_phrase_of_its_own(heldout: list) -> None:
    unseen = phrases(heldout=True)
    for problem in heldout:
        assert any(p.search(problem.question) for p in unseen), problem.question


def test_the_splits_share_no_tuple_of_numbers(train: list, heldout: list) -> None:
    def numbers(problems: list) -> set[tuple[str, ...]]:
        return {tuple(re.findall(r"\d+", p.question)) for p in problems}

    assert not numbers(train) & numbers(heldout)
    assert {number_split(p.question) for p in heldout} == {"heldout"}


def test_the_same_arguments_give_the_same_problems() -> None:
    assert generate("heldout", 50, seed=3) == generate("heldout", 50, seed=3)
    assert generate("heldout", 50, seed=3)[:20] == generate("heldout", 20, seed=3)
    assert generate("heldout", 50, seed=3) != generate("heldout", 50, seed=4)


def test_solutions_are_right(train: list, heldout: list) -> None:
    for problem in train + heldout:
        steps = re.findall(r"(\d+) ([-+×÷]) (\d+) = (\d+)\.", problem.solution)
        assert 1 <= len(steps) <= 4
        for left, symbol, right, result in steps:
            assert OPERATIONS[symbol](int(left), int(right)) == int(result)
            assert symbol != "÷" or int(left) % int(right) == 0
            assert 2 <= int(result) < LIMIT
        assert int(steps[-1][3]) == problem.answer == extract(problem.solution)


def test_questions_read_well(train: list, heldout: list) -> None:
    for problem in train + heldout:
        assert re.fullmatch(r"(?:[A-Z0-9][\w ,-]*[.?] ?)+(?<=\?)", problem.question), problem.question
        assert "  " not in problem.question


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        ("5 + 3 = 8. The answer is 8 (eight).", 8),
        ("The answer is 1 (one). No: the answer is 2. The answer is 3 (three).", 3),
        ("The answer is 125 (one hundred twenty-five).", 125),
        ("The answer is 6 (seven).", None),
        ("The answer is 06 (six).", None),
        ("The answer is 6.", None),
        ("The answer is six (6).", None),
        ("6", None),
        ("", None),
    ],
)
def test_an_answer_counts_only_where_digits_and_words_agree(reply: str, answer: int | None) -> None:
    assert extract(reply) == answer


def test_every_number_has_its_own_words() -> None:
    assert [number_words(n) for n in (0, 13, 40, 99, 100, 101, 1000)] == [
        "zero",
        "thirteen",
        "forty",
        "ninety-nine",
        "one hundred",
        "one hundred one",
        "one thousand",
    ]
    assert len({number_words(n) for n in range(20_000)}) == 20_000
    with pytest.raises(ValueError, match="1000000"):
        number_words(1_000_000)


def test_a_prompt_is_one_user_message() -> None:
    assert prompt("How many?") == [{"role": "user", "content": "How many?"}]
