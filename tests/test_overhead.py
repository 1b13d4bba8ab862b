"""Host cost of one small call beside torch's own, printed: no verdict hangs on a time.

What is asserted is what makes the cost: a call makes no Python frame but forward's own.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

import fastattn

torch = pytest.importorskip("torch")

ROUNDS = 15


def microseconds(call: Callable[[], Any], wait: Callable[[], Any], number: int = 300) -> float:
    """Median over the rounds of the mean time until a call returns, its work not waited for."""
    times = []
    for _ in range(ROUNDS):
        wait()
        start = time.perf_counter()
        for _ in range(number):
            call()
        times.append((time.perf_counter() - start) / number)
    wait()
    return statistics.median(times) * 1e6


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_host_cost(device: str, capsys: pytest.CaptureFixture[str]) -> None:
    q, k, v = torch.randn((3, 1, 2, 16, 64), device=device)
    out = torch.empty_like(q)
    # No rows: every step of a call but the work itself.
    empty = q[:, :, :0]
    no_wait = lambda: None  # noqa: E731
    wait = torch.cuda.synchronize if device == "cuda" else no_wait
    calls = {
        "forward": lambda: fastattn.forward(q, k, v),
        "forward, out=": lambda: fastattn.forward(q, k, v, out=out),
        "forward, return_lse=True": lambda: fastattn.forward(q, k, v, return_lse=True),
        "forward without rows": lambda: fastattn.forward(empty, k, v),
        "torch SDPA": lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v),
        "torch.add": lambda: torch.add(q, k),
        "torch.empty_like": lambda: torch.empty_like(q),
    }
    for call in calls.values():
        call()
    with capsys.disabled():
        print(f"\nhost cost on {device}:")
        for name, call in calls.items():
            print(f"  {name:26}{microseconds(call, wait):8.2f} us")
    torch.testing.assert_close(out, torch.nn.functional.scaled_dot_product_attention(q, k, v))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_no_python_but_the_public_function(device: str) -> None:
    q = torch.randn((1, 2, 16, 64), device=device)
    fastattn.forward(q, q, q)  # the first call of a type asks its adapter
    frames: list[str] = []

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            frames.append(frame.f_code.co_name)

    sys.setprofile(profile)
    try:
        fastattn.forward(q, q, q)
    finally:
        sys.setprofile(None)
    assert frames == ["forward"]
