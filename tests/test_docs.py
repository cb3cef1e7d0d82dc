"""What the pages and the README name is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_exist(page: Path) -> None:
    for name in re.findall(r"`((?:src|tests|benchmarks|examples)/[^`\s:]+)`", page.read_text()):
        assert list(ROOT.glob(name.removesuffix("/"))), name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tests_that_are_named_exist(page: Path) -> None:
    for file, test in re.findall(r"`([\w/]+\.py)::(\w+)`", page.read_text()):
        assert f"\ndef {test}(" in (ROOT / "tests" / file).read_text(), f"{file}::{test}"
