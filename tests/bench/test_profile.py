"""Reports of `weft profile`: on traces written here, whose figures are known, and on one of a real run."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs
from support import small_config

from e2e.here import weft_here
from weft.engine.assets import embedded_model_dir
from weft.engine.controller.profiling import ProfiledSteps, ProfileError, Recording, merge_traces, watch
from weft.engine.messages.rank_messages import Profiled
from weft.planner.spec import Mesh
from weft_bench.breakdown import Event, clock_shifts, kind_of, read_rank, short, summarise, with_waiting

PAIR = Mesh(1, 2, 2, 1)
PEER = "void weft::exchange<__nv_bfloat16, 2, 1>(weft::Call)"


def trace(steps: list[list[tuple[str, float, float]]], graph: bool, base_ns: int = 10**18) -> dict[str, Any]:
    """A GPU's: of each step its kernels (name, begin, end), in µs. Launches take no time; a step begins each 1000 µs,
    and its kernels may run long after the next one has begun."""
    events: list[dict[str, Any]] = []
    for n, kernels in enumerate(steps):
        at = 1000.0 * n
        mark = {"ph": "X", "cat": "user_annotation", "name": f"weft step {n + 5}", "ts": at, "dur": 900, "tid": 1}
        events.append(mark)
        for i, (name, begin, end) in enumerate(kernels):
            correlation = 100 * n if graph else 100 * n + i
            launch = "cudaGraphLaunch" if graph else "cudaLaunchKernel"
            if i == 0 or not graph:
                events.append(
                    {"ph": "X", "cat": "cuda_runtime", "name": launch, "ts": at + 1 + i, "dur": 0, "tid": 1}
                    | {"args": {"correlation": correlation}}
                )
            events.append(
                {"ph": "X", "cat": "kernel", "name": name, "ts": begin, "dur": end - begin, "tid": 7, "pid": 0}
                | {"args": {"correlation": correlation}}
            )
    return {"traceEvents": list(reversed(events)), "baseTimeNanoseconds": base_ns}


def about(rank: int, steps: int, *moves: list[Any]) -> dict[str, Any]:
    """Steps of one kind, the last of those that are told."""
    return {"rank": rank, "steps": [[n + 5, len(moves) - 1] for n in range(steps)], "moves": moves}


def late(kernels: list[tuple[str, float, float]], by: float, first: int = 0) -> list[tuple[str, float, float]]:
    return [(name, begin + by, end + by) for name, begin, end in kernels[first:]]


STEP = [("gemm", 0.0, 100.0), (PEER, 100.0, 150.0), ("_up", 160.0, 200.0), ("ncclDevKernel_AllReduce", 200.0, 240.0)]
MOVES = [["site.0", "all_reduce", "world", 4096], ["site.1", "all_gatherv", "world", 512]]


@pytest.mark.parametrize("graph", [False, True])
def test_kernels_belong_to_the_step_that_launched_them(graph: bool) -> None:
    steps = [late(STEP, 1000.0 * n + 1500.0) for n in range(5)]  # the GPU is more than a step behind
    events = read_rank(trace(steps, graph), about(0, 5, [["s", "other plan", "world", 1]] * 2, MOVES), PAIR)
    assert [e.step for e in events] == [n for n in (7, 8, 9) for _ in STEP]  # not the first two
    assert [e.kind for e in events[:4]] == ["dense products", "collectives", "experts", "collectives"]
    assert [(e.what, e.moved, e.ranks) for e in events[:4] if e.kind == "collectives"] == [
        ("all_reduce", 4096, (0, 1)),
        ("all_gatherv", 512, (0, 1)),
    ]
    assert events[0].begin == 1e15 + 3500 and events[0].end - events[0].begin == 100


def test_a_kernel_begins_when_the_one_before_on_its_stream_has_ended() -> None:
    early = [("_up_prompts", 0.0, 100.0), ("_down", 40.0, 130.0), ("_sum_choices", 90.0, 120.0)]
    steps = [late(early, 1000.0 * n) for n in range(4)]
    found = trace(steps, True)
    events = read_rank(found, about(0, 4, []), PAIR)[:3]
    assert [(e.begin - 1e15 - 2000, e.end - 1e15 - 2000) for e in events] == [(0, 100), (100, 130), (120, 120)]
    assert {e.kind for e in events} == {"experts"}
    for event in found["traceEvents"]:
        event.get("args", {})["stream"] = event["name"]  # side by side on streams of their own
    assert [e.begin - 1e15 - 2000 for e in read_rank(found, about(0, 4, []), PAIR)[:3]] == [0, 40, 90]


def test_exchanges_that_the_plan_does_not_name_keep_their_kernels() -> None:
    steps = [late(STEP, 1000.0 * n) for n in range(4)]
    events = read_rank(trace(steps, False), about(0, 4, MOVES[:1]), PAIR)
    assert [e.what for e in events if e.kind == "collectives"] == ["exchange", "ncclDevKernel_AllReduce"] * 2


def test_clocks_are_set_by_the_ends_of_exchanges() -> None:
    """Rank 1's clock is 333 µs ahead; it comes late into one exchange, and early into others."""
    ranks = []
    for rank, wrong in ((0, 0.0), (1, 333.0)):
        steps = [late(STEP, 1000.0 * n + wrong) for n in range(9)]
        if rank == 1:
            name, begin, end = steps[4][1]
            steps[4][1] = (name, begin - 20, end + 5)
        ranks.append(read_rank(trace(steps, True), about(rank, 9, MOVES), PAIR))
    assert clock_shifts(ranks) == pytest.approx([0.0, -333.0])


def test_clocks_of_groups_that_meet_only_through_others() -> None:
    mesh = Mesh(2, 2, 4, 1)  # ranks 0 1, 2 3 by attn_tp, and 0 2, 1 3 by attn_dp
    wrong = [0.0, 40.0, -7.0, 1000.0]
    ranks = []
    for rank in range(4):
        steps = [late(STEP, 1000.0 * n + wrong[rank]) for n in range(6)]
        moves = [["s", "all_reduce", "attn_tp", 1], ["s", "all_gatherv", "attn_dp", 1]]
        ranks.append(read_rank(trace(steps, True), about(rank, 6, moves), mesh))
    assert clock_shifts(ranks) == pytest.approx([-w for w in wrong])


def test_waiting_is_what_passes_before_the_last_has_entered() -> None:
    def exchange(begin: float, end: float, ranks: tuple[int, ...] = (0, 1)) -> Event:
        return Event(1, "collectives", "all_reduce", begin, end, ranks)

    ranks = [[exchange(0, 50), exchange(60, 80)], [exchange(30, 52), exchange(90, 95)]]
    waits = [[e.waiting for e in events] for events in with_waiting(ranks, [0.0, 0.0])]
    assert waits == [[30, 20], [0, 0]]  # never longer than the exchange itself
    waits = [[e.waiting for e in events] for events in with_waiting(ranks, [0.0, -25.0])]
    assert waits == [[5, 5], [0, 0]]
    alone = [[exchange(0, 50, (0,))], [exchange(30, 52, (1,))]]
    assert [e.waiting for events in with_waiting(alone, [0.0, 0.0]) for e in events] == [0, 0]


def test_attention_of_one_group_alone_moves_no_others() -> None:
    """Ranks 0 and 1 merge attention between two exchanges of all; 2 and 3, whose group is idle, do not."""
    mesh, merge = Mesh(2, 2, 4, 1, dcp=2), "void weft::merge<__nv_bfloat16, 2>(weft::Merge)"
    steps = [[(PEER, 0.0, 50.0), (merge, 60.0, 70.0), (PEER, 100.0, 150.0)] for _ in range(4)]
    ends = [["s", "all_gatherv", "world", 8], ["s", "reduce_scatterv", "world", 8]]
    moves = [ends[0], ["attention", "merge_scatterv dcp · peer", "dcp", 96], ends[1]]
    ranks = []
    for rank in range(4):
        kernels = [late(step, 1000.0 * n + 5.0 * rank) for n, step in enumerate(steps)]
        if rank >= 2:
            kernels = [[step[0], step[2]] for step in kernels]
        ranks.append(read_rank(trace(kernels, True), about(rank, 4, [], moves if rank < 2 else ends), mesh))
    assert [(e.what, e.moved, e.ranks) for e in ranks[0][1::3]] == [("merge_scatterv dcp · peer", 96, (0, 1))] * 2
    waits = [[e.waiting for e in events if e.step == 7] for events in with_waiting(ranks, [0.0] * 4)]
    assert waits == [[15, 5, 15], [10, 0, 10], [5, 5], [0, 0]]
    assert clock_shifts(ranks) == [0, -5, -10, -15]


def test_figures_of_a_step() -> None:
    steps = [late(STEP, 1000.0 * n) for n in range(12)]
    one = read_rank(trace(steps, True), about(0, 12, [], MOVES), PAIR)
    other = [Event(e.step, e.kind, e.what, e.begin + 10, e.end, e.ranks, e.moved) for e in one]
    found = summarise(with_waiting([one, other], [0.0, 0.0]))
    span = 9 * 1000 + 240  # ten steps; the pause after the last is not known
    assert found["step_us"] == pytest.approx((span + span - 10) / 2 / 10)
    assert found["idle_between"] == pytest.approx((9 * 760 / span + 9 * 770 / (span - 10)) / 2)
    assert found["idle_within"] == pytest.approx((10 * 10 / span + 10 * 40 / (span - 10)) / 2)
    gemm = next(row for row in found["kernels"] if row["what"] == "gemm")
    assert gemm["calls"] == 1 and gemm["us"] == pytest.approx((100 + 90) / 2)
    reduce = next(row for row in found["collectives"] if row["what"] == "all_reduce")
    assert reduce["waiting_us"] == pytest.approx(10 / 2) and reduce["us"] == pytest.approx(40)
    assert reduce["bytes"] == 4096 and reduce["gb_s"] == pytest.approx(4096 / 40 / 1e3)
    assert reduce["share"] == pytest.approx(45 / found["step_us"])
    assert [row["kind"] for row in found["kinds"]] == ["dense products", "collectives", "experts"]
    with pytest.raises(ValueError, match="fewer than two"):
        summarise([one[:2]])


def test_work_that_overlaps_is_busy_once() -> None:
    spans = [(1, 0, 10), (1, 5, 12), (1, 15, 16), (2, 20, 30)]
    found = summarise([[Event(step, "other", "a", begin, end) for step, begin, end in spans]])
    assert found["idle_between"] == pytest.approx(4 / 30) and found["idle_within"] == pytest.approx(3 / 30)


def test_names() -> None:
    for name, kind in (
        (PEER, "collectives"),
        ("void weft::merge<__half, 4>(weft::Merge)", "collectives"),
        ("_merge_splits", "attention"),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "collectives"),
        ("weft collective all_reduce", "collectives"),
        ("_attend_splits", "attention"),
        ("_attend_runs", "attention"),
        ("_down", "experts"),
        ("nvjet_tst_64x8_64x16_4x1_v_bz_TNT", "dense products"),
        ("aten::linear", "dense products"),
        ("weft kernel linear", "dense products"),
        ("weft kernel linear_float8", "dense products"),
        ("weft kernel multiply_heads", "dense products"),
        ("weft kernel experts", "experts"),
        ("weft kernel choose", "experts"),
        ("weft kernel decode", "attention"),
        ("weft kernel prompt", "attention"),
        ("weft kernel best", "sampling"),
        ("weft kernel rope", "norms"),
        ("_norm_rope_cache", "norms"),
        ("Memcpy HtoD (Pinned -> Device)", "copies"),
        ("_candidates", "sampling"),
        ("_gather_first", "sampling"),
        ("_cutoff", "sampling"),
        ("void at::native::elementwise_kernel<128, 4>(int)", "other"),
    ):
        assert kind_of(name) == kind, name
    assert short(PEER) == "exchange" and short("aten::linear") == "linear" and short("_up") == "_up"
    assert short("void at::native::(anonymous namespace)::distribution<float, 4>(int)") == "distribution"


def test_one_trace_of_all_ranks(tmp_path: Path) -> None:
    traces = [trace([STEP], True, 10**18), trace([STEP], True, 10**18 + 5000)]
    traces[0]["traceEvents"].append({"ph": "s", "id": 4, "ts": 1.0, "pid": 9, "name": "ac2g"})
    merge_traces(traces, [0.0, -3.0], tmp_path / "t.json.gz")
    with gzip.open(tmp_path / "t.json.gz", "rt") as file:
        events = json.load(file)["traceEvents"]
    gemms = {e["pid"]: e["ts"] for e in events if e["name"] == "gemm"}
    assert gemms == {0: 0.0, 1: 5.0 - 3.0}
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == ["rank 0", "rank 1"]
    assert [e["id"] for e in events if e["ph"] == "s"] == ["0.4"]


def test_a_real_window(tmp_path: Path) -> None:
    """Profile a latent cache whose tokens are sharded over two ranks."""
    out, model = tmp_path / "found", tmp_path / "model"
    small_config("deepseek_v2", 2, max_position_embeddings=2048).save_pretrained(model)
    words = "--load-format dummy --num-layers 1 --attn-tp 2 --ep 2 --moe-tp 1 --dcp 2 --batch 3 --context 20 --steps 2"
    code, text, err = weft_here("profile", str(model), *words.split(), "--output", str(out))
    assert code == 0, (code, text, err)
    assert sorted(p.name for p in out.iterdir()) == ["profile.json", "profile.png", "trace.json.gz"]
    found = json.loads((out / "profile.json").read_text())
    calls = {row["what"].rpartition(" · ")[0]: row["calls"] for row in found["collectives"]}
    sharded = {what: n for what, n in calls.items() if what.endswith(" dcp")}
    attention = {"queries: all_gatherv dcp": 1, "outputs: fused: merge_scatterv dcp": 1}
    assert sharded == attention and sum(calls.values()) == 4, calls
    moved = {row["what"].partition(" dcp")[0]: row["bytes"] for row in found["collectives"]}
    assert moved["queries: all_gatherv"] == 3 * 2 * 10 * 4, "of two heads"
    assert moved["outputs: fused: merge_scatterv"] == 3 * 2 * (5 * 4 + 4)
    assert all(row["bytes"] > 0 and row["us"] > 0 for row in found["collectives"])
    assert found["cpu_us_a_step"]["controller"] > 0 and len(found["cpu_us_a_step"]["rank"]) == 2
    threads = found["cpu_us_a_step"]["rank_threads"]
    assert [threads[rank][f"weft-rank-{rank}"] > 0 for rank in (0, 1)] == [True, True] and "weft-rank-0" in text
    assert not [name for name in threads[0] if "ZMQ" in name], "a message wakes the thread that wants it"
    assert max(map(len, text.splitlines()[:-1])) <= 80 and "waiting" in text
    assert (out / "profile.png").read_bytes().startswith(b"\x89PNG")
    with gzip.open(out / "trace.json.gz", "rt") as file:
        marks = [e for e in json.load(file)["traceEvents"] if e["name"].startswith("weft step")]
    assert {e["pid"] for e in marks} == {0, 1} and len(marks) == 2 * (2 + 2)


def test_steps_of_prompts(tmp_path: Path) -> None:
    """Two ranks, each step with one whole prompt: the rows of its exchanges are the prompt's."""
    words = "--num-layers 1 --attn-tp 2 --prompts --batch 14 --context 24 --steps 2"
    code, text, err = weft_here("profile", *words.split(), "--output", str(tmp_path / "found"))
    assert code == 0 and "weights and cached" not in text, (code, text, err)
    figures = json.loads((tmp_path / "found" / "profile.json").read_text())
    width = json.loads((embedded_model_dir() / "config.json").read_text())["hidden_size"]
    assert "bytes_a_step" not in figures
    assert {row["bytes"] for row in figures["collectives"] if row["what"].startswith("reduce_scatterv")} == {
        24 * width * 4
    }, figures["collectives"]


def test_what_a_server_recorded_is_read_later(tmp_path: Path) -> None:
    """Two ranks of a GPU: the figures of the recording equal the figures of its traces."""
    ranks = [
        Profiled(
            rank, 4, 0.02, 0.001, 0.002, {"weft-rank": 0.001},
            gzip.compress(json.dumps(trace([STEP] * 4, True)).encode()), json.dumps(about(rank, 4, MOVES)),
        )
        for rank in (0, 1)
    ]  # fmt: skip
    bare = tuple(structs.replace(rank, trace=b"", about="") for rank in ranks)
    recording = Recording(PAIR, ProfiledSteps(4, 0.02, 0.004, bare), tuple(ranks))
    (folder := tmp_path / "traces").mkdir()
    assert recording.write(folder) == ["recording.json", "rank0.json.gz", "rank1.json.gz"]
    assert Recording.read(folder) == recording
    code, text, err = weft_here("profile", "--read", str(folder), "--output", str(out := tmp_path / "found"))
    assert (code, err) == (0, "") and "all_gatherv" in text and "weights and cached" not in text, text
    found = json.loads((out / "profile.json").read_text())
    cpu = found["cpu_us_a_step"]
    assert found["unprofiled_step_us"] == 5000.0 and cpu["controller"] == 1000.0
    assert cpu["rank"] == [250.0] * 2 and cpu["rank_process"] == [500.0] * 2
    assert {row["what"] for row in found["collectives"]} == {what for _, what, *_ in MOVES}
    for broken in ("{", None):
        (folder / "recording.json").write_text(broken) if broken else (folder / "rank1.json.gz").unlink()
        code, _, err = weft_here("profile", "--read", str(folder), "--output", str(out))
        assert code == 2 and err.startswith("weft: cannot read a recording") and err.count("\n") == 1, err
        recording.write(folder)


def test_an_idle_engine_has_no_window() -> None:
    stats = SimpleNamespace(steps=7, running=0)
    ranks = SimpleNamespace(ask_all=lambda message, what: [Profiled(0, 0, 0.0, 0.0, 0.0)])
    config = SimpleNamespace(executor="process", step_timeout_s=60.0)
    engine: Any = SimpleNamespace(config=config, stats=lambda: stats, ask_ranks=lambda question: question(ranks))
    with pytest.raises(ProfileError, match="only 0 steps were run while 20 were to be watched; keep requests running"):
        watch(engine, 20)


@pytest.mark.parametrize(
    "words, text",
    [
        ("--steps 1", "steps is 1; it must be 2 or more"),
        ("--context 1000", "positions; at most --context "),
        ("--steps 2000", "positions; at most --steps below 2000"),
        ("--output /proc/x", "with --output"),
        ("--prompts --steps 2 --attn-dp 2 --batch 23", "--batch 24 or more lasts"),
    ],
)
def test_what_is_refused_before_anything_starts(words: str, text: str) -> None:
    code, out, err = weft_here("profile", *words.split())
    assert code == 2 and not out and err.startswith("weft: ") and err.count("\n") == 1 and text in err, err
