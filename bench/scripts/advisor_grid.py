"""Compare the advisor's predictions with servers: start every layout that it names, and load each with its clients.

Writes a JSON line per layout and load, with predicted and measured figures, and prints a table: the layout that the
advisor chooses, and its regret, which is the best measured throughput divided by that of the choice. Lines that are in
the file are not measured again, so a run that --limit-s ends goes on with the next. --engine omits HTTP, which the
advisor does not model: the clients are callbacks of engines in this process.

    python bench/scripts/advisor_grid.py --models embedded moe --loads 4x64x32 --ranks 1 2 --out grid.jsonl
"""

from __future__ import annotations

import argparse
import json
import shlex
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

from weft.engine.advise.candidates import ClientLoad
from weft.engine.advise.simulate import Clients, figures
from weft.engine.controller.engine import Engine
from weft.serve.cli.cmd_serve import Command as Serve
from weft.serve.cli.command import engine_config, parse
from weft.tune.host import describe_host

MOE = dict(model_type="qwen3_moe", architectures=["Qwen3MoeForCausalLM"], hidden_size=512, intermediate_size=1024)
MOE |= dict(num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=4, head_dim=64, vocab_size=1024)
MOE |= dict(num_experts=16, num_experts_per_tok=2, moe_intermediate_size=256, max_position_embeddings=2048)
MOE |= dict(rms_norm_eps=1e-6, rope_theta=1e4, hidden_act="silu", norm_topk_prob=True, tie_word_embeddings=True)
"""Shape of `moe`: 60 M parameters in float32, with made-up weights."""
FIGURES = ("tokens_s", "ttft_ms", "itl_ms")
KINDS = ("", "median"), ("_p99", "p99")
VOCABULARY = 1000
START_S, ROUNDS = 60.0, 6
WEFT = (sys.executable, "-m", "weft.serve.cli.main")


def advice(model: str, load: str, ranks: int, folder: Path) -> list[dict[str, Any]]:
    """Return the layouts that the advisor names, the best first."""
    clients, input_len, output_len = load.split("x")
    options = ["--concurrency", clients, "--input-len", input_len, "--output-len", output_len, "--ranks", str(ranks)]
    if model == "moe":
        (folder / "config.json").write_text(json.dumps(MOE))
        options = [str(folder), "--load-format", "dummy", *options]
    elif model != "embedded":
        options = [model, *options]
    done = subprocess.run([*WEFT, "advise", "--json", "--device", "cpu", *options], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    found: list[dict[str, Any]] = json.loads(done.stdout)["layouts"]
    return found


@contextmanager
def serving(commands: Sequence[str]) -> Iterator[list[str]]:
    """Start the servers of a layout, and yield their URLs."""
    with ExitStack() as stack:
        urls = []
        for command in commands:
            arguments = shlex.split(command)[1:]
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            if "--port" in arguments:
                arguments = arguments[: arguments.index("--port")]
            log = stack.enter_context(tempfile.TemporaryFile())
            server = subprocess.Popen([*WEFT, *arguments, "--port", str(port)], stdout=log, stderr=log)
            stack.callback(server.wait)
            stack.callback(server.terminate)
            urls.append(f"http://127.0.0.1:{port}")
        until = time.monotonic() + START_S
        for url in urls:
            while not ready(url):
                if time.monotonic() > until:
                    raise SystemExit(f"{url} did not start in {START_S:.0f} s")
                time.sleep(0.2)
        yield urls


def ready(url: str) -> bool:
    """Tell whether a server serves."""
    try:
        return bool(urlopen(f"{url}/health", timeout=1).status == 200)
    except (URLError, OSError):
        return False


def measured(layout: dict[str, Any], load: str) -> dict[str, Any]:
    """Return the measured figures of a layout's servers, each loaded by `weft bench serving`."""
    clients, input_len, output_len = map(int, load.split("x"))
    each = -(-clients // layout["replicas"])
    options = f"--json --ignore-eos --random-input-len {input_len} --random-output-len {output_len} --num-warmups 2"
    options += f" --max-concurrency {each} --num-prompts {max(16, 4 * each)} --vocab-size {VOCABULARY} --base-url"
    with serving(layout["commands"]) as urls:
        runs = [[*WEFT, "bench", "serving", *options.split(), url] for url in urls]
        loads = [subprocess.Popen(run, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) for run in runs]
        found = [json.loads(process.communicate()[0]) for process in loads]
    names = {f"{name}{end}_ms": f"{kind}_{name}_ms" for name in ("ttft", "itl") for end, kind in KINDS}
    latencies = {name: round(statistics.mean(run[key] for run in found), 3) for name, key in names.items()}
    return {"tokens_s": round(sum(run["output_throughput"] for run in found), 3), **latencies}


def measured_engines(layout: dict[str, Any], load: str) -> dict[str, Any]:
    """Return the measured figures of a layout's engines in this process, without HTTP: the quickest round's."""
    clients, input_len, output_len = map(int, load.split("x"))
    each = -(-clients // layout["replicas"])
    with ExitStack() as stack:
        commands = [parse(Serve, "serve", shlex.split(line)[2:]) for line in layout["commands"]]
        configs = [engine_config(command.model, command.engine) for command in commands]
        engines, found = [stack.enter_context(Engine(config)) for config in configs], []
        for seed in range(ROUNDS):
            lengths, requests = ClientLoad(input_len, output_len, each), max(16, 4 * each)
            groups = [Clients(lengths, requests, VOCABULARY, time.perf_counter, seed) for _ in engines]
            began = time.perf_counter()
            for group, engine in zip(groups, engines, strict=True):
                group.submit = engine.submit_all
                group.begin()
            if not all(group.ended.wait(START_S) for group in groups):
                raise SystemExit(f"requests did not end in {START_S:.0f} s")
            found.append(figures([times for group in groups for times in group.times], began))
    (ttft, ttft_p99), (itl, itl_p99), rate = max(found, key=lambda each: each[2])
    named = {"tokens_s": rate, "ttft_ms": ttft, "ttft_p99_ms": ttft_p99, "itl_ms": itl, "itl_p99_ms": itl_p99}
    return {name: round(value, 3) for name, value in named.items()}


def predicted(layout: dict[str, Any]) -> dict[str, Any]:
    """Return a layout's predicted figures, by the names of `measured`."""
    names = [(f"{name}{end}_ms", layout[f"{name}_ms"][kind]) for name in ("ttft", "itl") for end, kind in KINDS]
    found = {"tokens_s": layout["tokens_s"]["value"], "error": layout["error"]}
    return found | {name: values["value"] for name, values in names}


def cell_of(row: dict[str, Any]) -> tuple[str, ...]:
    """Return the cell of the grid that a row belongs to."""
    return row["model"], f"{row['ranks']} rank(s)", row["load"], "over HTTP" if row["http"] else "engines"


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return lines per cell of the grid: each layout's predicted / measured figures, the choice and its regret."""
    lines, errors = [], {name: list[float]() for name in FIGURES}
    for cell in dict.fromkeys(map(cell_of, rows)):
        some = [row for row in rows if cell_of(row) == cell]
        best = max(row["measured"]["tokens_s"] for row in some)
        choice = max(some, key=lambda row: row["predicted"]["tokens_s"])
        lines.append(f"{', '.join(cell)}: regret {best / choice['measured']['tokens_s']:.2f}")
        for row in some:
            pairs = [(row["predicted"][name], row["measured"][name]) for name in FIGURES]
            for name, (ours, real) in zip(FIGURES, pairs, strict=True):
                errors[name].append(abs(ours / real - 1))
            text = "  ".join(f"{name} {a:,.1f} / {b:,.1f}" for name, (a, b) in zip(FIGURES, pairs, strict=True))
            lines.append(f"  {'*' if row is choice else ' '} {row['layout']}  {text}")
    return [*lines, "median errors: " + ", ".join(f"{k} {statistics.median(v):.0%}" for k, v in errors.items() if v)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["embedded", "moe"], help="embedded, moe, or directories")
    parser.add_argument("--loads", nargs="+", default=["4x64x32"], help="loads: CLIENTSxINPUTxOUTPUT")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="numbers of ranks")
    parser.add_argument("--engine", action="store_true", help="measure engines in this process, without HTTP")
    parser.add_argument("--limit-s", type=float, default=1e9, help="seconds after which no layout is started")
    parser.add_argument("--out", type=Path, required=True, help="file of JSON lines")
    asked = parser.parse_args()
    began, host = time.monotonic(), describe_host()
    rows = [json.loads(line) for line in asked.out.read_text().splitlines()] if asked.out.is_file() else []
    try:
        for model in asked.models:
            for ranks in asked.ranks:
                for load in asked.loads:
                    folder = Path(tempfile.gettempdir()) / "weft-advisor-grid"
                    folder.mkdir(exist_ok=True)
                    for layout in advice(model, load, ranks, folder):
                        name = f"{layout['replicas']} × " * (layout["replicas"] > 1) + layout["layout"]
                        row = {"model": model, "ranks": ranks, "load": load, "layout": name, "http": not asked.engine}
                        if any(row.items() <= old.items() for old in rows):
                            continue
                        if time.monotonic() - began > asked.limit_s:
                            raise TimeoutError
                        found = (measured_engines if asked.engine else measured)(layout, load)
                        row |= {"predicted": predicted(layout), "measured": found}
                        rows.append(row | {"host": host})
                        with asked.out.open("a") as file:
                            file.write(json.dumps(rows[-1]) + "\n")
    except TimeoutError:
        print("out of time; the same command goes on", file=sys.stderr)
    print("\n".join(table(rows)))


if __name__ == "__main__":
    main()
