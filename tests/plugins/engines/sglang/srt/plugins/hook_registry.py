import functools
import pkgutil
from enum import Enum
from typing import ClassVar


class HookType(Enum):
    BEFORE = "before"
    AFTER = "after"
    AROUND = "around"


class HookRegistry:
    _hooks: ClassVar = {}

    @classmethod
    def register(cls, target, hook, hook_type=HookType.AFTER, *, source=None):
        cls._hooks[target] = hook, hook_type

    @classmethod
    def apply_hooks(cls):
        for target, (hook, kind) in cls._hooks.items():
            path, name = target.rsplit(".", 1)
            place = pkgutil.resolve_name(path)
            setattr(place, name, wrapped(getattr(place, name), hook, kind))


def wrapped(original, hook, kind):
    @functools.wraps(original)
    def call(*args, **kwargs):
        if kind is HookType.AROUND:
            return hook(original, *args, **kwargs)
        if kind is HookType.BEFORE:
            hook(*args, **kwargs)
        result = original(*args, **kwargs)
        if kind is HookType.AFTER:
            hook(result, *args, **kwargs)
        return result

    return call
