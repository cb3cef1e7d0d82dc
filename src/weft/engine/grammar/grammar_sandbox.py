"""Sandbox process that compiles a grammar before the engine does.

llguidance may need minutes for a grammar of a hundred bytes, gigabytes, or all of the stack, which ends the process.
Its own limits prevent none of these. So a grammar is tried in a fork of a process with the tokenizer, under limits of
the kernel. The process must stay single-threaded, since it forks. It is a child of
`weft.engine.grammar.child_process`; each message is a JSON value:

  in    {"tokenizer": TEXT, "vocabulary": N, "ends": [TOKEN, …]}    once, for `llguidance.LLTokenizer`
        GRAMMAR                                                     for `llguidance.LLMatcher`
  out   {"bytes": N}                                                memory of the compiled grammar
        {"error": LINE}                                             why it cannot be used
"""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import sys
import threading
import weakref
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import llguidance

from weft.engine.grammar.child_process import ChildProcess, requests

CPU_S = 2.0
"""Seconds of CPU time for one grammar."""
MEMORY = 2**29
"""Bytes of address space to compile one grammar."""
STACK = 2**20
"""Bytes of stack of a thread that compiles here; the engine's threads have more, so a grammar compiles there too."""
LIMITS = llguidance.LLParserLimits(max_items_in_row=8192, initial_lexer_fuel=750_000, verbose_errors=False)
"""Limits within llguidance; 900 optional properties need 3,600 items."""
ENDED = {
    signal.SIGPROF: f"compiling it takes more than {CPU_S:g} s of a processor",
    signal.SIGSEGV: "it is nested too deeply, or has too many properties",
    signal.SIGABRT: f"compiling it takes more than {MEMORY >> 20} MiB",
}
"""Errors for forks ended by a signal."""


REGEX_ERROR = re.compile(r"regex parse error:\n {4}([^\n]*)\n {4}( *)\^+\nerror: ([^\n]*)")
"""Format of the regular expression parser's errors: the expression, a mark below the place, and the reason."""
REGEX_SHOWN = 40
"""Characters of a regular expression in an error."""


def one_line_error(error: str) -> str:
    """Return an error of llguidance in one line; for a regular expression, the reason and the place."""
    if (match := REGEX_ERROR.search(error)) is not None:
        at = len(match[2])
        return f"{match[3]} at character {at} of the regular expression, {match[1][at : at + REGEX_SHOWN]!r}"
    if "regex parse error:" in error and (reason := re.search(r"^error: (.*)", error, re.MULTILINE)) is not None:
        return f"{reason[1]} in the regular expression"
    return re.sub(r"^at \d+\(\d+\): failed to compile JSON schema: ", "", error.splitlines()[0])


class GrammarSandbox:
    """The controller's end. tokenizer: returns the line that describes the tokenizer, at the process's first start."""

    def __init__(self, tokenizer: Callable[[], dict[str, Any]]):
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._process: ChildProcess | None = None

    def bytes_of(self, grammar: str) -> int:
        """Return the memory of a compiled grammar. Raises ValueError in one line if it cannot be used."""
        with self._lock:
            reply = self._ask(grammar) or self._ask(grammar)  # retry once: the process itself may have been killed
        if reply is None:
            raise ValueError("it cannot be compiled")
        if "error" in reply:
            raise ValueError(reply["error"])
        return int(reply["bytes"])

    def _ask(self, grammar: str) -> dict[str, Any] | None:
        """Return the reply; None if the process has ended and must be started again."""
        try:
            if self._process is None:
                self._process = self._start()
            self._process.connection.send_bytes(json.dumps(grammar).encode())
            reply: dict[str, Any] = json.loads(self._process.connection.recv_bytes())
        except (BrokenPipeError, ConnectionResetError, EOFError):
            self._process = None
            return None
        return reply

    def _start(self) -> ChildProcess:
        process = ChildProcess("weft.engine.grammar.grammar_sandbox")
        weakref.finalize(self, process.kill)
        process.connection.send_bytes(json.dumps(self._tokenizer()).encode())
        return process


def main(connection: Connection, parent: int) -> None:
    """Try grammars until the parent process ends."""
    asked = requests(connection, parent)
    if (described := next(asked, None)) is None:
        return
    tokenizer = json.loads(described)
    tokens = llguidance.LLTokenizer(
        tokenizer["tokenizer"], n_vocab=tokenizer["vocabulary"], eos_token=tokenizer["ends"] or None
    )
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for grammar in asked:
        pid = os.fork()
        if pid == 0:
            _try_and_exit(tokens, json.loads(grammar), connection)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if code < 0:
            _say(connection, {"error": ENDED.get(signal.Signals(-code), "it cannot be compiled")})


def _try_and_exit(tokens: llguidance.LLTokenizer, grammar: str, connection: Connection) -> None:
    size = _pages()[0]
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, size + MEMORY))
    signal.setitimer(signal.ITIMER_PROF, CPU_S)  # its signal ends the process
    threading.stack_size(STACK)
    thread = threading.Thread(target=lambda: _say(connection, _tried(tokens, grammar)))
    thread.start()
    thread.join()
    os._exit(0)


def _tried(tokens: llguidance.LLTokenizer, grammar: str) -> dict[str, Any]:
    before = _own()
    matcher = llguidance.LLMatcher(tokens, grammar, log_level=0, limits=LIMITS)
    # Take one step too, since the parser fills its first row only then.
    mask = int.from_bytes(matcher.compute_bitmask(), "little")
    if mask:
        matcher.consume_token((mask & -mask).bit_length() - 1)
    if error := matcher.get_error():
        return {"error": one_line_error(error)}
    return {"bytes": max(_own() - before, len(grammar))}


def _own() -> int:
    """Return the resident bytes that map no file."""
    _, resident, of_files, *_ = _pages()
    return resident - of_files


def _pages() -> list[int]:
    """Return bytes of this process: address space, resident, resident of files, and others."""
    with open("/proc/self/statm") as file:
        return [int(pages) * resource.getpagesize() for pages in file.read().split()]


def _say(connection: Connection, what: dict[str, Any]) -> None:
    connection.send_bytes(json.dumps(what).encode())


if __name__ == "__main__":
    main(Connection(int(sys.argv[1])), int(sys.argv[2]))
