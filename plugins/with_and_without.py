"""vLLM or SGLang with Weft's plug-in and without it, on the same GPUs: the same tokens, and the time of a decode step.

    python with_and_without.py vllm tokens                   # tiny model, float32, greedy, graphs: every token is equal
    python with_and_without.py vllm logprobs                 # the same in bfloat16: how far logprobs differ
    python with_and_without.py vllm time --json times.json   # Qwen3-30B-A3B's shape, tensor parallel 2
    python with_and_without.py vllm time --cases tp dp dcp --num-layers 24

Weights are the engine's dummy ones, the same in every engine. VLLM_PLUGINS or SGLANG_PLUGINS turns the plug-in on and
off. The engines of all cases and both arms start at once and keep the GPUs' memory; then one at a time measures, in
rounds of without, with, with, without. A step's time is that of --steps tokens of each sequence beyond the first,
divided by their number: the median of --repeats such differences, after one that compiles what is missing. An engine
that does not start within --start-s ends its case, not the others. With --profile an engine also traces each load once:
the time in which a GPU runs kernels shows whether a step waits for the host. A case passes only if the log of the
engine with the plug-in names groups that it carries, and that of the other names none. Nothing that takes multicast
objects is turned on. Run it where the engine, weft and its plug-in are installed.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from importlib.resources import files
from itertools import chain
from pathlib import Path
from typing import IO, Any

from weft.comm.ports import reserve

HERE = Path(__file__).resolve()
ARMS = ("without", "with")
TURNS = ("without", "with", "with", "without")
NO_MULTICAST = {
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
}
CARRIED = re.compile(rb"weft-\w+ carries group ([^\s,]+)")
REPLY = "with_and_without: a reply follows"
"""Line in a rank's log before each of its replies."""
TINY = {"num_hidden_layers": 3, "hidden_size": 512, "moe_intermediate_size": 128, "num_experts": 8, "vocab_size": 4096}
"""Fields of config.json that are smaller in the model for comparing tokens."""


Generate = Callable[[list[list[int]], int, bool], "list[tuple[list[int], list[float]]]"]
"""Engine's function from prompts, tokens and whether to return logprobs to the tokens and logprobs of each output."""
Trace = Callable[[Path], AbstractContextManager[None]]
"""Engine's function from a folder to a context that is traced into it."""


@dataclass(frozen=True)
class Case:
    """Model and layout of two GPUs, with the arguments of each engine. data_parallel: number of DP ranks."""

    preset: str
    vllm: dict[str, Any]
    sglang: dict[str, Any]
    data_parallel: int = 1


CASES = {
    "tp": Case("qwen3-30b-a3b", {"tensor_parallel_size": 2}, {"tp_size": 2}),
    "dp": Case(
        "qwen3-30b-a3b",
        {"enable_expert_parallel": True},
        {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True, "ep_size": 2},
        data_parallel=2,
    ),
    "dcp": Case(
        "deepseek-v2-lite",
        {"tensor_parallel_size": 2, "decode_context_parallel_size": 2},
        {"tp_size": 2, "dcp_size": 2},
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=("vllm", "sglang"))
    parser.add_argument("what", choices=("tokens", "logprobs", "time"))
    parser.add_argument("--cases", choices=CASES, nargs="+", default=["tp"])
    parser.add_argument("--num-layers", type=int, help="layers of each model; all by default")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64], help="sequences of each DP rank")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5, help="number of times that an engine measures in a turn")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--cache-gib", type=float, default=2, help="key-value cache of an engine on each GPU")
    parser.add_argument("--start-s", type=float, default=600, help="time limit of the start")
    parser.add_argument("--profile", type=Path, help="folder of torch's traces; adds the GPUs' time of a step")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        run_rank(options)
        return
    with tempfile.TemporaryDirectory() as folder:
        engines = {case: [Engine(case, arm, options, Path(folder)) for arm in ARMS] for case in options.cases}
        asked = {key: value for key, value in vars(options).items() if key not in ("json", "rank")}
        result: dict[str, Any] = {"passed": True, "cases": {}, options.engine: version(options.engine)}
        result["options"] = asked
        try:
            for case, found in measured(engines, options):
                result["cases"][case] = found
                result["passed"] = result["passed"] and found["passed"]
                print(case, json.dumps({key: value for key, value in found.items() if key != "runs"}), flush=True)
                if options.json:
                    options.json.write_text(json.dumps(result, indent=1, default=str) + "\n")
        finally:
            for engine in chain.from_iterable(engines.values()):
                engine.end()
    if not result["passed"]:
        raise SystemExit("an engine failed, or the plug-in changes what the engine samples")


def measured(engines: dict[str, list[Engine]], options: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    """Wait until each engine has started or failed, then yield each case and its comparison, or its error."""
    deadline = time.monotonic() + options.start_s
    started = []
    for case, pair in engines.items():
        try:
            for engine in pair:
                engine.reply(deadline - time.monotonic())
            started.append(case)
        except RuntimeError as error:
            yield case, {"passed": False, "error": str(error)}
    turns = TURNS * options.rounds if options.what == "time" else ARMS
    for case in started:
        by_arm = dict(zip(ARMS, engines[case], strict=True))
        try:
            found = compared([(arm, by_arm[arm].turn(options.start_s)) for arm in turns], options.what)
        except RuntimeError as error:
            found = {"passed": False, "error": str(error)}
        found["groups"] = {arm: sorted(by_arm[arm].groups) for arm in ARMS}
        if found["passed"] and [bool(by_arm[arm].groups) for arm in ARMS] != [False, True]:
            found |= {"passed": False, "error": "the plug-in carries a group without it, or none with it"}
        yield case, found


@dataclass
class Engine:
    """Engine of a case. vLLM has a process for each DP rank. A line from a process says that it started, or what it
    measured; a line to it starts its turn. groups: those that the plug-in carries, by the logs. replies_in_logs: of
    each rank, the replies that its log has come to."""

    case: str
    arm: str
    options: argparse.Namespace
    folder: Path
    ranks: list[subprocess.Popen[bytes]] = field(default_factory=list)
    channels: list[socket.socket] = field(default_factory=list)
    groups: set[str] = field(default_factory=set)
    replies_in_logs: list[threading.Semaphore] = field(default_factory=list)

    def __post_init__(self) -> None:
        case, work = CASES[self.case], self.folder / self.case
        write_config(case.preset, work, self.options)
        # vLLM listens on this port long after its start. SGLang listens on later ones, which it derives from it and
        # which nobody can keep for it: it tries others if they are taken, but for DP ranks.
        self.reserved = reserve()
        port = str(self.reserved.getsockname()[1])
        name = "weft" if self.arm == "with" else "none"
        environment = os.environ | NO_MULTICAST | {"VLLM_PLUGINS": name, "SGLANG_PLUGINS": name}
        environment |= {
            "CASE": self.case,
            "ARM": self.arm,
            "WORK": str(work),
            "PORT": port,
            "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        }
        processes = case.data_parallel if self.options.engine == "vllm" else 1
        for rank in range(processes):
            ours, theirs = socket.socketpair()
            if processes > 1:
                environment |= {"VLLM_DP_RANK": str(rank), "VLLM_DP_RANK_LOCAL": str(rank), "VLLM_DP_SIZE": "2"}
                environment |= {"VLLM_DP_MASTER_IP": "127.0.0.1", "VLLM_DP_MASTER_PORT": port}
            command = [sys.executable, str(HERE), *sys.argv[1:], "--rank", str(rank)]
            environment["CHANNEL"] = str(theirs.fileno())
            with theirs:
                self.ranks.append(
                    subprocess.Popen(
                        command,
                        env=environment,
                        pass_fds=[theirs.fileno()],
                        start_new_session=True,
                        stdout=subprocess.PIPE,
                        stderr=subprocess.STDOUT,
                    )
                )
            self.replies_in_logs.append(replies := threading.Semaphore(0))
            threading.Thread(target=self._pass_on, args=[self.ranks[-1].stdout, replies], daemon=True).start()
            self.channels.append(ours)

    def _pass_on(self, log: IO[bytes], replies: threading.Semaphore) -> None:
        """Write the log to stderr as it comes, and note the groups that it names and the replies."""
        last = b""
        while part := os.read(log.fileno(), 1 << 16):
            sys.stderr.buffer.write(part)
            sys.stderr.buffer.flush()
            *lines, last = (last + part).split(b"\n")
            self.groups |= {name.decode() for line in lines for name in CARRIED.findall(line)}
            for _ in range(lines.count(REPLY.encode())):
                replies.release()

    def reply(self, seconds: float) -> list[dict[str, Any]]:
        """Return a line of each rank, once `groups` has all that precedes it in the rank's log.

        Raises RuntimeError if one ends, or sends none for `seconds`, or if the log has none by then.
        """
        replies = []
        for channel, in_log in zip(self.channels, self.replies_in_logs, strict=True):
            channel.settimeout(max(0.1, seconds))
            try:
                line = channel.makefile().readline()
            except TimeoutError:
                line = ""
            if not line:
                raise RuntimeError(f"the engine {self.arm} the plug-in ended, or sent nothing for {seconds:.0f} s")
            if not in_log.acquire(timeout=max(0.1, seconds)):
                missing = f"the line {REPLY!r} is missing in its log after {seconds:.0f} s"
                raise RuntimeError(f"the engine {self.arm} the plug-in sent a reply, but {missing}")
            replies.append(json.loads(line))
        return replies

    def turn(self, seconds: float) -> list[dict[str, Any]]:
        """Measure once, and return what each rank found."""
        for channel in self.channels:
            channel.sendall(b"\n")
        return self.reply(seconds)

    def end(self) -> None:
        for channel in self.channels:
            channel.close()
        for rank in self.ranks:
            with suppress(subprocess.TimeoutExpired):
                rank.wait(10)
            with suppress(ProcessLookupError):
                os.killpg(rank.pid, signal.SIGKILL)
            rank.wait()
        self.reserved.close()


def write_config(preset: str, folder: Path, options: argparse.Namespace) -> None:
    """Write the model's config.json, which is all that an engine wants for dummy weights."""
    config = json.loads((files("weft.engine.assets") / "presets" / preset / "config.json").read_text())
    smaller = TINY if options.what != "time" else {}
    if options.num_layers:
        smaller = smaller | {"num_hidden_layers": options.num_layers}
    config |= {key: value for key, value in smaller.items() if key in config}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))


def run_rank(options: argparse.Namespace) -> None:
    """Run an engine's process, and measure at each line of the channel, until it closes."""
    channel = socket.socket(fileno=int(os.environ["CHANNEL"]))
    case = CASES[os.environ["CASE"]]
    generate, trace = (vllm if options.engine == "vllm" else sglang)(case, options)
    ranks = 1 if options.engine == "vllm" else case.data_parallel  # DP ranks of this process
    vocabulary = json.loads(Path(os.environ["WORK"], "config.json").read_text())["vocab_size"]
    given = random.Random(options.rank)

    def timed(count: int, tokens: int) -> tuple[float, list[tuple[list[int], list[float]]]]:
        """Return the seconds and outputs of `count` fresh prompts of each DP rank."""
        prompts = [[given.randrange(vocabulary) for _ in range(options.prompt)] for _ in range(count * ranks)]
        begin = time.perf_counter()
        outputs = generate(prompts, tokens, options.what != "time")
        return time.perf_counter() - begin, outputs

    def gpu_ms(count: int) -> float:
        """Return the GPUs' time of a step: with all tokens less that with one."""
        found = []
        for tokens in (1, options.steps + 1):
            name = f"{os.environ['CASE']}-{os.environ['ARM']}-{count}x{tokens}-{options.rank}"
            folder = options.profile.resolve() / name
            with trace(folder):
                timed(count, tokens)
            found.append(busy_ms(folder))
        return (found[1] - found[0]) / options.steps

    def measure() -> dict[str, Any]:
        result: dict[str, Any] = {"tokens": [], "logprobs": [], "step_ms": {}, "gpu_ms": {}}
        for count in options.batches:
            if options.what == "time":
                pairs = [[timed(count, n)[0] for n in (1, options.steps + 1)] for _ in range(options.repeats + 1)]
                steps = [(long - short) / options.steps * 1e3 for short, long in pairs[1:]]
                result["step_ms"][count] = statistics.median(steps)
                if options.profile:
                    result["gpu_ms"][count] = gpu_ms(count)
                continue
            timed(count, 2)
            for tokens, logprobs in timed(count, options.steps)[1]:
                result["tokens"].append(tokens)
                result["logprobs"].append(logprobs)
        return result

    def reply(found: dict[str, Any]) -> None:
        print(f"\n{REPLY}", flush=True)  # on a line of its own, after what other processes have left there
        channel.sendall(json.dumps(found).encode() + b"\n")

    reply({})
    for _ in channel.makefile():
        reply(measure())


def busy_ms(folder: Path) -> float:
    """Return the time in which a GPU runs at least one kernel: the mean of the traces below `folder`."""
    found = []
    for path in folder.rglob("*.json.gz"):
        with gzip.open(path) as file:
            events = json.load(file)["traceEvents"]
        busy = end = 0.0
        kernels = ((e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") == "kernel")
        for begin, until in sorted(kernels):
            busy += max(0.0, until - max(begin, end))
            end = max(end, until)
        found.append(busy / 1e3)
    return statistics.mean(found)


def vllm(case: Case, options: argparse.Namespace) -> tuple[Generate, Trace]:
    """Start vLLM, or one of its DP ranks."""
    from vllm import LLM, SamplingParams

    arguments: dict[str, Any] = {
        "model": os.environ["WORK"],
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": "float32" if options.what == "tokens" else "bfloat16",
        "seed": 0,
        "max_model_len": 2 * (options.prompt + options.steps),
        "max_num_seqs": max(options.batches),
        "max_num_batched_tokens": 8192,
        "enable_prefix_caching": False,
        "generation_config": "vllm",
        # Engines share the GPUs: a cache of a fixed size, so that none measures the memory while others allocate.
        "kv_cache_memory_bytes": int(options.cache_gib * 2**30),
        "gpu_memory_utilization": 0.05,
        "kernel_config": {"enable_flashinfer_autotune": False},  # with it 0.25.1 fails with --cases dcp
    }
    traces = Path(os.environ["WORK"], f"traces-{os.environ['ARM']}-{options.rank}")
    if options.profile:
        config = {"profiler": "torch", "torch_profiler_dir": str(traces), "torch_profiler_with_stack": False}
        arguments["profiler_config"] = config
    engine = LLM(**arguments | case.vllm)

    @contextmanager
    def trace(folder: Path) -> Iterator[None]:
        shutil.rmtree(traces, ignore_errors=True)
        engine.start_profile()
        yield
        engine.stop_profile()
        shutil.copytree(traces, folder, dirs_exist_ok=True)

    def generate(prompts: list[list[int]], tokens: int, logprobs: bool) -> list[tuple[list[int], list[float]]]:
        sampling = SamplingParams(
            temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=1 if logprobs else None
        )
        outputs = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
        return [drawn(output.outputs[0]) for output in outputs]

    def drawn(output: Any) -> tuple[list[int], list[float]]:
        chosen = [
            float(each[token].logprob) for token, each in zip(output.token_ids, output.logprobs or (), strict=False)
        ]
        return list(map(int, output.token_ids)), chosen

    return generate, trace


def sglang(case: Case, options: argparse.Namespace) -> tuple[Generate, Trace]:
    """Start SGLang."""
    from sglang import Engine as Server

    sequences = max(options.batches) * case.data_parallel
    length = 2 * (options.prompt + options.steps)
    engine = Server(
        model_path=os.environ["WORK"],
        load_format="dummy",
        skip_tokenizer_init=True,
        port=int(os.environ["PORT"]),  # the ports of DP ranks follow from it
        dtype="float32" if options.what == "tokens" else "bfloat16",
        random_seed=0,
        context_length=length,
        max_running_requests=sequences,
        max_total_tokens=sequences * length,
        chunked_prefill_size=8192,
        disable_radix_cache=True,
        attention_backend="triton" if options.what == "tokens" else "fa3",
        moe_runner_backend="triton",
        sampling_backend="pytorch",
        log_level="info",  # of which the plug-in's lines are
        **case.sglang,
    )

    def generate(prompts: list[list[int]], tokens: int, logprobs: bool) -> list[tuple[list[int], list[float]]]:
        sampling = {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True}
        outputs = engine.generate(input_ids=prompts, sampling_params=sampling, return_logprob=logprobs)
        return [drawn(output) for output in outputs]

    def drawn(output: dict[str, Any]) -> tuple[list[int], list[float]]:
        chosen = output["meta_info"].get("output_token_logprobs") or ()
        return list(map(int, output["output_ids"])), [float(each[0]) for each in chosen]

    @contextmanager
    def trace(folder: Path) -> Iterator[None]:
        engine.start_profile(output_dir=str(folder), activities=["GPU"])
        yield
        engine.stop_profile()

    return generate, trace


def compared(runs: list[tuple[str, list[dict[str, Any]]]], what: str) -> dict[str, Any]:
    """Compare the arms; the raw runs are in the result too."""
    by_arm = {arm: [ranks for name, ranks in runs if name == arm] for arm in ARMS}
    result: dict[str, Any] = {"passed": True, "runs": runs}
    if what == "time":
        for arm, engines in by_arm.items():
            counts = engines[0][0]["step_ms"]
            steps = {count: [max(rank["step_ms"][count] for rank in ranks) for ranks in engines] for count in counts}
            result[f"step_ms_{arm}"] = {count: round(statistics.median(times), 4) for count, times in steps.items()}
            busy = {n: [max(rank["gpu_ms"][n] for rank in ranks) for ranks in engines] for n in engines[0][0]["gpu_ms"]}
            result[f"gpu_ms_{arm}"] = {count: round(statistics.median(times), 4) for count, times in busy.items()}
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
