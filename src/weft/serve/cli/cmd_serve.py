"""`weft serve`."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from weft.serve.cli.command import EngineArguments, ModelDir, UserError, WithRay, engine_config, model_name, user_errors
from weft.serve.cli.ray_hosts import agents
from weft.serve.cli.several_hosts import run_agent
from weft.serve.cli.start import LayoutChoice, start_engine, with_layout
from weft.serve.http import log
from weft.serve.http.loading import Loading, bind, bind_unix
from weft.serve.http.options import LogLevel, Options


class StopSignals:
    """Context manager that handles SIGTERM and SIGINT of a process that stops with exit code 0, in the main thread.

    The first signal raises KeyboardInterrupt, so that everything that was started is stopped, and later signals do
    nothing. Once `stop` is set, each signal calls `stop` instead.

    Attributes:
        stop: ends the serving process in order.
        asked: whether KeyboardInterrupt was raised; a destructor may have swallowed it.
    """

    def __init__(self) -> None:
        self.stop: Callable[[], None] | None = None
        self.asked = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        self._before = {n: signal.signal(n, self._handle) for n in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.stop is not None:
            self.stop()
        elif not self.asked:
            self.asked = True
            raise KeyboardInterrupt


@dataclass(frozen=True)
class Command:
    """Serve a model over HTTP with OpenAI's API, until Ctrl-C.

    Examples:
      weft serve                                           the embedded model on one rank
      weft serve Qwen/Qwen3-0.6B                           a model from the hub, downloaded once
      weft serve FILE.gguf --attn-tp 2                     a GGUF file of llama.cpp on two ranks
      weft serve DIR --layout auto                         the best layout for this host
      weft serve DIR --attn-dp 2 --attn-tp 2               four ranks, with --ep 2 --moe-tp 2
      weft serve DIR --attn-dp 4 --ep 4 --api-key SECRET   data-parallel attention, expert parallelism
      weft serve DIR --attn-dp 2 --attn-tp 2 --nnodes 2 --node-rank 0 --master-addr 10.0.0.1 --cluster-key FILE
                                                           two hosts; start the other with --node-rank 1

    Then: curl http://127.0.0.1:8000/v1/models, or any OpenAI client with base_url http://127.0.0.1:8000/v1.
    """

    model: ModelDir = None
    engine: EngineArguments = field(default_factory=EngineArguments)
    layout: LayoutChoice = "given"
    ray: WithRay = False
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0: all addresses of the host."""
    port: int = 8000
    """Port to listen on; 0: any free port."""
    uds: Path | None = None
    """Path of a Unix domain socket to listen on instead of host and port."""
    config: Path | None = None
    """YAML file of options by name, such as `attn-tp: 2`, with `model` for MODEL_DIR; the command line overrides it."""
    api_servers: int | None = None
    """Processes that read requests, tokenise, and write responses next to the engine's process, on one port; 1: the
    engine's process does so itself; omitted: by cores and ranks on GPUs, at most 4."""
    http: Options = field(default_factory=Options)
    log_format: Literal["text", "json"] = "text"
    """Format of the log on stderr."""
    log_level: LogLevel = "info"
    """Lowest level of log lines; each request is a line of level info."""
    kv_events_config: str | None = None
    """Publish blocks that the prefix caches store and remove, for routers, with vLLM's JSON, such as
    '{"publisher": "zmq", "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5657", "topic": "kv"}'. Anyone who
    reaches these ports can read all prompts; omitted: nothing is published."""

    def run(self) -> int:
        """Serve until a signal and return the exit code. Raises UserError, LayoutError, ModelError, EngineError."""
        log.configure(self.log_format, self.log_level)
        with StopSignals() as signals:
            try:
                return self._serve(signals)
            except KeyboardInterrupt:
                return 0

    def _serve(self, signals: StopSignals) -> int:
        options = replace(self.http, api_key=self._key(), profile_dir=self._profile_folder())
        with user_errors():
            options.check()
            kv_events = None
            if self.kv_events_config is not None:
                from weft.engine.controller.event_publisher import KvEventsConfig

                kv_events = KvEventsConfig.parse(self.kv_events_config)
        config = engine_config(self.model, self.engine, ray=self.ray)
        if config.node_rank:
            return run_agent(config)
        with user_errors(OSError):
            listener = bind(self.host, self.port) if self.uds is None else bind_unix(self.uds)
        with listener, Loading(listener, options.tls, options.root_path) as loading:
            config = with_layout(config, self.layout)
            with (
                agents(config, self.ray),
                self._api_processes(config, listener) as processes,
                start_engine(config, kv_events) as engine,
            ):
                return self._serve_engine(engine, processes, loading, options, signals)

    def _api_processes(self, config: Any, listener: socket.socket) -> Any:
        """Return the started API processes, in a context of their own; None if the engine's process serves itself."""
        if self.api_servers is not None and self.api_servers < 1:
            raise UserError(f"api_servers is {self.api_servers}; it must be above 0")
        if self.api_servers == 1:
            return nullcontext()
        from weft.serve.http.api_processes import ApiProcesses, default_count

        count = default_count(config) if self.api_servers is None else self.api_servers
        return nullcontext() if count == 1 else ApiProcesses(count, listener)

    def _serve_engine(
        self, engine: Any, processes: Any, loading: Loading, options: Options, signals: StopSignals
    ) -> int:
        # These import torch, which takes seconds: options are checked and the port is bound before.
        from weft.engine.config.config import EngineError
        from weft.engine.config.device import dtype_of
        from weft.engine.models.load import describe_products
        from weft.serve import app
        from weft.serve.http import run
        from weft.serve.http.engine_client import EngineClient
        from weft.serve.http.metrics import Metrics
        from weft.serve.http.shared import Shared

        name = next(iter(options.served_model_name), model_name(self.model, engine.config.model))
        shared = Shared(engine, metrics := Metrics(engine), options, name)
        if processes is None:
            engine_client = EngineClient(engine, metrics, options.request_timeout_s)
            server: Any = run.Server(app.create_app(engine_client, shared, name, options), engine_client, options)
        else:
            server, log_options = processes, {"log_format": self.log_format, "log_level": self.log_level}
            setup = {"options": options.to_dict(), "model_name": name} | log_options
            processes.prepare(shared, setup)

        def leave_with_engine() -> None:
            engine.wait()
            server.stop()

        threading.Thread(target=leave_with_engine, daemon=True).start()
        run.prepare_interpreter()
        signals.stop = server.stop
        if signals.asked:
            return 0
        loading.shutdown()
        note = describe_products(engine.model_config, engine.config.mesh, dtype_of(engine.config))
        self._print_summary(engine, name, loading.socket, note)
        server.run(sockets=[loading.socket])
        if engine.error is not None:
            raise EngineError(engine.error)
        return 0

    def _url(self, listener: socket.socket) -> str:
        """Return the URL at which clients find the server."""
        if self.uds is not None:
            return f"unix:{self.uds}"
        host, port = listener.getsockname()[:2]
        return f"{'http' if self.http.ssl_certfile is None else 'https'}://{host}:{port}"

    def _print_summary(self, engine: Any, name: str, listener: socket.socket, products: str) -> None:
        limits = engine.config
        what = f"{limits.mesh}, attention by {limits.attention_backend}"
        where = "any core" if limits.cpu_bind == "off" else f"cores {limits.cpu_bind}"
        sizes = f"{limits.batch_sequences:,} sequences, {limits.batch_tokens:,} tokens a step"
        ignored = ", ".join(engine.model_config.ignored)
        lines = [
            f"serving {name} on {self._url(listener)} ({what}); Ctrl-C stops",
            f"a DP group: {sizes}, {limits.cached_tokens:,} tokens in the cache",
            f"a rank: {limits.threads} thread(s), {where}",
            products,
            engine.eager and f"decode steps run eagerly on CPUs, not recorded: {engine.eager}",
            limits.speculative != "off"
            and f"drafts by {limits.speculative}: steps of sequences that draft do not overlap",
            engine.kv_events and f"KV events: {engine.kv_events}",
            ignored and f"config.json: transformers does not read {ignored}, which Weft ignores",
            engine.text_processor.says and f"generation_config.json: {engine.text_processor.says}",
        ]
        for line in filter(None, lines):
            print(line, file=sys.stderr, flush=True)

    def _key(self) -> str | None:
        """Return the API key, stripped: a secret in a file often ends in a newline, which no client can send."""
        key = os.environ.get("WEFT_API_KEY") or None if self.http.api_key is None else self.http.api_key
        if key is not None and key != key.strip():
            print("the API key is taken without the spaces and newlines around it", file=sys.stderr)
        return key and key.strip()

    def _profile_folder(self) -> Path | None:
        if (folder := self.http.profile_dir) is None:
            return None
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            advice = "choose another folder with --profile-dir"
            raise UserError(f"cannot write {folder}: {error.strerror}; {advice}") from error
        return folder.resolve()
