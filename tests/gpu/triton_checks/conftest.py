"""Where the checks run: on a GPU where there is one, else in Triton's interpreter.

`test_triton.py` starts pytest on this folder with TRITON_INTERPRET set, since Triton reads it when it is imported.
"""

from __future__ import annotations

import pytest
import torch
from triton import knobs
from triton.runtime import interpreter


def _index_of_one(tensor_class: type, scope: interpreter._LangPatchScope, patch=interpreter._patch_lang_tensor) -> None:
    patch(tensor_class, scope)
    # numpy 2.4 makes no int of an array that has dimensions, and the interpreter's bounds of loops have one.
    scope.set_attr(tensor_class, "__index__", lambda self: int(self.handle.data.item()))


interpreter._patch_lang_tensor = _index_of_one


@pytest.fixture
def device() -> torch.device:
    return torch.device("cpu" if knobs.runtime.interpret else "cuda")


@pytest.fixture(params=[0, 1])
def seed(request: pytest.FixtureRequest) -> int:
    torch.manual_seed(request.param)
    return request.param
