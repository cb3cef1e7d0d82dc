"""What the pages, the README and the sources' own texts name is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from weft.models.registry import FAMILIES

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "weft"
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


def sources() -> list[Path]:
    return [path for suffix in ("py", "h", "cc", "cu", "cuh") for path in SOURCE.rglob(f"*.{suffix}")]


def resolves(name: str) -> bool:
    """Whether `weft.a.b.C.d` names a module, or what a module of its beginning has in its text."""
    parts = name.split(".")[1:]
    for length in range(len(parts), 0, -1):
        stem = SOURCE.joinpath(*parts[:length])
        for module in (stem.with_suffix(".py"), stem / "__init__.py"):
            if module.exists():
                return all(re.search(rf"\b{part}\b", module.read_text()) for part in parts[length:])
    return False


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("weft.place.cost", True),
        ("weft.server.errors.ApiError.response", True),
        ("weft.server.nothing", False),
        ("weft.kv.cache.Nothing", False),
    ],
)
def test_names_that_resolve(name: str, known: bool) -> None:
    assert resolves(name) is known


def test_modules_that_are_named_exist() -> None:
    """`weft.x.y` in comments, docstrings and pages, and `folder/file.py` of the package, or of its tests."""
    folders = "|".join(sorted(path.name for path in SOURCE.iterdir() if path.is_dir()))
    wrong = []
    for path in (*PAGES, *sources()):
        text = path.read_text()
        wrong += [(path.name, n) for n in re.findall(r"(?<=`)weft(?:\.\w+)+(?=`)", text) if not resolves(n)]
        for name in re.findall(rf"(?<![\w./])(?:{folders})/\w+\.(?:py|h|cc|cu|cuh)\b", text):
            if not any((folder / name).exists() for folder in (SOURCE, SOURCE / "kernels", ROOT / "tests")):
                wrong.append((path.name, name))
    assert not wrong


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
