"""KV events: a subscriber that follows them knows what the prefix caches hold, and slows nobody."""

from __future__ import annotations

import random
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from e2e.here import weft_here
from engine.conftest import WAIT_S
from engine.fake import VOCABULARY, Driver
from engine.test_scheduler import SPECS, WHOLE, random_prompt
from weft.engine.config.config import EngineConfig, EngineError
from weft.engine.controller.engine import Engine
from weft.engine.controller.event_publisher import END, EventPublisher, KvEventsConfig
from weft.engine.kv import cache_events
from weft.engine.kv.cache_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    CacheEvent,
    CacheEvents,
    KVEventBatch,
    page_hash,
    salt_hash,
)
from weft.engine.kv.cache_spec import Rule, Spec, cache_groups
from weft.engine.kv.manager import CacheManager
from weft.engine.kv.prefix import PrefixTree
from weft.engine.kv.prefix_run import ABSENT
from weft.engine.kv.tokens import token_array
from weft.engine.messages.request import SamplingParams, Sharing
from weft.engine.scheduler.scheduler import Scheduler
from weft.engine.worker.worker import Worker
from weft.serve.http.metrics import Metrics

pytestmark = pytest.mark.usefixtures("planned_once")


@dataclass
class Subscriber:
    """Follows events as a router does.

    blocks: what it believes to be stored, by group and hash. prefixes: salt and all tokens up to the end of each block
    that it has ever heard of; of a state it knows none where no other group told of the blocks before it.
    """

    page_size: int
    blocks: set[tuple[int, int]] = field(default_factory=set)
    prefixes: dict[int, tuple[str, tuple[int, ...]] | None] = field(default_factory=dict)

    def take(self, events: list[CacheEvent]) -> None:
        for event in events:
            if isinstance(event, BlockStored):
                self._stored(event)
            elif isinstance(event, BlockRemoved):
                for block in event.block_hashes:
                    self.blocks.remove((event.group_idx or 0, block))
            else:
                self.blocks.clear()

    def _stored(self, event: BlockStored) -> None:
        assert event.block_size == self.page_size and event.medium == "GPU" and event.group_idx is not None
        assert len(event.token_ids) == self.page_size * len(event.block_hashes)
        before = ("", ()) if event.parent_block_hash is None else self.prefixes.get(event.parent_block_hash)
        if event.extra_keys is not None:
            assert event.parent_block_hash is None and event.extra_keys[0] is not None
            assert event.extra_keys[1:] == [None] * (len(event.block_hashes) - 1)
            before = event.extra_keys[0][0], ()
        for at, block in enumerate(event.block_hashes):
            tokens = tuple(event.token_ids[at * self.page_size : (at + 1) * self.page_size])
            before = None if before is None else (before[0], before[1] + tokens)
            assert (event.group_idx, block) not in self.blocks, "stored twice"
            self.blocks.add((event.group_idx, block))
            self.prefixes[block] = self.prefixes.get(block) or before

    def check(self, tree: PrefixTree) -> None:
        """Compare with the full pages that a tree holds."""
        held = set()

        def visit(node: Any, parent: int, salt: str, prefix: tuple[int, ...]) -> None:
            for child in node.children.values():
                tokens, block = tuple(token_array(child.tokens)), parent
                for at in range(len(tokens) // self.page_size):
                    key = tokens[at * self.page_size : (at + 1) * self.page_size]
                    until = prefix + tokens[: (at + 1) * self.page_size]
                    block = page_hash(block, key)
                    held.update((group, block) for group, pages in enumerate(child.held) if pages[at] != ABSENT)
                    assert self.prefixes.get(block) in (None, (salt, until))
                    assert self.prefixes.get(block) or not tree._whole, "the tokens of a block are not known"
                visit(child, block, salt, prefix + tokens)

        for salt, root in tree._roots.items():
            visit(root, salt_hash(salt), salt, ())
        assert self.blocks == held


@pytest.mark.parametrize("specs", SPECS, ids=lambda specs: "+".join(type(s).__name__ for s in specs))
def test_who_follows_the_events_knows_what_is_cached(specs: list[Spec]) -> None:
    """Random traffic in a cache that is far too small, with salts, cancelled requests and caches that are reset."""
    rng, page_size, capacity = random.Random(5), 4, 48
    groups = cache_groups(specs, page_size=page_size, kv_tokens=capacity, max_running=3, max_batch_tokens=9)
    events, subscriber = CacheEvents(), Subscriber(page_size)
    caches = CacheManager(groups, page_size, events=events)
    driver = Driver(Scheduler(caches, max_batch_tokens=9, max_running=3), ahead=True)
    stems = [[rng.randrange(VOCABULARY) for _ in range(capacity)] for _ in range(2)]
    kinds = set()
    for request in range(60):
        prompt = random_prompt(rng, stems, capacity - 12)
        driver.add(request, prompt, rng.randrange(1, 10), sharing=Sharing(cache_salt=rng.choice(["", "salt"])))
        for _ in range(rng.randrange(4)):
            driver.step() if driver.live else None
        if driver.live and rng.random() < 0.2:
            driver.cancel(rng.choice(sorted(driver.live)))
        if rng.random() < 0.1:
            driver.scheduler.caches.forget()
        taken = events.take()
        kinds |= {type(event) for event in taken}
        subscriber.take(taken)
        subscriber.check(caches.tree)
    assert kinds >= {BlockStored, BlockRemoved}
    driver.finish_all()
    driver.scheduler.caches.forget()
    assert isinstance(events.take()[-1], AllBlocksCleared)


def test_what_events_say_of_a_group() -> None:
    events = CacheEvents()
    for group, rule in enumerate((Rule(), Rule(window=5), Rule(state=True))):
        events.stored(group, rule, 7, None, [1, 2], "")
    kinds = [(e.kv_cache_spec_kind, e.kv_cache_spec_sliding_window) for e in events.take()]  # type: ignore[union-attr]
    assert kinds == [("full_attention", None), ("sliding_window", 5), ("mamba", None)]
    assert events.take() == []


def test_equal_prefixes_have_equal_hashes_on_every_server() -> None:
    """Hashes are equal in every process and version, for routers that see servers replaced one by one."""
    first = page_hash(salt_hash(""), [1, 2, 3])
    assert (first, page_hash(first, (1, 2, 3))) == (16580129318509336541, 15330264130581748948)
    assert page_hash(salt_hash("x"), [1, 2, 3]) not in (first, page_hash(first, [1, 2, 3]))


@contextmanager
def publisher(groups: int = 1, **options: Any) -> Iterator[EventPublisher]:
    with tempfile.TemporaryDirectory() as folder:
        config = KvEventsConfig(endpoint=f"ipc://{folder}/events", replay_endpoint=f"ipc://{folder}/replay", **options)
        made = EventPublisher(config, groups)
        try:
            yield made
        finally:
            made.close()


@contextmanager
def socket(kind: int, endpoint: str | None) -> Iterator[zmq.Socket[bytes]]:
    assert endpoint is not None
    with zmq.Context() as context, context.socket(kind) as made:
        made.linger, made.rcvtimeo = 0, int(WAIT_S * 1000)
        made.connect(endpoint)
        yield made


def replayed(made: EventPublisher, first: int = 0, group: int = 0) -> dict[int, bytes]:
    """Return the batches that a client gets when it asks for them from a number on."""
    with socket(zmq.DEALER, made.channels[group].replay_endpoint) as asking:
        asking.send_multipart([b"", first.to_bytes(8, "big")])
        found = {}
        while (frames := asking.recv_multipart())[2] != END:
            empty, topic, number, payload = frames
            assert (empty, topic) == (b"", made._topic)
            found[int.from_bytes(number, "big")] = payload
    return found


def store(made: EventPublisher, block: int, group: int = 0) -> None:
    made.recorded[group].removed(0, block)
    made.publish()


def test_batches_are_published_by_topic_and_number_and_again_when_asked() -> None:
    decode = msgspec.msgpack.Decoder(KVEventBatch).decode
    with publisher(2, topic="kv@here") as made, socket(zmq.SUB, made.channels[1].endpoint) as subscribed:
        subscribed.subscribe("kv@")
        heard: list[list[bytes]] = []
        while not heard:  # whoever has subscribed is heard of later; what was sent until then is replayed
            store(made, 1, group=1)
            heard += [subscribed.recv_multipart()] if subscribed.poll(10) else []
        store(made, 2, group=1)
        while decode(heard[-1][2]).events != [BlockRemoved([2], "GPU", 0)]:
            heard.append(subscribed.recv_multipart())
        store(made, 3, group=0)
        topics, numbers = {frames[0] for frames in heard}, [int.from_bytes(frames[1], "big") for frames in heard]
        assert topics == {b"kv@here"} and numbers == list(range(numbers[0], made.published - 1))
        again = replayed(made, numbers[0], group=1)
        assert list(again) == numbers and list(again.values()) == [frames[2] for frames in heard]
        batch = decode(again[numbers[-1]])
        assert batch.data_parallel_rank == 1 and abs(batch.ts - time.time()) < WAIT_S
        assert list(replayed(made, group=0)) == [0], "groups have numbers of their own"


def test_only_the_last_batches_are_kept_for_replay_and_nonsense_is_ignored() -> None:
    with publisher(buffer_steps=3) as made:
        for block in range(8):
            store(made, block)
        while 7 not in (kept := replayed(made)):
            pass
        assert list(kept) == [5, 6, 7] and list(replayed(made, 7)) == [7] and replayed(made, 8) == {}
        with socket(zmq.DEALER, made.channels[0].replay_endpoint) as asking:
            for frames in ([b"x"], [b"", b"short"], [b"", b"", b"", b""]):
                asking.send_multipart(frames)
        assert list(replayed(made)) == [5, 6, 7]


def test_a_subscriber_that_reads_nothing_delays_nobody_and_a_full_queue_loses_batches() -> None:
    with publisher(hwm=1, max_queue_size=4, buffer_steps=100) as made:
        with socket(zmq.SUB, made.channels[0].endpoint) as subscribed:
            subscribed.rcvhwm = 1
            subscribed.subscribe("")
            for block in range(50):  # far more than the subscriber takes, one by one
                store(made, block)
                while made._queue:
                    time.sleep(0.001)
        assert made.published == 50 and made.lost == 0 and len(replayed(made)) == 50
        stored = threading.Event()
        encode, made._encode = made._encode, lambda batch: stored.wait(WAIT_S) and encode(batch)
        for block in range(20):  # while the thread is busy with the first of these
            store(made, block)
        assert made.lost >= 20 - 4 - 1
        stored.set()
        made._encode = encode
        numbers: list[int] = []
        while len(numbers) < made.published - made.lost:
            numbers = list(replayed(made))
        assert numbers[:50] == list(range(50)) and len(numbers) == made.published - made.lost
        store(made, 0)
        while len(replayed(made)) == len(numbers):
            pass
        assert list(replayed(made))[-1] == 70, "what was lost leaves a gap"


@pytest.mark.parametrize(
    "text, problem",
    [
        ("{", "it is JSON such as"),
        ('{"publisher": "kafka"}', "Invalid enum value 'kafka'"),
        ('{"port": 1}', "unknown field `port`"),
        ('{"endpoint": "udp://*:1"}', "endpoint is 'udp://.:1'; it must begin with tcp:// or ipc://"),
        ('{"hwm": 0}', "hwm is 0; it must be above 0"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem) as raised:
        KvEventsConfig.parse(text)
    assert str(raised.value).startswith("--kv-events-config") and "\n" not in str(raised.value)


def test_the_command_refuses_it_before_anything_starts() -> None:
    code, _, err = weft_here("serve", "--kv-events-config", '{"port": 1}')
    assert code == 2 and err.startswith("weft: --kv-events-config") and err.count("\n") == 1


def test_the_option_says_whether_anything_is_published() -> None:
    on = ("{}", '{"enable_kv_cache_events": true}', '{"publisher": "zmq"}')
    off = ('{"enable_kv_cache_events": false, "publisher": "zmq"}', '{"publisher": "null"}')
    assert all(KvEventsConfig.parse(text).enabled for text in on)
    assert not any(KvEventsConfig.parse(text).enabled for text in off)


def test_addresses_are_vllms_and_those_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    path = f"ipc://{tmp_path}/kv"
    made = EventPublisher(KvEventsConfig(endpoint=path, topic="t"), 2)
    assert str(made) == f"{path}, {path}_dp1"
    made.close()
    made = EventPublisher(KvEventsConfig(endpoint="tcp://*:0"), 1)
    port = int(str(made).rpartition(":")[2])
    with pytest.raises(EngineError, match=f"{port} cannot be used .Address already in use.; choose another"):
        EventPublisher(KvEventsConfig(endpoint=f"tcp://*:{port - 1}"), 2)
    made.close()
    with pytest.raises(EngineError, match="tcp://here has no port"):
        EventPublisher(KvEventsConfig(endpoint="tcp://here"), 1)


def test_an_engine_publishes_what_its_groups_store(model_dir: Path, tmp_path: Path) -> None:
    config = EngineConfig(model_dir, executor="thread", attn_dp=2, ep=2, kv_tokens=64, page_size=4)
    prompts = [[at] * 9 for at in range(1, 5)]
    path = f"ipc://{tmp_path}/events"
    events = KvEventsConfig(endpoint=path, replay_endpoint=f"{path}-replay")
    with Engine(config, kv_events=events) as engine:
        assert engine.kv_events is not None
        engine.generate(prompts * 3, SamplingParams(max_tokens=3))
        engine._ask(lambda: None)  # the step of the last token is over, and its events are published
        batches = {group: replayed(engine.kv_events, group=group) for group in (0, 1)}
        decode = msgspec.msgpack.Decoder(KVEventBatch).decode
        for group, scheduler in enumerate(engine._schedulers):
            subscriber = Subscriber(4)
            for payload in batches[group].values():
                subscriber.take(decode(payload).events)
            tree = scheduler.caches.tree
            assert tree is not None
            subscriber.check(tree)
            assert subscriber.blocks
        counted = Metrics(engine).text("small").decode()
        assert f"weft_kv_event_batches_total {float(sum(map(len, batches.values())))}\n" in counted
        assert "weft_kv_event_batches_lost_total 0.0\n" in counted
        engine.reset_cache()
        engine._ask(lambda: None)
        last = decode(list(replayed(engine.kv_events).values())[-1])
        assert last.events == [AllBlocksCleared()]
    with pytest.raises(EngineError, match="--kv-events-config requires the prefix cache"):
        Engine(EngineConfig(model_dir, executor="thread", prefix_cache=False), kv_events=events)


def test_ranks_that_start_anew_have_nothing_cached(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, failed = Worker.step, threading.Event()

    def fail_once(worker: Worker, message: Any) -> Any:
        if message.number == 4 and not failed.is_set():
            failed.set()
            raise RuntimeError("a fault of this test")
        return step(worker, message)

    monkeypatch.setattr(Worker, "step", fail_once)
    path = f"ipc://{tmp_path}/restart"
    events = KvEventsConfig(endpoint=path, replay_endpoint=f"{path}-replay")
    config = EngineConfig(model_dir, executor="thread", kv_tokens=64, page_size=4, restart_backoff_s=0)
    with Engine(config, kv_events=events) as engine:
        engine.generate([[1] * 9], SamplingParams(max_tokens=6, ignore_eos=True))
        assert engine.stats().failures == 1 and engine.kv_events is not None
        engine._ask(lambda: None)
        decode = msgspec.msgpack.Decoder(KVEventBatch).decode
        batches = [decode(payload).events for payload in replayed(engine.kv_events).values()]
        assert batches[0] == [AllBlocksCleared()] and [AllBlocksCleared()] in batches[2:]
        subscriber = Subscriber(4)
        for batch in batches:
            subscriber.take(batch)
        tree = engine._schedulers[0].caches.tree
        assert tree is not None and subscriber.blocks
        subscriber.check(tree)


def test_nothing_is_recorded_for_nobody(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("__init__", "stored", "removed", "cleared", "take"):
        monkeypatch.setattr(CacheEvents, name, None)
    monkeypatch.setattr(cache_events, "_hash", None)
    off = KvEventsConfig(enable_kv_cache_events=False)
    with Engine(EngineConfig(model_dir, executor="thread", kv_tokens=64, page_size=4), kv_events=off) as engine:
        assert engine.kv_events is None
        engine.generate([[at] * 9 for at in range(1, 9)], SamplingParams(max_tokens=3))
        engine.reset_cache()
    groups = cache_groups([WHOLE], page_size=4, kv_tokens=48, max_running=1, max_batch_tokens=4)
    assert CacheManager(groups, 4).tree is not None
