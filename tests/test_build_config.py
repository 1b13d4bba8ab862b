"""FASTATTN_CUDA and the architecture list, by configuring the project with CMake.

The toolkit of the machine, if any, is hidden from CMake by CMAKE_IGNORE_PATH, or shown.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
NVCC = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin:/opt/cuda/bin")

pytestmark = [
    pytest.mark.skipif(shutil.which("cmake") is None, reason="cmake is not on PATH"),
    pytest.mark.skipif(shutil.which("ninja") is None, reason="ninja is not on PATH"),
    pytest.mark.skipif(shutil.which("c++") is None, reason="there is no C++ compiler"),
]
needs_nvcc = pytest.mark.skipif(NVCC is None, reason="there is no CUDA toolkit")

_CLEARED = [
    "CMAKE_ARGS",
    "CMAKE_CUDA_ARCHITECTURES",
    "CUDAARCHS",
    "CUDACXX",
    "FASTATTN_CUDA",
    "FASTATTN_CUDA_ARCHS",
]


def configure(
    folder: Path, *definitions: str, hide_toolkit: bool = False, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Configure into folder; stdout and stderr come back as one text."""
    env = {name: value for name, value in os.environ.items() if name not in _CLEARED}
    # A folder may be configured again: what an earlier test asked for must not stay.
    arguments = [f"-U{name}" for name in ("CMAKE_CUDA_ARCHITECTURES", "FASTATTN_CUDA")]
    arguments += [f"-D{definition}" for definition in definitions]
    if hide_toolkit:
        places = [*env["PATH"].split(os.pathsep), "/usr/local/cuda/bin", "/opt/cuda/bin"]
        places += [
            str(Path(env[name], "bin")) for name in ("CUDA_HOME", "CUDA_PATH") if name in env
        ]
        hidden = [place for place in places if Path(place, "nvcc").exists()]
        arguments.append("-DCMAKE_IGNORE_PATH=" + ";".join(hidden))
    return subprocess.run(
        [
            "cmake",
            "-S",
            ROOT,
            "-B",
            folder,
            "-G",
            "Ninja",
            "-DFASTATTN_BUILD_TESTS=OFF",
            *arguments,
        ],
        env=env | environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
        timeout=300,
    )


def has_gpu() -> bool:
    nvidia_smi = shutil.which("nvidia-smi")
    return nvidia_smi is not None and not subprocess.call(
        [nvidia_smi, "-L"], stdout=subprocess.DEVNULL
    )


def summary(result: subprocess.CompletedProcess[str]) -> str:
    """The one line in which the configuration says what is built."""
    assert result.returncode == 0, result.stdout
    (line,) = (line for line in result.stdout.splitlines() if line.startswith("-- fastattn "))
    return line


def compiled_architectures(folder: Path) -> set[str]:
    """What the compiler is told to make, as ptxas and cicc name it: sm_90, compute_90, native."""
    rules = (folder / "build.ninja").read_text()
    kernels = [line for line in rules.splitlines() if "code=" in line or "-arch=" in line]
    assert kernels
    found: set[str] = set()
    for word in kernels[0].replace('"', " ").split():
        if "code=" in word:
            found.update(word.rpartition("code=")[2].strip("[]").split(","))
        elif word.startswith("-arch="):
            found.add(word.removeprefix("-arch="))
    return found


@pytest.fixture(scope="module")
def cpu_build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One build folder for all tests that see no toolkit: finding the compiler costs seconds."""
    return tmp_path_factory.mktemp("cpu")


@pytest.fixture(scope="module")
def cuda_build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same for those that see one."""
    return tmp_path_factory.mktemp("cuda")


def test_auto_without_a_toolkit_is_the_cpu_backend_and_says_so(cpu_build: Path) -> None:
    line = summary(configure(cpu_build, hide_toolkit=True))
    assert "CPU backend only (no CUDA toolkit found" in line


def test_on_without_a_toolkit_is_one_line(cpu_build: Path) -> None:
    result = configure(cpu_build, "FASTATTN_CUDA=ON", hide_toolkit=True)
    assert result.returncode != 0
    assert (
        "\n  FASTATTN_CUDA=ON, but there is no nvcc (PATH, CUDA_HOME, CUDACXX)\n" in result.stdout
    )


def test_a_compiler_that_does_not_exist(cpu_build: Path) -> None:
    result = configure(cpu_build, CUDACXX="/nowhere/nvcc")
    assert result.returncode != 0
    assert "No such CUDA compiler: /nowhere/nvcc" in result.stdout


def test_a_wrong_mode_is_refused(cpu_build: Path) -> None:
    result = configure(cpu_build, "FASTATTN_CUDA=MAYBE")
    assert result.returncode != 0
    assert "FASTATTN_CUDA is 'MAYBE', not one of AUTO, ON, OFF" in result.stdout


def test_off_by_the_environment(cpu_build: Path) -> None:
    assert "FASTATTN_CUDA=OFF" in summary(configure(cpu_build, FASTATTN_CUDA="OFF"))


@needs_nvcc
@pytest.mark.parametrize(
    ("definitions", "environment", "expected"),
    [
        (["CMAKE_CUDA_ARCHITECTURES=90a"], {}, {"sm_90a", "compute_90a"}),
        (["CMAKE_CUDA_ARCHITECTURES=80-real;90-virtual"], {}, {"sm_80", "compute_90"}),
        ([], {"FASTATTN_CUDA_ARCHS": "80-real, 90-real"}, {"sm_80", "sm_90"}),
        ([], {"CUDAARCHS": "86-real"}, {"sm_86"}),
        ([], {"FASTATTN_CUDA_ARCHS": "80-real", "CUDAARCHS": "86-real"}, {"sm_80"}),
        (["CMAKE_CUDA_ARCHITECTURES=90-real"], {"FASTATTN_CUDA_ARCHS": "80"}, {"sm_90"}),
        (["CMAKE_CUDA_ARCHITECTURES="], {"FASTATTN_CUDA_ARCHS": "80-real"}, {"sm_80"}),
    ],
    # Sorted, as a set's order differs from run to run.
    ids=lambda value: ", ".join(sorted(value)) or "none",
)
def test_the_architectures_asked_for_are_those_compiled(
    cuda_build: Path, definitions: list[str], environment: dict[str, str], expected: set[str]
) -> None:
    summary(configure(cuda_build, *definitions, **environment))
    assert compiled_architectures(cuda_build) == expected


@needs_nvcc
def test_native_is_this_machines_gpu_or_an_error(cuda_build: Path) -> None:
    result = configure(cuda_build, FASTATTN_CUDA_ARCHS="native")
    if has_gpu():
        summary(result)
        # Some versions of CMake put in what they found, others leave it to nvcc.
        assert all(re.match("sm_|native", arch) for arch in compiled_architectures(cuda_build))
    else:
        assert result.returncode != 0
        # Newer versions of CMake say so themselves.
        assert re.search("No GPU for architecture 'native'|no GPU was detected", result.stdout)


@needs_nvcc
def test_the_default_has_code_for_each_generation_and_ptx_for_the_next(cuda_build: Path) -> None:
    summary(configure(cuda_build))
    known = subprocess.run(
        [str(NVCC), "--list-gpu-code"], capture_output=True, text=True, check=True
    ).stdout.split()
    wanted = {"sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"} & set(known)
    built = compiled_architectures(cuda_build)
    assert {arch for arch in built if arch.startswith("sm_")} == wanted
    newest = max(int(arch.removeprefix("sm_")) for arch in wanted)
    assert f"compute_{newest}" in built


@needs_nvcc
def test_a_changed_environment_is_seen_by_the_next_configuration(cuda_build: Path) -> None:
    summary(configure(cuda_build, FASTATTN_CUDA_ARCHS="80-real"))
    summary(configure(cuda_build, FASTATTN_CUDA_ARCHS="90-real"))
    assert compiled_architectures(cuda_build) == {"sm_90"}
