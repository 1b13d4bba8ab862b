"""PyTorch's ways to compute attention, as calls that the benchmark times."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from typing import Any

from fastattn.benchmark._arrays import Call, Problem, TorchArrays


def _naive(arrays: TorchArrays, problem: Problem, q: Any, k: Any, v: Any) -> Call:
    """Matrix product, softmax, matrix product, all in the call's dtype."""
    torch, scale, hidden = arrays.torch, problem.factor, arrays.hidden(problem)

    def call() -> Any:
        scores = (q @ k.transpose(-2, -1)) * scale
        if hidden is not None:
            scores = scores.masked_fill(hidden, -math.inf)
        return torch.softmax(scores, -1) @ v

    return call


def _sdpa(arrays: TorchArrays, problem: Problem, q: Any, k: Any, v: Any) -> Call:
    """``scaled_dot_product_attention`` with the backend that torch chooses.

    Its own causal mask is aligned at the top left, so that other lengths need torch's mask for the
    bottom right, and a window, which it lacks, a mask of [M, N].
    """
    sdpa = arrays.torch.nn.functional.scaled_dot_product_attention
    mask, causal = None, problem.causal
    if problem.window is not None:
        mask, causal = ~arrays.hidden(problem), False
    elif causal and problem.len_q != problem.len_kv:
        bias = importlib.import_module("torch.nn.attention.bias")
        mask, causal = bias.causal_lower_right(problem.len_q, problem.len_kv), False
    grouped = problem.heads_q != problem.heads_kv
    return lambda: sdpa(
        q, k, v, attn_mask=mask, is_causal=causal, scale=problem.scale, enable_gqa=grouped
    )


def _fa2(arrays: TorchArrays, problem: Problem, q: Any, k: Any, v: Any) -> Call:
    """Torch's FlashAttention-2 kernels.

    Through ``scaled_dot_product_attention``, as they are used; the masks that it can't pass on go
    to the operator below it, which takes [B, M, H, D].
    """
    lengths_differ = problem.len_q != problem.len_kv
    if problem.window is None and not (problem.causal and lengths_differ):
        return _of_backend("FLASH_ATTENTION")(arrays, problem, q, k, v)
    left, right = problem.window or (-1, -1)
    operator = arrays.torch.ops.aten._flash_attention_forward
    by_row = [x.transpose(1, 2) for x in (q, k, v)]

    def call() -> Any:
        out = operator(
            *by_row,
            None,
            None,
            problem.len_q,
            problem.len_kv,
            0.0,
            problem.causal,
            False,
            scale=problem.scale,
            window_size_left=None if left < 0 else left,
            window_size_right=None if right < 0 else right,
        )[0]
        return out.transpose(1, 2)

    return call


def _of_backend(name: str) -> Callable[[TorchArrays, Problem, Any, Any, Any], Call]:
    """``scaled_dot_product_attention`` with one backend, which fails where it can't do the call."""

    def way(arrays: TorchArrays, problem: Problem, q: Any, k: Any, v: Any) -> Call:
        attention = importlib.import_module("torch.nn.attention")
        backend = getattr(attention.SDPBackend, name)
        call = _sdpa(arrays, problem, q, k, v)

        def restricted() -> Any:
            with attention.sdpa_kernel(backend):
                return call()

        return restricted

    return way


TORCH: dict[str, Callable[[TorchArrays, Problem, Any, Any, Any], Call]] = {
    "torch_naive": _naive,
    "torch_sdpa": _sdpa,
    "torch_fa2": _fa2,
    "torch_cudnn": _of_backend("CUDNN_ATTENTION"),
}
