"""The simulated load is the engine's: it has the steps of a real engine, and its clock sums their times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from engine.stub import World
from weft.engine.advise.candidates import Arrival, ClientLoad
from weft.engine.advise.simulate import NO_API, ApiTimes, Clients, LoadFigures, simulate
from weft.engine.config.config import EngineConfig
from weft.engine.kv.cache_spec import CacheGroup, Rule
from weft.tune.step_table import NotMeasured, StepShape

LOADS = [
    ClientLoad(20, 9, 3),
    ClientLoad(30, 12, 9),  # more clients than rows
    ClientLoad(60, 40, 6),  # the cache holds five requests, so some are preempted
    ClientLoad(40, 5, 4, 0.75),
]


def config_of(directory: Path, **changes: object) -> EngineConfig:
    values = dict(kv_tokens=512, page_size=4, max_batch_tokens=16, max_running=8)
    return EngineConfig(**dict(model=directory) | values | changes)  # type: ignore[arg-type]


def simulated(config: EngineConfig, load: ClientLoad, requests: int, us: float = 1000.0) -> LoadFigures:
    groups = (CacheGroup(Rule(), config.num_pages),)
    return simulate(config, groups, load, lambda shapes: us, requests)


def test_prompts_are_random_numbers_of_the_standard_library() -> None:
    for vocabulary in (1, 256, 1000):
        clients, random = Clients(LOADS[0], 1, vocabulary, lambda: 0.0, seed=3), Random(3)
        assert clients._tokens(99) == [random.randrange(vocabulary) for _ in range(99)]


def test_a_simulation_plans_no_steps(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.engine.controller.executor.check_plans", lambda *_: pytest.fail("steps were planned"))
    assert simulated(config_of(model_dir), LOADS[0], 4).steps


@pytest.mark.parametrize("load", LOADS, ids=str)
@pytest.mark.parametrize("attn_dp", [1, 2])
def test_steps_are_those_of_an_engine(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, load: ClientLoad, attn_dp: int
) -> None:
    requests = 4 * load.concurrency
    world = World(model_dir, monkeypatch)
    with world.engine(attn_dp=attn_dp, max_choices=64) as engine:
        clients = Clients(load, requests, engine.model_config.vocab_size, lambda: 0.0)
        clients.submit = engine.submit_all
        clients.begin()
        assert clients.ended.wait(60)
        preemptions = engine.stats().preemptions
    found = simulated(config_of(model_dir, attn_dp=attn_dp), load, requests)
    assert (found.steps, found.preemptions) == (len(world.steps), preemptions)


def test_one_load_preempts(model_dir: Path) -> None:
    """The comparison above is worth something only if this happens in it."""
    assert simulated(config_of(model_dir), LOADS[2], 24).preemptions > 0


def test_the_clock_sums_the_steps(model_dir: Path) -> None:
    """A client alone: three chunks of its prompt, then a step per token."""
    found = simulated(config_of(model_dir), ClientLoad(40, 5, 1), 4, us=2000.0)
    assert found.ttft_ms == (pytest.approx(6.0), pytest.approx(6.0)) and found.itl_ms[1] == pytest.approx(2.0)
    assert found.seconds == pytest.approx(found.steps * 2e-3) and found.steps == 4 * (3 + 4)
    assert found.tokens_s == pytest.approx(4 * 5 / found.seconds)


def test_the_server_reads_requests_one_after_the_other(model_dir: Path) -> None:
    """Three clients that begin at once: the last one is read after three requests, and tokens follow one another."""
    config, load = config_of(model_dir), ClientLoad(5, 5, 3)
    groups = (CacheGroup(Rule(), config.num_pages),)

    def found(api: ApiTimes) -> LoadFigures:
        return simulate(config, groups, load, lambda shapes: 1000.0, 3, api)

    free, api, crowded = map(found, (NO_API, ApiTimes(2000.0, 100.0), ApiTimes(2000.0, 100.0, crowded=True)))
    assert free.ttft_ms[1] == pytest.approx(1.0) and api.ttft_ms[1] > 2000.0 * 3 / 1e3 > 2 * free.ttft_ms[1]
    assert free.tokens_s > api.tokens_s > crowded.tokens_s and crowded.itl_ms[0] > api.itl_ms[0]


def test_the_controller_delays_steps_that_do_not_hide_it(model_dir: Path) -> None:
    """Three requests and their tokens cost 3 x 500 µs and 3 x 100 µs a step: with free cores only before an idle rank,
    otherwise each step loses it."""
    config, load = config_of(model_dir), ClientLoad(5, 5, 3)
    groups = (CacheGroup(Rule(), config.num_pages),)
    free, hidden, crowded = (
        simulate(config, groups, load, lambda shapes: 1000.0, 3, api)
        for api in (NO_API, ApiTimes(500.0, 100.0, http=False), ApiTimes(500.0, 100.0, crowded=True, http=False))
    )
    assert free.ttft_ms == (pytest.approx(1.0), pytest.approx(1.0)) and free.itl_ms[0] == pytest.approx(1.0)
    assert hidden.ttft_ms == (pytest.approx(2.5), pytest.approx(2.5)) and hidden.itl_ms[0] == pytest.approx(1.0)
    assert crowded.ttft_ms[0] == pytest.approx(2.5) and crowded.itl_ms[1] == pytest.approx(1.3)
    assert free.steps == hidden.steps == crowded.steps


def test_recorded_requests_arrive_at_their_times(model_dir: Path) -> None:
    """The clock skips to the next request where none runs."""
    config = config_of(model_dir)
    load = ClientLoad.recorded([Arrival(7.0, 8, 3), Arrival(9.0, 12, 2), Arrival(9.0, 4, 2)])
    found = simulate(config, (CacheGroup(Rule(), config.num_pages),), load, lambda shapes: 1000.0, 0)
    assert found.seconds == pytest.approx(2.0 + 2e-3) and found.steps == 3 + 2
    assert found.ttft_ms == (pytest.approx(1.0), pytest.approx(1.0))
    assert load.per_server(2).arrivals == (Arrival(0.0, 8, 3), Arrival(2.0, 4, 2)) and load.shortest == 4


def test_a_server_reads_recorded_requests_that_arrive_when_none_runs(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock skips to the arrival, and then to the end of its reading."""
    monkeypatch.setattr("weft.engine.advise.simulate.WAIT_S", 20.0)
    config, api = config_of(model_dir), ApiTimes(2000.0, 100.0)
    load = ClientLoad.recorded([Arrival(at, 8, 1) for at in (0.0, 1.0, 5.0)])
    found = simulate(config, (CacheGroup(Rule(), config.num_pages),), load, lambda shapes: 1000.0, 0, api)
    assert found.ttft_ms == (pytest.approx(3.1), pytest.approx(3.1)) and found.seconds == pytest.approx(5.003)


def test_slower_steps_and_more_clients_raise_latencies(model_dir: Path) -> None:
    config = config_of(model_dir)
    one, twice = (simulated(config, LOADS[0], 12, us) for us in (1000.0, 2000.0))
    assert twice.tokens_s == pytest.approx(one.tokens_s / 2) and twice.ttft_ms[0] == pytest.approx(2 * one.ttft_ms[0])
    crowded = simulated(config, replace(LOADS[0], concurrency=20), 40)
    assert crowded.ttft_ms[0] > one.ttft_ms[0] and crowded.tokens_s > one.tokens_s


def test_a_shared_prefix_saves_steps(model_dir: Path) -> None:
    config, load = config_of(model_dir), LOADS[3]
    shared, own = (simulated(config, each, 16) for each in (load, replace(load, shared_prefix=0.0)))
    assert shared.steps < own.steps
    assert simulated(replace(config, prefix_cache=False), load, 16).steps == own.steps


def test_steps_have_the_rows_and_tokens_of_their_sequences(model_dir: Path) -> None:
    seen: list[StepShape] = []

    def us(shapes: Sequence[StepShape]) -> float:
        seen.extend(shapes)
        return 1.0

    config = config_of(model_dir)
    simulate(config, (CacheGroup(Rule(), config.num_pages),), ClientLoad(20, 4, 1), us, 1)
    chunks = [StepShape(0, 0.0, 16, 0.0), StepShape(0, 0.0, 4, 16.0)]
    assert seen == [*chunks, *(StepShape(1, float(context)) for context in (20, 21, 22))]


def test_a_step_without_a_time_makes_the_figures_unknown(model_dir: Path) -> None:
    def us(shapes: Sequence[StepShape]) -> float:
        if shapes[0].prompt:
            raise NotMeasured(str(shapes[0]))
        return 1.0

    config = config_of(model_dir)
    found = simulate(config, (CacheGroup(Rule(), config.num_pages),), ClientLoad(20, 4, 1), us, 1)
    assert "prompt rows" in found.unknown
