"""The families of models: from a config.json to the layers of the model and its parameters, as
data.

Each is a module here that has a `FAMILY`. What is the same for all dense decoders stands in
`dense.py`, where a decoder lies that is a part of a larger model in `nested.py`.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

from ..quantization import narrowed_model, narrowed_table
from ..sharding import sharded_model, sharded_table

if TYPE_CHECKING:
    from ..config import ModelConfig
    from ..spec import Model
    from ..table import ParameterTable
    from .family import Family

FAMILIES = {
    "ArceeForCausalLM": "arcee",
    "CwmForCausalLM": "cwm",
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "Dots1ForCausalLM": "dots1",
    "Ernie4_5ForCausalLM": "ernie4_5",
    "Ernie4_5_MoeForCausalLM": "ernie4_5_moe",
    "Exaone4ForCausalLM": "exaone4",
    "ExaoneMoEForCausalLM": "exaone_moe",
    "ExaoneMoeForCausalLM": "exaone_moe",
    "FlexOlmoForCausalLM": "flex_olmo",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3_text",
    "Gemma3ForConditionalGeneration": "gemma3",
    "Gemma4ForCausalLM": "gemma4_text",
    "Gemma4ForConditionalGeneration": "gemma4",
    "Gemma4UnifiedForCausalLM": "gemma4_unified_text",
    "Gemma4UnifiedForConditionalGeneration": "gemma4_unified",
    "GemmaForCausalLM": "gemma",
    "Glm4ForCausalLM": "glm4",
    "Glm4MoeForCausalLM": "glm4_moe",
    "Glm4MoeLiteForCausalLM": "glm4_moe_lite",
    "Glm4vForConditionalGeneration": "glm4v",
    "Glm4vMoeForConditionalGeneration": "glm4v_moe",
    "GlmForCausalLM": "glm",
    "GptOssForCausalLM": "gpt_oss",
    "GraniteForCausalLM": "granite",
    "GraniteMoeForCausalLM": "granitemoe",
    "GraniteMoeHybridForCausalLM": "granitemoehybrid",
    "HYV3ForCausalLM": "hy_v3",
    "HeliumForCausalLM": "helium",
    "HunYuanDenseV1ForCausalLM": "hunyuan_v1_dense",
    "HunYuanMoEV1ForCausalLM": "hunyuan_v1_moe",
    "HyperCLOVAXForCausalLM": "hyperclovax",
    "Llama4ForCausalLM": "llama4_text",
    "Llama4ForConditionalGeneration": "llama4",
    "LlamaForCausalLM": "llama",
    "MiniMaxM2ForCausalLM": "minimax_m2",
    "Ministral3ForCausalLM": "ministral3",
    "MinistralForCausalLM": "ministral",
    "Mistral3ForConditionalGeneration": "mistral3",
    "MistralForCausalLM": "mistral",
    "Mistral4ForCausalLM": "mistral4",
    "MixtralForCausalLM": "mixtral",
    "Olmo2ForCausalLM": "olmo2",
    "Olmo3ForCausalLM": "olmo3",
    "OlmoeForCausalLM": "olmoe",
    "Phi3ForCausalLM": "phi3",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen2VLForConditionalGeneration": "qwen2_vl",
    "Qwen2_5_VLForConditionalGeneration": "qwen2_5_vl",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "Qwen3VLForConditionalGeneration": "qwen3_vl",
    "Qwen3VLMoeForConditionalGeneration": "qwen3_vl_moe",
    "SeedOssForCausalLM": "seed_oss",
    "SmolLM3ForCausalLM": "smollm3",
    "SolarOpenForCausalLM": "solar_open",
    "VaultGemmaForCausalLM": "vaultgemma",
    "YoutuForCausalLM": "youtu",
}
"""Architecture -> module, which has the name of the model type."""
PARTS = {
    "Glm4vMoeTextModel": "glm4v_moe_text",
    "Glm4vTextModel": "glm4v_text",
    "Qwen2VLTextModel": "qwen2_vl_text",
    "Qwen2_5_VLTextModel": "qwen2_5_vl_text",
    "Qwen3VLMoeTextModel": "qwen3_vl_moe_text",
    "Qwen3VLTextModel": "qwen3_vl_text",
}
"""Likewise of text models that exist as a part of a larger one alone."""


def module_of(architecture: str) -> str:
    """The module of an architecture that `FAMILIES` or `PARTS` has: the name of its model type."""
    return FAMILIES.get(architecture) or PARTS[architecture]


def family_of(architecture: str) -> Family:
    """The family of an architecture that `FAMILIES` or `PARTS` has."""
    family: Family = import_module(f"{__name__}.{module_of(architecture)}").FAMILY
    return family


@cache
def model_of(config: ModelConfig) -> Model:
    """The layers of the model that a config describes."""
    model = family_of(config.architecture).model(config)
    if config.quantization is not None:
        model = narrowed_model(model, _wide_parameters(config), config.quantization)
    return model if config.shard is None else sharded_model(model, config.vocab_size, config.shard)


@cache
def parameters_of(config: ModelConfig) -> ParameterTable:
    """The parameters of the model that a config describes."""
    table = _wide_parameters(config)
    if config.quantization is not None:
        table = narrowed_table(table, config.quantization)
    return table if config.shard is None else sharded_table(table, config.shard)


def _wide_parameters(config: ModelConfig) -> ParameterTable:
    return family_of(config.architecture).parameters(config)
