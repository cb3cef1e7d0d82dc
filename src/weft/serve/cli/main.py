"""`weft`: run a command, and print each error that a user can correct as one line."""

from __future__ import annotations

import importlib
import logging
import os
import sys

from weft.planner.spec import LayoutError, PlacementError
from weft.serve.cli.command import UserError, parse
from weft.serve.cli.command_table import GROUPS, OF_BENCH, CommandEntry, commands, group_of
from weft.serve.http.log import print_error, requested_format, stderr_as_log


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
        module = importlib.import_module(entry.module)
        code = int(parse(module.Command, name, rest).run())
        sys.stdout.flush()
        return code
    except ModuleNotFoundError as error:
        package = (error.name or "weft").split(".")[0]
        if package.startswith("weft"):
            raise
        what = package if entry.extra is None else f"'weft[{entry.extra}]'"
        print_error(f"{name} needs the package {package}; pip install {what}")
        return 2
    except BrokenPipeError:  # the reader has closed the pipe, like `head`: Python must not flush into it at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
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
        if name != "serve":
            raise
        logging.getLogger("weft").critical("weft serve ends with an error", exc_info=error)
        return 1


def _unknown(name: str, known: list[str]) -> str:
    if name in OF_BENCH and not any(command.split()[0] == name for command in known):
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
