"""Problems, frameworks and tolerances that the numeric tests share.

A ``Case`` is one attention problem with its float64 answer, a ``Runner`` is one kernel fed with one
framework's arrays. Both follow what ``fastattn.kernels()`` declares: a new kernel is tested without
being named here.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

import fastattn
from fastattn import testing

# Half an ulp, relative: the error of one rounding.
UNIT_ROUNDOFF = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
DTYPES = tuple(UNIT_ROUNDOFF)

# Of fewer numbers the norm of an error is a matter of luck, a kernel's and the yardstick's.
FEW = 64
# Of fewer rows likewise: a weight's error moves all of a row's columns.
FEW_ROWS = 8


def installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


@functools.cache
def torch_on(backend: str) -> bool:
    """torch is there, and can compute on this backend: a CPU build can't on "cuda"."""
    if not installed("torch"):
        return False
    import torch

    return backend == "cpu" or torch.cuda.is_available()


# ---- problems ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One call. ``data``: how q, k and v are drawn; see ``draw``."""

    batch: int = 2
    heads_q: int = 3
    heads_kv: int = 3
    len_q: int = 65
    len_kv: int = 65
    head_dim: int = 64
    head_dim_v: int = 64
    dtype: str = "float32"
    causal: bool = False
    window: tuple[int, int] | None = None
    scale: float | None = None
    data: str = "randn"

    def __str__(self) -> str:
        """Short and unique: a test's id."""
        mask = ("-causal" if self.causal else "") + (f"-w{self.window}" if self.window else "")
        scale = "" if self.scale is None else f"-scale{self.scale:g}"
        data = "" if self.data == "randn" else f"-{self.data}"
        return (
            f"{self.dtype}-b{self.batch}h{self.heads_q}:{self.heads_kv}-{self.len_q}x{self.len_kv}"
            f"-d{self.head_dim}:{self.head_dim_v}{mask}{scale}{data}".replace(" ", "")
        )

    @property
    def options(self) -> dict[str, Any]:
        return {"causal": self.causal, "window": self.window, "scale": self.scale}

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        return (
            (self.batch, self.heads_q, self.len_q, self.head_dim),
            (self.batch, self.heads_kv, self.len_kv, self.head_dim),
            (self.batch, self.heads_kv, self.len_kv, self.head_dim_v),
        )


@functools.lru_cache(maxsize=8)
def inputs(case: Case) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """q, k, v: read-only float32 arrays that hold values of the case's dtype."""
    rng = np.random.default_rng(zlib.crc32(str(case).encode()))
    arrays = tuple(
        testing.round_to(draw(rng, shape, case.data, name), case.dtype)
        for name, shape in zip("qkv", case.shapes, strict=True)
    )
    for x in arrays:
        x.flags.writeable = False
    return arrays


# Everything that small or that large. float16 has no 1e-20.
FACTORS = {"tiny": 1e-20, "small": 1e-4, "huge": 1e4}
# What arithmetic with a narrow range of exponents, or with one scale for a whole tile, gets wrong.
STRESS = ("q_rows", "k_rows", "v_rows", "k_channel", "v_channel", "small", "huge")


def stress(dtype: str) -> tuple[str, ...]:
    """The kinds of hard data that this dtype can hold."""
    return STRESS if dtype == "float16" else (*STRESS, "tiny")


def draw(rng: np.random.Generator, shape: tuple[int, ...], data: str, name: str) -> np.ndarray:
    x = rng.standard_normal(shape, np.float32)
    if data == "shifted":  # a mean that does not cancel
        return x + np.float32(0.5)
    if data == "large_logits":  # scores of several hundred: softmax is nearly one-hot
        return x * np.float32(20) if name in "qk" else x
    if data in ("q_rows", "k_rows", "v_rows"):  # ten orders of magnitude, a row each
        decades = rng.uniform(-6, 4, (*shape[:3], 1)).astype(np.float32)
        return x * np.float32(10) ** decades if name == data[0] else x
    if data in ("k_channel", "v_channel"):  # an outlier channel
        if name == data[0] and shape[3]:
            x[..., shape[3] // 2] *= np.float32(1000)
        return x
    if data in FACTORS:
        return x * np.float32(FACTORS[data])
    assert data == "randn"
    return x


@dataclass(frozen=True)
class Expected:
    """The float64 answer, and the largest normwise error that a kernel may have."""

    out: np.ndarray
    lse: np.ndarray
    out_limit: float
    lse_limit: float

    def check(self, out: Any, lse: Any = None) -> None:
        error = testing.error(out, self.out)
        assert error <= self.out_limit, f"out: error {error:.3g}, limit {self.out_limit:.3g}"
        if lse is not None:
            error = testing.error(lse, self.lse)
            assert error <= self.lse_limit, f"lse: error {error:.3g}, limit {self.lse_limit:.3g}"


def expect(
    q: Any,
    k: Any,
    v: Any,
    *,
    dtype: str = "float32",
    backend: str = "cpu",
    tensor_cores: bool = False,
    **options: Any,
) -> Expected:
    """The answer, and twice the error of a textbook evaluation in the same dtype as the limit.

    That evaluation is NumPy's, and for float32 also one that sums term by term, and that of torch
    or CuPy on the kernel's device, where they are there: the order of the sums decides about a
    factor of two and more.

    A yardstick of few numbers, or of a nearly one-hot softmax, can be exact by luck (one key:
    out = v). Below the limit therefore lies what one rounding of each score, weight and result
    costs, to first order, if roundings are independent: with u the unit roundoff, and e that of a
    score's sum, whose error is e |q_i| |k_j|, the square of the error of out_i is the sum over j of
    P_ij^2 (e |q_i| |k_j| (v_j - out_i))^2 + (u P_ij v_j)^2.

    Tensor cores cut sums off, so a score is too small by a part of itself, and lse by that part of
    the mean score: of such a bias no mean over keys makes less. A step cuts off half of the last
    place, on average, of the sum and of each of its 16 products: less than 4 u of the sum so far,
    and that is half of the whole on average. In float32 V6 takes no more than 2 steps in a row.
    """
    out, lse = testing.reference(q, k, v, **options)
    plain = [testing.naive(q, k, v, dtype=dtype, **options)]
    # Where it takes no minutes.
    if dtype == "float32" and math.prod(q.shape) * k.shape[2] < 5e8:
        plain.append(testing.naive(q, k, v, dtype=dtype, by_terms=True, **options))
    # Plain formulas make 0 * inf of a hidden infinity.
    finite = all(np.isfinite(x).all() for x in (q, k, v))
    if dtype == "float32" and out.size and k.shape[2] and finite:
        plain += _plain_on_device(q, k, v, backend, **options)
    out_limit = 2 * max(testing.error(x[0], out) for x in plain)
    lse_limit = 2 * max(testing.error(x[1], lse) for x in plain)

    with np.errstate(all="ignore"):
        # softmax(2 S) is P^2 but for a factor: the oracle gives sums of P^2 times anything.
        scale = options.get("scale")
        scale = 1 / math.sqrt(q.shape[3]) if scale is None else float(scale)
        q64, k64, v64 = (x.astype(np.float64) for x in (q, k, v))
        moments = np.concatenate([v64**2, v64, np.ones_like(v64[..., :1])], axis=-1)
        moments, lse_2 = testing.reference(q, k, moments, **(options | {"scale": 2 * scale}))
        weight_2 = np.exp(lse_2 - 2 * lse)[..., None]
        v_2, v_1, _ = np.split(moments * weight_2, [v.shape[3], 2 * v.shape[3]], axis=-1)
        largest_k = np.linalg.norm(k64, axis=-1).max(axis=2, initial=0.0)
        largest_k = largest_k.repeat(q.shape[1] // max(1, k.shape[1]), axis=1)[..., None, None]
        unit, unit_32 = UNIT_ROUNDOFF[dtype], UNIT_ROUNDOFF["float32"]
        # What is cut off is up to twice a rounding.
        unit_score = 2 * unit_32 if tensor_cores and dtype != "float32" else unit_32
        score = unit_score * abs(scale) * np.linalg.norm(q64, axis=-1, keepdims=True) * largest_k
        spread = v_2 - 2 * out * v_1 + out**2 * weight_2
        # Two float16 parts hold 22 bits of a number, and its sign.
        unit_v = 2 * unit_32 if tensor_cores and dtype == "float32" else unit
        out_floor = np.sqrt(score**2 * spread + unit_v**2 * v_2)
        cut_off = np.zeros_like(lse)
        if tensor_cores:
            steps = math.ceil(q.shape[3] / 16)
            steps = min(steps, 2) if dtype == "float32" else steps
            mean_score = scale * (q64 * testing.reference(q, k, k, **options)[0]).sum(axis=-1)
            cut_off = 2 * unit_32 * steps * np.abs(mean_score)
        lse_floor = np.sqrt(score**2 * weight_2 + (2 * unit_32 * lse[..., None]) ** 2)
        lse_floor = lse_floor[..., 0] + cut_off
    return Expected(
        out,
        lse,
        max(out_limit, _luck(out) * _relative(out_floor, out)),
        max(lse_limit, _luck(lse) * _relative(lse_floor, lse)),
    )


def _luck(x: np.ndarray) -> float:
    """One number alone may well be at three times its standard deviation; so may many that are the
    same, such as all rows under scale=0.
    """
    is_few = np.unique(x).size < FEW or (x.ndim == 4 and x[..., 0].size < FEW_ROWS)
    return 3 if is_few else 1


def _relative(bound: np.ndarray, to: np.ndarray) -> float:
    finite = np.isfinite(to) & np.isfinite(bound)
    norm = float(np.linalg.norm(to[finite]))
    return float(np.linalg.norm(bound[finite])) / norm if norm else 0.0


def visible(
    len_q: int, len_kv: int, causal: bool = False, window: tuple[int, int] | None = None
) -> np.ndarray:
    """[M, N]: which keys a row sees."""
    left, right = (x if x >= 0 else math.inf for x in window or (-1, -1))
    behind = np.arange(len_q)[:, None] + (len_kv - len_q) - np.arange(len_kv)
    return (behind <= left) & (behind >= -right) & ((behind >= 0) | (not causal))


def _plain_on_device(
    q: Any, k: Any, v: Any, backend: str, *, scale: Any = None, **mask: Any
) -> list[tuple[np.ndarray, np.ndarray]]:
    """The textbook evaluation by the framework of a runner's device, in float32."""
    seen = visible(q.shape[2], k.shape[2], **mask)
    scale = 1 / math.sqrt(q.shape[3]) if scale is None else float(scale)
    k, v = (x.repeat(q.shape[1] // k.shape[1], axis=1) for x in (k, v))
    if torch_on(backend):
        import torch

        q, k, v = (torch.from_numpy(np.array(x, np.float32)).to(backend) for x in (q, k, v))
        precision = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")  # TF32 would be a lenient yardstick
        try:
            scores = q @ k.mT * scale
            if not seen.all():
                scores = scores.masked_fill(torch.from_numpy(~seen).to(backend), -math.inf)
            out, lse = scores.softmax(-1) @ v, scores.logsumexp(-1)
        finally:
            torch.set_float32_matmul_precision(precision)
    elif backend == "cuda" and installed("cupy"):
        import cupy

        q, k, v = (cupy.asarray(x, np.float32) for x in (q, k, v))
        scores = cupy.where(cupy.asarray(seen), q @ k.swapaxes(2, 3) * np.float32(scale), -np.inf)
        top = scores.max(axis=-1, keepdims=True)
        weights = cupy.exp(scores - top)
        total = weights.sum(axis=-1, keepdims=True)
        out, lse = (weights / total) @ v, (top + cupy.log(total))[..., 0]
    else:
        return []
    out, lse = testing.to_numpy(out), testing.to_numpy(lse)
    blind = ~seen.any(axis=1)
    out[:, :, blind], lse[:, :, blind] = 0, -np.inf
    return [(out, lse)]


@functools.lru_cache(maxsize=8)
def expected(case: Case, backend: str, tensor_cores: bool = False) -> Expected:
    arithmetic = {"backend": backend, "tensor_cores": tensor_cores}
    return expect(*inputs(case), dtype=case.dtype, **arithmetic, **case.options)


Result = tuple[np.ndarray, np.ndarray]  # (out, lse)


def merge(a: Result, b: Result) -> Result:
    """Two partial results over disjoint keys, as users of lse combine them; in float64."""
    (out_a, lse_a), (out_b, lse_b) = a, b
    with np.errstate(invalid="ignore"):
        lse = np.logaddexp(lse_a.astype(np.float64), lse_b)
        weights = [np.where(x == -np.inf, 0, np.exp(x - lse)) for x in (lse_a, lse_b)]
    return weights[0][..., None] * out_a + weights[1][..., None] * out_b, lse


# ---- frameworks ----------------------------------------------------------------------------------


class Framework:
    """Makes arrays of one kind. ``xp`` is the module whose functions make views of them."""

    name: str
    backend: str
    dtypes: tuple[str, ...] = DTYPES
    has_views = True  # slices, transposes, broadcasts
    has_negative_strides = True

    @property
    def xp(self) -> Any:
        raise NotImplementedError

    def array(self, values: Any, dtype: str) -> Any:
        """float32 values as a new contiguous array of ``dtype``."""
        raise NotImplementedError

    def full(self, shape: tuple[int, ...], value: float, dtype: str) -> Any:
        return self.array(np.full(shape, value, np.float32), dtype)

    def poison(self, shape: tuple[int, ...]) -> None:
        """Frees a block of NaN of this size: an allocator hands it out next, and what a kernel
        forgets to write shows."""
        self.full(shape, math.nan, "float32")

    def __repr__(self) -> str:
        return self.name


class NumPy(Framework):
    name, backend = "numpy", "cpu"
    dtypes = DTYPES if installed("ml_dtypes") else ("float32", "float16")

    @property
    def xp(self) -> Any:
        return np

    def array(self, values: Any, dtype: str) -> Any:
        if dtype == "bfloat16":
            import ml_dtypes

            return np.array(values, ml_dtypes.bfloat16)
        with np.errstate(over="ignore"):
            return np.array(values, dtype)


class Torch(Framework):
    has_negative_strides = False

    def __init__(self, backend: str) -> None:
        self.name = f"torch-{backend}"
        self.backend = backend

    @property
    def xp(self) -> Any:
        import torch

        return torch

    def array(self, values: Any, dtype: str) -> Any:
        host = self.xp.from_numpy(np.array(values, np.float32))
        return host.to(self.backend).to(getattr(self.xp, dtype), copy=True)

    def full(self, shape: tuple[int, ...], value: float, dtype: str) -> Any:
        return self.xp.full(shape, value, dtype=getattr(self.xp, dtype), device=self.backend)


class CuPy(Framework):
    name, backend = "cupy", "cuda"
    dtypes = ("float32", "float16")

    @property
    def xp(self) -> Any:
        import cupy

        return cupy

    def array(self, values: Any, dtype: str) -> Any:
        return self.xp.array(np.asarray(values), dtype)

    def full(self, shape: tuple[int, ...], value: float, dtype: str) -> Any:
        return self.xp.full(shape, value, dtype)


class CudaArrays(Framework):
    """fastattn's own, for a GPU without a framework."""

    name, backend = "cuda_array", "cuda"
    has_views = has_negative_strides = False

    def array(self, values: Any, dtype: str) -> Any:
        return testing.CudaArray.from_numpy(values, dtype=dtype)


def frameworks(backend: str) -> list[Framework]:
    if backend == "cpu":
        return [NumPy()]
    found: list[Framework] = []
    if installed("torch"):
        found.append(Torch("cuda"))
    if installed("cupy"):
        found.append(CuPy())
    return found or [CudaArrays()]


# ---- layouts: the same values at other strides and addresses -------------------------------------
#
# Each takes a framework, values [B, H, L, D] and a dtype and returns a view that shows the values.
# What lies between and behind them is NaN.

Layout = Callable[[Framework, np.ndarray, str], Any]


def contiguous(framework: Framework, x: np.ndarray, dtype: str) -> Any:
    return framework.array(x, dtype)


def heads_last(framework: Framework, x: np.ndarray, dtype: str) -> Any:
    """[B, L, H, D] in memory, as most models keep it."""
    return framework.array(x.swapaxes(1, 2), dtype).swapaxes(1, 2)


def _padded(pad: int) -> Layout:
    def layout(framework: Framework, x: np.ndarray, dtype: str) -> Any:
        buffer = framework.full((*x.shape[:3], x.shape[3] + pad), math.nan, dtype)
        view = buffer[..., : x.shape[3]]
        view[...] = framework.array(x, dtype)
        return view

    return layout


def _offset(elements: int) -> Layout:
    def layout(framework: Framework, x: np.ndarray, dtype: str) -> Any:
        buffer = framework.full((x.size + elements + 8,), math.nan, dtype)
        view = buffer[elements : elements + x.size].reshape(x.shape)
        view[...] = framework.array(x, dtype)
        return view

    return layout


def interleaved_rows(framework: Framework, x: np.ndarray, dtype: str) -> Any:
    batch, heads, rows, head_dim = x.shape
    view = framework.full((batch, heads, 2 * rows, head_dim), math.nan, dtype)[:, :, ::2]
    view[...] = framework.array(x, dtype)
    return view


def part_of_batch(framework: Framework, x: np.ndarray, dtype: str) -> Any:
    """Strides of batch and head that no shape explains, as a slice of q, k, v in one tensor."""
    batch, heads, rows, head_dim = x.shape
    buffer = framework.full((batch + 1, 2, heads + 2, rows + 3, head_dim), math.nan, dtype)
    view = buffer[1:, 1, 1:-1, 1:-2]
    view[...] = framework.array(x, dtype)
    return view


def _reversed(axis: int) -> Layout:
    index = tuple(slice(None, None, -1) if i == axis else slice(None) for i in range(4))

    def layout(framework: Framework, x: np.ndarray, dtype: str) -> Any:
        return framework.array(np.ascontiguousarray(x[index]), dtype)[index]

    return layout


def last_dim_strided(framework: Framework, x: np.ndarray, dtype: str) -> Any:
    """Kernels take stride 1 there; the package has to copy."""
    view = framework.full((*x.shape[:3], 2 * x.shape[3]), math.nan, dtype)[..., ::2]
    view[...] = framework.array(x, dtype)
    return view


def last_dim_transposed(framework: Framework, x: np.ndarray, dtype: str) -> Any:
    return framework.array(np.ascontiguousarray(x.swapaxes(2, 3)), dtype).swapaxes(2, 3)


LAYOUTS: dict[str, Layout] = {
    "contiguous": contiguous,
    "heads_last": heads_last,
    "row_stride_plus_1": _padded(1),
    "row_stride_plus_2": _padded(2),
    # Rows of 33 then start at multiples of 16 bytes, and don't end there.
    "row_stride_plus_7": _padded(7),
    "row_stride_plus_16": _padded(16),
    "offset_1": _offset(1),
    "offset_2": _offset(2),
    "offset_4": _offset(4),
    "interleaved_rows": interleaved_rows,
    "part_of_batch": part_of_batch,
    "reversed_batch": _reversed(0),
    "reversed_heads": _reversed(1),
    "reversed_rows": _reversed(2),
}
# Only for q, k and v: an output like this is refused.
INPUT_LAYOUTS: dict[str, Layout] = LAYOUTS | {
    "last_dim_strided": last_dim_strided,
    "last_dim_transposed": last_dim_transposed,
    "last_dim_reversed": _reversed(3),
}


def supports(framework: Framework, layout: str) -> bool:
    if "reversed" in layout:
        return framework.has_negative_strides
    return framework.has_views or layout == "contiguous"


# ---- kernels -------------------------------------------------------------------------------------

KERNELS = {kernel.name: kernel for kernel in fastattn.kernels()}


@dataclass(frozen=True)
class Runner:
    """One kernel, called through ``fastattn.forward`` with one framework's arrays."""

    kernel: Any  # fastattn.KernelInfo
    framework: Framework
    emulated: bool = False  # a CUDA kernel's source, run on the CPU

    def __str__(self) -> str:
        return f"{self.kernel.name}-{'emulated' if self.emulated else self.framework}"

    def takes(self, case: Case) -> bool:
        """What the kernel that will run declares."""
        dims = (case.head_dim, case.head_dim_v)
        kernel = self.acting(case)
        return (
            case.dtype in kernel.dtypes
            and case.dtype in self.framework.dtypes
            and all(kernel.head_dim_min <= d <= kernel.head_dim_max for d in dims)
            and (kernel.head_dim_v_differs or dims[0] == dims[1])
            and (kernel.lengths_differ or case.len_q == case.len_kv)
            and (kernel.grouped_heads or case.heads_q == case.heads_kv)
            and (kernel.causal or not case.causal)
            and (kernel.window or case.window is None)
        )

    def acting(self, case: Case) -> Any:
        """The kernel, or the one that it hands this head dim to."""
        own = self.kernel.head_dim_min <= case.head_dim <= self.kernel.head_dim_max
        return self.kernel if own or not self.kernel.redirect else KERNELS[self.kernel.redirect]

    def expect(self, q: Any, k: Any, v: Any, **options: Any) -> Expected:
        arithmetic = {"backend": self.kernel.backend, "tensor_cores": self.on_tensor_cores}
        return expect(q, k, v, **arithmetic, **options)

    def expected(self, case: Case) -> Expected:
        return expected(case, self.kernel.backend, self.on_tensor_cores)

    @property
    def on_tensor_cores(self) -> bool:
        return "tensor cores" in self.kernel.arithmetic

    def own_case(self, case: Case) -> Case:
        """``case`` with a head dim of the kernel's own, where it would redirect."""
        head_dim = self.own_head_dim(case.head_dim)
        return replace(case, head_dim=head_dim, head_dim_v=head_dim)

    def own_head_dim(self, wanted: int) -> int:
        return min(max(wanted, self.kernel.head_dim_min), self.kernel.head_dim_max)

    def forward(self, q: Any, k: Any, v: Any, **options: Any) -> Any:
        """``fastattn.forward`` with this kernel; skips where this GPU is too small for it."""
        try:
            return fastattn.forward(q, k, v, kernel=self.kernel.name, **options)
        except NotImplementedError as refusal:
            if "shared memory" in str(refusal) or "compute capability" in str(refusal):
                pytest.skip(str(refusal))
            raise

    def run(
        self, q: Any, k: Any, v: Any, *, dtype: str = "float32", **options: Any
    ) -> tuple[np.ndarray, np.ndarray]:
        """Host values in, ``(out, lse)`` on the host out.

        out is poisoned, inside and around: what the kernel does not write stays NaN, what it writes
        beside it shows.
        """
        arrays = [self.framework.array(x, dtype) for x in (q, k, v)]
        shape = (*q.shape[:3], v.shape[3])
        self.framework.poison(shape[:3])
        if not self.framework.has_views:
            out = self.framework.full(shape, math.nan, dtype)
            out, lse = self.forward(*arrays, out=out, return_lse=True, **options)
            return testing.to_numpy(out), testing.to_numpy(lse)
        margin = 64  # elements: 128 bytes or more, so that out stays aligned
        size = math.prod(shape)
        buffer = self.framework.full((size + 2 * margin,), math.nan, dtype)
        view = buffer[margin : margin + size].reshape(shape)
        returned, lse = self.forward(*arrays, out=view, return_lse=True, **options)
        assert returned is view
        host = testing.to_numpy(buffer)
        around = np.concatenate([host[:margin], host[margin + size :]])
        assert np.isnan(around).all(), "the kernel wrote outside of out"
        return host[margin : margin + size].reshape(shape), testing.to_numpy(lse)

    def run_case(self, case: Case) -> tuple[np.ndarray, np.ndarray]:
        return self.run(*inputs(case), dtype=case.dtype, **case.options)


RUNNERS = [Runner(k, f) for k in KERNELS.values() for f in frameworks(k.backend)]
# For tests of many calls: what a kernel computes does not depend on the framework.
ONE_PER_KERNEL = [Runner(k, frameworks(k.backend)[0]) for k in KERNELS.values()]


def takes_any_call(kernel: Any) -> bool:
    """A production kernel: whatever the mask, the head dims, the lengths and the groups."""
    return (
        kernel.causal
        and kernel.window
        and kernel.head_dim_v_differs
        and kernel.lengths_differ
        and kernel.grouped_heads
    )


# The CUDA kernels among them run here without a GPU as well: their own source, emulated. Slow, so
# for small problems.
EMULATED = [
    Runner(k, NumPy(), emulated=True) for k in fastattn.kernels(emulated=True) if takes_any_call(k)
]
PRODUCTION = [r for r in ONE_PER_KERNEL if takes_any_call(r.kernel)]


def param(*values: Any, runner: Runner, id: str | None = None) -> Any:
    """A pytest parameter set that carries the marker of the runner's device."""
    marks = [pytest.mark.gpu] if runner.kernel.backend == "cuda" else []
    return pytest.param(*values, runner, marks=marks, id=id or str(runner))


def runners(*needs: Case, among: Iterable[Runner] = RUNNERS) -> Any:
    """Decorator: a parameter ``runner`` over the kernels that take each of these calls."""
    params = [param(runner=r) for r in among if all(r.takes(case) for case in needs)]
    return pytest.mark.parametrize("runner", params)


def cases(problems: Iterable[Case], among: Iterable[Runner] = RUNNERS) -> Any:
    """Decorator: parameters ``case`` and ``runner``, a test for each kernel that takes the case."""
    among = list(among)
    params = [
        param(case, runner=r, id=f"{case}-{r}") for case in problems for r in among if r.takes(case)
    ]
    return pytest.mark.parametrize(("case", "runner"), params)


def sampled(problems: Iterable[Case]) -> Any:
    """``cases``, where a kernel's second framework gets every fourth problem: what is computed does
    not depend on whose arrays they are.
    """
    params = [
        param(case, runner=r, id=f"{case}-{r}")
        for case in problems
        for r in RUNNERS
        if r.takes(case) and (r in ONE_PER_KERNEL or zlib.crc32(str(case).encode()) % 4 == 0)
    ]
    return pytest.mark.parametrize(("case", "runner"), params)


def taking(
    *needs: Case, dtypes: Iterable[str] = DTYPES, among: Iterable[Runner] = (*RUNNERS, *EMULATED)
) -> Any:
    """Decorator: parameters ``dtype`` and ``runner``, over each kernel that takes these calls in
    each of its dtypes.
    """
    among = list(among)
    params = [
        param(dtype, runner=r, id=f"{dtype}-{r}")
        for dtype in dtypes
        for r in among
        if all(r.takes(replace(case, dtype=dtype)) for case in (Case(), *needs))
    ]
    return pytest.mark.parametrize(("dtype", "runner"), params)
