"""The shared-memory protocol: random calls, a race detector, and every interleaving of small programs.

Each check is also shown to fail on protocols that are wrong.
"""

from __future__ import annotations

import json
import random
import re
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from comm.builds import CANNOT_START, Fault, compile_all, run
from comm.interleave import Program, Violation, explore

RACES = ("-O1", "-g1", "-fsanitize=thread")
# To build what the protocol is in half the time; the sums of each instruction set are in test_rows.py.
SCALAR = Fault("rows.h", "__x86_64__", "__none__")
# So that a program can begin just before the phases wrap around.
FIRST = Fault("exchange.h", r"groups\.size\(\), 1\)", "groups.size(), planted::last_phase + 1)")
LATE = 0xFFFFFEFF
FAULTS = {
    "publishes too weakly": Fault(
        "sync.h",
        r"mine\.phase\.store\(phase, std::memory_order_seq_cst\)",
        r"(planted::fault == 1 ? mine.phase.store(phase, std::memory_order_relaxed) : \g<0>)",
    ),
    "waits too weakly": Fault(
        "sync.h",
        r"line\.phase\.load\(std::memory_order_(acquire|seq_cst)\)",
        r"(planted::fault == 2 ? line.phase.load(std::memory_order_relaxed) : \g<0>)",
    ),
    "has one slot": Fault("arena.h", r"int\(phase & 1\)", "int(phase & (planted::fault == 3 ? 0 : 1))"),
    "does not wait at the end": Fault(
        "exchange.h", r"exit = (c\.two_shot \|\| anyone_in_place)", r"exit = planted::fault != 4 && (\1)"
    ),
}
NUMBER = {name: number for number, name in enumerate(FAULTS, 1)}
"""Number by which a program is told its fault."""
KINDS = [
    *("sum", "sum_chunks", "sum_zero_copy", "sum_some_zero_copy", "scatter", "gather_zero_copy", "exchange"),
    *("two_shot", "two_shot_zero_copy", "two_shot_over_input", "barrier"),
]
MERGES = ["merge", "merge_chunks"]


@pytest.fixture(scope="module")
def built() -> dict[str, Path]:
    """The programs by name: two that make calls, one of them under the race detector, and one that records them."""
    programs: dict[str, tuple[str, Sequence[str], Sequence[Fault]]] = {
        "races": ("stress.cc", RACES, [*FAULTS.values(), SCALAR]),
        "plain": ("stress.cc", ("-O2",), [FIRST, SCALAR]),
        "trace": ("trace.cc", ("-O0",), ()),
    }
    return compile_all(programs)


def ran(done: subprocess.CompletedProcess[str]) -> str:
    if CANNOT_START in done.stderr:
        pytest.skip("the race detector cannot start in this kernel's address space")
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "ranks, calls, delays, last_phase",
    [
        (2, 8_000, 0, 0),
        (2, 5_000, 1, 0),
        (4, 1_500, 1, 0),
        (3, 1_000, 1, LATE),
        pytest.param(2, 50_000, 1, 0, marks=pytest.mark.nightly),
        pytest.param(4, 50_000, 1, 0, marks=pytest.mark.nightly),
        pytest.param(2, 400_000, 0, 0, marks=pytest.mark.nightly),
    ],
)
def test_random_calls(ranks: int, calls: int, delays: int, last_phase: int, built: dict[str, Path]) -> None:
    done = run(built["plain"], ranks, calls, 1, delays, 0, last_phase)
    assert ran(done) == f"{calls} calls of {ranks} ranks\n"


@pytest.mark.parametrize(
    "ranks, calls, delays",
    [
        (2, 2_000, 1),
        (3, 1_000, 1),
        (4, 1_000, 0),
        pytest.param(2, 20_000, 1, marks=pytest.mark.nightly),
        pytest.param(4, 10_000, 0, marks=pytest.mark.nightly),
    ],
)
def test_no_races(ranks: int, calls: int, delays: int, built: dict[str, Path]) -> None:
    ran(run(built["races"], ranks, calls, 2, delays))


@pytest.mark.parametrize("fault", FAULTS)
def test_the_race_detector_finds(fault: str, built: dict[str, Path]) -> None:
    for seed in range(2, 22):  # a wrong result may come first, and end the run; how the threads run decides
        done = run(built["races"], 3, 20_000, seed, 1, NUMBER[fault])
        if CANNOT_START in done.stderr:
            pytest.skip("the race detector cannot start in this kernel's address space")
        if done.returncode and "data race" in done.stderr:
            return
    raise AssertionError(f"no race found: {done.stderr}")


@pytest.mark.parametrize("fault", ["has one slot", "does not wait at the end"])
def test_the_results_show(fault: str, built: dict[str, Path]) -> None:
    for seed in range(2, 22):  # how the threads run decides when a result is wrong
        done = run(built["races"], 3, 20_000, seed, 1, NUMBER[fault], races="report_bugs=0:atexit_sleep_ms=0")
        if CANNOT_START in done.stderr:
            pytest.skip("the race detector cannot start in this kernel's address space")
        if done.returncode == 1 and "wrong result" in done.stderr:
            return
    raise AssertionError(f"no wrong result: {done.stderr}")


def recorded(built: dict[str, Path], world: int, calls: Sequence[str]) -> list[Program]:
    """Return each rank's actions for calls given as `kind` or `kind@group`; group 0 is the world."""
    text = ran(run(built["trace"], world, *(c if "@" in c else f"{c}@0" for c in calls)))
    return [[tuple(action) for action in program] for program in json.loads(text)]


def every_run_of(length: int) -> list[str]:
    """Calls among which every run of `length` kinds occurs: a de Bruijn sequence, greedily."""
    calls, seen = [KINDS[0]] * (length - 1), set()
    while True:
        tail = tuple(calls[len(calls) - length + 1 :])
        # Prefer kinds in reverse: it is this that makes greed find them all.
        new = [kind for kind in reversed(KINDS) if (*tail, kind) not in seen]
        if not new:
            assert len(seen) == len(KINDS) ** length
            return calls
        seen.add((*tail, new[0]))
        calls.append(new[0])


@pytest.mark.parametrize("world, length", [(2, 3), pytest.param(3, 2, marks=pytest.mark.nightly)])
def test_every_interleaving_of_every_run_of_calls(world: int, length: int, built: dict[str, Path]) -> None:
    explored = explore(recorded(built, world, every_run_of(length)))
    assert explored.states > 100_000 and explored.reads > 100_000


def test_every_interleaving_over_several_groups(built: dict[str, Path]) -> None:
    draw = random.Random(7)
    for _ in range(4):
        calls = [f"{draw.choice(KINDS)}@{draw.randrange(3)}" for _ in range(60)]
        assert explore(recorded(built, 3, calls)).reads > 20_000


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.nightly)])
def test_every_interleaving_of_merges_among_other_calls(world: int, built: dict[str, Path]) -> None:
    calls = [call for kind in KINDS for call in ("merge", kind, "merge_chunks", kind)]
    if world == 3:
        calls = [f"{call}@{i % 5 % 3}" for i, call in enumerate(calls)]
    assert explore(recorded(built, world, [*calls, *MERGES, *MERGES])).reads > 20_000


def without(programs: list[Program], rank: int, at: int) -> list[Program]:
    return [p[:at] + p[at + 1 :] if r == rank else p for r, p in enumerate(programs)]


def places(programs: list[Program], what: str) -> Iterator[tuple[int, int]]:
    return ((r, at) for r, program in enumerate(programs) for at, action in enumerate(program) if action[0] == what)


# Elsewhere some waits only keep the ranks in step: chunks of inputs that are read in place, ranks that give nothing.
@pytest.mark.parametrize(
    "world, kinds",
    [
        (2, ["sum", "sum_chunks", "scatter", "two_shot_zero_copy", "two_shot_over_input", "barrier", *MERGES]),
        (3, ["sum", "sum_chunks", "barrier", "merge"]),
    ],
)
def test_every_wait_is_needed(world: int, kinds: list[str], built: dict[str, Path]) -> None:
    for kind in kinds:
        programs = recorded(built, world, [kind] * 3)
        for rank, at in places(programs, "wait"):
            with pytest.raises(Violation, match="not"):
                explore(without(programs, rank, at))


@pytest.mark.parametrize("kind", KINDS)
def test_without_the_waits_of_one_phase(kind: str, built: dict[str, Path]) -> None:
    """The first of a call, and the last of a call that lets others read what it goes on to overwrite."""
    programs = recorded(built, 3, [kind] * 3)
    phases = sorted({action[-1] for action in programs[0] if action[0] == "wait"})
    dropped = {phases[0]}
    if "zero_copy" in kind or "two_shot" in kind:
        dropped.add(phases[-1])
    for phase in dropped:
        broken = [[a for a in program if a[0] != "wait" or a[-1] != phase] for program in programs]
        with pytest.raises(Violation, match="not"):
            explore(broken)


@pytest.mark.parametrize("kind", [*KINDS, *MERGES])
def test_a_phase_that_is_never_published(kind: str, built: dict[str, Path]) -> None:
    programs = recorded(built, 2, [kind] * 2)
    last = max(at for rank, at in places(programs, "publish") if rank == 1)
    with pytest.raises(Violation, match="all ranks wait"):
        explore(without(programs, 1, last))


@pytest.mark.parametrize("kind", ["sum", "sum_chunks", "scatter", "exchange", "two_shot", *MERGES])
def test_published_before_it_is_staged(kind: str, built: dict[str, Path]) -> None:
    programs = recorded(built, 2, [kind])
    at = min(at for rank, at in places(programs, "publish") if rank == 0)
    first = programs[0]
    assert first[at - 1][:2] == ("write", "staged")
    with pytest.raises(Violation, match="staged"):
        explore([[*first[: at - 1], first[at], first[at - 1], *first[at + 1 :]], programs[1]])


def in_one_buffer(programs: list[Program], holds: str, size: int) -> list[Program]:
    """Return the programs with the two buffers of each rank, of `size` bytes each, made one."""
    moved = {}
    for program in programs:
        starts = sorted({a[3] // size * size for a in program if a[:2] == ("write", holds)})
        assert len(starts) <= 2
        moved[starts[-1]] = starts[0]

    def move(action: tuple) -> tuple:
        if action[0] not in ("read", "write") or action[1] != holds:
            return action
        start = action[3] // size * size
        return (*action[:3], action[3] + moved.get(start, start) - start, action[4])

    return [[move(action) for action in program] for program in programs]


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("kind", ["sum", "sum_chunks", "scatter", "exchange", "two_shot", *MERGES])
def test_one_slot_is_not_enough(kind: str, world: int, built: dict[str, Path]) -> None:
    programs = recorded(built, world, [kind] * 3)
    explore(programs)
    with pytest.raises(Violation, match="staged"):
        explore(in_one_buffer(programs, "staged", 4096))


@pytest.mark.parametrize("kind", ["sum", "barrier"])
def test_one_note_is_not_enough(kind: str, built: dict[str, Path]) -> None:
    programs = recorded(built, 2, [kind] * 3)
    with pytest.raises(Violation, match="note"):
        explore(in_one_buffer(programs, "note", 8))


def test_what_is_recorded(built: dict[str, Path]) -> None:
    """The kinds are what their names say: chunks, shots and copies would else be tested in name only."""

    def seen(kind: str, what: str) -> set[tuple[str, int]]:
        return {a[1:3] for program in recorded(built, 2, [kind]) for a in program if a[0] == what}

    for kind in MERGES:
        assert {chunk for _, chunk in seen(kind, "write")} == ({0} if kind == "merge" else {0, 1}), kind
        assert {holds for holds, _ in seen(kind, "read")} == {"note", "staged"}, kind
    for kind in KINDS:
        reads, chunks = seen(kind, "read"), {chunk for _, chunk in seen(kind, "write")}
        assert chunks == ({0} if kind in ("sum", "barrier") else {0, 1}), kind
        assert bool({h for h, _ in reads} & {"input"}) == bool(re.search("copy|over", kind)), kind
        assert bool({h for h, _ in reads} & {"result"}) == ("two_shot" in kind), kind
        assert bool({h for h, _ in seen(kind, "write")} & {"staged"}) == (
            kind not in ("barrier", "sum_zero_copy", "gather_zero_copy", "two_shot_zero_copy", "two_shot_over_input")
        )
