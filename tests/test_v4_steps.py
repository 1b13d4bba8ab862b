"""V4's steps: the patches lead from V3 to V4, every step compiles, and the command tells the truth.

The command's own code runs here without a GPU, over a stand-in that computes on the host.
"""

from __future__ import annotations

import ctypes
import json
import shutil
import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fastattn import testing
from fastattn.benchmark import load_record
from fastattn.benchmark._arrays import Problem

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "benchmarks" / "v4_steps"
# The command finds the modules beside it as a script does.
sys.path.insert(0, str(FOLDER))

import step_library  # noqa: E402
import step_record  # noqa: E402
import step_sources  # noqa: E402
from step_library import Builder, BuildError, Compiled, CompileError, Launched  # noqa: E402
from step_sources import STEPS, V4, PatchError  # noqa: E402


def load_command() -> ModuleType:
    loader = SourceFileLoader("v4_steps_run", str(FOLDER / "run.py"))
    spec = spec_from_loader(loader.name, loader)
    assert spec is not None
    module = module_from_spec(spec)
    sys.modules[loader.name] = module  # dataclasses look their module up
    loader.exec_module(module)
    return module


command = load_command()
RECORDS = sorted((ROOT / "benchmarks" / "results").glob("v4-steps-*.json"))
SMALL = Problem("float32", 2, 3, 3, 33, 33, 16, 16)


def has_nvcc() -> bool:
    try:
        step_library.find_nvcc()
    except BuildError:
        return False
    return True


needs_nvcc = pytest.mark.skipif(not has_nvcc(), reason="nvcc is not found")


# --- the patches ----------------------------------------------------------------------------------


def test_the_patches_lead_from_v3_to_v4() -> None:
    texts = step_sources.sources()
    assert len(texts) == len(STEPS)
    kernels = ROOT / "src" / "cuda" / "kernels"
    for step, rung in ((0, "v3_warp_local.cu"), (V4, "v4_vectorized.cu")):
        source = (kernels / rung).read_text()
        # The rest of the file is the comment that opens it.
        assert source.endswith("\n" + texts[step])
        comment = source[: -len(texts[step])].splitlines()
        assert all(line.startswith("//") or not line for line in comment)
    assert len(set(texts)) == len(STEPS)


def test_each_step_changes_what_its_title_says() -> None:
    texts = step_sources.sources()

    def first_with(what: str) -> int:
        return next(step for step, text in enumerate(texts) if what in text)

    def first_without(what: str) -> int:
        return next(step for step, text in enumerate(texts) if what not in text)

    names = [step.name for step in STEPS]
    assert names[first_with("float4*>(target)")] == "vector_copies"
    assert names[first_with("kKeyStride = kHeadDim + 1")] == "padded_keys"
    assert names[first_without("std::size_t")] == "narrow_indices"
    assert names[first_with("#pragma unroll 4")] == "bounded_unrolling"
    assert "#pragma unroll 4" not in texts[V4 + 1]
    assert "#pragma unroll 1" not in texts[V4 + 1]
    # The control: V3 and one line.
    assert len(texts[-1].splitlines()) == len(texts[0].splitlines()) + 1
    assert texts[-1].replace("#pragma unroll 4\n", "") == texts[0]
    plans = [step_sources.plan_of(text) for text in texts]
    assert plans == [(256, 32768)] * 2 + [(256, 32896)] * 4 + [(256, 32768)]


PATCH = "why\n\n--- a/x\n+++ b/x\n@@ -2,3 +2,3 @@\n b\n-c\n+C\n d\n"


def test_a_patch_applies_where_its_lines_have_moved() -> None:
    assert step_sources.apply("a\nb\nc\nd\n", PATCH, "x") == "a\nb\nC\nd\n"
    assert step_sources.apply("new\n" * 9 + "b\nc\nd\n", PATCH, "x") == "new\n" * 9 + "b\nC\nd\n"
    twice = "b\nc\nd\n" + "-\n" * 5 + "b\nc\nd\n"
    assert step_sources.apply(twice, PATCH, "x") == twice.replace("c", "C", 1)


@pytest.mark.parametrize(
    ("text", "patch", "said"),
    [
        ("a\nb\nx\nd\n", PATCH, r"fix.patch: hunk 1 of 1 does not fit; it looks for:\n  b\n  c\n"),
        ("b\nc\nd\n", "no hunk", "fix.patch: no hunk"),
        ("b\nc\nd\n", PATCH + "odd\n", "not a line of a unified diff: 'odd'"),
        # The second hunk's lines stand before the first's.
        ("e\nb\nc\nd\n", PATCH + "@@ -9,1 +9,1 @@\n-e\n+E\n", "hunk 2 of 2 does not fit"),
    ],
)
def test_a_patch_that_does_not_fit_says_where(text: str, patch: str, said: str) -> None:
    with pytest.raises(PatchError, match=said):
        step_sources.apply(text, patch, "fix.patch")


@pytest.fixture
def own_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Copies of the rungs and patches, to be changed."""
    for name, folder in (("KERNELS", step_sources.KERNELS), ("PATCHES", step_sources.PATCHES)):
        monkeypatch.setattr(step_sources, name, tmp_path / name)
        shutil.copytree(folder, tmp_path / name)
    return tmp_path


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_a_change_of_a_rung_alone_is_found(own_tree: Path) -> None:
    step_sources.sources()
    edit(own_tree / "KERNELS" / "v4_vectorized.cu", "// [rows, D]", "// [rows, 64]")
    with pytest.raises(PatchError, match=r"do not lead from V3 to V4(.|\n)*\+.*// \[rows, 64\]"):
        step_sources.sources()


def test_the_opening_comment_may_change(own_tree: Path) -> None:
    before = step_sources.sources()
    for rung in (own_tree / "KERNELS").glob("v[34]_*.cu"):
        rung.write_text("// Measured        a thousand times\n" + rung.read_text())
    assert step_sources.sources() == before


def test_patches_are_mended_step_by_step(
    own_tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = step_sources.sources()
    old_patches = {path.name: path.read_text() for path in (own_tree / "PATCHES").iterdir()}
    # The same rename in V3 and V4, through lines that the first patch looks for.
    for rung in (own_tree / "KERNELS").glob("v[34]_*.cu"):
        edit(rung, "load_tile", "copy_tile")
    work = own_tree / "work"
    assert command.main(["--write-sources", str(work)]) == 2
    assert "1_vector_copies.patch: hunk" in capsys.readouterr().out
    assert [path.name for path in work.iterdir()] == ["0_v3.cu"]
    for step in range(1, len(STEPS)):
        mended = before[step].replace("load_tile", "copy_tile")
        (work / step_sources.source_name(step)).write_text(mended)
    assert command.main(["--read-sources", str(work)]) == 0
    assert step_sources.sources()[V4] == before[V4].replace("load_tile", "copy_tile")
    for path in (own_tree / "PATCHES").iterdir():
        assert path.read_text().partition("--- ")[0] == old_patches[path.name].partition("--- ")[0]


def test_published_figures_agree_with_those_of_the_other_pages() -> None:
    published = json.loads((ROOT / "docs" / "ladder" / "published.json").read_text())
    last = STEPS[V4 - 1]  # the published V4 ends there
    assert last.published_us == published["us"]["v4"]
    profile = published["profile"]["v4"]
    assert last.published_registers == profile["registers"]
    assert last.published_blocks == profile["blocks_per_sm"]


# --- the compiler ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Builder, list[Compiled]]:
    builder = Builder(tmp_path_factory.mktemp("v4 steps"), "90", 2)
    return builder, builder.compile(step_sources.sources(), lambda *_: None)


@needs_nvcc
@pytest.mark.slow
def test_every_step_compiles(
    compiled: tuple[Builder, list[Compiled]], record_property: Any
) -> None:
    _, steps = compiled
    plans = [step_sources.plan_of(text) for text in step_sources.sources()]
    blocks = []
    for step, said, plan in zip(STEPS, steps, plans, strict=True):
        record_property(f"{step.name}_registers", said.registers)
        blocks.append(step_library.blocks_per_sm("90", said.registers, *plan))
    # What V4's page says of registers: bounded unrolling is what lets three blocks in.
    assert blocks[V4] == 3
    assert blocks[V4 + 1] is not None
    assert blocks[V4 + 1] < 3
    assert steps[V4].spill_bytes == 0


@needs_nvcc
@pytest.mark.slow
def test_the_library_loads_and_reports_errors(
    compiled: tuple[Builder, list[Compiled]],
) -> None:
    library = compiled[0].link(len(STEPS))
    with pytest.raises(RuntimeError):  # no such step; a CUDA machine would crash on the pointers
        library.run(len(STEPS), (0, 0, 0, 0), (1, 1, 1, 1), 1.0)


PTXAS = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_ZN1a6kernelILb0EEEv' for 'sm_90'
ptxas info    : Function properties for _ZN1a6kernelILb0EEEv
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 70 registers, used 1 barriers
ptxas info    : Compiling entry function '_ZN1a6kernelILb1EEEv' for 'sm_90'
ptxas info    : Function properties for _ZN1a6kernelILb1EEEv
    16 bytes stack frame, 16 bytes spill stores, 28 bytes spill loads
ptxas info    : Used 128 registers, used 1 barriers
"""


def test_ptxas_is_read() -> None:
    assert step_library.parse_ptxas(PTXAS) == Compiled(registers=128, spill_bytes=44)
    plain = PTXAS.replace("ILb1E", "").replace("ILb0E", "ILb0E")
    assert step_library.parse_ptxas(plain) == Compiled(registers=128, spill_bytes=44)
    for odd in ("", PTXAS.replace("ILb0E", "")):
        with pytest.raises(CompileError, match="not of one"):
            step_library.parse_ptxas(odd)


@pytest.mark.parametrize(
    ("arch", "registers", "shared", "blocks"),
    [
        ("89", 80, 32768, 3),  # published: registers and shared memory both allow three
        ("89", 91, 32896, 2),  # published: the fully unrolled V4
        ("90a", 80, 32896, 3),
        ("90", 81, 32896, 2),
        ("90", 32, 32896, 6),  # shared memory
        ("90", 32, 1024, 8),  # threads
        ("75", 32, 32768, 2),
        ("89", 32, 32768, 3),
        ("61", 32, 32768, None),
    ],
)
def test_blocks_per_multiprocessor(
    arch: str, registers: int, shared: int, blocks: int | None
) -> None:
    assert step_library.blocks_per_sm(arch, registers, 256, shared) == blocks


def test_no_nvcc_is_explained(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(step_library.shutil, "which", lambda *_, **__: None)
    monkeypatch.delenv("CUDACXX", raising=False)
    assert command.main(["--compile-only", "--arch", "90"]) == 2
    assert "Install the CUDA toolkit" in capsys.readouterr().out
    monkeypatch.setenv("CUDACXX", "/nowhere/nvcc")
    assert command.main(["--compile-only", "--arch", "90"]) == 2
    assert "CUDACXX: no such compiler: /nowhere/nvcc" in capsys.readouterr().out


# --- the command, over a stand-in for the GPU -----------------------------------------------------


class HostBuffer:
    """CudaBuffer's interface over host memory."""

    def __init__(self, nbytes: int) -> None:
        self.bytes = np.zeros(nbytes, np.uint8)
        self.pointer = self.bytes.ctypes.data

    def copy_from_host(self, host: Any) -> None:
        self.bytes[:] = np.frombuffer(host, np.uint8)

    def copy_to_host(self, host: Any) -> None:
        host.reshape(-1).view(np.uint8)[:] = self.bytes

    def fill(self, value: int) -> None:
        self.bytes[:] = value


class Clock:
    """Time that passes only when a step runs."""

    now = 0.0


class Event:
    """CudaEvent's interface over that clock."""

    def record(self) -> None:
        self.time = Clock.now

    def elapsed_ms(self, end: Event) -> float:
        return end.time - self.time


class HostLibrary:
    """The steps' library, computing on the host: step i takes 10 - i ms."""

    def __init__(self, spoil: Any = None) -> None:
        self.spoil = spoil or (lambda step, out: None)
        self.step = -1

    def run(self, step: int, pointers: list[int], shape: tuple[int, ...], scale: float) -> None:
        batch, heads, len_q, len_kv = shape

        def view(pointer: int, length: int) -> Any:
            size = batch * heads * length * SMALL.head_dim
            memory = (ctypes.c_float * size).from_address(pointer)
            return np.frombuffer(memory, np.float32).reshape(batch, heads, length, SMALL.head_dim)

        q, k, v = (view(p, n) for p, n in zip(pointers, (len_q, len_kv, len_kv), strict=False))
        out = view(pointers[3], len_q)
        out[:] = testing.naive(q, k, v, scale=scale)[0]
        self.spoil(step, out)
        self.step = step
        Clock.now += 10 - step

    def launched(self) -> Launched:
        return Launched(80 + self.step, 0, 256, 32896, 3)


@pytest.fixture
def host_gpu(monkeypatch: pytest.MonkeyPatch) -> HostLibrary:
    """The command sees a GPU and a compiler, both of them stand-ins."""
    library = HostLibrary()

    class HostBuilder:
        def __init__(self, folder: Path, arch: str, jobs: int) -> None:
            assert (arch, jobs) == ("90a", 3)

        def compile(self, texts: list[str], done: Any) -> list[Compiled]:
            assert texts == step_sources.sources()
            for step in range(len(texts)):
                done(step, Compiled(80 + step, 0))
            return [Compiled(80 + step, 0) for step in range(len(texts))]

        def link(self, steps: int) -> HostLibrary:
            assert steps == len(STEPS)
            return library

    found = [{"name": "Stand-in", "compute_capability": 90, "multiprocessors": 1}]
    core = SimpleNamespace(CudaBuffer=HostBuffer, CudaEvent=Event, synchronize=lambda: None)
    monkeypatch.setattr(command, "_core", core)
    monkeypatch.setattr(command, "gpus", lambda: found)
    monkeypatch.setattr(command, "Builder", HostBuilder)
    monkeypatch.setattr(command, "PROBLEM", SMALL)
    monkeypatch.setattr(command.step_library, "find_nvcc", lambda: "false")
    monkeypatch.setattr(command._machine, "sm_clock_under_load", lambda load: load() or 1234)
    return library


ARGS = ["--jobs", "3", "--repetitions", "4", "--warmup", "2", "--seed", "7"]


def test_the_command_measures_every_step(
    host_gpu: HostLibrary, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "new" / "steps.json"
    assert command.main([*ARGS, "--json", str(path)]) == 0
    text = capsys.readouterr().out
    record = load_record(path)
    rows = record["rows"]
    assert [row["us"] for row in rows] == [1e3 * (10 - step) for step in range(len(STEPS))]
    assert [row["registers"] for row in rows] == [80 + step for step in range(len(STEPS))]
    assert [row["impl"] for row in rows] == [step.name for step in STEPS]
    assert all(row["suite"] == "v4_steps" and row["repetitions"] == 4 for row in rows)
    assert all(0 < row["error"] < 1e-6 for row in rows)
    assert rows[0]["tflops"] == pytest.approx(4 * 6 * 33 * 33 * 16 / 10e-3 * 1e-12, rel=1e-4)
    meta = record["meta"]
    assert (meta["sm_clock_mhz"], meta["arch"], meta["seed"]) == (1234, "90a", 7)
    assert len(meta["steps_hash"]) == len(meta["source_hash"]) == 64
    (line,) = (line for line in text.splitlines() if line.split()[:1] == ["1"])
    assert "9000.00" in line
    assert "-10.0%" in line


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda out: out[0, 1, 5, 3:5].fill(np.nan), "NaN"),
        (lambda out: out[1, 0].fill(0.0), "is allowed"),
        (lambda out: np.multiply(out, np.float32(1 + 1e-5), out=out), "is allowed"),
    ],
    ids=["unwritten", "one head", "a little"],
)
def test_a_wrong_step_is_found(
    host_gpu: HostLibrary,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    spoil: Any,
    said: str,
) -> None:
    host_gpu.spoil = lambda step, out: spoil(out) if step == 3 else None
    path = tmp_path / "steps.json"
    assert command.main([*ARGS, "--json", str(path)]) == 1
    text = capsys.readouterr().out
    (line,) = (line for line in text.splitlines() if "WRONG" in line)
    assert line.startswith("  step 3 is WRONG")
    assert said in line
    assert not path.exists()


def test_a_failing_launch_is_reported(
    host_gpu: HostLibrary, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(step: int, out: Any) -> None:
        raise RuntimeError("launch of step: cudaErrorIllegalAddress")

    host_gpu.spoil = fail
    assert command.main(ARGS) == 1
    assert "CUDA failed: launch of step" in capsys.readouterr().out


def test_no_gpu_is_explained(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "gpus", list)
    for arch in ("native", "90"):
        assert command.main(["--arch", arch]) == 2
        text = capsys.readouterr().out
        assert "No GPU is seen" in text or "built without CUDA" in text


@pytest.mark.parametrize(
    "argv",
    [
        ["--from", "x.json"],
        ["--write", "x.md"],
        ["--compile-only", "--json", "x.json"],
        ["--arch", "89,90"],
        ["--repetitions", "0"],
    ],
)
def test_calls_that_make_no_sense(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        command.main(argv)
    assert exit_.value.code == 2
    assert "error" in capsys.readouterr().err


# --- the table ------------------------------------------------------------------------------------


def test_the_table_is_written_into_a_page(
    host_gpu: HostLibrary, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record, page = tmp_path / "steps.json", tmp_path / "v4.md"
    assert command.main([*ARGS, "--json", str(record)]) == 0
    page.write_text(f"# V4\n\n{step_record.BEGIN}\nold\n{step_record.END}\n\nafter\n")
    write = ["--from", str(record), "--write", str(page)]
    assert command.main(write) == 0
    text = page.read_text()
    assert text.startswith("# V4\n\n")
    assert text.endswith(f"{step_record.END}\n\nafter\n")
    assert "old" not in text
    assert "| 3 | 32-bit indices within a tile | 7,000 | -12.5% |" in text
    assert "| 3,810.30 µs, 80 registers, 3 blocks per SM |" in text
    assert "; step 0b adds to step 0." in text
    assert "| 0b | control: V3 with its product over d unrolled by 4 | 4,000 | -60.0% |" in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len(rows) == 2 + len(STEPS)
    assert len({row.count("|") for row in rows}) == 1
    capsys.readouterr()
    assert command.main(write) == 0
    assert "up to date" in capsys.readouterr().out


def test_pages_and_records_that_are_odd(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, record = tmp_path / "page.md", tmp_path / "record.json"
    page.write_text("no markers")
    for contents, said in (
        ("{", "not JSON"),
        ('{"meta": {}, "rows": []}', "no lines <!-- v4-steps:begin -->"),
    ):
        record.write_text(contents)
        assert command.main(["--from", str(record), "--write", str(page)]) == 2
        assert said in capsys.readouterr().out
    page.write_text(f"{step_record.BEGIN}\n{step_record.END}\n")
    for contents, said in (
        ('{"meta": {}, "rows": []}', 'no rows of the suite "v4_steps"'),
        ('{"meta": {}, "rows": [{"suite": "v4_steps"}]}', "field missing"),
    ):
        record.write_text(contents)
        assert command.main(["--from", str(record), "--write", str(page)]) == 2
        assert said in capsys.readouterr().out


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_committed_records_are_whole(path: Path) -> None:
    record = load_record(path)
    names = [row["impl"] for row in record["rows"]]
    assert names == [step.name for step in STEPS][: len(names)]
    assert len(names) > V4 + 1  # a record may be without the control
    for row in record["rows"]:
        assert row["us"] > 0
        assert row["tflops"] == pytest.approx(command.PROBLEM.flops / row["us"] * 1e-6, rel=1e-3)
    assert record["meta"]["gpu"] in step_record.render(record)


@needs_nvcc
@pytest.mark.gpu
@pytest.mark.slow
def test_the_steps_on_this_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "steps.json"
    argv = ["--json", str(path), "--repetitions", "5", "--warmup", "2"]
    assert command.main(argv) == 0, capsys.readouterr().out
    record = load_record(path)
    rows, arch = record["rows"], record["meta"]["arch"]
    assert len(rows) == len(STEPS)
    for row, text in zip(rows, step_sources.sources(), strict=True):
        assert (row["threads"], row["dynamic_shared_bytes"]) == step_sources.plan_of(text)
        arithmetic = step_library.blocks_per_sm(
            arch, row["registers"], row["threads"], row["dynamic_shared_bytes"]
        )
        assert arithmetic in (None, row["blocks_per_sm"])
