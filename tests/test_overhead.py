"""Host cost of one small call beside torch's own, printed: no verdict hangs on a time.

What is asserted is what makes the cost: a call makes no Python frame at all, and yet looks like a
Python function.
"""

from __future__ import annotations

import inspect
import pickle
import pydoc
import re
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
@pytest.mark.parametrize("return_lse", [False, True])
def test_no_python_frame(device: str, return_lse: bool) -> None:
    q = torch.randn((1, 2, 16, 64), device=device)
    fastattn.forward(q, q, q)  # the first call of a type asks its adapter
    frames: list[str] = []

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            frames.append(frame.f_code.co_name)

    sys.setprofile(profile)
    try:
        fastattn.forward(q, q, q, scale=0.5, return_lse=return_lse)
    finally:
        sys.setprofile(None)
    assert frames == []


def test_signature_and_documentation() -> None:
    assert str(inspect.signature(fastattn.forward)) == (
        "(q, k, v, *, kernel='auto', causal=False, window=None, scale=None, return_lse=False, "
        "out=None, stream=None)"
    )
    assert fastattn.forward.__name__ == fastattn.forward.__qualname__ == "forward"
    text = pydoc.plain(pydoc.render_doc(fastattn.forward))
    assert "forward(q, k, v, *, kernel='auto'" in text
    assert "Exact attention" in text
    assert "Raises\n    ------" in text
    assert pickle.loads(pickle.dumps(fastattn.forward)) is fastattn.forward


@pytest.mark.parametrize(
    ("arguments", "keywords", "text"),
    [
        ((), {}, "missing 3 required positional arguments: 'q', 'k', and 'v'"),
        ((1, 2), {}, "missing 1 required positional argument: 'v'"),
        ((1, 2), {"q": 3}, "got multiple values for argument 'q'"),
        ((1, 2, 3, "auto"), {}, "takes 3 positional arguments but 4 were given"),
        ((1, 2, 3), {"dropout": 0.1}, "got an unexpected keyword argument 'dropout'"),
    ],
)
def test_wrong_calls_fail_as_pythons_own(
    arguments: tuple[Any, ...], keywords: dict[str, Any], text: str
) -> None:
    with pytest.raises(TypeError, match=re.escape(f"forward() {text}")):
        fastattn.forward(*arguments, **keywords)


def test_every_argument_by_name() -> None:
    q, k, v = torch.randn((3, 1, 2, 16, 64))
    out = torch.empty_like(q)
    # Names made at run time are not the interned ones.
    options = {"".join(["ker", "nel"]): "cpu"}
    given = fastattn.forward(
        stream=None, out=out, scale=0.5, window=(3, 0), causal=False, v=v, k=k, q=q, **options
    )
    assert given is out
    torch.testing.assert_close(out, fastattn.forward(q, k, v, scale=0.5, window=(3, 0)))


class Subclass(torch.Tensor):
    """Its own idea of both questions that each tensor is asked."""

    requires_grad = property(lambda self: bool(self.answers[0]))

    def is_neg(self) -> bool:
        return bool(self.answers[1])


class Constant(torch.Tensor):
    requires_grad = True


def test_a_subclass_may_answer_by_a_constant() -> None:
    q = torch.randn(1, 2, 16, 64)
    with pytest.raises(TypeError, match="requires grad"):
        fastattn.forward(q.as_subclass(Constant), q, q)


@pytest.mark.parametrize("answers", [(False, False), (True, False), (False, True)])
def test_subclasses_answer_for_themselves(answers: tuple[bool, bool]) -> None:
    q = torch.randn(1, 2, 16, 64)
    x = q.as_subclass(Subclass)
    x.answers = answers
    if any(answers):
        with pytest.raises(TypeError, match="requires grad" if answers[0] else "negative bit"):
            fastattn.forward(x, q, q)
    else:
        torch.testing.assert_close(
            fastattn.forward(x, q, q).as_subclass(torch.Tensor), fastattn.forward(q, q, q)
        )
