"""The build backend's one decision: whether nvcc must come from PyPI."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
pytest.importorskip("scikit_build_core", reason="scikit-build-core is not installed")

_VARIABLES = [
    "CMAKE_ARGS",
    "CMAKE_BUILD_PARALLEL_LEVEL",
    "CUDACXX",
    "CUDAToolkit_ROOT",
    "CUDA_HOME",
    "CUDA_PATH",
    "FASTATTN_CUDA",
    "FASTATTN_NVCC",
    "LIBRARY_PATH",
    "MAX_JOBS",
]
NEW_DRIVER = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Release Build\n"
OPEN_DRIVER = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  590.1  Release Build\n"
OLD_DRIVER = NEW_DRIVER.replace("580.65.06", "550.54.15")


class Machine:
    """A machine with the driver and the toolkit that a test gives it."""

    def __init__(self, backend: ModuleType, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.backend = backend
        self.folder = folder
        self.patch = patch
        for name in _VARIABLES:
            patch.delenv(name, raising=False)
        patch.setattr(backend, "_DRIVER_VERSION_FILE", folder / "version")
        self.toolkit(False)

    def driver(self, text: str) -> None:
        (self.folder / "version").write_text(text)

    def toolkit(self, present: bool) -> None:
        self.patch.setattr(self.backend.shutil, "which", lambda _: "nvcc" if present else None)
        self.patch.setattr(self.backend.os, "access", lambda *_: present)

    def requirements(self, **settings: str) -> list[str]:
        """What it adds for CUDA, with cmake definitions as `-C cmake.define.NAME=VALUE` gives."""
        config = {f"cmake.define.{name}": value for name, value in settings.items()}
        wheel = self.backend.get_requires_for_build_wheel(config)
        editable = self.backend.get_requires_for_build_editable(config)
        assert [name for name in wheel if "cuda" in name] == [n for n in editable if "cuda" in n]
        return [name for name in wheel if "cuda" in name]


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(ROOT / "_build_backend"))
    monkeypatch.chdir(ROOT)
    yield importlib.import_module("fastattn_backend")
    sys.modules.pop("fastattn_backend", None)


@pytest.fixture
def machine(backend: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(backend, tmp_path, monkeypatch)


WHEELS = ["cuda-toolkit[nvcc,nvvm,crt,cudart,cccl]==13.0.*"]


def test_neither_driver_nor_toolkit(machine: Machine) -> None:
    assert machine.requirements() == []


@pytest.mark.parametrize("text", [NEW_DRIVER, OPEN_DRIVER])
def test_a_driver_without_a_toolkit_brings_nvcc(machine: Machine, text: str) -> None:
    machine.driver(text)
    assert machine.requirements() == WHEELS


def test_a_driver_too_old_for_that_nvcc(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.driver(OLD_DRIVER)
    assert machine.requirements() == []
    assert "550" in capsys.readouterr().out
    assert machine.requirements(FASTATTN_CUDA="ON") == WHEELS


def test_a_toolkit_is_used(machine: Machine) -> None:
    machine.driver(NEW_DRIVER)
    machine.toolkit(True)
    assert machine.requirements() == []
    assert machine.requirements(FASTATTN_CUDA="ON") == []


@pytest.mark.parametrize("word", ["ON", "on", "1", "True", "yes"])
def test_on_brings_nvcc_without_a_driver(machine: Machine, word: str) -> None:
    assert machine.requirements(FASTATTN_CUDA=word) == WHEELS


@pytest.mark.parametrize("word", ["OFF", "off", "0", "False", "no"])
def test_off_brings_nothing(machine: Machine, word: str) -> None:
    machine.driver(NEW_DRIVER)
    assert machine.requirements(FASTATTN_CUDA=word) == []


def test_every_way_to_say_it_in_the_order_that_cmake_sees_it(machine: Machine) -> None:
    machine.patch.setenv("FASTATTN_CUDA", "ON")
    assert machine.requirements() == WHEELS
    assert machine.requirements(FASTATTN_CUDA="OFF") == []
    machine.patch.setenv("CMAKE_ARGS", "-DOTHER=1 -DFASTATTN_CUDA=OFF")
    assert machine.requirements(FASTATTN_CUDA="ON") == []
    machine.patch.setenv("CMAKE_ARGS", "-DFASTATTN_CUDA=OFF -DFASTATTN_CUDA:STRING=ON")
    assert machine.requirements(FASTATTN_CUDA="OFF") == WHEELS
    machine.patch.delenv("CMAKE_ARGS")
    settings = {"cmake.args": "-DFASTATTN_CUDA=OFF;-DOTHER=1"}
    assert machine.backend._cuda_mode(settings) == "OFF"


def test_a_compiler_that_the_caller_names_is_a_toolkit(machine: Machine) -> None:
    assert machine.requirements(FASTATTN_CUDA="ON", CMAKE_CUDA_COMPILER="/some/nvcc") == []
    machine.patch.setenv("CUDACXX", "/some/nvcc")
    assert machine.requirements(FASTATTN_CUDA="ON") == []


def test_the_source_of_nvcc_can_be_forced(machine: Machine) -> None:
    machine.driver(NEW_DRIVER)
    machine.patch.setenv("FASTATTN_NVCC", "system")
    assert machine.requirements(FASTATTN_CUDA="ON") == []
    machine.toolkit(True)
    machine.patch.setenv("FASTATTN_NVCC", "pypi")
    assert machine.requirements() == WHEELS
    assert machine.requirements(FASTATTN_CUDA="OFF") == []
    machine.patch.setenv("FASTATTN_NVCC", "nowhere")
    with pytest.raises(SystemExit, match="'nowhere', not one of"):
        machine.requirements()


def test_the_build_finds_the_wheels_toolkit(machine: Machine) -> None:
    root = machine.folder / "nvidia" / "cu13"
    (root / "bin").mkdir(parents=True)
    (root / "bin" / "nvcc").touch()
    machine.driver(NEW_DRIVER)
    machine.patch.syspath_prepend(str(machine.folder))
    machine.patch.setenv("LIBRARY_PATH", "/elsewhere")
    machine.patch.setenv("CUDACXX", "")  # so that what the backend sets is undone
    machine.backend._use_nvcc_from_pypi({})
    assert machine.backend.os.environ["CUDACXX"] == str(root / "bin" / "nvcc")
    assert machine.backend.os.environ["LIBRARY_PATH"] == f"{root / 'lib'}:/elsewhere"


def test_without_build_isolation_on_says_what_to_install(machine: Machine) -> None:
    machine.patch.setattr(sys, "path", [str(machine.folder)])
    with pytest.raises(SystemExit, match=r"pip install 'cuda-toolkit"):
        machine.backend._use_nvcc_from_pypi({"cmake.define.FASTATTN_CUDA": "ON"})


def test_max_jobs_limits_the_build(machine: Machine) -> None:
    machine.patch.setenv("CMAKE_BUILD_PARALLEL_LEVEL", "7")
    machine.patch.setenv("MAX_JOBS", "1")
    machine.backend._limit_jobs()
    assert machine.backend.os.environ["CMAKE_BUILD_PARALLEL_LEVEL"] == "7"
    machine.patch.delenv("CMAKE_BUILD_PARALLEL_LEVEL")
    machine.backend._limit_jobs()
    assert machine.backend.os.environ.pop("CMAKE_BUILD_PARALLEL_LEVEL") == "1"
