"""The rules of "auto": the committed file, how rules follow from times, and the command."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))

import docs_tables

import fastattn
from fastattn.benchmark import _auto, _record
from fastattn.benchmark.__main__ import main
from fastattn.benchmark._arrays import Problem, TorchArrays
from fastattn.benchmark._auto import Cell, Rule
from fastattn.benchmark._suite import Implementation, Result

ROOT = Path(__file__).resolve().parent.parent
Us = Callable[[Problem, str], float]


def grid(dim: int = 64, dtype: str = "float32") -> list[Problem]:
    return [
        Problem(dtype, 1, heads, heads, m, n, dim, dim)
        for heads in (1, 16)
        for m, n in ((64, 64), (256, 256), (2048, 2048), (1, 8192), (64, 8192))
    ]


def record(us: Us, problems: list[Problem], gpu: str = "NVIDIA H200") -> dict[str, Any]:
    """As the command writes one, with times by a formula."""
    rows = [
        {"suite": _auto.SUITE, "impl": impl, "us": us(problem, impl)}
        | {name: getattr(problem, name) for name in _auto.SHAPE}
        for problem in problems
        for impl in ("v5", "v6")
    ]
    meta = {"gpu": gpu, "date": "2026-01-02T03:04:05+00:00", "source_hash": "c0ffee"}
    return {"meta": meta, "rows": rows}


def startup(problem: Problem, impl: str) -> float:
    """V6 is three times as fast, once it has started."""
    return 30 + _auto.work(problem) * 1e-5 if impl == "v6" else 10 + _auto.work(problem) * 3e-5


# --- the committed file ---------------------------------------------------------------------------


def test_the_rules_are_what_the_records_say() -> None:
    text = _auto.rules_file(ROOT).read_text()
    assert text == _auto.render(_auto.records(ROOT)), f"out of date: {_auto.COMMAND} --from FILE"


def test_every_line_is_a_rule_and_names_a_kernel_of_the_registry() -> None:
    text = _auto.rules_file(ROOT).read_text()
    rules = _auto.read_rules(text)
    assert len(rules) == text.count("\nFASTATTN_AUTO_RULE(") > 0
    registry = (ROOT / "src" / "cuda" / "kernels.def").read_text()
    for rule in rules:
        assert f"FASTATTN_CUDA_KERNEL({rule.kernel}, " in registry
        assert rule.line in text


# --- rules ----------------------------------------------------------------------------------------


def test_limits_include_their_value_and_0_is_none() -> None:
    problem = Problem("float32", 2, 3, 3, 5, 7, 64, 64)
    assert _auto.work(problem) == 210
    rule = Rule("kFullRate", "float32", 64, 5, 7, 210, "v5")
    assert rule.holds("kFullRate", problem)
    assert not rule.holds("kHalfRate", problem)
    assert not rule.holds("kFullRate", replace(problem, dtype="float16"))
    for name in ("head_dim", "head_dim_v", "len_q", "len_kv", "batch"):
        assert not rule.holds("kFullRate", replace(problem, **{name: getattr(problem, name) + 1}))
    unlimited = Rule("kFullRate", "float32", 0, 0, 0, 0, "v5")
    assert unlimited.holds("kFullRate", Problem("float32", 99, 99, 99, 9999, 9999, 256, 256))


def test_the_first_rule_that_holds_and_whose_kernel_is_able_decides() -> None:
    problem = Problem("float32", 1, 1, 1, 64, 64, 64, 64)
    rules = [
        Rule("kFullRate", "float32", 0, 32, 0, 0, "v4"),
        Rule("kFullRate", "float32", 0, 64, 0, 0, "v6"),
        Rule("kFullRate", "float32", 0, 0, 0, 0, "v5"),
    ]
    assert _auto.preferred(rules, "kFullRate", problem, ["v4", "v5", "v6", "v7"]) == "v6"
    assert _auto.preferred(rules, "kFullRate", problem, ["v4", "v5", "v7"]) == "v5"
    assert _auto.preferred(rules, "kFullRate", problem, ["v4", "v7"]) == "v7"
    assert _auto.preferred(rules, "kHalfRate", problem, ["v4", "v5", "v6"]) == "v6"


def test_a_geforce_card_is_half_rate() -> None:
    assert _auto.gpu_class("NVIDIA GeForce RTX 4090") == "kHalfRate"
    assert {_auto.gpu_class(f"NVIDIA {name}") for name in ("H200", "L40S")} == {"kFullRate"}


# --- rules from times -----------------------------------------------------------------------------


def test_a_threshold_is_found() -> None:
    rules = _auto.measured_rules(record(startup, grid()))
    # Equal at 1e6 scores; the largest that is measured below is 8192 * 64.
    assert rules == [
        Rule("kFullRate", "float32", 0, 0, 0, 64 * 8192, "v5"),
        Rule("kFullRate", "float32", 0, 0, 0, 0, "v6"),
    ]


def test_a_winner_everywhere_is_one_rule() -> None:
    slower: Us = lambda p, impl: 1 + _auto.work(p) * (2e-5 if impl == "v6" else 1e-5)  # noqa: E731
    assert _auto.measured_rules(record(slower, grid())) == [
        Rule("kFullRate", "float32", 0, 0, 0, 0, "v5")
    ]


def test_no_line_for_what_gains_less_than_it_is_worth() -> None:
    def close(problem: Problem, impl: str) -> float:
        small = problem.len_kv == 64
        return 100 * (1.02 if small == (impl == "v6") else 1.0)

    rules = _auto.measured_rules(record(close, grid()))
    assert [(rule.kernel, rule.keys_max) for rule in rules] == [("v6", 0)]


def test_few_queries_and_much_work_make_two_rules() -> None:
    def us(problem: Problem, impl: str) -> float:
        small = problem.len_q <= 64 or _auto.work(problem) <= 256 * 256
        return 100.0 if small == (impl == "v5") else 150.0

    made = record(us, grid())
    rules = _auto.measured_rules(made)
    assert len(rules) == 3
    assert _auto.loss(rules, _auto.cells(made), "kFullRate") == 0


def test_head_dims_share_rules_where_they_are_the_same() -> None:
    alike = _auto.measured_rules(record(startup, [*grid(64), *grid(128), *grid(256)]))
    assert [rule.head_dim_max for rule in alike] == [0, 0]

    def by_dim(problem: Problem, impl: str) -> float:
        return 2.0 if (problem.head_dim == 64) == (impl == "v5") else 1.0

    rules = _auto.measured_rules(record(by_dim, [*grid(64), *grid(128), *grid(256)]))
    assert [(rule.head_dim_max, rule.kernel) for rule in rules] == [(64, "v6"), (0, "v5")]


def test_a_dtype_that_one_kernel_takes_has_no_rule() -> None:
    made = record(startup, grid(dtype="float16"))
    made["rows"] = [row for row in made["rows"] if row["impl"] == "v6"]
    assert _auto.measured_rules(made) == []


def test_a_loss_is_of_time() -> None:
    cell = Cell(grid()[0], {"v5": 10.0, "v6": 20.0})
    assert cell.fastest == "v5"
    assert cell.loss("v5") == 0
    assert np.exp(cell.loss("v6")) == pytest.approx(2)


# --- the file -------------------------------------------------------------------------------------


def test_what_no_card_measured_is_arithmetic_and_says_so() -> None:
    text = _auto.render({})
    assert "kHalfRate: by arithmetic" in text
    assert _auto.read_rules(text) == [Rule("kHalfRate", "float32", 0, 0, 0, 0, "v5")]
    measured = _auto.render({"kFullRate": record(startup, grid())})
    assert "// kFullRate: measured on NVIDIA H200\nFASTATTN_AUTO_RULE(" in measured
    assert "kHalfRate: by arithmetic" in measured
    assert len(_auto.read_rules(measured)) == 3
    both = _auto.render(
        {
            "kFullRate": record(startup, grid()),
            "kHalfRate": record(startup, grid(), "NVIDIA GeForce RTX 4090"),
        }
    )
    assert "arithmetic" not in both
    assert len(_auto.read_rules(both)) == 4
    for each in (text, measured, both):
        assert max(map(len, each.splitlines())) <= 100


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A source tree, and the working directory in it."""
    for folder in ("include/fastattn", "src/core", "benchmarks/results"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "include" / "fastattn" / "fastattn.h").write_text("")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_from_a_record_the_file_is_written_without_a_gpu(
    tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = record(startup, grid())
    (tree / "h200.json").write_text(_record.dump_record(made))
    assert main(["--suite", "auto", "--from", "h200.json"]) == 0
    said = capsys.readouterr().out
    assert "10 cells: what the rules take needs 0.0% longer" in said
    assert "written" in said
    assert _auto.rules_file(tree).read_text() == _auto.render({"kFullRate": made})
    # The record of another class of GPU in the tree keeps its part.
    geforce = record(startup, grid(), "NVIDIA GeForce RTX 4090")
    (tree / "benchmarks" / "results" / "auto-rtx.json").write_text(_record.dump_record(geforce))
    assert main(["--suite", "auto", "--from", "h200.json"]) == 0
    text = _auto.render({"kFullRate": made, "kHalfRate": geforce})
    assert _auto.rules_file(tree).read_text() == text
    assert main(["--suite", "auto", "--from", "h200.json"]) == 0
    assert "up to date" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["{", '{"meta": {}, "rows": []}', '{"meta": 1, "rows": []}'])
def test_what_is_no_record_leaves_the_file(
    tree: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    (tree / "odd.json").write_text(text)
    assert main(["--suite", "auto", "--from", "odd.json"]) == 2
    assert "odd.json" in capsys.readouterr().out
    assert not _auto.rules_file(tree).exists()


def test_without_a_source_tree_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["--suite", "auto"]) == 2
    assert "no fastattn source tree" in capsys.readouterr().out


def test_without_a_gpu_it_says_so(
    tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_auto, "gpus", list)
    assert main(["--suite", "auto"]) == 2
    assert "no GPU is seen" in capsys.readouterr().out
    assert not _auto.rules_file(tree).exists()


def test_the_page_s_tables(monkeypatch: pytest.MonkeyPatch, tree: Path) -> None:
    made = record(startup, [*grid(64), *grid(128)])
    _auto.rules_file(tree).write_text(_auto.render({"kFullRate": made}))
    monkeypatch.setattr(docs_tables, "auto_record", lambda: made)
    monkeypatch.setattr(docs_tables.docs_facts, "ROOT", tree)
    rows = docs_tables.table("auto_rules").splitlines()
    assert rows[2] == "| full rate | float32 | any | any | any | 524,288 | `v5` |"
    assert rows[-1] == "| half rate | float32 | any | any | any | any | `v5` |"
    square = docs_tables.table("auto_grid float32 64 square").splitlines()
    assert square[0] == "| B·H | N=64 | N=256 | N=2048 |"
    # 1 * 64 * 64 scores: 10.12 and 30.04; 16 * 2048 * 2048: 2023 and 701.
    assert square[2].startswith("| 1 | v5 2.97 |")
    assert square[3].endswith("| v6 2.89 |")
    few = docs_tables.table("auto_grid float32 128 few").splitlines()
    assert few[0] == "| M | B·H | N=8192 |"
    assert [row.split(" | ")[:2] for row in few[2:]] == [
        ["| 1", "1"],
        ["| 64", "1"],
        ["| 1", "16"],
        ["| 64", "16"],
    ]
    assert docs_tables.auto_loss() == {"mean": 0, "most": 0, "cells": 20}
    # Where the rules take another kernel, the cell says so.
    _auto.rules_file(tree).write_text(_auto.render({}))
    square = docs_tables.table("auto_grid float32 64 square").splitlines()
    assert square[2].startswith("| 1 | v5 2.97 (*) |")
    assert docs_tables.auto_loss()["most"] > 100
    with pytest.raises(docs_tables.MissingRecordError):
        docs_tables.table("auto_grid float32 256 square")


# --- measurement ----------------------------------------------------------------------------------


def test_the_grid_has_every_kind_of_call_once() -> None:
    cases = _auto.cases("float32")
    assert len({case.name for case in cases}) == len(cases)
    assert len({case.problem for case in cases}) == len(cases)
    assert {case.problem.head_dim for case in cases} == {64, 128, 256}
    assert {case.graph for case in cases} == {True, False}
    for dim in (64, 128, 256):
        shapes = {(c.problem.len_q, c.problem.len_kv) for c in cases if c.problem.head_dim == dim}
        assert {(64, 64), (4096, 4096), (1, 1024), (1, 32768), (128, 8192)} <= shapes
    assert max(case.problem.flops for case in cases) <= 1.5e12


@pytest.fixture
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command's way on a GPU, with the CPU kernel and an emulated rung, which is slower."""
    pytest.importorskip("torch")
    known = {k.name: k for k in fastattn.kernels(emulated=True)}
    if not known:
        pytest.skip("this build has no emulation")
    items = [
        Implementation(name, name, kernel.title, kernel)
        for name, kernel in {"v5": known["v5"], "cpu": fastattn.kernels()[0]}.items()
    ]
    grid_cases = [
        replace(case, problem=replace(case.problem, batch=1, heads_q=1, heads_kv=1), graph=False)
        for case in _auto.cases("float32")
        if case.problem.len_q == case.problem.len_kv == 64 and case.problem.heads_q == 1
    ]
    assert {case.problem.head_dim for case in grid_cases} == {64, 128, 256}
    new_record = _auto.new_record

    def on_h200(seed: int) -> dict[str, Any]:
        made = new_record(seed)
        made["meta"]["gpu"] = "NVIDIA H200"
        return made

    for name, value in {
        "gpus": lambda: [{"name": "NVIDIA H200"}],
        "torch_for": lambda device: TorchArrays("cpu"),
        "candidates": lambda device: {"float32": items, "float16": items[1:]},
        "cases": lambda dtype: grid_cases[:2],
        "new_record": on_h200,
    }.items():
        monkeypatch.setattr(_auto, name, value)
    monkeypatch.setattr(_auto._suite, "sm_clock", lambda arrays, rng: 1980)


QUICK = ("--warmup", "0", "--repetitions", "3", "--max-seconds", "0.01")


def test_the_whole_command(
    on_the_cpu: None, tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--suite", "auto", *QUICK]) == 0
    said = capsys.readouterr().out
    assert "float16: no two kernels to choose from" in said
    assert re.search(r"float32 D=64 BH=1 M=64 N=64 .* cpu\n", said)
    assert "2 cells: what the rules take needs 0.0% longer" in said
    path = tree / "benchmarks" / "results" / "auto-nvidia-h200.json"
    made = _record.load_record(path)
    assert [row["impl"] for row in made["rows"]] == ["v5", "cpu"] * 2
    assert {row["suite"] for row in made["rows"]} == {"auto"}
    assert all(0 < row["error"] < 1e-6 for row in made["rows"])
    text = _auto.rules_file(tree).read_text()
    assert text == _auto.render(_auto.records(tree))
    assert [(rule.kernel, rule.gpu) for rule in _auto.read_rules(text)] == [
        ("cpu", "kFullRate"),
        ("v5", "kHalfRate"),
    ]


def test_a_wrong_kernel_makes_no_rules(
    on_the_cpu: None,
    tree: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(
        Result, "right", property(lambda result: result.implementation.impl != "v5")
    )
    assert main(["--suite", "auto", "--json", "own.json", *QUICK]) == 1
    said = capsys.readouterr().out
    assert "float32 D=64 BH=1 M=64 N=64: WRONG" in said
    assert "the rules stay as they are" in said
    assert (tree / "own.json").is_file()
    assert not _auto.rules_file(tree).exists()


def test_candidates_take_every_mask() -> None:
    found = _auto.candidates("cpu")
    assert {dtype: [item.selector for item in items] for dtype, items in found.items()} == {
        dtype: ["cpu"] for dtype in ("float32", "float16", "bfloat16")
    }
