"""The oracle itself: against the definition in plain Python, torch in float64, and by hand."""

from __future__ import annotations

import importlib.util
import math

import numpy as np
import pytest

from fastattn import testing

HAVE_TORCH = importlib.util.find_spec("torch") is not None
needs_torch = pytest.mark.skipif(not HAVE_TORCH, reason="torch is not installed")


def dot(x, y):
    return math.fsum(float(a) * float(b) for a, b in zip(x, y, strict=True))


def by_definition(q, k, v, causal, window, scale):
    """Loops over single numbers, so that it shares no idea with the vectorised oracle."""
    batch, heads_q, len_q, _ = q.shape
    len_kv, head_dim_v = v.shape[2:]
    group = heads_q // k.shape[1]
    left, right = window if window is not None else (-1, -1)
    out = np.zeros((batch, heads_q, len_q, head_dim_v))
    lse = np.full((batch, heads_q, len_q), -math.inf)
    for b in range(batch):
        for h in range(heads_q):
            for i in range(len_q):
                centre = i + len_kv - len_q
                seen = [
                    j
                    for j in range(len_kv)
                    if (not causal or j <= centre)
                    and (left < 0 or j >= centre - left)
                    and (right < 0 or j <= centre + right)
                ]
                if not seen:
                    continue
                scores = [scale * dot(q[b, h, i], key) for key in k[b, h // group, seen]]
                top = max(scores)
                weights = [math.exp(s - top) for s in scores]
                total = math.fsum(weights)
                lse[b, h, i] = top + math.log(total)
                for d in range(head_dim_v):
                    out[b, h, i, d] = dot(weights, v[b, h // group, seen, d]) / total
    return out, lse


def qkv(shape_q, shape_k, head_dim_v=None, seed=0):
    rng = np.random.default_rng(seed)
    shape_v = (*shape_k[:3], head_dim_v or shape_k[3])
    return tuple(rng.standard_normal(s, dtype=np.float32) for s in (shape_q, shape_k, shape_v))


@pytest.mark.parametrize("lengths", [(1, 1), (4, 4), (5, 3), (3, 7), (9, 2)])
@pytest.mark.parametrize(
    "mask",
    [
        {},
        {"causal": True},
        {"window": (1, 0)},
        {"window": (0, 2)},
        {"window": (-1, 1)},
        {"window": (2, -1), "causal": True},
        {"window": (0, 0)},
        {"window": (-1, -1)},
        {"window": (1000, 1000)},
    ],
    ids=str,
)
def test_reference_is_the_definition(lengths, mask):
    m, n = lengths
    q, k, v = qkv((2, 4, m, 3), (2, 2, n, 3), 5)
    out, lse = testing.reference(q, k, v, scale=0.7, **mask)
    expected = by_definition(q, k, v, mask.get("causal", False), mask.get("window"), 0.7)
    np.testing.assert_allclose(out, expected[0], rtol=1e-13, atol=1e-15)
    np.testing.assert_allclose(lse, expected[1], rtol=1e-13, atol=1e-15)
    assert out.dtype == lse.dtype == np.float64


@needs_torch
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [(257, 257), (64, 300), (300, 1200)])
def test_reference_is_torch_in_float64(lengths, causal):
    import torch

    m, n = lengths
    q, k, v = qkv((2, 6, m, 40), (2, 3, n, 40), 24)
    out, lse = testing.reference(q, k, v, causal=causal)
    tq, tk, tv = (torch.from_numpy(x).double() for x in (q, k, v))
    tk, tv = tk.repeat_interleave(2, dim=1), tv.repeat_interleave(2, dim=1)
    scores = tq @ tk.mT / math.sqrt(40)
    if causal:
        hidden = torch.ones(m, n, dtype=torch.bool).triu(n - m + 1)
        scores = scores.masked_fill(hidden, -math.inf)
    assert testing.error(out, scores.softmax(-1) @ tv) < 1e-14
    assert testing.error(lse, torch.logsumexp(scores, -1)) < 1e-14


def test_reference_is_scipys_logsumexp():
    special = pytest.importorskip("scipy.special")
    q, k, v = qkv((1, 2, 30, 8), (1, 2, 50, 8))
    scores = 3.0 * (q.astype(np.float64) @ k.astype(np.float64).swapaxes(2, 3))
    out, lse = testing.reference(q, k, v, scale=3.0)
    assert testing.error(lse, special.logsumexp(scores, axis=-1)) < 1e-14
    assert testing.error(out, special.softmax(scores, axis=-1) @ v.astype(np.float64)) < 1e-14


def test_blocks_of_rows_make_no_difference(monkeypatch):
    q, k, v = qkv((1, 2, 70, 8), (1, 1, 90, 8))
    v[0, 0, 40] = np.inf
    whole = testing.reference(q, k, v, window=(11, 3))
    monkeypatch.setattr(testing, "_SCORES_PER_BLOCK", 300)
    for a, b in zip(testing.reference(q, k, v, window=(11, 3)), whole, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12)


def test_rows_without_keys():
    q, k, v = qkv((1, 1, 5, 4), (1, 1, 3, 4))
    v[..., 0, :] = np.nan  # the one key that row 2 sees; rows 0 and 1 see none
    out, lse = testing.reference(q, k, v, causal=True)
    assert (out[0, 0, :2] == 0).all()
    assert (lse[0, 0, :2] == -np.inf).all()
    assert np.isnan(out[0, 0, 2:]).all()
    assert np.isfinite(lse[0, 0, 2:]).all()


@pytest.mark.parametrize("evaluate", [testing.reference, testing.naive])
def test_hidden_keys_never_contribute(evaluate):
    q, k, v = qkv((1, 2, 6, 4), (1, 2, 6, 4))
    clean = evaluate(q, k, v, causal=True)
    k[:, :, 4:] = np.nan
    v[:, :, 4:] = np.inf
    v[:, :, 5] = np.nan
    dirty = evaluate(q, k, v, causal=True)
    for a, b in zip(clean, dirty, strict=True):
        np.testing.assert_array_equal(a[:, :, :4], b[:, :, :4])
        assert np.isnan(b[:, :, 4:]).all()


def test_infinite_values_where_they_are_seen():
    q, k, v = qkv((1, 1, 3, 4), (1, 1, 3, 2))
    k = np.zeros((1, 1, 3, 4), np.float32)
    v[0, 0, 1] = [np.inf, 7.0]
    out, lse = testing.reference(q, k, v, causal=True)
    np.testing.assert_array_equal(out[0, 0, 0], v[0, 0, 0].astype(np.float64))
    np.testing.assert_array_equal(out[0, 0, 1:, 0], [np.inf, np.inf])
    np.testing.assert_allclose(out[0, 0, 2, 1], v[0, 0, :, 1].astype(np.float64).mean())
    np.testing.assert_allclose(lse[0, 0], np.log([1, 2, 3]))
    v[0, 0, 2, 0] = -np.inf
    assert np.isnan(testing.reference(q, k, v)[0][0, 0, :, 0]).all()


def test_infinite_scores():
    q = np.ones((1, 1, 2, 1))
    v = np.ones((1, 1, 2, 1))
    for k0, out_is_nan, lse_is in ((np.inf, True, math.nan), (-np.inf, False, 1.0)):
        k = np.array([k0, 1.0]).reshape(1, 1, 2, 1)
        out, lse = testing.reference(q, k, v, scale=1.0)
        assert np.isnan(out).all() == out_is_nan
        np.testing.assert_array_equal(lse, np.full((1, 1, 2), lse_is))
    out, lse = testing.reference(q, np.full((1, 1, 2, 1), -np.inf), v, scale=1.0)
    assert (out == 0).all()
    assert (lse == -np.inf).all()


def test_scores_beyond_exp():
    q = np.array([1e150, -1e150]).reshape(1, 1, 2, 1)
    k = np.array([1e150, 2e150]).reshape(1, 1, 2, 1)
    v = np.array([3.0, 5.0]).reshape(1, 1, 2, 1)
    out, lse = testing.reference(q, k, v, scale=1.0)
    np.testing.assert_array_equal(out.ravel(), [5.0, 3.0])
    np.testing.assert_allclose(lse.ravel(), [2e300, -1e300])


@pytest.mark.parametrize("shapes", [(0, 2, 3, 4), (2, 0, 3, 4), (2, 2, 0, 4), (2, 2, 3, 0)])
def test_empty(shapes):
    batch, heads, m, n = shapes
    q, k, v = qkv((batch, heads, m, 8), (batch, heads, n, 8), 5)
    out, lse = testing.reference(q, k, v)
    assert out.shape == (batch, heads, m, 5)
    assert lse.shape == (batch, heads, m)
    assert (out == 0).all()
    assert (lse == -np.inf).all()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"q": (2, 3, 8)}, "q:"),
        ({"k": (3, 2, 5, 8), "v": (3, 2, 5, 8)}, "k:"),
        ({"k": (2, 2, 5, 4), "v": (2, 2, 5, 4)}, "k:"),
        ({"v": (2, 2, 6, 8)}, "v:"),
        ({"q": (2, 3, 4, 8)}, "q:"),
        ({"q": (2, 2, 4, 0), "k": (2, 2, 5, 0)}, "head_dim"),
    ],
)
def test_wrong_shapes(changes, named):
    shapes = {"q": (2, 4, 4, 8), "k": (2, 2, 5, 8), "v": (2, 2, 5, 8)} | changes
    with pytest.raises(ValueError, match=named):
        testing.reference(*(np.ones(s) for s in shapes.values()))


def test_wrong_window():
    x = np.ones((1, 1, 2, 2))
    with pytest.raises(ValueError, match="window"):
        testing.reference(x, x, x, window=(-2, 0))


def test_error_is_normwise():
    expected = np.array([3.0, 4.0, 0.0])
    assert testing.error([3.0, 4.0, 5e-3], expected) == pytest.approx(1e-3)
    assert testing.error(expected, expected) == 0
    assert testing.error(np.zeros(3), np.zeros(3)) == 0
    assert testing.error([0.0, 1e-30], np.zeros(2)) == math.inf
    assert testing.error(np.zeros((0, 4)), np.zeros((0, 4))) == 0
    assert testing.error(expected * 1e300, expected * 1.5e300) == pytest.approx(1 / 3)
    assert testing.error([np.nan, 1.0, -np.inf], [np.nan, 2.0, -np.inf]) == 0.5


@pytest.mark.parametrize(
    ("actual", "expected"),
    [
        ([np.nan, 1.0], [1.0, 1.0]),
        ([1.0, 1.0], [np.nan, 1.0]),
        ([np.inf, 1.0], [1.0, 1.0]),
        ([1.0, 1.0], [1.0, -np.inf]),
        ([np.inf, 1.0], [-np.inf, 1.0]),
        ([np.inf, 1.0], [np.nan, 1.0]),
        ([1.0], [1.0, 1.0]),
    ],
)
def test_error_refuses_other_special_values(actual, expected):
    with pytest.raises(AssertionError, match=r"first at|shape"):
        testing.error(np.array(actual), np.array(expected))


def test_naive_is_float32_and_less_exact():
    q, k, v = qkv((2, 2, 100, 64), (2, 2, 100, 64))
    exact = testing.reference(q, k, v)
    plain = testing.naive(q, k, v)
    assert plain[0].dtype == plain[1].dtype == np.float32
    assert 1e-8 < testing.error(plain[0], exact[0]) < 1e-6
    assert 1e-9 < testing.error(plain[1], exact[1]) < 1e-6


@pytest.mark.parametrize(("dtype", "unit"), [("float16", 2.0**-11), ("bfloat16", 2.0**-8)])
def test_naive_of_a_half_type_rounds_weights_and_result(dtype, unit):
    q, k, v = (testing.round_to(x, dtype) for x in qkv((2, 2, 100, 64), (2, 2, 100, 64)))
    exact = testing.reference(q, k, v)
    plain = testing.naive(q, k, v, dtype=dtype)
    np.testing.assert_array_equal(plain[0], testing.round_to(plain[0], dtype))
    assert unit / 8 < testing.error(plain[0], exact[0]) < unit
    assert testing.error(plain[1], exact[1]) < 1e-6  # lse stays float32


def test_naive_by_terms_is_loops_in_float32():
    """Single float32 numbers, one operation at a time: the same bits."""
    q, k, v = qkv((1, 2, 3, 8), (1, 1, 150, 8), 5)
    out, lse = testing.naive(q, k, v, causal=True, scale=0.5, by_terms=True)
    for h, i in np.ndindex(2, 3):
        scores = []
        for key in k[0, 0, : 148 + i]:
            score = np.float32(0)
            for x, y in zip(q[0, h, i] * np.float32(0.5), key, strict=True):
                score += x * y
            scores.append(score)
        weights = np.exp(np.array(scores) - max(scores))
        row_sum = in_runs_of_64(weights)
        assert lse[0, h, i] == max(scores) + np.log(row_sum)
        for d in range(5):
            assert out[0, h, i, d] == in_runs_of_64(weights / row_sum * v[0, 0, : 148 + i, d])


def in_runs_of_64(terms):
    total = np.float32(0)
    for start in range(0, len(terms), 64):
        run = np.float32(0)
        for term in terms[start : start + 64]:
            run += term
        total += run
    return total


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_naive_by_terms_sees_what_naive_sees(dtype):
    """Masks, grouped heads, infinite v, rows without keys: only the order of the sums differs."""
    q, k, v = qkv((2, 4, 9, 300), (2, 2, 130, 300), 7)
    k[0, 0, 129], v[1, 1, 40, 3] = np.nan, np.inf
    for options in ({"causal": True}, {"window": (3, 5)}, {"window": (0, 0), "scale": 0.0}):
        exact, by_terms = (
            testing.reference(q, k, v, **options),
            testing.naive(q, k, v, dtype=dtype, by_terms=True, **options),
        )
        assert testing.error(by_terms[0], exact[0]) < (1e-6 if dtype == "float32" else 1e-3)
        assert testing.error(by_terms[1], exact[1]) < 1e-6
    out, lse = testing.naive(q, k[:, :, :4], v[:, :, :4], causal=True, by_terms=True)
    assert not out[:, :, :5].any()
    assert np.isneginf(lse[:, :, :5]).all()
    out, lse = testing.naive(q, k[:, :, :4], v[:, :, :4, :0], by_terms=True)
    assert out.shape == (2, 4, 9, 0)
    assert np.isfinite(lse).all()


def test_naive_takes_the_dtype_of_q():
    q, k, v = (x.astype(np.float16) for x in qkv((1, 1, 9, 8), (1, 1, 9, 8)))
    out, _ = testing.naive(q, k, v)
    np.testing.assert_array_equal(out, testing.naive(q, k, v, dtype="float16")[0])
    assert (out != testing.naive(q, k, v, dtype="float32")[0]).any()
    with pytest.raises(ValueError, match="dtype"):
        testing.naive(q, k, v, dtype="float8")


def test_bfloat16_rounding():
    # 1 + 2^-8 lies half way between 1 and 1 + 2^-7, 1 + 3 * 2^-8 between that and 1 + 2^-6.
    x = np.array([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -np.inf, np.nan, 3.4e38, -0.0])
    rounded = testing.round_to(x, "bfloat16")
    np.testing.assert_array_equal(rounded, [1, 1 + 2**-6, 1 + 2**-7, -np.inf, np.nan, np.inf, -0.0])
    assert np.signbit(rounded[-1])


def test_bfloat16_rounding_is_ml_dtypes():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    x = np.random.default_rng(0).integers(0, 2**32, 100_000, np.uint32).view(np.float32)
    with np.errstate(all="ignore"):
        expected = x.astype(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(testing.round_to(x, "bfloat16"), expected)


def test_round_to():
    x = np.array([1 / 3, 7e4], np.float64)
    np.testing.assert_array_equal(testing.round_to(x, "float32"), x.astype(np.float32))
    np.testing.assert_array_equal(
        testing.round_to(x, "float16"), [np.float32(np.float16(1 / 3)), np.inf]
    )
    with pytest.raises(ValueError, match="dtype"):
        testing.round_to(x, "int8")


def test_to_numpy_of_numpy_is_a_view():
    x = np.arange(6.0)
    assert np.shares_memory(testing.to_numpy(x), x)
    np.testing.assert_array_equal(testing.to_numpy([1, 2]), [1, 2])


def test_to_numpy_of_ml_dtypes():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    x = np.array([[1.5, -2.0]], ml_dtypes.bfloat16)
    assert testing.dtype_name(x) == "bfloat16"
    for view in (x, x[:, ::-1], x.T, np.broadcast_to(x, (3, 2)), x[:0]):
        y = testing.to_numpy(view)
        assert y.dtype == np.float32
        np.testing.assert_array_equal(y, view.astype(np.float32))


@needs_torch
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
def test_to_numpy_of_torch(dtype):
    import torch

    x = torch.tensor([[1.5, -2.0], [0.25, 3.0]], dtype=getattr(torch, dtype), requires_grad=True)
    assert testing.dtype_name(x) == dtype
    y = testing.to_numpy(x.T)
    assert y.dtype == ("float32" if dtype == "bfloat16" else dtype)
    np.testing.assert_array_equal(y, [[1.5, 0.25], [-2.0, 3.0]])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_to_numpy_of_jax(dtype):
    jnp = pytest.importorskip("jax.numpy")
    x = jnp.asarray([[1.5, -2.0]], dtype=dtype)
    assert testing.dtype_name(x) == dtype
    assert testing.to_numpy(x).dtype == np.float32
    np.testing.assert_array_equal(testing.to_numpy(x), [[1.5, -2.0]])


def test_to_numpy_of_any_dlpack_producer():
    class Producer:
        def __init__(self, x):
            self._x = x

        def __dlpack__(self, **kwargs):
            return self._x.__dlpack__(**kwargs)

        def __dlpack_device__(self):
            return self._x.__dlpack_device__()

    x = np.arange(3.0)
    np.testing.assert_array_equal(testing.to_numpy(Producer(x)), x)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("shape", [(2, 3, 5, 7), (2, 0, 5, 7)])
def test_cuda_array_round_trip(dtype, shape):
    x = testing.round_to(np.random.default_rng(0).standard_normal(shape), dtype)
    array = testing.CudaArray.from_numpy(x, dtype=dtype)
    assert array.shape == shape
    assert array.dtype == testing.dtype_name(array) == dtype
    assert array.__dlpack_device__() == (2, 0)
    np.testing.assert_array_equal(testing.to_numpy(array).astype(np.float32), x)


def test_cuda_array_takes_no_other_dtype():
    with pytest.raises(ValueError, match="dtype"):
        testing.CudaArray.from_numpy(np.zeros(3))
