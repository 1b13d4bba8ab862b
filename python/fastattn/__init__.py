"""Exact attention for torch, CuPy, JAX and NumPy arrays, on the GPU and on the CPU.

    out = fastattn.forward(q, k, v, causal=True)

``forward`` computes, ``kernels`` lists what with, ``show_config`` shows where.
"""

from ._config import get_cmake_dir, get_include, get_library_dir, show_config
from ._core import build_info as _build_info
from ._forward import forward
from ._kernels import KernelInfo, kernels

__all__ = [
    "KernelInfo",
    "__version__",
    "forward",
    "get_cmake_dir",
    "get_include",
    "get_library_dir",
    "kernels",
    "show_config",
]

__version__: str = _build_info()["version"]
