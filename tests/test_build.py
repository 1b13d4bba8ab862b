"""The installed package: what it links to and ships, and that C++ users can build on it."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import fastattn

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = Path(fastattn.__path__[0])


def run(*command: str | Path, **environment: str) -> str:
    """The output of a command that must succeed."""
    result = subprocess.run(
        command,
        env=os.environ | environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
        timeout=300,
    )
    assert result.returncode == 0, result.stdout
    return result.stdout


def binaries() -> list[Path]:
    """The extension module and the library that it loads."""
    extension = Path(str(fastattn._core.__file__))
    library = next(iter(Path(fastattn.get_library_dir()).glob("libfastattn.so*")))
    return [extension, library]


needs_binutils = pytest.mark.skipif(
    shutil.which("readelf") is None or shutil.which("nm") is None,
    reason="readelf and nm (binutils) are not installed",
)


# --- one version ----------------------------------------------------------------------------------


def test_one_version_number() -> None:
    text = Path(fastattn.get_include(), "fastattn", "version.h").read_text()
    (version,) = re.findall(r'^#define FASTATTN_VERSION "(.+)"$', text, re.MULTILINE)
    assert fastattn.__version__ == version
    assert importlib.metadata.version("fastattn") == version
    assert fastattn._core.build_info()["version"] == version


# --- what is linked -------------------------------------------------------------------------------


@needs_binutils
@pytest.mark.parametrize("binary", binaries(), ids=lambda path: path.name.partition(".")[0])
def test_loads_system_libraries_only(binary: Path) -> None:
    needed = re.findall(r"\(NEEDED\).*\[(.+)\]", run("readelf", "-d", binary))
    system = re.compile(
        r"lib(c|m|dl|rt|pthread|gcc_s|stdc\+\+|gomp|omp)\.so\.\d+|ld-linux.*\.so\.\d+"
    )
    foreign = [name for name in needed if not system.fullmatch(name)]
    assert [name for name in foreign if not name.startswith("libfastattn.so")] == []


@needs_binutils
@pytest.mark.parametrize("binary", binaries(), ids=lambda path: path.name.partition(".")[0])
def test_needs_no_symbol_of_a_framework_or_the_driver(binary: Path) -> None:
    undefined = {
        line.split()[-1].partition("@")[0]
        for line in run("nm", "-D", "--undefined-only", binary).splitlines()
    }
    ours = "8fastattn"  # as C++ names spell the namespace
    foreign = re.compile(r"cu[A-Z_]|cuda|nv[A-Z]|\w*(3c10|2at\d|5torch|3xla|3jax)|XLA|Jax")
    assert undefined
    assert [name for name in undefined if ours not in name and foreign.match(name)] == []


def exports(binary: Path) -> set[str]:
    lines = run("nm", "-D", "--defined-only", binary).splitlines()
    return {line.split()[-1].partition("@")[0] for line in lines}


@needs_binutils
def test_exports_nothing_but_its_own_names() -> None:
    """A static cudart or standard library that leaked out would take the place of another's."""
    extension, library = binaries()
    assert exports(extension) == {"PyInit__core"}
    names = exports(library)
    assert any("8fastattn7forward" in name for name in names)
    ours = re.compile(r"_ZT[ISV]N8fastattn|_ZNK?8fastattn")
    assert [name for name in names if not ours.match(name)] == []


@pytest.mark.parametrize("framework", ["torch", "jax", "cupy"])
@pytest.mark.parametrize("first", ["fastattn", "framework"])
def test_frameworks_import_before_and_after(framework: str, first: str) -> None:
    pytest.importorskip(framework, exc_type=ImportError)
    order = ["fastattn", framework] if first == "fastattn" else [framework, "fastattn"]
    use = """
import numpy as np
x = np.ones((1, 1, 2, 8), np.float32)
print(fastattn.forward(x, x, x).sum())
"""
    printed = run(sys.executable, "-c", f"import {', '.join(order)}\n{use}")
    assert printed.split()[-1] == "16.0"


def test_import_needs_no_driver_and_loads_no_framework() -> None:
    code = """
import sys, fastattn
libraries = open("/proc/self/maps").read()
assert "libcuda.so" not in libraries, "the driver was loaded"
heavy = {"torch", "jax", "jaxlib", "cupy", "ml_dtypes"} & set(sys.modules)
assert not heavy, heavy
print(fastattn.__version__)
"""
    assert run(sys.executable, "-c", code, CUDA_VISIBLE_DEVICES="").strip() == fastattn.__version__


# --- what is shipped ------------------------------------------------------------------------------


def test_types_are_shipped() -> None:
    assert Path(str(fastattn.__file__)).with_name("py.typed").is_file()
    stub = Path(str(fastattn._core.__file__)).parent / "_core.pyi"
    assert "def " in stub.read_text()


def test_numpy_is_the_only_dependency() -> None:
    requirements = importlib.metadata.requires("fastattn") or []
    assert [name for name in requirements if "extra ==" not in name] == ["numpy>=1.23"]


def test_licences_are_shipped() -> None:
    files = importlib.metadata.files("fastattn") or []
    licences = {str(file).partition("licenses/")[2] for file in files if "licenses/" in str(file)}
    vendored = {str(path.relative_to(ROOT)) for path in ROOT.glob("third_party/*/LICENSE")}
    assert licences == {"LICENSE"} | vendored


def test_other_builds_find_it_by_its_entry_point() -> None:
    (entry,) = importlib.metadata.entry_points(group="cmake.root", name="fastattn")
    assert entry.value == "fastattn"
    config = Path(fastattn.get_cmake_dir(), "fastattn-config.cmake")
    assert config.is_file()
    assert PACKAGE in config.parents or "editable" in str(config)


@pytest.mark.skipif(
    not all(shutil.which(name) for name in ("cmake", "ninja", "c++")),
    reason="cmake, ninja and a C++ compiler are needed",
)
def test_a_cpp_project_builds_against_the_installed_package(tmp_path: Path) -> None:
    run(
        *("cmake", "-G", "Ninja", "-S", ROOT / "cpp_tests" / "consumer", "-B", tmp_path),
        f"-Dfastattn_ROOT={fastattn.get_cmake_dir()}",
    )
    run("cmake", "--build", tmp_path)
    output = run(tmp_path / "consumer")
    assert f"fastattn {fastattn.__version__}, kernel cpu" in output
