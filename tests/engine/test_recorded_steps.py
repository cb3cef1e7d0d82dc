"""Recorded decode steps on CPUs: results have the bits of eager steps, whatever lay in the recorder's memory before."""

from __future__ import annotations

import ctypes
import itertools
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support import run_world, small_model
from torch import Tensor

from engine.conftest import byte_tokenizer, generate_together
from engine.test_engine import GREEDY, config, prompts
from gpu import definitions
from weft.engine.controller.engine import Engine
from weft.engine.kernels import cpu_ops
from weft.engine.kernels.step_inputs import table_pieces
from weft.engine.kv.tokens import token_bytes
from weft.engine.messages.rank_messages import Adjust, Chunk, Entries, GroupRows, Join, Result, Sampling, Step
from weft.engine.messages.request import SamplingParams
from weft.engine.worker.memory import dummy_tables
from weft.engine.worker.recorded_steps import RecordedSteps
from weft.engine.worker.recorder import NotRecordable, Recorder, StepRecording
from weft.engine.worker.worker import Worker
from weft.kernels import cpu_rows
from weft.kernels.build import model_kernels
from weft.planner.cost import costs

NAN = float("nan")
SIZES = dict(vocab_size=257, max_position_embeddings=256, num_hidden_layers=2)


class Poisoned:
    """Addresses and bytes of all results in recorders' memory, to fill them before a replay."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.pieces = defaultdict[int, dict[int, int]](dict)
        unfilled = Recorder._unfilled

        def made(recorder: Recorder, like: Tensor) -> Tensor:
            piece = unfilled(recorder, like)
            at, size = piece.untyped_storage().data_ptr(), piece.untyped_storage().nbytes()
            self.pieces[id(recorder)][at] = max(size, self.pieces[id(recorder)].get(at, 0))
            return piece

        monkeypatch.setattr(Recorder, "_unfilled", made)

    def poison(self, recorder: Recorder) -> None:
        """Fill a recorder's memory with NaN, or −1."""
        for at, size in self.pieces[id(recorder)].items():
            ctypes.memset(at, 0xFF, size)


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> Poisoned:
    return Poisoned(monkeypatch)


@pytest.fixture
def replays(poisoned: Poisoned, monkeypatch: pytest.MonkeyPatch) -> list[StepRecording]:
    """Recordings as they are replayed, over poisoned memory."""
    seen, replay = list[StepRecording](), StepRecording.replay

    def watched(recording: StepRecording) -> None:
        seen.append(recording)
        poisoned.poison(recording.recorder)
        replay(recording)

    monkeypatch.setattr(StepRecording, "replay", watched)
    return seen


def test_best_logits() -> None:
    """Like torch.argmax, with ties, infinities and NaN, for all dtypes and numbers of threads."""
    for dtype, count, threads in itertools.product(cpu_rows.DTYPES, (1, 15, 16, 257, 1000), (1, 3)):
        torch.set_num_threads(threads)
        rows = torch.randn(7, 2 * count).to(dtype)[:, :count]
        rows[1] = 0.0
        rows[2] = -torch.inf
        rows[3, count // 2] = NAN
        rows[4, count // 3] = rows[4, -1] = torch.inf
        rows[5, -1], rows[5, 0] = -torch.inf, torch.inf
        rows[6, count // 2 :] = NAN
        found, at = cpu_ops.best(rows, 40), rows.float().argmax(-1)
        torch.set_num_threads(1)
        assert torch.equal(found[:, 1].long() - 40, at)
        assert torch.equal(found[:, 0].nan_to_num(9e9), rows.float().gather(1, at[:, None])[:, 0].nan_to_num(9e9))


@pytest.mark.parametrize("live", [0, 1, 4, 6])
def test_inputs_and_samples_are_as_defined(live: int) -> None:
    page, groups, capacity, table = 4, [(5, False), (2, True), (5, False)], 6, 9
    pieces = table_pieces([width for width, _ in groups], [state for _, state in groups], torch.device("cpu"))
    rows, places, drafts = torch.tensor([[7, 1, 0, 4, 4, 4], [0, 0, 0, 0, 1, 2], [9, 9, 9, 9, 5, 6]], dtype=torch.int32)
    last, length = torch.randint(0, 250, (table,)).int(), torch.randint(0, 18, (table,)).int()
    last[1] = -1
    entries = torch.randint(0, 99, (table, 12)).int()
    steps, count = torch.tensor([6], dtype=torch.int32), torch.tensor([live], dtype=torch.int32)
    other_steps = steps.clone()
    found = cpu_ops.step_in((rows, places, drafts, count, last, length, entries, other_steps), pieces, page)
    wanted = definitions.step_in(rows, places, drafts, live, last, length, entries, steps, groups, page)
    assert torch.equal(other_steps, steps)
    for name, x, y in zip(("tokens", "positions", "lengths"), found, wanted, strict=False):
        assert torch.equal(x, y), name
    defined = wanted[3] >= 0
    assert torch.equal(found.entries[defined], wanted[3][defined])
    used = [state or side == 0 for _, state in groups for side in (0, 1)]
    assert torch.equal(found.slots.flatten(0, 1)[used], wanted[4].flatten(0, 1)[used])

    candidates = torch.randint(0, 4, (3, capacity, 2)).float()
    candidates[..., 1] += torch.arange(3)[:, None] * 10  # a rank's share of the vocabulary
    state = [last, length, torch.full((table,), 99).int(), steps, torch.full((8, table), 99).int()]
    own = [x.clone() for x in state]
    cpu_ops.step_out(rows, count, candidates, found.lengths, *own)
    definitions.step_out(rows, live, live, candidates[:, :, None], found.lengths, *state)
    for x, y in zip(own, state, strict=True):
        assert torch.equal(x, y)


READS: dict[str, Callable[[Tensor], object]] = {
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "item": lambda x: x.sum().item(),
    "int": lambda x: int(x.sum()),
    "bool": lambda x: bool(x.any()),
    "index": lambda x: range(8)[x.long().sum()],
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 0],
    "unique": lambda x: x.unique_consecutive(),
    "equal": lambda x: torch.equal(x, x + 1),
    "random": lambda x: torch.rand_like(x),
}


@pytest.mark.parametrize("read", READS)
def test_what_the_host_reads_is_not_recorded(read: str) -> None:
    recorder = Recorder()
    with pytest.raises(NotRecordable), recorder.recording():
        READS[read](torch.ones(2, 3))
    assert cpu_rows.recorders.note is None
    assert torch.ones(2).tolist() == [1.0, 1.0], "other reads are allowed again"


@torch.inference_mode()
def test_operators_of_torch_are_repeated(poisoned: Poisoned) -> None:
    """Views, results of several tensors, writes in place, new tensors, constants; the inputs are other ones then."""
    x, weight, index = torch.randn(3, 64), torch.randn(32, 64), torch.tensor([0, 2, 1])

    def step() -> list[Tensor]:
        y = cpu_ops.linear(x, weight)
        assert y is not None
        left, right = y.split(16, dim=1)
        total = left.contiguous().add_(right.t().t())
        values, places = total.topk(3, dim=-1)
        kept = torch.zeros(3, 3).index_copy_(0, index, values)
        made = torch.full((3,), 2.0) * torch.arange(3) + torch.tensor([1.0, 2.0, 3.0])
        whole = torch.empty(3, 6)
        whole[:, :3], whole[:, 3:] = kept, made.expand(3, 3)
        return [y, total, places, whole.bfloat16().float(), y[index].unflatten(1, (4, -1)).transpose(0, 1)]

    recorder = Recorder()
    with recorder.recording() as recording:
        found = list(map(recorder.borrowed, step()))
    for _ in range(3):
        poisoned.poison(recorder)
        x.normal_()
        index.copy_(torch.randperm(3))
        recording.replay()
        assert all(map(torch.equal, found, step()))


def test_recording_imports_no_compiler_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its import takes two seconds of a core, in every rank at each start."""

    class Fresh(Recorder):
        __torch_dispatch__ = Recorder.__torch_dispatch__  # torch may wrap the one of each class

    monkeypatch.setitem(sys.modules, "torch._dynamo", None)  # an import of it fails
    with Fresh().recording() as recording:
        torch.ones(2) + 1.0
    assert len(recording.calls) == 2


@torch.inference_mode()
def test_steps_share_memory_and_neighbouring_kernels_are_one_call() -> None:
    x, weight, recorder = torch.randn(16, 512), torch.randn(512, 512), Recorder()
    norm = torch.ones(512)
    for rows in (16, 3, 1):
        with recorder.recording() as recording:
            y = x[:rows]
            for _ in range(200):  # 16 rows' results are 13 MB
                y = cpu_ops.linear(cpu_rows.rms_norm(y, norm, 1e-5), weight)
            y = y + 1.0
            for _ in range(200):
                y = y * 2.0
        assert (len(recording.steps), len(recording.calls)) == (1 + 201, 400 + 201)
        del y
    assert recorder.bytes == 4 << 20
    with torch.profiler.profile() as profile:
        recording.replay()
    counts = {event.key: event.count for event in profile.key_averages()}
    assert counts["weft kernel linear"] == counts["weft kernel norm"] == 200


LAYOUTS = {
    "1x1": dict(),
    "1x2": dict(attn_tp=2, moe_tp=2),
    "2x1": dict(attn_dp=2, moe_tp=2),
    "ep 2": dict(attn_dp=2, ep=2),
    "2x2": dict(attn_dp=2, attn_tp=2, ep=2, moe_tp=2),
    "dcp 2": dict(attn_tp=2, moe_tp=2, dcp=2, dcp_interleave=2),
}
PROMPTS = (5, 1, 9, 14)
DECODED: list[tuple[Sequence[int], Sequence[int]]] = [
    ((0, 1, 2, 3), (0, 1)),
    ((0, 1, 2, 3), (0, 1)),
    ((2,), ()),
    ((2,), ()),
    ((), (1,)),
    ((3, 0, 2), (1, 0)),
    ((1,), (0, 1, 2, 3)),
    ((0, 1, 2, 3), (3, 2, 1, 0)),
]
"""Rows that decode in each step, in the first DP group and in the second."""
OTHERS = "llama", "qwen2", "mistral", "mixtral", "minimax_m2", "deepseek_v2", "qwen2_moe"
DENSE = {"llama", "qwen2", "qwen3", "mistral"}
LOGPROBS = Adjust(logprobs=4)


def steps_of(worker: Worker) -> list[Result]:
    """Return the results of prompts and decode steps; every second one asks for logprobs of all rows."""
    groups, config, results = worker.config.attn_dp, worker.config, list[Result]()
    reads = lambda rows, number: tuple((at, LOGPROBS) for at in range(len(rows))) if number % 2 else ()  # noqa: E731

    def run(number: int, *rows: GroupRows) -> None:
        results.append(worker.step(Step(number, rows[:groups]))())

    def joins(number: int, row: int, tokens: int) -> GroupRows:
        tables = dummy_tables(worker.groups, 8 * row, 8 * config.interleave.span, config.interleave.span)
        how = Sampling(temperature=0.7 if row == 3 else 0.0, seed=5)
        chunk = Chunk(row, token_bytes([(7 * row + 3 * i + number) % 257 for i in range(tokens)]), True)
        return GroupRows(chunks=(chunk,), joins=(Join(row, row, 0, tuple(table[:6] for table in tables), how),))

    for row, tokens in enumerate(PROMPTS):
        run(row, joins(0, row, tokens), joins(1, row, tokens + 1))
    for number, rows in enumerate(DECODED):
        new = (Entries(0, 0, 6, (6,)),) if number == 6 else ()
        run(10 + number, *(GroupRows(tuple(r), adjust=reads(r, number), entries=new if r else ()) for r in rows))
    return results


@pytest.mark.parametrize(
    ("family", "layout"),
    [*(("qwen3", layout) for layout in LAYOUTS), *(("qwen3_moe", layout) for layout in ("2x2", "dcp 2"))]
    + [(family, "1x2") for family in OTHERS]
    + [pytest.param("qwen3_moe", layout, marks=pytest.mark.nightly) for layout in ("1x1", "1x2", "2x1", "ep 2")],
)
def test_bits_are_those_of_eager_steps(
    family: str, layout: str, replays: list[StepRecording], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ragged lengths, one sequence, idle groups, groups of unequal rows, rows in another order, new pages."""
    few = dict(num_key_value_heads=1) if layout == "dcp 2" else {}
    small_model(family, 4, tmp_path, seed=3, **SIZES | few)
    refusals = set[str | None]()

    def results(**options: Any) -> list[list[Result]]:
        made = config(tmp_path, **LAYOUTS[layout], **options)

        def rank_main(transport: Any) -> list[Result]:
            with torch.inference_mode():
                worker = Worker(made, [transport], costs("cpu"), lambda message: None)
                refusals.add(worker.eager_because)
                return steps_of(worker)

        return run_world(made.mesh.world, rank_main)

    eager = results(cuda_graphs=False)
    assert not replays and refusals == {"--no-cuda-graphs is given"}
    refusals.clear()
    recorded = results()
    for ours, theirs in zip(recorded, eager, strict=True):
        for step, (found, wanted) in enumerate(zip(ours, theirs, strict=True)):
            assert (found.tokens, found.logprobs) == (wanted.tokens, wanted.logprobs), f"step {step}"
    [refusal] = refusals
    assert refusal is None or family not in DENSE
    assert len(replays) == (0 if refusal else len(DECODED) * len(eager))


@pytest.mark.parametrize("layout", [pytest.param("1x1", marks=pytest.mark.nightly), "1x2", "2x1"])
def test_an_engine_of_processes(layout: str, tmp_path: Path) -> None:
    """Preemption, since pages are few, prefixes that are used again, joins and leaves, next to random rows."""
    small_model("qwen3", 4, tmp_path, seed=3, **SIZES)
    byte_tokenizer(tmp_path)
    asked, few = [p[:11] for p in prompts(6)], replace(GREEDY, max_tokens=8)
    random = SamplingParams(max_tokens=8, temperature=0.8, top_k=20, seed=2, ignore_eos=True, logprobs=1)
    found: list[Any] = []
    for recorded in (False, True):
        options = dict(executor="process", kv_tokens=28, max_batch_tokens=8, cuda_graphs=recorded)
        with Engine(config(tmp_path, **LAYOUTS[layout], **options)) as engine:
            assert bool(engine.eager) != recorded
            greedy = [[r.token_ids for r in generate_together(engine, asked, few)] for _ in "ab"]
            mixed = generate_together(engine, asked, [few, random] * 3)
            found.append((greedy, [r.token_ids for r in mixed]))
            assert engine.stats().failures == 0 and engine.stats().preemptions > 0
            moved = sum(stat.bytes for stat in engine.comm_report()[0])
            assert (moved > 0) == (engine.config.mesh.world > 1)
            engine.check_idle()
    assert found[0] == found[1] and found[0][0][0] == found[0][0][1]


def test_a_model_that_cannot_be_recorded_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    small_model("qwen3", 2, tmp_path, seed=3, **SIZES)
    byte_tokenizer(tmp_path)
    sample = RecordedSteps._sample

    def reads(self: RecordedSteps, logits: Tensor, sampled: Any) -> None:
        if len(logits) > 2:
            logits.tolist()
        sample(self, logits, sampled)

    few = replace(GREEDY, max_tokens=4)
    with Engine(config(tmp_path)) as engine:
        wanted = [r.token_ids for r in engine.generate(prompts(4), few)]
        assert engine.eager == ""
    monkeypatch.setattr(RecordedSteps, "_sample", reads)
    with Engine(config(tmp_path)) as engine:  # found at the first step of three rows
        assert [r.token_ids for r in engine.generate(prompts(4), few)] == wanted and engine.stats().failures == 0
    assert "decode steps run eagerly, since they cannot be recorded: Tensor.tolist reads values" in caplog.text
    for options, why in (
        (dict(cuda_graphs=False), "--no-cuda-graphs is given"),
        (dict(attention_backend="torch"), "attention_backend torch reads the lengths of sequences on the host"),
    ):
        with Engine(config(tmp_path, **options)) as engine:
            assert engine.eager.startswith(why)
    assert model_kernels().isa() != "scalar"
