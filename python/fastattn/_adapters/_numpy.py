"""NumPy arrays, and those of any ndarray subclass that is plain memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from ._base import Adapter, DType, not_taken


class _NumPy(Adapter):
    path = "buffer"

    def empty_like(self, like: Any) -> Any:
        return np.empty_like(like, subok=False)

    def empty(self, like: Any, shape: tuple[int, ...], dtype: DType, stream: int | None) -> Any:
        # NumPy knows bfloat16 by the type that ml_dtypes registers, not by name.
        return np.empty(shape, like.dtype if dtype == "bfloat16" else dtype)

    def contiguous(self, array: Any, stream: int | None) -> Any:
        return np.ascontiguousarray(array)


_adapter = _NumPy()


def resolve(kind: type, argument: str) -> Adapter:
    """The adapter for the ndarray subclass ``kind``."""
    if issubclass(kind, np.ma.MaskedArray):
        not_taken(argument, "a masked array", "masked elements are not skipped: pass .filled(...)")
    return _adapter
