"""Prompt tokens that two replicas find in their prefix caches, by the router in front of them and its policy.

    python bench/scripts/prefix_routing.py --bin ~/routers/bin --json bench/results/cpu_prefix_routing.json

Conversations begin with one of a few long texts, and each turn brings all before it again. A router with the policy
round_robin sends the turns of a conversation to either replica; cache_aware compares texts that it has sent before, and
kv_aware what the replicas publish of their caches. `--bin` has the routers: pip install sglang-router==0.3.2
vllm-router==0.1.17 in a virtual environment of their own. Rates are counts of tokens, which other work does not change.
"""

from __future__ import annotations

import http.client
import json
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import tyro

from weft.tune.host import describe_host
from weft_bench.server_process import ServerError, ServerProcess

START_S, REQUEST_S, SETTLE_S = 120.0, 300.0, 3.0
WORDS = ["apples", "pears", "birds", "cars", "coins", "books", "buys", "gives", "finds", "takes", "then", "two", "five"]
Command = Callable[[list[str], list[int], int, int], list[str]]
"""Of a router: from the replicas' URLs and ports of their events, its own port and that of its metrics."""


@dataclass(frozen=True)
class Options:
    """bin: folder of the routers' commands. texts: long ones, of so many words, with which conversations begin.
    conversations: of each text; turns: of each; clients: requests at once. kv_tokens: of each replica's cache, all
    measured one after the other. policies: only these, such as "vllm-router kv_aware"."""

    bin: Path
    texts: int = 8
    words: int = 400
    conversations: int = 4
    turns: int = 4
    clients: int = 4
    kv_tokens: tuple[int, ...] = (65536, 6144)
    policies: tuple[str, ...] = ()
    json: Path | None = None


def main(options: Options) -> int:
    report: dict[str, Any] = {
        "host": describe_host(),
        "options": {**vars(options), "bin": None, "json": None},
        "runs": [],
    }
    for kv_tokens in options.kv_tokens:
        with tempfile.TemporaryDirectory(prefix="weft-routing-") as folder, ExitStack() as stack:
            replicas, events = [], free_ports(2)
            for number, port in enumerate(events):
                (own := Path(folder) / str(number)).mkdir()
                config = json.dumps({"publisher": "zmq", "endpoint": f"tcp://*:{port}"})
                arguments = ["--device", "cpu", "--kv-tokens", str(kv_tokens), "--kv-events-config", config]
                replicas.append(ServerProcess(own, arguments))
                stack.callback(replicas[-1].end, 30.0)
            for name, command in routers(options.bin, replicas[0].name).items():
                if not options.policies or name in options.policies:
                    run = {"router": name, "kv_tokens": kv_tokens} | measure(replicas, events, command, folder, options)
                    report["runs"].append(run)
                    print(json.dumps(run), file=sys.stderr, flush=True)
    print(table(report["runs"]))
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


def routers(folder: Path, model: str) -> dict[str, Command]:
    """The command of each router with each policy."""

    def sglang(policy: str, urls: list[str], events: list[int], port: int, metrics: int) -> list[str]:
        command = [str(folder / "sglang-router"), "launch", "--policy", policy, "--worker-urls", *urls]
        return [*command, "--port", str(port), "--prometheus-port", str(metrics)]

    def vllm(policy: str, urls: list[str], events: list[int], port: int, metrics: int) -> list[str]:
        command = [str(folder / "vllm-router"), "--policy", policy, "--worker-urls", *urls]
        if policy == "kv_aware":
            command += ["--kv-event-model", model, "--kv-event-block-size", "16"]
            for url, source in zip(urls, events, strict=True):
                command += ["--kv-event-source", f"{url}=tcp://127.0.0.1:{source}"]
        return [*command, "--port", str(port), "--prometheus-port", str(metrics)]

    return {
        **{f"sglang-router {policy}": partial(sglang, policy) for policy in ("round_robin", "cache_aware")},
        **{f"vllm-router {policy}": partial(vllm, policy) for policy in ("round_robin", "cache_aware", "kv_aware")},
    }


def measure(
    replicas: Sequence[ServerProcess], events: list[int], command: Command, folder: str, options: Options
) -> dict[str, Any]:
    """What the replicas count while a router sends them all conversations. Raises ServerError."""
    for replica in replicas:
        post(replica.port, "/reset_prefix_cache", {})
    before = [counters(replica) for replica in replicas]
    with routed(replicas, events, command, Path(folder) / "router.log") as port:
        talk(port, replicas[0].name, options)
    after = [counters(replica) for replica in replicas]
    each = [{name: int(now[name] - was[name]) for name in now} for was, now in zip(before, after, strict=True)]
    prompt, cached = (sum(counts[name] for counts in each) for name in ("prompt_tokens", "prefix_cached_tokens"))
    return {"hit_rate": round(cached / prompt, 4), "computed_tokens": prompt - cached, "replicas": each}


def counters(replica: ServerProcess) -> dict[str, float]:
    names = ("prompt_tokens", "prefix_cached_tokens", "requests")
    return {name: replica.metric(f"weft_{name}_total") for name in names}


@contextmanager
def routed(replicas: Sequence[ServerProcess], events: list[int], command: Command, log: Path) -> Iterator[int]:
    """The port of a router in front of the replicas. Raises ServerError where it does not start."""
    port, metrics = free_ports(2)
    urls = [f"http://127.0.0.1:{replica.port}" for replica in replicas]
    with open(log, "wb") as file:
        process = subprocess.Popen(command(urls, events, port, metrics), stdout=file, stderr=file)
    try:
        deadline = time.monotonic() + START_S
        while not healthy(port):
            if process.poll() is not None or time.monotonic() > deadline:
                raise ServerError(f"the router did not start: {log.read_text(errors='replace')[-400:]}")
            time.sleep(0.2)
        time.sleep(SETTLE_S)  # a router takes a server into its list, and subscribes to events, after it is healthy
        yield port
    finally:
        process.terminate()
        process.wait()


def talk(port: int, model: str, options: Options) -> None:
    """All conversations, turn by turn, each turn's in an order of its own."""
    rng = random.Random(0)
    texts = [" ".join(rng.choices(WORDS, k=options.words)) for _ in range(options.texts)]
    prompts = [f"{text} {at}:" for text in texts for at in range(options.conversations)]
    with ThreadPoolExecutor(options.clients) as clients:
        for _ in range(options.turns):
            questions = [" ".join(rng.choices(WORDS, k=20)) for _ in prompts]
            prompts = [f"{prompt} {question}?" for prompt, question in zip(prompts, questions, strict=True)]
            order = rng.sample(range(len(prompts)), len(prompts))
            asked = [{"model": model, "prompt": prompts[at], "max_tokens": 8, "temperature": 0} for at in order]
            for at, reply in zip(order, clients.map(partial(post, port, "/v1/completions"), asked), strict=True):
                prompts[at] += reply["choices"][0]["text"]


def post(port: int, path: str, body: dict[str, Any]) -> Any:
    """What a server replies. Raises ServerError."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=REQUEST_S)
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        text = response.read()
    finally:
        connection.close()
    if response.status != 200:
        raise ServerError(f"{path}: status {response.status}: {text[:300]!r}")
    return json.loads(text) if text else None


def healthy(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5.0)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        taken = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in taken:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in taken]


def table(runs: Sequence[dict[str, Any]]) -> str:
    lines = [
        "| tokens in each cache | router and policy | hit rate | tokens computed | requests by replica |",
        "|---|---|---|---|---|",
    ]
    for run in runs:
        split = " + ".join(str(replica["requests"]) for replica in run["replicas"])
        cells = (run["kv_tokens"], run["router"], f"{run['hit_rate']:.1%}", run["computed_tokens"], split)
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options)))
