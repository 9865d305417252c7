"""Sampling defaults that a model brings along: the fields of its generation_config.json that
vLLM reads too.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from .config import Change
from .errors import ConfigError, ModelError, RequestError
from .models.fields import Fields, is_number, need_folder, read_json, show
from .sampling_kinds import Temperature
from .sampling_params import SamplingParams

FIELDS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""Fields of the file, and what `SamplingParams` calls them. `do_sample` is not read: a
temperature of 0 is greedy.
"""
SOURCES = ("auto", "none")
"""auto: generation_config.json. none: the defaults of `SamplingParams`."""

OVERRIDE = "override-generation-config"
WAY_OUT = " (--generation-config none leaves the file's defaults out)"


def default_params(
    folder: str | Path, source: str = "auto", override: Mapping[str, Any] = MappingProxyType({})
) -> tuple[SamplingParams, list[Change]]:
    """What requests of the model in `folder` use where they say nothing, and how that differs from
    `SamplingParams()`. `override` has fields of the file that go before its own.

    Raises ConfigError for another source than those in `SOURCES` and for fields of `override` that
    cannot be had, ModelError for such a field of the file.
    """
    if source not in SOURCES:
        raise ConfigError(f"generation_config: got {source!r}, allowed are {', '.join(SOURCES)}")
    path = need_folder(folder) / "generation_config.json"
    reads = source == "auto" and os.path.exists(path)
    own = _read(Fields(read_json(path), str(path))) if reads else {}
    given = _overriding(override)
    usual = SamplingParams()
    changes = [
        Change(name, getattr(usual, name), value, where)
        for name, value in (own | given).items()
        # Of the most tokens it matters that they are given, also where they are the usual ones.
        if name == "max_tokens" or value != getattr(usual, name)
        for where in (OVERRIDE if name in given else path.name,)
    ]
    return SamplingParams(**own | given), changes


def _overriding(fields: Mapping[str, Any]) -> dict[str, Any]:
    for field in fields:
        if field not in FIELDS:
            raise ConfigError(f"{OVERRIDE}: has {show(field)}, allowed are {', '.join(FIELDS)}")
    try:
        return _read(Fields(fields, OVERRIDE))
    except ModelError as error:
        raise ConfigError(str(error).removesuffix(WAY_OUT)) from None


def _read(fields: Fields) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for field, name in FIELDS.items():
        value = fields.get(field)
        if value is None:
            continue
        if name == "temperature" and is_number(value):
            value = Temperature.raised(value)  # published files have 1e-6
        try:
            SamplingParams(**{name: value})
        except RequestError as error:
            reason = str(error).removeprefix(f"{name}: ")
            raise ModelError(f"{fields.where}: {field}: {reason}{WAY_OUT}") from None
        values[name] = value
    return values
