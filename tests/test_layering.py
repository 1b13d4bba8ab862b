"""The layering rule: who may include whom, read from the #include lines."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src"

# What each folder may include besides its own files, the public headers and the standard library.
# A folder that isn't listed takes the rule of its parent.
ALLOWED: dict[str, set[str]] = {
    "core": {"cpu", "cuda"},
    "cpu": set(),
    "cuda": {"cuda/launch"},
    "cuda/launch": {"cuda"},
    "cuda/ptx": set(),
    "cuda/tile": {"cuda/ptx"},
    "cuda/kernels": {"cuda", "cuda/launch", "cuda/ptx", "cuda/tile"},
    "emulation": {"core", "cpu", "cuda"},
    "bindings": {"core", "cuda", "emulation"},
}
PUBLIC = "fastattn/"
CUDA_HEADER = re.compile(r"^(cuda(_\w+)?|cooperative_groups|cub/.*|cute/.*|mma)(\.h|\.hpp|\.cuh)?$")
PYTHON_HEADER = re.compile(r"^(Python\.h|nanobind/|pybind11/|dlpack/|xla/|torch/|numpy/|ATen/)")
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.MULTILINE)

FILES = sorted(
    path
    for path in SOURCE.rglob("*")
    if path.suffix in {".h", ".cpp", ".cu", ".cuh", ".def"} and path.is_file()
)


def layer_of(relative: Path) -> str:
    """The listed folder that holds a file of src/."""
    for folder in relative.parents:
        if folder.as_posix() in ALLOWED:
            return folder.as_posix()
    raise AssertionError(f"src/{relative.as_posix()} is in no known layer: see CONTRIBUTING.md")


def includes(text: str) -> list[str]:
    return [name for _, name in INCLUDE.findall(text)]


def violations(relative: Path, text: str) -> list[str]:
    """One line for each include that the rule forbids, for a file of src/ with this text."""
    layer = layer_of(relative)
    found = []
    for name in includes(text):
        if name.startswith(PUBLIC):
            continue
        if PYTHON_HEADER.match(name):
            if layer != "bindings":
                found.append(f"{name}: only src/bindings knows Python")
        elif CUDA_HEADER.match(name):
            # The emulation has a <cuda_runtime.h> of its own.
            if (
                not layer.startswith(("cuda", "emulation"))
                or relative.as_posix() == "cuda/device.h"
            ):
                found.append(f"{name}: CUDA headers stay in src/cuda")
        elif (SOURCE / name).is_file():
            target = layer_of(Path(name))
            if target != layer and target not in ALLOWED[layer]:
                found.append(f"{name}: {layer} may not include {target}")
        elif (SOURCE / relative.parent / name).is_file():
            found.append(f"{name}: write it from src/, {(relative.parent / name).as_posix()}")
    return found


def test_there_are_sources() -> None:
    assert {"core", "cpu", "cuda", "cuda/kernels"} <= {
        layer_of(path.relative_to(SOURCE)) for path in FILES
    }


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(SOURCE).as_posix())
def test_includes_go_one_way(path: Path) -> None:
    assert violations(path.relative_to(SOURCE), path.read_text()) == []


@pytest.mark.parametrize(
    "path", sorted((ROOT / "include").rglob("*.h")), ids=lambda path: path.name
)
def test_public_headers_need_the_standard_library_only(path: Path) -> None:
    foreign = [
        name
        for name in includes(path.read_text())
        if not name.startswith(PUBLIC) and not re.fullmatch(r"[a-z_0-9]+", name)
    ]
    assert foreign == []


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("core/choose.cpp", "#include <cuda_runtime.h>"),
        ("core/choose.cpp", "#include <nanobind/nanobind.h>"),
        ("core/choose.cpp", "# include <Python.h>"),
        ("cpu/x.cpp", '#include "core/registry.h"'),
        ("core/choose.cpp", '#include "emulation/emulation.h"'),
        ("cuda/kernels/v9.cu", '#include "emulation/grid.h"'),
        ("cuda/kernels/v9.cu", '#include "core/registry.h"'),
        ("cuda/ptx/mma.cuh", '#include "cuda/launch/launch.cuh"'),
        ("cuda/device.h", "#include <cuda_runtime_api.h>"),
    ],
)
def test_the_check_sees_a_violation(file: str, line: str) -> None:
    if '"' in line and not (SOURCE / includes(line)[0]).is_file():
        pytest.skip(f"no {includes(line)[0]} in this tree")
    assert violations(Path(file), f"// text\n{line}\n") != []
