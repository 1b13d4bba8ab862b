"""The rungs of the ladder on the CPU: right, clean of findings, and counted as the formulas say.

The checked build takes about a microsecond for each access, so the problems are small: lengths on
both sides of each tile, and head dims that leave lanes idle.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fastattn
import helpers
from fastattn import emulation, testing
from fastattn.explain import RUNGS, Shape
from fastattn.explain._formulas import V6_HALF, V6_SPLIT, acting, dtypes
from helpers import Case

pytestmark = pytest.mark.skipif(
    not hasattr(fastattn._core, "emulate"), reason="this build has no emulation of the rungs"
)

SECTORS = {"global_read_sectors", "global_write_sectors"}
OF_OUT = {
    "global_write_requests",
    "shared_read_requests",
    "shared_read_transactions",
    "shared_read_conflicts",
}
ROOT = Path(__file__).parent.parent
KERNELS = ROOT / "src" / "cuda" / "kernels"
NUMPY = helpers.NumPy()


def case(
    m: int,
    n: int,
    d: int = 64,
    *,
    b: int = 1,
    h: int = 1,
    kv: int | None = None,
    dtype: str = "float32",
) -> Case:
    return Case(b, h, h if kv is None else kv, m, n, d, d, dtype)


# The textbook shape of whole tiles first: there every formula holds.
SQUARE = [case(64, 64), case(1, 1, 40), case(17, 17, 24), case(33, 33, 8, h=3), case(65, 65, 24)]
OTHER = [case(17, 63, 24), case(63, 17, 40), case(64, 65, 24), case(65, 64, 24), case(1, 100, 33)]
OTHER += [case(100, 1, 128), case(40, 24, 1), case(24, 40, 32, b=2, h=2), case(9, 9, h=4, kv=2)]
OTHER += [case(17, 33, 7, h=2, kv=1), case(33, 17, 65), case(9, 40, 100)]
# V3 and V4 take a head dim of 64 alone.
WIDE = [case(64, 64), case(1, 1), case(17, 63), case(63, 17), case(64, 65), case(65, 64)]
WIDE += [case(1, 100), case(100, 1), case(9, 9, b=2, h=4, kv=2)]
# V5 has its formulas for head dims to 64 in whole chunks; what else it takes follows further down.
REGISTER_TILES = [*WIDE, case(128, 128), case(1, 1, 40), case(17, 63, 24), case(130, 65, 4, h=2)]
CASES = {"v0": SQUARE, "v1": SQUARE + OTHER, "v2": SQUARE + OTHER, "v3": WIDE, "v4": WIDE}
CASES["v5"] = REGISTER_TILES
# V6 has its formulas for tiles that the end of the keys does not cut through.
CASES["v6"] = [
    case(m, acting("v6", Shape(1, 1, m, 1, d, dtype)).tiles["Bc"] * tiles, d, h=h, dtype=dtype)
    for dtype in dtypes("v6")
    for m, tiles, d, h in (
        *((64, 1, 64, 1), (1, 2, 40, 1), (130, 2, 16, 2), (128, 3, 64, 1), (70, 2, 128, 1)),
        *((129, 1, 72, 1), (64, 2, 256, 1), (9, 1, 200, 2)),
        # Warps whose rows are all there, for each shape of the tiles; columns to spare and none.
        *((32, 2, 24, 2), (96, 1, 72, 1), (96, 1, 128, 1), (16, 2, 136, 1)),
    )
]
if "bfloat16" in NUMPY.dtypes:
    CASES["v6"].append(case(64, 64, dtype="bfloat16"))

PROBLEMS = [
    pytest.param(kernel, problem, id=f"{kernel}-{problem}")
    for kernel, problems in CASES.items()
    for problem in problems
]


def inputs(problem: Case) -> list[Any]:
    """NumPy arrays of the problem's dtype."""
    return [NUMPY.array(x, problem.dtype) for x in helpers.inputs(problem)]


@functools.cache
def checked(kernel: str, problem: Case, seed: int = 0) -> emulation.Report:
    return emulation.run(*inputs(problem), kernel=kernel, seed=seed, **problem.options)


def shape_of(problem: Case) -> Shape:
    p = problem
    return Shape(p.batch, p.heads_q, p.len_q, p.len_kv, p.head_dim, p.dtype)


@pytest.mark.parametrize(("kernel", "problem"), PROBLEMS)
def test_right_and_clean(kernel: str, problem: Case) -> None:
    report = checked(kernel, problem)
    assert report.findings == ()
    helpers.expected(problem, "cpu").check(report.out, report.lse)


@pytest.mark.parametrize(("kernel", "problem"), PROBLEMS)
def test_counts_are_as_the_formulas_say(kernel: str, problem: Case) -> None:
    shape = shape_of(problem)
    rung = acting(kernel, shape)
    found = dataclasses.asdict(checked(kernel, problem).counts)
    predicted = {name: rung.value(name, shape) for name in found}
    held = {name: value for name, value in predicted.items() if value is not None}
    assert {name: found[name] for name in held} == held
    # All but sectors are as predicted at every shape, and these where rows begin at one. Lanes of
    # V6 that have rows or columns beyond the end of 16-bit tensors write in a way of their own.
    free = set(SECTORS)
    if kernel == "v6" and problem.dtype != "float32":
        if problem.len_q % (rung.tiles["Br"] // rung.tiles["W"]) != 0:
            free |= OF_OUT
        elif problem.head_dim < rung.tiles["P"]:
            free |= {"global_write_requests"}
    assert {name for name in found if name not in held} <= free
    if problem.head_dim == 64 and problem.len_q % 32 == problem.len_kv % 32 == 0:
        assert predicted.keys() == held.keys()


@pytest.mark.parametrize("kernel", RUNGS)
def test_every_order_of_the_threads_gives_the_same(kernel: str) -> None:
    problem = case(33, 33, 64 if kernel in ("v3", "v4") else 8)
    first = checked(kernel, problem)
    for seed in (1, 2, 2**64 - 1):
        other = checked(kernel, problem, seed)
        assert other.findings == ()
        np.testing.assert_array_equal(other.out, first.out)
        np.testing.assert_array_equal(other.lse, first.lse)
        assert other.counts == first.counts
        assert other.lines == first.lines


# ---- what the counts teach -----------------------------------------------------------------------


def line_of(kernel_file: str, text: str) -> int:
    lines = (KERNELS / kernel_file).read_text().splitlines()
    (number,) = (i for i, line in enumerate(lines, 1) if text in line)
    return number


def shared_reads(kernel: str, file: str, text: str) -> emulation.LineCounts:
    (found,) = (
        x
        for x in checked(kernel, case(64, 64)).lines
        if Path(x.file).name == file
        and x.line == line_of(file, text)
        and (x.space, x.access) == ("shared", "read")
    )
    return found


def test_padding_removes_the_conflicts_of_a_column_of_k() -> None:
    v3 = shared_reads("v3", "v3_warp_local.cu", "const float k = s.kv[")
    v4 = shared_reads("v4", "v4_vectorized.cu", "const float k = s.kv[")
    assert v3.requests == v4.requests == 2 * 8 * 64  # tiles of keys, warps, head dim
    assert v3.conflicts == 31 * v3.requests
    assert v4.conflicts == 0
    assert v4.transactions == v4.requests
    # And nothing else of V3's reads is in conflict.
    assert checked("v3", case(64, 64)).counts.shared_read_conflicts == v3.conflicts
    assert checked("v4", case(64, 64)).counts.shared_read_conflicts == 0


def test_wide_copies_take_a_quarter_of_the_requests_and_move_as_much() -> None:
    v3, v4 = (checked(kernel, case(64, 64)).counts for kernel in ("v3", "v4"))
    assert v3.global_read_requests == 4 * v4.global_read_requests
    assert v3.global_read_bytes == v4.global_read_bytes
    assert v3.global_read_sectors == v4.global_read_sectors


def test_what_each_rung_moves() -> None:
    moved = {}
    for kernel in RUNGS:
        counts = checked(kernel, case(64, 64)).counts
        moved[kernel] = counts.global_read_bytes + counts.global_write_bytes
    tensor = 64 * 64 * 4
    assert moved["v2"] == moved["v3"] == moved["v4"] == moved["v5"] == 4 * tensor + 4 * 64
    # For each of two key tiles: Q and O in, O out, m and l both ways. Then K and V, the zeros at
    # the start, and m, l and lse at the end.
    vector = 4 * 64
    assert moved["v1"] == 2 * (3 * tensor + 4 * vector) + 2 * tensor + (tensor + 2 * vector) + (
        3 * vector
    )
    assert moved["v0"] > 20 * moved["v1"]


def test_tiles_in_registers_use_a_value_eight_times() -> None:
    """One request of 16 bytes a lane for 16 multiply-adds, and no conflict without padding."""
    v4, v5 = (checked(kernel, case(128, 128)).counts for kernel in ("v4", "v5"))
    multiply_adds = 2 * 128 * 128 * 64 // 32  # of a warp
    assert v5.shared_read_requests == multiply_adds / 16
    assert v5.shared_read_conflicts == v5.shared_write_conflicts == 0
    assert v4.shared_read_requests > 8 * v5.shared_read_requests
    assert v4.global_read_bytes == 128 * 64 * 4 * (1 + 2 * 2)
    assert v5.global_read_bytes == 128 * 64 * 4 * (1 + 2)


@pytest.mark.parametrize("dtype", dtypes("v6"))
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_the_table_of_v6_s_tiles_is_the_source_s(head_dim: int, dtype: str) -> None:
    """What the launches tell; the keys of a tile by barriers, its head dim in the counts above."""
    tiles = acting("v6", Shape(1, 1, 1, 1, head_dim, dtype)).tiles
    if dtype == "float32":
        shared_bytes = V6_SPLIT[head_dim].split_bytes(head_dim)
    else:
        shared_bytes = V6_HALF[head_dim].half_bytes(head_dim)
    for rows, blocks in ((tiles["Br"], 1), (tiles["Br"] + 1, 2)):
        launch = checked("v6", case(rows, 1, head_dim, dtype=dtype)).launches[-1]
        assert (launch.blocks, launch.threads) == (blocks, 32 * tiles["W"])
        assert launch.dynamic_shared_bytes == shared_bytes
    one_tile, two_tiles = (
        checked("v6", case(1, keys, head_dim, dtype=dtype)).counts.barriers
        for keys in (tiles["Bc"], tiles["Bc"] + 1)
    )
    assert one_tile < two_tiles


def test_tensor_cores_take_the_place_of_reads_of_shared_memory() -> None:
    """One ldmatrix brings 16 x 16 numbers, of which each serves 16 or 32 rows of a warp."""
    v5 = checked("v5", case(128, 128)).counts
    half = checked("v6", case(128, 128, dtype="float16")).counts
    split = checked("v6", case(128, 128)).counts
    assert half.shared_read_transactions * 10 < v5.shared_read_transactions
    assert split.shared_read_transactions < v5.shared_read_transactions
    assert split.mmas == 3 * half.mmas
    assert v5.mmas == 0
    assert half.exponentials == split.exponentials < v5.exponentials
    assert 2 * half.global_read_bytes == v5.global_read_bytes


def test_registers_spare_shared_memory() -> None:
    v2, v3 = (checked(kernel, case(64, 64)).counts for kernel in ("v2", "v3"))
    assert v3.shared_read_transactions < v2.shared_read_transactions / 5
    assert v3.shared_write_requests < v2.shared_write_requests / 3


def test_launches_are_those_of_the_gpu() -> None:
    problem = case(65, 64, b=1)
    (launch,) = checked("v3", problem).launches
    assert (launch.blocks, launch.threads, launch.dynamic_shared_bytes) == (2, 256, 32768)
    (launch,) = checked("v4", problem).launches
    assert (launch.blocks, launch.threads, launch.dynamic_shared_bytes) == (2, 256, 32896)
    (launch,) = checked("v5", case(129, 64)).launches
    assert (launch.blocks, launch.threads, launch.dynamic_shared_bytes) == (2, 128, 114688)
    (launch,) = checked("v2", case(64, 64)).launches
    assert (launch.blocks, launch.threads, launch.dynamic_shared_bytes) == (1, 128, 58368)
    (launch,) = checked("v1", case(64, 64)).launches
    assert (launch.blocks, launch.threads, launch.dynamic_shared_bytes) == (1, 128, 37376)
    assert len(checked("v0", case(64, 64)).launches) == 3
    split, attention = checked("v6", case(70, 64, 128)).launches
    assert split.kernel.startswith("split_kernel<")
    assert attention.kernel.startswith("attention_kernel<")
    assert attention.kernel.endswith(">")


def test_lines_add_up_to_the_counts() -> None:
    report = checked("v4", case(64, 64))
    for space in ("global", "shared"):
        for access in ("read", "write"):
            lines = [x for x in report.lines if (x.space, x.access) == (space, access)]
            assert lines, (space, access)
            counts = dataclasses.asdict(report.counts)
            assert sum(x.requests for x in lines) == counts[f"{space}_{access}_requests"]
            moved = "sectors" if space == "global" else "transactions"
            assert sum(x.transactions for x in lines) == counts[f"{space}_{access}_{moved}"]
            if space == "shared":
                assert sum(x.conflicts for x in lines) == counts[f"shared_{access}_conflicts"]
            else:
                assert sum(x.bytes for x in lines) == counts[f"global_{access}_bytes"]


# ---- layouts and arguments -----------------------------------------------------------------------


@pytest.mark.parametrize("layout", helpers.INPUT_LAYOUTS)
def test_layouts_in_the_checked_build(layout: str) -> None:
    """V4, which copies by 16 bytes where it can, and nothing past the last element of a row."""
    problem = case(9, 9)
    q, k, v = (helpers.INPUT_LAYOUTS[layout](NUMPY, x, "float32") for x in helpers.inputs(problem))
    report = emulation.run(q, k, v, kernel="v4")
    assert report.findings == ()
    helpers.expected(problem, "cpu").check(report.out, report.lse)
    moved = report.counts.global_read_requests
    whole = checked("v4", problem).counts.global_read_requests
    odd_rows = [f"row_stride_plus_{n}" for n in (1, 2, 7)]
    if layout in (*odd_rows, "offset_1", "offset_2"):
        assert moved == 2 * 3 * 9  # the fallback: two requests of 4 bytes a lane for each row
    else:
        assert moved == whole == 3 * 5 or layout == "part_of_batch"


def test_sectors_do_not_depend_on_where_numpy_puts_an_array() -> None:
    problem = case(9, 9)
    arrays = helpers.inputs(problem)
    counts = set()
    for shift in (0, 16, 32, 48):
        moved = []
        for x in arrays:
            memory = np.empty(x.nbytes + 128, np.uint8)
            start = (shift - memory.ctypes.data) % 64
            view = memory[start : start + x.nbytes]
            # An array of its own, as far as NumPy knows.
            own = np.frombuffer(memoryview(view), np.float32).reshape(x.shape)
            moved.append(own)
            own_memory = view.view(np.float32).reshape(x.shape)
            own_memory[...] = x
        counts.add(emulation.run(*moved, kernel="v4").counts.global_read_sectors)
    assert counts == {3 * 9 * 8}


def test_the_inputs_are_not_written() -> None:
    q, k, v = helpers.inputs(case(9, 9))  # read-only
    before = [x.copy() for x in (q, k, v)]
    emulation.run(q, k, v, kernel="v3")
    for x, y in zip((q, k, v), before, strict=True):
        np.testing.assert_array_equal(x, y)


def test_scale() -> None:
    q, k, v = helpers.inputs(case(5, 7))
    for scale in (0, 0.5, np.float32(-1)):
        report = emulation.run(q, k, v, kernel="v3", scale=scale)
        helpers.expect(q, k, v, scale=float(scale)).check(report.out, report.lse)


def test_infinite_scores() -> None:
    """A row without weight gives 0 and -inf, also here."""
    q, k, v = (x.copy() for x in helpers.inputs(case(5, 5)))
    q[..., 0] = 1
    k[..., 0] = -np.inf
    report = emulation.run(q, k, v, kernel="v4")
    assert report.findings == ()
    assert not report.out.any()
    assert (report.lse == -np.inf).all()


def test_wrong_arguments() -> None:
    q, k, v = helpers.inputs(case(5, 5))
    run = functools.partial(emulation.run, kernel="v3")
    with pytest.raises(NotImplementedError, match=r"float16.*float32"):
        run(q.astype(np.float16), k.astype(np.float16), v.astype(np.float16))
    with pytest.raises(TypeError, match="float64"):
        run(q, k.astype(np.float64), v)
    with pytest.raises(TypeError, match=r"k: got dtype float16.*that of q, float32"):
        run(q, k.astype(np.float16), v)
    with pytest.raises(ValueError, match="4 dimensions"):
        run(q[0], k[0], v[0])
    with pytest.raises(ValueError, match="does not match"):
        run(q, k, v[:, :, :3])
    with pytest.raises(ValueError, match=r"v9|'v9'"):
        run(q, k, v, kernel="v9")
    with pytest.raises(NotImplementedError, match=r"v0.*M|v0.*length"):
        run(q, k[:, :, :3], v[:, :, :3], kernel="v0")
    with pytest.raises(TypeError, match="scale"):
        run(q, k, v, scale="1")
    with pytest.raises(ValueError, match="scale"):
        run(q, k, v, scale=float("nan"))
    with pytest.raises(TypeError, match="seed"):
        run(q, k, v, seed=1.5)
    with pytest.raises(ValueError, match="seed"):
        run(q, k, v, seed=-1)
    with pytest.raises(TypeError, match="kernel"):
        run(q, k, v, kernel=3)
    assert run(q, k, v).findings == ()  # the next valid call works


# ---- forward -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kernel", "problem"), PROBLEMS)
def test_forward_of_numpy_arrays(kernel: str, problem: Case) -> None:
    """The fast build, and what it must not write beside the output."""
    q, k, v = inputs(problem)
    margin = 64
    size = q[..., 0].size * v.shape[3]
    buffer = np.full(size + 2 * margin, np.nan, q.dtype)
    view = buffer[margin : margin + size].reshape(*q.shape[:3], v.shape[3])
    out, lse = fastattn.forward(q, k, v, kernel=kernel, out=view, return_lse=True)
    assert out is view
    assert np.isnan(buffer[:margin]).all()
    assert np.isnan(buffer[margin + size :]).all()
    helpers.expected(problem, "cpu").check(out, lse)


@pytest.mark.parametrize("kernel", RUNGS)
@pytest.mark.parametrize("layout", helpers.LAYOUTS)
def test_forward_takes_every_layout(kernel: str, layout: str) -> None:
    problem = case(33, 33, h=2)
    q, k, v, out = (
        helpers.LAYOUTS[layout](NUMPY, x, "float32")
        for x in (*helpers.inputs(problem), np.full((1, 2, 33, 64), np.nan, np.float32))
    )
    fastattn.forward(q, k, v, kernel=kernel, out=out)
    helpers.expected(problem, "cpu").check(out)


def test_forward_of_torch_tensors() -> None:
    torch = pytest.importorskip("torch")
    problem = case(17, 63, h=2)
    q, k, v = (torch.from_numpy(x.copy()) for x in helpers.inputs(problem))
    out, lse = fastattn.forward(q, k, v, kernel="v3", return_lse=True)
    assert isinstance(out, torch.Tensor)
    helpers.expected(problem, "cpu").check(out, lse)
    report = emulation.run(q, k, v, kernel="v3")
    helpers.expected(problem, "cpu").check(report.out, report.lse)


def test_auto_never_takes_a_rung_for_host_arrays() -> None:
    q, k, v = helpers.inputs(case(65, 65))
    auto, cpu = (fastattn.forward(q, k, v, kernel=name) for name in ("auto", "cpu"))
    np.testing.assert_array_equal(auto, cpu)
    # Large enough that the emulation would take minutes.
    large = np.zeros((1, 8, 2048, 64), np.float32)
    assert fastattn.forward(large, large, large).shape == large.shape


def test_emulated_kernels_are_those_of_the_registry() -> None:
    registry = re.findall(
        r"^FASTATTN_CUDA_KERNEL\((\w+), \w+\)$",
        (KERNELS.parent / "kernels.def").read_text(),
        re.MULTILINE,
    )
    emulated = fastattn.kernels(emulated=True)
    assert [kernel.name for kernel in emulated] == registry
    assert {kernel.backend for kernel in emulated} == {"cpu"}
    assert {kernel.min_compute_capability for kernel in emulated} == {0}
    # On a GPU they take the same, and no other.
    on_gpu = {kernel.name: kernel for kernel in fastattn.kernels() if kernel.backend == "cuda"}
    for kernel in emulated if on_gpu else ():
        as_on_host = dataclasses.replace(
            on_gpu[kernel.name], backend="cpu", min_compute_capability=0
        )
        assert as_on_host == kernel


@pytest.mark.parametrize("kernel", ["v3", "v4"])
def test_other_head_dims_are_handed_on(kernel: str) -> None:
    problem = case(17, 33, 80, h=2, kv=1)
    q, k, v = helpers.inputs(problem)
    out, by_v2 = (fastattn.forward(q, k, v, kernel=name) for name in (kernel, "v2"))
    np.testing.assert_array_equal(out, by_v2)
    helpers.expected(problem, "cpu").check(out)
    (launch,) = checked(kernel, problem).launches
    assert launch == checked("v2", problem).launches[0]


@pytest.mark.parametrize("kernel", RUNGS)
def test_forward_says_what_a_rung_takes(kernel: str) -> None:
    q, k, v = helpers.inputs(case(5, 5))
    (takes,) = (each for each in fastattn.kernels(emulated=True) if each.name == kernel)
    half: list[Any] = [x.astype(np.float16) for x in (q, k, v)]
    if "float16" in takes.dtypes:
        as_drawn = [x.astype(np.float32) for x in half]
        helpers.expect(*as_drawn, dtype="float16").check(fastattn.forward(*half, kernel=kernel))
    else:
        with pytest.raises(NotImplementedError, match=f"'{kernel}' does not take dtype=?.*float16"):
            fastattn.forward(*half, kernel=kernel)
    for name, value, taken in (("causal", True, takes.causal), ("window", (1, 1), takes.window)):
        mask: dict[str, Any] = {name: value}
        if taken:
            helpers.expect(q, k, v, **mask).check(fastattn.forward(q, k, v, kernel=kernel, **mask))
            continue
        for call in (fastattn.forward, emulation.run):
            with pytest.raises(NotImplementedError, match=f"'{kernel}' does not take {name}"):
                call(q, k, v, kernel=kernel, **mask)
    with pytest.raises(ValueError, match="stream"):
        fastattn.forward(q, k, v, kernel=kernel, stream=0)


def test_empty() -> None:
    """No keys, no queries, no batch: nothing to launch, and still an answer."""
    for kernel in ("v3", "cpu"):
        q, k = np.ones((1, 2, 3, 64), np.float32), np.ones((1, 2, 0, 64), np.float32)
        out, lse = fastattn.forward(q, k, k, kernel=kernel, return_lse=True)
        assert not out.any()
        assert (lse == -np.inf).all()
        assert fastattn.forward(k, q, q, kernel=kernel).shape == k.shape


def test_results_hold_against_the_oracle_of_testing() -> None:
    """The error that the command prints."""
    q, k, v = helpers.inputs(case(64, 64))
    report = checked("v3", case(64, 64))
    assert testing.error(report.out, testing.reference(q, k, v)[0]) < 1e-6


# ---- V5 and V6: masks, any head dims -------------------------------------------------------------


def masked(m: int, n: int, d: int = 64, dv: int | None = None, **options: Any) -> Case:
    heads: dict[str, int] = {"batch": 1, "heads_q": 1, "heads_kv": 1}
    heads |= {name: options.pop(name) for name in heads if name in options}
    return Case(
        **heads, len_q=m, len_kv=n, head_dim=d, head_dim_v=d if dv is None else dv, **options
    )


ANY_CALL = [
    # Skipped, masked and full tiles, of either end.
    masked(150, 150, causal=True),
    masked(70, 200, causal=True, heads_q=2),
    masked(200, 70, causal=True),  # the first rows see nothing
    masked(140, 210, 40, window=(70, 3)),
    masked(9, 200, window=(3, -1)),
    masked(200, 9, window=(-1, 0)),
    masked(9, 140, causal=True, window=(0, 5)),
    masked(3, 300, window=(0, 0)),
    # Every shape of the tiles, D other than Dv, and head dims that are no whole chunks.
    masked(9, 9, 1),
    masked(65, 70, 33, 7, causal=True),
    masked(65, 70, 7, 33),
    masked(20, 65, 64, 40, window=(9, 9)),
    masked(33, 70, 256, 64, causal=True),
    masked(133, 133, 96, causal=True),
    masked(17, 129, 128, window=(30, 10)),
    masked(33, 130, 192, 128, causal=True),
    masked(33, 70, 72, 128),
    masked(33, 70, 129, causal=True),
    masked(33, 280, 256, causal=True, window=(200, -1)),
    masked(33, 65, 3, 256),
    # Grouped heads, batches, scales.
    masked(9, 70, 24, causal=True, batch=2, heads_q=4, heads_kv=2),
    masked(17, 70, scale=0.0),
    masked(17, 70, scale=-0.5, causal=True),
    masked(70, 130, data="large_logits", causal=True),
    masked(33, 65, 40, data="shifted"),
]


@pytest.mark.parametrize("problem", ANY_CALL, ids=str)
def test_v5_takes_any_call(problem: Case) -> None:
    """Right in both builds, and clean in the checked one in either order of the threads."""
    first = checked("v5", problem)
    helpers.expected(problem, "cpu").check(first.out, first.lse)
    assert first.findings == ()
    other = checked("v5", problem, seed=1)
    assert other.findings == ()
    np.testing.assert_array_equal(other.out, first.out)
    assert other.counts == first.counts
    out, lse = fastattn.forward(
        *helpers.inputs(problem), kernel="v5", return_lse=True, **problem.options
    )
    helpers.expected(problem, "cpu").check(out, lse)


ANY_DTYPE = [dataclasses.replace(x, dtype=dtype) for x in ANY_CALL for dtype in dtypes("v6")]


@pytest.mark.parametrize("problem", ANY_DTYPE, ids=str)
def test_v6_takes_any_call(problem: Case) -> None:
    """Right in both builds, and clean in the checked one."""
    report = checked("v6", problem)
    helpers.expected(problem, "cpu").check(report.out, report.lse)
    assert report.findings == ()
    out, lse = fastattn.forward(*inputs(problem), kernel="v6", return_lse=True, **problem.options)
    np.testing.assert_array_equal(out, report.out)
    np.testing.assert_array_equal(lse, report.lse)


@pytest.mark.parametrize("dtype", dtypes("v6"))
@pytest.mark.parametrize("head_dim", [24, 72, 136])
def test_v6_is_clean_where_steps_are_careful(head_dim: int, dtype: str) -> None:
    """Numbers that need care, in tiles that the mask cuts through and in others."""
    problem = case(20, 100, head_dim, dtype=dtype)
    q, k, v = (x.copy() for x in inputs(problem))
    q[..., 3, :] = np.inf
    k[..., 5, :] = -np.inf
    k[..., 95, :] = 6e4
    v[..., 20, 1] = np.nan
    v[..., 99, :] = np.inf
    masks: list[dict[str, Any]] = [{}, {"causal": True}, {"window": (60, 3)}]
    # Rows one by one cost the emulation seconds.
    for mask in masks if head_dim == 24 else masks[1:2]:
        report = emulation.run(q, k, v, kernel="v6", seed=1, **mask)
        assert report.findings == ()
        # The other build, in another order of the threads.
        np.testing.assert_array_equal(fastattn.forward(q, k, v, kernel="v6", **mask), report.out)
        wanted = testing.reference(q, k, v, **mask)[0]
        np.testing.assert_array_equal(np.isnan(report.out), np.isnan(wanted))


@pytest.mark.parametrize("dtype", dtypes("v6"))
def test_v6_is_clean_where_one_row_of_a_warp_falls_behind(dtype: str) -> None:
    """Rows of a warp then differ in what they do: one after the first tile, another moves on."""
    problem = case(32, 160, 64, dtype=dtype)
    q, k, v = (x.copy() for x in inputs(problem))
    q[..., [0, 9], :] = 0
    q[..., 0, 0], q[..., 9, 0] = 20, -20
    k[..., :64, 0], k[..., 64:, 0] = 4, -4
    for seed in (0, 1):
        report = emulation.run(q, k, v, kernel="v6", seed=seed)
        assert report.findings == ()
        np.testing.assert_array_equal(fastattn.forward(q, k, v, kernel="v6"), report.out)
        wanted = testing.reference(q, k, v)[0]
        assert testing.error(report.out, wanted) < (1e-6 if dtype == "float32" else 1e-2)


@pytest.mark.parametrize("dtype", dtypes("v6"))
@pytest.mark.parametrize("layout", [*helpers.INPUT_LAYOUTS, "row_stride_plus_3"])
def test_v6_takes_every_layout(layout: str, dtype: str) -> None:
    """Rows that are not aligned to 16 bytes are packed first; nothing past them is touched."""
    problem = masked(9, 70, 40, 33, causal=True, heads_q=2, heads_kv=2, dtype=dtype)
    place = (helpers.INPUT_LAYOUTS | {"row_stride_plus_3": helpers._padded(3)})[layout]
    q, k, v = (place(NUMPY, x, dtype) for x in helpers.inputs(problem))
    report = emulation.run(q, k, v, kernel="v6", causal=True)
    assert report.findings == ()
    helpers.expected(problem, "cpu").check(report.out, report.lse)
    packed = [launch for launch in report.launches if launch.kernel == "pack_kernel"]
    assert bool(packed) == (dtype == "float16")  # v has 33 columns
    np.testing.assert_array_equal(report.out, checked("v6", problem).out)


@pytest.mark.parametrize("head_dim", [72, 128, 136, 256])
def test_v5_s_formulas_of_large_head_dims(head_dim: int) -> None:
    """Those that are not of one shape alone hold with the tiles of each."""
    problem = case(65, 130, head_dim)
    rung = acting("v5", shape_of(problem))
    found = dataclasses.asdict(checked("v5", problem).counts)
    held = {name: rung.value(name, shape_of(problem)) for name in found}
    held = {name: value for name, value in held.items() if value is not None}
    assert {"global_read_bytes", "global_read_sectors", "warp_barriers"} <= held.keys()
    assert {name: found[name] for name in held} == held


@pytest.mark.parametrize("layout", [*helpers.INPUT_LAYOUTS, "row_stride_plus_3"])
@pytest.mark.parametrize("dims", [(40, 40), (33, 129)], ids=str)
def test_v5_takes_every_layout(layout: str, dims: tuple[int, int]) -> None:
    """Nothing past the last element of a row is touched, not by a copy of 16 bytes either."""
    problem = masked(9, 70, *dims, causal=True, heads_q=2, heads_kv=2)
    place = (helpers.INPUT_LAYOUTS | {"row_stride_plus_3": helpers._padded(3)})[layout]
    q, k, v = (place(NUMPY, x, "float32") for x in helpers.inputs(problem))
    report = emulation.run(q, k, v, kernel="v5", causal=True)
    assert report.findings == ()
    helpers.expected(problem, "cpu").check(report.out, report.lse)
    as_models_keep_it = np.full((1, 9, 2, dims[1]), np.nan, np.float32).swapaxes(1, 2)
    fastattn.forward(q, k, v, kernel="v5", causal=True, out=as_models_keep_it)
    helpers.expected(problem, "cpu").check(as_models_keep_it)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    ("mask", "hidden"),
    [
        ({"causal": True}, slice(100, None)),
        ({"window": (10, 10)}, slice(0, 40)),
        ({"window": (-1, 3)}, slice(90, 140)),
    ],
    ids=str,
)
def test_v5_hides_keys_and_values(mask: dict[str, Any], hidden: slice, bad: float) -> None:
    """Not a bit of a row changes by what it does not see; a row that sees it shows it."""
    problem = masked(140, 140, 24, **mask)
    q, k, v = helpers.inputs(problem)
    seen = helpers.visible(140, 140, **mask)[:, hidden].any(axis=1)
    assert seen.any()
    assert not seen.all()
    clean = fastattn.forward(q, k, v, kernel="v5", return_lse=True, **mask)
    for spoilt in ("k", "v", "kv"):
        dirty_k, dirty_v = k.copy(), v.copy()
        if "k" in spoilt:
            dirty_k[:, :, hidden] = bad
        if "v" in spoilt:
            dirty_v[:, :, hidden] = bad
        report = emulation.run(q, dirty_k, dirty_v, kernel="v5", **mask)
        assert report.findings == ()
        for found in (
            (report.out, report.lse),
            fastattn.forward(q, dirty_k, dirty_v, kernel="v5", return_lse=True, **mask),
        ):
            for x, y in zip(found, clean, strict=True):
                np.testing.assert_allclose(x[:, :, ~seen], y[:, :, ~seen], rtol=1e-5, atol=1e-6)
            wanted = testing.reference(q, dirty_k, dirty_v, **mask)
            # The places of NaN and inf are the oracle's, or the error is not finite.
            assert testing.error(found[0], wanted[0]) < 1e-5


@pytest.mark.parametrize("scale", [1e5, -1e5])
def test_v5_with_logits_of_a_hundred_thousand(scale: float) -> None:
    q, k, v = helpers.inputs(masked(40, 100, 32))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    scores = scale * (q @ k.swapaxes(2, 3))
    assert abs(scores).max() > 5e4
    for causal in (False, True):
        out, lse = fastattn.forward(
            q, k, v, kernel="v5", scale=scale, causal=causal, return_lse=True
        )
        helpers.expect(q, k, v, scale=scale, causal=causal).check(out, lse)


def test_v5_without_keys() -> None:
    q, k = np.ones((2, 2, 3, 40), np.float32), np.ones((2, 2, 0, 40), np.float32)
    for mask in ({}, {"causal": True}, {"window": (0, 0)}):
        report = emulation.run(q, k, k, kernel="v5", **mask)
        assert report.findings == ()
        assert not report.out.any()
        assert (report.lse == -np.inf).all()


@given(data=st.data())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_v5_over_its_argument_space(data: st.DataObject) -> None:
    whole = st.integers(1, 200)
    heads_kv, group = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 2))
    side = st.integers(-1, 150)
    problem = masked(
        data.draw(whole),
        data.draw(whole),
        data.draw(st.integers(1, 256)),
        data.draw(st.integers(1, 256)),
        heads_q=heads_kv * group,
        heads_kv=heads_kv,
        causal=data.draw(st.booleans()),
        window=data.draw(st.none() | st.tuples(side, side)),
    )
    out, lse = fastattn.forward(
        *helpers.inputs(problem), kernel="v5", return_lse=True, **problem.options
    )
    helpers.expected(problem, "cpu").check(out, lse)


# ---- the page ------------------------------------------------------------------------------------

PAGE = (ROOT / "docs" / "emulation.md").read_text()


def test_the_page_lists_every_fault_with_what_is_said_of_it() -> None:
    """What the checker says is held against these texts by the C++ tests."""
    source = (ROOT / "cpp_tests" / "emulation" / "broken.cu").read_text()
    entry = r'(?:BROKEN\(|\{")(\w+)"?,\s*"([\w ]+)",\s*"([^"]+)"'
    broken = {name: (kind, says) for name, kind, says in re.findall(entry, source)}
    assert set(broken) == set(re.findall(r"^__global__ void (\w+)", source, re.MULTILINE))
    rows = re.findall(r"^\| .* \(`(\w+)`\) \| ([\w ]+) \| (.+) \|$", PAGE, re.MULTILINE)
    assert sorted(name for name, *_ in rows) == sorted(broken)
    for name, kind, message in rows:
        assert kind == broken[name][0]
        assert broken[name][1] in message


def test_the_page_s_debugger_shows_the_source_as_it_is() -> None:
    source = (KERNELS / "v3_warp_local.cu").read_text().splitlines()
    shown = re.findall(r"^(\d+)\t(.+)$", PAGE, re.MULTILINE)
    assert shown
    for number, text in shown:
        assert source[int(number) - 1] == text
    waits = {int(n) for n in re.findall(r"v3_warp_local\.cu:(\d+) (?:waits|goes)", PAGE)}
    assert len(waits) == 3
    for number in waits:
        assert re.search(r"warp_max\(|warp_sum\(|__syncthreads\(", source[number - 1])
