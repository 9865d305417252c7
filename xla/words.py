"""Words of torch that torch-xla lowers to something else, said in a way that it lowers right.

Shifts of integers become divisions, which round towards zero and overflow. A view of the same bits
in another dtype is copied to the host and back, a sort puts 0.0 before -0.0, which are equal, and
the largest of several numbers is never a NaN. All of that is silent; tests/xla judges every op that
is traced with these words by its contract.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
import torch_xla.core.xla_builder as xb
import torch_xla.core.xla_op_registry as xor
from torch.overrides import TorchFunctionMode

from ..shared.errors import InternalError

KINDS = {
    torch.float32: "F32",
    torch.int32: "S32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int16: "S16",
    torch.uint8: "U8",
    torch.int8: "S8",
}
"""XLA's names of what bits can be read as. It has none here for fp8."""


class Words(TorchFunctionMode):
    """Within the block, these words are replaced for tensors on an XLA device."""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = kwargs or {}
        replaced = REPLACED.get(function)
        if replaced is None or not any(_on_xla(x) for x in args):
            return function(*args, **named)
        return replaced(*args, **named)


def _on_xla(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.device.type == "xla"


def _beside(value: Any, like: torch.Tensor) -> torch.Tensor:
    """A number as a tensor of the dtype of `like`; a tensor as it is."""
    if isinstance(value, torch.Tensor):
        return value
    return torch.full((), value, dtype=like.dtype, device=like.device)


def _right(x: torch.Tensor, bits: Any) -> torch.Tensor:
    return torch.bitwise_right_shift(x, _beside(bits, x))


def _left(x: torch.Tensor, bits: Any) -> torch.Tensor:
    return torch.bitwise_left_shift(x, _beside(bits, x))


def _view(x: torch.Tensor, *size: Any, **named: Any) -> torch.Tensor:
    kind = named.get("dtype", size[0] if size else None)
    if not isinstance(kind, torch.dtype):
        return x.view(*size, **named)
    if kind == x.dtype:
        return x
    if kind not in KINDS or kind.itemsize != x.dtype.itemsize:
        raise InternalError(f"torch-xla cannot read the bits of {x.dtype} as {kind}")
    found: torch.Tensor = _bitcast()(x, kind=KINDS[kind])
    return found


@cache
def _bitcast() -> Callable[..., Any]:
    def lower(x: Any, kind: str) -> Any:
        return x.bitcast(getattr(xb.Type, kind))

    registered: Callable[..., Any] = xor.register("twinfer_bitcast", lower)
    return registered


def _sort(x: torch.Tensor, *args: Any, **named: Any) -> Any:
    return torch.sort(torch.where(x == 0, torch.zeros_like(x), x), *args, **named)


def _amax(x: torch.Tensor, *args: Any, **named: Any) -> torch.Tensor:
    found = torch.amax(x, *args, **named)
    if not x.is_floating_point():
        return found
    spoilt = torch.amax(torch.isnan(x).to(torch.int32), *args, **named) > 0
    return torch.where(spoilt, torch.full_like(found, float("nan")), found)


REPLACED: Mapping[Any, Callable[..., Any]] = {
    torch.Tensor.__rshift__: _right,
    torch.Tensor.__lshift__: _left,
    torch.Tensor.__rrshift__: lambda x, value: _right(_beside(value, x), x),
    torch.Tensor.__rlshift__: lambda x, value: _left(_beside(value, x), x),
    torch.Tensor.view: _view,
    torch.sort: _sort,
    torch.amax: _amax,
    torch.Tensor.amax: _amax,
}
