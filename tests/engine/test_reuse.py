"""Prefixes and groups: when a prompt can be reused, what is kept when room is short, and where a newcomer goes."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from engine.fake import answer
from engine.stub import Client, World
from engine.test_scheduler import STATE, WHOLE, make
from weft.kv.pages import PagePool
from weft.kv.prefix import ABSENT, PrefixTree
from weft.kv.spec import Rule

PROMPT = list(range(18))


def test_a_prompt_can_be_reused_once_it_is_done_and_before_its_answer_is() -> None:
    driver = make(num_pages=64, max_batch_tokens=8)
    driver.add(1, PROMPT, 20)
    reusable = []
    for _ in range(4):
        driver.step()
        reusable.append(driver.scheduler.cached_tokens(PROMPT))
    assert reusable == [0, 0, 16, 16]
    second = driver.add(2, PROMPT, 3)
    rows = driver.step()
    assert second.cached == 16 and [p.rows for p in rows.parts] == [1, 2]
    driver.finish_all()
    assert driver.answers[1] == answer(PROMPT, 20) and driver.answers[2] == answer(PROMPT, 3)


def test_a_state_is_kept_at_the_last_border_and_before_the_prompt_is_done() -> None:
    driver = make(num_pages=64, max_batch_tokens=32, specs=[WHOLE, STATE])
    driver.add(1, PROMPT, 20)
    assert [p.rows for p in driver.step().parts] == [16], "the step ends where others may start"
    assert driver.scheduler.cached_tokens(PROMPT) == 16
    assert driver.scheduler.cached_tokens(PROMPT[:14]) == 0, "there is no state at its border"
    second = driver.add(2, [*PROMPT[:16], 40, 41], 3)
    assert [p.rows for p in driver.step().parts] == [2, 2] and second.cached == 16
    driver.finish_all()
    assert driver.answers[2] == answer([*PROMPT[:16], 40, 41], 3)


def test_who_gave_way_goes_on_from_what_is_cached_but_reports_what_was_at_first() -> None:
    """Its own prompt is in the cache by then; the client is told of the tokens that others had computed for it."""
    driver = make(num_pages=12, max_batch_tokens=64, max_running=2)
    driver.add(1, [9] * 20, 16)
    young = driver.add(2, PROMPT, 9)
    driver.step()
    while not driver.scheduler.preemptions:
        driver.step()
    assert young.drawn > 0 and young.computed == 0
    while young.holding is None:
        cached = driver.scheduler.cached_tokens(young.tokens)
        rows = driver.step()
    (part,) = (p for p in rows.parts if p.request == 2)
    assert part.context == cached >= 12 and young.cached == 0
    driver.finish_all()
    assert driver.answers[2] == answer(PROMPT, 9)


WINDOW = Rule(window=5)


@pytest.mark.parametrize("rule", [Rule(), WINDOW, Rule(state=True)], ids=["pages", "window", "state"])
def test_the_prefix_that_was_not_used_for_longest_is_evicted(rule: Rule) -> None:
    pool = PagePool(4)
    tree = PrefixTree([rule], [pool], 2)
    prefixes = [[1, 1], [2, 2], [3, 3], [4, 4]]
    for prefix in prefixes:
        held = pool.take(1)
        assert held is not None
        tree.insert(prefix, [held])
        pool.release(held)
    for _, tables in (tree.match([1, 1]), tree.match([3, 3, 5])):
        pool.release(tables[0])
    tree.insert([2, 2], [[ABSENT]])  # computed anew by somebody: used, though its older page stays
    left = []
    for _ in prefixes:
        assert tree.evict(0, 1) == 1
        left.append([prefix[0] for prefix in prefixes if tree.longest(prefix)])
    assert left == [[1, 2, 3], [2, 3], [2], []]
    assert tree.nodes == 0 and pool.free == 4 and tree.evict(0, 1) == 0


def test_a_window_is_reused_where_all_its_pages_are_there() -> None:
    """Pages of 2 tokens, a window of 5: a row sees 4 tokens before it, so two pages, wherever it begins."""
    pools = [PagePool(8), PagePool(8)]
    tree = PrefixTree([Rule(), WINDOW], pools, 2)
    tokens = list(range(8))
    tables = [pool.take(4) or [] for pool in pools]
    tree.insert(tokens, [tables[0], [ABSENT, *tables[1][1:]]])
    assert [tree.longest(tokens[:n]) for n in range(9)] == [0, 0, 0, 0, 0, 0, 6, 6, 8]
    for pool, table in zip(pools, tables, strict=True):
        pool.release(table)
    reused, (whole, window) = tree.match(tokens)
    assert reused == 8 and whole == tables[0] and window == [ABSENT, ABSENT, *tables[1][2:]]
    assert tree.evict(1, 8) == 1, "two of three pages are in use"
    assert tree.longest(tokens) == 8 and tree.longest(tokens[:6]) == 0


def test_a_newcomer_goes_where_its_first_token_comes_soonest(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that wait count, however few the requests are; tokens of its own that are cached there do not."""
    world = World(model_dir, monkeypatch)
    with world.engine(attn_dp=2, ep=2) as engine:
        client = Client(engine)

        def together(*prompts: list[int]) -> list[int]:
            """Hands prompts over while a step of one row in group 0 runs; gives the group of each."""
            world.go.clear()
            client.ask([5], 2)
            while not engine.stats().running:
                threading.Event().wait(0.01)
            asked = [client.at[client.ask(prompt, 2)] for prompt in prompts]
            world.go.set()
            client.wait(1 + len(prompts))
            first = {
                p.request: g for step in reversed(world.steps) for g, rows in enumerate(step.groups) for p in rows.parts
            }
            return [first[request] for request in asked]

        assert together(PROMPT) == [1]
        assert together([1] * 50, [2] * 20, [3] * 20, PROMPT) == [1, 0, 0, 1]
