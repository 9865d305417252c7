"""The JAX binding: each op is a named jit that is not inlined, so that it stands in the jaxpr under
its name.

What takes the KV cache stands there as what it does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax

from ..declare import REGISTRY, Op
from ..namespaces.jax_ import taken
from ..plan import COMPOSITION, Choice, Plan


def bind(plan: Plan) -> Any:
    """A namespace of the plan's ops for JAX programs."""
    return plan.bind(lambda op, function: named_jit(op, taking(plan[op.name], function)))


def taking(choice: Choice, function: Callable[..., Any]) -> Callable[..., Any]:
    """What runs a choice, for arguments that may be `InStack`: taken out of their stack unless it
    reads them there, or hands them on to ops that do.
    """
    if choice.provider == COMPOSITION or choice.implementation.stacked:
        return function

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*map(taken, args), **{name: taken(x) for name, x in kwargs.items()})

    return call


def named_jit(op: Op, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` as a jit of the op's name, its Python values static.

    Those that take the KV cache are inlined. The TPU's compiler does not see that a reshape of the
    cache, for heads of 64, is undone inside of a call: it copied the whole cache in each layer that
    stood for itself.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    call.__name__ = call.__qualname__ = op.name
    call.__signature__ = op.signature  # type: ignore[attr-defined]
    states = {name for known in REGISTRY for name in known.state}
    inline = not states.isdisjoint(op.signature.parameters)
    return jax.jit(call, static_argnames=op.static_parameters, inline=inline)


def alone(op: Op, function: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    """A bound op as a program of its own, compiled with these options of the compiler. It takes
    arguments by name.
    """
    return jax.jit(
        lambda **arguments: function(**arguments),
        static_argnames=op.static_parameters,
        compiler_options=dict(options),
    )
