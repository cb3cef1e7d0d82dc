"""Cores of this host and the caches that they share, as Linux shows them in /sys."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

MAX_CORES = 1 << 16
"""Upper bound of a core's number: more than Linux has, so that a mistyped range cannot fill memory."""
CPUS = Path("/sys/devices/system/cpu")


def share_a_cache(cores: Collection[int], cpus: Path = CPUS) -> bool:
    """Return True if one cache of level 2 or 3 serves all cores; False if the system does not say."""
    levels = (cpus / f"cpu{min(cores)}" / "cache").glob("index*")
    shared = [_text(index / "shared_cpu_list") for index in levels if _text(index / "level") not in ("", "1")]
    return any(set(cores) <= core_list(text) for text in shared if text)


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def core_list(text: str) -> set[int]:
    """Return the numbers of a list such as `0-3,8`. Raises ValueError for any other text, including an empty one."""
    cores: set[int] = set()
    for part in text.split(","):
        first, to, last = part.partition("-")
        run = range(int(first), int(last if to else first) + 1)
        if not run or run[-1] >= MAX_CORES:
            raise ValueError
        cores |= set(run)
    return cores
