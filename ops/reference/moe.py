"""Mixture of experts: each token goes through its `k` best experts, and the results are added up by
their weights.

Shapes: `tok` tokens, `expert` experts of this process, `dim` model width, `inter` MLP width of an
expert, `choice` the tok * k choices of tokens, sorted by expert. Shapes are static: only how many
rows each expert has depends on the data, and that is an array (`group_sizes`). A choice outside
[0, expert) (-1: none, or an expert of another process) goes to the end, where rows are 0 and add
nothing.
"""

from __future__ import annotations

from typing import Any

from ..declare import DOT, Array, Contract, OpError, define
from ..namespaces import device_of
from .narrow import product_of_expert

ROUTED = Contract(
    rounds="nowhere: weights stay in the accumulation dtype",
    accumulate="float32 (float64 for float64 inputs), any order; experts are chosen by the "
    "logits, "
    "without arithmetic",
    masked="rows whose slot is negative choose no expert (-1, weight 0)",
    nan="an expert whose logit is NaN is chosen last; the weights of its row are NaN",
)
SCORED = Contract(
    rounds="nowhere: weights stay in the accumulation dtype",
    accumulate="float32 (float64 for float64 inputs), any order; experts are chosen by sigmoid "
    "plus bias in that dtype, so that either of two may be chosen that differ by its rounding",
    masked="rows whose slot is negative choose no expert (-1, weight 0)",
    nan="an expert whose logit is NaN is chosen last; the weights of its row are NaN",
)
BIASED = Contract(
    rounds="nowhere: weights stay in the accumulation dtype",
    accumulate="float32 (float64 for float64 inputs), any order; experts are chosen by their share "
    "plus bias in that dtype, so that either of two may be chosen that differ by its rounding",
    masked="rows whose slot is negative choose no expert (-1, weight 0)",
    nan="an expert whose logit is NaN is chosen last; the weights of its row are NaN",
)
MOVED = Contract(
    rounds="nowhere", accumulate="none", masked="each row is a copy of its token", nan="copied"
)
GROUPED = Contract(
    dot=DOT, masked="a row depends on itself and its own expert; rows past the last group are 0"
)
EXPERTS = Contract(
    rounds="where its finer ops do: gate and up, their product, each expert's result, and the "
    "sum; "
    "an implementation "
    "may skip all but the last",
    dot=DOT,
    masked="a token depends on itself and its own experts only; one that has none is 0",
)


@define(
    shapes="logits [tok expert], slots [tok], shift [expert], factor [expert] -> "
    "[tok top_k] float32, [tok top_k] int32",
    contract=ROUTED,
    sums=True,
)
def moe_route(
    xp: Any,
    logits: Array,
    slots: Array,
    top_k: int,
    renormalize: bool,
    shift: Array | None = None,
    factor: Array | None = None,
) -> tuple[Array, Array]:
    """(weights [tok k] float32, experts [tok k] int32) of the k largest of logits [tok expert],
    plus shift [expert] if there is one (gpt-oss: the router's bias), ties to the lower id.

    Weights are the softmax over all experts (Qwen3-MoE with `norm_topk_prob` off), or over the
    chosen ones if `renormalize` (Mixtral, arXiv:2401.04088, equation 3), each times the `factor`
    [expert] float32 of its expert if there is one (Gemma 4). Best first. A token whose
    slot in the cache [tok] int32 is negative is padding: it chooses nothing, so that no expert is
    read for it.
    """
    y = xp.accumulate(logits)
    if shift is not None:
        y = y + xp.accumulate(shift)[None, :]
    best = xp.max(y, axis=-1, keepdims=True)  # NaN if the row has one, so that all its weights are
    values, experts = xp.top(xp.where(xp.isnan(y), -float("inf"), y), top_k)
    chosen = xp.exp(values - best)
    total = xp.sum(chosen if renormalize else xp.exp(y - best), axis=-1, keepdims=True)
    weights = chosen / total
    if factor is not None:
        own = xp.take(xp.accumulate(factor), xp.reshape(experts, (-1,)), axis=0)
        weights = weights * xp.reshape(own, weights.shape)
    real = (slots >= 0)[:, None]
    return xp.where(real, weights, 0.0), xp.where(real, experts, -1)


@define(
    shapes="logits [tok expert], bias [expert], slots [tok] -> [tok top_k] float32, "
    "[tok top_k] int32",
    contract=SCORED,
    sums=True,
)
def moe_route_sigmoid(
    xp: Any,
    logits: Array,
    bias: Array,
    slots: Array,
    top_k: int,
    renormalize: bool,
    groups: int,
    groups_kept: int,
    scale: float,
) -> tuple[Array, Array]:
    """As `moe_route`, by sigmoids of the logits: the k experts whose sigmoid plus bias [expert]
    float32 is largest; weights are the sigmoids without it, times `scale`.

    The experts stand in `groups` equal groups, of which the `groups_kept` whose two best add up to
    most are chosen from. DeepSeek-V3 (arXiv:2412.19437, section 2.1.2), as `Glm4MoeTopkRouter` of
    transformers has it: weights that add up to 1 are divided by their sum plus 1e-20.
    """
    y = xp.accumulate(logits)
    tokens, experts = y.shape
    e = xp.exp(-xp.abs(y))
    scores = xp.where(y < 0, e, xp.ones_like(e)) / (1.0 + e)
    lost = xp.isnan(xp.max(y, axis=-1, keepdims=True))
    choice = scores + xp.accumulate(bias)[None, :]
    choice = xp.where(xp.isnan(choice), -float("inf"), choice)
    if groups_kept < groups:
        size = experts // groups
        best, _ = xp.top(xp.reshape(choice, (tokens * groups, size)), 2)
        _, kept = xp.top(xp.reshape(xp.sum(best, axis=-1), (tokens, groups)), groups_kept)
        of = xp.arange(experts, dtype=xp.int32, device=device_of(logits)) // size
        inside = xp.astype(kept[:, :, None] == of[None, None, :], xp.int32)
        choice = xp.where(xp.sum(inside, axis=1, dtype=xp.int32) > 0, choice, -float("inf"))
    _, found = xp.top(choice, top_k)
    here = xp.arange(experts, dtype=xp.int32, device=device_of(logits))[None, None, :]
    chosen = xp.sum(xp.where(found[:, :, None] == here, scores[:, None, :], 0.0), axis=-1)
    if renormalize:
        chosen = chosen / (xp.sum(chosen, axis=-1, keepdims=True) + 1e-20)
    weights = xp.where(lost, float("nan"), chosen * scale)
    real = (slots >= 0)[:, None]
    return xp.where(real, weights, 0.0), xp.where(real, found, -1)


@define(
    shapes="logits [tok expert], bias [expert], slots [tok] -> [tok top_k] float32, "
    "[tok top_k] int32",
    contract=BIASED,
    sums=True,
)
def moe_route_biased(
    xp: Any, logits: Array, bias: Array, slots: Array, top_k: int, renormalize: bool
) -> tuple[Array, Array]:
    """As `moe_route`, where the k experts are chosen whose share of the softmax over all of them
    plus bias [expert] float32 is largest; weights are the shares without it, as they are or divided
    by their sum.

    ERNIE 4.5 (`Ernie4_5_MoeTopKRouter` of transformers): the sum is taken as 1e-12 where it is
    less.
    """
    y = xp.accumulate(logits)
    spoiled = xp.isnan(y)
    known = xp.where(spoiled, -float("inf"), y)
    power = xp.exp(known - xp.max(known, axis=-1, keepdims=True))
    scores = power / xp.sum(power, axis=-1, keepdims=True)
    choice = xp.where(spoiled, -float("inf"), scores + xp.accumulate(bias)[None, :])
    _, found = xp.top(choice, top_k)
    here = xp.arange(y.shape[1], dtype=xp.int32, device=device_of(logits))[None, None, :]
    chosen = xp.sum(xp.where(found[:, :, None] == here, scores[:, None, :], 0.0), axis=-1)
    if renormalize:
        total = xp.sum(chosen, axis=-1, keepdims=True)
        chosen = chosen / xp.where(total < 1e-12, 1e-12, total)
    lost = xp.isnan(xp.max(y, axis=-1, keepdims=True))
    weights = xp.where(lost, float("nan"), chosen)
    real = (slots >= 0)[:, None]
    return xp.where(real, weights, 0.0), xp.where(real, found, -1)


@define(
    shapes="x [tok dim], experts [tok k] -> [tok*k dim] x, [tok k] int32, [num_experts] int32",
    contract=MOVED,
)
def moe_permute(xp: Any, x: Array, experts: Array, num_experts: int) -> tuple[Array, Array, Array]:
    """x [tok dim] sorted by experts [tok k] -> (rows [choice dim], place [tok k], group_sizes
    [expert]), int32.

    `place` is the row of each choice; rows of one expert keep the order of tokens.
    """
    tokens, k = experts.shape
    flat = xp.reshape(experts, (tokens * k,))
    real = (flat >= 0) & (flat < num_experts)
    order = xp.argsort(xp.where(real, flat, num_experts), stable=True)
    place = xp.astype(xp.argsort(order, stable=True), xp.int32)
    sizes = xp.count_tokens(xp.where(real, flat, -1)[None, :], num_experts)[0]
    return xp.take(x, order // k, axis=0), xp.reshape(place, (tokens, k)), sizes


@define(
    shapes="x [choice k], weight [expert n k], group_sizes [expert] -> [choice n] x",
    contract=GROUPED,
    native="per framework",
)
def grouped_matmul(xp: Any, x: Array, weight: Array, group_sizes: Array) -> Array:
    """x [choice k] times weight[e] [n k] transposed, rounded once, e the row's expert: [choice n].

    Rows are sorted by expert, `group_sizes` [expert] int32 of them for each. The reference makes
    one dense product per expert and selects: what lies in other experts or past the last group
    (even NaN) cannot reach a row, and its work grows with the number of experts. Implementations
    take blocks of rows that are one expert's.
    """
    ends = xp.cumsum(group_sizes, 0, dtype=xp.int32)
    row = xp.arange(x.shape[0], dtype=xp.int32, device=device_of(group_sizes))
    expert = xp.sum(xp.astype(row[:, None] >= ends[None, :], xp.int32), axis=-1, dtype=xp.int32)

    def select(i: Any, out: Any) -> Array:
        return xp.where((expert == i)[:, None], xp.linear_accumulated(x, weight[i]), out)

    return xp.astype(xp.loop(1, weight.shape[0], select, select(0, 0.0)), x.dtype)


@define(
    shapes="x [choice k], weight [expert n m], scale [expert n t], zero [expert n t], "
    "bias [expert n], group_sizes [expert] -> [choice n] x",
    contract=Contract(
        rounds="the weight once to the storage dtype, or not at all; the product once, after the "
        "bias",
        dot=DOT,
        masked="a row depends on itself and its own expert; rows past the last group are 0",
    ),
)
def grouped_linear(
    xp: Any,
    x: Array,
    weight: Array,
    scale: Array | None,
    zero: Array | None,
    bias: Array | None,
    group_sizes: Array,
    kind: str,
) -> Array:
    """As `grouped_matmul`, with weights [expert n k] of `kind` plain, or narrow as those of
    `linear_grouped` (then with their scale [expert n t] float32 or bfloat16, and zero), plus bias
    [expert n].
    """
    ends = xp.cumsum(group_sizes, 0, dtype=xp.int32)
    row = xp.arange(x.shape[0], dtype=xp.int32, device=device_of(group_sizes))
    expert = xp.sum(xp.astype(row[:, None] >= ends[None, :], xp.int32), axis=-1, dtype=xp.int32)

    def select(i: Any, out: Any) -> Array:
        y = product_of_expert(xp, x, weight, scale, zero, bias, kind, lambda weights: weights[i])
        return xp.where((expert == i)[:, None], y, out)

    return xp.astype(xp.loop(1, weight.shape[0], select, select(0, 0.0)), x.dtype)


@define(
    shapes="rows [choice dim], place [tok k], weights [tok k] -> [tok dim] rows",
    contract=Contract(masked="a token depends on its own rows only"),
    sums=True,
)
def moe_unpermute(xp: Any, rows: Array, place: Array, weights: Array) -> Array:
    """sum over k of weights[t, k] * rows[place[t, k]]: rows [choice dim], place and weights [tok k]
    -> [tok dim].
    """
    tokens, k = place.shape
    chosen = xp.reshape(
        xp.take(rows, xp.reshape(place, (tokens * k,)), axis=0), (tokens, k, rows.shape[1])
    )
    return xp.astype(
        xp.sum(xp.accumulate(chosen) * xp.accumulate(weights)[:, :, None], axis=1), rows.dtype
    )


@define(
    shapes="x [tok dim], weights [tok k], experts [tok k], gate_up [expert 2*inter dim], "
    "down [expert dim inter] -> [tok dim] x",
    level="coarse",
    shards=("expert",),
    composition=(
        "moe_permute",
        "grouped_matmul",
        "silu_and_mul",
        "gelu_and_mul",
        "grouped_matmul",
        "moe_unpermute",
    ),
    contract=EXPERTS,
)
def moe_experts(
    ops: Any,
    x: Array,
    weights: Array,
    experts: Array,
    gate_up: Array,
    down: Array,
    gelu: bool = False,
) -> Array:
    """The sum of each token's gated MLPs of its experts [tok k] int32, by weights [tok k] float32
    -> [tok dim].

    x [tok dim], gate_up [expert 2inter dim], down [expert dim inter]. `gelu`: with the gelu of
    tanh in place of silu.
    """
    rows, place, sizes = ops.moe_permute(x, experts, gate_up.shape[0])
    both = ops.grouped_matmul(rows, gate_up, sizes)
    hidden = ops.gelu_and_mul(both, "tanh") if gelu else ops.silu_and_mul(both)
    return ops.moe_unpermute(ops.grouped_matmul(hidden, down, sizes), place, weights)


@define(
    shapes="x [tok dim], weights [tok k], experts [tok k], gate_up [expert 2*inter m], "
    "gate_up_scale [expert 2*inter t], gate_up_zero [expert 2*inter t], "
    "gate_up_bias [expert 2*inter], down [expert dim i], down_scale [expert dim u], "
    "down_zero [expert dim u], down_bias [expert dim] -> [tok dim] x",
    level="coarse",
    shards=("expert",),
    composition=(
        "moe_permute",
        "grouped_linear",
        "silu_and_mul",
        "gelu_and_mul",
        "swigluoai_and_mul",
        "grouped_linear",
        "moe_unpermute",
    ),
    contract=EXPERTS,
)
def moe_experts_narrow(
    ops: Any,
    x: Array,
    weights: Array,
    experts: Array,
    gate_up: Array,
    gate_up_scale: Array | None,
    gate_up_zero: Array | None,
    gate_up_bias: Array | None,
    down: Array,
    down_scale: Array | None,
    down_zero: Array | None,
    down_bias: Array | None,
    kind: str,
    alpha: float,
    limit: float,
    gelu: bool = False,
) -> Array:
    """As `moe_experts`, with weights of `kind` plain or narrow (`grouped_linear`) and biases.

    `alpha` 0: silu(gate) * up, or with `gelu` its product with that, gate in front of up. Else gate
    and up lie in turns, as `swigluoai_and_mul` with `alpha` and `limit` takes them; there is no
    gelu then.
    """
    if alpha and gelu:
        raise OpError(f"moe_experts_narrow: gelu is True, allowed with alpha 0, got alpha {alpha}")
    rows, place, sizes = ops.moe_permute(x, experts, gate_up.shape[0])
    both = ops.grouped_linear(rows, gate_up, gate_up_scale, gate_up_zero, gate_up_bias, sizes, kind)
    if alpha:
        hidden = ops.swigluoai_and_mul(both, alpha, limit)
    else:
        hidden = ops.gelu_and_mul(both, "tanh") if gelu else ops.silu_and_mul(both)
    y = ops.grouped_linear(hidden, down, down_scale, down_zero, down_bias, sizes, kind)
    return ops.moe_unpermute(y, place, weights)
