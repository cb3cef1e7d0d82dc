"""`--config FILE`: a command's options in YAML, with their names on the command line."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_origin, get_type_hints

import yaml

from weft.serve.cli.other_engines import ADVICE, RENAMED

MODEL = "model"
"""Key of MODEL_DIR, which has no name on the command line."""


def file_arguments(file: Path, command: type) -> tuple[list[str], str | None]:
    """Return the options of a file as arguments of its command, and a line about its first fault, or None.

    A list is several values, an object is JSON. Scalars are passed on unparsed, so that `off` stays a word and each
    option reads its own type. Options after a fault are returned too, as log-format may be one of them.
    """
    try:
        root = yaml.compose(file.read_text(), Loader=yaml.SafeLoader)
    except OSError as error:
        return [], f"--config {file} cannot be read: {error.strerror}"
    except (yaml.YAMLError, ValueError) as error:
        return [], f"--config {file} is not YAML: {' '.join(str(error).split())}"
    except RecursionError:
        return [], f"--config {file} is nested too deeply to be read"
    if root is None:
        return [], None
    if not isinstance(root, yaml.MappingNode):
        return [], f"--config {file} must hold options by their names, such as `port: 8000`"
    kinds, texts, faults = dict(_options(command)) | {MODEL: Path}, dict[str, list[str]](), list[str]()
    for key, value in root.value:
        name = str(key.value).replace("_", "-")
        name = RENAMED.get(name, name)
        try:
            if name in texts:
                raise ValueError(f"{name} is given twice; drop one")
            texts[name] = _arguments(name, kinds, value)
        except ValueError as error:
            faults.append(f"--config {file}, line {key.start_mark.line + 1}: {error}")
    return [text for option in texts.values() for text in option], next(iter(faults), None)


def _arguments(name: str, kinds: Mapping[str, Any], node: yaml.Node) -> list[str]:
    """Return the arguments of one option. Raises ValueError."""
    if name not in kinds or name == "config":
        advice = f"; in Weft it is {ADVICE[name]}" if name in ADVICE else "; see weft serve --help"
        raise ValueError(f"there is no option {name!r}{advice}")
    if node.tag == "tag:yaml.org,2002:null":
        return []
    if kinds[name] is bool:
        if not isinstance(value := _loaded(node, name), bool):
            raise ValueError(f"{name} is {value!r}; it must be true or false")
        return [f"--{name}" if value else f"--no-{name}"]
    if not isinstance(node, yaml.SequenceNode):
        text = _text(node, name)
        if name == MODEL:
            return [f"./{text}" if text.startswith("-") else text]
        return [f"--{name}={text}"]  # it may begin with a dash
    if get_origin(kinds[name]) is not tuple:
        raise ValueError(f"{name} takes one value, not a list")
    texts = [_text(item, name) for item in node.value]
    if len(texts) == 1:
        return [f"--{name}={texts[0]}"]
    if dashed := [text for text in texts if text.startswith("-")]:
        raise ValueError(f"{name} holds {dashed[0]!r}; in a list no value may begin with a dash")
    return [f"--{name}", *texts]


def _options(command: type) -> Iterator[tuple[str, Any]]:
    """Yield names and types of a command's options, including option groups."""
    hints = get_type_hints(command)
    for option in dataclasses.fields(command):
        if dataclasses.is_dataclass(hints[option.name]):
            yield from _options(hints[option.name])
        else:
            yield option.name.replace("_", "-"), hints[option.name]


def _text(node: yaml.Node, name: str) -> str:
    """Return a value as an argument. Raises ValueError."""
    if isinstance(node, yaml.SequenceNode):
        raise ValueError(f"{name} holds a list in a list; give single values")
    if isinstance(node, yaml.ScalarNode):
        return str(node.value)
    value = _loaded(node, name)
    try:
        return json.dumps(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} cannot be written as JSON: {' '.join(str(error).split())}") from error


def _loaded(node: yaml.Node, name: str) -> Any:
    try:
        return yaml.safe_load(yaml.serialize(node))
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"{name} cannot be read: {' '.join(str(error).split())}") from error
