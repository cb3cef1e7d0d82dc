"""Command that injects faults: see its Command."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from weft.engine.config.engine_options import LayoutOptions
from weft.serve.cli.command import EngineArguments, ModelDir, UserError, check_writable, stop_on_sigterm


@dataclass(frozen=True)
class Command:
    """Serve a model, send requests without end, and inject faults.

    Ranks are killed, or stopped for a while; clients leave, read slowly, or never finish their headers; the log cannot
    be written. With --hosts, ranks and agents are killed or stopped, links are cut, a host is switched off and on, and
    others try to join that must be refused. The command starts a server of its own, and tests that alone.

    With --lose-for-good, ranks are lost instead, one after the other: each dies at every start until the engine goes on
    without it, by --shrink, with --hosts too. Outputs must stay the same, in float32 unless --dtype is given.

    The run passes if no request is lost or completed differently, every fault is heard in time, nothing hangs, and no
    process, file or segment is left. Otherwise its exit code is 1. The table has the seconds from a fault until /health
    gives 503 (until another host is refused), and until it gives 200 again: median and maximum.

    Examples:
      make chaos ARGS="--faults 12"                                one rank, a few faults
      make chaos ARGS="--attn-dp 2 --attn-tp 2 --json out.json"    four ranks, each fault about seven times
      make chaos ARGS="--attn-dp 5 --lose-for-good 3"              from five ranks to two
      make chaos ARGS="--hosts 2 --lose-for-good 2"                two hosts of two ranks, to one rank on each, or two
      make chaos ARGS="--hosts 2 --faults 60"                      two hosts of two ranks, on this machine, as root
    """

    model: ModelDir = None
    engine: EngineArguments = field(default_factory=EngineArguments)
    faults: int = 100
    """Number of faults; each kind about equally often."""
    lose_for_good: int = 0
    """Number of ranks to lose for good, in place of faults."""
    clients: int = 4
    """Number of clients at once, each with one request after the other."""
    tokens: int = 48
    """Maximum tokens of an output."""
    seed: int = 0
    """Seed of the questions, and of the order and times of faults."""
    hosts: int = 1
    """Hosts of the ranks: namespaces of this machine, which require root. Without a layout, two ranks on each:
    --attn-dp HOSTS --attn-tp 2."""
    bound_factor: float = 3.0
    """Multiple of its bound (docs/guide/hosts.md) that a fault may take to be heard; a busy machine needs more."""
    json: Path | None = None
    """Write the report to this file."""

    def run(self) -> int:
        """Print a table, and progress on stderr. Raises UserError, LayoutError, EngineError."""
        from chaos.chaos import run
        from chaos.faults import table
        from chaos.server_process import ServerError
        from weft.engine.config.config import EngineError
        from weft.serve.cli.command import engine_config

        if self.faults < 1 or self.clients < 1 or self.tokens < 2 or self.hosts < 1:
            raise UserError("--faults, --clients and --hosts must be 1 or more, --tokens 2 or more")
        if self.bound_factor < 1:
            raise UserError("--bound-factor must be 1 or more")
        if self.lose_for_good < 0:
            raise UserError("--lose-for-good must be 0 or more")
        if self.json is not None:
            check_writable(self.json, "--json")
        engine = self.engine
        if self.lose_for_good:
            engine = replace(engine, shrink=True, dtype="float32" if engine.dtype == "auto" else engine.dtype)
        if self.hosts > 1 and LayoutOptions.of(engine) == LayoutOptions():
            engine = replace(engine, attn_dp=self.hosts, attn_tp=2)
        config = engine_config(self.model, engine)
        if config.mesh.hosts > 1:
            raise UserError("chaos makes its hosts on this machine: give --hosts in place of --nnodes")
        if config.mesh.world <= self.lose_for_good:
            raise UserError(f"--lose-for-good {self.lose_for_good} leaves none of {config.mesh.world} ranks")
        replace(config.mesh, hosts=self.hosts)  # which says where they do not divide the ranks
        stop_on_sigterm()
        try:
            report = run(
                None if self.engine.preset else config.model,
                engine.arguments(),
                config.mesh.world,
                faults=self.faults,
                clients=self.clients,
                tokens=self.tokens,
                seed=self.seed,
                hosts=self.hosts,
                bound_factor=self.bound_factor,
                lost=self.lose_for_good,
                max_restarts=config.max_restarts,
                say=lambda line: print(line, file=sys.stderr, flush=True),
            )
        except ServerError as error:
            raise EngineError(str(error)) from error
        except PermissionError as error:
            raise UserError(f"--hosts makes hosts of namespaces, as root with CAP_SYS_ADMIN: {error}") from error
        if self.json is not None:
            self.json.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")
        print("\n".join([*table(report["faults"]), "", *summary(report)]))
        return 0 if report["passed"] else 1


def summary(report: dict[str, Any]) -> list[str]:
    """Format the report, without the faults."""
    counts = ", ".join(f"{number} {how}" for how, number in report["requests"].items())
    left = [
        f"{node} {what} {name}"
        for node, kinds in report["left_behind"].items()
        for what, names in kinds.items()
        for name in names
    ]
    lines = [
        *(
            f"rank {loss['rank']} of {loss['of']} was lost on node {loss['node']}: given up after "
            f"{loss['given_up_s']} s, next token after {loss['next_token_s']} s"
            for loss in report["losses"]
        ),
        f"requests: {counts}; {report['restarts']:g} restarts"
        if report["restarts"] is not None
        else f"requests: {counts}",
        f"left behind: {'; '.join(left) or 'nothing'}",
        f"exit codes: {', '.join(f'{node} {code}' for node, code in report['exit_codes'].items())}",
        *report["trouble"],
        *report["errors"],
    ]
    for node, log in report["log_tails"].items():
        lines += [f"the end of {node}'s log:", *log]
    return [*lines, "passed" if report["passed"] else "failed"]
