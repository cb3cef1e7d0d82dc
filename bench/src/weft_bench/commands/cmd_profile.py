"""`weft profile`."""

from __future__ import annotations

import json
import textwrap
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from weft.engine.config.engine_options import LayoutOptions
from weft.planner.show import columns, size_text
from weft.serve.cli.command import EngineArguments, ModelDir, UserError, engine_config, model_name, stop_on_sigterm
from weft.serve.cli.several_hosts import run_agent
from weft.serve.cli.start import start_engine

MAX_KERNELS = 12


@dataclass(frozen=True)
class Command:
    """Profile decode steps, or steps that read prompts, on every rank.

    Starts the engine, lets it complete prompts of random tokens, and watches steps with all sequences decoding: first
    for the CPU time of controller and ranks, then with torch's profiler. Prints tables of collectives, with separate
    waiting for the slowest rank, of other work, and of idle time, and writes to --output: profile.json, profile.png,
    and trace.json.gz, one Chrome trace of all ranks (https://ui.perfetto.dev shows it).

    Examples:
      weft profile --attn-dp 2 --batch 4 --context 64
      weft profile --preset qwen3-30b-a3b --load-format dummy --attn-tp 2 --ep 2 --moe-tp 1 --device cuda --batch 16
      weft profile --read traces      files of POST /weft/profile of a server with --profile-dir traces

    With --nnodes, start the same command on every host; node 0 prints and writes for the ranks of all.
    """

    model: ModelDir = None
    engine: EngineArguments = field(default_factory=EngineArguments)
    batch: int = 16
    """Number of sequences over all DP groups."""
    context: int = 512
    """Tokens of each prompt."""
    steps: int = 20
    """Number of steps to watch."""
    prompts: bool = False
    """Watch steps that each read one prompt per DP group, instead of decode steps."""
    read: Path | None = None
    """Print a server's recording in this folder, instead of starting an engine."""
    output: Path = Path("profile")
    """Folder for the files."""

    def run(self) -> int:
        """Print tables. Raises UserError, LayoutError, ModelError, EngineError."""
        from weft.engine.config.device import dtype_of, kv_dtype_of
        from weft.engine.controller.profiling import MIN_STEPS
        from weft.engine.worker.footprint import decode_step_bytes
        from weft_bench.breakdown import SPARE_TOKENS, output_length, run

        if self.read is not None:
            return self._read(self.read)
        rows = self.engine.batch_tokens
        for name in ("batch", "context", "steps"):
            minimum = MIN_STEPS if name == "steps" else 1
            if getattr(self, name) < minimum:
                raise UserError(f"{name} is {getattr(self, name)}; it must be {minimum} or more")
        tokens = 1 if self.prompts else output_length(self.steps, -(-self.batch * self.context // rows))
        rows = self.context if self.prompts else max(rows, self.batch)
        if self.prompts and self.batch < (minimum := self.engine.attn_dp * output_length(self.steps, 0)):
            raise UserError(f"--prompts reads one prompt per step and DP group: --batch {minimum} or more lasts")
        config = engine_config(
            self.model, self.engine, max_running=self.batch, max_batch_tokens=rows, prefix_cache=False
        )
        positions = config.read_model().max_position
        if self.context + tokens > positions:
            left = positions - tokens
            advice = f"--context {left}" if left > 0 else f"--steps below {self.steps}"
            raise UserError(
                f"a context of {self.context} and the {tokens} tokens that the steps take exceed the model's "
                f"{positions} positions; at most {advice} fits"
            )
        tokens = 1 if self.prompts else min(tokens + SPARE_TOKENS, positions - self.context)
        config = replace(
            config, kv_tokens=self.batch * (self.context + tokens + 16), max_model_len=self.context + tokens
        )
        if config.node_rank:
            stop_on_sigterm()
            return run_agent(config)
        self._make_folder()
        stop_on_sigterm()
        with start_engine(config) as engine:
            found = run(engine, self.batch, self.context, self.steps, tokens, self.output.resolve())
        name = model_name(self.model, config.model)
        title = f"{name}, {config.mesh}, {self.batch} sequences of {self.context} tokens"
        about: dict[str, Any] = {
            "model": name,
            "layout": vars(LayoutOptions.of(self.engine)) | {"num_layers": config.num_layers},
            "batch": self.batch,
            "context": self.context,
            "steps": self.steps,
        }
        if not self.prompts:
            about["bytes_a_step"] = decode_step_bytes(
                config.read_model(), config.mesh, dtype_of(config), self.batch, self.context, kv_dtype_of(config)
            )
        return self._show(title, about, found)

    def _read(self, folder: Path) -> int:
        from weft.engine.controller.profiling import Recording
        from weft_bench.breakdown import break_down

        try:
            recording = Recording.read(folder)
            self._make_folder()
            found = break_down(recording, self.output)
        except (OSError, ValueError) as error:
            raise UserError(f"cannot read a recording of POST /weft/profile in {folder}: {error}") from error
        return self._show(f"{folder}, {recording.mesh}", {}, found)

    def _make_folder(self) -> None:
        try:
            self.output.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot write {self.output}: {error.strerror}; choose another with --output") from error

    def _show(self, title: str, about: dict[str, Any], found: Any) -> int:
        from weft.tune.host import describe_host
        from weft_bench.chart import draw

        report = {"what": "weft profile", "host": describe_host()} | about | found.report
        (self.output / "profile.json").write_text(json.dumps(report, indent=1) + "\n")
        draw(found.ranks, found.figures["step_us"], title, self.output / "profile.png")
        print(f"{title}\n\n{tables(report)}\n\n{self.output}: profile.json, profile.png, trace.json.gz")
        return 0


def tables(report: dict[str, Any]) -> str:
    """Format the parts of a step in 80 columns: means over steps and ranks."""
    cpu, step, us = report["cpu_us_a_step"], report["step_us"], report["unprofiled_step_us"]
    by_time = sorted(cpu["rank_threads"][0].items(), key=lambda thread: -thread[1])
    threads = ", ".join(f"{name} {thread_us:,.0f}" for name, thread_us in by_time if thread_us >= 1)
    ranks = ", ".join(f"{us:,.0f}" for us in cpu["rank"])
    lines = [
        f"a step: {us:,.0f} µs, {step:,.0f} µs under the profiler",
        f"CPU time of a step: controller {cpu['controller']:,.0f} µs, ranks {ranks} µs",
        *textwrap.wrap(f"threads of rank 0, µs: {threads}", 80, subsequent_indent="  "),
        f"idle: {report['idle_between']:.1%} between steps, {report['idle_within']:.1%} within",
        "",
    ]
    if size := report.get("bytes_a_step"):
        lines.insert(1, f"weights and cached tokens: {size / 1e9:,.2f} GB a rank, {size / us / 1e3:,.1f} GB/s")
    rows: list[tuple[str, ...]] = [("of a step", "calls", "µs", "waiting", "share")]
    for row in report["kinds"]:
        rows.append((row["kind"], *_cells(row)))
    lines += [*columns(rows), ""]
    if report["collectives"]:
        rows = [("collectives of a step", "calls", "µs", "waiting", "share", "bytes", "GB/s")]
        for row in report["collectives"]:
            rows += [(row["what"],), ("", *_cells(row), size_text(row["bytes"]), f"{row['gb_s']:,.1f}")]
        lines += [*_narrow(rows), ""]
    rows = [("other kernels of a step", "calls", "µs", "", "share")]
    for row in report["kernels"][:MAX_KERNELS]:
        rows.append(
            (f"{row['what'][:40]} ({row['kind']})", f"{row['calls']:,.0f}", f"{row['us']:,.1f}", "", _share(row))
        )
    return "\n".join([*lines, *columns(rows)])


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    return f"{row['calls']:,.0f}", f"{row['us']:,.1f}", f"{row['waiting_us']:,.1f}", _share(row)


def _share(row: dict[str, Any]) -> str:
    return f"{row['share']:.1%}"


def _narrow(rows: list[tuple[str, ...]]) -> list[str]:
    """Put names on lines of their own, above their figures."""
    figures = columns([("  " if len(row) > 1 and not row[0] else row[0], *row[1:]) for row in rows if len(row) > 1])
    lines, at = [], iter(figures)
    for row in rows:
        lines.append(next(at) if len(row) > 1 else row[0])
    return lines
