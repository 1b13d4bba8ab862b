"""The command line: ``python -m fastattn.profile v4``."""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fastattn
from fastattn._console import Console, integer_from, run_command
from fastattn.benchmark import _machine, _record
from fastattn.benchmark._meta import gpus, new_record
from fastattn.profile import _ncu, _report, _roofline
from fastattn.profile._metrics import make_row
from fastattn.profile._rungs import (
    DTYPES,
    SEVERAL_KERNELS,
    Shape,
    has_cuda,
    profiled,
    refusal,
    without_gpu,
)

_PRIMARY = Shape()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m fastattn.profile",
        description="Runs NVIDIA Nsight Compute (ncu) on rungs of the ladder: one warm launch of "
        "each, a report for ncu-ui, and one table of what the counters say.",
        epilog="Clocks are left as they are unless --lock-clocks is given. Exit status: 0; 1 where "
        "a rung could not be profiled; 2 where none can be, or for a call that makes no sense.",
    )
    parser.add_argument("rung", nargs="*", help="all, or kernels by name: v4")
    shape = parser.add_argument_group("shape: not causal, M = N")
    for option, letter, value in (
        ("--batch-size", "B", _PRIMARY.batch),
        ("--num-heads", "H", _PRIMARY.heads),
        ("--seq-len", "N", _PRIMARY.length),
        ("--head-dim", "D", _PRIMARY.head_dim),
    ):
        shape.add_argument(
            option, type=integer_from(1), metavar=letter, default=value, help=f"default {value}"
        )
    shape.add_argument(
        "--dtype",
        nargs="+",
        choices=DTYPES,
        default=["float32"],
        help="one or more, each with the kernels that take it; default: float32",
    )
    measuring = parser.add_argument_group("measuring")
    measuring.add_argument(
        "--lock-clocks",
        action="store_true",
        help="let ncu lock the GPU to its base clock while it measures",
    )
    output = parser.add_argument_group("output")
    output.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="folder of the reports, RUNG.ncu-rep and RUNG.csv, or RUNG-DTYPE.… for other dtypes "
        "than float32 (default: build/profile in a source tree, else fastattn-profile)",
    )
    output.add_argument("--json", type=Path, metavar="FILE", help="write the record there")
    output.add_argument(
        "--roofline", type=Path, metavar="FILE", help="draw the roofline: a .png or .svg file"
    )
    output.add_argument(
        "--write",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help=f"put the table into Markdown files, between {_report.BEGIN} and {_report.END}",
    )
    output.add_argument(
        "--from",
        dest="record",
        type=Path,
        metavar="FILE",
        help="show, draw and write a record made earlier; needs neither GPU nor ncu",
    )
    return parser


def _outputs_problem(args: argparse.Namespace) -> str | None:
    """What would go wrong with the outputs, found before all the work."""
    if args.roofline is not None:
        if args.roofline.suffix not in _roofline.FORMATS:
            endings = " or ".join(_roofline.FORMATS)
            return f"--roofline: {args.roofline} must end in {endings}"
        if not _roofline.has_matplotlib():
            return "--roofline needs matplotlib: pip install matplotlib, or fastattn[profile]"
    try:
        for path in filter(None, (args.json, args.roofline)):
            _record.prepare_record(path)
        for path in args.write:
            text = path.read_text()
            if not 0 <= text.find(_report.BEGIN) < text.find(_report.END):
                return f"--write: {path} has no lines {_report.BEGIN} and {_report.END}"
    except OSError as error:
        return str(error)
    return None


def _deliver(console: Console, args: argparse.Namespace, record: dict[str, Any]) -> None:
    """Shows the table and writes what was asked for. Raises OSError and ValueError."""
    _report.print_table(console, record)
    console.line()
    if args.json is not None:
        args.json.write_text(_record.dump_record(record))
        console.line(f"Record: {args.json}")
    if args.roofline is not None:
        _roofline.draw(record, args.roofline)
        console.line(f"Roofline: {args.roofline}")
    for path in args.write:
        changed = _report.write_markdown(path, record)
        console.line(f"{path}: {'written' if changed else 'up to date'}")


def _show(console: Console, args: argparse.Namespace) -> int:
    def deliver(record: _record.Record) -> int:
        if not record["rows"] or any(row["suite"] != "profile" for row in record["rows"]):
            raise ValueError(f"{args.record}: not a record of python -m fastattn.profile")
        _deliver(console, args, record)
        return 0

    return _record.with_record(console, args.record, deliver)


def _choose(console: Console, args: argparse.Namespace, shape: Shape) -> list[str] | None:
    """The rungs to profile, in ladder order; None after a message where that makes no sense."""
    named = [name for name in dict.fromkeys(args.rung) if name != "all"]
    for name in named:
        reason = refusal(name, shape)
        if reason is not None:
            console.line(f"{reason}.", "bad")
            return None
    asked = "all" if "all" in args.rung else named[0]
    missing = None
    if not has_cuda():
        missing = (
            "This build of fastattn has no CUDA backend: on a machine with a GPU, install it again "
            "with FASTATTN_CUDA=ON in the environment."
        )
    elif not gpus():
        missing = "No GPU is seen here, and a profile needs one."
    if missing is not None:
        console.line(missing, "bad")
        console.line(without_gpu(asked))
        return None
    if "all" not in args.rung:
        return [name for name in profiled() if name in named]
    chosen = []
    for name in (*SEVERAL_KERNELS, *profiled()):
        reason = refusal(name, shape)
        if reason is None:
            chosen.append(name)
        else:
            console.line(f"Left out: {reason}.", "dim")
    return chosen


def _profile(
    console: Console,
    args: argparse.Namespace,
    launches: Sequence[tuple[str, Shape]],
    folder: Path,
) -> int:
    ncu = _ncu.find()
    meta_of = new_record()
    meta = meta_of["meta"]
    meta["ncu"] = _ncu.version(ncu)
    meta["clock_control"] = "base" if args.lock_clocks else "none"
    gpu = gpus()[0]
    titles = {kernel.name: kernel.title for kernel in fastattn.kernels()}
    console.line(f"fastattn {fastattn.__version__} profile, ncu {meta['ncu'] or '?'}", "bold")
    rows = []
    failed = refused = False
    with console.progress(len(launches)) as progress:
        for name, shape in launches:
            label = name if shape.dtype == "float32" else f"{name} {shape.dtype}"
            progress.step(f"{label}: ncu replays one launch, once for each group of counters")
            try:
                launch = _ncu.profile(ncu, name, shape, folder, args.lock_clocks)
            except _ncu.SeveralKernelsError as reason:
                refused |= name in args.rung
                console.line(f"Left out: {reason}.", "bad" if name in args.rung else "dim")
            except _ncu.RungError as error:
                failed = True
                console.line(f"{label}: FAILED: {error}", "bad")
            else:
                row = make_row(name, titles[name], shape, launch.function, launch.metrics, gpu)
                rows.append(row)
                console.line(f"{label}: {_ncu.report_path(name, shape, folder)}")
            progress.advance()
    if not rows:
        console.line("Nothing was profiled.", "bad")
        return 1 if failed else 2
    clocks = [row["sm_clock_mhz"] for row in rows if row["sm_clock_mhz"] is not None]
    meta["sm_clock_mhz"] = round(statistics.median(clocks)) if clocks else None
    console.line()
    try:
        _deliver(console, args, {"meta": meta, "rows": rows})
    except (OSError, ValueError) as error:
        console.line(str(error), "bad")
        return 1
    return 2 if refused else int(failed)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = _parser()
    args = parser.parse_args(argv)
    console = Console()
    if not args.rung and args.record is None:
        parser.error("what to profile? all, or kernels by name; --from FILE shows a record")
    if args.rung and args.record is not None:
        parser.error("--from shows what is in the record: name no kernel beside it")
    problem = _outputs_problem(args)
    if problem is not None:
        console.line(problem, "bad")
        return 2
    if args.record is not None:
        return _show(console, args)

    launches = []
    for dtype in dict.fromkeys(args.dtype):
        shape = Shape(args.batch_size, args.num_heads, args.seq_len, args.head_dim, dtype)
        rungs = _choose(console, args, shape)
        if rungs is None:
            return 2
        launches += [(name, shape) for name in rungs]
    if not launches:
        console.line("No kernel of this build can be profiled with this shape.", "bad")
        return 2
    in_tree = _machine.source_root() is not None
    folder = args.out or Path("build/profile" if in_tree else "fastattn-profile")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return _profile(console, args, launches, folder)
    except (OSError, _ncu.NcuError) as error:
        console.line(str(error), "bad")
        return 2


if __name__ == "__main__":
    sys.exit(run_command(main))
