"""The command line: ``python -m fastattn.explain v3 --seq-len 256``."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

import fastattn
from fastattn import emulation, testing
from fastattn._console import Column, Console, Progress, integer_from, run_command
from fastattn.benchmark import source_root
from fastattn.benchmark._record import prepare_record
from fastattn.explain._formulas import FLOP, RUNGS, Rung, Shape, acting, dtypes

# A count of emulation.Counts, and what the ladder's pages call it.
_TITLES = {
    "global_read_bytes": "global bytes read",
    "global_write_bytes": "global bytes written",
    "global_read_requests": "global reads, requests",
    "global_write_requests": "global writes, requests",
    "global_read_sectors": "32-byte sectors read",
    "global_write_sectors": "32-byte sectors written",
    "shared_read_requests": "shared reads, requests",
    "shared_read_transactions": "shared reads, turns",
    "shared_read_conflicts": "  of these, conflicts",
    "shared_write_requests": "shared writes, requests",
    "shared_write_transactions": "shared writes, turns",
    "shared_write_conflicts": "  of these, conflicts",
    "exponentials": "exponentials",
    "barriers": "barriers of a block",
    "warp_barriers": "barriers of a warp",
    "shuffles": "shuffles of a warp",
    "votes": "votes of a warp",
    "mmas": "tensor-core products of a warp",
    "atomics": "atomics",
}
# Away from the line above them in a table.
_ALONE = {
    "shared_read_conflicts": "conflicts of shared reads",
    "shared_write_conflicts": "conflicts of shared writes",
}
_SECTOR = 32  # bytes
_SEEDS = 3  # orders of the threads that --check tries
_SECONDS_PER_SCORE = 5e-5  # of the checked emulation, within a factor of two for every rung

_NOT_COUNTED = (
    "Counted are the accesses of the source: a GPU's compiler may join two or four neighbouring "
    "reads into one of 8 or 16 bytes. A request is a warp's; a turn is a clock of an SM's shared "
    "memory, and conflicts are turns beyond the fewest. Barriers are __syncthreads of a block and "
    "__syncwarp of a warp. Multiply-adds are not counted; the FLOP are those of the formula. The "
    "sectors are the most that can move between L1 and L2. What reaches DRAM depends on the L2 of "
    "the card: fastattn.profile measures it."
)


@dataclass(frozen=True)
class _Explained:
    """One rung at one shape, run once or by its formulas alone."""

    name: str  # what was asked for
    shape: Shape
    report: emulation.Report | None = None
    error: float | None = None  # of out, against float64

    @cached_property
    def rung(self) -> Rung:
        """What ran: V3 and V4 hand head dims other than 64 to V2."""
        return acting(self.name, self.shape)

    @cached_property
    def emulated(self) -> dict[str, int]:
        if self.report is None:
            return {}
        counts = dataclasses.asdict(self.report.counts)
        return {name: counts[name] for name in _TITLES}

    @cached_property
    def predicted(self) -> dict[str, int | None]:
        return {name: self.rung.value(name, self.shape) for name in _TITLES}

    @property
    def counts(self) -> dict[str, int | None]:
        """Those of the run, or else of the formulas."""
        return {**self.emulated} or self.predicted

    @property
    def wrong(self) -> list[str]:
        """The counts that differ from their formulas."""
        return [name for name, n in self.emulated.items() if self.predicted[name] not in (None, n)]

    @property
    def right(self) -> bool:
        """Nothing found, all counts as predicted, and a result everywhere."""
        findings = self.report is not None and self.report.findings
        return not findings and not self.wrong and self.error != math.inf

    @property
    def intensities(self) -> dict[str, float]:
        """How many FLOP are done for each unit that is moved."""
        named = {
            "FLOP per global byte that threads ask for": ("global_{}_bytes", 1),
            "FLOP per byte of the sectors": ("global_{}_sectors", _SECTOR),
            "FLOP per turn of shared memory": ("shared_{}_transactions", 1),
        }
        found = {}
        for name, (field, unit) in named.items():
            read, written = (self.counts[field.format(x)] for x in ("read", "write"))
            if read is not None and written is not None and read + written > 0:
                found[name] = self.shape.flop / (unit * (read + written))
        return found

    def text(self, count: str) -> str:
        """The formula; those that a rung has none of are 0."""
        formula = self.rung.formulas.get(count)
        if formula is None:
            return "0"
        if self.predicted[count] is None:
            return f"{formula.text}, where {formula.where}"
        return formula.text

    def record(self) -> dict[str, Any]:
        """For --json."""
        counts = {
            name: {
                "emulated": self.emulated.get(name),
                "formula": self.predicted[name],
                "text": self.text(name),
            }
            for name in _TITLES
        }
        record = {
            "kernel": self.name,
            "ran": self.rung.name,
            "tiles": self.rung.tiles,
            "flop": self.shape.flop,
            "error": self.error if self.error != math.inf else None,
            "counts": counts,
            "intensities": self.intensities,
        }
        if self.report is not None:
            for field in ("launches", "findings", "lines"):
                entries = getattr(self.report, field)
                record[field] = [dataclasses.asdict(entry) for entry in entries]
        return record


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m fastattn.explain",
        description="Runs a rung of the ladder on the CPU, from its own CUDA source, and shows "
        "what it does to memory beside the formulas that predict it, and the arithmetic intensity "
        "that follows. Needs no GPU.",
        epilog="Exit status: 0; 1 where a count differs from its formula or, with --check, "
        "something is found; 2 for a call that makes no sense.",
    )
    parser.add_argument("kernel", help=f"{', '.join(RUNGS)}, or all: one table of all rungs")
    shape = parser.add_argument_group("shape")
    shape.add_argument(
        "--seq-len", type=integer_from(1), default=256, metavar="M", help="default: 256"
    )
    shape.add_argument(
        "--len-kv",
        type=integer_from(1),
        metavar="N",
        help="keys, where they are not as many as queries",
    )
    shape.add_argument(
        "--batch-size", type=integer_from(1), default=1, metavar="B", help="default: 1"
    )
    shape.add_argument(
        "--num-heads", type=integer_from(1), default=1, metavar="H", help="default: 1"
    )
    shape.add_argument(
        "--head-dim", type=integer_from(1), default=64, metavar="D", help="default: 64"
    )
    shape.add_argument(
        "--dtype",
        choices=("float32", "float16"),
        default="float32",
        help="default: float32. The counts of bfloat16 are those of float16",
    )
    parser.add_argument(
        "--seed",
        type=integer_from(0),
        default=0,
        help="of the data, and of the order in which threads run; default: 0",
    )
    parser.add_argument(
        "--lines",
        action="store_true",
        help="the lines of the source as well, the costliest first",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help=f"look for races, missed barriers, and accesses that are out of range or "
        f"uninitialised, in {_SEEDS} orders of the threads, instead of explaining",
    )
    parser.add_argument(
        "--formulas",
        action="store_true",
        help="nothing is run: the formulas and their values alone, for shapes of any size",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there as well")
    return parser


class _Runner:
    """Runs rungs on one set of inputs."""

    def __init__(self, shape: Shape, seed: int) -> None:
        self.shape = shape
        rng = np.random.default_rng(seed)
        s = shape
        self.q, self.k, self.v = (
            rng.standard_normal((s.batch, s.heads, length, s.head_dim), np.float32).astype(s.dtype)
            for length in (s.len_q, s.len_kv, s.len_kv)
        )

    @cached_property
    def _reference(self) -> Any:
        return testing.reference(self.q, self.k, self.v)[0]

    def run(self, name: str, seed: int, progress: Progress) -> _Explained:
        report = _watched(
            progress,
            f"{name}, thread by thread, seed {seed}",
            lambda: emulation.run(self.q, self.k, self.v, kernel=name, seed=seed),
        )
        try:
            error = testing.error(report.out, self._reference)
        except AssertionError:  # NaN, where a fault ended the run
            error = math.inf
        return _Explained(name, self.shape, report, error)


def _watched(
    progress: Progress, label: str, call: Callable[[], emulation.Report]
) -> emulation.Report:
    """Calls on another thread, so that seconds pass on the display and Ctrl-C ends the wait."""
    done: list[emulation.Report] = []
    failed: list[Exception] = []

    def work() -> None:
        try:
            done.append(call())
        except Exception as error:  # raised again below, where it is waited for
            failed.append(error)

    thread = threading.Thread(target=work, daemon=True)
    start = time.monotonic()
    progress.step(label)
    thread.start()
    thread.join(1.0)
    while thread.is_alive():
        progress.step(f"{label}, {time.monotonic() - start:.0f} s")
        thread.join(1.0)
    if failed:
        raise failed[0]
    return done[0]


def _plural(n: int, noun: str) -> str:
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"


def _heading(explained: _Explained) -> Iterator[str]:
    e = explained
    kernels = (*fastattn.kernels(), *fastattn.kernels(emulated=True))
    titles = {kernel.name: kernel.title for kernel in kernels}
    yield f"{e.name}: {titles[e.name]}" if e.name in titles else e.name
    if e.rung.name != e.name:
        yield f"{e.name} hands head dim {e.shape.head_dim} to {e.rung.name}."
    for launch in () if e.report is None else e.report.launches:
        text = f"{launch.kernel}: {_plural(launch.blocks, 'block')} of {launch.threads} threads"
        if launch.dynamic_shared_bytes:
            text += f", {launch.dynamic_shared_bytes:,} bytes of shared memory"
        yield text
    if e.rung.tiles:
        tiles = " ".join(f"{name}={n}" for name, n in e.rung.tiles.items())
        said = "rows and keys of a tile, warps of a block"
        yield (
            f"{tiles} ({said}, head dim of a tile)" if "P" in e.rung.tiles else f"{tiles} ({said})"
        )


def _title(count: str) -> str:
    return _ALONE.get(count, _TITLES[count])


def _number(n: int | None) -> str:
    return "-" if n is None else f"{n:,}"


def _explain(console: Console, explained: _Explained) -> None:
    """The table of one rung."""
    e = explained
    first, *rest = _heading(e)
    console.line(first, "bold")
    for line in rest:
        console.line(line)
    console.line()
    columns = [Column("count", 26, "<")]
    if e.report is not None:
        columns += [Column("emulated", 14)]
    columns += [Column("formula", 14)]
    if e.report is not None:
        columns += [Column("", 6, "<")]
    columns += [Column("the formula", 30, "<")]
    console.header(columns)
    none = []
    for name, title in _TITLES.items():
        if not e.counts[name] and name not in e.rung.formulas and name not in e.wrong:
            none.append(_title(name))
            continue
        cells = [title, _number(e.predicted[name]), e.text(name)]
        if e.report is not None:
            agree = "" if e.predicted[name] is None else "DIFFER" if name in e.wrong else "agree"
            cells[1:1] = [_number(e.emulated[name])]
            cells[3:3] = [agree]
        console.row(columns, cells, "bad" if name in e.wrong else "plain")
    if none:
        console.line(f"Zero: {', '.join(none)}.", "dim")
    console.line()
    ratios = (Column("", 42, "<"), Column("", 22))
    console.row(ratios, [f"FLOP = {FLOP}", f"{e.shape.flop:,}"])
    for name, ratio in e.intensities.items():
        console.row(ratios, [name, f"{ratio:,.2f}"])
    if e.error is not None:
        console.row(ratios, ["error of the result against float64", f"{e.error:.1e}"])


def _compare(console: Console, all_explained: Sequence[_Explained]) -> None:
    """One table of several rungs."""
    columns = (Column("", 42, "<"), *(Column(e.name, 14) for e in all_explained))
    console.header(columns)
    for name, title in _TITLES.items():
        counts = [e.counts[name] for e in all_explained]
        if any(n != 0 for n in counts):
            console.row(columns, [title, *map(_number, counts)])
    for name in dict.fromkeys(name for e in all_explained for name in e.intensities):
        values = [e.intensities.get(name) for e in all_explained]
        console.row(columns, [name, *("-" if x is None else f"{x:,.2f}" for x in values)])
    errors = [e.error for e in all_explained if e.error is not None]
    if errors:
        console.row(columns, ["error against float64", *(f"{x:.1e}" for x in errors)])
        console.line()
    for e in all_explained:
        for name in e.wrong:
            console.line(
                f"{e.name}: {_title(name)} DIFFER from the formula, "
                f"{e.text(name)} = {_number(e.predicted[name])}",
                "bad",
            )
    compared = sum(e.predicted[name] is not None for e in all_explained for name in e.emulated)
    if compared and not any(e.wrong for e in all_explained):
        console.line(f"All {compared} counts that have a formula for this shape agree with it.")


class _Sources:
    """The text of source lines, where the source is at hand."""

    def __init__(self) -> None:
        self._root = source_root()
        self._texts: dict[str, list[str]] = {}

    def line(self, file: str, number: int) -> str:
        if file not in self._texts:
            self._texts[file] = self._read(file)
        lines = self._texts[file]
        return lines[number - 1].strip() if 0 < number <= len(lines) else ""

    def _read(self, file: str) -> list[str]:
        places = [Path(file)] if Path(file).is_absolute() else []
        if self._root is not None:
            places += [self._root / file, self._root / "src/cuda/kernels" / Path(file).name]
        for place in places:
            if place.is_file():
                return place.read_text().splitlines()
        return []


def _lines(console: Console, explained: _Explained) -> None:
    """The lines of the source that touch memory: shared first, the costliest first."""
    sources = _Sources()
    columns = (
        Column("line", 24, "<"),
        Column("access", 13, "<"),
        Column("requests", 12),
        Column("turns", 12),
        Column("conflicts", 12),
        Column("each", 6),
        Column("source", 40, "<"),
    )
    console.header(columns)
    lines = () if explained.report is None else explained.report.lines
    cost = sorted(lines, key=lambda x: (x.space != "shared", -x.transactions))
    for x in cost:
        cells = [
            f"{Path(x.file).name}:{x.line}",
            f"{x.space} {x.access}",
            f"{x.requests:,}",
            f"{x.transactions:,}",
            f"{x.conflicts:,}",
            f"{x.transactions / x.requests:.1f}" if x.requests else "-",
            sources.line(x.file, x.line),
        ]
        console.row(columns, cells, "bad" if x.conflicts else "plain")
    console.line("Turns: of shared memory; of global memory, sectors. Each: turns a request.")
    if not any(sources.line(x.file, x.line) for x in cost):
        console.line("The text of the lines is shown inside of a source tree.")


def _findings(console: Console, findings: Iterable[emulation.Finding]) -> None:
    for f in findings:
        console.line(
            f"  {Path(f.file).name}:{f.line}: {f.kind}: {f.message} "
            f"(block {f.block}, thread {f.thread})",
            "bad",
        )


def _check(console: Console, runner: _Runner, names: Sequence[str], seed: int) -> bool:
    """Looks for what is undefined; False where there is something."""
    columns = (
        Column("kernel", 6, "<"),
        Column("seeds", 12),
        Column("found", 13),
        Column("error", 8),
    )
    console.header(columns)
    clean = True
    seeds = range(seed, seed + _SEEDS)
    with console.progress(len(names) * len(seeds)) as progress:
        for name in names:
            # One place in the source is one finding, however many orders show it.
            found: dict[tuple[str, str, int], emulation.Finding] = {}
            errors = []
            for s in seeds:
                explained = runner.run(name, s, progress)
                assert explained.report is not None
                assert explained.error is not None
                errors.append(explained.error)
                for finding in explained.report.findings:
                    found.setdefault((finding.kind, finding.file, finding.line), finding)
                progress.advance()
            wrong = bool(found) or math.inf in errors
            said = "nothing found" if not found else _plural(len(found), "finding")
            cells = [name, f"{seeds[0]} to {seeds[-1]}", said, f"{max(errors):.1e}"]
            console.row(columns, cells, "bad" if wrong else "good")
            _findings(console, found.values())
            clean &= not wrong
    return clean


def _warn(console: Console, runs: int, shape: Shape, check: bool) -> None:
    """Says before a long run how long it is: in a pipe no progress is shown."""
    scores = runs * shape.batch * shape.heads * shape.len_q * shape.len_kv
    seconds = scores * _SECONDS_PER_SCORE
    if seconds < 10:
        return
    time_text = f"{seconds / 60:,.0f} minutes" if seconds >= 120 else f"{seconds:.0f} seconds"
    text = f"{scores:,} scores take the emulation {time_text} or so"
    console.line(f"{text}." if check else f"{text}; --formulas takes none.", "dim")


def _run(console: Console, runner: _Runner, names: Sequence[str], seed: int) -> list[_Explained]:
    explained = []
    with console.progress(len(names)) as progress:
        for name in names:
            explained.append(runner.run(name, seed, progress))
            progress.advance()
    return explained


def _names(console: Console, kernel: str, shape: Shape) -> list[str]:
    if kernel != "all":
        if kernel == "v0" and shape.len_q != shape.len_kv:
            raise ValueError("v0 takes as many keys as queries only")
        if shape.dtype not in dtypes(kernel):
            raise ValueError(f"{kernel} takes {' and '.join(dtypes(kernel))} only")
        return [kernel]
    names = [name for name in RUNGS if shape.dtype in dtypes(name)]
    if len(names) < len(RUNGS):
        left_out = ", ".join(name for name in RUNGS if name not in names)
        console.line(f"Left out, since they don't take {shape.dtype}: {left_out}.", "dim")
    if "v0" in names and shape.len_q != shape.len_kv:
        console.line("v0 takes as many keys as queries only, and is left out.", "dim")
        names.remove("v0")
    return names


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.kernel != "all" and args.kernel not in RUNGS:
        parser.error(f"no rung {args.kernel!r}; takes {', '.join(RUNGS)} or all")
    if args.check and (args.json is not None or args.lines or args.formulas):
        parser.error("--check shows what is found alone: not with --json, --lines or --formulas")
    if args.formulas and args.lines:
        parser.error("--lines needs a run: not with --formulas")
    console = Console()
    shape = Shape(
        args.batch_size,
        args.num_heads,
        args.seq_len,
        args.seq_len if args.len_kv is None else args.len_kv,
        args.head_dim,
        args.dtype,
    )
    how = "by formula" if args.formulas else f"emulated on the CPU, seed {args.seed}"
    console.line(
        f"fastattn {fastattn.__version__}: B={shape.batch} H={shape.heads} M={shape.len_q} "
        f"N={shape.len_kv} D={shape.head_dim}, {shape.dtype}, {how}",
        "bold",
    )
    try:
        names = _names(console, args.kernel, shape)
        if args.json is not None:
            prepare_record(args.json)
        if args.formulas:
            explained = [_Explained(name, shape) for name in names]
        else:
            _warn(console, len(names) * (_SEEDS if args.check else 1), shape, args.check)
            runner = _Runner(shape, args.seed)
            if args.check:
                return 0 if _check(console, runner, names, args.seed) else 1
            explained = _run(console, runner, names, args.seed)
    except (NotImplementedError, ValueError, OSError) as error:
        console.line(str(error), "bad")
        return 2
    console.line()
    if args.kernel == "all":
        _compare(console, explained)
    else:
        _explain(console, explained[0])
    for e in explained:
        _findings(console, () if e.report is None else e.report.findings)
    if args.lines:
        for e in explained:
            console.line()
            _lines(console, e)
    console.line()
    for line in textwrap.wrap(_NOT_COUNTED, 100):
        console.line(line, "dim")
    if args.json is not None:
        record = {
            "shape": dataclasses.asdict(shape),
            "seed": args.seed,
            "rungs": [e.record() for e in explained],
        }
        args.json.write_text(json.dumps(record, indent=2) + "\n")
        console.line(f"Record: {args.json}")
    return 0 if all(e.right for e in explained) else 1


if __name__ == "__main__":
    sys.exit(run_command(main))
