"""The public call."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Literal, TypeVar, cast, overload

from . import (
    _adapters,  # noqa: F401  (tells _core how to read arrays)
    _core,
)

ArrayT = TypeVar("ArrayT")
FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])
Window = tuple[int, int]


def _native(declaration: FunctionT) -> FunctionT:
    """Gives the native function the name, signature and documentation of its declaration.

    A Python function around it would be a sixth of what a small call costs besides its allocation.
    """
    signature = inspect.signature(declaration)
    # Python reads no annotations from the text of a builtin function.
    plain = signature.replace(
        parameters=[x.replace(annotation=x.empty) for x in signature.parameters.values()],
        return_annotation=signature.empty,
    )
    text = f"{declaration.__name__}{plain}\n--\n\n{inspect.getdoc(declaration) or ''}"
    return cast(FunctionT, _core.native_forward(declaration, text))


@overload
def forward(
    q: ArrayT,
    k: Any,
    v: Any,
    *,
    kernel: str = ...,
    causal: bool = ...,
    window: Window | None = ...,
    scale: float | None = ...,
    return_lse: Literal[False] = ...,
    out: ArrayT | None = ...,
    stream: Any = ...,
) -> ArrayT: ...


@overload
def forward(
    q: ArrayT,
    k: Any,
    v: Any,
    *,
    kernel: str = ...,
    causal: bool = ...,
    window: Window | None = ...,
    scale: float | None = ...,
    return_lse: Literal[True],
    out: ArrayT | None = ...,
    stream: Any = ...,
) -> tuple[ArrayT, ArrayT]: ...


@overload
def forward(
    q: ArrayT,
    k: Any,
    v: Any,
    *,
    kernel: str = ...,
    causal: bool = ...,
    window: Window | None = ...,
    scale: float | None = ...,
    return_lse: bool,
    out: ArrayT | None = ...,
    stream: Any = ...,
) -> ArrayT | tuple[ArrayT, ArrayT]: ...


@_native
def forward(
    q: ArrayT,
    k: Any,
    v: Any,
    *,
    kernel: str = "auto",
    causal: bool = False,
    window: Window | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    out: ArrayT | None = None,
    stream: Any = None,
) -> ArrayT | tuple[ArrayT, ArrayT]:
    """Exact attention: ``out = softmax(scale q k^T) v``.

    Parameters
    ----------
    q : array, shape (B, Hq, M, D)
        Queries: a torch, CuPy, JAX or NumPy array, or any other that speaks DLPack, on the CPU or
        on a CUDA device; float32, float16 or bfloat16. Any strides; a last dimension that is not
        contiguous is copied first.
    k : array, shape (B, Hkv, N, D)
        Keys, of the dtype and on the device of ``q``. Hq is a multiple of Hkv, and query head h
        reads key head ``h // (Hq // Hkv)``.
    v : array, shape (B, Hkv, N, Dv)
        Values.
    kernel : str
        A name of ``kernels()``, or "auto": the fastest that takes the call.
    causal : bool
        Row i sees no key after ``i + N - M``: the masks are aligned at the bottom right.
    window : (left, right) or None
        Row i sees keys ``i + N - M - left`` to ``i + N - M + right``; -1 is no limit on that side.
    scale : float or None
        Factor of the scores; None is ``1 / sqrt(D)``.
    return_lse : bool
        Return ``(out, lse)``.
    out : array, shape (B, Hq, M, Dv), or None
        Where to write the result; apart from the inputs. JAX arrays are never written.
    stream : int, stream object or None
        CUDA stream to enqueue on: a handle (0 or 1: legacy default stream, 2: per-thread default
        stream), or an object with ``__cuda_stream__()``, ``.cuda_stream`` or ``.ptr``. None is the
        current stream of q's framework. Only None for arrays on the CPU and for JAX.

    Returns
    -------
    out : array, shape (B, Hq, M, Dv)
        Of the kind, dtype and device of ``q``. Rows that see no key are 0.
    lse : array, shape (B, Hq, M), float32
        With ``return_lse``: ``log(sum(exp(scale q k^T)))`` over the keys that the row sees, natural
        logarithm; -inf for rows that see no key.

    Raises
    ------
    TypeError
        An argument of the wrong type or dtype; a tensor that requires grad.
    ValueError
        A shape, device or number out of range.
    NotImplementedError
        The kernel, the build or the GPU can't do it; the text says which kernels can.
    RuntimeError
        CUDA failed.

    Notes
    -----
    On CUDA the work is enqueued and nothing waits for it; the arrays may be freed right after the
    call. Not differentiable.

    The method is FlashAttention-2's (Dao, 2023): tiles of keys, a running maximum, one division at
    the end.
    """
    raise AssertionError("only the signature of this is used")
