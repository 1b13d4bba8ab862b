"""Data that some way of computing gets wrong: scales that several numbers share, exponents of a
narrow range, sums that are cut off.

On the production kernels, as in ``test_contract.py``. Each problem is a head of its own, and each
head is held to the limit of its own numbers: beside others of another size its errors, or those of
the others, would not show.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

import fastattn
import helpers
from fastattn import testing
from helpers import EMULATED, PRODUCTION, taking

KERNELS = [*PRODUCTION, *EMULATED]
WIDE = ("float32", "bfloat16")  # what has float32's exponents

Problem = tuple[np.ndarray, np.ndarray, np.ndarray]


def each_kernel(dtypes=helpers.DTYPES):
    """Decorator: ``dtype`` and ``runner`` over the production kernels."""
    return taking(dtypes=dtypes, among=KERNELS)


def randn(m: int, n: int, head_dim: int = 64, seed: int = 0) -> Problem:
    rng = np.random.default_rng([seed, m, n, head_dim])
    q, k, v = (rng.standard_normal((1, 1, x, head_dim), np.float32) for x in (m, n, n))
    return q, k, v


def check_each(runner, problems: dict[str, Problem], *, dtype: str, **options) -> None:
    """One call, each problem a head of it; a failure names the problem."""
    heads = [tuple(testing.round_to(x, dtype) for x in p) for p in problems.values()]
    together = (np.concatenate(x, axis=1) for x in zip(*heads, strict=True))
    out, lse = runner.run(*together, dtype=dtype, **options)
    failures = []
    for i, (what, head) in enumerate(zip(problems, heads, strict=True)):
        try:
            expected = runner.expect(*head, dtype=dtype, **options)
            expected.check(out[:, i : i + 1], lse[:, i : i + 1])
        except AssertionError as error:
            failures.append(f"{what}: {error}")
    assert not failures, "\n".join(failures)


# ---- v: small, and rows of zeros -----------------------------------------------------------------


@each_kernel()
@pytest.mark.parametrize("causal", [False, True])
def test_rows_of_zeros_in_a_small_v(dtype, runner, causal):
    """A row of zeros has no size that others could share."""
    problems = {}
    for size in (1, 1e-4) if dtype == "float16" else (1, 1e-4, 1e-15, 1e-20):
        q, k, v = randn(64, 100)
        v *= np.float32(size)
        few = v.copy()
        few[:, :, 5] = few[:, :, 99] = 0
        problems[f"v of {size:g}, two rows 0"] = q, k, few
        uneven = few.copy()
        uneven[:, :, 6] *= np.float32(1e-3)
        problems[f"v of {size:g}, two rows 0 and one small"] = q, k, uneven
        half = v.copy()
        half[:, :, ::2] = 0
        problems[f"v of {size:g}, half of the rows 0"] = q, k, half
        padded = uneven.copy()
        padded[:, :, 60:] = 0
        problems[f"v of {size:g}, zeros from row 60 on"] = q, k, padded
    check_each(runner, problems, dtype=dtype, causal=causal)


@each_kernel(WIDE)
def test_sizes_of_v(dtype, runner):
    """From where its rounding is still relative to where the sums are still finite."""
    q, k, v = randn(64, 100)
    sizes = (1e-36, 1e-34, 1e-28, 1e28, 1e34, 1e36)
    problems = {f"v of {size:g}": (q, k, v * np.float32(size)) for size in sizes}
    check_each(runner, problems, dtype=dtype)


# ---- attention sinks -----------------------------------------------------------------------------


def sink(gap: float, m: int, n: int, *, at: int = 0, v_size: float = 0.0) -> Problem:
    """Key ``at`` has the score ``gap``, the others have about 0. Its row of v is small or 0: what
    others hold is then most of the output, however small their weights.
    """
    q, k, v = randn(m, n)
    q[..., 0] = math.sqrt(q.shape[3])
    k[..., 0] = 0
    k[:, :, at] = 0
    k[:, :, at, 0] = gap
    v[:, :, at] *= np.float32(v_size)
    return q, k, v


@each_kernel()
@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"window": (70, 0)}], ids=["full", "causal", "window"]
)
def test_attention_sinks(dtype, runner, options):
    """The weight is at one key, the values are at others."""
    problems = {}
    for gap in (8, 12, 16) if dtype == "float16" else (8, 12, 16, 24, 40, 60):
        for at in (0, 45, 99):
            for v_size in (0, math.exp(4 - gap)):  # 0, or as much as the others bring together
                what = f"key {at} is {gap} ahead, its v of {v_size:.1g}"
                problems[what] = sink(gap, 64, 100, at=at, v_size=v_size)
    check_each(runner, problems, dtype=dtype, **options)


@each_kernel()
@pytest.mark.parametrize("share", [0.9, 0.99, 0.999])
def test_a_sink_of_most_of_the_mass(dtype, runner, share):
    """As models have it: the first key takes nearly all weight, and holds nearly nothing."""
    q, k, v = sink(0, 64, 2000, v_size=1e-3)
    mass = testing.reference(q, k[:, :, 1:], v[:, :, 1:])[1].mean()
    k[:, :, 0, 0] = mass + math.log(share / (1 - share))
    check_each(runner, {f"{100 * share:g} %": (q, k, v)}, dtype=dtype)


@pytest.mark.parametrize("gap", [20, 21, 22])
def test_on_a_cpu_many_keys_that_each_count_for_nothing(gap):
    """A tile of 64 keys weighs less than half a unit of the sum's last place, and all of them 4e-5
    and more of it. A running float32 sum has errors of 1e-5 and more here.
    """
    q, k, v = randn(2, 65536, 16)
    q[:], k[..., 0] = 0, 0
    q[..., 0], q[..., 1], k[:, :, 0, 0] = 1, 0.5, gap
    wanted, lse = testing.reference(q, k, v + 1, scale=1.0)
    out, out_lse = fastattn.forward(q, k, v + 1, scale=1.0, kernel="cpu", return_lse=True)
    assert testing.error(out, wanted) < 5e-7
    assert testing.error(out_lse, lse) < 1e-7


# ---- factors that float32 can't hold on the way --------------------------------------------------


@each_kernel(WIDE)
@pytest.mark.parametrize(
    ("q_size", "k_size", "scale"),
    [
        (1e35, 1e-35, 0.125),
        (1e37, 1e-37, 0.125),
        (1e38, 1e-38, 0.125),
        (1e-38, 1e38, 0.125),
        (1e-30, 1e38, 1e-9),
        (1e-10, 1e38, 1e-29),
        (1e-38, 1e35, 100.0),
        (1e20, 1e-38, 1e17),
        (1e-30, 1e-30, 1e30),
        (1e-20, 1e-20, 1e38),
    ],
)
def test_scores_of_ordinary_size_from_extreme_factors(dtype, runner, q_size, k_size, scale):
    q, k, v = randn(64, 100)
    q, k = (np.clip(x, -3, 3) * np.float32(s) for x, s in ((q, q_size), (k, k_size)))
    check_each(runner, {"": (q, k, v)}, dtype=dtype, scale=scale)


# ---- sums that are cut off -----------------------------------------------------------------------


@each_kernel()
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_scores_whose_products_have_one_sign(dtype, runner, head_dim):
    """What a step of a sum loses then adds up, in lse above all. Of 0 and 1 sums are exact in any
    order: nothing is left to lose.
    """
    q, k, v = randn(64, 70, head_dim)
    rng = np.random.default_rng(head_dim)
    positive = {
        "|randn|": (np.abs(q), np.abs(k), v),
        "randn + 2": (q + np.float32(2), k + np.float32(2), v),
        "uniform": (rng.random(q.shape, np.float32), rng.random(k.shape, np.float32), v),
    }
    check_each(runner, positive, dtype=dtype)
    bits = (rng.integers(0, 2, x.shape).astype(np.float32) for x in (q, k))
    exact = {"0 or 1": (*bits, v), "ones": (np.ones_like(q), np.ones_like(k), v)}
    for scale in (1.0, 0.25):
        check_each(runner, exact, dtype=dtype, scale=scale)


# ---- numbers that are lost beside large ones, and infinities -------------------------------------


@each_kernel()
def test_what_is_small_beside_larger_numbers_is_no_zero(dtype, runner):
    """Times inf it is an inf: 0 would make a NaN of it. V6's two parts reach down to 2^-39."""
    tiny = 2.0**-24 if dtype == "float16" else 1e-11
    q, k, v = randn(64, 70)
    q[..., 0], q[..., 2:] = 1, 0.5
    problems = {}
    for sign in (1, -1):
        tiny_q, infinite_k = q.copy(), k.copy()
        tiny_q[..., 1] = sign * tiny
        infinite_k[:, :, 5, 1] = -sign * np.inf
        problems[f"q of {sign * tiny:g}, one k infinite"] = tiny_q, infinite_k, v
        infinite_q, tiny_k = q.copy(), k.copy()
        infinite_q[:, :, 2, 1] = -sign * np.inf
        tiny_k[..., 1] = sign * tiny
        problems[f"k of {sign * tiny:g}, one q infinite"] = infinite_q, tiny_k, v
    for q, k, v in problems.values():
        assert not np.isnan(testing.reference(q, k, v)[0]).any()
    check_each(runner, problems, dtype=dtype)


@each_kernel(WIDE)
def test_an_infinite_value_under_a_tiny_weight(dtype, runner):
    problems = {}
    for gap in (10, 40, 80):
        q, k, v = sink(gap, 64, 70, v_size=1)
        v[:, :, 7, 3], v[:, :, 69, 4] = np.inf, -np.inf
        problems[f"e^-{gap}"] = q, k, v
    check_each(runner, problems, dtype=dtype)


@each_kernel()
def test_a_hidden_value_beside_a_key_of_weight_but_no_value(dtype, runner):
    """Rows that don't see the NaN or inf of a tile keep their digits beside such a sink."""
    problems = {}
    for gap in (8, 12) if dtype == "float16" else (8, 16, 24):
        for bad in (np.nan, np.inf):
            q, k, v = sink(gap, 64, 64, v_size=0)
            v[:, :, 31] = bad
            problems[f"gap {gap}, v of {bad}"] = q, k, v
    check_each(runner, problems, dtype=dtype, causal=True)


@each_kernel(("float32",))
@pytest.mark.parametrize(("gap", "size"), [(100, 2.0**-24), (110, 2.0**-12), (120, 1.0)])
def test_an_output_of_weights_far_below_one(dtype, runner, gap, size):
    """All weight but 2^-gap is on keys with no value; what is left is a float."""
    q, k, v = randn(16, 64)
    q[:], k[:] = 0, 0
    q[..., 0], k[:, :, :32, 0] = 1, -1000
    k[:, :, 0, 0] = gap * math.log(2)
    v[:, :, :32], v[:, :, 32:] = 0, v[:, :, 32:] * np.float32(size)
    out, _ = runner.run(q, k, v, dtype=dtype, scale=1.0)
    wanted = testing.reference(q, k, v, scale=1.0)[0]
    # One rounding of a score of this size is a relative error of a weight.
    assert testing.error(out, wanted) < 2 * gap * math.log(2) * 2.0**-24


@each_kernel(("float32",))
@pytest.mark.parametrize("which", ["q", "k"])
def test_outlier_channels(dtype, runner, which):
    """A score is one large product and many small ones, whose digits tensor cores cut off."""
    errors = np.zeros(2)
    for seed in range(4):
        q, k, v = randn(64, 512, seed=seed)
        (q if which == "q" else k)[..., 5] *= 1000
        out, _ = runner.run(q, k, v, dtype=dtype, scale=2.0**-8)
        plain = fastattn.forward(q, k, v, scale=2.0**-8, kernel="cpu")
        wanted = testing.reference(q, k, v, scale=2.0**-8)[0]
        errors += [testing.error(out, wanted), testing.error(plain, wanted)]
    # V6 has half of plain float32's error: one cut for 16 products, not 16 roundings.
    assert errors[0] < (0.75 if runner.kernel.name == "v6" else 1.2) * errors[1]
