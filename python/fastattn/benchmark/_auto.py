"""``--suite auto``: which kernel is the fastest where, and the rules of "auto" that follow.

The production kernels that take a dtype are timed over a grid of head dims, heads and lengths. From
the times come a few rules a dtype and head dim, and ``src/core/auto_rules.def`` is written anew.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fastattn._console import Column, Console
from fastattn.benchmark import _forward, _machine, _record, _suite
from fastattn.benchmark._arrays import Problem, TorchArrays, torch_for
from fastattn.benchmark._cases import Case
from fastattn.benchmark._forward import Measured
from fastattn.benchmark._meta import gpus, new_record
from fastattn.benchmark._record import Record
from fastattn.benchmark._suite import Implementation, Plan

SUITE = "auto"
COMMAND = "python -m fastattn.benchmark --suite auto"
# Fields of a problem, which a row has too.
SHAPE = ("dtype", "batch", "heads_q", "heads_kv", "len_q", "len_kv", "head_dim", "head_dim_v")
PLAN = Plan(warmup=3, repetitions=10, max_seconds=0.1)

_DIMS = (64, 128, 256)
_DTYPES = ("float32", "float16", "bfloat16")
# (M, N), and the products of batch and heads with which each is measured.
_SQUARE = tuple((n, n) for n in (64, 128, 256, 512, 1024, 2048, 4096))
_SQUARE_HEADS = (1, 16, 128)
_FEW = tuple((m, n) for m in (1, 16, 128) for n in (1024, 8192, 32768))
_FEW_HEADS = (16, 128)
_MOST_FLOPS = 1.5e12  # of a case: more tells nothing new
_GRAPH_FLOPS = 4e9  # up to so many, rows filled up to a tile, a case is timed by graph replay
_TILE = 64


# A rule is worth its line where it makes the calls of its grid that much faster on average.
_WORTH = 0.01
_MOST_RULES = 3  # of a dtype and head dim, without the last, which has no limits


# --- rules ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rule:
    """A line of ``src/core/auto_rules.def``; see ``src/core/auto_rules.h``. 0 is no limit."""

    gpu: str  # "kFullRate" or "kHalfRate"
    dtype: str
    head_dim_max: int
    queries_max: int
    keys_max: int
    work_max: int
    kernel: str

    def holds(self, gpu: str, problem: Problem) -> bool:
        """Whether it is about calls such as this one."""
        limits = (
            (self.head_dim_max, max(problem.head_dim, problem.head_dim_v)),
            (self.queries_max, problem.len_q),
            (self.keys_max, problem.len_kv),
            (self.work_max, work(problem)),
        )
        return (self.gpu, self.dtype) == (gpu, problem.dtype) and all(
            most in (0, value) or value < most for most, value in limits
        )

    @property
    def line(self) -> str:
        """As it stands in the file."""
        gpu, dtype, *rest = astuple(self)
        values = ", ".join(map(str, (gpu, f"k{_CPP[dtype]}", *rest)))
        return f"FASTATTN_AUTO_RULE({values})"


_CPP = {"float32": "Float32", "float16": "Float16", "bfloat16": "BFloat16"}

# Where no card of the class was measured.
_BY_ARITHMETIC = {
    "kFullRate": (),
    "kHalfRate": (Rule("kHalfRate", "float32", 0, 0, 0, 0, "v5"),),
}


def work(problem: Problem) -> int:
    """Scores of a call, B Hq M N."""
    return problem.batch * problem.heads_q * problem.len_q * problem.len_kv


def gpu_class(name: str) -> str:
    """As ``fastattn::core::gpu_class``."""
    return "kHalfRate" if "GeForce" in name else "kFullRate"


def read_rules(text: str) -> list[Rule]:
    """The rules of a file such as ``src/core/auto_rules.def``."""
    dtypes = {name: dtype for dtype, name in _CPP.items()}
    pattern = r"^FASTATTN_AUTO_RULE\((k\w+), k(\w+), (\d+), (\d+), (\d+), (\d+), (\w+)\)$"
    return [
        Rule(gpu, dtypes[dtype], int(dim), int(queries), int(keys), int(scores), kernel)
        for gpu, dtype, dim, queries, keys, scores, kernel in re.findall(
            pattern, text, re.MULTILINE
        )
    ]


def preferred(rules: Iterable[Rule], gpu: str, problem: Problem, able: Sequence[str]) -> str:
    """What "auto" takes of kernels that are able to do a call, in ladder order."""
    named = (rule.kernel for rule in rules if rule.holds(gpu, problem))
    return next((kernel for kernel in named if kernel in able), able[-1])


# --- rules from times -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """One problem, and the time of each kernel that takes it, in ladder order."""

    problem: Problem
    us: dict[str, float]

    @property
    def fastest(self) -> str:
        """The kernel that takes the least time."""
        return min(self.us, key=lambda name: self.us[name])

    def loss(self, kernel: str) -> float:
        """Logarithm of its time over the fastest's."""
        return math.log(self.us[kernel] / self.us[self.fastest])


def cells(record: Record) -> list[Cell]:
    """What a record says, problem by problem."""
    found: dict[Problem, dict[str, float]] = {}
    for row in record["rows"]:
        if row["suite"] != SUITE:
            continue
        problem = Problem(**{name: row[name] for name in SHAPE})
        found.setdefault(problem, {})[row["impl"]] = row["us"]
    return [Cell(problem, us) for problem, us in found.items()]


def loss(rules: Sequence[Rule], grid: Sequence[Cell], gpu: str) -> float:
    """Mean logarithm of the time of what the rules take over the fastest's."""
    taken = (c.loss(preferred(rules, gpu, c.problem, list(c.us))) for c in grid)
    return sum(taken) / len(grid)


def learn(grid: Sequence[Cell], gpu: str, dtype: str, head_dim_max: int) -> list[Rule]:
    """Few rules that take the fastest kernel of almost every cell, the last without limits.

    From each kernel as the last rule's, one rule after the other is put where it gains most, until
    none gains ``_WORTH``; the best of these lists counts, a rule as dear as what it must gain.
    Limits are measured values: what lies between two of them counts as the larger one.
    """

    def rule(kernel: str, queries: int = 0, keys: int = 0, scores: int = 0) -> Rule:
        return Rule(gpu, dtype, head_dim_max, queries, keys, scores, kernel)

    kernels = list(dict.fromkeys(name for cell in grid for name in cell.us))
    problems = [cell.problem for cell in grid]
    candidates = [
        rule(kernel, **{limit: value})
        for kernel in kernels
        for limit, values in (
            ("queries", {p.len_q for p in problems}),
            ("keys", {p.len_kv for p in problems}),
            ("scores", {work(p) for p in problems}),
        )
        for value in sorted(values)
    ]

    def price(rules: Sequence[Rule]) -> float:
        return loss(rules, grid, gpu) + math.log1p(_WORTH) * len(rules)

    def grow(rules: list[Rule]) -> list[Rule]:
        while len(rules) <= _MOST_RULES:
            longer = (
                [*rules[:place], candidate, *rules[place:]]
                for candidate in candidates
                for place in range(len(rules))
            )
            best = min(longer, key=price)
            if price(best) >= price(rules):
                break
            rules = best
        return rules

    return min((grow([rule(kernel)]) for kernel in kernels), key=price)


def measured_rules(record: Record) -> list[Rule]:
    """The rules of a record's GPU: for each dtype that two kernels take, by head dim."""
    gpu = gpu_class(record["meta"]["gpu"])
    grid = [cell for cell in cells(record) if len(cell.us) > 1]
    rules: list[Rule] = []
    for dtype in _DTYPES:
        dims = sorted({c.problem.head_dim for c in grid if c.problem.dtype == dtype})
        found = []
        for dim in dims:
            part = [c for c in grid if (c.problem.dtype, c.problem.head_dim) == (dtype, dim)]
            found.append(learn(part, gpu, dtype, dim if dim != dims[-1] else 0))
        # Where the next head dim has the same rules, those are enough.
        for place, mine in enumerate(found):
            larger = found[place + 1] if mine is not found[-1] else []
            if [astuple(r)[3:] for r in mine] != [astuple(r)[3:] for r in larger]:
                rules += mine
    return rules


# --- the file -------------------------------------------------------------------------------------


def records(root: Path, *more: Record) -> dict[str, Record]:
    """The newest record of each class of GPU in a source tree; ``more`` stand above those."""
    committed = [
        _record.load_record(path)
        for path in sorted((root / "benchmarks" / "results").glob("auto-*.json"))
    ]
    ordered = sorted(committed, key=lambda record: str(record["meta"]["date"]))
    return {gpu_class(record["meta"]["gpu"]): record for record in (*ordered, *more)}


def render(found: dict[str, Record]) -> str:
    """The text of ``src/core/auto_rules.def``."""
    lines = [
        '// What "auto" prefers: FASTATTN_AUTO_RULE(gpu, dtype, head_dim_max, queries_max,',
        "// keys_max, work_max, kernel), explained in core/auto_rules.h. Written by a command:",
        f"//   {COMMAND}",
    ]
    for gpu, by_arithmetic in _BY_ARITHMETIC.items():
        record = found.get(gpu)
        lines.append("//")
        if record is not None:
            # No date, no hash: where a new record gives the same rules, the sources stay the same.
            lines.append(f"// {gpu}: measured on {record['meta']['gpu']}")
            rules: Sequence[Rule] = measured_rules(record)
        elif by_arithmetic:
            lines += [
                f"// {gpu}: by arithmetic; no such card was measured. Float32 attention by tensor",
                "// cores is three float16 products, which these cards sum in float32 at twice the",
                "// rate of their float32 multiply-adds: two thirds of what those give.",
            ]
            rules = by_arithmetic
        else:
            lines.append(f"// {gpu}: no record yet, so ladder order.")
            rules = ()
        lines += [rule.line for rule in rules]
    return "\n".join(lines) + "\n"


def rules_file(root: Path) -> Path:
    """Where a source tree keeps the rules."""
    return root / "src" / "core" / "auto_rules.def"


# --- measurement ----------------------------------------------------------------------------------


def cases(dtype: str) -> list[Case]:
    """The grid of a dtype."""
    found = []
    for dim in _DIMS:
        for lengths, heads in ((_SQUARE, _SQUARE_HEADS), (_FEW, _FEW_HEADS)):
            for m, n in lengths:
                for both in heads:
                    batch, h = max(1, both // 16), min(both, 16)
                    problem = Problem(dtype, batch, h, h, m, n, dim, dim)
                    filled = problem.flops * max(1, _TILE // m)
                    if filled > _MOST_FLOPS:
                        continue
                    name = f"{dtype} D={dim} BH={both} M={m} N={n}"
                    found.append(Case(SUITE, name, problem, (), graph=filled <= _GRAPH_FLOPS))
    return found


def candidates(device: str) -> dict[str, list[Implementation]]:
    """The production kernels that take each dtype."""
    every = [item for item in _forward.kernels(device) if item.kernel is not None]
    return {
        dtype: [item for item in every if item.kernel and dtype in item.kernel.dtypes]
        for dtype in _DTYPES
    }


def measure(
    console: Console,
    arrays: TorchArrays,
    chosen: Sequence[Case],
    kernels: dict[str, list[Implementation]],
    plan: Plan,
    rng: np.random.Generator,
) -> tuple[list[dict[str, Any]], bool]:
    """Times the cases; the rows, and whether all kernels were right."""
    names = list(dict.fromkeys(k.selector for dtype in kernels for k in kernels[dtype]))
    columns = (Column("case", 34, "<"), *(Column(f"{n} us", 10) for n in names), Column("best", 6))
    console.header(columns)
    rows: list[dict[str, Any]] = []
    right = True
    with console.progress(len(chosen)) as progress:
        for case in chosen:

            def label(text: str, case: Case = case) -> None:
                progress.step(f"{case.name}: {text}")

            try:
                kernels_of = kernels[case.problem.dtype]
                found = _forward.run_case(arrays, case, kernels_of, plan, rng, label)
            except (MemoryError, RuntimeError) as error:
                console.line(f"{case.name}: FAILED: {error}", "bad")
                right = False
                if isinstance(error, _forward.GpuError):
                    break
                continue
            us = {}
            for item in found:
                if isinstance(item, Measured):
                    us[item.result.implementation.impl] = item.result.timing.us
                    rows.append(item.row())
                    if not item.result.right:
                        right = False
                        console.line(f"{case.name}: WRONG: error {item.result.error:.1e}", "bad")
                elif not item.refused:
                    right = False
                    console.line(f"{case.name}: FAILED: {item.reason}", "bad")
            times = [f"{us[name]:.2f}" if name in us else "-" for name in names]
            console.row(columns, [case.name, *times, min(us, key=us.__getitem__, default="-")])
            progress.advance()
    return rows, right


def run(console: Console, args: argparse.Namespace, plan: Plan) -> int:
    """Runs ``--suite auto``, or with ``--from`` the writing of the rules alone.

    Returns
    -------
    The exit status: 0; 1 where a kernel was wrong, and then nothing is written; 2 where the command
    can't run here.
    """
    root = _machine.source_root()
    if root is None:
        console.line("--suite auto: the working directory is in no fastattn source tree", "bad")
        return 2
    if args.record is not None:
        return _record.with_record(console, args.record, lambda read: _write(console, root, read))
    arrays = torch_for("cuda") if gpus() else None
    if arrays is None:
        missing = "no GPU is seen, or this is a CPU-only build"
        missing = "torch isn't installed, or can't use the GPU" if gpus() else missing
        console.line(f"--suite auto needs a GPU, and torch: {missing}", "bad")
        return 2

    kernels = {dtype: items for dtype, items in candidates("cuda").items() if len(items) > 1}
    seed = int(np.random.SeedSequence().generate_state(1)[0]) if args.seed is None else args.seed
    rng = np.random.default_rng(seed)
    record = new_record(seed)
    meta = record["meta"]
    meta["sm_clock_mhz"] = _suite.sm_clock(arrays, rng)
    console.line(
        f"GPU: {meta['gpu']} ({gpu_class(meta['gpu'])}), SM clock {meta['sm_clock_mhz'] or '?'} MHz"
    )
    for dtype in _DTYPES:
        if dtype not in kernels:
            console.line(f"{dtype}: no two kernels to choose from")
    record["rows"], right = measure(
        console, arrays, [c for dtype in kernels for c in cases(dtype)], kernels, plan, rng
    )
    path = args.json or root / "benchmarks" / "results" / f"auto-{_slug(meta['gpu'])}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_record.dump_record(record))
    console.line(f"Record: {path}")
    if not right:
        console.line("A kernel was wrong: the rules stay as they are.", "bad")
        return 1
    return _write(console, root, record)


def _write(console: Console, root: Path, record: Record) -> int:
    path = rules_file(root)
    text = render(records(root, record))
    changed = not path.is_file() or path.read_text() != text
    path.write_text(text)
    gpu = gpu_class(record["meta"]["gpu"])
    grid = [cell for cell in cells(record) if len(cell.us) > 1]
    if grid:
        rules = read_rules(text)
        lost = [c.loss(preferred(rules, gpu, c.problem, list(c.us))) for c in grid]
        mean, most = (100 * math.expm1(x) for x in (sum(lost) / len(lost), max(lost)))
        console.line(
            f"{len(grid)} cells: what the rules take needs {mean:.1f}% longer than the fastest on "
            f"average, {most:.0f}% at most"
        )
    console.line(f"{path}: {'written' if changed else 'up to date'}")
    return 0


def _slug(gpu: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")
