"""The command line: ``python -m fastattn.benchmark all``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import fastattn
from fastattn._console import Column, Console, Progress, integer_from, run_command
from fastattn.benchmark import _auto, _cases, _forward, _machine, _record, _suite
from fastattn.benchmark._arrays import Arrays, Problem, TorchArrays, arrays_for, torch_for
from fastattn.benchmark._meta import gpus, new_record
from fastattn.benchmark._suite import BASELINE, SDPA, Ceiling, Failure, Implementation, Plan, Result

_COLUMNS = (
    Column("kernel", 12, "<"),
    Column("N", 6),
    Column("us", 11),
    Column("IQR us", 9),
    Column("best us", 11),
    Column("n", 4),
    Column("TFLOP/s", 8),
    Column("ceiling", 7),
    Column("error", 8),
    Column("x naive", 8),
    Column("x SDPA", 8),
)

# The fixed suites: the ladder's published shape, and one that a CPU finishes.
_DEFAULTS = {
    "cuda": {"batch_size": 4, "num_heads": 12, "head_dim": 64, "seq_lens": [512, 1024, 2048]},
    "cpu": {"batch_size": 1, "num_heads": 8, "head_dim": 64, "seq_lens": [512, 1024, 2048]},
}
_SUITES = {"cuda": "ladder", "cpu": "cpu"}


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"a number above 0, not {text!r}")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m fastattn.benchmark",
        description="Times the attention kernels beside PyTorch: median of single calls, TFLOP/s, "
        "share of the machine's measured matrix-product rate, error against float64, and how many "
        "times as fast as PyTorch in the same run.",
        epilog="A row takes at most --max-seconds: a slow kernel is called fewer times, and the "
        "column n says how often. Exit status: 0; 1 where a kernel failed, was wrong or, "
        "asked for by name, has no row; 2 for a call that makes no sense.",
    )
    parser.add_argument(
        "implementation",
        nargs="*",
        help="all, baseline (PyTorch: matmul, softmax, matmul), sdpa (PyTorch: "
        "scaled_dot_product_attention), or kernels by name (--list)",
    )
    shape = parser.add_argument_group("shape")
    shape.add_argument("--batch-size", type=integer_from(1), metavar="B")
    shape.add_argument("--num-heads", type=integer_from(1), metavar="H")
    shape.add_argument("--head-dim", type=integer_from(1), metavar="D")
    shape.add_argument(
        "--seq-lens", type=integer_from(1), nargs="+", metavar="N", help="M = N = each"
    )
    shape.add_argument(
        "--dtype", choices=("float32", "float16", "bfloat16"), help="float32; a suite: all of its"
    )
    shape.add_argument("--causal", action="store_true")
    timing = parser.add_argument_group("timing")
    suites = parser.add_argument_group(
        "suites, on a GPU with torch",
        "The production kernels over the argument space, beside PyTorch's. Kernels may be named; "
        "--dtype, --head-dim, --seq-lens and --causal choose among the suite's cases. With --from "
        "FILE a record is shown, for which no GPU is needed.",
    )
    suites.add_argument(
        "--suite",
        choices=("forward", *_cases.SUITES, _auto.SUITE),
        metavar="NAME",
        help=f"forward, or a part of it: {', '.join(_cases.SUITES)}; auto: the production kernels "
        "beside each other, from which src/core/auto_rules.def is written (with --from: from FILE)",
    )
    suites.add_argument("--quick", action="store_true", help="a suite with fewer calls")
    timing.add_argument("--warmup", type=integer_from(0), help="untimed calls (25; a suite: 10)")
    timing.add_argument(
        "--repetitions", type=integer_from(1), help="timed calls (100; a suite: 50)"
    )
    timing.add_argument(
        "--max-seconds", type=_seconds, metavar="S", help="time of one row (10; a suite: 1)"
    )
    timing.add_argument("--device", choices=("cuda", "cpu"), help="default: what the kernel needs")
    timing.add_argument(
        "--no-compare", action="store_true", help="leave out PyTorch's rows unless they are named"
    )
    timing.add_argument(
        "--seed", type=integer_from(0), help="of the random inputs; default: a fresh one"
    )
    other = parser.add_argument_group("output and other jobs")
    other.add_argument("--json", type=Path, metavar="FILE", help="write the record there")
    other.add_argument("--list", action="store_true", help="list what can be timed")
    other.add_argument(
        "--source-hash", action="store_true", help="print the hash of include/ and src/"
    )
    other.add_argument(
        "--write-readme", type=Path, metavar="README", help="put a record's table into a README"
    )
    other.add_argument("--from", dest="record", type=Path, metavar="FILE", help="that record")
    return parser


def _devices(console: Console, args: argparse.Namespace) -> list[str]:
    """The devices whose suites run; empty after a message where that makes no sense."""
    present = ["cuda", "cpu"] if gpus() else ["cpu"]
    if args.device == "cuda" and "cuda" not in present:
        console.line("--device cuda: no GPU is seen, or this is a CPU-only build", "bad")
        return []
    names = {kernel.name: kernel.backend for kernel in fastattn.kernels()}
    known = ["all", BASELINE.selector, SDPA.selector, *names]
    for name in args.implementation:
        if name not in known:
            refusal = _suite.cuda_only(name)
            if refusal is not None:
                console.line(refusal, "bad")
                return []
            console.line(f"unknown implementation {name!r}; known: {', '.join(known)}", "bad")
            return []
        if args.device and names.get(name, args.device) != args.device:
            console.line(f"{name} runs on {names[name]}, not on {args.device}", "bad")
            return []
        if names.get(name) == "cuda" and "cuda" not in present:
            console.line(f"{name} needs a GPU, and none is seen", "bad")
            return []
    if args.device:
        return [args.device]
    if "all" in args.implementation:
        return present
    asked = {names[name] for name in args.implementation if name in names}
    return [d for d in ("cuda", "cpu") if d in asked] or present[:1]


def _choose(
    console: Console, args: argparse.Namespace, device: str, has_torch: bool
) -> list[Implementation]:
    every = _suite.implementations(device)
    chosen = [
        i
        for i in every
        if "all" in args.implementation
        or i.selector in args.implementation
        or (i.kernel is None and not args.no_compare)
    ]
    if not has_torch and any(i.kernel is None for i in chosen):
        console.line(
            f"torch isn't installed, or can't use this {device} device: the rows "
            f"{BASELINE.selector} and {SDPA.selector} are left out, and so are the ratios to them."
        )
        chosen = [i for i in chosen if i.kernel is not None]
    return chosen


class _Table:
    """Prints results as they come, with the ratios to torch's rows of the same problem."""

    def __init__(self, console: Console, ceiling: Ceiling | None) -> None:
        self._console = console
        self._ceiling = ceiling
        self._torch_us: dict[tuple[str, Problem], float] = {}
        self.failed = False

    def add(self, result: Result | Failure) -> None:
        name, problem = result.implementation.selector, result.problem
        if isinstance(result, Failure):
            verb, style = ("left out", "dim") if result.refused else ("FAILED", "bad")
            text = f"{name:<12}  {problem.len_q:>6}  {verb}: {result.reason}"
            self._console.line(text, "dim" if style == "dim" else "bad")
            self.failed |= not result.refused
            return
        timing = result.timing
        if result.implementation.kernel is None:
            self._torch_us[result.implementation.impl, problem] = timing.us
        ceiling = self._ceiling
        cells = [
            name,
            str(problem.len_q),
            f"{timing.us:.2f}",
            f"{timing.us_iqr:.2f}",
            f"{timing.us_best:.2f}",
            str(timing.repetitions),
            f"{result.tflops:.3f}",
            f"{100 * result.tflops / ceiling.tflops:.1f}%" if ceiling else "-",
            f"{result.error:.1e}",
            *(self._ratio(other, result) for other in (BASELINE, SDPA)),
        ]
        self._console.row(_COLUMNS, cells, "plain" if result.right else "bad")
        if not result.right:
            self._console.line(
                f"  {name}: WRONG: the error is more than {result.allowed:.1e}; of a plain "
                f"{problem.dtype} evaluation it is {result.plain_error:.1e}",
                "bad",
            )
            self.failed = True

    def problem_failed(self, length: int, error: Exception) -> None:
        """A length whose inputs or reference could not be made."""
        reason = (str(error) or type(error).__name__).splitlines()[0]
        self._console.line(f"{'':<12}  {length:>6}  FAILED: {reason}", "bad")
        self.failed = True

    def _ratio(self, other: Implementation, result: Result) -> str:
        us = self._torch_us.get((other.impl, result.problem))
        return f"{us / result.timing.us:.3f}" if us else "-"


def _run_suite(
    console: Console,
    args: argparse.Namespace,
    device: str,
    plan: Plan,
    rng: np.random.Generator,
    meta: dict[str, Any],
    rows: list[dict[str, Any]],
) -> bool | None:
    """Runs one device's suite. Whether all was right; None where nothing was chosen."""
    # torch's arrays where torch is there, so that its rows and the kernels share their inputs.
    torch: TorchArrays | None = torch_for(device)
    arrays: Arrays = torch if torch is not None else arrays_for(device)
    chosen = _choose(console, args, device, torch is not None)
    if not chosen:
        return None
    if not arrays.supports(args.dtype):
        console.line(f"{arrays.framework} has no {args.dtype} on this machine", "bad")
        return None

    given = {key: getattr(args, key) for key in _DEFAULTS[device]}
    shape = {key: given[key] or default for key, default in _DEFAULTS[device].items()}
    fixed = shape == _DEFAULTS[device] and args.dtype == "float32" and not args.causal
    suite = _SUITES[device] if fixed else f"{_SUITES[device]}_custom"
    seq_lens: list[int] = shape.pop("seq_lens")  # type: ignore[assignment]
    batch, heads, dim = (int(str(shape[key])) for key in ("batch_size", "num_heads", "head_dim"))

    if device == "cuda":
        meta["sm_clock_mhz"] = _suite.sm_clock(arrays, rng)
        console.line(
            f"GPU: {meta['gpu']}, driver {meta['driver']}, SM clock "
            f"{meta['sm_clock_mhz'] or '?'} MHz under load; arrays: {arrays.framework}"
        )
    else:
        console.line(
            f"CPU: {meta['cpu']}, {meta['cpu_threads']} threads; arrays: {arrays.framework}"
        )
    ceiling = None
    # A CPU computes in float32 whatever the dtype, and float32's products are its ceiling.
    for dtype in dict.fromkeys(("float32", args.dtype if device == "cuda" else "float32")):
        ceiling = _suite.measure_ceiling(arrays, dtype)
        key = dtype if device == "cuda" else f"cpu_{dtype}"
        if ceiling is None:
            console.line(f"{dtype} ceiling: nothing here can measure it")
            continue
        meta["ceilings"][key] = {"tflops": round(ceiling.tflops, 3), "method": ceiling.method}
        console.line(f"{dtype} ceiling: {ceiling.tflops:.3f} TFLOP/s ({ceiling.method})")
    console.line(
        f"B={batch} H={heads} D={dim} {args.dtype} {'causal' if args.causal else 'not causal'}; "
        f"{plan.warmup} warm-ups and {plan.repetitions} timed calls, fewer where they would take "
        f"more than {plan.max_seconds:g} s"
    )
    console.line()
    console.header(_COLUMNS)
    table = _Table(console, ceiling)
    with console.progress(len(seq_lens) * len(chosen)) as progress:
        for length in seq_lens:
            problem = Problem(
                args.dtype, batch, heads, heads, length, length, dim, dim, args.causal
            )
            label = _label(progress, length)
            try:
                for result in _suite.run(arrays, chosen, problem, plan, rng, label):
                    table.add(result)
                    progress.advance()
                    if isinstance(result, Result):
                        rows.append(result.row(suite))
            # Too large: NumPy raises the first or, past what it can count, the second; torch the
            # third.
            except (MemoryError, ValueError, RuntimeError) as error:
                table.problem_failed(length, error)
    console.line()
    if device == "cuda" and torch is not None:
        meta["host_us"] = _suite.host_cost(torch)
        cost = ", ".join(f"{name} {us:.2f}" for name, us in meta["host_us"].items())
        console.line(f"Host cost of a call on small CUDA tensors, us: {cost}")
        console.line()
    return not table.failed


def _label(progress: Progress, length: int) -> Any:
    return lambda text: progress.step(f"N={length}: {text}")


def _missing(args: argparse.Namespace, rows: Sequence[dict[str, Any]]) -> list[str]:
    """What was asked for by name and has no row; "all" wants one kernel at least."""
    torch_rows = {i.impl: i.selector for i in (BASELINE, SDPA)}
    measured = {torch_rows.get(row["impl"], row["impl"]) for row in rows}
    missing = [n for n in args.implementation if n != "all" and n not in measured]
    if "all" in args.implementation and not measured - set(torch_rows.values()):
        missing.append("any kernel")
    return missing


def _list(console: Console) -> None:
    columns = (Column("name", 10, "<"), Column("device", 6, "<"), Column("what it is", 60, "<"))
    console.header(columns)
    console.row(columns, ["all", "", "everything below that this machine can run"])
    for torch_row in (BASELINE, SDPA):
        console.row(columns, [torch_row.selector, "both", torch_row.title])
    for kernel in fastattn.kernels():
        console.row(columns, [kernel.name, kernel.backend, kernel.title])


def _plan(args: argparse.Namespace, default: Plan) -> Plan:
    """``default``, but for what the command line says."""
    names = ("warmup", "repetitions", "max_seconds")
    return replace(default, **{n: getattr(args, n) for n in names if getattr(args, n) is not None})


def _writable(console: Console, path: Path | None) -> bool:
    """Whether the record can be written, which is seen before all the work."""
    if path is not None:
        try:
            _record.prepare_record(path)
        except OSError as error:
            console.line(f"--json: {error}", "bad")
            return False
    return True


def _run_named_suite(
    parser: argparse.ArgumentParser, console: Console, args: argparse.Namespace
) -> int:
    for name in ("batch_size", "num_heads"):
        if getattr(args, name) is not None:
            parser.error(f"--{name.replace('_', '-')}: a --suite has its own shapes")
    if args.device == "cpu":
        parser.error("--device cpu: a --suite runs on a GPU")
    if args.write_readme is not None:
        parser.error("--write-readme shows no --suite")
    if not _writable(console, args.json):
        return 2
    if args.suite == _auto.SUITE:
        return _auto.run(console, args, _plan(args, _auto.PLAN))
    plan = _plan(args, _forward.QUICK_PLAN if args.quick else _forward.PLAN)
    return _forward.run(console, args, plan)


def _write_readme(console: Console, args: argparse.Namespace) -> int:
    return _record.show_in_page(console, args.record, args.write_readme, _record.write_readme)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = _parser()
    args = parser.parse_args(argv)
    console = Console()
    if args.list:
        _list(console)
        return 0
    if args.source_hash:
        root = _machine.source_root()
        if root is None:
            parser.error("--source-hash: the working directory is in no fastattn source tree")
        console.line(_machine.source_hash(root))
        return 0
    if args.suite is not None:
        return _run_named_suite(parser, console, args)
    if (args.write_readme is None) != (args.record is None):
        parser.error("--write-readme README and --from FILE go together")
    if args.write_readme is not None:
        return _write_readme(console, args)
    if args.quick:
        parser.error("--quick is for a --suite; there are --repetitions and --max-seconds")
    if not args.implementation:
        parser.error("what to time? all, baseline, sdpa, a kernel's name (--list), or a --suite")
    args.dtype = args.dtype or "float32"

    devices = _devices(console, args)
    if not devices or not _writable(console, args.json):
        return 2
    seed = int(np.random.SeedSequence().generate_state(1)[0]) if args.seed is None else args.seed
    rng = np.random.default_rng(seed)
    plan = _plan(args, Plan())
    torch_for(devices[0])  # imports torch where it is installed, for its version
    record: dict[str, Any] = new_record(seed)
    console.line(f"fastattn {fastattn.__version__} benchmark, seed {seed}", "bold")
    outcomes = [
        _run_suite(console, args, device, plan, rng, record["meta"], record["rows"])
        for device in devices
    ]
    if args.json is not None:
        args.json.write_text(_record.dump_record(record))
        console.line(f"Record: {args.json}")
    if not record["rows"]:
        console.line("Nothing was measured.", "bad")
        return 2 if all(outcome is None for outcome in outcomes) else 1
    missing = _missing(args, record["rows"])
    if missing:
        console.line(f"Nothing was measured of: {', '.join(missing)}", "bad")
    return 1 if missing or False in outcomes else 0


if __name__ == "__main__":
    sys.exit(run_command(main))
