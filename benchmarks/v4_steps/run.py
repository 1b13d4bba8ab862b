#!/usr/bin/env python3
"""V4's steps, one by one: from V3 to V4 by small patches, each compiled, timed and checked.

Step 0 is V3; then 16-byte copies, padded K rows, 32-bit indices and bounded unrolling, which is V4;
and one step further, V4 with its loops unrolled fully. A control, step 0b, is V3 with the one loop
unrolled by hand that the compiler treats otherwise in V3 than in step 1. The steps take turns in
one process, so that all meet the same clock, and every time is the median of single calls between
CUDA events.

    python benchmarks/v4_steps/run.py                            # on the GPU that is present
    python benchmarks/v4_steps/run.py --json FILE
    python benchmarks/v4_steps/run.py --from FILE --write docs/ladder/v4.md
    python benchmarks/v4_steps/run.py --compile-only --arch 89,90   # no GPU: registers and spills

Needs nvcc, NumPy and fastattn (``pip install .``); no framework.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import step_library
import step_record
import step_sources
from step_library import Builder, BuildError, Compiled, CompileError, Launched, Library
from step_sources import ROOT, STEPS, PatchError

try:
    import numpy as np

    from fastattn import _core, testing
    from fastattn._console import Column, Console, run_command
    from fastattn.benchmark import _machine, _record
    from fastattn.benchmark._arrays import HostArray, Problem, expect
    from fastattn.benchmark._meta import gpus, new_record
    from fastattn.benchmark._suite import Implementation, Result, Timing
except ImportError as error:
    if __name__ != "__main__":
        raise
    print(f"v4_steps: {error}. Install fastattn first: pip install {ROOT}", file=sys.stderr)
    sys.exit(2)

# The shape that the steps were published for.
PROBLEM = Problem("float32", 4, 12, 12, 2048, 2048, 64, 64)
# Every bit set is a NaN: what a kernel leaves unwritten shows.
_POISON = 0xFF
# Heads whose rows are all held against float64: the first, the last, and some at random.
ERROR_HEADS = 4

_COLUMNS = (
    Column("step", 4),
    Column("what it adds", 53, "<"),
    Column("us", 9),
    Column("IQR us", 7),
    Column("change", 7),
    Column("TFLOP/s", 7),
    Column("registers", 9),
    Column("spilled B", 9),
    Column("blocks/SM", 9),
    Column("error", 8),
)
_COMPILED_COLUMNS = (
    Column("step", 4),
    Column("what it adds", 53, "<"),
    Column("arch", 6),
    Column("registers", 9),
    Column("spilled B", 9),
    Column("blocks/SM", 9),
)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"a number from 1, not {value}")
    return value


def _parser() -> argparse.ArgumentParser:
    lines = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="benchmarks/v4_steps/run.py",
        description=lines[0],
        epilog="Exit status: 0; 1 where a step failed or was wrong; 2 where there is no GPU, no "
        "nvcc or no patch that fits, or the call makes no sense.",
    )
    parser.add_argument(
        "--arch",
        default="native",
        help="native (default): the GPU's; or a number such as 89 or 90a, several with commas for "
        "--compile-only",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the record there")
    parser.add_argument("--repetitions", type=_positive, default=100, help="timed calls (100)")
    parser.add_argument("--warmup", type=_positive, default=25, help="untimed calls (25)")
    parser.add_argument("--seed", type=int, help="of the random inputs; default: a fresh one")
    parser.add_argument(
        "--jobs",
        type=_positive,
        default=len(os.sched_getaffinity(0)),
        help="compilers at a time (one a core)",
    )
    parser.add_argument(
        "--build-dir", type=Path, metavar="DIR", help="keep what is built there; default: nothing"
    )
    parser.add_argument(
        "--compile-only",
        action="store_true",
        help="no GPU needed: registers and spills as ptxas says, blocks per multiprocessor by "
        "arithmetic",
    )
    page = parser.add_argument_group("the table on a page")
    page.add_argument("--from", dest="record", type=Path, metavar="FILE", help="of this record")
    page.add_argument("--write", type=Path, metavar="PAGE", help="between the markers of this page")
    patches = parser.add_argument_group("mending the patches after a change of V3 or V4")
    patches.add_argument(
        "--write-sources", type=Path, metavar="DIR", help="the steps, as far as the patches apply"
    )
    patches.add_argument(
        "--read-sources", type=Path, metavar="DIR", help="make the patches anew from these steps"
    )
    return parser


def nvcc_version(nvcc: str) -> str | None:
    """The toolkit's version as nvcc gives it: "13.0"."""
    done = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False)
    found = re.search(r"release (\d+\.\d+)", done.stdout)
    return found[1] if found else None


def native_arch() -> str:
    """The architecture of the first GPU.

    Raises
    ------
    BuildError
        None is seen.
    """
    if not gpus():
        raise BuildError(_no_gpu())
    number = int(gpus()[0]["compute_capability"])
    # As scripts/gpu_check builds: from Hopper on with the architecture's own instructions.
    return f"{number}a" if number >= 90 else str(number)


def _no_gpu() -> str:
    if not _core.build_info()["cuda"]:
        return "This fastattn was built without CUDA. Install it where nvcc is found, or see --help"
    return "No GPU is seen here. Without one: --compile-only --arch 89,90 tells of the compiler"


@dataclass(frozen=True)
class Checked:
    """What one call of a step did."""

    error: float  # against float64, over some heads
    plain_error: float  # of a plain float32 evaluation of the same heads
    wrong: str  # what is wrong with the output; empty: nothing
    launched: Launched


class Bench:
    """The steps on the first GPU: inputs, outputs, checks and times."""

    def __init__(self, library: Library, problem: Problem, seed: int) -> None:
        self._library = library
        self._problem = problem
        self._rng = np.random.default_rng(seed)
        self._host = problem.host_inputs(self._rng)
        self._buffers = []
        for x in self._host:
            self._buffers.append(_core.CudaBuffer(x.nbytes))
            self._buffers[-1].copy_from_host(x)
        self._buffers.append(_core.CudaBuffer(4 * math.prod(problem.out_shape)))
        self._shape = (problem.batch, problem.heads_q, problem.len_q, problem.len_kv)

    def _run(self, step: int) -> None:
        pointers = [buffer.pointer for buffer in self._buffers]
        self._library.run(step, pointers, self._shape, self._problem.head_dim**-0.5)

    def check(self) -> Iterator[Checked]:
        """Runs every step once into poisoned memory and looks at what it wrote."""
        problem = self._problem
        last = problem.batch * problem.heads_q - 1
        inner = self._rng.choice(np.arange(1, last), ERROR_HEADS - 2, replace=False)
        chosen = np.unravel_index([0, *inner, last], (problem.batch, problem.heads_q))
        q, k, v = (x[chosen][None] for x in self._host)  # [1, heads, M or N, D]
        expected = expect(testing.reference(q, k, v), testing.naive(q, k, v))
        first: HostArray | None = None
        for step in range(len(STEPS)):
            self._buffers[-1].fill(_POISON)
            self._run(step)
            launched = self._library.launched()
            out = np.empty(problem.out_shape, np.float32)
            self._buffers[-1].copy_to_host(out)
            first = out if first is None else first
            error, wrong = float("nan"), ""
            try:
                error = testing.error(out[chosen][None], expected.out)
                # The other heads are held against V3's.
                worst = max(error, testing.error(out, first))
                allowed = self.result(step, [1.0], error, expected.plain_error).allowed
                if worst > allowed:
                    wrong = f"its error is {worst:.1e}, no more than {allowed:.1e} is allowed"
            except AssertionError as difference:
                wrong = str(difference)
            if not np.isfinite(out).all():
                wrong = "it leaves NaN or infinities in its output"
            yield Checked(error, expected.plain_error, wrong, launched)

    def round(self) -> list[float]:
        """One call of each step, in a random order: microseconds by step."""
        order = [int(step) for step in self._rng.permutation(len(STEPS))]
        events = {step: (_core.CudaEvent(), _core.CudaEvent()) for step in order}
        for step in order:
            start, end = events[step]
            start.record()
            self._run(step)
            end.record()
        _core.synchronize()
        return [1e3 * events[step][0].elapsed_ms(events[step][1]) for step in range(len(STEPS))]

    def result(self, step: int, times: Sequence[float], error: float, plain: float) -> Result:
        """A step's times and error as the benchmark's result."""
        said = STEPS[step]
        implementation = Implementation(said.name, said.name, said.title)
        return Result(implementation, self._problem, Timing.of(times), error, plain)


def row_of(step: int, result: Result, checked: Checked, compiled: Compiled) -> dict[str, Any]:
    """A step's row in the record: the benchmark's fields, and the launch's."""
    return result.row(step_record.SUITE) | {
        "step": step,
        "registers": checked.launched.registers,
        "local_bytes": checked.launched.local_bytes,
        "spill_bytes": compiled.spill_bytes,
        "threads": checked.launched.threads,
        "dynamic_shared_bytes": checked.launched.dynamic_shared_bytes,
        "blocks_per_sm": checked.launched.blocks_per_sm,
    }


def _folder(args: argparse.Namespace) -> AbstractContextManager[Any]:
    """Where things are built: a folder that is kept, or one that goes when the run is over."""
    if args.build_dir is not None:
        return nullcontext(str(args.build_dir.resolve()))
    return tempfile.TemporaryDirectory(prefix="fastattn-v4-steps-")


def compile_only(console: Console, args: argparse.Namespace, texts: Sequence[str]) -> int:
    """Prints what the compiler says of each step, for each architecture."""
    archs = args.arch.split(",") if args.arch != "native" else [native_arch()]
    plans = [step_sources.plan_of(text) for text in texts]
    with _folder(args) as folder:
        builders = [Builder(Path(folder) / f"sm_{arch}", arch, args.jobs) for arch in archs]
        console.header(_COMPILED_COLUMNS)
        with console.progress(len(archs) * len(texts)) as progress:
            for arch, builder in zip(archs, builders, strict=True):

                def show(step: int, compiled: Compiled, arch: str = arch) -> None:
                    blocks = step_library.blocks_per_sm(arch, compiled.registers, *plans[step])
                    cells = [
                        STEPS[step].label,
                        STEPS[step].title,
                        f"sm_{arch}",
                        str(compiled.registers),
                    ]
                    cells += [str(compiled.spill_bytes), "?" if blocks is None else str(blocks)]
                    console.row(_COMPILED_COLUMNS, cells)
                    progress.advance()

                progress.step(f"nvcc, sm_{arch}")
                builder.compile(texts, show)
    return 0


def measure(console: Console, args: argparse.Namespace, texts: Sequence[str]) -> int:
    """Builds, checks and times the steps; prints the table and writes the record."""
    if not gpus():
        raise BuildError(_no_gpu())
    arch = native_arch() if args.arch == "native" else args.arch
    seed = int(np.random.SeedSequence().generate_state(1)[0]) if args.seed is None else args.seed
    record = new_record(seed)
    record["meta"] |= {
        "commit": _machine.git_commit(ROOT),
        "source_hash": _machine.source_hash(ROOT),
        # The patches lie outside the folders that the hash above covers.
        "steps_hash": hashlib.sha256("\0".join(texts).encode()).hexdigest(),
        "nvcc": nvcc_version(step_library.find_nvcc()),
        "arch": arch,
        "error_heads": ERROR_HEADS,
    }
    meta, rows = record["meta"], record["rows"]
    console.line(
        f"{meta['gpu']}, driver {meta['driver']}, nvcc {meta['nvcc']} for sm_{arch}, seed {seed}",
        "bold",
    )

    total = 2 * len(texts) + 1 + args.warmup + args.repetitions
    with _folder(args) as folder, console.progress(total) as progress:
        progress.step("nvcc")
        builder = Builder(Path(folder), arch, args.jobs)
        compiled = builder.compile(texts, lambda *_: progress.advance())
        progress.step("linking")
        bench = Bench(builder.link(len(texts)), PROBLEM, seed)
        progress.advance()
        progress.step("float64 reference")
        checks = []
        for checked in bench.check():
            checks.append(checked)
            progress.advance()
        progress.step("warm-up")

        def load() -> None:
            bench.round()

        meta["sm_clock_mhz"] = _machine.sm_clock_under_load(load)
        for _ in range(args.warmup):
            bench.round()
            progress.advance()
        progress.step("timed calls")
        rounds = []
        for _ in range(args.repetitions):
            rounds.append(bench.round())
            progress.advance()

    console.line(
        f"B={PROBLEM.batch} H={PROBLEM.heads_q} M=N={PROBLEM.len_q} D={PROBLEM.head_dim} float32; "
        f"SM clock {meta['sm_clock_mhz'] or '?'} MHz under load; {args.warmup} warm-ups, "
        f"{args.repetitions} timed calls of each step in turn; error over {ERROR_HEADS} of "
        f"{PROBLEM.batch * PROBLEM.heads_q} heads"
    )
    console.line()
    console.header(_COLUMNS)
    for step, checked in enumerate(checks):
        times = [microseconds[step] for microseconds in rounds]
        result = bench.result(step, times, checked.error, checked.plain_error)
        rows.append(row_of(step, result, checked, compiled[step]))
        row = rows[-1]
        cells = [STEPS[step].label, row["title"], f"{row['us']:.2f}", f"{row['us_iqr']:.2f}"]
        cells += [step_record.change(rows, step), f"{row['tflops']:.2f}", str(row["registers"])]
        cells += [str(row["local_bytes"]), str(row["blocks_per_sm"]), f"{row['error']:.1e}"]
        console.row(_COLUMNS, cells, "bad" if checked.wrong else "plain")
        if checked.wrong:
            console.line(f"  step {STEPS[step].label} is WRONG: {checked.wrong}", "bad")
    wrong = any(checked.wrong for checked in checks)
    if args.json is not None and not wrong:
        args.json.write_text(_record.dump_record(record))
        console.line(f"Record: {args.json}")
    elif args.json is not None:
        console.line("No record written: a step was wrong", "bad")
    return 1 if wrong else 0


def write_page(console: Console, args: argparse.Namespace) -> int:
    """Puts a record's table into a page."""
    return _record.show_in_page(console, args.record, args.write, step_record.write)


def mend(console: Console, args: argparse.Namespace) -> int:
    """Writes the steps' sources, or makes the patches from them."""
    if args.write_sources is not None:
        paths = step_sources.write_sources(args.write_sources)
    else:
        paths = step_sources.read_sources(args.read_sources)
    for path in paths:
        console.line(str(path))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = _parser()
    args = parser.parse_args(argv)
    console = Console()
    if (args.write is None) != (args.record is None):
        parser.error("--from FILE and --write PAGE go together")
    if args.compile_only and args.json is not None:
        parser.error("--json is for measurements, and --compile-only measures nothing")
    if not args.compile_only and "," in args.arch:
        parser.error("--arch: several architectures go with --compile-only")
    if args.record is not None:
        return write_page(console, args)
    try:
        if args.write_sources is not None or args.read_sources is not None:
            return mend(console, args)
        texts = step_sources.sources()
        if args.json is not None:
            _record.prepare_record(args.json)
        run = compile_only if args.compile_only else measure
        return run(console, args, texts)
    except (BuildError, PatchError, OSError) as error:
        console.line(str(error), "bad")
        return 2
    except CompileError as error:
        console.line(str(error), "bad")
        return 1
    except (MemoryError, RuntimeError) as error:  # of the GPU
        console.line(f"CUDA failed: {error}", "bad")
        return 1


if __name__ == "__main__":
    sys.exit(run_command(main))
