"""How faults are made: wrappers around what a plan has chosen for an op, written over an array
namespace.

A wrapper still calls what it wraps, even where it replaces the result: the taps of the ops inside
must stay in order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import Parameter
from typing import Any, Literal

from ...ops import REGISTRY
from ...ops.namespaces import device_of
from ...shared.models.config import ModelConfig
from ..sides.fault import Fault

Given = dict[str, Any]
"""The arguments of a call, by name."""
Make = Callable[[Any, Callable[..., Any]], Callable[..., Any]]
Place = Literal["layer", "top", "ops"]


@dataclass(frozen=True, slots=True)
class Entry(Fault):
    """A catalogued fault, in all layers. `what` is a sentence for people.

    `place`: in the layers of the model, in its `top` (embedding, logits), or in single `ops` that a
    dense decoder does not call: those can be planted in `twinfer numerics ops` only. `shown_by`
    names the ops that show a fault which is in no op, but in `weights` or `tables`. `needs` says
    what a model must have for the fault to make a difference, and `missing` names that.
    """

    what: str = ""
    place: Place = "layer"
    shown_by: tuple[str, ...] = ()
    needs: Callable[[ModelConfig], bool] | None = None
    missing: str = ""

    def fault(self, layer: int | None = None) -> Fault:
        """As a worker has it."""
        layer = -1 if self.place == "top" else layer
        return Fault(self.name, self.ops, self.weights, self.tables, layer)


def _given(args: tuple[Any, ...], kwargs: Mapping[str, Any], names: tuple[str, ...]) -> Given:
    found = dict(zip(names, args, strict=False)) | dict(kwargs)
    return {name: found[name] for name in names if name in found}


def _in_order(given: Given, parameters: Mapping[str, Parameter]) -> list[Any]:
    """The arguments by position, with the defaults of those that were left out before others."""
    last = max(number for number, name in enumerate(parameters) if name in given)
    named = list(parameters.items())[: last + 1]
    return [given.get(name, parameter.default) for name, parameter in named]


def changed(op: str, **changes: Callable[[Any, Given], Any]) -> tuple[str, Make]:
    """Some arguments are others."""

    def make(xp: Any, function: Callable[..., Any]) -> Callable[..., Any]:
        parameters = REGISTRY[op].signature.parameters
        names = tuple(parameters)

        def call(*args: Any, **kwargs: Any) -> Any:
            given = _given(args, kwargs, names)
            given |= {name: change(xp, given) for name, change in changes.items()}
            return function(*_in_order(given, parameters))

        return call

    return op, make


def instead(op: str, wrong: Callable[[Any, Given], Any]) -> tuple[str, Make]:
    """Another result, from the same arguments. It is made first: what is wrapped may write into
    them.
    """

    def make(xp: Any, function: Callable[..., Any]) -> Callable[..., Any]:
        names = tuple(REGISTRY[op].signature.parameters)

        def call(*args: Any, **kwargs: Any) -> Any:
            out = wrong(xp, _given(args, kwargs, names))
            function(*args, **kwargs)
            return out

        return call

    return op, make


def after(op: str, change: Callable[[Any, Any], Any]) -> tuple[str, Make]:
    """The result is changed."""

    def make(xp: Any, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            return change(xp, function(*args, **kwargs))

        return call

    return op, make


def around(op: str, wrong: Callable[[Any, Callable[..., Any], Given], Any]) -> tuple[str, Make]:
    """`wrong` calls the function itself: for fine ops, which have no taps inside."""

    def make(xp: Any, function: Callable[..., Any]) -> Callable[..., Any]:
        names = tuple(REGISTRY[op].signature.parameters)

        def call(*args: Any, **kwargs: Any) -> Any:
            return wrong(xp, function, _given(args, kwargs, names))

        return call

    return op, make


def bf16(xp: Any, x: Any) -> Any:
    """x rounded to bfloat16, in its own dtype."""
    return xp.astype(xp.accumulate(xp.astype(x, xp.float_dtype("bfloat16"))), x.dtype)


def storage(xp: Any, x: Any, like: Any) -> Any:
    """x rounded to the dtype of `like`, in float32."""
    return xp.accumulate(xp.astype(x, like.dtype))


def index(xp: Any, size: int, like: Any) -> Any:
    """0 to size, int32, beside `like`."""
    return xp.arange(size, dtype=xp.int32, device=device_of(like))
