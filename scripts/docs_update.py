"""Fills what pages quote and compute: ``scripts/docs --update`` and ``scripts/docs --check``.

A page holds its prose and these blocks, of which only the part between the markers is written::

    <!-- quote: src/cuda/kernels/v3_warp_local.cu "first line" .. "last line" -->
    <!-- /quote -->

    <!-- table: launch v3 -->
    <!-- /table -->

    a sentence with <!--= us("v3") -->5,568<!--/--> in it

A quote runs from the line that contains the first text to the one that contains the last; each must
stand on exactly one line of the file. A table is a function of ``docs_tables``, a value an
expression over the names of ``docs_values``. Where a record that they need is not in the tree, what
the page holds stays, and a check fails. A value may not begin a line: Markdown would take the line
for HTML.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import docs_figures
import docs_tables
from docs_facts import LADDER, RESULTS, ROOT, MissingRecordError, profile_record, steps_record

from fastattn._console import Console
from fastattn.benchmark import _record
from fastattn.profile import _report

sys.path.insert(0, str(ROOT / "benchmarks" / "v4_steps"))

import step_record

QUOTE = re.compile(
    r'(<!-- quote: (?P<file>\S+) "(?P<first>[^"\n]+)"(?: \.\. "(?P<last>[^"\n]+)")? -->\n)'
    r".*?(<!-- /quote -->)",
    re.DOTALL,
)
TABLE = re.compile(r"(<!-- table: (?P<call>[^\n]*?) -->\n).*?(<!-- /table -->)", re.DOTALL)
VALUE = re.compile(r"(<!--= (?P<expression>.*?) -->)(?P<old>.*?)(<!--/-->)", re.DOTALL)
LANGUAGES = {".cu": "cpp", ".cuh": "cpp", ".cpp": "cpp", ".h": "cpp", ".py": "python"}


class StaleError(ValueError):
    """A marker that can't be filled."""


@dataclass
class Report:
    """What an update found."""

    changed: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)  # records

    def lacks(self, error: MissingRecordError) -> None:
        """Notes a record that is missing, once."""
        if str(error) not in self.missing:
            self.missing.append(str(error))


def _line_with(lines: list[str], text: str, file: str) -> int:
    found = [number for number, line in enumerate(lines) if text in line]
    if len(found) != 1:
        raise StaleError(f'{file}: "{text}" stands on {len(found)} lines, not on one')
    return found[0]


def quote(file: str, first: str, last: str | None) -> str:
    """The lines of a source file between two texts, as a fenced block.

    Raises
    ------
    StaleError
        No such file, or a text that is not on exactly one line of it.
    """
    path = ROOT / file
    if not path.is_file():
        raise StaleError(f"{file}: no such file")
    lines = path.read_text().splitlines()
    begin = _line_with(lines, first, file)
    end = begin if last is None else _line_with(lines, last, file)
    if end < begin:
        raise StaleError(f'{file}: "{last}" stands before "{first}"')
    quoted = lines[begin : end + 1]
    # A #pragma stands at the margin whatever it belongs to.
    margins = (len(line) - len(line.lstrip()) for line in quoted if line and line[0] != "#")
    depth = min(margins, default=0)
    code = "\n".join(line if line.startswith("#") else line[depth:] for line in quoted)
    return f'```{LANGUAGES.get(path.suffix, "text")} title="{file}"\n{code}\n```\n'


def render_page(text: str, report: Report, name: str) -> str:
    """A page with every block filled anew."""

    def kept(match: re.Match[str], fill: Callable[[], str]) -> str:
        try:
            return fill()
        except MissingRecordError as error:
            report.lacks(error)
            return match[0]

    def one_quote(match: re.Match[str]) -> str:
        return match[1] + quote(match["file"], match["first"], match["last"]) + "<!-- /quote -->"

    def one_table(match: re.Match[str]) -> str:
        return kept(match, lambda: f"{match[1]}{docs_tables.table(match['call'])}\n<!-- /table -->")

    def one_value(match: re.Match[str]) -> str:
        return kept(match, lambda: f"{match[1]}{docs_tables.value(match['expression'])}<!--/-->")

    if re.search(r"^\s*<!--=", text, re.MULTILINE):
        raise StaleError(f"{name}: a value begins a line, which Markdown takes for HTML")
    try:
        for pattern, fill in ((QUOTE, one_quote), (TABLE, one_table), (VALUE, one_value)):
            text = pattern.sub(fill, text)
    except ValueError as error:
        raise StaleError(f"{name}: {error}") from error
    return text


def pages() -> list[Path]:
    """Every page that may hold blocks."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def newest_ladder_record() -> Path:
    """The record that README shows.

    Raises
    ------
    MissingRecordError
        None is in the tree.
    """
    found = []
    for path in sorted(RESULTS.glob("*.json")):
        record = _record.load_record(path)
        if record["meta"].get("gpu") and any(row["suite"] == "ladder" for row in record["rows"]):
            found.append((str(record["meta"]["date"]), path))
    if not found:
        raise MissingRecordError("no record with a ladder: scripts/gpu_check writes one")
    return max(found)[1]


def _profile_table(text: str, path: Path) -> str:
    before, begin, rest = text.partition(_report.BEGIN)
    _, end, after = rest.partition(_report.END)
    if not begin or not end:
        raise StaleError(f"{path}: no lines {_report.BEGIN} and {_report.END}")
    table = _report.render_markdown(profile_record(), path.parent)
    return f"{before}{begin}\n{table}\n{end}{after}"


def _steps_table(text: str, path: Path) -> str:
    return step_record.put(text, steps_record(), str(path))


def outputs(report: Report) -> dict[Path, str]:
    """Every file that is written, with what it has to hold."""
    wanted: dict[Path, str] = {}
    for path in pages():
        wanted[path] = render_page(path.read_text(), report, path.relative_to(ROOT).as_posix())
    record = _record.load_record(newest_ladder_record())
    for path in (ROOT / "README.md", LADDER / "README.md"):
        wanted[path] = _record.put_ladder(wanted[path], record, path)
    tables = (("docs/profiling.md", _profile_table), ("docs/ladder/v4.md", _steps_table))
    for name, put in tables:
        path = ROOT / name
        try:
            wanted[path] = put(wanted[path], path)
        except MissingRecordError as error:
            report.lacks(error)
    for name, draw in docs_figures.figures().items():
        try:
            wanted[LADDER / "figures" / f"{name}.svg"] = draw()
        except MissingRecordError as error:
            report.lacks(error)
    return wanted


def update(write: bool) -> Report:
    """Compares every written file with what it has to hold, and writes it if asked to."""
    report = Report()
    for path, text in outputs(report).items():
        if path.is_file() and path.read_text() == text:
            continue
        report.changed.append(path.relative_to(ROOT).as_posix())
        if write:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    return report


def main() -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--check", action="store_true", help="write nothing; 1 if anything is old or not filled"
    )
    arguments = parser.parse_args()
    console = Console()
    try:
        report = update(write=not arguments.check)
    except (StaleError, OSError) as error:
        console.line(str(error), "bad")
        return 2
    for name in report.changed:
        console.line(f"{name}: {'out of date' if arguments.check else 'written'}")
    for reason in report.missing:
        console.line(f"not filled: {reason}", "bad" if arguments.check else "dim")
    stale = bool(report.changed or report.missing)
    if not stale:
        console.line("pages and figures are up to date", "good")
    return int(arguments.check and stale)


if __name__ == "__main__":
    sys.exit(main())
