"""Messages between node 0 and the agents, encoded as msgpack. Those of ranks travel inside, as they are."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct


class Join(Struct, frozen=True, tag=True):
    """From an agent: it is there.

    Attributes:
        node: its number.
        host: its host's name.
        facts: versions and digests that must be those of node 0.
        options: of the engine, the same on every host.
        clock: seconds since 1970.
    """

    node: int
    host: str
    facts: dict[str, str]
    options: dict[str, Any]
    clock: float


class Alive(Struct, frozen=True, tag=True):
    """From an agent, every second."""


class FromRanks(Struct, frozen=True, tag=True):
    """From an agent: a rank's message of start `number`."""

    number: int
    encoded: bytes


class Ended(Struct, frozen=True, tag=True):
    """From an agent: a rank of start `number` has ended. killed: by a signal."""

    number: int
    text: str
    killed: bool


class Stopped(Struct, frozen=True, tag=True):
    """From an agent: no rank of start `number`, or of an earlier one, is left."""

    number: int


class Left(Struct, frozen=True, tag=True):
    """From an agent that leaves. text: why, in a few words."""

    text: str


class Welcome(Struct, frozen=True, tag=True):
    """To an agent: it belongs to the cluster."""


class Refused(Struct, frozen=True, tag=True):
    """To an agent: it does not belong to the cluster, for a reason of one line."""

    text: str


class Start(Struct, frozen=True, tag=True):
    """To an agent: start ranks.

    Attributes:
        number: of the start; each has a greater one.
        config: of the engine (`EngineConfig.to_dict`).
        table: the text of the cost table by which all ranks plan; None: the one that the configuration names.
    """

    number: int
    config: dict[str, Any]
    table: str | None


class ToRanks(Struct, frozen=True, tag=True):
    """To an agent: a message to a rank of start `number`; None: to all of its host."""

    number: int
    rank: int | None
    encoded: bytes


class StopRanks(Struct, frozen=True, tag=True):
    """To an agent: end the ranks of start `number`, and of earlier ones."""

    number: int


class Leave(Struct, frozen=True, tag=True):
    """To an agent: node 0 ends in order, and so does the agent."""


FromAgent = Join | Alive | FromRanks | Ended | Stopped | Left
ToAgent = Welcome | Refused | Start | ToRanks | StopRanks | Leave

encode = msgspec.msgpack.Encoder().encode
decode_from_agent = msgspec.msgpack.Decoder(FromAgent).decode
decode_to_agent = msgspec.msgpack.Decoder(ToAgent).decode
