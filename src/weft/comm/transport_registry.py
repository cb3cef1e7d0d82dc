"""Table of transports: a row for each, and the rows that plugins add.

Options, help texts, errors and offers follow from a transport's row before it is built. The table does not import
torch, so that command lines parse quickly: a transport's module is imported when it is opened.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from weft.comm import peer_launch
from weft.planner import exchange as exchanges
from weft.planner.exchange import Exchange
from weft.planner.spec import LayoutError, Mesh
from weft.plugins import PluginError, load_plugins

if TYPE_CHECKING:
    import torch

AUTO = "auto"
"""Option that enables every transport of a device with `auto` in its row; the planner chooses among them."""


class TransportName(str):
    """Option of the table of transports, with the plugins' rows."""


class TransportChoice(TransportName):
    """Option of the table of transports, or AUTO."""


ANY_TRANSPORT = TransportChoice(AUTO)
SHM_RANKS = 16


class Offers(Protocol):
    """Predicate: True if a transport runs an exchange; epilogue: with residual add and norm in the same call."""

    def __call__(self, exchange: Exchange, epilogue: bool = False) -> bool: ...


@dataclass(frozen=True)
class Opening:
    """Arguments of a rank that opens a transport.

    Attributes:
        arena: returns (maximum live tensors of a rank, bytes of the largest) in memory shared by the ranks of this
          host. Raises LayoutError if the host has less.
        tuning: returns the tuning of a class that `weft tune` found under a key for this host, or None. Raises
          LayoutError.
        store: host and port at which rank 0 serves torch.distributed's store, for ranks on several hosts.
    """

    mesh: Mesh
    rank: int
    directory: Path  # folder for the rendezvous of these ranks only; each host has its own, of the same name
    device: torch.device  # of this rank
    max_bytes: Callable[[], int]  # returns the maximum bytes of a tensor that a step exchanges
    arena: Callable[[], tuple[int, int]]
    tuning: Callable[[str, type], Any]
    store: tuple[str, int] | None = None
    timeout_s: float = 60.0  # seconds until a call fails if its peers have not arrived


@dataclass(frozen=True)
class TransportEntry:
    """Row of a transport in the table: its facts for the planner and for options. None: no limit."""

    option: str  # name on command lines
    name: str  # name in plans, reports and cost tables
    device: Literal["cpu", "cuda", "any"]  # of its ranks
    offers: Offers  # True for the exchanges that it runs
    open: Callable[[Opening], Any]  # makes a rank's `weft.comm.transport.Transport`; collective
    max_ranks: int | None = None  # maximum ranks of a host
    max_hosts: int | None = None  # maximum hosts
    max_normed_bytes: int | None = None  # maximum bytes of a row with an epilogue
    max_bytes: int | None = None  # maximum bytes of the larger of a call's input and result
    takes_live_sizes: bool = False  # accepts `weft.comm.transport.LiveSizes`
    auto: bool = True  # AUTO enables it, in the table's order

    def runs_on(self, device: str) -> bool:
        """Return True if it runs on a device, cpu or cuda."""
        return self.device in (device, "any")

    def spans(self, hosts: int) -> bool:
        """Return True if its groups may span this number of hosts."""
        return self.max_hosts is None or hosts <= self.max_hosts

    def check(self, mesh: Mesh) -> None:
        """Raise LayoutError if a host has more ranks than max_ranks."""
        on_host = mesh.world // mesh.hosts
        if self.max_ranks is not None and on_host > self.max_ranks:
            kind = ", of one host" if self.max_hosts == 1 else ""
            each = " on each" if mesh.hosts > 1 else ""
            raise LayoutError(
                f"{self.name} takes at most {self.max_ranks} ranks{kind}; this layout has {on_host}{each}"
            )


def check_serves(entries: Sequence[TransportEntry], mesh: Mesh) -> None:
    """Raise LayoutError if these transports, taken as a set, do not serve all ranks of a layout."""
    for entry in entries:
        entry.check(mesh)
    if not any(entry.spans(mesh.hosts) for entry in entries):
        across = [e.option for e in TRANSPORTS if e.max_hosts is None and e.device == entries[0].device]
        raise LayoutError(
            f"{' and '.join(e.option for e in entries)} runs on one host, but this layout spans "
            f"{mesh.hosts}: drop --transport{''.join(f', or use {option}' for option in across)}"
        )


def offers_all(exchange: Exchange, epilogue: bool = False) -> bool:
    """Offer all exchanges: epilogues of sums, and merges of whole heads."""
    if exchange.combine == "softmax_merge":
        return exchange == exchanges.merge_scatterv(exchange.ranks) and not epilogue
    return exchange.combine == "sum" or not epilogue


def _offers_moves_and_sums(exchange: Exchange, epilogue: bool = False) -> bool:
    return exchange.combine in ("none", "sum") and not epilogue


def _offers_nccl_calls(exchange: Exchange, epilogue: bool = False) -> bool:
    return exchange.kind in ("all_reduce", "reduce_scatterv", "all_gatherv", "all_to_allv") and not epilogue


def _opener(module: str) -> Callable[[Opening], Any]:
    """Return the `open_transport` of a module, imported at the first call."""
    return lambda opening: import_module(module).open_transport(opening)


SHM = TransportEntry("shm", "shm", "cpu", offers_all, _opener("weft.comm.shm"), SHM_RANKS, max_hosts=1)
GLOO = TransportEntry("gloo", "torchdist/gloo", "cpu", _offers_moves_and_sums, _opener("weft.comm.torchdist"))
PEER = TransportEntry(
    "peer",
    "peer",
    "cuda",
    offers_all,
    _opener("weft.comm.peer"),
    peer_launch.MAX_RANKS,
    max_hosts=1,
    max_normed_bytes=peer_launch.MAX_NORMED_BYTES,
    takes_live_sizes=True,
)
NCCL = TransportEntry("nccl", "torchdist/nccl", "cuda", _offers_nccl_calls, _opener("weft.comm.torchdist"))
TRANSPORTS = (SHM, GLOO, PEER, NCCL)
REFERENCE = TransportEntry("reference", "reference", "any", offers_all, _opener("weft.comm.reference"), auto=False)
"""Transport of ranks that are threads of one process, or of a single rank; no option for ranks that are processes."""


def transports(plugins: Sequence[str] = ()) -> dict[str, TransportEntry]:
    """Return Weft's transports, then the plugins' TRANSPORTS, by option. Raises PluginError."""
    known = {entry.option: entry for entry in TRANSPORTS}
    for module in load_plugins(plugins):
        for entry in getattr(module, "TRANSPORTS", ()):
            if known.setdefault(entry.option, entry) != entry or entry.option in (AUTO, REFERENCE.option):
                raise PluginError(
                    f"plugin {module.__name__} adds transport {entry.option}, but there is another of this name"
                )
    return known


def automatic(known: dict[str, TransportEntry], device: str, ranks: int) -> tuple[TransportEntry, ...]:
    """Return the `known` transports that AUTO enables for this number of `ranks` on `device` cpu or cuda."""
    on_device = (entry for entry in known.values() if entry.auto and entry.runs_on(device))
    return tuple(e for e in on_device if e.max_ranks is None or ranks <= e.max_ranks)
