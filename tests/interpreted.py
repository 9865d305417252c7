"""Programs of interpreted kernels, and of ops of JAX on a CPU, compiled quickly.

Interpreted, a kernel is a program of XLA for CPUs that is there to prove its source: what runs on a
TPU or GPU is made of it by another compiler. To optimise such a program takes longer than all that a
test does with it. What XLA does to operations before it emits code, as with roundings, stays as it
is.
"""

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp

from twinfer.ops import REGISTRY, testing
from twinfer.ops.bindings.jax import alone

FAST_COMPILE = {
    "xla_backend_optimization_level": 0,
    "xla_cpu_use_fusion_emitters": False,  # each fusion takes a context of MLIR's and its passes
    "xla_cpu_parallel_codegen_split_count": 1,
}
"""Options of XLA's compiler, which releases may have no more."""


@lru_cache
def fast_compile_options() -> dict[str, Any]:
    """Those of `FAST_COMPILE` that this release has."""

    def has(name: str) -> bool:
        try:
            jax.jit(lambda x: x, compiler_options={name: FAST_COMPILE[name]})(0)
        except jax.errors.JaxRuntimeError:
            return False
        return True

    return {name: value for name, value in FAST_COMPILE.items() if has(name)}


@lru_cache(maxsize=1)
def program(op: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A bound op as a program that is compiled quickly, once for each form of its arguments. That
    of the last one is kept.
    """
    return alone(REGISTRY[op], function, fast_compile_options())


def run(
    op: str, framework: str, provider: str | None, arguments: testing.Arguments,
    device: str = "cpu", quickly: bool = False,
) -> tuple[Any, ...]:  # fmt: skip
    """As `ops.testing.run`; what is interpreted on a CPU is compiled quickly, and with `quickly`
    all that JAX has there.
    """
    quick = (quickly and framework == "jax") or provider == "pallas_interpret"
    quick = quick and device == "cpu"
    wrap = (lambda function: program(op, function)) if quick else None
    return testing.run(op, framework, provider, arguments, device, wrap)


def interpret(function: Callable[..., Any], given: Mapping[str, Any], **options: Any) -> Any:
    """What `function` gives for the arrays of `given`, and the rest of them as they are; traced
    anew, so that a fault that was planted meanwhile is in the program.
    """
    arrays = {name: jnp.asarray(x) for name, x in given.items() if hasattr(x, "shape")}
    rest = {name: x for name, x in given.items() if name not in arrays} | options
    traced = jax.jit(
        lambda arrays: function(**arrays, **rest), compiler_options=fast_compile_options()
    )
    return traced(arrays)
