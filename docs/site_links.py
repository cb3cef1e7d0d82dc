"""Pages of the documentation site that lie outside of docs/: the README, its first page, and what pages link to.

A hook of mkdocs. A link between two of them is written as files lie in the repository, and is rewritten for the site. A
link to anything else in the repository becomes its text: the site has no sources.
"""

from __future__ import annotations

import re
from pathlib import Path
from posixpath import dirname, normpath, relpath
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
OUTSIDE = {"README.md": "index.md"} | {
    name: name for name in ("CONTRIBUTING.md", "CHANGELOG.md", "LICENSE", "tests/README.md", "bench/README.md")
}
OUTSIDE |= {name: name for path in ROOT.glob("bench/results/*") if (name := str(path.relative_to(ROOT)))}
"""Files of the repository, and where the site has them."""
HERE = {there: name for name, there in OUTSIDE.items()}


def on_files(files: Files, config: Any) -> Files:
    for name, there in OUTSIDE.items():
        files.append(File.generated(config, there, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Any, files: Files, **_: Any) -> str:
    here = page.file.src_uri
    folder = dirname(HERE.get(here, f"docs/{here}"))

    def link(found: re.Match[str]) -> str:
        text, target, anchor = found.groups("")
        there = normpath(f"{folder}/{target}") if folder else normpath(target)
        if not (ROOT / there).exists():
            return found.group()  # for mkdocs to report
        there = OUTSIDE.get(there) or there.removeprefix("docs/")
        if files.get_file_from_path(there) is None:
            return text
        return f"[{text}]({relpath(there, dirname(here) or '.')}{anchor})"

    return re.sub(r"\[([^\]]*)\]\((?!\w+:)([^)#\s]+)(#[^)]*)?\)", link, markdown)
