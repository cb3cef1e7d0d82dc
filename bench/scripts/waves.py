"""When clients that send one prompt after the other get their first tokens, by the scheduler alone: no GPU, no HTTP.

The scheduler is the engine's, and steps are sent one ahead, as the engine does. How long a step takes is made up: by
default as on an H200 with 24 layers of Qwen3-30B-A3B. Each token reaches its client `--lag-ms` after its step. So it
shows which requests wait for which steps, and what a delay of the server costs. Prints a line of JSON: TTFT and ITL in
ms, the CPU time of a step with prompts, in µs, of scheduling and of encoding its message, and which shares of the steps
without prompts are like the step before, or differ from it by new pages alone, or in their rows.

    python bench/scripts/waves.py --clients 64 --requests 128 --lag-ms 3
    python bench/scripts/waves.py --clients 64 --requests 192 --input-len 8192 --output-len 16
    python bench/scripts/waves.py --clients 128 --requests 768 --max-running 64 --random-lengths --output-len 400
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import statistics
import time
from collections import Counter, deque

from weft.engine.kv.cache_spec import CacheGroup, Rule
from weft.engine.kv.manager import CacheManager
from weft.engine.kv.tokens import token_array
from weft.engine.messages.rank_messages import GroupRows, Ran, Result, Step, encode
from weft.engine.messages.request import SamplingParams, Sequence
from weft.engine.scheduler.scheduler import Scheduled, Scheduler


def step_s(rows: GroupRows) -> float:
    """Seconds of a step: of weights and cached tokens, and 5 µs for each row of a step with prompts."""
    decoding = min(len(rows.decode_rows), 60)
    return 0.0095 + 5e-6 * rows.count if rows.chunks else 0.0015 + 0.00012 * decoding


def kind_of(rows: GroupRows, before: GroupRows) -> str:
    """What a step has that the one before did not have; a rank repeats it without a look-up where that is pages at
    most."""
    if rows.chunks:
        return "prompts"
    if rows.decode_rows != before.decode_rows or rows.joins:
        return "other_rows"
    return "new_pages" if rows.entries else "alike"


def simulate(asked: argparse.Namespace) -> dict[str, float]:
    """The figures of one run."""
    rng, now, free = random.Random(asked.seed), 0.0, 0.0
    rules = [Rule(), *[Rule(window=asked.window)] * (asked.window > 0)]
    caches = CacheManager([CacheGroup(rule, asked.kv_tokens // 16) for rule in rules], 16)
    scheduler = Scheduler(caches, max_batch_tokens=asked.batch_tokens, max_running=asked.max_running)
    # Where lengths differ, the scheduler does not know them beforehand, as with an end token.
    most = asked.output_len + (asked.output_len if asked.random_lengths else 0)
    params = SamplingParams(max_tokens=most, temperature=0.0, ignore_eos=True)
    lengths, kinds, before = dict[int, int](), Counter[str](), GroupRows()
    arrivals = [rng.uniform(0, asked.spread_ms / 1e3) for _ in range(asked.clients)]
    heapq.heapify(arrivals)
    came, first, last = dict[int, float](), dict[int, float](), dict[int, float]()
    between, cpu, in_flight = list[float](), list[float](), deque[tuple[Scheduled, float]]()
    ended = 0
    while ended < asked.requests:
        while arrivals and arrivals[0] <= now:
            came[number := len(came) + 1] = heapq.heappop(arrivals)
            shares = (rng.uniform(0.1, 1.0), rng.uniform(0.1, 1.0)) if asked.random_lengths else (1.0, 1.0)
            input_len, lengths[number] = round(asked.input_len * shares[0]), max(2, round(asked.output_len * shares[1]))
            tokens = token_array([rng.randrange(16, 100_000) for _ in range(input_len)])
            scheduler.add(Sequence(number, tokens, len(tokens), params, 1, most, frozenset()))
        began = time.thread_time()
        scheduled = scheduler.schedule()
        encode(Step(1, (scheduled.rows,)))
        if scheduled.rows.chunks:
            cpu.append(time.thread_time() - began)
        if scheduled.rows.count:
            kinds[kind_of(scheduled.rows, before)] += 1
            before = scheduled.rows
            free = max(now, free) + step_s(scheduled.rows)
            in_flight.append((scheduled, free))
            if len(in_flight) == 1:
                continue
        elif not in_flight:
            now = max(now, arrivals[0])
            continue
        done, now = in_flight.popleft()
        for sequence, (token,), _ in done.take_tokens(Result(0, Ran(1, (), 0, 0), ((70,),) * len(done.sampled))):
            sequence.tokens.append(token)
            if sequence.output_tokens == 1:
                first[sequence.request] = now + asked.lag_ms / 1e3 - came[sequence.request]
            else:
                between.append(now - last[sequence.request])
            last[sequence.request] = now
            if sequence.output_tokens == lengths[sequence.request]:
                scheduler.finish(sequence)
                ended += 1
                if len(came) + len(arrivals) < asked.requests:
                    heapq.heappush(arrivals, now + (asked.lag_ms + asked.client_ms) / 1e3)
    ttft = sorted(first.values())
    figures = {"ttft_median_ms": statistics.median(ttft), "ttft_mean_ms": statistics.mean(ttft)}
    figures |= {"ttft_p99_ms": ttft[int(0.99 * len(ttft))], "itl_median_ms": statistics.median(between)}
    rounded = {name: round(1e3 * value, 1) for name, value in figures.items()}
    decode = sum(kinds.values()) - kinds.pop("prompts")
    shares_of = {f"decode_{kind}": round(count / decode, 3) for kind, count in sorted(kinds.items())}
    return rounded | {"prompt_step_cpu_us": round(1e6 * statistics.median(cpu))} | shares_of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--input-len", type=int, default=1024)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--batch-tokens", type=int, default=8192)
    parser.add_argument("--max-running", type=int, default=256)
    parser.add_argument("--window", type=int, default=0, help="of half of the layers; 0: of none")
    parser.add_argument("--random-lengths", action="store_true", help="a tenth to all of both lengths, at random")
    parser.add_argument("--kv-tokens", type=int, default=689_296)
    parser.add_argument("--lag-ms", type=float, default=3.0, help="from the end of a step to a client")
    parser.add_argument("--client-ms", type=float, default=4.0, help="from a client's last token to its next prompt")
    parser.add_argument("--spread-ms", type=float, default=40.0, help="in which the first prompts come")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    print(json.dumps(vars(asked) | simulate(asked)))


if __name__ == "__main__":
    main()
