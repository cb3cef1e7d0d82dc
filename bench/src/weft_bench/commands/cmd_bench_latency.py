"""`weft bench latency`."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from weft.comm.shm import ShmTuning
from weft.planner.cost import host_table, read_tuning
from weft.planner.spec import Mesh
from weft.serve.cli.command import Revision, UserError, check_writable, model_dir, stop_on_sigterm, user_errors
from weft.serve.cli.progress import progress_bar
from weft.serve.cli.several_hosts import SeveralHosts, config_over_hosts
from weft.tune.host import describe_host
from weft.tune.ranks import run_ranks
from weft_bench.latency import OVER_HOSTS, Latency, LatencyRun, measure, measure_over_hosts, parameters

TOKENS = ("first", "next")


@dataclass(frozen=True)
class Command:
    """Time the first and the next tokens of one request, transport by transport, in interleaved rounds.

    Without --model: a mixture-of-experts model of 280 M parameters with random weights, with DeepSeek-V2-Lite's depth
    and routing at a quarter of its width.

    Examples:
      weft bench latency                                    tensor parallel over 2 ranks, 1024 tokens in, 8 out
      weft bench latency --model DIR --tp 4 --input 256 --rounds 9 --json latency.json
      weft bench latency --tp 4 --nnodes 2 --node-rank 0 --master-addr 10.0.0.1 --cluster-key FILE
    """

    model: Path | None = None
    """A Hugging Face model directory, a model's name on the hub, or a GGUF file."""
    revision: Revision = None
    tp: int = 2
    """Ranks of all hosts together, with tensor parallel attention and experts."""
    input: int = 1024
    """Tokens of the prompt."""
    output: int = 8
    """Tokens of the output."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Data type of weights and activations."""
    rounds: int = 7
    """Measured rounds, after one warm-up round."""
    transports: tuple[Literal["gloo", "shm"], ...] = ("gloo", "shm")
    """Transports; others are compared with the first. With --nnodes: gloo alone, then shm inside hosts, gloo across."""
    json: Path | None = None
    """Write the figures, and a description of the hardware and software, to this file."""
    cluster: SeveralHosts = field(default_factory=SeveralHosts)

    def run(self) -> int:
        """Print medians and ratios. Raises UserError, LayoutError."""
        if self.input < 1 or self.output < 2 or self.rounds < 1:
            raise UserError("--input and --rounds must be 1 or more, --output 2 or more")
        if not self.transports:
            raise UserError("--transports takes gloo, shm or both")
        if self.json is not None:
            check_writable(self.json, "--json")
        with user_errors():
            model = model_dir(self.model, revision=self.revision)
            hosts = config_over_hosts(self.cluster, attn_dp=1, attn_tp=self.tp, model=model)
        stop_on_sigterm()
        names = self.transports if hosts is None else OVER_HOSTS
        found: list[Latency] = []
        with progress_bar() as bar:
            task = bar.add_task("rounds", total=self.rounds * len(names))
            for latency in self._on_one_host(self.model and model) if hosts is None else self._over_hosts(hosts):
                found.append(latency)
                bar.advance(task)
        if hosts is not None and hosts.node_rank:
            return 0
        result = summary(found, names)
        print(f"{'':9}{'first token':>14}{'saved':>8}{'next token':>14}{'saved':>8}")
        for name, row in result.items():
            cells = [f"{row[f'{which}_ms']:,.1f} ms".rjust(14) + f"{row[f'{which}_saved']:8.0%}" for which in TOKENS]
            print(f"{name:9}{''.join(cells)}")
        if self.json is not None:
            head: dict[str, object] = {
                "what": "weft bench latency",
                "host": describe_host(),
                "model": str(self.model or "random"),
            }
            head |= {"parameters": parameters()} if self.model is None else {}
            head |= {"tp": self.tp, "input": self.input, "output": self.output, "dtype": self.dtype}
            rounds = [vars(x) for x in found]
            self.json.write_text(json.dumps(head | {"medians": result, "rounds": rounds}, indent=1) + "\n")
        return 0

    def _on_one_host(self, model: Path | None) -> Iterator[Latency]:
        tuning = read_tuning(host_table(), "shm_tuning", ShmTuning)
        mesh = Mesh(1, self.tp, 1, self.tp)
        tokens = self.input, self.output
        request = LatencyRun(model, mesh, self.dtype, *tokens, self.rounds, self.transports, tuning, "cpu")
        yield from run_ranks(self.tp, measure, request)

    def _over_hosts(self, config: Any) -> Iterator[Latency]:
        from weft.engine.hosts.measurement import run_over_hosts
        from weft_bench.collectives_hosts import cost_described

        said = {"dtype": self.dtype, "prompt": self.input, "output": self.output, "rounds": self.rounds}
        said |= {"random": self.model is None}
        say = partial(print, file=sys.stderr, flush=True)
        return run_over_hosts(config, measure_over_hosts, lambda: said | cost_described(config), say)


def summary(found: list[Latency], transports: tuple[str, ...]) -> dict[str, dict[str, float]]:
    """Return medians per transport, and savings: the median over rounds of 1 - its time / the first transport's."""
    by = {name: [x for x in found if x.transport == name] for name in transports}
    base = by[transports[0]]

    def saved(mine: list[float], theirs: list[float]) -> float:
        return statistics.median(1 - a / b for a, b in zip(mine, theirs, strict=True))

    return {
        name: {
            "first_ms": statistics.median(x.first_ms for x in rounds),
            "next_ms": statistics.median(x.next_ms for x in rounds),
            "first_saved": saved([x.first_ms for x in rounds], [x.first_ms for x in base]),
            "next_saved": saved([x.next_ms for x in rounds], [x.next_ms for x in base]),
        }
        for name, rounds in by.items()
    }
