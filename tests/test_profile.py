"""The profiler: ncu's CSV, the arithmetic on it, the command line, the table and the roofline.

No test runs ncu. A script stands in for it, which checks how it is called and answers in ncu's form
with one launch whose counters are round numbers, so that the table can be computed by hand.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import fastattn
from fastattn import KernelInfo
from fastattn.benchmark import _record
from fastattn.profile import (
    __main__ as command,
)
from fastattn.profile import (
    _metrics,
    _ncu,
    _report,
    _roofline,
    _rungs,
    _target,
)
from fastattn.profile.__main__ import main

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
GPU = {"name": "Test GPU", "compute_capability": 89, "multiprocessors": 76}
PRIMARY = _rungs.Shape()

needs_matplotlib = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib"
)

# One launch, as the raw page gives it with --print-units base: metric -> (unit, cell).
LAUNCH = {
    "device__attribute_multiprocessor_count": ("", "76"),
    "dram__bytes.sum": ("byte", "140,000,000"),
    "dram__bytes.sum.peak_sustained": ("byte/cycle", "64"),
    "dram__bytes_read.sum": ("byte", "100,000,000"),
    "dram__bytes_write.sum": ("byte", "40,000,000"),
    "dram__cycles_elapsed.avg.per_second": ("hz", "11,200,000,000"),
    "gpu__time_duration.sum": ("ns", "4,000,000"),
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum": ("", "1,234"),
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_st.sum": ("", "0"),
    "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum.pct_of_peak_sustained_elapsed": ("%", "61.25"),
    "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum": ("", "3,000,000"),
    "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_st.sum": ("", "150,000"),
    "launch__block_size": ("", "256"),
    "launch__grid_size": ("", "1,536"),
    "launch__occupancy_limit_barriers": ("block", "24"),
    "launch__occupancy_limit_blocks": ("block", "24"),
    "launch__occupancy_limit_registers": ("block", "3"),
    "launch__occupancy_limit_shared_mem": ("block", "3"),
    "launch__occupancy_limit_warps": ("block", "6"),
    "launch__registers_per_thread": ("register/thread", "80"),
    "launch__shared_mem_per_block_driver": ("byte/block", "1,024"),
    "launch__shared_mem_per_block_dynamic": ("byte/block", "32,896"),
    "launch__shared_mem_per_block_static": ("byte/block", "0"),
    "sm__cycles_elapsed.avg.per_second": ("hz", "2,500,000,000"),
    "sm__maximum_warps_per_active_cycle_pct": ("%", "50"),
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active": ("%", "0"),
    "sm__sass_thread_inst_executed_op_ffma_pred_on.sum.peak_sustained": ("inst/cycle", "9,728"),
    "sm__warps_active.avg.pct_of_peak_sustained_active": ("%", "48.39"),
    "smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio": ("inst", "0.5"),
    "smsp__average_warps_issue_stalled_gmma_per_issue_active.ratio": ("", "(!) n/a"),
    "smsp__average_warps_issue_stalled_long_scoreboard_not_issued_per_issue_active.ratio": (
        "inst",
        "9.9",
    ),
    "smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio": ("inst", "1.5"),
    "smsp__average_warps_issue_stalled_math_pipe_throttle_per_issue_active.ratio": ("inst", "0.25"),
    "smsp__average_warps_issue_stalled_selected_per_issue_active.ratio": ("inst", "1"),
    "smsp__average_warps_issue_stalled_short_scoreboard_per_issue_active.ratio": ("inst", "1.75"),
    "smsp__issue_active.avg.pct_of_peak_sustained_active": ("%", "72.5"),
    "smsp__sass_inst_executed_op_shared_ld.sum": ("inst", "2,000,000"),
    "smsp__sass_inst_executed_op_shared_st.sum": ("inst", "100,000"),
    "smsp__sass_thread_inst_executed_op_fadd_pred_on.sum": ("inst", "1,000,000,000"),
    "smsp__sass_thread_inst_executed_op_ffma_pred_on.sum": ("inst", "26,500,000,000"),
    "smsp__sass_thread_inst_executed_op_fmul_pred_on.sum": ("inst", "2,000,000,000"),
}
LEADING = (
    *("ID", "Process ID", "Process Name", "Host Name", "Kernel Name", "Context", "Stream"),
    *("Block Size", "Grid Size", "Device", "CC"),
)


def raw_page(*launches: dict[str, tuple[str, str]], function: str = "vectorized_kernel") -> str:
    def line(cells: list[str]) -> str:
        return ",".join(f'"{cell}"' for cell in cells)

    first = launches[0]
    lines = [
        line([*LEADING, *first]),
        line([""] * len(LEADING) + [unit for unit, _ in first.values()]),
    ]
    for i, launch in enumerate(launches):
        where = [str(i), "4242", "python3.12", "127.0.0.1", function, "1", "0"]
        where += ["(256, 1, 1)", "(1536, 1, 1)", "0", "8.9"]
        lines.append(line(where + [cell for _, cell in launch.values()]))
    return "\n".join(lines) + "\n"


def launch_metrics() -> dict[str, float]:
    return dict(_ncu.parse_raw(raw_page(LAUNCH))[0].metrics)


def make_row(name: str = "v4", **changes: float | None) -> dict[str, Any]:
    metrics: dict[str, Any] = launch_metrics() | changes
    metrics = {key: value for key, value in metrics.items() if value is not None}
    return _metrics.make_row(name, "title", PRIMARY, "vectorized_kernel", metrics, GPU)


def make_record(*names: str) -> dict[str, Any]:
    meta = {"gpu": "Test GPU", "driver": "580.1", "cuda": "13.0", "ncu": "2025.3.1.0"}
    meta |= {"clock_control": "none", "date": "2026-01-02T03:04:05+00:00"}
    rows = []
    for i, name in enumerate(names or ("v4",)):
        row = make_row(name)
        rows.append(row | {"executed_tflops": 14 / 4**i, "intensity": 400 / 8**i})
    return {"meta": meta, "rows": rows}


# --- ncu's CSV ------------------------------------------------------------------------------------


def test_raw_page_gives_functions_and_numbers() -> None:
    text = "==PROF== a message, with a comma\n" + raw_page(LAUNCH, LAUNCH) + "==PROF== another\n"
    launches = _ncu.parse_raw(text)
    assert [launch.function for launch in launches] == ["vectorized_kernel"] * 2
    metrics = launches[1].metrics
    assert metrics["gpu__time_duration.sum"] == pytest.approx(4e-3)
    assert metrics["dram__bytes.sum"] == 140e6
    assert metrics["launch__registers_per_thread"] == 80
    assert "smsp__average_warps_issue_stalled_gmma_per_issue_active.ratio" not in metrics
    assert not metrics.keys() & set(LEADING)


@pytest.mark.parametrize("text", ["", "==ERROR== no\n", '"ID","Kernel Name"\n'])
def test_no_launch_in_a_page_without_one(text: str) -> None:
    assert _ncu.parse_raw(text) == []


@pytest.mark.parametrize(
    ("unit", "factor"),
    [
        *(
            ("", 1),
            ("%", 1),
            ("inst", 1),
            ("block", 1),
            ("register/thread", 1),
            ("hz", 1),
            ("s", 1),
        ),
        *(
            ("ns", 1e-9),
            ("nsecond", 1e-9),
            ("us", 1e-6),
            ("msecond", 1e-3),
            ("s", 1),
            ("second", 1),
        ),
        *(("byte", 1), ("Kbyte", 1e3), ("Gbyte", 1e9), ("byte/block", 1), ("Kbyte/block", 1e3)),
        *(("Gbyte/second", 1e9), ("byte/ns", 1e9), ("cycle/nsecond", 1e9), ("cycle/us", 1e6)),
        *(("Ghz", 1e9), ("GHz", 1e9), ("Mhz", 1e6), ("Kbyte/cycle", 1e3), ("inst/cycle", 1)),
    ],
)
def test_units_become_plain_ones(unit: str, factor: float) -> None:
    page = raw_page({"a__b.sum": (unit, "1,000.5")})
    assert _ncu.parse_raw(page)[0].metrics["a__b.sum"] == pytest.approx(1000.5 * factor)


# --- the arithmetic -------------------------------------------------------------------------------


def test_row_by_hand() -> None:
    row = make_row()
    flop = 4 * 4 * 12 * 2048 * 2048 * 64
    assert row["us"] == 4000
    assert row["tflops"] == pytest.approx(flop / 4e-3 * 1e-12, rel=1e-4)  # 12.885
    assert row["fp32_peak_tflops"] == pytest.approx(76 * 128 * 2 * 2.5e9 * 1e-12)  # 48.64
    assert row["peak_share"] == pytest.approx(0.2649, abs=1e-4)
    assert row["executed_flop"] == 1e9 + 2e9 + 2 * 26.5e9
    assert row["executed_tflops"] == 14
    assert row["executed_peak_share"] == pytest.approx(0.28783, abs=1e-5)
    assert row["intensity"] == 400
    assert row["dram_gbs"] == 35
    assert row["dram_peak_gbs"] == pytest.approx(716.8)
    assert row["sm_clock_mhz"] == 2500
    assert (row["occupancy"], row["occupancy_theoretical"]) == (48.39, 50)
    assert row["blocks_per_sm"] == 3
    assert row["limited_by"] == ["registers", "shared memory"]
    assert row["shared_dynamic_bytes"] == 32896
    assert row["shared_driver_bytes"] == 1024
    assert row["stalls"] == {
        **{"short scoreboard": 1.75, "long scoreboard": 1.5, "selected": 1.0},
        **{"barrier": 0.5, "math pipe throttle": 0.25},
    }
    assert next(iter(row["stalls"])) == "short scoreboard"
    json.dumps(row)


def test_peak_by_arithmetic_where_ncu_has_none() -> None:
    no_peak = {_metrics._FFMA_PEAK: None}
    assert make_row(**no_peak)["fp32_peak_tflops"] == pytest.approx(48.64)
    metrics = {key: value for key, value in launch_metrics().items() if key not in no_peak}
    turing = {"compute_capability": 75, "multiprocessors": 76}
    row = _metrics.make_row("v4", "title", PRIMARY, "kernel", metrics, turing)
    assert row["fp32_peak_tflops"] == pytest.approx(24.32)


def test_dram_bytes_from_reads_and_writes() -> None:
    assert make_row(**{"dram__bytes.sum": None})["intensity"] == 400


def test_any_metric_may_be_missing() -> None:
    complete = dict(_report._cells([make_row()]))  # label -> cell
    assert "-" not in complete.values()
    for metric in LAUNCH:
        cells = dict(_report._cells([make_row(**{metric: None})]))
        assert cells.keys() == complete.keys()
    nothing = _metrics.make_row("v4", "title", PRIMARY, "kernel", {}, GPU)
    assert set(dict(_report._cells([nothing])).values()) == {"-"}


def test_every_metric_of_a_row_is_asked_for() -> None:
    asked = set(_metrics.METRICS)
    unused = {"device__attribute_multiprocessor_count"}
    assert {name for name in LAUNCH if "_not_issued_" not in name} - unused <= asked
    assert len(asked) == len(_metrics.METRICS)


# --- which kernels --------------------------------------------------------------------------------


def kernel(name: str, **changes: Any) -> KernelInfo:
    v4 = {"title": f"title of {name}", "backend": "cuda", "dtypes": ("float32",)}
    v4 |= {"head_dim_min": 64, "head_dim_max": 64, "redirect": "v2"}
    return replace(fastattn.kernels()[0], name=name, **(v4 | changes))


KERNELS = (
    kernel("cpu", backend="cpu", head_dim_min=1, head_dim_max=256, redirect=None),
    kernel("v0", head_dim_min=1, head_dim_max=256, redirect=None),
    kernel("v2", head_dim_min=1, head_dim_max=128, redirect=None),
    kernel("v4"),
    kernel("v6", dtypes=("float32", "float16"), head_dim_min=1, head_dim_max=256, redirect=None),
)


@pytest.fixture
def gpu_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A build with CUDA on a machine with one GPU."""
    monkeypatch.setattr(fastattn, "kernels", lambda: KERNELS)
    monkeypatch.setattr(fastattn, "show_config", lambda mode: {"backends": ["cpu", "cuda"]})
    monkeypatch.setattr(command, "gpus", lambda: [GPU])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["v0"], "v0 launches several CUDA kernels"),
        (["baseline"], "baseline is PyTorch's"),
        (["v4", "sdpa"], "sdpa is PyTorch's"),
        (["torch_fa2"], "PyTorch"),
        (["cpu"], "cpu runs on the CPU"),
        (["v9"], "unknown kernel 'v9'; known: all, v2, v4, v6"),
        (["v4", "--dtype", "float16"], "v4 takes no float16"),
        (["v6", "--dtype", "float32", "bfloat16"], "v6 takes no bfloat16"),
        (["v4", "--head-dim", "128"], "profile v2"),
        (["v2", "--head-dim", "256"], "head dim 1 to 128, not 256"),
        (["all", "--head-dim", "512"], "can be profiled with this shape"),
    ],
)
def test_refusals(
    gpu_machine: None, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert main(arguments) == 2
    assert words in capsys.readouterr().out


def test_a_build_without_cuda_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fastattn, "kernels", lambda: KERNELS[:1])
    monkeypatch.setattr(fastattn, "show_config", lambda mode: {"backends": ["cpu"]})
    for arguments in (["v4"], ["all"], ["v3", "all"]):
        assert main(arguments) == 2
        said = capsys.readouterr().out
        assert "no CUDA backend: on a machine with a GPU, install it again" in said
        assert f"`python -m fastattn.explain {arguments[-1]}`" in said
        shown = re.search(r"`--from (\S+)`", said)
        assert shown
        assert (ROOT / shown[1]).is_file()
    # What no build has is said first.
    for arguments in (["v9"], ["v4", "v9"]):
        assert main(arguments) == 2
        said = capsys.readouterr().out
        assert "unknown kernel 'v9'; known: all, v1, v2, v3, v4" in said
        assert "CUDA backend" not in said


def test_a_machine_without_gpu_says_so(
    gpu_machine: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "gpus", list)
    assert main(["all"]) == 2
    said = capsys.readouterr().out
    assert "No GPU is seen" in said
    assert "`python -m fastattn.explain all`" in said


def test_rungs_of_several_kernels_are_those_of_the_sources() -> None:
    registry = (ROOT / "src" / "cuda" / "kernels.def").read_text()
    several = {}
    for name, file in re.findall(r"^FASTATTN_CUDA_KERNEL\((\w+), (\w+)\)", registry, re.MULTILINE):
        kernel = ROOT / "src" / "cuda" / "kernels" / file
        sources = [f"{kernel}.cu"] if not kernel.is_dir() else sorted(kernel.rglob("*.cu*"))
        text = "".join(Path(source).read_text() for source in sources)
        launches = re.findall(r"\blaunch<(\w+)", text)
        assert launches, name
        if len(launches) > 1:
            several[name] = launches
    assert set(several) == {*_rungs.SEVERAL_KERNELS, *_rungs.MAIN_KERNELS}
    for name, main_kernel in _rungs.MAIN_KERNELS.items():
        assert main_kernel in several[name]


# --- running ncu ----------------------------------------------------------------------------------

FAKE = """\
#!{python}
import json, os, sys
from pathlib import Path

arguments = sys.argv[1:]
here = Path(__file__).parent
if arguments == ["--version"]:
    print("NVIDIA (R) Nsight Compute Command Line Profiler")
    print("Version 2025.3.1.0 (build 36398880) (public-release)")
    sys.exit(0)
with (here / "calls.jsonl").open("a") as calls:
    print(json.dumps(arguments), file=calls)
if "--import" in arguments:
    print((here / "raw.csv").read_text(), end="")
    sys.exit(0)
says = here / "says.txt"
if says.exists():
    print(says.read_text())
    sys.exit(int((here / "status.txt").read_text()))
print('==PROF== Profiling "vectorized_kernel" - 0: 0%....50%....100% - 31 passes')
Path(arguments[arguments.index("--export") + 1]).write_bytes(b"report")
"""


class FakeNcu:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "ncu"
        self.path.write_text(FAKE.format(python=sys.executable))
        self.path.chmod(0o755)
        self.answer(raw_page(LAUNCH))

    def answer(self, page: str) -> None:
        (self.folder / "raw.csv").write_text(page)

    def fail(self, words: str, status: int = 1) -> None:
        (self.folder / "says.txt").write_text(words)
        (self.folder / "status.txt").write_text(str(status))

    def calls(self) -> list[list[str]]:
        lines = (self.folder / "calls.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]


@pytest.fixture
def ncu(gpu_machine: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeNcu:
    folder = tmp_path / "fake"
    folder.mkdir()
    fake = FakeNcu(folder)
    monkeypatch.setenv("NCU", str(fake.path))
    return fake


def test_profile_of_one_rung(
    ncu: FakeNcu, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, record_file = tmp_path / "out", tmp_path / "results" / "profile.json"
    assert main(["v4", "--out", str(out), "--json", str(record_file)]) == 0
    assert (out / "v4.ncu-rep").read_bytes() == b"report"
    assert (out / "v4.csv").read_text() == raw_page(LAUNCH)

    profile, read = ncu.calls()
    assert profile[profile.index("--clock-control") + 1] == "none"
    child = profile[profile.index("fastattn.profile._target") + 1 :]
    shape = ["--shape", "4", "12", "2048", "64", "--dtype", "float32"]
    assert child == ["v4", "--calls", "4", *shape]
    assert "--kernel-name" not in profile
    assert profile[profile.index("--launch-skip") + 1] == "3"
    assert read[read.index("--import") + 1] == str(out / "v4.ncu-rep")

    record = _record.load_record(record_file)
    assert record["meta"]["ncu"] == "2025.3.1.0"
    assert record["meta"]["sm_clock_mhz"] == 2500
    assert record["rows"] == [
        _metrics.make_row("v4", "title of v4", PRIMARY, "vectorized_kernel", launch_metrics(), GPU)
    ]

    text = capsys.readouterr().out
    cells = dict(re.findall(r"^(\S.*?)  +(\S.*)$", text, re.MULTILINE))
    assert cells["duration, ms"] == "4"
    assert cells["TFLOP/s (4BHMND / duration)"] == "12.9"
    assert cells["of fp32 peak"] == "26.5%"
    assert cells["executed, of fp32 peak"] == "28.8%"
    assert cells["intensity, FLOP/byte"] == "400"
    assert cells["occupancy, achieved"] == "48.4%"
    assert cells["limited by"] == "registers, shared memory"
    assert cells["shared memory, dynamic, bytes"] == "32,896"
    assert cells["shared memory, driver's, bytes"] == "1,024"
    assert cells["shared loads, bank conflicts"] == "1,234"
    assert cells["wavefronts per shared load"] == "1.50"
    assert cells["stall 1"] == "short scoreboard 35%"
    assert cells["stall 2"] == "long scoreboard 30%"
    assert cells["stall 3"] == "barrier 10%"
    assert "\x1b" not in text


def test_all_walks_the_registry_and_says_what_it_leaves_out(
    ncu: FakeNcu, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["all", "--out", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "Left out: v0 launches several" in text
    rungs = [call[call.index("fastattn.profile._target") + 1] for call in ncu.calls()[::2]]
    assert rungs == ["v2", "v4", "v6"]


def test_the_one_kernel_of_several_that_does_the_work(ncu: FakeNcu, tmp_path: Path) -> None:
    """By its name without template arguments; in every dtype that is asked for and taken."""
    record_file = tmp_path / "profile.json"
    arguments = ["v6", "--dtype", "float32", "float16", "--out", str(tmp_path)]
    assert main([*arguments, "--json", str(record_file)]) == 0
    profiles = ncu.calls()[::2]
    for profile, dtype in zip(profiles, ("float32", "float16"), strict=True):
        assert profile[profile.index("--kernel-name") + 1] == _rungs.MAIN_KERNELS["v6"]
        assert profile[profile.index("--kernel-name-base") + 1] == "function"
        assert profile[profile.index("--dtype") + 1] == dtype
    assert (tmp_path / "v6.ncu-rep").is_file()
    assert (tmp_path / "v6-float16.csv").is_file()
    record = _record.load_record(record_file)
    assert [row["dtype"] for row in record["rows"]] == ["float32", "float16"]
    assert [row["peak_share"] is None for row in record["rows"]] == [False, True]
    lines = _report.render_markdown(record).splitlines()
    assert "| | v6 | v6 float16 |" in lines
    assert "float32 unless a column says another dtype" in lines[0]
    assert "| tensor cores busy | 0.0% | 0.0% |" in lines


def test_all_of_one_dtype_leaves_out_what_does_not_take_it(
    ncu: FakeNcu, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["all", "--dtype", "float16", "--out", str(tmp_path)]) == 0
    assert "Left out: v4 takes no float16." in capsys.readouterr().out
    (profile,) = ncu.calls()[::2]
    assert profile[profile.index("fastattn.profile._target") + 1] == "v6"


def test_clocks_are_locked_only_when_asked(ncu: FakeNcu, tmp_path: Path) -> None:
    assert main(["v4", "--out", str(tmp_path), "--lock-clocks"]) == 0
    profile = ncu.calls()[0]
    assert profile[profile.index("--clock-control") + 1] == "base"


def test_a_grid_too_small_for_the_gpu_is_a_limit(
    ncu: FakeNcu, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ncu.answer(raw_page(LAUNCH | {"launch__grid_size": ("", "48")}))
    assert main(["v4", "--out", str(tmp_path)]) == 0
    assert "registers, shared memory, grid 48 < 76 SMs" in capsys.readouterr().out


def test_a_rung_of_several_kernels_is_found_out(
    ncu: FakeNcu, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ncu.answer(raw_page(LAUNCH, LAUNCH))
    for arguments in (["v4"], ["all"]):
        assert main([*arguments, "--out", str(tmp_path)]) == 2
        text = capsys.readouterr().out
        assert "v4 launches several CUDA kernels in one call (ncu saw vectorized_kernel)" in text


@pytest.mark.parametrize(
    ("says", "words"),
    [
        (
            "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU "
            "Performance Counters on the target device 0.",
            ["sudo", "NVreg_RestrictProfilingToAdminUsers=0", "--cap-add=SYS_ADMIN"],
        ),
        (
            "==ERROR== Profiling failed because a driver resource was unavailable. Ensure that no "
            "other tool (like DCGM) is concurrently collecting profiling data.",
            ["Another program holds", "dcgmi profstats --pause"],
        ),
        (
            "==ERROR== Failed to initialize the profiler: LibraryNotLoaded",
            ["profiling interface", "LibraryNotLoaded"],
        ),
    ],
)
@pytest.mark.parametrize("status", [0, 1])
def test_what_stops_ncu_altogether(
    ncu: FakeNcu,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    says: str,
    words: list[str],
    status: int,
) -> None:
    ncu.fail(says, status)
    assert main(["all", "--out", str(tmp_path)]) == 2
    text = capsys.readouterr().out
    for word in words:
        assert word in text
    assert len(ncu.calls()) == 1  # the next rung would fail for the same reason


def test_a_failing_rung_is_reported_with_its_own_words(
    ncu: FakeNcu, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ncu.fail("==PROF== Connected\nTraceback\nRuntimeError: out of memory\n", 3)
    assert main(["v2", "v4", "--out", str(tmp_path)]) == 1
    text = capsys.readouterr().out
    assert "v4: FAILED: ncu ended with status 3" in text
    assert "RuntimeError: out of memory" in text
    assert len(ncu.calls()) == 2


def test_no_launch_seen(ncu: FakeNcu, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ncu.answer("==WARNING== nothing\n")
    assert main(["v4", "--out", str(tmp_path)]) == 1
    assert "no kernel launch" in capsys.readouterr().out


def test_no_ncu_says_where_it_looked(
    gpu_machine: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("NCU", raising=False)
    monkeypatch.setattr(_ncu, "_candidates", lambda: iter([tmp_path / "ncu"]))
    assert main(["v4", "--out", str(tmp_path)]) == 2
    text = capsys.readouterr().out
    for place in ("PATH", "$CUDA_HOME", "NCU=/path/to/ncu"):
        assert place in text
    monkeypatch.setenv("NCU", "/nowhere/ncu")
    assert main(["v4", "--out", str(tmp_path)]) == 2
    assert "$NCU is /nowhere/ncu" in capsys.readouterr().out


def test_ncu_is_found_in_path_and_below_cuda_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NCU", raising=False)
    home = tmp_path / "cuda"
    (home / "bin").mkdir(parents=True)
    in_home = FakeNcu(home / "bin")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(home))
    assert _ncu.find() == str(in_home.path)
    in_path = FakeNcu(tmp_path)
    assert _ncu.find() == str(in_path.path)
    assert _ncu.version(str(in_path.path)) == "2025.3.1.0"


def test_the_profiled_program_calls_the_rung(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[tuple[int, ...], str, str]] = []
    waited: list[bool] = []

    class HostArray:
        @staticmethod
        def from_numpy(x: Any, *, dtype: str) -> Any:
            return x.astype(dtype)

    def forward(q: Any, k: Any, v: Any, *, kernel: str) -> None:
        assert q.std() > 0.5  # random, not zeros
        calls.append((q.shape, q.dtype.name, kernel))

    monkeypatch.setattr(_target, "CudaArray", HostArray)
    monkeypatch.setattr(_target.fastattn, "forward", forward)
    monkeypatch.setattr(_target._core, "synchronize", lambda: waited.append(True))
    line = _ncu.command("ncu", "v4", _rungs.Shape(1, 2, 16, 8, "float16"), Path("x"), False)
    _target.main(line[line.index("fastattn.profile._target") + 1 :])
    assert calls == [((1, 2, 16, 8), "float16", "v4")] * 4
    assert waited == [True]


@pytest.mark.gpu
def test_the_profiled_program_runs() -> None:
    line = _ncu.command("ncu", "v4", _rungs.Shape(1, 2, 100, 64), Path("x"), False)
    program = line[line.index(sys.executable) :]
    subprocess.run(program, check=True, capture_output=True, timeout=300)


# --- the table and its files ----------------------------------------------------------------------


def show(tmp_path: Path, record: dict[str, Any], *arguments: str) -> int:
    path = tmp_path / "record.json"
    path.write_text(_record.dump_record(record))
    return main(["--from", str(path), *arguments])


def test_a_record_is_shown_without_gpu_and_ncu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NCU", "/nowhere")
    page = tmp_path / "page.md"
    page.write_text(f"before\n{_report.BEGIN}\nold\n{_report.END}\nafter\n")
    record = make_record("v3", "v4")
    assert show(tmp_path, record, "--write", str(page)) == 0
    text = page.read_text()
    assert text.startswith(f"before\n{_report.BEGIN}\nTest GPU (driver 580.1")
    assert text.endswith(f"{_report.END}\nafter\n")
    assert "old" not in text
    assert "| | v3 | v4 |" in text
    assert "| registers per thread | 80 | 80 |" in text
    assert "page.md: written" in capsys.readouterr().out
    assert show(tmp_path, record, "--write", str(page)) == 0
    assert "page.md: up to date" in capsys.readouterr().out
    assert page.read_text() == text


def test_a_long_cell_is_wrapped_and_the_ladder_fits_a_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert show(tmp_path, make_record("v1", "v2", "v3", "v4")) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    at = next(i for i, line in enumerate(lines) if line.startswith("limited by"))
    assert lines[at].split() == ["limited", "by", *["registers,"] * 4]
    assert lines[at + 1].split() == ["shared", "memory"] * 4


def test_markdown_links_the_pages_that_are_there(tmp_path: Path) -> None:
    (tmp_path / "ladder").mkdir()
    (tmp_path / "ladder" / "v4.md").touch()
    lines = _report.render_markdown(make_record("v3", "v4"), tmp_path).splitlines()
    assert "| | v3 | [v4](ladder/v4.md) |" in lines


@pytest.mark.parametrize(
    ("contents", "words"),
    [
        ("not json", "not JSON"),
        ("[]", "not a benchmark record"),
        ('{"meta": {}, "rows": []}', "not a record of python -m fastattn.profile"),
        ('{"meta": {}, "rows": [{"suite": "ladder"}]}', "not a record of"),
        ('{"meta": {}, "rows": [{"suite": "profile"}]}', "field missing"),
    ],
)
def test_from_something_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], contents: str, words: str
) -> None:
    path = tmp_path / "record.json"
    path.write_text(contents)
    assert main(["--from", str(path)]) == 2
    assert words in capsys.readouterr().out


def test_outputs_are_checked_before_the_work(
    ncu: FakeNcu, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"{_report.END}\n{_report.BEGIN}\n")
    for arguments, words in (
        (["--write", str(page)], "has no lines"),
        (["--write", str(tmp_path / "none.md")], "none.md"),
        (["--roofline", str(tmp_path / "x.gif")], "must end in .png or .svg"),
        (["--json", str(tmp_path)], str(tmp_path)),
    ):
        assert main(["v4", *arguments]) == 2
        assert words in capsys.readouterr().out
    assert not (ncu.folder / "calls.jsonl").exists()


@pytest.mark.parametrize("arguments", [[], ["v4", "--from", "x"], ["v4", "--seq-len", "0"]])
def test_calls_that_make_no_sense(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as error:
        main(arguments)
    assert error.value.code == 2


# --- the roofline ---------------------------------------------------------------------------------


def test_no_matplotlib_says_what_to_install(
    ncu: FakeNcu, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_roofline, "has_matplotlib", lambda: False)
    assert main(["v4", "--roofline", "x.svg"]) == 2
    assert "--roofline needs matplotlib" in capsys.readouterr().out
    assert not (ncu.folder / "calls.jsonl").exists()


def test_the_ridge_is_where_the_roofs_meet() -> None:
    chart = _roofline._chart(make_record())
    assert chart.peak_tflops == pytest.approx(48.64)
    assert chart.bandwidth_tbs == pytest.approx(0.7168)
    assert chart.ridge == pytest.approx(67.857, rel=1e-4)
    assert "2,500 MHz" in chart.title
    assert "Test GPU" in chart.title


@needs_matplotlib
def test_roofline_as_svg(tmp_path: Path) -> None:
    record = make_record("v1", "v2", "v3", "v4")
    picture = tmp_path / "roofline.svg"
    assert show(tmp_path, record, "--roofline", str(picture)) == 0
    text = picture.read_text()
    for label in ("v1  14 TFLOP/s, 28.8%", "v2  3.5 TFLOP/s", "v3  ", "v4  "):
        assert label in text
    for label in ("ridge 67.9 FLOP/byte", "fp32 peak 48.6 TFLOP/s", "DRAM 0.717 TB/s"):
        assert label in text
    assert _roofline.fingerprint(record) in text
    again = tmp_path / "again.svg"
    _roofline.draw(record, again)
    assert again.read_text() == text


def test_the_roofline_is_of_what_has_no_tensor_cores() -> None:
    record = make_record("v4", "v6")
    assert [point.name for point in _roofline._chart(record).points] == ["v4", "v6"]
    record["rows"][1]["tensor_pipe_busy"] = 61.0
    assert [point.name for point in _roofline._chart(record).points] == ["v4"]


@needs_matplotlib
def test_roofline_as_png(tmp_path: Path) -> None:
    picture = tmp_path / "roofline.png"
    _roofline.draw(make_record("v1", "v4"), picture)
    head = picture.read_bytes()[:24]
    assert head.startswith(b"\x89PNG")
    assert int.from_bytes(head[16:20], "big") == 1080  # 7.2 inches at 150 dots


@needs_matplotlib
def test_roofline_needs_peaks_and_points(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = make_record()
    record["rows"][0]["intensity"] = None
    assert show(tmp_path, record, "--roofline", str(tmp_path / "x.svg")) == 2
    assert "lacks what a roofline is drawn of" in capsys.readouterr().out


def test_fingerprint_follows_what_is_shown() -> None:
    record = make_record("v3", "v4")
    before = _roofline.fingerprint(record)
    assert re.fullmatch("[0-9a-f]{16}", before)
    record["rows"][0]["registers"] = 12
    assert _roofline.fingerprint(record) == before
    record["rows"][0]["intensity"] = 12.0
    assert _roofline.fingerprint(record) != before


def test_labels_do_not_lie_on_each_other() -> None:
    placed = _roofline._spread([2.0, 0.0, 0.01, 0.02], 0.1)
    assert placed == pytest.approx([2.0, 0.0, 0.1, 0.2])


# --- what is committed ----------------------------------------------------------------------------


def committed() -> tuple[Path, dict[str, Any]]:
    """The newest committed profile."""
    found = [(path, _record.load_record(path)) for path in RESULTS.glob("profile-*.json")]
    if not found:
        pytest.skip("no profile is committed yet: python -m fastattn.profile all, on a GPU")
    return max(found, key=lambda item: str(item[1]["meta"]["date"]))


def test_the_page_shows_the_committed_profile() -> None:
    path, record = committed()
    page = ROOT / "docs" / "profiling.md"
    shown = page.read_text().partition(_report.BEGIN)[2].partition(_report.END)[0].strip()
    assert shown == _report.render_markdown(record, page.parent).strip(), (
        "docs/profiling.md is out of date: python -m fastattn.profile --write docs/profiling.md "
        f"--from benchmarks/results/{path.name}"
    )


def test_the_picture_shows_the_committed_profile() -> None:
    path, record = committed()
    picture = (ROOT / "docs" / "ladder" / "roofline.svg").read_text()
    assert _roofline.fingerprint(record) in picture, (
        "docs/ladder/roofline.svg is out of date: python -m fastattn.profile --roofline "
        f"docs/ladder/roofline.svg --from benchmarks/results/{path.name}"
    )


def test_the_script_passes_everything_on(tmp_path: Path) -> None:
    seen = tmp_path / "python"
    seen.write_text(
        textwrap.dedent("""\
        #!/bin/sh
        test "$1" = -c || printf '%s\\n' "$@"
    """)
    )
    seen.chmod(0o755)
    done = subprocess.run(
        [ROOT / "profile.sh", "v4", "--seq-len", "64"],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHON": str(seen)},
    )
    assert done.stdout.split() == ["-m", "fastattn.profile", "v4", "--seq-len", "64"]


def test_the_script_says_where_fastattn_is_missing(tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')  # no installed packages
    bare.chmod(0o755)
    done = subprocess.run(
        [ROOT / "profile.sh", "all"],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHON": str(bare)},
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"profile.sh: {bare} has no fastattn: ")
