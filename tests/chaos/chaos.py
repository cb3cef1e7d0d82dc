"""Faults at random points of a server under load: no request may be lost, nothing may hang, nothing may stay behind."""

from __future__ import annotations

import http.client
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from chaos.chaos_hosts import HostsChaos, several_hosts
from chaos.chaos_one_host import OneHostChaos, one_host
from chaos.clients import Load, ask, questions
from chaos.faults import Injections
from chaos.losses import Losses
from chaos.server_process import ServerProcess
from weft.tune.host import describe_host


def run(
    model: Path | None,
    options: Sequence[str],
    ranks: int,
    *,
    faults: int,
    clients: int,
    tokens: int,
    seed: int,
    hosts: int = 1,
    bound_factor: float = 3.0,
    lost: int = 0,
    max_restarts: int = 3,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Serve a model with these options of `weft serve`, and inject `faults` faults, each kind about equally often.

    Returns the report; `report["passed"]` is True if no request was lost, every fault was heard in time, and nothing
    hung or stayed behind.

    Args:
        model: its directory; None if the options name a preset.
        clients: number of clients at once.
        tokens: maximum of an output.
        hosts: number of the ranks' hosts; several are namespaces of this machine.
        bound_factor: multiple of its bound that a fault may take to be heard.
        lost: number of ranks that are lost for good, in place of `faults`, with --shrink.
        max_restarts: failures of a rank that the server's ranks restart after.

    Raises ServerError if the server does not start, and PermissionError if hosts may not be made.
    """
    rng, began = random.Random(seed), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="weft-chaos-") as name, ExitStack() as stack:
        folder = Path(name)
        of_server = [*options, "--max-restarts", str(max_restarts if lost else 2 * faults + 2)]
        chaos: OneHostChaos | HostsChaos
        if hosts == 1:
            chaos = stack.enter_context(one_host(folder, model, of_server, ranks, rng))
        else:
            chaos = stack.enter_context(several_hosts(folder, model, of_server, hosts, rng))
        served = chaos.served
        asked = questions(4 * clients, tokens, seed)
        say(f"serving on port {served.port}; asking {len(asked)} questions without faults")
        expected = [ask(served.port, served.name, question) for question in asked]
        before = {"descriptors": served.descriptors(), "memory_mib": round(served.memory_mib())}
        load = Load(served.port, served.name, asked, expected, clients)
        injections: Injections | Losses
        if lost:
            injections = Losses(chaos, [ranks // hosts] * hosts, max_restarts, load.arrivals, rng, say)
        else:
            injections = Injections(served, chaos.health, chaos.faults, rng, bound_factor, say)
        injections.run(lost or faults)
        load.stop()
        chaos.release()
        after = _at_rest(served) if served.process.poll() is None else {}
        restarts = after.pop("restarts", None)
        chaos.health.stop()
        codes, left = chaos.end()
        logs = chaos.logs()
    passed = (
        not any(load.counts[bad] for bad in ("lost", "hung", "different"))
        and not injections.trouble
        and not any(any(of_host.values()) for of_host in left.values())
        and not any(code != 0 for code in codes.values())
        and after.get("running") == after.get("waiting") == 0
    )
    return {
        "passed": passed,
        "faults": injections.report(),
        "losses": injections.found if isinstance(injections, Losses) else [],
        "requests": dict(load.counts),
        "errors": load.errors[:20],
        "trouble": injections.trouble,
        "restarts": restarts,
        "longest_pause_s": round(max(load.gaps, default=0.0), 2),
        "left_behind": left,
        "exit_codes": codes,
        "before": before,
        "after": after,
        "log_tails": {} if passed else {node: log.splitlines()[-40:] for node, log in logs.items()},
        "seconds": round(time.monotonic() - began),
        "hosts": hosts,
        "bound_factor": bound_factor,
        "arguments": list(options),
        "clients": clients,
        "tokens": tokens,
        "seed": seed,
        "host": describe_host(),
    }


def _at_rest(served: ServerProcess) -> dict[str, Any]:
    """Return the server's resources while it has no requests."""
    deadline = time.monotonic() + 30
    with suppress(OSError, http.client.HTTPException):
        while True:
            state: dict[str, Any] = {
                "running": served.metric("weft_requests_running"),
                "waiting": served.metric("weft_requests_waiting"),
                "restarts": served.metric("weft_restarts_total"),
                "drafts": served.metric("weft_draft_tokens_total"),
                "descriptors": served.descriptors(),
                "memory_mib": round(served.memory_mib()),
            }
            if not (state["running"] or state["waiting"]) or time.monotonic() > deadline:
                return state
            time.sleep(0.5)
    return {}
