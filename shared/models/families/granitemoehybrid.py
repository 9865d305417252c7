"""Granite 4.0 without recurrent layers and without experts: a Granite 3 with an MLP of another
name, that may rotate nothing.
"""

from __future__ import annotations

from ..config import ModelConfig
from ..fields import Fields
from ..table import ParameterTable
from . import dense, granite
from .family import Family

NAMES = dense.Names(gate_up=("shared_mlp.input_linear",), down="shared_mlp.output_linear")
ATTENTION = ("attention", "full_attention")
"""What versions 4 and 5 of transformers call the layers that run."""


def read(fields: Fields) -> ModelConfig:
    """The MLP is what all tokens go through where there are experts. Those would be as wide as
    `intermediate_size` says.
    """
    layers = fields.size("num_hidden_layers", high=dense.MAX_LAYERS)
    # Others are recurrent, and so are all where nothing is said.
    dense.names_of_layers(fields, fields.need("layer_types", None), layers, ATTENTION)
    experts = fields.size("num_local_experts", 8, low=0)
    if experts:
        fields.refuse("num_local_experts", experts, "0")
    fields.size("intermediate_size", 11008)
    fields.only("mlp_bias", False)
    fields.only("position_embedding_type", "rope", "nope")
    rotates = fields.get("position_embedding_type") == "rope"
    bias, inner = fields.boolean("attention_bias", False), fields.size("shared_intermediate_size")
    config = dense.read(
        fields.replaced({"layer_types": None, "intermediate_size": inner}),
        kv_heads=fields.size("num_attention_heads"),
        qkv_bias=bias,
        o_bias=bias,
        unrotated_layers=() if rotates else tuple(range(layers)),
    )
    return granite.multiplied(fields, config)


def parameters(config: ModelConfig) -> ParameterTable:
    """gate and up are one tensor."""
    return dense.parameters(config, NAMES)


FAMILY = Family(
    read=read,
    parameters=parameters,
    fields=granite.FAMILY.fields
    | {"num_local_experts", "shared_intermediate_size", "position_embedding_type"},
    fixed={"normalization_function": ("rmsnorm",)},
    harmless=frozenset(
        """mamba_n_heads mamba_n_groups mamba_d_state mamba_d_head mamba_d_conv mamba_expand
        mamba_chunk_size mamba_conv_bias mamba_proj_bias time_step_limit num_experts_per_tok
        output_router_logits router_aux_loss_coef init_method""".split()
    ),
)
