"""The rows of a benchmark: what is timed, how, and what is written down."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import fastattn
from fastattn import testing
from fastattn.benchmark import _machine, _torch_ways
from fastattn.benchmark._arrays import Arrays, Call, Expected, Problem, TorchArrays
from fastattn.benchmark._meta import gpus

# A median of fewer calls says little; even a row far over its time gets these.
_MIN_REPETITIONS = 3
# The part of a row's time that warm-up calls may take.
_WARMUP_SHARE = 0.2
# Matrices of the ceiling: large enough for the full rate, small enough for a second.
_CEILING_SIZES = {"cuda": 8192, "cpu": 2048}
# How much worse than a plain evaluation in the same dtype a right kernel may be.
TOLERANCE = 2.0
# On few numbers a plain evaluation can be exact by luck. Never less than the roundings that every
# kernel has: that of the result, and in float32 those of an exponential besides.
_FLOOR = {"float32": 2.0**-22, "float16": 2.0**-11, "bfloat16": 2.0**-8}
# The norm of few errors is itself a matter of luck, and a score's error is that of all its row's
# columns. Of fewer rows, or columns, three times as much.
_FEW_ROWS, _FEW_COLUMNS = 16, 4
_LUCK = 3.0


@dataclass(frozen=True)
class Implementation:
    """Something that the benchmark times: a registered kernel, "auto", or one of torch's ways."""

    selector: str  # what the command line calls it
    impl: str  # what the record calls it
    title: str
    kernel: fastattn.KernelInfo | None = None  # None: torch's, or "auto"

    @property
    def is_torch(self) -> bool:
        """Whether torch computes it."""
        return self.impl.startswith("torch_")

    def refusal(self, problem: Problem) -> str | None:
        """Why this kernel's own code doesn't take the problem; None: it does."""
        kernel = self.kernel
        if kernel is None:
            return None
        if problem.dtype not in kernel.dtypes:
            return f"takes {', '.join(kernel.dtypes)}"
        for name, size in (("head dim", problem.head_dim), ("v head dim", problem.head_dim_v)):
            if not kernel.head_dim_min <= size <= kernel.head_dim_max:
                limits = f"takes {name} {kernel.head_dim_min} to {kernel.head_dim_max}"
                handed = f"; {kernel.redirect} takes over" if kernel.redirect else ""
                return limits + handed
        if problem.head_dim_v != problem.head_dim and not kernel.head_dim_v_differs:
            return "takes v of k's head dim only"
        if problem.len_q != problem.len_kv and not kernel.lengths_differ:
            return "takes M = N only"
        if problem.heads_q != problem.heads_kv and not kernel.grouped_heads:
            return "takes no grouped heads"
        if problem.causal and not kernel.causal:
            return "has no causal mask"
        if problem.window is not None and not kernel.window:
            return "has no window"
        return None

    def call(self, arrays: Arrays, problem: Problem, q: Any, k: Any, v: Any, out: Any) -> Call:
        """One timed call. Kernels write ``out``; torch's ways return their result."""
        if self.is_torch:
            assert isinstance(arrays, TorchArrays)
            return _torch_ways.TORCH[self.impl](arrays, problem, q, k, v)
        return lambda: fastattn.forward(
            q,
            k,
            v,
            kernel=self.impl,
            causal=problem.causal,
            window=problem.window,
            scale=problem.scale,
            out=out,
        )


BASELINE = Implementation("baseline", "torch_naive", "PyTorch: matmul, softmax, matmul")
SDPA = Implementation("sdpa", "torch_sdpa", "PyTorch: scaled_dot_product_attention")
FA2 = Implementation("fa2", "torch_fa2", "PyTorch: its FlashAttention-2 backend")
CUDNN = Implementation("cudnn", "torch_cudnn", "PyTorch: its cuDNN backend")
AUTO = Implementation("auto", "auto", "the kernel that auto takes")


def implementations(device: str) -> list[Implementation]:
    """Torch's two ways, then every registered kernel of the device's backend, in ladder order."""
    kernels = [
        Implementation(kernel.name, kernel.name, kernel.title, kernel)
        for kernel in fastattn.kernels()
        if kernel.backend == device
    ]
    return [BASELINE, SDPA, *kernels]


def cuda_only(name: str) -> str | None:
    """Why this build can't time a CUDA kernel that it lacks; None for any other name."""
    if any(kernel.name == name for kernel in fastattn.kernels(emulated=True)):
        return (
            f"{name!r} is a CUDA kernel, and this build has no CUDA backend: build with "
            f"FASTATTN_CUDA=ON (`python -m fastattn.explain {name}` emulates it, which says "
            "nothing about its speed)"
        )
    x = np.zeros((1, 1, 1, 1), np.float32)
    try:
        fastattn.forward(x, x, x, kernel=name)
    except NotImplementedError as refusal:
        return str(refusal)
    except ValueError:
        pass  # a name that no build knows
    return None


@dataclass(frozen=True)
class Timing:
    """Times of single calls, in microseconds."""

    us: float  # median
    us_iqr: float  # third quartile minus first
    us_best: float
    repetitions: int

    @classmethod
    def of(cls, times: Sequence[float]) -> Timing:
        """Summarises the times of at least one call."""
        first, third = np.quantile(times, (0.25, 0.75))
        return cls(statistics.median(times), float(third - first), min(times), len(times))


@dataclass(frozen=True)
class Plan:
    """How often a row's call runs."""

    warmup: int = 25
    repetitions: int = 100
    max_seconds: float = 10.0

    def fit(self, us: float) -> tuple[int, int]:
        """Warm-up calls and timed calls of a call that takes ``us``, within ``max_seconds``.

        Warm-up may take a fifth of the time, timed calls the rest; at least 3 calls are timed.
        """
        budget = self.max_seconds * 1e6
        warmup = int(budget * _WARMUP_SHARE / us)
        timed = int(budget * (1 - _WARMUP_SHARE) / us)
        return (
            min(self.warmup, warmup),
            min(self.repetitions, max(_MIN_REPETITIONS, timed)),
        )


def measure(arrays: Arrays, calls: Sequence[Call], plan: Plan) -> list[Timing]:
    """Times the calls by ``plan``.

    On a GPU one after the other. On a CPU in turn, one call of each per round, so that whatever
    else the machine does falls on all alike; the slowest then sets the number of rounds.
    """
    if arrays.device == "cuda":
        return [_measure_alone(arrays, call, plan) for call in calls]
    fits = [plan.fit(estimate(arrays, call)) for call in calls]
    warmup, repetitions = min(f[0] for f in fits), min(f[1] for f in fits)
    times: list[list[float]] = [[] for _ in calls]
    for round_ in range(warmup + repetitions):
        for call, mine in zip(calls, times, strict=True):
            taken = arrays.time_calls(call, 1)
            if round_ >= warmup:
                mine += taken
    return [Timing.of(mine) for mine in times]


def _measure_alone(arrays: Arrays, call: Call, plan: Plan) -> Timing:
    warmup, repetitions = plan.fit(estimate(arrays, call))
    for _ in range(warmup):
        call()
    return Timing.of(arrays.time_calls(call, repetitions))


def estimate(arrays: Arrays, call: Call) -> float:
    """Microseconds of one call; the first, which loads code, doesn't count."""
    call()
    arrays.synchronize()
    return max(arrays.time_calls(call, 1)[0], 1e-3)


@dataclass(frozen=True)
class Result:
    """One measured row."""

    implementation: Implementation
    problem: Problem
    timing: Timing
    error: float
    plain_error: float

    @property
    def tflops(self) -> float:
        """Counted operations over the median time."""
        return self.problem.flops / self.timing.us * 1e-6

    @property
    def allowed(self) -> float:
        """The largest error of a right kernel: twice a plain evaluation's, of few rows more."""
        *rows, columns = self.problem.out_shape
        is_few = math.prod(rows) < _FEW_ROWS or columns < _FEW_COLUMNS
        luck = _LUCK if is_few else 1.0
        return luck * max(TOLERANCE * self.plain_error, _FLOOR[self.problem.dtype])

    @property
    def right(self) -> bool:
        """Whether a kernel's error is allowed; torch's rows get no verdict."""
        return self.implementation.is_torch or self.error <= self.allowed

    def row(self, suite: str) -> dict[str, Any]:
        """The row of a record."""
        p = self.problem
        return {
            "suite": suite,
            "impl": self.implementation.impl,
            "title": self.implementation.title,
            "direction": "forward",
            "dtype": p.dtype,
            "batch": p.batch,
            "heads_q": p.heads_q,
            "heads_kv": p.heads_kv,
            "len_q": p.len_q,
            "len_kv": p.len_kv,
            "head_dim": p.head_dim,
            "head_dim_v": p.head_dim_v,
            "causal": p.causal,
            "window": None if p.window is None else list(p.window),
            "us": round(self.timing.us, 3),
            "us_iqr": round(self.timing.us_iqr, 3),
            "us_best": round(self.timing.us_best, 3),
            "repetitions": self.timing.repetitions,
            "tflops": float(f"{self.tflops:.5g}"),
            "error": float(f"{self.error:.3g}"),
        }


@dataclass(frozen=True)
class Failure:
    """A row that could not be measured: refused (by declaration), or failed."""

    implementation: Implementation
    problem: Problem
    reason: str
    refused: bool


def run(
    arrays: Arrays,
    chosen: Sequence[Implementation],
    problem: Problem,
    plan: Plan,
    rng: np.random.Generator,
    on_start: Callable[[str], None] = lambda label: None,
) -> Iterator[Result | Failure]:
    """Checks and times the implementations on one fresh input."""
    inputs = problem.host_inputs(rng)
    q, k, v = (arrays.put(x, problem.dtype) for x in inputs)
    on_start("float64 reference")
    expected = arrays.expected(problem, *inputs)
    ready: list[tuple[Implementation, Call, float]] = []
    for implementation in chosen:
        on_start(implementation.selector)
        reason = implementation.refusal(problem)
        if reason is not None:
            yield Failure(implementation, problem, reason, refused=True)
            continue
        try:
            out = None
            if not implementation.is_torch:
                out = arrays.poisoned(problem.out_shape, problem.dtype)
            call = implementation.call(arrays, problem, q, k, v, out)
            returned = call()
            arrays.synchronize()
            error = testing.error(returned if out is None else out, expected.out)
            if arrays.device == "cuda":
                yield _result(implementation, problem, arrays, call, plan, error, expected)
            else:
                ready.append((implementation, call, error))
        except NotImplementedError as refusal:
            yield Failure(implementation, problem, str(refusal), refused=True)
        except (AssertionError, MemoryError, RuntimeError) as failure:
            yield Failure(implementation, problem, str(failure), refused=False)
    if ready:
        on_start("all of them in turn")
        timings = measure(arrays, [call for _, call, _ in ready], plan)
        for (implementation, _, error), timing in zip(ready, timings, strict=True):
            yield Result(implementation, problem, timing, error, expected.plain_error)


def _result(
    implementation: Implementation,
    problem: Problem,
    arrays: Arrays,
    call: Call,
    plan: Plan,
    error: float,
    expected: Expected,
) -> Result:
    (timing,) = measure(arrays, [call], plan)
    return Result(implementation, problem, timing, error, expected.plain_error)


@dataclass(frozen=True)
class Ceiling:
    """The rate that a row's TFLOP/s is set against."""

    tflops: float
    method: str


def measure_ceiling(arrays: Arrays, dtype: str) -> Ceiling | None:
    """The rate of a large matrix product in ``dtype``, or the FP32 peak by arithmetic.

    8192^3 on a GPU (median of 10), 2048^3 on a CPU (best of 10: other work only slows it).
    """
    size = _CEILING_SIZES[arrays.device]
    product = arrays.gemm(size, dtype)
    if product is not None:
        for _ in range(3):
            product()
        times = arrays.time_calls(product, 10)
        us = statistics.median(times) if arrays.device == "cuda" else min(times)
        method = f"{size}^3 {dtype} matrix product through {arrays.framework}, this run"
        return Ceiling(2.0 * size**3 / us * 1e-6, method)
    if arrays.device == "cuda" and dtype == "float32":
        clock = _machine.nvidia_smi_mhz("clocks.max.sm")
        found = gpus()
        if clock and found:
            capability, processors = found[0]["compute_capability"], found[0]["multiprocessors"]
            peak = _machine.fp32_peak_tflops(capability, processors, clock)
            return Ceiling(peak, f"peak by arithmetic: {processors} SMs at {clock} MHz, unmeasured")
    return None


def sm_clock(arrays: Arrays, rng: np.random.Generator) -> int | None:
    """The SM clock in MHz while the fastest fp32 kernel runs."""
    problem = Problem("float32", 4, 12, 12, 2048, 2048, 64, 64)
    q, k, v = (arrays.put(x, problem.dtype) for x in problem.host_inputs(rng))
    out = arrays.poisoned(problem.out_shape, problem.dtype)

    def load() -> None:
        for _ in range(32):
            fastattn.forward(q, k, v, out=out)
        arrays.synchronize()

    return _machine.sm_clock_under_load(load)


def host_cost(arrays: TorchArrays) -> dict[str, float]:
    """Host microseconds of one call on small CUDA tensors: ours, torch's attention, torch.add.

    Batches of 100 calls are timed by the host's clock without waiting for the GPU; the best of 20
    batches counts, since only the host's other work can add to it.
    """
    torch = arrays.torch
    q, k, v = (torch.randn((1, 1, 16, 64), device="cuda") for _ in range(3))
    sdpa = torch.nn.functional.scaled_dot_product_attention
    calls: dict[str, Call] = {
        "fastattn": lambda: fastattn.forward(q, k, v),
        "torch_sdpa": lambda: sdpa(q, k, v),
        "torch_add": lambda: torch.add(q, k),
    }
    cost = {}
    for name, call in calls.items():
        batches = []
        for _ in range(20):
            arrays.synchronize()
            start = time.perf_counter_ns()
            for _ in range(100):
                call()
            batches.append((time.perf_counter_ns() - start) * 1e-5)
        cost[name] = round(min(batches), 3)
    return cost
