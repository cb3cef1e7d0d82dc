"""A sampling field that is new to the HTTP API: a line in each of two files, and every endpoint has it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import weft

PLANTED = {
    "engine/messages/request.py": ("    min_tokens: int = 0\n", "    toy: float = 0.0\n"),
    "serve/chat/protocol.py": ("    top_k: int | None = None\n", "    toy: float | None = None\n"),
}
"""By its file, the line that the toy field goes behind, and its own."""
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


def test_a_sampling_field_touches_two_files(tmp_path: Path) -> None:
    assert weft.__file__ is not None
    copied = shutil.copytree(Path(weft.__file__).parent, tmp_path / "weft")
    for name, (before, planted) in PLANTED.items():
        text = (copied / name).read_text()
        assert text.count(before) == 1
        (copied / name).write_text(text.replace(before, before + planted))
    surroundings = os.environ | {"PYTHONPATH": str(tmp_path)}
    made = subprocess.run([sys.executable, "-c", ASKED], env=surroundings, capture_output=True, text=True, check=False)
    assert made.stdout.split() == ["0.5"] * 4, made.stderr
