"""When faults are heard, and the report of faults that are not, or too late."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from chaos.faults import Fault, Injections, Moment, table
from chaos.health import Health
from chaos.server_process import ServerError
from engine.conftest import WAIT_S

IN_ORDER: Any = SimpleNamespace(shuffle=lambda kinds: None, uniform=lambda low, high: 0.0, random=lambda: 0.0)


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chaos.faults.time", SimpleNamespace(monotonic=time.monotonic, sleep=lambda seconds: None))


def injections(
    fault: Fault, heard: Callable[[bool, float], float | None], count: int = 1, wait: Callable[[float], float] = float
) -> Injections:
    """Return the injections after `count` faults of a server. heard: reports of its health."""
    served: Any = SimpleNamespace(wait_healthy=wait)
    health: Any = SimpleNamespace(serving=True, heard=lambda serving, after, timeout_s=0.0: heard(serving, after))
    found = Injections(served, health, {"a fault": fault}, IN_ORDER, 3.0, lambda line: None)
    found.run(count)
    return found


def now() -> Moment:
    return Moment(time.monotonic())


def test_a_fault_is_heard_within_its_bound() -> None:
    found = injections(Fault(now, 1.0), lambda serving, after: after + 2.5, count=3)
    row = found.report()["a fault"]
    assert not found.trouble and row["count"] == 3 and row["heard_s"] == {"median": 2.5, "max": 2.5}
    assert row["served_s"]["max"] < WAIT_S
    lines = table({"a fault": row | {"served_s": {"median": 7.0, "max": 12.04}}, "of a client": row | {"heard_s": {}}})
    assert [line.split() for line in lines[:2]] == [
        ["fault", "count", "bound", "s", "heard", "s", "max", "served", "s", "max"],
        ["a", "fault", "3", "1", "2.5", "2.5", "7.0", "12.0"],
    ]


def test_a_bound_that_is_broken_is_trouble() -> None:
    found = injections(Fault(now, 1.0), lambda serving, after: after + 3.5)
    assert found.trouble == ["'a fault' was heard after 3.5 s, more than 3 × 1 s"]


def test_a_fault_that_nobody_hears_ends_the_run() -> None:
    found = injections(Fault(now, 1.0), lambda serving, after: None, count=3)
    assert found.trouble == ["after fault 1, a fault: 'a fault' was not heard within 60 s"]


def test_a_server_that_does_not_come_back_ends_the_run() -> None:
    def never(timeout_s: float) -> float:
        raise ServerError("/health still says restarting")

    found = injections(Fault(now, 1.0), lambda serving, after: after + 0.5, count=3, wait=never)
    assert found.trouble == ["after fault 1, a fault: /health still says restarting"]


@pytest.mark.parametrize("refused, heard, trouble", [(0.5, None, 0), (4.0, None, 1), (0.5, 0.6, 1)])
def test_what_must_disturb_nobody(refused: float, heard: float | None, trouble: int) -> None:
    def inject() -> Moment:
        return Moment(at := time.monotonic(), at + refused)

    found = injections(Fault(inject, 1.0, calm=True), lambda serving, after: heard and after + heard)
    assert len(found.trouble) == trouble and not found.report()["a fault"]["served_s"]


def test_health_notes_when_it_changes() -> None:
    said = [200, 503, 503, 200]

    def get(path: str) -> tuple[int, str]:
        if len(said) == 1:
            return said[0], ""
        if len(said) == 2:
            said.pop(0)
            raise OSError("nobody accepts")
        return said.pop(0), ""

    began = time.monotonic()
    health = Health(SimpleNamespace(get=get))  # type: ignore[arg-type]
    lost = health.heard(False, began, WAIT_S)
    assert lost is not None and lost > began
    back = health.heard(True, lost, WAIT_S)
    assert back is not None and back > lost and health.serving
    assert health.heard(False, back) is None and health.heard(False, began) == lost
    health.stop()
