"""PEP 517 backend: scikit-build-core, plus nvcc from PyPI where the build needs it and has none.

A machine with an NVIDIA driver but no CUDA toolkit gets a CUDA build from ``pip install .`` alone:
the compiler comes into the build environment as a build requirement. ``FASTATTN_NVCC`` says where
nvcc comes from:

- ``auto`` (the default): from PyPI where the machine has no toolkit and either a driver that can
  run what is built or ``FASTATTN_CUDA=ON``;
- ``system``: never from PyPI;
- ``pypi``: always from PyPI, unless ``FASTATTN_CUDA=OFF``.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scikit_build_core import build as _backend
from scikit_build_core.build import (  # re-exported: these hooks need nothing more
    build_sdist,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

Settings = Mapping[str, Any] | None

# All five extras: the meta package pins only what its extras name, and compiler parts of different
# releases don't work together. 13.0, not newer: an older driver can't compile a newer one's PTX.
CUDA_REQUIREMENTS = ["cuda-toolkit[nvcc,nvvm,crt,cudart,cccl]==13.0.*"]
_DRIVER_NEEDED = 580  # the first driver that runs CUDA 13.0
_DRIVER_VERSION_FILE = Path("/proc/driver/nvidia/version")


def _cmake_definition(settings: Settings, name: str) -> str | None:
    """The value of a CMake variable that the caller set, by CMake's order: the last word wins."""
    settings = settings or {}
    arguments = settings.get("cmake.args", settings.get("skbuild.cmake.args", []))
    if isinstance(arguments, str):
        arguments = arguments.split(";")
    arguments = [*arguments, *shlex.split(os.environ.get("CMAKE_ARGS", ""))]
    for argument in reversed(arguments):
        if argument.startswith((f"-D{name}=", f"-D{name}:")):
            return str(argument.partition("=")[2])
    for key in (f"cmake.define.{name}", f"skbuild.cmake.define.{name}"):
        if key in settings:
            return str(settings[key])
    return None


def _cuda_mode(settings: Settings) -> str:
    value = _cmake_definition(settings, "FASTATTN_CUDA") or os.environ.get("FASTATTN_CUDA", "")
    value = value.strip().upper() or "AUTO"
    if value in ("1", "TRUE", "YES"):
        return "ON"
    return "OFF" if value in ("0", "FALSE", "NO") else value


def _has_toolkit(settings: Settings) -> bool:
    """Whether CMake will find an nvcc on this machine (the places of cmake/FastattnCuda.cmake)."""
    if _cmake_definition(settings, "CMAKE_CUDA_COMPILER") or os.environ.get("CUDACXX"):
        return True
    if shutil.which("nvcc"):
        return True
    roots = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH", "CUDAToolkit_ROOT")]
    roots += ["/usr/local/cuda", "/opt/cuda"]
    return any(os.access(Path(root, "bin", "nvcc"), os.X_OK) for root in roots if root)


def _driver_runs_our_cuda() -> bool:
    try:
        text = _DRIVER_VERSION_FILE.read_text()
    except OSError:
        return False
    found = re.search(r"Kernel Module.*?\s(\d+)\.\d", text)
    if found and int(found[1]) < _DRIVER_NEEDED:
        print(
            f"fastattn: this driver ({found[1]}) is older than CUDA 13.0 needs ({_DRIVER_NEEDED}): "
            "not fetching nvcc from PyPI",
            flush=True,
        )
        return False
    return True


def _wants_nvcc_from_pypi(settings: Settings) -> bool:
    source = os.environ.get("FASTATTN_NVCC", "auto").lower()
    if source not in ("auto", "system", "pypi"):
        raise SystemExit(f"FASTATTN_NVCC is {source!r}, not one of 'auto', 'system', 'pypi'")
    mode = _cuda_mode(settings)
    if mode == "OFF" or source == "system":
        return False
    if source == "pypi":
        return True
    return not _has_toolkit(settings) and (mode == "ON" or _driver_runs_our_cuda())


def _toolkit_from_pypi() -> Path | None:
    """The toolkit that the build requirements brought: <site-packages>/nvidia/cu13."""
    for entry in sys.path:
        root = Path(entry, "nvidia", "cu13")
        if (root / "bin" / "nvcc").is_file():
            return root
    return None


def _use_nvcc_from_pypi(settings: Settings) -> None:
    if not _wants_nvcc_from_pypi(settings):
        return
    root = _toolkit_from_pypi()
    if root is None:
        if _cuda_mode(settings) == "ON" or os.environ.get("FASTATTN_NVCC", "").lower() == "pypi":
            raise SystemExit(
                "fastattn: no CUDA toolkit. With --no-build-isolation install it yourself: "
                f"pip install '{CUDA_REQUIREMENTS[0]}'"
            )
        return
    print(f"fastattn: nvcc from PyPI, {root}", flush=True)
    os.environ["CUDACXX"] = str(root / "bin" / "nvcc")
    # These wheels have lib/, where nvcc looks in lib64/: without it nothing links.
    paths = [str(root / "lib"), *filter(None, [os.environ.get("LIBRARY_PATH")])]
    os.environ["LIBRARY_PATH"] = os.pathsep.join(paths)


def _limit_jobs() -> None:
    """MAX_JOBS, the name other CUDA packages use, means CMake's own variable."""
    if "MAX_JOBS" in os.environ:
        os.environ.setdefault("CMAKE_BUILD_PARALLEL_LEVEL", os.environ["MAX_JOBS"])


def get_requires_for_build_wheel(config_settings: Settings = None) -> list[str]:
    """What building a wheel needs beyond pyproject.toml: CMake, Ninja and perhaps nvcc."""
    requirements = list(_backend.get_requires_for_build_wheel(_plain(config_settings)))
    return requirements + (CUDA_REQUIREMENTS if _wants_nvcc_from_pypi(config_settings) else [])


def get_requires_for_build_editable(config_settings: Settings = None) -> list[str]:
    """As for a wheel."""
    requirements = list(_backend.get_requires_for_build_editable(_plain(config_settings)))
    return requirements + (CUDA_REQUIREMENTS if _wants_nvcc_from_pypi(config_settings) else [])


def build_wheel(
    wheel_directory: str,
    config_settings: Settings = None,
    metadata_directory: str | None = None,
) -> str:
    """Build the wheel and return its file name."""
    _limit_jobs()
    _use_nvcc_from_pypi(config_settings)
    return _backend.build_wheel(wheel_directory, _plain(config_settings), metadata_directory)


def build_editable(
    wheel_directory: str,
    config_settings: Settings = None,
    metadata_directory: str | None = None,
) -> str:
    """Build the wheel of an editable install and return its file name."""
    _limit_jobs()
    _use_nvcc_from_pypi(config_settings)
    return _backend.build_editable(wheel_directory, _plain(config_settings), metadata_directory)


def _plain(settings: Settings) -> dict[str, Any] | None:
    return None if settings is None else dict(settings)
