"""JAX arrays and tracers: XLA runs the call, through its FFI."""

from __future__ import annotations

from typing import Any

import jax

from .._jax import forward
from ._base import Adapter, not_taken


class _Jax(Adapter):
    path = "traced"

    def forward(
        self,
        q: Any,
        k: Any,
        v: Any,
        kernel: str,
        causal: bool,
        window: tuple[int, int],
        scale: float | None,
        return_lse: bool,
        out: Any,
        stream: Any,
    ) -> Any:
        if out is not None:
            raise ValueError("out: JAX arrays are immutable, takes None with them")
        if stream is not None:
            raise ValueError("stream: XLA chooses the stream, takes None with JAX arrays")
        return forward(
            q, k, v, kernel=kernel, causal=causal, window=window, scale=scale, return_lse=return_lse
        )


_adapter = _Jax()


def resolve(kind: type, argument: str) -> Adapter:
    """The adapter for the array or tracer type ``kind``."""
    if not (issubclass(kind, (jax.Array, jax.core.Tracer))):
        not_taken(argument, f"a {kind.__module__}.{kind.__name__}", "pass a jax.Array")
    return _adapter
