"""What ``--suite forward`` measures: problems, inputs, layouts, and what stands beside ours."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from fastattn.benchmark._arrays import Problem, TorchArrays
from fastattn.benchmark._suite import BASELINE, CUDNN, FA2, SDPA, Implementation

GRID, FP32, STRESS, SMALL, SHAPES = (
    "forward-grid",
    "forward-fp32",
    "forward-stress",
    "forward-small",
    "forward-shapes",
)

# Calls in a CUDA graph: enough that a replay's own start is spread thin.
GRAPH_CALLS = 20


@dataclass(frozen=True)
class Case:
    """One problem of a suite, with its input and how it lies in memory."""

    suite: str
    name: str
    problem: Problem
    beside: tuple[Implementation, ...]  # torch's ways to do the same
    inputs: str = "randn"  # of INPUTS
    layout: str = "bhmd"  # or "bmhd", "misaligned"
    graph: bool = False  # timed by replaying a CUDA graph of GRAPH_CALLS calls


# --- inputs ---------------------------------------------------------------------------------------

# What an input set does to standard normal q, k and v, in place.
Change = Callable[[Any, Any, Any, Any], None]


def _nothing(torch: Any, q: Any, k: Any, v: Any) -> None:
    pass


def _shifted(torch: Any, q: Any, k: Any, v: Any) -> None:
    for x in (q, k, v):
        x += 0.5


def _rows(x: Any, torch: Any, low: float, high: float) -> None:
    """Multiplies each row by e^u, u uniform from ``low`` to ``high``."""
    x *= torch.empty_like(x[..., :1]).uniform_(low, high).exp()


def _q_rows(torch: Any, q: Any, k: Any, v: Any) -> None:
    _rows(q, torch, -13.8155, 9.2103)  # 1e-6 to 1e4


def _k_rows(torch: Any, q: Any, k: Any, v: Any) -> None:
    _rows(k, torch, -7.0, 7.0)


def _v_rows(torch: Any, q: Any, k: Any, v: Any) -> None:
    _rows(v, torch, -13.8155, 9.2103)


def _k_channel(torch: Any, q: Any, k: Any, v: Any) -> None:
    k[..., 5] *= 1000


def _all(factor: float) -> Change:
    def change(torch: Any, q: Any, k: Any, v: Any) -> None:
        for x in (q, k, v):
            x *= factor

    return change


def _v_column(torch: Any, q: Any, k: Any, v: Any) -> None:
    # Alternating signs cancel in a uniform average, and leave the roundings of 1e5.
    v[..., 0] = 1e5
    v[..., 1::2, 0] *= -1


INPUTS: dict[str, Change] = {
    "randn": _nothing,
    "randn + 0.5": _shifted,
    "q rows 1e-6 to 1e4": _q_rows,
    "k rows e^-7 to e^7": _k_rows,
    "v rows 1e-6 to 1e4": _v_rows,
    "k channel x1000": _k_channel,
    "all 1e-20": _all(1e-20),
    "all 1e4": _all(1e4),
    "all 1e4, one-hot": _all(1e4),
    "v column 1e5": _v_column,
}

# The worst input that is known for products of two float16 parts: nothing is promised for it.
WORST_INPUT = "v column 1e5"

# Scales of the scores, for head dim 64; the other sets keep 1 / sqrt(64). Under that one the large
# inputs would make each row's softmax pick a single key, which hides the errors of the scores. Here
# the largest scores have a standard deviation of 3 to 5, and those of the last, a nearly uniform
# average, 1e-3. Powers of two, so that no row has the rounding of a scale in its error.
_STRESS_SCALES = {
    "q rows 1e-6 to 1e4": 2.0**-14,
    "k rows e^-7 to e^7": 2.0**-11,
    "k channel x1000": 2.0**-8,
    "all 1e4": 2.0**-28,
    "v column 1e5": 2.0**-13,
}


def make_inputs(arrays: TorchArrays, case: Case, seed: int) -> tuple[Any, Any, Any]:
    """Fresh q, k and v of a case on the device, in its layout."""
    torch = arrays.torch
    torch.manual_seed(seed)
    made = [
        torch.randn(shape, device=arrays.device, dtype=torch.float32)
        for shape in case.problem.shapes
    ]
    INPUTS[case.inputs](torch, *made)
    dtype = getattr(torch, case.problem.dtype)
    q, k, v = (lay_out(torch, x.to(dtype), case.layout) for x in made)
    return q, k, v


def lay_out(torch: Any, x: Any, layout: str) -> Any:
    """[B, H, M, D] with its elements where ``layout`` wants them."""
    if layout == "bmhd":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "misaligned":
        memory = torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)
        memory[1:] = x.flatten()
        return memory[1:].view(x.shape)
    return x


# --- the parts ------------------------------------------------------------------------------------


def _grid() -> list[Case]:
    """FlashAttention-2's grid: hidden size 2048, 16384 tokens."""
    return [
        Case(
            GRID,
            f"D={dim} {'causal' if causal else 'full'} N={length}",
            _square(dtype, 16384 // length, 2048 // dim, length, dim, causal=causal),
            (FA2, CUDNN),
        )
        for dtype in ("float16", "bfloat16")
        for dim in (64, 128, 256)
        for causal in (False, True)
        for length in (512, 2048, 8192)
    ]


def _fp32() -> list[Case]:
    """Float32: the ladder's shape, a larger head dim, longer ones, a mask."""
    shapes = [
        ("D=64 N=2048", 4, 2048, 64, False),
        ("D=128 N=2048", 4, 2048, 128, False),
        ("D=64 N=4096", 2, 4096, 64, False),
        ("D=64 N=4096 causal", 2, 4096, 64, True),
        ("D=128 N=4096", 2, 4096, 128, False),
        ("D=128 N=4096 causal", 2, 4096, 128, True),
        ("D=64 N=8192", 1, 8192, 64, False),
        ("D=128 N=8192", 1, 8192, 128, False),
    ]
    return [
        Case(FP32, name, _square("float32", batch, 12, n, dim, causal=causal), (SDPA, BASELINE))
        for name, batch, n, dim, causal in shapes
    ]


def _stress() -> list[Case]:
    """Float32 under inputs that are hard for products of two float16 parts."""
    problem = _square("float32", 1, 4, 2048, 64)
    return [
        Case(
            STRESS,
            inputs,
            replace(problem, scale=_STRESS_SCALES.get(inputs)),
            (SDPA, BASELINE),
            inputs=inputs,
        )
        for inputs in INPUTS
    ]


def _small() -> list[Case]:
    return [
        Case(SMALL, f"{dtype} N={n}", _square(dtype, 8, 16, n, 64), (SDPA,), graph=True)
        for dtype in ("float16", "float32")
        for n in (64, 128, 256)
    ]


def _shapes() -> list[Case]:
    """Masks, groups, head dims, lengths and layouts, each alone."""
    cases = []
    for dtype, heads, dim, beside in (
        ("float16", 16, 128, (SDPA, FA2)),
        ("float32", 12, 64, (SDPA,)),
    ):
        long = _square(dtype, 1, heads, 8192, dim)
        middle = _square(dtype, 2, heads, 4096, dim)
        problems = {
            "full": long,
            "causal": replace(long, causal=True),
            "window (256, 0)": replace(long, window=(256, 0)),
            "window (1024, 1024)": replace(long, window=(1024, 1024)),
            "Hq=32 Hkv=8 causal": replace(middle, heads_q=32, heads_kv=8, causal=True),
            "Hq=32 Hkv=1 causal": replace(middle, heads_q=32, heads_kv=1, causal=True),
            **{
                f"D={d}" if d == dv else f"D={d} Dv={dv}": replace(
                    middle, head_dim=d, head_dim_v=dv
                )
                for d, dv in ((32, 32), (40, 40), (80, 80), (96, 96), (192, 128), (128, 64))
            },
            "M=1024 N=8192 causal": replace(long, batch=4, len_q=1024, causal=True),
        }
        cases += [Case(SHAPES, name, p, beside) for name, p in problems.items()]
        few = replace(long, batch=8)
        cases += [
            Case(SHAPES, f"M={m} N=8192", replace(few, len_q=m), beside, graph=True)
            for m in (128, 1)
        ]
        cases.append(Case(SHAPES, "[B, M, H, D]", middle, beside, layout="bmhd"))
        # Torch's kernels aren't asked: some of them read 16 bytes at a time without looking.
        cases.append(Case(SHAPES, "misaligned", middle, (), layout="misaligned"))
    return cases


def _square(
    dtype: str, batch: int, heads: int, length: int, dim: int, *, causal: bool = False
) -> Problem:
    return Problem(dtype, batch, heads, heads, length, length, dim, dim, causal)


SUITES: dict[str, Callable[[], list[Case]]] = {
    GRID: _grid,
    FP32: _fp32,
    STRESS: _stress,
    SMALL: _small,
    SHAPES: _shapes,
}


def cases(suite: str) -> list[Case]:
    """Every case of one of ``SUITES``, or of all of them for "forward"."""
    names = list(SUITES) if suite == "forward" else [suite]
    return [case for name in names for case in SUITES[name]()]
