"""Messages between the controller and its ranks, encoded as msgpack.

A step is one message, the same bytes for every rank, with the rows of every DP group. So every rank knows every count:
an idle group steps with zero rows, and every rank enters every collective. Ranks keep each sequence of their group in a
row of a table (`weft.engine.worker.row_table`), so a step carries only changes. A step can be sent before the tokens of
the previous one are back, because the ranks hold these already.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

import msgspec
from msgspec import Struct

from weft.engine.kv.cache_spec import CacheGroup
from weft.engine.kv.tokens import TOKEN_BYTES, token_array
from weft.stream.step_stat import StepStat

TopLogprobs = tuple[tuple[int, float], ...]
"""Most probable tokens and their logprobs."""


@dataclass(frozen=True, kw_only=True)
class Shaping:
    """Sampling parameters that shape the distribution of a token, neutral by default.

    Attributes:
        temperature: 0 is greedy.
        top_p: keep the fewest most probable tokens that reach this probability.
        top_k: number of most probable tokens to keep; 0 is off.
        min_p: exclude tokens less probable than this share of the most probable token.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0


NEUTRAL = Shaping()
PARAMETERS: dict[str, tuple[str, Callable[[float], bool]]] = {
    "temperature": ("between 0 and 100", lambda value: 0 <= value <= 100),
    "top_p": ("above 0 and at most 1", lambda value: 0 < value <= 1),
    "top_k": ("0 (off) or more, below 2**31", lambda value: 0 <= value < 2**31),
    "min_p": ("between 0 and 1", lambda value: 0 <= value <= 1),
}
"""Fields of `Shaping` with their valid values, in words and as a function."""
GRAPH_PARAMETERS, SHARE_PARAMETERS = ("temperature", "min_p"), ("temperature",)
"""Fields supported by sampling in CUDA graphs, and fields supported on a share of a split vocabulary. Rows that set
another field are sampled after the graph, from full rows of logits."""


@dataclass(frozen=True, kw_only=True)
class Sampling(Shaping):
    """Sampling parameters of a request. seed: determines a token's noise together with its position."""

    seed: int = 0

    def beyond(self, known: Collection[str]) -> bool:
        """Tell whether parameters outside `known` shape the distribution."""
        others = (name for name in PARAMETERS if name not in known)
        return self.temperature > 0 and any(getattr(self, name) != getattr(NEUTRAL, name) for name in others)


class Adjust(Struct, frozen=True, array_like=True):
    """Adjustments of the sampling of one token, in addition to `Sampling`.

    Attributes:
        logprobs: number of requested alternatives; -1: no logprobs.
        banned: excluded tokens, such as the end tokens before min_tokens.
        added: (token, value added to its logit).
        repetition: divisor of positive logits of `repeated` tokens, and factor of negative ones.
        repeated: tokens that `repetition` applies to.
        mask: bit t % 8 of byte t // 8 allows token t; empty: all tokens.
    """

    logprobs: int = -1
    banned: tuple[int, ...] = ()
    added: tuple[tuple[int, float], ...] = ()
    repetition: float = 1.0
    repeated: tuple[int, ...] = ()
    mask: bytes = b""


class Score(Struct, frozen=True, array_like=True):
    """Prompt tokens with requested logprobs: for each row the next token. logprobs: number of alternatives."""

    tokens: tuple[int, ...]
    logprobs: int


class Join(Struct, frozen=True, array_like=True):
    """Assignment of a request's sequence to a row of the table. It replaces the row's content.

    Attributes:
        context: number of its tokens that are in the caches already.
        tables: per cache group its page table, or the slots of its state before and after its next rows.
        copy: (source, target) page of whole-sequence caches, copied before the step writes any row.
    """

    row: int
    request: int
    context: int
    tables: tuple[tuple[int, ...], ...]
    sampling: Sampling
    copy: tuple[int, int] | None = None


class Entries(Struct, frozen=True, array_like=True):
    """New entries of a row's table from number `first` on: pages, or slots of its state (0: before, 1: after)."""

    row: int
    group: int
    first: int
    values: tuple[int, ...]


class Chunk(Struct, frozen=True, array_like=True):
    """The next prompt tokens of a row.

    Attributes:
        tokens: encoded by `weft.engine.kv.tokens.token_bytes`.
        samples: whether a token is sampled after the last one.
        score: requested logprobs of prompt tokens, if any.
        following: the token after the last one, for draft layers, if it is not sampled.
    """

    row: int
    tokens: bytes
    samples: bool
    score: Score | None = None
    following: int = 0

    @property
    def count(self) -> int:
        """Number of tokens."""
        return len(self.tokens) // TOKEN_BYTES


class GroupRows(Struct, frozen=True, array_like=True):
    """One DP group's part of a step: changes of its table, then its rows, decode rows first.

    Attributes:
        decode_rows: rows of the table that run their last tokens, which ranks hold, then their drafts, and sample one
            token after each of these.
        chunks: prompt tokens; their rows follow the decode rows in this order.
        joins, entries: changes of the table, applied before any row runs.
        adjust: (index in `sampled_rows`, adjustments in addition to the row's `Sampling`).
        decode_tokens: number of tokens of each decode row, its last one and its drafts; empty: one each.
        drafts: drafts of all decode rows, encoded as tokens of a `Chunk`; or each is HELD.
    """

    decode_rows: tuple[int, ...] = ()
    chunks: tuple[Chunk, ...] = ()
    joins: tuple[Join, ...] = ()
    entries: tuple[Entries, ...] = ()
    adjust: tuple[tuple[int, Adjust], ...] = ()
    decode_tokens: tuple[int, ...] = ()  # a column: with a Struct per row, 256 rows take 40 µs longer to read
    drafts: bytes = b""

    @property
    def decode_each(self) -> Iterable[tuple[int, int]]:
        """(row of the table, number of its tokens) of each decode row."""
        return zip(self.decode_rows, self.decode_tokens or itertools.repeat(1), strict=False)

    @property
    def drafts_each(self) -> Iterator[array[int]]:
        """Yield the drafts of each decode row. Requires `decode_tokens`."""
        drafts, first = token_array(self.drafts), 0
        for tokens in self.decode_tokens:
            yield drafts[first : (first := first + tokens - 1)]

    @property
    def decode_count(self) -> int:
        """Number of tokens of the decode rows."""
        return sum(self.decode_tokens) or len(self.decode_rows)

    @property
    def count(self) -> int:
        """Number of rows of the step."""
        return self.decode_count + sum(chunk.count for chunk in self.chunks)

    @property
    def sampling_count(self) -> int:
        """Number of sequences that sample."""
        return len(self.decode_rows) + sum(chunk.samples for chunk in self.chunks)

    @property
    def sampling_rows(self) -> list[int]:
        """Table row of each sequence that samples."""
        return [*self.decode_rows, *(chunk.row for chunk in self.chunks if chunk.samples)]

    @property
    def sampled_rows(self) -> list[int]:
        """Table row of each sampled token, in the order of a step's tokens."""
        each = (row for row, tokens in self.decode_each for _ in range(tokens))
        return [*(each if self.decode_tokens else self.decode_rows), *(c.row for c in self.chunks if c.samples)]


class Step(Struct, frozen=True, tag=True):
    """Controller to every rank: run one forward pass. Ranks run steps in the order of arrival. drafts: number of drafts
    that ranks propose after each sampled row. hold: ranks hold these, and send the result before they find them."""

    number: int
    groups: tuple[GroupRows, ...]
    drafts: int = 0
    hold: bool = False

    @property
    def counts(self) -> tuple[int, ...]:
        """Rows of every DP group."""
        return tuple(group.count for group in self.groups)


class AskReport(Struct, frozen=True, tag=True):
    """Controller to a rank: send a `Report`."""


class AskPlan(Struct, frozen=True, tag=True):
    """Controller to a rank: send the plan for `tokens` tokens per DP group."""

    tokens: int


class StartProfile(Struct, frozen=True, tag=True):
    """Controller to every rank: profile the next `steps` steps. traced: also run torch's profiler."""

    steps: int
    traced: bool


class StopProfile(Struct, frozen=True, tag=True):
    """Controller to every rank: end the profile and send a `Profiled`."""


class Stop(Struct, frozen=True, tag=True):
    """Controller to every rank: exit."""


class Progress(Struct, frozen=True, tag=True):
    """Starting rank to the controller: `done` of `total` parts of `what` are done."""

    rank: int
    done: int
    total: int
    what: str = "loading weights"


class Planned(Struct, frozen=True, array_like=True):
    """Checksum of a rank's plan for steps of `rows` rows per DP group. captured: the step is a CUDA graph."""

    rows: int
    captured: bool
    plan: int

    def __str__(self) -> str:
        return f"{'captured ' * self.captured}steps of {self.rows} rows by plan {self.plan:08x}"


class Ready(Struct, frozen=True, tag=True):
    """Rank to the controller: it is ready for steps. The attributes are the same on every rank.

    Attributes:
        plans: plans of all graphs, and of the largest step without a graph.
        eager: reason why decode steps on CPUs are not recorded; empty: they are, or ranks run on GPUs.
    """

    rank: int
    groups: tuple[CacheGroup, ...]
    plans: tuple[Planned, ...] = ()
    eager: str = ""


Logprobs = tuple[float, TopLogprobs]
"""A token's logprob, and its best alternatives."""


class Scored(Struct, frozen=True, array_like=True):
    """The logprobs of a prompt's tokens from number `first` on."""

    first: int
    logprobs: tuple[Logprobs, ...]


class Ran(Struct, frozen=True, array_like=True):
    """Record of a step on a rank.

    Attributes:
        counts: rows of every DP group.
        plan: checksum of the plan, the same on every rank.
        tokens: checksum of the sampled tokens, the same on every rank of a DP group.
    """

    number: int
    counts: tuple[int, ...]
    plan: int
    tokens: int

    def __str__(self) -> str:
        return f"step {self.number} of {self.counts} rows by plan {self.plan:08x} with tokens {self.tokens:08x}"


class Result(Struct, frozen=True, tag=True):
    """Every rank to the controller, after a step. Only the leader of a DP group fills the fields after `ran`.

    Attributes:
        tokens: sampled tokens, in the order of `GroupRows.sampled_rows`, without those after a rejected draft.
        logprobs: logprobs of these tokens, None for rows without a request; empty if no row has one.
        scored: prompt logprobs of each chunk with a `score`, in order.
        accepted: number of tokens of each sampling row, its accepted drafts and one more; empty: one each.
        drafts: drafts of ranks after the tokens of each sampling row, HELD for each that they hold; empty: none.
    """

    rank: int
    ran: Ran
    tokens: tuple[int, ...] = ()
    logprobs: tuple[Logprobs | None, ...] = ()
    scored: tuple[Scored, ...] = ()
    accepted: tuple[int, ...] = ()
    drafts: tuple[tuple[int, ...], ...] = ()


class Report(Struct, frozen=True, tag=True):
    """Rank to the controller: communication of its steps, and of the naive plan for the same steps."""

    ran: tuple[StepStat, ...]
    naive: tuple[StepStat, ...]


class PlanText(Struct, frozen=True, tag=True):
    """Rank to the controller: the plan as printable text."""

    text: str


class Profiled(Struct, frozen=True, tag=True):
    """Rank to the controller: its profile of the last steps.

    Attributes:
        seconds: from the start of the first step to the end of the last.
        thread_cpu_s: CPU time of the thread that runs steps.
        process_cpu_s: CPU time of all threads of the rank's process.
        threads: CPU time of each thread, by name.
        trace: trace of torch's profiler, as gzipped JSON; empty if it did not run.
        about: steps of the trace and their exchanges, as JSON.
    """

    rank: int
    steps: int
    seconds: float
    thread_cpu_s: float
    process_cpu_s: float
    threads: dict[str, float] = {}
    trace: bytes = b""
    about: str = ""


class Failure(Struct, frozen=True, tag=True):
    """Rank to the controller: it cannot go on.

    Attributes:
        text: one line.
        user: the user can fix the cause, such as a bad model.
        lost_peer: a collective failed, most likely because another rank did; that rank's Failure is the cause.
        lost_device: its device cannot be used any more.
    """

    rank: int
    text: str
    user: bool
    lost_peer: bool = False
    lost_device: bool = False


ToRank = Step | AskReport | AskPlan | StartProfile | StopProfile | Stop
FromRank = Progress | Ready | Result | Report | PlanText | Profiled | Failure

encode = msgspec.msgpack.Encoder().encode
decode_to_rank = msgspec.msgpack.Decoder(ToRank).decode
decode_from_rank = msgspec.msgpack.Decoder(FromRank).decode
