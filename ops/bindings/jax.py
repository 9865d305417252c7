"""The JAX binding: each op is a named jit that is not inlined, so that it stands in the jaxpr under its name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from ..declare import Op
from ..plan import Plan


def bind(plan: Plan) -> Any:
    """A namespace of the plan's ops for JAX programs."""
    return plan.bind(named_jit)


def named_jit(op: Op, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` as a jit of the op's name, its Python values static."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    call.__name__ = call.__qualname__ = op.name
    call.__signature__ = op.signature  # type: ignore[attr-defined]
    return jax.jit(call, static_argnames=op.static_parameters, inline=False)
