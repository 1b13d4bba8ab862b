"""Calls in a forked child, where the OpenMP threads that torch started in the parent are gone."""

from __future__ import annotations

import subprocess
import sys

import pytest

_CODE = """
import os, signal
import numpy as np
import torch
{before}
torch.set_num_threads(2)
torch.softmax(torch.randn(1500, 1500), -1)
child = os.fork()
if child == 0:
    signal.alarm(30)  # a call that waits for ever is ended
    import fastattn
    q = np.ones((1, 8, 512, 64), np.float32)
    os._exit(0 if (fastattn.forward(q, q, q) == 1).all() else 1)
_, status = os.waitpid(child, 0)
assert status == 0, status
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a late import is noticed on Linux only")
@pytest.mark.parametrize("before", ["import fastattn", ""], ids=["loaded_before", "loaded_after"])
def test_a_fork_after_torch_started_its_threads(before: str) -> None:
    pytest.importorskip("torch")
    done = subprocess.run(
        [sys.executable, "-c", _CODE.format(before=before)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
