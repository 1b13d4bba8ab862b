"""Any other type that speaks DLPack."""

from __future__ import annotations

from typing import Any

import numpy as np

from ._base import Adapter, DType, Path, not_taken

_CPU = 1  # kDLCPU


class _Producer(Adapter):
    """Types with ``__dlpack__``: results come from the namespace of the array API standard."""

    path: Path = "stream"

    def empty(self, like: Any, shape: tuple[int, ...], dtype: DType, stream: int | None) -> Any:
        if hasattr(like, "__array_namespace__"):
            namespace = like.__array_namespace__()
            kind = like.dtype if dtype == "bfloat16" else getattr(namespace, dtype)
            return namespace.empty(shape, dtype=kind, device=like.device)
        if like.__dlpack_device__()[0] == _CPU and dtype != "bfloat16":
            return np.empty(shape, dtype)
        raise ValueError(
            f"out: got None, and {type(like).__qualname__} has no __array_namespace__ to allocate "
            "the result with; takes an array to write to"
        )


class _Exchange(_Producer):
    """Types with DLPack's C exchange API: it allocates, and names the current stream."""

    path = "exchange"


_exchange = _Exchange()
_producer = _Producer()


def resolve(kind: type, argument: str) -> Adapter:
    """The adapter for ``kind``, which belongs to no framework that we know by name."""
    if hasattr(kind, "__dlpack_c_exchange_api__"):
        return _exchange
    if hasattr(kind, "__dlpack__") and hasattr(kind, "__dlpack_device__"):
        return _producer
    package = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    not_taken(
        argument,
        f"a {package}{kind.__qualname__}",
        "takes an array that speaks DLPack (NumPy, torch, CuPy, JAX, ...): use numpy.asarray()",
    )
