"""Processes that serve HTTP for one engine, and the engine's end of their sockets."""

from __future__ import annotations

import json
import logging
import os
import pickle
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from msgspec import structs

from weft.engine.config.config import EngineConfig, EngineError, QueueFull
from weft.engine.config.device import on_gpus
from weft.engine.kv.tokens import token_array
from weft.engine.messages import api_messages as messages
from weft.engine.messages.rank_sockets import RankSockets
from weft.engine.messages.request import SamplingParams
from weft.engine.output.request_output import RequestOutput
from weft.serve.http.errors import ApiError
from weft.serve.http.shared import Shared

log = logging.getLogger(__name__)
POLL_S = 0.05
"""Interval of looks at the processes and at the engine's state."""
COLLECT_S = 2.0
"""Maximum seconds to wait for the observations of all processes."""
COLLECT_EACH_S = 5.0
"""Maximum seconds between two collections of observations."""
AGAIN_S = 1.0
"""Minimum seconds between the start of a process and that of its successor."""
MAX_DEFAULT = 4
"""Maximum processes unless `--api-servers` says more: each needs 0.2 GB of memory, and more for a large vocabulary."""
THREADS = 4
"""Maximum questions, and submissions with a grammar, at once."""


def default_count(config: EngineConfig) -> int:
    """Return the number of processes for a host's cores: 1 if ranks run on CPUs, which use all cores."""
    if not on_gpus(config):
        return 1
    return max(1, min(MAX_DEFAULT, (len(os.sched_getaffinity(0)) - config.ranks_of_host - 1) // 2))


@dataclass(eq=False)
class ApiProcess:
    """One process.

    Attributes:
        number: unique number of the process.
        requests: its number of a request → the engine's; None while it is submitted.
        outgoing: messages of the current step.
        started: it can serve.
    """

    number: int
    child: subprocess.Popen[bytes]
    began: float = field(default_factory=time.monotonic)
    requests: dict[int, int | None] = field(default_factory=dict)
    outgoing: list[messages.ToApi] = field(default_factory=list)
    started: bool = False


@dataclass(eq=False)
class Collection:
    """Question for metrics, by a process and with a number, that waits for observations of the missing processes."""

    question: tuple[ApiProcess, int]
    missing: set[int]
    deadline: float


class ApiProcesses:
    """Processes that share a listening socket. They start at once, and serve once `prepare` has their engine.

    One that ends is replaced by a new one; its requests are cancelled.
    """

    def __init__(self, count: int, listener: socket.socket):
        self._listener, self._count = listener, count
        self._folder = Path(tempfile.mkdtemp(prefix="weft-api-"))
        self._sockets = RankSockets(self._folder / "api", range(count))
        self._processes: dict[int, ApiProcess] = {}
        self._made, self._starts = 0, list[float]()
        self._lock = threading.Lock()  # of `ApiProcess.requests`
        self._collections: list[Collection] = []
        self._stops = self._stops_sent = 0
        self._collect_next = 0.0
        self._serving = False
        self._status: tuple[messages.EngineState, str | None] = ("serving", None)
        self._ready, self._over = threading.Event(), threading.Event()
        self._error: str | None = None
        self._pool = ThreadPoolExecutor(THREADS, "weft-api-calls")
        for _ in range(count):
            self._start()

    @property
    def pids(self) -> list[int]:
        """Process ids."""
        return [process.child.pid for process in list(self._processes.values())]

    def prepare(self, shared: Shared, setup: dict[str, Any]) -> None:
        """Give the engine to the processes, and wait until all can serve. Raises EngineError.

        setup: plain values that `weft.serve.api_process` starts with, without the engine's.
        """
        self._shared, self._engine = shared, (engine := shared.engine)
        options = setup["options"] | {"max_connections": -(-setup["options"]["max_connections"] // self._count)}
        self._setup = setup | {
            "options": options,
            "config": json.dumps(engine.config.to_dict()),
            "max_model_len": engine.max_model_len,
            "vocabulary": engine.text_processor.vocabulary,
            "eos": list(engine.model_config.eos_token_ids),
            "tokenizer": pickle.dumps(engine.tokenizer),
        }
        engine.after_callbacks(self._flush)
        threading.Thread(target=self._loop, name="weft-api", daemon=True).start()
        self._ready.wait()
        if self._error is not None:
            raise EngineError(self._error)

    def run(self, sockets: list[socket.socket]) -> None:
        """Serve until `stop`, and return when all processes have ended. Raises EngineError if that cannot go on.

        sockets: the listener, as in `Server.run`.
        """
        self._serving = True
        self._send_all(messages.ServeRequests())
        self._over.wait()
        if self._error is not None:
            raise EngineError(self._error)

    def stop(self) -> None:
        """Stop like a server on SIGTERM, from any thread; a second call ends running requests at once."""
        self._stops += 1

    def __enter__(self) -> ApiProcesses:
        return self

    def __exit__(self, *error: object) -> None:
        self._stops += 2
        for process in list(self._processes.values()):  # the thread of the sockets removes those that have ended
            process.child.kill()
            process.child.wait()
        self._pool.shutdown(cancel_futures=True)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self) -> None:
        self._made += 1
        descriptor = self._listener.fileno()
        command = [sys.executable, "-m", "weft.serve.api_process", str(self._folder / "api"), str(self._made)]
        command.append(str(descriptor))
        # In a session of its own: Ctrl-C is for the engine's process alone.
        child = subprocess.Popen(command, pass_fds=[descriptor], stdin=subprocess.DEVNULL, start_new_session=True)
        self._processes[self._made] = ApiProcess(self._made, child)

    # --- on the engine's thread -------------------------------------------------------------------------------

    def _increment(self, process: ApiProcess, number: int, output: RequestOutput) -> None:
        at, token, known, end = output.take_token()
        if number not in process.requests:
            return
        outgoing = process.outgoing
        if at and end is None and known is None and token is not None:
            if not (outgoing and isinstance(plain := outgoing[-1], messages.StepTokens)):
                plain = messages.StepTokens([], [])
                outgoing.append(plain)
            plain.requests.append(number)
            plain.tokens.append(token)
            return
        s, of_first = output.sequence, None
        if not at:
            of_first = messages.FirstIncrement(s.cached or 0, s.queue_s, tuple(s.scores))
        if end is not None:
            if end.fault is not None:
                log.error("request %s ends with an error", output.name, exc_info=end.fault)
                end = structs.replace(end, error=f"internal error: {type(end.fault).__name__}", fault=None)
            with self._lock:
                process.requests.pop(number, None)
        outgoing.append(messages.Increment(number, token, known, of_first, end))

    def _flush(self) -> None:
        self._send_status()
        for process in list(self._processes.values()):
            if process.outgoing:
                outgoing, process.outgoing = process.outgoing, []
                self._send(process, *outgoing)

    # --- on any thread ----------------------------------------------------------------------------------------

    def _send(self, process: ApiProcess, *sent: messages.ToApi) -> None:
        self._sockets.send(process.number, messages.encode(sent))

    def _send_all(self, message: messages.ToApi) -> None:
        for process in list(self._processes.values()):
            if process.started:  # before, it waits for its setup alone
                self._send(process, message)

    def _send_status(self) -> None:
        """Tell all processes the engine's state, if it has changed."""
        with self._lock:
            status = (self._engine.state, self._engine.error)
            changed, self._status = status != self._status, status
        if changed:
            self._send_all(messages.EngineStatus(*status))

    def _submit(self, process: ApiProcess, new: messages.NewRequests) -> None:
        numbers = range(new.first, new.first + len(new.requests))
        retry_after_s, invalid = None, False
        try:
            jobs = [
                (token_array(tokens), SamplingParams(**_tuples(params)), partial(self._increment, process, number))
                for number, (tokens, params) in zip(numbers, new.requests, strict=True)
            ]
            ids = self._engine.submit_all(jobs, sharing=new.sharing, timeout_s=new.timeout_s, name=new.name)
        except (ValueError, EngineError) as error:
            with self._lock:
                for number in numbers:
                    process.requests.pop(number, None)
            retry_after_s = error.retry_after_s if isinstance(error, QueueFull) else None
            invalid = isinstance(error, ValueError)
            refused = messages.RequestsRefused(new.first, len(numbers), str(error), retry_after_s, invalid)
            self._send(process, refused)
            return
        with self._lock:
            gone = [at for at, number in enumerate(numbers) if number not in process.requests]  # ended, or cancelled
            process.requests |= {number: ids[at] for at, number in enumerate(numbers) if at not in gone}
        for at in gone:
            self._engine.cancel(ids[at])

    def _reply(self, process: ApiProcess, question: messages.Question) -> None:
        function = self._shared.quick.get(question.what) or self._shared.slow[question.what]
        value, failed = b"", None
        try:
            value = messages.encode(function(*question.arguments))
        except ApiError as error:
            failed = error.status, error.message, error.param
        except EngineError as error:
            failed = 503, str(error), None
        except Exception as error:
            log.error("%s fails", question.what, exc_info=error)
            failed = 500, f"internal error: {type(error).__name__}", None
        self._send(process, messages.QuestionResult(question.number, value, failed))

    # --- on the thread of the sockets -------------------------------------------------------------------------

    def _loop(self) -> None:
        try:
            while self._processes or self._starts or not self._stops:
                self._receive(POLL_S)
                self._send_status()
                self._finish_collections()
                self._replace_ended()
                while self._stops_sent < min(self._stops, 2):
                    self._stops_sent += 1
                    self._send_all(messages.StopServing())
        except Exception as error:
            log.error("API processes cannot be served", exc_info=error)
            self._error = f"internal error: {type(error).__name__}"
        finally:
            self._ready.set()
            self._over.set()

    def _receive(self, timeout_s: float) -> bool:
        if (message := self._sockets.receive(timeout_s)) is None:
            return False
        packet = messages.decode_from_api(message)
        if (process := self._processes.get(packet.process)) is not None:
            for each in packet.messages:
                self._take(process, each)
        return True

    def _take(self, process: ApiProcess, message: messages.FromApi) -> None:
        match message:
            case messages.NewRequests():
                with self._lock:
                    numbers = range(message.first, message.first + len(message.requests))
                    process.requests |= dict.fromkeys(numbers)
                if any("grammar" in params for _, params in message.requests):  # it may take seconds to compile
                    self._pool.submit(self._submit, process, message)
                else:
                    self._submit(process, message)
            case messages.CancelRequests(requests):
                self._cancel(process, requests)
            case messages.Question(number, "metrics"):
                missing = {other.number for other in self._processes.values() if other.started}
                deadline = time.monotonic() + COLLECT_S
                self._collections.append(Collection((process, number), missing, deadline))
                self._collect()
            case messages.Question():
                if message.what in self._shared.quick:
                    self._reply(process, message)
                else:
                    self._pool.submit(self._reply, process, message)
            case messages.Observed():
                self._shared.metrics.add(message)
                for collection in self._collections:
                    collection.missing.discard(process.number)
            case messages.ApiConnected():
                self._send(process, messages.ApiSetup(self._setup))
            case messages.ApiStarted(error):
                process.started = True
                if error is not None and self._serving:
                    log.error("API process %d cannot start: %s", process.child.pid, error)
                else:
                    self._error = self._error or error
                if self._stops:
                    self._send(process, messages.StopServing())
                else:
                    with self._lock:  # no older status follows a newer one
                        self._send(process, messages.EngineStatus(*self._status))
                    if self._serving:
                        self._send(process, messages.ServeRequests())
                if error is not None or all(each.started for each in self._processes.values()):
                    self._ready.set()

    def _collect(self) -> None:
        self._collect_next = time.monotonic() + COLLECT_EACH_S
        self._send_all(messages.CollectObserved())

    def _cancel(self, process: ApiProcess, requests: Any) -> None:
        with self._lock:
            known = [process.requests.pop(number, None) for number in list(requests)]
        for request in known:
            if request is not None:
                self._engine.cancel(request)

    def _finish_collections(self) -> None:
        """Reply to requests for metrics once all processes have sent their observations, or have had the time to."""
        if time.monotonic() >= self._collect_next:  # a process that dies loses only its latest observations
            self._collect()
        due = [c for c in self._collections if not c.missing & self._processes.keys() or c.deadline <= time.monotonic()]
        for collection in due:
            self._collections.remove(collection)
            process, number = collection.question
            self._reply(process, messages.Question(number, "metrics", ()))

    def _replace_ended(self) -> None:
        for process in list(self._processes.values()):
            if (code := process.child.poll()) is None:
                continue
            while self._receive(0.0):  # what it sent before its end
                pass
            del self._processes[process.number]
            self._cancel(process, process.requests)
            if self._stops:
                continue
            if not process.started and not self._serving:
                self._error = self._error or f"a process of the HTTP API ended with exit code {code} at its start"
                self._ready.set()
                continue
            log.error("API process %d ended with exit code %d; a new one starts", process.child.pid, code)
            self._starts.append(max(process.began + AGAIN_S, time.monotonic()))
        if self._stops:
            self._starts.clear()
        for due in [due for due in self._starts if due <= time.monotonic()]:
            self._starts.remove(due)
            self._start()


def _tuples(value: Any) -> Any:
    """Return a value of msgpack with tuples in the place of lists."""
    if isinstance(value, dict):
        return {name: _tuples(each) for name, each in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
