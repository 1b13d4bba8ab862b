"""``python -m fastattn``: shows the configuration and proves every kernel that can run here."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

import fastattn
from fastattn import testing
from fastattn._console import Column, Console, Progress, run_command
from fastattn.benchmark._arrays import Arrays, Expected, NumpyArrays, Problem, arrays_for
from fastattn.benchmark._meta import gpus, new_record
from fastattn.benchmark._record import dump_record, prepare_record
from fastattn.benchmark._suite import (
    TOLERANCE,
    Implementation,
    Plan,
    Result,
    cuda_only,
    measure,
)

_COLUMNS = (
    Column("kernel", 8, "<"),
    Column("on", 4, "<"),
    Column("dtype", 8, "<"),
    Column("problem", 40, "<"),
    Column("us", 10),
    Column("TFLOP/s", 8),
    Column("error", 8),
    Column("allowed", 8),
    Column("", 5, "<"),
)

# The ladder's published shape on a GPU; on a CPU one that takes milliseconds.
_FULL = {
    "cuda": Problem("float32", 4, 12, 12, 2048, 2048, 64, 64),
    "cpu": Problem("float32", 1, 8, 8, 1024, 1024, 64, 64),
}
_PLANS = {"cuda": Plan(3, 20, 1.0), "cpu": Plan(2, 20, 0.5)}
# lse is stored in float32 and grows with log N, so its relative error can lie below what storing it
# costs; two roundings are always allowed.
_LSE_FLOOR = 2.0**-23


def problems(kernel: fastattn.KernelInfo, device: str, quick: bool) -> list[Problem]:
    """What a kernel is checked on: for each dtype a full-sized call, causal, and a ragged one."""
    full = _FULL[device]
    if not kernel.head_dim_min <= full.head_dim <= kernel.head_dim_max:
        full = replace(full, head_dim=kernel.head_dim_max, head_dim_v=kernel.head_dim_max)
    # No length is a multiple of a tile.
    ragged = replace(
        full,
        len_q=777 if kernel.lengths_differ else 1000,
        len_kv=1000,
        heads_kv=full.heads_kv // 4 if kernel.grouped_heads else full.heads_kv,
    )
    found = []
    for dtype in kernel.dtypes[:1] if quick else kernel.dtypes:
        found.append(replace(full, dtype=dtype))
        if kernel.causal and not quick:
            found.append(replace(full, dtype=dtype, causal=True))
        found.append(replace(ragged, dtype=dtype))
    return found


@dataclass(frozen=True)
class _Checked:
    result: Result
    lse_error: float
    lse_allowed: float

    @property
    def right(self) -> bool:
        return self.result.right and self.lse_error <= self.lse_allowed

    def row(self) -> dict[str, Any]:
        extra = {
            "lse_error": self.lse_error,
            "allowed": self.result.allowed,
            "right": self.right,
        }
        return self.result.row("check") | extra


def _check(
    arrays: Arrays,
    kernel: fastattn.KernelInfo,
    problem: Problem,
    inputs: Sequence[Any],
    expected: Expected,
) -> _Checked:
    """Runs one kernel on a poisoned output. Raises AssertionError where NaN is left in it."""
    q, k, v = inputs
    out = arrays.poisoned(problem.out_shape, problem.dtype)
    implementation = Implementation(kernel.name, kernel.name, kernel.title, kernel)
    call = implementation.call(arrays, problem, q, k, v, out)
    _, lse = fastattn.forward(
        q, k, v, kernel=kernel.name, causal=problem.causal, out=out, return_lse=True
    )
    lse_error = testing.error(lse, expected.lse)
    error = testing.error(out, expected.out)
    (timing,) = measure(arrays, [call], _PLANS[arrays.device])
    result = Result(implementation, problem, timing, error, expected.plain_error)
    return _Checked(result, lse_error, max(TOLERANCE * expected.plain_lse_error, _LSE_FLOOR))


def _text(problem: Problem) -> str:
    p = problem
    heads = f"H={p.heads_q}" if p.heads_q == p.heads_kv else f"H={p.heads_q}/{p.heads_kv}"
    lengths = f"M=N={p.len_q}" if p.len_q == p.len_kv else f"M={p.len_q} N={p.len_kv}"
    return f"B={p.batch} {heads} {lengths} D={p.head_dim}{' causal' if p.causal else ''}"


class _Check:
    """The self-check of one machine."""

    def __init__(self, console: Console, quick: bool) -> None:
        self.console = console
        self.quick = quick
        self.rows: list[dict[str, Any]] = []
        self.failures = 0
        self._rng = np.random.default_rng()

    def device(self, arrays: Arrays, kernels: Sequence[fastattn.KernelInfo]) -> None:
        """Checks kernels of one device, all on the same inputs for each problem."""
        wanted: dict[Problem, list[fastattn.KernelInfo]] = {}
        for kernel in kernels:
            for problem in problems(kernel, arrays.device, self.quick):
                if arrays.supports(problem.dtype):
                    wanted.setdefault(problem, []).append(kernel)
            for dtype in kernel.dtypes:
                if not arrays.supports(dtype):
                    self.console.line(
                        f"{kernel.name}: {dtype} is not checked, since {arrays.framework} has none "
                        "here (torch, or for NumPy ml_dtypes, would give it)",
                        "dim",
                    )
        self.console.header(_COLUMNS)
        with self.console.progress(sum(map(len, wanted.values()))) as progress:
            for problem, takers in wanted.items():
                self._problem(arrays, problem, takers, progress)
        self.console.line()

    def _problem(
        self,
        arrays: Arrays,
        problem: Problem,
        kernels: Sequence[fastattn.KernelInfo],
        progress: Progress,
    ) -> None:
        progress.step(f"float64 reference of {_text(problem)}")
        host = problem.host_inputs(self._rng)
        expected = arrays.expected(problem, *host)
        inputs = [arrays.put(x, problem.dtype) for x in host]
        for kernel in kernels:
            progress.step(f"{kernel.name}: {_text(problem)}")
            start = [kernel.name, arrays.device, problem.dtype, _text(problem)]
            try:
                checked = _check(arrays, kernel, problem, inputs, expected)
            except (AssertionError, NotImplementedError, RuntimeError) as failure:
                self.failures += 1
                self.console.row(_COLUMNS, [*start, "-", "-", "-", "-", "FAILED"], "bad")
                self.console.line(f"  {type(failure).__name__}: {failure}", "bad")
            else:
                self._report(start, checked)
            progress.advance()

    def _report(self, start: list[str], checked: _Checked) -> None:
        result = checked.result
        cells = [
            *start,
            f"{result.timing.us:.1f}",
            f"{result.tflops:.3f}",
            f"{result.error:.1e}",
            f"{result.allowed:.1e}",
            "ok" if checked.right else "WRONG",
        ]
        self.console.row(_COLUMNS, cells, "good" if checked.right else "bad")
        if checked.lse_error > checked.lse_allowed:
            self.console.line(
                f"  lse: error {checked.lse_error:.1e}, allowed {checked.lse_allowed:.1e}", "bad"
            )
        self.failures += not checked.right
        self.rows.append(checked.row())


def _runnable(console: Console, only: Sequence[str]) -> dict[str, list[fastattn.KernelInfo]]:
    """Kernels by device, and a line for each that can't run on this machine."""
    found: dict[str, list[fastattn.KernelInfo]] = {"cpu": [], "cuda": []}
    found_gpus = gpus()
    capability = int(found_gpus[0]["compute_capability"]) if found_gpus else 0
    for kernel in fastattn.kernels():
        if only and kernel.name not in only:
            continue
        if kernel.backend == "cuda" and not found_gpus:
            console.line(f"{kernel.name}: not run, no GPU is seen", "dim")
        elif kernel.backend == "cuda" and capability < kernel.min_compute_capability:
            need = kernel.min_compute_capability
            console.line(
                f"{kernel.name}: not run, needs compute capability {need / 10:.1f} and this GPU "
                f"has {capability / 10:.1f}",
                "dim",
            )
        else:
            found[kernel.backend].append(kernel)
    return found


def _cpu_arrays(kernels: Sequence[fastattn.KernelInfo]) -> Arrays:
    """NumPy's, which needs no import; torch's where only they hold a dtype that is wanted."""
    numpy = NumpyArrays()
    if all(numpy.supports(dtype) for kernel in kernels for dtype in kernel.dtypes):
        return numpy
    return arrays_for("cpu")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m fastattn",
        description="Shows how fastattn was built and what it sees, then runs every kernel that "
        "this machine can run, on random input of real size, against a float64 reference.",
        epilog=f"A kernel is right when its error ||out - ref|| / ||ref|| is at most {TOLERANCE:g} "
        "times that of a plain evaluation in the same dtype. Exit status: 0; 1 where a kernel "
        "failed or was wrong; 2 for a kernel that this build lacks or a FILE that can't be "
        "written.",
    )
    parser.add_argument("--kernel", action="append", default=[], help="check this one only")
    parser.add_argument("--quick", action="store_true", help="fewer problems for each kernel")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write a record there")
    args = parser.parse_args(argv)

    console = Console()
    known = [kernel.name for kernel in fastattn.kernels()]
    unknown = [name for name in args.kernel if name not in known]
    if unknown:
        refusal = cuda_only(unknown[0])
        if refusal is not None:
            console.line(refusal, "bad")
            return 2
        console.line(f"unknown kernel {unknown[0]!r}; known: {', '.join(known)}", "bad")
        return 2

    if args.json is not None:
        try:
            prepare_record(args.json)
        except OSError as error:
            console.line(f"--json: {error}", "bad")
            return 2

    start = time.perf_counter()
    fastattn.show_config()
    console.line()
    check = _Check(console, args.quick)
    runnable = _runnable(console, args.kernel)
    for device in ("cpu", "cuda"):
        kernels = runnable[device]
        if kernels:
            check.device(_cpu_arrays(kernels) if device == "cpu" else arrays_for(device), kernels)
    if args.json is not None:
        args.json.write_text(dump_record(new_record() | {"rows": check.rows}))

    seconds = time.perf_counter() - start
    done = len(check.rows) + check.failures - sum(not row["right"] for row in check.rows)
    if check.failures:
        console.line(f"{check.failures} of {done} checks FAILED ({seconds:.0f} s)", "bad")
        return 1
    if not done:
        console.line("No kernel can run here.", "bad")
        emulated = {kernel.name for kernel in fastattn.kernels(emulated=True)}
        shown = [name for name in args.kernel if name in emulated]
        if shown:
            console.line(
                f"python -m fastattn.explain {shown[0]} runs {shown[0]} on the CPU, emulated: to "
                "learn from, not for speed."
            )
        return 1
    console.line(f"All {done} checks passed ({seconds:.0f} s).", "good")
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
