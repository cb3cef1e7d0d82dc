"""Parametrisation by combinations of values: some by day, all of them at night."""

from __future__ import annotations

from collections.abc import Collection
from itertools import product
from typing import Any

import pytest


def in_pairs(names: str, *values: Collection[Any]) -> pytest.MarkDecorator:
    """Parametrise with all combinations of three parameters' values or more; by day with those that have each pair.

    names: of the parameters, by commas. values: of each parameter; the fewest of any are how many times fewer run by
    day.
    """
    cases, times = list[Any](), min(map(len, values))
    for numbered in product(*map(enumerate, values)):
        at, case = zip(*numbered, strict=True)
        cases.append(pytest.param(*case, marks=[pytest.mark.nightly] if sum(at) % times else []))
    return pytest.mark.parametrize(names, cases, ids=str)
