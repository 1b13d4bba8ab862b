"""The table of a record of V4's steps, for a page of the documentation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from step_sources import STEPS, V4

SUITE = "v4_steps"
BEGIN = "<!-- v4-steps:begin -->"
END = "<!-- v4-steps:end -->"

_HEAD = (
    *("step", "what it adds", "µs", "change", "TFLOP/s", "registers", "spilled, bytes"),
    *("blocks per SM", "error", "RTX 4080, published"),
)


def change(rows: list[dict[str, Any]], index: int) -> str:
    """How much the time of a step differs from that of the step it adds to, in percent."""
    base = STEPS[rows[index]["step"]].base
    if index == 0:
        return "-"
    return f"{100 * (rows[index]['us'] / rows[base]['us'] - 1):+.1f}%"


def microseconds(us: float) -> str:
    """With a thousands separator, and as many digits as mean something."""
    return f"{us:,.1f}" if us < 1000 else f"{us:,.0f}"


def _published(step: int) -> str:
    said = STEPS[step]
    parts = [f"{said.published_us:,.2f} µs"] if said.published_us is not None else []
    if said.published_registers is not None:
        parts.append(f"{said.published_registers} registers")
    if said.published_blocks is not None:
        parts.append(f"{said.published_blocks} blocks per SM")
    return ", ".join(parts) or "-"


def render(record: dict[str, Any]) -> str:
    """A Markdown table of a record, after a line on what it was measured on.

    Raises
    ------
    ValueError
        The record has no rows of the suite "v4_steps".
    """
    rows = [row for row in record["rows"] if row["suite"] == SUITE]
    if not rows:
        raise ValueError(f'the record has no rows of the suite "{SUITE}"')
    meta, first = record["meta"], rows[0]
    clock = f", SM clock {meta['sm_clock_mhz']} MHz under load" if meta["sm_clock_mhz"] else ""
    # Records from before there was a control are records still.
    control = "; step 0b adds to step 0" if len(rows) == len(STEPS) else ""
    lines = [
        f"{meta['gpu']} (driver {meta['driver']}, nvcc {meta['nvcc']} for sm_{meta['arch']}"
        f"{clock}), {meta['date'][:10]}: B={first['batch']}, H={first['heads_q']}, "
        f"M={first['len_q']}, N={first['len_kv']}, D={first['head_dim']}, {first['dtype']}. "
        f"Medians of {first['repetitions']} calls, the steps taking turns. Steps 1 to 5 each "
        f"contain the one above, their change is to that one, and step {V4} is V4{control}. The "
        "error is "
        f"‖out - ref‖/‖ref‖ against float64, over {meta['error_heads']} of "
        f"{first['batch'] * first['heads_q']} heads.",
        "",
        "| " + " | ".join(_HEAD) + " |",
        "|---:|---|" + "---:|" * (len(_HEAD) - 2),
    ]
    for index, row in enumerate(rows):
        cells = [
            STEPS[row["step"]].label,
            row["title"],
            microseconds(row["us"]),
            change(rows, index),
            f"{row['tflops']:.2f}",
            str(row["registers"]),
            str(row["local_bytes"]),
            str(row["blocks_per_sm"]),
            f"{row['error']:.1e}",
            _published(row["step"]),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def put(text: str, record: dict[str, Any], name: str) -> str:
    """A page's text with the record's table between its two markers.

    Parameters
    ----------
    text
        Of the page.
    record
        A record with rows of the suite "v4_steps".
    name
        Of the page, for the error.

    Raises
    ------
    ValueError
        The markers are missing or out of order, or the record has no such rows.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{name}: no lines {BEGIN} and {END}")
    return f"{before}{BEGIN}\n{render(record)}\n{END}{after}"


def write(page: Path, record: dict[str, Any]) -> bool:
    """Writes the record's table into a page; returns whether the page changed.

    Raises
    ------
    OSError, ValueError
        The page can't be read or written, or ``put`` refuses it.
    """
    text = page.read_text()
    updated = put(text, record, str(page))
    if updated == text:
        return False
    page.write_text(updated)
    return True
