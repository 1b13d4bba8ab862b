"""What ``kernels()`` says of each kernel."""

from __future__ import annotations

import pytest

import fastattn

EVERY = [*fastattn.kernels(), *fastattn.kernels(emulated=True)]


@pytest.mark.parametrize("kernel", EVERY, ids=lambda kernel: f"{kernel.name}-{kernel.backend}")
def test_arithmetic_tells_of_every_dtype(kernel: fastattn.KernelInfo) -> None:
    assert kernel.dtypes
    for dtype in kernel.dtypes:
        assert dtype in kernel.arithmetic
    # Nothing that is not taken is promised.
    for dtype in {"float32", "float16", "bfloat16"} - set(kernel.dtypes) - {"float32"}:
        assert dtype not in kernel.arithmetic
