"""Phrases and words of `word_problems`' questions."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Phrase:
    """Phrase with its operation on the running total: `total op number`, `~` being `number - total`.

    op: one of `+ - * / ~`, or `=` for none. constant: the number if the words imply it ("half"). heldout: not in
    training.
    """

    text: str
    op: str
    constant: int | None
    heldout: bool


@dataclass(frozen=True)
class Domain:
    """Phrases that go together. A start's first number is {a}; every other phrase's number is {b}."""

    starts: tuple[Phrase, ...]
    events: tuple[Phrase, ...]
    ends: tuple[Phrase, ...]


def _phrases(table: str) -> tuple[Phrase, ...]:
    """Parse one phrase per line: `?` if held out, the operation with its constant if any, the words.

    `[a|b]` in the words is either; MORE and SOME are names of such choices.
    """
    table = table.replace("MORE", "[{b}|{b} more|another {b}]").replace("SOME", "[{b} {o}|{b} of the {o}|{b} of them]")
    return tuple(
        Phrase(words, op, int(constant) if constant else None, bool(held))
        for held, op, constant, words in re.findall(r"^(\??)([-=+*/~])(\d*) (.+)$", table, re.MULTILINE)
    )


def each(words: str) -> tuple[str, ...]:
    """Return the words of a text."""
    return tuple(words.split())


def _domains(text: str) -> tuple[Domain, ...]:
    """Return the domains of phrases.txt, in its order."""
    tables: dict[str, dict[str, tuple[Phrase, ...]]] = {}
    for domain, kind, table in re.findall(r"^## (\w+) (\w+)\n(.*?)(?=^##|\Z)", text, re.MULTILINE | re.DOTALL):
        tables.setdefault(domain, {})[kind] = _phrases(table)
    return tuple(Domain(**kinds) for kinds in tables.values())


DOMAINS = _domains(Path(__file__).with_suffix(".txt").read_text())

NAMES = each("""
    Ada Alan Alice Amir Anna Ben Carla Chen Clara Daniel Diego Elena Emma Eva Felix Finn Grace Hana Hugo
    Ida Iris Ivan Jack James John Julia Kai Kofi Lara Lena Leo Lily Lucas Luna Maria Mary Max Maya Mia
    Mila Nina Noah Nora Olga Oliver Omar Oscar Paul Peter Priya Ravi Rosa Ruth Sam Sara Sofia Sven Tara
    Tom Uma Vera Victor Wei Yara Zoe
""")
OBJECTS = each("""
    apples bags balls balloons bananas beads bells books bottles bowls bricks brushes buttons cakes
    candles candies cards carrots chairs cookies cups dolls eggs flowers forks glasses grapes hats
    kites lamps leaves lemons magnets marbles mugs nails notebooks nuts oranges pears pencils pens pies
    plates plums postcards potatoes ribbons ropes rocks roses seeds shells shirts socks spoons stamps
    stickers stones tickets toys tomatoes tulips
""")
CONTAINERS = each("baskets boxes buckets cartons cases crates drawers jars packs sacks trays tins")
PLACE_NAMES = each("attic barn field forest garden hall house kitchen library market park room school store yard")
WHENS = (
    "",
    "then ",
    "later ",
    "soon ",
    "after that, ",
    "the next day ",
    "on Tuesday ",
    "on Friday ",
    "on Sunday ",
    "a week later ",
)
STOPS = ("", "then ", "later ", "soon ", "at the next stop ", "at the first stop ", "at the station ", "at the market ")
CURRENCIES = each("dollars euros pounds coins")
PURCHASES = each("bicycle book camera cap clock coat game guitar hat jacket kite lamp phone radio shirt ticket toy")
VEHICLES = each("bus train tram ferry boat ship plane")
WORKS = tuple(
    (pair.split("/")[0], pair.split("/")[1])
    for pair in each("""
        reads/pages bakes/cakes plants/trees paints/walls writes/letters runs/laps folds/shirts washes/plates
        makes/toys solves/puzzles draws/pictures picks/apples repairs/clocks builds/chairs sews/hats
    """)
)
"""Verbs with their objects."""
