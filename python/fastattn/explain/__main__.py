"""The command line: ``python -m fastattn.explain v3 --seq-len 256``."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

import fastattn
from fastattn import emulation, testing
from fastattn._console import Column, Console, Style, run_command
from fastattn.benchmark import source_root
from fastattn.benchmark._record import prepare_record
from fastattn.explain._formulas import FLOP, RUNGS, Rung, Shape, acting

# A count of emulation.Counts, and what a reader calls it.
_TITLES = {
    "global_read_bytes": "global bytes read",
    "global_write_bytes": "global bytes written",
    "global_read_requests": "global read requests",
    "global_write_requests": "global write requests",
    "global_read_sectors": "global sectors read",
    "global_write_sectors": "global sectors written",
    "shared_read_requests": "shared read requests",
    "shared_read_transactions": "shared read transactions",
    "shared_read_conflicts": "  of these conflicts",
    "shared_write_requests": "shared write requests",
    "shared_write_transactions": "shared write transactions",
    "shared_write_conflicts": "  of these conflicts",
    "exponentials": "exponentials",
    "barriers": "__syncthreads",
    "warp_barriers": "__syncwarp",
    "shuffles": "warp shuffles",
    "votes": "warp votes",
    "atomics": "atomics",
}
_SECTOR = 32  # bytes
_SEEDS = 3  # orders of the threads that --check tries

_NOT_COUNTED = (
    "Counted are the accesses of the source: a GPU's compiler may join four neighbouring reads "
    "into one. Multiply-adds are not counted; the FLOP are those of the formula. A sector is 32 "
    "bytes, and those counted are the most that can move between L1 and L2. What reaches DRAM "
    "depends on the L2 of the card, and `python -m fastattn.profile` measures it."
)


@dataclass(frozen=True)
class _Explained:
    """One rung, run once."""

    name: str  # what was asked for
    rung: Rung  # what ran: V3 and V4 hand head dims other than 64 to V2
    shape: Shape
    report: emulation.Report
    error: float  # of out, against float64

    @cached_property
    def counts(self) -> dict[str, int]:
        counts = dataclasses.asdict(self.report.counts)
        return {name: counts[name] for name in _TITLES}

    def predicted(self, count: str) -> int | None:
        return self.rung.value(count, self.shape)

    @property
    def wrong(self) -> list[str]:
        """The counts that differ from their formulas."""
        return [name for name, n in self.counts.items() if self.predicted(name) not in (None, n)]

    @property
    def intensities(self) -> dict[str, float]:
        """What FLOP are done for each unit that is moved."""
        c = self.report.counts
        asked = c.global_read_bytes + c.global_write_bytes
        moved = _SECTOR * (c.global_read_sectors + c.global_write_sectors)
        turns = c.shared_read_transactions + c.shared_write_transactions
        flop = self.shape.flop
        named = {
            "FLOP per global byte that threads ask for": asked,
            "FLOP per byte of the sectors": moved,
            "FLOP per shared transaction": turns,
        }
        return {name: flop / n for name, n in named.items() if n}

    def record(self) -> dict[str, Any]:
        """For --json."""
        counts = {
            name: {
                "emulated": value,
                "formula": self.predicted(name),
                "text": formula.text if (formula := self.rung.formulas.get(name)) else "0",
            }
            for name, value in self.counts.items()
        }
        report = dataclasses.asdict(self.report)
        return {
            "kernel": self.name,
            "ran": self.rung.name,
            "tiles": self.rung.tiles,
            "flop": self.shape.flop,
            "error": self.error,
            "counts": counts,
            "intensities": self.intensities,
            "launches": report["launches"],
            "findings": report["findings"],
            "lines": report["lines"],
        }


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"a number from 1, not {value}")
    return value


def _seed(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"a number from 0, not {value}")
    return value


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
    shape.add_argument("--seq-len", type=_positive, default=256, metavar="M", help="default: 256")
    shape.add_argument(
        "--len-kv", type=_positive, metavar="N", help="keys, where they are not as many as queries"
    )
    shape.add_argument("--batch-size", type=_positive, default=1, metavar="B", help="default: 1")
    shape.add_argument("--num-heads", type=_positive, default=1, metavar="H", help="default: 1")
    shape.add_argument("--head-dim", type=_positive, default=64, metavar="D", help="default: 64")
    parser.add_argument(
        "--seed",
        type=_seed,
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
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there as well")
    return parser


class _Runner:
    """Runs rungs on one set of inputs."""

    def __init__(self, shape: Shape, seed: int) -> None:
        self.shape = shape
        rng = np.random.default_rng(seed)
        s = shape
        self.q, self.k, self.v = (
            rng.standard_normal((s.batch, s.heads, length, s.head_dim), np.float32)
            for length in (s.len_q, s.len_kv, s.len_kv)
        )

    @cached_property
    def _reference(self) -> Any:
        return testing.reference(self.q, self.k, self.v)[0]

    def run(self, name: str, seed: int) -> _Explained:
        report = emulation.run(self.q, self.k, self.v, kernel=name, seed=seed)
        error = testing.error(report.out, self._reference)
        return _Explained(name, acting(name, self.shape), self.shape, report, error)


def _heading(explained: _Explained) -> Iterator[str]:
    e = explained
    titles = {kernel.name: kernel.title for kernel in fastattn.kernels()}
    yield f"{e.name}: {titles[e.name]}" if e.name in titles else e.name
    if e.rung.name != e.name:
        yield f"{e.name} hands head dim {e.shape.head_dim} to {e.rung.name}, which ran."
    for launch in e.report.launches:
        text = f"{launch.kernel}: {launch.blocks:,} blocks of {launch.threads} threads"
        if launch.dynamic_shared_bytes:
            text += f", {launch.dynamic_shared_bytes:,} bytes of shared memory"
        yield text
    if e.rung.tiles:
        tiles = " ".join(f"{name}={n}" for name, n in e.rung.tiles.items())
        yield f"{tiles} (rows and keys of a tile, warps of a block)"


def _explain(console: Console, explained: _Explained) -> None:
    """The table of one rung."""
    e = explained
    first, *rest = _heading(e)
    console.line(first, "bold")
    for line in rest:
        console.line(line)
    console.line()
    columns = (
        Column("count", 26, "<"),
        Column("emulated", 15),
        Column("formula", 15),
        Column("", 6, "<"),
        Column("the formula", 30, "<"),
    )
    console.header(columns)
    for name, n in e.counts.items():
        formula = e.rung.formulas.get(name)
        predicted = e.predicted(name)
        text = "0" if formula is None else formula.text
        if predicted is None:
            assert formula is not None
            cells = ["-", "", f"{text}, where {formula.where}"]
        else:
            cells = [f"{predicted:,}", "agree" if predicted == n else "DIFFER", text]
        style: Style = "bad" if name in e.wrong else "dim" if n == 0 else "plain"
        console.row(columns, [_TITLES[name], f"{n:,}", *cells], style)
    console.line()
    ratios = (Column("", 45, "<"), Column("", 18))
    console.row(ratios, [f"FLOP = {FLOP}", f"{e.shape.flop:,}"])
    for name, ratio in e.intensities.items():
        console.row(ratios, [name, f"{ratio:,.2f}"])
    console.row(ratios, ["error of the result against float64", f"{e.error:.1e}"])


def _compare(console: Console, all_explained: Sequence[_Explained]) -> None:
    """One table of several rungs."""
    columns = (Column("", 42, "<"), *(Column(e.name, 13) for e in all_explained))
    console.header(columns)
    for name, title in _TITLES.items():
        counts = [e.counts[name] for e in all_explained]
        cells = [f"{n:,}" for n in counts]
        console.row(columns, [title, *cells], "plain" if any(counts) else "dim")
    names = dict.fromkeys(name for e in all_explained for name in e.intensities)
    for name in names:
        values = [e.intensities.get(name) for e in all_explained]
        console.row(columns, [name, *("-" if x is None else f"{x:,.2f}" for x in values)])
    console.row(columns, ["error against float64", *(f"{e.error:.1e}" for e in all_explained)])
    console.line()
    for e in all_explained:
        for name in e.wrong:
            console.line(
                f"{e.name}: {_TITLES[name].strip()} DIFFER from the formula "
                f"{e.rung.formulas[name].text} = {e.predicted(name):,}"
                if name in e.rung.formulas
                else f"{e.name}: {_TITLES[name].strip()} DIFFER from the formula, which has none",
                "bad",
            )
    checked = sum(e.predicted(name) is not None for e in all_explained for name in _TITLES)
    if not any(e.wrong for e in all_explained):
        console.line(f"All {checked} counts that have a formula for this shape agree with it.")


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
    cost = sorted(explained.report.lines, key=lambda x: (x.space != "shared", -x.transactions))
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
    console.line("Turns: transactions of shared memory, sectors of global memory; each: a request.")


def _findings(console: Console, findings: Iterable[emulation.Finding]) -> None:
    for f in findings:
        console.line(
            f"  {Path(f.file).name}:{f.line}: {f.kind}: {f.message} "
            f"(block {f.block}, thread {f.thread})",
            "bad",
        )


def _check(console: Console, runner: _Runner, names: Sequence[str], seed: int) -> int:
    """Looks for what is undefined; returns how much was found."""
    columns = (
        Column("kernel", 6, "<"),
        Column("seeds", 12),
        Column("findings", 8),
        Column("error", 8),
    )
    console.header(columns)
    total = 0
    seeds = range(seed, seed + _SEEDS)
    with console.progress(len(names) * len(seeds)) as progress:
        for name in names:
            # One place in the source is one finding, however many orders show it.
            found: dict[tuple[str, str, int], emulation.Finding] = {}
            errors = []
            for s in seeds:
                progress.step(f"{name}, seed {s}")
                explained = runner.run(name, s)
                errors.append(explained.error)
                for finding in explained.report.findings:
                    found.setdefault((finding.kind, finding.file, finding.line), finding)
                progress.advance()
            cells = [name, f"{seeds[0]} to {seeds[-1]}", str(len(found)), f"{max(errors):.1e}"]
            console.row(columns, cells, "bad" if found else "good")
            _findings(console, found.values())
            total += len(found)
    return total


def _names(console: Console, kernel: str, shape: Shape) -> list[str]:
    if kernel != "all":
        return [kernel]
    names = list(RUNGS)
    if shape.len_q != shape.len_kv:
        console.line("v0 takes as many keys as queries only, and is left out.", "dim")
        names.remove("v0")
    return names


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.kernel != "all" and args.kernel not in RUNGS:
        parser.error(f"no rung {args.kernel!r}; takes {', '.join(RUNGS)} or all")
    if args.check and (args.json is not None or args.lines):
        parser.error("--check shows what is found alone: it goes with neither --json nor --lines")
    console = Console()
    shape = Shape(
        args.batch_size,
        args.num_heads,
        args.seq_len,
        args.seq_len if args.len_kv is None else args.len_kv,
        args.head_dim,
    )
    console.line(
        f"fastattn {fastattn.__version__}, emulated on the CPU: B={shape.batch} H={shape.heads} "
        f"M={shape.len_q} N={shape.len_kv} D={shape.head_dim}, float32, seed {args.seed}",
        "bold",
    )
    try:
        if args.json is not None:
            prepare_record(args.json)
        names = _names(console, args.kernel, shape)
        runner = _Runner(shape, args.seed)
        if args.check:
            return 1 if _check(console, runner, names, args.seed) else 0
        explained = []
        with console.progress(len(names)) as progress:
            for name in names:
                progress.step(f"{name}, thread by thread")
                explained.append(runner.run(name, args.seed))
                progress.advance()
    except (NotImplementedError, ValueError, OSError) as error:
        console.line(str(error), "bad")
        return 2
    console.line()
    if args.kernel == "all":
        _compare(console, explained)
    else:
        _explain(console, explained[0])
    for e in explained:
        _findings(console, e.report.findings)
    if args.lines:
        for e in explained:
            console.line()
            _lines(console, e)
    console.line()
    for line in textwrap.wrap(_NOT_COUNTED, 100):
        console.line(line, "dim")
    if args.json is not None:
        shape_fields = dataclasses.asdict(shape)
        record = {
            "shape": shape_fields,
            "seed": args.seed,
            "rungs": [e.record() for e in explained],
        }
        args.json.write_text(json.dumps(record, indent=2) + "\n")
        console.line(f"Record: {args.json}")
    return 1 if any(e.wrong or e.report.findings for e in explained) else 0


if __name__ == "__main__":
    sys.exit(run_command(main))
