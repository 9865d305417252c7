"""Rotary embedding: how a config.json describes it, and the angles that follow.

Source: `modeling_rope_utils.py` of transformers 5, which also reads what version 4 wrote.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from .fields import Fields, is_number, nearest, quoted, show

RopeKind = Literal["default", "linear", "llama3", "yarn", "longrope", "proportional"]
USUAL_KINDS: tuple[RopeKind, ...] = ("default", "linear", "llama3", "yarn")
"""What transformers computes for every family."""
ALIASES: dict[str, RopeKind] = {"su": "longrope"}
"""Names of the first releases."""

FIELDS: dict[RopeKind, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor"}),
    "yarn": frozenset(
        "factor attention_factor beta_fast beta_slow mscale mscale_all_dim truncate".split()
    ),
    "longrope": frozenset("factor attention_factor short_factor long_factor".split()),
    "proportional": frozenset({"factor"}),
}
COMMON = frozenset(
    "rope_type type rope_theta partial_rotary_factor original_max_position_embeddings".split()
)
PER_LAYER = ("full_attention", "sliding_attention")
"""Keys under which a config may have an object for each type of layer."""
ORIGINAL = "original_max_position_embeddings"
PARTIAL = "partial_rotary_factor"


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary embedding. Fields after `kind` mean something for some kinds only; None leaves it to
    the formula.

    `partial_rotary_factor` is the part of a head that is rotated.
    """

    theta: float = 10_000.0
    kind: RopeKind = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    partial_rotary_factor: float = 1.0
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()

    def rotated(self, head_dim: int) -> int:
        """Entries of a head that are rotated, by whatever angle."""
        if self.kind == "proportional":
            return head_dim
        return int(head_dim * self.partial_rotary_factor)

    @property
    def switches_at(self) -> int | None:
        """The longest sequence that is rotated as short ones are; None if all are rotated alike."""
        alike = self.kind != "longrope" or self.short_factor == self.long_factor
        return None if alike else self.original_max_position


def rope_inverse_frequencies(
    rope: RopeConfig, head_dim: int, length: int
) -> tuple[np.ndarray, float]:
    """Angles per position [rotated / 2] float64, and the factor of cos and sin.

    `length` is that of the longest sequence: longrope has one list of factors for short and one for
    long ones.

    proportional: the angles of a whole head, of which all but the first part are 0 (Gemma 4).
    linear: Chen et al., arXiv 2306.15595. llama3: Meta's Llama 3.1 reference code. yarn: Peng et
    al., arXiv 2309.00071. longrope: Ding et al., arXiv 2402.13753.
    """
    dim = rope.rotated(head_dim)
    inverse = 1.0 / rope.theta ** (np.arange(0, dim, 2, dtype=np.float64) / dim)
    if rope.kind == "linear":
        return inverse / rope.factor, 1.0
    if rope.kind == "proportional":
        turning = np.arange(dim // 2) < int(rope.partial_rotary_factor * dim // 2)
        return np.where(turning, inverse / rope.factor, 0.0), 1.0
    if rope.kind == "llama3":
        # Turns within the original context, from "so few that it is interpolated" (0) to "many,
        # left alone" (1).
        turns = rope.original_max_position * inverse / (2 * math.pi)
        low, high = rope.low_freq_factor, rope.high_freq_factor
        keep = (turns - low) / (high - low) if high > low else (turns > low).astype(np.float64)
        keep = np.clip(keep, 0.0, 1.0)
        return (1 - keep) * inverse / rope.factor + keep * inverse, 1.0
    if rope.kind == "yarn":
        low, high = (_yarn_dimension(rope, dim, beta) for beta in (rope.beta_fast, rope.beta_slow))
        if rope.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        ramp = (np.arange(dim // 2, dtype=np.float64) - low) / (
            high - low if high != low else 0.001
        )
        keep = 1 - np.clip(ramp, 0.0, 1.0)
        return (1 - keep) * inverse / rope.factor + keep * inverse, _yarn_attention_factor(rope)
    if rope.kind == "longrope":
        factors = rope.long_factor if length > rope.original_max_position else rope.short_factor
        return inverse / np.array(factors, np.float64), _longrope_attention_factor(rope)
    return inverse, 1.0


def _yarn_dimension(rope: RopeConfig, dim: int, turns: float) -> float:
    """The (fractional) pair of entries that makes `turns` turns within the original context."""
    return (
        dim
        * math.log(rope.original_max_position / (turns * 2 * math.pi))
        / (2 * math.log(rope.theta))
    )


def _yarn_attention_factor(rope: RopeConfig) -> float:
    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return scale(rope.mscale) / scale(rope.mscale_all_dim)
    return scale(1.0)


def _longrope_attention_factor(rope: RopeConfig) -> float:
    """The same for short and long sequences."""
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.factor <= 1.0:
        return 1.0
    return math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_max_position))


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeRules:
    """What a family reads of rotary embedding: which kinds, and whether a part of a head may be
    rotated.

    `original` is its default of `original_max_position_embeddings` outside of the object that
    describes the embedding. None: that field may stand inside alone. `theta` and `part` are its
    defaults, `extra` names fields of the object that the family reads itself.
    """

    kinds: Sequence[RopeKind] = USUAL_KINDS
    partial: bool = False
    original: int | None = None
    theta: float = 10_000.0
    part: float = 1.0
    extra: frozenset[str] = frozenset()


USUAL = RopeRules()


def read_rope(fields: Fields, head_dim: int, rules: RopeRules = USUAL) -> RopeConfig:
    """From `rope_theta` and `rope_scaling` (version 4) or `rope_parameters` (version 5), or from
    both if they agree.
    """
    found: list[tuple[str, RopeConfig]] = []
    for name in ("rope_parameters", "rope_scaling"):
        block = fields.get(name)
        block = {} if block is None else block
        if not isinstance(block, dict):
            fields.fail(name, f"is {show(block)}, must be an object")
        nested = {f"{name}.{key}": value for key, value in block.items() if key in PER_LAYER}
        if nested and len(nested) != len(block):
            fields.refuse(name, sorted(block), "either one object per layer type or plain fields")
        for label, part in (nested or {name: block}).items():
            if nested and not isinstance(part, dict):
                fields.refuse(label, part, "an object")
            if part:
                found.append(
                    (
                        label,
                        _read_block(
                            fields, Fields(part, f"{fields.where}: {fields.path(label)}"), rules
                        ),
                    )
                )
    if not found:
        theta = fields.number("rope_theta", rules.theta, low=1.0, above=True)
        found.append(
            (
                "rope_theta",
                RopeConfig(theta=theta, partial_rotary_factor=_partial(fields, fields, rules)),
            )
        )
    for label, rope in found[1:]:
        if rope != found[0][1]:
            fields.refuse(label, fields.get(label.partition(".")[0]), f"the same as {found[0][0]}")
    label, rope = found[0]
    _check_size(
        Fields(fields.raw, f"{fields.where}: {fields.path(label)}"), rope, rope.rotated(head_dim)
    )
    return rope


def read_ropes(
    fields: Fields,
    head_dim: int,
    full: RopeRules,
    window: RopeRules,
    window_theta: str,
    full_head_dim: int | None = None,
) -> tuple[RopeConfig, RopeConfig]:
    """The rotary embeddings of layers that see everything, and of layers with a window. Heads of
    the former have `full_head_dim` entries, if not `head_dim`.

    Version 5 has an object for each in `rope_parameters`. Of version 4, `rope_theta` and
    `rope_scaling` are those of layers that see everything; the field `window_theta` is of the
    others, which are never scaled.
    """
    blocks = fields.get("rope_parameters")
    blocks = {} if blocks is None else blocks
    if not isinstance(blocks, dict):
        fields.fail("rope_parameters", f"is {show(blocks)}, must be an object")
    for name in blocks:
        if name not in PER_LAYER:
            allowed = f"an object for each of {' and '.join(PER_LAYER)}{nearest(name, PER_LAYER)}"
            fields.refuse("rope_parameters", sorted(blocks), allowed)
    fields.number(window_theta, window.theta, low=1.0, above=True)

    def only(layer_type: str, **outside: Any) -> Fields:
        block = blocks.get(layer_type)
        inside = None if block is None else {layer_type: block}
        return fields.replaced({"rope_parameters": inside, **outside})

    of_full = only(PER_LAYER[0])
    of_window = only(PER_LAYER[1], rope_theta=fields.get(window_theta), rope_scaling=None)
    return (
        read_rope(of_full, full_head_dim or head_dim, full),
        read_rope(of_window, head_dim, window),
    )


def _check_size(block: Fields, rope: RopeConfig, rotated: int) -> None:
    """Raise ModelError where what is rotated is no pairs, or a list has not one factor for each
    of them.
    """
    if rotated < 2 or rotated % 2:
        block.fail(
            PARTIAL,
            f"is {rope.partial_rotary_factor}, which is {rotated} entries of a head, must be pairs",
        )
    if rope.kind != "longrope":
        return
    for name, factors in (("short_factor", rope.short_factor), ("long_factor", rope.long_factor)):
        if len(factors) != rotated // 2:
            block.fail(
                name,
                f"has {len(factors)} entries, must have one for each rotated pair ({rotated // 2})",
            )


def _partial(top: Fields, block: Fields, rules: RopeRules) -> float:
    """The part of a head that is rotated."""
    parts = {f.number(PARTIAL, above=True) for f in (block, top) if f.get(PARTIAL) is not None}
    if not parts:
        return rules.part
    if not rules.partial and parts == {1.0}:
        return 1.0
    if not rules.partial:
        block.refuse(PARTIAL, block.get(PARTIAL), "1.0 or absent")
    if len(parts) > 1:
        block.refuse(
            PARTIAL, block.get(PARTIAL), f"the value of {PARTIAL} outside, {top.get(PARTIAL)}"
        )
    part = parts.pop()
    if part > 1:
        block.fail(PARTIAL, f"is {part}, must be at most 1")
    return part


def _kind(block: Fields, rules: RopeRules) -> RopeKind:
    named = [block.get(name) for name in ("rope_type", "type") if block.get(name) is not None]
    kinds: list[Any] = [
        ALIASES.get(name, name) if isinstance(name, str) else name for name in named
    ]
    kind: RopeKind = kinds[0] if kinds else "default"
    if kind not in rules.kinds or kinds[1:] not in ([], [kind]):
        near = nearest(named[0], rules.kinds) if isinstance(named[0], str) else ""
        block.refuse(
            "rope_type",
            named[0] if len(named) < 2 else named,
            f"one of {', '.join(rules.kinds)}{near}",
        )
    return kind


def _read_block(top: Fields, block: Fields, rules: RopeRules) -> RopeConfig:
    kind, max_position = _kind(block, rules), top.size("max_position_embeddings")
    for name, value in block.raw.items():
        if value is not None and name not in COMMON | FIELDS[kind] | rules.extra:
            block.refuse(
                show(name), value, f"absent for rope_type {kind}{nearest(name, FIELDS[kind])}"
            )
    part = _partial(top, block, rules)
    thetas = {
        f.number("rope_theta", low=1.0, above=True)
        for f in (block, top)
        if f.get("rope_theta") is not None
    }
    if len(thetas) > 1:  # version 5 would take this one, version 4 the one outside
        block.refuse(
            "rope_theta",
            block.get("rope_theta"),
            f"the value of rope_theta outside, {top.get('rope_theta')}",
        )
    theta = thetas.pop() if thetas else rules.theta
    rope = RopeConfig(theta=theta, kind=kind, partial_rotary_factor=part)
    if kind == "default":
        return rope
    if kind in ("linear", "proportional"):
        default = None if kind == "linear" else 1.0
        return replace(rope, factor=block.number("factor", default, low=1.0))
    outside = top.size(ORIGINAL, rules.original or max_position)
    original = block.size(ORIGINAL, outside)
    if original != outside and (rules.original is not None or top.get(ORIGINAL) is not None):
        block.refuse(ORIGINAL, original, f"the value of {ORIGINAL} outside, {outside}")
    rope = replace(rope, original_max_position=original)
    if kind == "llama3":
        return _llama3(block, rope)
    read = _yarn if kind == "yarn" else _longrope
    return read(block, rope, max_position / original)


def _llama3(block: Fields, rope: RopeConfig) -> RopeConfig:
    low = block.number("low_freq_factor", above=True)
    high = block.number("high_freq_factor", low=low)
    return replace(
        rope, factor=block.number("factor", low=1.0), low_freq_factor=low, high_freq_factor=high
    )


def _yarn(block: Fields, rope: RopeConfig, stretch: float) -> RopeConfig:
    slow = block.number("beta_slow", 1.0, above=True)
    return replace(
        rope,
        factor=block.number("factor", stretch, low=1.0),
        beta_fast=block.number("beta_fast", max(32.0, slow), low=slow),
        beta_slow=slow,
        attention_factor=_optional(block, "attention_factor"),
        mscale=_optional(block, "mscale"),
        mscale_all_dim=_optional(block, "mscale_all_dim"),
        truncate=block.boolean("truncate", "truncate" not in block.raw),
    )


def _longrope(block: Fields, rope: RopeConfig, stretch: float) -> RopeConfig:
    if rope.original_max_position < 2:
        block.fail(ORIGINAL, f"is {rope.original_max_position}, must be at least 2")
    return replace(
        rope,
        factor=block.number("factor", stretch, above=True),
        attention_factor=_optional(block, "attention_factor"),
        short_factor=_factors(block, "short_factor"),
        long_factor=_factors(block, "long_factor"),
    )


def _factors(block: Fields, name: str) -> tuple[float, ...]:
    """What each pair's frequency is divided by."""
    value = block.need(name, None)
    if not isinstance(value, list) or not all(is_number(one) and one > 0 for one in value):
        block.fail(name, f"is {quoted(value)}, must be a list of numbers of more than 0")
    return tuple(float(one) for one in value)


def _optional(fields: Fields, name: str) -> float | None:
    return (
        None if fields.get(name) is None else fields.number(name, above=name == "attention_factor")
    )
