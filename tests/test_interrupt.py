"""Ctrl-C ends an emulated call between two of its blocks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

import fastattn

pytestmark = pytest.mark.skipif(
    not fastattn.kernels(emulated=True), reason="this build has no emulation"
)

# Hours of work, in blocks of a second or less.
PROGRAM = """
import signal, sys, threading
import numpy as np, fastattn
from fastattn import emulation

signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
x = np.ones((16, 256, 512, 64), np.float32)
small = np.ones((1, 1, 64, 64), np.float32)
threading.Timer(0.5, lambda: print("under way", flush=True)).start()
try:
    {call}
except KeyboardInterrupt:
    # The next calls work, also those that nobody interrupts.
    out = fastattn.forward(small, small, small, kernel="v2")
    thread = threading.Thread(target=fastattn.forward, args=(small,) * 3, kwargs={{"kernel": "v3"}})
    thread.start()
    thread.join()
    found = emulation.run(small, small, small, kernel="v2").findings
    print("interrupted", bool((out == 1).all()), found)
"""


@pytest.mark.parametrize(
    "call", ["fastattn.forward(x, x, x, kernel='v2')", "emulation.run(x, x, x, kernel='v2')"]
)
@pytest.mark.parametrize("threads", ["1", "2"])
def test_ctrl_c(call: str, threads: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(call=call)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": threads},
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "under way\n"
        process.send_signal(signal.SIGINT)
        text, _ = process.communicate(timeout=120)
    finally:
        process.kill()
    assert (process.returncode, text) == (0, "interrupted True ()\n")
