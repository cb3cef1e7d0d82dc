"""The command `make chaos ARGS="…"`: `python -m chaos` with tests/ on Python's path."""

from __future__ import annotations

import sys

from weft.serve.cli.main import CommandEntry, run_command


def main(arguments: list[str]) -> int:
    """Run the command; return its exit code, as `weft` does."""
    return run_command("chaos", CommandEntry("", "chaos.cmd_chaos", None), arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
