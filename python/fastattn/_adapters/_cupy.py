"""CuPy arrays."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import cupy

from ._base import Adapter, DType, not_taken


@contextlib.contextmanager
def _place(like: Any, stream: int | None) -> Iterator[None]:
    """Makes the device of ``like`` current, where CuPy allocates and copies, and the stream."""
    launch = contextlib.nullcontext() if stream is None else cupy.cuda.ExternalStream(stream)
    with like.device, launch:
        yield


class _CuPy(Adapter):
    path = "no_sync"

    def empty_like(self, like: Any) -> Any:
        if like.device.id == cupy.cuda.runtime.getDevice():
            return cupy.empty_like(like)
        with like.device:
            return cupy.empty_like(like)

    def empty(self, like: Any, shape: tuple[int, ...], dtype: DType, stream: int | None) -> Any:
        with _place(like, stream):
            return cupy.empty(shape, like.dtype if dtype == "bfloat16" else dtype)

    def contiguous(self, array: Any, stream: int | None) -> Any:
        with _place(array, stream):
            return cupy.ascontiguousarray(array)

    def current_stream(self, device: int) -> int:
        return int(cupy.cuda.get_current_stream(device).ptr)


_adapter = _CuPy()


def resolve(kind: type, argument: str) -> Adapter:
    """The adapter for ``kind``, cupy.ndarray or a subclass."""
    if not issubclass(kind, cupy.ndarray):
        not_taken(argument, f"a {kind.__module__}.{kind.__name__}", "pass a cupy.ndarray")
    return _adapter
