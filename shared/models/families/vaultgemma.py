"""VaultGemma: a Gemma 2 without norms behind sublayers."""

from __future__ import annotations

from ..config import ModelConfig
from ..spec import Model
from ..table import ParameterTable
from . import dense, gemma2
from .family import Family

NORMS = dense.Norms(before_mlp="pre_feedforward_layernorm", offset=1.0)


def model(config: ModelConfig) -> Model:
    """Norms before."""
    return dense.model(config, NORMS)


def parameters(config: ModelConfig) -> ParameterTable:
    """The usual names, and those of the norms."""
    return dense.parameters(config, norms=NORMS)


FAMILY = Family(
    read=gemma2.read,
    model=model,
    parameters=parameters,
    fields=gemma2.FAMILY.fields,
    fixed=gemma2.FIXED,
    harmless=gemma2.FAMILY.harmless,
)
