"""Steps on CPUs as recorded calls: the counterpart of CUDA graphs.

A step runs once while a recorder is active. Kernels (`weft.kernels.cpu_rows.run`) and exchanges of native transports
become one list, which one native call repeats with the same tensors. Other operators of torch, and exchanges in Python,
stay calls from Python, each with a copy of its result. Results lie in memory of the recorder, which reuses it within a
step and for all steps, like a pool of CUDA graphs.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast
from weakref import finalize

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.profiler import record_function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from weft.comm.transport import COLLECTIVE
from weft.kernels import cpu_rows
from weft.kernels.build import KernelError, model_kernels

aten = torch.ops.aten
UNFILLED = {aten.empty, aten.new_empty, aten.empty_like, aten.empty_strided, aten.new_empty_strided}
VARYING = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.nondeterministic_seeded}
BYTES = torch.empty(0, dtype=torch.uint8)
PLACES = {torch.int64, torch.int32}
"""Dtypes of indices that are not masks."""
HOST_READS = {"tolist", "numpy", "item", "__bool__", "__int__", "__float__", "__index__", "__array__"}
"""Methods of tensors that give values to Python, some of them without an operator."""


class NotRecordable(RuntimeError):
    """Operation of a step that depends on values on the host. The message names it."""


class StepRecording:
    """A recorded step.

    Attributes:
        calls: (range in torch's profiler, number of a native call or a function) of each call.
        steps: functions that a replay calls: neighbouring native calls are one.
        kept: tensors of native calls that are not in the recorder's memory.
    """

    def __init__(self, recorder: Recorder):
        self.recorder, self.steps, self.kept = recorder, list[Callable[[], object]](), list[Tensor]()
        self.calls: list[tuple[str, int | Callable[[], object]]] = []

    def finish(self) -> None:
        """Find `steps`."""
        for native, calls in itertools.groupby((call for _, call in self.calls), lambda call: isinstance(call, int)):
            found: list[Any] = list(calls)
            self.steps += [self.recorder.repeated(found[0], found[-1] + 1)] if native else found

    def replay(self) -> None:
        """Repeat the step. Under torch's profiler each call is a range of its own."""
        try:
            if not torch._C._autograd._profiler_enabled():
                for step in self.steps:
                    step()
                return
            for name, call in self.calls:
                with record_function(name):
                    (self.recorder.repeated(call, call + 1) if isinstance(call, int) else call)()
        except KernelError as error:
            self.recorder.explain(error)
            raise


class HostReads(TorchFunctionMode):
    """Refusal of reads by Python while a recorder is not paused."""

    def __init__(self, recorder: Recorder):
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self._recorder.paused and (name := getattr(func, "__name__", "")) in HOST_READS:
            raise NotRecordable(f"Tensor.{name} reads values on the host")
        return func(*args, **(kwargs or {}))


class Recorder(TorchDispatchMode):
    """Recorder of a rank's steps, used on one thread.

    Attributes:
        explain: raises the error that a native call's error means; set by a transport.
        paused: calls are not recorded.
    """

    _should_skip_dynamo = classmethod(lambda cls: False)  # torch's compiler would be imported: 2 s of a rank's start

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kernels, self.paused = model_kernels(), False
        self._handle = self._kernels.recorder()
        finalize(self, self._kernels.forget_recorder, self._handle)
        self._blocks = set[int]()  # addresses of all tensors ever made in its memory
        self._made = StepRecording(self)
        self.explain: Callable[[KernelError], object] = lambda error: None

    @property
    def bytes(self) -> int:
        """Bytes of memory that all recorded steps share."""
        return int(self._kernels.recorder_bytes(self._handle))

    def repeated(self, begin: int, end: int) -> Callable[[], object]:
        """Return a function that makes native calls begin … end − 1."""
        return partial(self._kernels.repeat, self._handle, begin, end)

    @contextmanager
    def recording(self) -> Iterator[StepRecording]:
        """Record all calls inside the context. Raises NotRecordable."""
        self._made, cpu_rows.recorders.note = StepRecording(self), self._note
        try:
            with self, HostReads(self):
                yield self._made
        finally:
            cpu_rows.recorders.note = None
        self._made.finish()

    @contextmanager
    def _pause(self) -> Iterator[None]:
        before, self.paused = self.paused, True
        try:
            yield
        finally:
            self.paused = before

    def noted(self, name: str, function: Callable[..., Any], seen: Callable[..., object] = lambda *args: None) -> Any:
        """Return a native collective, called `name`, that is recorded as it runs. Its results are copied.

        function: returns a tensor or None. seen: called with the arguments of each call.
        """

        def run(*args: object) -> Any:
            with self._pause():
                found = function(*args)
                kept = None if found is None else self._copied(found)
            seen(*args)
            self._note(f"{COLLECTIVE}{name}", function, args, kept)
            return kept

        return run

    def call(self, function: Callable[..., Any], *args: Any, **more: Any) -> Any:
        """Run a transport's function, which is recorded as one call of Python; return copies of its tensors."""
        with self._pause():
            found, again = function(*args, **more), partial(function, *map(self.borrowed, args), **more)
            return self._again(f"{COLLECTIVE}{function.__name__}", again, found, tree_leaves(found))

    def _note(self, name: str, function: Any, args: Sequence[object], result: Tensor | None = None) -> None:
        if self.paused:
            return
        self._made.kept += [x for x in args if isinstance(x, Tensor) and _address(x) not in self._blocks]
        with self._pause():
            self._made.calls.append((name, self._kernels.note(self._handle, function, list(args), result)))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.paused or func.namespace == "profiler":
            return func(*args, **kwargs)
        by_place = func.overloadpacket is aten.index and all(i is None or i.dtype in PLACES for i in args[1])
        if not VARYING.isdisjoint(func.tags) and not by_place:
            raise NotRecordable(f"{func} depends on values")
        found = func(*args, **kwargs)
        if func.overloadpacket in UNFILLED:
            return self._unfilled(found)
        given = {_address(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        fresh = [x for x in tree_leaves(found) if isinstance(x, Tensor) and _address(x) not in given]
        if not fresh and (not func._schema.is_mutable or torch.Tag.inplace_view in func.tags):
            return found  # a view
        args, kwargs = tree_map(self.borrowed, (args, kwargs))
        return self._again(str(func), partial(func, *args, **kwargs), found, fresh)

    def _again(self, name: str, call: Callable[[], Any], found: Any, fresh: Sequence[Tensor]) -> Any:
        """Note a call from Python; return its result with copies of the `fresh` tensors."""
        of = {id(x): self._copied(x) for x in fresh}
        places = [(i, self.borrowed(of[id(x)])) for i, x in enumerate(tree_leaves(found)) if id(x) in of]
        alone = places[0][1] if isinstance(found, Tensor) and places else None

        def again() -> None:
            found = call()
            if alone is not None:
                alone.copy_(found)
            elif places:
                leaves = tree_leaves(found)
                for i, to in places:
                    to.copy_(leaves[i])

        self._made.calls.append((name, again))
        return tree_map(lambda x: of.get(id(x), x), found)

    def _unfilled(self, like: Tensor) -> Tensor:
        """Return a tensor in the recorder's memory, of like's shape, strides and dtype."""
        made = self._kernels.recorder_empty(self._handle, like.numel() * like.element_size(), BYTES).view(like.dtype)
        self._blocks.add(_address(made))
        return cast(Tensor, made.as_strided(like.shape, torch.empty_like(like).stride()))

    def _copied(self, x: Tensor) -> Tensor:
        return self._unfilled(x).copy_(x)

    def borrowed(self, x: Any) -> Any:
        """Return a tensor that does not keep its part of the recorder's memory from reuse; other values unchanged."""
        if not isinstance(x, Tensor) or not x.numel() or _address(x) not in self._blocks:
            return x
        memory = (ctypes.c_char * x.untyped_storage().nbytes()).from_address(_address(x))
        whole = torch.frombuffer(memory, dtype=x.dtype, count=len(memory) // x.element_size())
        return whole.as_strided(x.shape, x.stride(), x.storage_offset())


def _address(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()
