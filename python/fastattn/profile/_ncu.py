"""Nsight Compute: where it is, how it is run, what it says when it can't, and its numbers.

The numbers are read from the "raw" page of a report as CSV: a row of metric names, a row of units,
and a row for each profiled launch.
"""

from __future__ import annotations

import csv
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fastattn.profile._metrics import METRICS
from fastattn.profile._rungs import MAIN_KERNELS, Shape

# What ncu-ui shows of a report. The table's own metrics are asked for by name as well.
SECTIONS = (
    *("SpeedOfLight", "SpeedOfLight_RooflineChart", "ComputeWorkloadAnalysis"),
    *("MemoryWorkloadAnalysis", "MemoryWorkloadAnalysis_Tables", "SchedulerStats"),
    *("WarpStateStats", "InstructionStats", "LaunchStats", "Occupancy"),
)
WARM_UP = 3  # launches before the profiled one


class NcuError(Exception):
    """Nothing can be profiled; the message is the sentence for the user."""


class RungError(Exception):
    """One rung could not be profiled; others may be."""


class SeveralKernelsError(Exception):
    """A call of the rung launched more than one kernel."""


@dataclass(frozen=True)
class Launch:
    """One profiled launch: the function's name, and metrics in seconds, bytes, Hz and counts."""

    function: str
    metrics: dict[str, float]


def _candidates() -> Iterator[Path]:
    found = shutil.which("ncu")
    if found:
        yield Path(found)
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(variable):
            yield Path(os.environ[variable]) / "bin" / "ncu"
    yield Path("/usr/local/cuda/bin/ncu")
    # NVIDIA's own installer; the newest version first.
    yield from sorted(Path("/opt/nvidia/nsight-compute").glob("*/ncu"), reverse=True)


def find() -> str:
    """The ncu executable: $NCU, then PATH, $CUDA_HOME, $CUDA_PATH, and where NVIDIA installs it.

    Raises
    ------
    NcuError
        There is none.
    """
    chosen = os.environ.get("NCU")
    if chosen:
        found = shutil.which(chosen)
        if found is None:
            raise NcuError(f"$NCU is {chosen}, which is no program that can be run.")
        return found
    for path in _candidates():
        if path.is_file() and os.access(path, os.X_OK):
            return str(path)
    raise NcuError(
        "Nsight Compute (ncu) was not found: not in PATH, nor under $CUDA_HOME, $CUDA_PATH, "
        "/usr/local/cuda or /opt/nvidia/nsight-compute. It is part of the full CUDA toolkit (the "
        "package nsight-compute); where it is elsewhere, say so with NCU=/path/to/ncu."
    )


def version(ncu: str) -> str | None:
    """The version of ncu, "2025.3.1.0"; None where it does not say."""
    try:
        done = subprocess.run([ncu, "--version"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return None
    match = re.search(r"Version (\S+)", done.stdout)
    return match.group(1) if match else None


def command(ncu: str, rung: str, shape: Shape, report: Path, lock_clocks: bool) -> list[str]:
    """The command line that profiles one warm launch of a rung and writes ``report``."""
    main = MAIN_KERNELS.get(rung)
    return [
        ncu,
        *("--target-processes", "all"),
        *("--clock-control", "base" if lock_clocks else "none"),
        # Without arguments of templates. Only launches of this name are counted below.
        *(() if main is None else ("--kernel-name-base", "function", "--kernel-name", main)),
        # One launch is what there is to profile after the warm-up; a second one gives away a rung
        # that launches several kernels a call.
        *("--launch-skip", str(WARM_UP), "--launch-count", "2"),
        *(part for section in SECTIONS for part in ("--section", section)),
        *("--metrics", ",".join(METRICS)),
        *("--force-overwrite", "--export", str(report)),
        *(sys.executable, "-m", "fastattn.profile._target", rung, "--calls", str(WARM_UP + 1)),
        *("--shape", *map(str, (shape.batch, shape.heads, shape.length, shape.head_dim))),
        *("--dtype", shape.dtype),
    ]


def _run(line: Sequence[str]) -> subprocess.CompletedProcess[str]:
    try:
        # The C locale: numbers with a decimal point.
        return subprocess.run(
            line,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=os.environ | {"LC_ALL": "C"},
        )
    except OSError as error:
        raise NcuError(f"{line[0]} could not be started: {error}") from error


def _explain(output: str) -> str | None:
    """The sentence for a failure that is the machine's and not a rung's; None for another."""
    if "ERR_NVGPUCTRPERM" in output:
        arguments = shlex.join(sys.argv[1:])
        return (
            "This user may not read the GPU's performance counters (ERR_NVGPUCTRPERM). Either run "
            f"as root: sudo -E {shlex.quote(sys.executable)} -m fastattn.profile {arguments}; or "
            "have the administrator open them for all users: the line 'options nvidia "
            "NVreg_RestrictProfilingToAdminUsers=0' in a file of /etc/modprobe.d, then a reboot. "
            "In a container the host decides, and docker run needs --cap-add=SYS_ADMIN."
        )
    if "driver resource was unavailable" in output:
        return (
            "Another program holds the GPU's performance counters (a monitoring service such as "
            "DCGM, or another profiler): pause it (dcgmi profstats --pause) and try again."
        )
    if "LibraryNotLoaded" in output or "not compatible with Nsight Compute" in output:
        return (
            "ncu can't reach the driver's profiling interface on this machine: the driver is too "
            "old for this ncu, or a sandbox or virtual machine hides it. Its words: "
            + _last_words(output)
        )
    return None


def _last_words(output: str, lines: int = 4) -> str:
    said = [line.strip() for line in output.splitlines() if line.strip()]
    # Errors first: ncu's progress and its hints come after them.
    errors = [line for line in said if line.startswith("==ERROR==")]
    return " / ".join((errors or said)[-lines:]) or "(nothing was printed)"


def report_path(rung: str, shape: Shape, folder: Path) -> Path:
    """``RUNG.ncu-rep``, or ``RUNG-DTYPE.ncu-rep`` where that is not float32."""
    dtype = "" if shape.dtype == "float32" else f"-{shape.dtype}"
    return folder / f"{rung}{dtype}.ncu-rep"


def profile(ncu: str, rung: str, shape: Shape, folder: Path, lock_clocks: bool) -> Launch:
    """Profiles one rung; leaves its report in ``folder``, and the numbers beside it as CSV.

    Raises
    ------
    NcuError
        ncu can't profile anything here.
    RungError
        This rung's run failed.
    SeveralKernelsError
        A call of the rung launches several kernels.
    """
    report = report_path(rung, shape, folder)
    report.unlink(missing_ok=True)
    done = _run(command(ncu, rung, shape, report, lock_clocks))
    reason = _explain(done.stdout)
    if reason is not None:
        raise NcuError(reason)
    if done.returncode != 0 or not report.is_file():
        raise RungError(f"ncu ended with status {done.returncode}: {_last_words(done.stdout)}")
    raw = _run(
        [
            *(ncu, "--import", str(report), "--page", "raw", "--csv"),
            *("--print-units", "base", "--print-kernel-base", "function"),
        ]
    )
    if raw.returncode != 0:
        raise RungError(f"ncu can't read its own report {report}: {_last_words(raw.stdout)}")
    report.with_suffix(".csv").write_text(raw.stdout)
    launches = parse_raw(raw.stdout)
    if not launches:
        raise RungError("ncu saw no kernel launch")
    if len(launches) > 1:
        functions = ", ".join(dict.fromkeys(launch.function for launch in launches))
        raise SeveralKernelsError(
            f"{rung} launches several CUDA kernels in one call (ncu saw {functions}), so it has no "
            "one occupancy, register count or point on the roofline"
        )
    return launches[0]


_UNIT = re.compile(r"(?P<prefix>[numkKMGT]?)(?:second|s|byte|hz|Hz|cycle|inst)")
_PREFIXES = {"": 1.0, "n": 1e-9, "u": 1e-6, "m": 1e-3}
_PREFIXES |= {"k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


def _factor(unit: str) -> float:
    """From a metric's unit to the plain one: "Gbyte/second" to byte/second, "us" to seconds."""
    factor = 1.0
    for sign, part in zip((1, -1), unit.split("/"), strict=False):
        match = _UNIT.fullmatch(part)
        if match:
            factor *= _PREFIXES[match["prefix"]] ** sign
    return factor


def _number(cell: str) -> float | None:
    """A cell as a number; None for "n/a", "(!) nan" and text."""
    try:
        value = float(cell.replace(",", "").removeprefix("(!)").strip())
    except ValueError:
        return None
    return value if value == value else None


def parse_raw(text: str) -> list[Launch]:
    """The launches of a report's raw page (``ncu --page raw --csv``).

    Metrics that ncu could not collect are left out.
    """
    lines = text.splitlines()
    # ncu may print messages first.
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        return []
    rows = list(csv.reader(lines[start:]))
    names, units = rows[0], rows[1] if len(rows) > 1 else []
    launches = []
    for row in rows[2:]:
        if len(row) != len(names):
            continue  # a message below the table
        metrics = {}
        for name, unit, cell in zip(names, units, row, strict=True):
            value = _number(cell) if "__" in name else None
            if value is not None:
                metrics[name] = value * _factor(unit)
        launches.append(Launch(row[names.index("Kernel Name")], metrics))
    return launches
