"""Further routes: tokens of texts, versions, and the prefix cache."""

from __future__ import annotations

from typing import Any

from server.conftest import Served
from weft import __version__


def post(served: Served, path: str, **body: Any) -> Any:
    with served.http() as http:
        response = http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json() if response.content else None


def test_tokens_and_text(served: Served) -> None:
    made = post(served, "/tokenize", prompt="ä b", return_token_strs=True)
    assert made["tokens"] == served.engine.tokenizer.encode("ä b") and made["count"] == 4
    assert made["max_model_len"] == 256 and made["token_strs"] == ["bytes:\\xc3", "bytes:\\xa4", " ", "b"]
    assert post(served, "/detokenize", tokens=made["tokens"])["prompt"] == "ä b"
    chat = post(served, "/tokenize", messages=[{"role": "user", "content": "hello"}])
    assert post(served, "/detokenize", tokens=chat["tokens"])["prompt"] == "user: hello\nassistant:"
    with served.http() as http:
        for path, body in (
            ("/tokenize", {}),
            ("/tokenize", {"prompt": "a" * 2000}),
            ("/tokenize", {"prompt": "a", "shape": 1}),
            ("/detokenize", {"tokens": [257]}),
            ("/detokenize", {"tokens": [-1]}),
        ):
            assert http.post(path, json=body).status_code == 400, body
        for wrong, param in (({}, "messages"), ({"messages": [{"role": 1}]}, "messages.0.role")):
            assert http.post("/tokenize", json=wrong).json()["error"]["param"] == param


def test_version_and_schema(served: Served) -> None:
    with served.http() as http:
        assert http.get("/version").json() == {"version": __version__}
        paths = http.get("/openapi.json").json()["paths"]
    assert {"/v1/completions", "/v1/chat/completions", "/tokenize", "/health"} <= set(paths)


def test_the_cache_forgets(served: Served) -> None:
    body: Any = {"prompt": "a prefix that is cached", "max_tokens": 1}
    post(served, "/v1/completions", **body)

    def cached() -> int:
        usage = post(served, "/v1/completions", **body)["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert cached() > 0
    post(served, "/reset_prefix_cache")
    assert cached() == 0
    served.engine.check_idle()
