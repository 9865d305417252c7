"""Sizes of well-known models by name, as their config.json states them: to measure and to compile without weights.

Sources: the config.json of meta-llama/Meta-Llama-3-8B and of Qwen/Qwen3-0.6B.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ..errors import ModelNotFound
from .locate import model_folder

SHAPES: Mapping[str, Mapping[str, Any]] = {
    "llama3-8b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 128000,
        "eos_token_id": 128001,
    },
    "qwen3-0.6b": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "attention_bias": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 151643,
        "eos_token_id": 151645,
    },
}


@contextmanager
def shape_or_folder(model: str) -> Iterator[str]:
    """What `LLM` takes for `model`: for the name of a shape a folder with nothing but config.json, else `model` itself.

    The folder of a shape lives as long as the block; its weights can only be dummies. Raises ModelNotFound.
    """
    if model not in SHAPES:
        try:
            model_folder(model)
        except ModelNotFound as error:
            raise ModelNotFound(f"{error}; known by name: {', '.join(SHAPES)}") from None
        yield model
        return
    with TemporaryDirectory(prefix=f"twinfer-{model}-") as folder:
        write_config(model, folder)
        yield folder


def write_config(name: str, folder: str | Path) -> None:
    """Write the config.json of a named shape. Raises KeyError for a name that is not in `SHAPES`."""
    (Path(folder) / "config.json").write_text(json.dumps(SHAPES[name], indent=1), encoding="utf-8")
