"""Compare the advisor's predictions with servers: start every layout that it names, and load each with its clients.

Writes a JSON line per layout and load, with predicted and measured figures, and next to it a Markdown table: the layout
that the advisor chooses, its regret, which is the best measured throughput divided by that of the choice, and the
median errors of all layouts of the cell. Lines that are in the file are not measured again and measured times of steps
are kept, so that after --limit-s, or a cut, the same command goes on. --engine omits HTTP: the clients are callbacks of
engines, which a layout starts once for all loads. --unseen SEED: three random loads instead.

    python bench/scripts/advisor_grid.py --engine --limit-s 1500 --out grid.jsonl
    python bench/scripts/advisor_grid.py --engine --limit-s 1500 --out unseen.jsonl --unseen 7
    python bench/scripts/advisor_grid.py --engine --device cuda --models qwen3-30b-a3b deepseek-v2-lite --ranks 1 2 \\
        --loads 4x512x64 64x1024x128 16x4096x64 --out gpus.jsonl
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, redirect_stdout
from io import StringIO
from itertools import product
from pathlib import Path
from random import Random
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

from weft.comm.cores import own_cores
from weft.comm.ports import reserve
from weft.engine.advise.candidates import Arrival, ClientLoad, measured_servers
from weft.engine.advise.measured_load import run_load, started_servers
from weft.engine.assets import preset_names
from weft.serve.cli.cmd_advise import Command as Advise
from weft.serve.cli.cmd_serve import Command as Serve
from weft.serve.cli.command import engine_config, parse, stop_on_sigterm
from weft.tune.host import describe_host

SHARED = dict(vocab_size=1024, max_position_embeddings=2048, rms_norm_eps=1e-6, rope_theta=1e4, hidden_act="silu")
SHARED |= dict(num_attention_heads=8, head_dim=64, num_experts_per_tok=2, tie_word_embeddings=True, hidden_size=512)
MOE = dict(model_type="qwen3_moe", architectures=["Qwen3MoeForCausalLM"], intermediate_size=1024, num_hidden_layers=10)
MOE |= dict(num_key_value_heads=4, num_experts=64, moe_intermediate_size=256, norm_topk_prob=True)
LATENT = dict(model_type="deepseek_v2", architectures=["DeepseekV2ForCausalLM"], intermediate_size=1024, n_group=1)
LATENT |= dict(num_hidden_layers=8, num_key_value_heads=8, n_routed_experts=16, n_shared_experts=1, topk_group=1)
LATENT |= dict(kv_lora_rank=128, q_lora_rank=None, qk_nope_head_dim=64, qk_rope_head_dim=32, v_head_dim=64)
LATENT |= dict(moe_intermediate_size=256, first_k_dense_replace=1, topk_method="greedy", scoring_func="softmax")
SHAPES = {"moe": SHARED | MOE, "latent": SHARED | LATENT}
"""Shapes with made-up weights in float32: 260 M parameters with grouped queries, and 60 M with latent attention."""
LOADS = {"short": "4x64x32", "long": "2x192x16", "mixed": "", "shared": "4x128x32x0.75", "cover": ""}
"""Loads by name: CLIENTSxINPUTxOUTPUTxSHARED. `cover` is not run: its times hold for several other loads. The one here
is of unseen loads."""
MIXED = [(24 + 40 * (at % 5), 8 + 12 * (at % 3)) for at in range(6)]
RECORDED = {"mixed": MIXED, "cover": [(24, 1), *[(192, 40)] * 5]}
"""Requests that come at once: tokens of prompt and output."""
FIGURES = ("tokens_s", "ttft_ms", "itl_ms")
KINDS = ("", "median"), ("_p99", "p99")
VOCABULARY = 1000
START_S, ROUNDS = 60.0, 6
WEFT = (sys.executable, "-m", "weft.serve.cli.main")


def load_of(name: str) -> ClientLoad:
    """Return a load by its name in LOADS, or by its numbers."""
    if name in RECORDED:
        return ClientLoad.recorded([Arrival(0.0, *sizes) for sizes in RECORDED[name]])
    clients, input_len, output_len, *shared = LOADS.get(name, name).split("x")
    return ClientLoad(int(input_len), int(output_len), int(clients), float(shared[0]) if shared else 0.0)


def unseen(seed: int) -> list[str]:
    """Return three random loads, whose steps `cover` has."""
    random = Random(seed)
    sizes = ((random.randint(1, 6), random.randint(24, 192), random.randint(4, 40)) for _ in range(3))
    return ["x".join(map(str, (*each, random.choice([0, 0.5])))) for each in sizes]


def cover_of(loads: Sequence[str]) -> list[tuple[int, int]]:
    """Return requests that have the steps of all these loads, also where two servers share them: few steps are larger,
    as a large one costs seconds."""
    found = [load_of(name) for name in loads]
    rows = max(sum(a.input_len for a in load.arrivals) or load.concurrency * load.input_len for load in found)
    longest, output = max(load.input_len for load in found), max(load.output_len for load in found)
    long, short, count = (longest, output), (min(load.shortest for load in found), 1), -(-rows // longest)
    return [long, short] * count + [short] * max(2, max(load.concurrency for load in found) - 2 * count)


def advice(
    model: str,
    name: str,
    ranks: int,
    folder: Path,
    http: bool = True,
    device: str = "cpu",
) -> list[dict[str, Any]]:
    """Return the layouts that the advisor names, the best first.

    name: of the load. http: add the server's time.
    """
    load = load_of(name)
    if load.arrivals:
        trace = folder / f"{name}.jsonl"
        rows = (dict(timestamp=a.seconds, input_length=a.input_len, output_length=a.output_len) for a in load.arrivals)
        trace.write_text("\n".join(map(json.dumps, rows)))
        options = ["--trace", str(trace)]
    else:
        sizes = {"concurrency": load.concurrency, "input-len": load.input_len, "output-len": load.output_len}
        options = [f"--{key}={value}" for key, value in (sizes | {"shared-prefix": load.shared_prefix}).items()]
    options += [f"--ranks={ranks}", *["--no-http"] * (not http)]
    if model in SHAPES:
        shape = folder / model
        shape.mkdir(exist_ok=True)
        (shape / "config.json").write_text(json.dumps(SHAPES[model]))
        options = [str(shape), "--load-format", "dummy", *options]
    elif model in preset_names():
        options = ["--preset", model, *options]
    elif model != "embedded":
        options = [model, *options]
    # In this process: each one of its own would import all that an engine is made of.
    with redirect_stdout(StringIO()) as out:
        parse(Advise, "advise", ["--json", "--device", device, *options]).run()
    found: list[dict[str, Any]] = json.loads(out.getvalue())["layouts"]
    return found


def server_of(command: str) -> tuple[dict[str, str], list[str]]:
    """Return the variables and options of an advised command, such as `CUDA_VISIBLE_DEVICES=1 weft serve --port 80`."""
    words = shlex.split(command)
    at = words.index("serve")
    return dict(word.split("=", 1) for word in words[: at - 1]), words[at + 1 :]


@contextmanager
def serving(commands: Sequence[str]) -> Iterator[list[str]]:
    """Start the servers of a layout, and yield their URLs."""
    with ExitStack() as stack:
        urls = []
        for command in commands:
            variables, arguments = server_of(command)
            port = stack.enter_context(reserve()).getsockname()[1]
            if "--port" in arguments:
                arguments = arguments[: arguments.index("--port")]
            log = stack.enter_context(tempfile.TemporaryFile())
            whole = [*WEFT, "serve", *arguments, "--port", str(port)]
            server = subprocess.Popen(whole, stdout=log, stderr=log, env=os.environ | variables)
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
    clients = load_of(load)
    each = clients.per_server(layout["replicas"]).concurrency
    prefix = int(clients.input_len * clients.shared_prefix)
    options = f"--json --ignore-eos --random-input-len {clients.input_len - prefix} --num-warmups 2"
    options += f" --random-output-len {clients.output_len} --random-prefix-len {prefix}"
    options += f" --max-concurrency {each} --num-prompts {max(16, 4 * each)} --vocab-size {VOCABULARY} --base-url"
    with serving(layout["commands"]) as urls:
        runs = [[*WEFT, "bench", "serving", *options.split(), url] for url in urls]
        loads = [subprocess.Popen(run, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) for run in runs]
        found = [json.loads(process.communicate()[0]) for process in loads]
    names = {f"{name}{end}_ms": f"{kind}_{name}_ms" for name in ("ttft", "itl") for end, kind in KINDS}
    latencies = {name: round(statistics.mean(run[key] for run in found), 3) for name, key in names.items()}
    return {"tokens_s": round(sum(run["output_throughput"] for run in found), 3), **latencies}


def measured_engines(layout: dict[str, Any], loads: Sequence[str], rounds: int) -> Generator[dict[str, Any]]:
    """Yield the measured figures of a layout's engines, without HTTP: each load's quickest round."""
    commands = [parse(Serve, "serve", server_of(line)[1]) for line in layout["commands"]]
    configs = [engine_config(command.model, command.engine) for command in commands]
    some = measured_servers(configs, configs[0])
    with started_servers(some) as servers:
        for name in loads:
            load = load_of(name).per_server(layout["replicas"])
            (ttft, ttft_p99), (itl, itl_p99), rate = run_load(servers, load, max(16, 4 * load.concurrency), 0, rounds)
            rate *= len(configs) / len(some)
            named = {"tokens_s": rate, "ttft_ms": ttft, "ttft_p99_ms": ttft_p99, "itl_ms": itl, "itl_p99_ms": itl_p99}
            yield {name: round(value, 3) for name, value in named.items()}


def predicted(layout: dict[str, Any]) -> dict[str, Any]:
    """Return a layout's predicted figures, by the names of `measured`."""
    names = [(f"{name}{end}_ms", layout[f"{name}_ms"][kind]) for name in ("ttft", "itl") for end, kind in KINDS]
    found = {"tokens_s": layout["tokens_s"]["value"], "error": layout["error"]}
    return found | {name: values["value"] for name, values in names}


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return a Markdown table with a line per cell of the grid, and the worst regret and median errors of all cells."""
    lines = ["| model | ranks | load | chosen layout | regret | error of tokens/s | of TTFT | of ITL |"]
    lines, regrets, errors = [*lines, "|---" * 8 + "|"], list[float](), list[list[float]]()
    keys = ("model", "ranks", "load", "http")
    for cell in dict.fromkeys(tuple(row[key] for key in keys) for row in rows):
        some = [row for row in rows if tuple(row[key] for key in keys) == cell]
        choice = max(some, key=lambda row: row["predicted"]["tokens_s"])
        best = max(row["measured"]["tokens_s"] for row in some)
        regrets.append(best / choice["measured"]["tokens_s"])
        pairs = [[row["predicted"][name] / row["measured"][name] for row in some] for name in FIGURES]
        errors.append([statistics.median(abs(each - 1) for each in ratios) for ratios in pairs])
        model, ranks, load, http = cell
        load += ", over HTTP" * http + f", {len(some)} of {choice['of']} layouts" * (len(some) < choice["of"])
        figures = " | ".join(f"{each:.0%}" for each in errors[-1])
        lines.append(f"| {model} | {ranks} | {load} | {choice['layout']} | {regrets[-1]:.2f} | {figures} |")
    figures = " | ".join(f"{statistics.median(each):.0%}" for each in zip(*errors, strict=True))
    return [*lines, f"| **worst, median** | | | | {max(regrets):.2f} | {figures} |"] if rows else lines


def measure_cells(
    model: str,
    ranks: int,
    loads: Sequence[str],
    folder: Path,
    http: bool,
    until: float,
    rows: list[dict[str, Any]],
    out: Path,
    host: dict[str, Any],
    rounds: int = ROUNDS,
    device: str = "cpu",
) -> None:
    """Add the rows of a model's loads on a number of ranks to `rows` and to a file, but for those that are there.

    until: time after which nothing is started; raises TimeoutError. rounds: of `measured_engines`.
    """

    def check_time() -> None:
        if time.monotonic() > until:
            raise TimeoutError

    if len(loads) > 1:
        check_time()
        advice(model, "cover", ranks, folder, http, device)
    named: dict[str, list[tuple[dict[str, Any], dict[str, Any]]]] = {}
    for load in loads:
        check_time()
        for layout in (layouts := advice(model, load, ranks, folder, http, device)):
            name = f"{layout['replicas']} × " * (layout["replicas"] > 1) + layout["layout"]
            row = {"model": model, "ranks": ranks, "load": load, "layout": name, "http": http}
            if not any(row.items() <= old.items() for old in rows) and not (http and load in RECORDED):
                named.setdefault(name, []).append((layout, row | {"of": len(layouts)}))
    for pairs in named.values():
        check_time()
        each = (measured(layout, row["load"]) for layout, row in pairs)
        # Closed here, for Ctrl-C: its servers end when it is closed.
        with closing(measured_engines(pairs[0][0], [row["load"] for _, row in pairs], rounds)) as engines:
            for (layout, row), found in zip(pairs, each if http else engines, strict=False):
                rows.append(row | {"predicted": predicted(layout), "measured": found, "host": host})
                with out.open("a") as file:
                    file.write(json.dumps(rows[-1]) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--models", nargs="+", default=["embedded", *SHAPES], help="embedded, moe, latent, presets or folders"
    )
    loads, cores = [name for name in LOADS if name != "cover"], sum(map(len, own_cores().values()))
    counts = [number for number in (1, 2, 4) if number <= cores]
    parser.add_argument("--loads", nargs="+", default=loads, help="names, or CLIENTSxINPUTxOUTPUTxSHARED")
    parser.add_argument("--ranks", type=int, nargs="+", default=counts, help="numbers of ranks")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--engine", action="store_true", help="measure engines, without HTTP")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="rounds of each load on engines, after a first one")
    parser.add_argument("--limit-s", type=float, default=1e9, help="seconds after which nothing is started")
    parser.add_argument("--unseen", type=int, help="seed of three random loads, instead of --loads")
    parser.add_argument("--out", type=Path, required=True, help="file of JSON lines")
    asked = parser.parse_args()
    until, host = time.monotonic() + asked.limit_s, describe_host()
    rows = [json.loads(line) for line in asked.out.read_text().splitlines()] if asked.out.is_file() else []
    folder = Path(tempfile.gettempdir()) / "weft-advisor-grid"
    folder.mkdir(exist_ok=True)
    loads = asked.loads if asked.unseen is None else unseen(asked.unseen)
    if asked.unseen is None:
        RECORDED["cover"] = cover_of(loads)
    options = asked.out, host, asked.rounds, asked.device
    try:
        for model, ranks in product(asked.models, asked.ranks):
            measure_cells(model, ranks, loads, folder, not asked.engine, until, rows, *options)
    except (TimeoutError, KeyboardInterrupt):
        print("out of time; the same command goes on", file=sys.stderr)
    asked.out.with_suffix(".md").write_text("\n".join(table(rows)) + "\n")
    print("\n".join(table(rows)))


if __name__ == "__main__":
    stop_on_sigterm()  # and the servers with it
    main()
