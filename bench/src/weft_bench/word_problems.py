"""Arithmetic word problems, made on demand: an English question, a worked solution, a whole-number answer.

A question is a start, some events and an end, each a phrase of one domain that performs at most one of `+ - × ÷` on the
running total. Two things keep the splits apart, both at once:

- phrases: every held-out question has at least one phrase that no training question has;
- numbers: the tuple of numbers that a question states belongs, by a hash, to one split only.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal

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
    each,
)

ProblemSplit = Literal["train", "heldout"]

LIMIT = 200
"""Upper limit of every number in a problem, with intermediate results and the answer; the minimum is 2."""

MAX_STEPS = 4


@dataclass(frozen=True)
class Problem:
    """Problem. solution: one equation per step, then the answer in digits and words, which `extract` reads."""

    question: str
    solution: str
    answer: int


_SYMBOLS = {"+": "+", "-": "-", "*": "×", "/": "÷", "~": "-"}


def generate(split: ProblemSplit, count: int, seed: int) -> list[Problem]:
    """Return `count` problems of 1 to 4 steps; equal arguments give the same list, which may repeat a problem."""
    rng = random.Random(f"{split} {seed}")
    problems: list[Problem] = []
    while len(problems) < count:
        problem = _make(rng, split)
        if problem is not None:
            problems.append(problem)
    return problems


def number_split(question: str) -> ProblemSplit:
    """Return the split of the numbers stated in a question, in order: one in eight is held out."""
    stated = ",".join(re.findall(r"\d+", question))
    return "heldout" if blake2b(stated.encode(), digest_size=1).digest()[0] < 32 else "train"


def prompt(question: str) -> list[dict[str, str]]:
    """Return the chat messages that ask a question."""
    return [{"role": "user", "content": question}]


def extract(text: str) -> int | None:
    """Return the answer at the end of a reply; None if there is none or its digits and its words disagree."""
    found = re.findall(r"The answer is (\d{1,6}) \(([a-z -]+)\)", text)
    if not found:
        return None
    digits, words = found[-1]
    value = int(digits)
    return value if str(value) == digits and number_words(value) == words else None


_SMALL = each(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen"
)
_TENS = each("twenty thirty forty fifty sixty seventy eighty ninety")


def number_words(n: int) -> str:
    """Return 0 ≤ n < 1,000,000 in English: 125 is "one hundred twenty-five". Raises ValueError outside."""
    if not 0 <= n < 1_000_000:
        raise ValueError(f"no words for {n}: give a number from 0 to 999999")
    if n < 20:
        return _SMALL[n]
    if n < 100:
        return _TENS[n // 10 - 2] + (f"-{_SMALL[n % 10]}" if n % 10 else "")
    unit, name = (1000, "thousand") if n >= 1000 else (100, "hundred")
    return f"{number_words(n // unit)} {name}" + (f" {number_words(n % unit)}" if n % unit else "")


def _make(rng: random.Random, split: ProblemSplit) -> Problem | None:
    """Return a problem, or None if the numbers do not work out or belong to the other split."""
    phrases = _template(rng, split)
    if phrases is None:
        return None
    words = _words(rng)
    total = _first(rng, phrases[0].op)
    said: list[str] = []
    steps: list[str] = []
    for phrase in phrases:
        other = phrase.constant or _operand(rng, phrase.op, total)
        said.append(_say(rng, phrase, {**words, "a": str(total), "b": str(other)}))
        if phrase.op == "=":
            continue
        result = None if other is None else _apply(phrase.op, total, other)
        if result is None:
            return None
        left, right = (other, total) if phrase.op == "~" else (total, other)
        steps.append(f"{left} {_SYMBOLS[phrase.op]} {right} = {result}.")
        total = result
    question = " ".join(said)
    if number_split(question) != split:
        return None
    return Problem(question, f"{' '.join(steps)} The answer is {total} ({number_words(total)}).", total)


def _template(rng: random.Random, split: ProblemSplit) -> list[Phrase] | None:
    domain = rng.choice(DOMAINS)
    starts, events, ends = (
        [phrase for phrase in kind if split == "heldout" or not phrase.heldout]
        for kind in (domain.starts, domain.events, domain.ends)
    )
    start, end = rng.choice(starts), rng.choice(ends)
    between = rng.randint(1, MAX_STEPS) - (start.op != "=") - (end.op != "=")
    if between < 0:
        return None
    phrases = [start, *rng.sample(events, between), end]
    return phrases if split == "train" or any(p.heldout for p in phrases) else None


def _say(rng: random.Random, phrase: Phrase, slots: dict[str, str]) -> str:
    chosen = re.sub(r"\[(.*?)\]", lambda either: rng.choice(either[1].split("|")), phrase.text)
    said = chosen.format(**slots, when=rng.choice(WHENS), stop=rng.choice(STOPS))
    return said[0].upper() + said[1:]


def _words(rng: random.Random) -> dict[str, str]:
    name, other = rng.sample(NAMES, 2)
    does, work = rng.choice(WORKS)
    return {
        "n": name,
        "m": other,
        "o": rng.choice(OBJECTS),
        "k": rng.choice(CONTAINERS),
        "p": f"in the {rng.choice(PLACE_NAMES)}",
        "c": rng.choice(CURRENCIES),
        "t": rng.choice(PURCHASES),
        "v": rng.choice(VEHICLES),
        "does": does,
        "w": work,
    }


def _first(rng: random.Random, op: str) -> int:
    small = op == "*" or rng.random() < 0.3
    return rng.randint(2, 12 if small else 99)


def _operand(rng: random.Random, op: str, total: int) -> int | None:
    """Return a number that keeps the result from 2 to LIMIT - 1; None if there is none, or none is needed."""
    if op in "*/":
        fits = [n for n in range(2, 13) if _apply(op, total, n) is not None]
        return rng.choice(fits) if fits else None
    if op == "=":
        return None
    low, high = {"+": (2, LIMIT - 1 - total), "-": (2, total - 2), "~": (total + 2, LIMIT - 1)}[op]
    if op == "+":
        high = min(high, 99)
    return rng.randint(low, high) if low <= high else None


def _apply(op: str, total: int, other: int) -> int | None:
    """Return the result; None if it is not a whole number from 2 to LIMIT - 1."""
    if op == "/" and total % other:
        return None
    results = {"+": total + other, "-": total - other, "~": other - total, "*": total * other, "/": total // other}
    return results[op] if 2 <= results[op] < LIMIT else None
