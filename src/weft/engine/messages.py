"""Everything that the controller and its ranks say to each other, as msgpack.

A step is one message, the same bytes for every rank, with the rows of every DP group. So every rank knows every count:
an idle group steps with zero rows, and no rank can leave out a collective. Ranks keep what they were told of a group's
sequences, each in a row of a table (`weft.engine.worker.row_table`), so that a step says only what is new, and steps
can be sent before the tokens of the one before have come back: the ranks hold these already.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

from weft.kv.cache_spec import CacheGroup

TopLogprobs = tuple[tuple[int, float], ...]
"""The best tokens and their logprobs."""


class Sampling(Struct, frozen=True, array_like=True):
    """How a request's tokens are drawn. temperature 0: greedy. top_k 0: off.

    min_p: tokens less likely than this share of the likeliest do not come.
    """

    temperature: float
    top_p: float
    top_k: int
    seed: int
    min_p: float = 0.0


class Adjust(Struct, frozen=True, array_like=True):
    """What else one draw asks for. logprobs: alternatives wanted, -1 for none at all.

    banned: tokens that must not come (the end before min_tokens). added: (token, what is added to its logit).
    repetition: what the logits of the repeated tokens are divided by, or multiplied with where they are negative.
    mask: bit t % 8 of byte t // 8 says whether token t may come; empty: all may.
    """

    logprobs: int = -1
    banned: tuple[int, ...] = ()
    added: tuple[tuple[int, float], ...] = ()
    repetition: float = 1.0
    repeated: tuple[int, ...] = ()
    mask: bytes = b""


class Score(Struct, frozen=True, array_like=True):
    """The tokens after a prompt's rows, one a row, whose logprobs are wanted; logprobs: alternatives of each."""

    tokens: tuple[int, ...]
    logprobs: int


class Join(Struct, frozen=True, array_like=True):
    """The sequence of a request takes a row of the table, whatever was there.

    context: its tokens that are in the caches already.
    tables: of each cache group its page table, or the slots of its state before and after its next rows.
    copy: (page, page) of whole sequences, of which the first is copied to the second, before the step writes any row.
    """

    row: int
    request: int
    context: int
    tables: tuple[tuple[int, ...], ...]
    sampling: Sampling
    copy: tuple[int, int] | None = None


class Entry(Struct, frozen=True, array_like=True):
    """A new entry of a row's table: its page number `index`, or a slot of its state (0: before, 1: after)."""

    row: int
    group: int
    index: int
    value: int


class Chunk(Struct, frozen=True, array_like=True):
    """The next tokens of a row, which the controller knows. draws: whether a token is drawn after the last of them.

    score: where the logprobs of the prompt's own tokens are wanted.
    """

    row: int
    tokens: tuple[int, ...]
    draws: bool
    score: Score | None = None


class GroupRows(Struct, frozen=True, array_like=True):
    """One DP group's part of a step: first what is new, then its rows, those of `answers` before those of `chunks`.

    answers: rows of the table that run the token last drawn for them, and draw the next. adjust: (row of the table,
    what its draw asks for) for draws that ask for more than the row's sampling.
    """

    answers: tuple[int, ...] = ()
    chunks: tuple[Chunk, ...] = ()
    joins: tuple[Join, ...] = ()
    entries: tuple[Entry, ...] = ()
    adjust: tuple[tuple[int, Adjust], ...] = ()

    @property
    def count(self) -> int:
        """Rows that it runs."""
        return len(self.answers) + sum(len(chunk.tokens) for chunk in self.chunks)

    @property
    def draws(self) -> list[int]:
        """The rows of the table for which tokens are drawn, in that order."""
        return [*self.answers, *(chunk.row for chunk in self.chunks if chunk.draws)]


class Step(Struct, frozen=True, tag=True):
    """To every rank: run one forward pass. Ranks run steps in the order in which they come."""

    number: int
    groups: tuple[GroupRows, ...]

    @property
    def counts(self) -> tuple[int, ...]:
        """Rows of every DP group."""
        return tuple(group.count for group in self.groups)


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


class Planned(Struct, frozen=True, array_like=True):
    """The plan that a rank follows in steps of so many rows in each DP group, replayed from a graph or not."""

    rows: int
    captured: bool
    plan: int

    def __str__(self) -> str:
        return f"{'captured ' * self.captured}steps of {self.rows} rows by plan {self.plan:08x}"


class Ready(Struct, frozen=True, tag=True):
    """From a rank that may be stepped. groups: of its caches; plans: of every graph, and of the largest step without
    one; both the same on every rank.
    """

    rank: int
    groups: tuple[CacheGroup, ...]
    plans: tuple[Planned, ...] = ()


Logprobs = tuple[float, TopLogprobs]
"""A token's logprob, and the best alternatives."""


class Scored(Struct, frozen=True, array_like=True):
    """The logprobs of a prompt's tokens from number `first` on."""

    first: int
    logprobs: tuple[Logprobs, ...]


class Ran(Struct, frozen=True, array_like=True):
    """What a rank executed: the step, every DP group's rows, a checksum of the plan, the same on every rank; and a
    checksum of the tokens that it drew, the same on every rank of its DP group."""

    number: int
    counts: tuple[int, ...]
    plan: int
    tokens: int

    def __str__(self) -> str:
        return f"step {self.number} of {self.counts} rows by plan {self.plan:08x} with tokens {self.tokens:08x}"


class Result(Struct, frozen=True, tag=True):
    """From every rank, after a step. The rest is from the leader of a DP group alone.

    tokens: drawn, in the order of `GroupRows.draws`. logprobs: of each of them, None where they were not asked for;
    empty where none asks. scored: of the chunks that ask for it, in their order.
    """

    rank: int
    ran: Ran
    tokens: tuple[int, ...] = ()
    logprobs: tuple[Logprobs | None, ...] = ()
    scored: tuple[Scored, ...] = ()


class Stat(Struct, frozen=True, array_like=True):
    """A `weft.comm.stats.StepStat` on the wire."""

    site: str
    step: str
    group: str
    count: int
    bytes: int
    seconds: float
    predicted: float


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
