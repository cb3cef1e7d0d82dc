"""Writes what a command measured."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from weft.tune.host import describe_host


def write_results(path: Path | None, what: str, found: Sequence[Any]) -> None:
    """Writes the `row()` of each figure, a line each, below the command that measured them and the host; nothing where
    there is no path, or nothing was found.
    """
    if path is None or not found:
        return
    head = json.dumps({"what": what, "host": describe_host()}, indent=1).removesuffix("\n}")
    lines = ",\n  ".join(json.dumps(each.row()) for each in found)
    path.write_text(f'{head},\n "rows": [\n  {lines}\n ]\n}}\n')
