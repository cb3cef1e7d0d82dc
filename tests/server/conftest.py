"""A served engine: a small random model, ranks as threads, real HTTP on a loopback port."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import pytest
import uvicorn
from support import small_model
from transformers import AutoTokenizer

from engine.conftest import byte_tokenizer
from weft.engine.config import EngineConfig
from weft.engine.engine import Engine
from weft.server.app import bind, create_app

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


@dataclass
class Served:
    """A running server and ways to talk to it."""

    engine: Engine
    url: str
    key: str | None = None

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=self.key or "none", max_retries=0)

    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=30)


def serve(engine: Engine, key: str | None = None) -> Iterator[Served]:
    listener = bind("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(create_app(engine, "small", key), log_level="warning"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield Served(engine, f"http://127.0.0.1:{listener.getsockname()[1]}", key)
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


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
    yield from serve(engine, key="secret")
