"""The rungs of the ladder on the CPU: their own source, compiled for the host, checked and counted.

    from fastattn import emulation

    report = emulation.run(q, k, v, kernel="v3")
    print(report.counts.global_read_bytes, report.findings)

``run`` executes every thread of every block of a rung and returns what it computed, how often it
touched memory, and what it did that is undefined on a GPU. ``python -m fastattn.explain`` shows the
counts beside the formulas that predict them.
"""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fastattn import _core, testing

__all__ = ["Counts", "Finding", "Launch", "LineCounts", "Report", "run"]

Array = npt.NDArray[Any]

_ALIGNMENT = 256  # bytes: that of an address which cudaMalloc returns


@dataclass(frozen=True)
class Counts:
    """What all launches of one call did, added up. Exact, and the same on every machine.

    These are the accesses that the source writes down. A compiler for a GPU may join neighbouring
    ones, or keep a value in a register that the source reads twice; it does not touch more.
    Multiply-adds are not counted: the source has them as ``a * b + c``.

    Attributes
    ----------
    global_read_bytes, global_write_bytes : int
        Bytes that threads ask for, each thread by itself.
    global_read_sectors, global_write_sectors : int
        Aligned pieces of 32 bytes that a warp's request touches, which is what moves between L1 and
        L2. They depend on the addresses of the arrays: see ``run``.
    global_read_requests, global_write_requests : int
        Requests of a warp: one for all lanes that execute the access together.
    shared_read_requests, shared_write_requests : int
        Likewise for shared memory.
    shared_read_transactions, shared_write_transactions : int
        Turns that these requests take: 32 banks of 4 bytes serve one word each a turn, lanes that
        read one word share it, and accesses of 8 and 16 bytes go in 2 and 4 parts.
    shared_read_conflicts, shared_write_conflicts : int
        Turns beyond the fewest in which the same lanes could move as many bytes.
    exponentials : int
        Calls of ``expf`` and its kin, a thread each.
    barriers : int
        ``__syncthreads``, a block each.
    warp_barriers, shuffles : int
        ``__syncwarp`` and ``__shfl_*_sync``, a warp each.
    votes : int
        ``__ballot_sync`` and its like, a warp each.
    mmas : int
        Products of 16x16 by 16x8 on tensor cores (``mma``), a warp each.
    atomics : int
        Atomic operations, a thread each.
    """

    global_read_bytes: int
    global_write_bytes: int
    global_read_sectors: int
    global_write_sectors: int
    global_read_requests: int
    global_write_requests: int
    shared_read_requests: int
    shared_write_requests: int
    shared_read_transactions: int
    shared_write_transactions: int
    shared_read_conflicts: int
    shared_write_conflicts: int
    exponentials: int
    barriers: int
    warp_barriers: int
    shuffles: int
    votes: int
    mmas: int
    atomics: int


@dataclass(frozen=True)
class Launch:
    """One kernel launch.

    Attributes
    ----------
    kernel : str
        The name of the ``__global__`` function.
    blocks, threads : int
        The grid, and the threads of a block.
    dynamic_shared_bytes : int
        Of a block.
    """

    kernel: str
    blocks: int
    threads: int
    dynamic_shared_bytes: int


@dataclass(frozen=True)
class Finding:
    """Something that a GPU may answer with anything.

    Attributes
    ----------
    kind : str
        "race" (shared memory that another thread wrote or read, with no barrier between), "barrier"
        (one that not all threads reach), "warp" (a shuffle or ``__syncwarp`` that names an absent
        lane), "out of range", "misaligned" or "uninitialised" (of shared or global memory).
    message : str
        One line.
    file : str
        The source file.
    line : int
        In that file.
    block, thread : int
        Where it was seen first.
    """

    kind: str
    message: str
    file: str
    line: int
    block: int
    thread: int


@dataclass(frozen=True)
class LineCounts:
    """What one line of the source does to one kind of memory.

    Attributes
    ----------
    file : str
        The source file.
    line : int
        In that file.
    space : str
        "global" or "shared".
    access : str
        "read" or "write".
    requests : int
        As in ``Counts``.
    transactions : int
        Turns of shared memory; sectors of global memory.
    conflicts : int
        As in ``Counts``; 0 for global memory.
    bytes : int
        That threads ask for.
    """

    file: str
    line: int
    space: str
    access: str
    requests: int
    transactions: int
    conflicts: int
    bytes: int


@dataclass(frozen=True)
class Report:
    """What ``run`` returns.

    Attributes
    ----------
    out : ndarray, shape (B, Hq, M, Dv), of q's dtype
        The result; bfloat16 as float32 with the same values. What a rung forgot to write is NaN.
    lse : ndarray, shape (B, Hq, M), float32
        Log of the sum of exponentials, natural logarithm.
    counts : Counts
        Of all launches together.
    launches : tuple of Launch
        In order.
    findings : tuple of Finding
        Empty for a rung that is right.
    lines : tuple of LineCounts
        Every line that touches global or shared memory, by file and line.
    """

    out: Array
    lse: npt.NDArray[np.float32]
    counts: Counts
    launches: tuple[Launch, ...]
    findings: tuple[Finding, ...]
    lines: tuple[LineCounts, ...]


def run(
    q: Any,
    k: Any,
    v: Any,
    *,
    kernel: str,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    scale: float | None = None,
    seed: int = 0,
) -> Report:
    """Runs one rung on the CPU, thread by thread, with every access checked and counted.

    Parameters
    ----------
    q : array, shape (B, Hq, M, D), float32, or float16 or bfloat16 where the rung takes it
        Queries, of any framework; what is on a GPU is copied to the host. Any strides; a last
        dimension that is not contiguous is copied first, and bfloat16, which NumPy lacks, always.
    k : array, shape (B, Hkv, N, D), of q's dtype
        Keys. Hq is a multiple of Hkv.
    v : array, shape (B, Hkv, N, Dv), of q's dtype
        Values; Dv other than D where the rung takes it.
    kernel : str
        The name of a rung, "v0" to "v6". As on a GPU, V3 and V4 hand head dims other than 64 to V2.
    causal, window
        As in ``forward``, where the rung takes a mask.
    scale : float or None
        Factor of the scores; None is ``1 / sqrt(D)``.
    seed : int
        From 0. Of the order in which the threads of a block take turns. Results and counts do not
        depend on it unless there is something to find.

    Returns
    -------
    Report

    Raises
    ------
    TypeError
        An argument of the wrong type or dtype.
    ValueError
        A shape, a number or a kernel's name out of range.
    NotImplementedError
        The rung does not take the call, or this build has no emulation.

    Notes
    -----
    Slow: some 50 ms for each thousand scores of a head (docs/emulation.md has the measurements).
    ``forward(q, k, v, kernel="v3")`` of NumPy arrays runs the same source without checks and
    counts, more than ten times as fast.

    An access out of range ends the run; what was not computed by then is NaN.

    The arrays are laid out as on a GPU: each begins at a multiple of 256 bytes, as what cudaMalloc
    returns, and a view as far behind that as it lies behind the start of the array that it is of.
    So the sectors do not depend on where NumPy happened to put an array. ``lse`` is always asked
    for, and the counts hold the writing of it.
    """
    if not isinstance(kernel, str):
        raise TypeError(f"kernel: got {kernel!r} of type {type(kernel).__name__}, takes a string")
    emulate = getattr(_core, "emulate", None)
    if emulate is None:
        raise NotImplementedError(
            "this build of fastattn has no emulation of the rungs: install it again with "
            "FASTATTN_EMULATION=ON, on Linux and with GCC or Clang"
        )
    dtype = testing.dtype_name(q)
    q, k, v = (_host(x, name, dtype) for x, name in ((q, "q"), (k, "k"), (v, "v")))
    testing._check_shapes(q, k, v)
    factor = _scale(scale, q.shape[3])
    out = _aligned((*q.shape[:3], v.shape[3]), q.dtype)
    lse = _aligned(q.shape[:3], np.dtype(np.float32))
    arrays = (_placed(q), _placed(k), _placed(v), out, lse)
    is_bfloat16 = dtype == "bfloat16"
    found = emulate(kernel, *arrays, factor, _seed(seed), causal, window, is_bfloat16)
    return Report(
        out=testing._from_bfloat16_bits(out.view(np.uint16)) if is_bfloat16 else out,
        lse=lse,
        counts=Counts(**found["counts"]),
        launches=tuple(Launch(**x) for x in found["launches"]),
        findings=tuple(Finding(**x) for x in found["findings"]),
        lines=tuple(LineCounts(**x) for x in found["lines"]),
    )


def _host(x: Any, name: str, dtype: str) -> Array:
    """The array on the host, with a contiguous last dimension; the bits of bfloat16 as float16."""
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError(f"{name}: got a masked array, whose mask would be lost; takes plain arrays")
    if not hasattr(x, "__dlpack__"):
        raise TypeError(f"{name}: got a {type(x).__name__}; takes an array that speaks DLPack")
    found = testing.dtype_name(x)
    if found not in ("float32", "float16", "bfloat16"):
        raise TypeError(f"{name}: got dtype {found}, takes float32, float16 or bfloat16")
    if found != dtype:
        raise TypeError(f"{name}: got dtype {found}, takes that of q, {dtype}")
    host: Array = testing.to_numpy(x)
    if dtype == "bfloat16":
        host = testing._bfloat16_bits(host).view(np.float16)
    if host.ndim and host.shape[-1] > 1 and host.strides[-1] != host.itemsize:
        host = np.ascontiguousarray(host)
    return host


def _scale(scale: float | None, head_dim: int) -> float:
    if scale is None:
        return 1.0 / math.sqrt(head_dim)
    if isinstance(scale, (bool, np.bool_)) or not isinstance(scale, numbers.Real):
        raise TypeError(
            f"scale: got {scale!r} of type {type(scale).__name__}, takes a real number or None"
        )
    value = float(scale)
    if not abs(value) <= float(np.finfo(np.float32).max):
        raise ValueError(f"scale: got {scale!r}, takes a number that is finite in float32")
    return value


def _seed(seed: int) -> int:
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)):
        raise TypeError(f"seed: got {seed!r} of type {type(seed).__name__}, takes an integer")
    if not 0 <= seed < 2**64:
        raise ValueError(f"seed: got {seed}, takes 0 to 2**64 - 1")
    return int(seed)


def _aligned(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """A new array of NaN where cudaMalloc could have put it."""
    memory = _aligned_bytes(math.prod(shape) * dtype.itemsize, 0)
    memory.fill(0xFF)  # NaN in bfloat16 too
    return memory.view(dtype).reshape(shape)


def _aligned_bytes(size: int, offset: int) -> npt.NDArray[np.uint8]:
    """New memory that begins ``offset`` bytes, modulo the alignment, behind an aligned address."""
    memory = np.empty(size + 2 * _ALIGNMENT, np.uint8)
    start = (offset - memory.ctypes.data) % _ALIGNMENT
    return memory[start : start + size]


def _placed(x: Array) -> Array:
    """``x`` with the same strides, where a GPU would have it: see the notes of ``run``."""
    owner = x
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    # Bytes before and behind element 0 that the view spans.
    steps = [(n - 1) * s for n, s in zip(x.shape, x.strides, strict=True)]
    if not x.size:
        return x
    before = -sum(step for step in steps if step < 0)
    behind = sum(step for step in steps if step > 0) + x.itemsize
    start = x.ctypes.data - before
    memory = _aligned_bytes(before + behind, start - owner.ctypes.data)
    placed: Array = np.ndarray(x.shape, x.dtype, memory, before, x.strides)
    placed[...] = x
    return placed
