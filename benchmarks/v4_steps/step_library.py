"""Compiles the steps with nvcc, tells what ptxas says of them, and loads them for a GPU."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path

from step_sources import HERE, ROOT, source_name

# What a multiprocessor has: threads, shared memory in KiB ("Technical Specifications per Compute
# Capability" in the CUDA C++ programming guide). All have 65,536 registers.
_MULTIPROCESSORS = {
    75: (1024, 64),
    80: (2048, 164),
    86: (1536, 100),
    87: (1536, 164),
    89: (1536, 100),
    90: (2048, 228),
    100: (2048, 228),
    103: (2048, 228),
    120: (1536, 100),
    121: (1536, 100),
}
_REGISTERS = 65536
# Registers are given out by 256 a warp; the driver keeps 1 KiB of shared memory a block, before
# compute capability 8.0 none.
_REGISTER_UNIT = 256
_WARP = 32


class BuildError(Exception):
    """There is nothing to build with, or nothing to build for."""


class CompileError(Exception):
    """nvcc failed, or said what can't be understood."""


@dataclass(frozen=True)
class Compiled:
    """What ptxas says of the kernel of a step that takes aligned tensors."""

    registers: int  # a thread
    spill_bytes: int  # stores and loads in the code of a thread


def find_nvcc() -> str:
    """The CUDA compiler: ``CUDACXX``, then PATH, ``CUDA_HOME``, ``CUDA_PATH``, the usual folders.

    Raises
    ------
    BuildError
        There is none.
    """
    wanted = os.environ.get("CUDACXX")
    if wanted:
        found = shutil.which(wanted)
        if found is None:
            raise BuildError(f"CUDACXX: no such compiler: {wanted}")
        return found
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    folders = [f"{home}/bin" for home in (*homes, "/usr/local/cuda", "/opt/cuda") if home]
    found = shutil.which("nvcc") or shutil.which("nvcc", path=os.pathsep.join(folders))
    if found is None:
        raise BuildError(
            "No nvcc here: the steps are compiled on the spot. Install the CUDA toolkit, or name "
            "its compiler in CUDACXX or its folder in CUDA_HOME."
        )
    return found


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    output = done.stdout + done.stderr
    if done.returncode != 0:
        raise CompileError(f"{' '.join(command)}\n{output.strip()}\nexit status {done.returncode}")
    return output


def parse_ptxas(output: str) -> Compiled:
    """Registers and spills from ``ptxas -v``, of the instance whose template argument is true.

    Raises
    ------
    CompileError
        The output tells of no such kernel, or of several.
    """
    found: list[Compiled] = []
    # One part a kernel: its mangled name, then what is said of it.
    for name, said in re.findall(
        r"Compiling entry function '([^']+)'(.*?)(?=Compiling entry function|\Z)", output, re.S
    ):
        if "ILb0E" in name:  # <false>: the instance for tensors that are not aligned
            continue
        registers = re.search(r"Used (\d+) registers", said)
        # Functions that were not inlined are listed with the kernel that they follow.
        spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", said)
        if registers and spills:
            total = sum(int(stores) + int(loads) for stores, loads in spills)
            found.append(Compiled(int(registers[1]), total))
    if len(found) != 1:
        raise CompileError(f"ptxas tells of {len(found)} kernels, not of one:\n{output.strip()}")
    return found[0]


def blocks_per_sm(arch: str, registers: int, threads: int, dynamic_shared_bytes: int) -> int | None:
    """How many blocks a multiprocessor holds, by arithmetic; None for an unknown architecture.

    Parameters
    ----------
    arch
        "89" or "90a".
    registers
        Of one thread.
    threads
        Of one block, a multiple of 32.
    dynamic_shared_bytes
        Of one block.
    """
    number = int(arch.rstrip("af"))
    if number not in _MULTIPROCESSORS:
        return None
    most_threads, shared_kib = _MULTIPROCESSORS[number]
    warps = threads // _WARP
    warp_registers = -(-registers * _WARP // _REGISTER_UNIT) * _REGISTER_UNIT
    reserved = 0 if number < 80 else 1024
    return min(
        _REGISTERS // warp_registers // warps,
        most_threads // threads,
        shared_kib * 1024 // (dynamic_shared_bytes + reserved),
    )


@dataclass(frozen=True)
class Launched:
    """What the CUDA runtime says of a kernel that was launched."""

    registers: int  # a thread
    local_bytes: int  # a thread: its spilled registers
    threads: int  # a block
    dynamic_shared_bytes: int  # a block
    blocks_per_sm: int


class _Info(ctypes.Structure):
    """V4StepInfo of steps.cu, in whose order the fields above stand too."""

    _fields_ = [(field.name, ctypes.c_int32) for field in fields(Launched)]


class Library:
    """The steps, ready to run on the current GPU."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        self._run = library.v4_step_run
        self._run.restype = ctypes.c_char_p
        self._run.argtypes = (
            [ctypes.c_int] + 4 * [ctypes.c_void_p] + 4 * [ctypes.c_int] + [ctypes.c_float]
        )
        self._info = library.v4_step_info
        self._info.restype = ctypes.c_char_p
        self._info.argtypes = [ctypes.POINTER(_Info)]

    def run(self, step: int, pointers: Sequence[int], shape: Sequence[int], scale: float) -> None:
        """Enqueues a step on the default stream.

        Parameters
        ----------
        step
            From 0.
        pointers
            Of q, k, v and out in the GPU's memory: contiguous float32.
        shape
            Batch, heads, M, N.
        scale
            Factor of the scores.

        Raises
        ------
        RuntimeError
            CUDA refused the launch.
        """
        message = self._run(step, *pointers, *shape, scale)
        if message is not None:
            raise RuntimeError(message.decode())

    def launched(self) -> Launched:
        """What the step that ran last was launched as.

        Raises
        ------
        RuntimeError
            CUDA failed.
        """
        info = _Info()
        message = self._info(ctypes.byref(info))
        if message is not None:
            raise RuntimeError(message.decode())
        return Launched(*(getattr(info, field.name) for field in fields(Launched)))


class Builder:
    """Compiles the steps for one architecture into a folder."""

    def __init__(self, folder: Path, arch: str, jobs: int) -> None:
        self._nvcc = find_nvcc()
        self._folder = folder
        self._arch = arch
        self._jobs = jobs
        number = arch.rstrip("af")
        if not number.isdigit():
            raise BuildError(f"--arch: a number such as 89 or 90a, not {arch!r}")
        # As the library is built: optimised, C++20, machine code for this one architecture.
        self._flags = [
            *("-std=c++20", "-O3", "-DNDEBUG", "-Xcompiler=-fPIC,-fvisibility=hidden"),
            f"-gencode=arch=compute_{arch},code=sm_{arch}",
            *(f"-I{path}" for path in (ROOT / "src", ROOT / "include", HERE, folder)),
        ]

    def compile(
        self, texts: Sequence[str], done: Callable[[int, Compiled], None]
    ) -> list[Compiled]:
        """Compiles every step to an object file; ``done`` hears of each, in order.

        Raises
        ------
        CompileError
            nvcc failed.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        compiled = []
        with ThreadPoolExecutor(self._jobs) as pool:
            results = pool.map(self._compile_step, range(len(texts)), texts)
            for step, result in enumerate(results):
                done(step, result)
                compiled.append(result)
        return compiled

    def _compile_step(self, step: int, text: str) -> Compiled:
        source = self._folder / source_name(step)
        source.write_text(text)
        rename = [f"-D{rung}=step_{step}" for rung in ("v3_warp_local", "v4_vectorized")]
        observer = ["-include", str(HERE / "launch_observer.cuh")]
        files = ["-c", str(source), "-o", str(source.with_suffix(".o"))]
        output = _run([self._nvcc, *self._flags, *rename, *observer, "-Xptxas=-v", *files])
        return parse_ptxas(output)

    def link(self, steps: int) -> Library:
        """Links the compiled steps into a library and loads it.

        Raises
        ------
        CompileError
            nvcc failed.
        """
        entries = "".join(f"V4_STEP(step_{step})\n" for step in range(steps))
        (self._folder / "steps.def").write_text(entries)
        path = self._folder / "libv4_steps.so"
        objects = [self._folder / source_name(step) for step in range(steps)]
        _run(
            [self._nvcc, *self._flags, f'-DV4_STEPS_ARCH="{self._arch}"', "-shared"]
            + [str(HERE / "steps.cu"), str(ROOT / "src" / "cuda" / "device.cu")]
            + [str(ROOT / "src" / "core" / "errors.cpp")]
            + [str(source.with_suffix(".o")) for source in objects]
            + ["-o", str(path)]
        )
        return Library(path)
