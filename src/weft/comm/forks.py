"""Guards against use in a forked child of objects that act for their process towards other ranks.

A fork copies a rank's counters, descriptors and mappings, but not its place among the ranks: a child that went on with
the copy would act as its parent.
"""

from __future__ import annotations

import os
from typing import Any, Self
from weakref import WeakSet


class ProcessBound:
    """Base class of objects that only the process that made them may use.

    In a forked child, each of them turns into a `Forked`.
    """

    fork_error: type[Exception]
    """Exception that every method raises in a forked child."""

    def __new__(cls, *_args: Any, **_options: Any) -> Self:
        instance = super().__new__(cls)
        _owned.add(instance)
        return instance

    def _forked(self, copy: Forked) -> None:
        """Turn into the copy, in a forked child."""
        contents = {"_held": self.__dict__}  # kept: closing its contents might tell other ranks that the parent is gone
        self.__dict__, self.__class__ = copy.__dict__ | contents, Forked  # type: ignore[assignment]


class Forked:
    """Copy of a parent's `kind` in a child that process `parent` forked: methods raise `error`, except `close`."""

    def __init__(self, kind: str, parent: int, error: type[Exception]):
        self._kind, self._parent, self._error = kind, parent, error

    def __getattr__(self, name: str) -> Any:
        raise self._error(
            f"{name}: this {self._kind} belongs to process {self._parent}, from which this process was forked; make "
            "another one here"
        )

    def close(self, *_arguments: Any) -> None:
        """Do nothing: only the process that made the object may leave."""


_owned: WeakSet[ProcessBound] = WeakSet()


def _after_fork() -> None:
    for instance in list(_owned):
        instance._forked(Forked(type(instance).__name__, os.getppid(), instance.fork_error))
    _owned.clear()


os.register_at_fork(after_in_child=_after_fork)
