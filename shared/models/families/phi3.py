"""Phi-3, Phi-3.5 and Phi-4: q, k and v are one tensor on disk, and so are gate and up."""

from __future__ import annotations

from ..config import ModelConfig
from ..fields import Fields
from ..rope import RopeRules
from ..table import ParameterTable
from . import dense
from .family import Family

ROPE = RopeRules(kinds=("default", "longrope"), partial=True, original=4096)
NAMES = dense.Names(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",))


def read(fields: Fields) -> ModelConfig:
    """There are no biases; one sliding window for all layers, or none."""
    fields.only("attention_bias", False)
    fields.only("mlp_bias", False)
    heads, windows = fields.size("num_attention_heads"), dense.one_window(fields, None)
    return dense.read(fields, kv_heads=heads, eps=1e-5, windows=windows, rope=ROPE)


def parameters(config: ModelConfig) -> ParameterTable:
    """The usual parameters under the names of this family."""
    return dense.parameters(config, NAMES)


FAMILY = Family(
    read=read,
    parameters=parameters,
    fields=frozenset({"partial_rotary_factor"}),
    fixed={"lm_head_bias": (False,), "full_attn_mod": (1,), "interpolate_factor": (1,)},
    harmless=frozenset({"embd_pdrop", "resid_pdrop"}),
)
