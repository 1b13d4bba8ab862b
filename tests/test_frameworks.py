"""An array of any framework goes in, the same kind of array comes out, on the same device."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import fastattn
import helpers
from fastattn import testing
from helpers import DTYPES, KERNELS, Case, Runner


class Jax(helpers.Framework):
    has_views = has_negative_strides = False  # slices are copies

    def __init__(self, backend: str) -> None:
        self.name = f"jax-{backend}"
        self.backend = backend

    @property
    def xp(self) -> Any:
        import jax.numpy

        return jax.numpy

    def array(self, values: Any, dtype: str) -> Any:
        import jax

        return jax.device_put(self.xp.asarray(values, dtype), jax.devices(self.backend)[0])


ALL: list[tuple[helpers.Framework, str | None]] = [
    (helpers.NumPy(), None),
    (helpers.Torch("cpu"), "torch"),
    (helpers.Torch("cuda"), "torch"),
    (helpers.CuPy(), "cupy"),
    (helpers.CudaArrays(), None),
    (Jax("cpu"), "jax"),
    (Jax("cuda"), "jax"),
]


def marks_of(framework: helpers.Framework, module: str | None) -> list[Any]:
    marks = [pytest.mark.gpu] if framework.backend == "cuda" else []
    if module and not helpers.installed(module):
        marks.append(pytest.mark.skip(reason=f"{module} is not installed"))
    elif not any(k.backend == framework.backend for k in KERNELS.values()):
        marks.append(pytest.mark.skip(reason="this build has no CUDA backend"))
    return marks


def each_framework(backends: tuple[str, ...] = ("cpu", "cuda")) -> Any:
    return pytest.mark.parametrize(
        "framework",
        [
            pytest.param(framework, marks=marks_of(framework, module), id=framework.name)
            for framework, module in ALL
            if framework.backend in backends
        ],
    )


def each_declared_dtype() -> Any:
    """Every framework with every kernel of its backend and every dtype that both have."""
    params = []
    for framework, module in ALL:
        own = [k for k in KERNELS.values() if k.backend == framework.backend]
        dtypes = {k.name: set(k.dtypes) for k in own}
        dtypes["auto"] = set().union(*dtypes.values())
        params += [
            pytest.param(
                *(framework, name, dtype),
                marks=marks_of(framework, module),
                id=f"{framework.name}-{name}-{dtype}",
            )
            for name, declared in dtypes.items()
            for dtype in DTYPES
            if dtype in declared and dtype in framework.dtypes
        ]
    return pytest.mark.parametrize(("framework", "kernel", "dtype"), params)


@pytest.fixture(autouse=True)
def need_the_device(request: pytest.FixtureRequest) -> None:
    """A framework may be there as a build for the CPU alone."""
    framework = (
        request.getfixturevalue("framework") if "framework" in request.fixturenames else None
    )
    if framework is None or framework.backend == "cpu":
        return
    if framework.name == "torch-cuda" and not helpers.torch_on("cuda"):
        pytest.skip("torch has no CUDA here")
    if framework.name == "jax-cuda":
        import jax

        try:
            jax.devices("cuda")
        except RuntimeError:
            pytest.skip("JAX has no CUDA here")


def device_of(x: Any) -> Any:
    if isinstance(x, np.ndarray):
        return None
    return x.device


@each_declared_dtype()
def test_the_same_kind_comes_back(framework, kernel, dtype):
    case = Case(dtype=dtype)
    arrays = [framework.array(x, dtype) for x in helpers.inputs(case)]
    out, lse = fastattn.forward(*arrays, kernel=kernel, return_lse=True)
    for result in (out, lse):
        assert type(result) is type(arrays[0])
        assert device_of(result) == device_of(arrays[0])
    assert out.dtype == arrays[0].dtype
    assert testing.dtype_name(lse) == "float32"
    assert tuple(out.shape) == case.shapes[0]
    assert tuple(lse.shape) == case.shapes[0][:3]
    helpers.expected(case, framework.backend).check(out, lse)
    np.testing.assert_array_equal(
        testing.to_numpy(fastattn.forward(*arrays, kernel=kernel)), testing.to_numpy(out)
    )


@each_framework()
def test_out_comes_back(framework):
    case = Case()
    arrays = [framework.array(x, case.dtype) for x in helpers.inputs(case)]
    out = framework.full(case.shapes[0], math.nan, case.dtype)
    if framework.name.startswith("jax"):
        with pytest.raises(ValueError, match="out"):
            fastattn.forward(*arrays, out=out)
        return
    assert fastattn.forward(*arrays, out=out) is out
    helpers.expected(case, framework.backend).check(out)


@each_framework()
def test_empty_results(framework):
    for shape_q, shape_k in [((2, 3, 0, 64), (2, 3, 5, 64)), ((0, 3, 5, 64), (0, 3, 5, 64))]:
        if shape_q[2] != shape_k[2] and not any(
            k.backend == framework.backend and k.lengths_differ for k in KERNELS.values()
        ):
            continue
        q = framework.array(np.zeros(shape_q, np.float32), "float32")
        k = framework.array(np.zeros(shape_k, np.float32), "float32")
        out, lse = fastattn.forward(q, k, k, return_lse=True)
        assert type(out) is type(lse) is type(q)
        assert tuple(out.shape) == shape_q
        assert tuple(lse.shape) == shape_q[:3]


@each_framework()
def test_all_frameworks_give_the_same_bits(framework):
    case = Case(len_q=127, len_kv=127)
    first = helpers.frameworks(framework.backend)[0]
    for kernel in KERNELS.values():
        if kernel.backend != framework.backend:
            continue
        values = helpers.inputs(case)
        same = Runner(kernel, first).run(*values)
        arrays = [framework.array(x, case.dtype) for x in values]
        found = Runner(kernel, framework).forward(*arrays, return_lse=True)
        for a, b in zip(found, same, strict=True):
            np.testing.assert_array_equal(testing.to_numpy(a), b)
