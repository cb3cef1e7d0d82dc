"""Table of commands: Weft's own, and commands that other distributions add by entry points."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import entry_points

COMMANDS = {
    "serve": "serve a model over HTTP with OpenAI's API",
    "generate": "complete prompts on the terminal",
    "plan": "print the collectives of a layout and their predicted times",
    "advise": "choose a layout for a model, this host and a load",
    "tune": "measure this host's transports for the planner",
    "doctor": "check this host: what is missing, what will be slow, and why",
    "diff": "compare two layouts and find the first value that differs",
}
GROUPS = {
    "serve a model": ("serve", "generate", "demo"),
    "plan and tune": ("advise", "plan", "tune", "doctor", "diff"),
    "measure": ("bench", "profile", "reproduce", "eval"),
}
"""Headings of `weft --help`, with the first words of their commands; the last one also has all other commands."""
EXTRAS = {"serve": "serve"}
"""Extra of weft with the packages that a command imports in addition to weft[engine]."""
OF_BENCH = ("bench", "profile", "reproduce", "eval", "demo")
"""First words of the commands of weft-bench, for the error if it is not installed."""


@dataclass(frozen=True)
class CommandEntry:
    """Command: its line in `weft --help`, the module of its class Command, and the extra that it requires."""

    summary: str
    module: str
    extra: str | None


def commands(name: str | None = None) -> dict[str, CommandEntry]:
    """Return all commands in the order of `weft --help`; only Weft's own if `name` is one of them.

    An entry point of the group `weft.commands` names a package with COMMANDS (command → summary), EXTRAS and a module
    cmd_NAME per command. Reading the installed distributions takes a tenth of a second.
    """
    entries = _entries("weft.serve.cli", COMMANDS, EXTRAS)
    if name not in COMMANDS:
        for entry in entry_points(group="weft.commands"):
            package = import_module(entry.value)
            entries |= _entries(entry.value, package.COMMANDS, package.EXTRAS)
    return entries


def group_of(name: str) -> str:
    """Return the heading of a command in `weft --help`."""
    return next((heading for heading, words in GROUPS.items() if name.split()[0] in words), [*GROUPS][-1])


def _entries(package: str, summaries: Mapping[str, str], extras: Mapping[str, str]) -> dict[str, CommandEntry]:
    return {
        name: CommandEntry(summary, f"{package}.cmd_{name.replace(' ', '_')}", extras.get(name))
        for name, summary in summaries.items()
    }
