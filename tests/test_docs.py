"""What the pages and the README name is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from weft.models.registry import FAMILIES

ROOT = Path(__file__).parents[1]
IN_CELL = re.compile(r"`(?:\w+/)?(\w+\.(?:py|h|cc|cu|cuh))`").findall
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


def test_the_map_names_every_module() -> None:
    """But for commands, families of models and Triton's kernels, which are a file each by their names."""
    text = (ROOT / "docs" / "design.md").read_text()
    named = {(folder, name) for folder, cell in re.findall(r"^\| `(\w+)/`(.*)$", text, re.M) for name in IN_CELL(cell)}
    families = {f"{read.__module__.rpartition('.')[2]}.py" for read in FAMILIES.values()}
    for module in (ROOT / "src" / "weft").glob("*/*.py"):
        folder, name = module.parent.name, module.name
        listed = folder == "cli" or name == "__init__.py" or (folder == "models" and name in families)
        assert listed or (folder, name) in named, f"docs/design.md does not name {folder}/{name}"
    for folder, name in named:
        assert list((ROOT / "src" / "weft" / folder).rglob(name)), f"docs/design.md names {folder}/{name}"
