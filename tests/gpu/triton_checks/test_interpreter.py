"""Properties of Triton's interpreter that the checks rely on."""

from __future__ import annotations

import numpy as np
import pytest
import triton.language as tl
from triton.runtime import interpreter

from gpu.triton_checks.worker import INTERPRETED

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="of the interpreter")


@pytest.mark.parametrize("of", [np.float32, np.float16])
@pytest.mark.parametrize("depth", [16, 64, 512])
def test_an_element_of_a_product_has_the_same_bits_whatever_the_shape(depth: int, of: type) -> None:
    rng = np.random.default_rng(depth)
    a, b = rng.standard_normal((32, depth)).astype(of), rng.standard_normal((depth, 64)).astype(of)

    def dot(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        sums = np.zeros((*a.shape[:-1], b.shape[-1]), np.float32)
        dtype = tl.float16 if of is np.float16 else tl.float32
        handles = [interpreter.TensorHandle(x, t) for x, t in ((a, dtype), (b, dtype), (sums, tl.float32))]
        return interpreter.interpreter_builder.create_dot(*handles, tl.constexpr("ieee"), 0).data

    whole = dot(a, b)
    assert np.allclose(whole, a.astype(float) @ b.astype(float), rtol=1e-4, atol=1e-4)
    for rows, columns in ((1, 1), (1, 64), (2, 16), (16, 2), (32, 1)):
        assert (dot(a[:rows], b[:, :columns]) == whole[:rows, :columns]).all(), (rows, columns)
        assert (dot(a[:rows], np.asfortranarray(b[:, :columns])) == whole[:rows, :columns]).all(), (rows, columns)
    assert (dot(np.stack([a, a]), np.stack([b, b])) == whole).all()
