"""What each array framework can do for us: allocate, copy, name its stream, explain a refusal.

``_core`` asks once for each Python type, through ``resolve``. Importing this imports NumPy alone: a
framework's adapter is imported when an array of that framework first arrives.
"""

from __future__ import annotations

import numbers

import numpy as np

from .. import _core
from ._base import Adapter

__all__ = ["Adapter", "resolve"]


def resolve(kind: type, argument: str) -> Adapter:
    """The adapter for arrays of type ``kind``; ``argument`` is the parameter that got one.

    Raises TypeError for a type that is no array, or whose memory is not what it stands for.
    """
    # The first class of a framework in the MRO decides, so that users' subclasses work too.
    for base in kind.__mro__:
        package = str(base.__module__).partition(".")[0]  # which may be None
        if package == "torch":
            from . import _torch

            return _torch.resolve(kind, argument)
        if base is np.ndarray:
            from . import _numpy

            return _numpy.resolve(kind, argument)
        if package == "cupy":
            from . import _cupy

            return _cupy.resolve(kind, argument)
        if package in ("jax", "jaxlib"):
            from . import _jax

            return _jax.resolve(kind, argument)
    from . import _dlpack

    return _dlpack.resolve(kind, argument)


_core.configure(resolve, np.bool_, numbers.Real)
