"""The command line: one file a command."""

from __future__ import annotations

import sys


def run() -> int:
    """`weft`; one line where the packages of the commands are not installed. Gives the exit code."""
    try:
        from weft.cli.main import main
    except ModuleNotFoundError as error:
        if (error.name or "weft").split(".")[0] == "weft":
            raise
        print(f"weft: commands need the package {error.name}; pip install 'weft[engine]'", file=sys.stderr)
        return 2
    return main()
