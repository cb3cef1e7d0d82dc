"""Times of steps between measured points, and none outside."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from weft.planner.cost import cache_folder
from weft.tune.step_table import (
    QUANTILES,
    NotMeasured,
    StepShape,
    StepTable,
    best_of,
    extrapolate,
    interpolate,
    spread_of,
    table_path,
)


def decode_us(rows: float, context: float) -> float:
    return 100 + 10 * rows + 0.5 * rows * context


def mixed_us(rows: float, prompt: float, cached: float) -> float:
    return decode_us(rows, 10) + 7 * prompt + 0.25 * cached


TABLE = StepTable(
    {(n, c): decode_us(n, c) for n in (1, 4, 8) for c in (10, 50)},
    {(n, p, c): mixed_us(n, p, c) for n in (0, 8) for p in (1, 16, 64) for c in (0, 49)},
)


@pytest.mark.parametrize("shape", [StepShape(1, 10), StepShape(3, 20), StepShape(8, 50), StepShape(6, 10.5)], ids=str)
def test_decode_steps_lie_between_their_neighbours(shape: StepShape) -> None:
    assert TABLE.us(shape) == pytest.approx(decode_us(shape.decode, shape.context))


@pytest.mark.parametrize("shape", [StepShape(0, 0, 1), StepShape(0, 0, 40, 30), StepShape(5, 30, 17, 3)], ids=str)
def test_steps_with_prompts_add_the_contexts_of_their_decode_rows(shape: StepShape) -> None:
    rows, context = shape.decode, shape.context
    more = decode_us(rows, context) - decode_us(rows, 10) if rows else 0.0
    assert TABLE.us(shape) == pytest.approx(mixed_us(rows, shape.prompt, shape.cached) + more)


OUTSIDE = [
    StepShape(9, 20),
    StepShape(4, 9),
    StepShape(4, 51),
    StepShape(0, 0, 65),
    StepShape(0, 0, 8, 50),
    StepShape(9, 20, 8),
    StepShape(4, 51, 8),
]


@pytest.mark.parametrize("shape", OUTSIDE, ids=str)
def test_nothing_is_known_outside_of_the_grid(shape: StepShape) -> None:
    with pytest.raises(NotMeasured, match=f"^{shape}$"):
        TABLE.us(shape)


def test_a_table_covers_a_load_or_not() -> None:
    assert TABLE.holds([(1, 10), (8, 50)], [(0, 1, 0), (8, 64, 49)])
    assert not TABLE.holds([(9, 10)], []) and not TABLE.holds([], [(0, 65, 0)]) and not StepTable().holds([(1, 1)], [])


def test_a_grid_of_one_point_holds_it_alone() -> None:
    assert interpolate({(3.0,): 5.0}, (3,)) == 5.0
    for at in (2, 4):
        with pytest.raises(NotMeasured):
            interpolate({(3.0,): 5.0}, (at,))


def test_a_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "new" / "steps.json"
    assert StepTable.read(path) is None
    written = StepTable(TABLE.decode, TABLE.mixed, [0.1, -0.2], [0.9, 1.1], 1.5, {"layout": "attn_tp=2"})
    written.write(path)
    assert StepTable.read(path) == written
    path.write_text("{}")
    assert StepTable.read(path) is None


def test_more_layers_cost_the_difference_with_the_errors_of_both() -> None:
    """Errors of 1 % and 2 % in 4 and 8 layers are 4 % in 48, and less by 4 and 16."""
    assert extrapolate((50.0, 0.0), (90.0, 0.0), 11) == (490.0, 0.0)
    us, near = extrapolate((50.0, 0.01), (90.0, 0.02), 11)
    assert us == 490.0 and near == pytest.approx(math.hypot(500 * 0.01, 990 * 0.02) / 490)
    us, far = extrapolate((50.0, 0.01), (170.0, 0.02), 44 / 12)
    assert us == 490.0 and far < 0.7 * near
    assert extrapolate((50.0, 0.1), (40.0, 0.1), 11)[0] == 50.0  # many layers take no less


def test_the_error_is_that_of_nine_residuals_in_ten() -> None:
    assert StepTable().error == 0.0
    assert StepTable(residuals=[0.01 * (-1) ** i for i in range(19)] + [3.0]).error == pytest.approx(0.01)
    assert StepTable(residuals=[-0.3, 0.1]).error == pytest.approx(0.3)
    assert best_of([3.0, 2.0, 2.5]) == (2.0, pytest.approx(0.25)) and best_of([2.0]) == (2.0, 0.0)


def test_the_spread_is_that_of_single_steps_around_their_mean() -> None:
    found = spread_of([[10.0] * 98 + [30.0] * 2, [1.0] * 100])
    assert sum(found) / len(found) == pytest.approx(1.0) and max(found) == pytest.approx(30 / 10.4, rel=0.05)
    assert spread_of([[5.0]]) == [1.0] * QUANTILES
    table = StepTable(TABLE.decode, TABLE.mixed, factor=2.0)
    assert table.us(StepShape(4, 10)) == 2 * TABLE.us(StepShape(4, 10))


def test_each_layout_and_version_has_a_file() -> None:
    paths = {table_path({"weft": version, "layout": {"attn_tp": tp}}) for version in "12" for tp in (1, 2)}
    assert len(paths) == 4 and {path.parent for path in paths} == {cache_folder()}
