"""Measurement of exchanges inside hosts and across them, with ranks on CPUs: the cost table for plans over hosts."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from weft.comm.shm import ShmTransport, ShmTuning
from weft.comm.torchdist import TorchDistTransport
from weft.comm.transport import Transport
from weft.comm.transport_registry import GLOO, TransportEntry, transports
from weft.planner.exchange import Exchange
from weft.planner.spec import Mesh
from weft.tune.cpu_costs import DTYPE, WIDTH, call_us, calls_to_price, opening_of
from weft.tune.ranks import HostContext, Report, all_cores, slowest

SIZES = [1 << p for p in range(12, 22, 3)]
"""Bytes; beyond them, times over a network grow in proportion."""


def mesh_of(hosts: int, on_host: int) -> Mesh:
    """Return the layout with the groups to measure: inside a host, one rank of each, and all."""
    return Mesh(hosts, on_host, hosts, on_host, hosts=hosts)


def entries_of(options: Iterable[str], mesh: Mesh, plugins: Iterable[str] = ()) -> list[TransportEntry]:
    """Return the rows of these options that serve some group of a mesh."""
    known = transports(tuple(plugins))
    alone = mesh.world == mesh.hosts
    return [known[o] for o in options if not alone or known[o].max_hosts is None]


def count(mesh: Mesh, options: Iterable[str], sizes: list[int], plugins: Iterable[str] = ()) -> int:
    """Return the number of times that `price` reports for these `options`, `sizes` and `plugins`."""
    entries = entries_of(options, mesh, plugins)
    calls = calls_to_price(mesh, 0, sizes, torch.empty(0, WIDTH, dtype=DTYPE, device="meta"))
    return sum(_carries(entry, exchange, row) for exchange, _, _, row in calls for entry in entries)


def _carries(entry: TransportEntry, exchange: Exchange, row: dict[str, Any]) -> bool:
    return entry.offers(exchange) and entry.spans(row["hosts"])


def price(rank: int, directory: Path, report: Report, here: HostContext, said: dict[str, Any]) -> None:
    """Run a rank's part. Rank 0 reports a row for each time: transport, kind, ranks, world, hosts, bytes, us.

    said: options of the table of transports, sizes in bytes, and the tuning of shm.
    """
    mesh, sizes, tuning = here.mesh, said["sizes"], ShmTuning(**said["tuning"])
    device = torch.device("cpu")
    opening = opening_of(mesh, rank, directory, device, max(sizes), {"shm_tuning": tuning}, store=here.store)
    with all_cores():  # gloo's threads must not wait for this one
        meeting = GLOO.open(opening)
    assert isinstance(meeting, TorchDistTransport)
    opened: list[Transport] = []
    for entry in entries_of(said["options"], mesh, here.plugins):
        opened.append(meeting if entry is GLOO else entry.open(opening))
    on_host = mesh.peers("host", rank)
    shm = next((t for t in opened if isinstance(t, ShmTransport)), None)
    gc.disable()
    for exchange, fresh, call, row in calls_to_price(mesh, rank, sizes, torch.empty(0, WIDTH, dtype=DTYPE)):
        for transport in (t for t in opened if _carries(t.entry, exchange, row)):
            if row["hosts"] == 1 and shm is not None:  # its ranks meet without the network
                us = call_us(shm, transport, fresh, partial(call, transport), on_host)
            else:
                us = call_us(meeting, transport, fresh, partial(call, transport), mesh.groups[0])
            [us] = slowest([us], meeting, mesh.groups[0])
            if rank == 0:
                report({"transport": transport.entry.name} | row | {"us": round(us, 2)})
        gc.collect()
    for transport in opened:
        transport.close()
    if meeting not in opened:
        meeting.close()
