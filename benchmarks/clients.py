"""Runs the clients that people measure and evaluate with against `weft serve`, as they are.

    python benchmarks/clients.py --lm-eval VENV/bin/lm_eval --guidellm VENV/bin/guidellm --aiperf VENV/bin/aiperf \\
        --json benchmarks/results/clients.json

Each is run where its program is named: `pip install '.[clients]'` has them, best in an environment of their own. The
embedded model is served, whose directory has a tokenizer. The runs are short: they show that the clients work, and
their figures mean little. Exit code 1 where a client fails or reports a failed request; its output is shown.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from weft.assets import embedded_model_dir
from weft.bench.host import describe_host

NAME, REQUESTS = "embedded", 10
TASK = """
task: weft_smoke_{kind}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: {output}
doc_to_text: "{{{{question}}}}"
doc_to_target: {target}
{choices}
"""


def lm_eval(program: str, url: str, folder: Path) -> list[list[str]]:
    """A task of each kind: likelihoods of choices, and generated text."""
    data = folder / "questions.jsonl"
    rows = [
        {"question": f"Tom has {n} apples. He buys 2 more.", "choices": [" 5", " 7"], "answer": 0} for n in range(4)
    ]
    data.write_text("\n".join(map(json.dumps, rows)))
    choices = 'doc_to_choice: "{{choices}}"\nmetric_list: [{metric: acc}]'
    generate = 'generation_kwargs: {max_gen_toks: 8, until: ["\\n"]}\nmetric_list: [{metric: exact_match}]'
    for kind, output, target, rest in (
        ("score", "multiple_choice", "answer", choices),
        ("text", "generate_until", '"{{answer}}"', generate),
    ):
        text = TASK.format(kind=kind, data=data, output=output, target=target, choices=rest)
        (folder / f"{kind}.yaml").write_text(text)
    arguments = f"model={NAME},base_url={url}/v1/completions,tokenizer={embedded_model_dir()},num_concurrent=2"
    command = [program, "--model", "local-completions", "--model_args", arguments, "--include_path", str(folder)]
    return [[*command, "--tasks", f"weft_smoke_{kind}"] for kind in ("score", "text")]


def guidellm(program: str, url: str, folder: Path) -> list[list[str]]:
    """Synthetic prompts, two at once."""
    return [
        [
            *(program, "run", "--disable-console-interactive"),
            *("--backend", f"kind=openai_http,target={url},model={NAME}"),
            *("--tokenizer", f"kind=huggingface_auto,model={embedded_model_dir()}"),
            *("--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=16"),
            *("--profile", "kind=concurrent,streams=2", "--constraint", f"kind=max_requests,count={REQUESTS}"),
            *("--output", f"kind=json,path={folder / 'guidellm.json'}"),
        ]
    ]


def guidellm_found(folder: Path) -> dict[str, float]:
    """What it counted and measured."""
    [measured] = json.loads((folder / "guidellm.json").read_text())["benchmarks"]
    metrics = measured["metrics"]
    totals, first = metrics["request_totals"], metrics["time_to_first_token_ms"]["successful"]
    return {"successful": totals["successful"], "failed": totals["errored"], "ttft_ms_median": first["median"]}


def aiperf(program: str, url: str, folder: Path) -> list[list[str]]:
    """Synthetic prompts, streamed, two at once."""
    sizes = ["--synthetic-input-tokens-mean", "32", "--output-tokens-mean", "16", "--request-count", str(REQUESTS)]
    where = ["--model", NAME, "--url", url, "--endpoint-type", "chat", "--streaming", "--concurrency", "2"]
    tokenizer = ["--tokenizer", str(embedded_model_dir()), "--ui", "simple"]
    return [[program, "profile", *where, *tokenizer, *sizes, "--artifact-dir", str(folder / "aiperf")]]


def aiperf_found(folder: Path) -> dict[str, float]:
    """As `guidellm_found`."""
    found = json.loads((folder / "aiperf" / "profile_export_aiperf.json").read_text())
    done = int(found["request_count"]["avg"])
    return {
        "successful": done,
        "failed": REQUESTS - done,
        "ttft_ms_median": found["time_to_first_token"]["p50"],
    }


def lm_eval_found(folder: Path) -> dict[str, float]:
    """It has no count of failures: a failed request ends it."""
    return {"failed": 0}


CLIENTS = {
    "lm_eval": (lm_eval, lm_eval_found),
    "guidellm": (guidellm, guidellm_found),
    "aiperf": (aiperf, aiperf_found),
}


def run(name: str, program: str, url: str, folder: Path) -> dict[str, Any] | None:
    """What a client found; None where it failed."""
    commands, found = CLIENTS[name]
    environment = dict(os.environ) | {"OPENAI_API_KEY": "none"}
    for command in commands(program, url, folder):
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
        if done.returncode:
            print(done.stdout[-3000:], done.stderr[-3000:], sep="\n")
            return None
    measured = found(folder)
    python = Path(program).parent / "python"
    asked = f"from importlib import metadata; print(metadata.version({name.replace('_', '-')!r}))"
    version = subprocess.run([python, "-c", asked], capture_output=True, text=True).stdout.strip()
    return None if measured["failed"] else {"version": version, **measured}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in CLIENTS:
        parser.add_argument(f"--{name.replace('_', '-')}", metavar="PROGRAM")
    parser.add_argument("--json", type=Path, metavar="FILE", help="what came out, and the host")
    options = parser.parse_args()
    programs = {name: program for name in CLIENTS if (program := getattr(options, name))}
    command = [sys.executable, "-m", "weft.cli.main", "serve", "--port", "0", "--served-model-name", NAME]
    results: dict[str, dict[str, Any] | None] = {}
    with (
        subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server,
        tempfile.TemporaryDirectory() as folder,
    ):
        assert server.stderr is not None
        try:
            port = next(m[1] for line in server.stderr if (m := re.search(r"serving .*:(\d+) ", line)))
            threading.Thread(target=server.stderr.read, daemon=True).start()  # the log must not fill the pipe
            for name, program in programs.items():
                results[name] = run(name, program, f"http://127.0.0.1:{port}", Path(folder))
                print(f"{name}: {results[name] or 'failed'}", flush=True)
        finally:
            server.terminate()
            server.wait(60)
    if options.json:
        said = {"what": "the clients of benchmarks/clients.py", "host": describe_host(), "clients": results}
        options.json.write_text(json.dumps(said, indent=1) + "\n")
    return int(any(found is None for found in results.values()))


if __name__ == "__main__":
    sys.exit(main())
