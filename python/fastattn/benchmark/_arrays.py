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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fastattn import testing

Call = Callable[[], Any]
HostArray = npt.NDArray[Any]
Attention = tuple[HostArray, HostArray]

# Scores of the evaluations on a GPU that are held at one time: 256 MiB in float64.
_SCORES_AT_A_TIME = 1 << 25
# Queries, and scores, of which a library's matrix products may sum otherwise than those of many: in
# trees, or in parts side by side.
_FEW_ROWS = 32
_FEW_SCORES = 1 << 18


def sums_may_be_trees(rows: int, scores: int) -> bool:
    """Whether torch or NumPy may sum a call's products more exactly than tiles of keys can."""
    return rows <= _FEW_ROWS or scores <= _FEW_SCORES


@dataclass(frozen=True)
class Problem:
    """One attention call: its shape, dtype, mask and scale."""

    dtype: str
    batch: int
    heads_q: int
    heads_kv: int
    len_q: int
    len_kv: int
    head_dim: int
    head_dim_v: int
    causal: bool = False
    window: tuple[int, int] | None = None  # (left, right), as fastattn.forward takes it
    scale: float | None = None  # None: 1 / sqrt(head_dim)

    @property
    def flops(self) -> float:
        """Floating-point operations: 2 B H M N (D + Dv), half of that when causal.

        With Dv = D that is the 4 B H M N D by which attention is counted everywhere; what a kernel
        skips or does twice changes nothing. Masked half: the convention, whatever M - N is. With a
        window, which has no convention, M N are the pairs that the masks let through.
        """
        pairs = self.len_q * self.len_kv / (2 if self.causal else 1)
        if self.window is not None:
            first, end = self.visible()
            pairs = float(np.maximum(end - first, 0).sum())
        return 2.0 * self.batch * self.heads_q * pairs * (self.head_dim + self.head_dim_v)

    def visible(self) -> tuple[HostArray, HostArray]:
        """Of each row, the first key that it sees and the one behind the last."""
        position = np.arange(self.len_q) + (self.len_kv - self.len_q)
        left, right = self.window or (-1, -1)
        if self.causal:
            right = 0 if right < 0 else min(right, 0)
        first = np.zeros_like(position) if left < 0 else np.maximum(position - left, 0)
        end = np.full_like(position, self.len_kv)
        return first, end if right < 0 else np.minimum(end, position + right + 1)

    @property
    def factor(self) -> float:
        """Of the scores."""
        return 1 / math.sqrt(self.head_dim) if self.scale is None else self.scale

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
        """The float64 reference of host inputs, and the plain evaluations' error on them."""
        options: dict[str, Any] = {
            "causal": problem.causal,
            "window": problem.window,
            "scale": problem.scale,
        }
        plain = [testing.naive(q, k, v, dtype=problem.dtype, **options)]
        scores = problem.batch * problem.heads_q * problem.len_q * problem.len_kv
        if problem.dtype == "float32" and sums_may_be_trees(problem.len_q, scores):
            plain.append(testing.naive(q, k, v, dtype="float32", by_terms=True, **options))
        return expect(testing.reference(q, k, v, **options), *plain)

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
        x, y, z = (self.torch.from_numpy(array).to(self.device) for array in (q, k, v))
        exact, *plain = self.evaluations(problem, x, y, z, self.pairs(problem))
        shape = problem.out_shape

        def host(result: tuple[Any, Any]) -> Attention:
            out, lse = (x.cpu().numpy() for x in result)
            return out.reshape(shape), lse.reshape(shape[:3])

        return expect(host(exact), *map(host, plain))

    @staticmethod
    def pairs(problem: Problem) -> list[tuple[int, int]]:
        """Every (batch, query head) of a problem, in order."""
        return list(np.ndindex(problem.batch, problem.heads_q))

    def evaluations(
        self, problem: Problem, q: Any, k: Any, v: Any, pairs: Sequence[tuple[int, int]]
    ) -> list[tuple[Any, Any]]:
        """Attention of some (batch, query head) pairs of device tensors.

        First in float64, then as plain evaluations in the problem's dtype, by which a kernel's
        error is judged. Each is ``(out, lse)`` on the device: [pairs, M, Dv] and [pairs, M].
        """
        float32, float64 = self.torch.float32, self.torch.float64
        dtype = getattr(self.torch, problem.dtype)
        found = [
            self._evaluate(problem, q, k, v, pairs, float64, float64),
            self._evaluate(problem, q, k, v, pairs, float32, dtype),
        ]
        if dtype is float32:
            found += self._naive(problem, q, k, v, pairs)
            scores = len(pairs) * problem.len_q * problem.len_kv
            if sums_may_be_trees(problem.len_q, scores):
                found.append(self._loops(problem, q, k, v, pairs))
        return found

    def _naive(
        self, problem: Problem, q: Any, k: Any, v: Any, pairs: Sequence[tuple[int, int]]
    ) -> list[tuple[Any, Any]]:
        """Float32 attention, all pairs at once; none where memory is too small for it.

        How a matrix product orders its sums decides about a factor of two in the error, and the
        product of a batch may order them otherwise than the product of one head.
        """
        torch = self.torch
        group = problem.heads_q // problem.heads_kv
        batch, head = (
            torch.tensor(index, device=self.device) for index in zip(*pairs, strict=True)
        )
        try:
            scores = (q[batch, head] @ k[batch, head // group].mT) * problem.factor
            hidden = self.hidden(problem)
            if hidden is not None:
                scores.masked_fill_(hidden, -math.inf)
            lse = torch.logsumexp(scores, -1)
            return [(torch.softmax(scores, -1) @ v[batch, head // group], lse)]
        except torch.cuda.OutOfMemoryError:
            return []

    def _loops(
        self, problem: Problem, q: Any, k: Any, v: Any, pairs: Sequence[tuple[int, int]]
    ) -> tuple[Any, Any]:
        """Float32 attention with sums term by term, over keys in runs of 64.

        The products of few rows are vector times matrix to torch, whose sums are trees, and small
        products are split along their sums: twice as exact as kernels that take tiles in turn.
        """
        torch = self.torch
        group = problem.heads_q // problem.heads_kv
        batch, head = (
            torch.tensor(index, device=self.device) for index in zip(*pairs, strict=True)
        )
        queries, keys, values = q[batch, head], k[batch, head // group], v[batch, head // group]
        scores = torch.zeros((), device=self.device)
        for d in range(problem.head_dim):
            scores = scores + queries[..., d, None] * keys[..., None, :, d]  # [pairs, M, N]
        scores = scores * problem.factor
        hidden = self.hidden(problem)
        if hidden is not None:
            scores.masked_fill_(hidden, -math.inf)
        largest = scores.amax(-1, keepdim=True)
        weights = (scores - largest).exp()
        # The runs side by side: weights [pairs, M, runs, 64], terms [pairs, 1, runs, 64, Dv + 1].
        pad = torch.nn.functional.pad
        missing = -problem.len_kv % 64
        weights = pad(weights, (0, missing)).unflatten(-1, (-1, 64))
        terms = pad(torch.cat([values, torch.ones_like(values[..., :1])], -1), (0, 0, 0, missing))
        terms = terms[:, None].unflatten(2, (-1, 64))
        runs = torch.zeros((), device=self.device)
        for j in range(64):
            runs = runs + weights[..., j, None] * terms[..., j, :]
        summed = torch.zeros((), device=self.device)
        for run in runs.unbind(2):
            summed = summed + run
        return summed[..., :-1] / summed[..., -1:], (largest + summed[..., -1:].log())[..., 0]

    def hidden(self, problem: Problem) -> Any:
        """[M, N], True where a mask hides a key; None without one."""
        if not problem.causal and problem.window is None:
            return None
        first, end = (self.torch.from_numpy(x).to(self.device)[:, None] for x in problem.visible())
        key = self.torch.arange(problem.len_kv, device=self.device)
        return (key < first) | (key >= end)

    def _evaluate(
        self,
        problem: Problem,
        q: Any,
        k: Any,
        v: Any,
        pairs: Sequence[tuple[int, int]],
        compute: Any,
        store: Any,
    ) -> tuple[Any, Any]:
        """Plain attention in ``compute`` arithmetic; P and the result are rounded to ``store``."""
        torch = self.torch
        shape = (len(pairs), problem.len_q, problem.head_dim_v)
        out = torch.empty(shape, dtype=compute, device=self.device)
        lse = torch.empty(shape[:2], dtype=compute, device=self.device)
        group = problem.heads_q // problem.heads_kv
        hidden = self.hidden(problem)
        # One head at a time, and of a long one some rows, bounds the memory.
        rows = max(1, _SCORES_AT_A_TIME // max(1, problem.len_kv))
        for place, (b, h) in enumerate(pairs):
            queries = q[b, h].to(compute) * problem.factor
            keys, values = (x[b, h // group].to(compute) for x in (k, v))
            for start in range(0, problem.len_q, rows):
                block = slice(start, start + rows)
                scores = queries[block] @ keys.T
                if hidden is not None:
                    scores.masked_fill_(hidden[block], -math.inf)
                lse[place, block] = torch.logsumexp(scores, -1)
                weights = torch.softmax(scores, -1).to(store).to(compute)
                out[place, block] = (weights @ values).to(store).to(compute)
        return out, lse

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

    def repeated(self, call: Call, count: int) -> Call:
        """``count`` calls as one: a CUDA graph, whose replay costs the host nothing for each.

        On a CPU, where there are no graphs, a loop.
        """
        if self.device == "cpu":
            return lambda: [call() for _ in range(count)]
        # Capture wants what is first done in a call, such as loading code, to be over, and wants
        # it done on another stream than the legacy default one.
        side = self.torch.cuda.Stream()
        side.wait_stream(self.torch.cuda.current_stream())
        with self.torch.cuda.stream(side):
            for _ in range(3):
                call()
        self.torch.cuda.current_stream().wait_stream(side)
        graph = self.torch.cuda.CUDAGraph()
        with self.torch.cuda.graph(graph):
            for _ in range(count):
                call()
        replay: Call = graph.replay
        return replay

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
