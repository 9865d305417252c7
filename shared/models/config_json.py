"""A folder's config.json, read into a `ModelConfig`. What might change the maths is refused if
unknown.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..checkpoint import Checkpoint, has_weights
from ..errors import CheckpointError
from .config import ModelConfig
from .families import FAMILIES, family_of
from .fields import Fields, nearest, need_folder, read_json, show
from .quantization_config import read_quantization


def load_config(folder: str | Path) -> ModelConfig:
    """The config of the model in `folder`; its dtype is that of most weights where config.json says
    none. Raises ModelNotFound, ModelError or UnsupportedModel.
    """
    path = need_folder(folder)
    raw = read_json(path / "config.json")
    generation = path / "generation_config.json"
    config = parse_config(
        raw, read_json(generation) if os.path.exists(generation) else {}, str(path / "config.json")
    )
    if _states_dtype(raw) or not has_weights(path):
        return config
    try:
        with Checkpoint(path) as checkpoint:
            return replace(config, dtype=checkpoint.usual_dtype() or config.dtype)
    except CheckpointError:  # which is said when they are loaded, if they are
        return config


def _states_dtype(raw: Mapping[str, Any]) -> bool:
    every = (raw, raw.get("text_config"))
    return any(
        isinstance(block, dict) and block.get(name) is not None
        for block in every
        for name in ("dtype", "torch_dtype")
    )


def parse_config(
    raw: Mapping[str, Any], generation: Mapping[str, Any] | None = None, where: str = "config.json"
) -> ModelConfig:
    """The config that a config.json (`raw`) and a generation_config.json describe; `where` names
    them in errors.
    """
    architecture = _architecture(Fields(raw, where))
    model_type, family = FAMILIES[architecture], family_of(architecture)
    fields = Fields({**raw, "quantization_config": None}, where, model_type)
    family.refuse_unknown(fields)
    config = family.read(fields)
    if config.left_out:
        _refuse_quantized_parts(raw, where, model_type)
    quantization = read_quantization(Fields(raw, where, model_type))
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
    """Raise UnsupportedModel if this model of several parts is quantised."""
    for fields in (
        Fields(raw, where, model_type),
        Fields(raw.get("text_config") or {}, where, model_type, "text_config."),
    ):
        value = fields.get("quantization_config")
        if value is not None:
            fields.refuse("quantization_config", value, "absent where text is one of several parts")


def _architecture(fields: Fields) -> str:
    named, model_type = fields.get("architectures"), fields.get("model_type")
    # A model type that has two spellings is named once.
    by_type = {module: architecture for architecture, module in FAMILIES.items()}
    known = f"one of {', '.join(by_type.values())}"
    if named is None or named == []:
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
