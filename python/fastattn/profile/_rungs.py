"""Which kernels have a profile, and why the others have none."""

from __future__ import annotations

from dataclasses import dataclass

import fastattn
from fastattn import KernelInfo
from fastattn.explain import RUNGS

# One duration, occupancy and point on the roofline describe one CUDA kernel. What launches several
# in a call is known here, so that it is refused before anything runs; a rung that is missing here
# is found out all the same, by ncu (see _ncu.profile).
SEVERAL_KERNELS = {"v0": "scores, softmax and output"}
# Of what launches short kernels before the one that does the work: that one, which is profiled.
MAIN_KERNELS = {"v6": "attention_kernel"}
DTYPES = ("float32", "float16", "bfloat16")

_REFERENCES = ("baseline", "sdpa")


@dataclass(frozen=True)
class Shape:
    """Of the profiled call: B, H, M = N, D, dtype; not causal, Hq = Hkv, D = Dv."""

    batch: int = 4
    heads: int = 12
    length: int = 2048
    head_dim: int = 64
    dtype: str = "float32"

    @property
    def flop(self) -> int:
        """What attention of this shape needs: 4 B H M N D, as everywhere in the project."""
        return 4 * self.batch * self.heads * self.length * self.length * self.head_dim


def has_cuda() -> bool:
    """Whether this build can run a kernel on a GPU."""
    return "cuda" in fastattn.show_config("dict")["backends"]


def without_gpu(name: str) -> str:
    """What there is of a rung, or of all, where nothing can be measured."""
    return (
        f"Without a GPU, `python -m fastattn.explain {name}` counts what the source does, and "
        "`--from benchmarks/results/profile-nvidia-h200.json`, a file of the source tree, shows "
        "what was measured on an H200."
    )


def refusal(name: str, shape: Shape) -> str | None:
    """Why ``name`` has no profile of this shape, in one sentence; None where it has one."""
    if name in _REFERENCES or name.startswith("torch_"):
        return (
            f"{name} is PyTorch's code, which launches kernels of its own choice: only the "
            "ladder's kernels are profiled"
        )
    if name in SEVERAL_KERNELS:
        return (
            f"{name} launches several CUDA kernels in one call ({SEVERAL_KERNELS[name]}), so it "
            "has no one occupancy, register count or point on the roofline"
        )
    known = {kernel.name: kernel for kernel in fastattn.kernels()}
    kernel = known.get(name)
    if kernel is None:
        # A build without CUDA has no rungs, but knows what they are called.
        rungs = profiled() or [rung for rung in RUNGS if rung not in SEVERAL_KERNELS]
        if name in rungs and not has_cuda():
            return None  # nothing is wrong with the name: what the build lacks is said of all
        return f"unknown kernel {name!r}; known: all, {', '.join(rungs)}"
    if kernel.backend != "cuda":
        return f"{name} runs on the CPU, and ncu sees GPUs only"
    return _shape_refusal(kernel, shape)


def _shape_refusal(kernel: KernelInfo, shape: Shape) -> str | None:
    if shape.dtype not in kernel.dtypes:
        return f"{kernel.name} takes no {shape.dtype}"
    if not kernel.head_dim_min <= shape.head_dim <= kernel.head_dim_max:
        takes = (
            f"{kernel.head_dim_min}"
            if kernel.head_dim_min == kernel.head_dim_max
            else f"{kernel.head_dim_min} to {kernel.head_dim_max}"
        )
        text = f"{kernel.name} takes head dim {takes}, not {shape.head_dim}"
        if kernel.redirect:
            text += f"; it would hand the call to {kernel.redirect}: profile {kernel.redirect}"
        return text
    return None


def profiled() -> list[str]:
    """The kernels that ``all`` stands for, in ladder order."""
    return [
        kernel.name
        for kernel in fastattn.kernels()
        if kernel.backend == "cuda" and kernel.name not in SEVERAL_KERNELS
    ]
