"""Sizes of well-known models by name, as their config.json states them: to measure and to compile without weights.

Sources: the config.json of meta-llama/Meta-Llama-3-8B, Llama-3.1-8B and 70B, Llama-3.2-1B and 3B, of
mistralai/Mistral-7B-v0.3, of Qwen/Qwen2.5-7B-Instruct, and of Qwen/Qwen3-0.6B, 4B, 14B and 32B.
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

LLAMA: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "head_dim": 128,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}
QWEN2: Mapping[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "hidden_act": "silu",
    "use_sliding_window": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}
QWEN3: Mapping[str, Any] = {
    **QWEN2,
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 128,
    "num_key_value_heads": 8,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "attention_bias": False,
}
MISTRAL: Mapping[str, Any] = {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "head_dim": 128,
    "num_key_value_heads": 8,
    "vocab_size": 32768,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000.0,
    "hidden_act": "silu",
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _sizes(family: Mapping[str, Any], hidden: int, mlp: int, layers: int, heads: int, **more: Any) -> Mapping[str, Any]:
    """The config.json of a member of a family."""
    sizes = {"hidden_size": hidden, "intermediate_size": mlp, "num_hidden_layers": layers, "num_attention_heads": heads}
    return {**family, **sizes, **more}


def _long(factor: float) -> dict[str, Any]:
    """Positions of Llama 3.1 and 3.2: 128K, stretched from 8K."""
    rope = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return {
        "max_position_embeddings": 131072,
        "rope_scaling": {**rope, "original_max_position_embeddings": 8192},
    }


SHAPES: Mapping[str, Mapping[str, Any]] = {
    "llama3-8b": _sizes(LLAMA, 4096, 14336, 32, 32, max_position_embeddings=8192),
    "llama3.1-8b": _sizes(LLAMA, 4096, 14336, 32, 32, **_long(8.0)),
    "llama3.1-70b": _sizes(LLAMA, 8192, 28672, 80, 64, **_long(8.0)),
    "llama3.2-1b": _sizes(LLAMA, 2048, 8192, 16, 32, head_dim=64, tie_word_embeddings=True, **_long(32.0)),
    "llama3.2-3b": _sizes(LLAMA, 3072, 8192, 28, 24, tie_word_embeddings=True, **_long(32.0)),
    "mistral-7b": _sizes(MISTRAL, 4096, 14336, 32, 32),
    "qwen2.5-7b": _sizes(
        QWEN2, 3584, 18944, 28, 28, num_key_value_heads=4, vocab_size=152064, max_position_embeddings=32768,
        tie_word_embeddings=False,
    ),
    "qwen3-0.6b": _sizes(QWEN3, 1024, 3072, 28, 16, tie_word_embeddings=True),
    "qwen3-4b": _sizes(QWEN3, 2560, 9728, 36, 32, tie_word_embeddings=True),
    "qwen3-14b": _sizes(QWEN3, 5120, 17408, 40, 40, tie_word_embeddings=False),
    "qwen3-32b": _sizes(QWEN3, 5120, 25600, 64, 64, tie_word_embeddings=False),
}  # fmt: skip


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
