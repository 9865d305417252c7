"""Sizes of well-known models by name, as their config.json states them: to measure and to compile
without weights.

Each is a folder in `shapes/` with nothing but a config.json, so that whatever takes a model's
folder takes its name. Sources: the config.json of meta-llama/Meta-Llama-3-8B, Llama-3.1-8B and 70B,
Llama-3.2-1B and 3B, of mistralai/Mistral-7B-v0.3, of Qwen/Qwen2.5-7B-Instruct, of Qwen/Qwen3-0.6B,
4B, 14B and 32B, of microsoft/Phi-4-mini-instruct and of ibm-granite/granite-3.3-8b-instruct. Those
of google/gemma-3-4b-it, gemma-3-27b-it, gemma-4-31B-it, gemma-4-E2B-it and gemma-4-E4B-it and of
allenai/Olmo-3-1025-7B are from memory; their numbers of parameters are the published ones, of
Gemma 4 as far as these are said (30.7, 5.1 and 8 billion with towers). Those of
google/gemma-4-26B-A4B-it are put together from what is published of it: 25.2 billion parameters,
and the bytes of its cache.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ..errors import ConfigError
from .locate import SHAPES_FOLDER, shape_names

SHAPES: Mapping[str, Mapping[str, Any]] = {
    name: json.loads((SHAPES_FOLDER / name / "config.json").read_bytes()) for name in shape_names()
}


def check_weights(model: str, load_format: str) -> None:
    """Raise ConfigError if `model` names a shape, which has no weights, and they are not to be
    dummies.
    """
    if model in SHAPES and load_format != "dummy":
        raise ConfigError(
            f"load_format: got {load_format}; {model} is a shape without weights, so it must be "
            "dummy "
            "(--load-format dummy: seeded random weights)"
        )
