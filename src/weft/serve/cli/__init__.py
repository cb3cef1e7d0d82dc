"""Command line, with one file per command."""

from __future__ import annotations

import os
import signal
import sys

SIGNALS = (signal.SIGTERM, signal.SIGINT)


def run() -> int:
    """Run `weft` and return the exit code; a missing package of the commands becomes one line."""
    serves = sys.argv[1:2] == ["serve"]
    if serves:  # its own handlers are set after its imports; until then nothing has to be stopped
        for number in SIGNALS:
            signal.signal(number, lambda number, frame: os._exit(0))
    try:
        from weft.serve.cli.main import main
    except ModuleNotFoundError as error:
        if (error.name or "weft").split(".")[0] == "weft":
            raise
        print(f"weft: commands need the package {error.name}; pip install 'weft[engine]'", file=sys.stderr)
        return 2
    code = main()
    if serves:  # the interpreter's exit takes a while, and a second signal would kill it
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
    return code
