"""`weft bench serving`."""

from __future__ import annotations

import asyncio
import datetime
import json
import math
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn

from weft.planner.show import columns
from weft.serve.cli.command import UserError, check_writable, stop_on_sigterm, user_errors
from weft.serve.cli.progress import progress_bar
from weft_bench.client_processes import processes_for, send_from
from weft_bench.serving import LATENCIES, ApiBackend, LoadedServer, Workload, accepted_drafts, arrivals, summary
from weft_bench.streamed_completion import LoadError

NAMES = {
    "tpot": "time per output token",
    "ttft": "time to first token",
    "itl": "inter-token latency",
    "e2el": "end to end",
}

UNREPORTED = ("api_key", "tokenizer", "vocab_size", "goodput", "json", "output_file")
"""Options omitted from the results."""


@dataclass(frozen=True)
class Command:
    """Load an OpenAI-compatible server with random prompts, and report its throughput and latencies.

    Options and figures are as in `vllm bench serve` with its random data set. Prompts are token ids, which most servers
    accept; with --tokenizer they are texts. Clients are spread over processes, one for 32 clients if the host has four
    cores for it. Exit code 1 if a request fails.

    Examples:
      weft bench serving --num-prompts 200 --random-input-len 256 --random-output-len 64 --max-concurrency 16
      weft bench serving --base-url http://host:8000 --request-rate 4 --ignore-eos --output-file runs.jsonl
      weft bench serving --backend openai-chat --tokenizer DIR --goodput ttft:500 tpot:50 --json
    """

    base_url: str = "http://127.0.0.1:8000"
    """URL of the server."""
    api_key: str | None = None
    """Bearer token to send; omitted: the value of OPENAI_API_KEY."""
    backend: ApiBackend = "openai"
    """openai: /v1/completions; openai-chat: /v1/chat/completions, which requires texts."""
    model: str | None = None
    """Name of the model; omitted: the server's first in /v1/models."""
    tokenizer: str | None = None
    """Directory or Hugging Face name: prompts are texts, with lengths in its tokens."""
    vocab_size: int = 1000
    """Upper bound of token ids in prompts without a tokenizer."""
    num_prompts: int = 1000
    """Number of requests."""
    random_input_len: int = 1024
    """Tokens of a prompt."""
    random_output_len: int = 128
    """Maximum tokens of an output; with --ignore-eos the exact number."""
    random_range_ratio: float = 0.0
    """Lengths are sampled from len × (1 - ratio) to len × (1 + ratio)."""
    random_prefix_len: int = 0
    """Tokens of a prefix shared by all prompts, in addition to their own."""
    request_rate: float = math.inf
    """Requests per second; inf: all at once."""
    burstiness: float = 1.0
    """Burstiness of the arrivals: 1 is a Poisson process, less is burstier, more is steadier."""
    max_concurrency: int | None = None
    """Maximum requests open at once."""
    num_warmups: int = 1
    """Requests sent one after the other before the measurement."""
    ignore_eos: bool = False
    """Request outputs of full length, by a field of vLLM, SGLang and Weft that other servers may refuse."""
    temperature: float = 0.0
    """Temperature of sampling; 0 is greedy."""
    seed: int = 0
    """Seed of prompts, lengths and arrivals."""
    goodput: tuple[str, ...] = ()
    """Count the requests within limits in ms, such as ttft:500 tpot:50 e2el:10000."""
    json: bool = False
    """Print one JSON object instead of the table."""
    output_file: Path | None = None
    """Append the JSON object to this file, as one line."""

    def run(self) -> int:
        """Print the figures. Raises UserError."""
        limits = self._limits()
        lengths = self.random_input_len, self.random_output_len, self.random_range_ratio, self.random_prefix_len
        with user_errors():
            workload = Workload(self.num_prompts, *lengths, self.seed)
        for name, value in (("request_rate", self.request_rate), ("burstiness", self.burstiness)):
            if not value > 0:
                raise UserError(f"{name} is {value}; it must be above 0")
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise UserError(f"max_concurrency is {self.max_concurrency}; it must be 1 or more")
        if self.num_warmups < 0:
            raise UserError(f"num_warmups is {self.num_warmups}; it must be 0 or more")
        if self.output_file is not None:
            check_writable(self.output_file, "--output-file")
        if self.backend == "openai-chat" and self.tokenizer is None:
            raise UserError("--backend openai-chat sends texts; name their --tokenizer, a directory or a name")
        tokenizer = self._load_tokenizer()
        vocabulary = self.vocab_size if tokenizer is None else len(tokenizer)
        if vocabulary < 32:
            raise UserError(f"vocab_size is {vocabulary}; it must be 32 or more")
        stop_on_sigterm()
        with user_errors(LoadError):
            found, errors = asyncio.run(self._measure(workload, vocabulary, tokenizer, limits))
        if self.output_file is not None:
            with self.output_file.open("a") as file:
                file.write(json.dumps(found) + "\n")
        print(json.dumps(found) if self.json else table(found, errors))
        return int(found["failed"] > 0)

    def _limits(self) -> dict[str, float]:
        limits = {}
        for text in self.goodput:
            name, _, ms = text.partition(":")
            try:
                limits[name] = float(ms)
            except ValueError:
                name = ""
            if name not in ("ttft", "tpot", "e2el"):
                raise UserError(f"--goodput takes ttft:MS, tpot:MS and e2el:MS, not {text!r}")
        return limits

    def _load_tokenizer(self) -> Any:
        if self.tokenizer is None:
            return None
        from weft.engine.output.tokenizer_files import read_tokenizer

        return read_tokenizer(self.tokenizer)

    async def _measure(
        self, workload: Workload, vocabulary: int, tokenizer: Any, limits: dict[str, float]
    ) -> tuple[dict[str, Any], list[str]]:
        extra: dict[str, Any] = {"temperature": self.temperature} | ({"ignore_eos": True} if self.ignore_eos else {})
        key = (self.api_key or os.environ.get("OPENAI_API_KEY", "")).strip()  # mounted secrets end in a newline
        asks = workload.asks(vocabulary, tokenizer)
        async with LoadedServer(self.base_url, key, self.backend, extra) as server:
            model = await self._choose_model(server)
            if self.num_warmups:  # other tokens, so that no measured prefix is cached
                other = replace(workload, num_prompts=self.num_warmups, seed=self.seed + 1)
                for ask in other.asks(vocabulary, tokenizer):
                    if error := (await server.ask(server.job(model, ask))).error:
                        raise LoadError(f"a first request to {server.base_url} failed: {error}")
            drafts = await server.drafts()
            shown = (TextColumn("requests"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            with progress_bar(*shown) as bar:
                task = bar.add_task("requests", total=len(asks))
                times = arrivals(len(asks), self.request_rate, self.burstiness, self.seed)
                jobs = [server.job(model, *each) for each in zip(asks, times, strict=True)]
                processes = processes_for(min(len(jobs), self.max_concurrency or len(jobs)))
                outcomes, seconds = await send_from(
                    processes, server, jobs, self.max_concurrency, lambda at, outcome: bar.advance(task)
                )
            speculative = accepted_drafts(drafts, await server.drafts())
        if unknown := frozenset[str]().union(*(outcome.unknown for outcome in outcomes)):
            names = ", ".join(sorted(unknown))
            print(f"weft: unknown pieces in the streams count as output: {names}", file=sys.stderr)
        rate = "inf" if math.isinf(self.request_rate) else self.request_rate
        head: dict[str, Any] = {"date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")}
        head |= {name: value for name, value in vars(self).items() if name not in UNREPORTED}
        head |= {"base_url": server.base_url, "model": model, "request_rate": rate, "client_processes": processes}
        head |= {"speculative": speculative}
        return head | summary(outcomes, seconds, limits), [o.error for o in outcomes if o.error]

    async def _choose_model(self, server: LoadedServer) -> str:
        served = await server.models()
        if self.model is None:
            if not served:
                raise LoadError(f"{server.base_url} names no model; give --model")
            return served[0]
        if self.model not in served:
            raise LoadError(f"{server.base_url} serves no model {self.model!r}, only {', '.join(served) or 'none'}")
        return self.model


def table(found: dict[str, Any], errors: list[str]) -> str:
    """Format the figures in 80 columns. errors: errors of failed requests."""
    lines = [f"{found['model']}, {found['num_prompts']} requests in {found['duration']:,.1f} s", ""]
    rows: list[tuple[str, ...]] = [
        ("successful requests", f"{found['completed']:,}"),
        ("failed requests", f"{found['failed']:,}"),
        ("input tokens", f"{found['total_input_tokens']:,}"),
        ("output tokens", f"{found['total_output_tokens']:,}"),
        ("requests a second", f"{found['request_throughput']:,.2f}"),
        ("input tokens a second", f"{found['input_throughput']:,.1f}"),
        ("output tokens a second", f"{found['output_throughput']:,.1f}"),
        ("all tokens a second", f"{found['total_token_throughput']:,.1f}"),
        ("requests at once, mean", f"{found['concurrency']:,.1f}"),
    ]
    if drafts := found["speculative"]:
        counts = f"{drafts['accepted']:,} of {drafts['drafted']:,} ({drafts['share']:.0%})"
        rows += [("accepted drafts", counts), ("tokens of a row with drafts", f"{drafts['accept_length']:.2f}")]
    if "request_goodput" in found:
        rows.append(("requests a second within limits", f"{found['request_goodput']:,.2f}"))
    lines += columns(rows)
    kinds = ("mean", "median", "std", "p99")
    rows = [("ms", *kinds)]
    for name in LATENCIES:
        values = [found[f"{kind}_{name}_ms"] for kind in kinds]
        rows.append((f"{NAMES[name]} ({name.upper()})", *("-" if v is None else f"{v:,.2f}" for v in values)))
    lines += ["", *columns(rows)]
    if errors:
        more = f", and {len(errors) - 1} more" if len(errors) > 1 else ""
        lines += ["", f"failed with: {errors[0]}{more}"]
    return "\n".join(lines)
