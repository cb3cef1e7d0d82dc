"""Weft installs next to vLLM and SGLang: its requirements and theirs leave a version in common.

Their requirements lie in `metadata`, a file per version, copied from their wheels.
"""

from __future__ import annotations

import itertools
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
ENGINES = sorted((Path(__file__).parent / "metadata").glob("*.txt"))
OURS = {
    "core": PROJECT["dependencies"],
    "engine": PROJECT["optional-dependencies"]["engine"],
    "serve": PROJECT["optional-dependencies"]["serve"],
}


def in_common(one: SpecifierSet, other: SpecifierSet) -> bool:
    """Return whether some version is in both: one that either names, or the next after it."""
    named = [Version(s.version.removesuffix(".*")) for s in (*one, *other)]
    after = [Version(".".join(map(str, (*v.release[:-1], v.release[-1] + 1)))) for v in named]
    return not named or any(v in one and v in other for v in (*named, *after))


def clashes(ours: list[str], theirs: list[str]) -> list[str]:
    """Requirements of ours that rule out theirs, on this platform."""
    taken = [(canonicalize_name(r.name), r) for r in map(Requirement, theirs) if not r.marker or r.marker.evaluate()]
    pairs = itertools.product(map(Requirement, ours), taken)
    return [
        f"{mine} | {other}"
        for mine, (name, other) in pairs
        if canonicalize_name(mine.name) == name and not in_common(mine.specifier, other.specifier)
    ]


@pytest.mark.parametrize("engine", ENGINES, ids=[path.stem for path in ENGINES])
@pytest.mark.parametrize("part", OURS)
def test_weft_installs_beside_it(engine: Path, part: str) -> None:
    fields = [line.partition(": ") for line in engine.read_text().splitlines() if not line.startswith("#")]
    theirs = [value for name, _, value in fields if name == "Requires-Dist"]
    assert any(each.startswith("apache-tvm-ffi==") for each in theirs)  # what once could not be had
    assert clashes(OURS[part], theirs) == []
    python = next(SpecifierSet(value) for name, _, value in fields if name == "Requires-Python")
    assert in_common(SpecifierSet(PROJECT["requires-python"]), python)


def test_a_pin_that_is_ruled_out_is_found() -> None:
    assert clashes(["apache-tvm-ffi>=0.1.11,<0.2"], ["apache-tvm-ffi==0.1.10"])
    assert clashes(["transformers>=5.0,<6"], ["transformers<5,>=4.9"])
    assert not clashes(["torch>=2.11,<2.16", "numpy>=1.26"], ["torch==2.14.0", "numpy"])


def test_the_core_is_small() -> None:
    """Who wants the communicator alone gets no tokenizers, templates or servers."""
    assert {Requirement(each).name for each in OURS["core"]} == {"torch", "apache-tvm-ffi", "numpy"}
