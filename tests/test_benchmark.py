"""The benchmark: its arithmetic, its command line, its records and the README's table."""

from __future__ import annotations

import io
import json
import re
import sys
import time
from dataclasses import replace
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import fastattn
from fastattn import benchmark
from fastattn._console import Column, Console
from fastattn.benchmark import _arrays, _machine, _record, _suite
from fastattn.benchmark.__main__ import main
from fastattn.benchmark._meta import gpus

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
ROW_KEYS = {
    *("suite", "impl", "direction", "dtype", "batch", "heads_q", "heads_kv", "len_q", "len_kv"),
    *("head_dim", "head_dim_v", "causal", "window", "us", "tflops", "error"),
}
META_KEYS = {
    *("gpu", "driver", "cuda", "torch", "date", "commit", "source_hash", "sm_clock_mhz"),
    "ceilings",
}
SMALL = ["--seq-lens", "33", "--num-heads", "2", "--head-dim", "16", "--repetitions", "3"]


@pytest.fixture(autouse=True)
def small_ceiling(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ceiling's value is no test's business, and its full size takes seconds."""
    monkeypatch.setitem(_suite._CEILING_SIZES, "cpu", 64)


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str]:
    status = main(argv)
    return status, capsys.readouterr().out


SMALL_PROBLEM = _arrays.Problem("float32", 1, 2, 2, 33, 33, 16, 16)
PRIMARY = _arrays.Problem("float32", 4, 12, 12, 2048, 2048, 64, 64)


def problem(**changes: Any) -> _arrays.Problem:
    return replace(SMALL_PROBLEM, **changes)


# --- what a record is identified by ---------------------------------------------------------------


def make_tree(root: Path) -> Path:
    (root / "include" / "fastattn").mkdir(parents=True)
    (root / "src" / "cuda").mkdir(parents=True)
    (root / "include" / "fastattn" / "fastattn.h").write_text("header")
    (root / "src" / "cuda" / "a.cu").write_text("kernel")
    (root / "src" / "b.cpp").write_text("code")
    return root


def test_source_hash_depends_on_names_and_contents_alone(tmp_path: Path) -> None:
    one, two = make_tree(tmp_path / "one"), make_tree(tmp_path / "two")
    before = benchmark.source_hash(one)
    assert re.fullmatch("[0-9a-f]{64}", before)
    assert benchmark.source_hash(two) == before
    (two / "README.md").write_text("text")
    (two / "src" / ".hidden").write_text("x")
    (two / "src" / "b.cpp~").write_text("backup")
    assert benchmark.source_hash(two) == before
    (two / "src" / "cuda" / "a.cu").write_text("kernel 2")
    changed = benchmark.source_hash(two)
    assert changed != before
    (two / "src" / "cuda" / "a.cu").rename(two / "src" / "cuda" / "c.cu")
    assert benchmark.source_hash(two) not in (before, changed)


def test_source_hash_tells_where_one_file_ends_and_the_next_begins(tmp_path: Path) -> None:
    one, two = make_tree(tmp_path / "one"), make_tree(tmp_path / "two")
    (one / "src" / "x").write_bytes(b"src/y\x001\x00z")
    (two / "src" / "x").write_bytes(b"")
    (two / "src" / "y").write_bytes(b"z")
    assert benchmark.source_hash(one) != benchmark.source_hash(two)


def test_source_hash_refuses_another_folder(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="include/"):
        benchmark.source_hash(tmp_path)


def test_source_root_is_found_from_below(tmp_path: Path) -> None:
    root = make_tree(tmp_path)
    assert benchmark.source_root(root / "src" / "cuda") == root.resolve()


@pytest.mark.parametrize(("capability", "lanes"), [(75, 64), (80, 64), (86, 128), (90, 128)])
def test_fp32_peak_counts_the_lanes_of_the_architecture(capability: int, lanes: int) -> None:
    expected = 100 * lanes * 2 * 1000e6 / 1e12
    assert _machine.fp32_peak_tflops(capability, 100, 1000) == pytest.approx(expected)


def test_fp32_peak_of_a_published_card() -> None:
    # H100/H200 SXM: 132 SMs at 1980 MHz, published as 67 TFLOP/s.
    assert _machine.fp32_peak_tflops(90, 132, 1980) == pytest.approx(67, rel=0.01)


# --- arithmetic of a row --------------------------------------------------------------------------


def test_flops_of_the_primary_shape() -> None:
    assert PRIMARY.flops == 4 * 4 * 12 * 2048 * 2048 * 64
    assert replace(PRIMARY, causal=True).flops == PRIMARY.flops / 2


def test_timing_is_median_and_quartiles() -> None:
    timing = _suite.Timing.of([4.0, 1.0, 2.0, 3.0, 100.0])
    assert (timing.us, timing.us_best, timing.us_iqr, timing.repetitions) == (3.0, 1.0, 2.0, 5)


@pytest.mark.parametrize(
    ("us", "expected"),
    [
        (100.0, (25, 100)),  # fast: as often as asked for
        (250_000.0, (8, 32)),  # 10 s: 2 s of warm-up, 8 s of timed calls
        (60e6, (0, 3)),  # a minute a call: the fewest that make a median
    ],
)
def test_plan_keeps_a_row_within_its_time(us: float, expected: tuple[int, int]) -> None:
    assert _suite.Plan(25, 100, 10.0).fit(us) == expected


def test_plan_never_does_more_than_asked() -> None:
    assert _suite.Plan(0, 1, 10.0).fit(1.0) == (0, 1)


class FakeArrays(_arrays.NumpyArrays):
    """Counts calls instead of timing them."""

    def time_calls(self, call: _arrays.Call, count: int) -> list[float]:
        return [float(call()) for _ in range(count)]


def test_cpu_rows_are_timed_in_turn() -> None:
    order: list[str] = []

    def recorder(name: str, us: float) -> _arrays.Call:
        def call() -> float:
            order.append(name)
            return us

        return call

    calls = [recorder("a", 10.0), recorder("b", 20.0)]
    first, second = _suite.measure(FakeArrays(), calls, _suite.Plan(2, 4, 1.0))
    assert (first.us, second.us, first.repetitions, second.repetitions) == (10.0, 20.0, 4, 4)
    rounds = order[4:]  # two estimating calls each
    assert rounds == ["a", "b"] * 6


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_inputs_are_fresh_and_rounded(dtype: str) -> None:
    rng = np.random.default_rng(0)
    wanted = problem(dtype=dtype, len_kv=65, head_dim_v=8)
    first, second = wanted.host_inputs(rng), wanted.host_inputs(rng)
    assert [x.shape for x in first] == [(1, 2, 33, 16), (1, 2, 65, 16), (1, 2, 65, 8)]
    assert not np.array_equal(first[0], second[0])
    for x in first:
        assert np.array_equal(fastattn.testing.round_to(x, dtype), x)


def test_refusals_follow_what_the_kernel_declares() -> None:
    kernel = next(k for k in fastattn.kernels() if k.name == "cpu")
    item = _suite.Implementation("cpu", "cpu", kernel.title, kernel)
    assert item.refusal(problem()) is None
    too_big = kernel.head_dim_max + 1
    refusal = item.refusal(problem(head_dim=too_big, head_dim_v=too_big))
    assert refusal is not None
    assert str(kernel.head_dim_max) in refusal


# --- command line ---------------------------------------------------------------------------------


def test_list_names_every_kernel(capsys: pytest.CaptureFixture[str]) -> None:
    status, text = run(capsys, "--list")
    assert status == 0
    for name in ("all", "baseline", "sdpa", *(k.name for k in fastattn.kernels())):
        assert re.search(rf"^{name}\s", text, re.MULTILINE), name


def test_cpu_suite_writes_a_record(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "new" / "record.json"
    status, text = run(capsys, "all", "--device", "cpu", *SMALL, "--json", str(file))
    assert status == 0, text
    record = benchmark.load_record(file)
    assert record["meta"].keys() >= META_KEYS
    assert record["meta"]["gpu"] is None or gpus()
    assert record["meta"]["cpu"]
    rows = record["rows"]
    kernels = [k.name for k in fastattn.kernels() if k.backend == "cpu"]
    assert [row["impl"] for row in rows if not row["impl"].startswith("torch")] == kernels
    for row in rows:
        assert row.keys() >= ROW_KEYS
        assert row["suite"] == "cpu_custom"
        assert (row["batch"], row["heads_q"], row["len_q"], row["head_dim"]) == (1, 2, 33, 16)
        assert row["us"] > 0
        assert 0 <= row["error"] < 1e-5
        assert row["repetitions"] == 3
        flops = 4 * 2 * 33 * 33 * 16
        assert row["tflops"] == pytest.approx(flops / row["us"] * 1e-6, rel=1e-3)


def test_torch_rows_stand_beside_a_single_kernel(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    status, text = run(capsys, "cpu", *SMALL)
    assert status == 0
    row = next(line.split() for line in text.splitlines() if line.startswith("cpu "))
    assert float(row[-1]) > 0
    assert float(row[-2]) > 0
    status, text = run(capsys, "cpu", "--no-compare", *SMALL)
    row = next(line.split() for line in text.splitlines() if line.startswith("cpu "))
    assert row[-2:] == ["-", "-"]
    assert "sdpa" not in text


def test_without_torch_its_rows_are_left_out(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    status, text = run(capsys, "all", "--device", "cpu", *SMALL)
    assert status == 0
    assert "baseline and sdpa are left out" in text
    assert "arrays: numpy" in text
    status, text = run(capsys, "baseline", "--device", "cpu", *SMALL)
    assert status == 2
    assert "Nothing was measured" in text


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_types_and_causal(capsys: pytest.CaptureFixture[str], dtype: str) -> None:
    if not _arrays.arrays_for("cpu").supports(dtype):
        pytest.skip(f"no {dtype} without torch or ml_dtypes")
    status, text = run(capsys, "cpu", "--dtype", dtype, "--causal", *SMALL)
    assert status == 0, text
    assert f"{dtype} causal" in text


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["v99"], "unknown implementation 'v99'; known: all, baseline, sdpa, cpu"),
        (["cpu", "--device", "cuda"], "cuda"),
    ],
)
def test_calls_that_make_no_sense(
    capsys: pytest.CaptureFixture[str], argv: list[str], message: str
) -> None:
    status, text = run(capsys, *argv)
    assert status == 2
    assert message in text


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["cpu", "--repetitions", "0"],
        ["cpu", "--max-seconds", "nan"],
        ["cpu", "--seq-lens", "-1"],
        ["--write-readme", "README.md"],
    ],
)
def test_usage_errors(argv: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2


@pytest.mark.parametrize("argv", [["cpu"], ["all", "--device", "cpu"], ["cpu", "sdpa"]])
def test_a_kernel_without_a_row_fails_the_run(
    capsys: pytest.CaptureFixture[str], argv: list[str]
) -> None:
    """Head dim 300: torch's rows are measured where torch is there, the kernel refuses."""
    shape = ["--seq-lens", "33", "--num-heads", "2", "--head-dim", "300", "--repetitions", "3"]
    status, text = run(capsys, *argv, *shape)
    assert status == 1
    assert "Nothing was measured" in text


def test_a_length_too_large_for_memory_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    status, text = run(capsys, "cpu", *SMALL, "--seq-lens", str(10**15), "33")
    assert status == 1
    assert f"{10**15}  FAILED: " in text
    assert re.search(r"^cpu +33 ", text, re.MULTILINE)  # the other length is measured


def test_a_record_that_cannot_be_written_stops_before_the_work(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for path in (tmp_path, file / "below.json"):
        status, text = run(capsys, "cpu", *SMALL, "--json", str(path))
        assert status == 2
        assert text.startswith("--json: ")
        assert len(text.splitlines()) == 1


def test_a_cuda_kernel_is_no_unknown_name(capsys: pytest.CaptureFixture[str]) -> None:
    if any(kernel.backend == "cuda" for kernel in fastattn.kernels()):
        pytest.skip("this build has the CUDA kernels")
    for name in cuda_kernel_names():
        status, text = run(capsys, name)
        assert status == 2
        assert f"'{name}' is a CUDA kernel" in text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        (b"\xff\xfe", "not JSON"),
        (b"text", "not JSON"),
        (b"{}", "not a benchmark record"),
        (b'{"meta": {}, "rows": [1]}', "not a benchmark record"),
        (b'{"meta": {}, "rows": [{"suite": "ladder"}]}', "'len_q'"),
    ],
)
def test_a_bad_record_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, content: bytes | None, message: str
) -> None:
    readme, file = tmp_path / "README.md", tmp_path / "record.json"
    readme.write_text(f"{_record.BEGIN}\n{_record.END}\n")
    if content is not None:
        file.write_bytes(content)
    status, text = run(capsys, "--write-readme", str(readme), "--from", str(file))
    assert status == 2
    assert message in text
    assert len(text.splitlines()) == 1


def test_torch_rows_get_no_verdict() -> None:
    timing = _suite.Timing(1.0, 0.0, 1.0, 3)
    kernel = next(k for k in fastattn.kernels() if k.name == "cpu")
    ours = _suite.Implementation("cpu", "cpu", kernel.title, kernel)
    verdicts = [
        _suite.Result(item, SMALL_PROBLEM, timing, error, 1e-6).right
        for item in (ours, _suite.BASELINE)
        for error in (1.9e-6, 2.1e-6)
    ]
    assert verdicts == [True, False, True, True]
    # A plain evaluation that is exact by luck leaves a kernel its four roundings, and no more.
    verdicts = [
        _suite.Result(ours, SMALL_PROBLEM, timing, error, 0.0).right for error in (2.3e-7, 2.5e-7)
    ]
    assert verdicts == [True, False]


def test_the_yardstick_is_the_worst_plain_evaluation() -> None:
    exact = (np.array([1.0]), np.array([2.0]))
    plain = [(np.array([1.25]), np.array([2.0])), (np.array([1.0]), np.array([3.0]))]
    expected = _arrays.expect(exact, *plain)
    assert (expected.plain_error, expected.plain_lse_error) == (0.25, 0.5)


@pytest.mark.parametrize(
    "shape",
    [
        problem(),
        problem(causal=True, len_kv=65, heads_q=4),
        problem(causal=True, len_q=65),  # rows that see no key
    ],
)
def test_torch_all_heads_at_once_is_attention(shape: _arrays.Problem) -> None:
    torch = pytest.importorskip("torch")
    arrays = _arrays.TorchArrays("cpu")
    q, k, v = shape.host_inputs(np.random.default_rng(0))
    ((out, lse),) = arrays._naive(shape, *map(torch.from_numpy, (q, k, v)), arrays.pairs(shape))
    out, lse = out.numpy().reshape(shape.out_shape), lse.numpy().reshape(shape.out_shape[:3])
    expected, expected_lse = fastattn.testing.reference(q, k, v, causal=shape.causal)
    seen = np.isfinite(expected_lse)
    assert fastattn.testing.error(out[seen], expected[seen]) < 1e-6
    assert fastattn.testing.error(lse, expected_lse) < 1e-6


def test_an_unwritten_output_fails_the_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fastattn, "forward", lambda *args, **kwargs: None)
    status, text = run(capsys, "cpu", "--no-compare", *SMALL)
    assert status == 1
    assert "FAILED" in text


def test_a_wrong_result_fails_the_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = fastattn.forward

    def wrong(q: Any, k: Any, v: Any, **kwargs: Any) -> Any:
        result = right(q, k, v, **kwargs)
        kwargs["out"][..., 0] *= 1.001
        return result

    monkeypatch.setattr(fastattn, "forward", wrong)
    status, text = run(capsys, "cpu", "--no-compare", *SMALL)
    assert status == 1
    assert "WRONG" in text


def test_source_hash_of_this_tree(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT / "tests")
    status, text = run(capsys, "--source-hash")
    assert status == 0
    assert text.strip() == benchmark.source_hash(ROOT)


class HostEvent:
    """A CUDA event's interface, on the host's clock."""

    def record(self) -> None:
        self.us = time.perf_counter_ns() * 1e-3


@pytest.mark.parametrize("len_q", [32, 64])
@pytest.mark.parametrize("len_kv", [32, 300])
def test_the_limit_of_few_rows_is_no_matter_of_the_seed(len_q: int, len_kv: int) -> None:
    """NumPy's products of few rows are up to twice as exact as any sum over tiles."""
    problem = _arrays.Problem("float32", 1, 2, 2, len_q, len_kv, 64, 64)
    arrays = _arrays.NumpyArrays()
    for seed in range(40):
        inputs = problem.host_inputs(np.random.default_rng(seed))
        expected = arrays.expected(problem, *inputs)
        error = fastattn.testing.error(fastattn.forward(*inputs, kernel="cpu"), expected.out)
        assert error < 0.8 * _suite.TOLERANCE * expected.plain_error, seed


def test_few_rows_and_columns_may_be_wrong_by_luck() -> None:
    cpu = next(x for x in _suite.implementations("cpu") if x.selector == "cpu")
    timing = _suite.Timing(1.0, 0.0, 1.0, 3)
    for len_q, head_dim, factor in ((7, 64, 3), (8, 4, 1), (99, 3, 3)):
        problem = _arrays.Problem("float32", 1, 2, 2, len_q, 9, head_dim, head_dim)
        limit = factor * 2 * 3e-7
        for error, right in ((0.99 * limit, True), (1.01 * limit, False)):
            result = _suite.Result(cpu, problem, timing, error, 3e-7)
            assert result.right == right, (len_q, head_dim, error)
            assert result.allowed == pytest.approx(limit)


class FakeCudaArrays(_arrays._CudaArrays):
    """Host arrays that say they are on a GPU."""

    framework = "fake"

    def put(self, host: _arrays.HostArray, dtype: str) -> Any:
        return host.astype(dtype)

    def synchronize(self) -> None:
        pass

    def event(self) -> Any:
        return HostEvent()

    def elapsed_us(self, start: Any, end: Any) -> float:
        return float(end.us - start.us)


def test_the_ladder_suite_end_to_end(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What a GPU machine runs without a framework, with the CPU kernel in a GPU kernel's place."""
    kernel = next(k for k in fastattn.kernels() if k.name == "cpu")
    device = {"name": "Test GPU", "compute_capability": 90, "multiprocessors": 132}
    module = sys.modules[main.__module__]
    for place in (module, _suite, sys.modules["fastattn.benchmark._meta"]):
        monkeypatch.setattr(place, "gpus", lambda: [device])
    monkeypatch.setattr(fastattn, "kernels", lambda: (replace(kernel, backend="cuda"),))
    monkeypatch.setattr(module, "torch_for", lambda device: None)
    monkeypatch.setattr(module, "arrays_for", lambda device: FakeCudaArrays())
    monkeypatch.setattr(_suite, "sm_clock", lambda arrays, rng: 1755)
    monkeypatch.setattr(_machine, "nvidia_smi", lambda field: "1980")
    defaults = {"batch_size": 1, "num_heads": 2, "head_dim": 64, "seq_lens": [32, 64]}
    monkeypatch.setitem(module._DEFAULTS, "cuda", defaults)

    file = tmp_path / "record.json"
    argv = ("cpu", "--device", "cuda", "--repetitions", "4", "--json", str(file))
    status, text = run(capsys, *argv)
    assert status == 0, text
    assert "SM clock 1755 MHz under load" in text
    assert "132 SMs at 1980 MHz, unmeasured" in text
    record = benchmark.load_record(file)
    assert record["meta"]["gpu"] == "Test GPU"
    assert record["meta"]["ceilings"]["float32"]["tflops"] == pytest.approx(66.9, abs=0.1)
    assert [(row["suite"], row["len_q"], row["repetitions"]) for row in record["rows"]] == [
        ("ladder", 32, 4),
        ("ladder", 64, 4),
    ]
    assert "| cpu | " in benchmark.render_ladder(record)


# --- records and the README -----------------------------------------------------------------------


def make_record() -> dict[str, Any]:
    def row(impl: str, title: str, length: int, us: float, error: float) -> dict[str, Any]:
        shape = replace(PRIMARY, len_q=length, len_kv=length)
        timing = _suite.Timing(us, 1.0, us, 100)
        item = _suite.Implementation(impl, impl, title)
        return _suite.Result(item, shape, timing, error, error).row("ladder")

    return {
        "meta": {
            "gpu": "Test GPU",
            "driver": "580.1",
            "cuda": "13.0",
            "torch": "2.11.0",
            "date": "2026-01-02T03:04:05+00:00",
            "commit": None,
            "source_hash": "0" * 64,
            "sm_clock_mhz": 1980,
            "ceilings": {"float32": {"tflops": 51.3, "method": "8192^3 float32 matrix product"}},
        },
        "rows": [
            row("torch_naive", "PyTorch: matmul, softmax, matmul", 512, 150.0, 8e-7),
            row("v9", "A kernel", 512, 75.0, 7e-7),
            row("torch_naive", "PyTorch: matmul, softmax, matmul", 2048, 2000.0, 8.7e-7),
            row("torch_sdpa", "PyTorch: scaled_dot_product_attention", 2048, 1500.0, 6.6e-7),
            row("v9", "A kernel", 2048, 1000.0, 7e-7),
        ],
    }


def test_record_survives_a_round_trip(tmp_path: Path) -> None:
    file = tmp_path / "record.json"
    text = benchmark.dump_record(make_record())
    file.write_text(text)
    assert benchmark.load_record(file) == make_record()
    assert sum('"impl"' in line for line in text.splitlines()) == 5


def test_load_record_refuses_other_json(tmp_path: Path) -> None:
    file = tmp_path / "other.json"
    file.write_text("[]")
    with pytest.raises(ValueError, match="not a benchmark record"):
        benchmark.load_record(file)


def test_ladder_table() -> None:
    text = benchmark.render_ladder(make_record())
    assert text.startswith("Test GPU (driver 580.1, CUDA 13.0, torch 2.11.0")
    assert "51.3 TFLOP/s" in text
    line = next(line for line in text.splitlines() if line.startswith("| v9 "))
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    # 4*4*12*2048^2*64 = 51.54 GFLOP in 1 ms; 100.5% of 51.3.
    assert cells == ["v9", "A kernel", "75.0", "1,000", "51.5", "100%", "7.0e-07", "2x", "1.5x"]
    sdpa = next(line for line in text.splitlines() if line.startswith("| torch_sdpa "))
    assert "| - | 1,500 |" in sdpa


def test_ladder_table_needs_ladder_rows() -> None:
    record = make_record()
    record["rows"] = [row | {"suite": "cpu"} for row in record["rows"]]
    with pytest.raises(ValueError, match="ladder"):
        benchmark.render_ladder(record)


def test_write_readme_replaces_what_is_between_the_markers(tmp_path: Path) -> None:
    (tmp_path / "docs" / "ladder").mkdir(parents=True)
    (tmp_path / "docs" / "ladder" / "v9.md").write_text("page")
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{_record.BEGIN}\nold\n{_record.END}\nafter\n")
    assert benchmark.write_readme(readme, make_record())
    text = readme.read_text()
    assert text.startswith(f"before\n{_record.BEGIN}\n")
    assert text.endswith(f"\n{_record.END}\nafter\n")
    assert "| [v9](docs/ladder/v9.md) |" in text
    assert "old" not in text
    assert not benchmark.write_readme(readme, make_record())


def test_write_readme_needs_the_markers(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("no table here\n")
    with pytest.raises(ValueError, match="ladder:begin"):
        benchmark.write_readme(readme, make_record())


def gpu_records() -> list[tuple[Path, dict[str, Any]]]:
    """Committed GPU records of the benchmark, the newest last; the folder holds others too."""
    found = [(path, benchmark.load_record(path)) for path in RESULTS.glob("*.json")]
    gpu = [
        (path, record)
        for path, record in found
        if record["meta"]["gpu"] and any(row["suite"] == "ladder" for row in record["rows"])
    ]
    return sorted(gpu, key=lambda item: str(item[1]["meta"]["date"]))


def newest_gpu_record() -> tuple[Path, dict[str, Any]]:
    records = gpu_records()
    if not records:
        pytest.skip("no GPU record is committed yet: run scripts/gpu_check on a GPU")
    return records[-1]


def cuda_kernel_names() -> list[str]:
    """From the registry's file: a CPU-only build doesn't hold these kernels."""
    text = (ROOT / "src" / "cuda" / "kernels.def").read_text()
    return re.findall(r"^FASTATTN_CUDA_KERNEL\((\w+),", text, re.MULTILINE)


def test_committed_records_have_every_field() -> None:
    newest_gpu_record()
    for path, record in gpu_records():
        assert record["meta"].keys() >= META_KEYS, path
        for row in record["rows"]:
            assert row.keys() >= ROW_KEYS, path


def test_committed_record_has_every_registered_cuda_kernel() -> None:
    path, record = newest_gpu_record()
    names = cuda_kernel_names()
    assert names
    measured = {row["impl"] for row in record["rows"] if row["suite"] == "ladder"}
    missing = [name for name in names if name not in measured]
    assert not missing, f"{path.name} lacks {missing}: run scripts/gpu_check"


def test_readme_shows_the_committed_record() -> None:
    path, record = newest_gpu_record()
    text = (ROOT / "README.md").read_text()
    shown = text.partition(_record.BEGIN)[2].partition(_record.END)[0].strip()
    expected = benchmark.render_ladder(record, ROOT / "docs" / "ladder").strip()
    assert shown == expected, (
        "README.md is out of date: python -m fastattn.benchmark --write-readme README.md --from "
        f"benchmarks/results/{path.name}"
    )


def test_committed_record_is_of_these_sources() -> None:
    path, record = newest_gpu_record()
    if record["meta"]["source_hash"] != benchmark.source_hash(ROOT):
        # Not a failure: most contributors have no GPU to measure on.
        pytest.xfail(f"GPU record {path.name} older than sources: run scripts/gpu_check")


# --- console --------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


COLUMNS = (Column("name", 6, "<"), Column("us", 8))


def write_table(stream: io.StringIO) -> str:
    console = Console(stream)
    console.header(COLUMNS)
    with console.progress(2) as progress:
        progress.step("one")
        console.row(COLUMNS, ["v0", "1.5"], "good")
        progress.advance()
        progress.step("two")
        console.row(COLUMNS, ["v1", "20.5"], "bad")
        progress.advance()
    return stream.getvalue()


def test_a_pipe_gets_plain_lines() -> None:
    lines = ["name          us", "------  --------", "v0           1.5", "v1          20.5"]
    assert write_table(io.StringIO()).splitlines() == lines


def test_a_terminal_gets_colour_and_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setitem(sys.modules, "rich", None)
    text = write_table(Terminal())
    assert "\x1b[32mv0" in text
    assert "[1/2] two" in text
    assert text.endswith("\r\x1b[K")  # the status line is taken away


def test_no_color_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setitem(sys.modules, "rich", None)
    assert not re.search(r"\x1b\[[0-9;]*m", write_table(Terminal()))


def test_rich_draws_the_progress_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    monkeypatch.setenv("TERM", "xterm")
    text = write_table(Terminal())
    assert "2/2" in text
    assert "v0           1.5" in text


# --- scripts/gpu_check, as far as it goes without a GPU -------------------------------------------


@pytest.fixture(scope="module")
def gpu_check() -> ModuleType:
    loader = SourceFileLoader("gpu_check", str(ROOT / "scripts" / "gpu_check"))
    spec = spec_from_loader("gpu_check", loader)
    assert spec is not None
    module = module_from_spec(spec)
    sys.modules["gpu_check"] = module  # dataclasses look their module up
    loader.exec_module(module)
    return module


def test_gpu_check_counts_a_skipped_gpu_test_as_a_failure(
    gpu_check: ModuleType, tmp_path: Path
) -> None:
    junit = tmp_path / "junit.xml"
    junit.write_text(
        """<testsuites><testsuite>
        <testcase classname="t" name="passes"/>
        <testcase classname="t" name="fails"><failure message="no"/></testcase>
        <testcase classname="t" name="errs"><error message="no"/></testcase>
        <testcase classname="t" name="one"><skipped message="needs two GPUs"/></testcase>
        <testcase classname="t" name="cupy"><skipped message="CuPy is not installed"/></testcase>
        <testcase classname="t" name="x"><skipped type="pytest.xfail" message="known"/></testcase>
        </testsuite></testsuites>"""
    )
    counts, unexcused = gpu_check.read_junit(junit, lambda _: True, gpu_check.ALLOWED_SKIPS)
    assert counts == {"passed": 2, "failed": 2, "skipped": 2}
    assert unexcused == ["t::cupy: CuPy is not installed"]
    assert gpu_check.read_junit(junit, lambda _: False, gpu_check.ALLOWED_SKIPS)[1] == []


def test_gpu_check_writes_its_record_without_the_package(
    gpu_check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It installs the package elsewhere, so its own interpreter does not have it."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "fastattn"]:
        monkeypatch.setitem(sys.modules, name, None)
    out = tmp_path / "record.json"
    done = gpu_check.Outcome("ctest", True, 1.25, "", {"passed": 3})
    gpu_check.write_record(out, [done], {"meta": {"gpu": "GPU"}, "rows": [{"us": 1}]}, {}, False)
    record = json.loads(out.read_text())
    assert record["rows"] == [{"us": 1}]
    assert record["meta"]["checks"]["steps"] == {"ctest": {"ok": True, "seconds": 1.2, "passed": 3}}
    assert len(gpu_check.load_part("_machine").source_hash(ROOT)) == 64


def test_gpu_check_reads_registers_and_spills(gpu_check: ModuleType, tmp_path: Path) -> None:
    log = """
  ptxas v5.cu sm_90a tiles<9, true>: 4 registers, 0 bytes spilled
  ptxas v5.cu sm_90a tiles<0, true>: 255 registers, 8 bytes spilled, 8 bytes of stack
  [3/9] Building CUDA object v4.cu.o
ptxas v4.cu sm_90a rows: 80 registers, 0 bytes spilled
"""
    ptxas = gpu_check.read_ptxas(log)
    assert ptxas == [
        "v4.cu sm_90a rows: 80 registers, 0 bytes spilled",
        "v5.cu sm_90a tiles<0, true>: 255 registers, 8 bytes spilled, 8 bytes of stack",
    ]
    out = tmp_path / "record.json"
    gpu_check.write_record(out, [], {"meta": {}, "rows": []}, {}, False, ptxas)
    assert json.loads(out.read_text())["meta"]["checks"]["ptxas"] == ptxas


def test_gpu_check_reads_ctest_skips(gpu_check: ModuleType, tmp_path: Path) -> None:
    junit = tmp_path / "ctest.xml"
    junit.write_text(
        """<testsuite>
        <testcase name="GpuForward.Runs" status="notrun"><skipped message="SKIP"/>
        <system-out>Skipped: no GPU</system-out></testcase>
        <testcase name="All/GpuGuard.Two/0" status="notrun"><skipped message="SKIP"/>
        <system-out>Skipped: fewer than 2 GPUs</system-out></testcase>
        <testcase name="CpuLevel.V4" status="notrun"><skipped message="SKIP"/></testcase>
        </testsuite>"""
    )
    counts, unexcused = gpu_check.read_junit(junit, gpu_check._gpu_name, gpu_check.ALLOWED_SKIPS)
    assert counts == {"passed": 0, "failed": 0, "skipped": 3}
    assert len(unexcused) == 1
    assert "GpuForward.Runs" in unexcused[0]


@pytest.mark.parametrize(
    ("tool", "log", "errors", "ok"),
    [
        ("memcheck", "========= ERROR SUMMARY: 0 errors", 0, True),
        ("memcheck", "========= ERROR SUMMARY: 2 errors", 2, False),
        ("memcheck", "no summary", 0, False),
        (
            "racecheck",
            "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)",
            0,
            True,
        ),
        (
            "racecheck",
            "========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)",
            1,
            False,
        ),
    ],
)
def test_gpu_check_reads_the_sanitizer(
    gpu_check: ModuleType, tmp_path: Path, tool: str, log: str, errors: int, ok: bool
) -> None:
    gpu = gpu_check.Gpu("Test", "90a", "580.1", 1 << 17)
    args = gpu_check.parse_arguments([])
    check = gpu_check.Check(args, gpu, gpu_check.Runner(tmp_path, {}, None), tmp_path)
    outcome = check._sanitized(f"{tool}-python", tool, 0.0, 0, log)
    assert outcome.ok is ok
    assert outcome.counts["errors"] == errors


def test_gpu_check_ends_a_command_that_takes_too_long(
    gpu_check: ModuleType, tmp_path: Path
) -> None:
    runner = gpu_check.Runner(tmp_path, {"PATH": "/usr/bin:/bin"}, None)
    status, log = runner.run("slow", [["sleep", "60"]], timeout=1)
    assert status == 124
    assert "took too long" in log
    assert runner.run("missing", [["/no/such/program"]], timeout=1)[0] == 127
    assert runner.run("two", [["false"], ["echo", "never"]], timeout=5)[0] == 1
    assert "\nnever" not in (tmp_path / "two.log").read_text()


def test_gpu_check_chooses_steps(gpu_check: ModuleType) -> None:
    assert gpu_check.parse_arguments([]).only == list(gpu_check.STEPS)
    assert gpu_check.parse_arguments(["--only", "benchmark,pytest"]).only == ["pytest", "benchmark"]
    assert "build" not in gpu_check.parse_arguments(["--skip-build"]).only
    with pytest.raises(SystemExit):
        gpu_check.parse_arguments(["--only", "nonsense"])


def test_gpu_check_writes_a_record_that_loads(gpu_check: ModuleType, tmp_path: Path) -> None:
    out = tmp_path / "results" / "test-gpu.json"
    outcomes = [gpu_check.Outcome("ctest", True, 1.0, "", {"passed": 3})]
    extra = {"rows": [{"suite": "check", "impl": "v9"}]}
    gpu_check.write_record(out, outcomes, make_record(), extra, quick=False)
    record = benchmark.load_record(out)
    assert len(record["rows"]) == 6
    assert record["meta"]["checks"]["ok"] is True
    assert record["meta"]["checks"]["steps"]["ctest"]["passed"] == 3
    assert json.loads(out.read_text()) == record


# --- on a GPU -------------------------------------------------------------------------------------


def cuda_arrays(name: str) -> _arrays.Arrays:
    if name == "fastattn":
        return _arrays.PlainCudaArrays()
    pytest.importorskip(name)
    return _arrays.TorchArrays("cuda") if name == "torch" else _arrays.CupyArrays()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["torch", "cupy", "fastattn"])
def test_every_provider_checks_and_times_kernels(name: str) -> None:
    arrays = cuda_arrays(name)
    chosen = [i for i in _suite.implementations("cuda") if i.kernel is not None]
    shape = problem(len_q=130, len_kv=130, head_dim=64, head_dim_v=64)
    plan = _suite.Plan(1, 3, 1.0)
    results = list(_suite.run(arrays, chosen, shape, plan, np.random.default_rng(0)))
    assert results
    measured = [r for r in results if isinstance(r, _suite.Result)]
    refused = [r for r in results if isinstance(r, _suite.Failure)]
    assert measured
    assert all(r.refused for r in refused), [r.reason for r in refused]
    for result in measured:
        assert result.right, result
        assert 0 < result.timing.us < 1e6


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_torch_reference_on_the_gpu_is_the_numpy_oracle(dtype: str) -> None:
    arrays = cuda_arrays("torch")
    shape = problem(dtype=dtype, heads_q=4, heads_kv=2, len_q=65, len_kv=130, causal=True)
    host = shape.host_inputs(np.random.default_rng(0))
    on_gpu = arrays.expected(shape, *host)
    oracle = fastattn.testing.reference(*host, causal=True)
    assert fastattn.testing.error(on_gpu.out, oracle[0]) < 1e-13
    assert fastattn.testing.error(on_gpu.lse, oracle[1]) < 1e-13
    plain = fastattn.testing.naive(*host, causal=True, dtype=dtype)
    numpy_error = fastattn.testing.error(plain[0], oracle[0])
    assert numpy_error / 2 < on_gpu.plain_error < numpy_error * 2


@pytest.mark.gpu
def test_sm_clock_is_read_under_load() -> None:
    clock = _suite.sm_clock(_arrays.arrays_for("cuda"), np.random.default_rng(0))
    assert clock is not None
    assert 300 < clock < 5000
