"""JAX arrays: eager, under jit and its other transforms, on the CPU and on a GPU.

What the numbers are is the business of test_forward.py. Here the same kernel gives the same bits to
NumPy arrays, or the result stands beside the float64 oracle.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

# Four CPU devices, for sharding. Read when JAX first looks for devices, which is after collection.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
)

import fastattn
import helpers

jax = pytest.importorskip("jax", minversion="0.8")

import jax.numpy as jnp  # noqa: E402
from jax.sharding import AxisType, NamedSharding, PartitionSpec  # noqa: E402

KERNELS = [
    pytest.param(kernel, id=kernel.name, marks=[pytest.mark.gpu] * (kernel.backend == "cuda"))
    for kernel in fastattn.kernels()
]


def device_of(backend: str) -> Any:
    platform = "gpu" if backend == "cuda" else "cpu"
    try:
        return jax.devices(platform)[0]
    except RuntimeError as missing:
        pytest.skip(f"JAX has no {platform}: {missing}")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Any:
    return device_of(request.param)


def draw(*shapes: tuple[int, ...], seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape, np.float32) for shape in shapes]


def qkv(device: Any, batch: int = 2, heads: int = 4, length: int = 65, seed: int = 0) -> list[Any]:
    """Three fp32 arrays that every kernel takes."""
    shape = (batch, heads, length, 64)
    return [jax.device_put(x, device) for x in draw(shape, shape, shape, seed=seed)]


def check(arrays: list[Any], out: Any, lse: Any = None, **options: Any) -> None:
    host = [np.asarray(x, np.float32) for x in arrays]
    dtype = arrays[0].dtype.name
    helpers.expect(*host, dtype=dtype, **options).check(
        np.asarray(out, np.float32), None if lse is None else np.asarray(lse)
    )


# ---- the call ------------------------------------------------------------------------------------


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_each_kernel(kernel: Any, compiled: bool) -> None:
    device = device_of(kernel.backend)
    arrays = qkv(device)

    def call(q: Any, k: Any, v: Any) -> Any:
        return fastattn.forward(q, k, v, kernel=kernel.name, return_lse=True)

    out, lse = (jax.jit(call) if compiled else call)(*arrays)
    assert isinstance(out, jax.Array)
    assert isinstance(lse, jax.Array)
    assert out.devices() == lse.devices() == {device}
    assert (out.dtype, lse.dtype) == (np.float32, np.float32)
    assert lse.shape == (2, 4, 65)
    check(arrays, out, lse)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"window": (5, 2)},
        {"causal": True, "window": (7, -1), "scale": 0.3},
        {"scale": 0.0},
    ],
    ids=str,
)
def test_same_bits_as_numpy(dtype: str, options: dict[str, Any]) -> None:
    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes")
    arrays = [
        jax.device_put(jnp.asarray(x, dtype), device_of("cpu"))
        for x in draw((2, 6, 33, 24), (2, 2, 50, 24), (2, 2, 50, 40))
    ]
    out, lse = fastattn.forward(*arrays, return_lse=True, **options)
    expected = fastattn.forward(*map(np.asarray, arrays), return_lse=True, **options)
    assert out.dtype == dtype
    assert out.shape == (2, 6, 33, 40)
    np.testing.assert_array_equal(np.asarray(out), expected[0])
    np.testing.assert_array_equal(np.asarray(lse), expected[1])


def test_lse_is_left_out_unless_wanted(device: Any) -> None:
    arrays = qkv(device)
    out = fastattn.forward(*arrays)
    with_lse, _ = fastattn.forward(*arrays, return_lse=True)
    np.testing.assert_array_equal(out, with_lse)
    program = jax.jit(fastattn.forward).lower(*arrays).as_text()
    assert "tensor<2x4x65xf32>" not in program


@pytest.mark.parametrize("shape", [(0, 2, 3, 64), (2, 0, 3, 64), (2, 2, 0, 64)], ids=str)
def test_empty(device: Any, shape: tuple[int, ...]) -> None:
    q = jax.device_put(jnp.zeros(shape), device)
    out, lse = fastattn.forward(q, q, q, return_lse=True)
    assert (out.shape, lse.shape) == (shape, shape[:3])


def test_no_keys(device: Any) -> None:
    q, _, _ = qkv(device)
    k = jax.device_put(jnp.zeros((2, 4, 0, 64)), device)
    out, lse = fastattn.forward(q, k, k, return_lse=True)
    assert not np.asarray(out).any()
    assert np.all(np.asarray(lse) == -np.inf)


def test_numpy_constants_beside_jax_arrays() -> None:
    arrays = qkv(device_of("cpu"))
    expected = fastattn.forward(*arrays)
    host = [np.asarray(x) for x in arrays]
    for mixed in ([arrays[0], *host[1:]], [host[0], *arrays[1:]]):
        out = fastattn.forward(*mixed)
        assert isinstance(out, jax.Array)
        np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(
        jax.jit(lambda q: fastattn.forward(q, *host[1:]))(arrays[0]), expected
    )


def test_result_is_on_the_device_of_the_inputs() -> None:
    device = jax.devices("cpu")[2]
    arrays = qkv(device)
    assert fastattn.forward(*arrays).devices() == {device}
    # k and v are where JAX puts arrays by default, so they follow q.
    assert fastattn.forward(
        arrays[0], *map(jnp.asarray, draw(*[(2, 4, 65, 64)] * 2))
    ).devices() == {device}


def test_inputs_keep_their_values(device: Any) -> None:
    arrays = qkv(device)
    before = [np.array(x) for x in arrays]
    fastattn.forward(*arrays).block_until_ready()
    for x, expected in zip(arrays, before, strict=True):
        np.testing.assert_array_equal(x, expected)


def test_eager_calls_compile_once() -> None:
    from fastattn import _jax

    arrays = qkv(device_of("cpu"), length=13)
    fastattn.forward(*arrays)
    before = _jax._compiled._cache_size()
    for _ in range(3):
        fastattn.forward(*arrays)
    assert _jax._compiled._cache_size() == before
    fastattn.forward(*arrays, causal=True)
    assert _jax._compiled._cache_size() == before + 1


def test_threads() -> None:
    arrays = [qkv(device_of("cpu"), seed=seed) for seed in range(8)]
    expected = [fastattn.forward(*x) for x in arrays]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(10):
            results = list(pool.map(lambda x: fastattn.forward(*x), arrays))
            for got, wanted in zip(results, expected, strict=True):
                np.testing.assert_array_equal(got, wanted)


def test_first_use_in_threads() -> None:
    """The handlers are registered once, whoever comes first."""
    run_python(
        "import jax.numpy as jnp, fastattn\n"
        "from concurrent.futures import ThreadPoolExecutor\n"
        "x = jnp.ones((1, 1, 4, 8))\n"
        "with ThreadPoolExecutor(8) as pool:\n"
        "    for out in pool.map(lambda _: fastattn.forward(x, x, x), range(8)):\n"
        "        assert (out == 1).all()\n"
    )


def test_import_leaves_jax_alone() -> None:
    run_python("import sys, fastattn\nassert not any(m.startswith('jax') for m in sys.modules)\n")


def run_python(code: str) -> None:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


# ---- transforms ----------------------------------------------------------------------------------


def test_loops_and_branches(device: Any) -> None:
    """The result of one call is the query of the next."""
    q, k, v = qkv(device)
    expected = q
    for _ in range(4):
        expected = fastattn.forward(expected, k, v)

    @jax.jit
    def by_scan(q: Any, k: Any, v: Any) -> Any:
        return jax.lax.scan(lambda c, _: (fastattn.forward(c, k, v), None), q, None, length=4)[0]

    @jax.jit
    def by_fori_loop(q: Any, k: Any, v: Any) -> Any:
        return jax.lax.fori_loop(0, 4, lambda _, c: fastattn.forward(c, k, v), q)

    @jax.jit
    def by_cond(q: Any, k: Any, v: Any, twice: Any) -> Any:
        def two(x: Any) -> Any:
            return fastattn.forward(fastattn.forward(x, k, v), k, v)

        half = jax.lax.cond(twice, two, lambda x: x, q)
        return jax.lax.cond(twice, two, lambda x: x, half)

    for result in (by_scan(q, k, v), by_fori_loop(q, k, v), by_cond(q, k, v, True)):
        np.testing.assert_array_equal(result, expected)


def test_layout_inside_jit(device: Any) -> None:
    """XLA may keep a transposed array as it lies; the handler wants rows."""
    arrays = qkv(device)
    transposed = [x.swapaxes(1, 2) for x in arrays]

    @jax.jit
    def call(*arrays: Any) -> Any:
        return fastattn.forward(*(x.swapaxes(1, 2) for x in arrays)).swapaxes(1, 2)

    np.testing.assert_array_equal(call(*transposed).swapaxes(1, 2), fastattn.forward(*arrays))


def test_ahead_of_time_and_abstract(device: Any) -> None:
    arrays = qkv(device)
    compiled = jax.jit(fastattn.forward).lower(*arrays).compile()
    np.testing.assert_array_equal(compiled(*arrays), fastattn.forward(*arrays))
    out, lse = jax.eval_shape(lambda *x: fastattn.forward(*x, return_lse=True), *arrays)
    assert (out.shape, lse.shape) == ((2, 4, 65, 64), (2, 4, 65))


def test_disable_jit() -> None:
    arrays = qkv(device_of("cpu"))
    expected = fastattn.forward(*arrays)
    with jax.disable_jit():
        np.testing.assert_array_equal(fastattn.forward(*arrays), expected)


@pytest.mark.parametrize("in_axes", [(0, 0, 0), (0, None, None), (None, 1, 1), (4, None, 0)])
def test_vmap(device: Any, in_axes: tuple[int | None, ...]) -> None:
    shape = (2, 4, 33, 64)
    shapes = [shape if a is None else (*shape[:a], 3, *shape[a:]) for a in in_axes]
    arrays = [jax.device_put(x, device) for x in draw(*shapes)]

    def call(q: Any, k: Any, v: Any) -> Any:
        return fastattn.forward(q, k, v, return_lse=True)

    for mapped in (jax.vmap(call, in_axes), jax.jit(jax.vmap(call, in_axes))):
        out, lse = mapped(*arrays)
        for i in range(3):
            one = [
                x if a is None else jnp.take(x, i, axis=a)
                for x, a in zip(arrays, in_axes, strict=True)
            ]
            expected = call(*one)
            np.testing.assert_array_equal(out[i], expected[0])
            np.testing.assert_array_equal(lse[i], expected[1])


def test_vmap_of_vmap(device: Any) -> None:
    q, k, v = (
        jax.device_put(x, device) for x in draw((2, 3, 2, 2, 17, 64), *[(3, 2, 2, 17, 64)] * 2)
    )
    mapped = jax.vmap(jax.vmap(fastattn.forward), in_axes=(0, None, None))
    out = mapped(q, k, v)
    assert out.shape == q.shape
    for i in range(2):
        for j in range(3):
            np.testing.assert_array_equal(out[i, j], fastattn.forward(q[i, j], k[j], v[j]))


@pytest.mark.parametrize(
    "transform",
    [
        lambda f, x: jax.grad(f)(x),
        lambda f, x: jax.value_and_grad(f)(x),
        lambda f, x: jax.jit(jax.grad(f))(x),
        lambda f, x: jax.jvp(f, (x,), (x,)),
        lambda f, x: jax.vmap(jax.grad(f))(jnp.stack([x, x])),
    ],
    ids=["grad", "value_and_grad", "jit(grad)", "jvp", "vmap(grad)"],
)
def test_no_gradient_is_an_error_not_zeros(transform: Any) -> None:
    q, k, v = qkv(device_of("cpu"))
    with pytest.raises(NotImplementedError, match=r"no gradient .*stop_gradient"):
        transform(lambda q: fastattn.forward(q, k, v).sum(), q)


def test_stop_gradient() -> None:
    q, k, v = qkv(device_of("cpu"))

    def loss(q: Any) -> Any:
        return (q * fastattn.forward(jax.lax.stop_gradient(q), k, v)).sum()

    np.testing.assert_array_equal(jax.grad(loss)(q), fastattn.forward(q, k, v))


# ---- sharding ------------------------------------------------------------------------------------


@pytest.fixture(params=[AxisType.Auto, AxisType.Explicit], ids=str)
def mesh(request: pytest.FixtureRequest) -> Any:
    devices = jax.devices("cpu")
    if len(devices) < 4:
        pytest.skip("JAX looked for devices before this module could ask for four")
    return jax.make_mesh((4,), ("x",), axis_types=(request.param,), devices=devices[:4])


def put(arrays: list[Any], mesh: Any, spec: Any) -> list[Any]:
    return [jax.device_put(x, NamedSharding(mesh, spec)) for x in arrays]


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("axis", [0, 1], ids=["batch", "heads"])
def test_shard_map(mesh: Any, axis: int, check_vma: bool) -> None:
    arrays = qkv(jax.devices("cpu")[0], batch=4)
    expected = fastattn.forward(*arrays, causal=True, return_lse=True)
    spec = PartitionSpec(*[None] * axis, "x")
    call = jax.jit(
        jax.shard_map(
            lambda *x: fastattn.forward(*x, causal=True, return_lse=True),
            mesh=mesh,
            in_specs=spec,
            out_specs=spec,
            check_vma=check_vma,
        )
    )
    sharded = put(arrays, mesh, spec)
    for got, wanted in zip(call(*sharded), expected, strict=True):
        assert len(got.sharding.device_set) == 4
        assert not got.sharding.is_fully_replicated
        np.testing.assert_array_equal(got, wanted)
    assert "all-gather" not in call.lower(*sharded).compile().as_text()


def test_shard_map_over_queries(mesh: Any) -> None:
    """k and v are replicated: they do not vary along the axis that q is split over."""
    q, k, v = qkv(jax.devices("cpu")[0], length=64)
    expected = fastattn.forward(q, k, v)
    rows = PartitionSpec(None, None, "x")
    call = jax.shard_map(
        fastattn.forward,
        mesh=mesh,
        in_specs=(rows, PartitionSpec(), PartitionSpec()),
        out_specs=rows,
    )
    result = jax.jit(call)(*put([q], mesh, rows), *put([k, v], mesh, PartitionSpec()))
    np.testing.assert_array_equal(result, expected)


def test_the_page_s_mesh() -> None:
    if len(jax.devices()) < 4:
        pytest.skip("fewer than four devices")
    page = (Path(__file__).parent.parent / "docs" / "jax.md").read_text(encoding="utf-8")
    (code,) = (text for text in re.findall(r"```python\n(.*?)```", page, re.S) if "mesh" in text)
    names: dict[str, Any] = {"jax": jax, "np": np, "fastattn": fastattn}
    exec(code, names)
    shape = (2, 4, 65, 64)
    arrays = [jnp.asarray(x) for x in draw(shape, shape, shape, seed=0)]  # on no device by choice
    result = names["attend"](*arrays)
    assert len(result.sharding.device_set) == 4
    np.testing.assert_array_equal(result, fastattn.forward(*arrays))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
def test_sharded_arrays_outside_shard_map_are_gathered(mesh: Any, compiled: bool) -> None:
    """XLA does not know how to split the call: right numbers, and each device computes them all."""
    arrays = qkv(jax.devices("cpu")[0], batch=4)
    expected = fastattn.forward(*arrays)
    call = jax.jit(lambda *x: fastattn.forward(*x)) if compiled else fastattn.forward
    result = call(*put(arrays, mesh, PartitionSpec("x")))
    assert result.sharding.is_fully_replicated
    assert len(result.sharding.device_set) == 4
    np.testing.assert_array_equal(result, expected)


# ---- errors --------------------------------------------------------------------------------------


def zeros(*shape: int, dtype: Any = jnp.float32) -> Any:
    return jax.device_put(jnp.zeros(shape, dtype), device_of("cpu"))


Q = (2, 4, 8, 16)

ERRORS = {
    "rank": (lambda: (zeros(4, 8, 16), zeros(*Q), zeros(*Q)), ValueError, r"q: got 3 dimensions"),
    "batch": (
        lambda: (zeros(*Q), zeros(1, 4, 8, 16), zeros(*Q)),
        ValueError,
        r"k: .* batch size 1",
    ),
    "head_dim": (
        lambda: (zeros(*Q), zeros(2, 4, 8, 8), zeros(*Q)),
        ValueError,
        r"k: .* head_dim 8",
    ),
    "heads": (
        lambda: (zeros(*Q), zeros(*Q), zeros(2, 2, 8, 16)),
        ValueError,
        r"v: .* head count 2",
    ),
    "length": (lambda: (zeros(*Q), zeros(*Q), zeros(2, 4, 9, 16)), ValueError, r"v: .* length 9"),
    "groups": (lambda: (zeros(*Q), *[zeros(2, 3, 8, 16)] * 2), ValueError, r"4 query heads"),
    "zero head_dim": (lambda: [zeros(2, 4, 8, 0)] * 3, ValueError, r"head_dim: got 0"),
    "large head_dim": (lambda: [zeros(1, 1, 2, 1000)] * 3, NotImplementedError, r"head_dim 1000"),
    "int32": (lambda: [zeros(*Q, dtype=jnp.int32)] * 3, TypeError, r"q: got dtype int32"),
    "float8": (
        lambda: [zeros(*Q, dtype=jnp.float8_e4m3fn)] * 3,
        TypeError,
        r"q: got dtype float8_e4m3fn",
    ),
    "complex": (lambda: [zeros(*Q, dtype=jnp.complex64)] * 3, TypeError, r"dtype complex64"),
    "key": (
        lambda: [jax.random.key(0).reshape(1, 1, 1, 1)] * 3,
        TypeError,
        r"q: got dtype key<fry>",
    ),
    "mixed dtypes": (
        lambda: (zeros(*Q), zeros(*Q, dtype=jnp.bfloat16), zeros(*Q)),
        TypeError,
        r"k: got dtype bfloat16, takes that of q, float32",
    ),
    "NumPy float64": (
        lambda: (zeros(*Q), np.zeros(Q), zeros(*Q)),
        TypeError,
        r"k: got dtype float64",
    ),
    "list": (lambda: (zeros(*Q), zeros(*Q), [[[[1.0]]]]), TypeError, r"v: "),
    "two devices": (
        lambda: (*[zeros(*Q)] * 2, jax.device_put(zeros(*Q), jax.devices("cpu")[1])),
        ValueError,
        r"device",
    ),
}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("name", ERRORS)
def test_wrong_arrays(name: str, compiled: bool) -> None:
    arrays, kind, message = ERRORS[name]
    if compiled and name in ("list", "NumPy float64"):
        pytest.skip("jit itself makes these JAX arrays")
    call = jax.jit(lambda *x: fastattn.forward(*x)) if compiled else fastattn.forward
    with pytest.raises(kind, match=message):
        call(*arrays())
    assert fastattn.forward(*[zeros(*Q)] * 3).shape == Q


OPTION_ERRORS = {
    "kernel": ({"kernel": "v99"}, ValueError, r"unknown kernel 'v99'; known are 'auto', 'cpu'"),
    "kernel type": ({"kernel": 4}, TypeError, r"kernel: "),
    "scale nan": ({"scale": float("nan")}, ValueError, r"scale: "),
    "scale type": ({"scale": "1"}, TypeError, r"scale: "),
    "causal type": ({"causal": 1}, TypeError, r"causal: "),
    "window size": ({"window": (1,)}, ValueError, r"window: "),
    "window type": ({"window": (1.0, 2.0)}, TypeError, r"window: "),
    "window range": ({"window": (-2, 0)}, ValueError, r"window: "),
    "out": ({"out": np.zeros(Q, np.float32)}, ValueError, r"out: JAX arrays are immutable"),
    "stream": ({"stream": 0}, ValueError, r"stream: XLA chooses the stream"),
}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("name", OPTION_ERRORS)
def test_wrong_options(name: str, compiled: bool) -> None:
    options, kind, message = OPTION_ERRORS[name]
    q = zeros(*Q)
    fastattn.forward(q, q, q, causal=True, window=(1, 2))  # equal options must not hide wrong ones

    def call(*arrays: Any) -> Any:
        return fastattn.forward(*arrays, **options)

    with pytest.raises(kind, match=message):
        (jax.jit(call) if compiled else call)(q, q, q)


def test_float64_with_x64_enabled() -> None:
    enabled = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    try:
        with pytest.raises(TypeError, match="q: got dtype float64"):
            fastattn.forward(*[zeros(*Q, dtype=jnp.float64)] * 3)
    finally:
        jax.config.update("jax_enable_x64", enabled)


@pytest.mark.parametrize("kernel", [k.name for k in fastattn.kernels(emulated=True)])
def test_cuda_kernel_on_cpu_arrays(kernel: str) -> None:
    """It runs emulated, as for every other array on the CPU."""
    arrays = qkv(device_of("cpu"), length=9)
    check(arrays, fastattn.forward(*arrays, kernel=kernel))
    check(arrays, jax.jit(lambda q, k, v: fastattn.forward(q, k, v, kernel=kernel))(*arrays))


@pytest.mark.gpu
def test_cpu_kernel_on_gpu_arrays() -> None:
    with pytest.raises(ValueError, match="'cpu' takes arrays on the cpu backend"):
        fastattn.forward(*qkv(device_of("cuda")), kernel="cpu")


def test_unsupported_call_fails_while_tracing() -> None:
    with pytest.raises(NotImplementedError, match="head_dim 1000"):
        jax.eval_shape(fastattn.forward, *[jax.ShapeDtypeStruct((1, 1, 2, 1000), np.float32)] * 3)


# ---- the handler, past the checks in Python ------------------------------------------------------


def raw(q: Any, k: Any, v: Any, out: Any = None, lse: Any = None, **attributes: Any) -> Any:
    """The FFI target itself; jitted, for that is how XLA reports a handler's error."""
    fastattn.forward(*[zeros(*Q)] * 3)  # registers
    results = [jax.ShapeDtypeStruct(out or q.shape, q.dtype)]
    results += [jax.ShapeDtypeStruct(lse, np.float32)] if lse else []
    attributes = {
        "kernel": "auto",
        "causal": False,
        "window_left": np.int32(-1),
        "window_right": np.int32(-1),
        "scale": np.float32(1),
    } | attributes
    call = jax.ffi.ffi_call("fastattn_forward", results)
    return jax.block_until_ready(jax.jit(lambda *x: call(*x, **attributes))(q, k, v))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: raw(zeros(*Q), zeros(1, 4, 8, 16), zeros(*Q)), "batch size 1 is not the 2 of q"),
        (lambda: raw(zeros(8, 16), zeros(8, 16), zeros(8, 16)), r"q: got shape \(8, 16\)"),
        (lambda: raw(*[zeros(*Q)] * 3, out=(2, 4, 8, 15)), r"out: got shape \(2, 4, 8, 15\)"),
        (lambda: raw(*[zeros(*Q)] * 3, lse=(2, 4, 9)), r"lse: got shape \(2, 4, 9\)"),
        (lambda: raw(*[zeros(*Q, dtype=jnp.int32)] * 3), "one dtype of float32"),
        (lambda: raw(zeros(*Q), zeros(*Q, dtype=jnp.bfloat16), zeros(*Q)), "one dtype of float32"),
        (lambda: raw(*[zeros(*Q)] * 3, kernel="v99"), "unknown kernel 'v99'"),
        (lambda: raw(*[zeros(*Q)] * 3, window_left=np.int32(-5)), "window_left: got -5"),
        (lambda: raw(*[zeros(1, 1, 2, 1000)] * 3), "UNIMPLEMENTED.*head_dim 1000"),
    ],
)
def test_handler_checks_what_it_is_given(call: Any, message: str) -> None:
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        call()
    assert raw(*[zeros(*Q)] * 3, lse=Q[:3])[1].shape == Q[:3]


# ---- GPU only ------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", [k.name for k in fastattn.kernels() if k.backend == "cuda"])
def test_command_buffers(kernel: str) -> None:
    """XLA records the calls into a CUDA graph where it may; kernels with scratch memory stay out.

    One call is enough for a graph here, and a graph is made once and replayed.
    """
    device = device_of("cuda")
    arrays = qkv(device)

    def layers(q: Any, k: Any, v: Any) -> Any:
        for _ in range(6):
            q = fastattn.forward(q + 1, k, v, kernel=kernel)
        return q

    recorded = jax.jit(
        layers,
        compiler_options={
            "xla_gpu_graph_min_graph_size": "1",
            "xla_gpu_enable_command_buffer": "FUSION,CUSTOM_CALL",
        },
    )
    plain = jax.jit(layers, compiler_options={"xla_gpu_enable_command_buffer": ""})
    for seed in range(5):
        arrays = qkv(device, seed=seed)
        expected = np.asarray(plain(*arrays))
        np.testing.assert_array_equal(np.asarray(recorded(*arrays)), expected)


@pytest.mark.gpu
def test_runs_on_the_stream_of_xla() -> None:
    """What comes before and after on XLA's stream is in order with the kernel, without a wait."""
    device = device_of("cuda")
    q, k, v = qkv(device, length=512)
    big = jax.device_put(jnp.full((4096, 4096), 1 / 4096), device)

    @jax.jit
    def call(q: Any, k: Any, v: Any, big: Any) -> Any:
        for _ in range(8):
            big = big @ big
        late = q * big[0, 0] * 4096
        return fastattn.forward(late, k, v) * 2

    expected = np.asarray(fastattn.forward(q, k, v)) * 2
    results = [call(q, k, v, big) for _ in range(20)]
    for result in results:
        np.testing.assert_allclose(np.asarray(result), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
def test_each_gpu() -> None:
    device_of("cuda")
    gpus = jax.devices("gpu")
    if len(gpus) < 2:
        pytest.skip("needs two GPUs")
    arrays = qkv(gpus[0])
    expected = np.asarray(fastattn.forward(*arrays))
    for gpu in gpus:
        result = fastattn.forward(*(jax.device_put(x, gpu) for x in arrays))
        assert result.devices() == {gpu}
        np.testing.assert_array_equal(np.asarray(result), expected)
