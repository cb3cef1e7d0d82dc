"""Served engine: a small random model, ranks as threads, real HTTP on a loopback port."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
from support import small_model
from transformers import AutoTokenizer

from engine.conftest import WAIT_S, byte_tokenizer
from weft.engine.config.config import EngineConfig, QueueFull
from weft.engine.controller.engine import Engine
from weft.engine.messages.request import Output, Sharing
from weft.engine.output.text_processor import TextProcessor
from weft.serve.app import create_app
from weft.serve.chat.templates import Templates
from weft.serve.http.engine_client import EngineClient
from weft.serve.http.loading import bind
from weft.serve.http.metrics import Metrics
from weft.serve.http.options import Options
from weft.serve.http.run import Server
from weft.serve.http.shared import Shared

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


@pytest.fixture(scope="session")
def chat_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("chat-model")
    small_model("qwen2_moe", 4, directory, seed=3, vocab_size=257, max_position_embeddings=256)
    byte_tokenizer(directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory)
    return directory


class QuietEngine:
    """Engine that accepts requests and sends nothing until `say`."""

    max_model_len, error, state = 100, None, "serving"

    def __init__(self, tokenizer: Any = None) -> None:
        self.tokenizer = tokenizer
        self.text_processor = TextProcessor(tokenizer or SimpleNamespace(eos_token_id=None), Path("nowhere"), 257, (0,))
        self.listeners: dict[int, Callable[[Any], None]] = {}
        self.cancelled: list[int] = []
        self.asked: list[tuple[Sharing, float | None]] = []
        self.full = False
        self.config = SimpleNamespace(max_choices=16)

    def submit_all(self, jobs: Any, sharing: Sharing, timeout_s: float | None, name: str) -> list[int]:
        if self.full:
            raise QueueFull(7, 2.5)
        first = len(self.listeners)
        self.listeners |= {first + i: on_output for i, (_, _, on_output) in enumerate(jobs)}
        self.asked.append((sharing, timeout_s))
        return list(range(first, first + len(jobs)))

    def say(self, output: Output, request: int = 0) -> None:
        """Send an output as the engine's thread would, once the request is there."""
        while request not in self.listeners:
            time.sleep(0.01)
        self.listeners[request](SimpleNamespace(take=lambda count: output, end=output.finish_reason))

    def cancel(self, request: int) -> None:
        self.cancelled.append(request)


def output(text: str, reason: Any = None, error: str | None = None) -> Output:
    return Output(text, (1,), (), reason, None, 1, 0, 1, error)


@dataclass
class Served:
    """Running server and ways to talk to it."""

    engine: Engine
    server: Server
    address: tuple[str, int]
    key: str | None = None

    @property
    def url(self) -> str:
        return f"http://{self.address[0]}:{self.address[1]}"

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=self.key or "none", max_retries=0)

    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=WAIT_S)

    def socket(self) -> socket.socket:
        """Open a socket, for bytes that no client would send."""
        return socket.create_connection(self.address, timeout=WAIT_S)


@cache
def templates_of(special: str) -> Templates:
    return Templates(json.loads(special))


def shared_templates(engine: Any) -> Templates:
    """Share one process for all servers of a tokenizer."""
    return templates_of(json.dumps(engine.tokenizer.special_tokens_map))


def serve(engine: Any, listener: socket.socket | None = None, **options: Any) -> Iterator[Served]:
    listener = listener or bind("127.0.0.1", 0)
    chosen = Options(**options)
    metrics, name = Metrics(engine), next(iter(chosen.served_model_name), "small")
    engine_client, shared = EngineClient(engine, metrics), Shared(engine, metrics, chosen, name)
    app = create_app(engine_client, shared, name, chosen, shared_templates(engine))
    server = Server(app, engine_client, chosen)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield Served(engine, server, listener.getsockname(), chosen.api_key)
    finally:
        server.stop()
        server.stop()
        thread.join()
        listener.close()


@pytest.fixture
def quiet(chat_model_dir: Path) -> QuietEngine:
    return QuietEngine(AutoTokenizer.from_pretrained(chat_model_dir))


@pytest.fixture(scope="session")
def engine(chat_model_dir: Path) -> Iterator[Engine]:
    with Engine(
        EngineConfig(chat_model_dir, executor="thread", attn_dp=2, ep=2, kv_tokens=4096, page_size=4)
    ) as engine:
        yield engine


@pytest.fixture(scope="session")
def served(engine: Engine) -> Iterator[Served]:
    yield from serve(engine)


@pytest.fixture
def locked(engine: Engine) -> Iterator[Served]:
    yield from serve(engine, api_key="secret")
