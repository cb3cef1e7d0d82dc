"""Measure the time per output token with a forced share of right drafts, compared with no drafts.

Sequences of made-up prompts are sampled at a temperature of 100: the noise of seed and position decides, so outputs are
the same tokens however a step rounds. An engine without drafts records them. The source of a second engine, which
replaces prompt lookup, proposes the next ones, each wrong with probability 1 − rate. `accepted` is the share of drafts
that were accepted: none is after a wrong one. `equal` is the share of outputs that are the recorded ones.

With --source the engine's own source drafts instead: for completions of word problems by the embedded model, greedy, or
by the draft layer of a --preset with made-up weights, which are never right. `price` is what the engine measured: the
time of a step in which sequences draft, in steps without. With --forced ranks accept the source's drafts with the
probabilities --rates, whatever they sample: only the times mean something. Each measurement follows one that warms up.

The engines take turns `--turns` times. Prints a line of JSON per measurement: the median time per output token of its
sequences, and the longest times between tokens, by the number of the token.

    python bench/scripts/drafts.py --preset qwen3-30b-a3b --num-layers 16 --clients 1 16
    python bench/scripts/drafts.py --device cpu --clients 1 --tokens 96
    python bench/scripts/drafts.py --device cpu --clients 1 4 --source mtp --dtype float32
    python bench/scripts/drafts.py --preset glm-4.5-air --num-layers 16 --source mtp --forced --rates 0 0.7
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import operator
import random
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpu_decode import complete
from weft.engine.assets import preset_dir
from weft.engine.config.config import EngineConfig
from weft.engine.controller.engine import Engine
from weft.engine.messages.request import SamplingParams
from weft.engine.speculation.sources import SOURCES
from weft.serve.cli.command import stop_on_sigterm
from weft.tune.host import describe_host
from weft_bench import word_problems
from weft_bench.breakdown import random_prompts

OFF, DRAFTS = -1.0, "drafts"
PROBLEMS, WARM, LONGEST = 32, 8, 4
"""Word problems of a measurement, and of one before, by which an engine learns the price of its drafts; number of
late tokens to show."""


class Recorded:
    """Source of drafts from recorded sequences. rate: probability that a draft is right."""

    rate = 1.0

    def __init__(self) -> None:
        self.sequences: dict[tuple[int, ...], list[int]] = {}  # by the first tokens

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        """See `DraftSource.propose`."""
        at = len(tokens)
        drafts = self.sequences.get(tuple(tokens[:8]), [])[at : at + count]
        right = [random.Random(f"{tokens[0]}/{at + i}").random() < self.rate for i in range(len(drafts))]
        return [draft if good else draft ^ 1 for draft, good in zip(drafts, right, strict=True)]


FORCED = '''"""Plugin of ranks that accept a draft with a probability of {rate}."""
import random

from weft.engine.worker.row_table import Accepted, RowTable

FAMILIES = {{}}


def accept(table, group_rows, tokens):
    first, counts, last = 0, [], []
    for row, drafts in zip(group_rows.decode_rows, group_rows.drafts_each):
        request, length = table.rows[row].request, table.rows[row].length
        right = [random.Random(f"{{request}}/{{length}}/{{at}}").random() < {rate} for at in range(len(drafts))]
        accepted = right.index(False) if False in right else len(drafts)
        table.rows[row].length -= len(drafts) - accepted
        counts.append(accepted + 1)
        last.append(tokens[first + accepted])
        first += len(drafts) + 1
    return Accepted((*counts, *(1 for chunk in group_rows.chunks if chunk.samples)), last)


RowTable.accept = accept
'''
NOISE = SamplingParams(temperature=100.0, seed=1, ignore_eos=True)


def solve(engine: Engine, clients: int, count: int, tokens: int) -> tuple[list[list[float]], list[list[int]]]:
    """Return the times and outputs of completions of word problems, as `complete` does, with `clients` at once."""
    times, outputs = list[list[float]](), list[list[int]]()
    problems = word_problems.generate("heldout", count, seed=5)
    for at in range(0, count, clients):
        prompts = [
            engine.tokenizer.apply_chat_template(
                word_problems.prompt(p.question), add_generation_prompt=True, return_dict=False
            )
            for p in problems[at : at + clients]
        ]
        found = complete(engine, prompts, SamplingParams(max_tokens=tokens, temperature=0.0))
        times += found[0]
        outputs += found[1]
    return times, outputs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", help="shape with made-up weights; default: the embedded model")
    parser.add_argument("--num-layers", type=int)
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--attn-dp", type=int, default=1)
    parser.add_argument("--attn-tp", type=int, default=1)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--source", choices=["ngram", "mtp"], help="source instead of recorded outputs")
    parser.add_argument(
        "--forced", action="store_true", help="accept the source's drafts with the probabilities --rates"
    )
    parser.add_argument("--rates", type=float, nargs="+", default=[0.0, 0.7, 1.0])
    parser.add_argument("--drafts", type=int, default=3)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    model, files = dict[str, Any](), tempfile.TemporaryDirectory()
    if args.preset:
        model = dict(model=preset_dir(args.preset), load_format="dummy", num_layers=args.num_layers)
        if args.source == "mtp" and args.num_layers:  # the draft layer is the one after the last
            values = json.loads((preset_dir(args.preset) / "config.json").read_text())
            (Path(files.name) / "config.json").write_text(json.dumps(values | {"num_hidden_layers": args.num_layers}))
            model |= dict(model=Path(files.name), num_layers=None)
    length = args.context + args.tokens + 16
    config = EngineConfig(
        device=args.device,
        dtype=args.dtype,
        attn_dp=args.attn_dp,
        attn_tp=args.attn_tp,
        max_running=max(args.clients),
        max_model_len=length,
        kv_tokens=-(-length // 64) * 64 * max(args.clients),
        **model,
    )
    source, rows, own = Recorded(), list[dict[str, Any]](), args.source is not None and not args.preset
    rates = args.rates if args.forced or not args.source else [1.0]
    if not args.source:
        SOURCES["ngram"] = lambda shortest, longest: source
    first: dict[int, list[list[int]]] = {}
    cases: list[tuple[str, list[float], dict[str, Any]]] = [
        ("off", [OFF], {}),
        ("off, no step sent ahead", [OFF], dict(overlap=False)),
    ]
    options: dict[str, Any] = dict(speculative=args.source or "ngram", speculative_tokens=args.drafts)
    for at, rate in enumerate(rates if args.forced else ()):
        plugin = Path(files.name) / f"forced_{at}.py"
        plugin.write_text(FORCED.format(rate=rate))
        cases.append((DRAFTS, [rate], options | dict(plugins=(str(plugin),))))
    cases += [] if args.forced else [(DRAFTS, rates, options)]
    for turn in range(args.turns):
        for case, rates_of_case, options in cases:
            with Engine(EngineConfig(**{**vars(config), **options})) as engine:
                complete(engine, random_prompts(engine, 2, args.context, seed=99), replace(NOISE, max_tokens=16))
                for clients, rate in itertools.product(args.clients, rates_of_case):
                    prompts = [] if own else random_prompts(engine, clients, args.context, seed=clients)
                    if own:
                        solve(engine, clients, WARM * clients, args.tokens)
                    elif args.source:  # as rivals/speculation.py
                        again = random_prompts(engine, clients, args.context, seed=99)
                        complete(engine, again, replace(NOISE, max_tokens=args.tokens))
                    source.rate, before = rate, engine.stats()
                    if own:
                        times, outputs = solve(engine, clients, PROBLEMS, args.tokens)
                    else:
                        times, outputs = complete(engine, prompts, replace(NOISE, max_tokens=args.tokens))
                    after = engine.stats()
                    waits = ((b - a, at) for each in times for at, (a, b) in enumerate(itertools.pairwise(each), 1))
                    spans = [
                        (each[-1] - each[0]) / (len(tokens) - 1) for each, tokens in zip(times, outputs, strict=True)
                    ]
                    for prompt, output in zip(prompts, outputs, strict=not own):
                        source.sequences.setdefault(tuple(prompt[:8]), [*prompt, *output])
                    reference = outputs if args.forced else first.setdefault(clients, outputs)
                    drafted, accepted = (
                        sum(getattr(after, name)) - sum(getattr(before, name)) for name in ("drafted", "accepted")
                    )
                    rows.append(
                        dict(
                            case=case,
                            turn=turn,
                            clients=clients,
                            rate=None if rate == OFF else rate,
                            tpot_ms=round(statistics.median(spans) * 1e3, 4),
                            longest_ms={at: round(wait * 1e3, 2) for wait, at in heapq.nlargest(LONGEST, waits)},
                            steps=after.steps - before.steps,
                            drafted=drafted,
                            accepted=round(accepted / max(1, drafted), 4),
                            equal=statistics.mean(map(operator.eq, outputs, reference)),
                            price=engine.speculation and engine.speculation.prices.price(),
                        )
                    )
                    print(json.dumps(rows[-1]), flush=True)
    for clients in args.clients:
        off = [row["tpot_ms"] for row in rows if row["clients"] == clients and row["case"] == "off"]
        for rate in rates:
            on = [row["tpot_ms"] for row in rows if row["clients"] == clients and row["rate"] == rate]
            mean, base = statistics.mean(on), statistics.mean(off)
            print(f"clients={clients} rate={rate}: {mean:.3f} ms, {mean / base:.2f} × {base:.3f} without drafts")
    if args.json:
        arguments = {name: str(value) for name, value in vars(args).items()}
        args.json.write_text(json.dumps({"host": describe_host(), "arguments": arguments, "rows": rows}, indent=1))


if __name__ == "__main__":
    stop_on_sigterm()
    main()
