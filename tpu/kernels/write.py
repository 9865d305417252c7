"""The op `write_kv` by a Pallas kernel: `pallas` on a TPU, `pallas_interpret` the same source
interpreted.

It writes rows into slots of the paged cache, in place: copies from HBM to HBM and no other work.

Tokens of a prompt lie in slots that follow each other: `RUN` of them are one copy. Slots are whole
words, so that no neighbour is read or written.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ...ops.declare import Array
from ...ops.implement import Refusal, implement
from ...ops.namespaces import namespace
from ...ops.reference.quantization import stored
from .cache import slot_dims
from .target import answer, on_tpu, refused_scalars, refused_size, refused_words

RUN = 16
BLOCK = 256
"""Tokens whose copies are under way at a time."""


def write_rows(
    kv: jax.Array, rows: jax.Array, slots: jax.Array, *, words: int, interpret: Any
) -> jax.Array:
    """kv [slot*word row lane] with rows [tok*word row lane] at slots [tok] (-1: nowhere), in the
    buffer of kv.

    The first axis is in no tile, so that a slot of any number of words can be addressed alone.
    """
    tokens = slots.shape[0]
    run, block = min(RUN, tokens, kv.shape[0] // words), min(BLOCK, tokens)
    hbm = pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(
        partial(_kernel, tokens=tokens, words=words, run=run, block=block),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(-(-tokens // block),),
            in_specs=[hbm, hbm],
            out_specs=hbm,
            scratch_shapes=[pltpu.SemaphoreType.DMA],
        ),
        out_shape=jax.ShapeDtypeStruct(kv.shape, kv.dtype),
        input_output_aliases={2: 0},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        cost_estimate=pl.CostEstimate(
            flops=0,
            bytes_accessed=2 * rows.size * rows.dtype.itemsize + slots.size * 4,
            transcendentals=0,
        ),
        interpret=interpret,
        name="write_kv",
    )(slots, rows, kv)


def _kernel(
    slots: Any, rows: Any, _: Any, kv: Any, sem: Any, *, tokens: int, words: int, run: int,
    block: int
) -> None:  # fmt: skip
    begin = pl.program_id(0) * block
    end = jnp.minimum(begin + block, tokens)

    def copy(token: Any, slot: Any, count: int) -> Any:
        source = rows.at[pl.ds(token * words, count * words)]
        return pltpu.make_async_copy(source, kv.at[pl.ds(slot * words, count * words)], sem)

    def follow(token: Any) -> Any:
        """How many tokens from this one on lie in slots that follow each other, at most `run`."""
        first = slots[token]

        def more(n: Any) -> Any:
            return (
                (n < run)
                & (token + n < end)
                & (slots[jnp.minimum(token + n, end - 1)] == first + n)
            )

        return lax.while_loop(more, lambda n: n + 1, jnp.int32(1))

    def start(state: Any) -> Any:
        token, runs, singles = state
        slot = slots[token]
        count = jnp.where(slot < 0, 1, follow(token))
        alone = jnp.where((slot < 0) | (count == run), 0, count)

        @pl.when((slot >= 0) & (count == run))
        def _() -> None:
            copy(token, slot, run).start()

        lax.fori_loop(0, alone, lambda n, _: copy(token + n, slot + n, 1).start(), None)
        whole = ((slot >= 0) & (count == run)).astype(jnp.int32)
        return token + count, runs + whole, singles + alone

    zero = jnp.int32(0)
    _, runs, singles = lax.while_loop(lambda state: state[0] < end, start, (begin, zero, zero))
    # What is waited for is a number of bytes: any copy of the size stands for another.
    lax.fori_loop(0, runs, lambda _, __: copy(0, 0, run).wait(), None)
    lax.fori_loop(0, singles, lambda _, __: copy(0, 0, 1).wait(), None)


def write(
    kv: jax.Array,
    k: jax.Array,
    v: jax.Array,
    slots: jax.Array,
    k_scale: jax.Array | None,
    v_scale: jax.Array | None,
    interpret: Any,
) -> jax.Array:
    """The op; `interpret` as pallas_call takes it."""
    xp, (pages, page, heads, hdim) = namespace("jax"), kv.shape
    words, *tile = slot_dims(heads // 2, hdim, kv.dtype)
    rows = jnp.stack([stored(xp, k, kv, k_scale), stored(xp, v, kv, v_scale)], axis=2)
    rows, flat = rows.reshape(-1, *tile), kv.reshape(pages * page * words, *tile)
    out = write_rows(flat, rows, slots, words=words, interpret=interpret)
    return out.reshape(kv.shape)


def takes(
    kv: Array,
    k: Array,
    v: Array,
    slots: Array,
    k_scale: Array | None = None,
    v_scale: Array | None = None,
) -> bool | Refusal:
    """What the kernel takes where it is interpreted."""
    return answer(
        refused_scalars("the list of slots", "a smaller max_num_batched_tokens", *slots.shape)
    )


def compiles(
    kv: Array,
    k: Array,
    v: Array,
    slots: Array,
    k_scale: Array | None = None,
    v_scale: Array | None = None,
) -> bool | Refusal:
    """What the kernel takes on a TPU."""
    return answer(
        refused_size(kv), refused_words(kv, 1, "a slot"), takes(kv, k, v, slots, k_scale, v_scale)
    )


@implement(
    "write_kv", provider="pallas", framework="jax", supported=on_tpu, supports_args=compiles,
    preferred_on=("tpu",), required_on=("tpu",),
)  # fmt: skip
def write_kv(
    kv: Array,
    k: Array,
    v: Array,
    slots: Array,
    k_scale: Array | None = None,
    v_scale: Array | None = None,
) -> Array:
    """See the op."""
    return write(kv, k, v, slots, k_scale, v_scale, False)


@implement("write_kv", provider="pallas_interpret", framework="jax", supports_args=takes)
def interpreted_write(
    kv: Array,
    k: Array,
    v: Array,
    slots: Array,
    k_scale: Array | None = None,
    v_scale: Array | None = None,
) -> Array:
    """See the op."""
    return write(kv, k, v, slots, k_scale, v_scale, True)
