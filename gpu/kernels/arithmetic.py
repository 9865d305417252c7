"""Arithmetic that several kernels share."""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
# 1.5 * 2^23: adding it to a float32 below 2^22 rounds to the nearest integer
NEAREST = tl.constexpr(12582912.0)
INT8_MAX = tl.constexpr(127.0)
FP8_MAX = tl.constexpr(448.0)
INT8_SHARE = tl.constexpr(0.007874015718698502)
"""float32(1 / 127)."""
FP8_SHARE = tl.constexpr(0.002232142956927419)
"""float32(1 / 448)."""
LARGEST = tl.constexpr(3.4028234663852886e38)
SMALLEST = tl.constexpr(2.0**-100)


@triton.jit
def dot(a, b, acc):
    """acc + a b in float32: float32 products are float32, never tf32."""
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def size_of(y):
    """What counts towards the largest of a row: no NaN, and infinities as the largest number."""
    size = tl.abs(y)
    return tl.where(size == size, tl.minimum(size, LARGEST), 0.0)


@triton.jit
def scale_of(amax, FP8: tl.constexpr):
    """The scale in e4m3, or in int8, of what has this as its largest."""
    share: tl.constexpr = FP8_SHARE if FP8 else INT8_SHARE
    return tl.where(amax < SMALLEST, 1.0, amax * share)


@triton.jit
def exp(x):
    """e^x to 2 units in the last place: the hardware's 2^x, after its argument was made small
    exactly.
    """
    whole = (x * LOG2_E + NEAREST) - NEAREST
    whole = tl.minimum(tl.maximum(whole, -126.0), 127.0)
    rest = (x - whole * 0.693145751953125) - whole * 1.4286068203094172e-06
    return tl.exp2(whole) * tl.exp2(rest * LOG2_E)


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)) of float32, without a power that overflows."""
    e = exp(-tl.abs(x))
    return tl.where(x < 0, e, 1.0) / (1.0 + e)


@triton.jit
def gated(gate, up):
    """silu(gate) * up, all of float32's range."""
    # e^gate in two halves: where it is below the smallest number, its product with `up` need not
    # be.
    half = exp(tl.abs(gate) * -0.5)
    return tl.where(gate < 0, gate * half * up * half, gate * up) / (1.0 + half * half)


@triton.jit
def gelu_gated(gate, up):
    """gelu(gate) * up with the gelu of tanh: gate / (1 + e^-2z) for z as the tanh takes it."""
    z = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
    e = exp(tl.abs(z) * -2.0)
    return gate * tl.where(z < 0, e, 1.0) / (1.0 + e) * up


@triton.jit
def activated(gate, up, GELU: tl.constexpr):
    """gelu(gate) * up if GELU, else silu(gate) * up."""
    if GELU:
        return gelu_gated(gate, up)
    else:
        return gated(gate, up)


@triton.jit
def tanh(x):
    """tanh to 2^-23 of 1."""
    e = tl.exp2(tl.abs(x) * (-2.0 * LOG2_E))
    y = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0, -y, y)


@triton.jit
def squash(scores, soft_cap):
    """soft_cap * tanh(scores / soft_cap) for scores in units of log2 e, as exp2 takes them."""
    return soft_cap * LOG2_E * tanh(scores / (soft_cap * LOG2_E))


@triton.jit
def stored(x, inverse, KIND: tl.constexpr):
    """x [float32, a number of the storage dtype] as the cache holds it: KIND is "" (as it is),
    "int8s" or "fp8".
    """
    if KIND == "int8s":
        y = tl.minimum(tl.maximum(x * inverse, -INT8_MAX), INT8_MAX)
        y = tl.where(x == x, (y + NEAREST) - NEAREST, 0.0)
        return y.to(tl.int8)
    elif KIND == "fp8":
        y = tl.minimum(tl.maximum(x * inverse, -FP8_MAX), FP8_MAX)
        return tl.where(x == x, y, x).to(tl.float8e4nv)
    else:
        return x


@triton.jit
def oldest_seen(position, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    """The first position that a query at `position` sees; there is a window or a chunk."""
    if CHUNK > 0:
        return position // CHUNK * CHUNK
    else:
        return tl.maximum(position - (WINDOW - 1), 0)


@triton.jit
def with_sinks(total, top, sinks, head, real, SINKS: tl.constexpr):
    """Sums of weights with maxima `top`, in units of log2 e, and those of the sinks of their heads.

    A row that has seen nothing has an infinite sum: its result is 0.
    """
    if SINKS:
        sink = tl.load(sinks + head, mask=real, other=0.0).to(tl.float32)
        return total + tl.exp2(sink * LOG2_E - top)
    else:
        return total
