"""Runs the clients that people measure and evaluate with against `weft serve`, as they are.

    python benchmarks/clients.py --lm-eval VENV/bin/lm_eval --guidellm VENV/bin/guidellm --aiperf VENV/bin/aiperf

Each is run where its program is named, and wants a virtual environment of its own (`pip install 'lm-eval[api]'
transformers`, `guidellm`, `aiperf`). The embedded model is served, whose directory has a tokenizer. Exit code 1 where a
client fails; its output is shown.
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

from weft.assets import embedded_model_dir

NAME = "embedded"
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
    """Synthetic prompts, a few seconds, two at once."""
    data = "prompt_tokens=32,output_tokens=16"
    options = [
        "--rate-type",
        "concurrent",
        "--rate",
        "2",
        "--max-requests",
        "10",
        "--output-path",
        str(folder / "g.json"),
    ]
    processor = ["--processor", str(embedded_model_dir()), "--data", data]
    return [[program, "benchmark", "--target", url, "--model", NAME, *processor, *options]]


def aiperf(program: str, url: str, folder: Path) -> list[list[str]]:
    """Synthetic prompts, streamed."""
    sizes = ["--synthetic-input-tokens-mean", "32", "--output-tokens-mean", "16", "--request-count", "10"]
    where = ["--model", NAME, "--url", url, "--endpoint-type", "chat", "--streaming", "--concurrency", "2"]
    return [
        [program, "profile", *where, "--tokenizer", str(embedded_model_dir()), *sizes, "--artifact-dir", str(folder)]
    ]


CLIENTS = {"lm_eval": lm_eval, "guidellm": guidellm, "aiperf": aiperf}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in CLIENTS:
        parser.add_argument(f"--{name.replace('_', '-')}", metavar="PROGRAM")
    programs = {name: program for name, program in vars(parser.parse_args()).items() if program}
    command = [sys.executable, "-m", "weft.cli.main", "serve", "--port", "0", "--served-model-name", NAME]
    failed = []
    with (
        subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server,
        tempfile.TemporaryDirectory() as folder,
    ):
        assert server.stderr is not None
        try:
            port = next(m[1] for line in server.stderr if (m := re.search(r"serving .*:(\d+) ", line)))
            threading.Thread(target=server.stderr.read, daemon=True).start()  # the log must not fill the pipe
            for name, program in programs.items():
                for call in CLIENTS[name](program, f"http://127.0.0.1:{port}", Path(folder)):
                    done = subprocess.run(
                        call,
                        capture_output=True,
                        text=True,
                        timeout=600,
                        env=dict(os.environ) | {"OPENAI_API_KEY": "none"},
                    )
                    print(f"{name}: {'ok' if done.returncode == 0 else 'failed'}", flush=True)
                    if done.returncode:
                        failed.append(name)
                        print(done.stdout[-3000:], done.stderr[-3000:], sep="\n")
        finally:
            server.terminate()
            server.wait(60)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
