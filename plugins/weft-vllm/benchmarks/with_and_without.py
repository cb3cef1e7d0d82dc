"""vLLM with weft-vllm and without it, in turns on the same GPUs: the same tokens, and the time of a decode step.

    python with_and_without.py tokens                    # tiny model, float32, greedy, graphs: every token is equal
    python with_and_without.py logprobs                  # the same in bfloat16: how far logprobs differ
    python with_and_without.py time --json times.json    # Qwen3-30B-A3B's shape, --tensor-parallel 2, or
    python with_and_without.py time --tensor-parallel 1 --data-parallel 2
    python with_and_without.py time --model deepseek-v2-lite --dcp 2

Weights are vLLM's dummy ones, the same in every run. The plug-in is turned on and off by VLLM_PLUGINS, in rounds of
without, with, with, without; each is a fresh engine. A step's time is that of --steps tokens of each sequence beyond
the first, divided by their number: the median of --repeats such differences, after one that compiles what is missing.
Nothing that takes multicast objects is turned on. Run it where vLLM, weft and weft-vllm are installed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
ARMS = ("without", "with")
TURNS = ("without", "with", "with", "without")
NO_MULTICAST = {
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
}
TINY = {"num_hidden_layers": 3, "hidden_size": 512, "moe_intermediate_size": 128, "num_experts": 8, "vocab_size": 4096}
"""Fields of config.json that are smaller in the model for comparing tokens."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("tokens", "logprobs", "time"))
    parser.add_argument("--model", default="qwen3-30b-a3b", help="a preset of Weft, whose shape is taken")
    parser.add_argument("--tensor-parallel", type=int, default=2)
    parser.add_argument("--data-parallel", type=int, default=1, help="above 1 also with expert parallelism")
    parser.add_argument("--dcp", type=int, default=1, help="decode context parallelism")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64], help="sequences of each DP rank")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5, help="number of times that an engine measures")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        run_rank(options)
        return
    tiny = options.what != "time"
    turns = ARMS if tiny else TURNS * options.rounds
    with tempfile.TemporaryDirectory() as folder:
        write_config(options.model, Path(folder), tiny)
        runs = [(arm, run(options, arm, Path(folder))) for arm in turns]
    result = compared(runs, options.what)
    asked = {key: value for key, value in vars(options).items() if key not in ("json", "rank")}
    result |= {"vllm": version("vllm"), "options": asked}
    if options.json:
        options.json.write_text(json.dumps(result, indent=1, default=str) + "\n")
    print(json.dumps({key: value for key, value in result.items() if key != "runs"}, default=str))
    if not result["passed"]:
        raise SystemExit("the plug-in changes what vLLM samples")


def write_config(model: str, folder: Path, tiny: bool) -> None:
    """Write the model's config.json, which is all that vLLM wants for dummy weights."""
    config = json.loads((files("weft.engine.assets") / "presets" / model / "config.json").read_text())
    if tiny:
        config |= {key: value for key, value in TINY.items() if key in config}
    (folder / "config.json").write_text(json.dumps(config))


def run(options: argparse.Namespace, arm: str, folder: Path) -> list[dict[str, Any]]:
    """Run a fresh engine, a process for each DP rank, and return the output of each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = []
    for rank in range(options.data_parallel):
        environment = os.environ | NO_MULTICAST | {"VLLM_PLUGINS": "weft" if arm == "with" else ""}
        environment |= {"WORK": str(folder), "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
        if options.data_parallel > 1:
            environment |= {
                "VLLM_DP_RANK": str(rank),
                "VLLM_DP_RANK_LOCAL": str(rank),
                "VLLM_DP_SIZE": str(options.data_parallel),
                "VLLM_DP_MASTER_IP": "127.0.0.1",
                "VLLM_DP_MASTER_PORT": str(port),
            }
        command = [sys.executable, str(HERE), *sys.argv[1:], "--rank", str(rank)]
        ranks.append(subprocess.Popen(command, env=environment))
    if any([rank.wait() for rank in ranks]):
        raise SystemExit(
            f"vLLM {arm} the plug-in ended with {[rank.returncode for rank in ranks]}; see its lines above"
        )
    outputs = [(folder / f"{rank}.json").read_text() for rank in range(len(ranks))]
    return [json.loads(output) for output in outputs]


def run_rank(options: argparse.Namespace) -> None:
    """Run the engine of one DP rank. Write its tokens, or seconds per step, to RANK.json in the folder WORK."""
    from vllm import LLM, SamplingParams

    arguments: dict[str, Any] = {
        "model": os.environ["WORK"],
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "tensor_parallel_size": options.tensor_parallel,
        "dtype": "float32" if options.what == "tokens" else "bfloat16",
        "seed": 0,
        "max_model_len": 2 * (options.prompt + options.steps),
        "max_num_seqs": max(options.batches),
        "enable_prefix_caching": False,
        "generation_config": "vllm",
    }
    if options.data_parallel > 1:
        arguments["enable_expert_parallel"] = True
    if options.dcp > 1:
        arguments["decode_context_parallel_size"] = options.dcp
    engine = LLM(**arguments)
    vocabulary = json.loads(Path(os.environ["WORK"], "config.json").read_text())["vocab_size"]
    given = random.Random(options.rank)
    result: dict[str, Any] = {"tokens": [], "logprobs": [], "step_ms": {}}

    def generate(count: int, tokens: int) -> tuple[float, list[Any]]:
        """Return the seconds and outputs of `count` fresh prompts."""
        prompts = [
            {"prompt_token_ids": [given.randrange(vocabulary) for _ in range(options.prompt)]} for _ in range(count)
        ]
        logprobs = None if options.what == "time" else 1
        sampling = SamplingParams(
            temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=logprobs
        )
        begin = time.perf_counter()
        outputs = engine.generate(prompts, sampling, use_tqdm=False)
        return time.perf_counter() - begin, [output.outputs[0] for output in outputs]

    for count in options.batches:
        if options.what == "time":
            pairs = [[generate(count, n)[0] for n in (1, options.steps + 1)] for _ in range(options.repeats + 1)]
            steps = [(long - short) / options.steps * 1e3 for short, long in pairs[1:]]
            result["step_ms"][count] = statistics.median(steps)
            continue
        generate(count, 2)
        for output in generate(count, options.steps)[1]:
            tokens = [int(token) for token in output.token_ids]
            result["tokens"].append(tokens)
            chosen = [float(each[token].logprob) for token, each in zip(tokens, output.logprobs, strict=True)]
            result["logprobs"].append(chosen)
    Path(os.environ["WORK"], f"{options.rank}.json").write_text(json.dumps(result))  # stdout has progress bars


def compared(runs: list[tuple[str, list[dict[str, Any]]]], what: str) -> dict[str, Any]:
    """Compare the arms; the raw runs are in the result too."""
    by_arm = {arm: [ranks for name, ranks in runs if name == arm] for arm in ARMS}
    result: dict[str, Any] = {"passed": True, "runs": runs}
    if what == "time":
        for arm, engines in by_arm.items():
            counts = engines[0][0]["step_ms"]
            steps = {count: [max(rank["step_ms"][count] for rank in ranks) for ranks in engines] for count in counts}
            result[f"step_ms_{arm}"] = {count: round(statistics.median(times), 4) for count, times in steps.items()}
        return result
    sequences = {arm: [tokens for rank in engines[0] for tokens in rank["tokens"]] for arm, engines in by_arm.items()}
    logprobs = {arm: [chosen for rank in engines[0] for chosen in rank["logprobs"]] for arm, engines in by_arm.items()}
    equal, difference = [], 0.0
    for place, (one, other) in enumerate(zip(*sequences.values(), strict=True)):
        same = next((at for at, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1]), len(one))
        equal.append(same == len(one))
        pairs = zip(logprobs["without"][place][:same], logprobs["with"][place][:same], strict=True)
        difference = max([difference, *(abs(a - b) for a, b in pairs)])
    result |= {"sequences": len(equal), "equal": sum(equal), "logprobs_differ_by": difference}
    result["passed"] = bool(equal) and (all(equal) if what == "tokens" else difference < 0.1)
    return result


if __name__ == "__main__":
    main()
