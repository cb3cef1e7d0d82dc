"""Two source trees, before and after, measured in turns: a machine that changes its mind does so for both."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


def environment_of(tree: Path) -> dict[str, str]:
    """Return the environment that lets Python import Weft from a source folder."""
    path = [str(tree.resolve()), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(path)}


def run_python(tree: Path, *arguments: str) -> str:
    """Run this Python with Weft of a source folder, and return its output. Raises CalledProcessError."""
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=environment_of(tree), stdout=subprocess.PIPE, text=True, check=True).stdout


def copy_of(script: str, tree: Path) -> str:
    """Return the copy of a script in the checkout of a source folder, which may be older than the folder bench/."""
    folders = (tree.parent / "bench" / "scripts", tree.parent / "benchmarks")
    return str(next(path for folder in folders if (path := folder / Path(script).name).exists()))


def alternate(runs: int, trees: Sequence[Any], run: Callable[[Any], Any]) -> dict[str, list[Any]]:
    """Return the results of `run` on both trees, each measured `runs` times and first in every other turn."""
    found: dict[str, list[Any]] = {"before": [], "after": []}
    for index in range(runs):
        for name, tree in sorted(zip(found, trees, strict=True), key=lambda named: named[0], reverse=index % 2 == 0):
            found[name].append(run(tree))
    return found
