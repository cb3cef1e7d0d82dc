"""Weft: placements, planned collectives, and a serving engine for parallel LLM inference.

A library user's names are here; a name is imported, and torch with it, when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weft.comm.transport import CommError, CommTimeout, PeerLost
    from weft.library.communicator import Communicator
    from weft.library.planned import Stream, plan, trace
    from weft.planner.spec import LayoutError, Mesh, Placement, PlacementError, Rows
    from weft.stream.hidden import Hidden
    from weft.stream.stream import GROUP, OWN, WORLD

    __version__: str

__all__ = [
    "GROUP",
    "OWN",
    "WORLD",
    "CommError",
    "CommTimeout",
    "Communicator",
    "Hidden",
    "LayoutError",
    "Mesh",
    "PeerLost",
    "Placement",
    "PlacementError",
    "Rows",
    "Stream",
    "plan",
    "trace",
]

_MODULES = {
    "weft.comm.transport": ("CommError", "CommTimeout", "PeerLost"),
    "weft.stream.hidden": ("Hidden",),
    "weft.library.communicator": ("Communicator",),
    "weft.library.planned": ("Stream", "plan", "trace"),
    "weft.planner.spec": ("LayoutError", "Mesh", "Placement", "PlacementError", "Rows"),
    "weft.stream.stream": ("GROUP", "OWN", "WORLD"),
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version  # 0.1 s, which few commands need

        try:
            return version("weft")
        except PackageNotFoundError:
            return "0+source"  # a source tree that is not installed
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(module), name)
    raise AttributeError(f"module 'weft' has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
