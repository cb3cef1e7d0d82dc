"""`weft`: run a command of Weft or of another distribution; each error that a user can correct is one line."""

from __future__ import annotations

import errno
import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import entry_points

from weft.planner.spec import LayoutError, PlacementError
from weft.serve.cli.command import UserError, parse, requested_format
from weft.serve.http.log import print_error, stderr_as_log

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
FULL = (errno.ENOSPC, errno.EDQUOT)
"""Errors of a full disk."""


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


def main(arguments: list[str] | None = None) -> int:
    """Run a command and return the exit code: 0, 1 for a failure, 2 for bad input."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage())
        return 0 if arguments else 2
    if arguments[0] in ("--version", "-V", "version"):
        from weft import __version__

        print(f"weft {__version__}")
        return 0
    known = commands(arguments[0])
    name = next((c for c in known if arguments[: len(c.split())] == c.split()), None)
    if name is None:
        group = f"{arguments[0]} "
        if arguments[1:2] in ([], ["-h"], ["--help"]) and any(command.startswith(group) for command in known):
            print(usage(group))
            return 0 if arguments[1:] else 2
        print(f"weft: {_unknown(arguments[0], list(known))}", file=sys.stderr)
        return 2
    rest = arguments[len(name.split()) :]
    if name == "serve":
        with stderr_as_log(requested_format(rest)):
            return run_command(name, known[name], rest)
    return run_command(name, known[name], rest)


def run_command(name: str, entry: CommandEntry, rest: list[str]) -> int:
    """Run one command with its arguments and return the exit code; errors that a user can correct become one line."""
    try:
        module = import_module(entry.module)
        code = int(parse(module.Command, name, rest).run())
        if sys.stdout is not None:  # it is None if the shell has closed it
            sys.stdout.flush()
        return code
    except ModuleNotFoundError as error:
        package = (error.name or "weft").split(".")[0]
        if package.startswith("weft"):
            raise
        what = package if entry.extra is None else f"'weft[{entry.extra}]'"
        print_error(f"{name} needs the package {package}; pip install {what}")
        return 2
    except BrokenPipeError:  # the reader has closed the pipe, like `head`
        _end_output()
        return 1
    except KeyboardInterrupt:
        return 130
    except UserError as error:
        print_error(error)
        return 2
    except (LayoutError, PlacementError) as error:
        print_error(error)
        return 2
    except Exception as error:
        # Imported late: `weft --help` and errors of options must not wait for torch.
        from weft.comm.transport import CommError
        from weft.engine.config.config import EngineError
        from weft.engine.models.config_json.fields import ModelError

        if isinstance(error, CommError | EngineError | ModelError):
            print_error(error)
            return 2 if isinstance(error, ModelError) else 1
        if isinstance(error, OSError) and error.errno in FULL:
            print_error(f"{name} cannot write {error.filename or 'its output'}: {error.strerror}")
            _end_output()
            return 1
        if name != "serve":
            raise
        logging.getLogger("weft").critical("weft serve ends with an error", exc_info=error)
        return 1


def _end_output() -> None:
    """Write the rest of the output, or drop it if that fails, as Python would fail again at exit."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _unknown(name: str, known: list[str]) -> str:
    listed = any(name in words for words in GROUPS.values())
    if listed and not any(command.split()[0] == name for command in known):
        return f"{name} is a command of weft-bench; pip install 'weft[bench]'"
    return f"no command {name!r}; one of {', '.join(known)}"


def usage(prefix: str = "") -> str:
    """Return the list of commands in groups, or of the commands with this prefix."""
    lines = ["weft: plan the collectives of parallel LLM inference, and serve models with them", ""]
    lines += ["usage: weft COMMAND [MODEL] [OPTIONS]", ""]
    known = {name: entry for name, entry in commands().items() if name.startswith(prefix)}
    for heading in GROUPS:
        shown = [f"  {name:19}{entry.summary}" for name, entry in known.items() if group_of(name) == heading]
        lines += [f"{heading}:", *shown, ""] if shown else []
    return "\n".join([*lines, "`weft COMMAND --help` explains a command. MODEL_DIR omitted: the embedded model."])


if __name__ == "__main__":
    sys.exit(main())
