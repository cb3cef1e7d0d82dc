"""A thousand mixed requests over HTTP: cancellations, prefix hits and preemption; greedy answers as of each alone.

    PYTHONPATH=tests python -m chaos.soak [--requests 1000] [--serve-arguments --attn-dp 2 --ep 2] [--json FILE]

First each distinct request is asked alone, one after the other. Then all are asked by many clients at once, each again
and again in another company: greedy and sampled ones, streamed and whole, with prompts of several lengths of
which many begin alike, and a cache too small for all of them, so that sequences give up their pages. A part is
cancelled in the midst of its answer: the client goes away. It holds where every answer that was not cancelled is, token
for token, what the request got alone, nothing is lost or left, sequences were preempted and prefixes were found. Exit
code 1 where it does not. About two minutes on two cores.

On GPUs: `--serve-arguments --device cuda --dtype float32 --attn-tp 2 --ep 2 --moe-tp 1`; in bfloat16 the order in which
numbers are added may decide between two tokens, and that depends on the company.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp

from chaos.server_process import ServerProcess
from weft.tune.host import describe_host
from weft_bench.streamed_completion import LoadError, StreamedCompletion

TIMEOUT = aiohttp.ClientTimeout(total=None, sock_read=300)
SMALL = ("--kv-tokens", "640", "--max-running", "12", "--max-batch-tokens", "128", "--max-waiting", "4096")
"""Cache size for about a third of a full batch's sequences; prompts are read in chunks."""
METRICS = ("weft_preemptions_total", "weft_prefix_cached_tokens_total", "weft_restarts_total", "weft_steps_total")


def mixed(count: int, seed: int, vocabulary: int) -> list[dict[str, Any]]:
    """Return bodies of distinct requests, with token ids for prompts: a third begin with one of three stems."""
    draw = random.Random(seed)

    def tokens(length: int) -> list[int]:
        return [draw.randrange(10, vocabulary) for _ in range(length)]

    stems, bodies = [tokens(48) for _ in range(3)], []
    for i in range(count):
        prompt = (stems[i % 9] if i % 9 < 3 else []) + tokens(draw.choice((1, 5, 20, 60, 150)))
        body = {"prompt": prompt, "max_tokens": draw.choice((1, 4, 16, 48)), "ignore_eos": True, "seed": i}
        bodies.append(body | {"temperature": 0.0 if i % 4 else 0.8, "logprobs": 0})
    return bodies


class Client:
    """Client of one server."""

    def __init__(self, session: aiohttp.ClientSession, url: str, model: str):
        self._session, self._url, self._model = session, url, model

    async def ask(self, body: dict[str, Any], streams: bool, leave_after: int | None = None) -> list[str] | None:
        """Return the output's tokens by name; None if the client left after `leave_after`. Raises LoadError."""
        body = body | {"model": self._model, "stream": streams}
        async with self._session.post(f"{self._url}/v1/completions", json=body) as response:
            if response.status != 200:
                raise LoadError(f"status {response.status}: {(await response.text())[:200]}")
            if not streams:
                [choice] = (await response.json())["choices"]
                return list(choice["logprobs"]["tokens"])
            output, found = StreamedCompletion(), []
            async for line in response.content:
                output.take(line, time.monotonic())
                if line.startswith(b"data: {"):
                    for choice in json.loads(line[6:])["choices"]:
                        found += (choice["logprobs"] or {}).get("tokens", [])
                if leave_after is not None and len(found) >= leave_after:
                    response.close()
                    return None
        if not output.done:
            raise LoadError("the stream ended without [DONE]")
        return found


async def soak(url: str, model: str, options: argparse.Namespace) -> dict[str, Any]:
    bodies = mixed(options.distinct, options.seed, options.vocabulary)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=TIMEOUT) as session:
        client = Client(session, url, model)
        began = time.monotonic()
        alone = [await client.ask(body, streams=False) for body in bodies]
        alone_s = time.monotonic() - began
        began = time.monotonic()
        draw, counts, wrong = random.Random(options.seed), Counter[str](), []
        plan = [(draw.randrange(len(bodies)), draw.random(), draw.random()) for _ in range(options.requests)]
        capacity = asyncio.Semaphore(options.clients)

        async def one(which: int, chance: float, cut: float) -> None:
            body, leave = bodies[which], None
            if chance < options.cancelled and body["max_tokens"] > 1:
                leave = 1 + int(cut * (body["max_tokens"] - 1))
            async with capacity:
                try:
                    found = await client.ask(body, streams=leave is not None or chance < 0.7, leave_after=leave)
                except (LoadError, aiohttp.ClientError, TimeoutError, OSError) as error:
                    counts["lost"] += 1
                    wrong.append(f"request {which}: {type(error).__name__}: {error}")
                    return
            same = found is None or found == alone[which]
            counts["cancelled" if found is None else "same" if same else "different"] += 1
            if not same:
                wrong.append(f"request {which}: {found} instead of {alone[which]}")

        await asyncio.gather(*(one(*each) for each in plan))
        return {
            "counts": dict(counts),
            "wrong": wrong[:5],
            "alone_s": round(alone_s, 1),
            "together_s": round(time.monotonic() - began, 1),
            "greedy": sum(b["temperature"] == 0 for b in bodies) / len(bodies),
        }


def idle(served: ServerProcess) -> dict[str, float]:
    """Return the requests that run or wait, once no client is left; they need a step or two to end."""
    names = ("weft_requests_running", "weft_requests_waiting")
    deadline = time.monotonic() + 30
    while True:
        found = {name: served.metric(name) for name in names}
        if not any(found.values()) or time.monotonic() > deadline:
            return found
        time.sleep(0.1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--distinct", type=int, default=90, help="different requests, each of which is asked alone")
    parser.add_argument("--clients", type=int, default=48, help="requests that are open at once")
    parser.add_argument("--cancelled", type=float, default=0.15, help="share whose clients leave")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--vocabulary", type=int, default=1000, help="prompts are of token ids below it")
    parser.add_argument("--serve-arguments", nargs=argparse.REMAINDER, default=[], help="further ones of weft serve")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="weft-soak-") as folder:
        served = ServerProcess(Path(folder), [*SMALL, *options.serve_arguments])
        try:
            found = asyncio.run(soak(f"http://127.0.0.1:{served.port}", served.name, options))
            found |= {name: served.metric(name) for name in METRICS} | idle(served)
        finally:
            found_code = served.end(60.0)
    counts = found["counts"]
    held = {
        "every answer is the one that the request got alone": not counts.get("different") and not counts.get("lost"),
        "clients left": counts.get("cancelled", 0) > 0,
        "sequences were preempted": found["weft_preemptions_total"] > 0,
        "prefixes were found": found["weft_prefix_cached_tokens_total"] > 0,
        "no rank failed": found["weft_restarts_total"] == 0,
        "nothing was left": not found["weft_requests_running"] and not found["weft_requests_waiting"],
        "the server ended by itself": found_code == 0,
    }
    arguments = {k: v for k, v in vars(options).items() if k != "json"}
    report = {"held": all(held.values()), "checks": held, **found, "arguments": arguments, "host": describe_host()}
    text = json.dumps(report, indent=1)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")
    return 0 if report["held"] else 1


if __name__ == "__main__":
    sys.exit(main())
