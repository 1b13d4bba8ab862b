"""cmake/ptxas_report.cmake: registers and spills are printed, and a spill fails the build.

A stand-in compiler says what ptxas says, so neither a toolkit nor a GPU is needed.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "cmake" / "ptxas_report.cmake"
CMAKE = shutil.which("cmake")

pytestmark = pytest.mark.skipif(CMAKE is None, reason="cmake is not on PATH")

CLEAN = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z3fooPf' for 'sm_90'
ptxas info    : Function properties for _Z3fooPf
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 80 registers, used 1 barriers, 128 bytes smem
ptxas info    : Compile time = 1.000 ms
"""
SPILL = CLEAN.replace(
    "0 bytes stack frame, 0 bytes spill stores, 0",
    "16 bytes stack frame, 8 bytes spill stores, 12",
)
SERIALISED = (
    "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are "
    "serialized due to insufficient register resources in the function 'foo'\n"
)


class Compiler:
    """Runs the launcher over a stand-in compiler that prints a text and exits with a status."""

    def __init__(self, folder: Path) -> None:
        self.source = folder / "a kernel; [1].cu"
        self.source.write_text("// nothing\n")
        self.object = folder / "kernel.o"
        self.folder = folder

    def run(self, text: str, status: int = 0, *arguments: str) -> subprocess.CompletedProcess[str]:
        said = self.folder / "said.txt"
        said.write_text(text)
        program = self.folder / "nvcc"
        program.write_text(
            '#!/bin/sh\nprintf "%s\\n" "$@" >arguments.txt\ntouch kernel.o\n'
            f"cat said.txt >&2\nexit {status}\n"
        )
        program.chmod(0o755)
        command = [str(CMAKE), f"-DINCLUDE_DIR={self.folder}", "-P", str(SCRIPT)]
        command += ["--", str(program), *arguments]
        command += ["-c", str(self.source), "-o", str(self.object)]
        return subprocess.run(
            command, cwd=self.folder, capture_output=True, text=True, check=False, timeout=60
        )


@pytest.fixture
def compiler(tmp_path: Path) -> Compiler:
    return Compiler(tmp_path)


def test_one_line_for_each_kernel_and_architecture(compiler: Compiler) -> None:
    result = compiler.run(CLEAN + CLEAN.replace("sm_90", "sm_120"))
    lines = [line for line in result.stderr.splitlines() if line]
    assert result.returncode == 0
    assert len(lines) == 2
    assert "sm_90 _Z3fooPf: 80 registers, 0 bytes spilled" in lines[0]
    assert "128 bytes of static shared memory" in lines[0]
    assert "sm_120" in lines[1]


def test_a_spill_fails_and_leaves_no_object(compiler: Compiler) -> None:
    result = compiler.run(SPILL)
    assert result.returncode != 0
    assert "spills 20 bytes on sm_90" in result.stderr
    assert not compiler.object.exists()


def test_a_spill_of_a_function_counts_for_its_kernel(compiler: Compiler) -> None:
    inner = (
        "ptxas info    : Function properties for _Z3barPf\n"
        "    8 bytes stack frame, 4 bytes spill stores, 4 bytes spill loads\n"
    )
    result = compiler.run(CLEAN.replace("ptxas info    : Used", inner + "ptxas info    : Used"))
    assert result.returncode != 0
    assert "_Z3fooPf spills 8 bytes" in result.stderr


def test_a_spill_is_allowed_where_the_kernel_says_why(compiler: Compiler) -> None:
    compiler.source.write_text("// spills allowed: two registers, outside the loop\n")
    result = compiler.run(SPILL)
    assert result.returncode == 0
    assert "20 bytes spilled" in result.stderr
    assert compiler.object.exists()


def test_an_excuse_without_a_reason_is_none(compiler: Compiler) -> None:
    compiler.source.write_text("// spills allowed: \n")
    assert compiler.run(SPILL).returncode != 0


def test_the_header_of_a_generated_instance_may_give_the_reason(compiler: Compiler) -> None:
    kernel = compiler.folder / "cuda" / "kernels" / "v9"
    kernel.mkdir(parents=True)
    (kernel / "half.cuh").write_text("// spills allowed: two registers, outside the loop\n")
    (kernel / "single.cuh").write_text("// nothing\n")
    compiler.source.write_text('#include "cuda/kernels/v9/half.cuh"\n')
    assert compiler.run(SPILL).returncode == 0
    compiler.source.write_text('#include "cuda/kernels/v9/single.cuh"\n')
    result = compiler.run(SPILL)
    assert result.returncode != 0
    assert "spills 20 bytes on sm_90" in result.stderr


def test_a_device_debug_build_may_spill(compiler: Compiler) -> None:
    assert compiler.run(SPILL, 0, "-G").returncode == 0


def test_serialised_wgmma_fails_and_has_no_excuse(compiler: Compiler) -> None:
    compiler.source.write_text("// spills allowed: it is fast\n")
    result = compiler.run(CLEAN + SERIALISED)
    assert result.returncode != 0
    assert "serialised WGMMA" in result.stderr


def test_other_output_and_the_failure_pass_through(compiler: Compiler) -> None:
    result = compiler.run('k.cu(3): error: identifier "y; [x" is undefined\n', 2)
    assert result.returncode != 0
    assert "k.cu(3): error: identifier" in result.stderr


def test_arguments_arrive_unchanged(compiler: Compiler) -> None:
    odd = ['-DA="x y"', "-DLIST=75;80", "--generate-code=arch=compute_90,code=[sm_90]", "-Dp=a\\b"]
    assert compiler.run(CLEAN, 0, *odd).returncode == 0
    arrived = (compiler.folder / "arguments.txt").read_text().splitlines()
    assert arrived == [*odd, "-c", str(compiler.source), "-o", str(compiler.object)]
