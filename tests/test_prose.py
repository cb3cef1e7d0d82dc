"""Plain English that can be checked: how docstrings open, turns of phrase that hide their noun, and commit subjects."""

from __future__ import annotations

import ast
import re
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest

from test_layout import FILES, ROOT, name_of, parsed

OPENINGS = re.compile(r"(?:Of|What|As|Those|The same|By|For|In|Whether|How|Where|With|That|Which)\b")
TURNS = re.compile(r"\b(?:so many|beside|those of)\b")
MAX_OPENINGS, MAX_TURNS = 42, 86
"""Counts of today; they may only fall."""


def docstrings(path: Path) -> Iterator[str]:
    """Docstrings of modules, classes and functions, and the strings behind attributes."""
    for node in ast.walk(parsed(path)):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else []:
            match statement:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    yield text.strip()


def test_docstrings_open_with_a_verb_or_a_noun() -> None:
    bad = [f"{name_of(path)}: {text[:60]}" for path in FILES for text in docstrings(path) if OPENINGS.match(text)]
    assert len(bad) <= MAX_OPENINGS, bad[:20]


def test_turns_of_phrase_have_their_noun() -> None:
    found = [f"{name_of(path)}: {turn}" for path in FILES for turn in TURNS.findall(path.read_text())]
    assert len(found) <= MAX_TURNS, found[:20]


def test_bad_openings_are_found() -> None:
    assert (
        OPENINGS.match("Of a step.") and not OPENINGS.match("Officer of a step.") and not OPENINGS.match("Return it.")
    )


@pytest.mark.parametrize(
    ("subject", "wrong"),
    [
        ("Send rows by one call", 0),
        ("Embed the table of recipes", 0),
        ("Pass rows on", 0),
        ("Docs: no time is named that was not measured", 1),
        ("Adds a call; moves another", 2),
        ("x", 1),
        ("Measure " + "x" * 60, 1),
        ("Merge a branch; whatever", 0),
    ],
)
def test_commit_subjects(subject: str, wrong: int) -> None:
    problems = runpy.run_path(str(ROOT / ".ci" / "commit_subject.py"))["problems"]
    assert len(problems(subject)) == wrong, problems(subject)
