"""Tables and progress for the command line tools.

In a pipe, or with ``NO_COLOR`` set, every line is plain text. On a terminal a progress bar runs
below the table where ``rich`` is installed; without it, a status line.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, TextIO

Style = Literal["plain", "bold", "dim", "good", "bad"]

_ANSI: dict[Style, str] = {"plain": "", "bold": "1", "dim": "2", "good": "32", "bad": "1;31"}


@dataclass(frozen=True)
class Column:
    """A table column: its title, its width in characters and the side its cells lean on."""

    title: str
    width: int
    align: Literal["<", ">"] = ">"


def _join(columns: Sequence[Column], cells: Sequence[str]) -> str:
    padded = (f"{cell:{c.align}{c.width}}" for c, cell in zip(columns, cells, strict=True))
    return "  ".join(padded).rstrip()


def integer_from(least: int) -> Callable[[str], int]:
    """A type for argparse: an integer from ``least`` on."""

    def integer(text: str) -> int:
        with contextlib.suppress(ValueError):
            if (value := int(text)) >= least:
                return value
        raise argparse.ArgumentTypeError(f"an integer from {least}, not {text!r}")

    return integer


def run_command(main: Callable[[], int]) -> int:
    """Runs a command to its exit status; a reader that went away (``| head``) ends it quietly."""
    try:
        status = main()
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes once more when it ends, which then must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + 13  # what a shell reports for SIGPIPE
    return status


class Console:
    """Writes lines, table rows as they come in, and progress, to one stream."""

    def __init__(self, stream: TextIO | None = None) -> None:
        if stream is None:
            # None: the command was started with its output closed, and only its status counts.
            stream = open(os.devnull, "w") if sys.stdout is None else sys.stdout  # noqa: SIM115
        self._stream = stream
        self._terminal = self._stream.isatty() and os.environ.get("TERM") != "dumb"
        self._color = self._terminal and not os.environ.get("NO_COLOR")
        self._progress: Progress | None = None

    @property
    def terminal(self) -> bool:
        """Whether a person watches: a status line can be redrawn in place."""
        return self._terminal

    def line(self, text: str = "", style: Style = "plain") -> None:
        """Writes one line; a progress display stays below it."""
        code = _ANSI[style]
        if self._color and code and text:
            text = f"\x1b[{code}m{text}\x1b[0m"
        if self._progress is not None:
            self._progress.clear()
        print(text, file=self._stream, flush=True)
        if self._progress is not None:
            self._progress.draw()

    def header(self, columns: Sequence[Column]) -> None:
        """Writes the titles of a table's columns, and a rule."""
        self.line(_join(columns, [c.title for c in columns]), "bold")
        self.line(_join(columns, ["-" * c.width for c in columns]), "dim")

    def row(self, columns: Sequence[Column], cells: Sequence[str], style: Style = "plain") -> None:
        """Writes one row of a table."""
        self.line(_join(columns, cells), style)

    def progress(self, total: int) -> Progress:
        """A context manager that shows how many of ``total`` steps are done, on a terminal."""
        return Progress(self, self._stream, total)

    def _attach(self, progress: Progress | None) -> None:
        self._progress = progress


class Progress:
    """Steps done and what is running now. Writes nothing when the stream is no terminal."""

    def __init__(self, console: Console, stream: TextIO, total: int) -> None:
        self._console = console
        self._stream = stream
        self._total = total
        self._done = 0
        self._label = ""
        self._rich: Any = None
        self._task: Any = None

    def __enter__(self) -> Progress:
        if not self._console.terminal:
            return self
        if importlib.util.find_spec("rich") is not None:
            rich_console = importlib.import_module("rich.console").Console(file=self._stream)
            rich_progress = importlib.import_module("rich.progress")
            self._rich = rich_progress.Progress(
                rich_progress.SpinnerColumn(),
                rich_progress.BarColumn(bar_width=24),
                rich_progress.MofNCompleteColumn(),
                rich_progress.TextColumn("{task.description}", markup=False),
                console=rich_console,
                transient=True,
                # Lines go straight to the stream between two draws, so nothing may draw by itself.
                auto_refresh=False,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._task = self._rich.add_task("", total=self._total)
            self._rich.start()
        self._console._attach(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.clear()
        self._console._attach(None)

    def step(self, label: str) -> None:
        """Names what starts now."""
        self._label = label
        self.draw()

    def advance(self) -> None:
        """One step is done."""
        self._done += 1
        self.draw()

    def draw(self) -> None:
        """Draws the current state below the last line written."""
        if not self._console.terminal:
            return
        if self._rich is not None:
            self._rich.start()
            self._rich.update(self._task, completed=self._done, description=self._label)
            self._rich.refresh()
        else:
            text = f"[{self._done}/{self._total}] {self._label}"
            print(f"\r\x1b[K{text}", end="", file=self._stream, flush=True)

    def clear(self) -> None:
        """Takes the display away, so that a line can be written in its place."""
        if not self._console.terminal:
            return
        if self._rich is not None:
            self._rich.stop()
        else:
            print("\r\x1b[K", end="", file=self._stream, flush=True)
