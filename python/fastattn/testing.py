"""What a test of an attention kernel needs: an oracle, a yardstick, an error norm, host copies.

    expected, expected_lse = fastattn.testing.reference(q, k, v, causal=True)
    out, lse = fastattn.forward(q, k, v, causal=True, return_lse=True)
    plain, _ = fastattn.testing.naive(q, k, v, causal=True)
    assert error(out, expected) <= 2 * error(plain, expected)

Only NumPy is imported. Symbols: B batch, Hq/Hkv query and key/value heads, M query length, N key
length, D head dim of q and k, Dv head dim of v.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from fastattn import _core

__all__ = ["CudaArray", "dtype_name", "error", "naive", "reference", "round_to", "to_numpy"]

Array = npt.NDArray[Any]
Float64Array = npt.NDArray[np.float64]
Float32Array = npt.NDArray[np.float32]

# Scores held at one time. 2 MiB of float64 stays in a core's L2 cache, and bounds the memory.
_SCORES_PER_BLOCK = 1 << 18
# Keys that a sum by terms adds up before it goes on: a tile's.
_RUN = 64


def reference(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    scale: float | None = None,
) -> tuple[Float64Array, Float64Array]:
    """Attention evaluated in float64: the oracle.

    Parameters
    ----------
    q : [B, Hq, M, D], any array that ``to_numpy`` takes, of any real dtype.
    k : [B, Hkv, N, D]. Hq is a multiple of Hkv; query head h uses key head h // (Hq / Hkv).
    v : [B, Hkv, N, Dv].
    causal : row i sees no key after i + N - M.
    window : (left, right). Row i sees keys i + N - M - left to i + N - M + right; -1 is no limit.
    scale : factor of the scores. None is 1 / sqrt(D).

    Returns
    -------
    ``(out, lse)``: out [B, Hq, M, Dv] = softmax(scale q k^T) v and lse [B, Hq, M] =
    log(sum(exp(scale q k^T))), natural logarithm, both float64.

    Raises
    ------
    ValueError : shapes that disagree, or a window with a number below -1.

    Notes
    -----
    Special values: a key that a row does not see contributes nothing to it, whatever k and v hold
    there (a mask that multiplies would make 0 * NaN of it). A row without any weight, one that sees
    no key or none with a score above -inf, gives out 0 and lse -inf. All else is plain IEEE
    arithmetic on the visible keys: a NaN among them gives NaN; a score of +inf gives out and lse
    NaN; a weight that underflows to zero times an infinite v gives NaN. That last
    threshold is float64's, exp(-745), and a kernel's float32 has another, exp(-104).

    Memory: one block of scores (2 MiB) plus the result. Time: 4 B Hq M N D flops of float64.

    Source: the definition, "Attention Is All You Need" (2017), eq. 1; the maximum is subtracted
    before the exponential.
    """
    return _evaluate(q, k, v, causal, window, scale, np.dtype(np.float64), "float64")


def naive(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    scale: float | None = None,
    dtype: str | None = None,
    by_terms: bool = False,
) -> tuple[Float32Array, Float32Array]:
    """The textbook evaluation with float32 arithmetic: the yardstick of a kernel's error.

    Arguments, special values and errors as ``reference``. ``dtype`` is the type that a program
    without fusion would store its matrices in: "float32", "float16" or "bfloat16"; None is q's own
    (float32 for any other type). For the two half types the weights P and the result are rounded to
    that type, products are summed in float32, as a matrix multiply on tensor cores does.

    ``by_terms`` adds the terms of each sum one after the other, as loops do: over the head dim in
    one go, over keys in runs of 64. A library's matrix product of few rows may sum in trees, which
    is up to twice as exact as a kernel that takes tile after tile: take the worse of the two. It
    takes 4 to 30 times as long, and overflows where one of its partial sums does.

    Returns
    -------
    ``(out, lse)`` as ``reference``, float32 arrays (out with the half type's values).
    """
    if dtype is None:
        dtype = dtype_name(q)
        if dtype not in ("float16", "bfloat16"):
            dtype = "float32"
    elif dtype not in ("float32", "float16", "bfloat16"):
        raise ValueError(f'dtype: "float32", "float16" or "bfloat16", not {dtype!r}')
    return _evaluate(q, k, v, causal, window, scale, np.dtype(np.float32), dtype, by_terms)


def error(actual: Any, expected: Any) -> float:
    """Normwise relative error ||actual - expected|| / ||expected||, Frobenius norms, in float64.

    NaN and infinities must stand at the same positions (infinities with the same sign); the norms
    are over the rest. 0 for empty arrays; inf where expected is all zero and actual is not.

    Raises
    ------
    AssertionError : shapes, NaN positions or infinities differ; says where first.
    """
    a = np.asarray(to_numpy(actual), np.float64)
    e = np.asarray(to_numpy(expected), np.float64)
    if a.shape != e.shape:
        raise AssertionError(f"shape {a.shape}, expected {e.shape}")
    finite = np.isfinite(e)
    # NaN differs from itself, so two comparisons: the NaN positions, then all other special values.
    wrong = (np.isnan(a) != np.isnan(e)) | ((np.isinf(a) | np.isinf(e)) & (a != e))
    if wrong.any():
        first = tuple(int(i) for i in np.argwhere(wrong)[0])
        raise AssertionError(
            f"{int(wrong.sum())} of {wrong.size} NaN or infinite positions differ; first at "
            f"{first}: {a[first]}, expected {e[first]}"
        )
    a, e = a[finite], e[finite]
    largest = float(np.abs(e).max(initial=0.0))
    if largest == 0.0:
        return math.inf if a.any() else 0.0
    # Scaled first: the square of a large float64 would overflow.
    off, size = (float(np.square(x / largest).sum()) for x in (a - e, e))
    return math.sqrt(off / size)


def dtype_name(x: Any) -> str:
    """The dtype of any framework's array as NumPy would spell it: "float32", "bfloat16"."""
    dtype = x.dtype if hasattr(x, "dtype") else np.asarray(x).dtype
    return str(dtype).rpartition(".")[2]


def round_to(x: Any, dtype: str) -> Float32Array:
    """float32 values rounded to the nearest value of ``dtype``, ties to even, still in float32.

    ``dtype``: "float32" (a float64 is rounded once), "float16" or "bfloat16". NumPy has no
    bfloat16; this gives its values without one.

    Raises
    ------
    ValueError : another dtype.
    """
    values = np.asarray(x, np.float32)
    if dtype == "float32":
        return values
    if dtype == "float16":
        with np.errstate(over="ignore"):
            return values.astype(np.float16).astype(np.float32)
    if dtype == "bfloat16":
        return _from_bfloat16_bits(_bfloat16_bits(values))
    raise ValueError(f'dtype: "float32", "float16" or "bfloat16", not {dtype!r}')


def to_numpy(x: Any) -> Array:
    """Any framework's array, on any device, as a host NumPy array (a view where that is possible).

    torch, CuPy and JAX arrays, ``CudaArray``, NumPy arrays and whatever ``np.from_dlpack`` or
    ``np.asarray`` takes. bfloat16, which NumPy lacks, comes back as float32 with the same values,
    from every framework. Waits for the device's work on the array.
    """
    if isinstance(x, CudaArray):
        return x.to_numpy()
    package = type(x).__module__.partition(".")[0]
    if package == "torch":
        x = x.detach().cpu().resolve_conj().resolve_neg()
        return _numpy((x.float() if dtype_name(x) == "bfloat16" else x).numpy())
    if package == "cupy":
        return _numpy(x.get())
    if hasattr(x, "__dlpack__") and not hasattr(x, "__array__"):
        return _numpy(np.from_dlpack(x))
    return _numpy(np.asarray(x))


class CudaArray:
    """A dense array in GPU memory, for a machine that has a GPU and no array framework.

    It holds data, speaks DLPack and can be allocated, no more: enough for ``fastattn.forward``.

        q, k, v = (CudaArray.from_numpy(x) for x in (q, k, v))
        out = fastattn.forward(q, k, v).to_numpy()
    """

    def __init__(self, buffer: _core.CudaBuffer, shape: tuple[int, ...], dtype: str) -> None:
        """Wraps ``buffer``, which holds prod(shape) elements of ``dtype``, in row-major order."""
        self._buffer = buffer
        self._shape = shape
        self._dtype = dtype

    @classmethod
    def from_numpy(
        cls, x: npt.ArrayLike, *, dtype: str | None = None, device: int = 0
    ) -> CudaArray:
        """Copies ``x`` to GPU ``device`` as ``dtype``: "float32", "float16" or "bfloat16".

        None is x's own dtype. Raises ValueError for another dtype, RuntimeError where CUDA fails.
        """
        host = np.asarray(x)
        dtype = dtype or dtype_name(host)
        if dtype == "bfloat16":
            bits: Array = _bfloat16_bits(np.asarray(host, np.float32))
        elif dtype in ("float32", "float16"):
            bits = np.asarray(host, dtype)
        else:
            raise ValueError(f'dtype: "float32", "float16" or "bfloat16", not {dtype!r}')
        bits = np.ascontiguousarray(bits)
        from fastattn import _core  # not at import: the oracle needs no compiled module

        buffer = _core.CudaBuffer(bits.nbytes, device)
        buffer.copy_from_host(bits)
        return cls(buffer, host.shape, dtype)

    def to_numpy(self) -> Array:
        """The data on the host, after all work of the device; bfloat16 as float32."""
        bits = np.empty(self._shape, np.uint16 if self._dtype == "bfloat16" else self._dtype)
        self._buffer.copy_to_host(bits)
        return _from_bfloat16_bits(bits) if self._dtype == "bfloat16" else bits

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the array, as NumPy's."""
        return self._shape

    @property
    def dtype(self) -> str:
        """Its name: NumPy has no bfloat16."""
        return self._dtype

    @property
    def device(self) -> int:
        """The number of the GPU."""
        return int(self._buffer.device)

    def __array_namespace__(self, *, api_version: str | None = None) -> type[_Namespace]:
        """What of the array API standard there is: ``empty`` and the names of the dtypes."""
        return _Namespace

    def __dlpack__(self, **kwargs: Any) -> object:
        return self._buffer.dlpack(self._shape, self._dtype, **kwargs)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, self.device)  # kDLCUDA

    def __repr__(self) -> str:
        return f"CudaArray(shape={self._shape}, dtype={self._dtype}, device={self.device})"


class _Namespace:
    """``CudaArray.__array_namespace__()``."""

    float32 = "float32"
    float16 = "float16"
    bfloat16 = "bfloat16"

    @staticmethod
    def empty(shape: tuple[int, ...], *, dtype: str, device: int) -> CudaArray:
        from fastattn import _core

        size = 4 if dtype == "float32" else 2
        return CudaArray(_core.CudaBuffer(math.prod(shape) * size, device), tuple(shape), dtype)


def _evaluate(
    q: Any,
    k: Any,
    v: Any,
    causal: bool,
    window: tuple[int, int] | None,
    scale: float | None,
    compute: np.dtype[Any],
    store: str,
    by_terms: bool = False,
) -> tuple[Array, Array]:
    """``reference`` and ``naive``: one evaluation, in the arithmetic of ``compute``."""
    q, k, v = to_numpy(q), to_numpy(k), to_numpy(v)
    _check_shapes(q, k, v)
    batch, heads_q, len_q, head_dim = q.shape
    heads_kv, len_kv, head_dim_v = v.shape[1:]
    factor = compute.type(1.0 / math.sqrt(head_dim) if scale is None else scale)
    left, right = (-1, -1) if window is None else (int(window[0]), int(window[1]))
    if left < -1 or right < -1:
        raise ValueError(f"window: numbers from -1, not {window}")

    # The visible keys of row i are first[i] <= j < end[i].
    position = np.arange(len_q) + (len_kv - len_q)
    first = np.zeros_like(position) if left < 0 else np.maximum(position - left, 0)
    end = np.full_like(position, len_kv)
    if right >= 0:
        end = np.minimum(end, position + right + 1)
    if causal:
        end = np.minimum(end, position + 1)

    out = np.zeros((batch, heads_q, len_q, head_dim_v), compute)
    lse = np.full((batch, heads_q, len_q), -np.inf, compute)
    rows = max(1, _SCORES_PER_BLOCK // max(1, len_kv))
    for b, head in np.ndindex(batch, heads_kv):
        keys = k[b, head].astype(compute)
        values = v[b, head].astype(compute)
        infinite = np.flatnonzero(~np.isfinite(values).all(axis=1))
        group = heads_q // heads_kv
        for h in range(head * group, (head + 1) * group):
            with np.errstate(all="ignore"):
                queries = q[b, h].astype(compute) * factor
            for start in range(0, len_q, rows):
                block = slice(start, min(start + rows, len_q))
                rows_of = (queries[block], keys, values, infinite, first[block], end[block])
                out[b, h, block], lse[b, h, block] = _rows(*rows_of, store, by_terms)
    return out, lse


def _rows(
    queries: Array,
    keys: Array,
    values: Array,
    infinite: Array,
    first: Array,
    end: Array,
    store: str,
    by_terms: bool,
) -> tuple[Array, Array]:
    """Rows of one head. ``queries`` are scaled; ``infinite`` are the keys whose v is not finite."""
    low, high = int(first.min()), int(end.max())
    if low >= high:
        return np.zeros((len(queries), values.shape[1]), values.dtype), np.full(
            len(queries), -np.inf, values.dtype
        )
    with np.errstate(all="ignore"):
        keys, values = keys[low:high], values[low:high]
        scores = _by_terms(queries, keys.T, keys.shape[1]) if by_terms else queries @ keys.T
        visible = None
        if first.max() > low or end.min() < high:
            column = np.arange(low, high)
            visible = (column >= first[:, None]) & (column < end[:, None])
            scores[~visible] = -np.inf
        row_max = scores.max(axis=1, keepdims=True)
        # exp(-inf - -inf) would be NaN: subtract 0 where no score is above -inf.
        row_max[row_max == -np.inf] = 0
        scores -= row_max
        weights = np.exp(scores, out=scores)
        if by_terms:
            row_sum = _by_terms(weights, np.ones((len(keys), 1), weights.dtype), _RUN)
        else:
            row_sum = weights.sum(axis=1, keepdims=True)
        lse = (row_max + np.log(row_sum))[:, 0]
        weights /= np.where(row_sum == 0, 1, row_sum)
        if store in ("float16", "bfloat16"):
            weights = round_to(weights, store)

        infinite = infinite[(infinite >= low) & (infinite < high)] - low
        clean = values
        if len(infinite):
            # An invisible key has weight 0, and 0 * inf is NaN: add these keys where they are seen.
            clean = np.where(np.isfinite(clean), clean, 0)
        out = _by_terms(weights, clean, _RUN) if by_terms else weights @ clean
        for j in infinite:
            dirty = np.where(np.isfinite(values[j]), 0, values[j])
            seen = slice(None) if visible is None else visible[:, j]
            out[seen] += weights[seen, j, None] * dirty
        if store in ("float16", "bfloat16"):
            out = round_to(out, store)
        blind = first >= end
        out[blind] = 0
        lse[blind] = -np.inf
    return out, lse


def _by_terms(a: Array, b: Array, run: int) -> Array:
    """``a @ b``, each sum term by term, in runs of ``run`` terms whose sums are added in turn."""
    rows, terms = a.shape
    columns = b.shape[1]
    count = -(-terms // run)
    missing = count * run - terms
    a = np.pad(a, ((0, 0), (0, missing))).reshape(rows, count, run)
    b = np.pad(b, ((0, missing), (0, 0))).reshape(count, run, columns)
    runs = np.zeros((rows, count, columns), a.dtype)
    for i in range(run):
        runs += a[:, :, i, None] * b[:, i]
    total = runs[:, 0]
    for part in range(1, count):
        total = total + runs[:, part]
    return total


def _check_shapes(q: Array, k: Array, v: Array) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4:
            raise ValueError(
                f"{name}: 4 dimensions [batch, heads, length, head_dim], not {x.shape}"
            )
    if k.shape[:3] != v.shape[:3]:
        raise ValueError(f"v: {v.shape} does not match k {k.shape}")
    if k.shape[0] != q.shape[0] or k.shape[3] != q.shape[3]:
        raise ValueError(f"k: {k.shape} does not match q {q.shape}")
    if q.shape[1] % k.shape[1] if k.shape[1] else q.shape[1]:
        raise ValueError(f"q: {q.shape[1]} heads are no multiple of k's {k.shape[1]}")
    if q.shape[3] == 0:
        raise ValueError("q: head_dim 0")


def _numpy(x: Array) -> Array:
    if x.dtype.name == "bfloat16":  # ml_dtypes: JAX's and NumPy users'
        return _from_bfloat16_bits(x.view(np.uint16))
    return x


def _bfloat16_bits(x: Float32Array) -> npt.NDArray[np.uint16]:
    bits = np.ascontiguousarray(x).view(np.uint32).reshape(x.shape)
    # To nearest, ties to even: half of the last kept bit, less one where that bit is 0.
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    # A NaN could round to infinity; set its quiet bit instead.
    quiet = (bits >> np.uint32(16)) | np.uint32(0x40)
    kept: npt.NDArray[np.uint32] = np.where(np.isnan(x), quiet, rounded)
    return kept.astype(np.uint16)


def _from_bfloat16_bits(bits: npt.NDArray[np.uint16]) -> Float32Array:
    wide: npt.NDArray[np.uint32] = bits.astype(np.uint32) << np.uint32(16)
    return wide.view(np.float32)
