"""What all dense decoders have in common: attention, then a gated MLP, each behind a norm.

Sources: `configuration_*.py` and `modeling_*.py` of transformers 5, which also read what version 4
wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...checkpoint import STACKED
from ..config import Heads, ModelConfig
from ..fields import Fields, nearest, quoted, show
from ..kv_scales import ignored_scales, scale_parameters
from ..rope import PER_LAYER as LAYER_TYPES
from ..rope import USUAL, RopeConfig, RopeRules, read_rope
from ..spec import Attention, Experts, Layer, Mlp, Model, Norm, Shared, Sublayer
from ..table import PairsToHalves, Parameter, ParameterTable, Part, is_power_of_two

DTYPES = ("float32", "bfloat16", "float16")
MAX_LAYERS = 10_000
MAX_HEAD_DIM = 65_536

READ = frozenset(
    """architectures model_type vocab_size hidden_size intermediate_size num_hidden_layers
    num_attention_heads num_key_value_heads head_dim max_position_embeddings
    rms_norm_eps tie_word_embeddings attention_bias mlp_bias sliding_window
    use_sliding_window max_window_layers layer_types rope_theta rope_scaling
    rope_parameters original_max_position_embeddings dtype torch_dtype eos_token_id
    bos_token_id quantization_config""".split()
)

# Training, bookkeeping, outputs that nobody asks for here, and defaults of sampling (which a
# request states itself).
HARMLESS = frozenset(
    """_name_or_path name_or_path _commit_hash transformers_version transformers.js_config
    auto_map tokenizer_class unsloth_version unsloth_fixed is_llama_config
    keys_to_ignore_at_inference finetuning_task task_specific_params prefix problem_type
    num_labels id2label label2id initializer_range attention_dropout use_cache
    pad_token_id sep_token_id decoder_start_token_id max_sequence_length
    model_max_length gradient_checkpointing output_attentions output_hidden_states
    output_scores return_dict return_dict_in_generate torchscript use_bfloat16
    tf_legacy_loss chunk_size_feed_forward is_decoder _attn_implementation
    attn_implementation _attn_implementation_autoset _flash_attn_2_enabled
    _experts_implementation experts_implementation bad_words_ids begin_suppress_tokens
    diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size
    exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id
    length_penalty max_length min_length max_new_tokens no_repeat_ngram_size
    num_beam_groups num_beams num_return_sequences remove_invalid_values
    repetition_penalty suppress_tokens temperature top_k top_p typical_p""".split()
)

# Fields with one value (or absent, or null) that leaves the maths as it is written here.
FIXED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "pretraining_tp": (1,),
    "partial_rotary_factor": (1.0,),
    "rope_interleaved": (False,),
    "use_mrope": (False,),
    "bias": (False,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "tie_encoder_decoder": (False,),
    "pruned_heads": ({},),
}


def read(
    fields: Fields,
    *,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    eps: float = 1e-6,
    windows: Sequence[int] | None = None,
    rope: RopeRules = USUAL,
    ropes: Callable[[Fields, int], tuple[RopeConfig, RopeConfig]] | None = None,
    full_heads: Heads | None = None,
    **more: Any,
) -> ModelConfig:
    """The numbers of a config.json. `more` are fields of `ModelConfig` that the family has read.

    `kv_heads`, `head_dim` and `eps` are the family's defaults. A field that is null is that of the
    usual formula. `ropes(fields, head_dim)` reads the rotary embeddings of a family whose layers
    with a window have one of their own, behind that of the others. `full_heads` are the heads of
    those others, if they differ.
    """
    hidden, heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    groups = fields.size(
        "num_key_value_heads", heads if "num_key_value_heads" in fields.raw else kv_heads
    )
    if heads % groups:
        fields.fail(
            "num_attention_heads",
            f"is {heads}, which is not a multiple of num_key_value_heads ({groups})",
        )
    vocab, layers = fields.size("vocab_size"), fields.size("num_hidden_layers", high=MAX_LAYERS)
    size = _head_dim(fields, hidden, heads, head_dim)
    bos = fields.token_ids("bos_token_id", vocab)
    by_layer = tuple(no_windows(fields) if windows is None else windows)
    window_rope: RopeConfig | None
    if ropes is None:
        full_rope, window_rope = read_rope(fields, size, rope), None
    else:
        full_rope, window_rope = ropes(fields, size)
        if (window_rope == full_rope and full_heads is None) or not any(by_layer):
            window_rope = None
    return ModelConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=fields.size("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=groups,
        head_dim=size,
        max_position_embeddings=fields.size("max_position_embeddings"),
        layer_windows=by_layer,
        rms_norm_eps=fields.number("rms_norm_eps", eps, low=0.0, above=True),
        tie_embeddings=fields.boolean("tie_word_embeddings", False),
        rope=full_rope,
        window_rope=window_rope,
        full_heads=full_heads,
        dtype=_dtype(fields),
        eos_token_ids=tuple(fields.token_ids("eos_token_id", vocab)),
        bos_token_id=bos[0] if bos else None,
        **more,
    )


def no_windows(fields: Fields) -> list[int]:
    """Every layer sees everything: for families whose modeling code has no sliding window."""
    if fields.get("sliding_window") is not None:
        fields.refuse("sliding_window", fields.size("sliding_window"), "null or absent")
    return _same_in_all(fields, 0)


def one_window(fields: Fields, default: int | None) -> list[int]:
    """The same window in every layer, unless it is null; `default` where the field is absent."""
    return _same_in_all(fields, window_size(fields, default))


def windows_by_layer(fields: Fields, default: int) -> list[int]:
    """As Qwen: windows from layer `max_window_layers` on, or where `layer_types` says, if
    `use_sliding_window`.
    """
    layers, window = _num_layers(fields), window_size(fields, default)
    if not fields.boolean("use_sliding_window", False):
        window = 0
    first, types = first_window(fields), _layer_types(fields, window)
    if types is not None:
        return [window if name == "sliding_attention" else 0 for name in types]
    return [window if layer >= first else 0 for layer in range(layers)]


def windows_in_pattern(fields: Fields, default: int, pattern: int, first: int = 1) -> list[int]:
    """As Gemma: `layer_types` says which layers have the window; without it all but every
    `pattern`-th one, where layers are counted from `first` on.
    """
    for name in ("use_sliding_window", "max_window_layers"):
        fields.only(name)
    window = window_size(fields, default)
    types = _layer_types(fields, window)
    if types is None:
        layers = range(first, first + _num_layers(fields))
        types = [LAYER_TYPES[1] if layer % pattern else LAYER_TYPES[0] for layer in layers]
    if not window and LAYER_TYPES[1] in types:
        fields.fail("sliding_window", "is null, must be an integer where layers have a window")
    return [window if name == LAYER_TYPES[1] else 0 for name in types]


def _same_in_all(fields: Fields, window: int) -> list[int]:
    """`window` in all layers. What other fields say of windows is not read by these families, so
    it has to agree.
    """
    if fields.boolean("use_sliding_window", window > 0) != (window > 0):
        fields.refuse(
            "use_sliding_window", window == 0, f"what sliding_window ({window or None}) says"
        )
    first_window(fields)
    types = _layer_types(fields, window)
    usual = "sliding_attention" if window else "full_attention"
    if types is not None and any(name != usual for name in types):
        fields.refuse("layer_types", types, "the same window in every layer")
    return [window] * _num_layers(fields)


def _num_layers(fields: Fields) -> int:
    return fields.size("num_hidden_layers", high=MAX_LAYERS)


def window_size(fields: Fields, default: int | None) -> int:
    """`sliding_window`; 0 where it is null."""
    if fields.get("sliding_window") is not None:
        return fields.size("sliding_window")
    return 0 if "sliding_window" in fields.raw else default or 0


def first_window(fields: Fields) -> int:
    """`max_window_layers`, as Qwen has it."""
    first = fields.get("max_window_layers")
    first = 28 if first is None else first
    if isinstance(first, bool) or not isinstance(first, int) or first < 0:
        fields.fail("max_window_layers", f"is {quoted(first)}, must be an integer of at least 0")
    return first


def names_of_layers(fields: Fields, types: Any, layers: int, allowed: Sequence[str]) -> list[str]:
    """`layer_types`, refused if they have not one of the names `allowed` for each layer."""
    if not isinstance(types, list) or len(types) != layers:
        fields.fail(
            "layer_types", f"is {show(types)}, must be a list of num_hidden_layers ({layers}) names"
        )
    for name in types:
        if name not in allowed:
            near = nearest(name, allowed) if isinstance(name, str) else ""
            fields.refuse("layer_types", name, f"{' and '.join(allowed)}{near}")
    found: list[str] = types
    return found


def _layer_types(fields: Fields, window: int) -> list[str] | None:
    types, layers = fields.get("layer_types"), _num_layers(fields)
    if types is None:
        return None
    names = names_of_layers(fields, types, layers, LAYER_TYPES)
    if not window and "sliding_attention" in names:
        fields.refuse(
            "layer_types", "sliding_attention", "full_attention, since no sliding window is set"
        )
    return names


def cap(fields: Fields, name: str, default: float) -> float:
    """A soft cap. There is none where it is null."""
    if name in fields.raw and fields.get(name) is None:
        return 0.0
    return default if name not in fields.raw else fields.number(name, above=True)


def _head_dim(fields: Fields, hidden: int, heads: int, default: int | None) -> int:
    if "head_dim" not in fields.raw and default is not None:
        head_dim = default
    else:
        if fields.get("head_dim") is None and hidden % heads:
            fields.fail(
                "hidden_size",
                f"is {hidden}, which is not a multiple of num_attention_heads ({heads})",
            )
        head_dim = fields.size("head_dim", hidden // heads, high=MAX_HEAD_DIM)
    if head_dim % 2:
        fields.fail("head_dim", f"is {head_dim}, must be even: rotary embedding turns pairs")
    return head_dim


def _dtype(fields: Fields) -> str:
    name = "dtype" if fields.get("dtype") is not None else "torch_dtype"
    value = fields.get(name)
    if value is None:
        return "float32"
    if not isinstance(value, str) or value.removeprefix("torch.") not in DTYPES:
        fields.refuse(name, value, " or ".join(DTYPES))
    return str(value).removeprefix("torch.")


# --- the layers
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Norms:
    """What the norms before and behind attention and the MLP are called on disk; None: there is
    none. They multiply with `offset` + weight, and so does that behind the last layer.
    """

    before_attention: str | None = "input_layernorm"
    behind_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    behind_mlp: str | None = None
    offset: float = 0.0

    @property
    def by_name(self) -> dict[str, str | None]:
        """What each is called on disk, by the name of its parameter."""
        return {
            "input_norm": self.before_attention,
            "attention_out_norm": self.behind_attention,
            "post_norm": self.before_mlp,
            "mlp_out_norm": self.behind_mlp,
        }


PRE_NORMS = Norms()


def model(config: ModelConfig, norms: Norms = PRE_NORMS) -> Model:
    """Every layer is attention, then an MLP; layers differ in their windows and what goes with
    them, in whether q and k are rotated, and in whether they have experts.
    """
    kinds = [
        (window, layer not in config.unrotated_layers, config.has_experts(layer))
        for layer, window in enumerate(config.layer_windows)
    ]
    # Equal layers are one object: comparing them is then quick.
    layers = {kind: _layer(config, *kind, norms) for kind in kinds}
    return Model(
        layers=tuple(layers[kind] for kind in kinds),
        norm=Norm("norm", config.rms_norm_eps),
        embedding_scale=config.embedding_scale,
        rounds_embedding_scale=config.rounds_embedding_scale,
        logits_cap=config.logits_cap,
        # A power of two is in the weight of the last norm.
        logits_scale=1.0 if is_power_of_two(config.logits_scale) else config.logits_scale,
    )


def _layer(
    config: ModelConfig, window: int, is_rotated: bool, has_experts: bool, norms: Norms
) -> Layer:
    eps, scale = config.rms_norm_eps, config.residual_scale
    norm = {name: Norm(name, eps) if key else None for name, key in norms.by_name.items()}
    angles, temper = _columns(config, window, is_rotated)
    heads, dealt = config.heads(window), config.dealt_heads
    attention = Attention(
        num_heads=heads.query,
        num_kv_heads=heads.kv,
        head_dim=heads.size,
        scale=heads.size**-0.5 if config.attention_scale is None else config.attention_scale,
        window=0 if config.windows_are_chunks else window,
        chunk=window if config.windows_are_chunks else 0,
        qk_norm=config.qk_norm,
        qk_norm_behind_rope=config.qk_norm_behind_rope,
        norm_eps=eps,
        wide_qk_norm=config.wide_qk_norm,
        dealt_entries=dealt and (dealt[0] * heads.size, dealt[1] * heads.size),
        v_norm=config.v_norm,
        soft_cap=config.attention_cap,
        angles=angles,
        temper=temper,
        sinks=config.attention_sinks,
    )
    mlp = mixture(config) if has_experts else Mlp(config.act)
    return (
        Sublayer(attention, norm["input_norm"], norm["attention_out_norm"], scale),
        Sublayer(mlp, norm["post_norm"], norm["mlp_out_norm"], scale),
    )


def mixture(config: ModelConfig) -> Experts:
    """What stands in place of the MLP."""
    shared: Shared | None = None
    if config.shared_expert_size:
        shared = "gated" if config.gates_shared_expert else "plain"
    groups, kept = config.expert_groups
    alpha, limit = config.expert_clamp or (0.0, 0.0)
    return Experts(
        num_experts=config.num_experts,
        top_k=config.experts_per_token,
        renormalize=config.renormalizes_experts,
        shared=shared,
        score=config.expert_score,
        groups=groups,
        groups_kept=kept,
        scale=config.expert_scale,
        biases=config.expert_biases,
        act=config.act,
        alpha=alpha,
        limit=limit,
        factors=config.expert_factors,
    )


def _columns(
    config: ModelConfig, window: int, is_rotated: bool
) -> tuple[tuple[int, int] | None, int | None]:
    """The columns of cos and sin (`decoder.rotary_tables`) that a layer's angles and the
    temperature of its q are in.
    """
    sizes = config.rope_head_dims
    widths = [rope.rotated(size) // 2 for rope, size in zip(config.ropes, sizes, strict=True)]
    own = 1 if window and config.window_rope is not None else 0
    if config.unrotated_layers:
        own = own if is_rotated else len(widths)
        widths.append(widths[0])
    temper = None if config.temper is None else sum(widths)
    if len(widths) == 1 and temper is None:
        return None, None
    first = sum(widths[:own])
    return (first, first + widths[own]), temper


# --- the parameters
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Names:
    """What projections are called on disk: one module for each part, or one that holds all parts
    in order.
    """

    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    qk_norms: tuple[str, str] = ("self_attn.q_norm", "self_attn.k_norm")
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"
    router: str = "mlp.gate"
    router_bias: str = "mlp.gate.e_score_correction_bias"
    experts: str = "mlp.experts"
    expert: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    shared_expert: str = "mlp.shared_expert"


SEPARATE = Names()
LAYER = "model.layers.{layer}."
HEAD = "lm_head.weight"
IGNORED = ("rotary_emb.inv_freq", "*.rotary_emb.inv_freq")
"""Old checkpoints carry the rotary frequencies, which follow from config.json."""


def parameters(
    config: ModelConfig, names: Names = SEPARATE, norms: Norms = PRE_NORMS, *, pairs: bool = False
) -> ParameterTable:
    """The parameter table of a dense decoder. Every name may stand without the leading `model.`
    too. `pairs`: the checkpoint's rotary embedding turns neighbouring entries, not halves.
    """
    copies = ((HEAD, "embed"),) if config.tie_embeddings else ()
    found = [*_every_model(config, names, norms), *_some_models(config, names, norms)]
    found += scale_parameters(config)
    if pairs:
        found = [_halves(config, parameter) for parameter in found]
    found = list(map(or_without_model, found))
    if config.tie_embeddings:
        found = [_or_head(parameter) for parameter in found]
    ignored = (*IGNORED, *ignored_scales(config))
    return ParameterTable(tuple(found), ignored, copies)


def _or_head(parameter: Parameter) -> Parameter:
    """The embedding of a model that ties it, which a file may have as its head alone: safetensors'
    `save_model` keeps the first name of two. All other parameters as they are.
    """
    if parameter.name != "embed":
        return parameter
    head = tuple(replace(part, key=HEAD) for part in parameter.parts)
    return replace(parameter, alternatives=(*parameter.alternatives, head))


def _halves(config: ModelConfig, parameter: Parameter) -> Parameter:
    """q and k with what lies in pairs as halves. All other parameters as they are."""
    if parameter.name not in ("qkv", "qkv_bias"):
        return parameter
    order = PairsToHalves(config.head_dim, config.rope.rotated(config.head_dim))
    q, k, v = parameter.parts
    return replace(parameter, parts=(replace(q, order=order), replace(k, order=order), v))


def _every_model(config: ModelConfig, names: Names, norms: Norms) -> Iterator[Parameter]:
    """What every dense decoder has."""
    width, layers = config.hidden_size, range(config.num_layers)
    yield _one("embed", (config.vocab_size, width), ("vocab", "embed"), "model.embed_tokens.weight")
    for name, key in norms.by_name.items():
        if key is not None:
            norm = _norm(name, width, "embed", f"{LAYER}{key}.weight", layers)
            yield _with_offset(norm, norms.offset)
    for sort in _attentions(config):
        yield from _projections(config, names, sort)
    for inner, some in _mlps(config):
        yield _before_down(config, names, "weight", inner, (width, "embed"), some)
        key = f"{LAYER}{names.down}.weight"
        yield _one("down", (width, inner), ("embed", "mlp"), key, some)
    if config.num_experts:
        yield from _experts(config, names)
    # A power of two that logits are multiplied by is multiplied into the norm that the head reads.
    factor = config.logits_scale if is_power_of_two(config.logits_scale) else 1.0
    last = replace(_norm("norm", width, "embed", "model.norm.weight"), factor=factor)
    yield _with_offset(last, norms.offset)


def _some_models(config: ModelConfig, names: Names, norms: Norms) -> Iterator[Parameter]:
    """A head of its own, norms of q and k, biases."""
    width, layers = config.hidden_size, range(config.num_layers)
    if not config.tie_embeddings:
        yield _one("head", (config.vocab_size, width), ("vocab", "embed"), HEAD)
    for sort in _attentions(config):
        for name, size, axis in _head_norms(config, sort):
            module = names.qk_norms[name == "k_norm"]
            norm = _norm(name, size, axis, f"{LAYER}{module}.weight", sort.layers)
            yield _with_offset(norm, norms.offset)
        if config.qkv_bias:
            yield _queries_keys_values(names, sort, "bias", None)
    if config.o_bias:
        yield _one("o_bias", (width,), ("embed",), LAYER + "self_attn.o_proj.bias", layers)
    if config.mlp_bias:
        for inner, some in _mlps(config):
            yield _before_down(config, names, "bias", inner, None, some)
        yield _one("down_bias", (width,), ("embed",), f"{LAYER}{names.down}.bias", layers)


def _before_down(
    config: ModelConfig,
    names: Names,
    kind: str,
    inner: int,
    columns: tuple[int, str] | None,
    layers: Sequence[int],
) -> Parameter:
    """gate and up of an MLP, or up alone where there is no gate."""
    modules, name = (names.gate_up, "gate_up") if config.gates_mlp else ((names.up,), "up")
    rows = [(inner, "mlp")] * (2 if config.gates_mlp else 1)
    title = name if kind == "weight" else f"{name}_bias"
    return _stacked(title, modules, kind, rows, "mlp", columns, layers)


@dataclass(frozen=True, slots=True)
class _Sort:
    """Layers whose attention has the same weights: their heads, and the axes that these are.

    Those that read another layer's cache have no k and v. `keys_are_values`: k is v too.
    """

    layers: tuple[int, ...]
    heads: Heads
    prefix: str
    reads: bool
    keys_are_values: bool

    @property
    def rows(self) -> tuple[tuple[int, str], ...]:
        """Rows of q, k and v, and their axes."""
        q, kv = self.heads.query * self.heads.size, self.heads.kv * self.heads.size
        of_q, of_kv = (q, f"{self.prefix}heads"), (kv, f"{self.prefix}kv_heads")
        return (of_q,) if self.reads else (of_q, of_kv, of_kv)


def _attentions(config: ModelConfig) -> list[_Sort]:
    """The sorts of layers, in the order in which they first come."""
    found: dict[tuple[bool, bool], list[int]] = {}
    for layer, window in enumerate(config.layer_windows):
        is_full = not window and config.full_heads is not None
        found.setdefault((is_full, config.source_of(layer) != layer), []).append(layer)
    return [
        _Sort(
            tuple(layers),
            config.heads(config.layer_windows[layers[0]]),
            "full_" if is_full else "",
            reads,
            is_full and config.full_keys_are_values,
        )
        for (is_full, reads), layers in found.items()
    ]


def _mlps(config: ModelConfig) -> Iterator[tuple[int, Sequence[int]]]:
    """Widths of MLPs, and the layers that have them."""
    own = config.num_layers
    if config.reading_intermediate_size:
        own -= config.num_reading_layers
        yield config.reading_intermediate_size, range(own, config.num_layers)
    some = [layer for layer in range(own) if config.has_mlp(layer)]
    if some:
        yield config.intermediate_size, some if len(some) < own else range(own)


def _experts(config: ModelConfig, names: Names) -> Iterator[Parameter]:
    """The router, and the weights of all experts, one below the other."""
    width, size, count = config.hidden_size, config.expert_size, config.num_experts
    some = [layer for layer in range(config.num_layers) if config.has_experts(layer)]
    gate, up, down = names.expert
    modules = [f"{names.experts}.{expert}" for expert in range(count)]
    router = LAYER + names.router + ".weight"
    yield _one("router", (count, width), ("expert", "embed"), router, some)
    if config.expert_score != "softmax":
        key = f"{LAYER}{names.router_bias}"
        bias = _one("router_bias", (count,), ("expert",), key, some)
        yield replace(bias, dtype="float32", init="zeros")
    both = tuple(f"{module}.{part}" for module in modules for part in (gate, up))
    rows, columns = [(size, "expert")] * (2 * count), (width, "embed")
    yield _stacked("experts_gate_up", both, "weight", rows, "experts", columns, some)
    downs = tuple(f"{module}.{down}" for module in modules)
    rows, columns = [(width, "embed")] * count, (size, "expert")
    yield _stacked("experts_down", downs, "weight", rows, "experts", columns, some)
    if config.shared_expert_size:
        inner, module = config.shared_expert_size, names.shared_expert
        pair = (f"{module}.gate_proj", f"{module}.up_proj")
        halves = (inner, "mlp"), (inner, "mlp")
        yield _stacked("shared_gate_up", pair, "weight", halves, "mlp", (width, "embed"), some)
        key = f"{LAYER}{module}.down_proj.weight"
        yield _one("shared_down", (width, inner), ("embed", "mlp"), key, some)
        if config.gates_shared_expert:
            key = f"{LAYER}{module}_gate.weight"
            yield _one("shared_gate", (1, width), ("one", "embed"), key, some)


def with_stacked_experts(
    table: ParameterTable, count: int, keys: Mapping[str, str], views: Sequence[str] = (STACKED,)
) -> ParameterTable:
    """The experts of a layer are one tensor [expert n k] for gate and up, and one for down. `keys`
    are what these are called behind the layer. `views` may say that they are [expert k n], or
    either, which their shape says.
    """

    def stacked(parameter: Parameter) -> Parameter:
        key = keys.get(parameter.name)
        if key is None:
            return parameter
        usual, *others = [
            (Part(f"{LAYER}{key}{view}{count}", parameter.shape[0], parameter.axes[0]),)
            for view in views
        ]
        return or_without_model(replace(parameter, parts=usual, alternatives=tuple(others)))

    return replace(table, parameters=tuple(map(stacked, table)))


def _projections(config: ModelConfig, names: Names, sort: _Sort) -> Iterator[Parameter]:
    """What is before and behind attention."""
    width, heads = config.hidden_size, sort.heads.query * sort.heads.size
    yield _queries_keys_values(names, sort, "weight", (width, "embed"))
    axes = "embed", f"{sort.prefix}heads"
    yield _one("o", (width, heads), axes, LAYER + "self_attn.o_proj.weight", sort.layers)


def _queries_keys_values(
    names: Names, sort: _Sort, kind: str, columns: tuple[int, str] | None
) -> Parameter:
    """q, k and v as one parameter, or q alone."""
    modules, name = names.qkv, "q" if sort.reads else "qkv"
    if sort.reads:
        modules = modules[:1]
    elif sort.keys_are_values:
        modules = (modules[0], modules[1], modules[1])
    title = name if kind == "weight" else f"{name}_bias"
    return _stacked(title, modules, kind, sort.rows, "qkv", columns, sort.layers)


def _head_norms(config: ModelConfig, sort: _Sort) -> list[tuple[str, int, str]]:
    """Name, size and axis of the norms of q and k: of a head's size, or of that of all heads."""
    if config.qk_norm:
        names = ("q_norm",) if sort.reads else ("q_norm", "k_norm")
        return [(name, sort.heads.size, "head_dim") for name in names]
    if config.wide_qk_norm:
        (q, of_q), (kv, of_kv), _ = sort.rows
        return [("q_norm", q, of_q), ("k_norm", kv, of_kv)]
    return []


def _one(
    name: str,
    shape: tuple[int, ...],
    axes: tuple[str, ...],
    key: str,
    layers: Sequence[int] | None = None,
) -> Parameter:
    """A parameter that is one tensor on disk."""
    return Parameter(name, shape, axes, (Part(key, shape[0], axes[0]),), layers)


def _norm(
    name: str, size: int, axis: str, key: str, layers: Sequence[int] | None = None
) -> Parameter:
    return replace(_one(name, (size,), (axis,), key, layers), init="ones")


def _with_offset(norm: Parameter, offset: float) -> Parameter:
    """A norm that multiplies with offset + weight: in float32, as that sum is made."""
    if offset == 0.0:
        return norm
    return replace(norm, offset=offset, init="zeros", dtype="float32")


def _stacked(
    name: str,
    modules: tuple[str, ...],
    kind: str,
    sizes: Sequence[tuple[int, str]],
    axis: str,
    columns: tuple[int, str] | None,
    layers: Sequence[int],
) -> Parameter:
    """A parameter of several parts, each with its rows and their axis."""
    rows = sum(size for size, _ in sizes)
    on_disk = [f"{LAYER}{module}.{kind}" for module in modules]
    if len(on_disk) == 1:
        starts = [sum(size for size, _ in sizes[:i]) for i in range(len(sizes))]
        parts = [
            Part(on_disk[0], size, of, first, rows)
            for (size, of), first in zip(sizes, starts, strict=True)
        ]
    else:
        parts = [Part(key, size, of) for (size, of), key in zip(sizes, on_disk, strict=True)]
    shape, axes = (
        ((rows,), (axis,)) if columns is None else ((rows, columns[0]), (axis, columns[1]))
    )
    return Parameter(name, shape, axes, tuple(parts), layers)


def or_without_model(parameter: Parameter) -> Parameter:
    """The same parameter, which may also be named as in a checkpoint that was saved without the
    head.
    """
    every = parameter.parts, *parameter.alternatives
    if not all(part.key.startswith("model.") for parts in every for part in parts):
        return parameter
    bare = tuple(
        tuple(replace(part, key=part.key.removeprefix("model.")) for part in parts)
        for parts in every
    )
    return replace(parameter, alternatives=(*parameter.alternatives, *bare))
