"""One decoder for all families of the references: a stage for each type of mixer, over the
product's own reference ops in numpy and the mathematics of `maths.py`.

It runs one request in float64, so its own rounding does not show beside that of float32. Caches and
weights are dictionaries of arrays. A weight that may be absent, such as a bias, is read by `get`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from twinfer.ops import resolve
from twinfer.ops.declare import Array

from .maths import Maths, sigmoid, softplus, wide
from .spec import (
    Activation,
    Attention,
    DeltaNet,
    Experts,
    LatentAttention,
    Layer,
    Mamba2,
    Mlp,
    MlpAndExperts,
    Model,
    Norm,
    PerLayerInput,
)

OPS: Any = resolve("numpy").bind()
SWIGLUOAI = 1.702, 7.0
"""alpha and limit of gpt-oss."""

Named = Mapping[str, Array]
Cache = dict[str, Array]
Angles = tuple[Array, Array]
"""cos and sin of each position [position rotated/2]."""


@dataclass(frozen=True, kw_only=True)
class Weights:
    """layers[i][j] are those of sublayer j of layer i. No `head`: the embedding is the head.

    `per_layer` makes the small embeddings [tok layer dim] of token ids and the embedded tokens.
    """

    embedding: Array
    norm: Array
    layers: Sequence[Sequence[Named]]
    angles: Sequence[Angles] = ()
    head: Array | None = None
    scalars: Sequence[Array] = ()
    per_layer: Callable[[Array, Array], Array] | None = None


@dataclass(frozen=True, kw_only=True)
class Step:
    """What the stages share: tokens at positions from `start` on."""

    maths: Maths
    start: int
    angles: Sequence[Angles]
    caches: Sequence[Cache]
    per_layer: Array | None
    positions: Array

    def rotate(self, table: int, pairs: bool, q: Array, k: Array) -> tuple[Array, Array]:
        """q and k [tok head hdim] by the angles of the tokens."""
        cos, sin = (values[self.positions] for values in self.angles[table])
        if pairs:
            q, k = OPS.rotary_embedding_gptj(q, k, cos, sin)
        else:
            q, k = OPS.rotary_embedding(q, k, cos, sin)
        return q, k


def forward(
    model: Model, weights: Weights, ids: Array, caches: Sequence[Cache], start: int, maths: Maths
) -> Array:
    """Logits [tok vocab] of token ids at positions from `start` on. The caches, one for each
    layer, are advanced.
    """
    stream = OPS.embedding(ids, weights.embedding) * model.embedding_scale
    step = Step(
        maths=maths,
        start=start,
        angles=weights.angles,
        caches=caches,
        per_layer=weights.per_layer(ids, stream) if weights.per_layer else None,
        positions=start + np.arange(len(ids)),
    )
    for index, layer in enumerate(model.layers):
        stream = run_layer(step, index, layer, weights.layers[index], stream)
        if layer.scalar:
            stream = stream * weights.scalars[index]
    hidden = norm(model.norm, stream, weights.norm)
    head = weights.embedding if weights.head is None else weights.head
    return OPS.logits_processor(OPS.logits(hidden, head), model.logits_scale, model.logits_cap)


def run_layer(
    step: Step, index: int, layer: Layer, weights: Sequence[Named], stream: Array
) -> Array:
    """The stream [tok dim] behind layer `index`."""
    for sublayer, named in zip(layer.sublayers, weights, strict=True):
        x = stream if sublayer.pre is None else norm(sublayer.pre, stream, named.get("pre"))
        if isinstance(sublayer.mixer, MlpAndExperts):
            y = mlp_and_experts(step, sublayer.mixer, named, x, stream)
        elif isinstance(sublayer.mixer, PerLayerInput):
            y = per_layer_input(step, sublayer.mixer, named, x, index)
        else:
            stage = STAGES[type(sublayer.mixer)]
            y = stage(step, sublayer.mixer, named, x, step.caches[index])
        if sublayer.post is not None:
            y = norm(sublayer.post, y, named.get("post"))
        stream = OPS.add(stream, y * sublayer.scale)
    return stream


def norm(how: Norm, x: Array, weight: Array | None) -> Array:
    """x [... n] normed."""
    if how.kind == "unit" or weight is None:
        weight = np.ones(x.shape[-1], x.dtype)
    rms_norm = OPS.gemma_rms_norm if how.kind == "gemma" else OPS.rms_norm
    return rms_norm(x, weight, how.eps)


def project(weights: Named, name: str, x: Array) -> Array:
    """x [tok k] by the matrix `name` [n k], and its bias if it has one."""
    return OPS.linear(x, weights[name], weights.get(f"{name}_bias"))


def append(cache: Cache, name: str, rows: Array) -> None:
    """Write the rows of new tokens behind those of earlier ones."""
    cache[name] = np.concatenate([cache[name], rows]) if name in cache else rows


# --- attention


def attention(step: Step, a: Attention, weights: Named, x: Array, cache: Cache) -> Array:
    """x [tok dim] -> [tok dim]."""
    q, k, v = queries_keys_values(a, weights, x)
    if a.qk_norm is not None and not a.norm_rows and not a.norm_after_rope:
        q = norm(a.qk_norm, q, weights.get("q_norm"))
        k = norm(a.qk_norm, k, weights.get("k_norm"))
    if a.rope is not None:
        q, k = step.rotate(a.rope, a.pairs, q, k)
    if a.qk_norm is not None and a.norm_after_rope:
        q, k = norm(a.qk_norm, q, None), norm(a.qk_norm, k, None)
    q = q * temperatures(a, step.positions, q)
    if a.shares is None:
        append(cache, "k", k)
        append(cache, "v", v)
    else:
        cache = step.caches[a.shares]
    y = step.maths.attention(
        q, cache["k"], cache["v"], step.start, a.scale, a.window, a.chunk, a.soft_cap,
        weights["sinks"] if a.sinks else None,
    )  # fmt: skip
    y = y.reshape(len(x), -1).astype(x.dtype)
    if a.gated:
        y = (y * sigmoid(project(weights, "gate", x))).astype(x.dtype)
    return project(weights, "o", y)


def queries_keys_values(a: Attention, weights: Named, x: Array) -> tuple[Array, Array, Array]:
    """q [tok head hdim], k and v [tok kvhead hdim] before positions and norms of heads. A layer
    that reads another one's cache has no k and v: some of q stand in for them.
    """
    q = project(weights, "q", x)
    if a.shares is not None:
        q = q.reshape(len(x), a.num_heads, a.head_dim)
        return q, q[:, :1], q[:, :1]
    k = project(weights, "k", x)
    v = k if a.v_is_k else project(weights, "v", x)
    if a.qk_norm is not None and a.norm_rows:
        q = norm(a.qk_norm, q, weights["q_norm"])
        k = norm(a.qk_norm, k, weights["k_norm"])
    q = q.reshape(len(x), a.num_heads, a.head_dim)
    k, v = (rows.reshape(len(x), a.num_kv_heads, a.head_dim) for rows in (k, v))
    if a.v_norm is not None:
        v = norm(a.v_norm, v, None)
    return q, k, v


def temperatures(a: Attention | LatentAttention, positions: Array, q: Array) -> Array:
    """What queries are multiplied by: [tok 1 1] in the dtype of q."""
    t = a.temperature
    if t is None:
        return np.ones((1, 1, 1), q.dtype)
    grown = np.log1p(np.floor((positions + t.offset) / t.length))
    return (1 + t.beta * grown)[:, None, None].astype(q.dtype)


def latent_attention(
    step: Step, a: LatentAttention, weights: Named, x: Array, cache: Cache
) -> Array:
    """x [tok dim] -> [tok dim]. The cache holds the normed latent and one rotated key a token."""
    q = x
    if a.query_rank is not None:
        q = norm(a.norm, project(weights, "q_a", x), weights["q_a_norm"])
    q = project(weights, "q_b", q).reshape(len(x), a.num_heads, a.plain + a.rotated)
    compressed = project(weights, "kv_a", x)
    latent = norm(a.norm, compressed[:, : a.rank].copy(), weights["kv_a_norm"])
    q_rotated, k_rotated = step.rotate(0, True, q[..., a.plain :], compressed[:, None, a.rank :])
    append(cache, "latent", np.concatenate([latent, k_rotated[:, 0]], axis=-1))
    up = weights["kv_b"].reshape(a.num_heads, a.plain + a.v_dim, a.rank)
    k_up, v_up = up[:, : a.plain], up[:, a.plain :]
    q = np.concatenate([np.einsum("thn,hnr->thr", q[..., : a.plain], k_up), q_rotated], axis=-1)
    q = q * temperatures(a, step.positions, q)
    y = step.maths.latent_attention(q, cache["latent"], step.start, a.scale, a.rank)
    y = np.einsum("thr,hvr->thv", y, v_up).reshape(len(x), -1)
    return project(weights, "o", y.astype(x.dtype))


# --- recurrent states


def convolve(step: Step, weights: Named, x: Array, cache: Cache) -> Array:
    """silu of the causal convolution of x [tok ch], whose state is in the cache."""
    channels, width = weights["conv"].shape
    state = cache.get("conv", np.zeros((width - 1, channels)))
    y, cache["conv"] = step.maths.causal_conv(x, weights["conv"], weights.get("conv_bias"), state)
    return y


def delta_net(step: Step, d: DeltaNet, weights: Named, x: Array, cache: Cache) -> Array:
    """x [tok dim] -> [tok dim]."""
    keys, tokens = d.k_heads * d.k_dim, len(x)
    y = convolve(step, weights, project(weights, "qkv", x), cache)
    q, k, v = np.split(y, [keys, 2 * keys], axis=1)
    group = d.v_heads // d.k_heads
    q, k = (np.repeat(z.reshape(tokens, d.k_heads, d.k_dim), group, axis=1) for z in (q, k))
    v = v.reshape(tokens, d.v_heads, d.v_dim)
    dt = softplus(wide(project(weights, "a", x)) + weights["dt_bias"])
    log_decay = -np.exp(wide(weights["A_log"])) * dt
    beta = sigmoid(project(weights, "b", x))
    state = cache.get("state", np.zeros((d.v_heads, d.k_dim, d.v_dim)))
    y, cache["state"] = step.maths.gated_delta_rule(q, k, v, log_decay, beta, state)
    gate = project(weights, "z", x).reshape(y.shape)
    y = OPS.gated_rms_norm(y.astype(x.dtype), gate, weights["norm"], d.norm.eps, True)
    return project(weights, "out", y.reshape(tokens, -1))


def mamba2(step: Step, m: Mamba2, weights: Named, x: Array, cache: Cache) -> Array:
    """x [tok dim] -> [tok dim]."""
    inner, states, tokens = m.num_heads * m.head_dim, m.groups * m.state, len(x)
    sizes = np.cumsum([inner, inner + 2 * states])
    gate, xbc, dt = np.split(project(weights, "in", x), sizes, axis=1)
    y = convolve(step, weights, xbc, cache)
    heads, b, c = np.split(y, [inner, inner + states], axis=1)
    b, c = (z.reshape(tokens, m.groups, m.state) for z in (b, c))
    y, cache["state"] = step.maths.ssd(
        heads.reshape(tokens, m.num_heads, m.head_dim),
        softplus(wide(dt) + weights["dt_bias"]),
        -np.exp(wide(weights["A_log"])),
        b,
        c,
        wide(weights["D"]),
        cache.get("state", np.zeros((m.num_heads, m.head_dim, m.state))),
    )
    grouped = tokens, m.groups, inner // m.groups
    y = OPS.gated_rms_norm(
        y.reshape(grouped).astype(x.dtype), gate.reshape(grouped),
        weights["norm"].reshape(grouped[1:]), m.norm.eps, False,
    )  # fmt: skip
    return project(weights, "out", y.reshape(tokens, inner))


# --- MLPs and experts


def activate(activation: Activation, x: Array) -> Array:
    """x [row 2*inter] -> [row inter], or [row inter] -> the same without a gate."""
    if activation == "silu":
        y = OPS.silu_and_mul(x)
    elif activation == "gelu_tanh":
        y = OPS.gelu_and_mul(x, "tanh")
    elif activation == "swigluoai":
        y = OPS.swigluoai_and_mul(x, *SWIGLUOAI)
    else:
        y = OPS.relu2(x)
    return y


def mlp(step: Step, m: Mlp, weights: Named, x: Array, cache: Cache) -> Array:
    """x [tok dim] -> [tok dim]."""
    return project(weights, "down", activate(m.activation, project(weights, "up", x)))


def experts(step: Step, m: Experts, weights: Named, x: Array, cache: Cache) -> Array:
    """x [tok dim] -> [tok dim]."""
    routed, chosen = step.maths.route(
        project(weights, "router", x), weights.get("route_bias"), m.route
    )
    y = project(weights, "latent_in", x) if m.latent else x
    y = run_experts(m, weights, y, routed, chosen)
    if m.latent:
        y = project(weights, "latent_out", y)
    if m.shared is None:
        return y
    shared = project(
        weights, "shared_down", activate(m.activation, project(weights, "shared_up", x))
    )
    if m.shared == "gated":
        shared = (shared * sigmoid(project(weights, "shared_gate", x))).astype(x.dtype)
    return y + shared


def run_experts(m: Experts, weights: Named, x: Array, routed: Array, chosen: Array) -> Array:
    """The sum of each token's experts by their weights -> [tok dim]. x [tok dim], the weights
    `routed` and the experts `chosen` [tok k].
    """
    if m.scale_input:
        x, routed = (x * routed).astype(x.dtype), np.ones_like(routed)
    rows, place, sizes = OPS.moe_permute(x, chosen, len(weights["experts_up"]))
    expert = np.repeat(np.arange(len(sizes)), sizes)

    def multiply(name: str, rows: Array) -> Array:
        y = OPS.grouped_matmul(rows, weights[name], sizes)
        bias = weights.get(f"{name}_bias")
        return y if bias is None else y + bias[expert]

    hidden = activate(m.activation, multiply("experts_up", rows))
    return OPS.moe_unpermute(multiply("experts_down", hidden), place, routed)


def mlp_and_experts(step: Step, m: MlpAndExperts, weights: Named, x: Array, stream: Array) -> Array:
    """x and the stream [tok dim] -> [tok dim]. The router norms the stream without its weight."""
    dense = norm(m.norm, mlp(step, m.mlp, weights, x, {}), weights["mlp_norm"])
    scale = weights["router_scale"] * stream.shape[1] ** -0.5
    logits = project(weights, "router", norm(m.norm, stream, scale))
    routed, chosen = step.maths.route(logits, None, m.experts.route)
    routed = routed * weights["expert_scale"][chosen]
    y = norm(m.norm, stream, weights["experts_pre"])
    y = run_experts(m.experts, weights, y, routed, chosen)
    return dense + norm(m.norm, y, weights["experts_norm"])


def per_layer_input(step: Step, m: PerLayerInput, weights: Named, x: Array, index: int) -> Array:
    """x [tok dim] -> [tok dim]: the layer's small embedding of each token, gated by x."""
    if step.per_layer is None:
        raise ValueError("PerLayerInput: the model has no per_layer weights")
    pair = np.concatenate([project(weights, "gate", x), step.per_layer[:, index]], axis=-1)
    return project(weights, "proj", activate(m.activation, pair))


Stage = Callable[[Step, Any, Named, Array, Cache], Array]
STAGES: Mapping[type, Stage] = {
    Attention: attention,
    LatentAttention: latent_attention,
    DeltaNet: delta_net,
    Mamba2: mamba2,
    Mlp: mlp,
    Experts: experts,
}
