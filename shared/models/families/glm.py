"""GLM-4 9B of 2024: a GLM-4-0414 without norms behind sublayers."""

from __future__ import annotations

from ..config import ModelConfig
from ..table import ParameterTable
from . import dense, glm4
from .family import Family


def parameters(config: ModelConfig) -> ParameterTable:
    """Gate and up are one tensor. Rows of q and k are put where halves are turned, not pairs."""
    return dense.parameters(config, glm4.NAMES, pairs=True)


FAMILY = Family(read=glm4.read, parameters=parameters, fields=glm4.FAMILY.fields)
