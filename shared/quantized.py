"""Which of a model's weights are quantised: those of its checkpoint, or all projections, if the
option asks for it.
"""

from __future__ import annotations

from dataclasses import replace

from .config import Change
from .errors import ConfigError
from .models.config import ModelConfig
from .models.quantization import WHEN_LOADED, Quantization

OPTION = "quantization"


def with_quantization(model: ModelConfig, name: str | None) -> tuple[ModelConfig, list[Change]]:
    """The model with its weights held as the option `name` says, and what there is to say about
    them. Raises ConfigError for a checkpoint that is quantised already.
    """
    theirs = model.quantization
    if name is None:
        if theirs is None:
            return model, []
        return model, [Change(OPTION, None, theirs.title, "the checkpoint's")]
    if theirs is not None and theirs != Quantization(WHEN_LOADED[name]):
        raise ConfigError(
            f"{OPTION}: got {name}, allowed is nothing: the weights of the checkpoint are "
            f"quantised already ({theirs.title})"
        )
    return replace(model, quantization=Quantization(WHEN_LOADED[name])), []
