"""Triton's interpreter as the checks need it: faster, with FP8, and with the same bits on every processor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


def _index_of_one(tensor_class: type, scope: interpreter._LangPatchScope, patch=interpreter._patch_lang_tensor) -> None:
    patch(tensor_class, scope)
    # numpy 2.4 makes no int of an array that has dimensions, and the interpreter's bounds of loops have one.
    scope.set_attr(tensor_class, "__index__", lambda self: int(self.handle.data.item()))


interpreter._patch_lang_tensor = _index_of_one


def _patch_once(fn: Callable[..., object], patch=interpreter._patch_lang) -> interpreter._LangPatchScope:
    """A launch patches the language; the interpreter would again at each call of a function in the kernel, for long."""
    langs = [value for value in fn.__globals__.values() if value is tl or value is tl.core]
    done = langs and not any(tl.core.is_builtin(lang.load) for lang in langs)
    return interpreter._LangPatchScope() if done else patch(fn)


interpreter._patch_lang = _patch_once

# Sums of integers are made again in 64 bits, to be compared, which is then left undone but in debug mode.
interpreter.interpreter_builder.options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)


_NUMBERS: dict[str, np.dtype] = {}


def _number_of(of: tl.dtype, else_=interpreter._get_np_dtype) -> np.dtype:
    if of.name not in _NUMBERS:
        _NUMBERS[of.name] = else_(of)
    return _NUMBERS[of.name]


# For every value the interpreter describes its type and shape with a dozen new objects, which takes half of its time.
# They are the same for all values of a type and a shape: made once. So values of one shape have the same object for it,
# and need not be compared dimension by dimension to find that none is to be broadcast.
_DESCRIBED: dict[tuple[str, ...], dict[str, object]] = {}
_OF_TENSOR: dict[tuple[int, ...], tuple[object, object]] = {}
_OF_SCALAR = tl.tuple([]), tl.constexpr(1)


def _describe_block(block: tl.block_type, element: tl.dtype, shape: object, make=tl.block_type.__init__) -> None:
    key = element.name, *map(int, shape)
    if key not in _DESCRIBED:
        make(block, element, shape)
        shape = tuple(key[1:])
        if shape not in _OF_TENSOR:
            _OF_TENSOR[shape] = tl.tuple([tl.constexpr(number) for number in shape]), tl.constexpr(block.numel)
        _DESCRIBED[key] = vars(block) | {"of_tensor": _OF_TENSOR[shape]}
    vars(block).update(_DESCRIBED[key])


def _describe_tensor(tensor: tl.tensor, handle: object, of: tl.dtype) -> None:
    tensor.handle, tensor.type, tensor.dtype = handle, of, of.scalar
    tensor.shape, tensor.numel = of.of_tensor if of.is_block() else _OF_SCALAR


def _broadcast(semantic: TritonSemantic, a: tl.tensor, b: tl.tensor, else_=TritonSemantic.broadcast_impl_value):
    return (a, b) if a.shape is b.shape else else_(semantic, a, b)


def _equal(a: tl.dtype, b: object, else_=tl.dtype.__eq__) -> bool:
    return a is b or else_(a, b)


def _call_directly(
    of: object, name: str, member: Callable[..., object], builder: object, scope: interpreter._LangPatchScope
) -> None:
    """Call a function of the language without the wrapper that requires what is given here."""
    semantic, called = TritonSemantic(builder), getattr(member, "__wrapped__", member)

    def call(*args: object, **named: object) -> object:
        named["_semantic"] = semantic
        return called(*args, **named)

    scope.set_attr(of, name, call)


tl.block_type.__init__, tl.tensor.__init__, tl.dtype.__eq__ = _describe_block, _describe_tensor, _equal
TritonSemantic.broadcast_impl_value = _broadcast
interpreter._get_np_dtype, interpreter._patch_attr = _number_of, _call_directly

FLOATS = {tl.float8e4nv: torch.float8_e4m3fn, tl.float16: torch.float16, tl.float32: torch.float32}
BITS = {8: torch.uint8, 16: torch.int16, 32: torch.int32}


def _convert_by_torch(values: np.ndarray, src: tl.dtype, dst: tl.dtype, mode: object, else_=interpreter._convert_float):
    """The interpreter's own conversions to FP8 round neither to even nor into the next power of two."""
    if tl.float8e4nv not in (src, dst) or not {src, dst} <= FLOATS.keys():
        return else_(values, src, dst, mode)
    found = torch.from_numpy(np.ascontiguousarray(values)).view(FLOATS[src]).float().to(FLOATS[dst])
    return found.view(BITS[dst.primitive_bitwidth]).numpy().view(f"uint{dst.primitive_bitwidth}")


interpreter._convert_float = _convert_by_torch


def _dot(builder: object, a: interpreter.TensorHandle, b: interpreter.TensorHandle, d: interpreter.TensorHandle, *_):
    """a · b + d, where the terms of every element are added in one order, as they are on GPUs.

    A library's product adds them in an order of its own for each shape, which is another on each processor.
    """
    left, right = (
        _convert_by_torch(x.data, x.dtype, tl.float16, None).view(np.float16) if x.dtype.is_fp8() else x.data
        for x in (a, b)
    )
    terms = np.swapaxes(left, -1, -2)[..., None].astype(d.data.dtype) * right[..., None, :].astype(d.data.dtype)
    while (count := terms.shape[-3]) > 1:  # a power of two
        terms = terms[..., : count // 2, :, :] + terms[..., count // 2 :, :, :]
    return interpreter.TensorHandle(terms[..., 0, :, :] + d.data, d.dtype.scalar)


interpreter.InterpreterBuilder.create_dot = _dot
