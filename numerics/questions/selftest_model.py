"""The model of the self-test: small, random, with all that a dense decoder can have, so that
every fault can show.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from ...shared.models import decoder
from ...shared.models.config_json import parse_config
from ...shared.models.table import keys
from ..sides.subject import Subject, open_subject

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32, "max_position_embeddings": 128, "dtype": "bfloat16",
    "tie_word_embeddings": False,
    "attention_bias": True, "use_sliding_window": True, "sliding_window": 24,
    "layer_types": ["full_attention", "sliding_attention"],
}  # fmt: skip
"""Biases, norms of queries and keys, grouped heads, and a window in the last layer, where faults
are planted.
"""
LAYER = 1


def write_model(folder: Path, seed: int, config: Mapping[str, Any] = CONFIG) -> None:
    """A checkpoint of `config` whose activations are of the size that trained models have. Norm
    weights are not 1: some faults hide behind a weight of 1.
    """
    rng, model = np.random.default_rng(seed), parse_config(config)
    tensors = {}
    for parameter, layer in decoder.parameters_of(model).placed():
        for part, key in zip(parameter.parts, keys(parameter.parts, layer), strict=True):
            shape = parameter.part_shape(part)
            if parameter.init == "ones":
                values = rng.uniform(0.5, 1.5, shape)
            else:
                scale = 0.3 if len(shape) == 1 or parameter.name == "embed" else shape[-1] ** -0.5
                values = rng.normal(size=shape) * scale
            tensors[key] = values.astype(ml_dtypes.bfloat16)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(config)), encoding="utf-8")
    save_file(tensors, folder / "model.safetensors")


def open_model(folder: Path, seed: int) -> Subject:
    """The subject of one seed, written to a folder of its own."""
    path = folder / f"seed-{seed}"
    write_model(path, seed)
    return open_subject(str(path), seed=seed, max_model_len=128)
