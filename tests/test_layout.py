"""The rules of the source tree: imports run one way, model files hold no communication, files stay small."""

from __future__ import annotations

import ast
import sys
import tomllib
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "weft"
ORDER = (
    "place",
    "plugins",
    "kernels",
    "comm",
    "dcp",
    "hidden",
    "stream",
    "kv",
    "attention",
    "models",
    "assets",
    "engine",
    "profiler",
    "evals",
    "bench",
    "server",
    "cli",
)
FILES = sorted(SOURCE.rglob("*.py"))


def part_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path.name}: relative import"
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_run_one_way(path: Path) -> None:
    part = part_of(path)
    if part == "__init__":
        return
    for name in imports(path):
        if name.startswith("weft.") and (other := name.split(".")[1]) in ORDER:
            assert ORDER.index(other) <= ORDER.index(part), f"{part} imports {name}"


@pytest.mark.parametrize("path", sorted((SOURCE / "place").glob("*.py")), ids=lambda p: p.name)
def test_place_imports_only_the_standard_library(path: Path) -> None:
    for name in imports(path):
        top = name.split(".")[0]
        assert top in sys.stdlib_module_names or name.startswith("weft.place"), name


@pytest.mark.parametrize("path", sorted((SOURCE / "models").glob("*.py")), ids=lambda p: p.name)
def test_models_hold_no_communication(path: Path) -> None:
    names = imports(path)
    assert not any(n.startswith(("torch.distributed", "weft.comm")) for n in names)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_files_stay_small(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 400


def test_the_wheel_holds_what_is_no_module() -> None:
    """Configs, weights, sources of kernels, cost tables, and the mark that the package has types."""
    project = tomllib.loads((SOURCE.parents[1] / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["weft"]
    held = {path for pattern in patterns for path in SOURCE.glob(pattern) if path.is_file()}
    assert SOURCE / "py.typed" in held
    beside = {p for p in SOURCE.rglob("*") if p.is_file() and p.suffix != ".py" and "__pycache__" not in p.parts}
    assert not beside - held
