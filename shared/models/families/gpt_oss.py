"""gpt-oss: windows in every other layer, heads with sinks, and experts with biases whose gate and
up lie in turns. The experts' weights are bfloat16 or mxfp4.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...checkpoint import STACKED, TRANSPOSED
from ..config import ModelConfig
from ..fields import Fields
from ..rope import ORIGINAL, RopeRules
from ..table import Parameter, ParameterTable, Part
from . import dense
from .family import Family
from .mixtral import experts

NAMES = dense.Names(router="mlp.router")
EXPERTS = f"{dense.LAYER}mlp.experts."
ROPE = RopeRules(theta=150_000.0)
DEFAULT_ROPE: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 32.0,
    ORIGINAL: 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
}
"""Of a file that has neither `rope_parameters` nor `rope_scaling`."""


def read(fields: Fields) -> ModelConfig:
    """Layers with a window come first. Weights of the chosen experts add up to 1."""
    bias = fields.boolean("attention_bias", True)
    if not fields.get("rope_scaling"):
        fields = fields.defaulted({"rope_parameters": DEFAULT_ROPE})
    given = experts(fields, "num_local_experts", "intermediate_size", 4, True)
    fields.only("experts_per_token", given["experts_per_token"])
    clamp = (
        fields.number("swiglu_alpha", 1.702, above=True),
        fields.number("swiglu_limit", 7.0, above=True),
    )
    return dense.read(
        fields,
        kv_heads=8,
        head_dim=64,
        eps=1e-5,
        rope=ROPE,
        windows=dense.windows_in_pattern(fields, 128, 2),
        qkv_bias=bias,
        o_bias=bias,
        attention_sinks=True,
        expert_biases=True,
        expert_clamp=clamp,
        **given,
    )


def parameters(config: ModelConfig) -> ParameterTable:
    """The experts of a layer are one tensor, transposed where it is not quantised."""
    table = dense.parameters(config, NAMES)
    layers = range(config.num_layers)
    width, size, count = config.hidden_size, config.expert_size, config.num_experts

    def shared_by_experts(parameter: Parameter, rows: int, key: str) -> Parameter:
        parts = tuple(
            Part(key, rows, parameter.axes[0], expert * rows, count * rows)
            for expert in range(count)
        )
        return dense.or_without_model(replace(parameter, parts=parts, alternatives=()))

    def bias(name: str, rows: int, key: str) -> Parameter:
        whole = Part(key, count * rows, "experts")
        made = Parameter(name, (count * rows,), ("experts",), (whole,), layers, "zeros")
        return shared_by_experts(made, rows, key)

    of = {
        "experts_gate_up": (2 * size, f"{EXPERTS}gate_up_proj{TRANSPOSED}{count}"),
        "experts_down": (width, f"{EXPERTS}down_proj{TRANSPOSED}{count}"),
    }
    found = [
        shared_by_experts(parameter, *of[parameter.name]) if parameter.name in of else parameter
        for parameter in table
    ]
    found += [
        bias("experts_gate_up_bias", 2 * size, f"{EXPERTS}gate_up_proj_bias{STACKED}{count}"),
        bias("experts_down_bias", width, f"{EXPERTS}down_proj_bias{STACKED}{count}"),
    ]
    router = Part(f"{dense.LAYER}mlp.router.bias", count, "expert")
    sinks = Part(f"{dense.LAYER}self_attn.sinks", config.num_heads, "heads")
    more = [
        Parameter("router_shift", (count,), ("one",), (router,), layers, "zeros", "float32"),
        Parameter("sinks", (config.num_heads,), ("heads",), (sinks,), layers, "zeros", "float32"),
    ]
    found += [dense.or_without_model(parameter) for parameter in more]
    return replace(table, parameters=tuple(found))


FAMILY = Family(
    read=read,
    parameters=parameters,
    fields=frozenset(
        """num_local_experts num_experts_per_tok experts_per_token swiglu_alpha
        swiglu_limit""".split()
    ),
    fixed={"initial_context_length": (4096,)},
    harmless=frozenset({"output_router_logits", "router_aux_loss_coef"}),
)
