"""What one shard of a tensor-parallel layer computes, and the sum over shards. What is gathered
belongs to the backend.

The shard's place is a static int. Column-parallel and replicated projections are `linear` under
another name: they are declared as compositions of it, so that they exist in plans and recordings
but can never drift from it. A row-parallel projection gives a partial sum, rounded once like every
`linear`; the backend's reduction over s shards may round s - 1 times more.
"""

from __future__ import annotations

from typing import Any

from ..declare import DOT, Array, Contract, define
from .dense import FUSED_ADD, along
from .quantization import BITWISE, largest_of_rows, scale_of

PARTIAL = Contract(
    rounds="once a shard: the partial sum to the storage dtype, before the backend's reduction",
    dot=DOT,
)
LOCAL = Contract(dot=DOT)


@define(
    shapes="ids [tok], table_shard [shard dim] -> [tok dim] table_shard",
    contract=Contract(
        rounds="nowhere: the sum over shards is exact, since all but one are 0",
        accumulate="none",
        masked="ids outside the shard (padding and -1 too) give 0 and read nothing into the result",
        nan="copied",
    ),
)
def vocab_parallel_embedding(xp: Any, ids: Array, table_shard: Array, start: int) -> Array:
    """Rows of the words [start, start + shard) and 0 for other ids: ids [tok] int32, table
    [shard dim] -> [tok dim].
    """
    inside = (ids >= start) & (ids < start + table_shard.shape[0])
    rows = xp.take(table_shard, xp.where(inside, ids - start, 0), axis=0)
    return xp.where(inside[:, None], rows, xp.zeros_like(rows))


@define(
    shapes="x [tok dim] -> [tok dim] x",
    shards=(),
    activations=("x",),
    native="per framework",
    contract=Contract(
        rounds="once, at the output; a library's sum may round once a shard",
        accumulate="float32, in the order of the ranks; the same bits on all of them",
        nan="copied",
    ),
)
def all_reduce(xp: Any, x: Array) -> Array:
    """The sum of x [tok dim] over the shards of a layer: here, of one shard."""
    return x


@define(
    shapes="x [tok k] -> [tok 1] float32",
    shards=(),
    native="per framework",
    contract=BITWISE,
)
def token_scales(xp: Any, x: Array, limit: float) -> Array:
    """The scale [tok 1] float32 of each token, by which its largest entry becomes `limit`, where
    shards have parts x [tok k] of tokens: here, of one shard. As `quantize_int8_dynamic` has it for
    whole tokens with `limit` 127, and `quantize_fp8_dynamic` with 448.
    """
    return scale_of(xp, largest_of_rows(xp, x), limit)


@define(
    shapes="qkv [tok q+2*kv], q_weight [q], k_weight [kv] -> [tok 2] float32",
    shards=("q", "kv"),
    contract=Contract(rounds="nowhere"),
    sums=True,
)
def qk_mean_squares(
    xp: Any, qkv: Array, q_weight: Array, k_weight: Array, q_entries: int, k_entries: int
) -> Array:
    """The part that this shard's entries are of the mean squares [tok 2] of all q and of all k,
    which have so many entries on all shards together: a head that several shards hold counts for
    each, one of zeros for none.

    qkv [tok q+2*kv] and the weights [q] and [kv] are as in `wide_qk_norm`, of one shard.
    """
    y = xp.accumulate(qkv)
    q, kv = q_weight.shape[0], k_weight.shape[0]
    squares = y * y
    query = xp.sum(squares[:, :q], axis=-1, keepdims=True) / q_entries
    key = xp.sum(squares[:, q : q + kv], axis=-1, keepdims=True) / k_entries
    return xp.concat([query, key], axis=-1)


@define(
    shapes="qkv [tok q+2*kv], means [tok 2], q_weight [q], k_weight [kv] -> [tok q+2*kv] qkv",
    shards=("q", "kv"),
    activations=("qkv",),
    contract=Contract(rounds="q and k once, at the output; v is copied"),
)
def norm_qk_by_means(
    xp: Any, qkv: Array, means: Array, q_weight: Array, k_weight: Array, eps: float
) -> Array:
    """`wide_qk_norm` of a shard's part of qkv [tok q+2*kv], where the mean squares of q and of k on
    all shards are given: means [tok 2] float32.
    """
    y = xp.accumulate(qkv)
    q, kv = q_weight.shape[0], k_weight.shape[0]
    scales = xp.rsqrt(xp.accumulate(means) + eps)
    query = y[:, :q] * scales[:, :1] * along(xp.accumulate(q_weight), y)
    key = y[:, q : q + kv] * scales[:, 1:] * along(xp.accumulate(k_weight), y)
    return xp.astype(xp.concat([query, key, y[:, q + kv :]], axis=-1), qkv.dtype)


@define(
    shapes="x [tok dim], residual [tok dim], weight [dim] -> [tok dim] x, [tok dim] x",
    shards=(),
    level="coarse",
    activations=("x", "residual"),
    composition=("all_reduce", "fused_add_rms_norm"),
    contract=FUSED_ADD,
)
def reduce_add_rms_norm(
    ops: Any, x: Array, residual: Array, weight: Array, eps: float
) -> tuple[Array, Array]:
    """(rms_norm(s), s) with s = residual + the sum of x [tok dim] over the shards, where
    row-parallel products give parts of sums.
    """
    both: tuple[Array, Array] = ops.fused_add_rms_norm(ops.all_reduce(x), residual, weight, eps)
    return both


@define(
    shapes="x [tok k], weight_shard [n k], bias_shard [n] -> [tok n] x",
    level="coarse",
    composition=("linear",),
    contract=LOCAL,
)
def column_linear(ops: Any, x: Array, weight_shard: Array, bias_shard: Array | None) -> Array:
    """This shard's columns of a projection: x [tok k], weight [n/shards k], bias [n/shards] or
    None: `linear`.
    """
    return ops.linear(x, weight_shard, bias_shard)


@define(
    shapes="x_shard [tok k], weight_shard [n k], bias [n] -> [tok n] x_shard",
    level="coarse",
    composition=("linear",),
    contract=PARTIAL,
)
def row_linear(
    ops: Any, x_shard: Array, weight_shard: Array, bias: Array | None, shard: int
) -> Array:
    """This shard's part of a sum over k: x [tok k/shards], weight [n k/shards] -> [tok n].

    bias [n] (or None) is the whole layer's; shard 0 alone adds it, so that the reduction counts it
    once.
    """
    return ops.linear(x_shard, weight_shard, bias if shard == 0 else None)


@define(
    shapes="x [tok k], weight [n k], bias [n] -> [tok n] x",
    level="coarse",
    composition=("linear",),
    contract=LOCAL,
)
def replicated_linear(ops: Any, x: Array, weight: Array, bias: Array | None) -> Array:
    """The same projection on every shard: `linear`."""
    return ops.linear(x, weight, bias)


@define(
    shapes="logits [row vocab] -> [row vocab] logits",
    shards=(),
    activations=("logits",),
    contract=Contract(rounds="once, at the output (float32 logits: nowhere else)"),
)
def logits_processor(xp: Any, logits: Array, scale: float, soft_cap: float) -> Array:
    """scale * c tanh(logits / c) with c = `soft_cap`, or scale * logits if it is 0: [row vocab].

    The cap comes first (Gemma 2); the scale after it (Cohere, Granite), as in vLLM's
    LogitsProcessor.
    """
    y = xp.accumulate(logits)
    if soft_cap > 0:
        y = soft_cap * xp.tanh(y / soft_cap)
    return xp.astype(y * scale, logits.dtype)
