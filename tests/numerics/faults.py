"""The faults that the comparison must see, beside those that the package has: importing this module
adds them to its catalogue.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from twinfer.numerics.faults.catalogue import (
    ATTENTION,
    MLPS,
    NORM,
    WINDOW,
    WRITE,
    in_engine,
    in_layer,
    in_op,
    on_top,
)
from twinfer.numerics.faults.engine import Kept, Tables, Views
from twinfer.numerics.faults.making import Given, after, around, bf16, changed, instead
from twinfer.ops.namespaces import device_of
from twinfer.shared.models.config import ModelConfig


def storage(xp: Any, x: Any, like: Any) -> Any:
    """x rounded to the dtype of `like`, in float32."""
    return xp.accumulate(xp.astype(x, like.dtype))


def index(xp: Any, size: int, like: Any) -> Any:
    """0 to size, int32, beside `like`."""
    return xp.arange(size, dtype=xp.int32, device=device_of(like))


# --- attention
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MaskInputs:
    """What a mask is made of, to broadcast to [tok slot]: the slots, and each token's position,
    request and length.
    """

    slot: Any
    position: Any
    length: Any
    last: Any
    window: int
    chunk: int


def right_mask(xp: Any, s: MaskInputs) -> Any:
    """Causal, within the window or the chunk: what the op says."""
    causal = s.slot <= s.position
    if s.chunk > 0:
        return causal & (s.slot >= s.position - s.position % s.chunk)
    return causal & (s.slot > s.position - s.window) if s.window > 0 else causal


def right_softmax(xp: Any, scores: Any) -> Any:
    """Softmax of scores whose maximum is 0."""
    weights = xp.exp(scores)
    return weights / xp.sum(weights, axis=-1, keepdims=True)


def dense_attention(
    xp: Any, a: Given, mask: Callable[[Any, MaskInputs], Any] = right_mask,
    softmax: Callable[[Any, Any], Any] = right_softmax,
) -> Any:  # fmt: skip
    """`paged_attention` once more, with two places to be wrong in: every token gathers all pages
    of its request.
    """
    q, kv = a["q"], a["kv"]
    device = device_of(q)
    table, start, lens = (
        xp.asarray(a[name], device=device) for name in ("page_table", "query_start", "kv_lens")
    )
    tokens, heads, size = q.shape
    page, kv_heads = kv.shape[1], kv.shape[2] // 2
    token = index(xp, tokens, q)
    request = xp.sum(xp.astype(token[:, None] >= start[None, 1:], xp.int32), axis=1, dtype=xp.int32)
    real = request < table.shape[0]
    request = xp.where(real, request, table.shape[0] - 1)
    stop, length = xp.take(start[1:], request, axis=0), xp.take(lens, request, axis=0)
    # What an engine's table holds beyond a request's pages means nothing.
    pages = xp.clip(xp.take(table, request, axis=0), 0, kv.shape[0] - 1)
    pages = xp.reshape(pages, (tokens * table.shape[1],))
    cache = xp.reshape(
        xp.take(kv, pages, axis=0), (tokens, table.shape[1] * page, kv_heads, 2, size)
    )
    keys, values = (
        xp.permute_dims(xp.accumulate(cache[:, :, :, i]), (0, 2, 1, 3))[:, :, None] for i in (0, 1)
    )
    slot = index(xp, table.shape[1] * page, q)[None, :]
    mask_inputs = MaskInputs(
        slot,
        (length - stop + token)[:, None],
        length[:, None],
        (token == stop - 1)[:, None],
        a["window"],
        a.get("chunk", 0),
    )
    visible = (mask(xp, mask_inputs) & (slot < length[:, None]) & real[:, None])[:, None, None]
    grouped = xp.reshape(xp.accumulate(q), (tokens, kv_heads, heads // kv_heads, 1, size))
    # A sum of products, not a matrix product: frameworks have defaults for those.
    scores = xp.sum(grouped * keys, axis=-1) * a["scale"]
    if a.get("k_scale") is not None:
        scores = scores * a["k_scale"][None, :, None, None]
    if a["soft_cap"] > 0:
        scores = a["soft_cap"] * xp.tanh(scores / a["soft_cap"])
    scores = xp.where(visible, scores, -1e30)
    top = xp.max(scores, axis=-1, keepdims=True)
    scores = scores - top
    weights = xp.where(visible, softmax(xp, scores), 0.0)
    if a.get("sinks") is not None:
        weights = weights * _share(xp, scores, top, a["sinks"])
    weights = storage(xp, weights, q)
    values = xp.where(visible[..., None], values, 0.0)
    out = xp.sum(weights[..., None] * values, axis=-2)
    if a.get("v_scale") is not None:
        out = out * a["v_scale"][None, :, None, None]
    return xp.astype(xp.reshape(out, (tokens, heads, size)), q.dtype)


def _share(xp: Any, scores: Any, top: Any, sinks: Any) -> Any:
    """What sinks leave of the weights of scores [tok kvhead group slot] less `top`, the largest."""
    total = xp.sum(xp.exp(scores), axis=-1, keepdims=True)
    sinks = xp.reshape(xp.accumulate(sinks), (1, *scores.shape[1:3], 1))
    return total / (total + xp.exp(sinks - top))


def _own_key_hidden(xp: Any, s: MaskInputs) -> Any:
    return right_mask(xp, s) & ~((s.slot == s.position) & s.last & (s.length > 1))


def _next_key_seen(xp: Any, s: MaskInputs) -> Any:
    return right_mask(xp, s) | (s.slot == s.position + 1)


def _rounded_softmax(xp: Any, scores: Any) -> Any:
    weights = bf16(xp, xp.exp(bf16(xp, scores)))
    return bf16(xp, weights / bf16(xp, xp.sum(weights, axis=-1, keepdims=True)))


def _scaled(factor: float) -> Callable[[Any, Given], Any]:
    return lambda xp, a: a["scale"] * factor


def _stale_key(xp: Any, a: Given) -> Any:
    """The cache with K of slot 1 of the first request's first page as that of slot 0."""
    kv, table = a["kv"], xp.asarray(a["page_table"], device=device_of(a["kv"]))
    pages, page, entries, _ = kv.shape
    here = index(xp, pages, kv)[:, None, None, None] == table[:1, :1, None, None]
    here = here & (index(xp, page, kv) == 1)[None, :, None, None]
    here = here & (index(xp, entries, kv) % 2 == 0)[None, None, :, None]
    return xp.where(here, xp.roll(kv, 1, axis=1), kv)


def _last_head_is_first(xp: Any, a: Given) -> Any:
    kv = a["kv"]
    return xp.concat([kv[:, :, :-2], kv[:, :, :2]], axis=2)


def _heads_interleaved(xp: Any, function: Callable[..., Any], a: Given) -> Any:
    """Query head h reads K and V head h % kvhead, not h // group."""
    heads, kv_heads = a["q"].shape[1], a["kv"].shape[2] // 2
    shape = (a["q"].shape[0], heads // kv_heads, kv_heads, a["q"].shape[2])

    def swapped(x: Any, shape: tuple[int, ...]) -> Any:
        return xp.reshape(xp.permute_dims(xp.reshape(x, shape), (0, 2, 1, 3)), x.shape)

    out = function(swapped(a["q"], shape), *list(a.values())[1:])
    return swapped(out, (shape[0], shape[2], shape[1], shape[3]))


def _grouped(model: ModelConfig) -> bool:
    return 1 < model.num_kv_heads < model.num_heads


in_layer(
    "mask-hides-own-key",
    "the last query of a request does not see its own key",
    instead(ATTENTION, partial(dense_attention, mask=_own_key_hidden)),
)
in_layer(
    "mask-shows-next-key",
    "causal mask off by one: a query sees the key after its own",
    instead(ATTENTION, partial(dense_attention, mask=_next_key_seen)),
)
in_layer(
    "window-missing",
    "the sliding window is ignored",
    changed(ATTENTION, window=lambda xp, a: 0),
    **WINDOW,
)
in_layer(
    "attention-skipped",
    "attention adds nothing",
    after(ATTENTION, lambda xp, out: xp.zeros_like(out)),
)
in_layer(
    "attention-scale-1e-2",
    "attention scores are 1 % too large",
    changed(ATTENTION, scale=_scaled(1.01)),
)
in_layer(
    "softmax-bf16",
    "softmax is computed in bfloat16",
    instead(ATTENTION, partial(dense_attention, softmax=_rounded_softmax)),
)
in_layer(
    "page-table-row",
    "each request reads the page table of the one before it",
    changed(ATTENTION, page_table=lambda xp, a: xp.roll(a["page_table"], 1, axis=0)),
)
in_layer(
    "stale-key",
    "one key of one request is that of the slot before it",
    changed(ATTENTION, kv=_stale_key),
)
in_layer(
    "kv-head-dropped",
    "queries of the last K/V head read the first one",
    changed(ATTENTION, kv=_last_head_is_first),
    needs=lambda m: m.num_kv_heads > 1,
    missing="several K/V heads",
)
in_layer(
    "query-heads-interleaved",
    "query heads are dealt out to K/V heads one by one, not in groups",
    around(ATTENTION, _heads_interleaved),
    needs=_grouped,
    missing="several K/V heads, each for several query heads",
)
in_op(
    "soft-cap-missing",
    "the cap on attention scores is ignored",
    changed(ATTENTION, soft_cap=lambda xp, a: 0.0),
)
in_op(
    "kv-scales-swapped",
    "a quantised cache is read with the scales of K and V swapped",
    changed(
        ATTENTION,
        k_scale=lambda xp, a: a.get("v_scale"),
        v_scale=lambda xp, a: a.get("k_scale"),
    ),
)
in_op(
    "sink-dropped",
    "softmax leaves out the sink of each head",
    changed(ATTENTION, sinks=lambda xp, a: None),
)


# --- rotary embedding and KV write
# -----------------------------------------------------------------------------------


def _split(a: Given) -> tuple[int, int]:
    """Where K and V begin in qkv."""
    heads = a["kv"].shape[2] // 2 * a["kv"].shape[3]
    return a["qkv"].shape[1] - 2 * heads, a["qkv"].shape[1] - heads


def _k_and_v_swapped(xp: Any, a: Given) -> Any:
    k, v = _split(a)
    return xp.concat([a["qkv"][:, :k], a["qkv"][:, v:], a["qkv"][:, k:v]], axis=1)


def _k_and_v_in_fp8(xp: Any, a: Given) -> Any:
    k, x = _split(a)[0], a["qkv"]
    narrow = xp.astype(
        xp.clip(xp.astype(x[:, k:], xp.float32), -448.0, 448.0), xp.float_dtype("float8_e4m3fn")
    )
    return xp.concat([x[:, :k], xp.astype(xp.astype(narrow, xp.float32), x.dtype)], axis=1)


def _last_row_lost(xp: Any, a: Given) -> Any:
    slots = a["slots"]
    row = index(xp, slots.shape[0], slots)
    return xp.where(row == xp.max(xp.where(slots >= 0, row, -1)), -1, slots)


in_layer(
    "rope-bf16",
    "the rotary table is rounded to bfloat16",
    changed(WRITE, cos=lambda xp, a: bf16(xp, a["cos"]), sin=lambda xp, a: bf16(xp, a["sin"])),
)
in_layer(
    "position-off-by-one",
    "each token is rotated by the position of the next one",
    changed(
        WRITE,
        cos=lambda xp, a: xp.roll(a["cos"], -1, axis=0),
        sin=lambda xp, a: xp.roll(a["sin"], -1, axis=0),
    ),
)
in_layer(
    "rope-sign",
    "queries and keys are rotated the other way",
    changed(WRITE, sin=lambda xp, a: -a["sin"]),
)
in_layer(
    "kv-row-lost",
    "K and V of a step's last token are not written",
    changed(WRITE, slots=_last_row_lost),
)
in_layer("kv-swapped", "K and V are taken for each other", changed(WRITE, qkv=_k_and_v_swapped))
in_layer(
    "kv-fp8",
    "K and V lose bits as in an fp8 cache that nobody asked for",
    changed(WRITE, qkv=_k_and_v_in_fp8),
)
in_layer(
    "qk-norms-swapped",
    "queries are normed with the weight of keys and the reverse",
    changed(WRITE, q_weight=lambda xp, a: a["k_weight"], k_weight=lambda xp, a: a["q_weight"]),
    needs=lambda m: m.qk_norm,
    missing="norms of queries and keys",
)
in_layer(
    "qk-norm-eps",
    "epsilon of the norms of queries and keys is ten times too large",
    changed(WRITE, eps=lambda xp, a: 10.0 * a["eps"]),
    needs=lambda m: m.qk_norm,
    missing="norms of queries and keys",
)


# --- norm and residual
# -----------------------------------------------------------------------------------------------

PLAIN_NORM, WIDE_NORM = "rms_norm", "wide_qk_norm"


def _rms(xp: Any, y: Any, eps: float) -> Any:
    return xp.rsqrt(xp.mean(y * y, axis=-1, keepdims=True) + eps)


def _norm_in_bf16(xp: Any, a: Given) -> Any:
    total = a["x"] + a["residual"]
    y = bf16(xp, xp.accumulate(total))
    scale = bf16(xp, _rms(xp, bf16(xp, y), a["eps"]))
    return xp.astype(bf16(xp, y * scale) * xp.accumulate(a["weight"])[None], total.dtype), total


def _weight_after_rounding(xp: Any, a: Given) -> Any:
    total = a["x"] + a["residual"]
    y = xp.accumulate(total)
    normed = bf16(xp, y * _rms(xp, y, a["eps"]))
    return xp.astype(normed * xp.accumulate(a["weight"])[None], total.dtype), total


def _other_eps(xp: Any, a: Given) -> float:
    return 1e-6 if a["eps"] == 1e-5 else 1e-5


def _with_weight(xp: Any, out: Any) -> Any:
    """Every other entry is 5 % larger."""
    n = out.shape[-1]
    weight = 1.0 + 0.05 * xp.astype(index(xp, n, out) % 2, xp.float32)
    weight = xp.reshape(weight, (1,) * (out.ndim - 1) + (n,))
    return xp.astype(xp.accumulate(out) * weight, out.dtype)


def _residual_kept(xp: Any, a: Given) -> Any:
    total = a["x"] + a["residual"]
    y = xp.accumulate(total)
    normed = xp.astype(y * _rms(xp, y, a["eps"]) * xp.accumulate(a["weight"])[None], total.dtype)
    return normed, a["residual"] + xp.zeros_like(total)


in_layer(
    "norm-eps",
    "epsilon of the norms is ten times too large",
    changed(NORM, eps=lambda xp, a: 10.0 * a["eps"]),
)
in_op(
    "eps-of-another-model",
    "norms behind sublayers and over all heads have the other epsilon of 1e-5 and 1e-6",
    changed(PLAIN_NORM, eps=_other_eps),
    changed(WIDE_NORM, eps=_other_eps),
)
in_op(
    "unit-norm-with-weight",
    "a norm that has no weight multiplies with one",
    after("unit_rms_norm", _with_weight),
)
in_op(
    "scalar-dropped",
    "the stream is not multiplied by the layer's weight",
    instead("scale_by", lambda xp, a: a["x"]),
)
in_layer("norm-bf16", "the norm is computed in bfloat16", instead(NORM, _norm_in_bf16))
in_layer(
    "norm-weight-after-rounding",
    "the normed value is rounded to bfloat16 before the weight",
    instead(NORM, _weight_after_rounding),
)
in_layer(
    "norm-weight-plus-one",
    "the norm multiplies by 1 + weight, as Gemma does",
    changed(NORM, weight=lambda xp, a: a["weight"] + 1.0),
)
in_layer(
    "residual-twice",
    "the residual is added twice",
    changed(NORM, residual=lambda xp, a: a["residual"] + a["residual"]),
)
in_layer(
    "residual-stale",
    "the residual is handed on without what the block added",
    instead(NORM, _residual_kept),
)


# --- products and MLP
# ------------------------------------------------------------------------------------------------

LINEAR = "linear"
TILE = 8


def _tile_transposed(xp: Any, a: Given) -> Any:
    w = a["weight"]
    tile = xp.permute_dims(w[:TILE, :TILE], (1, 0))
    top = xp.concat([tile, w[:TILE, TILE:]], axis=1)
    return xp.concat([top, w[TILE:]], axis=0)


def _tail_dropped(xp: Any, a: Given) -> Any:
    x = a["x"]
    return xp.concat([x[:, :-TILE], xp.zeros_like(x[:, -TILE:])], axis=1)


def _partials_rounded(xp: Any, function: Callable[..., Any], a: Given) -> Any:
    x, w, half = a["x"], a["weight"], a["x"].shape[1] // 2
    first = xp.concat([x[:, :half], xp.zeros_like(x[:, half:])], axis=1)
    second = xp.concat([xp.zeros_like(x[:, :half]), x[:, half:]], axis=1)
    return function(first, w, a["bias"]) + function(second, w, None)


def _tf32(xp: Any, x: Any) -> Any:
    """x with 10 bits of mantissa; bfloat16 has fewer."""
    return xp.from_bits((xp.bits(x) + 0x1000) & ~0x1FFF) if x.dtype == xp.float32 else x


def _gate_and_up_swapped(xp: Any, a: Given) -> Any:
    half = a["gate_up"].shape[0] // 2
    return xp.concat([a["gate_up"][half:], a["gate_up"][:half]], axis=0)


def _silu(xp: Any, gate: Any) -> Any:
    return gate * (0.5 + 0.5 * xp.tanh(0.5 * gate))


def _gelu(xp: Any, gate: Any) -> Any:
    return 0.5 * gate * (1.0 + xp.tanh(0.7978845608 * (gate + 0.044715 * gate * gate * gate)))


def _mlp_with(xp: Any, a: Given, act: Callable[[Any, Any], Any]) -> Any:
    """The gated MLP with this activation."""
    hidden = xp.accumulate(xp.linear(a["x"], a["gate_up"], a["gate_up_bias"]))
    half = hidden.shape[1] // 2
    y = act(xp, hidden[:, :half]) * hidden[:, half:]
    return xp.linear(xp.astype(y, a["x"].dtype), a["down"], a["down_bias"])


in_layer(
    "bias-forgotten",
    "the bias of a projection is left out",
    changed(LINEAR, bias=lambda xp, a: None),
    needs=lambda m: m.qkv_bias or m.o_bias or m.mlp_bias,
    missing="biases",
)
in_layer(
    "weight-tile-transposed",
    "one 8 by 8 tile of each weight is transposed",
    changed(LINEAR, weight=_tile_transposed),
)
in_layer(
    "k-tail-dropped",
    "the last 8 terms of each product's sums are missing",
    changed(LINEAR, x=_tail_dropped),
)
in_layer(
    "split-k-rounded",
    "the two halves of each product's sums are rounded before they are added",
    around(LINEAR, _partials_rounded),
)
in_layer(
    "tf32-products",
    "float32 products keep 10 bits of mantissa",
    changed(LINEAR, x=lambda xp, a: _tf32(xp, a["x"]), weight=lambda xp, a: _tf32(xp, a["weight"])),
)
in_layer(
    "gate-up-swapped",
    "gate and up of the MLP are taken for each other",
    *(changed(op, gate_up=_gate_and_up_swapped) for op in MLPS),
)
in_layer(
    "mlp-skipped",
    "the MLP adds nothing",
    *(after(op, lambda xp, out: xp.zeros_like(out)) for op in MLPS),
)
in_layer(
    "gelu-for-silu",
    "the MLP has gelu for silu, or silu for gelu",
    instead("gated_mlp", partial(_mlp_with, act=_gelu)),
    instead("gelu_gated_mlp", partial(_mlp_with, act=_silu)),
)


# --- before and after the layers
# -------------------------------------------------------------------------------------


def _words_lost(xp: Any, out: Any) -> Any:
    return xp.concat([out[:, :-TILE], xp.zeros_like(out[:, -TILE:])], axis=1)


on_top(
    "embedding-off-by-one",
    "each token gets the embedding of the next word",
    changed("embedding", ids=lambda xp, a: (a["ids"] + 1) % a["table"].shape[0]),
)
on_top("vocab-tail-lost", "the logits of the last 8 words are 0", after("logits", _words_lost))


# --- sampling, quantisation, experts, adapters: ops outside of a dense decoder's layers
# ------------------------------


def _last_word_allowed(xp: Any, a: Given) -> Any:
    mask = a["mask"]
    return xp.concat([mask[:, :-1], xp.zeros_like(mask[:, -1:]) - 1], axis=1)


def _int8(xp: Any, a: Given, convert: Callable[[Any, Any], Any]) -> Any:
    x, scale = xp.astype(a["x"], xp.float32), xp.astype(a["scale"], xp.float32)
    blocks = (
        xp.reshape(x, (x.shape[0], scale.shape[1], x.shape[1] // scale.shape[1])) / scale[..., None]
    )
    y = xp.reshape(blocks, x.shape)
    return xp.astype(convert(xp, xp.where(xp.isnan(y), 0.0, y)), xp.int8)


def _wrapped(xp: Any, y: Any) -> Any:
    """Rounded, modulo 256."""
    whole = xp.astype(xp.round(xp.clip(y, -1e6, 1e6)), xp.int32)
    return (whole + 128) % 256 - 128


def _truncated(xp: Any, y: Any) -> Any:
    return xp.trunc(xp.clip(y, -127.0, 127.0))


in_op(
    "vocab-mask-truncated",
    "the last 32 words of a mask are allowed whatever it says",
    changed("penalties", mask=_last_word_allowed),
)
in_op(
    "noise-position-off-by-one",
    "sampling noise is that of the next position",
    changed("sample", position=lambda xp, a: a["position"] + 1),
)
in_op(
    "top-k-off-by-one",
    "top-k keeps one token more",
    changed("sample", top_k=lambda xp, a: xp.where(a["top_k"] > 0, a["top_k"] + 1, 0)),
)
in_op(
    "int8-wrapped",
    "int8 values wrap around where they must saturate",
    instead("quantize_int8", partial(_int8, convert=_wrapped)),
)
in_op(
    "int8-truncated",
    "int8 values are cut, not rounded",
    instead("quantize_int8", partial(_int8, convert=_truncated)),
)
in_op(
    "dequantize-next-scale",
    "values are dequantised with the scale of the next row",
    changed("dequantize", scale=lambda xp, a: xp.roll(a["scale"], -1, axis=0)),
)
in_op(
    "experts-renormalised",
    "router weights are renormalised where they must not be, and the reverse",
    changed("moe_route", renormalize=lambda xp, a: not a["renormalize"]),
)
in_op(
    "expert-off-by-one",
    "rows of an expert go to the one before it",
    changed("grouped_matmul", group_sizes=lambda xp, a: xp.roll(a["group_sizes"], -1, axis=0)),
)
in_op(
    "adapter-off-by-one",
    "each row gets the next adapter",
    changed(
        "lora_shrink",
        index=lambda xp, a: xp.where(
            a["index"] < 0, a["index"], (a["index"] + 1) % a["a"].shape[0]
        ),
    ),
)


# --- what an engine keeps between steps
# --------------------------------------------------------------------------------------------------


def _late(views: Views, kept: Kept, tables: Tables) -> None:
    """What a step brings of page tables arrives with the step after it."""
    names = [
        name for name in ("page_table", "new_rows", "new_columns", "new_pages") if name in views
    ]
    now = {name: views[name].copy() for name in names}
    before = kept.get("pages")
    kept["pages"] = now
    for name in names:
        if before is None or name not in before:
            views[name] = now[name][:0] if name != "page_table" else now[name]
        elif name != "page_table" or before[name].shape == now[name].shape:
            views[name] = before[name]


def _short(views: Views, kept: Kept, tables: Tables) -> None:
    """One slot less than there is, where one token is decoded: the length that the step before
    had.
    """
    decoded = np.arange(len(views["kv_lens"])) < int(views["counts"][0])
    views["kv_lens"][...] = np.where(
        decoded & (views["kv_lens"] > 1), views["kv_lens"] - 1, views["kv_lens"]
    )


def _restarted(views: Views, kept: Kept, tables: Tables) -> None:
    for i in range(int(views["counts"][1])):
        start, stop = int(views["query_start"][i]), int(views["query_start"][i + 1])
        views["positions"][start:stop] = np.arange(stop - start)


def _moved(views: Views, kept: Kept, tables: Tables) -> None:
    """Every other step finds the page table's first two columns in the other order, of what it
    brings of them.
    """
    kept["steps"] = kept.get("steps", 0) + 1
    if kept["steps"] % 2:
        return
    if "new_columns" in views:
        rows, columns = views["new_rows"], views["new_columns"]
        both = np.isin(rows, np.intersect1d(rows[columns == 0], rows[columns == 1]))
        views["new_columns"] = np.where(both & (columns < 2), 1 - columns, columns)
    elif views["page_table"].shape[1] > 1:
        views["page_table"][:, :2] = views["page_table"][:, 1::-1].copy()


def _forgotten(views: Views, kept: Kept, tables: Tables) -> None:
    """The first token of each chunk that does not begin a prompt is not written to the cache."""
    of_groups = views["slots"].reshape(len(tables.groups), -1)
    for i in range(int(views["counts"][1])):
        start = int(views["query_start"][i])
        if views["positions"][start] > 0:
            of_groups[:, start] = -1


def _of_another_group(views: Views, kept: Kept, tables: Tables) -> None:
    """The last group reads the pages of the first one. That has them all: groups with windows
    stand behind.
    """
    last = len(tables.groups) - 1
    if "page_table" in views:
        of_groups = views["page_table"].reshape(len(tables.groups), -1)
        of_groups[last] = of_groups[0]
        return
    known = kept.setdefault("pages", {})
    rows, columns, pages = (views[name] for name in ("new_rows", "new_columns", "new_pages"))
    keys = list(zip((rows % tables.rows).tolist(), columns.tolist(), strict=True))
    for i in np.flatnonzero(rows < tables.rows).tolist():
        known[keys[i]] = pages[i]
    for i in np.flatnonzero(rows >= last * tables.rows).tolist():
        pages[i] = known.get(keys[i], pages[i])


def _freed_early(views: Views, kept: Kept, tables: Tables) -> None:
    """What no later step reads of a group with a window is given away before this one reads it:
    to the last request of the step, whose newest page it is.
    """
    count = int(views["counts"][1])
    slots = views["slots"].reshape(len(tables.groups), -1)
    for number, group in enumerate(tables.groups):
        taken = slots[number, views["query_start"][count] - 1] // group.page_size
        for i in range(count) if group.window else ():
            start = int(views["positions"][views["query_start"][i]])
            freed = group.first_column(start), group.first_column(int(views["kv_lens"][i]))
            _point(views, tables, number, i, range(*freed), int(taken))


def _point(
    views: Views, tables: Tables, group: int, request: int, columns: Iterable[int], page: int
) -> None:
    """Let columns of a request's page table in a group name this page."""
    if "page_table" in views:
        width = views["page_table"].shape[1]
        of_groups = views["page_table"].reshape(len(tables.groups), -1, width)
        of_groups[group, request, list(columns)] = page
        return
    row = group * tables.rows + int(views["rows"][request])
    for column in columns:
        here = (views["new_rows"] == row) & (views["new_columns"] == column)
        views["new_pages"][here] = page
        if not here.any():
            entry = {"new_rows": row, "new_columns": column, "new_pages": page}
            for name, value in entry.items():
                views[name] = np.append(views[name], np.int32(value))


in_engine("page-table-stale", "what is new in the page tables arrives one step late", edit=_late)
in_engine(
    "lengths-stale", "a decoded token attends over the length of the step before it", edit=_short
)
in_engine("positions-restart", "positions count from the beginning of a chunk", edit=_restarted)
in_engine(
    "pages-swapped", "every other step brings the first two pages in the other order", edit=_moved
)
in_engine(
    "chunk-start-lost",
    "K and V of the first token of a later chunk are not written",
    edit=_forgotten,
)
in_engine(
    "table-of-another-group",
    "layers of one page group read the page table of another",
    edit=_of_another_group,
)
in_engine(
    "window-page-freed-early",
    "a page of a layer with a window is another request's one step before its last reader",
    edit=_freed_early,
)
