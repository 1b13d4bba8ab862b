"""What a measurement was taken on: the machine, the sources, the commit, the clock."""

from __future__ import annotations

import hashlib
import os
import platform
import statistics
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType


def source_hash(root: Path | str) -> str:
    """SHA-256 over ``include/`` and ``src/``: names the sources that a record was measured on.

    Each file adds its path relative to ``root`` (with ``/``), a zero byte, its length in bytes as
    decimal digits, a zero byte and its contents, in the order of the paths. Hidden files and editor
    backups don't count.

    Parameters
    ----------
    root
        The top folder of a source tree.

    Returns
    -------
    64 hexadecimal digits.

    Raises
    ------
    FileNotFoundError
        ``root`` has no ``include/`` or no ``src/``.
    """
    root = Path(root)
    files: list[tuple[str, Path]] = []
    for folder in ("include", "src"):
        if not (root / folder).is_dir():
            raise FileNotFoundError(f"{root} is no fastattn source tree: it has no {folder}/")
        for path in (root / folder).rglob("*"):
            name = path.relative_to(root).as_posix()
            hidden = any(part.startswith(".") for part in Path(name).parts)
            if path.is_file() and not hidden and not name.endswith(("~", ".pyc")):
                files.append((name, path))
    digest = hashlib.sha256()
    for name, path in sorted(files):
        contents = path.read_bytes()
        digest.update(f"{name}\0{len(contents)}\0".encode())
        digest.update(contents)
    return digest.hexdigest()


def source_root(start: Path | None = None) -> Path | None:
    """The source tree that holds ``start`` (the working directory by default), if any."""
    here = (Path.cwd() if start is None else start).resolve()
    for folder in (here, *here.parents):
        if (folder / "include" / "fastattn" / "fastattn.h").is_file() and (folder / "src").is_dir():
            return folder
    return None


def _output(*command: str, cwd: Path | None = None, timeout: float = 30) -> str | None:
    try:
        done = subprocess.run(
            command, cwd=cwd, capture_output=True, text=True, timeout=timeout, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def git_commit(root: Path) -> str | None:
    """HEAD of the repository at ``root``, with ``-dirty`` where tracked files differ from it."""
    head = _output("git", "rev-parse", "HEAD", cwd=root)
    if not head:
        return None
    changed = _output("git", "status", "--porcelain", "--untracked-files=no", cwd=root)
    return head if changed == "" else f"{head}-dirty"


def _smi_command(fields: str) -> list[str]:
    # nvidia-smi counts every GPU of the machine; CUDA_VISIBLE_DEVICES says which one is device 0.
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip() or "0"
    return ["nvidia-smi", f"--id={gpu}", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]


def nvidia_smi(field: str) -> str | None:
    """One field of ``nvidia-smi --query-gpu`` for CUDA device 0; None where it can't be had."""
    value = _output(*_smi_command(field))
    return value.splitlines()[0].strip() if value else None


def nvidia_smi_mhz(field: str) -> int | None:
    """A clock field of ``nvidia-smi --query-gpu``, in MHz."""
    value = nvidia_smi(field)
    return int(value) if value is not None and value.isdigit() else None


def sm_clock_under_load(load: Callable[[], None], warm_calls: int = 3) -> int | None:
    """The SM clock in MHz while the GPU works. Clocks are read, never set.

    Parameters
    ----------
    load
        Runs some work on the GPU and waits for it; called until the clock is read.
    warm_calls
        Calls before the reading starts, so that the clock has risen.
    """
    for _ in range(warm_calls):
        load()
    try:
        query = subprocess.Popen(
            _smi_command("clocks.sm"), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
    except OSError:
        return None
    while query.poll() is None:
        load()
    value = query.communicate()[0].strip()
    return int(value) if value.isdigit() else None


class ClockLog:
    """Reads the SM clock and the power again and again while a ``with`` block runs."""

    def __init__(self, every: float = 0.5) -> None:
        self._every = every  # seconds
        self._samples: list[tuple[float, float, float]] = []  # time, MHz, W
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)

    def __enter__(self) -> ClockLog:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        self._thread.join()

    def _read(self) -> None:
        # One process a reading: in a pipe, nvidia-smi's own loop may keep its lines to itself.
        while not self._over.is_set():
            answer = _output(*_smi_command("clocks.sm,power.draw"))
            if answer is None:
                return
            try:
                mhz, watts = map(float, answer.split(","))
                self._samples.append((time.monotonic(), mhz, watts))
            except ValueError:  # "[N/A]"
                pass
            self._over.wait(self._every)

    def since(self, start: float) -> dict[str, float] | None:
        """What was read since a time of ``time.monotonic``; None where nothing was.

        Median, lowest and highest clock in MHz, and the highest power in W.
        """
        samples = [sample for sample in self._samples if sample[0] >= start]
        if not samples:
            return None
        clocks = [mhz for _, mhz, _ in samples]
        return {
            "sm_clock_mhz": statistics.median(clocks),
            "sm_clock_mhz_low": min(clocks),
            "sm_clock_mhz_high": max(clocks),
            "watts_high": max(watts for _, _, watts in samples),
        }


def fp32_peak_tflops(compute_capability: int, multiprocessors: int, clock_mhz: int) -> float:
    """FP32 peak by arithmetic: multiprocessors x lanes x 2 FLOP x clock.

    Parameters
    ----------
    compute_capability
        90 is 9.0.
    multiprocessors
        SMs of the GPU.
    clock_mhz
        The highest SM clock.
    """
    # FP32 lanes of one SM: "Arithmetic Instructions" in the CUDA C++ programming guide.
    lanes = 64 if compute_capability in (70, 72, 75, 80) else 128
    return multiprocessors * lanes * 2 * clock_mhz * 1e-6


def cpu_model() -> str:
    """The processor's name, as the operating system gives it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
