"""The op `grouped_matmul` by a Pallas kernel: `pallas` on a TPU, `pallas_interpret` the same source
interpreted.

Rows are sorted by expert. The work is a list of (block of rows, expert that has rows in it), found
on the device and taken in order for each block of columns. An expert without rows is in no item, so
that its weights are not read; one whose rows fill several blocks stays in vector memory from one to
the next. Rows of a block that belong to other experts are multiplied too and not kept.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ...ops.declare import Array
from ...ops.implement import Refusal, implement
from ...ops.namespaces.jax_ import in_stack
from .cache import LANES
from .softmax import dot
from .target import answer, on_tpu, refused_memory, refused_scalars, target_kind
from .tiles import SPARE, columns_at_once, in_memory, lanes_of

ROWS = 128
"""Rows of a block. A matrix unit multiplies as many in about the time in which their weights come,
and experts with fewer rows share it.
"""
DTYPES = (jnp.float32, jnp.bfloat16)
HALF = LANES // 2
"""Rows of weights are multiples of it. Those that are no whole registers lie in rows all the same
(`sharding.as_read`), with padding behind each.
"""


class Items(NamedTuple):
    """The work, in order; behind the last item, that one again.

    expert, block [item]; begins, ends [expert]: its rows; count [1]: how many items there are.
    """

    expert: jax.Array
    block: jax.Array
    begins: jax.Array
    ends: jax.Array
    count: jax.Array


def items_of(group_sizes: jax.Array, rows: int, size: int) -> Items:
    """The work of `rows` rows in blocks of `size`, of which experts have `group_sizes` [expert]."""
    experts = group_sizes.shape[0]
    most = -(-rows // size) + min(experts, rows) - 1
    ends = jnp.cumsum(group_sizes, dtype=jnp.int32)
    begins = ends - group_sizes
    first = begins // size
    blocks = jnp.where(group_sizes > 0, (ends - 1) // size - first + 1, 0)
    behind = jnp.cumsum(blocks, dtype=jnp.int32)
    count = behind[-1:]
    item = jnp.minimum(jnp.arange(most, dtype=jnp.int32), jnp.maximum(count - 1, 0))
    expert = jnp.sum((item[:, None] >= behind[None, :]).astype(jnp.int32), axis=1)
    expert = jnp.minimum(expert, experts - 1)  # where no expert has a row
    block = first[expert] + item - (behind - blocks)[expert]
    return Items(expert, jnp.clip(block, 0, -(-rows // size) - 1), begins, ends, count)


def multiply(
    x: jax.Array, weight: jax.Array, layer: jax.Array | int, group_sizes: jax.Array, *,
    vmem: int | None, interpret: Any, size: int = ROWS, bias: jax.Array | None = None,
) -> jax.Array:  # fmt: skip
    """x [choice k] times weight[layer, e] [n k] transposed, plus bias [expert n] if there is one,
    e the row's expert: [choice n].

    weight [layer expert n k]: of one layer, or those of a stack, which is not taken apart.
    """
    rows, k = x.shape
    experts, n = weight.shape[1:3]
    size, columns = min(size, rows), columns_at_once(n, lanes_of(k) * weight.dtype.itemsize)
    items = items_of(group_sizes, rows, size)
    scalars = [jnp.asarray(layer, jnp.int32).reshape(1), *items]
    bytes_each = jnp.dtype(x.dtype).itemsize
    biases = [] if bias is None else [bias[:, None, :]]
    of_expert = pl.BlockSpec((None, 1, columns), lambda j, i, layer, expert, *_: (expert[i], 0, j))
    out = pl.pallas_call(
        _kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(-(-n // columns), len(items.expert)),
            in_specs=[
                pl.BlockSpec((size, k), lambda j, i, layer, expert, block, *_: (block[i], 0)),
                pl.BlockSpec(
                    (None, None, columns, k),
                    lambda j, i, layer, expert, *_: (layer[0], expert[i], j, 0),
                ),
                *[of_expert] * len(biases),
            ],
            out_specs=pl.BlockSpec(
                (size, columns), lambda j, i, layer, expert, block, *_: (block[i], j)
            ),
        ),
        out_shape=jax.ShapeDtypeStruct((rows, n), x.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=vmem
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * rows * n * k,
            bytes_accessed=bytes_each * (min(experts, rows) * n * k + rows * (n + k)),
            transcendentals=0,
        ),
        interpret=interpret,
        name="grouped_matmul" if bias is None else "grouped_linear",
    )(*scalars, x, in_memory(weight, interpret), *biases)
    return of_experts(out, items)


def of_experts(out: jax.Array, items: Items) -> jax.Array:
    """Results [choice n], with zeros in rows of no expert: they are in no item, or in one that does
    not keep them.
    """
    mine = jnp.arange(len(out), dtype=jnp.int32) < items.ends[-1]
    return jnp.where(mine[:, None], out, jnp.zeros((), out.dtype))


def _kernel(
    layer: Any, expert: Any, block: Any, begins: Any, ends: Any, count: Any, x: Any, weight: Any,
    *rest: Any,
) -> None:  # fmt: skip
    *bias, out = rest
    item = pl.program_id(1)

    @pl.when(item < count[0])
    def _() -> None:
        found, own = dot(x[...], weight[...], (1, 1)), expert[item]
        put_own(found, bias, out, block[item], begins[own], ends[own])


def put_own(y: jax.Array, bias: Any, out: Any, block: Any, begin: Any, end: Any) -> None:
    """Put the rows [begin, end) of y [row column], the sums of a block, plus bias [[1 column]] if
    there is one, into `out`; the others stay.
    """
    if bias:
        y = y + bias[0][...].astype(jnp.float32)
    row = block * y.shape[0] + lax.broadcasted_iota(jnp.int32, y.shape, 0)
    out[...] = jnp.where((row >= begin) & (row < end), y.astype(out.dtype), out[...])


def vmem_need(x: Any, weight: Any) -> dict[str, int]:
    """Bytes of vector memory: each block twice, as the next one comes meanwhile."""
    (rows, k), n = x.shape, weight.shape[1]
    size, columns = min(ROWS, rows), columns_at_once(n, lanes_of(k) * weight.dtype.itemsize)
    bytes_each = jnp.dtype(x.dtype).itemsize
    return {
        "two blocks of a weight": 2 * columns * lanes_of(k) * bytes_each,
        "rows and results": 2 * size * (lanes_of(k) + lanes_of(columns)) * bytes_each,
        "products": 2 * size * lanes_of(columns) * 4,
    }


def takes(x: Array, weight: Array, group_sizes: Array) -> bool | Refusal:
    """What the kernel takes where it is interpreted."""
    if x.dtype not in DTYPES or weight.dtype != x.dtype:
        return Refusal(f"rows are {x.dtype}, weights {weight.dtype}: both float32 or both bfloat16")
    rows, experts = x.shape[0], weight.shape[0]
    items = 2 * (-(-rows // ROWS) + min(experts, rows)) + 2 * experts
    return answer(refused_scalars("the list of work", "a smaller max_num_batched_tokens", items))


def compiles(x: Array, weight: Array, group_sizes: Array) -> bool | Refusal:
    """What the kernel takes on a TPU."""
    need, k = vmem_need(x, weight), x.shape[1]
    if k % HALF:
        return Refusal(
            f"weights have rows of {k} entries: multiples of {HALF} are taken, which is what was "
            "compiled"
        )
    return answer(refused_memory(target_kind(), need), takes(x, weight, group_sizes))


def run(
    x: jax.Array, weight: Any, group_sizes: jax.Array, interpret: Any, bias: Any = None
) -> jax.Array:
    """The product by experts, whose weights may be an `InStack`, plus bias [expert n]."""
    stack, layer = in_stack(weight)
    need = None if interpret else sum(vmem_need(x, weight).values()) + SPARE
    return multiply(x, stack, layer, group_sizes, vmem=need, interpret=interpret, bias=bias)


@implement(
    "grouped_matmul", provider="pallas", framework="jax", supported=on_tpu, supports_args=compiles,
    preferred_on=("tpu",), stacked=True,
)  # fmt: skip
def grouped_matmul(x: Array, weight: Array, group_sizes: Array) -> Array:
    """See the op."""
    return run(x, weight, group_sizes, False)


@implement(
    "grouped_matmul", provider="pallas_interpret", framework="jax", supports_args=takes,
    stacked=True,
)  # fmt: skip
def interpreted_matmul(x: Array, weight: Array, group_sizes: Array) -> Array:
    """See the op."""
    return run(x, weight, group_sizes, True)
