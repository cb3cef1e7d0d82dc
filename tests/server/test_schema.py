"""Requests made up from the served schema, by schemathesis: whatever comes, no response is the server's fault."""

from __future__ import annotations

from typing import Any

import hypothesis
import pytest
import schemathesis

from engine.conftest import WAIT_S
from server.conftest import Served

OPERATIONS = [
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/responses"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/weft/plan"),
]


@pytest.mark.parametrize("method, path", OPERATIONS, ids=[path for _, path in OPERATIONS])
@pytest.mark.parametrize("mode", [schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE])
@pytest.mark.parametrize("examples", [5, pytest.param(40, marks=pytest.mark.nightly)])
def test_made_up_requests(served: Served, method: str, path: str, mode: Any, examples: int) -> None:
    schema = schemathesis.openapi.from_url(f"{served.url}/openapi.json")
    operation = schema[path][method]

    @hypothesis.settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(operation.as_strategy(generation_mode=mode))
    def check(case: Any) -> None:
        response = case.call(timeout=WAIT_S)
        assert response.status_code < 500, f"{case.as_curl_command()}\n{response.text}"
        if response.status_code >= 400 and response.status_code != 405 and response.text:
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}

    check()
    served.engine.check_idle()
