"""``python -m fastattn.explain``: its formulas as text, its tables, its exit statuses."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastattn import emulation, testing
from fastattn.explain import RUNGS, Shape
from fastattn.explain import __main__ as command
from fastattn.explain._formulas import acting, dtypes, evaluate

COUNTS = [field.name for field in dataclasses.fields(emulation.Counts)]
SHAPE = Shape(batch=1, heads=1, len_q=256, len_kv=256, head_dim=64)

Fake = Callable[..., None]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    """An emulation that takes no time: right results, and counts as the formulas have them."""

    def install(
        findings: list[dict[str, Any]] | None = None, ends: bool = False, **counts: int
    ) -> None:
        def emulate(
            kernel: str,
            q: Any,
            k: Any,
            v: Any,
            out: Any,
            lse: Any,
            scale: float,
            seed: int,
            causal: bool,
            window: tuple[int, int] | None,
            is_bfloat16: bool,
        ) -> dict[str, Any]:
            if not ends:
                out[...], lse[...] = testing.reference(q, k, v, scale=scale)
            shape = Shape(*q.shape[:3], k.shape[2], q.shape[3], q.dtype.name)
            rung = acting(kernel, shape)
            predicted = {name: rung.value(name, shape) or 0 for name in COUNTS}
            line: dict[str, Any] = {
                "file": "src/cuda/kernels/v3_warp_local.cu",
                "line": 3,
                "space": "shared",
            }
            line |= {"access": "read", "requests": 2, "transactions": 64}
            line |= {"conflicts": 62, "bytes": 256}
            return {
                "counts": predicted | counts,
                "launches": [
                    {"kernel": "a_kernel", "blocks": 4, "threads": 256, "dynamic_shared_bytes": 512}
                ],
                "findings": findings or [],
                "lines": [line],
            }

        monkeypatch.setattr(emulation._core, "emulate", emulate, raising=False)

    return install


RACE = {
    "kind": "race",
    "message": "reads what thread 3 wrote",
    "file": "a/broken.cu",
    "line": 12,
    "block": 1,
    "thread": 40,
}


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    status = command.main([*arguments])
    captured = capsys.readouterr()
    assert captured.err == ""
    return status, captured.out


# ---- formulas ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RUNGS)
def test_formulas_are_of_counts_that_exist(name: str) -> None:
    assert set(RUNGS[name].formulas) <= set(COUNTS)
    for count, formula in RUNGS[name].formulas.items():
        assert formula.why, count
        assert len(formula.text) <= 120, count


def test_the_formulas_of_the_ladder_at_one_shape() -> None:
    """The figures that the pages quote, worked out by hand."""
    q = k = 256 * 64 * 4  # bytes of one tensor
    read = {name: rung.value("global_read_bytes", SHAPE) for name, rung in RUNGS.items()}
    # Each score reads two rows of 64; P is read by 64 columns and V by 256 rows.
    assert read["v0"] == 4 * 256 * 256 * (2 * 64 + 3 + 2 * 64)
    # 8 key tiles, each with all of Q, O, m and l.
    assert read["v1"] == 2 * k + 8 * (2 * q + 2 * 256 * 4) + 2 * 256 * 4
    # 4 query tiles, each with all of K and V.
    assert read["v2"] == read["v3"] == read["v4"] == q + 4 * 2 * k
    conflicts = {name: rung.value("shared_read_conflicts", SHAPE) for name, rung in RUNGS.items()}
    pairs = 4 * 8
    assert conflicts["v2"] == pairs * 64 * 64 * 31  # each row reads each column of K
    assert conflicts["v3"] == pairs * 8 * 64 * 31  # each warp does
    assert conflicts["v4"] == 0
    assert SHAPE.flop == 4 * 256 * 256 * 64


def test_the_formulas_of_v6_at_one_shape() -> None:
    """Likewise, for either form."""
    half, split = (
        acting("v6", dataclasses.replace(SHAPE, dtype=x)) for x in ("float16", "float32")
    )
    tensor = 2 * 256 * 64  # bytes in float16
    assert half.value("global_read_bytes", SHAPE) == tensor * (1 + 2 * 256 // half.tiles["Br"])
    # The pre-pass reads K and V. The parts of both have as many bytes as they, and a tile of them
    # has a head; each tile of queries reads them.
    parts = 2 * (2 * tensor) + 16 * 256 // split.tiles["Bc"]
    assert split.value("global_read_bytes", SHAPE) == (
        3 * (2 * tensor) + 256 // split.tiles["Br"] * parts
    )
    products = 2 * (256 * 256 * 64) // (16 * 8 * 16)
    assert half.value("mmas", SHAPE) == products
    assert split.value("mmas", SHAPE) == 3 * products
    for rung in (half, split):
        assert rung.value("exponentials", SHAPE) == 256 * 256
        assert rung.value("shared_read_conflicts", SHAPE) == 0


@pytest.mark.parametrize("dtype", dtypes("v6"))
@pytest.mark.parametrize("head_dim", [1, 64, 65, 128, 129, 256])
def test_v6_s_tiles_are_those_of_the_head_dim(head_dim: int, dtype: str) -> None:
    rung = acting("v6", dataclasses.replace(SHAPE, head_dim=head_dim, dtype=dtype))
    assert rung.tiles["P"] == next(p for p in (64, 128, 256) if head_dim <= p)
    assert set(rung.formulas) <= set(COUNTS)
    for count, formula in rung.formulas.items():
        assert formula.why, count
        assert len(formula.text) <= 120, count


def test_a_formula_says_where_it_holds() -> None:
    ragged = dataclasses.replace(SHAPE, head_dim=20)
    assert RUNGS["v2"].value("global_read_sectors", ragged) is None
    assert RUNGS["v2"].value("global_read_bytes", ragged) is not None


def test_divisions_are_exact() -> None:
    assert evaluate("ceil(M/Br)", {"M": 3 * 2**60, "Br": 3}) == 2**60
    assert evaluate("B*D/32", {"B": 1, "D": 40}) * 4 == 5


def test_other_head_dims_are_handed_on() -> None:
    assert acting("v4", SHAPE).name == "v4"
    assert acting("v4", dataclasses.replace(SHAPE, head_dim=32)).name == "v2"
    assert acting("v1", dataclasses.replace(SHAPE, head_dim=32)).name == "v1"


# ---- the command ---------------------------------------------------------------------------------


def test_one_rung(capsys: pytest.CaptureFixture[str], fake: Fake) -> None:
    fake()
    status, text = run(capsys, "v3", "--seq-len", "256")
    assert status == 0
    (line,) = (line for line in text.splitlines() if line.startswith("global bytes read"))
    assert line.split() == [
        *("global", "bytes", "read", "589,824", "589,824", "agree"),
        *RUNGS["v3"].formulas["global_read_bytes"].text.split(),
    ]
    assert "FLOP = 4*B*H*M*N*D" in text
    assert f"{SHAPE.flop:,}" in text
    bytes_asked = 589824 + 4 * 256 * 65
    assert f"{SHAPE.flop / bytes_asked:.2f}" in text
    assert "a_kernel: 4 blocks of 256 threads, 512 bytes of shared memory" in text
    assert "DIFFER" not in text
    zero = "conflicts of shared writes, barriers of a warp, votes of a warp, "
    zero += "tensor-core products of a warp, atomics."
    assert f"Zero: {zero}" in " ".join(text.split())
    assert "fastattn.profile" in text  # what DRAM moves is measured, not counted


def test_a_count_that_differs_fails(capsys: pytest.CaptureFixture[str], fake: Fake) -> None:
    fake(barriers=7)
    status, text = run(capsys, "v3")
    assert status == 1
    (line,) = (line for line in text.splitlines() if "DIFFER" in line)
    assert line.split()[3:7] == ["block", "7", "128", "DIFFER"]
    status, text = run(capsys, "all")
    assert status == 1
    assert text.count("DIFFER") == len(RUNGS)
    status, text = run(capsys, "v6", "--dtype", "float16")
    assert status == 1
    assert text.count("DIFFER") == 1


def test_a_count_without_a_formula_for_the_shape_does_not_fail(
    capsys: pytest.CaptureFixture[str], fake: Fake
) -> None:
    fake(global_read_sectors=12345)
    status, text = run(capsys, "v2", "--head-dim", "20")
    assert status == 0
    assert "where D % 8 == 0" in text


def test_all_rungs_side_by_side(capsys: pytest.CaptureFixture[str], fake: Fake) -> None:
    fake()
    status, text = run(capsys, "all", "--seq-len", "64")
    assert status == 0
    (header,) = (line for line in text.splitlines() if line.split() == list(RUNGS))
    assert header
    (line,) = (line for line in text.splitlines() if line.startswith("global bytes read"))
    shape = Shape(1, 1, 64, 64, 64)
    expected = [f"{rung.value('global_read_bytes', shape):,}" for rung in RUNGS.values()]
    assert line.split()[3:] == expected
    held = sum(acting(n, shape).holds(count, shape) for n in RUNGS for count in COUNTS)
    assert held > len(COUNTS) * (len(RUNGS) - 1)
    assert f"All {held} counts" in text


def test_v0_is_left_out_where_lengths_differ(
    capsys: pytest.CaptureFixture[str], fake: Fake
) -> None:
    fake()
    status, text = run(capsys, "all", "--seq-len", "64", "--len-kv", "32")
    assert status == 0
    assert "v0 takes as many keys as queries" in text
    assert any(line.split() == [*RUNGS][1:] for line in text.splitlines())


@pytest.mark.parametrize("value", ["abc", "0", "1.5"])
@pytest.mark.parametrize("option", ["--seq-len", "--batch-size"])
def test_numbers_that_are_none(capsys: pytest.CaptureFixture[str], option: str, value: str) -> None:
    with pytest.raises(SystemExit):
        command.main(["v3", option, value])
    assert f"argument {option}: an integer from 1, not '{value}'" in capsys.readouterr().err


def test_dtypes(capsys: pytest.CaptureFixture[str], fake: Fake, tmp_path: Path) -> None:
    fake()
    file = tmp_path / "explain.json"
    half = ("--dtype", "float16", "--seq-len", "128")
    status, text = run(capsys, "v6", *half, "--json", str(file))
    assert status == 0
    assert "N=128 D=64, float16" in text
    assert "DIFFER" not in text
    record = json.loads(file.read_text())
    assert record["shape"]["dtype"] == "float16"
    shape = Shape(1, 1, 128, 128, 64, "float16")
    (rung,) = record["rungs"]
    assert rung["tiles"] == acting("v6", shape).tiles
    assert rung["counts"]["mmas"]["formula"] == acting("v6", shape).value("mmas", shape)
    # Results of float16 have its rounding, and inputs too.
    assert 1e-5 < rung["error"] < 1e-3
    status, text = run(capsys, "v5", *half)
    assert status == 2
    assert "v5 takes float32 only" in text
    status, text = run(capsys, "all", *half, "--len-kv", "64")
    assert status == 0
    assert "Left out, since they don't take float16: v0, v1, v2, v3, v4, v5." in text
    assert any(line.split() == ["v6"] for line in text.splitlines())


def test_a_redirect_is_told(capsys: pytest.CaptureFixture[str], fake: Fake) -> None:
    fake()
    status, text = run(capsys, "v4", "--seq-len", "64", "--head-dim", "32")
    assert status == 0
    assert "v4 hands head dim 32 to v2." in text
    assert "Br=64 Bc=32 W=4" in text


def test_lines(
    capsys: pytest.CaptureFixture[str], fake: Fake, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake()
    source = tmp_path / "src/cuda/kernels/v3_warp_local.cu"
    source.parent.mkdir(parents=True)
    source.write_text("one\ntwo\n  float k = sK[lane];\n")
    monkeypatch.setattr(command, "source_root", lambda: tmp_path)
    status, text = run(capsys, "v3", "--lines")
    assert status == 0
    (line,) = (line for line in text.splitlines() if line.startswith("v3_warp_local.cu:3"))
    assert line.split()[1:7] == ["shared", "read", "2", "64", "62", "32.0"]
    assert line.endswith("float k = sK[lane];")
    # Shorter than it was when it was compiled, and away from the source: no text, no failure.
    source.write_text("one\n")
    status, text = run(capsys, "v3", "--lines")
    assert status == 0
    assert "v3_warp_local.cu:3" in text
    monkeypatch.setattr(command, "source_root", lambda: None)
    status, text = run(capsys, "v3", "--lines")
    assert status == 0
    assert "v3_warp_local.cu:3" in text
    assert "inside of a source tree" in text


def test_check(capsys: pytest.CaptureFixture[str], fake: Fake) -> None:
    fake()
    status, text = run(capsys, "all", "--check", "--seq-len", "8")
    assert status == 0
    rows = {line.split()[0]: line.split()[1:6] for line in text.splitlines() if line}
    for name in RUNGS:
        assert rows[name] == ["0", "to", "2", "nothing", "found"]


def test_findings_fail(capsys: pytest.CaptureFixture[str], fake: Fake) -> None:
    fake(findings=[RACE])
    for arguments in (["v3", "--check", "--seq-len", "8"], ["v3", "--seq-len", "8"]):
        status, text = run(capsys, *arguments)
        assert status == 1
        # Once, though every seed shows it.
        assert text.count("broken.cu:12: race: reads what thread 3 wrote (block 1, thread 40)") == 1
        assert ("0 to 2      1 finding " in text) == ("--check" in arguments)


def test_a_run_that_a_fault_ended_fails(
    capsys: pytest.CaptureFixture[str], fake: Fake, tmp_path: Path
) -> None:
    file = tmp_path / "explain.json"
    fake(findings=[RACE | {"kind": "out of range"}], ends=True)
    status, text = run(capsys, "v3", "--seq-len", "8", "--json", str(file))
    assert status == 1
    assert "out of range" in text
    assert json.loads(file.read_text())["rungs"][0]["error"] is None
    # Not even a finding says why.
    fake(ends=True)
    assert run(capsys, "v3", "--seq-len", "8")[0] == 1
    assert run(capsys, "v3", "--seq-len", "8", "--check")[0] == 1


def test_json(capsys: pytest.CaptureFixture[str], fake: Fake, tmp_path: Path) -> None:
    fake()
    file = tmp_path / "folder" / "explain.json"
    status, _ = run(capsys, "v3", "--json", str(file), "--seed", "5")
    assert status == 0
    record = json.loads(file.read_text())
    assert record["shape"] == dataclasses.asdict(SHAPE)
    assert record["seed"] == 5
    (rung,) = record["rungs"]
    assert rung["kernel"] == rung["ran"] == "v3"
    assert set(rung["counts"]) == set(COUNTS)
    for count in rung["counts"].values():
        assert count["emulated"] == count["formula"]
    assert rung["flop"] == SHAPE.flop
    assert rung["error"] < 1e-6
    assert len(rung["lines"]) == len(rung["launches"]) == 1
    assert rung["findings"] == []


def test_formulas_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """For shapes that would take hours, and in builds without the emulation."""
    monkeypatch.delattr(emulation._core, "emulate", raising=False)
    file = tmp_path / "explain.json"
    primary = ("--batch-size", "4", "--num-heads", "12", "--seq-len", "2048")
    status, text = run(capsys, "v3", "--formulas", *primary, "--json", str(file))
    assert status == 0
    (line,) = (line for line in text.splitlines() if line.startswith("global bytes read"))
    read = 4 * 12 * (2048 * 64 * 4) * (1 + 2048 // 64 * 2)
    assert line.split()[3] == f"{read:,}"
    assert "agree" not in text
    (rung,) = json.loads(file.read_text())["rungs"]
    assert rung["counts"]["global_read_bytes"]["formula"] == read
    assert rung["counts"]["global_read_bytes"]["emulated"] is None
    status, text = run(capsys, "all", "--formulas", *primary)
    assert status == 0
    assert f"{read:,}" in text


def test_a_long_run_is_told_of(capsys: pytest.CaptureFixture[str], fake: Fake) -> None:
    fake()
    status, text = run(capsys, "v1", "--seq-len", "2048", "--head-dim", "1")
    assert status == 0
    assert "--formulas takes none" in text
    assert "--formulas" not in run(capsys, "v1", "--seq-len", "256", "--head-dim", "1")[1]
    # The orders that --check tries count, and no formula finds a race.
    status, text = run(capsys, "v1", "--seq-len", "300", "--head-dim", "1", "--check")
    assert status == 0
    assert "270,000 scores take the emulation 14 seconds or so." in text


def test_progress_counts_the_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    class Thread(threading.Thread):
        """Waits a hundredth of the time."""

        def join(self, timeout: float | None = None) -> None:
            super().join(None if timeout is None else timeout / 100)

    class Steps:
        def __init__(self) -> None:
            self.labels: list[str] = []

        def step(self, label: str) -> None:
            self.labels.append(label)

    monkeypatch.setattr(command.threading, "Thread", Thread)
    steps: Any = Steps()
    assert command._watched(steps, "v3", lambda: time.sleep(0.2)) is None
    assert steps.labels[0] == "v3"
    assert "v3, 0 s" in steps.labels
    with pytest.raises(NotImplementedError):
        command._watched(steps, "v3", lambda: (_ for _ in ()).throw(NotImplementedError("no")))


def test_calls_that_make_no_sense(
    capsys: pytest.CaptureFixture[str], fake: Fake, tmp_path: Path
) -> None:
    for arguments in (["v9"], ["cpu"], [], ["v3", "--seq-len", "0"], ["v3", "--seed", "-1"]):
        with pytest.raises(SystemExit) as stopped:
            command.main(arguments)
        assert stopped.value.code == 2
    assert "takes v0, v1, v2, v3, v4, v5, v6 or all" in capsys.readouterr().err
    for more in (["--check", "--json", "x"], ["--check", "--formulas"], ["--formulas", "--lines"]):
        with pytest.raises(SystemExit):
            command.main(["v3", *more])
    capsys.readouterr()
    fake()
    status, text = run(capsys, "v0", "--len-kv", "3")
    assert status == 2
    assert "as many keys as queries" in text
    status, text = run(capsys, "v3", "--json", str(tmp_path))
    assert status == 2
    assert str(tmp_path) in text


def test_a_build_without_emulation_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(emulation._core, "emulate", raising=False)
    status, text = run(capsys, "v3")
    assert status == 2
    assert "FASTATTN_EMULATION=ON" in text
    x = np.zeros((1, 1, 1, 64), np.float32)
    with pytest.raises(NotImplementedError, match="no emulation"):
        emulation.run(x, x, x, kernel="v3")


@pytest.mark.parametrize("redirect", ["| head -1", ">&-"])
def test_nobody_reads_the_output(redirect: str) -> None:
    """The reader of a pipe leaves early, or there is no output at all."""
    if os.name != "posix":
        pytest.skip("needs a POSIX shell")
    done = subprocess.run(
        ["sh", "-c", f'"$0" -m fastattn.explain v3 --seq-len 8 {redirect}', sys.executable],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == (0 if "|" in redirect or hasattr(emulation._core, "emulate") else 2)
    assert done.stderr == ""
