"""How arrays come in and go out: the kind of the result, memory layouts, producers of every sort.

On CPU arrays; what only a GPU has is in test_streams_gpu.py. The wrong arguments are in
test_arguments.py.
"""

from __future__ import annotations

import ctypes
import gc
import math
import os
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fastattn
from fastattn import testing

SHAPE = (2, 4, 9, 16)


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape or SHAPE, np.float32)


Q, K, V = (random(seed=seed) for seed in range(3))
WANTED, WANTED_LSE = fastattn.forward(Q, K, V, return_lse=True)


def test_the_yardstick_is_right() -> None:
    out, lse = testing.reference(Q, K, V)
    assert testing.error(WANTED, out) < 1e-6
    assert testing.error(WANTED_LSE, lse) < 1e-6


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


# --- NumPy ----------------------------------------------------------------------------------------


def test_numpy_result() -> None:
    out, lse = fastattn.forward(Q, K, V, return_lse=True)
    assert (type(out), out.dtype, out.shape) == (np.ndarray, np.float32, SHAPE)
    assert (type(lse), lse.dtype, lse.shape) == (np.ndarray, np.float32, SHAPE[:3])
    assert out.flags.c_contiguous
    assert lse.flags.c_contiguous


def test_numpy_half() -> None:
    half = [x.astype(np.float16) for x in (Q, K, V)]
    out, lse = fastattn.forward(*half, return_lse=True)
    assert (out.dtype, lse.dtype) == (np.float16, np.float32)
    assert testing.error(out, testing.reference(*half)[0]) < 1e-3


def test_numpy_bfloat16() -> None:
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    q, k, v = (x.astype(bfloat16) for x in (Q, K, V))
    out, lse = fastattn.forward(q, k, v, return_lse=True)
    assert (out.dtype, lse.dtype) == (bfloat16, np.float32)
    given = np.full(SHAPE, np.nan, bfloat16)
    assert fastattn.forward(q, k, v, out=given) is given
    np.testing.assert_array_equal(given, out)
    # Another Dv: allocated by shape, not like q.
    assert fastattn.forward(q, k, v[..., :5]).dtype == bfloat16


class Subclass(np.ndarray):
    pass


def test_ndarray_subclasses_are_plain_memory(tmp_path: Path) -> None:
    mapped = np.memmap(tmp_path / "q", np.float32, "w+", shape=SHAPE)
    mapped[:] = Q
    for q in (Q.view(Subclass), mapped):
        out = fastattn.forward(q, K, V)
        assert type(out) is np.ndarray
        np.testing.assert_array_equal(out, WANTED)


def test_native_byte_order_by_any_name() -> None:
    native = "<f4" if sys.byteorder == "little" else ">f4"
    np.testing.assert_array_equal(fastattn.forward(Q.astype(native), K, V), WANTED)


def test_out_is_returned() -> None:
    out = np.full(SHAPE, np.nan, np.float32)
    assert fastattn.forward(Q, K, V, out=out) is out
    np.testing.assert_array_equal(out, WANTED)
    # Strided: rows with a gap, heads after positions, backwards.
    for view in (
        np.full((2, 4, 9, 24), np.nan, np.float32)[..., 4:20],
        np.full((2, 9, 4, 16), np.nan, np.float32).transpose(0, 2, 1, 3),
        np.full(SHAPE, np.nan, np.float32)[:, ::-1, ::-1],
    ):
        out, lse = fastattn.forward(Q, K, V, out=view, return_lse=True)
        assert out is view
        np.testing.assert_array_equal(view, WANTED)
        np.testing.assert_array_equal(lse, WANTED_LSE)


def test_out_writes_nothing_else() -> None:
    memory = np.full((2, 4, 9, 24), 7, np.float32)
    fastattn.forward(Q, K, V, out=memory[..., 4:20])
    assert (memory[..., :4] == 7).all()
    assert (memory[..., 20:] == 7).all()


def test_out_may_interleave_with_an_input() -> None:
    packed = np.zeros((2, 4, 9, 2, 16), np.float32)
    packed[..., 0, :] = Q
    fastattn.forward(packed[..., 0, :], K, V, out=packed[..., 1, :])
    np.testing.assert_array_equal(packed[..., 1, :], WANTED)
    np.testing.assert_array_equal(packed[..., 0, :], Q)


def test_out_never_shares_memory() -> None:
    """Random views of one buffer: accepted are only those that NumPy's exact solver finds apart."""
    rng = np.random.default_rng(0)
    memory = np.zeros(400, np.float32)
    accepted = refused = 0
    for _ in range(500):
        shape = tuple(int(x) for x in rng.integers(1, 4, 4))

        def view(shape: tuple[int, ...] = shape) -> np.ndarray:
            strides = [int(x) * 4 for x in rng.integers(-24, 25, 3)]
            start = memory[int(rng.integers(180, 220)) :]
            return np.lib.stride_tricks.as_strided(start, shape, (*strides, 4))

        q, out = view(), view()
        try:
            fastattn.forward(q, q.copy(), q.copy(), out=out)
        except ValueError as error:
            assert "memory" in str(error)  # noqa: PT017
            refused += 1
            continue
        accepted += 1
        rows = [out[index].ctypes.data for index in np.ndindex(shape[:3])]
        assert len({row + 4 * i for row in rows for i in range(shape[3])}) == out.size
        assert not np.shares_memory(q, out, max_work=-1)
    assert accepted > 50
    assert refused > 50


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("axis", range(4))
@pytest.mark.parametrize("heads_after_positions", [False, True])
def test_out_may_be_a_part_of_a_packed_buffer(
    axis: int, heads_after_positions: bool, dtype: Any
) -> None:
    """q, k, v and out side by side along any axis but the last."""
    order = (0, 2, 1, 3) if heads_after_positions else (0, 1, 2, 3)
    shape = [SHAPE[i] for i in order]
    shape.insert(axis, 4)
    parts = [x.transpose(order) for x in np.moveaxis(np.zeros(shape, dtype), axis, 0)]
    for part, values in zip(parts, (Q, K, V), strict=False):
        part[...] = values
    wanted = fastattn.forward(*(x.copy() for x in parts[:3]))
    fastattn.forward(*parts[:3], out=parts[3])
    np.testing.assert_array_equal(parts[3], wanted)


LAYOUTS = {
    "positions before heads": lambda x: x.transpose(0, 2, 1, 3).copy().transpose(0, 2, 1, 3),
    "rows with a gap": lambda x: np.concatenate([x, x * np.nan], -1)[..., : x.shape[-1]],
    "last dimension with a gap": lambda x: np.repeat(x, 3, -1)[..., ::3],
    "last dimension backwards": lambda x: x[..., ::-1].copy()[..., ::-1],
    "all backwards": lambda x: x[::-1, ::-1, ::-1, ::-1].copy()[::-1, ::-1, ::-1, ::-1],
    "head_dim before positions": lambda x: x.swapaxes(2, 3).copy().swapaxes(2, 3),
    "Fortran order": np.asfortranarray,
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("which", ["q", "k", "v", "qkv"])
def test_layouts(layout: str, which: str) -> None:
    q, k, v = (
        LAYOUTS[layout](x) if name in which else x for name, x in zip("qkv", (Q, K, V), strict=True)
    )
    np.testing.assert_array_equal(fastattn.forward(q, k, v), WANTED)


def test_head_dim_one_has_any_stride() -> None:
    q, k, v = (x[..., :1] for x in (Q, K, V))
    copies = [x.copy() for x in (q, k, v)]
    np.testing.assert_array_equal(fastattn.forward(q, k, v), fastattn.forward(*copies))
    np.testing.assert_array_equal(
        fastattn.forward(q, k, v, out=np.empty(SHAPE, np.float32)[..., :1]),
        fastattn.forward(*copies),
    )


def test_broadcast_inputs() -> None:
    k, v = (np.broadcast_to(x[:1, :1], SHAPE) for x in (K, V))
    np.testing.assert_array_equal(
        fastattn.forward(Q, k, v), fastattn.forward(Q, k.copy(), v.copy())
    )
    q = np.broadcast_to(Q[:, :1], SHAPE)  # its layout is not one for a result
    out = fastattn.forward(q, K, V)
    assert out.flags.c_contiguous
    np.testing.assert_array_equal(out, fastattn.forward(q.copy(), K, V))


def test_the_result_has_the_layout_of_a_dense_q() -> None:
    q = LAYOUTS["positions before heads"](Q)
    assert fastattn.forward(q, K, V).strides == q.strides


@pytest.mark.parametrize(
    ("q_shape", "kv_shape"),
    [
        ((0, 4, 9, 16), (0, 4, 9, 16)),
        ((2, 0, 9, 16), (2, 0, 9, 16)),
        ((2, 4, 0, 16), (2, 4, 9, 16)),
        ((2, 4, 9, 16), (2, 4, 0, 16)),
    ],
)
@pytest.mark.parametrize("kind", ["numpy", "torch", "strides 0"])
def test_empty(kind: str, q_shape: tuple[int, ...], kv_shape: tuple[int, ...]) -> None:
    q, k = np.ones(q_shape, np.float32), np.ones(kv_shape, np.float32)
    if kind == "torch":
        torch = pytest.importorskip("torch")
        q, k = torch.from_numpy(q), torch.from_numpy(k)
    elif kind == "strides 0":
        q, k = (np.lib.stride_tricks.as_strided(x, x.shape, (0, 0, 0, 0)) for x in (q, k))
    out, lse = fastattn.forward(q, k, k, return_lse=True)
    assert (tuple(out.shape), tuple(lse.shape)) == (q_shape, q_shape[:3])
    assert (np.asarray(out) == 0).all()
    assert (np.asarray(lse) == -np.inf).all()


# --- torch ----------------------------------------------------------------------------------------


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch")


@pytest.fixture
def tensors(torch: Any) -> list[Any]:
    return [torch.from_numpy(x.copy()) for x in (Q, K, V)]


def test_torch_result(torch: Any, tensors: list[Any]) -> None:
    out, lse = fastattn.forward(*tensors, return_lse=True)
    assert (type(out), out.dtype, out.device.type) == (torch.Tensor, torch.float32, "cpu")
    assert (lse.dtype, tuple(lse.shape), lse.is_contiguous()) == (torch.float32, SHAPE[:3], True)
    np.testing.assert_array_equal(out, WANTED)
    np.testing.assert_array_equal(lse, WANTED_LSE)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_torch_half(torch: Any, tensors: list[Any], dtype: str) -> None:
    kind = getattr(torch, dtype)
    out, lse = fastattn.forward(*(x.to(kind) for x in tensors), return_lse=True)
    assert (out.dtype, lse.dtype) == (kind, torch.float32)


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if "backwards" not in name])
def test_torch_layouts(torch: Any, layout: str) -> None:
    q, k, v = (torch.from_numpy(LAYOUTS[layout](x)) for x in (Q, K, V))
    np.testing.assert_array_equal(fastattn.forward(q, k, v), WANTED)


def test_expanded_tensors(torch: Any, tensors: list[Any]) -> None:
    q, k, v = tensors
    k1, v1 = k[:, :1], v[:, :1]
    grouped = fastattn.forward(q, k1, v1)
    np.testing.assert_array_equal(fastattn.forward(q, k1.expand(SHAPE), v1.expand(SHAPE)), grouped)


def test_the_kind_of_q_decides(torch: Any, tensors: list[Any]) -> None:
    q, k, v = tensors
    assert isinstance(fastattn.forward(q, K, V), torch.Tensor)
    assert isinstance(fastattn.forward(Q, k, v), np.ndarray)
    np.testing.assert_array_equal(fastattn.forward(q, K, v), WANTED)
    given = np.empty(SHAPE, np.float32)
    assert fastattn.forward(q, k, v, out=given) is given
    np.testing.assert_array_equal(given, WANTED)


def test_requires_grad_where_nothing_is_recorded(torch: Any, tensors: list[Any]) -> None:
    q, k, v = tensors
    q.requires_grad_()
    with torch.no_grad():
        assert not fastattn.forward(q, k, v).requires_grad
        parameter = torch.nn.Parameter(q.detach())
        np.testing.assert_array_equal(fastattn.forward(parameter, k, v), WANTED)
    with torch.inference_mode():
        np.testing.assert_array_equal(fastattn.forward(q, k, v), WANTED)
    np.testing.assert_array_equal(fastattn.forward(q.detach(), k, v), WANTED)


def test_autograd_notices_that_out_was_overwritten(torch: Any, tensors: list[Any]) -> None:
    out = torch.ones(SHAPE)
    weight = torch.ones(SHAPE, requires_grad=True)
    product = weight * out  # saves out for backward
    fastattn.forward(*tensors, out=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


def test_subclass_of_tensor(torch: Any, tensors: list[Any]) -> None:
    class Named(torch.Tensor):  # type: ignore[misc]
        pass

    q, k, v = tensors
    np.testing.assert_array_equal(fastattn.forward(q.as_subclass(Named), k, v), WANTED)


def test_torch_before_the_exchange_api(torch: Any) -> None:
    """torch < 2.10 is read by __dlpack__: what a torch without the attribute looks like."""
    printed = run_python("""
        import numpy as np, torch
        if hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
            del torch.Tensor.__dlpack_c_exchange_api__
        import fastattn
        q = np.random.default_rng(0).standard_normal((1, 2, 5, 8), np.float32)
        out, lse = fastattn.forward(*[torch.from_numpy(q)] * 3, return_lse=True)
        assert isinstance(out, torch.Tensor) and isinstance(lse, torch.Tensor)
        assert (out.numpy() == fastattn.forward(q, q, q)).all()
        x = torch.ones(1, 2, 5, 8)
        for wrong in (x.clone().requires_grad_(), x.to_sparse(), x.to("meta")):
            try:
                fastattn.forward(wrong, wrong, wrong)
            except TypeError as error:
                print(error)
    """)
    assert "requires grad" in printed
    assert "sparse" in printed
    assert "meta" in printed


# --- other producers ------------------------------------------------------------------------------


class Producer:
    """A DLPack producer of the least sort."""

    def __init__(self, inner: np.ndarray) -> None:
        self.inner = inner

    def __dlpack__(self, *, max_version: Any = None) -> Any:
        return self.inner.__dlpack__(max_version=max_version)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)


class OldProducer(Producer):
    """As they were before DLPack 1.0."""

    def __dlpack__(self) -> Any:  # type: ignore[override]
        return self.inner.__dlpack__()


class StandardArray(Producer):
    """What the array API standard asks of an array, as far as it matters here."""

    class Namespace:
        float32 = np.float32

        @staticmethod
        def empty(shape: tuple[int, ...], *, dtype: Any, device: str) -> StandardArray:
            assert device == "the device"
            return StandardArray(np.empty(shape, dtype))

    device = "the device"

    def __array_namespace__(self) -> type[Namespace]:
        return self.Namespace


class Failing(Producer):
    """Its own TypeError is no sign of an old producer."""

    calls = 0

    def __dlpack__(self, **_: Any) -> Any:
        self.calls += 1
        raise TypeError("not today")


def test_a_producers_own_error_is_not_asked_for_twice() -> None:
    producer = Failing(Q)
    with pytest.raises(TypeError, match="q: Failing could not be read through DLPack: not today"):
        fastattn.forward(producer, K, V)  # type: ignore[type-var]
    assert producer.calls == 1


@pytest.mark.parametrize("producer", [Producer, OldProducer, StandardArray])
def test_any_producer(producer: type[Producer]) -> None:
    out, lse = fastattn.forward(*map(producer, (Q, K, V)), return_lse=True)
    if producer is StandardArray:
        assert isinstance(out, StandardArray)
        assert isinstance(lse, StandardArray)
        out, lse = out.inner, lse.inner
    np.testing.assert_array_equal(out, WANTED)
    np.testing.assert_array_equal(lse, WANTED_LSE)


def test_any_producer_as_out() -> None:
    out = Producer(np.full(SHAPE, np.nan, np.float32))
    assert fastattn.forward(Q, K, V, out=out) is out  # type: ignore[arg-type]
    np.testing.assert_array_equal(out.inner, WANTED)


def test_read_only_through_dlpack() -> None:
    x = Q.copy()
    x.flags.writeable = False
    np.testing.assert_array_equal(fastattn.forward(Producer(x), K, V), WANTED)  # type: ignore[type-var]
    with pytest.raises(ValueError, match="out: the array is read-only"):
        fastattn.forward(Q, K, V, out=Producer(x))  # type: ignore[arg-type]


def test_exports_end_with_the_call() -> None:
    x = Q.copy()
    before = sys.getrefcount(x)
    for producer in (Producer, OldProducer):
        fastattn.forward(producer(x), producer(x), producer(x))
        gc.collect()
        assert sys.getrefcount(x) == before


def test_tvm_ffi() -> None:
    tvm_ffi = pytest.importorskip("tvm_ffi")
    q, k, v = (tvm_ffi.from_dlpack(x.copy()) for x in (Q, K, V))
    np.testing.assert_array_equal(np.from_dlpack(fastattn.forward(q, k, v)), WANTED)


def test_exchange_api_of_a_library_unknown_by_name(torch: Any) -> None:
    """Such a library allocates through the API: torch, taken for one of them."""
    printed = run_python("""
        import numbers
        import numpy as np, torch
        import fastattn
        from fastattn import _core
        from fastattn._adapters import _dlpack
        _core.configure(_dlpack.resolve, np.bool_, numbers.Real)
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            q, k, v = torch.randn(3, 2, 4, 9, 16).to(dtype)
            out, lse = fastattn.forward(q, k, v[..., :5], return_lse=True)
            print(out.dtype, tuple(out.shape), lse.dtype, tuple(lse.shape))
            wanted = torch.softmax(q.float() @ k.float().mT / 4, -1) @ v[..., :5].float()
            assert torch.allclose(out.float(), wanted, atol=1e-2), dtype
    """)
    for line, dtype in zip(printed.splitlines(), ("float32", "float16", "bfloat16"), strict=True):
        assert line == f"torch.{dtype} (2, 4, 9, 5) torch.float32 (2, 4, 9)"


# --- references, threads, the process -------------------------------------------------------------


@pytest.mark.parametrize("kind", ["numpy", "torch", "producer"])
def test_references(kind: str) -> None:
    if kind == "torch":
        torch = pytest.importorskip("torch")
        arrays = [torch.from_numpy(x.copy()) for x in (Q, K, V)]
    else:
        arrays = [x.copy() if kind == "numpy" else Producer(x) for x in (Q, K, V)]
    out = arrays[0].clone() if kind == "torch" else np.empty_like(Q)
    everything = [*arrays, out]
    before = [sys.getrefcount(x) for x in everything]
    for _ in range(20):
        fastattn.forward(*arrays, return_lse=True)
        fastattn.forward(*arrays, out=out)
    assert [sys.getrefcount(x) for x in everything] == before


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_no_leak() -> None:
    big = random(2, 4, 64, 64)
    wrong = big[:, :3]

    def calls(count: int) -> None:
        for _ in range(count):
            fastattn.forward(big, big, big, return_lse=True)
            fastattn.forward(Producer(big), Producer(big), big[..., ::-1])  # type: ignore[type-var]
            with pytest.raises(ValueError, match="head count"):
                fastattn.forward(big, big, wrong)

    calls(30)
    gc.collect()
    before = resident_bytes()
    calls(300)
    gc.collect()
    # One leaked result each round would be 40 MB.
    assert resident_bytes() - before < 8 << 20


def test_threads() -> None:
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            x = random(1, 2, 16, 8, seed=seed)
            wanted = fastattn.forward(x, x, x)
            for _ in range(200):
                np.testing.assert_array_equal(fastattn.forward(x, x, x), wanted)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def test_exit_while_threads_are_in_a_call() -> None:
    """Python ends, or hangs, a daemon thread that comes back; that must not abort the process."""
    printed = run_python("""
        import threading, time
        import fastattn, numpy as np
        q = np.ones((2, 8, 512, 64), np.float32)
        def work():
            while True:
                fastattn.forward(q, q, q)
        for _ in range(3):
            threading.Thread(target=work, daemon=True).start()
        time.sleep(0.3)
        print("end")
    """)
    assert printed.strip() == "end"


def test_other_threads_run_during_a_long_call() -> None:
    x = random(1, 2, 4096, 64)
    moments: list[float] = []
    stop = threading.Event()

    def tick() -> None:
        while not stop.wait(0.001):
            moments.append(time.monotonic())

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        begin = time.monotonic()
        fastattn.forward(x, x, x)
        end = time.monotonic()
    finally:
        stop.set()
        thread.join()
    # Well inside of the call: at its ends Python itself may let others in.
    quarter = (end - begin) / 4
    assert any(begin + quarter < moment < end - quarter for moment in moments)


def test_import_brings_in_numpy_alone() -> None:
    printed = run_python("""
        import sys
        import fastattn
        fastattn.show_config("dict")
        others = {"torch", "cupy", "jax", "jaxlib", "ml_dtypes"}
        print(sorted(others & set(sys.modules)))
    """)
    assert printed.strip() == "[]"


def test_works_where_no_gpu_is_visible() -> None:
    printed = run_python(
        """
        import fastattn, numpy as np
        x = np.ones((1, 1, 2, 8), np.float32)
        print(fastattn.forward(x, x, x).sum(), fastattn.show_config("dict")["cuda"]["devices"])
        """,
        CUDA_VISIBLE_DEVICES="",
    )
    assert printed.strip() == "16.0 []"


def test_import_then_fork() -> None:
    printed = run_python("""
        import os
        import fastattn, numpy as np
        child = os.fork()
        if child == 0:
            x = np.ones((1, 1, 2, 8), np.float32)
            os._exit(0 if fastattn.forward(x, x, x).sum() == 16 else 1)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """)
    assert printed.strip() == "0"


def test_the_extension_needs_no_framework_and_no_driver() -> None:
    from fastattn import _core

    library = ctypes.CDLL(str(_core.__file__))
    assert library is not None
    needed = Path(str(_core.__file__)).read_bytes()
    for name in (b"libcuda.so", b"libtorch", b"libc10", b"libcudart.so"):
        assert name not in needed


# --- what there is to see -------------------------------------------------------------------------


def test_kernels() -> None:
    kernels = fastattn.kernels()
    assert kernels[0].name == "cpu"
    assert len({kernel.name for kernel in kernels}) == len(kernels)
    for kernel in kernels:
        assert kernel.backend in ("cpu", "cuda")
        assert set(kernel.dtypes) <= {"float32", "float16", "bfloat16"}
        assert 1 <= kernel.head_dim_min <= kernel.head_dim_max
        assert kernel.redirect is None or kernel.redirect in {other.name for other in kernels}
        with pytest.raises(AttributeError):
            kernel.name = "other"  # type: ignore[misc]


def test_show_config(capsys: pytest.CaptureFixture[str]) -> None:
    config = fastattn.show_config("dict")
    assert config["version"] == fastattn.__version__
    assert config["kernels"] == [kernel.name for kernel in fastattn.kernels()]
    assert config["emulated"] == [kernel.name for kernel in fastattn.kernels(emulated=True)]
    assert config["frameworks"]["numpy"] == np.__version__
    assert config["cpu"]["threads"] >= 1
    assert fastattn.show_config() is None
    printed = capsys.readouterr().out
    assert fastattn.__version__ in printed
    assert config["cpu"]["instruction_set"] in printed


class UnsignedStrides:
    """Exports negative strides as CuPy does: the bytes divided as an unsigned number."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()

    def __dlpack__(self, **keywords: Any) -> Any:
        capsule = self.array.__dlpack__(max_version=(1, 0))
        pointer = ctypes.pythonapi.PyCapsule_GetPointer
        pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        managed = pointer(capsule, b"dltensor_versioned")
        strides_at = 64  # version, context, deleter, flags; data, device, ndim, dtype, shape
        strides = ctypes.c_void_p.from_address(managed + strides_at).value
        assert strides is not None
        values = (ctypes.c_int64 * self.array.ndim).from_address(strides)
        assert list(values) == [step // self.array.itemsize for step in self.array.strides]
        for i, step in enumerate(self.array.strides):
            values[i] = step % 2**64 // self.array.itemsize
        return capsule


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_negative_strides_that_were_divided_as_unsigned(axis: int) -> None:
    shapes = [(2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8), (2, 3, 5, 8)]
    # Next to each other, so that a box that is too large would overlap.
    pool = np.random.default_rng(1).standard_normal(4 * 512).astype(np.float32)
    index = tuple(slice(None, None, -1) if i == axis else slice(None) for i in range(4))
    q, k, v, out = (
        pool[512 * i : 512 * i + math.prod(shape)].reshape(shape)[index]
        for i, shape in enumerate(shapes)
    )
    expected = fastattn.forward(*(np.ascontiguousarray(x) for x in (q, k, v)))
    given = UnsignedStrides(out)
    assert fastattn.forward(*map(UnsignedStrides, (q, k, v)), out=given) is given
    np.testing.assert_array_equal(out, expected)
