"""A catalogue of faults to plant on purpose: what a comparison must be able to see
(`questions/selftest.py` checks it).

A fault wraps what a backend's plan has chosen for an op, from outside, or changes weights or the
rotary tables on the way to the device, or the steps that a worker gets: nothing of it is in the
code that serves. Each is written once over an array namespace, so it can be planted in either
backend. Most wrap the ops that the decoder itself calls, which every plan has, fused or not.

Here is one fault of each kind: what to try the comparison with on a machine. All the others that it
must see are in `tests/numerics/faults.py`, which adds them to this catalogue.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, get_args

import numpy as np

from ...shared.errors import ConfigError
from ...shared.models.config import ModelConfig
from ..sides.fault import Fault, Place
from .engine import stale
from .making import Given, after, bf16, changed, instead

CATALOGUE: dict[str, Fault] = {}


def _catalogue(place: Place, name: str, what: str, *makes: Any, **rest: Any) -> None:
    """Add a fault of some ops, or one that the fields in `rest` make."""
    layer = -1 if place == "top" else None
    CATALOGUE[name] = Fault(name, dict(makes), what=what, place=place, layer=layer, **rest)


in_layer, on_top, in_op, in_engine = (partial(_catalogue, place) for place in get_args(Place))


def plant(text: str, model: ModelConfig | None = None, *, between_steps: bool = False) -> Fault:
    """The fault that `NAME` (in every layer) or `NAME@LAYER` names. Raises ConfigError, also for
    one that `model` cannot show. `between_steps`: a fault may be in no step by itself.
    """
    name, sign, where = text.partition("@")
    if name not in CATALOGUE:
        raise ConfigError(f"plant: got {name!r}, allowed are {', '.join(CATALOGUE)}")
    fault = CATALOGUE[name]
    if sign and fault.place != "layer":
        raise ConfigError(f"plant: got {text!r}; {name} is not in a layer, allowed is {name}")
    if sign and not where.isdecimal():
        raise ConfigError(f"plant: got {text!r}, allowed is {name}@LAYER with a number")
    if sign:
        fault = replace(fault, layer=int(where))
    if model is None:
        return fault
    if sign and int(where) >= model.num_layers:
        raise ConfigError(f"plant: got {text!r}, allowed are layers below {model.num_layers}")
    if fault.place == "ops":
        raise ConfigError(
            f"plant: {name} is in {', '.join(fault.ops)}, which this model does not call"
        )
    if fault.place == "engine" and not between_steps:
        raise ConfigError(f"plant: {name} is in no step by itself, `invariants` alone shows it")
    if fault.needs is not None and not fault.needs(model):
        raise ConfigError(f"plant: {name} shows only in a model with {fault.missing}")
    return fault


def plant_by_side(texts: Sequence[str], model: ModelConfig | None = None) -> dict[str, Fault]:
    """Faults by side (`a`, `b` where none is named), from `[SIDE=]NAME[@LAYER]`. Raises
    ConfigError, also for two on one side.
    """
    found: dict[str, Fault] = {}
    for text in texts:
        side, sign, rest = text.partition("=")
        side, rest = (side, rest) if sign else ("b", text)
        if side not in ("a", "b") or side in found:
            raise ConfigError(f"plant: got {text!r}, allowed is one [a=|b=]NAME[@LAYER] a side")
        found[side] = plant(rest, model)
    return found


# --- the faults
# --------------------------------------------------------------------------------------------------

ATTENTION, WRITE, NORM = "paged_attention", "norm_rope_write_kv", "fused_add_rms_norm"
MLPS = "gated_mlp", "gelu_gated_mlp"
"""A model calls one of the ops for an MLP: which, its activation says."""
WINDOW: dict[str, Any] = {
    "needs": lambda model: any(model.layer_windows) and not model.windows_are_chunks,
    "missing": "a sliding window",
}  # fmt: skip


def _column_repeated(xp: Any, a: Given) -> Any:
    table = a["page_table"]
    return (
        xp.concat([table[:, :1], table[:, :1], table[:, 2:]], axis=1)
        if table.shape[1] > 1
        else table
    )


def _other_base(cos: np.ndarray, sin: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Tables of theta^1.01: angles of position 1 are the frequencies, theta^(-2j/d)."""
    scaling, inverse = np.hypot(cos[1], sin[1]), np.arctan2(sin[1], cos[1]).astype(np.float64)
    angles = np.arange(len(cos), dtype=np.float64)[:, None] * np.maximum(inverse, 1e-300) ** 1.01
    return (np.cos(angles) * scaling).astype(cos.dtype), (np.sin(angles) * scaling).astype(
        sin.dtype
    )


def _next_slot(xp: Any, a: Given) -> Any:
    slots, total = a["slots"], a["kv"].shape[0] * a["kv"].shape[1]
    return xp.where(slots < 0, slots, xp.where(slots < total - 1, slots + 1, slots))


def _unrounded_sum(xp: Any, a: Given) -> Any:
    y = xp.accumulate(a["x"]) + xp.accumulate(a["residual"])
    total = a["x"] + a["residual"]
    scale = xp.rsqrt(xp.mean(y * y, axis=-1, keepdims=True) + a["eps"])
    return xp.astype(y * scale * xp.accumulate(a["weight"])[None], total.dtype), total


def _loaded_swapped(weights: dict[str, np.ndarray], layer: int) -> dict[str, np.ndarray]:
    gate, up = np.split(weights["gate_up"], 2)
    return weights | {"gate_up": np.concatenate([up, gate])}


in_layer(
    "window-off-by-one",
    "the sliding window is one position too long",
    changed(ATTENTION, window=lambda xp, a: a["window"] + 1 if a["window"] > 0 else 0),
    **WINDOW,
)
in_layer(
    "attention-scale-1e-3",
    "attention scores are 0.1 % too large",
    changed(ATTENTION, scale=lambda xp, a: a["scale"] * 1.001),
)
in_layer(
    "stale-page",
    "the second page of each request is read as the first one",
    changed(ATTENTION, page_table=_column_repeated),
)
in_layer(
    "rope-base",
    "the rotary base is its power of 1.01",
    tables=_other_base,
    shown_by=(WRITE,),
)
in_layer(
    "kv-slot-off-by-one",
    "K and V are written to the next slot",
    changed(WRITE, slots=_next_slot),
)
in_layer(
    "rounding-dropped",
    "the norm reads the residual sum before it was rounded",
    instead(NORM, _unrounded_sum),
)
in_layer(
    "gate-up-loaded-swapped",
    "gate and up lie the other way round in the loaded weights",
    weights=_loaded_swapped,
    shown_by=MLPS,
)
on_top("logits-rounded", "logits are rounded to bfloat16", after("logits", bf16))
in_op(
    "token-off-by-one",
    "greedy sampling returns the token after the best one",
    after("greedy_sample", lambda xp, out: out + 1),
)
in_engine(
    "slots-stale",
    "a step writes K and V to the slots of the step before it",
    edit=stale("slots"),
)
