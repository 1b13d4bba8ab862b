"""``--suite forward``: its cases, its float64 reference, its order, its tables; on the CPU."""

from __future__ import annotations

import importlib
import re
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fastattn
from fastattn import benchmark
from fastattn.benchmark import (
    _arrays,
    _auto,
    _cases,
    _forward,
    _forward_report,
    _machine,
    _suite,
    _torch_ways,
)
from fastattn.benchmark.__main__ import main
from fastattn.benchmark._arrays import Problem, TorchArrays

torch = pytest.importorskip("torch")
torch.set_num_threads(1)  # the tensors are tiny: more threads only wait for each other

ROOT = Path(__file__).resolve().parent.parent
KERNEL = next(kernel for kernel in fastattn.kernels() if kernel.name == "cpu")
OURS = [_suite.Implementation("cpu", "cpu", KERNEL.title, KERNEL), _suite.AUTO]
PLAN = _suite.Plan(1, 3, 0.05)
BASE = Problem("float32", 2, 4, 2, 19, 33, 16, 8)
MASKS = [
    {},
    {"causal": True},
    {"window": (5, 0)},
    {"window": (3, 7)},
    {"window": (-1, 2)},
    {"causal": True, "window": (4, 9)},
    {"len_q": 33, "len_kv": 19, "causal": True},  # rows that see no key
]


@pytest.fixture
def arrays() -> TorchArrays:
    return TorchArrays("cpu")


def inputs_of(problem: Problem, seed: int = 0) -> list[Any]:
    return [torch.from_numpy(x) for x in problem.host_inputs(np.random.default_rng(seed))]


def reference(problem: Problem, tensors: list[Any]) -> tuple[Any, Any]:
    return fastattn.testing.reference(
        *tensors, causal=problem.causal, window=problem.window, scale=problem.scale
    )


def tiny(case: _cases.Case) -> _cases.Case:
    """A case of the same kind that a CPU does in no time."""
    p = case.problem
    group = p.heads_q // p.heads_kv
    len_kv = 48
    small = replace(
        p,
        batch=min(p.batch, 2) if p.len_q > 1 else p.batch,
        heads_q=2 * group if group > 1 else 2,
        heads_kv=2,
        len_q=len_kv if p.len_q == p.len_kv else min(p.len_q, 16),
        len_kv=len_kv,
        window=None if p.window is None else tuple(min(x, 9) for x in p.window),
    )
    return replace(case, problem=small)


# --- problems -------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", MASKS)
def test_operations_are_those_of_the_visible_pairs(
    arrays: TorchArrays, changes: dict[str, Any]
) -> None:
    problem = replace(BASE, **changes)
    hidden = arrays.hidden(problem)
    pairs = problem.len_q * problem.len_kv
    visible = pairs if hidden is None else int((~hidden).sum())
    per_pair = 2 * problem.batch * problem.heads_q * (problem.head_dim + problem.head_dim_v)
    if problem.window is None:  # by convention half, whatever the mask leaves
        visible = pairs / 2 if problem.causal else pairs
    assert problem.flops == per_pair * visible


@pytest.mark.parametrize("at_a_time", [1 << 25, 70])
@pytest.mark.parametrize("changes", [*MASKS, {"scale": -0.3}])
def test_the_reference_of_some_heads_is_the_oracle(
    arrays: TorchArrays, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], at_a_time: int
) -> None:
    """Also when it takes only some rows at a time."""
    monkeypatch.setattr(_arrays, "_SCORES_AT_A_TIME", at_a_time)
    problem = replace(BASE, **changes)
    tensors = inputs_of(problem)
    pairs = [(0, 0), (1, 1), (1, 3)]
    exact, *plain = arrays.evaluations(problem, *tensors, pairs)
    scores = len(pairs) * problem.len_q * problem.len_kv
    few = _arrays.sums_may_be_trees(problem.len_q, scores)
    assert len(plain) == 2 + few  # head by head, all at once, and in loops
    expected = reference(problem, tensors)
    index = tuple(zip(*pairs, strict=True))
    seen = np.isfinite(expected[1][index])
    for found, allowed in ((exact, 1e-14), *((p, 1e-6) for p in plain)):
        for actual, wanted in zip(found, expected, strict=True):
            error = fastattn.testing.error(actual.numpy()[seen], wanted[index][seen])
            assert error < allowed
    assert exact[0].dtype == torch.float64


def test_plain_evaluation_rounds_as_the_dtype_does(arrays: TorchArrays) -> None:
    problem = replace(BASE, dtype="float16")
    tensors = [x.half() for x in inputs_of(problem)]
    exact, *plain = arrays.evaluations(problem, *tensors, arrays.pairs(problem))
    assert len(plain) == 1
    error, _ = _forward.errors(torch, plain[0][0], exact[0])
    expected, _ = fastattn.testing.naive(*tensors)
    assert error == pytest.approx(
        fastattn.testing.error(expected, reference(problem, tensors)[0]), rel=0.5
    )


@pytest.mark.parametrize("impl", ["torch_naive", "torch_sdpa", "torch_fa2"])
@pytest.mark.parametrize("changes", [*MASKS[:-1], {"scale": 0.1}, {"len_q": 33, "causal": True}])
def test_torch_computes_the_same_problem(
    arrays: TorchArrays, impl: str, changes: dict[str, Any]
) -> None:
    problem = replace(BASE, heads_q=2, head_dim_v=16, **changes)
    by_operator = problem.window is not None or (problem.causal and problem.len_q != problem.len_kv)
    if impl == "torch_fa2" and by_operator:
        pytest.skip("the operator below SDPA is CUDA's")
    tensors = inputs_of(problem)
    out = _torch_ways.TORCH[impl](arrays, problem, *tensors)()
    assert fastattn.testing.error(out, reference(problem, tensors)[0]) < 1e-6


def test_torch_shares_key_heads(arrays: TorchArrays) -> None:
    tensors = inputs_of(BASE)
    out = _torch_ways.TORCH["torch_sdpa"](arrays, BASE, *tensors)()
    assert fastattn.testing.error(out, reference(BASE, tensors)[0]) < 1e-6


# --- cases ----------------------------------------------------------------------------------------


def test_case_names_tell_the_cases_of_a_suite_apart() -> None:
    for suite in _cases.SUITES:
        names = [(case.name, case.problem.dtype) for case in _cases.cases(suite)]
        assert len(names) == len(set(names)), suite
        assert all(len(name) <= 30 for name, _ in names)  # the table's column
    assert len(_cases.cases("forward")) == sum(len(_cases.cases(s)) for s in _cases.SUITES)


def test_the_grid_is_flash_attentions() -> None:
    cases = _cases.cases(_cases.GRID)
    assert len(cases) == 2 * 3 * 2 * 3
    for case in cases:
        p = case.problem
        assert (p.head_dim * p.heads_q, p.batch * p.len_q) == (2048, 16384)


def spread(x: Any) -> float:
    size = x.norm(dim=-1)
    return float(size.max() / size.min())


def test_inputs_are_what_their_names_say(arrays: TorchArrays) -> None:
    made = {}
    for case in _cases.cases(_cases.STRESS):
        # Of the first seconds of a GPU's life nothing depends on the shape.
        case = replace(case, problem=replace(case.problem, len_q=500, len_kv=500))
        q, k, v = made[case.inputs] = _cases.make_inputs(arrays, case, 1)
        again = _cases.make_inputs(arrays, case, 2)
        assert all(x.shape == (1, 4, 500, 64) for x in (q, k, v))
        assert not torch.equal(q, again[0])
        # Unless it is meant to be one-hot or uniform, softmax weighs several keys in some rows.
        weights = torch.softmax((q @ k.mT).double() * case.problem.factor, -1)
        largest = weights.max(-1).values
        if case.inputs == "all 1e4, one-hot":
            assert largest.min() > 0.99
        elif case.inputs in ("all 1e-20", _cases.WORST_INPUT):
            assert largest.max() < 1.1 / 500
        else:
            assert 0.01 < float(largest.mean()) < 0.9, case.inputs
    assert set(made) == set(_cases.INPUTS)
    assert spread(made["randn"][0]) < 10
    assert 1e9 < spread(made["q rows 1e-6 to 1e4"][0]) < 1e11
    assert 1e5 < spread(made["k rows e^-7 to e^7"][1]) < 1e7
    assert 1e9 < spread(made["v rows 1e-6 to 1e4"][2]) < 1e11
    assert float(made["randn + 0.5"][2].mean()) == pytest.approx(0.5, abs=0.02)
    channels = made["k channel x1000"][1].std(dim=(0, 1, 2))
    assert float(channels.max() / channels.median()) == pytest.approx(1000, rel=0.1)
    column = made["v column 1e5"][2][..., 0]
    assert float(column.abs().min()) == 1e5
    assert float(column.sum()) == 0


@pytest.mark.parametrize("layout", ["bhmd", "bmhd", "misaligned"])
def test_layouts(layout: str) -> None:
    x = torch.arange(2.0 * 3 * 4 * 5).view(2, 3, 4, 5)
    laid = _cases.lay_out(torch, x, layout)
    assert torch.equal(laid, x)
    if layout == "bmhd":
        assert laid.transpose(1, 2).is_contiguous()
    else:
        assert laid.is_contiguous()
        assert laid.data_ptr() % 16 == (4 if layout == "misaligned" else 0)


# --- a case ---------------------------------------------------------------------------------------


def test_sampled_pairs_are_the_ends_and_two_of_the_middle() -> None:
    rng = np.random.default_rng(0)
    case = _cases.cases(_cases.GRID)[0]
    batch, heads = case.problem.batch, case.problem.heads_q
    seen = set()
    for _ in range(20):
        pairs = _forward.sample_pairs(case, rng)
        assert len(set(pairs)) == 4
        assert pairs == sorted(pairs)
        assert (pairs[0], pairs[-1]) == ((0, 0), (batch - 1, heads - 1))
        seen |= set(pairs)
    assert len(seen) > 10
    few = replace(case, problem=replace(case.problem, batch=1, heads_q=3, heads_kv=3))
    assert _forward.sample_pairs(few, rng) == [(0, 0), (0, 1), (0, 2)]
    short = replace(case, problem=replace(case.problem, len_q=40))
    assert len(_forward.sample_pairs(short, rng)) == 13  # 512 rows


def test_errors_are_normwise_and_of_the_worst_row() -> None:
    expected = torch.tensor([[[3.0, 4.0], [30.0, 40.0], [0.0, 0.0]]], dtype=torch.float64)
    out = expected.clone()
    out[0, 0, 0] += 1
    total = float(expected.norm())
    assert _forward.errors(torch, out, expected) == pytest.approx((1 / total, 1 / 5))
    out[0, 1, 0] = float("nan")
    with pytest.raises(AssertionError, match="NaN"):
        _forward.errors(torch, out, expected)


def test_calls_take_turns_in_alternating_order(arrays: TorchArrays) -> None:
    order: list[str] = []
    calls = [lambda: order.append("a"), lambda: order.append("b")]
    timings = _forward.time_in_turn(arrays, calls, _suite.Plan(0, 10, 10.0))
    assert [timing.repetitions for timing in timings] == [10, 10]
    rounds = "".join(order[4:])  # two estimating calls each
    assert rounds == "aaabbb" + "bbbaaa" + "aaabbb" + "bbbaaa" + "aaabbb"


def test_every_case_runs(arrays: TorchArrays) -> None:
    """Each of the suite, at a tiny size, with the CPU kernel in a GPU kernel's place."""
    rng = np.random.default_rng(0)
    for case in map(tiny, _cases.cases("forward")):
        rows = _forward.run_case(arrays, case, OURS, PLAN, rng)
        measured = {row.result.implementation.impl: row for row in rows if not is_failure(row)}
        failed = [row for row in rows if is_failure(row)]
        assert {"cpu", "auto"} <= measured.keys(), (case, failed)
        assert all(f.implementation.is_torch and f.refused for f in failed), (case, failed)
        if any(item.impl == "torch_sdpa" for item in case.beside):
            assert "torch_sdpa" in measured, (case, failed)
        for row in measured.values():
            written = row.row()
            assert written["suite"] == case.suite
            assert 0 <= written["error"] <= written["worst_row_error"] or written["error"] < 1e-7
            assert row.right, (case, written)


def is_failure(row: Any) -> bool:
    return isinstance(row, _suite.Failure)


def test_a_graph_holds_many_calls(arrays: TorchArrays, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []
    repeated = arrays.repeated

    def counting(call: _arrays.Call, count: int) -> _arrays.Call:
        counts.append(count)
        return repeated(call, count)

    monkeypatch.setattr(arrays, "repeated", counting)

    def time_calls(call: _arrays.Call, count: int) -> list[float]:
        return [2000.0] * count

    monkeypatch.setattr(arrays, "time_calls", time_calls)
    case = tiny(_cases.cases(_cases.SMALL)[0])
    rows = _forward.run_case(arrays, case, OURS[:1], PLAN, np.random.default_rng(0))
    assert counts == [_cases.GRAPH_CALLS] * 2  # ours and SDPA
    assert [row.row()["us"] for row in rows] == [100.0, 100.0]
    assert {row.row()["timing"] for row in rows} == {"graph"}


# --- the command ----------------------------------------------------------------------------------


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command believes in a GPU, whose kernel and tensors are the CPU's."""
    device = {"name": "Test GPU", "compute_capability": 90, "multiprocessors": 132}
    for place in (_forward, _suite, sys.modules["fastattn.benchmark._meta"]):
        monkeypatch.setattr(place, "gpus", lambda: [device])
    monkeypatch.setattr(fastattn, "kernels", lambda: (replace(KERNEL, backend="cuda"),))
    monkeypatch.setattr(_forward, "torch_for", lambda device: TorchArrays("cpu"))
    monkeypatch.setattr(_suite, "sm_clock", lambda arrays, rng: 1755)
    monkeypatch.setitem(_suite._CEILING_SIZES, "cpu", 64)
    monkeypatch.setattr(_machine, "nvidia_smi", lambda field: "580.1")
    monkeypatch.setattr(_machine, "_smi_command", lambda fields: ["echo", "1700, 600"])
    every = _cases.cases
    monkeypatch.setattr(_cases, "cases", lambda suite: [tiny(case) for case in every(suite)])


SHORT = ("--warmup", "0", "--repetitions", "3", "--max-seconds", "0.01")


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str]:
    status = main([*argv, *SHORT])
    return status, capsys.readouterr().out


@pytest.mark.usefixtures("fake_gpu")
def test_the_whole_suite_end_to_end(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "forward.json"
    status, text = run(capsys, "--suite", "forward", "--json", str(file))
    assert status == 0, text
    record = benchmark.load_record(file)
    assert {row["suite"] for row in record["rows"]} == set(_cases.SUITES)
    assert list(record["meta"]["suites"]) == list(_cases.SUITES)
    assert record["meta"]["sm_clock_mhz"] == 1755
    assert record["meta"]["ceilings"].keys() == {"float16", "bfloat16", "float32"}
    ours = [row for row in record["rows"] if row["impl"] == "cpu"]
    assert len(ours) == len(_cases.cases("forward"))
    windows = [row["window"] for row in ours if row["window"]]
    assert windows == [[9, 0], [9, 9]] * 2
    for name, make in _forward_report.TABLES.items():
        table = make(record)
        assert table.rows, name
        assert all(len(cells) == len(table.head) == len(table.align) for cells in table.rows)
    assert "Test GPU" in _forward_report.caption(record)
    suites = record["meta"]["suites"] | {"forward-grid": {"date": "2030-01-02T03:04:05+00:00"}}
    later = record | {"meta": record["meta"] | {"suites": suites}}
    assert "forward-grid is of a later run, 2030-01-02 03:04" in _forward_report.caption(later)
    assert re.search(r"^forward-small: [\d.]+ s", text, re.MULTILINE)
    assert "v6" not in text  # a goal whose kernel has no row is no line


def test_a_record_is_shown_without_a_gpu(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "forward.json"
    file.write_text(benchmark.dump_record(make_record()))
    status, text = run(capsys, "--suite", "forward", "--from", str(file))
    assert status == 0
    assert "Test GPU" in text
    assert "MISSED  v6, float16: speed over torch's FlashAttention-2" in text
    file.write_text('{"meta": {}, "rows": []}')
    status, text = run(capsys, "--suite", "forward", "--from", str(file))
    assert status == 2
    assert "a field missing" in text


def test_nothing_is_promised_for_the_worst_input() -> None:
    worst, other = (
        next(case for case in _cases.cases(_cases.STRESS) if case.inputs == inputs)
        for inputs in (_cases.WORST_INPUT, "all 1e4")
    )
    timing = _suite.Timing(1.0, 0.0, 1.0, 3)
    verdicts = [
        _forward.Measured(case, _suite.Result(OURS[0], case.problem, timing, 1e-4, 1e-5), 1.0, 4)
        for case in (worst, other)
    ]
    assert [row.right for row in verdicts] == [True, False]


@pytest.mark.usefixtures("fake_gpu")
def test_options_choose_cases_and_kernels(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "forward.json"
    argv = ("--suite", "forward-grid", "--dtype", "bfloat16", "--head-dim", "64", "--causal")
    status, text = run(capsys, "auto", *argv, "--no-compare", "--json", str(file))
    assert status == 0, text
    rows = benchmark.load_record(file)["rows"]
    assert [(row["impl"], row["dtype"], row["head_dim"], row["causal"]) for row in rows] == [
        ("auto", "bfloat16", 64, True)
    ] * 3
    status, text = run(capsys, "--suite", "forward-grid", "--head-dim", "3")
    assert status == 2
    assert "no such case" in text
    status, text = run(capsys, "v99", "--suite", "forward-grid")
    assert status == 2
    assert "'v99' is none of cpu, auto" in text


@pytest.mark.usefixtures("fake_gpu")
@pytest.mark.parametrize(
    ("value", "message"), [(1.01, "WRONG"), (float("nan"), "NaN or infinities")]
)
def test_a_wrong_kernel_fails_the_run(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    value: float,
    message: str,
) -> None:
    right = fastattn.forward

    def wrong(q: Any, k: Any, v: Any, **kwargs: Any) -> Any:
        kwargs["kernel"] = "cpu"
        result = right(q, k, v, **kwargs)
        kwargs["out"][-1, -1] *= value
        return result

    monkeypatch.setattr(fastattn, "forward", wrong)
    status, text = run(capsys, "--suite", "forward-small")
    assert status == 1
    assert message in text


@pytest.mark.usefixtures("fake_gpu")
def test_a_lost_gpu_ends_the_run_with_what_there_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    right, lost = fastattn.forward, []

    def breaks(q: Any, k: Any, v: Any, **kwargs: Any) -> Any:
        if q.shape[-1] == 128:
            lost.append(True)
            raise RuntimeError("an illegal memory access was encountered")
        return right(q, k, v, **kwargs)

    def synchronize(self: TorchArrays) -> None:
        if lost:
            raise RuntimeError("the same again")

    monkeypatch.setattr(fastattn, "forward", breaks)
    monkeypatch.setattr(TorchArrays, "synchronize", synchronize)
    file = tmp_path / "forward.json"
    status, text = run(capsys, "--suite", "forward-fp32", "--json", str(file))
    assert status == 1
    assert "the GPU is lost to this process: cpu: an illegal memory access" in text
    assert {row["head_dim"] for row in benchmark.load_record(file)["rows"]} == {64}


@pytest.mark.parametrize("suite", ["forward", "auto"])
def test_without_a_gpu_the_command_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, suite: str
) -> None:
    monkeypatch.chdir(ROOT)
    for module in (_forward, _auto):
        monkeypatch.setattr(module, "gpus", list)
    status, text = run(capsys, "--suite", suite)
    assert status == 2
    assert "needs a GPU" in text
    assert len(text.splitlines()) == 1


@pytest.mark.parametrize(
    "argv",
    [
        ["--suite", "backward"],
        ["--suite", "forward", "--batch-size", "2"],
        ["--suite", "forward", "--device", "cpu"],
        ["cpu", "--quick"],
    ],
)
def test_usage_errors(argv: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2


# --- tables and goals -----------------------------------------------------------------------------


def make_row(case: _cases.Case, impl: str, us: float, error: float) -> dict[str, Any]:
    item = _suite.Implementation(impl, impl, impl)
    timing = _suite.Timing(us, 0.0, us, 50)
    result = _suite.Result(item, case.problem, timing, error, error)
    return _forward.Measured(case, result, 2 * error, 4).row()


def make_record() -> dict[str, Any]:
    """Made-up times: v6 at 400 TFLOP/s beside 380, but for one cell; and so on."""
    rows = []
    for case in _cases.cases("forward"):
        half = case.problem.dtype != "float32"
        speed = ({} if half else {"v5": 42.0}) | {"v6": 400.0 if half else 120.0}
        speed |= {"auto": speed["v6"], "torch_sdpa": 300.0 if half else 34.0}
        speed |= {"torch_fa2": 380.0, "torch_cudnn": 600.0, "torch_naive": 25.0}
        if case.name == "D=64 causal N=512":
            speed["v6"] = 342.0
        for impl, rate in speed.items():
            if not impl.startswith("torch_") or impl in [item.impl for item in case.beside]:
                us = case.problem.flops / rate * 1e-6
                rows.append(make_row(case, impl, us, 3e-7 if impl[0] == "v" else 6e-7))
    meta = {
        "gpu": "Test GPU",
        "driver": "580.1",
        "cuda": "13.0",
        "torch": "2.11.0",
        "date": "2026-01-02T03:04:05+00:00",
        "ceilings": {"float32": {"tflops": 50.0, "method": "product"}},
        "suites": {"forward-grid": {"seconds": 30.0, "sm_clock_mhz": 1755.0}},
    }
    return {"meta": meta, "rows": rows}


def test_grid_table() -> None:
    table = _forward_report.grid_table(make_record(), "float16")
    assert table.head[:7] == ["D", "mask", "N", "v6", "FA2", "cuDNN", "v6 / FA2"]
    cells = {tuple(row[:3]): row[3:] for row in table.rows}
    assert len(cells) == 18
    assert cells["128", "full", "8192"] == ["400", "380", "600", "1.05", "3.0e-07", "6.0e-07"]
    assert cells["64", "causal", "512"][3] == "0.90"


def test_other_tables() -> None:
    record = make_record()
    (first, *_) = _forward_report.fp32_table(record).rows
    assert first[:7] == ["4, 12", "D=64 N=2048", "42.0", "120", "120", "34.0", "25.0"]
    (first, *_) = _forward_report.stress_table(record).rows
    assert first == ["randn", *["3.0e-07"] * 2, *["6.0e-07"] * 4, *["1.2e-06"] * 2]
    table = _forward_report.small_table(record)
    assert table.head[-3:] == [f"time {impl} / SDPA" for impl in ("v5", "v6", "auto")]
    assert table.rows[0][-3] == "-"  # float16
    assert table.rows[0][-1] == "0.75"  # 300 / 400


def test_goals() -> None:
    record = make_record()
    found = {goal.what: goal for goal in _forward_report.goals(record)}
    cell = found["v6, float16: speed over torch's FlashAttention-2, each cell of the grid"]
    assert (cell.met, cell.measured) == (False, "0.90 at least; 1 of 18 below")
    assert cell.verdict == "MISSED"
    assert found["v6, float16, D=128, N=8192, full: TFLOP/s"].measured == "400"
    large = found["v6, bfloat16, causal: TFLOP/s at D=256 over those at D=128, each N"]
    assert (large.met, large.measured) == (True, "1.00 at least")  # 400 everywhere
    assert found["v5, there: over the matrix product's rate"].measured == "0.84"
    assert found["v5, float32, D=64, N=4096: causal time over full"].measured == "0.50"
    assert found["v6, there: speed over torch's SDPA"].met
    stress = found["v6, float32: error over SDPA's, each input but 'v column 1e5'"]
    assert (stress.met, stress.measured) == (True, "0.50 at most")
    assert all(goal.met is not None for goal in found.values())
    empty = _forward_report.goals({"meta": {}, "rows": []})
    assert [goal.what for goal in empty] == list(found)
    assert all((goal.met, goal.verdict) == (None, "not measured") for goal in empty)


@pytest.mark.parametrize(
    ("tflops", "measured", "verdict"),
    [(39.84, "0.797", "MISSED"), (39.99, "0.7998", "MISSED"), (40, "0.80", "met")],
)
def test_a_value_is_told_from_its_goal(tflops: float, measured: str, verdict: str) -> None:
    record = make_record()
    for row in record["rows"]:
        if (row["impl"], row["case"]) == ("v5", "D=64 N=2048"):
            row["tflops"] = tflops
    goal = next(g for g in _forward_report.goals(record) if g.what.startswith("v5, there: over"))
    assert (goal.measured, goal.verdict) == (measured, verdict)


def test_a_worse_error_on_one_input_misses_the_goal() -> None:
    record = make_record()
    for row in record["rows"]:
        if (row["impl"], row["inputs"]) == ("v6", "all 1e-20"):
            row["error"] = 6.1e-7
        if (row["impl"], row["inputs"]) == ("v6", _cases.WORST_INPUT):
            row["error"] = 1e-3  # documented, not promised
        if row["inputs"] == "all 1e4, one-hot":
            row["error"] = 5e-8 if row["impl"] == "v6" else 0.0  # less than a rounding
    goal = next(g for g in _forward_report.goals(record) if g.what.startswith("v6, float32: error"))
    assert (goal.met, goal.measured) == (False, "1.02 at most; 1 of 9 above")


def test_pages_show_every_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/benchmark.md is filled from a record as soon as there is one."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    tables, update = (importlib.import_module(f"docs_{name}") for name in ("tables", "update"))
    monkeypatch.setattr(tables, "forward_record", make_record)
    report = update.Report()
    page = update.render_page((ROOT / "docs" / "benchmark.md").read_text(), report, "page")
    assert report.missing == []
    for name, make in _forward_report.TABLES.items():
        table = make(make_record())
        block = page.partition(f"<!-- table: forward {name} -->")[2].partition("<!-- /table -->")[0]
        assert len(block.strip().splitlines()) == 2 + len(table.rows), name
    assert "-->Test GPU (driver 580.1, CUDA 13.0, torch 2.11.0, median SM clock of " in page
    fields = {"case": "D=128 full N=8192", "dtype": "float16"}
    assert tables.forward_row(_cases.GRID, "v6", **fields)["tflops"] == pytest.approx(400)
    with pytest.raises(LookupError, match="no row of v9"):
        tables.forward_row(_cases.GRID, "v9", **fields)


# --- the clock ------------------------------------------------------------------------------------


def test_clock_log_summarises_what_the_tool_says(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter(["1980, 300.5", "[N/A], 1", "1500, 690.0", "1700, 650"])
    done = threading.Event()

    def command(fields: str) -> list[str]:
        answer = next(answers, None)
        if answer is None:
            done.set()
            return ["false"]
        return ["echo", answer]

    monkeypatch.setattr(_machine, "_smi_command", command)
    with _machine.ClockLog(every=0.0) as log:
        assert done.wait(10)
        assert log.since(0.0) == {
            "sm_clock_mhz": 1700.0,
            "sm_clock_mhz_low": 1500.0,
            "sm_clock_mhz_high": 1980.0,
            "watts_high": 690.0,
        }
        assert log.since(float("inf")) is None


def test_clock_log_without_the_tool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_machine, "_smi_command", lambda fields: ["/no/such/program"])
    with _machine.ClockLog() as log:
        assert log.since(0.0) is None


# --- on a GPU -------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_every_case_runs_on_the_gpu() -> None:
    arrays, rng = TorchArrays("cuda"), np.random.default_rng(0)
    ours = _forward.kernels("cuda")
    for case in map(tiny, _cases.cases("forward")):
        if not any(item.kernel and item.refusal(case.problem) is None for item in ours):
            continue
        rows = _forward.run_case(arrays, case, ours, PLAN, rng)
        measured = [row for row in rows if not is_failure(row)]
        failed = [row for row in rows if is_failure(row)]
        assert all(f.refused for f in failed), (case, failed)
        assert any(not row.result.implementation.is_torch for row in measured), (case, failed)
        for row in measured:
            assert row.right, (case, row)
            assert row.result.timing.us > 0


@pytest.mark.gpu
@pytest.mark.parametrize("changes", MASKS[1:-1])
def test_torchs_flash_attention_computes_the_same_problem(changes: dict[str, Any]) -> None:
    problem = replace(
        BASE, dtype="float16", heads_q=2, head_dim=64, head_dim_v=64, len_q=65, len_kv=130
    )
    problem = replace(problem, **changes)
    arrays = TorchArrays("cuda")
    tensors = [x.half().cuda() for x in inputs_of(problem)]
    out = _torch_ways.TORCH["torch_fa2"](arrays, problem, *tensors)()
    assert fastattn.testing.error(out, reference(problem, tensors)[0]) < 4 * 2.0**-11
