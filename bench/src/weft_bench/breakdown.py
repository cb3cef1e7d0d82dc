"""Parts of the steps of a running engine: kernels by kind, collectives with their waiting, and idle time.

torch's profiler watches every rank for the same steps (`weft.engine.controller.profiling`). A GPU's step is the kernels
and copies launched in it; a CPU's step is the outermost operators and the exchanges. The k-th exchange of a step is the
same one on every rank, so its waiting is known: the time on a rank until the last rank has entered it.
"""

from __future__ import annotations

import bisect
import gzip
import json
import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from weft.comm.transport import COLLECTIVE
from weft.engine.controller.engine import Engine
from weft.engine.controller.profiling import SKIPPED, Recording, merge_traces, record
from weft.engine.messages.request import SamplingParams
from weft.engine.output.request_output import OutputCallback
from weft.engine.worker.rank_profiler import STEP
from weft.kernels.cpu_rows import KERNEL
from weft.planner.spec import Mesh

SPARE_TOKENS = 512
"""Additional tokens of outputs, where the model allows it: a busy machine runs many steps while a profiler starts."""
DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
KINDS = {
    "collectives": r"^weft collective |exchange<|weft::merge<|^nccl",
    "experts": (
        r"^(weft kernel |_)(experts|(up|down)(_prompts)?|sum_choices|choose|route|count_chunks|(sort|place)_pairs)\b"
        r"|grouped_mm|moe"
    ),
    "attention": r"^weft kernel (decode|prompt)$|^_(attend|merge)_(splits|runs)|flash|fmha|attention",
    "norms": r"^weft kernel (norm|rope)|rms_?norm|_norm_rope_cache|layer_?norm",
    "sampling": r"^(weft kernel |_)(row_top|gather_first|cutoff|candidates|best)\b|argmax|topk|sort|gumbel|multinomial",
    "dense products": r"kernel (lin|mul)|gem[mv]|nvjet|cutlass|cublas|splitk|aten::(linear|mm|addmm|bmm|matmul|einsum)",
    "copies": r"memcpy|memset|copy|aten::(to|cat|index_put_?|index_copy_?|fill_|stack|empty|zero_)$",
}
"""Kinds of kernels, with the pattern of their names. The first match counts; the rest is `other`."""


def kind_of(name: str) -> str:
    """Return a kernel's kind, by its name."""
    plain = name.removeprefix("void ")
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, plain, re.IGNORECASE)), "other")


def short(name: str) -> str:
    """Return a kernel's name without its arguments, template or other."""
    plain = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    return re.split(r"[<(]", plain, maxsplit=1)[0].rpartition("::")[2] or name


@dataclass(frozen=True)
class Event:
    """Event of a rank: a kernel, an operator or an exchange.

    Attributes:
        begin, end: in µs.
        what: step in the plan of a collective, otherwise name of the kernel.
        step: number of its step.
        ranks, moved: ranks of a collective, and the bytes that the busiest of them receives.
        waiting: µs until the last rank entered it.
    """

    step: int
    kind: str
    what: str
    begin: float
    end: float
    ranks: tuple[int, ...] = ()
    moved: int = 0
    waiting: float = 0.0


def read_rank(trace: dict[str, Any], about: dict[str, Any], mesh: Mesh) -> list[Event]:
    """Return a rank's events in order of their beginning, without the first steps.

    trace, about: the rank's files. A kernel may start while its predecessor on the stream still runs
    (`kernels/triton/overlap.py`): it has waited until the predecessor's end, and begins there.
    """
    events = [e for e in trace["traceEvents"] if e.get("ph") == "X"]
    base = trace["baseTimeNanoseconds"] / 1e3
    marks = sorted((e["ts"], e) for e in events if e.get("cat") == "user_annotation" and e["name"].startswith(STEP))
    starts, numbers = [ts for ts, _ in marks], [int(e["name"].removeprefix(STEP)) for _, e in marks]
    launches = {
        e["args"]["correlation"]: e
        for e in events
        if e.get("cat", "").startswith("cuda_") and "args" in e and "correlation" in e["args"]
    }
    found: list[Event] = []
    ended: dict[Any, float] = defaultdict(float)  # by stream

    def add(event: dict[str, Any], launched: float) -> None:
        at = bisect.bisect_right(starts, launched) - 1
        begin, end = event["ts"], event["ts"] + event["dur"]
        if event.get("cat") in DEVICE:
            stream = event["args"].get("stream")
            begin = max(begin, min(ended[stream], end))
            ended[stream] = max(ended[stream], end)
        if at >= SKIPPED:
            found.append(Event(numbers[at], kind_of(event["name"]), event["name"], base + begin, base + end))

    on_gpu = any(e.get("cat") in DEVICE for e in events)
    if on_gpu:
        for event in sorted((e for e in events if e.get("cat") in DEVICE), key=lambda e: e["ts"]):
            if launch := launches.get(event.get("args", {}).get("correlation")):
                add(event, launch["ts"])
    else:
        thread, covered = marks[0][1]["tid"] if marks else None, 0.0
        for event in sorted((e for e in events if e.get("tid") == thread), key=lambda e: (e["ts"], -e["dur"])):
            if event["ts"] < covered or event["name"].startswith(STEP):
                continue
            if event.get("cat") == "cpu_op" or event["name"].startswith((COLLECTIVE, KERNEL)):
                add(event, event["ts"])
                covered = event["ts"] + event["dur"]
    moves = {number: about["moves"][kind] for number, kind in about["steps"]}
    return _name_collectives(found, moves, mesh, about["rank"])


def _name_collectives(events: list[Event], moves: dict[int, Any], mesh: Mesh, rank: int) -> list[Event]:
    """Name exchanges by the plan, in the order of a step: a kernel's name does not tell them apart."""
    places: dict[int, list[int]] = defaultdict(list)
    for at, event in enumerate(events):
        if event.kind == "collectives":
            places[event.step].append(at)
    for step, here in places.items():
        if len(here) != len(moves[step]):  # something else than the plan ran: only its kernels are known
            for i in here:
                events[i] = replace(events[i], what=short(events[i].what), ranks=tuple(range(mesh.world)))
            continue
        for i, (_, what, group, moved) in zip(here, moves[step], strict=True):
            events[i] = replace(events[i], what=what, ranks=mesh.peers(group or None, rank), moved=moved)
    return events


CollectiveKey = tuple[int, tuple[int, ...], int]
"""A collective of all ranks: its step, its ranks, and the number of their earlier ones in that step."""


def _collectives(events: Iterable[Event]) -> dict[CollectiveKey, Event]:
    """Return collectives by a key that is equal on all their ranks; other ranks may run more or fewer in between."""
    found: dict[CollectiveKey, Event] = {}
    seen: dict[tuple[int, tuple[int, ...]], int] = defaultdict(int)
    for event in events:
        if event.kind == "collectives":
            at = event.step, event.ranks
            found[*at, seen[at]] = event
            seen[at] += 1
    return found


def clock_shifts(ranks: Sequence[Sequence[Event]]) -> list[float]:
    """Return µs to add to each rank's clock. Median ends of exchanges coincide, whoever entered last."""
    by_rank = [_collectives(events) for events in ranks]
    shifts: dict[int, float] = {0: 0.0}
    while len(shifts) < len(ranks):
        for rank, mine in enumerate(by_rank):
            if rank in shifts:
                continue
            apart = [
                by_rank[other][at].end + shifts[other] - event.end
                for at, event in mine.items()
                for other in shifts
                if other in event.ranks and at in by_rank[other]
            ]
            if apart:
                shifts[rank] = statistics.median(apart)
                break
        else:  # ranks that exchange nothing with those before
            shifts |= {rank: 0.0 for rank in range(len(ranks)) if rank not in shifts}
    return [shifts[rank] for rank in range(len(ranks))]


def with_waiting(ranks: Sequence[Sequence[Event]], shifts: Sequence[float]) -> list[list[Event]]:
    """Return the events on one clock, each collective with the time until the last rank entered it."""
    moved = [[replace(e, begin=e.begin + s, end=e.end + s) for e in es] for es, s in zip(ranks, shifts, strict=True)]
    by_rank = [_collectives(events) for events in moved]
    out = []
    for events in moved:
        met = iter(_collectives(events))
        mine = []
        for event in events:
            if event.kind == "collectives":
                at = next(met)
                last = max((by_rank[r][at].begin for r in event.ranks if at in by_rank[r]), default=event.begin)
                event = replace(event, waiting=min(max(0.0, last - event.begin), event.end - event.begin))
            mine.append(event)
        out.append(mine)
    return out


def summarise(ranks: Sequence[Sequence[Event]]) -> dict[str, Any]:
    """Return means over steps and ranks: times of a step in µs, and shares of the step's time.

    step_us; idle_between, idle_within: idle shares of a rank's device, between two steps' work and within; kinds,
    kernels, collectives: rows, largest first. Raises ValueError if a rank ran nothing.
    """
    spans, between, within = [], [], []
    for events in ranks:
        steps: dict[int, list[Event]] = defaultdict(list)
        for event in events:
            steps[event.step].append(event)
        if len(steps) < 2:
            raise ValueError("a rank's trace holds fewer than two whole steps")
        edges = [(min(e.begin for e in steps[n]), max(e.end for e in steps[n])) for n in sorted(steps)]
        # The last step has no successor: its own work is counted, the pause after it is not.
        span = edges[-1][1] - edges[0][0]
        pauses = sum(max(0.0, after[0] - before[1]) for before, after in pairwise(edges))
        spans.append(span / len(steps))
        between.append(pauses / span)
        within.append(max(0.0, 1 - _busy(events) / span - pauses / span))
    step_us, count = statistics.mean(spans), len(ranks) * len({e.step for events in ranks for e in events})
    rows: dict[str, list[dict[str, Any]]] = {}
    all_events = [e for events in ranks for e in events]
    named: dict[str, Callable[[Event], Any]] = {
        "kinds": lambda e: (e.kind,),
        "kernels": lambda e: (e.kind, short(e.what)) if e.kind != "collectives" else None,
        "collectives": lambda e: (e.kind, e.what) if e.kind == "collectives" else None,
    }
    for name, key in named.items():
        groups: dict[Any, list[Event]] = defaultdict(list)
        for event in all_events:
            if (at := key(event)) is not None:
                groups[at].append(event)
        found = []
        for at, events in groups.items():
            waiting = sum(e.waiting for e in events) / count
            us = sum(e.end - e.begin for e in events) / count - waiting
            row = {"kind": at[0]} | ({"what": at[1]} if len(at) > 1 else {}) | {"calls": len(events) / count, "us": us}
            row |= {"waiting_us": waiting, "share": (us + waiting) / step_us}
            if name == "collectives":
                moved = sum(e.moved for e in events) / count
                row |= {"bytes": moved, "gb_s": moved / us / 1e3 if us else 0.0}
            found.append(row)
        rows[name] = sorted(found, key=lambda row: -(row["us"] + row["waiting_us"]))
    idle = {"idle_between": statistics.mean(between), "idle_within": statistics.mean(within)}
    return {"step_us": step_us} | idle | rows


def _busy(events: Sequence[Event]) -> float:
    """Return the µs with at least one event running."""
    total, until = 0.0, float("-inf")
    for event in sorted(events, key=lambda e: e.begin):
        total += max(0.0, event.end - max(event.begin, until))
        until = max(until, event.end)
    return total


@dataclass(frozen=True)
class Found:
    """Recording that was read.

    Attributes:
        recording: its windows.
        figures: result of `summarise`.
        ranks: events behind the figures.
    """

    recording: Recording
    figures: dict[str, Any]
    ranks: list[list[Event]]

    @property
    def report(self) -> dict[str, Any]:
        """Return all figures, for JSON."""
        return self.recording.report | self.figures


def output_length(steps: int, chunks: int) -> int:
    """Return the minimum tokens of each output of `run`, so that none ends before both windows are over.

    chunks: steps that read prompts, while the first sequences decode already. See SPARE_TOKENS.
    """
    return 3 * (steps + SKIPPED) + chunks


def break_down(recording: Recording, folder: Path) -> Found:
    """Read a recording's traces, and write folder/trace.json.gz: one Chrome trace, a process of it for every rank.

    Raises ValueError where a rank ran too few steps.
    """
    mesh = recording.mesh
    traces = [json.loads(gzip.decompress(rank.trace)) for rank in recording.traced]
    abouts = [json.loads(rank.about) for rank in recording.traced]
    ranks = [read_rank(trace, about, mesh) for trace, about in zip(traces, abouts, strict=True)]
    on_gpu = any(e.get("cat") == "kernel" for e in traces[0]["traceEvents"])
    one_clock = not on_gpu and mesh.hosts == 1  # that of a host's CPUs
    shifts = [0.0] * mesh.world if one_clock else clock_shifts(ranks)
    merge_traces(traces, shifts, folder / "trace.json.gz")
    ranks = with_waiting(ranks, shifts)
    return Found(recording, summarise(ranks), ranks)


def random_prompts(engine: Engine, count: int, tokens: int, seed: int) -> list[list[int]]:
    """Return prompts of random tokens that the engine's model knows and that are no special ones."""
    generator, limit = torch.Generator().manual_seed(seed), min(5000, engine.model_config.vocab_size)
    return list(torch.randint(10, limit, (count, tokens), generator=generator).tolist())


def run(engine: Engine, batch: int, context: int, steps: int, tokens: int, folder: Path) -> Found:
    """Let an engine complete `batch` prompts of random tokens, and watch `steps` steps with all of them decoding.

    tokens: length of each output, see `output_length`; 1: watch steps that read prompts. Otherwise as `record` and
    `break_down`.
    """
    prompts = random_prompts(engine, batch, context, seed=batch)
    begun: set[int] = set()
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)

    def callback(at: int) -> OutputCallback:
        return lambda completion: begun.add(at)

    requests = [engine.submit(prompt, params, callback(at)) for at, prompt in enumerate(prompts)]
    try:
        while tokens > 1 and len(begun) < batch and engine.healthy:
            engine.wait(0.01)
        return break_down(record(engine, steps), folder)
    finally:
        for request in requests:
            engine.cancel(request)
