"""Share of exchanges in steps that read prompts, by rank and by edge: a preset's shape with made-up weights.

Starts one engine for each layout, keeps its prompts coming, and profiles a window of steps on every rank. Prints the
tables of `weft profile`, and writes a row for each layout after it ran.

    python bench/scripts/prompt_exchanges.py --preset qwen3-30b-a3b --layouts 4x1 1x4 2x2 --json prompts.json
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from weft.engine.assets import preset_dir
from weft.engine.config.config import EngineConfig
from weft.engine.controller.engine import Engine
from weft.engine.controller.profiling import SKIPPED, record
from weft.engine.messages.request import SamplingParams
from weft.tune.host import describe_host
from weft_bench.breakdown import break_down, random_prompts
from weft_bench.commands.cmd_profile import tables

WINDOWS = 2
"""Windows of a recording: one for CPU times, one with the profiler."""
SPARE_STEPS = 12
"""Steps of prompts before the first window, between the windows and after the last."""


def profile(config: EngineConfig, tokens: int, steps: int) -> dict[str, Any]:
    """Return the figures of steps that each read one prompt of `tokens` per DP group."""
    with Engine(config) as engine, tempfile.TemporaryDirectory(prefix="weft-") as folder:
        count = config.attn_dp * (WINDOWS * (steps + SKIPPED) + SPARE_STEPS)
        params = SamplingParams(max_tokens=1, temperature=0.0)
        requests = [
            engine.submit(prompt, params, lambda _: None) for prompt in random_prompts(engine, count, tokens, 0)
        ]
        try:
            return break_down(record(engine, steps), Path(folder)).report
        finally:
            for request in requests:
                engine.cancel(request)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", help="shape of the model, omitted: the embedded model")
    parser.add_argument("--num-layers", type=int, help="run the first layers only")
    parser.add_argument("--layouts", nargs="+", default=["1x2"], metavar="DPxTP", help="split of the attention")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of a step, one prompt for each DP group")
    parser.add_argument("--steps", type=int, default=8, help="steps to profile")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="device of the ranks")
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for layout in options.layouts:
        dp, tp = map(int, layout.split("x"))
        tokens = options.tokens // dp
        config = EngineConfig(
            **{"model": preset_dir(options.preset), "load_format": "dummy"} if options.preset else {},
            attn_dp=dp,
            attn_tp=tp,
            ep=dp * tp,
            moe_tp=1,
            device=options.device,
            num_layers=options.num_layers,
            max_batch_tokens=tokens,
            max_model_len=tokens + 1,
            max_running=16,
            prefix_cache=False,
        )
        row = profile(config, tokens, options.steps)
        print(f"attention dp {dp} × tp {tp}, {options.tokens} tokens a step\n\n{tables(row)}\n", flush=True)
        rows.append({"layout": layout, "tokens": options.tokens, **row})
        if options.json:
            report = {"what": Path(__file__).stem, "preset": options.preset, "host": describe_host(), "rows": rows}
            options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
