"""Check a commit's subject: imperative, at most 64 characters, one change. Argument: the file with the message."""

from __future__ import annotations

import re
import sys
from pathlib import Path

MAX_CHARACTERS = 64
VERBS = {"Bring", "Embed", "Express", "Focus", "Process"}
"""Verbs in the imperative that look like other forms."""


def problems(subject: str) -> list[str]:
    """Return what is wrong with a subject, each as a short sentence; merges are exempt."""
    if subject.startswith(("Merge ", "Revert ", "fixup! ", "squash! ")):
        return []
    first = subject.split(" ", 1)[0]
    found = []
    if len(subject) > MAX_CHARACTERS:
        found.append(f"it has {len(subject)} characters; at most {MAX_CHARACTERS}")
    if ";" in subject:
        found.append("a semicolon joins two changes; make two commits")
    if subject.endswith("."):
        found.append("drop the full stop")
    if not first[:1].isupper():
        found.append("begin with a capital letter")
    if first not in VERBS and (re.search(r"(?:[^e]ed|ing|[^s]s)$", first) or not first.isalpha()):
        found.append(f"begin with a verb in the imperative, not {first!r}")
    return found


def main() -> int:
    subject = Path(sys.argv[1]).read_text().splitlines()[0]
    for problem in problems(subject):
        print(f"commit subject: {problem}", file=sys.stderr)
    return int(bool(problems(subject)))


if __name__ == "__main__":
    sys.exit(main())
