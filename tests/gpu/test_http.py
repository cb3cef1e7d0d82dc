"""`weft serve` on GPUs, asked over HTTP: greedy tokens as of a CPU, what it tells of its exchanges, and under load."""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from chaos.server_process import ServerProcess
from e2e.here import weft_here
from weft_bench import word_problems

GPUS = torch.cuda.device_count()
LAYOUTS = {"1x1": "", "1x2": "--attn-tp 2 --ep 2 --moe-tp 1", "2x1": "--attn-dp 2"}
QUESTIONS = [problem.question for problem in word_problems.generate("heldout", 8, seed=11)]


@contextmanager
def serving(folder: Path, device: str, layout: str) -> Iterator[ServerProcess]:
    """Serve with less room than all questions and answers need, so that sequences give up their pages."""
    folder.mkdir()
    sizes = "--dtype float32 --kv-tokens 320 --max-running 8 --max-batch-tokens 64 --max-model-len 256"
    served = ServerProcess(folder, ["--device", device, *sizes.split(), *layout.split()])
    try:
        yield served
        assert served.end(60) == 0
    finally:
        if served.process.poll() is None:
            served.kill()


def asked(served: ServerProcess) -> list[list[str]]:
    """The tokens of every question's answer, all asked at once."""

    def ask(question: str) -> list[str]:
        connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=300)
        body: dict[str, Any] = {"messages": [{"role": "user", "content": question}]}
        body |= {"temperature": 0, "max_tokens": 60, "logprobs": True}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        found = json.loads(response.read())
        connection.close()
        assert response.status == 200, found
        [choice] = found["choices"]
        return [token["token"] for token in choice["logprobs"]["content"]]

    with ThreadPoolExecutor(len(QUESTIONS)) as pool:
        return list(pool.map(ask, QUESTIONS))


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    with serving(tmp_path_factory.mktemp("http") / "cpu", "cpu", "") as served:
        found = asked(served)
    assert all(len(tokens) > 9 for tokens in found)
    return found


def check_what_it_tells(served: ServerProcess) -> None:
    """Check its report of exchanges: the ones that ran, their times, and the naive plan's times in the same graphs."""
    status, text = served.get("/weft/report", 60)
    report = json.loads(text)
    assert status == 200 and report["ran"] and report["naive"] and report["attention_backend"]
    for plan in (report["ran"], report["naive"]):
        assert all(step["count"] > 0 and step["predicted"] > 0 for step in plan), plan
        assert sum(step["seconds"] for step in plan) > 0, plan
    status, text = served.get("/metrics", 60)
    measured = re.findall(r'^weft_plan_seconds_total{by="measured",plan="(\w+)"} (\S+)$', text, re.MULTILINE)
    assert {plan: float(seconds) > 0 for plan, seconds in measured} == {"followed": True, "naive": True}


def check_it_bears_load(served: ServerProcess) -> None:
    sizes = "--num-prompts 12 --random-input-len 20 --random-output-len 8 --ignore-eos --max-concurrency 4"
    url = f"http://127.0.0.1:{served.port}"
    code, out, err = weft_here(*f"bench serving --base-url {url} {sizes} --vocab-size 900 --json".split())
    assert code == 0, err
    found = json.loads(out)
    assert found["completed"] == 12 and found["failed"] == 0 and found["total_output_tokens"] == 12 * 8


@pytest.mark.parametrize("name", LAYOUTS)
def test_greedy_tokens_over_http_are_those_of_a_cpu(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    world = 1 if name == "1x1" else 2
    if world > GPUS:
        pytest.skip(f"needs {world} GPU(s); this machine has {GPUS}")
    with serving(tmp_path / "gpu", "cuda", LAYOUTS[name]) as served:
        assert asked(served) == request.getfixturevalue("expected")
        if world > 1:
            check_what_it_tells(served)
        check_it_bears_load(served)
