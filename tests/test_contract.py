"""What a production kernel promises of its numbers, in each dtype that it takes.

Production kernels take any call: those of ``PRODUCTION`` on their own device, those of
``EMULATED`` on the CPU. Heads carry the variants of a problem, as heads don't touch each other.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

import helpers
from fastattn import testing
from helpers import EMULATED, INPUT_LAYOUTS, PRODUCTION, Case, cases, param, taking, visible

KERNELS = [*PRODUCTION, *EMULATED]

# Keys at both ends, in the middle and on both sides of the borders of tiles.
PLACES = (0, 31, 63, 64, 65, 127, 128, 139)
FEW_PLACES = (0, 63, 64, 128, 139)  # where emulation takes its time
MASKS = {
    "causal": (140, 140, {"causal": True}),
    "window": (140, 140, {"window": (20, 5)}),
    "both": (75, 140, {"causal": True, "window": (30, -1)}),
    "blind_rows": (170, 140, {"window": (-1, 3)}),
}
HEAD_DIM, HEAD_DIM_V = 40, 24


def each_kernel(*needs: Case, **chosen):
    """Decorator: ``dtype`` and ``runner`` over the production kernels."""
    return taking(*needs, among=KERNELS, **chosen)


def randn(*shape: int, dtype: str, seed: int = 0) -> np.ndarray:
    values = np.random.default_rng(seed).standard_normal(shape, np.float32)
    return testing.round_to(values, dtype)


def one_head(m: int, n: int, dtype: str, seed: int = 0) -> list[np.ndarray]:
    shapes = [(m, HEAD_DIM), (n, HEAD_DIM), (n, HEAD_DIM_V)]
    return [randn(1, 1, *s, dtype=dtype, seed=3 * seed + i) for i, s in enumerate(shapes)]


def places(runner: helpers.Runner) -> tuple[int, ...]:
    return FEW_PLACES if runner.emulated else PLACES


def in_each_head(x: np.ndarray, heads: int) -> np.ndarray:
    return np.repeat(x, heads, axis=1)


# ---- what a row can't see, and what it sees ------------------------------------------------------


@each_kernel()
@pytest.mark.parametrize("mask", MASKS)
def test_nan_and_inf_reach_the_rows_that_see_them_and_no_other(dtype, runner, mask):
    """Hidden: not a bit changes, also of rows of the same tile. Seen: as IEEE arithmetic has it."""
    m, n, options = MASKS[mask]
    arrays = one_head(m, n, dtype)
    clean_out, clean_lse = runner.run(*arrays, dtype=dtype, **options)
    variants = list(
        itertools.product(places(runner), ("k", "one of k", "v", "one of v", "k and v"))
    )
    q, k, v = (in_each_head(x, len(variants)) for x in arrays)
    for head, (key, which) in enumerate(variants):
        special = (np.nan, np.inf, -np.inf)[(head + len(mask)) % 3]
        for name, x in (("k", k), ("v", v)):
            if name in which.split():
                x[0, head, key, 3 if "one" in which else slice(None)] = special
    out, lse = runner.run(q, k, v, dtype=dtype, **options)
    seen = visible(m, n, **options)
    for head, (key, which) in enumerate(variants):
        blind, what = ~seen[:, key], f"key {key}: {which}"
        np.testing.assert_array_equal(out[0, head, blind], clean_out[0, 0, blind], err_msg=what)
        np.testing.assert_array_equal(lse[0, head, blind], clean_lse[0, 0, blind], err_msg=what)
    runner.expect(q, k, v, dtype=dtype, **options).check(out, lse)


@each_kernel()
@pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf])
def test_a_query_spoils_its_own_row_alone(dtype, runner, special):
    arrays = one_head(140, 140, dtype)
    clean = runner.run(*arrays, dtype=dtype)
    variants = list(itertools.product(places(runner), (3, slice(None))))
    q, k, v = (in_each_head(x, len(variants)) for x in arrays)
    for head, (row, channel) in enumerate(variants):
        q[0, head, row, channel] = special
    out, lse = runner.run(q, k, v, dtype=dtype)
    for head, (row, _) in enumerate(variants):
        others = np.arange(140) != row
        np.testing.assert_array_equal(out[0, head, others], clean[0][0, 0, others])
        np.testing.assert_array_equal(lse[0, head, others], clean[1][0, 0, others])
    runner.expect(q, k, v, dtype=dtype).check(out, lse)


@each_kernel()
@pytest.mark.parametrize("mask", MASKS)
def test_huge_numbers_in_one_key_cost_the_others_nothing(dtype, runner, mask):
    """Where rows of one tile share a scale, the largest of them must not set all others to 0."""
    m, n, options = MASKS[mask]
    huge = float(testing.round_to(6e4 if dtype == "float16" else 1e30, dtype))
    arrays = one_head(m, n, dtype)
    # One sign for all channels of q: a huge key then takes a row's whole weight, or has none.
    arrays[0] = np.abs(arrays[0])
    clean = runner.expect(*arrays, dtype=dtype, **options)
    variants = list(itertools.product(("k", "v", "k and v"), places(runner), (huge, -huge)))
    q, k, v = (in_each_head(x, len(variants)) for x in arrays)
    for head, (which, key, value) in enumerate(variants):
        for name, x in (("k", k), ("v", v)):
            if name in which.split():
                x[0, head, key] = value
    out, lse = runner.run(q, k, v, dtype=dtype, **options)
    exact_out, exact_lse = testing.reference(q, k, v, **options)
    seen = visible(m, n, **options)
    for head, (which, key, value) in enumerate(variants):
        what = f"key {key}: {which} of {value:g}"
        # All rows, where v is as it was: out is then of the size of the clean problem's.
        rows = np.full(m, True) if which == "k" else ~seen[:, key]
        off = np.linalg.norm(out[0, head, rows] - exact_out[0, head, rows])
        assert off <= clean.out_limit * np.linalg.norm(clean.out), what
        # The lse of a row that is all huge score is rounded as sums of its D terms are.
        large = np.abs(exact_lse[0, head]) > 1e3
        rounding = {"rtol": HEAD_DIM * 2.0**-24, "err_msg": what}
        np.testing.assert_allclose(lse[0, head, large], exact_lse[0, head, large], **rounding)
        finite = np.isfinite(clean.lse[0, 0])
        off = np.linalg.norm(lse[0, head, ~large] - exact_lse[0, head, ~large])
        assert off <= clean.lse_limit * np.linalg.norm(clean.lse[0, 0, finite]), what
    large_v = [head for head, (which, *_) in enumerate(variants) if which == "v"]
    q, k, v = (x[:, large_v] for x in (q, k, v))
    runner.expect(q, k, v, dtype=dtype, **options).check(out[:, large_v], lse[:, large_v])


@each_kernel()
@pytest.mark.parametrize("score", [-4.78, -3.0, 0.0, 8.0])
def test_a_query_far_from_the_others_changes_no_bit_of_theirs(dtype, runner, score):
    """Keys that fill tiles, and that all rows see: what a warp does is up to its rows alone."""
    q, k, v = (randn(1, 1, 64, 64, dtype=dtype, seed=seed) for seed in range(3))
    q[:], q[..., 0], k[..., 1:] = 0, 1, 0
    k[..., 0] = testing.round_to(score + 0.3 * k[..., 0], dtype)
    clean = runner.run(q, k, v, dtype=dtype, scale=1.0)
    others = np.arange(64) != 5
    for value in (np.nan, np.inf, 4.0, -20.0, 1e4):
        q[0, 0, 5] = value
        for x, y in zip(runner.run(q, k, v, dtype=dtype, scale=1.0), clean, strict=True):
            np.testing.assert_array_equal(x[:, :, others], y[:, :, others], err_msg=f"{value}")


@each_kernel(dtypes=["float32"])
@pytest.mark.parametrize("scale", [2.3e38, 3e38, -3e38])
def test_lse_under_scales_at_the_end_of_float32(dtype, runner, scale):
    """The scale times log2(e) is no float."""
    zeros = np.zeros((1, 1, 64, 64), np.float32)
    out, lse = runner.run(zeros, zeros, zeros + 1, dtype=dtype, scale=scale)
    np.testing.assert_allclose(lse, math.log(64), rtol=1e-6)
    np.testing.assert_allclose(out, 1, rtol=1e-6)


def infinite_inputs():
    """Each is (q, k, v) of ones with infinities, and says what float32 makes of them."""
    inf = np.inf
    ones = [np.ones((1, 1, 70, 16), np.float32) for _ in range(3)]

    def spoil(name, index, value):
        arrays = [x.copy() for x in ones]
        arrays["qkv".index(name)][(0, 0, *index)] = value
        return arrays

    yield "a key of -inf has no weight", spoil("k", (66,), -inf), 1, math.log(69) + 4
    yield "and no weight anywhere", spoil("k", (slice(None),), -inf), 0, -inf
    yield "a key of +inf", spoil("k", (66,), inf), np.nan, np.nan
    yield "a query of -inf: every score is -inf", spoil("q", (slice(None),), -inf), 0, -inf
    yield "a query of +inf", spoil("q", (slice(None),), inf), np.nan, np.nan
    yield "a value of +inf", spoil("v", (66,), inf), inf, math.log(70) + 4
    yield "a value of -inf", spoil("v", (3,), -inf), -inf, math.log(70) + 4
    both = spoil("v", (3,), -inf)
    both[2][0, 0, 66] = inf
    yield "both", both, np.nan, math.log(70) + 4
    zero = spoil("k", (66, 5), inf)
    zero[0][...] = 0
    yield "0 * inf", zero, np.nan, np.nan


@each_kernel()
def test_infinite_inputs(dtype, runner):
    texts, problems, outs, lses = zip(*infinite_inputs(), strict=True)
    q, k, v = (np.concatenate(x, axis=1) for x in zip(*problems, strict=True))
    out, lse = runner.run(q, k, v, dtype=dtype)
    for head, text in enumerate(texts):
        close = {"rtol": 4e-7, "err_msg": text}
        np.testing.assert_allclose(out[0, head], np.full((70, 16), outs[head]), **close)
        np.testing.assert_allclose(lse[0, head], np.full(70, lses[head]), **close)


@each_kernel()
def test_rows_that_see_nothing(dtype, runner):
    """Whatever the keys hold."""
    q, k, v = one_head(200, 70, dtype)
    for value in (None, np.nan, np.inf):
        if value is not None:
            k[...], v[...] = value, value
        for options in (
            {"causal": True},
            {"window": (5, 0)},
            {"window": (-1, 0)},
            {"causal": True, "window": (3, 9)},
        ):
            out, lse = runner.run(q, k, v, dtype=dtype, **options)
            blind = ~visible(200, 70, **options).any(axis=1)
            assert blind[:130].all()
            np.testing.assert_array_equal(out[0, 0, blind], 0)
            np.testing.assert_array_equal(lse[0, 0, blind], -np.inf)
            if value is None:
                runner.expect(q, k, v, dtype=dtype, **options).check(out, lse)
            else:
                assert np.isnan(out[0, 0, ~blind]).all()


# ---- large and small numbers ---------------------------------------------------------------------


@each_kernel()
@pytest.mark.parametrize("scale", [1e5, -1e5])
@pytest.mark.parametrize("causal", [False, True])
def test_logits_of_a_hundred_thousand(dtype, runner, scale, causal):
    q, k, v = one_head(70, 140, dtype)
    q, k = (testing.round_to(x / np.linalg.norm(x, axis=-1, keepdims=True), dtype) for x in (q, k))
    assert np.abs(scale * (q @ k.swapaxes(2, 3))).max() > 5e4
    options = {"scale": scale, "causal": causal}
    expected = runner.expect(q, k, v, dtype=dtype, **options)
    expected.check(*runner.run(q, k, v, dtype=dtype, **options))


@each_kernel()
@pytest.mark.parametrize("causal", [False, True])
def test_scores_beyond_the_range_of_float16(dtype, runner, causal):
    """Before the scale, and (A024) after it."""
    q, k, v = one_head(70, 140, dtype)
    q, k = (testing.round_to(200 * x, dtype) for x in (q, k))
    assert np.abs(q @ k.swapaxes(2, 3)).max() > 5 * 65504
    for scale in (1e-5, None):
        options = {"scale": scale, "causal": causal}
        expected = runner.expect(q, k, v, dtype=dtype, **options)
        expected.check(*runner.run(q, k, v, dtype=dtype, **options))


@each_kernel()
@pytest.mark.parametrize("scale", [0.0, -0.3, -1e-30, 1e-30, 1e38])
def test_scales(dtype, runner, scale):
    q, k, v = one_head(70, 140, dtype)
    if scale > 1:
        q = testing.round_to(q * np.float32(1e-38), dtype)
    options = {"scale": scale, "causal": True}
    expected = runner.expect(q, k, v, dtype=dtype, **options)
    expected.check(*runner.run(q, k, v, dtype=dtype, **options))


@each_kernel()
def test_sums_over_many_keys(dtype, runner):
    """In float16 a sum of ones stops at 2048 and ends at 65504."""
    n = 5000 if runner.emulated else 70000
    q, k = (np.zeros((1, 1, x, 16), np.float32) for x in (3, n))
    out, lse = runner.run(q, k, np.ones((1, 1, n, 16)), dtype=dtype)
    np.testing.assert_allclose(out, np.ones_like(out), rtol=2.0**-23)
    np.testing.assert_allclose(lse, np.full_like(lse, math.log(n)), rtol=2.0**-22)
    q, k, v = (randn(1, 1, x, 16, dtype=dtype, seed=x) for x in (3, n, n + 1))
    v = testing.round_to(v[:, :, :n] + 1, dtype)
    expected = runner.expect(q, k, v, dtype=dtype)
    expected.check(*runner.run(q, k, v, dtype=dtype))


def stress_cases(m, n, **rest):
    for dtype in helpers.DTYPES:
        for data in helpers.stress(dtype):
            yield Case(1, 2, 2, m, n, dtype=dtype, data=data, **rest)


@cases([*stress_cases(130, 200), *stress_cases(70, 140, causal=True, head_dim=80)], among=KERNELS)
def test_hard_data(case, runner):
    """Rows of ten orders of magnitude, outlier channels, everything tiny or huge."""
    runner.expected(case).check(*runner.run_case(case))


# ---- the same numbers, bit for bit ---------------------------------------------------------------

ALONE = [
    Case(3, 4, 2, 70, 70, causal=True),
    Case(2, 6, 2, 1, 200, 40, 24),
    Case(2, 4, 1, 130, 150, 33, 33, window=(40, 3)),
    Case(3, 2, 2, 17, 65, 128, 128),
]


@cases((replace(case, dtype=dtype) for case in ALONE for dtype in helpers.DTYPES), among=KERNELS)
def test_a_sequence_is_the_same_alone_and_in_a_batch(case, runner):
    """And so is a head, and the heads that share a key head."""
    q, k, v = helpers.inputs(case)
    whole = runner.run_case(case)
    group = case.heads_q // case.heads_kv
    parts = [(slice(b, b + 1), slice(None), slice(None)) for b in range(case.batch)]
    for h in range(case.heads_kv):
        heads = slice(h * group, (h + 1) * group)
        parts.append((slice(0, 1), heads, slice(h, h + 1)))
        parts.append((slice(1, 2), slice(h * group, h * group + 1), slice(h, h + 1)))
    for b, heads_q, heads_kv in parts:
        one = [q[b, heads_q], k[b, heads_kv], v[b, heads_kv]]
        alone = runner.run(*one, dtype=case.dtype, **case.options)
        for x, y in zip(alone, whole, strict=True):
            np.testing.assert_array_equal(x, y[b, heads_q], err_msg=f"{b} {heads_q}")


@cases((replace(ALONE[0], dtype=dtype) for dtype in helpers.DTYPES), among=KERNELS)
def test_the_rest_of_the_batch_may_hold_anything(case, runner):
    """Lengths aside: NaN, infinities and huge numbers in one sequence are its own affair."""
    clean = runner.run_case(case)
    q, k, v = (x.copy() for x in helpers.inputs(case))
    q[1], k[1], v[1] = 6e4, np.nan, np.inf
    q[0, 3], k[0, 1], v[0, 1] = np.inf, 6e4, np.nan  # the head pair of query heads 2 and 3
    found = runner.run(q, k, v, dtype=case.dtype, **case.options)
    for x, y in zip(found, clean, strict=True):
        np.testing.assert_array_equal(x[2], y[2])
        np.testing.assert_array_equal(x[0, :2], y[0, :2])


def laid_out():
    case = Case(1, 2, 1, 33, 70, 40, 24, causal=True)
    for runner, dtype, layout in itertools.product(EMULATED, helpers.DTYPES, INPUT_LAYOUTS):
        each = replace(case, dtype=dtype)
        if runner.takes(each):
            yield param(each, layout, runner=runner, id=f"{layout}-{each}-{runner}")


@pytest.mark.parametrize(("case", "layout", "runner"), list(laid_out()))
def test_strides_and_alignment_of_emulated_kernels(case, layout, runner):
    """As ``test_forward.py`` has it on the kernels' own devices, fewer."""
    same, same_lse = runner.run_case(case)
    values = helpers.inputs(case)
    plain = [runner.framework.array(x, case.dtype) for x in values]
    strided = [INPUT_LAYOUTS[layout](runner.framework, x, case.dtype) for x in values]
    for arrays in (strided, [plain[0], plain[1], strided[2]]):
        nan = np.full(same.shape, np.nan, np.float32)
        place = helpers.LAYOUTS.get(layout, helpers.contiguous)
        out = place(runner.framework, nan, case.dtype)
        _, lse = runner.forward(*arrays, out=out, return_lse=True, **case.options)
        np.testing.assert_array_equal(testing.to_numpy(out), same)
        np.testing.assert_array_equal(lse, same_lse)


# ---- who is tested -------------------------------------------------------------------------------


def test_the_cpu_kernel_is_one_of_them():
    assert "cpu" in {r.kernel.name for r in PRODUCTION}
