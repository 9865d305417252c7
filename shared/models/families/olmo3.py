"""OLMo 3: as OLMo 2, with a window in three of four layers; the others alone have scaled angles."""

from __future__ import annotations

from ..config import ModelConfig
from ..fields import Fields
from ..rope import RopeConfig, RopeRules, read_ropes
from . import dense, olmo2
from .family import Family

ROPE = RopeRules(theta=500_000.0)


def read(fields: Fields) -> ModelConfig:
    """`layer_types`, or every fourth layer sees everything."""
    windows = dense.windows_in_pattern(fields, 4096, 4)
    return dense.read(fields, windows=windows, ropes=_ropes, **olmo2.numbers(fields))


def _ropes(fields: Fields, head_dim: int) -> tuple[RopeConfig, RopeConfig]:
    return read_ropes(fields, head_dim, ROPE, ROPE, "rope_theta")


FAMILY = Family(read=read, model=olmo2.model, parameters=olmo2.parameters)
