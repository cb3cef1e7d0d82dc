"""Weft: placements, planned collectives, and a serving engine for parallel LLM inference.

What a library user needs is here by name; a name is imported, and torch with it, when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weft.comm.transport import CommError, CommTimeout, PeerLost
    from weft.library.communicator import Communicator
    from weft.place.spec import LayoutError, Mesh, PlacementError

__version__ = "0.1.0"
__all__ = ["CommError", "CommTimeout", "Communicator", "LayoutError", "Mesh", "PeerLost", "PlacementError"]

_MODULES = {
    "weft.comm.transport": ("CommError", "CommTimeout", "PeerLost"),
    "weft.library.communicator": ("Communicator",),
    "weft.place.spec": ("LayoutError", "Mesh", "PlacementError"),
}


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(module), name)
    raise AttributeError(f"module 'weft' has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
