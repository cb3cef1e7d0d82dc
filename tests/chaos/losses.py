"""Ranks of a server that are lost for good, one after the other: each dies at every start until the engine gives it
up.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

from chaos.chaos_hosts import HostsChaos
from chaos.chaos_one_host import OneHostChaos, send
from chaos.faults import BACK_S, spread
from chaos.server_process import ServerError

GIVEN_UP = "lost for good; the engine goes on with"
"""Text of the log's line about a rank that is lost."""
POLL_S = 0.02


class Losses:
    """Losses of ranks for good.

    Args:
        ranks: number of ranks on each host at the start.
        restarts: number of restarts before the engine gives a rank up (--max-restarts).
        arrivals: moments of the tokens that clients have received, which grow.
    """

    def __init__(
        self,
        chaos: OneHostChaos | HostsChaos,
        ranks: Sequence[int],
        restarts: int,
        arrivals: Sequence[float],
        rng: random.Random,
        say: Callable[[str], None],
    ):
        self._chaos, self._left, self._restarts, self._arrivals = chaos, list(ranks), restarts, arrivals
        self._rng, self._say = rng, say
        self.trouble: list[str] = []
        """Failures, a line each."""
        self.found: list[dict[str, Any]] = []
        """Each loss: the rank, the number of ranks before it, the rank's node, and seconds from the first kill to the
        last one, to the log's line, and to the next token of any client."""

    def run(self, count: int) -> None:
        """Lose `count` ranks; end early if the server does not go on."""
        for _ in range(count):
            self._wait_for_token(time.monotonic(), "a token before a loss")
            time.sleep(self._rng.uniform(0.0, 1.5))
            of, nodes = most_ranks(self._left), self._chaos.ranks()
            node, rank = self._rng.choice(
                [(node, rank) for node, ranks in enumerate(nodes) for rank in ranks if node or self._left[0] > 1]
            )
            self._say(f"rank {rank} of {of} is lost for good, on node {node}")
            try:
                self._lose(node, rank, of)
            except (OSError, RuntimeError) as error:  # ServerError among them
                self.trouble.append(f"after the loss of rank {rank} of {of}, on node {node}: {error}")
                return

    def report(self) -> dict[str, dict[str, Any]]:
        """Return a row of the table of faults: served_s are the seconds to the next token."""
        seconds = spread([loss["next_token_s"] for loss in self.found])
        return {"lose a rank for good": {"count": len(self.found), "bound_s": None, "heard_s": {}, "served_s": seconds}}

    def _lose(self, node: int, rank: int, of: int) -> None:
        """Kill a rank at each start. Raises ServerError if the engine does not go on without it."""
        served, killed, moments = self._chaos.served, set[int](), list[float]()

        def killed_again() -> bool:
            pid = self._chaos.ranks()[node].get(rank)
            if pid is None or pid in killed or (moment := send(pid, signal.SIGKILL)) is None:
                return False
            killed.add(pid)
            moments.append(moment.at)
            return True

        for number in range(self._restarts + 1):
            self._wait(killed_again, f"rank {rank} to start the {number + 1}. time")
        self._wait(lambda: served.log.read_text().count(GIVEN_UP) > len(self.found), f"{GIVEN_UP!r} in the log")
        given_up = time.monotonic()  # no rank runs now
        token = self._wait_for_token(given_up, "the next token")
        served.wait_healthy(BACK_S)
        self._left[node] -= 1
        first, last = moments[0], moments[-1]
        since = {"last_kill_s": last - first, "given_up_s": given_up - first, "next_token_s": token - first}
        loss = {"rank": rank, "of": of, "node": node, **{name: round(s, 2) for name, s in since.items()}}
        self.found.append(loss)
        self._say(f"  {loss}")
        said, ranks, due = served.get("/health")[1], served.metric("weft_ranks"), most_ranks(self._left)
        if ranks != due or "degraded" not in said:
            raise ServerError(f"the server has {ranks:g} ranks, where {due} are possible, or /health says {said}")

    def _wait_for_token(self, after: float, what: str) -> float:
        """Return the moment of the first token after a moment."""
        self._wait(lambda: bool(self._arrivals) and self._arrivals[-1] > after, what)
        return next(at for at in self._arrivals if at > after)

    def _wait(self, holds: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + BACK_S
        while not holds():
            if self._chaos.served.process.poll() is not None:
                raise ServerError("the server has ended")
            if time.monotonic() > deadline:
                raise ServerError(f"waited {BACK_S:g} s for {what}")
            time.sleep(POLL_S)


def most_ranks(left: Sequence[int]) -> int:
    """Return the maximum of ranks if each host has equally many, or none, and node 0 has some. left: of each host."""
    return max(each * sum(ranks >= each for ranks in left) for each in range(1, left[0] + 1))
