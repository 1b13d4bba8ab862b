"""How slow the emulated rungs are: ``python benchmarks/emulation_speed.py --json FILE``.

Times every rung on one head by the plain and by the checked build, and the CPU kernel beside them,
on one thread. Processor time is taken, so that other work on the machine changes little; the least
of a few calls. The table in docs/emulation.md comes from the record: ``scripts/docs --update``.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # read when the library is loaded

import numpy as np

import fastattn
from fastattn import emulation
from fastattn._console import Console, run_command
from fastattn.benchmark._meta import new_record
from fastattn.benchmark._record import dump_record, prepare_record

LENGTHS = (64, 256, 1024)
HEAD_DIM = 64
BUILDS: dict[str, Callable[..., Any]] = {"plain": fastattn.forward, "checked": emulation.run}
LEAST, MOST = 0.05, 2.0  # seconds of calls, where one takes no longer
CALLS = 3


def seconds(call: Callable[[], Any]) -> float:
    """The least processor time of a call."""
    times: list[float] = []
    while sum(times) < LEAST or (len(times) < CALLS and sum(times) < MOST):
        start = time.process_time()
        call()
        times.append(time.process_time() - start)
    return min(times)


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    args = parser.parse_args(argv)
    console = Console()
    rungs = [kernel.name for kernel in fastattn.kernels(emulated=True)]
    if not rungs:
        console.line("this build of fastattn has no emulation of the rungs", "bad")
        return 2
    prepare_record(args.json)
    record = new_record(seed=0)
    with console.progress(len(LENGTHS) * (1 + 2 * len(rungs))) as progress:
        for length in LENGTHS:
            rng = np.random.default_rng(0)
            q, k, v = (rng.standard_normal((1, 1, length, HEAD_DIM), np.float32) for _ in range(3))
            for name, build in [("cpu", "plain"), *((r, b) for b in BUILDS for r in rungs)]:
                progress.step(f"{name}, {length} keys, {build}")
                took = seconds(functools.partial(BUILDS[build], q, k, v, kernel=name))
                record["rows"].append(
                    {
                        "suite": "emulation",
                        "impl": name,
                        "build": build,
                        "direction": "forward",
                        "dtype": "float32",
                        "batch": 1,
                        "heads_q": 1,
                        "heads_kv": 1,
                        "len_q": length,
                        "len_kv": length,
                        "head_dim": HEAD_DIM,
                        "head_dim_v": HEAD_DIM,
                        "causal": False,
                        "window": None,
                        "us": round(took * 1e6, 1),
                    }
                )
                progress.advance()
    args.json.write_text(dump_record(record))
    console.line(f"Record: {args.json}")
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
