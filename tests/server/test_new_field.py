"""A sampling field that is new to the HTTP API: a line in each of two files, and every endpoint has it."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import run_with_changes

TOY = {
    "engine/messages/request.py": {"    min_tokens: int = 0\n": "    min_tokens: int = 0\n    toy: float = 0.0\n"},
    "serve/chat/protocol.py": {
        "    top_k: int | None = None\n": "    top_k: int | None = None\n    toy: float | None = None\n"
    },
}
ASKED = """
from types import SimpleNamespace
from weft.serve.dialects.anthropic_messages import MessagesRequest
from weft.serve.chat.chats import ChatRequest
from weft.serve.chat.protocol import CompletionRequest
from weft.serve.dialects.responses import ResponsesRequest

said = [{"role": "user", "content": "hi"}]
for body in (
    CompletionRequest(prompt="hi", toy=0.5),
    ChatRequest(messages=said, toy=0.5),
    ResponsesRequest(input="hi", toy=0.5).chat(),
    MessagesRequest(messages=said, max_tokens=1, toy=0.5).chat(),
):
    body.refuse_unsupported()
    print(body.sampling(SimpleNamespace(defaults={}, tokenizer=None)).toy)
"""


@pytest.mark.nightly
def test_a_sampling_field_touches_two_files(tmp_path: Path) -> None:
    assert run_with_changes(tmp_path, TOY, ASKED).split() == ["0.5"] * 4
