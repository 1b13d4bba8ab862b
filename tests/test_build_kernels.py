"""Kernels as files and as folders: what CMake compiles for a line of the registry."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CMAKE = shutil.which("cmake")

pytestmark = pytest.mark.skipif(CMAKE is None, reason="cmake is not on PATH")

PROJECT = f"""\
cmake_minimum_required(VERSION 3.26)
project(registry LANGUAGES NONE)
set(FASTATTN_CUDA OFF)
include("{(ROOT / "cmake" / "FastattnCuda.cmake").as_posix()}")
fastattn_cuda_kernel_sources(sources)
list(JOIN sources "\\n" sources)
file(WRITE "${{PROJECT_BINARY_DIR}}/sources.txt" "${{sources}}")
"""
TABLE = """\
// What is compiled.
FASTATTN_INSTANCE(half, float16, 64, 128)
FASTATTN_INSTANCE(single, 64)  // a word about it
"""


class Tree:
    """A source tree with a registry of one file and one folder."""

    def __init__(self, folder: Path) -> None:
        self.source, self.build = folder / "source", folder / "build"
        self.kernels = self.source / "src" / "cuda" / "kernels"
        self.table = self.kernels / "v1_folder" / "instances.def"
        self.table.parent.mkdir(parents=True)
        (self.source / "CMakeLists.txt").write_text(PROJECT)
        (self.kernels.parent / "kernels.def").write_text(
            "// registry\nFASTATTN_CUDA_KERNEL(v0, v0_file)\nFASTATTN_CUDA_KERNEL(v1, v1_folder)\n"
        )
        for name in ("v0_file.cu", "v1_folder/kernel.cu", "v1_folder/half.cuh"):
            (self.kernels / name).write_text("// nothing\n")

    def configure(self) -> subprocess.CompletedProcess[str]:
        command = [str(CMAKE), "-S", str(self.source), "-B", str(self.build)]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)

    def sources(self) -> list[Path]:
        result = self.configure()
        assert result.returncode == 0, result.stderr
        return [Path(line) for line in (self.build / "sources.txt").read_text().splitlines()]


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def test_a_kernel_is_a_file_or_all_cu_files_of_its_folder(tree: Tree) -> None:
    own = [tree.kernels / "v0_file.cu", tree.kernels / "v1_folder" / "kernel.cu"]
    assert tree.sources() == own
    (tree.kernels / "v1_folder" / "more.cu").write_text("// nothing\n")
    assert tree.sources() == [*own, tree.kernels / "v1_folder" / "more.cu"]


def test_each_line_of_the_table_is_a_file_in_the_build_tree(tree: Tree) -> None:
    tree.table.write_text(TABLE)
    half, single = tree.sources()[2:]
    assert half == tree.build / "instances" / "v1_folder_half_float16_64_128.cu"
    assert single == tree.build / "instances" / "v1_folder_single_64.cu"
    assert half.read_text() == (
        '#include "cuda/kernels/v1_folder/half.cuh"\n\nnamespace fastattn::cuda {\n'
        "FASTATTN_INSTANTIATE_half(float16, 64, 128)\n}  // namespace fastattn::cuda\n"
    )
    assert "FASTATTN_INSTANTIATE_single(64)\n" in single.read_text()
    assert sorted(path.name for path in tree.table.parent.iterdir()) == [
        "half.cuh",
        "instances.def",
        "kernel.cu",
    ]


def test_configuring_anew_leaves_what_is_the_same(tree: Tree) -> None:
    tree.table.write_text(TABLE)
    half = tree.sources()[2]
    before = half.stat().st_mtime_ns
    tree.table.write_text(TABLE.replace("(single, 64)", "(single, 128)"))
    assert tree.sources()[3].name == "v1_folder_single_128.cu"
    assert half.stat().st_mtime_ns == before


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("FASTATTN_INSTANCE(half)", "is not FASTATTN_INSTANCE(header, argument...)"),
        ("FASTATTN_INSTANCE half, 64", "is not FASTATTN_INSTANCE(header, argument...)"),
        ("FASTATTN_INSTANCE(half, float16,64,128)", "stands there twice"),
    ],
)
def test_a_wrong_line_stops_the_configuration(tree: Tree, line: str, said: str) -> None:
    tree.table.write_text(f"{TABLE}{line}\n")
    result = tree.configure()
    assert result.returncode != 0
    assert said in " ".join(result.stderr.split())
    assert line in result.stderr
