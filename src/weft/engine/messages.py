"""Everything that the controller and its ranks say to each other, as msgpack.

A step is one message, the same bytes for every rank, with the rows of every DP group. So every rank knows every count:
an idle group steps with zero rows, and no rank can leave out a collective.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

from weft.kv.spec import CacheGroup


class Sampling(Struct, frozen=True, array_like=True):
    """How to draw one token. temperature 0: greedy. top_k 0: off. index: of the token in the answer.

    logprobs: alternatives wanted, -1 for none at all. banned: tokens that must not come (the end before min_tokens).
    min_p: tokens less likely than this share of the likeliest do not come. added: (token, what is added to its logit).
    repetition: what the logits of the repeated tokens are divided by, or multiplied with where they are negative.
    mask: bit t % 8 of byte t // 8 says whether token t may come; empty: all may.
    """

    temperature: float
    top_p: float
    top_k: int
    seed: int
    index: int
    logprobs: int = -1
    banned: tuple[int, ...] = ()
    min_p: float = 0.0
    added: tuple[tuple[int, float], ...] = ()
    repetition: float = 1.0
    repeated: tuple[int, ...] = ()
    mask: bytes = b""


class Score(Struct, frozen=True, array_like=True):
    """The tokens after a prompt's rows, one a row, whose logprobs are wanted; logprobs: alternatives of each."""

    tokens: tuple[int, ...]
    logprobs: int


class Part(Struct, frozen=True, array_like=True):
    """The rows of one sequence: its tokens number context … context + rows - 1. sampling: None where none is drawn.

    tables: of each cache group its page table, or the slots of its state before and after these rows. score: where the
    logprobs of the prompt's own tokens are wanted.
    """

    request: int
    rows: int
    context: int
    tables: tuple[tuple[int, ...], ...]
    sampling: Sampling | None
    score: Score | None = None


class GroupRows(Struct, frozen=True, array_like=True):
    """One DP group's rows, the tokens of its parts one after the other."""

    tokens: tuple[int, ...] = ()
    parts: tuple[Part, ...] = ()


class Step(Struct, frozen=True, tag=True):
    """To every rank: run one forward pass."""

    number: int
    groups: tuple[GroupRows, ...]


class AskReport(Struct, frozen=True, tag=True):
    """To a rank: what has run so far?"""


class AskPlan(Struct, frozen=True, tag=True):
    """To a rank: what is the plan for so many tokens in each DP group?"""

    tokens: int


class StartProfile(Struct, frozen=True, tag=True):
    """To every rank: watch so many of the steps to come. folder: where the profiler writes; empty: it does not run."""

    steps: int
    folder: str


class StopProfile(Struct, frozen=True, tag=True):
    """To every rank: what have you seen?"""


class Stop(Struct, frozen=True, tag=True):
    """To every rank: leave."""


class Progress(Struct, frozen=True, tag=True):
    """From a rank that starts: how much of what is done. what: such as "loading weights"."""

    rank: int
    done: int
    total: int
    what: str = "loading weights"


class Ready(Struct, frozen=True, tag=True):
    """From a rank that may be stepped. groups: of its caches, the same on every rank."""

    rank: int
    groups: tuple[CacheGroup, ...]


class Drawn(Struct, frozen=True, array_like=True):
    """One drawn token; its logprob and the best alternatives (token, logprob) where they were asked for."""

    request: int
    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class Scored(Struct, frozen=True, array_like=True):
    """The logprobs of a prompt's tokens from number `first` on, each with its best alternatives (token, logprob)."""

    request: int
    first: int
    logprobs: tuple[tuple[float, tuple[tuple[int, float], ...]], ...]


class Ran(Struct, frozen=True, array_like=True):
    """What a rank executed: the step, every DP group's rows, and a checksum of the plan. The same on every rank."""

    number: int
    counts: tuple[int, ...]
    plan: int

    def __str__(self) -> str:
        return f"step {self.number} of {self.counts} rows by plan {self.plan:08x}"


class Result(Struct, frozen=True, tag=True):
    """From every rank, after a step. drawn: from the leader of a DP group, in the order of its sampled parts."""

    rank: int
    ran: Ran
    drawn: tuple[Drawn, ...] = ()
    scored: tuple[Scored, ...] = ()


class Stat(Struct, frozen=True, array_like=True):
    """A `weft.stream.StepStat` on the wire."""

    site: str
    step: str
    group: str
    count: int
    bytes: int
    seconds: float


class Report(Struct, frozen=True, tag=True):
    """From a rank: what ran, and what the naive plan would have moved."""

    ran: tuple[Stat, ...]
    naive: tuple[Stat, ...]


class PlanText(Struct, frozen=True, tag=True):
    """From a rank: the plan, printable."""

    text: str


class Profiled(Struct, frozen=True, tag=True):
    """From a rank: steps that it has watched so far, and the time from the first's beginning to the last's end, on the
    clock, on the CPU by the thread that runs steps, and by all its threads.
    """

    rank: int
    steps: int
    seconds: float
    thread_cpu_s: float
    process_cpu_s: float


class Failure(Struct, frozen=True, tag=True):
    """From a rank that cannot go on: one line. user: something that the user can put right, such as a bad model.

    lost_peer: a collective failed, most likely because another rank did; that rank's Failure is the cause.
    """

    rank: int
    text: str
    user: bool
    lost_peer: bool = False


ToRank = Step | AskReport | AskPlan | StartProfile | StopProfile | Stop
FromRank = Progress | Ready | Result | Report | PlanText | Profiled | Failure

encode = msgspec.msgpack.Encoder().encode
decode_to_rank = msgspec.msgpack.Decoder(ToRank).decode
decode_from_rank = msgspec.msgpack.Decoder(FromRank).decode
