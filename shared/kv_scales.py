"""Which scales a narrow KV cache has: those that are given, else the checkpoint's, else none.

They are parameters of the layers (`models/kv_scales.py`); this says whether a model has them, which
takes a look at the names in its checkpoint.
"""

from __future__ import annotations

from dataclasses import replace

from .checkpoint import Checkpoint
from .config import Change, ResolvedConfig
from .errors import CheckpointError, ConfigError
from .kv_config import NARROW
from .models.config import KvScales, ModelConfig
from .models.decoder import parameters_of
from .models.table import keys
from .weights import parts_in

OPTION = "kv_cache_scales"
SHOWN = 3
"""Tensors that a message names."""


def with_scales(
    model: ModelConfig, config: ResolvedConfig, folder: str | None
) -> tuple[ModelConfig, list[Change]]:
    """The model with the scales that its cache has, and what there is to say about them. `folder`
    None: weights are not read.

    Raises ConfigError for an int8 cache without scales, CheckpointError for scales of some layers.
    """
    return scaled_model(model, config.kv_cache_dtype, config.kv_cache_scales, folder)


def scaled_model(
    model: ModelConfig, dtype: str, given: tuple[float, float] | None, folder: str | None
) -> tuple[ModelConfig, list[Change]]:
    """The same for a cache of `dtype`, as numpy calls it, with these scales `given`."""
    if model.latents is not None and dtype in NARROW.values():
        raise ConfigError(
            f"kv_cache_dtype: got {dtype}, allowed for {model.architecture} is auto: latents are "
            "held in the dtype of the model"
        )
    found = []
    if folder is not None:
        with Checkpoint(folder) as checkpoint:
            found = _scales_in(checkpoint, model)
    scales, changes = _choose(dtype, given, found)
    return replace(model, kv_scales=scales), changes


def _choose(
    dtype: str, given: tuple[float, float] | None, found: list[str]
) -> tuple[KvScales, list[Change]]:
    """The scales of a cache of `dtype`, where the checkpoint has those `found`."""
    theirs = "the checkpoint's"
    if dtype not in NARROW.values():
        why = f"a cache of {dtype} holds K and V themselves; not read: {_few(found)}"
        return None, [Change(OPTION, theirs, None, why)] if found else []
    if given is not None:
        why = f"given; not read: {_few(found)}"
        used = None if given == (1.0, 1.0) else given
        return used, [Change(OPTION, theirs, given, why)] if found else []
    if found:
        return "checkpoint", [Change(OPTION, None, theirs, _few(found))]
    if dtype == "int8":
        raise ConfigError(
            f"{OPTION}: int8 holds x / scale from -127 to 127 and needs scales of K and V, which "
            "the weights do not have: give them"
        )
    return None, [Change(OPTION, None, (1.0, 1.0), "the weights have none")]


def _scales_in(checkpoint: Checkpoint, model: ModelConfig) -> list[str]:
    """The checkpoint's scales of K and V, by name. Raises CheckpointError if some layers have them
    and others do not.
    """
    found: list[str] = []
    missing: list[str] = []
    for parameter, layer in parameters_of(replace(model, kv_scales="checkpoint")).placed():
        if parameter.is_scale:
            (key,) = keys(parts_in(checkpoint, parameter, layer), layer)
            (found if checkpoint.has(key) else missing).append(key)
    if found and missing:
        raise CheckpointError(
            f"scales of K and V: the checkpoint has {_few(found)}, but not {_few(missing)}; "
            "allowed are those of all layers, or none"
        )
    return found


def _few(names: list[str]) -> str:
    rest = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + rest
