"""Faults that users of attention libraries reported: small inputs, and the right result.

``cases/index.md`` lists them all, each with its tests or what it waits for. Arrays are
[B, H, L, D] here; a test runs on each kernel that declares what it needs.
"""

from __future__ import annotations

import math
import mmap
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import fastattn
import helpers
from fastattn import emulation, testing
from helpers import (
    DTYPES,
    EMULATED,
    ONE_PER_KERNEL,
    RUNNERS,
    Case,
    param,
    taking,
)

TESTS = Path(__file__).parent
CAUSAL = Case(causal=True)
WINDOW = Case(window=(3, 3))
UNEQUAL = Case(len_q=5)  # M != N

# What exp, log and a division may cost where the exact answer is a short number.
CLOSE = {"rtol": 4e-7, "atol": 0}


def rounding(dtype: str) -> dict[str, float]:
    """That, and a result's own rounding."""
    unit = helpers.UNIT_ROUNDOFF[dtype] if dtype != "float32" else 0
    return CLOSE | {"rtol": CLOSE["rtol"] + unit}


def rows(*values: float, head_dim: int = 4, heads: int = 1) -> np.ndarray:
    """[1, heads, len(values), head_dim]: row i holds values[i] in every channel."""
    column = np.array(values, np.float32)[None, None, :, None]
    return np.broadcast_to(column, (1, heads, len(values), head_dim)).copy()


def first_channel(*values: float, head_dim: int) -> np.ndarray:
    """[1, 1, len(values), head_dim]: zero but for channel 0, so that q k^T is a product of two."""
    x = np.zeros((1, 1, len(values), head_dim), np.float32)
    x[0, 0, :, 0] = values
    return x


def randn(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


# ---- masks ---------------------------------------------------------------------------------------


@taking(CAUSAL, UNEQUAL)
def test_a001_more_queries_than_keys(dtype, runner):
    d = runner.own_head_dim(4)
    zero = np.zeros((1, 1, 5, d), np.float32)
    out, lse = runner.run(zero, zero[:, :, :3], rows(1, 2, 3, head_dim=d), dtype=dtype, causal=True)
    np.testing.assert_allclose(out, rows(0, 0, 1, 1.5, 2, head_dim=d), **CLOSE)
    np.testing.assert_allclose(
        lse[0, 0], [-np.inf, -np.inf, 0, math.log(2), math.log(3)], rtol=4e-7, atol=1e-7
    )


@taking(UNEQUAL)
@pytest.mark.parametrize("head_dim", [8, 64])
def test_a003_no_keys_at_all(dtype, runner, head_dim):
    q, k = np.ones((1, 2, 3, head_dim)), np.ones((1, 2, 0, head_dim))
    out, lse = runner.run(q, k, k, dtype=dtype)
    np.testing.assert_array_equal(out, np.zeros((1, 2, 3, head_dim)))
    np.testing.assert_array_equal(lse, np.full((1, 2, 3), -np.inf))


@taking(CAUSAL, UNEQUAL)
def test_a005_an_empty_row_is_the_neutral_element(dtype, runner):
    q, k = randn(1, 1, 4, 64), randn(1, 1, 2, 64, seed=1)
    empty = runner.run(q, k, k, dtype=dtype, causal=True)
    np.testing.assert_array_equal(empty[1][0, 0, :2], [-np.inf, -np.inf])
    other = runner.run(q, q, q, dtype=dtype)
    out, lse = helpers.merge(empty, other)
    np.testing.assert_array_equal(out[:, :, :2], other[0][:, :, :2])
    np.testing.assert_array_equal(lse[:, :, :2], other[1][:, :, :2])
    out, lse = helpers.merge(empty, empty)
    np.testing.assert_array_equal(out[:, :, :2], np.zeros((1, 1, 2, 64)))
    np.testing.assert_array_equal(lse[0, 0, :2], [-np.inf, -np.inf])


@taking(UNEQUAL)
def test_a005_partial_results_merge_into_the_whole(dtype, runner):
    q, k, v = (testing.round_to(randn(2, 3, 65, 64, seed=s), dtype) for s in range(3))
    parts = [runner.run(q, k[:, :, s], v[:, :, s], dtype=dtype) for s in (slice(20), slice(20, 65))]
    runner.expect(q, k, v, dtype=dtype).check(*helpers.merge(*parts))


@taking(CAUSAL, UNEQUAL, Case(heads_q=6))
@pytest.mark.parametrize("heads", [1, 7])
def test_a007_first_tiles_masked_then_very_negative_scores(dtype, runner, heads):
    d = runner.own_head_dim(1)
    q = np.tile(first_channel(*[1] * 88, head_dim=d), (1, heads, 1, 1))
    k = first_channel(*[-1000] * 448, head_dim=d)  # a number in each dtype
    v = testing.round_to(rows(*range(448), head_dim=d), dtype)
    out, lse = runner.run(q, k, v, dtype=dtype, causal=True, scale=1.0)
    close = rounding(dtype)
    seen = np.arange(361, 449)  # row i sees keys 0 .. i + 360
    mean = np.cumsum(v[0, 0, :, 0], dtype=np.float64)[seen - 1] / seen
    np.testing.assert_allclose(mean, (seen - 1) / 2, rtol=1e-3 if dtype == "bfloat16" else 1e-12)
    np.testing.assert_allclose(out[0, :, :, 0], np.tile(mean, (heads, 1)), **close)
    np.testing.assert_allclose(lse, np.tile(-1000 + np.log(seen), (1, heads, 1)), **CLOSE)


@taking()
@pytest.mark.parametrize("score", [-1000, -20000, -1e30])
def test_a007_every_score_very_negative(dtype, runner, score):
    """The same fault without a mask: a running maximum that starts at a finite number."""
    d = runner.own_head_dim(1)
    # 1e30 is no float16: there the factor makes it so large.
    factor, score = (1e26, score / 1e26) if score < -65504 else (1.0, score)
    score = float(testing.round_to(score, dtype))
    q, k = first_channel(*[1] * 448, head_dim=d), first_channel(*[score] * 448, head_dim=d)
    v = testing.round_to(rows(*range(448), head_dim=d), dtype)
    out, lse = runner.run(q, k, v, dtype=dtype, scale=factor)
    mean = v[0, 0, :, 0].mean(dtype=np.float64)
    np.testing.assert_allclose(out, np.full_like(out, mean), **rounding(dtype))
    np.testing.assert_allclose(lse, np.full_like(lse, score * factor + math.log(448)), **CLOSE)


@taking(CAUSAL)
def test_a008_a_masked_key_never_beats_a_visible_one(dtype, runner):
    d = runner.own_head_dim(1)
    low = float(testing.round_to(-20000, dtype))
    q, k = first_channel(low, 0, head_dim=d), first_channel(1, 0, head_dim=d)
    v = rows(1, 100, head_dim=d)
    out, lse = runner.run(q, k, v, dtype=dtype, causal=True, scale=1.0)
    np.testing.assert_array_equal(out[0, 0, :, 0], [1, 50.5])
    np.testing.assert_allclose(lse[0, 0], [low, math.log(2)], **CLOSE)


@taking(CAUSAL, UNEQUAL)
def test_a010_causal_is_aligned_at_the_bottom_right(dtype, runner):
    q, k, v = randn(1, 2, 1, 64), randn(1, 2, 5, 64, seed=1), randn(1, 2, 5, 64, seed=2)
    one = runner.run(q, k, v, dtype=dtype, causal=True)
    for a, b in zip(one, runner.run(q, k, v, dtype=dtype), strict=True):
        np.testing.assert_array_equal(a, b)
    two = np.concatenate([q, q], axis=2)
    out, lse = runner.run(two, k, v, dtype=dtype, causal=True)
    np.testing.assert_array_equal(out[:, :, 1:], one[0])
    first = runner.run(q, k[:, :, :4], v[:, :, :4], dtype=dtype)
    np.testing.assert_array_equal(out[:, :, :1], first[0])
    np.testing.assert_array_equal(lse[:, :, :1], first[1])


@taking(UNEQUAL)
@pytest.mark.parametrize("n", [1, 2, 129, 3000])
def test_a011_one_query_row(dtype, runner, n):
    """However a kernel splits the keys among its workers."""
    b, h = (1, 4) if runner.emulated else (2, 16)
    q, k, v = (testing.round_to(randn(b, h, x, 64, seed=x), dtype) for x in (1, n, n))
    runner.expect(q, k, v, dtype=dtype).check(*runner.run(q, k, v, dtype=dtype))


@taking(WINDOW, UNEQUAL)
@pytest.mark.parametrize("window", [(10, 0), (0, 0), (130, -1)])
def test_a011_leading_tiles_without_a_visible_key(dtype, runner, window):
    q, k, v = (testing.round_to(randn(2, 16, x, 64, seed=x), dtype) for x in (1, 3000, 3000))
    expected = runner.expect(q, k, v, dtype=dtype, window=window)
    expected.check(*runner.run(q, k, v, dtype=dtype, window=window))


# ---- windows -------------------------------------------------------------------------------------


@taking(CAUSAL, WINDOW)
@pytest.mark.parametrize("s", [6, 300, pytest.param(16384, marks=pytest.mark.slow)])
def test_a012_windows_that_are_the_causal_mask(dtype, runner, s):
    if runner.emulated and s > 1000:
        pytest.skip("takes minutes, emulated")
    q, k, v = (randn(1, 1, s, 16, seed=x) for x in range(3))
    causal = runner.run(q, k, v, dtype=dtype, causal=True)
    for window in [(-1, 0), (s, 0), (s - 1, 0)]:
        assert_same(runner.run(q, k, v, dtype=dtype, window=window), causal)
    full = runner.run(q, k, v, dtype=dtype)
    assert_same(runner.run(q, k, v, dtype=dtype, window=(s - 1, s - 1)), full)


@taking(WINDOW)
def test_a015_a_window_counts_the_row_itself(dtype, runner):
    d = runner.own_head_dim(4)
    zero, v = np.zeros((1, 1, 4, d), np.float32), rows(0, 1, 2, 3, head_dim=d)
    out, _ = runner.run(zero, zero, v, dtype=dtype, window=(1, 0))
    np.testing.assert_allclose(out, rows(0, 0.5, 1.5, 2.5, head_dim=d), **CLOSE)


@taking(CAUSAL, WINDOW)
@pytest.mark.parametrize("integer", [int, np.int32, np.int64, np.uint8])
def test_a016_a_zero_in_the_window_is_zero(dtype, runner, integer):
    d = runner.own_head_dim(4)
    q, k, v = (testing.round_to(randn(1, 1, 4, d, seed=x), dtype) for x in range(3))
    three, zero = integer(3), integer(0)

    def run(**mask):
        return runner.run(q, k, v, dtype=dtype, **mask)

    assert_same(run(window=(three, zero)), run(causal=True))
    assert_same(run(window=(three, -1)), run())
    # One key of weight 1: v, but for the roundings of a sum of 1 and of a quotient.
    np.testing.assert_allclose(run(window=(zero, zero))[0], v, **CLOSE)


def assert_same(a, b):
    for x, y in zip(a, b, strict=True):
        np.testing.assert_array_equal(x, y)


# ---- numerics ------------------------------------------------------------------------------------


@taking(CAUSAL)
@pytest.mark.parametrize(("length", "bad"), [(3, 2), (200, 190), (200, 1), (130, 64)])
def test_a018_nan_in_a_hidden_key_stays_there(dtype, runner, length, bad):
    d = runner.own_head_dim(64)
    q, k, v = (randn(1, 2, length, d, seed=x) for x in range(3))
    clean = runner.run(q, k, v, dtype=dtype, causal=True)
    k[:, :, bad:], v[:, :, bad:] = np.nan, np.inf
    out, lse = runner.run(q, k, v, dtype=dtype, causal=True)
    np.testing.assert_array_equal(out[:, :, :bad], clean[0][:, :, :bad])
    np.testing.assert_array_equal(lse[:, :, :bad], clean[1][:, :, :bad])
    assert np.isnan(out[:, :, bad:]).all()
    assert np.isnan(lse[:, :, bad:]).all()


@taking(WINDOW, UNEQUAL)
@pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf])
def test_a018_outside_of_a_window(dtype, runner, special):
    q, k, v = (testing.round_to(randn(1, 2, x, 64, seed=x), dtype) for x in (90, 200, 201))
    v = v[:, :, :200].copy()
    clean = runner.run(q, k, v, dtype=dtype, window=(7, 5))
    k[:, :, 150], v[:, :, 150] = special, special
    out, lse = runner.run(q, k, v, dtype=dtype, window=(7, 5))
    centre = np.arange(90) + 110
    blind = (centre + 5 < 150) | (centre - 7 > 150)
    np.testing.assert_array_equal(out[:, :, blind], clean[0][:, :, blind])
    np.testing.assert_array_equal(lse[:, :, blind], clean[1][:, :, blind])
    with np.errstate(invalid="ignore"):
        reference, _ = testing.reference(q, k, v, window=(7, 5))
    same_nan(out, reference)


def same_nan(actual, expected):
    """NaN where the reference has it: what a row sees does reach it."""
    np.testing.assert_array_equal(np.isnan(actual), np.isnan(expected))


@taking()
@pytest.mark.parametrize("which", ["k", "v", "q"])
def test_a018_nan_where_it_is_seen(dtype, runner, which):
    d = runner.own_head_dim(64)
    arrays = {name: randn(1, 2, 70, d, seed=i) for i, name in enumerate("qkv")}
    arrays[which][0, 1, 66, 3] = np.nan
    out, lse = runner.run(*arrays.values(), dtype=dtype)
    expected = testing.reference(*arrays.values())
    same_nan(out, expected[0])
    same_nan(lse, expected[1])


@taking()
def test_a018_infinite_scores(dtype, runner):
    """A row whose scores are all -inf has no weight to give: out 0. One +inf makes NaN."""
    d = runner.own_head_dim(64)
    q = np.ones((1, 1, 70, d), np.float32)
    k, v = np.full_like(q, -np.inf), testing.round_to(randn(1, 1, 70, d), dtype)
    out, lse = runner.run(q, k, v, dtype=dtype)
    np.testing.assert_array_equal(out, np.zeros_like(out))
    np.testing.assert_array_equal(lse, np.full_like(lse, -np.inf))
    k[0, 0, 66] = 0
    out, lse = runner.run(q, k, v, dtype=dtype)  # the one key with weight, in a later tile
    np.testing.assert_allclose(out, np.broadcast_to(v[:, :, 66:67], out.shape), **CLOSE)
    np.testing.assert_array_equal(lse, np.zeros_like(lse))
    k[0, 0, 3] = np.inf
    out, lse = runner.run(q, k, v, dtype=dtype)
    assert np.isnan(out).all()
    assert np.isnan(lse).all()


@taking(UNEQUAL)
def test_a021_stale_scratch_memory(dtype, runner):
    """NaN that an earlier call left in a tile's tail."""
    b, h, rounds = (1, 1, 17) if runner.emulated else (2, 3, 204)
    nan = np.full((b, h, 128, 64), np.nan, np.float32)
    arrays = {n: [runner.framework.array(randn(b, h, n, 64, seed=s), dtype) for s in range(3)]
              for n in range(1, 18)}  # fmt: skip
    bad = runner.framework.array(nan, dtype)
    expected = {
        n: runner.expect(*(testing.to_numpy(x).astype(np.float32) for x in a), dtype=dtype)
        for n, a in arrays.items()
    }
    for round_ in range(rounds):
        n = 1 + round_ % 17
        runner.forward(bad, bad, bad)
        out, lse = runner.forward(*arrays[n], return_lse=True)
        if round_ < 17 or round_ > 186:
            expected[n].check(out, lse)
        else:
            assert np.isfinite(testing.to_numpy(out)).all()


@taking(Case())
@pytest.mark.parametrize("n", [1, 5, 70])
def test_a022_huge_equal_scores_weigh_exactly_one(dtype, runner, n):
    """score - max must be 0: a fused multiply-add leaves the rounding error of the score."""
    value = 133120 if dtype != "float16" else 60000
    x = np.full((1, 1, n, 64), value, np.float32)
    out, lse = runner.run(x, x, x, dtype=dtype)
    value = float(testing.round_to(value, dtype))
    np.testing.assert_allclose(out, np.full_like(out, value), rtol=0 if n < 70 else n * 2**-24)
    np.testing.assert_allclose(lse, np.full_like(lse, value * value * 8), rtol=3e-6)


@taking(Case(head_dim=128, head_dim_v=128), dtypes=("float16",))
def test_a024_float16_scores_beyond_its_range(dtype, runner):
    x = np.full((1, 1, 2, 128), 256, np.float32)
    out, lse = runner.run(x, x, rows(1, 3, head_dim=128), dtype=dtype)
    np.testing.assert_array_equal(out, np.full_like(out, 2))
    np.testing.assert_allclose(lse, np.full_like(lse, 256**2 * 128**0.5 + math.log(2)), rtol=2e-6)


@taking(CAUSAL)
def test_a026_scale_zero_under_a_mask(dtype, runner):
    d = runner.own_head_dim(16)
    q, k, v = (testing.round_to(randn(1, 2, 6, d, seed=x), dtype) for x in range(3))
    out, lse = runner.run(q, k, v, dtype=dtype, causal=True, scale=0.0)
    count = np.arange(1, 7)
    mean = v.astype(np.float64).cumsum(axis=2) / count[:, None]
    assert testing.error(out, mean) <= 2 * helpers.UNIT_ROUNDOFF[dtype]
    np.testing.assert_allclose(lse[0, 0], np.log(count), rtol=4e-7, atol=1e-7)


@taking(Case())
def test_a026_scale_zero_negative_and_default(dtype, runner):
    d = runner.own_head_dim(16)
    q, k, v = (testing.round_to(randn(1, 2, 70, d, seed=x), dtype) for x in range(3))
    out, lse = runner.run(q, k, v, dtype=dtype, scale=0.0)
    mean = v.astype(np.float64).mean(axis=2, keepdims=True)
    runner.expect(q, k, v, dtype=dtype, scale=0.0).check(out, lse)
    np.testing.assert_allclose(out, np.broadcast_to(mean, out.shape), rtol=0.01, atol=1e-3)
    np.testing.assert_allclose(lse, math.log(70), **CLOSE)
    assert_same(
        runner.run(q, k, v, dtype=dtype, scale=-1.0), runner.run(-q, k, v, dtype=dtype, scale=1.0)
    )
    assert_same(
        runner.run(q, k, v, dtype=dtype, scale=1 / math.sqrt(d)), runner.run(q, k, v, dtype=dtype)
    )


# ---- empty ---------------------------------------------------------------------------------------


@taking(UNEQUAL)
@pytest.mark.parametrize("shape", [(2, 0, 3, 64), (0, 4, 3, 64), (2, 4, 0, 64)])
def test_a032_empty_arrays_without_address_or_strides(dtype, runner, shape):
    """[B, N, H, D]. NumPy gives such arrays strides 0, torch a null pointer."""
    if not runner.framework.has_views:
        pytest.skip(f"{runner.framework} has no views")
    kv = runner.framework.array(np.zeros(shape), dtype).swapaxes(1, 2)
    q = runner.framework.array(np.ones((shape[0], 5, shape[2], 64)), dtype).swapaxes(1, 2)
    out, lse = runner.forward(q, kv, kv, return_lse=True)
    assert tuple(out.shape) == (shape[0], shape[2], 5, 64)
    assert (testing.to_numpy(out) == 0).all()
    assert (testing.to_numpy(lse) == -np.inf).all()


# ---- head dims -----------------------------------------------------------------------------------

ODD_DIMS = (1, 2, 3, 5, 7, 8, 12, 33, 40, 48, 56, 64, 72, 80, 88, 96, 100, 112, 120, 160, 192, 224)
ODD_DIMS += (256,)


def each_head_dim(dtypes: tuple[str, ...] = DTYPES):
    params = [
        param(dtype, d, runner=r, id=f"{dtype}-{d}-{r}")
        for dtype in dtypes
        for d in ODD_DIMS
        for r in (*RUNNERS, *(EMULATED if d in (1, 7, 33, 56, 72, 100, 192, 256) else ()))
        if r.takes(Case(dtype=dtype, head_dim=d, head_dim_v=d))
    ]
    return pytest.mark.parametrize(("dtype", "head_dim", "runner"), params)


@each_head_dim()
def test_a033_every_channel_is_computed(dtype, head_dim, runner):
    zero = np.zeros((1, 1, 3, head_dim), np.float32)
    v = np.broadcast_to(np.arange(head_dim, dtype=np.float32), (1, 1, 3, head_dim)).copy()
    out, _ = runner.run(zero, zero, v, dtype=dtype)
    np.testing.assert_allclose(out, v, rtol=2e-7)


@each_head_dim()
def test_a034_nan_behind_the_last_channel(dtype, head_dim, runner):
    if not runner.framework.has_views:
        pytest.skip(f"{runner.framework} has no views")
    b, h = (1, 2) if runner.emulated else (2, 3)
    values = [testing.round_to(randn(b, h, 70, head_dim, seed=s), dtype) for s in range(3)]
    expected = runner.expect(*values, dtype=dtype)
    layout = helpers.LAYOUTS["row_stride_plus_2"]
    arrays = [layout(runner.framework, x, dtype) for x in values]
    expected.check(*runner.forward(*arrays, return_lse=True))


@taking(among=[*ONE_PER_KERNEL, *EMULATED])
@pytest.mark.parametrize("dims", [(128, 64), (64, 128), (192, 128)], ids=str)
def test_a036_another_head_dim_of_v(dtype, runner, dims):
    case = Case(1, 2, 2, 33, 70, head_dim=dims[0], head_dim_v=dims[1], dtype=dtype)
    arrays = [runner.framework.array(x, case.dtype) for x in helpers.inputs(case)]
    if not runner.takes(case):
        with pytest.raises(NotImplementedError, match=r"head_dim"):
            fastattn.forward(*arrays, kernel=runner.kernel.name)
        return
    runner.expected(case).check(*runner.run_case(case))


# ---- grouped heads -------------------------------------------------------------------------------


@taking(Case(heads_q=6))
def test_a039_key_heads_are_repeated_not_tiled(dtype, runner):
    d = runner.own_head_dim(8)
    q, k = np.zeros((1, 6, 9, d), np.float32), np.zeros((1, 2, 9, d), np.float32)
    v = np.broadcast_to(np.arange(2, dtype=np.float32)[None, :, None, None], (1, 2, 9, d)).copy()
    out, _ = runner.run(q, k, v, dtype=dtype)
    expected = np.array([0, 0, 0, 1, 1, 1], np.float32)[None, :, None, None]
    np.testing.assert_allclose(out, np.broadcast_to(expected, out.shape), rtol=2e-7)


@taking(Case(heads_q=6, len_q=5, causal=True))
@pytest.mark.parametrize(("m", "n"), [(5, 9), (130, 200), (1, 77)])
def test_a044_grouped_heads_under_a_causal_mask(dtype, runner, m, n):
    d = runner.own_head_dim(64)
    q, k, v = randn(1, 8, m, d), randn(1, 2, n, d, seed=1), randn(1, 2, n, d, seed=2)
    grouped = runner.run(q, k, v, dtype=dtype, causal=True)
    repeated = runner.run(q, k.repeat(4, 1), v.repeat(4, 1), dtype=dtype, causal=True)
    q, k, v = (testing.round_to(x, dtype) for x in (q, k, v))
    expected = runner.expect(q, k, v, dtype=dtype, causal=True)
    expected.check(*grouped)
    expected.check(*repeated)


# ---- lse -----------------------------------------------------------------------------------------


@taking(Case())
def test_a049_shape_and_dtype_of_lse(dtype, runner):
    d = runner.own_head_dim(64)
    x = runner.framework.array(randn(2, 3, 17, d), dtype)
    out, lse = runner.forward(x, x, x, return_lse=True)
    assert type(out) is type(x)
    assert tuple(lse.shape) == (2, 3, 17)
    assert testing.dtype_name(lse) == "float32"
    assert testing.to_numpy(lse).flags.c_contiguous
    if runner.framework.name.startswith("torch"):
        assert lse.is_contiguous()


@taking(UNEQUAL)
@pytest.mark.parametrize("m", [1, 4])
def test_a050_lse_is_the_natural_logarithm(dtype, runner, m):
    zero = np.zeros((1, 1, 4, 64), np.float32)
    _, lse = runner.run(zero[:, :, :m], zero, zero, dtype=dtype)
    np.testing.assert_allclose(lse, np.full_like(lse, 1.3862944), rtol=2e-7)


# ---- sizes ---------------------------------------------------------------------------------------


def far_view(framework, buffer, start, shape, gap):
    """[B, H, L, D] in a flat buffer, with ``gap`` elements from one batch entry to the next."""
    size = math.prod(shape[1:])
    if framework.name == "numpy" or framework.name == "cupy":
        strides = [gap, shape[2] * shape[3], shape[3], 1]
        return framework.xp.lib.stride_tricks.as_strided(
            buffer[start : start + (shape[0] - 1) * gap + size],
            shape,
            [s * buffer.itemsize for s in strides],
        )
    return buffer.as_strided(shape, (gap, shape[2] * shape[3], shape[3], 1), start)


def allocate(runner, length, dtype):
    """A flat array that nothing has written; skips where there is no such memory."""
    xp = runner.framework.xp
    place = {"device": runner.kernel.backend} if xp.__name__ == "torch" else {}
    kind = np.dtype(runner.framework.array(0.0, dtype).dtype) if xp is np else getattr(xp, dtype)
    try:
        return xp.empty(length, dtype=kind, **place)
    except (MemoryError, RuntimeError) as failure:  # torch's is a RuntimeError
        pytest.skip(f"needs memory for {length} {dtype}: {failure}")


@taking(Case(), among=RUNNERS)
def test_a053_offsets_beyond_2_31_elements(dtype, runner):
    """Few elements, far apart: index arithmetic in 32 bits reads and writes elsewhere."""
    if not runner.framework.has_views:
        pytest.skip(f"{runner.framework} has no views")
    case = runner.own_case(Case(dtype=dtype, heads_q=2, heads_kv=2))
    gap = 2**31 + 64
    shape = case.shapes[0]
    block = math.prod(shape[1:]) + 64
    # On a host only address space: the pages between the views are never touched.
    buffer = allocate(runner, gap + 4 * block, dtype)
    views = [far_view(runner.framework, buffer, i * block, shape, gap) for i in range(4)]
    for view, values in zip(views, helpers.inputs(case), strict=False):
        view[...] = runner.framework.array(values, dtype)
    views[3][...] = runner.framework.full(shape, math.nan, dtype)
    _, lse = runner.forward(*views[:3], out=views[3], return_lse=True)
    runner.expected(case).check(views[3], lse)


@taking(Case(window=(10, 0)), among=[*ONE_PER_KERNEL, *EMULATED])
@pytest.mark.parametrize("right", [0, -1])
def test_the_largest_length(dtype, runner, right):
    """Of 2^31 - 256 keys each query sees a window; all keys are one in memory."""
    if not runner.framework.has_views:
        pytest.skip(f"{runner.framework} has no views")
    length, head_dim = 2**31 - 256, 8
    q = runner.framework.full((1, 1, 4, head_dim), 0.0, dtype)
    key = runner.framework.full((1, 1, 1, head_dim), 1.0, dtype)
    keys = runner.framework.xp.broadcast_to(key, (1, 1, length, head_dim))
    out, lse = runner.forward(q, keys, keys, window=(10, right), return_lse=True)
    seen = np.float32([11, 11, 11, 11] if right == 0 else [14, 13, 12, 11])
    np.testing.assert_allclose(testing.to_numpy(lse)[0, 0], np.log(seen), rtol=2e-7)
    np.testing.assert_array_equal(testing.to_numpy(out).astype(np.float32), 1)


TORCH_ON_GPU = [r for r in RUNNERS if r.framework.name == "torch-cuda"]


def on_gpu(*needs: Case, dtypes=DTYPES):
    """Decorator: ``dtype`` and ``runner`` over the CUDA kernels, with torch, which can make such
    sizes there.
    """
    if TORCH_ON_GPU:
        return taking(*needs, dtypes=dtypes, among=TORCH_ON_GPU)
    none = pytest.mark.skip(reason="needs a kernel of the CUDA backend, and torch")
    return pytest.mark.parametrize(("dtype", "runner"), [pytest.param("", None, marks=none)])


@on_gpu(dtypes=("float32", "bfloat16"))
def test_a053_more_than_2_31_bytes_and_scores(dtype, runner):
    """[1600, 16, 729, 72]: 1.3e9 elements a tensor, 1.4e10 scores."""
    import torch

    d = runner.own_head_dim(72)
    torch.cuda.empty_cache()
    # q, k, v, out, and the scores that an unfused kernel keeps.
    needed = 4 * 1600 * 16 * 729 * (4 * d + 729)
    if torch.cuda.mem_get_info()[0] < 1.2 * needed:
        pytest.skip(f"needs {1.2 * needed / 1e9:.0f} GB of free memory on the GPU")
    like = {"dtype": getattr(torch, dtype), "device": "cuda"}
    q, k, v = (torch.randn(1600, 16, 729, d, **like) for _ in range(3))
    out = torch.full_like(q, math.nan)
    runner.forward(q, k, v, out=out)
    for b in (0, 799, 1599):
        one = [x[b : b + 1].clone() for x in (q, k, v)]
        alone, lse = runner.forward(*one, return_lse=True)
        assert torch.equal(out[b : b + 1], alone)
        heads = [testing.to_numpy(x[:, :2]).astype(np.float32) for x in one]
        runner.expect(*heads, dtype=dtype).check(alone[:, :2], lse[:, :2])
    assert not torch.isnan(out).any()


@on_gpu()
@pytest.mark.parametrize(
    "shape", [(65536, 8, 4, 64), (1, 65536, 10, 16), (65536, 1, 16, 80), (70000, 1, 1, 64)], ids=str
)
def test_a055_more_heads_than_a_grid_dimension(dtype, runner, shape):
    import torch

    *lead, head_dim = shape
    shape = (*lead, runner.own_head_dim(head_dim))
    like = {"dtype": getattr(torch, dtype), "device": "cuda"}
    q, k, v = (torch.randn(shape, **like) for _ in range(3))
    out = torch.full_like(q, math.nan)
    _, lse = runner.forward(q, k, v, out=out, return_lse=True)
    assert_near_double(q, k, v, out, lse)


@on_gpu(UNEQUAL)
def test_a055_more_rows_than_a_grid_dimension(dtype, runner):
    import torch

    d = runner.own_head_dim(16)
    like = {"dtype": getattr(torch, dtype), "device": "cuda"}
    q = torch.randn(1, 1, 64 * 65535 + 1, d, **like)
    k, v = (torch.randn(1, 1, 5, d, **like) for _ in range(2))
    out = torch.full_like(q, math.nan)
    _, lse = runner.forward(q, k, v, out=out, return_lse=True)
    assert_near_double(q, k, v, out, lse)


def assert_near_double(q, k, v, out, lse):
    """Against float64 on the GPU, as it is too much for the host; the limit is torch naive's."""
    import torch

    def evaluate(q, k, v, weights):
        scores = q @ k.mT / math.sqrt(q.shape[3])
        return scores.softmax(-1).to(weights).to(v.dtype) @ v, scores.logsumexp(-1)

    def error(actual, expected):
        assert torch.isfinite(actual).all()
        return (torch.linalg.norm(actual.double() - expected) / torch.linalg.norm(expected)).item()

    exact = evaluate(q.double(), k.double(), v.double(), torch.float64)
    # float32 sums, weights and result in the tensors' own dtype.
    plain, plain_lse = evaluate(q.float(), k.float(), v.float(), q.dtype)
    for actual, expected, yardstick in zip(
        (out, lse), exact, (plain.to(q.dtype), plain_lse), strict=True
    ):
        # With one key the yardstick may be exact: a result may still be rounded once.
        assert error(actual, expected) <= 2 * error(yardstick, expected) + 2.0**-24


# ---- strides -------------------------------------------------------------------------------------


@taking(Case())
def test_a058_last_dimension_not_contiguous(dtype, runner):
    if not runner.framework.has_views:
        pytest.skip(f"{runner.framework} has no views")
    d = runner.own_head_dim(64)
    values = [testing.round_to(randn(2, 3, 70, d, seed=s), dtype) for s in range(3)]
    q = runner.framework.array(values[0].repeat(2, axis=3), dtype)[..., ::2]
    k = runner.framework.array(values[1].swapaxes(2, 3).copy(), dtype).swapaxes(2, 3)
    v = runner.framework.array(values[2].repeat(3, axis=3), dtype)[..., ::3]
    out, lse = runner.forward(q, k, v, return_lse=True)
    assert_same(map(testing.to_numpy, (out, lse)), runner.run(*values, dtype=dtype))


@taking(Case())
def test_a060_only_v_is_a_transposed_view(dtype, runner):
    if not runner.framework.has_views:
        pytest.skip(f"{runner.framework} has no views")
    d = runner.own_head_dim(64)
    values = [testing.round_to(randn(2, 3, 70, d, seed=s), dtype) for s in range(3)]
    q, k = (runner.framework.array(x, dtype) for x in values[:2])
    v = runner.framework.array(values[2].swapaxes(1, 2).copy(), dtype).swapaxes(1, 2)
    out, lse = runner.forward(q, k, v, return_lse=True)
    assert_same(map(testing.to_numpy, (out, lse)), runner.run(*values, dtype=dtype))


def test_a062_negative_strides():
    q, a, b = (randn(2, 5, 3, 8, seed=s) for s in range(3))  # [B, N, H, D]
    k, v = a[:, ::-1], b[..., ::-1]
    heads_first = [x.swapaxes(1, 2) for x in (q, k, v)]
    same = fastattn.forward(*(x.copy() for x in heads_first))
    np.testing.assert_array_equal(fastattn.forward(*heads_first), same)


@pytest.mark.parametrize("dtype", ["f4", "f2"])
def test_a064_strides_that_are_no_multiple_of_an_element(dtype):
    records = np.zeros((1, 2, 3, 8), [("tag", "u1"), ("x", dtype)])
    x = np.ones((1, 2, 3, 8), dtype)
    with pytest.raises((TypeError, ValueError), match="k"):
        fastattn.forward(x, records["x"], x)
    np.testing.assert_array_equal(fastattn.forward(x, x, x), x)


@taking(Case(heads_q=6))
def test_a065_expanded_heads_are_grouped_heads(dtype, runner):
    if not runner.framework.has_views:
        pytest.skip(f"{runner.framework} has no views")
    values = [testing.round_to(randn(2, h, 70, 64, seed=h), dtype) for h in (8, 1)]
    q, k1 = (runner.framework.array(x, dtype) for x in values)
    k = runner.framework.xp.broadcast_to(k1, (2, 8, 70, 64))
    wide = runner.forward(q, k, k, return_lse=True)
    expected = runner.expect(values[0], values[1], values[1], dtype=dtype)
    expected.check(*wide)
    grouped = runner.forward(q, k1, k1, return_lse=True)
    expected.check(*grouped)
    assert_same(*(map(testing.to_numpy, x) for x in (wide, grouped)))


# ---- what the package takes ----------------------------------------------------------------------


def test_a068_read_only_inputs(tmp_path):
    x = randn(1, 2, 9, 16)
    expected = fastattn.forward(x, x, x)
    frozen = x.copy()
    frozen.flags.writeable = False
    path = tmp_path / "x.bin"
    path.write_bytes(x.tobytes())
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        views = [
            frozen,
            np.frombuffer(x.tobytes(), np.float32).reshape(x.shape),
            np.frombuffer(mapped, np.float32).reshape(x.shape),
            np.memmap(path, np.float32, "r", shape=x.shape),
        ]
        for view in views:
            assert not view.flags.writeable
            np.testing.assert_array_equal(fastattn.forward(view, view, view), expected)
        del view, views  # they keep the map open
    same = np.broadcast_to(x[:, :1], x.shape)
    np.testing.assert_array_equal(
        fastattn.forward(x, same, same), fastattn.forward(x, same.copy(), same.copy())
    )
    with pytest.raises(ValueError, match=r"out.*read-only"):
        fastattn.forward(x, x, x, out=frozen)


def test_a071_bfloat16_of_ml_dtypes():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    values = [testing.round_to(randn(2, 3, 70, 64, seed=s), "bfloat16") for s in range(3)]
    q, k, v = (x.astype(ml_dtypes.bfloat16) for x in values)
    out, lse = fastattn.forward(q, k, v, return_lse=True)
    assert out.dtype == ml_dtypes.bfloat16
    assert lse.dtype == np.float32
    helpers.expect(*values, dtype="bfloat16").check(out, lse)
    again = np.zeros_like(out)
    assert fastattn.forward(q.swapaxes(1, 2).copy().swapaxes(1, 2), k, v, out=again) is again
    assert again.tobytes() == out.tobytes()


# ---- repeatable, anywhere ------------------------------------------------------------------------


@taking(
    Case(heads_q=6, head_dim=128, head_dim_v=128, causal=True),
    dtypes=("bfloat16", "float32"),
    among=RUNNERS,
)
def test_a091_many_runs_are_bitwise_equal(dtype, runner):
    shapes = [(2, 8, 1024, 128), (2, 2, 1024, 128), (2, 2, 1024, 128)]
    arrays = [
        runner.framework.array(randn(*shape, seed=s), dtype) for s, shape in enumerate(shapes)
    ]
    first = None
    for _ in range(10):
        found = runner.forward(*arrays, causal=True, return_lse=True)
        digest = tuple(testing.to_numpy(x).tobytes() for x in found)
        first = first or digest
        assert digest == first


WITHOUT_GPU = """
import importlib.util
import numpy as np
import fastattn
from fastattn import testing
rng = np.random.default_rng(0)
dtypes = ["float32", "float16"] + ["bfloat16"] * bool(importlib.util.find_spec("ml_dtypes"))
for name in dtypes:
    if name == "bfloat16":
        import ml_dtypes
        dtype = ml_dtypes.bfloat16
    else:
        dtype = np.dtype(name)
    q, k, v = (rng.standard_normal((1, 2, 70, 64), np.float32).astype(dtype) for _ in range(3))
    for causal in (False, True):
        out = fastattn.forward(q, k, v, causal=causal)
        exact, _ = testing.reference(q, k, v, causal=causal)
        plain, _ = testing.naive(q, k, v, causal=causal)
        assert testing.error(out, exact) <= 2 * testing.error(plain, exact), name
print(len(dtypes))
"""


def test_a108_right_results_without_a_gpu():
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_GPU],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        check=True,
        capture_output=True,
        text=True,
    )
    assert int(done.stdout) >= 2


# ---- speed: what makes it is counted; the goals of the benchmark hold the times ------------------


@taking(among=[*ONE_PER_KERNEL, *EMULATED])
@pytest.mark.parametrize("length", [64, 128, 256])
def test_a109_short_sequences(dtype, runner, length):
    batch, heads = (1, 2) if runner.emulated else (8, 16)
    case = Case(batch, heads, heads, length, length, dtype=dtype)
    runner.expected(case).check(*runner.run_case(case))


def counted(case: Case, runner: helpers.Runner) -> emulation.Report:
    arrays = [runner.framework.array(x, case.dtype) for x in helpers.inputs(case)]
    report = emulation.run(*arrays, kernel=runner.kernel.name, **case.options)
    assert report.findings == ()
    return report


@taking(among=EMULATED)
def test_a109_a_short_call_is_one_launch(dtype, runner):
    report = counted(Case(2, 2, 2, 64, 64, dtype=dtype), runner)
    *before, main = report.launches
    # Tensor cores need float32's K and V split, which is done once, by a kernel of its own.
    assert len(before) == (dtype == "float32" and report.counts.mmas > 0)
    assert main.blocks >= 2 * 2  # a head has a block at least


@taking(among=EMULATED)
def test_a111_head_dim_256_costs_twice_128(dtype, runner):
    reports = [counted(Case(1, 1, 1, 128, 256, d, d, dtype), runner) for d in (128, 256)]
    half, whole = (report.counts for report in reports)
    assert len(reports[0].launches) == len(reports[1].launches)
    assert whole.mmas == 2 * half.mmas
    assert whole.exponentials <= half.exponentials * 1.2  # rescaling may come more often
    # Twice the channels; tiles of half as many rows read K and V twice as often.
    assert whole.global_read_bytes <= 4 * half.global_read_bytes
    # Loads as wide as there.
    assert whole.global_read_requests * half.global_read_bytes <= 1.1 * (
        half.global_read_requests * whole.global_read_bytes
    )


# ---- the index -----------------------------------------------------------------------------------

INDEX = re.findall(
    r"^\| (A\d{3}) \| (.+?) \| (.+?) \|$", (TESTS / "cases/index.md").read_text(), re.M
)


def test_the_index_lists_each_case_once():
    ids = [row[0] for row in INDEX]
    assert ids == sorted(set(ids))
    assert (len(ids), ids[0], ids[-1]) == (73, "A001", "A111")


@pytest.mark.parametrize(("id_", "state"), [(i, s) for i, _, s in INDEX], ids=[r[0] for r in INDEX])
def test_each_case_is_covered_or_says_what_it_waits_for(id_, state):
    parts = state.split("; ")
    for part in parts:
        if waits := re.fullmatch(r"waits for: (.+)", part):
            assert len(waits[1]) > 3
            continue
        named = re.fullmatch(r"`(\w+\.py)::(\w+)`|`(scripts/\w+)`", part)
        assert named, f"{id_}: {part!r} names neither a test nor what the case waits for"
        if named[3]:
            assert (TESTS.parent / named[3]).exists()
        else:
            assert re.search(rf"^def {named[2]}\(", (TESTS / named[1]).read_text(), re.M), part


def test_each_test_of_a_case_is_in_the_index():
    listed = " ".join(row[2] for row in INDEX)
    for name in re.findall(r"^def (test_a\d{3}_\w+)\(", Path(__file__).read_text(), re.M):
        assert f"::{name}`" in listed, name
