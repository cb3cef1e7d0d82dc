"""Run the checks for a machine with GPUs, in parts of at most nine minutes: tests, sanitizers, soaks, CPU time.

    make test-gpu-parts PARTS="kernels engine"      # with the Python at own, as make test-gpu
    python tests/gpu/parts.py --list

Each command's output is printed and written to FOLDER/COMMAND.log (--out), and its JSON next to it; a line per command
at the end has its exit code and seconds. A command that outlasts its part is interrupted, so that pytest still names
the tests that it ran. Exit code 1 if one failed. Nothing uses NVLink multicast.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
PATIENCE_S = 20.0
"""Seconds between the request to end and the end by force."""


@dataclass(frozen=True)
class Command:
    """Command after this Python. {out} is the folder of results, {before} another source tree, {device} cuda or cpu,
    and {scratch} a folder with `small_models`."""

    name: str
    arguments: tuple[str, ...]


@dataclass(frozen=True)
class Part:
    """Part of the checks. gpus: number of GPUs that it needs and sees."""

    what: str
    gpus: int
    commands: tuple[Command, ...]


def tests(name: str, *arguments: str) -> Command:
    options = ("-q", "-rs", "-o", "cache_dir=/dev/null", "--durations=25")
    return Command(name, ("-m", "pytest", *options, *arguments))


def soak(name: str, model: str, *arguments: str) -> Command:
    """Return the soak of one of `small_models`, or of the embedded model (no name)."""
    small = ("--requests", "300", "--distinct", "45", "--vocabulary", "250") if model else ()
    device = ("--device", "{device}", "--dtype", "float32")
    served = (*([f"{{scratch}}/{model}"] if model else []), *device, *arguments)
    options = ("--json", f"{{out}}/{name}.json", "--serve-arguments")
    return Command(name, ("-m", "chaos.soak", *small, *options, *served))


def weft(name: str, *arguments: str) -> Command:
    """Return a command of `weft`."""
    return Command(name, ("-m", "weft.serve.cli.main", *arguments))


def reproduce(name: str, layers: int, *options: str) -> Command:
    """Return the measurement of a pull request, with a model's first layers, one round, engines started at once."""
    figures = ("--num-layers", str(layers), "--at-once", "--rounds", "1", "--json", f"{{out}}/{name}.jsonl")
    return weft(name, "reproduce", name, *figures, *options)


ELSEWHERE = ("emulated", "merge_emulated", "lanes", "compile", "triton_compile")  # on CPUs
ELSEWHERE += ("sanitizer", "plain", "engine", "http", "families", "library", "shrink")  # in parts of their own
OTHER_TESTS = ("tests/gpu", *(f"--ignore=tests/gpu/test_{name}.py" for name in ELSEWHERE))
OTHER_TESTS += ("--ignore=tests/gpu/triton_checks",)
TWO = ("--attn-tp", "2", "--ep", "2", "--moe-tp", "1")
PROFILED = ("--preset", "qwen3-30b-a3b", "--load-format", "dummy", "--num-layers", "12", "--device", "cuda", *TWO)
PARTS = {
    "kernels": Part("the Triton kernels on a GPU", 1, (tests("triton", "tests/gpu/triton_checks"),)),
    "plain": Part(
        "peer's kernels in the form that GPUs before Hopper run", 1, (tests("plain", "tests/gpu/test_plain.py"),)
    ),
    "engine": Part(
        "families, the engine and HTTP on one GPU, and what else one GPU can do",
        1,
        (
            tests("families", "tests/gpu/test_families.py"),
            tests("one-gpu", *OTHER_TESTS),
            tests("engine", "tests/gpu/test_engine.py", "tests/gpu/test_http.py"),
        ),
    ),
    "peer": Part("transports on two GPUs", 2, (tests("two-gpus", *OTHER_TESTS),)),
    "library-2": Part("the library on two GPUs", 2, (tests("library", "tests/gpu/test_library.py"),)),
    "engine-2": Part(
        "the engine and HTTP on two GPUs",
        2,
        (
            tests(
                "engine-2", "tests/gpu/test_engine.py", "tests/gpu/test_http.py", "-k", "1x2 or 2x1 or sharded_tokens"
            ),
        ),
    ),
    "shrink": Part(
        "a GPU of two that is lost for good, while requests run",
        2,
        (
            tests("shrink", "tests/gpu/test_shrink.py"),
            Command(
                "lose-for-good",
                (
                    *("-m", "chaos", "--device", "{device}", *TWO, "--lose-for-good", "1", "--kv-tokens", "8192"),
                    *("--max-running", "8", "--max-batch-tokens", "512", "--json", "{out}/lose-for-good.json"),
                    *("--seed", "1"),  # rank 0
                ),
            ),
        ),
    ),
    "peer-4": Part(
        "transports and the library on four GPUs",
        4,
        (tests("library-4", "tests/gpu/test_library.py"), tests("four-gpus", *OTHER_TESTS)),
    ),
    "engine-4": Part(
        "the engine on four GPUs",
        4,
        (tests("engine-4", "tests/gpu/test_engine.py", "-k", "2x2 or four"),),
    ),
    "memcheck": Part("memcheck", 2, (tests("memcheck", "tests/gpu/test_sanitizer.py", "-k", "memcheck"),)),
    "racecheck": Part("racecheck", 2, (tests("racecheck", "tests/gpu/test_sanitizer.py", "-k", "racecheck"),)),
    "soak": Part(
        "a thousand mixed requests, prompts in graphs: ranks share heads, or have requests of their own",
        2,
        (soak("soak-attn-tp", "", *TWO), soak("soak-attn-dp", "", "--attn-dp", "2")),
    ),
    "soak-families": Part(
        "mixed requests to models with latents, windows and sinks, prompts in graphs, and with merged prompts",
        2,
        (
            soak("soak-latents", "latents", *TWO),
            soak("soak-windows", "windows", *TWO),
            soak("soak-sinks", "sinks", *TWO),
            soak("soak-merged", "latents", *TWO, "--dcp", "2", "--dcp-prefill", "merge"),
        ),
    ),
    "drafts": Part(
        "draft layers at forced rates: a model of 16 layers, and the embedded one",
        1,
        tuple(
            Command(
                f"drafts-{name}",
                (
                    *("bench/scripts/drafts.py", "--source", "mtp", "--turns", "1", *options),
                    *("--forced", "--rates", "0", "0.7", "--json", f"{{out}}/drafts-{name}.json"),
                ),
            )
            for name, *options in (
                ("glm", "--preset", "glm-4.5-air", "--num-layers", "16", "--tokens", "300"),
                ("embedded", "--clients", "1", "4", "16", "--tokens", "96"),
            )
        ),
    ),
    "advisor": Part(
        "layouts that the advisor names, predicted and measured: two models, three loads",
        2,
        (
            Command(
                "advisor-grid",
                (
                    *("bench/scripts/advisor_grid.py", "--engine", "--device", "{device}", "--limit-s", "480"),
                    *("--models", "qwen3-30b-a3b", "deepseek-v2-lite", "--ranks", "1", "2", "--rounds", "2"),
                    *("--loads", "4x512x64", "64x1024x128", "16x4096x64", "--out", "{out}/advisor-grid.jsonl"),
                ),
            ),
        ),
    ),
    "cpu-time": Part(
        "CPU time of a step, without a model and of one",
        2,
        (
            Command("step-cpu", ("bench/scripts/step_cpu.py", "--pause-ms", "2")),
            *(
                weft(f"profile-{n}", "profile", *PROFILED, "--batch", n, "--output", f"{{scratch}}/profile-{n}")
                for n in ("1", "16", "64")
            ),
        ),
    ),
    "racecheck-4": Part(
        "racecheck on four GPUs", 4, (tests("racecheck-4", "tests/gpu/test_sanitizer.py", "-k", "racecheck"),)
    ),
    "tune-4": Part(
        "cost table of four GPUs, and every edge next to NCCL's and others'",
        4,
        (
            weft("tune", "tune", "--device", "cuda", "--ranks", "4", "--out", "{out}/tune.json"),
            weft("collectives", "bench", "collectives", "--device", "cuda", "--json", "{out}/collectives.json"),
        ),
    ),
    **{
        f"reproduce-{name}": Part(f"pull request {name} on four GPUs", 4, (reproduce(name, layers, *options),))
        for name, layers, *options in (
            ("mixed", 12),
            ("reduce-scatterv", 6),
            ("deferred", 16),
            ("dcp", 3, "--variants", "triton:"),
        )
    },
    "prompts-4": Part(
        "share of exchanges in steps of 8,192 tokens of prompts",
        4,
        (
            *(
                weft(
                    f"prompts-{dp}x{4 // dp}",
                    *(
                        "profile",
                        "--prompts",
                        "--preset",
                        "qwen3-30b-a3b",
                        "--load-format",
                        "dummy",
                        "--device",
                        "cuda",
                    ),
                    *("--num-layers", "16", "--attn-dp", str(dp), "--attn-tp", str(4 // dp), "--ep", "4"),
                    *("--moe-tp", "1", "--steps", "8", "--batch", str(40 * dp), "--context", str(8192 // dp)),
                    *("--output", f"{{out}}/prompts-{dp}x{4 // dp}"),
                )
                for dp in (1, 2, 4)
            ),
        ),
    ),
    "before-after": Part(
        "every edge of peer, compared with the source tree that --before names",
        2,
        (
            Command(
                "before-after",
                ("bench/scripts/gpu_before_after.py", "--before", "{before}", "--json", "{out}/before-after.json"),
            ),
        ),
    ),
}


def small_models(folder: Path) -> None:
    """Write models of few narrow layers, with a tokenizer of bytes."""
    from engine.conftest import byte_tokenizer
    from engine.test_hybrids import FAMILIES
    from gpu.test_engine import small_latent

    made: dict[str, Callable[[Path], Any]] = {
        "latents": small_latent,
        "windows": FAMILIES["step3p5"],
        "sinks": FAMILIES["gpt_oss"],
    }
    for name, make in made.items():
        (folder / name).mkdir()
        make(folder / name)
        byte_tokenizer(folder / name)


def run(command: Command, values: dict[str, str], environment: dict[str, str], deadline: float) -> int | None:
    """Run a command; return its exit code, or None if it was interrupted."""
    out = Path(values["out"])
    arguments = [sys.executable, *(argument.format(**values) for argument in command.arguments)]
    print(f"\n=== {command.name}: {' '.join(arguments)}", flush=True)
    with open(out / f"{command.name}.log", "w") as log:
        process = subprocess.Popen(
            arguments, cwd=REPOSITORY, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        interrupted = False
        try:
            process.wait(max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            interrupted = True
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(PATIENCE_S)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    print((out / f"{command.name}.log").read_text(errors="replace"), flush=True)
    return None if interrupted else process.returncode


def run_part(part: Part, values: dict[str, str], seconds: float) -> list[tuple[str, str, float]]:
    """Run a part; return each command's name, its end, and seconds."""
    path = os.pathsep.join(
        [
            *(f"{REPOSITORY}/{name}" for name in ("src", "bench/src", "tests")),
            *filter(None, [os.environ.get("PYTHONPATH")]),
        ]
    )
    environment = os.environ | NO_MULTICAST | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(part.gpus)))).split(",")
    environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[: part.gpus])
    deadline, ended = time.monotonic() + seconds, []
    for command in part.commands:
        began = time.monotonic()
        code = run(command, values, environment, deadline) if began < deadline else None
        how = "was interrupted, or had no time" if code is None else "passed" if code == 0 else f"failed, status {code}"
        ended.append((command.name, how, time.monotonic() - began))
    return ended


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"parts, of {', '.join(PARTS)}")
    parser.add_argument("--list", action="store_true", help="say what the parts are")
    parser.add_argument("--out", type=Path, default=Path("gpu-parts"), help="folder of logs and figures")
    parser.add_argument("--seconds", type=float, default=540, help="time limit of each part")
    parser.add_argument("--before", type=Path, help="source tree of the version to compare with: …/src")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: of soaks, to try them out")
    asked = parser.parse_args(arguments)
    if asked.list:
        for name, part in PARTS.items():
            print(f"{name:14} {part.gpus} GPU{'s' * (part.gpus > 1)}  {part.what}")
        return 0
    if not asked.parts or (unknown := set(asked.parts) - PARTS.keys()):
        parser.error(f"name parts of {', '.join(PARTS)}" + (f", not {', '.join(unknown)}" if asked.parts else ""))
    if "before-after" in asked.parts and asked.before is None:
        parser.error("before-after takes --before: the src folder of the version to compare with")
    asked.out.mkdir(parents=True, exist_ok=True)
    ended: list[tuple[str, str, float]] = []
    with tempfile.TemporaryDirectory(prefix="weft-gpu-parts-") as scratch:
        if "soak-families" in asked.parts:
            sys.path[:0] = [f"{REPOSITORY}/src", f"{REPOSITORY}/tests"]
            small_models(Path(scratch))
        values = {"out": str(asked.out.resolve()), "before": str(asked.before and asked.before.resolve())}
        values |= {"device": asked.device, "scratch": scratch}
        for name in asked.parts:
            ended += run_part(PARTS[name], values, asked.seconds)
    for name, how, seconds in ended:
        print(f"{name:14} {seconds:5.0f} s  {how}")
    return int(any(how != "passed" for _, how, _ in ended))


if __name__ == "__main__":
    sys.exit(main())
