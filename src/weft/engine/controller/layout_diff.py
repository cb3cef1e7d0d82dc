"""Comparison of two runs of a model: the first read of the residual stream that differs, and the exchange before it.

A run steps through whole prompts, then token by token, without CUDA graphs, and samples greedily. All runs continue
with the first run's tokens, so that each step has the same input in every run. A run records the normalised rows of
each read, and the logits of all rows as the last read: every rank's copy of a row, with a number independent of the
layout.

Runs with different orders of sums are never equal bit by bit. So the norm of a row's difference, relative to the norm
of the row, is compared with `TOLERANCES`.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from weft.comm.reference import ReferenceTransport, ReferenceWorld
from weft.comm.transport import CommError, Transport
from weft.engine.attention.build_batch import SeqRows, build_batch
from weft.engine.config.config import EngineConfig
from weft.engine.config.device import device_of, dtype_of, on_gpus
from weft.engine.controller.startup import check_plans, read_model, resolve_defaults
from weft.engine.messages.rank_messages import Progress
from weft.engine.models.config_json.fields import ModelError, first_line
from weft.engine.worker.open_transports import bind, cost_model, open_transports
from weft.engine.worker.worker import Worker
from weft.planner.plan import Plan
from weft.planner.spec import NAMED_ROWS, Mesh, Rows
from weft.stream.hidden import Hidden
from weft.tune.ranks import run_ranks

LOGITS = "logits"
"""Site of the last read of a step."""
NUMBERS = 1 << 32
"""Factor of row numbers: a row's number is its prompt's index times this, plus its position."""
TOLERANCES = {"float32": 1e-4, "bfloat16": 0.1, "fp8": 0.25}
"""Maximum relative difference of equal rows, by the least exact dtype of the two runs.

Another order of a sum changes a row by a few roundings: 2⁻²⁴ each in float32, 2⁻⁹ in bfloat16, 2⁻⁴ in FP8. They add up
like the square root of their number over the layers: to 10⁻⁶, 0.02 and 0.1 in small models. A sum over a wrong group
changes rows by 0.1 to 1. A wrong base of a softmax merge changes them by 10⁻³ to 10⁻¹, visible in float32 only.
"""
TokenLists = Sequence[Sequence[int]]
"""Tokens of each prompt, or of each output."""
Say = Callable[[str, float], None]
"""Callback of progress: the current activity, and its fraction done."""
Report = Callable[[Any], None]


class RowCopies(NamedTuple):
    """Copies of rows on ranks. ranks, numbers: int64 `[n]`. values: float32 `[n, width]`."""

    ranks: np.ndarray
    numbers: np.ndarray
    values: np.ndarray


class RecordedRun:
    """The reads of a run.

    Attributes:
        steps: rows of each site from each rank, per step.
        exchanges: the plan's exchanges between each site and the previous one, per step.
    """

    def __init__(self, steps: int):
        self.steps: list[dict[str, list[RowCopies]]] = [{} for _ in range(steps)]
        self.exchanges: list[dict[str, list[str]]] = [{} for _ in range(steps)]

    def copies(self, step: int, site: str) -> RowCopies:
        """Return all copies of the rows of a read, in the order of ranks."""
        pieces = sorted(self.steps[step][site], key=lambda piece: piece.ranks[:1].tolist())
        return RowCopies(*map(np.concatenate, zip(*pieces, strict=True)))

    def whole(self, step: int, site: str) -> tuple[np.ndarray, np.ndarray]:
        """Return (numbers, values) of the rows of a read, sorted by number, each from the first rank that has it."""
        copies = self.copies(step, site)
        numbers, at = np.unique(copies.numbers, return_index=True)
        return numbers, copies.values[at]

    def logits(self, prompts: TokenLists) -> list[list[np.ndarray]]:
        """Return the logits `[vocabulary]` of each token of each output."""
        reads = [dict(zip(*self.whole(step, LOGITS), strict=True)) for step in range(len(self.steps))]
        ends = [p * NUMBERS + len(prompt) - 1 for p, prompt in enumerate(prompts)]
        return [[rows[end + step] for step, rows in enumerate(reads)] for end in ends]

    def outputs(self, prompts: TokenLists) -> list[list[int]]:
        """Return the greedy tokens of each output."""
        return [[int(row.argmax()) for row in rows] for rows in self.logits(prompts)]


def tolerance_of(*configs: EngineConfig) -> float:
    """Return the tolerance for runs of these configurations."""
    dtypes = {str(dtype_of(config)).removeprefix("torch.") for config in configs}
    for config in configs:
        products = config.float8 == "on" or (config.float8 == "auto" and on_gpus(config))
        storage = read_model(config).storage
        if config.kv_dtype != "auto" or (products and storage.has_products and storage.quantises_rows):
            dtypes.add("fp8")
    return max(TOLERANCES[dtype] for dtype in dtypes)


def compare(first: RecordedRun, other: RecordedRun, prompts: TokenLists, tolerance: float) -> dict[str, Any]:
    """Compare all copies of all rows of `other` with the first run's, at their common sites.

    Returns values for JSON, with None for NaN differences:
        reads: step (0: the prompts), site and largest relative difference of a row, of each read.
        largest: maximum of these differences.
        departure: the first read with a difference above the tolerance, or None: step and site; `before`, the previous
            site, which is equal; the `exchanges` between the two, of other's plan, or of the first run's if other has
            none; prompt, position and rank of the row that differs most; its relative and max_abs difference; `rows`,
            the number of copies that differ, and of all copies; `largest_before`, the maximum of the reads before.
        partings: for each prompt with another greedy output, the index of the first different token, both tokens, and
            the difference of their logits in the first run.
    """
    reads: list[dict[str, Any]] = []
    departure, before, largest = None, "", 0.0
    for step, sites in enumerate(first.steps):
        for site in (site for site in sites if site in other.steps[step]):
            numbers, values = first.whole(step, site)
            copies = other.copies(step, site)
            expected = values[np.searchsorted(numbers, copies.numbers)]
            away = np.abs(copies.values - expected)
            off = np.linalg.norm(away, axis=1) / np.maximum(np.linalg.norm(expected, axis=1), 1e-30)
            off[np.isnan(off)] = math.inf
            row = int(off.argmax())
            if off[row] > tolerance and departure is None:
                prompt, position = divmod(int(copies.numbers[row]), NUMBERS)
                departure = {
                    "step": step,
                    "site": site,
                    "before": before,
                    "exchanges": other.exchanges[step].get(site) or first.exchanges[step].get(site, []),
                    "prompt": prompt,
                    "position": position,
                    "rank": int(copies.ranks[row]),
                    "relative": _finite(off[row]),
                    "max_abs": _finite(away[row].max()),
                    "rows": [int((off > tolerance).sum()), len(off)],
                    "largest_before": largest,
                }
            largest, before = max(largest, float(off[row])), site
            reads.append({"step": step, "site": site, "relative": _finite(off[row])})
    partings, others = [], other.outputs(prompts)
    for prompt, rows in enumerate(first.logits(prompts)):
        for token, (logits, actual) in enumerate(zip(rows, others[prompt], strict=True)):
            if (best := int(logits.argmax())) != actual:
                margin = _finite(logits[best] - logits[actual])
                partings.append({"prompt": prompt, "token": token, "first": best, "other": actual, "margin": margin})
                break
    return {"largest": _finite(largest), "departure": departure, "partings": partings, "reads": reads}


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def record(config: EngineConfig, prompts: TokenLists, steps: int, given: TokenLists | None, say: Say) -> RecordedRun:
    """Run a configuration: as threads on the reference transport if its executor is thread, else a process per rank.

    Args:
        prompts: tokens of each prompt; DP groups get prompts in turn.
        steps: tokens to generate.
        given: outputs to feed to the steps; None: the run's own greedy tokens.

    Raises CommError, LayoutError, ModelError in one line.
    """
    say("starting", 0.0)
    recording, config = RecordedRun(steps), _prepared(config, prompts, steps)

    def take(reported: Any) -> None:
        if isinstance(reported, Progress):
            say(reported.what, reported.done / reported.total)
            return
        step, reads, exchanges = reported
        for site, rows in reads.items():
            recording.steps[step].setdefault(site, []).append(rows)
        if exchanges is not None:
            recording.exchanges[step] = exchanges
            say("running steps", (step + 1) / steps)

    if config.executor == "thread":
        _run_threads(config, take, prompts, steps, given)
    else:
        for reported in run_ranks(config.mesh.world, _run_process, config, prompts, steps, given):
            take(reported)
    return recording


def record_transformers(
    config: EngineConfig, prompts: TokenLists, given: TokenLists, sites: Sequence[str]
) -> RecordedRun:
    """Run the same tokens, `prompts`, through transformers' model, with hooks on the modules with the names of sites.

    Args:
        given: outputs of the first run; their length is the number of steps.
        sites: sites of the first run.

    Raises ModelError if transformers cannot load or run the model.
    """
    from transformers import AutoModelForCausalLM

    recording, seen = RecordedRun(len(given[0])), dict[str, Tensor]()
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(config.model, dtype=dtype_of(config))
        model.to(device_of(config, 0))
        for name, module in model.named_modules():
            if name in sites:
                module.register_forward_hook(lambda module, given, rows, name=name: seen.update({name: rows}))
        for prompt, text in enumerate(prompts):
            tokens = torch.tensor([[*text, *given[prompt][:-1]]], device=model.device)
            with torch.inference_mode():
                seen[LOGITS] = model(tokens, use_cache=False).logits
            for step, reads in enumerate(recording.steps):
                at = np.arange(*_span(text, step))
                for site in (site for site in sites if site in seen):
                    rows = RowCopies(np.zeros_like(at), prompt * NUMBERS + at, _array(seen[site].flatten(0, -2)[at]))
                    reads.setdefault(site, []).append(rows)
    except (AttributeError, ImportError, OSError, RuntimeError, TypeError, ValueError) as error:
        raise ModelError(f"transformers does not run {config.model}: {first_line(error)}") from error
    return recording


def _prepared(config: EngineConfig, prompts: TokenLists, steps: int) -> EngineConfig:
    """Return the configuration with checked defaults, and a cache for these prompts. Raises LayoutError."""
    if config.mesh.world == 1 and not on_gpus(config):  # nothing is exchanged
        config = replace(config, executor="thread")
    sequences = -(-len(prompts) // config.attn_dp)
    pages = sequences * _pages(config, prompts, steps)
    sizes: dict[str, Any] = dict(kv_tokens=pages * config.page_size, max_running=sequences)
    # Caches of windows hold whole sequences only if a step may have that number of rows.
    sizes |= dict(max_batch_tokens=pages * config.interleave.span, mixed_batch_tokens=None)
    config = resolve_defaults(replace(config, **sizes, cuda_graphs=False, prefix_cache=True))
    return check_plans(config, read_model(config))


def _pages(config: EngineConfig, prompts: TokenLists, steps: int) -> int:
    """Return the pages of the longest sequence."""
    return -(-(max(map(len, prompts)) + steps) // config.interleave.span)


def _span(prompt: Sequence[int], step: int) -> tuple[int, int]:
    """Return [begin, end) of the positions of a sequence in a step."""
    return (len(prompt) + step - 1, len(prompt) + step) if step else (0, len(prompt))


def _exchanges(plan: Plan) -> dict[str, list[str]]:
    """Return the exchanges of a plan between each site and the previous one."""
    calls, after = dict[str, list[str]](), list[str]()
    for read in plan.reads:
        calls[read.read.site] = after + [str(op) for step in read.steps for op in step.steps() if op.kinds]
        after = [str(op) for each in read.inside for op in each.steps() if op.kinds and not op.optional]
    return calls | {LOGITS: after}


def _run_threads(config: EngineConfig, report: Report, *work: Any) -> None:
    """Run all ranks as threads on the reference transport. Raises the first error not caused by another rank's."""
    world, errors = ReferenceWorld(config.mesh.world, timeout_s=config.step_timeout_s), list[BaseException]()

    def main(transport: ReferenceTransport) -> None:
        try:
            with world.compute_lock.computing():
                _run(config, [transport], report, *work)
        except BaseException as error:
            errors.append(error)
            world.abort()

    threads = [threading.Thread(target=main, args=(transport,), daemon=True) for transport in world.transports()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next((error for error in errors if not isinstance(error, CommError)), errors[0])


def _run_process(rank: int, directory: Path, report: Report, config: EngineConfig, *work: Any) -> None:
    config = bind(config, rank)
    transports = open_transports(config, rank, directory)
    _run(config, transports, report, *work)
    for transport in transports:
        transport.close()


def _run(
    config: EngineConfig,
    transports: Sequence[Transport],
    report: Report,
    prompts: TokenLists,
    steps: int,
    given: TokenLists | None,
) -> None:
    """Run all steps on one rank; report (step, rows of each site, on rank 0 the plan's exchanges) after each."""
    mesh, rank = config.mesh, transports[0].rank
    worker = Worker(config, transports, cost_model(config), report if rank == 0 else lambda message: None)
    runner, size, pages = worker.runner, worker.table.page_size, _pages(config, prompts, steps)
    groups = [range(group, len(prompts), mesh.attn_dp) for group in range(mesh.attn_dp)]
    own_rows = groups[mesh.group_of(rank)]
    texts = {p: list(prompts[p]) for p in own_rows}
    for step in range(steps):
        spans = [_span(prompt, step) for prompt in prompts]
        numbers = [[p * NUMBERS + at for p in group for at in range(*spans[p])] for group in groups]
        counts, seqs, tokens = tuple(map(len, numbers)), list[SeqRows](), list[int]()
        for i, p in enumerate(own_rows):
            begin, end = spans[p]
            states = [2 * i + step % 2 if step else -1, 2 * i + (step + 1) % 2]  # alternate between two slots
            table = range(i * pages, i * pages + -(-end // size))
            tables = [states if rule.state else table for rule in runner.rules]
            seqs.append(SeqRows(end - begin, begin, tables, end - begin))
            tokens += texts[p][begin:end]
        rows = _StepRecord(mesh, rank, counts, np.fromiter(chain(*numbers), np.int64), {})
        runner.observer = rows.note
        batch = build_batch(tokens, seqs, size, runner.rules, worker.table.device)
        logits = runner.forward(batch, counts)
        runner.check()
        rows.add(LOGITS, logits, Rows.GROUP)
        report((step, rows.found, _exchanges(runner.planner.plan(counts)) if rank == 0 else None))
        last = np.cumsum([seq.rows for seq in seqs], dtype=np.int64) - 1
        for p, token in zip(own_rows, logits[last].argmax(1).tolist(), strict=True):
            texts[p].append(token if given is None else given[p][step])


@dataclass(frozen=True)
class _StepRecord:
    """Recorder of a step on a rank. numbers: int64 `[rows]`, of the rows of all DP groups."""

    mesh: Mesh
    rank: int
    counts: tuple[int, ...]
    numbers: np.ndarray
    found: dict[str, RowCopies]

    def note(self, site: str, hidden: Hidden) -> None:
        """Record a read, dequantising rows that were sent in a format."""
        wire, value = hidden.placement.wire, hidden.value
        if wire is not None:
            value = wire.format.dequantise(hidden.in_format(wire.format), torch.float32)
        self.add(site, value, hidden.placement.rows)

    def add(self, site: str, value: Tensor, rows: Rows) -> None:
        """Record rows `[n, width]` of this rank."""
        holders, kind = [(self.rank, rows)], self.mesh.rows(rows)
        if kind not in NAMED_ROWS:
            holders = [(peer, Rows.OWN) for peer in self.mesh.peers(kind.over, self.rank)]
        ranges = [self.mesh.row_range(part, peer, self.counts) for peer, part in holders]
        numbers = np.concatenate([self.numbers[begin:end] for begin, end in ranges])
        self.found[site] = RowCopies(np.full_like(numbers, self.rank), numbers, _array(value))


def _array(value: Tensor) -> np.ndarray:
    """Return a copy in float32, since a transport may reuse the tensor's memory."""
    array: np.ndarray = value.to("cpu", torch.float32, copy=True).numpy()
    return array
