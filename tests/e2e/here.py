"""Commands in the tests' own process: each of its own would import torch for seconds."""

from __future__ import annotations

import contextlib
import io
import signal
from collections.abc import Callable

from weft.serve.cli import main


def weft_here(*arguments: str, command: Callable[[list[str]], int] = main.main) -> tuple[int, str, str]:
    """Exit code, stdout, stderr."""
    handler = signal.getsignal(signal.SIGTERM)
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            code = command(list(arguments))
        except SystemExit as end:
            code = int(end.code or 0)
        finally:
            signal.signal(signal.SIGTERM, handler)
    return code, out.getvalue(), err.getvalue()
