"""Tables and goals of a record of ``--suite forward``, for the console and for the pages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fastattn._console import Column, Console
from fastattn.benchmark._cases import FP32, GRID, SHAPES, SMALL, STRESS, WORST_INPUT

Row = dict[str, Any]
Record = dict[str, Any]

_LABELS = {
    "torch_naive": "naive",
    "torch_sdpa": "SDPA",
    "torch_fa2": "FA2",
    "torch_cudnn": "cuDNN",
}


@dataclass(frozen=True)
class Table:
    """Texts by row and column; ``align`` has one of "<" and ">" a column."""

    head: list[str]
    rows: list[list[str]]
    align: str


def select(record: Record, suite: str, **fields: Any) -> list[Row]:
    """The rows of a suite that have these fields."""
    return [
        row
        for row in record["rows"]
        if row["suite"] == suite and all(row[name] == value for name, value in fields.items())
    ]


def _cases(rows: Sequence[Row]) -> dict[tuple[str, str], dict[str, Row]]:
    """Rows by (case, dtype), then by implementation, in the order of the record."""
    found: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        found.setdefault((row["case"], row["dtype"]), {})[row["impl"]] = row
    return found


def _impls(rows: Sequence[Row]) -> list[str]:
    """Ours in ladder order, "auto" the last of them, then torch's as they were measured."""
    found = list(dict.fromkeys(row["impl"] for row in rows))
    ours = [impl for impl in found if not impl.startswith("torch_")]
    ours.sort(key=lambda impl: (impl == "auto", len(impl), impl))
    return ours + [impl for impl in found if impl.startswith("torch_")]


def _kernels(rows: Sequence[Row]) -> list[str]:
    """Our kernels by name; "auto" only where no other was measured."""
    ours = [impl for impl in _impls(rows) if not impl.startswith("torch_")]
    return [impl for impl in ours if impl != "auto"] or ours


def _label(impl: str) -> str:
    return _LABELS.get(impl, impl)


def _figures(value: float) -> str:
    """Three of them, of a large one all: 7.05, 21.3, 1,519."""
    if value < 1:
        return f"{value:.3g}"
    return f"{value:,.{max(0, 3 - len(str(int(value))))}f}"


def _tflops(row: Row | None) -> str:
    return "-" if row is None else _figures(row["tflops"])


def _us(row: Row | None) -> str:
    return "-" if row is None else _figures(row["us"])


def _error(row: Row | None, field: str = "error") -> str:
    return "-" if row is None else f"{row[field]:.1e}"


def _speed(ours: Row | None, other: Row | None) -> str:
    """How many times as fast as the other."""
    return "-" if ours is None or other is None else f"{other['us'] / ours['us']:.2f}"


def _mask(row: Row) -> str:
    return "causal" if row["causal"] else "full"


def grid_table(record: Record, dtype: str) -> Table:
    """TFLOP/s over the grid; ours over torch's FlashAttention-2; errors."""
    rows = select(record, GRID, dtype=dtype)
    kernels = _kernels(rows)
    torch = [impl for impl in ("torch_fa2", "torch_cudnn") if impl in _impls(rows)]
    head = ["D", "mask", "N", *map(_label, [*kernels, *torch])]
    head += [f"{kernel} / FA2" for kernel in kernels]
    head += [f"error {_label(impl)}" for impl in (*kernels, "torch_fa2")]
    lines = []
    for found in _cases(rows).values():
        row = next(iter(found.values()))
        fa2 = found.get("torch_fa2")
        lines.append(
            [
                str(row["head_dim"]),
                _mask(row),
                str(row["len_q"]),
                *(_tflops(found.get(impl)) for impl in (*kernels, *torch)),
                *(_speed(found.get(kernel), fa2) for kernel in kernels),
                *(_error(found.get(impl)) for impl in (*kernels, "torch_fa2")),
            ]
        )
    return Table(head, lines, "><" + ">" * (len(head) - 2))


def fp32_table(record: Record) -> Table:
    """TFLOP/s and errors in float32."""
    rows = select(record, FP32)
    impls = _impls(rows)
    head = ["B=, H=", "case", *map(_label, impls), *(f"error {_label(impl)}" for impl in impls)]
    lines = []
    for (name, _), found in _cases(rows).items():
        row = next(iter(found.values()))
        shown = [found.get(impl) for impl in impls]
        lines.append(
            [f"{row['batch']}, {row['heads_q']}", name, *map(_tflops, shown), *map(_error, shown)]
        )
    return Table(head, lines, "<<" + ">" * (len(head) - 2))


def stress_table(record: Record) -> Table:
    """Normwise error and that of the worst row, by input."""
    rows = select(record, STRESS)
    impls = [impl for impl in _impls(rows) if impl != "auto"] or _impls(rows)
    head = ["inputs", *map(_label, impls), *(f"worst row {_label(impl)}" for impl in impls)]
    lines = []
    for (name, _), found in _cases(rows).items():
        shown = [found.get(impl) for impl in impls]
        lines.append([name, *map(_error, shown), *(_error(x, "worst_row_error") for x in shown)])
    return Table(head, lines, "<" + ">" * (len(head) - 1))


def small_table(record: Record) -> Table:
    """Device time of small calls by graph replay."""
    rows = select(record, SMALL)
    impls = _impls(rows)
    ours = [impl for impl in impls if not impl.startswith("torch_")]
    head = ["dtype", "M=N", *(f"{_label(impl)}, µs" for impl in impls)]
    head += [f"time {impl} / SDPA" for impl in ours]
    lines = []
    for (_, dtype), found in _cases(rows).items():
        sdpa = found.get("torch_sdpa")
        lines.append(
            [
                dtype,
                str(next(iter(found.values()))["len_q"]),
                *(_us(found.get(impl)) for impl in impls),
                *(_speed(sdpa, found.get(impl)) for impl in ours),
            ]
        )
    return Table(head, lines, "<" + ">" * (len(head) - 1))


def shapes_table(record: Record, dtype: str) -> Table:
    """Masks, groups, head dims, lengths and layouts."""
    rows = select(record, SHAPES, dtype=dtype)
    impls = _impls(rows)
    ours = [impl for impl in impls if not impl.startswith("torch_")]
    head = ["case", *(f"{_label(impl)}, µs" for impl in impls)]
    head += [f"TFLOP/s {impl}" for impl in ours] + [f"error {impl}" for impl in ours]
    lines = []
    for (name, _), found in _cases(rows).items():
        mine = [found.get(impl) for impl in ours]
        times = [_us(found.get(impl)) for impl in impls]
        lines.append([name, *times, *map(_tflops, mine), *map(_error, mine)])
    return Table(head, lines, "<" + ">" * (len(head) - 1))


# --- goals ----------------------------------------------------------------------------------------


# One rounding of the result: a one-hot softmax may have less error, which no kernel promises.
_ROUNDING = 2.0**-24


@dataclass(frozen=True)
class Goal:
    """What the project wants of an H200, and what a record has of it."""

    what: str
    wanted: str
    measured: str
    met: bool | None  # None: not measured

    @property
    def verdict(self) -> str:
        """In a word or two."""
        return {True: "met", False: "MISSED", None: "not measured"}[self.met]


def _shown(value: float, wanted: float, digits: int) -> str:
    """The value, with as many more digits as tell it from what is wanted."""
    while value != wanted and float(f"{value:.{digits}f}") == wanted and digits < 9:
        digits += 1
    return f"{value:.{digits}f}"


def _least(what: str, wanted: float, values: Sequence[float], digits: int = 2) -> Goal:
    """All values are to be ``wanted`` at least."""
    if not values:
        return Goal(what, f">= {wanted:g}", "-", None)
    least = min(values)
    below = sum(value < wanted for value in values)
    text = _shown(least, wanted, digits)
    if len(values) > 1:
        text += f" at least; {below} of {len(values)} below" if below else " at least"
    return Goal(what, f">= {wanted:g}", text, not below)


def _most(what: str, wanted: float, values: Sequence[float]) -> Goal:
    """All values are to be ``wanted`` at most."""
    if not values:
        return Goal(what, f"<= {wanted:g}", "-", None)
    most = max(values)
    above = sum(value > wanted for value in values)
    text = _shown(most, wanted, 2)
    if len(values) > 1:
        text += f" at most; {above} of {len(values)} above" if above else " at most"
    return Goal(what, f"<= {wanted:g}", text, not above)


def _ratios(
    rows: Sequence[Row], top: str, bottom: str, field: str, floor: float = 0.0
) -> list[float]:
    """Of every case that has both implementations, ``field`` of one over the other's.

    The other's counts as ``floor`` at least.
    """
    return [
        found[top][field] / max(found[bottom][field], floor)
        for found in _cases(rows).values()
        if top in found and bottom in found
    ]


def _of(record: Record, suite: str, impl: str, field: str, **fields: Any) -> list[float]:
    return [float(row[field]) for row in select(record, suite, impl=impl, **fields)]


def goals(record: Record) -> list[Goal]:
    """Every goal, with what the record has of it. They were set for an H200."""
    found = [
        _least(
            f"v6, {dtype}: speed over torch's FlashAttention-2, each cell of the grid",
            1.0,
            _ratios(select(record, GRID, dtype=dtype), "torch_fa2", "v6", "us"),
        )
        for dtype in ("float16", "bfloat16")
    ]
    found += [
        _least(
            f"v6, {dtype}, D=128, N=8192, full: TFLOP/s",
            360,
            _of(record, GRID, "v6", "tflops", dtype=dtype, case="D=128 full N=8192"),
            0,
        )
        for dtype in ("float16", "bfloat16")
    ]
    rates = [
        {row["len_q"]: row["tflops"] for row in select(record, GRID, impl="v6", **fields)}
        for fields in ({"dtype": "bfloat16", "causal": True, "head_dim": d} for d in (128, 256))
    ]
    found.append(
        _least(
            "v6, bfloat16, causal: TFLOP/s at D=256 over those at D=128, each N",
            0.6,
            [rates[1][n] / rate for n, rate in rates[0].items() if n in rates[1]],
        )
    )
    primary = {"case": "D=64 N=2048"}
    found.append(
        _least("v5, float32, B=4, H=12, D=64, N=2048: TFLOP/s", 41, _fp32(record, "v5", primary), 1)
    )
    ceiling = record["meta"].get("ceilings", {}).get("float32")
    shares = [x / ceiling["tflops"] for x in _fp32(record, "v5", primary)] if ceiling else []
    found.append(_least("v5, there: over the matrix product's rate", 0.8, shares))
    larger = {"case": "D=128 N=2048"}
    found.append(_least("v5, D=128, N=2048: TFLOP/s", 40, _fp32(record, "v5", larger), 1))
    for impl in ("v5", "v6"):
        full = _of(record, FP32, impl, "us", case="D=64 N=4096")
        causal = _of(record, FP32, impl, "us", case="D=64 N=4096 causal")
        parts = [causal[0] / full[0]] if full and causal else []
        found.append(_most(f"{impl}, float32, D=64, N=4096: causal time over full", 0.58, parts))
    found.append(_least("v6, float32, D=64, N=2048: TFLOP/s", 115, _fp32(record, "v6", primary), 1))
    over_sdpa = _ratios(select(record, FP32, **primary), "torch_sdpa", "v6", "us")
    found.append(_least("v6, there: speed over torch's SDPA", 3.4, over_sdpa))
    found.append(_least("v6, D=128, N=2048: TFLOP/s", 100, _fp32(record, "v6", larger), 1))
    stress = [row for row in select(record, STRESS) if row["inputs"] != WORST_INPUT]
    for impl, other in (("v6", "torch_sdpa"), ("v5", "torch_naive")):
        found.append(
            _most(
                f"{impl}, float32: error over {_label(other)}'s, each input but {WORST_INPUT!r}",
                1.0,
                _ratios(stress, impl, other, "error", _ROUNDING),
            )
        )
    small = select(record, SMALL, dtype="float16")
    found.append(
        _most(
            "auto, float16, B=8, H=16, D=64, N=64 to 256: device time over SDPA's",
            1.3,
            _ratios(small, "auto", "torch_sdpa", "us"),
        )
    )
    return found


def _fp32(record: Record, impl: str, fields: dict[str, Any]) -> list[float]:
    return _of(record, FP32, impl, "tflops", **fields)


def goals_table(record: Record) -> Table:
    """The goals and whether they are met."""
    lines = [[goal.what, goal.wanted, goal.measured, goal.verdict] for goal in goals(record)]
    return Table(["goal", "wanted", "measured", ""], lines, "<><<")


def caption(record: Record) -> str:
    """On what, with what and when a record was measured."""
    meta = record["meta"]
    clocks = [part["sm_clock_mhz"] for part in meta["suites"].values() if "sm_clock_mhz" in part]
    clock = f", median SM clock of each part {min(clocks):.0f} MHz or more" if clocks else ""
    ceilings = ", ".join(f"{name} {c['tflops']:.1f}" for name, c in meta["ceilings"].items())
    later = "".join(
        f" {name} is of a later run, {part['date'][:16].replace('T', ' ')} UTC, of newer sources."
        for name, part in meta["suites"].items()
        if "date" in part
    )
    return (
        f"{meta['gpu']} (driver {meta['driver']}, CUDA {meta['cuda']}, torch {meta['torch']}"
        f"{clock}), {meta['date'][:16].replace('T', ' ')} UTC. Matrix products of 8192^3 in the "
        f"same run, TFLOP/s: {ceilings}.{later}"
    )


TABLES: dict[str, Callable[[Record], Table]] = {
    "grid float16": lambda record: grid_table(record, "float16"),
    "grid bfloat16": lambda record: grid_table(record, "bfloat16"),
    "fp32": fp32_table,
    "stress": stress_table,
    "small": small_table,
    "shapes float16": lambda record: shapes_table(record, "float16"),
    "shapes float32": lambda record: shapes_table(record, "float32"),
    "goals": goals_table,
}


def show(console: Console, record: Record) -> None:
    """Prints the tables that the record has rows for, and the goals."""
    for name, make in TABLES.items():
        table = make(record)
        if table.rows and name != "goals":
            console.line()
            console.line(f"forward, {name}", "bold")
            _print(console, table)
    measured = [goal for goal in goals(record) if goal.met is not None]
    if measured:
        console.line()
        console.line("Goals, set for an H200", "bold")
        for goal in measured:
            console.line(
                f"  {goal.verdict:<6}  {goal.what}: {goal.measured} (wanted {goal.wanted})",
                "good" if goal.met else "bad",
            )
    console.line()


def _print(console: Console, table: Table) -> None:
    columns = tuple(
        Column(head, max(map(len, (head, *cells))), "<" if side == "<" else ">")
        for head, side, *cells in zip(table.head, table.align, *table.rows, strict=True)
    )
    console.header(columns)
    for cells in table.rows:
        console.row(columns, cells)
