"""Loader of modules by name: model families, transports and attention backends from outside of Weft."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

DEFINES = {
    "FAMILIES": "a dict from model type to the reader of its config",
    "TRANSPORTS": "a tuple of weft.comm.transport_registry.TransportEntry",
    "ATTENTION_BACKENDS": "a tuple of weft.engine.attention.backend_registry.BackendEntry",
}


class PluginError(ValueError):
    """Plugin that is missing, or defines nothing that Weft supports: one line that says what to do."""


def load_plugins(names: Sequence[str]) -> Iterator[ModuleType]:
    """Yield the modules of importable names or of .py files, each with one or more of DEFINES.

    A plugin runs unrestricted: name only trusted ones. Raises PluginError.
    """
    for name in names:
        module = _load(name)
        if not any(hasattr(module, what) for what in DEFINES):
            wanted = " and no ".join(f"{what} ({form})" for what, form in DEFINES.items())
            raise PluginError(f"plugin {name} defines no {wanted}")
        yield module


def _load(name: str) -> ModuleType:
    try:
        if not name.endswith(".py"):
            return importlib.import_module(name)
        path = str(Path(name).resolve())  # also the module's name: files of one name in two folders are two modules
        if path not in sys.modules:
            spec = importlib.util.spec_from_file_location(path, path)
            assert spec is not None and spec.loader is not None
            sys.modules[path] = importlib.util.module_from_spec(spec)  # before it runs: its dataclasses look here
            try:
                spec.loader.exec_module(sys.modules[path])
            except BaseException:
                del sys.modules[path]
                raise
        return sys.modules[path]
    except Exception as error:
        ours = (__file__, importlib.__file__)
        frames = [
            f for f in traceback.extract_tb(error.__traceback__) if f.filename not in ours and f.filename[0] != "<"
        ]
        if not frames and isinstance(error, ImportError | OSError):  # nothing of it has run
            advice = "give a module's name or a .py file"
            raise PluginError(f"plugin {name} cannot be imported: {error}; {advice}") from error
        where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
        what = f"{type(error).__name__}: {' '.join(str(error).split())}{where}"
        raise PluginError(f"plugin {name} fails on import: {what}") from error
