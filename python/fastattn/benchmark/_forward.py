"""``--suite forward``: the production kernels over the argument space, beside PyTorch's.

Each case gets fresh inputs on the GPU and a float64 evaluation of some of its heads there; then all
that take it are timed in turn.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

import fastattn
from fastattn._console import Column, Console
from fastattn.benchmark import _cases, _forward_report, _machine, _record, _suite
from fastattn.benchmark._arrays import Call, TorchArrays, torch_for
from fastattn.benchmark._cases import GRAPH_CALLS, Case
from fastattn.benchmark._meta import gpus, new_record
from fastattn.benchmark._suite import Failure, Implementation, Plan, Result, Timing

# (batch, head) pairs of a case that are evaluated in float64: so many, or as many as have so many
# rows. The error of a few rows would be a matter of luck.
_PAIRS = 4
_ROWS = 512
# What is compared takes turns so often, in alternating order: the clock and the temperature of the
# GPU then fall on all alike.
_ROUNDS = 5

PLAN = Plan(warmup=10, repetitions=50, max_seconds=1.0)
QUICK_PLAN = Plan(warmup=2, repetitions=10, max_seconds=0.2)

_COLUMNS = (
    Column("case", 30, "<"),
    Column("kernel", 11, "<"),
    Column("us", 10),
    Column("IQR us", 8),
    Column("n", 3),
    Column("TFLOP/s", 8),
    Column("error", 8),
    Column("worst row", 9),
    Column("x SDPA", 6),
    Column("x FA2", 6),
    Column("x cuDNN", 7),
)
_RATIOS = ("torch_sdpa", "torch_fa2", "torch_cudnn")


class GpuError(RuntimeError):
    """The GPU no longer works for this process: a kernel wrote or read where it may not."""


@dataclass(frozen=True)
class Measured:
    """A row of the suite."""

    case: Case
    result: Result
    worst_row: float  # ||out - ref|| / ||ref|| of the worst row
    pairs: int  # (batch, head) pairs that the errors are over

    @property
    def right(self) -> bool:
        """Whether the error is allowed; nothing is promised for the worst input."""
        return self.result.right or self.case.inputs == _cases.WORST_INPUT

    def row(self) -> dict[str, Any]:
        """The row of a record."""
        case = self.case
        return self.result.row(case.suite) | {
            "case": case.name,
            "inputs": case.inputs,
            "layout": case.layout,
            "scale": case.problem.scale,
            "timing": "graph" if case.graph else "events",
            "worst_row_error": float(f"{self.worst_row:.3g}"),
            "plain_error": float(f"{self.result.plain_error:.3g}"),
            "error_pairs": self.pairs,
        }


def kernels(device: str) -> list[Implementation]:
    """The production kernels, which take every mask, in ladder order; then "auto"."""
    found = [
        Implementation(kernel.name, kernel.name, kernel.title, kernel)
        for kernel in fastattn.kernels()
        if kernel.backend == device and kernel.causal and kernel.window
    ]
    return [*found, _suite.AUTO]


def sample_pairs(case: Case, rng: np.random.Generator) -> list[tuple[int, int]]:
    """The (batch, query head) pairs held against float64: the first, the last, some at random."""
    every = TorchArrays.pairs(case.problem)
    wanted = max(_PAIRS, -(-_ROWS // case.problem.len_q))
    if len(every) <= wanted:
        return every
    inner = 1 + rng.choice(len(every) - 2, wanted - 2, replace=False)
    return [every[i] for i in (0, *sorted(int(i) for i in inner), len(every) - 1)]


def errors(torch: Any, out: Any, expected: Any) -> tuple[float, float]:
    """Normwise error of [pairs, M, Dv] against float64, and that of the worst row.

    Rows whose expected result is zero have no relative error, and don't count as rows.

    Raises
    ------
    AssertionError
        NaN or infinities in ``out``; the suite's inputs give none.
    """
    if not bool(torch.isfinite(out).all()):
        raise AssertionError("NaN or infinities in the output")
    off, size = out.double() - expected, expected.norm(dim=-1)
    rows = off.norm(dim=-1)[size > 0] / size[size > 0]
    worst = float(rows.max()) if rows.numel() else 0.0
    return float(off.norm() / expected.norm()), worst


def time_in_turn(arrays: TorchArrays, calls: Sequence[Call], plan: Plan) -> list[Timing]:
    """Times the calls by ``plan``, in turn: some of each a round, every other round backwards."""
    fits = [plan.fit(_suite.estimate(arrays, call)) for call in calls]
    for call, (warmup, _) in zip(calls, fits, strict=True):
        for _ in range(warmup):
            call()
    times: list[list[float]] = [[] for _ in calls]
    for number in range(_ROUNDS):
        order = range(len(calls)) if number % 2 == 0 else reversed(range(len(calls)))
        for i in order:
            total = fits[i][1]
            share = total * (number + 1) // _ROUNDS - total * number // _ROUNDS
            if share:
                # The first meets an idle GPU, so that its time has the host's in it.
                times[i] += arrays.time_calls(calls[i], share + 1)[1:]
    return [Timing.of(mine) for mine in times]


def run_case(
    arrays: TorchArrays,
    case: Case,
    ours: Sequence[Implementation],
    plan: Plan,
    rng: np.random.Generator,
    on_start: Callable[[str], None] = lambda label: None,
) -> list[Measured | Failure]:
    """Checks and times what takes a case.

    Raises
    ------
    GpuError
        The GPU can't be used any more.
    """
    problem, torch = case.problem, arrays.torch
    q, k, v = _cases.make_inputs(arrays, case, int(rng.integers(2**31)))
    pairs = sample_pairs(case, rng)
    on_start("float64 reference")
    (expected, _), *plain = arrays.evaluations(problem, q, k, v, pairs)
    plain_error = max(errors(torch, out, expected)[0] for out, _ in plain)
    batch, head = (list(index) for index in zip(*pairs, strict=True))

    rows: list[Measured | Failure] = []
    ready: list[tuple[Implementation, Call, tuple[float, float]]] = []
    for item in (*ours, *case.beside):
        on_start(item.selector)
        reason = item.refusal(problem)
        if reason is not None:
            rows.append(Failure(item, problem, reason, refused=True))
            continue
        try:
            call, out = _prepare(arrays, case, item, q, k, v)
            ready.append((item, call, errors(torch, out[batch, head], expected)))
        except NotImplementedError as refusal:
            rows.append(Failure(item, problem, _first_line(refusal), refused=True))
        except (AssertionError, MemoryError, RuntimeError) as failure:
            # A backend of torch that can't do a call says so by a RuntimeError.
            rows.append(Failure(item, problem, _first_line(failure), refused=item.is_torch))
            _still_works(arrays, f"{item.selector}: {_first_line(failure)}")
    on_start("all of them in turn")
    try:
        timings = time_in_turn(arrays, [call for _, call, _ in ready], plan)
    except RuntimeError as failure:
        _still_works(arrays, _first_line(failure))
        raise
    calls = GRAPH_CALLS if case.graph else 1
    measured = [
        Measured(
            case,
            Result(item, problem, _divided(timing, calls), error, plain_error),
            worst,
            len(pairs),
        )
        for (item, _, (error, worst)), timing in zip(ready, timings, strict=True)
    ]
    return [*measured, *rows]


def _prepare(
    arrays: TorchArrays, case: Case, item: Implementation, q: Any, k: Any, v: Any
) -> tuple[Call, Any]:
    """The call to be timed, and what it computed.

    Raises
    ------
    AssertionError
        It left NaN or infinities.
    """
    out = None if item.is_torch else _poisoned(arrays, case)
    call = item.call(arrays, case.problem, q, k, v, out)
    # torch warns of each reason why a backend that is asked for can't be had.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = call()
    if case.graph:
        call = arrays.repeated(call, GRAPH_CALLS)
        if out is not None:  # what the graph writes is looked at
            out.fill_(np.nan)
            call()
    result = result if out is None else out
    if not bool(arrays.torch.isfinite(result).all()):
        raise AssertionError("NaN or infinities in the output")
    return call, result


def _poisoned(arrays: TorchArrays, case: Case) -> Any:
    torch, problem = arrays.torch, case.problem
    nan = torch.full(
        problem.out_shape, np.nan, dtype=getattr(torch, problem.dtype), device=arrays.device
    )
    return _cases.lay_out(torch, nan, case.layout)


def _divided(timing: Timing, calls: int) -> Timing:
    return Timing(
        timing.us / calls, timing.us_iqr / calls, timing.us_best / calls, timing.repetitions
    )


def _still_works(arrays: TorchArrays, failure: str) -> None:
    try:
        arrays.synchronize()
    except RuntimeError as error:
        raise GpuError(failure) from error


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


# --- the command ----------------------------------------------------------------------------------


def choose_cases(args: argparse.Namespace) -> list[Case]:
    """The suite's cases that the command line's options leave."""
    return [
        replace(case, beside=()) if args.no_compare else case
        for case in _cases.cases(args.suite)
        if (args.dtype is None or case.problem.dtype == args.dtype)
        and (args.head_dim is None or case.problem.head_dim == args.head_dim)
        and (args.seq_lens is None or case.problem.len_kv in args.seq_lens)
        and (not args.causal or case.problem.causal)
    ]


class _Printer:
    """Prints cases as they come."""

    def __init__(self, console: Console, named: Sequence[str]) -> None:
        self._console = console
        self._named = named
        self.failed = False

    def case(self, case: Case, rows: Iterable[Measured | Failure]) -> None:
        found = list(rows)
        us = {r.result.implementation.impl: r.result.timing.us for r in _measured(found)}
        for row in found:
            if isinstance(row, Failure):
                self._failure(case, row)
                continue
            result, timing = row.result, row.result.timing
            cells = [
                case.name,
                result.implementation.impl,
                f"{timing.us:.2f}",
                f"{timing.us_iqr:.2f}",
                str(timing.repetitions),
                f"{result.tflops:.2f}",
                f"{result.error:.1e}",
                f"{row.worst_row:.1e}",
                *(f"{us[name] / timing.us:.3f}" if name in us else "-" for name in _RATIOS),
            ]
            self._console.row(_COLUMNS, cells, "plain" if row.right else "bad")
            if not row.right:
                self._console.line(
                    f"  {case.name}, {result.implementation.impl}: WRONG: the error is more than "
                    f"{result.allowed:.1e}; of a plain {case.problem.dtype} evaluation it is "
                    f"{result.plain_error:.1e}",
                    "bad",
                )
                self.failed = True

    def _failure(self, case: Case, failure: Failure) -> None:
        name = failure.implementation.selector
        # That a float32 kernel takes no float16 is no news in every line of a grid.
        if failure.refused and not failure.implementation.is_torch and name not in self._named:
            return
        verb = "left out" if failure.refused else "FAILED"
        text = f"{case.name:<30}  {failure.implementation.impl:<11}  {verb}: {failure.reason}"
        self._console.line(text, "dim" if failure.refused else "bad")
        self.failed |= not failure.refused


def _measured(rows: Iterable[Measured | Failure]) -> list[Measured]:
    return [row for row in rows if isinstance(row, Measured)]


def run(console: Console, args: argparse.Namespace, plan: Plan) -> int:
    """Runs ``--suite forward`` or one of its parts; returns the exit status.

    With ``--from FILE`` it shows that record instead, for which no GPU is needed.
    """
    if args.record is not None:
        return _show_record(console, args.record)
    arrays = torch_for("cuda") if gpus() else None
    if arrays is None:
        missing = "no GPU is seen, or this is a CPU-only build"
        missing = "torch isn't installed, or can't use the GPU" if gpus() else missing
        console.line(
            f"--suite {args.suite} needs a GPU, and torch for the comparison and the float64 "
            f"reference: {missing}",
            "bad",
        )
        return 2
    every = {item.selector: item for item in kernels("cuda")}
    named = [name for name in args.implementation if name != "all"]
    unknown = [name for name in named if name not in every]
    if unknown:
        console.line(
            f"--suite {args.suite}: {unknown[0]!r} is none of {', '.join(every)}: the kernels that "
            "take every mask",
            "bad",
        )
        return 2
    ours = [every[name] for name in named] if named else list(every.values())
    chosen = choose_cases(args)
    if not chosen:
        console.line(f"--suite {args.suite} has no such case", "bad")
        return 2

    seed = int(np.random.SeedSequence().generate_state(1)[0]) if args.seed is None else args.seed
    rng = np.random.default_rng(seed)
    record = new_record(seed)
    console.line(f"fastattn {fastattn.__version__} benchmark, {args.suite}, seed {seed}", "bold")
    complete, printer = _measure(console, args, arrays, chosen, ours, plan, rng, record)
    _forward_report.show(console, record)
    if args.json is not None:
        console.line(f"Record: {args.json}")
    measured = {row["impl"] for row in record["rows"]}
    absent = [item.selector for item in ours if item.selector not in measured and named]
    if absent:
        console.line(f"Nothing was measured of: {', '.join(absent)}", "bad")
    return 1 if printer.failed or absent or not complete or not measured else 0


def _show_record(console: Console, path: Path) -> int:
    def show(record: _record.Record) -> int:
        console.line(_forward_report.caption(record))
        _forward_report.show(console, record)
        return 0

    return _record.with_record(console, path, show)


def _measure(
    console: Console,
    args: argparse.Namespace,
    arrays: TorchArrays,
    chosen: Sequence[Case],
    ours: Sequence[Implementation],
    plan: Plan,
    rng: np.random.Generator,
    record: dict[str, Any],
) -> tuple[bool, _Printer]:
    """Fills the record. Whether the GPU lasted to the end, and what was printed."""
    meta = record["meta"]
    meta["sm_clock_mhz"] = _suite.sm_clock(arrays, rng)
    for dtype in dict.fromkeys(case.problem.dtype for case in chosen):
        ceiling = _suite.measure_ceiling(arrays, dtype)
        if ceiling is not None:
            meta["ceilings"][dtype] = {
                "tflops": round(ceiling.tflops, 3),
                "method": ceiling.method,
            }
    meta["quick"] = bool(args.quick)
    meta["error_pairs"] = (
        f"errors: against float64 on the GPU, all rows of {_PAIRS} (batch, head) pairs of a case, "
        f"the first, the last and others at random; of more pairs where {_PAIRS} have less than "
        f"{_ROWS} rows; of all pairs where there are no more"
    )
    meta["suites"] = {}
    ceilings = ", ".join(f"{name} {c['tflops']:.1f}" for name, c in meta["ceilings"].items())
    console.line(
        f"GPU: {meta['gpu']}, driver {meta['driver']}, SM clock {meta['sm_clock_mhz'] or '?'} MHz "
        f"under load, torch {meta['torch']}; matrix products, TFLOP/s: {ceilings}"
    )
    printer = _Printer(console, args.implementation)
    complete = True
    with _machine.ClockLog() as log, console.progress(len(chosen)) as progress:
        for suite in dict.fromkeys(case.suite for case in chosen):
            start = time.monotonic()
            console.line()
            console.line(suite, "bold")
            console.header(_COLUMNS)
            for case in (case for case in chosen if case.suite == suite):

                def label(text: str, case: Case = case) -> None:
                    progress.step(f"{case.suite}, {case.name}: {text}")

                try:
                    rows = run_case(arrays, case, ours, plan, rng, label)
                except GpuError as error:
                    console.line(f"{case.name}: the GPU is lost to this process: {error}", "bad")
                    complete = False
                    break
                except (MemoryError, RuntimeError) as error:
                    console.line(f"{case.name:<30}  FAILED: {_first_line(error)}", "bad")
                    printer.failed = True
                    continue
                printer.case(case, rows)
                record["rows"] += [row.row() for row in _measured(rows)]
                progress.advance()
            seconds = time.monotonic() - start
            clocks = log.since(start)
            meta["suites"][suite] = {"seconds": round(seconds, 1)} | (clocks or {})
            text = f"{suite}: {seconds:.1f} s"
            if clocks is not None:
                text += (
                    ", SM clock {sm_clock_mhz:.0f} MHz, {sm_clock_mhz_low:.0f} to "
                    "{sm_clock_mhz_high:.0f}, up to {watts_high:.0f} W"
                ).format(**clocks)
            console.line(text, "dim")
            if args.json is not None:  # what is measured stays, whatever becomes of the rest
                args.json.write_text(_record.dump_record(record))
            if not complete:
                break
    return complete, printer
