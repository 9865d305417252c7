"""The stages of a layer: one function for each type of mixer, and the one seam for products with
weights.

A stage sees the ops, what its mixer is, the layer's weights and cache, and the batch. None asks
which family it is in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeGuard

from ..errors import ConfigError
from .spec import (
    Activation,
    Attention,
    Experts,
    LatentAttention,
    Layer,
    LayerInput,
    Mixer,
    Mlp,
    MlpAndExperts,
    Model,
    Narrow,
    Norm,
)

DEALT = ("o", "down", "shared_down")
"""The products whose tokens are dealt out to shards, where `Narrow.dealt` says that any are."""
Array = Any
Weights = Mapping[str, Array]
Cache = Any
"""Keys and values of one layer [page slot 2*kvhead hdim], or latents [page slot copy rank+turn]."""


class Rows(NamedTuple):
    """The last token of each request, the only ones that anything behind the layers wants, and what
    attention reads of them alone: each request has one query.

    `index` [row]: where the tokens are. `query_start` [row + 1]: 0, 1, 2 ... `counts` [2]: the
    number of requests, twice.
    """

    index: Array
    query_start: Array
    counts: Array


class Batch(NamedTuple):
    """What every layer of a step reads: cos, sin [tok r] float32, and fields of `batch_layout`.
    Where layers have several rotary embeddings, the columns of each stand side by side.

    Of several page groups, `slots` and `page_table` hold those of one behind those of another, and
    a layer reads its own (`of_group`).

    `max_query_len` is a Python integer. A program that gets its batch as an argument sets it inside
    (`within`). `rows`: the only tokens that anything behind the layers wants, in the last layer
    that mixes tokens. `layer_input` are the small embeddings of the tokens: [layer tok size],
    of which a layer reads its own (`of_layer`) [tok size]. `stream` [tok dim] is what a stage's x
    is the norm of, within a layer.
    """

    cos: Array
    sin: Array
    slots: Array
    page_table: Array
    query_start: Array
    kv_lens: Array
    counts: Array
    max_query_len: int = 0
    rows: Rows | None = None
    layer_input: Array | None = None
    stream: Array | None = None

    def arrays(self) -> dict[str, Array]:
        """What a step brings to the device, by name."""
        return dict(zip(ARRAYS, self, strict=False))

    def of_group(self, group: int, num_groups: int) -> Batch:
        """What the layers of one of `num_groups` page groups read."""
        if num_groups == 1:
            return self
        tokens = self.slots.shape[0] // num_groups
        requests = self.page_table.shape[0] // num_groups
        return self._replace(
            slots=self.slots[group * tokens : (group + 1) * tokens],
            page_table=self.page_table[group * requests : (group + 1) * requests],
        )

    def of_layer(self, layer: int) -> Batch:
        """What one layer reads of embeddings that each has of its own."""
        if self.layer_input is None:
            return self
        return self._replace(layer_input=self.layer_input[layer])

    def within(self, max_query_len: int, rows: Rows | None = None) -> Batch:
        """The same inside of a program."""
        return self._replace(max_query_len=max_query_len, rows=rows)

    def queries_of(self, rows: Rows) -> Batch:
        """What attention reads where only the tokens `rows` ask."""
        return self._replace(
            query_start=rows.query_start, counts=rows.counts, max_query_len=1, rows=None
        )

    def narrowed(self, rows: Rows) -> Batch:
        """What stages read that see the tokens `rows` only and nothing of the cache."""
        own = None if self.layer_input is None else self.layer_input[rows.index]
        return self._replace(layer_input=own, slots=self.slots[rows.index])


ARRAYS = Batch._fields[:-4]
Stage = Callable[[Any, Any, Weights, Array, Cache, Batch], tuple[Array, Cache]]
"""(ops, mixer, weights, x [tok dim], cache, batch) -> (y [tok dim], cache).

A stage whose tokens see each other returns the tokens `batch.rows` only, if there are any.
"""


def project(
    ops: Any, weights: Weights, name: str, x: Array, batch: Batch, narrow: Narrow | None
) -> Array:
    """x [tok in] times the weight of this name, [tok out]: the only place that knows what a
    weight is.
    """
    weight, bias = weights[name], weights.get(f"{name}_bias")
    if narrow is None:
        return ops.linear(x, weight, bias)
    scale = weights[f"{name}_scale"]
    if narrow.activations is None:
        zero = weights.get(f"{name}_zero")
        return ops.linear_grouped(x, weight, scale, zero, bias, narrow.kind)
    dtype = str(x.dtype).removeprefix("torch.")
    if quantises_rows(narrow) and not _is_dealt(narrow, name):
        return ops.linear_fp8(x, weight, None, scale, bias, dtype)
    values, own = quantized(ops, weights, name, x, narrow)
    linear = ops.linear_int8 if narrow.activations == "int8" else ops.linear_fp8
    return linear(values, weight, own, scale, bias, dtype)


def quantises_rows(narrow: Narrow) -> bool:
    """Whether tokens are quantised to fp8 by row: `linear_fp8` does that itself."""
    return narrow.activations == "fp8" and narrow.scales_whole_tokens


def _is_dealt(narrow: Narrow, name: str) -> bool:
    """Whether each shard has some of the entries of what goes into a product."""
    return narrow.dealt and name in DEALT


def quantized(
    ops: Any, weights: Weights, name: str, x: Array, narrow: Narrow
) -> tuple[Array, Array]:
    """(values [tok in], scales) of what goes into a product: each token's own, or those that the
    weights bring along.
    """
    scale = None
    if narrow.static_activations:
        # All parts of a weight have the same (`check_checkpoint`).
        scale = weights[f"{name}_input_scale"][:1]
    elif narrow.scales_whole_tokens and _is_dealt(narrow, name):
        # A token has one scale, of its largest entry on any shard.
        scale = ops.token_scales(x, 127.0 if narrow.activations == "int8" else 448.0)
    if scale is not None:
        fixed = ops.quantize_int8 if narrow.activations == "int8" else ops.quantize_fp8
        return fixed(x, scale), scale
    by = ("block", narrow.activation_group) if narrow.activation_group else ("row", 0)
    own = ops.quantize_int8_dynamic if narrow.activations == "int8" else ops.quantize_fp8_dynamic
    found: tuple[Array, Array] = own(x, *by)
    return found


def _pieces(weights: Weights, names: tuple[str, ...], parts: tuple[str, ...]) -> list[Array | None]:
    """What narrow weights of these names are made of, None where one has no such part."""
    return [weights.get(f"{name}{part}") for name in names for part in parts]


def gated_mlp(
    ops: Any,
    weights: Weights,
    up: str,
    down: str,
    x: Array,
    batch: Batch,
    act: Activation,
    narrow: Narrow | None,
) -> Array:
    """Two projections and what is between them: as the one op that covers them, if there is one
    for their weights.
    """
    if narrow is not None:
        if act == "silu" and quantises_rows(narrow) and not _is_dealt(narrow, down):
            return ops.gated_mlp_fp8(x, *_pieces(weights, (up, down), ("", "_scale", "_bias")))
        if act == "silu" and narrow.activations is None:
            pieces = _pieces(weights, (up, down), ("", "_scale", "_zero", "_bias"))
            return ops.gated_mlp_grouped(x, *pieces, narrow.kind)
        both = project(ops, weights, up, x, batch, narrow)
        hidden = ops.silu_and_mul(both) if act == "silu" else ops.gelu_and_mul(both, "tanh")
        return project(ops, weights, down, hidden, batch, narrow)
    bias_up, bias_down = weights.get(f"{up}_bias"), weights.get(f"{down}_bias")
    op = ops.gated_mlp if act == "silu" else ops.gelu_gated_mlp
    return op(x, weights[up], bias_up, weights[down], bias_down)


def begins_with_norm(mixer: Mixer) -> TypeGuard[Attention | Mlp]:
    """Whether one op computes what a mixer begins with and the norm in front of that: tokens are
    quantised by row there.
    """
    if not isinstance(mixer, Attention | Mlp) or type(mixer) in _replaced:
        return False
    if mixer.narrow is None or not quantises_rows(mixer.narrow):
        return False
    if isinstance(mixer, Attention):
        return mixer.reads is None
    return mixer.act == "silu" and not _is_dealt(mixer.narrow, "down")


def stage_with_norm(
    ops: Any,
    spec: Attention | Mlp,
    weights: Weights,
    norm: Norm,
    hidden: Array,
    residual: Array,
    cache: Cache,
    batch: Batch,
) -> tuple[Array, Array, Cache]:
    """(What a mixer that `begins_with_norm` gives of the norm of a stream's two summands, their
    sum, the cache).
    """
    given = hidden, residual, weights[norm.weight]
    if isinstance(spec, Mlp):
        pieces = _pieces(weights, ("gate_up", "down"), ("", "_scale", "_bias"))
        y, total = ops.add_norm_gated_mlp_fp8(*given, *pieces, norm.eps)
        return y, total, cache
    pieces = _pieces(weights, ("qkv",), ("", "_scale", "_bias"))
    qkv, total = ops.add_norm_linear_fp8(*given, *pieces, norm.eps)
    y, cache = attention_of(ops, spec, weights, qkv, cache, batch)
    return y, total, cache


def angles_of(spec: Attention | LatentAttention, batch: Batch) -> tuple[Array, Array]:
    """cos and sin [tok r] of a layer's own rotary embedding."""
    if spec.angles is None:
        return batch.cos, batch.sin
    own = slice(*spec.angles)
    return batch.cos[:, own], batch.sin[:, own]


def attention_stage(
    ops: Any, spec: Attention, weights: Weights, x: Array, cache: Cache, batch: Batch
) -> tuple[Array, Cache]:
    """Writes the tokens' keys and values, then reads those of their requests."""
    if spec.reads is not None:
        q = queries(ops, spec, weights, x, batch)
        return attended(ops, spec, weights, q, cache, batch), cache
    qkv = project(ops, weights, "qkv", x, batch, spec.narrow)
    return attention_of(ops, spec, weights, qkv, cache, batch)


def attention_of(
    ops: Any, spec: Attention, weights: Weights, qkv: Array, cache: Cache, batch: Batch
) -> tuple[Array, Cache]:
    """The same from q, k and v [tok q+2*kv] of the tokens on."""
    if spec.wide_qk_norm:
        qkv = normed_over_heads(ops, spec, qkv, weights["q_norm"], weights["k_norm"])
    q_norm = weights["q_norm"] if spec.qk_norm else None
    k_norm = weights["k_norm"] if spec.qk_norm else None
    scales = weights.get("k_scale"), weights.get("v_scale")
    cos, sin = angles_of(spec, batch)
    # Left out where it is the default: providers that know no such norm take the call.
    more = {"v_norm": True} if spec.v_norm else {}
    if spec.qk_norm_behind_rope:
        more["norm_behind"] = True
    q, cache = ops.norm_rope_write_kv(
        qkv, cache, q_norm, k_norm, cos, sin, batch.slots, spec.norm_eps, *scales, **more
    )
    return attended(ops, spec, weights, q, cache, batch), cache


def normed_over_heads(
    ops: Any, spec: Attention, qkv: Array, q_weight: Array, k_weight: Array
) -> Array:
    """qkv [tok q+2*kv] with q and k normed over all of their heads, on whatever shards they are."""
    if spec.dealt_entries is None:
        return ops.wide_qk_norm(qkv, q_weight, k_weight, spec.norm_eps)
    means = ops.all_reduce(ops.qk_mean_squares(qkv, q_weight, k_weight, *spec.dealt_entries))
    return ops.norm_qk_by_means(qkv, means, q_weight, k_weight, spec.norm_eps)


def queries(ops: Any, spec: Attention, weights: Weights, x: Array, batch: Batch) -> Array:
    """Normed and rotated queries [tok head hdim] of a layer that has no keys and values."""
    q = project(ops, weights, "q", x, batch, spec.narrow)
    q = q.reshape(q.shape[0], spec.num_heads, spec.head_dim)
    q_norm = weights["q_norm"] if spec.qk_norm else None
    return ops.norm_rope(q, q_norm, *angles_of(spec, batch), spec.norm_eps)


def attended(
    ops: Any, spec: Attention, weights: Weights, q: Array, cache: Cache, batch: Batch
) -> Array:
    """What queries [tok head hdim] read of the cache, projected: [tok dim]."""
    scales = weights.get("k_scale"), weights.get("v_scale")
    if spec.temper is not None:
        q = ops.scale_tokens(q, batch.cos[:, spec.temper])
    if batch.rows is not None:
        # Keys and values are written for all tokens; nobody asks for what the others read of them.
        q, batch = q[batch.rows.index], batch.queries_of(batch.rows)
    # Left out where it is the default, as above.
    more = {"sinks": weights["sinks"]} if spec.sinks else {}
    if spec.chunk:
        more["chunk"] = spec.chunk
    y = ops.paged_attention(
        q, cache, batch.page_table, batch.query_start, batch.kv_lens, batch.counts,
        spec.scale, spec.window, spec.soft_cap, batch.max_query_len, *scales, **more,
    )  # fmt: skip
    heads = y.reshape(y.shape[0], spec.num_heads * spec.head_dim)
    return project(ops, weights, "o", heads, batch, spec.narrow)


def latent_attention_stage(
    ops: Any, spec: LatentAttention, weights: Weights, x: Array, cache: Cache, batch: Batch
) -> tuple[Array, Cache]:
    """Writes the tokens' latents, then reads those of their requests."""
    cos, sin = angles_of(spec, batch)
    if spec.query_rank:
        both = project(ops, weights, "qkv_a", x, batch, spec.narrow)
        latents = both[:, spec.query_rank :]
        x = ops.rms_norm(both[:, : spec.query_rank], weights["q_a_norm"], spec.norm_eps)
    else:
        latents = project(ops, weights, "kv_a", x, batch, spec.narrow)
    norm = weights["kv_a_norm"]
    cache = ops.norm_rope_write_latents(latents, cache, norm, cos, sin, batch.slots, spec.norm_eps)
    temper = None if spec.temper is None else batch.cos[:, spec.temper]
    if batch.rows is not None:
        # Latents are written for all tokens; nobody asks for what the others read of them.
        index = batch.rows.index
        x, cos, sin, batch = x[index], cos[index], sin[index], batch.queries_of(batch.rows)
        temper = None if temper is None else temper[index]
    q = project(ops, weights, "q", x, batch, spec.narrow)
    q = q.reshape(q.shape[0], spec.num_heads, spec.plain + spec.rotated)
    if temper is not None:
        q = ops.scale_tokens(q, temper)
    # Of each head the rows that make keys, then those that make values.
    of_heads = weights["kv_b"].reshape(spec.num_heads, spec.plain + spec.v_dim, spec.rank)
    y = ops.latent_attention(
        ops.to_latents(q[..., : spec.plain], of_heads[:, : spec.plain]),
        ops.norm_rope(q[..., spec.plain :], None, cos, sin, spec.norm_eps),
        cache, batch.page_table, batch.query_start, batch.kv_lens, batch.counts, spec.scale,
        batch.max_query_len,
    )  # fmt: skip
    values = ops.from_latents(y, of_heads[:, spec.plain :])
    heads = values.reshape(values.shape[0], spec.num_heads * spec.v_dim)
    return project(ops, weights, "o", heads, batch, spec.narrow), cache


def mlp_stage(
    ops: Any, spec: Mlp, weights: Weights, x: Array, cache: Cache, batch: Batch
) -> tuple[Array, Cache]:
    """Each token for itself; the cache stays as it is."""
    if spec.act == "relu2":
        hidden = ops.relu2(project(ops, weights, "up", x, batch, spec.narrow))
        return project(ops, weights, "down", hidden, batch, spec.narrow), cache
    y = gated_mlp(ops, weights, "gate_up", "down", x, batch, spec.act, spec.narrow)
    return y, cache


def experts_stage(
    ops: Any, spec: Experts, weights: Weights, x: Array, cache: Cache, batch: Batch
) -> tuple[Array, Cache]:
    """Each token for itself; padding goes through no expert, and the cache stays as it is."""
    return through_experts(ops, spec, weights, x, x, batch), cache


def through_experts(
    ops: Any, spec: Experts, weights: Weights, x: Array, of_router: Array, batch: Batch
) -> Array:
    """What the experts make of x [tok dim], chosen by what the router reads."""
    logits = ops.logits(of_router, weights["router"])
    chosen, experts = route(ops, spec, weights, logits, batch)
    routed = ops.gate_by_best(x, logits) if spec.gates_input else x
    if spec.first is not None:
        # Those of other shards become none: below 0, or more than there are.
        experts = experts - spec.first
    # Left out where it is the default, as above.
    more = {"gelu": True} if spec.act == "gelu_tanh" else {}
    if spec.narrow is None and not spec.biases:
        gate_up = of_experts(spec, weights, "experts_gate_up")
        down = of_experts(spec, weights, "experts_down")
        y = ops.moe_experts(routed, chosen, experts, gate_up, down, **more)
    else:
        pieces = [
            of_experts(spec, weights, f"{name}{piece}")
            for name in ("experts_gate_up", "experts_down")
            for piece in ("", "_scale", "_zero", "_bias")
        ]
        kind = "plain" if spec.narrow is None else spec.narrow.kind
        clamp = spec.alpha, spec.limit
        y = ops.moe_experts_narrow(routed, chosen, experts, *pieces, kind, *clamp, **more)
    if spec.shared is not None:
        every = gated_mlp(
            ops, weights, "shared_gate_up", "shared_down", x, batch, spec.act, spec.narrow
        )
        if spec.shared == "plain":
            return ops.add(y, every)
        y = ops.add_gated(y, every, ops.logits(x, weights["shared_gate"]))
    return y


def mlp_and_experts_stage(
    ops: Any, spec: MlpAndExperts, weights: Weights, x: Array, cache: Cache, batch: Batch
) -> tuple[Array, Cache]:
    """Each token for itself; the cache stays as it is. What experts give is normed and added where
    the sum is normed.
    """
    dense, _ = mlp_stage(ops, spec.mlp, weights, x, cache, batch)
    if spec.reduces:
        dense = ops.all_reduce(dense)
    dense = ops.rms_norm(dense, weights[spec.behind_mlp.weight], spec.behind_mlp.eps)
    before, router = spec.before_experts, spec.before_router
    normed, of_router = ops.rms_norm_pair(
        batch.stream, weights[before.weight], weights[router.weight], before.eps
    )
    y = through_experts(ops, spec.experts, weights, normed, of_router, batch)
    if spec.reduces:
        y = ops.all_reduce(y)
    behind, out = spec.behind_experts, spec.out
    y, _ = ops.norm_add_rms_norm(
        y, weights[behind.weight], dense, weights[out.weight], behind.eps, out.eps
    )
    return y, cache


def of_experts(spec: Experts, weights: Weights, name: str) -> Array | None:
    """What all experts have of this name, one below the other in the parameter, by expert."""
    found = weights.get(name)
    if found is None:
        return None
    return found.reshape(spec.num_experts, -1, *found.shape[1:])


def route(
    ops: Any, spec: Experts, weights: Weights, logits: Array, batch: Batch
) -> tuple[Array, Array]:
    """The weights [tok k] float32 and numbers [tok k] int32 of each token's experts."""
    slots = batch.slots
    if spec.score == "softmax":
        # Left out where it is the default, as above.
        more = {"shift": weights["router_shift"]} if spec.biases else {}
        if spec.factors:
            more["factor"] = weights["expert_factor"]
        found: tuple[Array, Array] = ops.moe_route(
            logits, slots, spec.top_k, spec.renormalize, **more
        )
        return found
    if spec.score == "biased":
        biased: tuple[Array, Array] = ops.moe_route_biased(
            logits, weights["router_bias"], slots, spec.top_k, spec.renormalize
        )
        return biased
    if spec.biases:
        logits = logits + weights["router_shift"][None, :]
    scored: tuple[Array, Array] = ops.moe_route_sigmoid(
        logits, weights["router_bias"], slots, spec.top_k, spec.renormalize, spec.groups,
        spec.groups_kept, spec.scale,
    )  # fmt: skip
    return scored


def layer_input_stage(
    ops: Any, spec: LayerInput, weights: Weights, x: Array, cache: Cache, batch: Batch
) -> tuple[Array, Cache]:
    """The layer's own embedding of each token, as far as its gate lets it; the cache stays."""
    gate = project(ops, weights, "input_gate", x, batch, spec.narrow)
    own = ops.gelu_gate(gate, batch.layer_input)
    return project(ops, weights, "input_up", own, batch, spec.narrow), cache


STAGES: Mapping[type[Mixer], Stage] = {
    Attention: attention_stage,
    LatentAttention: latent_attention_stage,
    Mlp: mlp_stage,
    Experts: experts_stage,
    MlpAndExperts: mlp_and_experts_stage,
    LayerInput: layer_input_stage,
}
_replaced: dict[type[Mixer], Stage] = {}


def replace_stage(mixer: type[Mixer], stage: Stage) -> None:
    """Run `stage` for this type of mixer, in every model that has it: for packages that are not
    part of this one.

    Raises ConfigError for a type that has no stage, and if somebody else has replaced it.
    """
    if mixer not in STAGES:
        allowed = ", ".join(known.__name__ for known in STAGES)
        raise ConfigError(
            f"mixer: got {getattr(mixer, '__name__', mixer)!r}, allowed are {allowed}"
        )
    other = _replaced.get(mixer, stage)
    if other is not stage:
        raise ConfigError(
            f"mixer: the stage of {mixer.__name__} is replaced by {_title(other)} and by "
            f"{_title(stage)}, "
            "one of them is allowed"
        )
    _replaced[mixer] = stage


def stage_of(mixer: Mixer) -> Stage:
    """The stage that runs for a mixer."""
    kind = type(mixer)
    return _replaced.get(kind) or STAGES[kind]


def is_replaced(layer: Layer) -> bool:
    """Whether a stage of a layer comes from outside: what it does between its ops is not known."""
    return any(type(sublayer.mixer) in _replaced for sublayer in layer)


def any_replaced(model: Model) -> bool:
    """Whether a stage of any layer comes from outside."""
    return any(is_replaced(layer) for layer in model.kinds)


def outside_stages(model: Model) -> dict[str, Stage]:
    """The stages of a model that come from outside, by the names of their mixers."""
    mixers = {type(sublayer.mixer) for layer in model.kinds for sublayer in layer}
    return {mixer.__name__: _replaced[mixer] for mixer in mixers & _replaced.keys()}


def _title(stage: Stage) -> str:
    return f"{stage.__module__}.{getattr(stage, '__qualname__', stage)}"
