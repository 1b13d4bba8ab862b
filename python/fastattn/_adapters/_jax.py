"""JAX arrays and tracers: XLA runs the call, through its FFI."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from ._base import Adapter, not_taken


class _Jax(Adapter):
    path = "traced"
    empty_like = None

    def forward(
        self,
        q: Any,
        k: Any,
        v: Any,
        kernel: str,
        causal: bool,
        window: tuple[int, int] | None,
        scale: float | None,
        return_lse: bool,
        out: Any,
        stream: Any,
    ) -> Any:
        from .. import _jax

        for argument, array in (("q", q), ("k", k), ("v", v)):
            # NumPy arrays are constants to JAX, as in its own functions.
            if not isinstance(array, (jax.Array, np.ndarray)):
                found = f"{type(array).__module__}.{type(array).__qualname__} beside a jax.Array"
                not_taken(argument, found, "pass JAX arrays only")
        if out is not None:
            raise ValueError("out: JAX arrays are immutable, takes None with them")
        if stream is not None:
            raise ValueError("stream: XLA chooses the stream, takes None with JAX arrays")
        return _jax.forward(
            q, k, v, kernel=kernel, causal=causal, window=window, scale=scale, return_lse=return_lse
        )


_adapter = _Jax()


def resolve(kind: type, argument: str) -> Adapter:
    """The adapter for the array or tracer type ``kind``."""
    if not (issubclass(kind, (jax.Array, jax.core.Tracer))):
        not_taken(argument, f"a {kind.__module__}.{kind.__name__}", "pass a jax.Array")
    return _adapter
