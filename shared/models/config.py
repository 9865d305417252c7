"""A model's config as the numbers that the maths needs; `config_json.py` reads them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from .quantization import Quantization
from .rope import RopeConfig
from .spec import Activation, Score, Shard

KvScales = tuple[float, float] | Literal["checkpoint"] | None


@dataclass(frozen=True, slots=True)
class Heads:
    """How many heads of queries, and of keys and values, a layer has, and the entries of each."""

    query: int
    kv: int
    size: int


@dataclass(frozen=True, slots=True)
class Latents:
    """Sizes of multi-head latent attention (`spec.LatentAttention`). `query_rank` 0: q has no
    latent. `in_pairs`: the checkpoint's rotary embedding turns neighbouring entries.
    """

    rank: int
    query_rank: int
    plain: int
    rotated: int
    v_dim: int
    in_pairs: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder in numbers, whatever its config.json calls them."""

    # Which model it is.
    architecture: str = ""
    model_type: str = ""
    text_architecture: str = ""  # of the part that runs, where it is one of several
    left_out: tuple[str, ...] = ()  # parts of the checkpoint that do not run: they are not text
    raw_hash: str = ""  # SHA-256 of config.json's content
    dtype: str = "float32"
    max_position_embeddings: int

    # Tokens. `eos_token_ids` joins config.json and generation_config.json.
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    image_token_ids: tuple[int, ...] = ()  # these stand for an image's vectors in a prompt

    # The stream.
    num_layers: int
    hidden_size: int
    rms_norm_eps: float = 1e-6
    tie_embeddings: bool = False
    embedding_scale: float = 1.0
    rounds_embedding_scale: bool = False  # to the run dtype, before embeddings are multiplied
    residual_scale: float = 1.0  # of what a sublayer adds to the stream
    logits_scale: float = 1.0
    logits_cap: float = 0.0  # a soft cap; 0 is none
    layer_factor: bool = False  # the stream is multiplied by a weight behind each layer
    layer_input_size: int = 0  # entries of a small embedding that each layer has of its own

    # Attention. Position p of a layer with window w > 0 sees positions above p - w; with 0, all.
    layer_windows: tuple[int, ...]
    windows_are_chunks: bool = False  # position p sees those from (p // w) w on
    num_heads: int
    num_kv_heads: int
    head_dim: int
    latents: Latents | None = None  # K and V of all heads are made of; head_dim is what rotates
    full_heads: Heads | None = None  # of layers without a window; None if all are alike
    full_keys_are_values: bool = False  # one projection gives both in layers without a window
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False  # of each head of q and k
    unit_qk_norm: bool = False  # of each head of q and k that is rotated, without a weight
    qk_norm_behind_rope: bool = False  # that norm reads what is rotated
    wide_qk_norm: bool = False  # of q and k over all of their heads
    # Of q and of k that all shards hold together, where those norms are dealt out: without heads of
    # zeros, and those that several shards hold once for each.
    dealt_heads: tuple[int, int] | None = None
    v_norm: bool = False  # of each head of v, without a weight
    attention_scale: float | None = None  # of scores; None is head_dim^-0.5
    attention_cap: float = 0.0  # a soft cap of scores; 0 is none
    attention_sinks: bool = False  # each head has a score that is that of no token
    rope: RopeConfig = field(default_factory=RopeConfig)
    window_rope: RopeConfig | None = None  # of layers with a window; None if it is `rope`
    unrotated_layers: tuple[int, ...] = ()  # these rotate nothing
    temper: tuple[float, int] | None = None  # (beta, n): q *= 1 + beta ln(1 + floor(position / n))
    temper_start: int = 0  # what positions are counted from there
    # The last layers read the cache of the last layer before them that has the same window.
    num_reading_layers: int = 0
    reading_intermediate_size: int = 0  # of their MLP
    # What K and V are divided by in a narrow cache: nothing (None), tensors of the checkpoint, or
    # numbers that are given. The engine's choice, not config.json's.
    kv_scales: KvScales = None

    # The MLP.
    intermediate_size: int
    mlp_bias: bool = False
    act: Activation = "silu"

    # Experts, in place of the MLP (or beside it) in all layers but `dense_layers`.
    num_experts: int = 0
    experts_per_token: int = 0
    expert_size: int = 0
    dense_layers: tuple[int, ...] = ()
    expert_score: Score = "softmax"  # what they are chosen by
    renormalizes_experts: bool = False  # the weights of those chosen add up to 1
    expert_groups: tuple[int, int] = (1, 1)  # (all, kept), with scores that are sigmoids
    expert_scale: float = 1.0  # likewise
    expert_biases: bool = False  # of the router and of all experts
    expert_clamp: tuple[float, float] | None = None  # alpha and limit of `swigluoai_and_mul`
    expert_factors: bool = False  # the weights of experts are multiplied by a number of each
    experts_beside_mlp: bool = False  # both run and are added (`spec.MlpAndExperts`)
    shared_expert_size: int = 0  # of the one that all tokens go through
    gates_shared_expert: bool = False

    # How it is held.
    quantization: Quantization | None = None  # projections have 8 or 4 bits an entry
    # One of several that add up to the model (`sharding.py`), whose numbers these are then; the
    # vocabulary is the whole one.
    shard: Shard | None = None

    def heads(self, window: int) -> Heads:
        """The heads of layers with this window."""
        if window or self.full_heads is None:
            return Heads(self.num_heads, self.num_kv_heads, self.head_dim)
        return self.full_heads

    @property
    def gates_mlp(self) -> bool:
        """Whether an MLP multiplies by a gate."""
        return self.act != "relu2"

    def has_experts(self, layer: int) -> bool:
        """Whether a layer has experts."""
        return self.num_experts > 0 and layer not in self.dense_layers

    def has_mlp(self, layer: int) -> bool:
        """Whether a layer has an MLP that all tokens go through, which is no expert."""
        return self.experts_beside_mlp or not self.has_experts(layer)

    def source_of(self, layer: int) -> int:
        """The layer whose cache a layer reads."""
        own = self.num_layers - self.num_reading_layers
        if layer < own:
            return layer
        window = self.layer_windows[layer]
        return max(i for i in range(own) if self.layer_windows[i] == window)

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """The rotary embeddings that layers have: of those without a window, then of the others."""
        return (self.rope,) if self.window_rope is None else (self.rope, self.window_rope)

    @property
    def rope_head_dims(self) -> tuple[int, ...]:
        """The size of the heads that each of `ropes` rotates."""
        return (
            (self.heads(0).size,)
            if self.window_rope is None
            else (self.heads(0).size, self.head_dim)
        )
