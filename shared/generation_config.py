"""Sampling defaults that a model brings along: the fields of its generation_config.json that
vLLM reads too.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from .config import Change
from .errors import ConfigError, ModelError, RequestError
from .models.fields import Fields, is_number, need_folder, read_json
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


def default_params(folder: str | Path, source: str = "auto") -> tuple[SamplingParams, list[Change]]:
    """What requests of the model in `folder` use where they say nothing, and how that differs from
    `SamplingParams()`.

    Raises ConfigError for another source than those in `SOURCES`, and ModelError for a value that
    cannot be had.
    """
    if source not in SOURCES:
        raise ConfigError(f"generation_config: got {source!r}, allowed are {', '.join(SOURCES)}")
    path = need_folder(folder) / "generation_config.json"
    if source == "none" or not os.path.exists(path):
        return SamplingParams(), []
    usual = SamplingParams()
    values = _read(Fields(read_json(path), str(path)))
    changes = [
        Change(name, getattr(usual, name), value, "generation_config.json")
        for name, value in values.items()
        if value != getattr(usual, name)
    ]
    return SamplingParams(**values), changes


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
            raise ModelError(
                f"{fields.where}: {field}: {reason} (--generation-config none leaves the file's "
                "defaults out)"
            ) from None
        values[name] = value
    return values
