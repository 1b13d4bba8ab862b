"""Random calls against the oracle, and laws that hold whatever the numbers are (Hypothesis)."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import helpers
from fastattn import testing
from helpers import INPUT_LAYOUTS, KERNELS, LAYOUTS, ONE_PER_KERNEL, Case, Runner, runners

LENGTH = st.one_of(st.integers(0, 9), st.integers(0, 150))
HEAD_DIM = st.one_of(
    st.integers(1, 16), st.sampled_from([32, 64, 80, 96, 128]), st.integers(1, 256)
)
SIDE = st.one_of(st.just(-1), st.integers(0, 6), st.integers(0, 200), st.just(2**31 - 1))
SCALE = st.one_of(
    st.none(), st.sampled_from([0.0, 1.0, -0.5]), st.floats(-3, 3, width=32, allow_nan=False)
)


def each_kernel(*needs: Case) -> Any:
    """Decorator: ``runner`` over the kernels that take each of these calls."""
    return runners(*needs, among=ONE_PER_KERNEL)


@st.composite
def calls(draw: st.DrawFn, runner: Runner) -> Case:
    """Any call that the kernel declares; emulated, of few heads."""
    kernel = runner.kernel
    head_dim = draw(HEAD_DIM.map(runner.own_head_dim))
    head_dim_v = draw(HEAD_DIM.map(runner.own_head_dim)) if kernel.head_dim_v_differs else head_dim
    most = 1 if runner.emulated else 3
    heads_kv = draw(st.integers(0, most))
    len_q = draw(LENGTH)
    dtype = draw(st.sampled_from([d for d in kernel.dtypes if d in runner.framework.dtypes]))
    return Case(
        batch=draw(st.integers(0, most)),
        heads_q=heads_kv * (draw(st.integers(1, most + 1)) if kernel.grouped_heads else 1),
        heads_kv=heads_kv,
        len_q=len_q,
        len_kv=draw(LENGTH) if kernel.lengths_differ else len_q,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        dtype=dtype,
        causal=draw(st.booleans()) if kernel.causal else False,
        window=draw(st.none() | st.tuples(SIDE, SIDE)) if kernel.window else None,
        scale=draw(SCALE),
        data=draw(st.sampled_from(["randn", "shifted", "large_logits", *hard_data(runner, dtype)])),
    )


def hard_data(runner: Runner, dtype: str) -> tuple[str, ...]:
    """What the contract asks of production kernels."""
    return helpers.stress(dtype) if helpers.takes_any_call(runner.kernel) else ()


def layouts(runner: Runner, names: dict[str, helpers.Layout]) -> st.SearchStrategy[str]:
    return st.sampled_from([n for n in names if helpers.supports(runner.framework, n)])


@each_kernel()
@given(data=st.data())
def test_any_call_in_any_layout(runner, data):
    any_call_in_any_layout(runner, data)


def any_call_in_any_layout(runner: Runner, data: st.DataObject) -> None:
    case = data.draw(calls(runner))
    chosen = [data.draw(layouts(runner, INPUT_LAYOUTS)) for _ in "qkv"]
    values = helpers.inputs(case)
    arrays = [
        INPUT_LAYOUTS[name](runner.framework, x, case.dtype)
        for name, x in zip(chosen, values, strict=True)
    ]
    shape = (*case.shapes[0][:3], case.head_dim_v)
    nan = np.full(shape, np.nan, np.float32)
    out = LAYOUTS[data.draw(layouts(runner, LAYOUTS))](runner.framework, nan, case.dtype)
    returned, lse = runner.forward(*arrays, out=out, return_lse=True, **case.options)
    assert returned is out
    runner.expected(case).check(out, lse)


@each_kernel(Case(causal=True), Case(window=(1, 1)), Case(len_q=5))
@given(data=st.data())
def test_hidden_keys_never_reach_a_row(runner, data):
    hidden_keys_never_reach_a_row(runner, data)


def hidden_keys_never_reach_a_row(runner: Runner, data: st.DataObject) -> None:
    """Bit for bit, whatever stands in a hidden key."""
    case = replace(data.draw(calls(runner)), data="randn")
    q, k, v = (x.copy() for x in helpers.inputs(case))
    clean, clean_lse = runner.run_case(case)
    bad = data.draw(st.lists(st.integers(0, max(0, case.len_kv - 1)), max_size=3))
    bad = sorted({j for j in bad if j < case.len_kv})
    k[:, :, bad] = data.draw(st.sampled_from([np.nan, np.inf, -np.inf, 1e4]))
    v[:, :, bad] = data.draw(st.sampled_from([np.nan, np.inf, -np.inf, 1e4]))
    out, lse = runner.run(q, k, v, dtype=case.dtype, **case.options)
    seen = helpers.visible(case.len_q, case.len_kv, case.causal, case.window)
    rows = ~seen[:, bad].any(axis=1)
    np.testing.assert_array_equal(out[:, :, rows], clean[:, :, rows])
    np.testing.assert_array_equal(lse[:, :, rows], clean_lse[:, :, rows])


@each_kernel(Case(len_q=5))
@given(data=st.data())
def test_a_row_does_not_depend_on_the_others(runner, data):
    a_row_does_not_depend_on_the_others(runner, data)


def a_row_does_not_depend_on_the_others(runner: Runner, data: st.DataObject) -> None:
    """Out and lse of a head are those of the call with that head alone."""
    case = data.draw(calls(runner).filter(lambda c: c.batch * c.heads_kv * c.len_q > 0))
    q, k, v = helpers.inputs(case)
    whole = runner.run_case(case)
    b = data.draw(st.integers(0, case.batch - 1))
    h = data.draw(st.integers(0, case.heads_q - 1))
    kv = h // (case.heads_q // case.heads_kv)
    one = [q[b : b + 1, h : h + 1], k[b : b + 1, kv : kv + 1], v[b : b + 1, kv : kv + 1]]
    out, lse = runner.run(*one, dtype=case.dtype, **case.options)
    expected = runner.expect(*one, dtype=case.dtype, **case.options)
    expected.check(out, lse)
    expected.check(whole[0][b : b + 1, h : h + 1], whole[1][b : b + 1, h : h + 1])


@each_kernel(Case(len_q=5))
@given(data=st.data())
def test_partial_results_merge_into_the_whole(runner, data):
    """By lse, as split keys are combined, whatever the split."""
    case = data.draw(calls(runner).filter(lambda c: c.data != "large_logits"))
    case = replace(case, causal=False, window=None, dtype="float32")
    q, k, v = helpers.inputs(case)
    cut = data.draw(st.integers(0, case.len_kv))
    parts = [
        runner.run(q, k[:, :, s], v[:, :, s], scale=case.scale)
        for s in (slice(cut), slice(cut, None))
    ]
    out, lse = helpers.merge(*parts)
    expected = runner.expected(case)
    np.testing.assert_array_equal(np.isinf(lse), np.isinf(expected.lse))
    # The rounding of each lse, an absolute one in the exponent, is one of the weights.
    largest = np.abs(lse[np.isfinite(lse)]).max(initial=0.0)
    total, _ = helpers.merge(*((abs(o), x) for o, x in parts))
    slack = 4 * 2.0**-24 * (1 + largest) * np.linalg.norm(total)
    limit = 2 * expected.out_limit * np.linalg.norm(expected.out) + slack
    assert np.linalg.norm(out - expected.out) <= limit


@each_kernel(Case())
@given(data=st.data())
def test_the_order_of_the_keys_does_not_matter(runner, data):
    case = replace(data.draw(calls(runner)), causal=False, window=None)
    q, k, v = helpers.inputs(case)
    order = data.draw(st.permutations(range(case.len_kv)))
    found = runner.run(q, k[:, :, order], v[:, :, order], dtype=case.dtype, scale=case.scale)
    runner.expected(case).check(*found)


@each_kernel(Case())
@given(data=st.data())
def test_weights_sum_to_one(runner, data):
    """A v that is the same everywhere comes out, but for the rounding of sum and quotient, and of
    the weights that tensor cores take in 16 bits.
    """
    case = replace(data.draw(calls(runner)), causal=False, window=None, data="randn")
    q, k, v = helpers.inputs(case)
    value = float(testing.round_to(data.draw(st.floats(-100, 100, width=16)), case.dtype))
    out, _ = runner.run(q, k, np.full_like(v, value), dtype=case.dtype, scale=case.scale)
    expected = value if case.len_kv else 0
    rounding = 2 * math.sqrt(max(1, case.len_kv)) * 2.0**-24
    rounding += helpers.UNIT_ROUNDOFF[case.dtype] * (1 if case.dtype == "float32" else 2)
    np.testing.assert_allclose(out, np.full_like(out, expected), rtol=rounding)


# ---- the CUDA kernels' logic, without a GPU ------------------------------------------------------

FEW = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
EMULATED = runners(among=helpers.EMULATED)


@EMULATED
@FEW
@given(data=st.data())
def test_any_call_in_any_layout_emulated(runner, data):
    any_call_in_any_layout(runner, data)


@EMULATED
@FEW
@given(data=st.data())
def test_hidden_keys_never_reach_a_row_emulated(runner, data):
    hidden_keys_never_reach_a_row(runner, data)


@EMULATED
@FEW
@given(data=st.data())
def test_a_row_does_not_depend_on_the_others_emulated(runner, data):
    a_row_does_not_depend_on_the_others(runner, data)


def test_every_kernel_is_drawn():
    assert [r.kernel.name for r in ONE_PER_KERNEL] == list(KERNELS)
