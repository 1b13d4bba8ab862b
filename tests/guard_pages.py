"""Calls a kernel of the host with memory behind and before its arrays that kills who touches it.

A process of its own, as an access where none is allowed ends it: ``guard_pages.py KERNEL DTYPE``
prints "untouched".
"""

from __future__ import annotations

import ctypes
import math
import mmap
import sys
from typing import Any

import numpy as np

import fastattn

PAGE = mmap.PAGESIZE
TILE = 128  # keys, at most, that a kernel may load together: with one that is seen, those beside it


def dtype_of(name: str) -> Any:
    if name != "bfloat16":
        return np.dtype(name)
    import ml_dtypes

    return np.dtype(ml_dtypes.bfloat16)


class Guarded:
    """Memory between two pages that nobody may touch."""

    def __init__(self, size: int) -> None:
        self.pages = math.ceil(size / PAGE)
        self.map = mmap.mmap(-1, (self.pages + 2) * PAGE)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        self.forbid(0, 1)
        self.forbid(self.pages + 1, 1)

    def forbid(self, first: int, count: int) -> None:
        """Takes pages away, counted from the guard at the start."""
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        if libc.mprotect(self.address + first * PAGE, count * PAGE, 0):
            raise OSError(ctypes.get_errno(), "mprotect")

    def place(self, values: np.ndarray, at_end: bool) -> np.ndarray:
        """The values, up against the guard at one end."""
        start = PAGE + (self.pages * PAGE - values.nbytes if at_end else 0)
        array = np.ndarray(values.shape, values.dtype, self.map, start)
        array[...] = values
        return array


def beside_the_arrays(kernel: str, dtype: Any) -> None:
    """No byte before the first element or behind the last, ragged lengths and rows included."""
    rng = np.random.default_rng(0)
    for m, n, d, dv in [(77, 90, 40, 24), (9, 65, 33, 7), (65, 64, 64, 64), (1, 3, 1, 130)]:
        shapes = [(1, 2, m, d), (1, 1, n, d), (1, 1, n, dv), (1, 2, m, dv)]
        values = [rng.standard_normal(s, np.float32).astype(dtype) for s in shapes]
        guards = [Guarded(x.nbytes) for x in values]
        for mask in ({}, {"causal": True}, {"window": (9, 3)}):
            wanted = fastattn.forward(*values[:3], kernel=kernel, **mask)
            for at_end in (False, True):
                q, k, v, out = (g.place(x, at_end) for g, x in zip(guards, values, strict=True))
                fastattn.forward(q, k, v, kernel=kernel, out=out, **mask)
                assert out.tobytes() == wanted.tobytes(), (m, n, d, dv, mask, at_end)


def keys_that_no_row_sees(kernel: str, dtype: Any) -> None:
    """Whatever tile they are in, if no row of the call sees a key of it."""
    rng = np.random.default_rng(0)
    m, n, d, window = 100, 1024, 64, (40, 0)
    hidden = (n - m - window[0]) // TILE * TILE
    values = [rng.standard_normal((1, 1, x, d), np.float32).astype(dtype) for x in (m, n, n)]
    wanted = fastattn.forward(
        values[0], *(x[:, :, hidden:] for x in values[1:]), kernel=kernel, window=window
    )
    placed = [values[0]]
    for x in values[1:]:
        guard = Guarded(x.nbytes)
        placed.append(guard.place(x, at_end=True))
        pages = hidden * x.strides[2] // PAGE
        assert pages >= 16
        guard.forbid(1, pages)
    for options in ({"window": window}, {"window": (window[0], -1), "causal": True}):
        out = fastattn.forward(*placed, kernel=kernel, **options)
        assert out.tobytes() == wanted.tobytes()


if __name__ == "__main__":
    kernel, dtype = sys.argv[1], dtype_of(sys.argv[2])
    beside_the_arrays(kernel, dtype)
    keys_that_no_row_sees(kernel, dtype)
    print("untouched")
