"""HyperCLOVA X SEED: a Granite with norms behind sublayers too, whose logits are multiplied by
their number, not divided.
"""

from __future__ import annotations

from dataclasses import replace

from ..config import ModelConfig
from ..fields import Fields
from ..spec import Model
from ..table import ParameterTable
from . import dense, granite, llama
from .family import Family

NORMS = dense.Norms(behind_attention="post_norm1", behind_mlp="post_norm2")


def read(fields: Fields) -> ModelConfig:
    """Where no number for scores is given, their scale is the usual one."""
    config = llama.read(fields)
    usual = fields.defaulted({"attention_multiplier": config.head_dim**-0.5})
    logits = fields.number("logits_scaling", 1.0, above=True)
    return replace(granite.multiplied(usual, config), logits_scale=logits)


def model(config: ModelConfig) -> Model:
    """Norms before and behind."""
    return dense.model(config, NORMS)


def parameters(config: ModelConfig) -> ParameterTable:
    """The usual names, and those of the norms."""
    return dense.parameters(config, norms=NORMS)


FAMILY = Family(
    read=read,
    model=model,
    parameters=parameters,
    fields=granite.FAMILY.fields,
    fixed={"use_post_norm": (True,)},
    harmless=frozenset({"resid_pdrop", "embd_pdrop", "attn_pdrop"}),
)
