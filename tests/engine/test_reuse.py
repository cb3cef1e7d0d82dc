"""Prefixes and groups: when a prompt can be reused, what is kept when room is short, and where a newcomer goes."""

from __future__ import annotations

import gc
import random
import threading
from pathlib import Path

import pytest
import torch

from engine.fake import VOCABULARY, expected_output
from engine.stub import Client, World
from engine.test_scheduler import STATE, WHOLE, make
from weft.engine.attention.caches import Caches
from weft.engine.kv.cache_spec import CacheGroup, Latent, PagedKV, Rule, Spec, Window
from weft.engine.kv.cache_spec import rule as kv_rule
from weft.engine.kv.manager import CacheManager
from weft.engine.kv.pages import PagePool
from weft.engine.kv.prefix import PrefixTree
from weft.engine.kv.prefix_run import ABSENT
from weft.engine.messages.request import Sharing

PROMPT = list(range(18))


def test_a_prompt_can_be_reused_once_it_is_done_and_before_its_output_is() -> None:
    driver = make(num_pages=64, max_batch_tokens=8)
    driver.add(1, PROMPT, 20)
    reusable = []
    for _ in range(4):
        driver.step()
        reusable.append(driver.scheduler.caches.longest(PROMPT))
    assert reusable == [0, 0, 16, 16]
    second = driver.add(2, PROMPT, 3)
    rows = driver.step()
    assert second.cached == 16 and [p.rows for p in rows.parts] == [1, 2]
    driver.finish_all()
    assert driver.outputs[1] == expected_output(PROMPT, 20) and driver.outputs[2] == expected_output(PROMPT, 3)


def test_a_state_is_kept_at_the_last_border_and_before_the_prompt_is_done() -> None:
    driver = make(num_pages=64, max_batch_tokens=32, specs=[WHOLE, STATE])
    driver.add(1, PROMPT, 20)
    assert [p.rows for p in driver.step().parts] == [16], "the step ends where others may start"
    assert driver.scheduler.caches.longest(PROMPT) == 16
    assert driver.scheduler.caches.longest(PROMPT[:14]) == 0, "there is no state at its border"
    second = driver.add(2, [*PROMPT[:16], 40, 41], 3)
    assert [p.rows for p in driver.step().parts] == [2, 2] and second.cached == 16
    driver.finish_all()
    assert driver.outputs[2] == expected_output([*PROMPT[:16], 40, 41], 3)


def test_a_state_is_kept_a_page_before_the_end_of_a_prompt_of_whole_pages() -> None:
    """The last token of the same prompt has to run."""
    driver = make(num_pages=64, max_batch_tokens=32, specs=[WHOLE, STATE])
    driver.add(1, PROMPT[:16], 20)
    assert [p.rows for p in driver.step().parts] == [12]
    assert driver.scheduler.caches.longest(PROMPT[:16]) == 12
    second = driver.add(2, PROMPT[:16], 3)
    assert [p.rows for p in driver.step().parts] == [4, 4] and second.cached == 12
    driver.finish_all()
    assert driver.outputs[2] == expected_output(PROMPT[:16], 3)


def test_a_preempted_request_goes_on_from_what_is_cached_but_reports_what_was_at_first() -> None:
    """Its own prompt is in the cache by then; the client learns of the tokens that others had computed for it."""
    driver = make(num_pages=12, max_batch_tokens=64, max_running=2)
    driver.add(1, [9] * 20, 16)
    young = driver.add(2, PROMPT, 9)
    driver.step()
    while not driver.scheduler.preemptions:
        driver.step()
    assert young.output_tokens > 0 and young.computed == 0
    while young.allocation is None:
        cached = driver.scheduler.caches.longest(young.tokens)
        rows = driver.step()
    (part,) = (p for p in rows.parts if p.request == 2)
    assert part.context == cached >= 12 and young.cached == 0
    driver.finish_all()
    assert driver.outputs[2] == expected_output(PROMPT, 9)


def begins_alike(one: list[int], other: list[int]) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


@pytest.mark.parametrize("page_size", [1, 3, 8])
def test_as_many_tokens_are_reused_as_any_ended_request_has_run(page_size: int) -> None:
    """To the token, wherever that is in a page; but of the page that a running request still fills, none."""
    rng = random.Random(page_size)
    driver = make(num_pages=2000, page_size=page_size, max_batch_tokens=40)
    stem = [rng.randrange(VOCABULARY) for _ in range(30)]
    kept: list[list[int]] = []  # what the cache must hold
    in_part = 0
    for request in range(60):
        prompt = stem[: rng.randrange(30)] + [rng.randrange(3) for _ in range(rng.randrange(1, 6))]
        expected = max((begins_alike(tokens, prompt[:-1]) for tokens in kept), default=0)
        assert driver.scheduler.caches.longest(prompt) == expected
        sequence = driver.add(request, prompt, 4)
        driver.step()
        assert sequence.cached == expected
        in_part += expected % page_size > 0
        kept.append(prompt[: len(prompt) // page_size * page_size])
        for _ in range(rng.randrange(5)):
            driver.step()
        ran = sequence.tokens[: len(sequence.tokens) - 1]
        if request in driver.live:
            ran = sequence.tokens[: sequence.computed]
            driver.cancel(request)
        else:
            assert driver.outputs[request] == expected_output(prompt, 4)
        kept.append(ran)
    assert in_part > 20 or page_size == 1
    driver.scheduler.check_idle()
    driver.scheduler.caches.forget()
    assert driver.scheduler.caches.pools[0].free == driver.scheduler.caches.total


@pytest.mark.parametrize("specs", [[WHOLE], [WHOLE, STATE]])
def test_prefixes_are_reused_under_the_same_salt_only(specs: list[Spec]) -> None:
    """Neither pages nor parts of pages nor states of another, whichever came first; and no salt is remembered for
    longer than its pages."""
    driver = make(num_pages=64, max_batch_tokens=64, specs=specs)
    cached = {}
    for request, salt in enumerate(("a", "", "b", "a", "", "b", "c")):
        sequence = driver.add(request, PROMPT, 3, sharing=Sharing(cache_salt=salt))
        assert driver.scheduler.caches.longest(PROMPT, salt) == cached.get(salt, 0)
        driver.finish_all()
        assert sequence.cached == cached.get(salt, 0)
        cached[salt] = driver.scheduler.caches.longest(PROMPT, salt)
        assert cached[salt] >= 16 and driver.outputs[request] == expected_output(PROMPT, 3)
    tree = driver.scheduler.caches.tree
    assert tree is not None and set(tree._roots) == {"", "a", "b", "c"}
    driver.scheduler.caches.forget()
    driver.scheduler.check_idle()
    assert not tree._roots and not tree.nodes


def test_a_page_that_is_copied_may_be_given_away_in_the_same_step() -> None:
    """To the newcomer itself, or to another that is admitted with it: the copy is read before anything is written."""
    driver = make(num_pages=6, max_batch_tokens=64)
    driver.add(1, PROMPT[:14], 1)  # four pages, of which the last is not full
    driver.finish_all()
    one, other = [*PROMPT[:13], 40], [7] * 7
    first, second = driver.add(2, one, 2), driver.add(3, other, 1)
    parts = driver.step()
    assert (first.cached, second.cached) == (13, 0) and len(parts.copies) == 1
    source = parts.copies[0][0]
    assert source in {page for part in parts.parts for page in part.tables[0]}, "the tree had to give it up"
    driver.finish_all()
    assert driver.outputs[2] == expected_output(one, 2) and driver.outputs[3] == expected_output(other, 1)


def test_pages_of_whole_sequences_are_copied_as_they_were() -> None:
    specs = {"a": PagedKV(2, 3), "b": Latent(5, 4), "c": Window(4, 2, 3)}
    groups = [CacheGroup(r, 4) for r in dict.fromkeys(map(kv_rule, specs.values()))]
    caches = Caches(specs, groups, 3, torch.float32)
    kept = [each for _, backend in caches.paged for each in (backend.cache.keys, backend.cache.values)]
    for each in kept:
        each.normal_()
    before = [each.clone() for each in kept]
    caches.copy(torch.tensor([(0, 2), (2, 0), (2, 3)]))
    for at, (each, was) in enumerate(zip(kept, before, strict=True)):
        pages = [0, 1, 2, 3, 4] if at >= 4 else [2, 1, 0, 2, 4]  # of five, the last of which is nobody's
        assert torch.equal(each.unflatten(1, (5, 3)), was.unflatten(1, (5, 3))[:, pages])


def test_a_fuller_page_takes_the_place_of_its_beginning() -> None:
    pool = PagePool(4)
    tree = PrefixTree([Rule()], [pool], 4)
    for tokens, nodes in (([1, 2], 1), ([1, 3], 2), ([1], 2), ([1, 2, 5], 2), ([1, 2, 5, 6], 2), ([1, 2, 5], 2)):
        held = pool.take(1)
        assert held is not None
        tree.insert(tokens, [held], part=True)
        pool.release(held)
        assert tree.nodes == nodes == pool.total - pool.free and tree.longest(tokens) == len(tokens)
    assert tree.match([1, 2, 7])[:3] == (0, [[]], 2) and tree.match([4])[2:] == (0, ABSENT)
    tree.insert([9, 9], [pool.take(1)])
    assert tree.longest([9, 9]) == 0, "a page that is still written"
    assert tree.evict(0, 4) == 2 and tree.nodes == 0 and pool.free == 3


WINDOW = Rule(window=5)


@pytest.mark.parametrize("rules", [[Rule()], [Rule(), WINDOW, Rule(state=True)]], ids=["pages", "all"])
def test_a_prompt_costs_the_tree_a_few_objects_however_long_it_is(rules: list[Rule]) -> None:
    """One object for each page would cost the controller milliseconds in a step with a long prompt, and garbage
    collections look through all that is cached.
    """
    pools = [PagePool(2000) for _ in rules]
    tree, prompt = PrefixTree(rules, pools, 2), list(range(1000))
    tables = [pool.take(1 if rule.state else 500) or [] for rule, pool in zip(rules, pools, strict=True)]
    gc.collect()
    before = len(gc.get_objects())
    tree.insert(prompt, tables)
    assert tree.nodes == 1 and len(gc.get_objects()) - before < 30
    other = [*prompt[:600], 7, *prompt[601:]]
    tree.insert(other, tables)
    assert tree.nodes == 3, "where they part, the run is cut"
    assert tree.longest(prompt) == tree.longest(other) == 1000
    assert tree.longest([*prompt[:600], 8, 8]) == (600 if len(rules) == 1 else 0), "no state is kept there"


def test_of_a_long_prefix_the_part_that_was_not_used_goes_first() -> None:
    pool = PagePool(12)
    tree, one, two = PrefixTree([Rule()], [pool], 2), [1] * 16, [2] * 8
    for tokens in (one, two):
        pages = pool.take(len(tokens) // 2)
        assert pages is not None
        tree.insert(tokens, [pages])
        pool.release(pages)
    held = tree.match([*one[:6], 3]).tables[0]
    assert tree.evict(0, 4) == 4 and (tree.longest(one), tree.longest(two)) == (8, 8)
    assert tree.evict(0, 2) == 2 and (tree.longest(one), tree.longest(two)) == (6, 6)
    assert tree.evict(0, 9) == 3 and (tree.longest(one), tree.longest(two)) == (6, 0), "the others are in use"
    pool.release(held)
    assert tree.evict(0, 9) == 3 and pool.free == 12


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
    for found in (tree.match([1, 1]), tree.match([3, 3, 5])):
        pool.release(found.tables[0])
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
    reused, (whole, window), *_ = tree.match(tokens)
    assert reused == 8 and whole == tables[0] and window == [ABSENT, ABSENT, *tables[1][2:]]
    assert tree.evict(1, 8) == 1, "two of three pages are in use"
    assert tree.longest(tokens) == 8 and tree.longest(tokens[:6]) == 0


def test_a_newcomer_goes_where_its_first_token_comes_soonest(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that wait count, however few the requests are; tokens of its own that are cached there do not."""
    world = World(model_dir, monkeypatch)
    with world.engine(attn_dp=2, ep=2) as engine:
        client = Client(engine)

        def together(*prompts: list[int]) -> list[int]:
            """Hand prompts over while a step of one row in group 0 runs; return the group of each."""
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


@pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 8, 9])
def test_a_window_keeps_what_later_rows_see_and_no_page_more(window: int) -> None:
    caches = CacheManager([CacheGroup(Rule(window=window), 40)], 4, prefix_cache=False)
    tokens = list(range(30))
    admitted = caches.admit(tokens, 1)
    assert admitted is not None
    allocation, _ = admitted
    for computed in range(1, len(tokens)):
        assert caches.grow(allocation, len(tokens), computed + 1)
        caches.advance(allocation, tokens, computed, keep=False)
        seen = range(max(0, computed - window + 1), computed + 1)  # by the next row
        pages = {page for page, held in enumerate(allocation.tables[0]) if held != ABSENT}
        assert pages == set(range(seen[0] // 4, seen[-1] // 4 + 1)), computed
