"""What a model of the references is, as data: more kinds of layers than the product has yet.

A layer is a tuple of sublayers, each `norm -> mixer -> norm -> scale -> add to the stream`. A mixer
says what is computed; its stage in `decoder.py` computes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

NormKind = Literal["rms", "gemma", "unit"]
"""x / rms * weight, x / rms * (1 + weight), x / rms."""
Score = Literal["softmax", "softmax of the chosen", "sigmoid"]
Activation = Literal["silu", "gelu_tanh", "swigluoai", "relu2"]
"""All gated but relu2."""


@dataclass(frozen=True)
class Norm:
    """RMS norm."""

    kind: NormKind
    eps: float


@dataclass(frozen=True)
class Temperature:
    """Queries at position p times 1 + beta * ln(1 + floor((p + offset) / length))."""

    beta: float
    length: float
    offset: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Causal attention.

    window         position p sees positions above p - window; 0: all of them
    chunk          positions are cut into chunks, and see their own one only; 0: all of them
    sinks          one more term in each head's softmax, which has no value
    rope           which table of angles rotates q and k; None: none does
    pairs          entries 2i and 2i + 1 are rotated together, not i and i + n / 2
    qk_norm        of each head of q and k, or of all heads of a token together if `norm_rows`
    v_norm, v_is_k a norm without weight of V; V is the projection of K
    gated          the result times the sigmoid of one more projection
    shares         the layer whose cache is read in place of an own one
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int = 0
    chunk: int = 0
    soft_cap: float = 0.0
    sinks: bool = False
    rope: int | None = 0
    pairs: bool = False
    qk_norm: Norm | None = None
    norm_rows: bool = False
    norm_after_rope: bool = False
    v_norm: Norm | None = None
    v_is_k: bool = False
    gated: bool = False
    temperature: Temperature | None = None
    shares: int | None = None


@dataclass(frozen=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434), with K's and V's projections
    absorbed into q and the output: the cache holds `rank` + `rotated` numbers a token.

    `plain` and `rotated` are the parts of a head of q without and with positions.
    """

    num_heads: int
    plain: int
    rotated: int
    v_dim: int
    rank: int
    scale: float
    norm: Norm
    query_rank: int | None = None
    temperature: Temperature | None = None


@dataclass(frozen=True, kw_only=True)
class DeltaNet:
    """Gated delta rule behind a causal convolution (arXiv:2412.06464)."""

    k_heads: int
    v_heads: int
    k_dim: int
    v_dim: int
    norm: Norm


@dataclass(frozen=True, kw_only=True)
class Mamba2:
    """State space duality behind a causal convolution (arXiv:2405.21060)."""

    num_heads: int
    head_dim: int
    groups: int
    state: int
    norm: Norm


@dataclass(frozen=True)
class Mlp:
    """A gated MLP, or one without a gate if the activation has none."""

    activation: Activation = "silu"


@dataclass(frozen=True, kw_only=True)
class Route:
    """How a token's experts and their weights follow from the router's logits.

    Scores choose, with a bias if there is one; where experts are in groups, only those of the
    `groups_kept` best ones. Weights are the scores of the chosen, made to add up to 1 if
    `renormalize`, times `scale`.
    """

    top_k: int
    score: Score = "softmax"
    renormalize: bool = True
    biased: bool = False
    groups: int = 1
    groups_kept: int = 1
    scale: float = 1.0
    eps: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Experts:
    """A mixture of MLPs.

    shared        an MLP that every token goes through, "gated" by the sigmoid of one number
    scale_input   the weight of the one expert multiplies what goes in (Llama 4)
    latent        experts work between two projections (Nemotron 3)
    """

    route: Route
    activation: Activation = "silu"
    shared: Literal["plain", "gated"] | None = None
    scale_input: bool = False
    latent: bool = False


@dataclass(frozen=True)
class MlpAndExperts:
    """An MLP and experts side by side, each with norms of its own (Gemma 4). The experts are fed
    from the stream.
    """

    mlp: Mlp
    experts: Experts
    norm: Norm


@dataclass(frozen=True)
class PerLayerInput:
    """A small embedding of the token for this layer, behind a gate (Gemma 3n and 4)."""

    activation: Activation = "gelu_tanh"


Mixer = (
    Attention | LatentAttention | DeltaNet | Mamba2 | Mlp | Experts | MlpAndExperts | PerLayerInput
)


@dataclass(frozen=True)
class Sublayer:
    """x = pre(stream); y = post(mixer(x)) * scale; stream += y."""

    mixer: Mixer
    pre: Norm | None
    post: Norm | None = None
    scale: float = 1.0


@dataclass(frozen=True)
class Layer:
    """Sublayers in order; with `scalar`, the stream behind them is multiplied by a weight."""

    sublayers: tuple[Sublayer, ...]
    scalar: bool = False


@dataclass(frozen=True, kw_only=True)
class Model:
    """The layers in order, and the norm behind the last one."""

    layers: tuple[Layer, ...]
    norm: Norm
    embedding_scale: float = 1.0
    logits_scale: float = 1.0
    logits_cap: float = 0.0
