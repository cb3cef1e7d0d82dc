"""`weft bench serving` against a server of a few lines that says what it was asked and decides when it answers."""

from __future__ import annotations

import asyncio
import json
import re
import statistics
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from e2e.here import weft_here
from weft_bench.client_processes import send_from
from weft_bench.serving import LoadedServer, Outcome, Posted, RequestSpec, Workload, arrivals, send, summary
from weft_bench.streamed_completion import LoadError, StreamedCompletion

Events = AsyncIterator[dict[str, Any] | str]


class Stub:
    """An OpenAI-compatible server on a port of its own. bodies: what it was asked."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.drafts: dict[str, int] = {}
        self.status, self.models = 200, ["small", "other"]
        self.answer: Callable[[dict[str, Any]], Events] = self.three_pieces
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._serve, daemon=True).start()
        assert self._ready.wait(240)

    def _serve(self) -> None:
        async def start() -> None:
            app = web.Application(client_max_size=1 << 26)
            app.router.add_get("/v1/models", self._models)
            app.router.add_get("/metrics", self._metrics)
            app.router.add_post("/v1/completions", self._complete)
            app.router.add_post("/v1/chat/completions", self._complete)
            runner = web.AppRunner(app)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            self._ready.set()

        self._loop.run_until_complete(start())
        self._loop.run_forever()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)

    async def _models(self, request: web.Request) -> web.Response:
        self.keys.append(request.headers.get("Authorization"))
        return web.json_response({"data": [{"id": name} for name in self.models]})

    async def _metrics(self, request: web.Request) -> web.Response:
        if not self.drafts:
            return web.Response(status=404)
        names = ("drafts", "draft_tokens", "accepted_tokens")
        lines = [
            f'vllm:spec_decode_num_{name}_total{{engine="{e}"}} {n}.0' for e in "01" for name, n in self.drafts.items()
        ]
        lines += [f"# HELP vllm:spec_decode_num_{name}_total of it" for name in names]
        lines += ['vllm:spec_decode_num_accepted_tokens_per_pos_total{position="0"} 77.0']
        return web.Response(text="\n".join(lines))

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.drafts = {
            name: count + more for (name, count), more in zip(self.drafts.items(), (10, 30, 12), strict=False)
        }
        if self.status != 200:
            return web.json_response({"error": {"message": "no room"}}, status=self.status)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        async for event in self.answer(body):
            data = event if isinstance(event, str) else json.dumps(event)
            await response.write(f"data: {data}\n\n".encode())
        return response

    @staticmethod
    async def three_pieces(body: dict[str, Any]) -> Events:
        for text, reason in (("a", None), ("", None), ("c", "length")):  # the second is a token without text yet
            yield {"choices": [{"text": text, "finish_reason": reason}]}
        used = len(body["prompt"])
        yield {"choices": [], "usage": {"prompt_tokens": used, "completion_tokens": 3}}
        yield "[DONE]"


@pytest.fixture
def stub() -> Iterator[Stub]:
    made = Stub()
    yield made
    made.close()


def bench(stub: Stub, *options: str) -> tuple[int, str, str]:
    small = ("--num-prompts", "4", "--random-input-len", "5", "--random-output-len", "3")
    return weft_here("bench", "serving", "--base-url", stub.url, *small, *options)


def test_what_is_sent_and_what_is_counted(stub: Stub) -> None:
    code, out, err = bench(stub, "--ignore-eos", "--json", "--random-prefix-len", "7", "--seed", "3")
    assert code == 0, err
    found = json.loads(out)
    assert found["completed"] == 4 and found["failed"] == 0 and found["model"] == "small"
    assert found["total_input_tokens"] == 4 * 12 and found["total_output_tokens"] == 4 * 3
    assert found["total_token_throughput"] == pytest.approx(60 / found["duration"])
    warm_up, *bodies = stub.bodies
    for body in stub.bodies:
        assert body["max_tokens"] == 3 and body["stream"] and body["ignore_eos"] and body["temperature"] == 0
        assert body["model"] == "small" and body["stream_options"] == {"include_usage": True}
        assert len(body["prompt"]) == 12 and all(16 <= token < 1000 for token in body["prompt"])
    assert len({tuple(body["prompt"][:7]) for body in bodies}) == 1
    assert len({tuple(body["prompt"][7:]) for body in bodies}) == 4
    assert warm_up["prompt"][:7] != bodies[0]["prompt"][:7]
    stub.bodies.clear()
    assert bench(stub, "--random-prefix-len", "7", "--seed", "3")[0] == 0
    assert sorted(b["prompt"] for b in stub.bodies[1:]) == sorted(b["prompt"] for b in bodies)  # by the seed
    assert "ignore_eos" not in stub.bodies[0]


@pytest.mark.parametrize("limit", [1, 3, None])
def test_as_many_requests_are_open_as_may_be(limit: int | None) -> None:
    jobs = [LoadedServer("").job("model", ask) for ask in Workload(9, 4, 2).asks(100)]
    open_now, max_open, order = 0, 0, []

    class Slow:
        async def ask(self, job: Posted) -> Outcome:
            nonlocal open_now, max_open
            order.append(job)
            open_now += 1
            max_open = max(max_open, open_now)
            for _ in range(50):  # turns of the event loop, in which others could begin
                await asyncio.sleep(0)
            open_now -= 1
            return Outcome("", (float(jobs.index(job)),), 4, 2)

    outcomes, _ = asyncio.run(send(Slow(), jobs, limit))  # type: ignore[arg-type]
    assert max_open == (limit or 9) and order == jobs
    assert [o.times for o in outcomes] == [(float(i),) for i in range(9)]


def test_requests_from_several_processes(stub: Stub) -> None:
    """Each is sent once, and outcomes are in order, also of more processes than requests of some."""

    async def ask() -> tuple[list[Outcome], list[int]]:
        async with LoadedServer(stub.url, "key", extra={"seed": 5}) as server:
            specs = [RequestSpec([16] * n, n, 3) for n in range(1, 6)]
            jobs, done = [server.job("small", spec) for spec in specs], list[int]()
            outcomes, seconds = await send_from(2, server, jobs, 3, lambda at, outcome: done.append(at))
            assert seconds > 0
            return outcomes, done

    outcomes, done = asyncio.run(ask())
    assert [o.error for o in outcomes] == [""] * 5 and sorted(done) == list(range(5))
    assert [o.input_tokens for o in outcomes] == [1, 2, 3, 4, 5], "as the server counts them"
    assert sorted(len(body["prompt"]) for body in stub.bodies) == [1, 2, 3, 4, 5]
    assert all(body["seed"] == 5 for body in stub.bodies) and set(stub.keys) <= {None, "Bearer key"}


def test_a_process_with_clients_that_ends_is_an_error(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask() -> None:
        async with LoadedServer(stub.url) as server:
            monkeypatch.setattr(server, "unconnected", lambda: "no server")
            await send_from(2, server, [server.job("small", RequestSpec([16], 1, 3))] * 2)

    with pytest.raises(LoadError, match="a process with clients has ended"):
        asyncio.run(ask())


def test_chats(stub: Stub) -> None:
    from weft.engine.assets import embedded_model_dir

    async def chat(body: dict[str, Any]) -> Events:
        yield {"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}
        yield {"choices": [{"delta": {"content": "x"}, "finish_reason": None}]}
        yield {"choices": [{"delta": {"content": "y"}, "finish_reason": None}]}
        yield {"choices": [{"delta": {}, "finish_reason": "length"}]}
        yield "[DONE]"

    stub.answer = chat
    options = ("--backend", "openai-chat", "--json", "--tokenizer", str(embedded_model_dir()), "--model", "other")
    code, out, err = bench(stub, *options, "--random-input-len", "20")
    assert code == 0, err
    [message] = stub.bodies[-1]["messages"]
    assert message["role"] == "user" and len(message["content"]) > 20 and stub.bodies[-1]["model"] == "other"
    found = json.loads(out)  # no usage: what was asked, and the pieces that came
    assert found["total_input_tokens"] == 4 * 20 and found["total_output_tokens"] == 4 * 2


def test_the_table_and_the_file(stub: Stub, tmp_path: Path) -> None:
    file = tmp_path / "runs.jsonl"
    for _ in range(2):
        code, out, _ = bench(stub, "--output-file", str(file), "--goodput", "ttft:600000", "e2el:0.0001")
        assert code == 0
    assert max(map(len, out.splitlines())) <= 80
    assert re.findall(r"\((\w+)\)", out) == ["TPOT", "TTFT", "ITL", "E2EL"]
    for word in ("median", "p99", "output tokens a second"):
        assert word in out
    first, second = map(json.loads, file.read_text().splitlines())
    assert first.keys() == second.keys() and first["request_goodput"] == 0.0 and first["request_rate"] == "inf"


def test_drafts_are_those_of_the_servers_metrics(stub: Stub) -> None:
    """They count from after the first requests, over all engines; a server without drafts has no line."""
    code, out, _ = bench(stub, "--json")
    assert code == 0 and json.loads(out)["speculative"] is None
    stub.drafts = dict(drafts=7, draft_tokens=21, accepted_tokens=3)
    code, out, _ = bench(stub)
    assert code == 0 and "accepted drafts" in out and "96 of 240 (40%)" in out and "2.20" in out
    code, out, _ = bench(stub, "--json")
    found = json.loads(out)["speculative"]
    assert found == dict(rows=80, drafted=240, accepted=96, share=0.4, accept_length=2.2)


def test_failures_are_counted_and_said(stub: Stub) -> None:
    async def cut(body: dict[str, Any]) -> Events:
        yield {"choices": [{"text": "a", "finish_reason": None}]}

    async def broken(body: dict[str, Any]) -> Events:
        yield {"error": {"message": "gone"}}
        yield "[DONE]"

    async def empty(body: dict[str, Any]) -> Events:
        yield "[DONE]"

    for answer, why in ((cut, "without [DONE]"), (broken, "gone"), (empty, "no tokens")):
        stub.answer = answer
        code, out, _ = bench(stub, "--num-warmups", "0")
        assert code == 1 and why in out and "and 3 more" in out and re.search("failed requests +4\n", out)
        code, out, err = bench(stub)
        assert code == 2 and not out and err.startswith("weft: a first request to http://") and why in err
    stub.status = 429
    assert "status 429" in bench(stub, "--num-warmups", "0")[1]


def test_what_is_refused_in_one_line(stub: Stub) -> None:
    for options, text in (
        (("--model", "nope"), "serves no model 'nope', only small, other"),
        (("--base-url", "http://127.0.0.1:9"), "no server at http://127.0.0.1:9"),
        (("--num-prompts", "0"), "num_prompts is 0"),
        (("--random-range-ratio", "1"), "range_ratio is 1.0"),
        (("--request-rate", "0"), "request_rate is 0.0; it must be above 0"),
        (("--burstiness", "-1"), "burstiness is -1.0"),
        (("--max-concurrency", "0"), "max_concurrency is 0"),
        (("--goodput", "itl:4"), "--goodput takes ttft:MS"),
        (("--goodput", "ttft"), "--goodput takes ttft:MS"),
        (("--vocab-size", "20"), "vocab_size is 20"),
        (("--tokenizer", "/nowhere"), "/nowhere has no usable tokenizer"),
        (("--backend", "openai-chat"), "name their --tokenizer"),
        (("--output-file", "/proc/x.jsonl"), "with --output-file"),
    ):
        code, out, err = bench(stub, *options)
        assert code == 2 and not out and err.startswith("weft: ") and err.count("\n") == 1 and text in err, err
    assert not stub.bodies
    stub.models = []
    assert "names no model; give --model" in bench(stub)[2]


def test_the_key(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "from-the-environment\n")
    bench(stub, "--api-key", "named")
    bench(stub)
    assert stub.keys == ["Bearer named", "Bearer from-the-environment"]


def test_figures_of_given_outputs() -> None:
    outcomes = [
        Outcome("", (0.1, 0.2, 0.4), 10, 3),
        Outcome("", (0.3, 0.5, 1.1), 20, 5),
        Outcome("", (0.2,), 5, 1),  # no time between tokens
        Outcome("status 500", (), 99, 0),
    ]
    found = summary(outcomes, 2.0, {"ttft": 250.0, "tpot": 160.0})
    assert (found["completed"], found["failed"]) == (3, 1)
    assert (found["request_throughput"], found["input_throughput"], found["output_throughput"]) == (1.5, 17.5, 4.5)
    assert found["mean_ttft_ms"] == pytest.approx(200) and found["median_e2el_ms"] == pytest.approx(400)
    assert found["mean_tpot_ms"] == pytest.approx((150 + 200) / 2)
    assert found["mean_itl_ms"] == pytest.approx((100 + 200 + 200 + 600) / 4)
    assert found["median_itl_ms"] == pytest.approx(200) and found["p99_itl_ms"] == pytest.approx(588)
    assert found["std_ttft_ms"] == pytest.approx(1e3 * statistics.pstdev([0.1, 0.3, 0.2]))
    assert found["concurrency"] == pytest.approx((0.4 + 1.1 + 0.2) / 2)
    assert found["request_goodput"] == 1.0  # the first and the third: the second's TTFT and TPOT are beyond
    nothing = summary([outcomes[-1]], 1.0)
    assert nothing["mean_ttft_ms"] is None and nothing["request_throughput"] == 0


def test_arrivals_keep_the_rate() -> None:
    assert arrivals(3, float("inf"), 1.0, 0) == [0.0] * 3
    gaps = {}
    for burstiness in (0.25, 1.0, 4.0):
        times = arrivals(20001, 5.0, burstiness, 1)
        gaps[burstiness] = [b - a for a, b in pairwise(times)]
        assert statistics.mean(gaps[burstiness]) == pytest.approx(0.2, rel=0.05)
        # A gamma distribution's variance is its mean squared over its shape.
        assert statistics.variance(gaps[burstiness]) == pytest.approx(0.04 / burstiness, rel=0.1)
    assert arrivals(9, 5.0, 1.0, 1) == arrivals(9, 5.0, 1.0, 1) != arrivals(9, 5.0, 1.0, 2)


def test_lengths_are_spread_as_asked() -> None:
    asks = Workload(2000, 100, 10, range_ratio=0.5, seed=1).asks(1000)
    inputs, outputs = [a.input_tokens for a in asks], [a.output_tokens for a in asks]
    assert (min(inputs), max(inputs)) == (50, 150) and (min(outputs), max(outputs)) == (5, 15)
    assert statistics.mean(inputs) == pytest.approx(100, rel=0.03)
    assert all(len(a.prompt) == a.input_tokens for a in asks)


def test_texts_have_as_many_tokens() -> None:
    from transformers import AutoTokenizer

    from weft.engine.assets import embedded_model_dir

    tokenizer = AutoTokenizer.from_pretrained(embedded_model_dir())
    asks = Workload(20, 40, 1).asks(len(tokenizer), tokenizer)
    lengths = [len(tokenizer.encode(a.prompt, add_special_tokens=False)) for a in asks]
    assert statistics.median(lengths) == 40 and max(abs(n - 40) for n in lengths) <= 4


# Deltas as vLLM, SGLang, OpenAI, Mistral and litellm send them, the seconds that count, and the text.
CALL = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "f", "arguments": ""}}
MORE = {"index": 0, "function": {"arguments": "{}"}}
DELTAS: dict[str, tuple[list[dict[str, Any] | None], list[int], str]] = {
    "reasoning": ([{"role": "assistant", "content": ""}, {"reasoning": "a"}, {"reasoning": "b"}, {}], [1, 2], "ab"),
    "reasoning_content": ([{"content": None, "reasoning_content": "a"}, {"content": "b"}, {}], [0, 1], "ab"),
    "both names": ([{"reasoning": "a", "reasoning_content": "a"}, {"content": "b", "reasoning": None}], [0, 1], "ab"),
    "calls alone": ([{"role": "assistant"}, {"tool_calls": [CALL]}, {"tool_calls": [MORE]}], [1, 2], ""),
    "refusal": ([{"role": "assistant", "refusal": None}, {"refusal": "no"}, None], [1], ""),
    "audio": ([{"audio": {"data": "AA=="}}, {"function_call": {"arguments": "{"}}, {"audio": None}], [0, 1], ""),
    "parts": ([{"content": [{"type": "thinking", "thinking": []}]}, {"content": "a"}], [0, 1], "a"),
    "unknown": ([{"thinking_blocks": [{"a": 1}]}, {"thinking_blocks": []}, {"thinking_blocks": [{}]}], [0, 2], ""),
}


@pytest.mark.parametrize("name", DELTAS)
def test_what_a_delta_carries_counts_as_its_time(stub: Stub, name: str) -> None:
    """From the first piece of any kind, and a success without text. An unknown kind is named once."""
    deltas, times, text = DELTAS[name]
    events = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    read = StreamedCompletion()
    for second, event in enumerate(events):
        read.take(f"data: {json.dumps(event)}".encode(), second)
    assert read.times == times and read.text == text

    async def chat(body: dict[str, Any]) -> Events:
        for event in events:
            yield event
        yield "[DONE]"

    stub.answer = chat
    code, out, err = bench(stub, "--json")
    assert code == 0 and json.loads(out)["completed"] == 4 and json.loads(out)["total_output_tokens"] == 4 * len(times)
    assert [line for line in err.splitlines() if "unknown" in line] == (
        ["weft: unknown pieces in the streams count as output: thinking_blocks"] if name == "unknown" else []
    )


def test_lines_that_are_no_events() -> None:
    answer = StreamedCompletion()
    for line in (b": a comment\n", b"\n", b"event: ping\n"):
        answer.take(line, 1.0)
    assert answer == StreamedCompletion()
    with pytest.raises(LoadError, match="not JSON"):
        answer.take(b"data: <html>\n", 1.0)
