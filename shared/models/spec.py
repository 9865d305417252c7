"""What a model is, as data: frozen and hashable, so that equal layers are one kind of layer.

A layer is a tuple of sublayers. Each is `pre-norm -> mixer -> post-norm -> scale -> add to the
residual stream`. A mixer says what is computed. The function that computes it is its stage
(`stages.py`), one for each type of mixer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

Activation = Literal["silu", "gelu_tanh", "relu2"]
"""All gated but relu2."""
Score = Literal["softmax", "sigmoid", "biased"]
Shared = Literal["plain", "gated"]
NarrowKind = Literal["int8", "fp8", "int4", "fp4"]
"""See `ops/reference/narrow.py`."""
Activations = Literal["int8", "fp8"]


@dataclass(frozen=True)
class Norm:
    """RMS norm with the weight of this name."""

    weight: str
    eps: float


@dataclass(frozen=True)
class Narrow:
    """How the projections of a mixer are held: w = (q - zero) * scale, q of this kind.

    `group` entries along k share a scale, and a zero if they have `zeros`; 0: all of a row. With
    `activations` the products are of quantised tokens: by blocks of `activation_group` entries, or
    as a whole if it is 0; with `static_activations` by a scale of the weights, else by each one's
    own. `dealt`: the entries of tokens behind attention, and of hidden ones, are dealt out to
    shards.
    """

    kind: NarrowKind
    group: int = 0
    zeros: bool = False
    activations: Activations | None = None
    activation_group: int = 0
    static_activations: bool = False
    dealt: bool = False

    @property
    def scale_dtype(self) -> Literal["float32", "bfloat16"]:
        """What scales are held in. Those of mxfp4 are powers of two, which bfloat16 has all of, and
        a tenth of the weight's bytes less.
        """
        return "bfloat16" if self.kind == "fp4" and self.group == 32 else "float32"

    @property
    def scales_whole_tokens(self) -> bool:
        """Whether a token that is quantised has a scale of its own for all of its entries."""
        whole = not (self.static_activations or self.activation_group)
        return self.activations is not None and whole


@dataclass(frozen=True)
class Attention:
    """Causal attention over the paged cache. `window` w > 0: position p sees positions above p - w;
    0: all of them. `chunk` c > 0: it sees those from (p // c) c on.

    `norm_eps` is that of the norms of q and k heads, which a model has if `qk_norm`, or of the
    norms over all heads if `wide_qk_norm`: `dealt_entries` are those of q and of k that all shards
    have together, where each has some. `qk_norm_behind_rope`: heads are rotated before they are
    normed. `v_norm`: heads of v are normed too, without a weight.
    `soft_cap` c > 0 squashes scores to c tanh(score / c). `angles` are the columns (first, last +
    1) of the batch's cos and sin that this layer is rotated by; None: all. `temper` is the column
    of cos that q is multiplied with behind them. `reads`: the layer has no k and v of its own, but
    reads the cache of the layer with this number, whose window and heads are the same. `sinks`:
    each head has one more score, which is that of no token.
    """

    mixes_tokens: ClassVar[bool] = True

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int = 0
    chunk: int = 0
    qk_norm: bool = False
    qk_norm_behind_rope: bool = False
    norm_eps: float = 1e-6
    wide_qk_norm: bool = False
    dealt_entries: tuple[int, int] | None = None
    soft_cap: float = 0.0
    angles: tuple[int, int] | None = None
    temper: int | None = None
    v_norm: bool = False
    reads: int | None = None
    sinks: bool = False
    narrow: Narrow | None = None


@dataclass(frozen=True)
class LatentAttention:
    """Causal attention over a cache of latents (DeepSeek-V2, arXiv:2405.04434): all heads share a
    normed latent of `rank` entries a token, and one key of `rotated` entries.

    Heads of q have `plain` entries, and `rotated` ones behind them. Keys and values of a head are
    products of the latent, of `plain` and `v_dim` entries; here these products are made with q, and
    with what is read, so that neither is ever made of a slot. `query_rank`: q is a product of a
    normed latent of its own, of that size; 0: of the normed stream. `angles` and `temper` are as in
    `Attention`.
    """

    mixes_tokens: ClassVar[bool] = True

    num_heads: int
    plain: int
    rotated: int
    v_dim: int
    rank: int
    query_rank: int
    scale: float
    norm_eps: float
    angles: tuple[int, int] | None = None
    temper: int | None = None
    narrow: Narrow | None = None


@dataclass(frozen=True)
class Mlp:
    """A gated MLP: `down(act(gate) * up)`; with relu2 `down(relu2(up))`."""

    mixes_tokens: ClassVar[bool] = False

    act: Activation = "silu"
    narrow: Narrow | None = None


@dataclass(frozen=True)
class Experts:
    """A mixture of gated MLPs: each token goes through the `top_k` of `num_experts` that its router
    likes best.

    Weights are a softmax over all experts, or with `renormalize` over the chosen ones. With `score`
    sigmoid see the op `moe_route_sigmoid`, with biased `moe_route_biased`. `shared`: every token
    goes through one more MLP, and its result is added: as it is, or times a sigmoid of the token's
    gate. `biases`: the router and all projections have some. `alpha` and `limit` are those of
    `swigluoai_and_mul`; 0: experts are `act` of the gate times up. `factors`: weights are
    multiplied by a number of each expert. `gates_input`: the one expert of a token reads it times
    the sigmoid of its logit.

    On a shard `num_experts` are those that it has, whole, from number `first` on.
    """

    mixes_tokens: ClassVar[bool] = False

    num_experts: int
    top_k: int
    renormalize: bool
    act: Activation = "silu"
    shared: Shared | None = None
    score: Score = "softmax"
    groups: int = 1
    groups_kept: int = 1
    scale: float = 1.0
    biases: bool = False
    alpha: float = 0.0
    limit: float = 0.0
    factors: bool = False
    gates_input: bool = False
    narrow: Narrow | None = None
    first: int | None = None


@dataclass(frozen=True)
class MlpAndExperts:
    """An MLP beside experts: `out(behind_mlp(mlp(x)) + behind_experts(experts(before(stream))))`.

    x is the normed stream, as for any mixer. Experts read the stream through a norm of their own,
    and their router through another. What comes out is normed already: the sublayer has no `post`.

    On a shard, `reduces` says that both give a part of a sum, which is made before its norm.
    """

    mixes_tokens: ClassVar[bool] = False

    mlp: Mlp
    experts: Experts
    before_experts: Norm
    before_router: Norm
    behind_mlp: Norm
    behind_experts: Norm
    out: Norm
    reduces: bool = field(default=False, kw_only=True)


@dataclass(frozen=True)
class LayerInput:
    """A small embedding of each token, of this layer's own (`Batch.layer_input`), gated by the
    stream: `up(act(gate) * input)`.
    """

    mixes_tokens: ClassVar[bool] = False

    act: Activation = "gelu_tanh"
    narrow: Narrow | None = None


Mixer = Attention | LatentAttention | Mlp | Experts | MlpAndExperts | LayerInput


@dataclass(frozen=True, slots=True)
class Shard:
    """One of `count` shards of a model, whose processes add up what each computed."""

    index: int
    count: int


@dataclass(frozen=True)
class Place:
    """Where one of several processes stands: its shard, which process of its machine it is, and
    where all of them meet: `file://PATH` or `tcp://HOST:PORT`.
    """

    shard: Shard
    here: Shard
    meeting: str


@dataclass(frozen=True)
class Sublayer:
    """x = pre(stream); y = post(mixer(x)) * scale; stream += y. `factor` names the weight [1] that
    the stream is multiplied by behind that.

    On a shard, `reduces` says that the mixer gives a part of a sum, which is made at once;
    `reduces_before`, that what is added to the stream before `pre` is such a part, which is summed
    where it is added.
    """

    mixer: Mixer
    pre: Norm | None
    post: Norm | None = None
    scale: float = 1.0
    factor: str | None = None
    reduces: bool = False
    reduces_before: bool = False


Layer = tuple[Sublayer, ...]


@dataclass(frozen=True)
class Model:
    """The layers in order, and the norm behind the last one. Embeddings and logits are
    multiplied by their scales; that of embeddings is rounded to their dtype before, if
    `rounds_embedding_scale`. `logits_cap` c > 0 squashes logits to c tanh(logit / c). `input_size`:
    entries of the small embedding that each layer gets of a token, 0 for none.

    On a shard, `first_word` is the first of the words whose rows it has; None: it has all. Then
    `reduces_embedding` and `reduces_before` say where the parts of embeddings, and of what the last
    layer gave, are added up: see `Sublayer`.
    """

    layers: tuple[Layer, ...]
    norm: Norm
    embedding_scale: float = 1.0
    logits_scale: float = 1.0
    rounds_embedding_scale: bool = False
    logits_cap: float = 0.0
    input_size: int = 0
    first_word: int | None = None
    reduces_embedding: bool = False
    reduces_before: bool = False

    @property
    def kinds(self) -> tuple[Layer, ...]:
        """The different layers, in the order in which they first come."""
        return tuple(dict.fromkeys(self.layers))


def source_of(layer: Layer, index: int) -> int:
    """The layer whose cache layer `index` reads: its own, unless it says another."""
    for sublayer in layer:
        if isinstance(sublayer.mixer, Attention) and sublayer.mixer.reads is not None:
            return sublayer.mixer.reads
    return index


def mixes_tokens(sublayer: Sublayer) -> bool:
    """Whether tokens see each other in a sublayer."""
    return sublayer.mixer.mixes_tokens
