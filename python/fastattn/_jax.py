"""``forward`` for JAX arrays, through XLA's foreign function interface.

One ``jax.jit`` function with the options static holds everything: an eager call finds its compiled
program in JAX's cache, and inside a user's ``jit`` the function is inlined. Shapes and dtypes are
checked while JAX traces, where a program for them is first made.

The method is https://docs.jax.dev/en/latest/ffi.html.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from fastattn import _core

_OLDEST_JAX = (0, 8)

# (is it CUDA, device ordinal)
Place = tuple[bool, int]

# Types seen of arrays that are no tracers (there is one): isinstance takes three times as long.
_concrete_types: set[type] = set()

# FFI targets are registered for the life of the process, and XLA takes each only once.
_registered = False
_registration = threading.Lock()


def _register() -> None:
    global _registered
    with _registration:
        if _registered:
            return
        if jax.__version_info__ < _OLDEST_JAX:
            raise RuntimeError(
                f"JAX arrays need jax {'.'.join(map(str, _OLDEST_JAX))} or newer; "
                f"this is {jax.__version__}"
            )
        for name, platform, handler in _core.xla_targets():
            jax.ffi.register_ffi_target(name, handler, platform=platform)
        _registered = True


def _array(name: str, x: Any) -> jax.Array:
    if isinstance(x, jax.Array):
        return x
    if not isinstance(x, np.ndarray):
        raise TypeError(
            f"{name}: got {type(x).__module__}.{type(x).__qualname__} beside a jax.Array; "
            "pass JAX arrays only"
        )
    # A NumPy constant among JAX arrays. JAX would round float64 to float32 without a word.
    if jax.dtypes.canonicalize_dtype(x.dtype) != x.dtype:
        raise TypeError(f"{name}: got dtype {x.dtype}, takes float32, float16 or bfloat16")
    return jax.numpy.asarray(x)


def _place(*arrays: jax.Array) -> Place:
    """Where a call of concrete arrays will run."""
    # JAX moves arrays that it put somewhere by default to those that the user put somewhere.
    anchor = next((x for x in arrays if x.committed), arrays[0])
    device = next(iter(anchor.sharding.addressable_devices))
    if device.platform == "cpu":
        return False, -1
    if device.platform == "gpu":
        return True, device.local_hardware_id
    raise ValueError(f"q: on {device}, takes the CPU or a CUDA device")


def _candidates(place: Place | None) -> Sequence[Place]:
    """The places that a call may be compiled for, the likeliest first; place: None for tracers."""
    if place is not None:
        return (place,)
    # Which platform a jitted function is compiled for is settled only after it is traced. What JAX
    # has no GPU for runs on the CPU; else either may come, and the handler has the last word.
    return ((True, -1), (False, -1)) if jax.default_backend() == "gpu" else ((False, -1),)


def _target(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    kernel: str,
    causal: bool,
    window: tuple[int, int],
    scale: float | None,
    place: Place | None,
) -> tuple[str, float]:
    """Name of the FFI target and the scale in effect; raises where no kernel takes the call."""
    first: Exception | None = None
    for cuda, device in _candidates(place):
        try:
            target: tuple[str, float] = _core.xla_target(
                q.shape, k.shape, v.shape, q.dtype.name, kernel, causal, window, scale, cuda, device
            )
            return target
        except (TypeError, ValueError, NotImplementedError) as error:
            first = first or error
    assert first is not None
    raise first


def _check(q: jax.Array, k: jax.Array, v: jax.Array) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4:
            raise ValueError(
                f"{name}: got {x.ndim} dimensions, shape {x.shape}, takes 4: "
                "(batch, heads, length, head_dim)"
            )
        if not all(isinstance(size, int) for size in x.shape):
            raise NotImplementedError(f"{name}: symbolic dimensions {x.shape} are not supported")
        if x.dtype != q.dtype:
            raise TypeError(f"{name}: got dtype {x.dtype}, takes that of q, {q.dtype}")


def _manual_axes(x: jax.Array) -> frozenset[str]:
    """Mesh axes of an enclosing shard_map along which the shards of x differ."""
    aval = jax.typeof(x)
    axes: frozenset[str] = (
        aval.vma if hasattr(aval, "vma") else aval.manual_axis_type.varying  # jax >= 0.10
    )
    return axes


def _align_manual_axes(arrays: Sequence[jax.Array]) -> tuple[list[jax.Array], dict[str, Any]]:
    """What ffi_call asks under shard_map: operands that vary alike, and results that say so too."""
    wanted = frozenset[str]().union(*map(_manual_axes, arrays))
    if not wanted:
        return list(arrays), {}
    aligned = []
    for x in arrays:
        missing = tuple(wanted - _manual_axes(x))
        if not missing:
            aligned.append(x)
        elif hasattr(jax.lax, "pcast"):
            aligned.append(jax.lax.pcast(x, missing, to="varying"))
        else:
            aligned.append(jax.lax.pvary(x, missing))
    aval = jax.typeof(aligned[0])
    replicated = jax.sharding.NamedSharding(aval.sharding.mesh, jax.sharding.PartitionSpec())
    if hasattr(aval, "vma"):
        return aligned, {"sharding": replicated, "vma": wanted}
    return aligned, {"sharding": replicated, "manual_axis_type": aval.manual_axis_type}


def _trace(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    kernel: str,
    causal: bool,
    window: tuple[int, int],
    scale: float | None,
    return_lse: bool,
    place: Place | None,
) -> Any:
    _check(q, k, v)
    target, scale = _target(q, k, v, kernel, causal, window, scale, place)

    def call(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        (q, k, v), varying = _align_manual_axes((q, k, v))
        batch, heads, length, _ = q.shape
        out = jax.ShapeDtypeStruct((batch, heads, length, v.shape[3]), q.dtype, **varying)
        lse = jax.ShapeDtypeStruct((batch, heads, length), np.float32, **varying)
        results = jax.ffi.ffi_call(
            target, (out, lse) if return_lse else (out,), vmap_method="broadcast_all"
        )(
            q,
            k,
            v,
            kernel=kernel,
            causal=causal,
            window_left=np.int32(window[0]),
            window_right=np.int32(window[1]),
            scale=np.float32(scale),
        )
        return tuple(results) if return_lse else results[0]

    # custom_jvp only for the sake of the message: without it JAX tells the user to write one.
    primal = jax.custom_jvp(call)
    primal.defjvp(_no_gradient)
    return primal(q, k, v)


def _no_gradient(primals: Any, tangents: Any) -> Any:
    raise NotImplementedError(
        "fastattn.forward has no gradient for JAX arrays yet; where none is wanted, pass "
        "jax.lax.stop_gradient(q), and k and v alike"
    )


_compiled = jax.jit(
    _trace, static_argnames=("kernel", "causal", "window", "scale", "return_lse", "place")
)


def forward(
    q: Any,
    k: Any,
    v: Any,
    *,
    kernel: str,
    causal: bool,
    window: tuple[int, int],
    scale: float | None,
    return_lse: bool,
) -> Any:
    """Run ``fastattn.forward`` where q, k or v is a JAX array or tracer.

    The options are checked already: window is a pair with -1 for no limit, scale None or finite.
    Returns out, or ``(out, lse)``; raises as ``fastattn.forward`` does.
    """
    if not _registered:
        _register()
    known = _concrete_types
    if type(q) in known and type(k) in known and type(v) in known:
        place: Place | None = _place(q, k, v)
    else:
        q, k, v = arrays = _array("q", q), _array("k", k), _array("v", v)
        tracing = any(isinstance(x, jax.core.Tracer) for x in arrays)
        place = None if tracing else _place(q, k, v)
        if not tracing:
            known.update(map(type, arrays))
    return _compiled(
        q,
        k,
        v,
        kernel=kernel,
        causal=causal,
        window=window,
        scale=scale,
        return_lse=return_lse,
        place=place,
    )
