"""The op `write_kv` by a Pallas kernel: `pallas` on a TPU, `pallas_interpret` the same source
interpreted.

It writes rows into slots of the paged cache, in place: copies to HBM and no other work.

Tokens of a prompt lie in slots that follow each other: `RUN` of them are one copy. All else, as the
tokens of a decode step, are copies of one token each. What takes time is to start them: whether a
token may begin a run is seen by two slots, so that a decode step does next to nothing else.

Slots are whole words, so that no neighbour is read or written.
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
    """kv [slot*word row lane] with rows [tok*word row lane], or the words that hold them
    [tok*word 1 lane] uint32, at slots [tok] (-1: nowhere), in the buffer of kv.

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


def is_written(slot: Any) -> Any:
    """Whether a token with this slot is written."""
    return slot >= 0


def is_run(slots: Any, token: Any, run: int) -> Any:
    """Whether `run` tokens from this one on are written to slots that follow each other."""
    first = slots[token]
    found = is_written(first)
    for n in range(1, run):
        found = found & (slots[token + n] == first + n)
    return found


def _kernel(
    slots: Any, rows: Any, _: Any, kv: Any, sem: Any, *, tokens: int, words: int, run: int,
    block: int
) -> None:  # fmt: skip
    """slots [tok], rows [tok*word row lane], kv [slot*word row lane]; rows may be words."""
    if rows.dtype != kv.dtype:
        kv = kv.bitcast(jnp.uint32)
    begin = pl.program_id(0) * block
    end = jnp.minimum(begin + block, tokens)

    def start(token: Any, slot: Any, count: int) -> None:
        source = rows.at[pl.ds(token * words, count * words)]
        target = kv.at[pl.ds(slot * words, count * words)]
        pltpu.make_async_copy(source, target, sem).start()

    def may_begin(token: Any) -> Any:
        """Whether the first and the last of `run` tokens lie as far apart as in a run."""
        first = jnp.minimum(token, tokens - run)  # whichever is compared, it is in `slots`
        return (slots[first + run - 1] - slots[first] == run - 1) & (token + run <= end)

    def start_one(state: Any) -> Any:
        _, token, started = state
        slot = slots[token]
        written = is_written(slot)
        pl.when(written)(lambda: start(token, slot, 1))
        following = token + 1
        single = (following < end) & ~may_begin(following)
        return single, following, started + written.astype(jnp.int32)

    def start_some(state: Any) -> Any:
        """Start a run if one begins here; then, or else, single tokens up to where one may."""
        token, started = state
        # A loop of one pass or none: of a conditional, the compiler has both sides computed.
        whole = lax.fori_loop(
            0,
            may_begin(token).astype(jnp.int32),
            lambda _, __: is_run(slots, token, run).astype(jnp.int32),
            jnp.int32(0),
        )
        pl.when(whole == 1)(lambda: start(token, slots[token], run))
        behind = whole == 0, token + whole * run, started + whole * run
        _, token, started = lax.while_loop(lambda state: state[0], start_one, behind)
        return token, started

    _, started = lax.while_loop(lambda state: state[0] < end, start_some, (begin, jnp.int32(0)))
    # A semaphore counts bytes: as many tokens as were started, in powers of two of them.
    for bit in range(block.bit_length()):

        @pl.when(started & (1 << bit) != 0)
        def _(count: int = 1 << bit) -> None:
            some = rows.at[pl.ds(0, count * words)]
            pltpu.make_async_copy(some, some, sem).wait()


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
    k, v = stored(xp, k, kv, k_scale), stored(xp, v, kv, v_scale)
    flat = kv.reshape(pages * page * words, *tile)
    if kv.dtype.itemsize == 2 and tile == [2, hdim]:
        rows = k_and_v_in_words(k, v)
        if interpret is not False:  # interpreters cannot write to a cache that is seen as words
            rows = rows_of_words(rows, kv.dtype)
    else:
        rows = jnp.stack([k, v], axis=2).reshape(-1, *tile)
    out = write_rows(flat, rows, slots, words=words, interpret=interpret)
    return out.reshape(kv.shape)


def k_and_v_in_words(k: jax.Array, v: jax.Array) -> jax.Array:
    """k and v [tok head lane] of 16 bits as words [tok*head 1 lane] uint32, K in the lower half:
    what a TPU's memory holds of rows [tok*head 2 lane].

    XLA would bring rows of K and V together one by one, which takes it longer than all else between
    a layer's products.
    """
    low, high = (lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32) for x in (k, v))
    # Else XLA computes the rotated halves of K in the shape of the result, which is slow too.
    words = lax.optimization_barrier(low | high << 16)
    return words.reshape(-1, 1, k.shape[2])


def rows_of_words(words: jax.Array, dtype: Any) -> jax.Array:
    """words [n 1 lane] uint32 as the rows [n 2 lane] of 16 bits that they hold."""
    return jnp.moveaxis(lax.bitcast_convert_type(words[:, 0], dtype), 2, 1)


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
