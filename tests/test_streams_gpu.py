"""Streams, graph capture, lifetimes, devices and failures: what only a GPU shows.

Every kernel of the CUDA backend goes through the stream tests. Results are compared bit for bit
with a synchronised call of the same kernel: a kernel gives the same bits each time, and any work on
the wrong stream reads the NaNs that stand there before the producer has run.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import fastattn
from fastattn import _core
from fastattn.testing import CudaArray

pytestmark = pytest.mark.gpu

SHAPE = (2, 3, 65, 64)
SLEEP = 200_000  # cycles: some 0.1 ms
LONG = 500_000_000  # some 0.3 s: longer than any call


def kernel_names() -> list[str]:
    """Those that this machine's GPU can run."""
    devices = fastattn.show_config("dict")["cuda"]["devices"]
    capability = devices[0]["compute_capability"] if devices else 0
    return ["auto"] + [
        kernel.name
        for kernel in fastattn.kernels()
        if kernel.backend == "cuda" and kernel.min_compute_capability <= capability
    ]


@pytest.fixture(params=kernel_names())
def kernel(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def dtype_of(kernel: str) -> str:
    return next((k.dtypes[0] for k in fastattn.kernels() if k.name == kernel), "float32")


@pytest.fixture
def torch() -> Any:
    module = pytest.importorskip("torch")
    if not module.cuda.is_available():
        pytest.skip("torch has no CUDA")
    return module


@pytest.fixture
def cupy() -> Any:
    return pytest.importorskip("cupy")


def random(torch: Any, count: int, kernel: str = "auto", shape: Any = SHAPE) -> Any:
    generator = torch.Generator(device="cuda").manual_seed(1)
    x = torch.randn((count, *shape), device="cuda", generator=generator)
    torch.cuda.synchronize()
    return x.to(getattr(torch, dtype_of(kernel)))


def synchronised(torch: Any, kernel: str, *arrays: Any) -> Any:
    torch.cuda.synchronize()
    out = fastattn.forward(*arrays, kernel=kernel)
    torch.cuda.synchronize()
    return out


# --- torch's streams ------------------------------------------------------------------------------


def test_side_stream_of_torch(torch: Any, kernel: str) -> None:
    rounds = 300
    inputs = random(torch, 4, kernel)
    k, v = inputs[2:]
    wanted = [synchronised(torch, kernel, q, k, v) for q in inputs[:2]]
    q, out = torch.empty_like(k), torch.empty_like(k)
    results = torch.empty((rounds, *SHAPE), dtype=k.dtype, device="cuda")
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for i in range(rounds):
            q.fill_(float("nan"))
            out.fill_(float("nan"))
            torch.cuda._sleep(SLEEP)
            q.copy_(inputs[i % 2])
            fastattn.forward(q, k, v, kernel=kernel, out=out)
            results[i].copy_(out)
    stream.synchronize()
    for i in range(rounds):
        assert torch.equal(results[i], wanted[i % 2]), f"round {i}"


def test_result_allocated_on_the_side_stream(torch: Any, kernel: str) -> None:
    q, k, v = random(torch, 3, kernel)
    wanted, wanted_lse = fastattn.forward(q, k, v, kernel=kernel, return_lse=True)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    same = []
    with torch.cuda.stream(stream):
        for _ in range(50):
            late = torch.full_like(q, float("nan"))
            torch.cuda._sleep(SLEEP)
            late.copy_(q)
            out, lse = fastattn.forward(late, k, v, kernel=kernel, return_lse=True)
            # Both results are freed at the end of the round, and their memory used again.
            same.append((out == wanted).all() & (lse == wanted_lse).all())
    stream.synchronize()
    assert all(map(bool, same))


def test_inputs_freed_right_after_the_call(torch: Any, kernel: str) -> None:
    q, k, v = random(torch, 3, kernel)
    wanted = synchronised(torch, kernel, q, k, v)
    outs = []
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
        for _ in range(50):
            torch.cuda._sleep(SLEEP)
            outs.append(fastattn.forward(q.clone(), k.clone(), v.clone(), kernel=kernel))
            torch.full((3, *SHAPE), float("nan"), device="cuda")  # may take the clones' memory
    torch.cuda.synchronize()
    assert all(torch.equal(out, wanted) for out in outs)


class CudaStreamProtocol:
    def __init__(self, handle: int) -> None:
        self.handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self.handle)


FORMS: dict[str, Callable[[Any], Any]] = {
    "torch.cuda.Stream": lambda stream: stream,
    "handle": lambda stream: stream.cuda_stream,
    "__cuda_stream__": lambda stream: CudaStreamProtocol(stream.cuda_stream),
    "cupy stream": lambda stream: pytest.importorskip("cupy").cuda.ExternalStream(
        stream.cuda_stream
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_explicit_stream(torch: Any, form: str) -> None:
    q, k, v = random(torch, 3)
    wanted = synchronised(torch, "auto", q, k, v)
    stream = torch.cuda.Stream()
    argument = FORMS[form](stream)
    late = torch.full_like(q, float("nan"))
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(LONG)
        late.copy_(q)
    # The current stream is the default one, which does not wait for torch's streams.
    out, lse = fastattn.forward(late, k, v, stream=argument, return_lse=True)
    assert not stream.query()
    stream.synchronize()
    assert torch.equal(out, wanted)
    assert torch.isfinite(lse).all()


def test_inputs_of_an_explicit_stream_freed_right_after_the_call(torch: Any) -> None:
    q, k, v = random(torch, 3)
    wanted = synchronised(torch, "auto", q, k, v)
    stream = torch.cuda.Stream()
    outs = []
    for _ in range(20):
        late = q.clone()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(10 * SLEEP)
        outs.append(fastattn.forward(late, k, v, stream=stream))
        del late
        torch.full_like(q, float("nan"))  # on the current stream, whose allocator owned `late`
    torch.cuda.synchronize()
    assert all(torch.equal(out, wanted) for out in outs)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_numbers_of_the_default_streams(torch: Any, number: int) -> None:
    q, k, v = random(torch, 3)
    wanted = synchronised(torch, "auto", q, k, v)
    # 0 and 1 are the legacy stream, which is torch's default; 2 is the per-thread stream, which
    # waits for the legacy one.
    late = torch.full_like(q, float("nan"))
    torch.cuda._sleep(SLEEP)
    late.copy_(q)
    out = fastattn.forward(late, k, v, stream=number)
    torch.cuda.synchronize()
    assert torch.equal(out, wanted)
    # The same from inside of another stream, which the default streams do not wait for.
    late.fill_(float("nan"))
    torch.cuda.synchronize()
    torch.cuda._sleep(SLEEP)
    late.copy_(q)
    with torch.cuda.stream(torch.cuda.Stream()):
        out = fastattn.forward(late, k, v, stream=number)
    torch.cuda.synchronize()
    assert torch.equal(out, wanted)


def test_last_dimension_with_gaps_on_a_stream(torch: Any) -> None:
    q, k, v = random(torch, 3)
    wanted = synchronised(torch, "auto", q, k, v)
    stream = torch.cuda.Stream()
    late = torch.full((*SHAPE, 2), float("nan"), device="cuda")[..., 0]
    torch.cuda.synchronize()
    for argument in (None, stream):
        late.fill_(float("nan"))
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(10 * SLEEP)
            late.copy_(q)
            if argument is None:
                out = fastattn.forward(late, k, v)
        if argument is not None:
            out = fastattn.forward(late, k, v, stream=argument)
        stream.synchronize()
        assert torch.equal(out, wanted)


def test_nothing_waits(torch: Any, kernel: str) -> None:
    q, k, v = random(torch, 3, kernel)
    synchronised(torch, kernel, q, k, v)
    done = torch.cuda.Event()
    torch.cuda._sleep(LONG)
    fastattn.forward(q, k, v, kernel=kernel, return_lse=True)
    done.record()
    assert not done.query()
    torch.cuda.synchronize()


# --- graphs ---------------------------------------------------------------------------------------


def test_graph_capture(torch: Any, kernel: str) -> None:
    inputs = random(torch, 5, kernel)
    k, v = inputs[3:]
    wanted = [fastattn.forward(inputs[i], k, v, kernel=kernel, return_lse=True) for i in range(3)]
    q = torch.empty_like(k)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out, lse = fastattn.forward(q, k, v, kernel=kernel, return_lse=True)
    for i in range(3):
        q.copy_(inputs[i])
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, wanted[i][0]), f"replay {i}"
        assert torch.equal(lse, wanted[i][1]), f"replay {i}"


def run_python(code: str, **environment: str) -> str:
    """Runs code in an interpreter of its own, and gives what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_first_call_of_a_process_is_captured(torch: Any, kernel: str) -> None:
    printed = run_python(f"""
        import torch
        import fastattn
        q, k, v = torch.randn(3, *{SHAPE}, device="cuda").to(torch.{dtype_of(kernel)})
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            out = fastattn.forward(q, k, v, kernel="{kernel}")
        graph.replay()
        torch.cuda.synchronize()
        print(torch.equal(out, fastattn.forward(q, k, v, kernel="{kernel}")))
    """)
    assert printed.strip() == "True"


# --- CuPy's streams -------------------------------------------------------------------------------

SPIN = r"""
extern "C" __global__ void spin(long long cycles) {
  for (const long long start = clock64(); clock64() - start < cycles;) {
  }
}
"""


@pytest.fixture
def spin(cupy: Any) -> Callable[[int], None]:
    """Keeps CuPy's current stream busy."""
    function = cupy.RawKernel(SPIN, "spin")
    function((1,), (1,), (np.int64(1),))
    cupy.cuda.Device().synchronize()
    return lambda cycles: function((1,), (1,), (np.int64(cycles),))


def cupy_random(cupy: Any, count: int) -> Any:
    x = cupy.asarray(np.random.default_rng(1).standard_normal((count, *SHAPE), np.float32))
    cupy.cuda.Device().synchronize()
    return x


@pytest.mark.parametrize("sort", ["null", "per-thread", "blocking", "non-blocking"])
def test_current_stream_of_cupy(cupy: Any, spin: Callable[[int], None], sort: str) -> None:
    rounds = 100
    inputs = cupy_random(cupy, 4)
    k, v = inputs[2:]
    wanted = [fastattn.forward(inputs[i], k, v) for i in range(2)]
    q, out = cupy.empty_like(k), cupy.empty_like(k)
    results = cupy.empty((rounds, *SHAPE), np.float32)
    stream = {
        "null": lambda: cupy.cuda.Stream.null,
        "per-thread": lambda: cupy.cuda.Stream.ptds,
        "blocking": cupy.cuda.Stream,
        "non-blocking": lambda: cupy.cuda.Stream(non_blocking=True),
    }[sort]()
    cupy.cuda.Device().synchronize()
    with stream:
        for i in range(rounds):
            q.fill(np.nan)
            out.fill(np.nan)
            spin(SLEEP)
            q[...] = inputs[i % 2]
            if i % 2:
                fastattn.forward(q, k, v, out=out)
                results[i] = out
            else:
                results[i] = fastattn.forward(q, k, v)
    stream.synchronize()
    for i in range(rounds):
        assert bool((results[i] == wanted[i % 2]).all()), f"round {i}"


def test_explicit_stream_for_cupy(cupy: Any, spin: Callable[[int], None]) -> None:
    q, k, v = cupy_random(cupy, 3)
    wanted = fastattn.forward(q, k, v)
    stream = cupy.cuda.Stream(non_blocking=True)
    late = cupy.full_like(q, np.nan)
    cupy.cuda.Device().synchronize()
    for argument in (stream, stream.ptr):
        late.fill(np.nan)
        cupy.cuda.Device().synchronize()
        with stream:
            spin(LONG)
            late[...] = q
        out, lse = fastattn.forward(late, k, v, stream=argument, return_lse=True)
        assert not stream.done
        stream.synchronize()
        assert bool((out == wanted).all())
        assert bool(cupy.isfinite(lse).all())


def test_graph_capture_by_cupy(cupy: Any) -> None:
    q, k, v = cupy_random(cupy, 3)
    wanted = fastattn.forward(q, k, v)
    out = cupy.full_like(q, np.nan)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        fastattn.forward(q, k, v, out=out)
        graph = stream.end_capture()
    graph.launch(stream)
    stream.synchronize()
    assert bool((out == wanted).all())


def test_managed_memory(cupy: Any) -> None:
    q, k, v = cupy_random(cupy, 3)
    with cupy.cuda.using_allocator(cupy.cuda.malloc_managed):
        managed = [x.copy() for x in (q, k, v)]
        assert managed[0].__dlpack_device__()[0] == 13  # kDLCUDAManaged
        out = fastattn.forward(*managed)
    assert isinstance(out, cupy.ndarray)
    assert bool((out == fastattn.forward(q, k, v)).all())


def test_pinned_memory_is_the_cpus(cupy: Any) -> None:
    cupyx = pytest.importorskip("cupyx")
    q, k, v = (np.asarray(x.get()) for x in cupy_random(cupy, 3))
    pinned = [cupyx.empty_like_pinned(x) for x in (q, k, v)]
    for to, x in zip(pinned, (q, k, v), strict=True):
        to[...] = x
    np.testing.assert_array_equal(fastattn.forward(*pinned), fastattn.forward(q, k, v))


# --- frameworks together, and producers unknown by name -------------------------------------------


def test_frameworks_wait_for_each_other(torch: Any, cupy: Any, spin: Callable[[int], None]) -> None:
    """q of torch decides the stream; what CuPy still computes on its own is waited for."""
    q, k, v = random(torch, 3)
    wanted = synchronised(torch, "auto", q, k, v)
    late = cupy.full(SHAPE, np.nan, np.float32)
    source = cupy.from_dlpack(k)
    theirs = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with torch.cuda.stream(torch.cuda.Stream()), theirs:
        spin(100 * SLEEP)
        late[...] = source
        out = fastattn.forward(q, late, v)
    torch.cuda.synchronize()
    assert isinstance(out, torch.Tensor)
    assert torch.equal(out, wanted)

    # And the other way round.
    late_torch = torch.full_like(k, float("nan"))
    ours = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(ours), theirs:
        torch.cuda._sleep(100 * SLEEP)
        late_torch.copy_(k)
        result = fastattn.forward(cupy.from_dlpack(q), late_torch, cupy.from_dlpack(v))
    torch.cuda.synchronize()
    assert isinstance(result, cupy.ndarray)
    assert torch.equal(torch.from_dlpack(result), wanted)


class Producer:
    """A CUDA array of no framework that fastattn knows by name."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.streams: list[Any] = []

    def __dlpack__(self, *, stream: Any = None, max_version: Any = None) -> Any:
        self.streams.append(stream)
        return self.inner.__dlpack__(stream=stream, max_version=max_version)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, int(self.inner.device.index))


def test_unknown_producer_hears_the_launch_stream(torch: Any) -> None:
    q, k, v = random(torch, 3)
    wanted = synchronised(torch, "auto", q, k, v)
    out = torch.full_like(q, float("nan"))
    producer = Producer(q)
    fastattn.forward(producer, Producer(k), Producer(v), out=Producer(out))
    torch.cuda.synchronize()
    assert producer.streams == [1]  # DLPack's number of the legacy default stream
    assert torch.equal(out, wanted)

    stream = torch.cuda.Stream()
    fastattn.forward(producer, Producer(k), Producer(v), out=Producer(out), stream=stream)
    assert producer.streams[-1] == stream.cuda_stream
    with torch.cuda.stream(stream):
        fastattn.forward(q, producer, v)  # q of torch decides
    assert producer.streams[-1] == stream.cuda_stream
    torch.cuda.synchronize()


def test_unknown_producer_is_kept_until_the_work_is_done(torch: Any) -> None:
    q, k, v = random(torch, 3)
    out = torch.empty_like(q)
    arguments = [Producer(q.clone()), Producer(k), Producer(v)]
    fastattn.forward(*arguments, out=out)
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    torch.cuda._sleep(LONG)
    fastattn.forward(*arguments, out=out)
    del arguments
    assert torch.cuda.memory_allocated() == held
    torch.cuda.synchronize()
    fastattn.forward(q, k, v, out=out)  # lets go of what is done
    assert torch.cuda.memory_allocated() < held


def test_unknown_producer_without_allocator(torch: Any) -> None:
    q, k, v = map(Producer, random(torch, 3))
    with pytest.raises(ValueError, match="out: got None, and Producer has no __array_namespace__"):
        fastattn.forward(q, k, v)


# --- a GPU without a framework --------------------------------------------------------------------


def test_cuda_array(kernel: str) -> None:
    arrays = np.random.default_rng(1).standard_normal((3, *SHAPE), np.float32)
    dtype = dtype_of(kernel)
    q, k, v = (CudaArray.from_numpy(x, dtype=dtype) for x in arrays)
    out = CudaArray.from_numpy(np.full(SHAPE, np.nan, np.float32), dtype=dtype)
    assert fastattn.forward(q, k, v, kernel=kernel, out=out) is out
    scores = (arrays[0].astype(np.float64) @ arrays[1].swapaxes(-1, -2)) / 8
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    wanted = weights / weights.sum(-1, keepdims=True) @ arrays[2]
    np.testing.assert_allclose(out.to_numpy(), wanted, atol=1e-5 if dtype == "float32" else 2e-2)


def test_cuda_buffer(torch: Any) -> None:
    buffer = _core.CudaBuffer(64)
    assert (buffer.nbytes, buffer.device) == (64, 0)
    host = np.arange(16, dtype=np.float32)
    buffer.copy_from_host(host)
    view = torch.from_dlpack(CudaArray(buffer, (4, 4), "float32"))
    assert view.data_ptr() == buffer.pointer
    assert torch.equal(view.cpu(), torch.from_numpy(host.reshape(4, 4)))
    buffer.fill(0xFF)
    back = np.empty(16, np.float32)
    buffer.copy_to_host(back)
    assert np.isnan(back).all()
    with pytest.raises(ValueError, match="16 elements do not fit into 8 bytes"):
        _core.CudaBuffer(8).dlpack((4, 4), "float32")
    with pytest.raises(ValueError, match="host: got 64 bytes, the buffer has 8"):
        _core.CudaBuffer(8).copy_from_host(host)
    # The tensor keeps the buffer.
    del buffer
    assert torch.isnan(view).all()


def test_cuda_event(torch: Any) -> None:
    start, end = _core.CudaEvent(), _core.CudaEvent()
    start.record()
    torch.cuda._sleep(1_000_000)
    end.record()
    assert not end.is_done()
    end.synchronize()
    assert end.is_done()
    assert start.elapsed_ms(end) > 0.1
    _core.synchronize()


# --- devices --------------------------------------------------------------------------------------


def test_arrays_on_another_gpu_than_the_current_one(torch: Any, kernel: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("fewer than 2 GPUs")
    first = random(torch, 3, kernel)
    wanted = synchronised(torch, kernel, *first)
    second = first.to("cuda:1")
    torch.cuda.synchronize(1)
    out = fastattn.forward(*second, kernel=kernel)
    assert out.device.index == 1
    assert torch.cuda.current_device() == 0
    assert torch.equal(out.cpu(), wanted.cpu())
    # With a side stream of that GPU.
    with torch.cuda.device(1):
        stream = torch.cuda.Stream()
    out = fastattn.forward(*second, kernel=kernel, stream=stream)
    stream.synchronize()
    assert torch.equal(out.cpu(), wanted.cpu())
    assert torch.cuda.current_device() == 0


def test_cupy_on_another_gpu_than_the_current_one(cupy: Any) -> None:
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("fewer than 2 GPUs")
    first = cupy_random(cupy, 3)
    wanted = fastattn.forward(*first).get()
    with cupy.cuda.Device(1):
        second = cupy_random(cupy, 3)
    out = fastattn.forward(*second)
    assert out.device.id == 1
    assert cupy.cuda.runtime.getDevice() == 0
    np.testing.assert_array_equal(out.get(), wanted)


# --- failures -------------------------------------------------------------------------------------


def test_an_error_of_another_library_is_not_blamed_on_us(torch: Any, cupy: Any) -> None:
    q, k, v = random(torch, 3)
    wanted = synchronised(torch, "auto", q, k, v)
    with pytest.raises(cupy.cuda.runtime.CUDARuntimeError):
        cupy.cuda.runtime.malloc(1 << 60)
    assert torch.equal(fastattn.forward(q, k, v), wanted)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1 << 45, device="cuda")
    assert torch.equal(fastattn.forward(q, k, v), wanted)


def test_a_failure_of_ours_passes(torch: Any) -> None:
    q, k, v = random(torch, 3)
    wanted = synchronised(torch, "auto", q, k, v)
    with pytest.raises(RuntimeError, match="cudaMalloc"):
        _core.CudaBuffer(1 << 60)
    with pytest.raises(ValueError, match="ordinal 1000"):
        _core.CudaBuffer(8, 1000)
    assert torch.equal(fastattn.forward(q, k, v), wanted)
    with pytest.raises(NotImplementedError, match="it has no causal mask"):
        fastattn.forward(q, k, v, kernel="v0", causal=True)
    assert torch.equal(fastattn.forward(q, k, v), wanted)


# --- the process ----------------------------------------------------------------------------------


def test_import_and_config_create_no_context() -> None:
    printed = run_python("""
        import ctypes
        import fastattn

        def active():
            driver = ctypes.CDLL("libcuda.so.1")
            assert driver.cuInit(0) == 0
            flags, active = (ctypes.c_uint * 1)(), (ctypes.c_int * 1)()
            assert driver.cuDevicePrimaryCtxGetState(0, flags, active) == 0
            return active[0]

        after_import = active()
        assert fastattn.show_config("dict")["cuda"]["devices"]
        print(after_import, active())
    """)
    assert printed.split() == ["0", "0"]


def test_import_then_fork(torch: Any) -> None:
    printed = run_python("""
        import os
        import torch
        import fastattn
        child = os.fork()
        if child == 0:
            x = torch.randn(1, 2, 64, 64, device="cuda")
            os._exit(0 if bool(torch.isfinite(fastattn.forward(x, x, x)).all()) else 1)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """)
    assert printed.strip() == "0"


def test_no_visible_gpu() -> None:
    printed = run_python(
        """
        import numpy as np
        import fastattn
        x = np.ones((1, 1, 2, 8), np.float32)
        print(fastattn.forward(x, x, x).sum(), fastattn.show_config("dict")["cuda"]["devices"])
        """,
        CUDA_VISIBLE_DEVICES="",
    )
    assert printed.strip() == "16.0 []"


def test_threads(torch: Any, kernel: str) -> None:
    q, k, v = random(torch, 3, kernel)
    wanted = synchronised(torch, kernel, q, k, v)
    failures: list[str] = []

    def work() -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(500):
                    out = fastattn.forward(q, k, v, kernel=kernel)
                torch.cuda.current_stream().synchronize()
                if not torch.equal(out, wanted):
                    failures.append("wrong result")
        except Exception as error:
            failures.append(repr(error))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_no_leak(torch: Any) -> None:
    names = [name for name in kernel_names() if dtype_of(name) == "float32"]
    q, k, v = random(torch, 3)
    stream = torch.cuda.Stream()
    references = [sys.getrefcount(x) for x in (q, k, v)]

    def calls(count: int) -> None:
        for i in range(count):
            name = names[i % len(names)]
            fastattn.forward(q, k, v, kernel=name, return_lse=bool(i & 1))
            if i % 5 == 0:
                fastattn.forward(q, k, v, kernel=name, stream=stream)
                fastattn.forward(Producer(q), Producer(k), v, out=torch.empty_like(q))
                with pytest.raises(ValueError, match="head count"):
                    fastattn.forward(q, k, v[:, :1])
        torch.cuda.synchronize()
        fastattn.forward(q, k, v)  # lets go of what is done
        torch.cuda.synchronize()

    calls(50)
    allocated, free = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]
    calls(2000)
    assert torch.cuda.memory_allocated() <= allocated
    # The driver takes a few MiB in its own time; one leaked result a call would be 250 MB.
    assert free - torch.cuda.mem_get_info()[0] < 32 << 20
    assert [sys.getrefcount(x) for x in (q, k, v)] == references
