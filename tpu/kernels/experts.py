"""The op `grouped_linear` by Pallas kernels: `pallas` on a TPU, `pallas_interpret` the same source
interpreted.

Plain weights with biases are those of `grouped`. Narrow ones take its list of work, and of each
block what `narrow` makes of it: they stay in 8 or 4 bits until they are in vector memory.

Scales and zeros lie with the weight's rows along lanes (`sharding.as_read`), those of all experts
of a layer behind each other, and are read there. Where an expert begins in the middle of a
register, as every other one of 2880 rows does, that is brought too; where it begins elsewhere, a
layer's are taken out and turned first.
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
from ...ops.namespaces.jax_ import in_stack, taken
from . import grouped, narrow
from .cache import LANES
from .grouped import HALF
from .target import answer, on_tpu, refused_memory, refused_scalars, target_kind
from .tiles import SPARE, in_memory


def rows_at_once(rows: int, experts: int, dtype: Any) -> int:
    """Rows of a block: twice what an expert has on average, as rows are multiplied once for each
    group of a span.
    """
    tile = 32 // jnp.dtype(dtype).itemsize
    each = -(-2 * rows // experts // tile) * tile
    return min(max(each, tile), grouped.ROWS, -(-rows // tile) * tile)


def columns_of(n: int) -> int:
    """Columns of a block: all, or whole registers, which divide n if any do."""
    if n <= LANES:
        return n
    found = range(LANES, min(narrow.COLUMNS, n) + 1, LANES)
    return max([c for c in found if n % c == 0] or [found[-1]])


def multiply(
    x: jax.Array, weight: jax.Array, layer: jax.Array | int, scale: jax.Array,
    zero: jax.Array | None, bias: jax.Array | None, group_sizes: jax.Array, kind: str, *,
    vmem: int | None, interpret: Any, size: int | None = None,
) -> jax.Array:  # fmt: skip
    """The op, with weight[layer] of a stack [layer expert n lanes], scale and zero [layer expert n
    t] of stacks too, bias [expert n]; blocks of `size` rows.
    """
    (rows, k), (experts, n, lanes) = x.shape, weight.shape[1:]
    cut, halves = narrow.cut_of(lanes, scale.shape[3]), k // lanes
    size, columns = size or rows_at_once(rows, experts, x.dtype), columns_of(n)
    padded = jnp.pad(x, ((0, -rows % size), (0, 0)))
    by_half = padded.reshape(-1, lanes, halves).transpose(2, 0, 1)
    items = grouped.items_of(group_sizes, len(padded), size)
    scalars = [jnp.asarray(layer, jnp.int32).reshape(1), *items]
    groups = scale.shape[3]
    arrays, specs = [by_half, in_memory(weight, interpret)], _of_weight(cut, halves, size, columns)
    for values in (scale, zero):
        if values is not None:
            array, spec = _of_groups(values, layer, columns)
            arrays.append(in_memory(array, interpret))
            specs.append(spec)
    if bias is not None:
        arrays.append(bias[:, None, :])
        specs.append(pl.BlockSpec((None, 1, columns), lambda j, i, s, at, e, *_: (e[i], 0, j)))
    out = pl.pallas_call(
        partial(_kernel, kind=kind, cut=cut, n=n, zeros=zero is not None),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(-(-n // columns), len(items.expert), lanes // cut.step),
            in_specs=specs,
            out_specs=pl.BlockSpec(
                (size, columns), lambda j, i, s, at, e, block, *_: (block[i], j)
            ),
            scratch_shapes=[
                pltpu.VMEM((size, columns), jnp.float32),
                *[pltpu.VMEM((groups, columns), jnp.float32)] * (1 + (zero is not None)),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((len(padded), n), x.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"), vmem_limit_bytes=vmem
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * rows * n * k,
            bytes_accessed=min(experts, rows)
            * n
            * (lanes + (scale.dtype.itemsize + (zero is not None)) * groups)
            + rows * (n + k) * x.dtype.itemsize,
            transcendentals=0,
        ),
        interpret=interpret,
        name="grouped_linear",
    )(*scalars, *arrays)
    return grouped.of_experts(out[:rows], items)


def _of_weight(cut: narrow.Cut, halves: int, size: int, columns: int) -> list[pl.BlockSpec]:
    """Which block of x and of the weight a step of the grid (columns, item, step) sees."""
    last = cut.lanes // cut.step - 1

    def step(i: Any, s: Any, count: Any) -> Any:
        # What is no work brings nothing new.
        return jnp.where(i < count[0], s, last) if last else 0

    def of_x(j: Any, i: Any, s: Any, *scalars: Any) -> Any:
        _, _, block, *_, count = scalars
        return 0, block[i], step(i, s, count)

    def of_weight(j: Any, i: Any, s: Any, *scalars: Any) -> Any:
        layer, expert, *_, count = scalars
        return layer[0], expert[i], j, step(i, s, count)

    return [
        pl.BlockSpec((halves, size, cut.step), of_x),
        pl.BlockSpec((None, None, columns, cut.step), of_weight),
    ]


def _of_groups(
    values: jax.Array, layer: jax.Array | int, columns: int
) -> tuple[jax.Array, pl.BlockSpec]:
    """Scales or zeros [layer expert n t] as the kernel reads them, [group column] of an item."""
    layers, experts, n, groups = values.shape
    every = values.reshape(layers, experts * n, groups).transpose(0, 2, 1)
    if n % columns == 0 and columns % LANES == 0:
        each, dims = n // columns, (None, groups, columns)
        return every, pl.BlockSpec(dims, lambda j, i, s, at, e, *_: (at[0], 0, e[i] * each + j))
    if n % HALF == 0 and columns % LANES == 0:
        # Every other expert begins in the middle of a register, which is brought too.
        width = pl.Element(columns + LANES, (0, columns + LANES))

        def of(j: Any, i: Any, s: Any, at: Any, e: Any, *_: Any) -> Any:
            return at[0], 0, (e[i] * n + j * columns) // LANES * LANES

        return every, pl.BlockSpec((None, pl.Element(groups), width), of)
    one = lax.dynamic_index_in_dim(values, layer, 0, keepdims=False).transpose(0, 2, 1)
    return one, pl.BlockSpec((None, groups, columns), lambda j, i, s, at, e, *_: (e[i], 0, j))


def _own(values: Any, begins: Any, columns: int) -> jax.Array:
    """Scales or zeros of an expert, whose first row is number `begins` of all, in float32."""
    found = values[...].astype(jnp.int32 if values.dtype == jnp.uint8 else jnp.float32)
    if found.shape[1] > columns:
        late = found[:, HALF : HALF + columns]
        found = jnp.where(begins % LANES == 0, found[:, :columns], late)
    return found.astype(jnp.float32)


def _kernel(
    layer: Any, expert: Any, block: Any, begins: Any, ends: Any, count: Any, x: Any, weight: Any,
    *rest: Any, kind: str, cut: narrow.Cut, n: int, zeros: bool,
) -> None:  # fmt: skip
    stored, (*bias, out, acc) = rest[: 1 + zeros], rest[1 + zeros : len(rest) - 1 - zeros]
    wide = rest[len(rest) - 1 - zeros :]
    item, step = pl.program_id(1), pl.program_id(2)

    @pl.when(item < count[0])
    def _() -> None:
        @pl.when(step == 0)
        def _() -> None:
            acc[...] = jnp.zeros_like(acc)
            for values, numbers in zip(stored, wide, strict=True):
                numbers[...] = _own(values, expert[item] * n, acc.shape[1])

        first = step * cut.step // cut.group
        zero = wide[1] if zeros else None
        narrow.add_step(acc, x, weight, wide[0], zero, kind, cut, first)

        @pl.when(step == pl.num_programs(2) - 1)
        def _() -> None:
            own = expert[item]
            grouped.put_own(acc[...], bias, out, block[item], begins[own], ends[own])


def vmem_need(x: Any, weight: Any, groups: int) -> dict[str, int]:
    """Bytes of vector memory of a product with narrow weights."""
    (rows, k), (experts, n, lanes) = x.shape, weight.shape
    block = rows_at_once(rows, experts, x.dtype), columns_of(n)
    bytes_each = jnp.dtype(x.dtype).itemsize
    need = narrow.need_of(narrow.cut_of(lanes, groups), k // lanes, block, groups, bytes_each)
    return need | {"scales and zeros as numbers": 2 * 4 * block[1] * (groups + 8)}


def takes(
    x: Array, weight: Array, scale: Array | None, zero: Array | None, bias: Array | None,
    group_sizes: Array, kind: str,
) -> bool | Refusal:  # fmt: skip
    """What the kernels take where they are interpreted."""
    if scale is None:
        return grouped.takes(x, weight, group_sizes)
    if x.dtype not in narrow.DTYPES:
        return Refusal(f"x is {x.dtype}: float32 or bfloat16 are taken")
    (rows, _), experts = x.shape, weight.shape[0]
    blocks = -(-rows // rows_at_once(rows, experts, x.dtype))
    items = 2 * (blocks + min(experts, rows)) + 2 * experts
    return answer(refused_scalars("the list of work", "a smaller max_num_batched_tokens", items))


def compiles(
    x: Array, weight: Array, scale: Array | None, zero: Array | None, bias: Array | None,
    group_sizes: Array, kind: str,
) -> bool | Refusal:  # fmt: skip
    """What the kernels take on a TPU."""
    if scale is None:
        return grouped.compiles(x, weight, group_sizes)
    groups = scale.shape[2]
    return answer(
        narrow.refused_groups(weight.shape[2], groups),
        refused_memory(target_kind(), vmem_need(x, weight, groups)),
        takes(x, weight, scale, zero, bias, group_sizes, kind),
    )


def _run(
    x: jax.Array, weight: Any, scale: Any, zero: Any, bias: Any, group_sizes: jax.Array, kind: str,
    interpret: Any,
) -> jax.Array:  # fmt: skip
    if scale is None:
        return grouped.run(x, weight, group_sizes, interpret, taken(bias))
    stack, layer = in_stack(weight)
    need = vmem_need(x, weight, scale.shape[2])
    vmem = None if interpret else sum(need.values()) + SPARE
    scales, zeros = in_stack(scale)[0], None if zero is None else in_stack(zero)[0]
    return multiply(
        x, stack, layer, scales, zeros, taken(bias), group_sizes, kind, vmem=vmem,
        interpret=interpret,
    )  # fmt: skip


@implement(
    "grouped_linear", provider="pallas", framework="jax", supported=on_tpu, supports_args=compiles,
    preferred_on=("tpu",), stacked=True,
)  # fmt: skip
def grouped_linear(
    x: Array, weight: Array, scale: Array | None, zero: Array | None, bias: Array | None,
    group_sizes: Array, kind: str,
) -> Array:  # fmt: skip
    """See the op."""
    return _run(x, weight, scale, zero, bias, group_sizes, kind, False)


@implement(
    "grouped_linear", provider="pallas_interpret", framework="jax", supports_args=takes,
    stacked=True,
)  # fmt: skip
def interpreted_linear(
    x: Array, weight: Array, scale: Array | None, zero: Array | None, bias: Array | None,
    group_sizes: Array, kind: str,
) -> Array:  # fmt: skip
    """See the op."""
    return _run(x, weight, scale, zero, bias, group_sizes, kind, True)
