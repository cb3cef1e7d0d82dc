"""Compare Weft with vLLM and SGLang: each serves the same checkpoint, and gets the same prompts over HTTP.

Writes a checkpoint with made-up weights, unless --model names one, starts each engine as its documentation says, and
loads it with the clients of `weft bench serving`: prompts of token ids that it has not seen, so that no prefix cache
helps; greedy outputs of full length. Rounds alternate: A B, B A. Engines are placed in one of two ways:

- one after the other: each has the GPUs to itself, and starts anew if another ran in between;
- --together: all start first, each with its share of the memory, and the load alternates point by point. They start
  one after the other, because each sizes its cache by the free memory, or with --cache-tokens at the same time.

All engines have the same limits of sequences and tokens per step, or with --defaults each its own. The table has times
per output token (TPOT), between tokens (ITL) and to the first token (TTFT), tokens per second, seconds to start, tokens
that a cache holds, and the first engine's multiple of the best other. It is in --out, with JSON that names the host,
and with the engines' logs. All are written after each point, so that --limit-s loses nothing when it ends a run early.

    python bench/scripts/rivals/compare.py --engines weft vllm --num-layers 24 --python vllm=/opt/vllm/bin/python
    python bench/scripts/rivals/compare.py --dry-run
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from engines import KINDS, EngineFailed, Installation, Options, RunningEngine
from results import Results

from weft.engine.assets import embedded_model_dir
from weft.serve.cli.command import stop_on_sigterm
from weft_bench.client_processes import processes_for, send_from
from weft_bench.serving import LoadedServer, Outcome, RequestSpec, Workload, summary

POINTS = ["1x1024x128x8", "16x1024x128x48", "64x1024x128x128", "256x1024x128x256"]
POINTS += ["1x8192x16x4", "16x8192x16x16", "64x8192x16x64", "256x8192x16x256"]
DRY_POINTS = ["1x32x8x2", "40x64x4x40"]
MAX_TOKEN = 100_000
"""Upper bound of token ids: vocabularies end in special ones."""
WARM_INPUT, WARM_OUTPUT = 1 << 17, 8
"""Tokens before a point is measured: the maximum of all prompts, and the number of an output."""
POLL_S = 0.2
"""Seconds between two looks at engines that start."""
WARM_SEED = 1 << 20
"""Seed of the prompts that warm the first point. (Python's Random uses the same seed for a number and its negative.)"""


class OutOfTime(Exception):
    """--limit-s has passed."""


@dataclass(frozen=True)
class Point:
    """Load of `clients` clients; each sends its next request when the last has ended."""

    clients: int
    input_tokens: int
    output_tokens: int
    requests: int

    @classmethod
    def parse(cls, text: str) -> Point:
        """Parse CLIENTSxINPUTxOUTPUTxREQUESTS. Raises ValueError."""
        clients, input_tokens, output_tokens, requests = map(int, text.split("x"))
        return cls(clients, input_tokens, output_tokens, requests)

    def prompts(self, vocabulary: int, seed: int) -> list[RequestSpec]:
        """Return the requests; a seed's are the same for every engine."""
        return Workload(self.requests, self.input_tokens, self.output_tokens, seed=seed).asks(vocabulary)


async def load(url: str, model: str, prompts: list[RequestSpec], clients: int) -> tuple[list[Outcome], float]:
    """Send requests from `clients` clients. Return the outcomes, and seconds from the start to the last output."""
    async with LoadedServer(url, extra={"temperature": 0.0, "ignore_eos": True}) as server:
        jobs = [server.job(model, prompt) for prompt in prompts]
        return await send_from(processes_for(clients), server, jobs, clients)


@dataclass(frozen=True)
class Comparison:
    """Engines by label, each with its kind and installation, loaded with the points in rounds.

    more: more options of engines, by label. vocabulary: upper bound of token ids in prompts. deadline: end of the whole
    run, on time.monotonic.
    """

    engines: dict[str, tuple[str, Installation]]
    options: Options
    more: Mapping[str, str]
    points: Sequence[Point]
    rounds: int
    vocabulary: int
    results: Results
    out: Path
    start_limit_s: float
    deadline: float

    def one_after_the_other(self) -> None:
        """Measure one engine at a time. Raises OutOfTime."""
        order = [(label, number) for number in range(self.rounds) for label in self._in_turn(number)]
        for label, rounds in itertools.groupby(order, key=lambda each: each[0]):
            with ExitStack() as stack:
                for engine in self._start([label], stack).values():
                    for _, number in rounds:
                        for at in range(len(self.points)):
                            self._measure(label, engine, at, number)

    def together(self) -> None:
        """Measure all engines at once. Raises OutOfTime."""
        with ExitStack() as stack:
            running: dict[str, RunningEngine] = {}
            at_once = [list(self.engines)] if self.options.cache_tokens else [[label] for label in self.engines]
            for labels in at_once:
                running |= self._start(labels, stack, before=len(running))
            for at in range(len(self.points)):
                for number in range(self.rounds):
                    for label in self._in_turn(number):
                        if label in running:
                            self._measure(label, running[label], at, number)

    def _in_turn(self, number: int) -> list[str]:
        return list(self.engines)[:: 1 if number % 2 == 0 else -1]

    def _left_s(self) -> float:
        if (left := self.deadline - time.monotonic()) <= 0:
            raise OutOfTime
        return left

    def _start(self, labels: Sequence[str], stack: ExitStack, before: int = 0) -> dict[str, RunningEngine]:
        """Start engines at the same time, and warm them. Return those that started. before: number of others."""
        starting: dict[str, RunningEngine] = {}
        ready: dict[str, RunningEngine] = {}
        for label in labels:
            kind, installed = self.engines[label]
            more = tuple(self.more.get(label, "").split())
            options = replace(self.options, before=before * self.options.memory, more=more)
            limit_s = min(self.start_limit_s, self._left_s())
            starting[label] = RunningEngine(KINDS[kind], installed, options, self.out / f"{label}.log", limit_s)
            stack.callback(starting[label].end)
        while starting:
            for label, engine in list(starting.items()):
                try:
                    if not engine.ready():
                        continue
                    ready[label] = engine
                    about = {"start_s": engine.start_s, "cache_tokens": engine.cache_tokens(), "command": engine.shown}
                except EngineFailed as error:
                    print(f"{label}: {error}", file=sys.stderr, flush=True)
                    engine.end()
                    about = {"error": str(error)}
                self.results.add_start({"engine": label} | about)
                del starting[label]
            time.sleep(POLL_S)
        for label, engine in ready.items():
            self._warm(label, engine)
        return ready

    def _warm(self, label: str, engine: RunningEngine) -> None:
        """Send requests of each point, for all that is compiled or loaded at the first use."""
        for at, point in enumerate(self.points):
            clients = min(point.clients, -(-WARM_INPUT // point.input_tokens))
            warm = Point(clients, point.input_tokens, WARM_OUTPUT, clients)
            outcomes, _ = self._load(engine, warm, warm.prompts(self.vocabulary, WARM_SEED + at))
            if error := next((outcome.error for outcome in outcomes if outcome.error), None):
                print(f"{label}: {error}\n{engine.tail()}", file=sys.stderr, flush=True)

    def _measure(self, label: str, engine: RunningEngine, at: int, number: int) -> None:
        point = self.points[at]
        row = {"engine": label, "round": number, "clients": point.clients, "input": point.input_tokens}
        row |= {"output": point.output_tokens}
        prompts = point.prompts(self.vocabulary, number * len(self.points) + at)
        outcomes, seconds = self._load(engine, point, prompts)
        found = row | summary(outcomes, seconds)
        if errors := [outcome.error for outcome in outcomes if outcome.error]:
            found["error"] = f"{len(errors)} requests failed: {errors[0]}"
            print(f"{label}: {found['error']}\n{engine.tail()}", file=sys.stderr, flush=True)
        self.results.add(found)

    def _load(self, engine: RunningEngine, point: Point, prompts: list[RequestSpec]) -> tuple[list[Outcome], float]:
        """Run `load`. Raises OutOfTime."""
        left_s = self._left_s()
        try:
            return asyncio.run(asyncio.wait_for(load(engine.url, engine.model, prompts, point.clients), left_s))
        except TimeoutError:
            raise OutOfTime from None


PLACES = {"python", "path", "model", "write_to", "caches", "out"}
"""Arguments that only this machine has; they are not written down."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", default=["weft", "vllm"], choices=list(KINDS))
    parser.add_argument("--python", nargs="*", default=[], metavar="ENGINE=PYTHON", help="defaults to this one")
    parser.add_argument("--path", nargs="*", default=[], metavar="ENGINE=PYTHONPATH", help="defaults to this process's")
    parser.add_argument(
        "--more", nargs="*", default=[], metavar="LABEL=OPTIONS", help='such as weft-2="--mixed-batch-tokens 2048"'
    )
    parser.add_argument("--model", type=Path, help="directory with a checkpoint; defaults to a new one in --write-to")
    parser.add_argument("--write-to", type=Path, default=Path("/dev/shm/weft-rivals"), help="reused if it exists")
    parser.add_argument("--preset", default="qwen3-30b-a3b", help="shape of the new checkpoint")
    parser.add_argument("--num-layers", type=int, help="number of its layers; defaults to all")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--ranks", type=int, default=1, help="GPUs of each engine")
    parser.add_argument(
        "--attn-dp",
        type=int,
        default=1,
        help="groups of these ranks with requests of their own, with experts sharded over all; 1: tensor parallelism",
    )
    parser.add_argument("--together", action="store_true", help="run all engines at once, each with a share of memory")
    parser.add_argument("--memory", type=float, default=0.9, help="share of a GPU's memory for all running engines")
    parser.add_argument("--cache-tokens", type=int, help="size of each group's cache; omitted: all that fits")
    parser.add_argument("--sequences", type=int, default=256, help="maximum at once, of a group")
    parser.add_argument("--tokens", type=int, default=8192, help="maximum of a step, of a group")
    parser.add_argument("--defaults", action="store_true", help="use each engine's own --sequences and --tokens")
    parser.add_argument("--points", nargs="+", default=POINTS, metavar="CLIENTSxINPUTxOUTPUTxREQUESTS")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--start-limit-s", type=float, default=300.0, help="limit for one start")
    parser.add_argument("--limit-s", type=float, default=3600.0, help="limit for everything")
    parser.add_argument(
        "--caches", type=Path, default=Path(tempfile.gettempdir(), "weft-rivals"), help="caches of compilers"
    )
    parser.add_argument("--out", type=Path, default=Path("build/rivals"))
    parser.add_argument(
        "--dry-run", action="store_true", help="compare two Weft servers of the embedded model, on CPUs"
    )
    args = parser.parse_args()
    if args.dry_run:
        dry = {"engines": ["weft", "weft"], "model": embedded_model_dir(), "device": "cpu", "points": DRY_POINTS}
        vars(args).update(dry, together=True, sequences=16, tokens=256)
    for name, known in (("python", list(KINDS)), ("path", list(KINDS)), ("more", labels_of(args.engines))):
        pairs = [text.partition("=")[::2] for text in getattr(args, name)]
        if wrong := [engine for engine, _ in pairs if engine not in known]:
            parser.error(f"--{name} takes ENGINE=VALUE, and {wrong[0]!r} is none of {', '.join(known)}")
        setattr(args, name, dict(pairs))
    if args.ranks % args.attn_dp:
        parser.error(f"--ranks {args.ranks} is no multiple of --attn-dp {args.attn_dp}")
    try:
        args.points = [Point.parse(text) for text in args.points]
    except ValueError:
        parser.error("--points takes CLIENTSxINPUTxOUTPUTxREQUESTS, such as 16x1024x128x48")
    return args


def labels_of(engines: Sequence[str]) -> list[str]:
    """Return a label for each engine: its name, and its place if the name is there before."""
    return [name if engines[:at].count(name) == 0 else f"{name}-{at + 1}" for at, name in enumerate(engines)]


def apart(*command: str) -> str:
    """Return the output of a Python program, run in a process of its own so that this one keeps no memory of a GPU."""
    return subprocess.run([sys.executable, *command], check=True, stdout=subprocess.PIPE, text=True).stdout


def main() -> None:
    args = arguments()
    deadline = time.monotonic() + args.limit_s
    stop_on_sigterm()
    if (model := args.model) is None:
        model = args.write_to
        if not (model / "model.safetensors.index.json").exists():
            layers = [] if args.num_layers is None else ["--num-layers", str(args.num_layers)]
            print(apart(str(Path(__file__).parent / "checkpoint.py"), str(model), "--preset", args.preset, *layers))
    labels = labels_of(args.engines)
    engines = {
        label: (name, Installation(args.python.get(name, sys.executable), args.path.get(name), args.caches / name))
        for label, name in zip(labels, args.engines, strict=True)
    }
    share = args.memory / (len(engines) if args.together else 1)
    own = (None, None) if args.defaults else (args.sequences, args.tokens)
    options = Options(model, 0, args.device, args.ranks, args.attn_dp, share, 0.0, *own, args.cache_tokens)
    host = json.loads(apart("-c", "import json; from weft.tune.host import describe_host as d; print(json.dumps(d()))"))
    args.out.mkdir(parents=True, exist_ok=True)
    about = {"host": host, "arguments": {name: str(v) for name, v in vars(args).items() if name not in PLACES}}
    vocabulary = min(json.loads((model / "config.json").read_text())["vocab_size"], MAX_TOKEN)
    results = Results(args.out, about, labels)
    limits = args.start_limit_s, deadline
    run = args.points, args.rounds, vocabulary, results, args.out, *limits
    compared = Comparison(engines, options, args.more, *run)
    try:
        (compared.together if args.together else compared.one_after_the_other)()
    except OutOfTime:
        print(f"ended after {args.limit_s:g} s", file=sys.stderr)
    print(results.table())
    sys.exit(any("error" in row for row in (*results.starts, *results.rows)))


if __name__ == "__main__":
    main()
