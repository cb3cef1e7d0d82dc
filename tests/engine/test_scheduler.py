"""One group's scheduler against a device whose tokens depend on everything read back through the page tables."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import groupby, pairwise
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.fake import VOCABULARY, Driver, expected_output, next_token
from speculation.toy import FixedPrices
from weft.engine.kv.cache_spec import PagedKV, Recurrent, Spec, Window, cache_groups
from weft.engine.kv.manager import CacheManager
from weft.engine.messages.rank_messages import GroupRows
from weft.engine.messages.request import Sharing
from weft.engine.scheduler.scheduled import Scheduled
from weft.engine.scheduler.scheduler import PAGES_AHEAD, Scheduler
from weft.engine.speculation.drafting import Speculation

WHOLE, STATE = PagedKV(1, 1), Recurrent(((1,),))
SPECS = [
    [WHOLE],
    [WHOLE, STATE],
    [WHOLE, Window(5, 1, 1)],
    [STATE],
    [Window(1, 1, 1), STATE],
    [Window(7, 1, 1), WHOLE, Window(2, 1, 1), STATE],
]


class RandomDrafts:
    """Drafts that are right with a chance, for the fake model."""

    def __init__(self, rng: random.Random, chance: float = 0.6):
        self.rng, self.chance = rng, chance

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        known = list(tokens)
        for _ in range(self.rng.randrange(count + 1) if 0 < self.chance < 1 else count):
            known.append(next_token(known) if self.rng.random() < self.chance else VOCABULARY)
        return known[len(tokens) :]


def drafts_of(rng: random.Random, count: int, chance: float = 0.6) -> Speculation:
    """Return up to `count` drafts a row, for a fixed price."""
    speculation = Speculation(RandomDrafts(rng, chance), count, 64)
    speculation.prices = FixedPrices()  # type: ignore[assignment]
    return speculation


DEPENDS_ON_OUTPUT: dict[str, Any] = dict(presence_penalty=1.0)  # of which the fake model takes no notice
SCORED: dict[str, Any] = dict(prompt_logprobs=0)


def make(**changes: Any) -> Driver:
    values = dict(num_pages=16, page_size=4, max_batch_tokens=16, max_running=4, prefix_cache=True) | changes
    pages, prefix_cache, page_size = (values.pop(name) for name in ("num_pages", "prefix_cache", "page_size"))
    ahead, driver = values.pop("ahead", False), values.pop("driver", Driver)
    groups = cache_groups(
        values.pop("specs", [PagedKV(1, 1)]),
        page_size=page_size,
        kv_tokens=pages * page_size,
        max_running=values["max_running"],
        max_batch_tokens=values["max_batch_tokens"],
        prefix_cache=prefix_cache,
    )
    return driver(Scheduler(CacheManager(groups, page_size, prefix_cache=prefix_cache), **values), ahead)


def random_prompt(rng: random.Random, stems: list[list[int]], longest: int) -> list[int]:
    """Often a cut of a common stem, so that prefixes are shared and diverge within pages."""
    stem = rng.choice(stems)[: rng.randrange(longest)] if rng.random() < 0.7 else []
    tail = [rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, 6))]
    return (stem + tail)[:longest]


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num_pages=st.integers(4, 24),
    page_size=st.sampled_from([1, 2, 3, 4, 8]),
    max_running=st.integers(1, 6),
    spare_rows=st.integers(0, 12),
    mixed=st.floats(0, 1),
    prefix_cache=st.booleans(),
    specs=st.sampled_from(SPECS),
    ahead=st.booleans(),
    drafts=st.integers(0, 4),
)
@example(22065638, 9, 4, 1, 11, 1.0, True, [Window(1, 1, 1), STATE], False, 0)  # held pages that no row sees
def test_random_traffic_gets_what_each_request_alone_would(
    seed: int,
    num_pages: int,
    page_size: int,
    max_running: int,
    spare_rows: int,
    mixed: float,
    prefix_cache: bool,
    specs: list[Spec],
    ahead: bool,
    drafts: int,
) -> None:
    """Chunked prompts, prefix hits, preemption and cancellation at random points, in caches that are far too small.

    Also with every step scheduled before the tokens of the one before are known, by which some requests must wait;
    with prompts that are scored, each token once; and with drafts.
    """
    rng = random.Random(seed)
    capacity = num_pages * page_size
    driver = make(
        num_pages=num_pages,
        page_size=page_size,
        max_running=max_running,
        max_batch_tokens=max_running + spare_rows,
        mixed_batch_tokens=max_running + int(mixed * spare_rows),
        prefix_cache=prefix_cache,
        specs=specs,
        ahead=ahead,
        speculation=drafts_of(rng, drafts) if drafts and STATE not in specs else None,
    )
    stems = [[rng.randrange(VOCABULARY) for _ in range(capacity)] for _ in range(2)]
    expected: dict[int, list[int]] = {}
    for request in range(20):
        prompt = random_prompt(rng, stems, capacity - 1)
        max_tokens = rng.randrange(1, min(12, capacity - len(prompt)) + 1)
        end_ids = frozenset(rng.sample(range(VOCABULARY), 3)) if rng.random() < 0.3 else frozenset()
        expected[request] = expected_output(prompt, max_tokens, end_ids)
        options = rng.choice([{}, {}, DEPENDS_ON_OUTPUT, SCORED, DEPENDS_ON_OUTPUT | SCORED])
        sharing = Sharing(priority=rng.choice([0, 0, -1, 1]), cache_salt=rng.choice(["", "", "salt"]))
        driver.add(request, prompt, max_tokens, end_ids, sharing, **options)
        for _ in range(rng.randrange(4)):
            if driver.live:
                driver.step()
        if driver.live and rng.random() < 0.25:
            victim = rng.choice(sorted(driver.live))
            got = driver.cancel(victim)
            assert got == expected.pop(victim)[: len(got)]
    driver.finish_all()
    assert driver.outputs == expected
    driver.scheduler.check_idle()


def test_traffic_of_that_kind_preempts_shares_and_cuts_prompts() -> None:
    """The random test above is worth something only if these happen in it."""
    rng = random.Random(0)
    driver = make(num_pages=10, max_batch_tokens=6)
    stems = [[rng.randrange(VOCABULARY) for _ in range(40)]]
    cached = cut = 0
    sequences = []
    for request in range(30):
        sequences.append(driver.add(request, random_prompt(rng, stems, 20), 12))
        rows = driver.step()
        cut += any(not p.samples for p in rows.parts)
    driver.finish_all()
    cached = sum(s.cached or 0 for s in sequences)
    assert driver.scheduler.preemptions > 5 and cached > 20 and cut > 5
    driver.scheduler.check_idle()


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("num_pages", [11, 40])
def test_a_decode_row_with_drafts_gets_what_rows_of_one_token_would(num_pages: int, ahead: bool) -> None:
    """Rows of up to three tokens in one step, with prompts among them, also where pages are few and rows repeat."""
    rng, counts = random.Random(num_pages), set[int]()
    speculation = drafts_of(rng, 2)
    driver = make(num_pages=num_pages, ahead=ahead, max_batch_tokens=9, speculation=speculation)
    prompts = {request: [rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, 14))] for request in range(9)}
    for request, prompt in prompts.items():
        driver.add(request, prompt, 17)
    while driver.live or driver.in_flight:
        counts |= {part.rows for part in driver.step().parts if part.tokens is None}
    assert driver.outputs == {request: expected_output(prompt, 17) for request, prompt in prompts.items()}
    assert counts == {1, 2, 3} and (num_pages == 40) == (driver.scheduler.preemptions == 0)
    assert 0 < sum(speculation.accepted) < sum(speculation.drafted)
    driver.scheduler.check_idle()


def test_drafts_leave_a_row_to_each_sequence_that_decodes() -> None:
    driver = make(max_batch_tokens=4, max_running=2, speculation=drafts_of(random.Random(3), 3, 1.0))
    for request in range(2):
        driver.add(request, [request, 3], 12)
    driver.step()
    assert [part.rows for part in driver.step().parts] == [3, 1]
    assert driver.outputs == {} and len(driver.live[0].tokens) == 2 + 1 + 3 and len(driver.live[1].tokens) == 2 + 2


def test_a_sequence_pauses_while_its_drafts_are_rejected_and_steps_overlap_and_repeat_then() -> None:
    speculation = drafts_of(random.Random(3), 2, 0.0)
    driver = make(num_pages=256, page_size=16, max_batch_tokens=40, ahead=True, speculation=speculation)
    driver.add(0, [1, 2, 3], 300)
    drafted, ahead = list[bool](), list[bool]()
    while driver.live or driver.in_flight:
        parts = driver.step().parts
        drafted.append(any(part.drafts for part in parts))
        ahead.append(bool(driver.in_flight))
    runs = [(drafts, [at for at, _ in steps]) for drafts, steps in groupby(enumerate(drafted, 1), lambda s: s[1])]
    assert [(steps[0], len(steps)) for drafts, steps in runs if drafts] == [(2, 12), (32, 4), (128, 4), (256, 4)]
    assert not any(one and other for one, other in zip(drafted, ahead, strict=True)) and sum(ahead) > 200
    assert driver.outputs[0] == expected_output([1, 2, 3], 300)


def test_a_long_prompt_is_cut_and_does_not_stop_those_that_decode() -> None:
    driver = make(num_pages=64, max_batch_tokens=8)
    driver.add(1, [1, 2, 3], 30)
    driver.step()
    driver.add(2, list(range(40)), 2)
    chunks = []
    while 2 in driver.live:
        rows = {p.request: p.rows for p in driver.step().parts}
        assert rows[1] == 1
        chunks.append(rows[2])
    assert chunks == [7, 7, 7, 7, 7, 5, 1]


def test_a_step_in_which_somebody_decodes_is_shorter() -> None:
    """Prompts alone get whole steps, also those that come after the last output has ended."""
    driver = make(num_pages=64, max_batch_tokens=16, mixed_batch_tokens=6)
    driver.add(1, list(range(20)), 3)
    driver.add(2, list(range(40)), 2)
    steps = []
    while driver.live:
        steps.append({p.request: p.rows for p in driver.step().parts})
    assert steps == [{1: 16}, {1: 4, 2: 12}, {1: 1, 2: 5}, {1: 1, 2: 5}, {2: 16}, {2: 2}, {2: 1}]
    driver = make(num_pages=64, max_batch_tokens=16, mixed_batch_tokens=6)
    driver.add(1, list(range(20)), 3)
    assert [driver.scheduler.schedule(decodes).rows.count for decodes in (True, False)] == [6, 14], "of another group"


def test_equal_prefixes_are_computed_once() -> None:
    driver = make(num_pages=64, max_batch_tokens=64)
    prompt = list(range(18))
    driver.add(1, prompt, 3)
    driver.finish_all()
    for request, text, cached in [(2, prompt, 17), (3, prompt[:16], 15), (4, [*prompt[:9], 49, 49], 9), (5, [9], 0)]:
        sequence = driver.add(request, text, 3)
        rows = driver.step()
        assert (sequence.cached, rows.count) == (cached, len(text) - cached)
        driver.finish_all()
        assert driver.outputs[request] == expected_output(text, 3)


def test_an_output_is_a_prefix_of_the_next_turn() -> None:
    driver = make(num_pages=64, max_batch_tokens=64)
    driver.add(1, [1, 2, 3], 14)
    driver.finish_all()
    number = [1, 2, 3, *driver.outputs[1], 7]
    sequence = driver.add(2, number, 1)
    driver.finish_all()
    assert sequence.cached == 16  # the last sampled token never ran: 16 of 17 are in the cache


def test_when_pages_run_out_the_newest_is_preempted_and_comes_back_in_order() -> None:
    driver = make(num_pages=6, prefix_cache=False)
    for request in (1, 2, 3):
        driver.add(request, [request] * 7, 9)
    driver.step()
    assert [s.request for s in driver.scheduler.running] == [1, 2, 3]
    seen = []
    while driver.live:
        driver.step()
        seen.append([s.request for s in driver.scheduler.running])
    assert all(order == sorted(order) for order in seen)
    assert seen.index([1, 2]) < len(seen) and driver.scheduler.preemptions > 0
    assert list(driver.outputs) == [1, 2, 3]
    driver.scheduler.check_idle()


def test_preempted_requests_go_before_those_that_never_ran() -> None:
    driver = make(num_pages=6, prefix_cache=False, max_running=3)
    for request in range(6):
        driver.add(request, [request] * 7, 9)
    while not driver.scheduler.preemptions:
        driver.step()
    assert [s.request for s in driver.scheduler.waiting] == [2, 3, 4, 5]
    driver.finish_all()
    assert list(driver.outputs) == sorted(driver.outputs)


def test_a_lower_priority_number_goes_first_and_is_preempted_last() -> None:
    """Equal numbers change nothing; no running request gives way to a waiting one."""
    driver = make(num_pages=6, prefix_cache=False, max_running=3)
    for request, priority in enumerate((5, -2, 5, 0, -2)):
        driver.add(request, [request] * 7, 9, sharing=Sharing(priority=priority))
    driver.step()
    assert [s.request for s in driver.scheduler.running] == [1, 4, 3]
    while not driver.scheduler.preemptions:
        driver.step()
    assert [s.request for s in driver.scheduler.waiting] == [3, 0, 2]
    late = driver.add(5, [5] * 7, 9, sharing=Sharing(priority=-3))
    assert driver.scheduler.waiting.first() is late
    while late.allocation is None:
        driver.step()
    assert driver.scheduler.running[0] is late, "it came last, and is the last to give way"
    driver.finish_all()
    assert [request for request in driver.outputs if request != 5] == [1, 4, 3, 0, 2]
    assert driver.outputs == {request: expected_output([request] * 7, 9) for request in range(6)}
    driver.scheduler.check_idle()


def test_cancelled_pages_are_free_before_the_next_step() -> None:
    driver = make(num_pages=8, prefix_cache=False)
    driver.add(1, list(range(28)), 4)
    driver.add(2, list(range(20)), 4)
    driver.step()
    assert [s.request for s in driver.scheduler.running] == [1]
    driver.cancel(1)
    assert driver.scheduler.caches.pools[0].free == 8
    assert {p.request for p in driver.step().parts} == {2}


def test_the_oldest_waiting_is_not_overtaken_by_smaller_ones() -> None:
    driver = make(num_pages=8, max_running=8, prefix_cache=False)
    driver.add(0, [1] * 15, 4)
    driver.step()
    driver.add(1, [2] * 27, 4)  # 7 of 8 pages: must wait for request 0
    admitted: list[int] = []
    for request in range(2, 20):
        driver.add(request, [request] * 2, 2)
        driver.step()
        admitted += [s.request for s in driver.scheduler.running if s.request not in admitted]
    assert admitted[:3] == [0, 1, 2]


def test_what_can_never_fit_is_refused() -> None:
    driver = make()
    with pytest.raises(ValueError, match="holds 64"):
        driver.add(1, [1] * 60, 5)
    driver.scheduler.check_idle()


def test_check_idle_sees_a_leak() -> None:
    driver = make()
    driver.add(1, [1] * 9, 2)
    driver.finish_all()
    driver.scheduler.check_idle()
    driver.scheduler.caches.pools[0].take(1)
    with pytest.raises(AssertionError):
        driver.scheduler.check_idle()


@pytest.mark.parametrize("ahead", [False, True])
def test_steps_between_two_pages_are_alike_until_somebody_comes_or_goes(ahead: bool) -> None:
    """Sequences begin new pages at different steps, and take them together: several of each where they are free."""
    driver, rows = make(num_pages=128, page_size=8, ahead=ahead), list[GroupRows]()
    schedule = driver.scheduler.schedule

    def seen() -> Scheduled:
        scheduled = schedule()
        rows.append(scheduled.rows)
        return scheduled

    def steps(count: int) -> list[GroupRows]:
        rows.clear()
        for _ in range(count):
            driver.step()
        return list(rows)

    driver.scheduler.schedule = seen  # type: ignore[method-assign]
    prompts = [[7] * 3, [8] * 6, [9] * 5]
    for request, prompt in enumerate(prompts):
        driver.add(request, prompt, 120)
    pool, others = driver.scheduler.caches.pools[0], driver.others

    def leave(free: int) -> None:
        pool.release(others)
        others[:] = pool.take(pool.free - free) or []

    for pages, free in ((PAGES_AHEAD, 30), (1, 5)):
        leave(free)
        while not steps(1)[-1].entries:
            pass
        leave(free)
        cycle = steps(8 * pages)
        group_rows = [sum(len(e.values) for e in step.entries) for step in cycle]
        assert group_rows.count(3 * pages) == 1 and sum(group_rows) == 3 * pages
        assert sum(a is b for a, b in pairwise(cycle)) >= 8 * pages - 3
    pool.release(others)
    others.clear()
    while rows[-1] is not rows[-2] or rows[-1].entries:  # in the midst of steps that are alike
        driver.step()
    driver.add(3, [4], 20)
    assert [len(step.decode_rows) for step in steps(2)] == [3, 4], "a newcomer waits for no page"
    while rows[-1] is not rows[-2]:
        driver.step()
    begun = driver.cancel(1)
    assert [len(step.decode_rows) for step in steps(1)] == [3] and begun == expected_output(prompts[1], 120)[
        : len(begun)
    ]
    driver.finish_all()
    driver.scheduler.check_idle()
    assert driver.outputs == {
        0: expected_output(prompts[0], 120),
        2: expected_output(prompts[2], 120),
        3: expected_output([4], 20),
    }


@pytest.mark.parametrize("ahead", [False, True])
def test_no_row_runs_beyond_the_length_of_an_output(ahead: bool) -> None:
    driver = make(num_pages=64, page_size=8, ahead=ahead)
    lengths = [5, 14, 30]
    for request, length in enumerate(lengths):
        driver.add(request, [request] * (3 + 2 * request), length)
    ran = 0
    while driver.live or driver.in_flight:
        ran += sum(part.tokens is None for part in driver.step().parts)
    assert ran == sum(lengths) - len(lengths), "the first token of each is sampled after its prompt"


def test_what_sampling_needs_is_sent_in_every_step() -> None:
    driver = make(num_pages=64, page_size=8, ahead=True)
    driver.add(0, [1, 2], 20)
    driver.add(1, [3], 20, logprobs=0)
    driver.step()
    asked = [[at for at, _ in driver.scheduler.schedule().rows.adjust] for _ in range(6)]
    assert asked == [[1]] * 6


def test_pages_are_taken_ahead_while_others_wait_for_a_row() -> None:
    """Not for pages: what the next of them needs is left."""

    def steps_with_pages(waiting: int, pages: int) -> int:
        driver = make(num_pages=pages, page_size=8, max_running=3, prefix_cache=False)
        for request in range(3):
            driver.add(request, [request] * (3 + 2 * request), 100)
        if waiting:
            driver.add(3, [3] * waiting, 9)
        schedule, entries = driver.scheduler.schedule, list[bool]()

        def seen() -> Scheduled:
            scheduled = schedule()
            entries.append(bool(scheduled.rows.entries))
            return scheduled

        driver.scheduler.schedule = seen  # type: ignore[method-assign]
        for _ in range(60):
            driver.step()
        return sum(entries)

    assert steps_with_pages(0, 128) == steps_with_pages(20, 128) <= 3
    assert steps_with_pages(200, 40) > 10


def test_pages_are_not_taken_ahead_where_others_may_need_them() -> None:
    driver = make(num_pages=7, prefix_cache=False)
    for request, (prompt, length) in enumerate([(4, 3), (9, 17), (4, 3)]):
        driver.add(request, [request] * prompt, length)
    driver.finish_all()
    assert driver.scheduler.preemptions == 0
