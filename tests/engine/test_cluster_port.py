"""Bad frames against the port of a cluster that serves: nothing of them is decoded, and nobody notices."""

from __future__ import annotations

import os
import random
import threading
from pathlib import Path
from typing import Any

import pytest

from engine import cluster_fuzzer
from engine.test_agents import agent_thread, cluster
from engine.test_engine import GREEDY, expected, prompts
from engine.test_faults import wait_until
from weft.engine.config.config import EngineConfig
from weft.engine.controller.engine import Engine
from weft.engine.hosts import agents, secured

__all__ = ["cluster", "expected"]


@pytest.mark.parametrize("frames", [300, pytest.param(100_000, marks=pytest.mark.nightly)])
def test_nothing_of_bad_frames_is_decoded_and_the_cluster_serves_on(
    cluster: EngineConfig, expected: Any, monkeypatch: pytest.MonkeyPatch, frames: int
) -> None:
    decoded: list[bytes] = []
    wrong: list[bytes] = []
    decode = agents.messages.decode_from_agent

    def spy(frame: bytes) -> Any:
        decoded.append(frame)
        try:
            return decode(frame)
        except Exception:
            wrong.append(frame)
            raise

    monkeypatch.setattr(agents.messages, "decode_from_agent", spy)
    rng, port, key = random.Random(frames), cluster.master_port, secured.read_key(cluster.cluster_key or Path())

    def tokens() -> list[tuple[int, ...]]:
        return [result.token_ids for result in engine.generate(prompts(), GREEDY)]

    with agent_thread(cluster), Engine(cluster) as engine:
        recorded = cluster_fuzzer.record(port, key)
        assert wait_until(lambda: wrong == [b"no message"]), "the recorded member knows the key"
        wrong.clear()
        before = len(os.listdir("/proc/self/fd"))

        def attack() -> None:
            cluster_fuzzer.strange_sockets(port, rng)
            cluster_fuzzer.raw(port, frames, rng, recorded)

        attacker = threading.Thread(target=attack)
        attacker.start()
        assert tokens() == expected
        while attacker.is_alive():
            assert tokens() == expected
        attacker.join()
        assert tokens() == expected
        assert engine.stats().failures == 0 and engine.healthy
        assert wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before), "every connection is closed"
    assert decoded and not wrong
    assert not any(cluster_fuzzer.MARK.encode() in frame for frame in decoded)
