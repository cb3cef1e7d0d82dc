"""A host with GPUs, as a process: `python -m gpu.host JSON`, where JSON has the options of an EngineConfig.

Node 0, or a single host, prints the greedy tokens of the prompts that are in `prompts`, and what it exchanged.
"""

from __future__ import annotations

import faulthandler
import json
import sys
from pathlib import Path
from typing import Any

from weft.engine.config.config import EngineConfig
from weft.engine.controller.engine import Engine
from weft.engine.controller.startup import resolve_defaults
from weft.engine.hosts.agent import HostAgent
from weft.engine.messages.request import SamplingParams

STUCK_S = 70.0


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main(options: dict[str, Any]) -> None:
    """Run the host to its end."""
    faulthandler.dump_traceback_later(STUCK_S, exit=True)
    prompts, max_tokens = options.pop("prompts"), options.pop("max_tokens")
    key = options.pop("cluster_key", None)
    config = EngineConfig(**options, cluster_key=key and Path(key))
    if config.node_rank:
        HostAgent(resolve_defaults(config), say).run()
        return
    seen: dict[str, float] = {}

    def progress(what: str, part: float) -> None:
        if what not in seen:
            say(what)
        seen[what] = part

    with Engine(config, progress) as engine:
        found = engine.generate(prompts, SamplingParams(max_tokens=max_tokens, temperature=0.0))
        steps, failures = sorted({stat.step for stat in engine.comm_report()[0]}), engine.stats().failures
    tokens = [list(each.token_ids) for each in found]
    print(json.dumps({"tokens": tokens, "steps": steps, "failures": failures, "stages": list(seen)}))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
