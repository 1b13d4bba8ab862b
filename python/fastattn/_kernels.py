"""What kernels exist and what each takes."""

from __future__ import annotations

from dataclasses import dataclass

from . import _core


@dataclass(frozen=True)
class KernelInfo:
    """One registered kernel and the calls that it takes.

    Attributes
    ----------
    name : str
        What ``forward(kernel=...)`` takes.
    title : str
        One line about it.
    arithmetic : str
        In what precision the products are made and summed, for each dtype that it takes. A call
        never runs in a lower one in silence: ``kernel`` names the arithmetic along with the kernel.
    backend : str
        "cpu" or "cuda".
    dtypes : tuple of str
        Of "float32", "float16", "bfloat16".
    head_dim_min, head_dim_max : int
        The range of D (and of Dv), both included.
    head_dim_v_differs : bool
        Takes Dv != D.
    lengths_differ : bool
        Takes M != N.
    grouped_heads : bool
        Takes Hq != Hkv.
    causal, window : bool
        Takes that mask.
    min_compute_capability : int
        Of the GPU: 90 is 9.0; 0 for a CPU kernel.
    redirect : str or None
        The kernel that takes over where D is outside the range.
    """

    name: str
    title: str
    arithmetic: str
    backend: str
    dtypes: tuple[str, ...]
    head_dim_min: int
    head_dim_max: int
    head_dim_v_differs: bool
    lengths_differ: bool
    grouped_heads: bool
    causal: bool
    window: bool
    min_compute_capability: int
    redirect: str | None


def kernels(*, emulated: bool = False) -> tuple[KernelInfo, ...]:
    """Every kernel of this build: those of the CPU, then those of CUDA in ladder order.

    Parameters
    ----------
    emulated : bool
        Instead, the CUDA kernels as this host emulates a GPU: what ``forward(kernel=...)`` takes by
        name for arrays on the CPU, to learn from. Their backend is "cpu"; "auto" never takes one.
        Empty in a build without the emulation.

    Returns
    -------
    tuple of KernelInfo

    Raises
    ------
    TypeError
        ``emulated`` is not a bool.
    """
    if not isinstance(emulated, bool):
        raise TypeError(
            f"emulated: got {emulated!r} of type {type(emulated).__name__}, takes True or False"
        )
    return tuple(KernelInfo(**fields) for fields in _core.kernels(emulated))
