"""torch tensors. From torch 2.10 on by the C exchange API, before by ``__dlpack__``."""

from __future__ import annotations

from typing import Any

import torch

from ._base import Adapter, DType, not_taken

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def _stream(handle: int, device: Any) -> Any:
    # ExternalStream(0) would be a new stream.
    if handle == 0:
        return torch.cuda.default_stream(device)
    return torch.cuda.ExternalStream(handle, device=device)


class _Torch(Adapter):
    path = "exchange" if hasattr(torch.Tensor, "__dlpack_c_exchange_api__") else "no_sync"
    screened = True
    # The allocator of the exchange API would do, but its tensors are views of foreign memory to
    # torch, and record_stream() ignores those.
    empty_like = staticmethod(torch.empty_like)
    # With sizes one by one: torch takes twice as long to parse empty(shape, dtype=, device=).
    new_empty = staticmethod(torch.Tensor.new_empty)
    float32 = torch.float32
    # autograd then notices a tensor that was saved for backward and overwritten since.
    wrote = staticmethod(torch.autograd.graph.increment_version)

    def empty(self, like: Any, shape: tuple[int, ...], dtype: DType, stream: int | None) -> Any:
        kind = _DTYPES[dtype]
        if stream is None:
            return like.new_empty(shape, dtype=kind)
        with torch.cuda.stream(_stream(stream, like.device)):
            return like.new_empty(shape, dtype=kind)

    def contiguous(self, array: Any, stream: int | None) -> Any:
        if stream is None:
            return array.contiguous()
        with torch.cuda.stream(_stream(stream, array.device)):
            return array.contiguous()

    def current_stream(self, device: int) -> int:
        return int(torch._C._cuda_getCurrentRawStream(device))

    def record_stream(self, array: Any, stream: int) -> bool:
        array.record_stream(_stream(stream, array.device))
        return True

    def refuse(self, array: Any, argument: str) -> None:
        # The second are the tensors of torch.func.functionalize, at its own level.
        if torch._C._functorch.is_functorch_wrapped_tensor(array) or torch._is_functional_tensor(
            array
        ):
            not_taken(argument, "a tensor inside a torch.func transform", "call it outside of it")
        if array.layout is not torch.strided:
            not_taken(argument, f"a tensor of layout {array.layout}", "pass .to_dense()")
        if array.device.type == "meta":
            not_taken(argument, "a meta tensor", "it has no memory")
        if array.requires_grad and torch.is_grad_enabled():
            not_taken(
                argument,
                "a tensor that requires grad",
                "forward is not differentiable: pass .detach() or call it under torch.no_grad()",
            )
        if array.is_conj():
            not_taken(argument, "a conjugate view", "pass .resolve_conj()")
        if array.is_neg():
            not_taken(argument, "a view with the negative bit", "pass .resolve_neg()")


_adapter = _Torch()


def resolve(kind: type[Any], argument: str) -> Adapter:
    """The adapter for ``kind``, torch.Tensor or a subclass."""
    if not issubclass(kind, torch.Tensor):
        not_taken(argument, f"a {kind.__module__}.{kind.__name__}", "pass a torch.Tensor")
    # FakeTensor, DTensor and their like stand for memory that is elsewhere or nowhere.
    if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        not_taken(
            argument,
            f"a {kind.__name__}",
            "it has no memory of its own: pass the plain torch.Tensor inside",
        )
    return _adapter
