"""Every kernel against float64, over all that it declares: nothing here names a kernel."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import itertools
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import fastattn
import helpers
from fastattn import testing
from fastattn.benchmark import _auto
from fastattn.benchmark._arrays import Problem
from helpers import (
    DTYPES,
    INPUT_LAYOUTS,
    KERNELS,
    LAYOUTS,
    RUNNERS,
    Case,
    cases,
    param,
    runners,
    sampled,
)

LENGTHS = (1, 17, 63, 64, 65, 127, 1000)
HEAD_DIMS = (
    1,
    2,
    3,
    5,
    7,
    8,
    12,
    16,
    32,
    33,
    40,
    48,
    56,
    63,
    64,
    65,
    72,
    80,
    88,
    96,
    100,
    112,
    120,
)
HEAD_DIMS += (127, 128, 129, 144, 160, 192, 224, 255, 256)


def heads_for(len_q: int) -> dict[str, int]:
    """Enough rows that a norm over them means something, few where rows are many."""
    if len_q >= 500:
        return {"batch": 1, "heads_q": 2, "heads_kv": 2}
    if len_q >= 60:
        return {"batch": 2, "heads_q": 3, "heads_kv": 3}
    return {"batch": 5, "heads_q": 12, "heads_kv": 12}


def lengths(m: int, n: int, **rest: object) -> Case:
    return Case(len_q=m, len_kv=n, **(heads_for(m) | rest))


def square_lengths():
    for dtype, n in itertools.product(DTYPES, LENGTHS):
        for data in ("randn", "shifted", "large_logits"):
            yield lengths(n, n, dtype=dtype, data=data)


def other_lengths():
    pairs = [(1, 5), (1, 1000), (1000, 1), (5, 3), (17, 64), (64, 17), (63, 1000), (1000, 63)]
    pairs += [(65, 127), (127, 65), (32, 33), (33, 32), (130, 200)]
    for dtype, (m, n) in itertools.product(DTYPES, pairs):
        yield lengths(m, n, dtype=dtype, data="shifted")


def head_dims():
    for dtype, d in itertools.product(DTYPES, HEAD_DIMS):
        yield Case(dtype=dtype, len_q=65, len_kv=65, head_dim=d, head_dim_v=d)
        yield Case(dtype=dtype, len_q=33, len_kv=70, head_dim=d, head_dim_v=d, data="shifted")
    pairs = [(64, 128), (128, 64), (192, 128), (7, 33), (33, 7), (1, 256), (256, 1), (64, 65)]
    for dtype, (d, dv) in itertools.product(DTYPES, pairs):
        yield Case(dtype=dtype, len_kv=70, head_dim=d, head_dim_v=dv)


def grouped_heads():
    for dtype, (hq, hkv) in itertools.product(DTYPES, [(6, 2), (8, 1), (7, 7), (12, 4), (64, 1)]):
        for m, n in [(65, 65), (5, 70), (1, 130)]:
            yield Case(dtype=dtype, heads_q=hq, heads_kv=hkv, len_q=m, len_kv=n)


MASKED_LENGTHS = [(1, 1), (65, 65), (128, 128), (1, 130), (5, 3), (130, 64), (64, 130), (200, 333)]


def causal():
    for dtype, (m, n) in itertools.product(DTYPES, MASKED_LENGTHS):
        for hkv in (2, 4):
            yield lengths(m, n, dtype=dtype, heads_q=4, heads_kv=hkv, causal=True, data="shifted")


def windows():
    sides = [(0, 0), (1, 0), (0, 1), (5, 7), (-1, 3), (3, -1), (64, 0), (100, 100), (-1, -1)]
    sides += [(2**31 - 1, 0), (0, 2**31 - 1)]
    for (m, n), window in itertools.product(MASKED_LENGTHS, sides):
        yield lengths(m, n, heads_q=4, heads_kv=2, window=window)
        yield lengths(m, n, window=window, causal=True, data="shifted")
    for dtype in ("float16", "bfloat16"):
        yield Case(dtype=dtype, heads_q=4, heads_kv=2, len_q=65, len_kv=130, window=(20, 3))


def scales():
    for dtype, scale in itertools.product(DTYPES, (0.0, 1.0, -1.0, 0.3, 1e-30, 30.0)):
        yield Case(dtype=dtype, scale=scale)


ALL = [
    *square_lengths(),
    *other_lengths(),
    *head_dims(),
    *grouped_heads(),
    *causal(),
    *windows(),
    *scales(),
]


@sampled(ALL)
def test_against_float64(case, runner):
    runner.expected(case).check(*runner.run_case(case))


def few():
    """On both sides of every tile's border, each width of a row's tail, each mask; one head."""
    one = Case(1, 1, 1)
    for m, n in [(1, 1), (17, 63), (64, 64), (65, 127), (127, 65), (128, 129), (1, 300), (200, 7)]:
        yield replace(one, len_q=m, len_kv=n, data="shifted")
    for d, dv in [(1, 1), (3, 8), (8, 3), (16, 72), (33, 40), (72, 16), (80, 96), (96, 129)]:
        yield replace(one, len_q=20, len_kv=70, head_dim=d, head_dim_v=dv)
    for d, dv in [(128, 64), (64, 128), (128, 128), (192, 128), (255, 7), (256, 256), (1, 256)]:
        yield replace(one, len_q=20, len_kv=70, head_dim=d, head_dim_v=dv, causal=True)
    for window in [(0, 0), (5, 7), (-1, 3), (64, 0), (100, -1)]:
        yield replace(one, len_q=130, len_kv=150, window=window)
        yield replace(one, len_q=70, len_kv=40, head_dim=40, window=window, causal=True)
    for m, n in [(128, 128), (130, 64), (40, 200)]:
        yield Case(2, 4, 2, m, n, head_dim=32, head_dim_v=32, causal=True)
    for scale in (0.0, -1.0, 30.0):
        yield replace(one, scale=scale, len_kv=130)
    yield replace(one, data="large_logits", len_kv=130)


@cases([replace(c, dtype=dtype) for c in few() for dtype in DTYPES], among=helpers.EMULATED)
def test_emulated_kernels_against_float64(case, runner):
    """The production kernels of CUDA where there is no GPU."""
    runner.expected(case).check(*runner.run_case(case))


@pytest.mark.parametrize("name", KERNELS)
def test_each_kernel_is_tested(name):
    """The list above holds cases for all that a kernel declares."""
    kernel = KERNELS[name]
    taken = [c for c in ALL for r in RUNNERS if r.kernel.name == name and r.takes(c)]
    assert {c.dtype for c in taken} == set(kernel.dtypes)
    own = [c for c in taken if kernel.head_dim_min <= c.head_dim <= kernel.head_dim_max]
    assert {kernel.head_dim_min, kernel.head_dim_max} <= {c.head_dim for c in own}
    assert any(c.head_dim != c.head_dim_v for c in own) == kernel.head_dim_v_differs
    assert any(c.len_q != c.len_kv for c in own) == kernel.lengths_differ
    assert any(c.heads_q != c.heads_kv for c in own) == kernel.grouped_heads
    assert any(c.causal for c in own) == kernel.causal
    assert any(c.window for c in own) == kernel.window


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_limits_are_tight(dtype):
    """So that no change of the helpers makes the tests above vacuous."""
    largest = {"float32": 1.2e-6, "float16": 7e-4, "bfloat16": 6e-3}[dtype]
    for case in (
        Case(dtype=dtype),
        Case(dtype=dtype, len_kv=1000, data="shifted"),
        Case(dtype=dtype, len_q=128, len_kv=128, causal=True),
        Case(dtype=dtype, head_dim=256, head_dim_v=256),
    ):
        expected = helpers.expected(case, "cpu")
        assert 0 < expected.out_limit <= largest, str(case)
        assert 0 < expected.lse_limit <= 1.3e-7, str(case)
        cut_off = helpers.expected(case, "cpu", tensor_cores=True)
        steps = 4 if dtype == "float32" else case.head_dim // 16
        assert 0 < cut_off.out_limit <= largest, str(case)
        assert 0 < cut_off.lse_limit <= 1.3e-7 + steps * 4.5e-8, str(case)


# ---- what a kernel does not declare, it refuses --------------------------------------------------

BEYOND = {
    "dtypes": [Case(dtype=d) for d in DTYPES],
    "head_dim_max": [Case(head_dim=d, head_dim_v=d) for d in (129, 257, 512)],
    "head_dim_v_differs": [Case(head_dim_v=32)],
    "lengths_differ": [Case(len_q=5)],
    "grouped_heads": [Case(heads_q=6)],
    "causal": [Case(causal=True)],
    "window": [Case(window=(3, 3))],
}


@pytest.mark.parametrize(
    ("case", "runner"),
    [
        param(c, runner=r, id=f"{what}-{c}-{r}")
        for what, problems in BEYOND.items()
        for c in problems
        for r in RUNNERS
        if c.dtype in r.framework.dtypes and not r.takes(c)
    ],
)
def test_what_is_not_declared_is_refused(case, runner):
    arrays = [runner.framework.array(x, case.dtype) for x in helpers.inputs(case)]
    with pytest.raises(NotImplementedError, match=f"'{runner.kernel.name}'"):
        fastattn.forward(*arrays, kernel=runner.kernel.name, **case.options)
    simple = runner.own_case(Case())
    runner.expected(simple).check(*runner.run_case(simple))  # the next call works


# ---- empty ---------------------------------------------------------------------------------------

EMPTY = [
    Case(batch=0),
    Case(heads_q=0, heads_kv=0),
    Case(len_q=0, len_kv=0),
    Case(len_q=0),
    Case(len_kv=0),
    Case(batch=0, len_kv=0),
    Case(len_q=0, causal=True),
    Case(len_kv=0, causal=True),
    Case(len_kv=0, window=(3, 3)),
    Case(len_kv=0, heads_q=6),
    Case(len_kv=0, head_dim=32),
]


@cases(replace(c, dtype=dtype) for c in EMPTY for dtype in DTYPES)
def test_empty(case, runner):
    out, lse = runner.run_case(case)
    assert out.shape == (case.batch, case.heads_q, case.len_q, case.head_dim_v)
    assert lse.shape == (case.batch, case.heads_q, case.len_q)
    assert (out == 0).all()
    assert (lse == -np.inf).all()


# ---- strides and alignment -----------------------------------------------------------------------

STRIDED = [Case(len_q=65, len_kv=65), Case(len_q=5, len_kv=70), Case(len_q=70, len_kv=1)]
STRIDED += [Case(heads_q=6, len_kv=130, causal=True), Case(head_dim=40, head_dim_v=40)]
STRIDED += [Case(head_dim=33, head_dim_v=33, len_kv=40), Case(dtype="float16", head_dim_v=32)]
STRIDED += [Case(dtype="bfloat16", heads_q=6, window=(9, 9))]
STRIDED += [Case(dtype="float16", head_dim=40, head_dim_v=33, causal=True)]
STRIDED += [Case(dtype="bfloat16", len_q=5, head_dim=129, head_dim_v=72)]


def strided_cases():
    for case in STRIDED:
        for layout in INPUT_LAYOUTS:
            for runner in RUNNERS:
                if runner.takes(case) and helpers.supports(runner.framework, layout):
                    yield param(case, layout, runner=runner, id=f"{layout}-{case}-{runner}")


@pytest.mark.parametrize(("case", "layout", "runner"), list(strided_cases()))
def test_strides_and_alignment(case, layout, runner):
    """Whatever the strides and the alignment: the numbers of the contiguous call, bit for bit."""
    values = helpers.inputs(case)
    same, same_lse = runner.run_case(case)
    runner.expected(case).check(same, same_lse)
    plain = [runner.framework.array(x, case.dtype) for x in values]
    strided = [INPUT_LAYOUTS[layout](runner.framework, x, case.dtype) for x in values]
    # All three at once, then each alone: a kernel may look at one pointer for all.
    for chosen in [(0, 1, 2), (0,), (1,), (2,)]:
        arrays = [strided[i] if i in chosen else plain[i] for i in range(3)]
        out, lse = runner.forward(*arrays, return_lse=True, **case.options)
        which = "".join("qkv"[i] for i in chosen)
        np.testing.assert_array_equal(testing.to_numpy(out), same, err_msg=which)
        np.testing.assert_array_equal(testing.to_numpy(lse), same_lse, err_msg=which)
    if layout in LAYOUTS:
        nan = np.full(same.shape, np.nan, np.float32)
        for arrays in (plain, strided):
            out = LAYOUTS[layout](runner.framework, nan, case.dtype)
            assert runner.forward(*arrays, out=out, **case.options) is out
            np.testing.assert_array_equal(testing.to_numpy(out), same, err_msg="out")


@pytest.mark.parametrize(
    ("layout", "runner"),
    [
        param(layout, runner=r, id=f"{layout}-{r}")
        for layout in LAYOUTS
        for r in RUNNERS
        if layout != "contiguous" and helpers.supports(r.framework, layout)
    ],
)
def test_nothing_is_written_beside_a_strided_out(layout, runner):
    """The gaps between the rows of ``out`` keep their values."""
    case = runner.own_case(Case())
    values = helpers.inputs(case)
    arrays = [runner.framework.array(x, case.dtype) for x in values]
    out = LAYOUTS[layout](runner.framework, np.zeros((*values[0].shape,), np.float32), case.dtype)
    whole = base_of(out)
    before = np.isnan(testing.to_numpy(whole)).sum()
    runner.forward(*arrays, out=out)
    runner.expected(case).check(out)
    assert np.isnan(testing.to_numpy(whole)).sum() == before


def base_of(view):
    base = view
    while True:
        # torch names it _base, the others base; NumPy ends with the buffer's owner.
        parent = getattr(base, "_base", None) if hasattr(base, "_base") else base.base
        if parent is None or not hasattr(parent, "shape"):
            return base
        base = parent


@runners(Case())
@pytest.mark.parametrize("which", ["heads", "batch", "rows", "all"])
def test_broadcast_inputs(runner, which):
    """Stride 0, as broadcast_to makes it."""
    if not runner.framework.has_views:
        pytest.skip(f"{runner.framework} has no views")
    case = runner.own_case(Case(batch=3, heads_q=4, heads_kv=4))
    axes = {"heads": (1,), "batch": (0,), "rows": (2,), "all": (0, 1, 2)}[which]
    index = tuple(slice(0, 1) if axis in axes else slice(None) for axis in range(4))
    values = [np.broadcast_to(x[index], x.shape) for x in helpers.inputs(case)]
    arrays = [
        runner.framework.xp.broadcast_to(runner.framework.array(x[index], case.dtype), x.shape)
        for x in values
    ]
    out, lse = runner.forward(*arrays, return_lse=True)
    same, same_lse = runner.run(*values)
    np.testing.assert_array_equal(testing.to_numpy(out), same)
    np.testing.assert_array_equal(testing.to_numpy(lse), same_lse)
    runner.expect(*values).check(same, same_lse)


# ---- one call like the next ----------------------------------------------------------------------


@cases(
    [
        Case(len_q=127, len_kv=127),
        Case(len_q=1, len_kv=1000, heads_q=6),
        Case(len_q=65, len_kv=300, causal=True, dtype="bfloat16"),
        lengths(1000, 1000),
    ]
)
def test_two_calls_are_bitwise_equal(case, runner):
    first = runner.run_case(case)
    for _ in range(3):
        again = runner.run_case(case)
        assert all(a.tobytes() == b.tobytes() for a, b in zip(first, again, strict=True))


@runners(Case())
def test_lse_changes_nothing(runner):
    """``out`` is the same with lse and without it."""
    case = runner.own_case(Case(len_q=127, len_kv=127))
    arrays = [runner.framework.array(x, case.dtype) for x in helpers.inputs(case)]
    out = runner.framework.full(helpers.inputs(case)[0].shape, math.nan, case.dtype)
    runner.forward(*arrays, out=out)
    np.testing.assert_array_equal(testing.to_numpy(out), runner.run_case(case)[0])


@runners(Case())
def test_inputs_are_not_written(runner):
    case = runner.own_case(Case(len_q=127, len_kv=127))
    values = helpers.inputs(case)
    arrays = [runner.framework.array(x, case.dtype) for x in values]
    runner.forward(*arrays, return_lse=True)
    for x, before in zip(arrays, values, strict=True):
        np.testing.assert_array_equal(testing.to_numpy(x), before)


@cases([Case(len_q=127, len_kv=127, dtype=dtype) for dtype in DTYPES])
def test_the_same_array_three_times(case, runner):
    values = helpers.inputs(case)[0]
    x = runner.framework.array(values, case.dtype)
    out, lse = runner.forward(x, x, x, return_lse=True)
    runner.expect(values, values, values, dtype=case.dtype).check(out, lse)


PRINT_HASH = """
import hashlib
import numpy as np
import fastattn
rng = np.random.default_rng(0)
digest = hashlib.sha256()
for m, n, options in [(1, 700, {}), (300, 300, {}), (257, 500, {"causal": True})]:
    q, k, v = (rng.standard_normal((2, 3, x, 64), np.float32) for x in (m, n, n))
    for x in fastattn.forward(q, k, v, return_lse=True, **options):
        digest.update(x.tobytes())
print(digest.hexdigest())
"""


def test_cpu_results_do_not_depend_on_the_number_of_threads():
    found = set()
    for threads in ("1", "2", "3", "7"):
        environment = os.environ | {"OMP_NUM_THREADS": threads}
        found.add(
            subprocess.run(
                [sys.executable, "-c", PRINT_HASH],
                env=environment,
                check=True,
                capture_output=True,
                text=True,
            ).stdout
        )
    assert len(found) == 1


# ---- which kernel "auto" takes -------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_auto_takes_what_the_rules_say_else_the_last_that_takes_the_call(backend):
    """``kernels()`` is in the order of speed where nothing else was measured."""
    rules, gpu = [], ""
    if backend == "cuda":
        root = Path(__file__).resolve().parent.parent
        rules = _auto.read_rules(_auto.rules_file(root).read_text())
        gpu = _auto.gpu_class(fastattn.show_config("dict")["cuda"]["devices"][0]["name"])
    for framework in helpers.frameworks(backend):
        takers = [r for r in RUNNERS if r.framework.name == framework.name]
        for case in (Case(), Case(len_q=5), Case(head_dim=40, head_dim_v=40), Case(causal=True)):
            able = [r for r in takers if r.takes(case)]
            if not able:
                continue
            arrays = [framework.array(x, case.dtype) for x in helpers.inputs(case)]
            out = fastattn.forward(*arrays, **case.options)
            problem = Problem(**{name: getattr(case, name) for name in _auto.SHAPE})
            names = {runner.kernel.name: runner for runner in able}
            taken = names[_auto.preferred(rules, gpu, problem, list(names))]
            same = taken.run_case(case)[0]
            np.testing.assert_array_equal(testing.to_numpy(out), same)


# ---- the fp32 kernels against torch's own, on the same device ------------------------------------


@contextlib.contextmanager
def without_tf32():
    """TF32 would be a lenient yardstick."""
    import torch

    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
@cases(
    [
        Case(batch=1, heads_q=4, heads_kv=4, len_q=1024, len_kv=1024, data=d)
        for d in ("randn", "shifted")
    ]
)
def test_no_worse_than_twice_torch_naive(case, runner):
    import torch

    values = helpers.inputs(case)
    q, k, v = (torch.from_numpy(x.copy()).to(runner.kernel.backend) for x in values)
    with without_tf32():
        scores = q @ k.mT / math.sqrt(case.head_dim)
        plain, plain_lse = scores.softmax(-1) @ v, scores.logsumexp(-1)
    exact = runner.expected(case)
    out, lse = runner.run_case(case)
    assert testing.error(out, exact.out) <= 2 * testing.error(plain, exact.out)
    assert testing.error(lse, exact.lse) <= 2 * testing.error(plain_lse, exact.lse)


@functools.lru_cache(maxsize=2)
def exact_out(case):
    return testing.reference(*helpers.inputs(case))[0]


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
@cases(
    [
        Case(1, 1, 1, 2048, 2048, head_dim=d, head_dim_v=d, data=data)
        for d in (64, 128)
        for data in ("randn", "shifted", *helpers.stress("float32"))
    ],
    among=[r for r in helpers.PRODUCTION if r.kernel.backend == "cuda"],
)
def test_no_less_accurate_than_torch(case, runner):
    """Than its fused kernel or its three steps, whichever is less accurate, on the same numbers.

    Twice that on hard data, where one score's rounding decides, for kernels that sum a score's
    products one after the other in float32; those of tensor cores are held to torch's own.
    """
    import torch

    values = helpers.inputs(case)
    q, k, v = (torch.from_numpy(x.copy()).to(runner.kernel.backend) for x in values)
    with without_tf32():
        fused = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        plain = (q @ k.mT / math.sqrt(case.head_dim)).softmax(-1) @ v
    exact = exact_out(case)
    allowed = max(testing.error(x, exact) for x in (fused, plain))
    if case.data in helpers.stress("float32") and "tensor cores" not in runner.kernel.arithmetic:
        allowed *= 2
    # All of a row's weight on one key: theirs is exact, and one rounding is as good as that.
    allowed = max(allowed, helpers.UNIT_ROUNDOFF["float32"])
    assert testing.error(runner.run_case(case)[0], exact) <= allowed
