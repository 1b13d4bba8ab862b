"""What this build is, what this machine has, and where the C++ library lies."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any, Literal, overload

from . import _core

# Distribution names of what forward() takes arrays of, and of what NumPy's bfloat16 needs.
_FRAMEWORKS = {
    "numpy": ("numpy",),
    "torch": ("torch",),
    "cupy": ("cupy-cuda13x", "cupy-cuda12x", "cupy"),
    "jax": ("jax",),
    "ml_dtypes": ("ml_dtypes",),
}


def _frameworks() -> dict[str, str | None]:
    """Versions by the packages' metadata: nothing is imported."""
    versions: dict[str, str | None] = {}
    for name, distributions in _FRAMEWORKS.items():
        versions[name] = None
        for distribution in distributions:
            try:
                versions[name] = importlib.metadata.version(distribution)
                break
            except importlib.metadata.PackageNotFoundError:
                continue
    return versions


def _cuda_version(number: int) -> str | None:
    return f"{number // 1000}.{number % 1000 // 10}" if number else None


def _config() -> dict[str, Any]:
    build = _core.build_info()
    return {
        "version": build["version"],
        "backends": ["cpu", "cuda"] if build["cuda"] else ["cpu"],
        "kernels": [kernel["name"] for kernel in _core.kernels()],
        "emulated": [kernel["name"] for kernel in _core.kernels(emulated=True)],
        "cpu": {
            "instruction_set": build["cpu_instruction_set"],
            "threading": build["threading"],
            "threads": _core.cpu_threads(),
        },
        "cuda": {
            "toolkit": build["cuda_toolkit"] or None,
            "architectures": build["cuda_archs"].split(),
            "driver": _cuda_version(_core.cuda_driver_version()),
            "devices": _core.cuda_devices(),
        },
        "frameworks": _frameworks(),
    }


def _text(config: dict[str, Any]) -> str:
    cpu, cuda = config["cpu"], config["cuda"]
    lines = [
        ("fastattn", config["version"]),
        ("kernels", ", ".join(config["kernels"])),
        (
            "emulated",
            f"{', '.join(config['emulated'])}: on the CPU, by name, see fastattn.explain"
            if config["emulated"]
            else "none: install with FASTATTN_EMULATION=ON",
        ),
        ("CPU", f"{cpu['instruction_set']}, {cpu['threads']} threads ({cpu['threading']})"),
    ]
    if "cuda" in config["backends"]:
        lines += [
            ("CUDA toolkit", f"{cuda['toolkit']}, for {' '.join(cuda['architectures'])}"),
            ("CUDA driver", f"up to CUDA {cuda['driver']}" if cuda["driver"] else "none"),
        ]
        lines += [
            (
                f"GPU {device['ordinal']}",
                f"{device['name']}, compute capability {device['compute_capability'] / 10:.1f}, "
                f"{device['multiprocessors']} SMs, {device['memory_bytes'] / 2**30:.1f} GiB",
            )
            for device in cuda["devices"]
        ] or [("GPU", "none")]
    else:
        lines.append(("CUDA", "not in this build: install with FASTATTN_CUDA=ON"))
    lines.append(
        (
            "frameworks",
            ", ".join(
                f"{name} {version}" for name, version in config["frameworks"].items() if version
            ),
        )
    )
    return "\n".join(f"{name:14}{value}" for name, value in lines)


@overload
def show_config(mode: Literal["print"] = ...) -> None: ...


@overload
def show_config(mode: Literal["dict"]) -> dict[str, Any]: ...


def show_config(mode: str = "print") -> dict[str, Any] | None:
    """Shows the version, the backends, the CUDA toolkit and driver, the GPUs and the frameworks.

    Parameters
    ----------
    mode : str
        "print" writes text to standard output, "dict" returns the same as a dictionary: version,
        backends, kernels, emulated (the CUDA kernels that the CPU can run), cpu (instruction_set,
        threading, threads), cuda (toolkit, architectures, driver, devices: ordinal, name,
        compute_capability, multiprocessors, shared_bytes_per_block, memory_bytes), frameworks
        (name to version or None).

    Raises
    ------
    ValueError
        Another mode.

    Notes
    -----
    Imports no framework and creates no CUDA context.
    """
    if mode not in ("print", "dict"):
        raise ValueError(f"mode: got {mode!r}, takes 'print' or 'dict'")
    config = _config()
    if mode == "dict":
        return config
    print(_text(config))
    return None


def _root() -> Path:
    # Not this file's folder: an editable install leaves the Python sources where they are.
    return Path(str(_core.__file__)).parent


def get_include() -> str:
    """The folder to give to a C++ compiler: it holds ``fastattn/fastattn.h``."""
    return str(_root() / "include")


def get_library_dir() -> str:
    """The folder of the C++ library ``libfastattn``."""
    return str(_root() / "lib")


def get_cmake_dir() -> str:
    """The folder of ``fastattn-config.cmake``, for CMake's ``fastattn_DIR``."""
    return str(_root() / "lib" / "cmake" / "fastattn")
