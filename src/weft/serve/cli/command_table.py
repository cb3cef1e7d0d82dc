"""The table of commands: Weft's own, and commands that other distributions add by entry points."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import entry_points

COMMANDS = {
    "serve": "serve a model over HTTP, OpenAI-compatible",
    "generate": "complete prompts on the terminal",
    "plan": "print the collectives that a layout needs, and what they cost",
    "diff": "find where two layouts part: the first read that differs, and the exchanges before it",
    "tune": "measure this host: the table by which the planner chooses",
    "doctor": "look at this host: what will be slow, and why",
}
EXTRAS = {"serve": "serve"}
"""The extra with the packages that a command imports beyond those of weft[engine]."""
OF_BENCH = ("bench", "profile", "reproduce", "eval", "demo")
"""First words of the commands of weft-bench, for an error that names it where it is not installed."""


@dataclass(frozen=True)
class CommandEntry:
    """A command: its line in `weft --help`, the module of its class Command, and the extra that it requires."""

    summary: str
    module: str
    extra: str | None


def commands(name: str | None = None) -> dict[str, CommandEntry]:
    """Return all commands in the order of `weft --help`; Weft's own alone where `name` is one of them.

    An entry point of the group `weft.commands` names a package with COMMANDS (from a command to its summary), EXTRAS,
    and a module cmd_NAME for each. Reading the installed distributions takes a tenth of a second.
    """
    found = _entries("weft.serve.cli", COMMANDS, EXTRAS)
    if name not in COMMANDS:
        for entry in entry_points(group="weft.commands"):
            package = import_module(entry.value)
            found |= _entries(entry.value, package.COMMANDS, package.EXTRAS)
    return found


def _entries(package: str, summaries: Mapping[str, str], extras: Mapping[str, str]) -> dict[str, CommandEntry]:
    return {
        name: CommandEntry(summary, f"{package}.cmd_{name.replace(' ', '_')}", extras.get(name))
        for name, summary in summaries.items()
    }
