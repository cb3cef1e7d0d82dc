"""Measure an engine's time per output token with a forced share of right drafts, compared with no drafts.

For vLLM and SGLang, what `drafts.py --source mtp --forced` is for Weft: the draft layer of a checkpoint with Weft's
made-up weights drafts, and the engine accepts a draft with a probability of --rates, whatever it samples, and none
after a wrong one. With the engines' own made-up weights all tokens would choose the same experts. vLLM draws for each
sequence; SGLang draws one number of drafts for all sequences of a step, with the same mean. Only the times mean
something: `tpot_ms` is the time per token after the first of a sequence, by the clock of vLLM's engine or the stream of
SGLang's outputs, the median over sequences and REPEATS. All prompts of a measurement run at once. `accepted` is the
share of drafts that were accepted. Each case has an engine of its own, on the first GPU.

    python bench/scripts/rivals/checkpoint.py /dev/shm/glm --preset glm-4.5-air --num-layers 8 --drafts
    python bench/scripts/rivals/speculation.py vllm /dev/shm/glm --json vllm.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any

from engines import KINDS

from weft.tune.host import describe_host

OFF = -1.0
CACHES = Path(tempfile.gettempdir(), "weft-rivals")  # as in compare.py
CONTEXT, DRAFTS, REPEATS, TEMPERATURE = 512, 3, 3, 2.0
BOTH: dict[str, Any] = {"skip_tokenizer_init": True, "dtype": "bfloat16"}
Measure = Callable[[list[list[int]]], tuple[list[float], int, int]]
"""Engine's function from prompts to the ms per token of each sequence, and the numbers of drafts and accepted ones."""


def vllm(args: argparse.Namespace, rate: float) -> Measure:
    """Start vLLM."""
    from vllm import LLM, SamplingParams

    options = BOTH | {"max_model_len": CONTEXT + args.tokens + 16, "max_num_seqs": max(args.clients)}
    if rate != OFF:
        rates = [rate ** (at + 1) for at in range(DRAFTS)]  # of a draft and all before it
        drafts = {"method": "mtp", "num_speculative_tokens": DRAFTS}
        drafts |= {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": rates}
        options["speculative_config"] = drafts
    engine = LLM(
        model=str(args.model), disable_log_stats=False, **options
    )  # the times of tokens are among these statistics
    sampling = SamplingParams(temperature=TEMPERATURE, max_tokens=args.tokens, ignore_eos=True, detokenize=False)

    def counted(what: str) -> int:
        name = f"vllm:spec_decode_num_{what}_tokens"
        return sum(each.value for each in engine.get_metrics() if each.name == name)

    def measure(prompts: list[list[int]]) -> tuple[list[float], int, int]:
        drafted, accepted = counted("draft"), counted("accepted")
        outputs = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
        times = [each.metrics.last_token_ts - each.metrics.first_token_ts for each in outputs]
        spans = [seconds * 1e3 / (args.tokens - 1) for seconds in times]
        return spans, counted("draft") - drafted, counted("accepted") - accepted

    return measure


def sglang(args: argparse.Namespace, rate: float) -> Measure:
    """Start SGLang."""
    options = BOTH | {"context_length": CONTEXT + args.tokens + 16, "max_running_requests": max(args.clients)}
    options |= {"attention_backend": "fa3", "moe_runner_backend": "triton", "sampling_backend": "pytorch"}
    if rate != OFF:
        os.environ["SGLANG_SIMULATE_ACC_LEN"] = str(sum(rate**at for at in range(DRAFTS + 1)))
        os.environ["SGLANG_SIMULATE_ACC_TOKEN_MODE"] = "real-draft-token"  # else all tokens are the same
        options |= {"speculative_algorithm": "NEXTN", "speculative_num_steps": DRAFTS}
        options |= {"speculative_eagle_topk": 1, "speculative_num_draft_tokens": DRAFTS + 1}
    from sglang import Engine

    engine = Engine(model_path=str(args.model), **options)
    sampling = {"temperature": TEMPERATURE, "max_new_tokens": args.tokens, "ignore_eos": True}

    async def complete(prompt: list[int]) -> tuple[float, dict[str, Any]]:
        moments, info = [], dict[str, Any]()
        async for chunk in await engine.async_generate(input_ids=prompt, sampling_params=sampling, stream=True):
            info = chunk["meta_info"]
            moments.append((time.perf_counter(), info["completion_tokens"]))
        (begin, before), (end, after) = moments[0], moments[-1]
        return (end - begin) * 1e3 / (after - before), info

    def measure(prompts: list[list[int]]) -> tuple[list[float], int, int]:
        tasks = [engine.loop.create_task(complete(prompt)) for prompt in prompts]
        engine.loop.run_until_complete(asyncio.wait(tasks))
        spans, infos = zip(*(task.result() for task in tasks), strict=True)
        proposed, correct = (f"spec_num_{kind}_drafts" for kind in ("proposed", "correct"))
        return list(spans), sum(i.get(proposed, 0) for i in infos), sum(i.get(correct, 0) for i in infos)

    return measure


def run(args: argparse.Namespace) -> None:
    """Measure a case in this process, and append a line of JSON per row to --json."""
    vocabulary = json.loads((args.model / "config.json").read_text())["vocab_size"]
    measure, given = (vllm if args.engine == "vllm" else sglang)(args, args.case), random.Random(0)
    for clients in args.clients:
        found = []
        for _ in range(REPEATS + 1):
            found.append(measure([given.choices(range(vocabulary), k=CONTEXT) for _ in range(clients)]))
        spans, drafted, accepted = zip(*found[1:], strict=True)  # the first one compiled what was missing
        row = {"clients": clients, "rate": None if args.case == OFF else args.case}
        row["tpot_ms"] = round(statistics.median(chain(*spans)), 4)
        row["accepted"] = round(sum(accepted) / max(1, sum(drafted)), 4)
        print(json.dumps(row), flush=True)
        with args.json.open("a") as file:
            print(json.dumps(row), file=file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=("vllm", "sglang"))
    parser.add_argument("model", type=Path, help="folder of a checkpoint with a draft layer")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--rates", type=float, nargs="+", default=[0.0, 0.7])
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--case", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case is not None:
        run(args)
        return
    caches = str(CACHES / args.engine)
    environment = {name: text.replace("{caches}", caches) for name, text in KINDS[args.engine].environment.items()}
    with tempfile.NamedTemporaryFile() as file:
        for case in (OFF, *args.rates):
            command = [sys.executable, *sys.argv, f"--case={case}", "--json", file.name]
            subprocess.run(command, env=os.environ | environment, check=True)
        rows = [json.loads(line) for line in Path(file.name).read_text().splitlines()]
    given = {name: str(getattr(args, name)) for name in ("clients", "rates", "tokens")}  # no paths of this machine
    about = {"host": describe_host(), args.engine: version(args.engine), "arguments": given}
    args.json.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
