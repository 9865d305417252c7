"""The ops `linear_grouped` and `linear_fp8` by a Pallas kernel: `pallas` on a TPU,
`pallas_interpret` the same source interpreted.

Weights stay in 8 or 4 bits until they are in vector memory. There a span of a row's entries becomes
numbers of the dtype of x, exactly, and is multiplied; scales come behind the sum of their group. A
group of few entries shares a span with others: the rows of x stand below each other once for each
group, with zeros where the other groups are.

Of two entries in a byte, the first are multiplied with every other column of x, the second with
the rest: so that no byte is taken apart along lanes.

Entries of e4m3 are numbers of bfloat16, tokens in fp8 too: XLA, which knows no such product on a
TPU, takes minutes to compile what widens a weight, and has no products for scales of blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
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
from ...ops.namespaces.jax_ import in_stack, taken
from ...ops.reference.narrow import INT4_ZERO, PACKED
from ...ops.reference.quantization import quantize_fp8_dynamic
from .cache import LANES
from .softmax import dot
from .target import answer, on_tpu, refused_memory, target_kind
from .tiles import SPARE, in_memory, lanes_of

ROWS, COLUMNS = 256, 512
"""The most rows and columns of a block of results."""
SPAN, STEP = 512, 2048
"""The most lanes of a weight's rows that are widened at once, and that are brought at once."""
DTYPES = (jnp.float32, jnp.bfloat16)


@dataclass(frozen=True, slots=True)
class Cut:
    """How rows of `lanes` stored numbers are taken: `step` of them at a time, `span` of those at
    once. A group is `group` of them.
    """

    lanes: int
    group: int
    span: int
    step: int

    @property
    def tail(self) -> int:
        """How many of a step's lanes are no whole span; they come last."""
        return self.step % self.span

    @property
    def groups_of_span(self) -> int:
        """How many groups a span has entries of."""
        return max(self.span // self.group, 1)

    @property
    def groups_of_step(self) -> int:
        """How many groups a step has entries of."""
        return max(self.step // self.group, 1)


def cut_of(lanes: int, groups: int) -> Cut:
    """The cut of rows of `lanes` stored numbers in so many groups."""
    group = lanes // groups
    tail = lanes % LANES
    if tail and LANES < lanes <= STEP and (group == lanes or LANES % group == tail % group == 0):
        span = LANES if group < lanes else _largest(lanes - tail, LANES, SPAN)
        return Cut(lanes, group, span, lanes)
    if group < LANES:
        span = _largest(lanes, group, LANES)
    else:
        span = group if group <= SPAN else _largest(group, LANES, SPAN)
    steps = [s for s in range(span, lanes + 1, span) if lanes % s == 0]
    whole = [s for s in steps if s % group == 0 or group % s == 0]
    return Cut(lanes, group, span, max((s for s in whole if s <= STEP), default=whole[0]))


def _largest(size: int, unit: int, most: int) -> int:
    """The largest multiple of `unit` up to `most` that divides `size`; `size` if there is none."""
    found = [s for s in range(unit, min(most, size) + 1, unit) if size % s == 0]
    return found[-1] if found else size


def multiply(
    x: jax.Array, weight: jax.Array, layer: jax.Array | int, scale: jax.Array,
    zero: jax.Array | None, bias: jax.Array | None, kind: str, *, vmem: int | None, interpret: Any,
    rows: int = ROWS, columns: int = COLUMNS, dtype: Any = None, x_scale: jax.Array | None = None,
) -> jax.Array:  # fmt: skip
    """The op, with weight[layer] of a stack [layer n lanes]; blocks of `rows` by `columns`. The
    result is of `dtype`, or that of x. `x_scale` [tok 1], or [tok t] as there are groups, are
    factors of rows of x.
    """
    (tokens, k), (n, lanes) = x.shape, weight.shape[1:]
    cut = cut_of(lanes, scale.shape[1])
    tile = 32 // x.dtype.itemsize
    rows, columns = min(rows, -(-tokens // tile) * tile), min(columns, n)
    padded = jnp.pad(x, ((0, -tokens % rows), (0, 0)))
    # [half row lane]: what a byte's first and second entries are multiplied with.
    by_half = padded.reshape(-1, lanes, k // lanes).transpose(2, 0, 1)
    beside = {
        "scale": _by_step(scale, cut),
        "zero": None if zero is None else _by_step(zero, cut),
        "bias": None if bias is None else bias[None, :],
        "x_scale": None if x_scale is None else jnp.pad(x_scale, ((0, -tokens % rows), (0, 0))),
    }
    beside = {name: values for name, values in beside.items() if values is not None}
    grid = -(-n // columns), padded.shape[0] // rows, lanes // cut.step
    specs = _specs(cut, k // lanes, rows, columns, 1 if x_scale is None else x_scale.shape[1])
    out = pl.pallas_call(
        partial(_kernel, kind=kind, cut=cut, names=tuple(beside)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=grid,
            in_specs=[specs[name] for name in ("x", "weight", *beside)],
            out_specs=pl.BlockSpec((rows, columns), lambda j, i, s, *_: (i, j)),
            scratch_shapes=[pltpu.VMEM((rows, columns), jnp.float32)],
        ),
        out_shape=jax.ShapeDtypeStruct((padded.shape[0], n), dtype or x.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"), vmem_limit_bytes=vmem
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * tokens * n * k,
            bytes_accessed=grid[1] * n * lanes + tokens * (n + k) * x.dtype.itemsize,
            transcendentals=0,
        ),
        interpret=interpret,
        name="linear_grouped" if x_scale is None else "linear_fp8",
    )(
        jnp.asarray(layer, jnp.int32).reshape(1),
        by_half,
        in_memory(weight, interpret),
        *beside.values(),
    )
    return out[:tokens]


def _by_step(values: jax.Array, cut: Cut) -> jax.Array:
    """Scales or zeros [n t] as the kernel reads them: [step or what it is part of, group, n]."""
    return values.astype(jnp.float32).T.reshape(-1, cut.groups_of_step, values.shape[0])


def _specs(
    cut: Cut, halves: int, rows: int, columns: int, x_scales: int
) -> dict[str, pl.BlockSpec]:
    """Which block of each input a step of the grid (columns, rows, step) sees."""
    together = max(cut.step, cut.group)
    of_groups = pl.BlockSpec(
        (None, cut.groups_of_step, columns), lambda j, i, s, *_: (s * cut.step // together, 0, j)
    )
    return {
        "x": pl.BlockSpec((halves, rows, cut.step), lambda j, i, s, *_: (0, i, s)),
        "weight": pl.BlockSpec((None, columns, cut.step), lambda j, i, s, layer: (layer[0], j, s)),
        "scale": of_groups,
        "zero": of_groups,
        "bias": pl.BlockSpec((1, columns), lambda j, i, s, *_: (0, j)),
        "x_scale": pl.BlockSpec((rows, x_scales), lambda j, i, s, *_: (i, 0)),
    }


def _kernel(
    layer: Any, x: Any, weight: Any, *rest: Any, kind: str, cut: Cut, names: tuple[str, ...]
) -> None:
    beside = dict(zip(names, rest, strict=False))
    out, acc = rest[len(names) :]
    scale, zero, x_scale = beside["scale"], beside.get("zero"), beside.get("x_scale")
    step = pl.program_id(2)
    by_group: Any = x_scale if x_scale is not None and x_scale.shape[1] > 1 else None

    @pl.when(step == 0)
    def _() -> None:
        acc[...] = jnp.zeros_like(acc)

    def factor(group: Any) -> Any:
        return _column(by_group[...], step * cut.step // cut.group + group)

    add_step(acc, x, weight, scale, zero, kind, cut, 0, None if by_group is None else factor)

    @pl.when(step == pl.num_programs(2) - 1)
    def _() -> None:
        y = acc[...]
        if x_scale is not None and by_group is None:
            y = y * x_scale[...]
        if "bias" in beside:
            y = y + beside["bias"][...].astype(jnp.float32)
        out[...] = y.astype(out.dtype)


def add_step(
    acc: Any, x: Any, weight: Any, scale: Any, zero: Any, kind: str, cut: Cut, first: Any,
    factor: Callable[[Any], Any] | None = None,
) -> None:  # fmt: skip
    """Add to acc [row column] what a step of x [half row step] gives by one of weight [column
    step], span by span. The step's groups stand in scale and zero [group column] from `first` on;
    `factor` gives a factor [row 1] of each, counted in the step.
    """

    def add(lanes: Any, size: int, number: Any) -> None:
        whole = replace(cut, span=size)
        found, total = _of_span(x, weight[:, lanes], lanes, kind, whole, zero is not None)
        for n in range(whole.groups_of_span):
            of_group, group = slice(n * acc.shape[0], (n + 1) * acc.shape[0]), number + n
            own, part = pl.ds(first + group, 1), found[of_group]
            if zero is not None:
                part = part - total[of_group] * (zero[own, :] - INT4_ZERO)
            if factor is not None:
                part = part * factor(group)
            acc[...] += part * scale[own, :]

    def span(number: Any, _: Any) -> None:
        lanes = pl.ds(pl.multiple_of(number * cut.span, math.gcd(cut.span, LANES)), cut.span)
        add(lanes, cut.span, number * cut.span // cut.group if cut.groups_of_step > 1 else 0)

    lax.fori_loop(0, cut.step // cut.span, span, None)
    if cut.tail:
        start = cut.step - cut.tail
        add(pl.ds(start, cut.tail), cut.tail, start // cut.group)


def _column(values: jax.Array, index: Any) -> jax.Array:
    """values[:, index] as [row 1]: lanes are not addressed by numbers that the chip computes."""
    lane = lax.broadcasted_iota(jnp.int32, values.shape, 1)
    return jnp.sum(jnp.where(lane == index, values, 0.0), axis=1, keepdims=True)


def _of_span(
    x: Any, stored: jax.Array, place: Any, kind: str, cut: Cut, zeros: bool
) -> tuple[jax.Array, Any]:
    """(products [group*row column] of a span for each of its groups, sums [group*row 1] of x where
    there are zeros).
    """
    found: Any = 0.0
    total: Any = 0.0
    for half, values in enumerate(_entries(stored, kind)):
        rows = _of_groups(x[half, :, place], cut)
        found = found + dot(rows, values.astype(rows.dtype), (1, 1))
        if zeros:
            total = total + jnp.sum(rows.astype(jnp.float32), axis=1, keepdims=True)
    return found, total


def _of_groups(x: jax.Array, cut: Cut) -> jax.Array:
    """x [row span] once for each group of the span, 0 outside of it: [group*row span]."""
    if cut.groups_of_span == 1:
        return x
    group = lax.broadcasted_iota(jnp.int32, x.shape, 1) // cut.group
    nothing = jnp.zeros_like(x)
    return jnp.concatenate([jnp.where(group == n, x, nothing) for n in range(cut.groups_of_span)])


def _entries(stored: jax.Array, kind: str) -> list[jax.Array]:
    """The entries that stored numbers stand for, float32, less the zero that int4 has without
    zeros: the first of all bytes, then the second.
    """
    if kind not in PACKED:
        return [stored.astype(jnp.float32)]
    both = stored.astype(jnp.int32)
    widen = _e2m1 if kind == "fp4" else _int4
    return [widen(both & 15), widen((both >> 4) & 15)]


def _int4(nibble: jax.Array) -> jax.Array:
    return (nibble - int(INT4_ZERO)).astype(jnp.float32)


def _e2m1(nibble: jax.Array) -> jax.Array:
    size = nibble & 7
    twice = jnp.where(size < 4, size, jnp.where(size < 6, 2 * size - 4, 4 * size - 16))
    return jnp.where(nibble > 7, -twice, twice).astype(jnp.float32) * 0.5


def vmem_need(
    x: Any, weight: Any, groups: int, bytes_each: int, x_scales: int = 0
) -> dict[str, int]:
    """Bytes of vector memory: what comes and goes twice, as the next block is under way. A weight
    has scales and zeros beside it; `bytes_each`: of an entry of x as it is multiplied.
    """
    (tokens, k), (n, lanes) = x.shape, weight.shape
    cut = cut_of(lanes, groups)
    block = min(ROWS, tokens + 32), lanes_of(min(COLUMNS, n))
    return need_of(cut, k // lanes, block, cut.groups_of_step, bytes_each) | {
        "scales of rows": 2 * 4 * block[0] * lanes_of(x_scales)
    }


def need_of(
    cut: Cut, halves: int, block: tuple[int, int], groups: int, bytes_each: int
) -> dict[str, int]:
    """What a block of (rows, columns) needs, with scales and zeros of so many groups beside it."""
    rows, columns = block
    return {
        "two blocks of a weight": 2 * columns * (lanes_of(cut.step) + 2 * 4 * groups),
        "rows": (2 * lanes_of(cut.step) + cut.groups_of_span * cut.span) * rows * bytes_each
        * halves,
        # Results may be parts of sums, in float32.
        "results and sums": rows * columns * 4 * (2 + 1 + cut.groups_of_span),
        "a span as numbers": columns * lanes_of(cut.span) * (4 * halves + 4 + bytes_each),
    }  # fmt: skip


def takes(
    x: Array, weight: Array, scale: Array, zero: Array | None, bias: Array | None, kind: str
) -> bool | Refusal:
    """What the kernel takes where it is interpreted."""
    if x.dtype not in DTYPES:
        return Refusal(f"x is {x.dtype}: float32 or bfloat16 are taken")
    return True


def compiles(
    x: Array, weight: Array, scale: Array, zero: Array | None, bias: Array | None, kind: str
) -> bool | Refusal:
    """What the kernel takes on a TPU."""
    groups, bytes_each = scale.shape[1], jnp.dtype(x.dtype).itemsize
    return answer(
        refused_groups(weight.shape[1], groups),
        refused_memory(target_kind(), vmem_need(x, weight, groups, bytes_each)),
        takes(x, weight, scale, zero, bias, kind),
    )


def refused_groups(lanes: int, groups: int) -> Refusal | None:
    """Why groups of a weight's rows of so many stored numbers do not lie in registers."""
    if cut_of(lanes, groups).span % LANES == 0:
        return None
    return Refusal(
        f"rows of {lanes} stored numbers in {groups} groups: parts of {LANES} lanes must be "
        "whole groups, or groups whole parts"
    )


def _run(
    x: jax.Array, weight: Any, scale: Any, zero: Any, bias: Any, kind: str, interpret: Any,
    dtype: Any = None,
) -> jax.Array:  # fmt: skip
    stack, layer = in_stack(weight)
    bytes_each = jnp.dtype(x.dtype).itemsize
    need = vmem_need(x, weight, scale.shape[1], bytes_each)
    vmem = None if interpret else sum(need.values()) + SPARE
    # Scales are turned first, which for a whole stack would be done again in every layer.
    small = taken(scale), taken(zero), taken(bias)
    return multiply(x, stack, layer, *small, kind, vmem=vmem, interpret=interpret, dtype=dtype)


def part(
    x: Array, weight: Array, scale: Array, zero: Array | None, bias: Array | None, kind: str
) -> Array:
    """What a shard has of the op's product."""
    return _run(x, weight, scale, zero, None, kind, False, jnp.float32)


def interpreted_part(
    x: Array, weight: Array, scale: Array, zero: Array | None, bias: Array | None, kind: str
) -> Array:
    """What a shard has of the op's product."""
    return _run(x, weight, scale, zero, None, kind, True, jnp.float32)


@implement(
    "linear_grouped", provider="pallas", framework="jax", supported=on_tpu, supports_args=compiles,
    preferred_on=("tpu",), stacked=True, part=part,
)  # fmt: skip
def linear_grouped(
    x: Array, weight: Array, scale: Array, zero: Array | None, bias: Array | None, kind: str
) -> Array:
    """See the op."""
    return _run(x, weight, scale, zero, bias, kind, False)


@implement(
    "linear_grouped", provider="pallas_interpret", framework="jax", supports_args=takes,
    stacked=True, part=interpreted_part,
)  # fmt: skip
def interpreted_linear(
    x: Array, weight: Array, scale: Array, zero: Array | None, bias: Array | None, kind: str
) -> Array:
    """See the op."""
    return _run(x, weight, scale, zero, bias, kind, True)


# --- tokens in fp8
# --------------------------------------------------------------------------------------------------


def fp8_takes(
    x: Array,
    weight: Array,
    x_scale: Array | None,
    weight_scale: Array,
    bias: Array | None,
    dtype: str,
) -> bool | Refusal:
    """What the kernel takes of `linear_fp8` where it is interpreted."""
    if dtype not in ("float32", "bfloat16"):
        return Refusal(f"results are {dtype}: float32 or bfloat16 are given")
    blocks = {weight_scale.shape[1], 1 if x_scale is None else x_scale.shape[1]} - {1}
    if len(blocks) > 1:
        return Refusal(f"blocks of x and of the weight: {blocks} in a row, equal numbers are taken")
    return True


def fp8_compiles(
    x: Array,
    weight: Array,
    x_scale: Array | None,
    weight_scale: Array,
    bias: Array | None,
    dtype: str,
) -> bool | Refusal:
    """What the kernel takes of `linear_fp8` on a TPU."""
    x_scales = 1 if x_scale is None else x_scale.shape[1]
    groups = max(weight_scale.shape[1], x_scales)
    return answer(
        refused_groups(weight.shape[1], groups),
        refused_memory(target_kind(), vmem_need(x, weight, groups, 2, x_scales)),
        fp8_takes(x, weight, x_scale, weight_scale, bias, dtype),
    )


def _run_fp8(
    x: jax.Array, weight: Any, x_scale: Any, weight_scale: Any, bias: Any, dtype: str,
    interpret: Any,
) -> jax.Array:  # fmt: skip
    if x_scale is None:
        x, x_scale = quantize_fp8_dynamic(namespace("jax"), x, "row", 0)
    (stack, layer), (n, _) = in_stack(weight), weight.shape
    groups = max(weight_scale.shape[1], x_scale.shape[1])
    need = vmem_need(x, weight, groups, 2, x_scale.shape[1])
    return multiply(
        x.astype(jnp.bfloat16), stack, layer, jnp.broadcast_to(taken(weight_scale), (n, groups)),
        None, taken(bias), "fp8", vmem=None if interpret else sum(need.values()) + SPARE,
        interpret=interpret, dtype=jnp.dtype(dtype),
        x_scale=jnp.broadcast_to(x_scale, (x.shape[0], x_scale.shape[1])),
    )  # fmt: skip


def fp8_part(
    x: Array,
    weight: Array,
    x_scale: Array | None,
    weight_scale: Array,
    bias: Array | None,
    dtype: str,
) -> Array:
    """What a shard has of a product of `linear_fp8`."""
    return _run_fp8(x, weight, x_scale, weight_scale, None, "float32", False)


def interpreted_fp8_part(
    x: Array,
    weight: Array,
    x_scale: Array | None,
    weight_scale: Array,
    bias: Array | None,
    dtype: str,
) -> Array:
    """What a shard has of a product of `linear_fp8`."""
    return _run_fp8(x, weight, x_scale, weight_scale, None, "float32", True)


@implement(
    "linear_fp8", provider="pallas", framework="jax", supported=on_tpu, supports_args=fp8_compiles,
    preferred_on=("tpu",), stacked=True, part=fp8_part,
)  # fmt: skip
def linear_fp8(
    x: Array,
    weight: Array,
    x_scale: Array | None,
    weight_scale: Array,
    bias: Array | None,
    dtype: str,
) -> Array:
    """See the op."""
    return _run_fp8(x, weight, x_scale, weight_scale, bias, dtype, False)


@implement(
    "linear_fp8", provider="pallas_interpret", framework="jax", supports_args=fp8_takes,
    stacked=True, part=interpreted_fp8_part,
)  # fmt: skip
def interpreted_linear_fp8(
    x: Array,
    weight: Array,
    x_scale: Array | None,
    weight_scale: Array,
    bias: Array | None,
    dtype: str,
) -> Array:
    """See the op."""
    return _run_fp8(x, weight, x_scale, weight_scale, bias, dtype, True)
