"""Publisher of the prefix caches' changes in vLLM's format: over ZeroMQ, with sequence numbers and replay.

Each DP group has a PUB socket, and a ROUTER socket for replay if configured. One thread owns all sockets: the engine's
thread only appends to a queue and never waits. If the queue is full, a batch is lost; its number is not used again, so
subscribers notice.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from typing import Literal

import msgspec
import zmq

from weft.engine.config.config import EngineConfig, EngineError
from weft.engine.config.threads import name_thread
from weft.engine.kv.cache_events import CacheEvents, KVEventBatch

log = logging.getLogger(__name__)
NUMBER_BYTES = 8
END = (-1).to_bytes(NUMBER_BYTES, "big", signed=True)
"""Number that marks the end of a replay."""
POLL_MS = 1000


class KvEventsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """vLLM's `--kv-events-config`, with vLLM's names.

    Attributes:
        endpoint, replay_endpoint: tcp:// or ipc:// addresses. An endpoint with * is bound, another one is connected to;
            a replay endpoint is always bound. DP group n uses the port n above, or appends _dpN to a path.
        buffer_steps: batches kept for replay.
        hwm: maximum unread batches of a slow subscriber; further ones are lost to it.
        max_queue_size: maximum batches waiting to be published; further ones are lost.
        topic: first frame of each message, to which clients subscribe.
    """

    enable_kv_cache_events: bool | None = None
    publisher: Literal["zmq", "null"] | None = None
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""

    @property
    def enabled(self) -> bool:
        """True unless the configuration turns publishing off."""
        return self.enable_kv_cache_events is not False and self.publisher != "null"

    @classmethod
    def parse(cls, text: str) -> KvEventsConfig:
        """Parse JSON. Raises ValueError in one line."""
        option = "--kv-events-config"
        try:
            config = msgspec.json.decode(text, type=cls)
        except msgspec.DecodeError as error:
            example = '{"publisher": "zmq", "endpoint": "tcp://*:5557"}'
            raise ValueError(f"{option} {text!r}: {error}; it is JSON such as {example}") from error
        for name in ("endpoint", "replay_endpoint"):
            value = getattr(config, name)
            if value is not None and not value.startswith(("tcp://", "ipc://")):
                raise ValueError(f"{option}: {name} is {value!r}; it must begin with tcp:// or ipc://")
        for name in ("buffer_steps", "hwm", "max_queue_size"):
            if (value := getattr(config, name)) <= 0:
                raise ValueError(f"{option}: {name} is {value}; it must be above 0")
        return config


class Channel:
    """Sockets of one DP group. endpoint, replay_endpoint: addresses with their ports."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], config: KvEventsConfig, group: int):
        self.sent: deque[tuple[bytes, bytes]] = deque(maxlen=config.buffer_steps)
        self.events = context.socket(zmq.PUB)
        self.events.set_hwm(config.hwm)
        listens = "*" in config.endpoint or "::" in config.endpoint or config.endpoint.startswith("ipc://")
        self.endpoint = _open(self.events, _of_group(config.endpoint, group), listens)
        self.replay: zmq.Socket[bytes] | None = None
        self.replay_endpoint: str | None = None
        if config.replay_endpoint is not None:
            self.replay = context.socket(zmq.ROUTER)
            # ZeroMQ counts read messages in steps of half this limit, so allow twice the kept batches.
            self.replay.set_hwm(2 * (config.buffer_steps + 1))
            self.replay_endpoint = _open(self.replay, _of_group(config.replay_endpoint, group), True)

    def __str__(self) -> str:
        return self.endpoint if self.replay_endpoint is None else f"{self.endpoint} (replay {self.replay_endpoint})"


class EventPublisher:
    """Publisher of the events of all DP groups. Raises EngineError if an address cannot be used."""

    def __init__(self, config: KvEventsConfig, groups: int):
        self.recorded = [CacheEvents() for _ in range(groups)]
        """Record of each DP group's events, filled by its prefix cache."""
        self.published = self.lost = 0
        """Number of batches, and number of these lost because the queue was full."""
        self._limit, self._topic = config.max_queue_size, config.topic.encode()
        self._numbers, self._full = [0] * groups, False
        self._queue: deque[tuple[int, int, KVEventBatch]] = deque()
        self._encode = msgspec.msgpack.Encoder().encode
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self.channels = [Channel(self._context, config, group) for group in range(groups)]
        except EngineError:
            self._context.destroy(linger=0)
            raise
        self._wake, self._closing = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC), False
        self._thread = threading.Thread(target=self._run, name="weft-kv-events", daemon=True)
        self._thread.start()

    def __str__(self) -> str:
        """Return the addresses of each DP group's events."""
        return ", ".join(map(str, self.channels))

    def publish(self) -> None:
        """Publish the events recorded since the last call, a batch per group. Runs on the schedulers' thread, and never
        waits."""
        for group, recorded in enumerate(self.recorded):
            if events := recorded.take():
                self._put(group, KVEventBatch(time.time(), events, group))

    def publish_cleared(self) -> None:
        """Publish that no group has any block, after their caches are recreated."""
        for recorded in self.recorded:
            recorded.cleared()
        self.publish()

    def close(self) -> None:
        """Publish waiting batches, and close the sockets. May be called twice."""
        if not self._closing:
            self._closing = True
            os.eventfd_write(self._wake, 1)
            self._thread.join()
            os.close(self._wake)

    def _put(self, group: int, batch: KVEventBatch) -> None:
        number = self._numbers[group]
        self._numbers[group] += 1
        self.published += 1
        full = len(self._queue) >= self._limit
        if full:
            self.lost += 1
            if not self._full:
                log.warning("KV events: %d batches wait to be published; what comes now is lost", self._limit)
        else:
            self._queue.append((group, number, batch))
            os.eventfd_write(self._wake, 1)
        self._full = full

    def _run(self) -> None:
        name_thread("weft-kv-events")
        poller = zmq.Poller()
        poller.register(self._wake, zmq.POLLIN)
        for channel in self.channels:
            if channel.replay is not None:
                poller.register(channel.replay, zmq.POLLIN)
        while not self._closing:
            ready = dict(poller.poll(POLL_MS))
            if self._wake in ready:
                os.eventfd_read(self._wake)
            self._send_waiting()
            for channel in self.channels:
                if channel.replay in ready:
                    self._replay(channel)
        self._send_waiting()
        self._context.destroy(linger=0)

    def _send_waiting(self) -> None:
        while self._queue:
            group, number, batch = self._queue.popleft()
            channel, frames = self.channels[group], (number.to_bytes(NUMBER_BYTES, "big"), self._encode(batch))
            channel.events.send_multipart((self._topic, *frames))
            channel.sent.append(frames)

    def _replay(self, channel: Channel) -> None:
        """Send the kept batches from a number on again, and then the mark of the end."""
        assert channel.replay is not None
        request = channel.replay.recv_multipart()
        if len(request) != 3 or len(request[2]) != NUMBER_BYTES:  # client, empty frame, number
            log.warning("KV events: a replay request is not a number of %d bytes", NUMBER_BYTES)
            return
        client, _, first = request
        for number, payload in channel.sent:
            if number >= first:
                channel.replay.send_multipart((client, b"", self._topic, number, payload))
        channel.replay.send_multipart((client, b"", b"", END, b""))


def open_publisher(kv_events: KvEventsConfig | None, config: EngineConfig) -> EventPublisher | None:
    """Open the publisher of an engine, if configured. Raises EngineError."""
    if kv_events is None or not kv_events.enabled:
        return None
    if not config.prefix_cache:
        raise EngineError("--kv-events-config requires the prefix cache: drop it, or drop --no-prefix-cache")
    return EventPublisher(kv_events, config.attn_dp)


def _of_group(endpoint: str, group: int) -> str:
    """Return a DP group's endpoint, as vLLM names endpoints of data-parallel ranks; port 0 is any free port."""
    address, _, port = endpoint.rpartition(":")
    if endpoint.startswith("ipc://"):
        return f"{endpoint}_dp{group}" if group else endpoint
    if not port.isdecimal():
        raise EngineError(f"--kv-events-config: {endpoint} has no port; write it as tcp://*:5557")
    return f"{address}:{int(port) + group if int(port) else 0}"


def _open(socket: zmq.Socket[bytes], endpoint: str, listens: bool) -> str:
    """Bind or connect a socket; return the endpoint with its port. Raises EngineError."""
    if "[" in endpoint:
        socket.setsockopt(zmq.IPV6, 1)
    try:
        if not listens:
            socket.connect(endpoint)
            return endpoint
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        why = zmq.strerror(error.errno or 0)
        raise EngineError(f"--kv-events-config: {endpoint} cannot be used ({why}); choose another") from error
    return str(socket.getsockopt_string(zmq.LAST_ENDPOINT))
