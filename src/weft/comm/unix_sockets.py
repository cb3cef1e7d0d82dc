"""Addresses of Unix sockets at paths of any length."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def address_of(path: Path) -> Iterator[str]:
    """Yield an address to bind or connect at a path of any length. Raises OSError if its folder does not exist.

    Linux limits an address to 107 bytes. This one goes through a descriptor of the folder: its permissions still hold.
    """
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
