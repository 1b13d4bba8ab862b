"""``python -m fastattn``: the self-check."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fastattn
from fastattn import __main__ as command
from fastattn import benchmark
from fastattn.benchmark._arrays import Problem
from fastattn.benchmark._meta import gpus
from fastattn.benchmark._suite import Plan


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same checks on a size that takes no time."""
    problems = {device: Problem("float32", 1, 4, 4, 130, 130, 64, 64) for device in ("cpu", "cuda")}
    plans = dict.fromkeys(("cpu", "cuda"), Plan(0, 3, 0.1))
    monkeypatch.setattr(command, "_FULL", problems)
    monkeypatch.setattr(command, "_PLANS", plans)


def test_every_kernel_is_checked_as_it_declares(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "check.json"
    status = command.main(["--json", str(file)])
    text = capsys.readouterr().out
    assert status == 0, text
    assert "checks passed" in text
    assert fastattn.__version__ in text  # the configuration comes first
    rows = benchmark.load_record(file)["rows"]
    (kernel,) = (k for k in fastattn.kernels() if k.backend == "cpu")
    mine = [row for row in rows if row["impl"] == kernel.name]
    assert {row["dtype"] for row in mine} == set(kernel.dtypes)
    assert {row["causal"] for row in mine} == {False, True}
    assert any(row["len_q"] != row["len_kv"] for row in mine)
    assert any(row["heads_q"] != row["heads_kv"] for row in mine)
    for row in rows:
        assert row["suite"] == "check"
        assert row["right"] is True
        assert row["error"] <= row["allowed"]


def test_one_kernel_and_quick(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--kernel", "cpu", "--quick"]) == 0
    text = capsys.readouterr().out
    assert "All 2 checks passed" in text


@pytest.mark.skipif(not fastattn.kernels(emulated=True), reason="this build has no emulation")
def test_a_kernel_without_a_gpu(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rungs = [k for k in fastattn.kernels(emulated=True) if k.name == "v3"]
    on_gpu = [dataclasses.replace(k, backend="cuda", min_compute_capability=75) for k in rungs]
    monkeypatch.setattr(
        command.fastattn, "kernels", lambda emulated=False: rungs if emulated else on_gpu
    )
    monkeypatch.setattr(command, "gpus", list)
    assert command.main(["--kernel", "v3"]) == 1
    text = capsys.readouterr().out
    assert "v3: not run, no GPU is seen" in text
    assert "python -m fastattn.explain v3 runs v3 on the CPU" in text


def test_unknown_kernel(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--kernel", "nonsense"]) == 2
    assert "known: cpu" in capsys.readouterr().out
    if all(kernel.backend == "cpu" for kernel in fastattn.kernels()):
        assert command.main(["--kernel", "v0"]) == 2
        assert "'v0' is a CUDA kernel" in capsys.readouterr().out


def corrupt(result: Any, kwargs: dict[str, Any], what: str) -> Any:
    if what == "out":
        kwargs["out"][0, 0, 0, 0] += np.asarray(1, kwargs["out"].dtype)
    elif what == "nan":
        kwargs["out"][0, 0, 0, 0] = np.nan
    elif what == "lse" and kwargs.get("return_lse"):
        return result[0], result[1] * np.float32(1.00001)
    elif what == "raise":
        raise RuntimeError("CUDA failed")
    return result


@pytest.mark.parametrize(
    ("what", "message"),
    [("out", "WRONG"), ("nan", "NaN"), ("lse", "lse: error"), ("raise", "CUDA failed")],
)
def test_anything_wrong_fails(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, what: str, message: str
) -> None:
    right = fastattn.forward

    def wrong(q: Any, k: Any, v: Any, **kwargs: Any) -> Any:
        return corrupt(right(q, k, v, **kwargs), kwargs, what)

    monkeypatch.setattr(fastattn, "forward", wrong)
    assert command.main(["--kernel", "cpu", "--quick"]) == 1
    text = capsys.readouterr().out
    assert message in text
    assert "2 of 2 checks FAILED" in text


def test_the_command_needs_numpy_alone() -> None:
    """As a newcomer runs it, with no framework in sight and its output in a pipe."""
    code = (
        "import runpy, sys\n"
        "for name in ('torch', 'cupy', 'jax', 'ml_dtypes', 'rich'): sys.modules[name] = None\n"
        "sys.argv = ['fastattn', '--quick', '--kernel', 'cpu']\n"
        "runpy.run_module('fastattn', run_name='__main__')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=os.environ | {"PYTHONIOENCODING": "utf-8"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "All 2 checks passed" in done.stdout
    assert "\x1b" not in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize("module", ["fastattn", "fastattn.benchmark"])
@pytest.mark.parametrize("redirect", ["| head -1", ">&-"])
def test_nobody_reads_the_output(module: str, redirect: str) -> None:
    """The reader of a pipe leaves early, or there is no output at all."""
    if os.name != "posix":
        pytest.skip("needs a POSIX shell")
    options = "--quick --kernel cpu" if module == "fastattn" else "--list"
    done = subprocess.run(
        ["sh", "-c", f'"$0" -m {module} {options} {redirect}', sys.executable],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0
    assert done.stderr == ""


def test_a_record_that_cannot_be_written_stops_before_the_work(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert command.main(["--json", str(tmp_path)]) == 2
    text = capsys.readouterr().out
    assert text.startswith("--json: ")
    assert len(text.splitlines()) == 1


@pytest.mark.gpu
def test_every_cuda_kernel_is_checked(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "check.json"
    assert command.main(["--json", str(file)]) == 0, capsys.readouterr().out
    checked = {row["impl"] for row in benchmark.load_record(file)["rows"]}
    assert checked >= {k.name for k in fastattn.kernels() if k.backend == "cuda"} - not_here()


def not_here() -> set[str]:
    capability = gpus()[0]["compute_capability"]
    return {k.name for k in fastattn.kernels() if k.min_compute_capability > capability}
