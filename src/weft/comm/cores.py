"""Cores of this host and the caches that they share, as Linux shows them in /sys."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from pathlib import Path

MAX_CORES = 1 << 16
"""Upper bound of a core's number: more than Linux has, so that a mistyped range cannot fill memory."""
CPUS = Path("/sys/devices/system/cpu")


def share_a_cache(cores: Collection[int], cpus: Path = CPUS) -> bool:
    """Return True if one cache of level 2 or 3 serves all cores; False if the system does not say."""
    levels = (cpus / f"cpu{min(cores)}" / "cache").glob("index*")
    shared = [text_of(index / "shared_cpu_list") for index in levels if text_of(index / "level") not in ("", "1")]
    return any(set(cores) <= core_list(text) for text in shared if text)


def own_cores(cpus: Path = CPUS) -> dict[int, list[int]]:
    """Return one CPU of each core that this process may use, by NUMA node: hyperthreads share what computes."""
    cores, nodes = set[str](), dict[int, list[int]]()
    for cpu in sorted(os.sched_getaffinity(0)):
        core = text_of(cpus / f"cpu{cpu}" / "topology" / "thread_siblings_list") or str(cpu)
        if core not in cores:
            node = next((each.name[4:] for each in (cpus / f"cpu{cpu}").glob("node[0-9]*")), "0")
            nodes.setdefault(int(node), []).append(cpu)
        cores.add(core)
    return nodes


def text_of(path: Path) -> str:
    """Return a file's text, stripped; an empty one if it cannot be read."""
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


def core_text(cores: Iterable[int]) -> str:
    """Return the list that `core_list` reads, such as `0-3,8`."""
    found = set(cores)
    firsts, lasts = (sorted(core for core in found if core + step not in found) for step in (-1, 1))
    return ",".join(f"{a}-{b}" if a < b else str(a) for a, b in zip(firsts, lasts, strict=True))
