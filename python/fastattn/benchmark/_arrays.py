"""Arrays, events and references on one device, through whatever framework the machine has.

The benchmark and the self-check need few things of a framework: random inputs, poisoned outputs,
events, and a float64 evaluation. torch gives all of them, CuPy and the package's own CudaArray give
enough for a machine without torch, and NumPy serves the CPU.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fastattn import testing

Call = Callable[[], Any]
HostArray = npt.NDArray[Any]
Attention = tuple[HostArray, HostArray]


@dataclass(frozen=True)
class Problem:
    """One attention call: its shape, dtype and mask."""

    dtype: str
    batch: int
    heads_q: int
    heads_kv: int
    len_q: int
    len_kv: int
    head_dim: int
    head_dim_v: int
    causal: bool = False

    @property
    def flops(self) -> float:
        """Floating-point operations: 2 B H M N (D + Dv), half of that when causal.

        With Dv = D that is the 4 B H M N D by which attention is counted everywhere; what a kernel
        skips or does twice changes nothing. Masked half: the convention, whatever M - N is.
        """
        pairs = self.batch * self.heads_q * self.len_q * self.len_kv
        return 2.0 * pairs * (self.head_dim + self.head_dim_v) / (2 if self.causal else 1)

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Shapes of q, k and v."""
        return (
            (self.batch, self.heads_q, self.len_q, self.head_dim),
            (self.batch, self.heads_kv, self.len_kv, self.head_dim),
            (self.batch, self.heads_kv, self.len_kv, self.head_dim_v),
        )

    @property
    def out_shape(self) -> tuple[int, ...]:
        """Shape of the output."""
        return (self.batch, self.heads_q, self.len_q, self.head_dim_v)

    def host_inputs(self, rng: np.random.Generator) -> tuple[HostArray, HostArray, HostArray]:
        """Fresh q, k and v: standard normal, rounded to the dtype, held as float32."""
        q, k, v = (
            testing.round_to(rng.standard_normal(shape, np.float32), self.dtype)
            for shape in self.shapes
        )
        return q, k, v


@dataclass(frozen=True)
class Expected:
    """What a kernel's result is held against."""

    out: HostArray  # float64
    lse: HostArray  # float64
    plain_error: float  # of plain evaluations in the call's own dtype, the largest
    plain_lse_error: float


def expect(reference: Attention, *plain: Attention) -> Expected:
    """The oracle's result, and how far plain evaluations of the same input are from it at most."""
    return Expected(
        *reference,
        plain_error=max(testing.error(out, reference[0]) for out, _ in plain),
        plain_lse_error=max(testing.error(lse, reference[1]) for _, lse in plain),
    )


class Arrays(ABC):
    """A framework's arrays on one device."""

    framework: str
    device: str  # "cuda" or "cpu"

    def supports(self, dtype: str) -> bool:
        """Whether the framework has this dtype."""
        return dtype in ("float32", "float16", "bfloat16")

    @abstractmethod
    def put(self, host: HostArray, dtype: str) -> Any:
        """Copies a float32 host array to the device, as ``dtype``."""

    def poisoned(self, shape: tuple[int, ...], dtype: str) -> Any:
        """An array of NaN: what a kernel leaves unwritten shows."""
        return self.put(np.full(shape, np.nan, np.float32), dtype)

    def expected(self, problem: Problem, q: HostArray, k: HostArray, v: HostArray) -> Expected:
        """The float64 reference of host inputs, and the plain evaluation's error on them."""
        return expect(
            testing.reference(q, k, v, causal=problem.causal),
            testing.naive(q, k, v, causal=problem.causal, dtype=problem.dtype),
        )

    @abstractmethod
    def synchronize(self) -> None:
        """Waits for all work of the device."""

    @abstractmethod
    def time_calls(self, call: Call, count: int) -> list[float]:
        """Times ``count`` calls, each on its own, in microseconds."""

    def gemm(self, size: int, dtype: str) -> Call | None:
        """A matrix product of two ``size`` x ``size`` matrices; None where there is no library."""
        return None


class NumpyArrays(Arrays):
    """Host arrays. bfloat16 needs ml_dtypes."""

    framework = "numpy"
    device = "cpu"

    def supports(self, dtype: str) -> bool:
        return dtype != "bfloat16" or importlib.util.find_spec("ml_dtypes") is not None

    def put(self, host: HostArray, dtype: str) -> Any:
        if dtype == "bfloat16":
            return host.astype(importlib.import_module("ml_dtypes").bfloat16)
        return host.astype(dtype)

    def synchronize(self) -> None:
        pass

    def time_calls(self, call: Call, count: int) -> list[float]:
        times = []
        for _ in range(count):
            start = time.perf_counter_ns()
            call()
            times.append((time.perf_counter_ns() - start) * 1e-3)
        return times

    def gemm(self, size: int, dtype: str) -> Call | None:
        a = np.random.default_rng(0).standard_normal((size, size), np.float32)
        out = np.empty_like(a)
        return lambda: np.matmul(a, a, out=out)


class _CudaArrays(Arrays):
    """GPU arrays with events: each call lies between two events of its own."""

    device = "cuda"

    @abstractmethod
    def event(self) -> Any:
        """A timing event, not yet recorded."""

    @abstractmethod
    def elapsed_us(self, start: Any, end: Any) -> float:
        """Microseconds between two recorded events that have passed."""

    def time_calls(self, call: Call, count: int) -> list[float]:
        # All events exist before the first call and one wait ends the row, so that the GPU never
        # waits for the host in between.
        pairs = [(self.event(), self.event()) for _ in range(count)]
        self.synchronize()
        for start, end in pairs:
            start.record()
            call()
            end.record()
        self.synchronize()
        return [self.elapsed_us(start, end) for start, end in pairs]


class TorchArrays(_CudaArrays):
    """torch tensors, on either device."""

    framework = "torch"

    def __init__(self, device: str) -> None:
        self.device = device
        self.torch = importlib.import_module("torch")
        # float32 means float32 here: no TF32 in the rows, the ceiling and the yardstick.
        self.torch.set_float32_matmul_precision("highest")
        self._host = NumpyArrays()

    def put(self, host: HostArray, dtype: str) -> Any:
        return self.torch.from_numpy(host).to(self.device, getattr(self.torch, dtype))

    def expected(self, problem: Problem, q: HostArray, k: HostArray, v: HostArray) -> Expected:
        if self.device == "cpu":
            return super().expected(problem, q, k, v)
        dtype = getattr(self.torch, problem.dtype)
        plain = [self._evaluate(problem, q, k, v, self.torch.float32, dtype)]
        if problem.dtype == "float32":
            plain += self._naive(problem, q, k, v)
        return expect(
            self._evaluate(problem, q, k, v, self.torch.float64, self.torch.float64), *plain
        )

    def _naive(self, problem: Problem, q: HostArray, k: HostArray, v: HostArray) -> list[Attention]:
        """Float32 attention by torch, all heads at once; none where memory is too small for it.

        How a matrix product orders its sums decides about a factor of two in the error, and the
        product of a batch may order them otherwise than the product of one head.
        """
        torch = self.torch
        group = problem.heads_q // problem.heads_kv
        try:
            x, y, z = (torch.from_numpy(array).to(self.device) for array in (q, k, v))
            y, z = (array.repeat_interleave(group, 1) for array in (y, z))
            scores = (x @ y.mT) * (1 / math.sqrt(problem.head_dim))
            hidden = self._hidden(problem)
            if hidden is not None:
                scores.masked_fill_(hidden, -math.inf)
            lse = torch.logsumexp(scores, -1)
            out = torch.softmax(scores, -1) @ z
            return [(out.cpu().numpy(), lse.cpu().numpy())]
        except torch.cuda.OutOfMemoryError:
            return []

    def _hidden(self, problem: Problem) -> Any:
        """[M, N], True where the causal mask hides a key; None without one."""
        if not problem.causal:
            return None
        shape = (problem.len_q, problem.len_kv)
        ones = self.torch.ones(shape, dtype=self.torch.bool, device=self.device)
        return ones.triu(problem.len_kv - problem.len_q + 1)

    def _evaluate(
        self, problem: Problem, q: HostArray, k: HostArray, v: HostArray, compute: Any, store: Any
    ) -> Attention:
        """Plain attention in ``compute`` arithmetic; P and the result are rounded to ``store``."""
        torch = self.torch
        tensors = [torch.from_numpy(x).to(self.device, compute) for x in (q, k, v)]
        scale = 1 / math.sqrt(problem.head_dim)
        shape = problem.out_shape
        out = torch.empty(shape, dtype=compute, device=self.device)
        lse = torch.empty(shape[:3], dtype=compute, device=self.device)
        group = problem.heads_q // problem.heads_kv
        hidden = self._hidden(problem)
        # One head at a time bounds the memory: [M, N] scores of float64, 34 MB at 2048.
        for b, h in np.ndindex(problem.batch, problem.heads_q):
            scores = (tensors[0][b, h] * scale) @ tensors[1][b, h // group].T
            if hidden is not None:
                scores.masked_fill_(hidden, -math.inf)
            lse[b, h] = torch.logsumexp(scores, -1)
            weights = torch.softmax(scores, -1).to(store).to(compute)
            out[b, h] = (weights @ tensors[2][b, h // group]).to(store).to(compute)
        return out.cpu().numpy(), lse.cpu().numpy()

    def synchronize(self) -> None:
        if self.device == "cuda":
            self.torch.cuda.synchronize()

    def event(self) -> Any:
        return self.torch.cuda.Event(enable_timing=True)

    def elapsed_us(self, start: Any, end: Any) -> float:
        return float(start.elapsed_time(end)) * 1e3

    def time_calls(self, call: Call, count: int) -> list[float]:
        if self.device == "cpu":
            return self._host.time_calls(call, count)
        return super().time_calls(call, count)

    def gemm(self, size: int, dtype: str) -> Call | None:
        kind = getattr(self.torch, dtype)
        a = self.torch.randn((size, size), device=self.device).to(kind)
        b = self.torch.randn((size, size), device=self.device).to(kind)
        out = self.torch.empty_like(a)
        return lambda: self.torch.matmul(a, b, out=out)


class CupyArrays(_CudaArrays):
    """CuPy arrays."""

    framework = "cupy"

    def __init__(self) -> None:
        self.cupy = importlib.import_module("cupy")

    def supports(self, dtype: str) -> bool:
        return dtype in ("float32", "float16")

    def put(self, host: HostArray, dtype: str) -> Any:
        return self.cupy.asarray(host).astype(dtype)

    def synchronize(self) -> None:
        self.cupy.cuda.Device().synchronize()

    def event(self) -> Any:
        return self.cupy.cuda.Event()

    def elapsed_us(self, start: Any, end: Any) -> float:
        return float(self.cupy.cuda.get_elapsed_time(start, end)) * 1e3

    def gemm(self, size: int, dtype: str) -> Call | None:
        # CuPy multiplies float32 in float32 unless CUPY_TF32 asks for less.
        a = self.cupy.random.standard_normal((size, size), dtype="float32").astype(dtype)
        out = self.cupy.empty_like(a)
        return lambda: self.cupy.matmul(a, a, out=out)


class PlainCudaArrays(_CudaArrays):
    """The package's own GPU arrays, for a machine with a GPU and no framework."""

    framework = "fastattn"

    def __init__(self) -> None:
        self._core = importlib.import_module("fastattn._core")

    def put(self, host: HostArray, dtype: str) -> Any:
        return testing.CudaArray.from_numpy(host, dtype=dtype)

    def synchronize(self) -> None:
        self._core.synchronize()

    def event(self) -> Any:
        return self._core.CudaEvent()

    def elapsed_us(self, start: Any, end: Any) -> float:
        return float(start.elapsed_ms(end)) * 1e3


def torch_for(device: str) -> TorchArrays | None:
    """Torch's arrays on ``device``; None where torch isn't installed or can't use the GPU."""
    if importlib.util.find_spec("torch") is None:
        return None
    arrays = TorchArrays(device)
    return arrays if device == "cpu" or arrays.torch.cuda.is_available() else None


def arrays_for(device: str) -> Arrays:
    """The best framework that the machine has for ``device``."""
    torch = torch_for(device)
    if torch is not None:
        return torch
    if device == "cpu":
        return NumpyArrays()
    if importlib.util.find_spec("cupy") is not None:
        return CupyArrays()
    return PlainCudaArrays()
