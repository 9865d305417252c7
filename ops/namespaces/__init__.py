"""Array namespaces that references are written against: the Array API standard plus a few words it
lacks.

accumulate(x)              x in its accumulation dtype: float32, or float64 if x is float64
linear(x, w, bias)         x [..., k] by w [n, k], accumulated, plus bias, rounded once to x's dtype
linear_accumulated(x, w)   the same without bias or rounding: [..., n] in the accumulation dtype
head_linear(x, w)          x [tok head k] by w [head n k], rounded once to x's dtype: [tok head n]
rsqrt(x)                   1 / sqrt(x)
to_int(x)                  float32 to the nearest int32, ties to even
count_tokens(ids, size)    ids [rows, n] int32, -1 unused: how often each id occurs, [rows, size]
                           int32
add_at(x, ids, values)     x [rows, n] plus values at ids [rows, m] of each row; id -1 adds nothing
loop(a, b, body, state)    state = body(i, state) for i in [a, b)
top(x, k)                  the k largest of each row and their indices, ties by the lower index
erf(x)                     the error function
linear_int32(x, w)         x [tok k] int8 by w [n k] int8, exact: [tok n] int32
float_dtype(name)          the dtype of that name: float32, bfloat16, float16, float8_e4m3fn
bits(x), from_bits(x)      float32 as the int32 of the same bits, and back
"""

from __future__ import annotations

from functools import cache
from typing import Any


@cache
def namespace(framework: str) -> Any:
    """The namespace of `numpy`, `jax` or `torch`; imports that framework and no other."""
    if framework == "numpy":
        from .numpy_ import NumpyNamespace

        return NumpyNamespace()
    if framework == "jax":
        from .jax_ import JaxNamespace

        return JaxNamespace()
    if framework == "torch":
        from .torch_ import TorchNamespace

        return TorchNamespace()
    raise ValueError(f"unknown framework {framework!r}")


def device_of(x: Any) -> Any:
    """Where x lies, for constants made beside it (None under a JAX trace, which places them
    itself).
    """
    device = getattr(x, "device", None)
    return device if type(device).__module__.startswith("torch") else None
