"""Every row of docs/errors.md happens, with the type and the text that stand there."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import fastattn
from fastattn import emulation

DOCS = Path(__file__).parent.parent / "docs" / "errors.md"
SHAPE = (1, 2, 3, 8)


class Row(NamedTuple):
    kind: str
    text: str


def documented() -> dict[str, Row]:
    row = re.compile(r"^\| (?P<id>[a-z0-9-]+) \| .* \| (?P<kind>\w+Error) \| (?P<text>.+) \|$")
    lines = DOCS.read_text(encoding="utf-8").splitlines()
    return {m["id"]: Row(m["kind"], m["text"]) for m in map(row.match, lines) if m}


def array(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.ones(shape or SHAPE, dtype)


class Producer:
    """A type that fastattn has never heard of, around another array."""

    def __init__(self, inner: Any, device: tuple[int, int] | None = None) -> None:
        self.inner = inner
        self.device = device

    def __dlpack__(self, **kwargs: Any) -> Any:
        if isinstance(self.inner, Exception):
            raise type(self.inner)(*self.inner.args)
        if isinstance(self.inner, str):
            return self.inner
        return self.inner.__dlpack__(**kwargs)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device or (1, 0)


def unaligned() -> np.ndarray:
    return np.zeros(4 * 48 + 1, np.uint8)[1:].view(np.float32).reshape(SHAPE)


def byte_stride() -> np.ndarray:
    return np.zeros(SHAPE, np.dtype([("x", "u1"), ("v", "f4")]))["v"]


def read_only() -> np.ndarray:
    x = array()
    x.flags.writeable = False
    return x


def overlapping() -> tuple[np.ndarray, np.ndarray]:
    memory = np.ones(96, np.float32)
    return memory[:48].reshape(SHAPE), memory[8:56].reshape(SHAPE)


def stride_zero() -> np.ndarray:
    return np.lib.stride_tricks.as_strided(array(), SHAPE, (4 * 48, 0, 32, 4))


def overlapping_itself() -> np.ndarray:
    return np.lib.stride_tricks.as_strided(np.zeros(512, np.float32), SHAPE, (0, 1024, 16, 4))


def long(length: int) -> np.ndarray:
    return np.broadcast_to(np.zeros(8, np.float32), (1, 2, length, 8))


def torch() -> Any:
    return pytest.importorskip("torch")


def tensor(*shape: int, **options: Any) -> Any:
    return torch().ones(shape or SHAPE, **options)


def cuda(*shape: int, device: int = 0) -> Any:
    if torch().cuda.device_count() <= device:
        pytest.skip(f"torch sees fewer than {device + 1} GPUs")
    return tensor(*shape, device=f"cuda:{device}")


def fake_tensor() -> Any:
    fake = pytest.importorskip("torch._subclasses.fake_tensor")
    with fake.FakeTensorMode():
        return tensor()


def large_on_cuda() -> tuple[Any, ...]:
    """Small arrays of which V0 wants 4 times the memory of the GPU, for B * H * M * N scores."""
    x = cuda(1, 1, length := 65536, 1)
    heads = 4 * torch().cuda.get_device_properties(0).total_memory // (4 * length**2) + 1
    # head_dim 1, and one head's memory for all: the result alone is real.
    return (
        x.expand(1, heads, length, 1),
        x.expand(1, heads, length, 1),
        x.expand(1, heads, length, 1),
    )


def jax_array() -> Any:
    return pytest.importorskip("jax.numpy", exc_type=ImportError).ones(SHAPE)


def ml_dtype(name: str) -> Any:
    return getattr(pytest.importorskip("ml_dtypes"), name)


def build_has(*, cuda: bool | None = None, emulation: bool | None = None) -> None:
    found = {
        "the CUDA backend": ("cuda" in fastattn.show_config("dict")["backends"], cuda),
        "an emulation of the rungs": (bool(fastattn.kernels(emulated=True)), emulation),
    }
    for what, (is_there, wanted) in found.items():
        if wanted is not None and is_there is not wanted:
            pytest.skip(f"this build has {what}" if is_there else f"this build lacks {what}")


# --- what the rows do -----------------------------------------------------------------------------


class Call:
    """A call of forward; arguments that are not given are right."""

    def __init__(self, *arrays: Any, **options: Any) -> None:
        self.arrays = {name: options.pop(name, array()) for name in "qkv"}
        self.arrays.update(zip("qkv", arrays, strict=False))
        self.options = options

    def __call__(self) -> Any:
        return fastattn.forward(**self.arrays, **self.options)

    def dlpack_arguments(self) -> list[Any]:
        given = [*self.arrays.values(), *self.options.values()]
        return [x for x in given if hasattr(x, "__dlpack__")]


def in_vmap() -> Any:
    x = tensor()
    return torch().vmap(lambda q: fastattn.forward(q, x, x))(x[None])


def in_functionalize() -> Any:
    return torch().func.functionalize(lambda q: fastattn.forward(q, q, q))(tensor())


def without_cuda(*arrays: Any, **options: Any) -> Call:
    build_has(cuda=False)
    return Call(*arrays, **options)


def without_emulation(*, cuda: bool, **options: Any) -> Call:
    build_has(cuda=cuda, emulation=False)
    return Call(**options)


def emulated(*arrays: Any, kernel: str, **options: Any) -> Call:
    """A rung on arrays of the host."""
    build_has(emulation=True)
    return Call(*arrays, kernel=kernel, **options)


class Run(Call):
    """A call of emulation.run."""

    def __init__(self, *arrays: Any, has: bool = True, **options: Any) -> None:
        build_has(emulation=has)
        super().__init__(*arrays, **{"kernel": "v3"} | options)

    def __call__(self) -> Any:
        return emulation.run(**self.arrays, **self.options)


def aliased() -> Call:
    v = array()
    return Call(v=v, out=v)


def overlapped() -> Call:
    q, out = overlapping()
    return Call(q=q, out=out)


def reversed_alias() -> Call:
    memory = array()
    return Call(q=memory[:, :, ::-1], out=memory)


def shifted() -> Call:
    memory = array(1, 2, 9, 8)
    return Call(k=memory[:, :, :6], v=array(1, 2, 6, 8), out=memory[:, :, 3:6])


class Nowhere:
    __module__ = None  # type: ignore[assignment]


class Surrogate:
    def __repr__(self) -> str:
        return "\ud800"


class SaysTwo(tuple[int, ...]):
    def __len__(self) -> int:
        return 2


class CudaStream:
    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def __cuda_stream__(self) -> Any:
        return self.answer


# Each makes what it needs when it runs, or skips.
ROWS: dict[str, Callable[[], Callable[[], Any]]] = {
    "array-none": lambda: Call(q=None),
    "array-list": lambda: Call(q=[[1.0]]),
    "array-number": lambda: Call(k=3.0),
    "array-bytes": lambda: Call(v=memoryview(b"12345678")),
    "array-torch-other": lambda: Call(q=torch().Size(SHAPE)),
    "array-masked": lambda: Call(q=np.ma.array(array())),
    "array-export-fails": lambda: Call(q=Producer(BufferError("not today"))),
    "array-no-capsule": lambda: Call(q=Producer("no capsule")),
    "array-device": lambda: Call(q=Producer(array(), (2**70, 0))),
    "array-type-error": lambda: Call(q=Producer(TypeError("not today"))),
    "array-no-module": lambda: Call(q=Nowhere()),
    "dtype-float64": lambda: Call(q=array(dtype=np.float64)),
    "dtype-int32": lambda: Call(q=array(dtype=np.int32)),
    "dtype-bool": lambda: Call(q=array(dtype=bool)),
    "dtype-complex64": lambda: Call(q=array(dtype=np.complex64)),
    "dtype-big-endian": lambda: Call(q=array(dtype=">f4")),
    "dtype-datetime": lambda: Call(q=np.zeros(SHAPE, "M8[s]")),
    "dtype-float8-numpy": lambda: Call(q=array(dtype=ml_dtype("float8_e4m3fn"))),
    "dtype-float8-torch": lambda: Call(q=tensor().to(torch().float8_e5m2)),
    "dtype-double-torch": lambda: Call(v=tensor(dtype=torch().float64)),
    "dtype-mixed": lambda: Call(q=array(dtype=np.float16)),
    "dtype-mixed-v": lambda: Call(v=tensor(dtype=torch().bfloat16)),
    "tensor-grad": lambda: Call(q=tensor(requires_grad=True)),
    "tensor-conj": lambda: Call(q=tensor(dtype=torch().complex64).conj()),
    "tensor-neg": lambda: Call(q=tensor(dtype=torch().complex64).conj().imag),
    "tensor-fake": lambda: Call(q=fake_tensor()),
    "tensor-meta": lambda: Call(q=tensor(device="meta")),
    "tensor-sparse": lambda: Call(q=tensor().to_sparse()),
    "tensor-vmap": lambda: in_vmap,
    "tensor-functionalize": lambda: in_functionalize,
    "tensor-null": lambda: Call(q=torch()._efficientzerotensor(SHAPE)),
    "rank": lambda: Call(q=array(2, 3, 8)),
    "rank-numpy-many": lambda: Call(q=array(1, 1, 2, 3, 8)),
    "size-beyond-int": lambda: Call(k=long(2**31)),
    "size-length": lambda: Call(k=long(2**31 - 255), v=long(2**31 - 255)),
    "stride-bytes": lambda: Call(q=byte_stride()),
    "unaligned": lambda: Call(q=unaligned()),
    "stride-last": lambda: Call(k=Producer(array(1, 2, 3, 16)[..., ::2])),
    "shape-batch": lambda: Call(k=array(2, 2, 3, 8)),
    "shape-head-dim": lambda: Call(k=array(1, 2, 3, 4)),
    "shape-heads": lambda: Call(v=array(1, 1, 3, 8)),
    "shape-length": lambda: Call(v=array(1, 2, 4, 8)),
    "shape-grouped-heads": lambda: Call(q=array(1, 3, 3, 8)),
    "shape-fewer-heads": lambda: Call(k=array(1, 4, 3, 8), v=array(1, 4, 3, 8)),
    "shape-no-head-dim": lambda: Call(array(1, 2, 3, 0), array(1, 2, 3, 0)),
    "shape-large-head-dim": lambda: Call(*[array(1, 2, 3, 257)] * 3),
    "device-type": lambda: Call(q=Producer(array(), (8, 0))),
    "device-pinned": lambda: Call(q=Producer(array(), (3, 0))),
    "device-mixed": lambda: Call(q=cuda()),
    "device-mixed-gpus": lambda: Call(cuda(), cuda(), cuda(device=1)),
    "device-no-cuda": lambda: without_cuda(q=Producer(array(), (2, 0))),
    "jax-torch": lambda: Call(jax_array(), tensor(), jax_array()),
    "kernel-unknown": lambda: Call(kernel="v99"),
    "kernel-type": lambda: Call(kernel=4),
    "kernel-not-built": lambda: without_emulation(cuda=False, kernel="v0"),
    "kernel-needs-gpu": lambda: without_emulation(cuda=True, kernel="v0"),
    "kernel-needs-cpu": lambda: Call(*[cuda()] * 3, kernel="cpu"),
    "kernel-refuses": lambda: Call(*[cuda()] * 3, kernel="v0", causal=True),
    "emulated-unknown": lambda: emulated(kernel="v99"),
    "emulated-dtype": lambda: emulated(*[array(1, 2, 3, 64, dtype=np.float16)] * 3, kernel="v3"),
    "emulated-causal": lambda: emulated(*[array(1, 2, 3, 64)] * 3, kernel="v3", causal=True),
    "emulated-window": lambda: emulated(kernel="v1", window=(1, 0)),
    "emulated-redirect": lambda: emulated(*[array(1, 2, 3, 80)] * 3, kernel="v3", causal=True),
    "emulated-head-dim": lambda: emulated(*[array(1, 2, 3, 129)] * 3, kernel="v4"),
    "emulated-head-dim-v": lambda: emulated(v=array(1, 2, 3, 4), kernel="v1"),
    "emulated-length": lambda: emulated(q=array(1, 2, 4, 8), kernel="v0"),
    "causal-type": lambda: Call(causal=1),
    "causal-none": lambda: Call(causal=None),
    "causal-long": lambda: Call(causal="é" * 100),
    "causal-surrogate": lambda: Call(causal=Surrogate()),
    "window-type": lambda: Call(window=3),
    "window-string": lambda: Call(window="12"),
    "window-float": lambda: Call(window=(1.0, 2)),
    "window-bool": lambda: Call(window=(True, 0)),
    "window-count": lambda: Call(window=(1, 2, 3)),
    "window-subclass": lambda: Call(window=SaysTwo([1])),
    "window-negative": lambda: Call(window=(-1, -3)),
    "window-very-negative": lambda: Call(window=(-99999999999999999999, 0)),
    "scale-string": lambda: Call(scale="0.1"),
    "scale-bool": lambda: Call(scale=True),
    "scale-numpy-bool": lambda: Call(scale=np.True_),
    "scale-complex": lambda: Call(scale=1j),
    "scale-array": lambda: Call(scale=np.ones(1)),
    "scale-nan": lambda: Call(scale=float("nan")),
    "scale-infinite": lambda: Call(scale=float("-inf")),
    "scale-beyond-float32": lambda: Call(scale=1e39),
    "scale-beyond-float64": lambda: Call(scale=10**400),
    "scale-fraction-beyond": lambda: Call(scale=Fraction(10**400)),
    "lse-type": lambda: Call(return_lse="yes"),
    "out-list": lambda: Call(out=[0.0]),
    "out-shape": lambda: Call(out=array(1, 2, 4, 8)),
    "out-head-dim": lambda: Call(v=array(1, 2, 3, 4), out=array()),
    "out-rank": lambda: Call(out=array(2, 3, 8)),
    "out-dtype": lambda: Call(out=array(dtype=np.float16)),
    "out-dtype-wrong": lambda: Call(out=array(dtype=np.float64)),
    "out-device": lambda: Call(*[cuda()] * 3, out=array()),
    "out-read-only": lambda: Call(out=read_only()),
    "out-stride-last": lambda: Call(out=array(1, 2, 3, 16)[..., ::2]),
    "out-broadcast": lambda: Call(out=stride_zero()),
    "out-overlaps-itself": lambda: Call(out=overlapping_itself()),
    "out-aliases": aliased,
    "out-overlaps": overlapped,
    "out-reversed": reversed_alias,
    "out-shifted": shifted,
    "out-grad": lambda: Call(out=tensor(requires_grad=True)),
    "out-missing": lambda: Call(*[Producer(tensor(dtype=torch().bfloat16))] * 3),
    "out-jax": lambda: Call(out=jax_array()),
    "out-with-jax": lambda: Call(*[jax_array()] * 3, out=array()),
    "stream-cpu": lambda: Call(stream=0),
    "stream-type": lambda: Call(stream="main"),
    "stream-bool": lambda: Call(stream=True),
    "stream-pair": lambda: Call(stream=CudaStream((0,))),
    "stream-handle": lambda: Call(stream=CudaStream((0, "7"))),
    "stream-negative": lambda: Call(stream=-1),
    "stream-with-jax": lambda: Call(*[jax_array()] * 3, stream=0),
    "scratch-too-large": lambda: Call(*large_on_cuda(), kernel="v0"),
    "run-array": lambda: Run(q=None),
    "run-list": lambda: Run(k=[[1.0]]),
    "run-dtype": lambda: Run(v=array(dtype=np.float64)),
    "run-mixed": lambda: Run(q=array(dtype=np.float16)),
    "run-kernel-dtype": lambda: Run(*[array(dtype=np.float16)] * 3, kernel="v2"),
    "run-rank": lambda: Run(q=array(2, 3, 8)),
    "run-shape": lambda: Run(k=array(1, 2, 4, 8)),
    "run-kernel-type": lambda: Run(kernel=3),
    "run-kernel-unknown": lambda: Run(kernel="v99"),
    "run-kernel-other": lambda: Run(kernel="cpu"),
    "run-kernel-auto": lambda: Run(kernel="auto"),
    "run-refuses": lambda: Run(q=array(1, 2, 4, 8), kernel="v0"),
    "run-head-dim": lambda: Run(*[array(1, 2, 3, 129)] * 3),
    "run-causal": lambda: Run(causal=1, kernel="v5"),
    "run-window": lambda: Run(window=(-1, -3), kernel="v5"),
    "run-scale": lambda: Run(scale="1"),
    "run-scale-nan": lambda: Run(scale=float("nan")),
    "run-seed-type": lambda: Run(seed=1.5),
    "run-seed": lambda: Run(seed=-1),
    "run-not-built": lambda: Run(has=False),
    "kernels-type": lambda: lambda: fastattn.kernels(emulated=1),  # type: ignore[arg-type]
    "config-mode": lambda: lambda: fastattn.show_config("json"),  # type: ignore[call-overload]
}
NEED_GPU = {
    "device-mixed",
    "device-mixed-gpus",
    "kernel-needs-cpu",
    "kernel-refuses",
    "out-device",
    "scratch-too-large",
}


def failure(action: Callable[[], Any]) -> tuple[str, str]:
    """Type and text of what it raises; the traceback, which refers to the arguments, is gone."""
    try:
        action()
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def pattern(text: str) -> str:
    return ".*".join(map(re.escape, text.split("…")))


@pytest.mark.parametrize(
    "row", [pytest.param(row, marks=[pytest.mark.gpu] if row in NEED_GPU else []) for row in ROWS]
)
def test_wrong_argument(row: str) -> None:
    action = ROWS[row]()
    arguments = action.dlpack_arguments() if isinstance(action, Call) else []
    before = [sys.getrefcount(x) for x in arguments]

    kind, text = failure(action)
    assert (kind, text) != ("nothing", "")
    wanted = documented()[row]
    assert kind == wanted.kind, text
    assert re.fullmatch(pattern(wanted.text), text, re.DOTALL), text

    # The next valid call works, and nothing refers to the arrays of the failed one.
    np.testing.assert_allclose(fastattn.forward(array(), array(), array()), 1, rtol=1e-6)
    assert [sys.getrefcount(x) for x in arguments] == before


def test_every_documented_row_is_tested() -> None:
    assert set(documented()) == set(ROWS)


@pytest.mark.parametrize(
    "device", [None, 7, "ab", (), (1,), (1, 0, 0), (1.5, 0), ("a", "b"), (2**70, 0), (1, 2**31)]
)
def test_a_device_that_is_none(device: Any) -> None:
    class Lying(Producer):
        def __dlpack_device__(self) -> Any:
            return device

    kind, text = failure(Call(k=Lying(array())))
    assert (kind, text.partition(" of ")[0]) == ("TypeError", "k: __dlpack_device__")


@pytest.mark.parametrize("answer", [5, None, (), (0,), (0, 1, 2), (0, None), (0, 1.0)])
def test_a_stream_that_is_none(answer: Any) -> None:
    kind, text = failure(Call(stream=CudaStream(answer)))
    assert (kind, text.partition(":")[0]) == ("TypeError", "stream")


@pytest.mark.parametrize("cut", range(4))
def test_texts_are_cut_between_characters(cut: int) -> None:
    kind, text = failure(Call(kernel=["x" * cut + "€𝄞" * 40]))
    assert kind == "TypeError"
    assert "... of type list" in text


def test_a_window_that_changes_while_it_is_read() -> None:
    class Clears:
        def __index__(self) -> int:
            window.clear()
            return 2

    window: list[Any] = [Clears(), 0]
    np.testing.assert_array_equal(
        fastattn.forward(Q, K, V, window=window),  # type: ignore[arg-type]
        fastattn.forward(Q, K, V, window=(2, 0)),
    )


def test_errors_of_the_callers_own_code_pass() -> None:
    class Fails:
        def __index__(self) -> int:
            raise MemoryError("not today")

    assert failure(Call(window=(0, Fails()))) == ("MemoryError", "not today")


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_the_text_names_the_argument(name: str) -> None:
    kind, text = failure(Call(**{name: array(dtype=np.float64)}))
    assert (kind, text.partition(":")[0]) == ("TypeError", name)


def test_failed_calls_leave_no_reference() -> None:
    q, out = array(), read_only()
    before = sys.getrefcount(q), sys.getrefcount(out)
    for _ in range(100):
        assert failure(Call(q=q, out=out))[0] == "ValueError"
    assert (sys.getrefcount(q), sys.getrefcount(out)) == before


# --- values that are right ------------------------------------------------------------------------


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape, np.float32)


Q, K, V = random(1, 2, 5, 8), random(1, 2, 6, 8), random(1, 2, 7, 8)[:, :, :6]


@pytest.mark.parametrize("one", [1, 1.0, np.float64(1), np.float32(1), np.float16(1), np.int8(1)])
def test_scale_is_any_real_number(one: Any) -> None:
    np.testing.assert_array_equal(
        fastattn.forward(Q, K, V, scale=one), fastattn.forward(Q, K, V, scale=1.0)
    )


def test_scale_none_is_not_zero() -> None:
    mean = np.broadcast_to(V.mean(2, keepdims=True), Q.shape)
    np.testing.assert_allclose(fastattn.forward(Q, K, V, scale=0.0), mean, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(
        fastattn.forward(Q, K, V), fastattn.forward(Q, K, V, scale=1 / np.sqrt(8))
    )


@pytest.mark.parametrize(
    "window",
    [
        (np.int64(2), np.int32(0)),
        [2, 0],
        (2, np.uint8(0)),
    ],
)
def test_window_is_any_pair_of_integers(window: Any) -> None:
    np.testing.assert_array_equal(
        fastattn.forward(Q, K, V, window=window), fastattn.forward(Q, K, V, window=(2, 0))
    )


@pytest.mark.parametrize("far", [2**31 - 1, 2**31, 2**63 - 1, 2**63, 10**30])
def test_a_window_beyond_every_sequence_is_no_limit(far: int) -> None:
    np.testing.assert_array_equal(
        fastattn.forward(Q, K, V, window=(far, far)), fastattn.forward(Q, K, V)
    )
    np.testing.assert_array_equal(
        fastattn.forward(Q, K, V, window=(far, 0)), fastattn.forward(Q, K, V, causal=True)
    )


def test_flags_may_be_numpys() -> None:
    out, lse = fastattn.forward(Q, K, V, causal=np.True_, return_lse=np.True_)
    wanted, wanted_lse = fastattn.forward(Q, K, V, causal=True, return_lse=True)
    np.testing.assert_array_equal(out, wanted)
    np.testing.assert_array_equal(lse, wanted_lse)
    assert isinstance(fastattn.forward(Q, K, V, return_lse=np.False_), np.ndarray)
