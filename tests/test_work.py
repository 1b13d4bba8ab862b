"""Work that nobody needs is not done: counted, or made deadly, never timed."""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path

import helpers
from fastattn import emulation
from helpers import EMULATED, PRODUCTION, Case, taking

Window = tuple[int, int] | None

ON_THE_HOST = [r for r in PRODUCTION if r.kernel.backend == "cpu"] + EMULATED

# Rows or keys, at most, of a tile: so much may be done in vain on either side of a boundary.
TILE = 128
HEAD_DIM = 8
WIDTH = {"float32": 4, "float16": 2}
COUNTED_DTYPES = ("float32", "float16")  # bfloat16 moves as float16 does
COUNTED = ("global_read_bytes", "exponentials")


@taking(among=ON_THE_HOST)
def test_memory_that_no_row_sees_is_not_touched(dtype, runner):
    """Beside the arrays, and keys before every row's window: ``guard_pages.py``."""
    script = Path(__file__).with_name("guard_pages.py")
    done = subprocess.run(
        [sys.executable, script, runner.kernel.name, dtype], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, "untouched\n"), done.stderr[-2000:]


@functools.lru_cache(maxsize=16)
def counts(
    kernel: str,
    dtype: str,
    m: int,
    n: int,
    causal: bool = False,
    window: Window = None,
    head_dim: int = HEAD_DIM,
) -> dict[str, int]:
    case = Case(1, 1, 1, m, n, head_dim, head_dim, dtype, causal, window)
    arrays = [helpers.NumPy().array(x, dtype) for x in helpers.inputs(case)]
    report = emulation.run(*arrays, kernel=kernel, **case.options)
    assert report.findings == ()
    helpers.expected(case, "cpu").check(report.out, report.lse)
    return {name: getattr(report.counts, name) for name in COUNTED}


@taking(dtypes=COUNTED_DTYPES, among=EMULATED)
def test_tiles_above_the_diagonal_are_not_loaded(dtype, runner):
    of = functools.partial(counts, runner.kernel.name, dtype)
    itself = {
        "global_read_bytes": TILE * HEAD_DIM * WIDTH[dtype],
        "exponentials": 0,
    }  # of a tile of rows
    whole, causal = of(2 * TILE, 2 * TILE), of(2 * TILE, 2 * TILE, causal=True)
    half = of(TILE, 2 * TILE)
    for name in COUNTED:
        # What a tile of rows costs against all keys; what is done once for all tiles cancels.
        tile = whole[name] - half[name] - itself[name]
        assert whole[name] - causal[name] >= tile // 2 > 0, name
    # Rows that see no key cost no more than the reading of themselves.
    seeing, blind = of(TILE, TILE, causal=True), of(2 * TILE, TILE, causal=True)
    assert blind["global_read_bytes"] - seeing["global_read_bytes"] <= itself["global_read_bytes"]
    assert blind["exponentials"] - seeing["exponentials"] <= TILE


@taking(dtypes=COUNTED_DTYPES, among=EMULATED)
def test_the_cost_of_a_window_grows_with_the_window(dtype, runner):
    of = functools.partial(counts, runner.kernel.name, dtype)
    # As many rows as keys: each further tile of rows costs the same, however many came before.
    one, two, three = (of(x * TILE, x * TILE, window=(30, 0)) for x in (1, 2, 3))
    for name in COUNTED:
        assert three[name] - two[name] == two[name] - one[name] > 0, name
    # Few rows: the keys before them cost nothing.
    assert of(40, 2 * TILE, window=(30, 0)) == of(40, 4 * TILE, window=(30, 0))
    wide = of(40, 4 * TILE, window=(30 + TILE, 0))
    for name in COUNTED:
        assert wide[name] > of(40, 4 * TILE, window=(30, 0))[name], name


@taking(dtypes=COUNTED_DTYPES, among=EMULATED)
def test_keys_before_all_windows_cost_nothing_where_rows_are_packed(dtype, runner):
    """Rows of 9 numbers are not aligned to 16 bytes."""
    of = functools.partial(counts, runner.kernel.name, dtype, window=(30, 0), head_dim=9)
    assert of(40, 2 * TILE) == of(40, 4 * TILE)
