"""A model's config.json as the numbers that the maths needs. What might change the maths is
refused if unknown.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from .families import FAMILIES, family_of
from .fields import Fields, nearest, need_folder, read_json, show
from .quantization import Quantization
from .quantization_config import read_quantization
from .rope import RopeConfig
from .spec import Activation, Score, Shard

KvScales = tuple[float, float] | Literal["checkpoint"] | None


@dataclass(frozen=True, slots=True)
class Heads:
    """How many heads of queries, and of keys and values, a layer has, and the entries of each."""

    query: int
    kv: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A dense decoder. `layer_windows[i]` w > 0 lets position p of layer i see positions above p -
    w; 0 is all of them.

    `eos_token_ids` joins config.json and generation_config.json. `raw_hash` is the SHA-256 of
    config.json's content. `kv_scales` says what K and V are divided by in a narrow cache: nothing
    (None), tensors of the checkpoint, or numbers that are given; the engine's choice, not
    config.json's. The other scales multiply: embeddings, scores (None:
    head_dim^-0.5), what a sublayer adds to the stream, logits. `rounds_embedding_scale`: that of
    embeddings is rounded to the run dtype first. `attention_cap` and `logits_cap` are soft caps, 0
    for none. `window_rope` is the rotary embedding of layers with a window, None if it is `rope`.
    `temper` (beta, n): q of position p is multiplied by 1 + beta ln(1 + floor(p / n)).
    `wide_qk_norm`: q and k are normed over all of their heads; `v_norm`: heads of v too, without a
    weight. `full_heads` are the heads of layers without a window, None if all are alike;
    `full_keys_are_values`: one projection gives both there. The last `num_reading_layers` layers
    read the cache of the last layer before them that has the same window, and their MLP has
    `reading_intermediate_size`. `layer_input_size`: entries of a small embedding that each layer
    has of its own; `layer_factor`: the stream is multiplied by a weight behind each layer.
    `num_experts` of `expert_size` entries stand in place of the MLP, of which a token goes through
    `experts_per_token`, in all layers but `dense_layers`; their weights add up to 1 if
    `renormalizes_experts`. `shared_expert_size` are the entries of the one that all tokens go
    through, whose result is gated if `gates_shared_expert`. `expert_score` says what they are
    chosen by; `expert_groups` (all, kept) and `expert_scale` belong to sigmoids. `expert_biases`:
    the router and all experts have some. `expert_clamp` are alpha and limit of
    `swigluoai_and_mul`, which stands in place of the activation. `expert_factors`: the weights of
    experts are multiplied by a number of each. `experts_beside_mlp`: layers with experts have their
    MLP too, and both are added up (`spec.MlpAndExperts`). `attention_sinks`: each head has a
    score that is that of no token. `quantization`:
    projections are held in 8 or 4 bits an entry.
    `shard`: these are the numbers of one of several,
    which sums with the others (`sharding.py`); the vocabulary is the whole one.
    `text_architecture` is that of the
    part that runs, where it is one of several. `left_out` names parts of the
    checkpoint that do not run, since they are not text; `image_token_ids` are those that stand for
    their output in a prompt.
    """

    architecture: str = ""
    model_type: str = ""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    layer_windows: tuple[int, ...]
    rms_norm_eps: float = 1e-6
    tie_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    wide_qk_norm: bool = False
    act: Activation = "silu"
    rope: RopeConfig = field(default_factory=RopeConfig)
    window_rope: RopeConfig | None = None
    temper: tuple[float, int] | None = None
    dtype: str = "float32"
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    raw_hash: str = ""
    kv_scales: KvScales = None
    embedding_scale: float = 1.0
    rounds_embedding_scale: bool = False
    attention_scale: float | None = None
    attention_cap: float = 0.0
    residual_scale: float = 1.0
    logits_scale: float = 1.0
    logits_cap: float = 0.0
    text_architecture: str = ""
    image_token_ids: tuple[int, ...] = ()
    left_out: tuple[str, ...] = ()
    v_norm: bool = False
    full_heads: Heads | None = None
    full_keys_are_values: bool = False
    num_reading_layers: int = 0
    reading_intermediate_size: int = 0
    layer_input_size: int = 0
    layer_factor: bool = False
    num_experts: int = 0
    experts_per_token: int = 0
    expert_size: int = 0
    renormalizes_experts: bool = False
    shared_expert_size: int = 0
    gates_shared_expert: bool = False
    expert_score: Score = "softmax"
    expert_groups: tuple[int, int] = (1, 1)
    expert_scale: float = 1.0
    dense_layers: tuple[int, ...] = ()
    attention_sinks: bool = False
    expert_biases: bool = False
    expert_clamp: tuple[float, float] | None = None
    expert_factors: bool = False
    experts_beside_mlp: bool = False
    quantization: Quantization | None = None
    shard: Shard | None = None

    def heads(self, window: int) -> Heads:
        """The heads of layers with this window."""
        if window or self.full_heads is None:
            return Heads(self.num_heads, self.num_kv_heads, self.head_dim)
        return self.full_heads

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


def load_config(folder: str | Path) -> ModelConfig:
    """The config of the model in `folder`. Raises ModelNotFound, ModelError or UnsupportedModel."""
    path = need_folder(folder)
    raw = read_json(path / "config.json")
    generation = path / "generation_config.json"
    return parse_config(
        raw, read_json(generation) if os.path.exists(generation) else {}, str(path / "config.json")
    )


def parse_config(
    raw: Mapping[str, Any], generation: Mapping[str, Any] | None = None, where: str = "config.json"
) -> ModelConfig:
    """The config that a config.json (`raw`) and a generation_config.json describe; `where` names
    them in errors.
    """
    architecture = _architecture(Fields(raw, where))
    model_type, family = FAMILIES[architecture], family_of(architecture)
    _refuse_quantized_parts(raw, where, model_type)
    quantization = read_quantization(Fields(raw, where, model_type))
    fields = Fields({**raw, "quantization_config": None}, where, model_type)
    family.refuse_unknown(fields)
    config = family.read(fields)
    beside = Fields(generation or {}, str(Path(where).with_name("generation_config.json")))
    eos = (*config.eos_token_ids, *beside.token_ids("eos_token_id", config.vocab_size))
    return replace(
        config,
        architecture=architecture,
        model_type=model_type,
        quantization=quantization,
        eos_token_ids=tuple(dict.fromkeys(eos)),
        raw_hash=hashlib.sha256(json.dumps(raw, sort_keys=True).encode()).hexdigest(),
    )


def _refuse_quantized_parts(raw: Mapping[str, Any], where: str, model_type: str) -> None:
    """Raise UnsupportedModel for a model of several parts that is quantised."""
    inner = raw.get("text_config")
    if not isinstance(inner, dict):
        return
    for fields in (
        Fields(raw, where, model_type),
        Fields(inner, where, model_type, "text_config."),
    ):
        value = fields.get("quantization_config")
        if value is not None:
            fields.refuse("quantization_config", value, "absent where text is one of several parts")


def _architecture(fields: Fields) -> str:
    named, model_type = fields.get("architectures"), fields.get("model_type")
    known = f"one of {', '.join(FAMILIES)}"
    if named is None or named == []:
        by_type = {module: architecture for architecture, module in FAMILIES.items()}
        if not isinstance(model_type, str) or model_type not in by_type:
            fields.refuse("architectures", named, known)
        return by_type[model_type]
    if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
        fields.fail("architectures", f"is {show(named)}, must be a list of names")
    if len(named) != 1:
        fields.refuse("architectures", named, known)
    architecture: str = named[0]
    if architecture not in FAMILIES:
        fields.refuse("architectures", architecture, f"{known}{nearest(architecture, FAMILIES)}")
    expected = FAMILIES[architecture]
    if model_type not in (None, expected):
        fields.refuse("model_type", model_type, f"{expected} for {architecture}")
    return architecture
