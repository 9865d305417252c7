"""The JAX namespace."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

# Named per dtype: a framework default would be bfloat16 passes for float32 on TPU and TF32 on GPU.
ALGORITHMS = {
    "bfloat16": jax.lax.DotAlgorithmPreset.BF16_BF16_F32,
    "float16": jax.lax.DotAlgorithmPreset.F16_F16_F32,
    "float32": jax.lax.DotAlgorithmPreset.F32_F32_F32,
    "float32 on a TPU": jax.lax.DotAlgorithmPreset.BF16_BF16_F32_X6,
    "float64": jax.lax.DotAlgorithmPreset.F64_F64_F64,
}


def with_float32_sums(product: Callable[..., jax.Array], x: jax.Array, w: jax.Array) -> jax.Array:
    """`product(x, w, precision=, preferred_element_type=)` by the algorithm that the contract
    names.

    TPUs multiply bfloat16 alone: products of float32 are six of parts of theirs, which leaves out
    less than the sums round. Only NVIDIA GPUs have products of float16 with float32 sums.
    Elsewhere both sides are widened, which is exact: a product of two float16 numbers is a float32
    number.
    """

    def by(algorithm: str, inputs: Any, sums: Any) -> Callable[..., jax.Array]:
        def run(x: jax.Array, w: jax.Array) -> jax.Array:
            x, w = x.astype(inputs), w.astype(inputs)
            return product(x, w, precision=ALGORITHMS[algorithm], preferred_element_type=sums)

        return run

    if x.dtype not in (jnp.float16, jnp.float32):
        sums = jnp.float64 if x.dtype == jnp.float64 else jnp.float32
        return by(x.dtype.name, x.dtype, sums)(x, w)
    wide, six = (by(name, jnp.float32, jnp.float32) for name in ("float32", "float32 on a TPU"))
    on_gpus = {"cuda": by("float16", jnp.float16, jnp.float32)} if x.dtype == jnp.float16 else {}
    return jax.lax.platform_dependent(x, w, **on_gpus, tpu=six, default=wide)


class OneOf(NamedTuple):
    """One matrix of several of the same shape, known by its index on the device, for `linear`.

    A loop over layers that takes a slice of stacked weights copies it, which on a CPU takes longer
    than the product. Here each matrix has a branch of its own that reads it where it lies.
    """

    matrices: tuple[jax.Array, ...]
    index: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class InStack:
    """One array of a stack [n, ...] of them, known by its index on the device.

    A loop over layers that hands a slice of stacked weights to a kernel copies it first. A kernel
    that is `stacked` reads it where it lies. `dealt`: the dimension of the one array that the
    shards of a mesh deal out, None if each has all of it.
    """

    stack: jax.Array
    index: jax.Array
    dealt: int | None = field(default=None, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the one array."""
        return self.stack.shape[1:]

    @property
    def ndim(self) -> int:
        """Of the one array."""
        return self.stack.ndim - 1

    @property
    def dtype(self) -> Any:
        """Of all."""
        return self.stack.dtype

    def reshape(self, *shape: int) -> InStack:
        """With all arrays reshaped."""
        return replace(self, stack=self.stack.reshape(self.stack.shape[0], *shape))

    def taken(self) -> jax.Array:
        """The array itself."""
        found: jax.Array = jax.lax.dynamic_index_in_dim(self.stack, self.index, 0, keepdims=False)
        return found


def in_stack(x: jax.Array | InStack) -> tuple[jax.Array, jax.Array | int]:
    """(stack, index) of an array, which may be alone."""
    return (x.stack, x.index) if isinstance(x, InStack) else (x[None], 0)


def taken(x: Any) -> Any:
    """An argument that may be one of a stack, by itself."""
    return x.taken() if isinstance(x, InStack) else x


def _product(x: jax.Array, w: jax.Array | OneOf) -> jax.Array:
    """x [..., k] by w [n, k] with the sums that the contract names."""
    if isinstance(w, OneOf):
        branches = [partial(_product, w=matrix) for matrix in w.matrices]
        return jax.lax.switch(w.index, branches, x)
    dims = (((x.ndim - 1,), (1,)), ((), ()))
    return with_float32_sums(partial(jax.lax.dot_general, dimension_numbers=dims), x, w)


def _product_of_two_rows(x: jax.Array, w: jax.Array | OneOf) -> jax.Array:
    """`_product` of a single row, with a row of zeros below it."""
    return _product(jnp.pad(x, ((0, 1), (0, 0))), w)[:1]


class JaxNamespace:
    """Array API functions of jax.numpy and the extra words of this package."""

    name = "jax"

    def __getattr__(self, name: str) -> Any:
        return getattr(jnp, name)

    @staticmethod
    def accumulate(x: jax.Array) -> jax.Array:
        """x in its accumulation dtype, as it was rounded: XLA drops roundings between ops if
        nothing forbids it.
        """
        if x.dtype in (jnp.bfloat16, jnp.float16):
            kind = jnp.finfo(x.dtype)
            x = jax.lax.reduce_precision(x, exponent_bits=kind.nexp, mantissa_bits=kind.nmant)
        return x if x.dtype == jnp.float64 else x.astype(jnp.float32)

    @staticmethod
    def linear_accumulated(x: jax.Array, w: jax.Array | OneOf) -> jax.Array:
        """x [..., k] by w [n, k] in the accumulation dtype."""
        if x.dtype != jnp.bfloat16 or x.shape[:-1] != (1,):
            return _product(x, w)
        # For a single row XLA's CPU compiler widens the whole matrix to float32 first, which takes
        # five times as long.
        return jax.lax.platform_dependent(x, w, cpu=_product_of_two_rows, default=_product)

    def linear(self, x: jax.Array, w: jax.Array, bias: jax.Array | None) -> jax.Array:
        """x [..., k] by w [n, k] plus bias, rounded once."""
        y = self.linear_accumulated(x, w)
        if bias is not None:
            y = y + self.accumulate(bias)[None, :]
        return y.astype(x.dtype)

    @staticmethod
    def head_linear(x: jax.Array, w: jax.Array) -> jax.Array:
        """x [tok head k] by w [head n k], rounded once: [tok head n]."""
        product = partial(with_float32_sums, partial(jnp.einsum, "thk,hnk->thn"))

        def widened(x: jax.Array, w: jax.Array) -> jax.Array:
            return product(x.astype(jnp.float32), w.astype(jnp.float32))

        # XLA's CPU runtime has no product by head of bfloat16 with sums of float32.
        return jax.lax.platform_dependent(x, w, cpu=widened, default=product).astype(x.dtype)

    @staticmethod
    def rsqrt(x: jax.Array) -> jax.Array:
        """1 / sqrt(x)."""
        return jax.lax.rsqrt(x)

    @staticmethod
    def to_int(x: jax.Array) -> jax.Array:
        """The nearest int32, ties to even."""
        return jnp.rint(x).astype(jnp.int32)

    @staticmethod
    def count_tokens(ids: jax.Array, size: int) -> jax.Array:
        """How often each id occurs in each row."""
        rows = jnp.arange(ids.shape[0], dtype=jnp.int32)[:, None]
        counts = jnp.zeros((ids.shape[0], size), jnp.int32)
        return counts.at[rows, jnp.where(ids < 0, size, ids)].add(1, mode="drop")

    @staticmethod
    def add_at(x: jax.Array, ids: jax.Array, values: jax.Array) -> jax.Array:
        """x plus values at ids of each row."""
        rows = jnp.arange(ids.shape[0], dtype=jnp.int32)[:, None]
        return x.at[rows, jnp.where(ids < 0, x.shape[1], ids)].add(values, mode="drop")

    @staticmethod
    def top(x: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
        """The k largest and their indices, ties by the lower index."""
        # top_k puts 0.0 before -0.0; as numbers they are a tie.
        values, ids = jax.lax.top_k(jnp.where(x == 0, jnp.zeros((), x.dtype), x), k)
        return values, ids.astype(jnp.int32)

    @staticmethod
    def erf(x: jax.Array) -> jax.Array:
        """The error function."""
        return jax.lax.erf(x)

    @staticmethod
    def linear_int32(x: jax.Array, w: jax.Array) -> jax.Array:
        """x [tok k] int8 by w [n k] int8, exact."""
        return jax.lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.int32)

    @staticmethod
    def float_dtype(name: str) -> Any:
        """The dtype of that name."""
        return jnp.dtype(name)

    @staticmethod
    def bits(x: jax.Array) -> jax.Array:
        """float32 as int32 of the same bits."""
        return jax.lax.bitcast_convert_type(x, jnp.int32)

    @staticmethod
    def from_bits(x: jax.Array) -> jax.Array:
        """int32 as float32 of the same bits."""
        return jax.lax.bitcast_convert_type(x, jnp.float32)

    @staticmethod
    def loop(start: int, stop: int, body: Any, state: Any) -> Any:
        """state after state = body(i, state) for each i; one body in the program."""
        return jax.lax.fori_loop(start, stop, body, state)
