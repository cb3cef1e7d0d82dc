"""A transport that Weft does not know, as a plugin: one row. It sums and gathers over gloo."""

from __future__ import annotations

from weft.comm.torchdist import TorchDistTransport
from weft.comm.transport_registry import Opening, TransportEntry
from weft.planner.exchange import Exchange


class ToyTransport(TorchDistTransport):
    """All that gloo moves, under another name."""

    def __init__(self, rank: Opening):
        super().__init__(rank.mesh, rank.rank, f"file://{rank.directory}/toy", timeout_s=rank.timeout_s)
        self.entry = TRANSPORTS[0]


def offers(exchange: Exchange, epilogue: bool = False) -> bool:
    return exchange.kind in ("all_reduce", "all_gatherv") and not epilogue


TRANSPORTS = (TransportEntry("toy", "toy", "cpu", offers, ToyTransport, max_ranks=2, auto=False),)
