"""`--config FILE`: a command's options in YAML, by the names that they have on the command line."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import yaml

from weft.cli.other_engines import ADVICE, RENAMED

MODEL = "model"
"""The key of the one argument that has no name on the command line."""


def file_arguments(file: Path, command: type) -> list[str]:
    """Return the options of a file as arguments of its command. A list is several values, an object is JSON.

    Scalars are passed on as they are written, so that `off` stays a word and each option reads its own type.

    Raises ValueError in one line, with the place in the file.
    """
    try:
        root = yaml.compose(file.read_text(), Loader=yaml.SafeLoader)
    except OSError as error:
        raise ValueError(f"--config {file} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"--config {file} is not YAML: {' '.join(str(error).split())}") from error
    if root is None:
        return []
    if not isinstance(root, yaml.MappingNode):
        raise ValueError(f"--config {file} must hold options by their names, such as `port: 8000`")
    kinds, found = dict(_options(command)) | {MODEL: Path}, list[str]()
    for key, value in root.value:
        name, where = str(key.value).replace("_", "-"), f"--config {file}, line {key.start_mark.line + 1}"
        name = RENAMED.get(name, name)
        if name not in kinds or name == "config":
            advice = f"; in Weft it is {ADVICE[name]}" if name in ADVICE else "; see weft serve --help"
            raise ValueError(f"{where}: there is no option {name!r}{advice}")
        if value.tag == "tag:yaml.org,2002:null":
            continue
        if kinds[name] is bool:
            found.append(f"--{name}" if _truth(value, f"{where}: {name}") else f"--no-{name}")
        else:
            found += _values(value) if name == MODEL else [f"--{name}", *_values(value)]
    return found


def _options(command: type) -> Iterator[tuple[str, Any]]:
    """Names of a command's options and their types, with those of groups."""
    hints = get_type_hints(command)
    for each in dataclasses.fields(command):
        if dataclasses.is_dataclass(hints[each.name]):
            yield from _options(hints[each.name])
        else:
            yield each.name.replace("_", "-"), hints[each.name]


def _values(node: yaml.Node) -> list[str]:
    if isinstance(node, yaml.SequenceNode):
        return [text for item in node.value for text in _values(item)]
    if isinstance(node, yaml.MappingNode):
        return [json.dumps(yaml.safe_load(yaml.serialize(node)))]
    return [str(node.value)]


def _truth(node: yaml.Node, what: str) -> bool:
    value = yaml.safe_load(yaml.serialize(node))
    if not isinstance(value, bool):
        raise ValueError(f"{what} is {value!r}; it must be true or false")
    return value
