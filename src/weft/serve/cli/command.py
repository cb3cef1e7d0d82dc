"""Parts that commands share: the engine's options, and the parser that makes a command of a dataclass."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_type_hints

import tyro
from tyro import constructors

from weft.comm.transport_registry import AUTO, REFERENCE, TransportChoice, TransportName, transports
from weft.engine.assets import embedded_model_dir, preset_dir
from weft.engine.attention.backend_registry import ANY_BACKEND, BackendChoice, backends
from weft.engine.config.engine_options import EngineOptions, OptionGroup
from weft.engine.models.config_json.directory import explain_no_model, is_gguf, is_hub_name, packaged
from weft.plugins import PluginError
from weft.serve.cli.config_file import file_arguments
from weft.serve.cli.other_engines import hint, renamed
from weft.serve.cli.progress import startup_progress
from weft.serve.cli.ray_hosts import node_0
from weft.serve.cli.several_hosts import with_launcher
from weft.serve.http.log import LogFormat, LogStream

T = TypeVar("T")

WithRay = Annotated[
    bool,
    tyro.conf.arg(
        help="Start the agents of the other hosts (--nnodes 2 or more) on this host's Ray cluster (extra ray), "
        "instead of by hand."
    ),
]
MODEL_HELP = (
    "A Hugging Face model directory, a model's name on the hub (ORG/NAME), a GGUF file, or smollm2 (from a package); "
    "omitted: the embedded model."
)
ModelDir = Annotated[
    Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="[MODEL_DIR]", help=MODEL_HELP, help_behavior_hint="")
]
Revision = Annotated[
    str | None, tyro.conf.arg(help="Branch, tag or commit of a model on the hub; omitted: its main branch.")
]


class UserError(Exception):
    """Bad input: one line that says what to do."""


@contextmanager
def user_errors(kind: type[Exception] = ValueError) -> Iterator[None]:
    """Raise errors of a kind in this context as UserErrors with the same line."""
    try:
        yield
    except kind as error:
        raise UserError(str(error)) from error


@dataclass(frozen=True)
class SourceOptions(OptionGroup):
    """Source of the model, other than MODEL_DIR."""

    preset: str | None = None
    """Published config to use instead of MODEL_DIR, such as qwen3-30b-a3b; running it requires --load-format dummy."""
    revision: Revision = None


@dataclass(frozen=True)
class EngineArguments(EngineOptions, SourceOptions):
    """Options of a command that runs a model, except MODEL_DIR."""

    def check_with(self, model: Path | None) -> None:
        """Check the options and the model directory as far as possible without torch. Raises UserError."""
        if self.preset is not None and self.load_format != "dummy":
            add = "add --load-format dummy to make some up"
            raise UserError(f"--preset {self.preset} is a shape without weights; {add}")
        _without_hub(model, self.preset, self.revision)
        with user_errors():
            self.check()

    def values(self) -> dict[str, Any]:
        """Return the options that EngineConfig accepts, by name."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(EngineOptions)}

    def arguments(self) -> list[str]:
        """Return command-line arguments for the options that differ from their defaults."""
        result: list[str] = []
        for field in dataclasses.fields(self):
            value, name = getattr(self, field.name), field.name.replace("_", "-")
            if value != field.default:
                values = map(str, value if isinstance(value, tuple) else (value,))
                result += [f"--no-{name}"] if value is False else [f"--{name}", *([] if value is True else values)]
        return result


def parse(command: type[T], name: str, arguments: list[str], default: T | None = None) -> T:
    """Return the `command` called `name` from its `arguments`; its docstring is the help. default: for omitted options.

    Raises UserError before `run` imports torch: for options of other engines, and for an impossible model or layout.
    """
    arguments, old_names = renamed(arguments, name)
    for line in old_names:
        print(f"weft: {line}", file=sys.stderr)
    hints = get_type_hints(command)
    starts_engine = hints.get("engine") is EngineArguments
    if starts_engine and (advice := hint(arguments)) is not None:
        raise UserError(advice)
    file = _value_of("--config", arguments) if "config" in hints else []
    written, fault = file_arguments(Path(file[0]), command) if file else ([], None)
    if isinstance(sys.stderr, LogStream):
        sys.stderr.log_format = requested_format([*written, *arguments])
    if fault is not None:
        raise UserError(fault)
    shown: dict[str, Any] = {"prog": f"weft {name}", "description": inspect.getdoc(command)}
    shown["registry"] = _registry([*written, *arguments])
    shown["config"] = (tyro.conf.OmitArgPrefixes,)
    if default is not None:
        shown["default"] = default
    if written:
        try:
            shown["default"] = tyro.cli(command, args=written, **shown)
        except SystemExit as error:
            raise UserError(f"this is an option of --config {file[0]}") from error
    parsed: Any = tyro.cli(command, args=arguments, **shown)
    if starts_engine:
        parsed.engine.check_with(parsed.model)
    return parsed


def _registry(arguments: Sequence[str]) -> constructors.ConstructorRegistry:
    """Return tyro's rules for names of transports and attention backends, also from --plugins, and for option groups.

    Raises UserError.
    """
    plugins = _value_of("--plugins", arguments)
    with user_errors(PluginError):
        known, attention = tuple(transports(plugins)), tuple(backends(plugins))
    names: dict[Any, tuple[str, ...]] = {
        TransportName: (*known, REFERENCE.option),
        TransportChoice: (AUTO, *known),
        BackendChoice: (ANY_BACKEND, *attention),
    }
    result, reading = constructors.ConstructorRegistry(), list[Any]()

    def others(get: Callable[[Any], Any], asked: Any) -> Any:
        """Return the spec of a type by the other rules, to which it is left; None if they ask for it."""
        if asked.type in reading:
            return None
        reading.append(asked.type)
        spec = get(asked)
        reading.pop()
        return spec

    @result.primitive_rule
    def choose(asked: constructors.PrimitiveTypeInfo) -> constructors.PrimitiveConstructorSpec[Any] | None:
        if asked.type not in names:
            return None
        literal: Any = Literal.__getitem__(names[asked.type])
        as_literal = constructors.PrimitiveTypeInfo.make(literal, asked.markers)
        return constructors.ConstructorRegistry.get_primitive_spec(as_literal)  # type: ignore[return-value]

    @result.primitive_rule
    def optional(asked: constructors.PrimitiveTypeInfo) -> constructors.PrimitiveConstructorSpec[Any] | None:
        if type(None) not in get_args(asked.type):
            return None
        spec = others(constructors.ConstructorRegistry.get_primitive_spec, asked)
        if not isinstance(spec, constructors.PrimitiveConstructorSpec):
            return None
        return dataclasses.replace(spec, metavar=spec.metavar.removeprefix("{None}|").replace("{None,", "{"))

    @result.struct_rule
    def in_groups(asked: constructors.StructTypeInfo) -> constructors.StructConstructorSpec | None:
        if asked.type is not EngineArguments:
            return None
        default = asked.default if isinstance(asked.default, EngineArguments) else EngineArguments()
        fields = []
        for group in EngineArguments.groups():
            heading = tyro.conf.arg(name=group.__name__.removesuffix("Options").lower(), prefix_name=False)
            shown: Any = Annotated[group, heading]
            fields.append(constructors.StructFieldSpec(group.__name__, shown, group.of(default)))
        return constructors.StructConstructorSpec(joined, tuple(fields))

    def joined(**groups: OptionGroup) -> EngineArguments:
        return EngineArguments(**{name: value for group in groups.values() for name, value in vars(group).items()})

    @result.struct_rule
    def with_paragraphs(asked: constructors.StructTypeInfo) -> constructors.StructConstructorSpec | None:
        spec = others(constructors.ConstructorRegistry.get_struct_spec, asked)  # tyro's keeps a docstring's line ends
        if not isinstance(spec, constructors.StructConstructorSpec):
            return None
        fields = (dataclasses.replace(field, helptext=partial(_paragraph, field.helptext)) for field in spec.fields)
        return dataclasses.replace(spec, fields=tuple(map(_without_none, fields)))

    return result


def _without_none(field: constructors.StructFieldSpec) -> constructors.StructFieldSpec:
    """Return a field without an empty default in the help: its text says what happens where it is omitted."""
    if field.default not in (None, ()):
        return field
    shown: Any = Annotated[field.type, tyro.conf.arg(help_behavior_hint="")]
    return dataclasses.replace(field, type=shown)


def _paragraph(text: str | Callable[[], str | None] | None) -> str | None:
    text = text() if callable(text) else text
    return text and " ".join(text.split())


def _value_of(option: str, arguments: Sequence[str]) -> list[str]:
    """Return the values of one option before the others are parsed."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(option, f"--{option[2:].replace('-', '_')}", nargs="*", default=[], dest="values")
    return list(parser.parse_known_args(arguments)[0].values)


def requested_format(arguments: Sequence[str]) -> LogFormat:
    """Return the log format of a command line before it is parsed, so that its errors have this format too."""
    return "json" if _value_of("--log-format", arguments)[:1] == ["json"] else "text"


def check_writable(path: Path, option: str) -> None:
    """Raise UserError unless a file can be written, before anything is measured for it. Leaves no file behind."""
    new = not path.exists()
    try:
        path.open("a").close()  # only an attempt shows a read-only folder, file or file system, for root too
        if new:
            path.unlink()
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; choose another file with {option}") from error


def model_dir(
    model: Path | None, preset: str | None = None, revision: str | None = None, *, weights: bool = True
) -> Path:
    """Return the directory or file of a `model` given by path, name or `preset`; else of the embedded model.

    Args:
        revision: branch, tag or commit of a model on the hub, which is downloaded unless the cache has it.
        weights: also fetch the weights, not only config.json.

    Raises UserError.
    """
    if (result := _without_hub(model, preset, revision)) is not None:
        return result
    from weft.engine.models.weights.hub import snapshot

    with user_errors(), startup_progress() as start:
        start.what = f"fetching {model} from the hub"
        return snapshot(str(model), revision, weights=weights)


def model_name(model: Path | None, found: Path) -> str:
    """Return the name of a model for users: `model` unless it is a path, else of `found`, the result of `model_dir`."""
    if model is not None and not model.exists():
        return str(model)
    return found.stem if is_gguf(found) else found.resolve().name


def _without_hub(model: Path | None, preset: str | None, revision: str | None) -> Path | None:
    """Return the directory of a model on this host; None for a name on the hub. Raises UserError."""
    if model is not None and preset is not None:
        raise UserError(f"give {model} or --preset {preset}, not both")
    if model is not None and is_hub_name(model):
        return None
    if revision is not None:
        raise UserError(f"--revision {revision} requires a model on the hub, ORG/NAME")
    with user_errors():
        result = packaged(model or embedded_model_dir()) if preset is None else preset_dir(preset)
    if (why := explain_no_model(result)) is not None:
        raise UserError(why)
    return result


def engine_config(model: Path | None, engine: EngineArguments, *, ray: bool = False, **options: Any) -> Any:
    """Return the EngineConfig of `model` and `engine`. ray: start agents by Ray. Raises UserError, LayoutError."""
    from weft.engine.config.config import EngineConfig

    with user_errors():
        given = engine.values() | options
        values = with_launcher(node_0(given) if ray else given, os.environ)
        weights = engine.load_format != "dummy"
        result = model_dir(model, engine.preset, engine.revision, weights=weights)
        if draft := values.get("draft_model"):
            values["draft_model"] = model_dir(draft, weights=weights)
        return EngineConfig(model=result, **values)


def stop_on_sigterm() -> None:
    """Let SIGTERM end the command like Ctrl-C, so that everything it has started is stopped first."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
