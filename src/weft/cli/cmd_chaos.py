"""`weft chaos`."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from weft.cli.command import UNNAMED, EngineArguments, ModelDir, UserError, check_writable


@dataclass(frozen=True)
class Command:
    """Serve a model, ask it without end, and do faults to it.

    Ranks are killed, or stopped for a while; clients leave, read slowly, or never finish their headers; the log cannot
    be written. It starts a server of its own, and asks that alone.

    It passes where no request is lost or completed differently, nothing hangs, and no process, file or segment is left.
    Exit code 1 where it does not.

    Examples:
      weft chaos --faults 12                                          a short look, one rank
      weft chaos --attn-dp 2 --attn-tp 2 --faults 100 --json out.json   four ranks, each fault about seven times
    """

    model: ModelDir = None
    """A Hugging Face model directory; left out, the embedded model."""
    engine: Annotated[EngineArguments, UNNAMED] = field(default_factory=EngineArguments)
    faults: int = 100
    """How many; each kind about equally often."""
    clients: int = 4
    """That ask at once, each one request after the other."""
    tokens: int = 48
    """Tokens of an output, at most."""
    seed: int = 0
    """Of the questions, and of which fault comes when."""
    json: Path | None = None
    """Write the report to this file."""

    def run(self) -> int:
        """Prints the report, and says on stderr what it does. Raises UserError, LayoutError, EngineError."""
        from weft.bench.chaos import run
        from weft.bench.server_process import ServerError
        from weft.cli.command import engine_config
        from weft.engine.config import EngineError

        if self.faults < 1 or self.clients < 1 or self.tokens < 2:
            raise UserError("--faults and --clients must be 1 or more, --tokens 2 or more")
        if self.json is not None:
            check_writable(self.json, "--json")
        config = engine_config(self.model, self.engine)
        if config.mesh.hosts > 1:
            raise UserError("chaos looks after the ranks of one host; leave --nnodes out")
        arguments = self.engine.arguments()
        if self.model is not None:
            arguments.insert(0, str(self.model))
        try:
            report = run(
                arguments,
                config.mesh.world,
                self.faults,
                self.clients,
                self.tokens,
                self.seed,
                lambda line: print(line, file=sys.stderr, flush=True),
            )
        except ServerError as error:
            raise EngineError(str(error)) from error
        text = json.dumps(report, indent=1, ensure_ascii=False)
        if self.json is not None:
            self.json.write_text(text + "\n")
        print(text)
        return 0 if report["passed"] else 1
