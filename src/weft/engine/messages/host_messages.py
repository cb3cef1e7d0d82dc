"""Messages between node 0 and the agents, encoded as msgpack. Encoded messages of ranks are embedded unchanged."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct


class Join(Struct, frozen=True, tag=True):
    """Agent to node 0: request to join.

    Attributes:
        facts: versions and digests, which must equal node 0's.
        options: engine options, the same on every host.
        clock: seconds since 1970.
    """

    node: int
    host: str
    facts: dict[str, str]
    options: dict[str, Any]
    clock: float


class Alive(Struct, frozen=True, tag=True):
    """Agent to node 0, every second: heartbeat."""


class FromRanks(Struct, frozen=True, tag=True):
    """Agent to node 0: a message of a rank of start `number`."""

    number: int
    encoded: bytes


class Ended(Struct, frozen=True, tag=True):
    """Agent to node 0: a rank of start `number` has ended. killed: by a signal. ranks: empty for all of the host."""

    number: int
    text: str
    killed: bool
    ranks: tuple[int, ...] = ()


class Stopped(Struct, frozen=True, tag=True):
    """Agent to node 0: all ranks of start `number` and of earlier starts have ended."""

    number: int


class Left(Struct, frozen=True, tag=True):
    """Agent to node 0: the agent leaves. text: reason in a few words."""

    text: str


class Welcome(Struct, frozen=True, tag=True):
    """Node 0 to an agent: it has joined the cluster."""


class Refused(Struct, frozen=True, tag=True):
    """Node 0 to an agent: it may not join. text: reason in one line."""

    text: str


class Start(Struct, frozen=True, tag=True):
    """Node 0 to an agent: start ranks.

    Attributes:
        number: number of the start; it grows with each.
        config: configuration of the engine (`EngineConfig.to_dict`).
        table: text of the cost table for all ranks; None: the table that the configuration names.
    """

    number: int
    config: dict[str, Any]
    table: str | None


class ToRanks(Struct, frozen=True, tag=True):
    """Node 0 to an agent: a message for a rank of start `number`. rank: None for all ranks of the host."""

    number: int
    rank: int | None
    encoded: bytes


class StopRanks(Struct, frozen=True, tag=True):
    """Node 0 to an agent: end the ranks of start `number` and of earlier starts."""

    number: int


class Leave(Struct, frozen=True, tag=True):
    """Node 0 to an agent: exit, as node 0 does."""


FromAgent = Join | Alive | FromRanks | Ended | Stopped | Left
ToAgent = Welcome | Refused | Start | ToRanks | StopRanks | Leave

encode = msgspec.msgpack.Encoder().encode
decode_from_agent = msgspec.msgpack.Decoder(FromAgent).decode
decode_to_agent = msgspec.msgpack.Decoder(ToAgent).decode
