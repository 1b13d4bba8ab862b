"""The table of a profile: a column a rung, for the terminal and as Markdown."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fastattn._console import Column, Console

BEGIN = "<!-- profile:begin -->"
END = "<!-- profile:end -->"

Row = dict[str, Any]
Record = dict[str, Any]

_MISSING = "-"
_TOP_STALLS = 3
# Of the table on a console, in characters: all of it, and what a column needs at least.
_WIDTH = 100
_NARROWEST = 14


def _field(key: str, form: str, factor: float = 1) -> Callable[[Row], str]:
    def cell(row: Row) -> str:
        value = row.get(key)  # records made before a counter was asked for lack it
        return _MISSING if value is None else format(value * factor, form)

    return cell


def _three_digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _plain(key: str, factor: float = 1) -> Callable[[Row], str]:
    def cell(row: Row) -> str:
        value = row[key]
        return _MISSING if value is None else _three_digits(value * factor)

    return cell


def _per(key: str, unit: str) -> Callable[[Row], str]:
    def cell(row: Row) -> str:
        if row[key] is None or not row[unit]:
            return _MISSING
        return f"{row[key] / row[unit]:.2f}"

    return cell


def _limited_by(row: Row) -> str:
    limits = list(row["limited_by"])
    blocks, multiprocessors = row["blocks"], row["multiprocessors"]
    # A grid that leaves SMs without work limits more than what each SM could hold.
    if blocks is not None and blocks < multiprocessors:
        limits.append(f"grid {blocks} < {multiprocessors} SMs")
    return ", ".join(limits) or _MISSING


def _stall(place: int) -> Callable[[Row], str]:
    def cell(row: Row) -> str:
        stalls: dict[str, float] = row["stalls"]
        waits = [reason for reason in stalls if reason != "selected"]
        if place >= len(waits) or not stalls[waits[place]]:
            return _MISSING
        share = stalls[waits[place]] / sum(stalls.values())
        return f"{waits[place]} {100 * share:.0f}%"

    return cell


_LINES: tuple[tuple[str, Callable[[Row], str]], ...] = (
    ("duration, ms", _plain("us", 1e-3)),
    ("TFLOP/s (4BHMND / duration)", _plain("tflops")),
    ("of fp32 peak", _field("peak_share", ".1%")),
    ("executed fp32 TFLOP/s", _plain("executed_tflops")),
    ("executed, of fp32 peak", _field("executed_peak_share", ".1%")),
    ("intensity, FLOP/byte", _plain("intensity")),
    ("DRAM, GB/s", _plain("dram_gbs")),
    ("occupancy, achieved", _field("occupancy", ".1f")),
    ("occupancy, theoretical", _field("occupancy_theoretical", ".1f")),
    ("blocks", _field("blocks", ",d")),
    ("blocks per SM", _field("blocks_per_sm", "d")),
    ("limited by", _limited_by),
    ("registers per thread", _field("registers", "d")),
    ("shared memory, dynamic, bytes", _field("shared_dynamic_bytes", ",d")),
    ("shared memory, static, bytes", _field("shared_static_bytes", ",d")),
    ("shared memory, driver's, bytes", _field("shared_driver_bytes", ",d")),
    ("shared loads, bank conflicts", _field("load_bank_conflicts", ",d")),
    ("shared stores, bank conflicts", _field("store_bank_conflicts", ",d")),
    ("wavefronts per shared load", _per("load_wavefronts", "shared_loads")),
    ("wavefronts per shared store", _per("store_wavefronts", "shared_stores")),
    ("shared memory pipe busy", _field("shared_pipe_busy", ".1f")),
    ("tensor cores busy", _field("tensor_pipe_busy", ".1f")),
    ("issue slots used", _field("issue_active", ".1f")),
    *((f"stall {place + 1}", _stall(place)) for place in range(_TOP_STALLS)),
    ("SM clock, MHz", _field("sm_clock_mhz", ",.0f")),
)
# These are counters in percent already.
_PERCENT = {
    *("occupancy, achieved", "occupancy, theoretical"),
    *("shared memory pipe busy", "tensor cores busy", "issue slots used"),
}


def _cells(rows: Sequence[Row]) -> list[list[str]]:
    table = []
    for label, cell in _LINES:
        cells = [cell(row) for row in rows]
        if label in _PERCENT:
            cells = [c if c == _MISSING else f"{c}%" for c in cells]
        table.append([label, *cells])
    return table


def _name(row: Row) -> str:
    """Of a column."""
    return str(row["impl"]) if row["dtype"] == "float32" else f"{row['impl']} {row['dtype']}"


def caption(record: Record) -> str:
    """What was profiled, with what, on what: one line of text."""
    meta, row = record["meta"], record["rows"][0]
    dtypes = {row["dtype"] for row in record["rows"]}
    dtype = row["dtype"] if len(dtypes) == 1 else "float32 unless a column says another dtype"
    with_what = [f"driver {meta['driver']}", f"CUDA {meta['cuda']}", f"ncu {meta['ncu']}"]
    clocks = "locked to base" if meta["clock_control"] == "base" else "not locked"
    return (
        f"{meta['gpu']} ({', '.join(with_what)}; clocks {clocks}), {meta['date'][:10]}: "
        f"B={row['batch']}, H={row['heads_q']}, M=N={row['len_q']}, D={row['head_dim']}, "
        f"{dtype}, not causal. One warm launch of each, measured by Nsight Compute."
    )


def print_table(console: Console, record: Record) -> None:
    """Writes the table to a console, long cells in several lines."""
    rows = record["rows"]
    cells = _cells(rows)
    label_width = max(len(line[0]) for line in cells)
    most = max(_NARROWEST, (_WIDTH - label_width) // len(rows) - 2)
    wrapped = [[textwrap.wrap(cell, most) for cell in line] for line in cells]
    for line, (label, *_) in zip(wrapped, cells, strict=True):
        line[0] = [label]
    columns = [Column("", label_width, "<")]
    for i, row in enumerate(rows, 1):
        widths = [len(part) for line in wrapped for part in line[i]]
        columns.append(Column(_name(row), max(len(_name(row)), *widths)))
    for part in textwrap.wrap(caption(record), _WIDTH):
        console.line(part)
    console.line()
    console.header(columns)
    for line in wrapped:
        for parts in itertools.zip_longest(*line, fillvalue=""):
            console.row(columns, parts)


def render_markdown(record: Record, docs: Path | None = None) -> str:
    """The table as Markdown, below a line on what it was measured on.

    Parameters
    ----------
    record
        Of ``python -m fastattn.profile --json``: {"meta": ..., "rows": [...]}.
    docs
        Folder of the file that shows the table; a rung whose page ``ladder/NAME.md`` is there is
        linked to it.

    Raises
    ------
    ValueError
        The record has no rows.
    """
    if not record["rows"]:
        raise ValueError("the record has no rows")
    names = [
        f"[{_name(row)}](ladder/{row['impl']}.md)"
        if docs is not None and (docs / "ladder" / f"{row['impl']}.md").is_file()
        else _name(row)
        for row in record["rows"]
    ]
    lines = ["| | " + " | ".join(names) + " |", "|---|" + "---:|" * len(names)]
    lines += ["| " + " | ".join(line) + " |" for line in _cells(record["rows"])]
    return "\n".join([caption(record), "", *lines])


def write_markdown(path: Path | str, record: Record) -> bool:
    """Puts the table between the markers ``<!-- profile:begin -->`` and ``<!-- profile:end -->``.

    Returns
    -------
    Whether the file changed.

    Raises
    ------
    OSError
        The file can't be read or written.
    ValueError
        The markers are missing or out of order, or the record has no rows.
    """
    path = Path(path)
    text = path.read_text()
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{path}: no lines {BEGIN} and {END}")
    updated = f"{before}{BEGIN}\n{render_markdown(record, path.parent)}\n{END}{after}"
    if updated == text:
        return False
    path.write_text(updated)
    return True
