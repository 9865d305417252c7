"""A catalogue of faults to plant on purpose: what a comparison must be able to see
(`questions/selftest.py` checks it).

A fault wraps what a backend's plan has chosen for an op, from outside, or changes weights or the
rotary tables on the way to the device: nothing of it is in the code that serves. Each is written
once over an array namespace, so it can be planted in either backend. `plant("NAME")` is the fault
in every layer, `plant("NAME@3")` in layer 3 only.

Most wrap the ops that the decoder itself calls, which every plan has, fused or not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...shared.errors import ConfigError
from ...shared.models.config import ModelConfig
from ..sides.fault import Fault
from .catalogue import CATALOGUE


def plant(text: str, model: ModelConfig | None = None) -> Fault:
    """The fault that `NAME` or `NAME@LAYER` names. Raises ConfigError, also for one that `model`
    cannot show.
    """
    name, sign, where = text.partition("@")
    if name not in CATALOGUE:
        raise ConfigError(f"plant: got {name!r}, allowed are {', '.join(CATALOGUE)}")
    entry = CATALOGUE[name]
    if sign and entry.place != "layer":
        raise ConfigError(f"plant: got {text!r}; {name} is not in a layer, allowed is {name}")
    if sign and not where.isdecimal():
        raise ConfigError(f"plant: got {text!r}, allowed is {name}@LAYER with a number")
    layer = int(where) if sign else None
    if model is not None:
        if layer is not None and layer >= model.num_layers:
            raise ConfigError(f"plant: got {text!r}, allowed are layers below {model.num_layers}")
        if entry.place == "ops":
            raise ConfigError(
                f"plant: {name} is in {', '.join(entry.ops)}, which this model does not call"
            )
        if entry.needs is not None and not entry.needs(model):
            raise ConfigError(f"plant: {name} shows only in a model with {entry.missing}")
    return entry.fault(layer)


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


def describe() -> Iterator[str]:
    """The catalogue as lines of text: name, place, what is wrong."""
    for entry in CATALOGUE.values():
        yield f"{entry.name:28} {entry.place:6} {entry.what}"
