"""Clients that stream completions from a server on this host, again and again, and check each output."""

from __future__ import annotations

import http.client
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from weft_bench.streamed_completion import LoadError, StreamedCompletion

TIMEOUT_S = 300.0
"""Seconds without a byte after which a stream counts as hung."""


@dataclass(frozen=True)
class Question:
    """Request with a deterministic output: greedy, or sampled from a seed."""

    prompt: str
    max_tokens: int
    temperature: float
    seed: int

    def body(self, model: str) -> dict[str, Any]:
        """Return the body as JSON."""
        how = {"max_tokens": self.max_tokens, "temperature": self.temperature, "seed": self.seed, "stream": True}
        return how | {"model": model, "prompt": self.prompt, "ignore_eos": True}


def questions(count: int, tokens: int, seed: int) -> list[Question]:
    """Return questions, half greedy and half sampled; prompts have several lengths, some with a common beginning."""
    rng = random.Random(seed)
    words = "apples boxes Tom has buys gives seven three with and then how many are left".split()  # noqa: SIM905
    stem = " ".join(rng.choices(words, k=30))
    made = []
    for i in range(count):
        prompt = (stem + " " if i % 3 == 0 else "") + " ".join(rng.choices(words, k=rng.randrange(4, 60)))
        made.append(Question(prompt, rng.randrange(tokens // 2, tokens + 1), 0.8 * (i % 2), rng.randrange(2**31)))
    return made


def ask(
    port: int,
    model: str,
    question: Question,
    gaps: list[float] | None = None,
    arrivals: list[float] | None = None,
) -> str:
    """Return the streamed text.

    gaps: gets the longest pause between two pieces of it, in seconds. arrivals: gets the moment of each piece.

    Raises LoadError, OSError, http.client.HTTPException; TimeoutError if nothing arrives for TIMEOUT_S.
    """
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    try:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(question.body(model)), headers)
        response = connection.getresponse()
        if response.status != 200:
            raise LoadError(f"status {response.status}: {response.read(500)!r}")
        completion, last, longest = StreamedCompletion(), time.monotonic(), 0.0
        for line in response:
            longest, last = max(longest, time.monotonic() - last), time.monotonic()
            completion.take(line, last)
            if arrivals is not None and line.startswith(b"data: {"):
                arrivals.append(last)
        if not completion.done:
            raise LoadError("the stream ended without [DONE]")
        if completion.reason != "length":
            raise LoadError(f"it ended with finish_reason {completion.reason!r}")
        if gaps is not None:
            gaps.append(longest)
        return completion.text
    finally:
        connection.close()


class Load:
    """Clients on threads of their own, each asking one question after the other. expected: outputs without faults.

    counts: completions by their end; a client that is refused (429) tries again later. errors: wrong outputs. gaps: the
    longest pause within each complete output, in seconds. arrivals: the moment of each piece of an output.
    """

    def __init__(self, port: int, model: str, asked: Sequence[Question], expected: Sequence[str], clients: int):
        self._port, self._model, self._asked, self._expected = port, model, asked, expected
        self._stop, self._lock = threading.Event(), threading.Lock()
        self.counts: Counter[str] = Counter(completed=0, different=0, lost=0, refused=0, hung=0)
        self.errors: list[str] = []
        self.gaps: list[float] = []
        self.arrivals: list[float] = []
        self._threads = [threading.Thread(target=self._run, args=(i,), daemon=True) for i in range(clients)]
        for thread in self._threads:
            thread.start()

    def stop(self, timeout_s: float = TIMEOUT_S) -> None:
        """Let every client end its request; a request that does not end in time is counted as hung."""
        self._stop.set()
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
            self.counts["hung"] += thread.is_alive()

    def _run(self, number: int) -> None:
        rng = random.Random(number)
        while not self._stop.is_set():
            at = rng.randrange(len(self._asked))
            try:
                text = ask(self._port, self._model, self._asked[at], self.gaps, self.arrivals)
                outcome, error = ("completed" if text == self._expected[at] else "different"), ""
                if outcome == "different":
                    error = f"{text!r} instead of {self._expected[at]!r}"
            except TimeoutError:
                outcome, error = "hung", f"nothing came for {TIMEOUT_S:g} s"
            except (LoadError, OSError, http.client.HTTPException) as caught:
                refused = "status 429" in str(caught)
                outcome, error = (
                    "refused" if refused else "lost",
                    "" if refused else f"{type(caught).__name__}: {caught}",
                )
            with self._lock:
                self.counts[outcome] += 1
                if error:
                    self.errors.append(error)
            if outcome != "completed":
                self._stop.wait(1.0)
