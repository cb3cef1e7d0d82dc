"""Load on an OpenAI-compatible server, measured at its clients, with the conventions of `vllm bench serve`.

Requests arrive with gamma-distributed intervals (burstiness 1: a Poisson process) or all at once, and a maximum may be
open at once. TTFT is the time from sending to an output's first piece, ITL the time between two pieces, E2EL the time
until its last, and TPOT = (E2EL - TTFT) / (output tokens - 1).
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import aiohttp
import msgspec
import numpy as np

from weft_bench.streamed_completion import LoadError, StreamedCompletion

ApiBackend = Literal["openai", "openai-chat"]
PATHS: dict[ApiBackend, str] = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}
TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=30, sock_read=600)
FIRST_TOKEN = 16
"""Lowest token id of prompts: most ids below are special tokens."""
JSON = {"Content-Type": "application/json"}
DRAFTS = {
    "rows": "vllm:spec_decode_num_drafts_total",
    "drafted": "vllm:spec_decode_num_draft_tokens_total",
    "accepted": "vllm:spec_decode_num_accepted_tokens_total",
}
"""Counts of speculative decoding with their metrics, which vLLM's servers have, too."""
LATENCIES = ("tpot", "ttft", "itl", "e2el")
"""Metrics in the order of the report: TPOT first, as most ITL are 0 if tokens are sent in clumps."""


@dataclass(frozen=True)
class RequestSpec:
    """Request: prompt as token ids or text, and its numbers of input and output tokens."""

    prompt: list[int] | str
    input_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class Workload:
    """Random prompts. Lengths are sampled evenly from len · (1 - range_ratio) to len · (1 + range_ratio), both rounded.

    prefix_len: tokens of a prefix shared by all prompts, in addition to input_len. Raises ValueError.
    """

    num_prompts: int
    input_len: int
    output_len: int
    range_ratio: float = 0.0
    prefix_len: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, minimum in (("num_prompts", 1), ("input_len", 1), ("output_len", 1), ("prefix_len", 0)):
            if getattr(self, name) < minimum:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be {minimum} or more")
        if not 0 <= self.range_ratio < 1:
            raise ValueError(f"range_ratio is {self.range_ratio}; it must be from 0 to below 1")

    def asks(self, vocabulary: int, tokenizer: Any = None) -> list[RequestSpec]:
        """Return the requests. Prompts are token ids below vocabulary, or texts if a tokenizer is given."""
        rng = random.Random(self.seed)

        def tokens(count: int) -> list[int]:
            return [rng.randrange(FIRST_TOKEN, vocabulary) for _ in range(count)]

        def length(mean: int) -> int:
            spread = self.range_ratio
            return rng.randint(max(1, math.floor(mean * (1 - spread))), max(1, math.ceil(mean * (1 + spread))))

        prefix, made = tokens(self.prefix_len), []
        for _ in range(self.num_prompts):
            prompt = prefix + tokens(length(self.input_len))
            text = None if tokenizer is None else _text_of(tokenizer, prompt, tokens)
            made.append(RequestSpec(prompt if text is None else text, len(prompt), length(self.output_len)))
        return made


def _text_of(tokenizer: Any, ids: list[int], more: Callable[[int], list[int]]) -> str:
    """Return a text of len(ids) tokens. Decoded ids may be encoded in fewer or more, so it needs some rounds."""
    count, text = len(ids), ""
    for _ in range(10):
        text = tokenizer.decode(ids)
        again = tokenizer.encode(text, add_special_tokens=False)
        if len(again) == count:
            break
        ids = again[:count] + more(max(0, count - len(again)))
    return text


def arrivals(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Return the seconds from the start at which requests are sent: all at once if the rate is infinite."""
    if math.isinf(rate):
        return [0.0] * count
    rng, at, times = random.Random(seed), 0.0, []
    for _ in range(count):
        times.append(at)
        at += rng.gammavariate(burstiness, 1 / (rate * burstiness))
    return times


class Posted(NamedTuple):
    """Request to send: its body, encoded before the clock starts. at: seconds after the start."""

    body: bytes
    input_tokens: int
    at: float


@dataclass(frozen=True)
class Outcome:
    """Measurements of one request.

    Attributes:
        error: error in one line, or empty.
        times: seconds from the sending to each piece.
        unknown: kinds of pieces, as in StreamedCompletion.
    """

    error: str
    times: tuple[float, ...]
    input_tokens: int
    output_tokens: int
    unknown: frozenset[str] = frozenset()

    @property
    def latencies(self) -> dict[str, list[float]]:
        """Return seconds, by the names in LATENCIES."""
        first, last = self.times[0], self.times[-1]
        tpot = [(last - first) / (self.output_tokens - 1)] if self.output_tokens > 1 else []
        return {"ttft": [first], "tpot": tpot, "itl": [b - a for a, b in pairwise(self.times)], "e2el": [last]}


class LoadedServer:
    """OpenAI-compatible server. extra: fields of every request's body. An asynchronous context manager."""

    def __init__(self, base_url: str, api_key: str = "", backend: ApiBackend = "openai", extra: Mapping[str, Any] = {}):
        self.base_url, self.backend, self.extra = base_url.rstrip("/").removesuffix("/v1"), backend, dict(extra)
        self._api_key = api_key

    def unconnected(self) -> LoadedServer:
        """Return this server without a connection, for another process."""
        return LoadedServer(self.base_url, self._api_key, self.backend, self.extra)

    async def __aenter__(self) -> LoadedServer:
        headers = {"Authorization": f"Bearer {self._api_key}"} if self._api_key else {}
        connector = aiohttp.TCPConnector(limit=0)
        self._session = aiohttp.ClientSession(connector=connector, timeout=TIMEOUT, headers=headers)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._session.close()

    async def models(self) -> list[str]:
        """Return the names of its models. Raises LoadError in one line if the list cannot be read."""
        url = f"{self.base_url}/v1/models"
        try:
            async with self._session.get(url) as response:
                if response.status != 200:
                    raise LoadError(f"{url} gives status {response.status}: {await _why(response)}")
                return [card["id"] for card in (await response.json(content_type=None))["data"]]
        except (aiohttp.ClientError, OSError) as error:
            raise LoadError(f"no server at {self.base_url}: {_line(error)}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise LoadError(f"{url} gives no list of models: {_line(error)}") from error

    async def drafts(self) -> Counter[str]:
        """Return the counts of DRAFTS so far; none if the server has no such metrics."""
        try:
            async with self._session.get(f"{self.base_url}/metrics") as response:
                lines = (await response.text(errors="replace")).splitlines() if response.status == 200 else []
            found = Counter[str]()
            for name, metric in DRAFTS.items():
                found[name] = sum(
                    int(float(line.split()[-1])) for line in lines if line.startswith((metric + "{", metric + " "))
                )
            return found
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
            return Counter()

    def job(self, model: str, ask: RequestSpec, at: float = 0.0) -> Posted:
        """Return a request to send `at` seconds after the start."""
        prompt: dict[str, Any] = {"prompt": ask.prompt}
        if self.backend == "openai-chat":
            prompt = {"messages": [{"role": "user", "content": ask.prompt}]}
        body = {"model": model, **prompt, "max_tokens": ask.output_tokens, "stream": True}
        body |= {"stream_options": {"include_usage": True}} | self.extra
        return Posted(msgspec.json.encode(body), ask.input_tokens, at)

    async def ask(self, job: Posted) -> Outcome:
        """Send a request and read its stream to the end."""
        completion, error, began = StreamedCompletion(), "", time.perf_counter()
        try:
            async with self._session.post(self.base_url + PATHS[self.backend], data=job.body, headers=JSON) as response:
                if response.status != 200:
                    raise LoadError(f"status {response.status}: {await _why(response)}")
                async for data in response.content.iter_any():  # by lines it would cost this process twice as much
                    completion.feed(data, time.perf_counter())
            if not completion.done:
                raise LoadError("the stream ended without [DONE]")
            if not completion.times:
                raise LoadError("the output has no tokens")
        except LoadError as caught:
            error = str(caught)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as caught:
            error = _line(caught)
        return Outcome(
            error,
            tuple(t - began for t in completion.times),
            job.input_tokens if completion.prompt_tokens is None else completion.prompt_tokens,
            len(completion.times) if completion.completion_tokens is None else completion.completion_tokens,
            frozenset(completion.unknown),
        )


async def _why(response: aiohttp.ClientResponse) -> str:
    text = (await response.text(errors="replace")).strip()
    return text.replace("\n", " ")[:300] or "nothing"


def _line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


async def send(
    server: LoadedServer,
    jobs: Sequence[Posted],
    max_concurrency: int | None = None,
    done: Callable[[int, Outcome], None] = lambda at, outcome: None,
    began: float | None = None,
) -> tuple[list[Outcome], float]:
    """Send each request at its time, or later if max_concurrency are open. Return outcomes in order, and seconds.

    done: callback with the place and the outcome of each request. began: start by `time.perf_counter`; None: now.
    """
    slots = nullcontext() if max_concurrency is None else asyncio.Semaphore(max_concurrency)
    start = time.perf_counter() if began is None else began

    async def one(at: int, job: Posted) -> Outcome:
        await asyncio.sleep(max(0.0, start + job.at - time.perf_counter()))
        async with slots:
            outcome = await server.ask(job)
        done(at, outcome)
        return outcome

    outcomes = await asyncio.gather(*(one(*each) for each in enumerate(jobs)))
    return outcomes, time.perf_counter() - start


def summary(outcomes: Sequence[Outcome], duration: float, goodput: Mapping[str, float] = {}) -> dict[str, Any]:
    """Return the figures, under the names that `vllm bench serve` writes; latencies in ms, None if there is none.

    duration: seconds. goodput: limits in ms by ttft, tpot or e2el; requests within all of them count.
    """
    whole = [o for o in outcomes if not o.error]
    read, written = sum(o.input_tokens for o in whole), sum(o.output_tokens for o in whole)
    found: dict[str, Any] = {
        "duration": duration,
        "completed": len(whole),
        "failed": len(outcomes) - len(whole),
        "total_input_tokens": read,
        "total_output_tokens": written,
        "request_throughput": len(whole) / duration,
        "input_throughput": read / duration,
        "output_throughput": written / duration,
        "total_token_throughput": (read + written) / duration,
        "concurrency": sum(o.times[-1] for o in whole) / duration,
    }
    if goodput:
        kept = [all(1e3 * s <= goodput[k] for k in goodput for s in o.latencies[k]) for o in whole]
        found["request_goodput"] = sum(kept) / duration
    for name in LATENCIES:
        ms = 1e3 * np.array([s for o in whole for s in o.latencies[name]])
        for what, of in (("mean", np.mean), ("median", np.median), ("std", np.std), ("p99", _p99)):
            found[f"{what}_{name}_ms"] = float(of(ms)) if len(ms) else None
    return found


def accepted_drafts(before: Counter[str], after: Counter[str]) -> dict[str, float] | None:
    """Return the counts of DRAFTS between two moments, the share of accepted drafts, and the mean tokens of a row with
    drafts; None: there were no drafts."""
    counts = {name: after[name] - before[name] for name in DRAFTS}
    if counts["drafted"] < 1:
        return None
    share, length = counts["accepted"] / counts["drafted"], 1 + counts["accepted"] / max(1, counts["rows"])
    return counts | {"share": share, "accept_length": length}


def _p99(values: Any) -> float:
    return float(np.percentile(values, 99))
