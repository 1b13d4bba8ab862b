"""The interface between ``_core`` and the array frameworks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NoReturn

# How _core reads an array (src/bindings/tensor.h): through DLPack's C exchange API, the buffer
# protocol, __dlpack__(stream=-1), __dlpack__(stream=launch stream), or not at all.
Path = Literal["exchange", "buffer", "no_sync", "stream", "traced"]


DType = Literal["float32", "float16", "bfloat16"]


class Adapter:
    """One framework. A subclass overrides what its framework can do."""

    path: Path
    # Look at each array for what its pointer does not show: requires_grad, the negative bit.
    screened: bool = False
    # A new array with the layout of a dense one. None: as any other, or for the path "exchange" by
    # that API, which has an allocator.
    empty_like: Callable[[Any], Any] | None = None
    # new_empty(like, *shape): a new array in C order of dtype ``like.dtype``, or with dtype=float32
    # of that; on the device of ``like`` and for the current stream. None: by empty().
    new_empty: Callable[..., Any] | None = None
    float32: Any = None
    # Tells the framework that an array, the caller's own, was written. None: it does not ask.
    wrote: Callable[[Any], Any] | None = None

    def empty(self, like: Any, shape: tuple[int, ...], dtype: DType, stream: int | None) -> Any:
        """A new array in C order on the device of ``like``; bfloat16 only where ``like`` is.

        ``stream`` is the CUDA stream it is for; None is the framework's current one.
        """
        raise NotImplementedError

    def contiguous(self, array: Any, stream: int | None) -> Any:
        """A copy of ``array`` in C order, made on ``stream``; None: this framework can't."""
        return None

    def current_stream(self, device: int) -> int:
        """Handle of the framework's current CUDA stream on ``device``. Path "no_sync" only."""
        raise NotImplementedError

    def record_stream(self, array: Any, stream: int) -> bool:
        """Tells the allocator that ``stream`` uses ``array``; False: it has no such call."""
        return False

    def refuse(self, array: Any, argument: str) -> None:
        """Raises TypeError where ``array`` holds something that its memory does not show."""

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
        """The whole call; the options are checked. Path "traced" only."""
        raise NotImplementedError


def not_taken(argument: str, found: str, remedy: str) -> NoReturn:
    """Raises the TypeError of an argument that can't be read."""
    raise TypeError(f"{argument}: got {found}; {remedy}")
