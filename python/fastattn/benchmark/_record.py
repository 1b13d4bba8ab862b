"""Measured records (benchmarks/results/*.json) and the table that the README shows of one."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # scripts/gpu_check loads this file without the package
    from fastattn._console import Console

BEGIN = "<!-- ladder:begin -->"
END = "<!-- ladder:end -->"

Record = dict[str, Any]


def dump_record(record: Record) -> str:
    """A record as JSON text, one row a line, so that two versions compare well."""
    meta = json.dumps(record["meta"], indent=2).replace("\n", "\n  ")
    rows = ",\n".join("    " + json.dumps(row) for row in record["rows"])
    return f'{{\n  "meta": {meta},\n  "rows": [\n{rows}\n  ]\n}}\n'


def load_record(path: Path | str) -> Record:
    """Reads a record.

    Raises
    ------
    OSError
        The file can't be read.
    ValueError
        It is no record.
    """
    try:
        record = json.loads(Path(path).read_text())
    except ValueError as error:  # of the encoding, or of JSON
        raise ValueError(f"{path}: not JSON: {error}") from error
    if not (
        isinstance(record, dict)
        and isinstance(record.get("meta"), dict)
        and isinstance(record.get("rows"), list)
        and all(isinstance(row, dict) and "suite" in row for row in record["rows"])
    ):
        raise ValueError(f'{path}: not a benchmark record, which has "meta" and "rows"')
    return record


def with_record(console: Console, path: Path | str, use: Callable[[Record], int]) -> int:
    """Reads a record and hands it to ``use``; what a file is wrong with is said on the console.

    Returns
    -------
    The exit status: that of ``use``, or 2 where the record or a file that ``use`` needs can't be
    read or written, or the record lacks what ``use`` looks for.
    """
    try:
        return use(load_record(path))
    except (OSError, ValueError) as error:
        console.line(str(error), "bad")
    except (LookupError, TypeError) as error:
        console.line(f"{path}: a record with a field missing or odd: {error}", "bad")
    return 2


def show_in_page(
    console: Console, record: Path | str, page: Path, write: Callable[[Path, Record], bool]
) -> int:
    """Has ``write`` put a record into a page, and says whether that changed it.

    Returns
    -------
    The exit status, as of :func:`with_record`.
    """

    def use(loaded: Record) -> int:
        console.line(f"{page}: {'written' if write(page, loaded) else 'up to date'}")
        return 0

    return with_record(console, record, use)


def prepare_record(path: Path) -> None:
    """Makes the folder of a record and sees that the file can be written, before all the work.

    Raises
    ------
    OSError
        It can't.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    is_new = not path.exists()
    with path.open("a"):
        pass
    if is_new:
        path.unlink()


def render_ladder(record: Record, docs: Path | None = None, start: Path | None = None) -> str:
    """The ladder of a GPU record as a Markdown table, with a line on what it was measured on.

    Parameters
    ----------
    record
        A record with rows of the suite "ladder".
    docs
        Folder of the rungs' pages; a kernel is linked to its page where there is one.
    start
        Folder that the links start from; default: the one that holds ``docs/ladder``.

    Raises
    ------
    ValueError
        The record has no such rows.
    """
    rows = [row for row in record["rows"] if row["suite"] == "ladder"]
    if not rows:
        raise ValueError('the record has no rows of the suite "ladder"')
    meta = record["meta"]
    lengths = sorted({row["len_q"] for row in rows})
    by_impl: dict[str, dict[int, dict[str, Any]]] = {}
    for row in rows:
        by_impl.setdefault(row["impl"], {})[row["len_q"]] = row
    longest = lengths[-1]

    ceiling = meta["ceilings"].get("float32")
    head = ["kernel", *(f"N={n}, µs" for n in lengths), "TFLOP/s", "of ceiling", "error"]
    head += ["vs naive", "vs SDPA"]
    lines = [
        "| " + " | ".join([head[0], "what it is", *head[1:]]) + " |",
        "|---|---|" + "---:|" * (len(head) - 1),
    ]
    for impl, measured in by_impl.items():
        last = measured.get(longest)
        cells = [_name(impl, docs, start), next(iter(measured.values()))["title"]]
        cells += [_us(measured.get(n)) for n in lengths]
        if last is None:
            cells += ["-"] * 5
        else:
            cells.append(f"{last['tflops']:.3g}")
            cells.append(f"{100 * last['tflops'] / ceiling['tflops']:.3g}%" if ceiling else "-")
            cells.append(f"{last['error']:.1e}")
            for other in ("torch_naive", "torch_sdpa"):
                beside = by_impl.get(other, {}).get(longest)
                cells.append(f"{beside['us'] / last['us']:.3g}x" if beside else "-")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([_caption(meta, rows, longest), "", *lines])


def _name(impl: str, docs: Path | None, start: Path | None) -> str:
    if docs is None or not (docs / f"{impl}.md").is_file():
        return impl
    page = Path(os.path.relpath(docs / f"{impl}.md", start or docs.parent.parent))
    return f"[{impl}]({page.as_posix()})"


def _us(row: dict[str, Any] | None) -> str:
    if row is None:
        return "-"
    return f"{row['us']:,.1f}" if row["us"] < 1000 else f"{row['us']:,.0f}"


def _caption(meta: dict[str, Any], rows: list[dict[str, Any]], longest: int) -> str:
    row = rows[0]
    versions = [f"driver {meta['driver']}", f"CUDA {meta['cuda']}"]
    if meta["torch"]:
        versions.append(f"torch {meta['torch']}")
    if meta["sm_clock_mhz"]:
        versions.append(f"SM clock {meta['sm_clock_mhz']} MHz under load")
    ceiling = meta["ceilings"].get("float32")
    repetitions = max(r["repetitions"] for r in rows)
    text = (
        f"{meta['gpu']} ({', '.join(versions)}), {meta['date'][:10]}: B={row['batch']}, "
        f"H={row['heads_q']}, M=N, D={row['head_dim']}, {row['dtype']}, not causal. "
        f"Medians of up to {repetitions} calls. The last columns are for N={longest}: error is "
        "‖out - ref‖/‖ref‖ against float64, the ratios are speed over PyTorch's in the same run"
    )
    if ceiling:
        text += (
            f", the ceiling is {ceiling['tflops']:.1f} TFLOP/s ({ceiling['method']}), which "
            "kernels that compute on tensor cores may pass"
        )
    return text + "."


def put_ladder(text: str, record: Record, readme: Path) -> str:
    """A page's text with the ladder's table between its two markers.

    Parameters
    ----------
    text
        Of the page.
    record
        A record with rows of the suite "ladder".
    readme
        Where the page lies: links go from there to the rungs' pages, which lie in its
        ``docs/ladder`` or beside it.

    Raises
    ------
    ValueError
        The markers are missing or out of order.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{readme}: no lines {BEGIN} and {END}")
    docs = readme.parent / "docs" / "ladder"
    table = render_ladder(record, docs if docs.is_dir() else readme.parent, readme.parent)
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


def write_readme(readme: Path | str, record: Record) -> bool:
    """Puts the ladder's table between the two markers of a page.

    Returns
    -------
    Whether the file changed.

    Raises
    ------
    ValueError
        The markers are missing or out of order.
    """
    readme = Path(readme)
    text = readme.read_text()
    updated = put_ladder(text, record, readme)
    if updated == text:
        return False
    readme.write_text(updated)
    return True
