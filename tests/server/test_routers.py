"""Requests of `sglang-router` 0.3.2 and `vllm-router` 0.1.17, as recorded behind them, and the paths that they ask."""

from __future__ import annotations

from typing import Any

import pytest

from server.conftest import Served

C, H, R = "/v1/completions", "/v1/chat/completions", "/v1/responses"
ALWAYS: Any = {"no_stop_trim": False, "ignore_eos": False, "skip_special_tokens": True, "return_hidden_states": False}
OF_CHATS: Any = ALWAYS | {"continue_final_message": False, "separate_reasoning": True, "stream_reasoning": True}
MESSAGES: Any = [{"role": "user", "content": "Tom has 3 apples. How many?"}]
ASKED: Any = {
    C: {"model": "small", "prompt": "Tom has", "max_tokens": 4, "stream": False, "echo": False},
    H: {"model": "small", "messages": MESSAGES, "max_completion_tokens": 4, "stream": False, "logprobs": False},
    R: {"model": "small", "input": "Tom", "max_output_tokens": 4},
}
DRAWN: Any = {"temperature": 1.0, "top_p": 1.0, "priority": 0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
SENT = {
    "sglang-router completion": (C, ALWAYS),
    "sglang-router chat": (H, OF_CHATS),
    "sglang-router response": (R, DRAWN | {"store": True, "stream": None}),
    "sglang-router --dp-aware": (R, DRAWN | {"data_parallel_rank": 0}),
    "sglang-router --dp-aware, chat": (H, OF_CHATS | {"data_parallel_rank": 0}),
    "vllm-router completion": (C, ALWAYS | {"suffix": "", "best_of": 1}),
    "vllm-router chat": (H, OF_CHATS | {"include_reasoning": True}),
    "vllm-router response": (R, {}),
}


@pytest.mark.parametrize("path, added", SENT.values(), ids=SENT)
def test_what_routers_add_is_taken(served: Served, path: str, added: Any) -> None:
    with served.http() as http:
        response = http.post(path, json=ASKED[path] | added)
        assert response.status_code == 200, response.text
        assert response.json()["usage"]["total_tokens"] > 4


@pytest.mark.parametrize("field", ["return_hidden_states", "stream_reasoning", "data_parallel_rank"])
def test_what_they_add_is_refused_where_it_asks_for_something(served: Served, field: str) -> None:
    asking = not (OF_CHATS | {"data_parallel_rank": 0})[field]
    with served.http() as http:
        response = http.post(H, json=ASKED[H] | {field: asking})
    assert response.status_code == 400 and response.json()["error"]["param"] == field


def test_no_stop_trim_keeps_the_stop_string(served: Served) -> None:
    body = ASKED[C] | {"temperature": 0, "max_tokens": 8, "allowed_token_ids": served.engine.tokenizer.encode("xyz")}
    with served.http() as http:
        free = http.post(C, json=body).json()["choices"][0]["text"]
        stop = free[3:5]
        kept = http.post(C, json=body | {"stop": stop, "no_stop_trim": True}).json()["choices"][0]["text"]
    assert kept == free[: free.index(stop) + 2]


def test_what_routers_ask(served: Served) -> None:
    with served.http() as http:
        for name in ("server_info", "get_server_info"):
            said = http.get(name).json()
            assert (said["served_model_name"], said["dp_size"]) == ("small", 1)
            assert said["model_path"] == said["tokenizer_path"] == str(served.engine.config.model)
        for name in ("model_info", "get_model_info"):
            model = http.get(name).json()
            assert model["is_generation"] is True and model["model_path"] == said["model_path"]
        sampled = served.engine.stats().generated_tokens
        assert http.get("/health_generate").status_code == 200
        assert served.engine.stats().generated_tokens == sampled + 1
        assert http.post("/flush_cache").status_code == 200
        [load] = http.get("/get_load").json()
    assert load == {"dp_rank": 0, "num_reqs": 0, "num_waiting_reqs": 0, "num_tokens": 0}


def test_the_tokens_of_a_request_are_those_that_it_runs_with(served: Served) -> None:
    """`vllm-router --policy kv_aware` asks for them, to compare them with what each server has cached."""
    with served.http() as http:
        for path in (C, H):
            rendered = http.post(f"{path}/render", json=ASKED[path] | {"cache_salt": "s"})
            assert rendered.status_code == 200, rendered.text
            [found] = rendered.json() if path == C else [rendered.json()]
            ran = http.post(path, json=ASKED[path] | {"return_token_ids": True}).json()
            prompt = ran["choices"][0]["prompt_token_ids"] if path == C else ran["prompt_token_ids"]
            assert found["token_ids"] == prompt and (found["model"], found["cache_salt"]) == ("small", "s")
            for wrong, status in (({"model": "other"}, 404), ({"suffix": "x"} if path == C else {"n": 999}, 400)):
                assert http.post(f"{path}/render", json=ASKED[path] | wrong).status_code == status
        two = http.post(f"{C}/render", json={"prompt": [[1, 2], [3]]}).json()
    assert [each["token_ids"] for each in two] == [[1, 2], [3]]
