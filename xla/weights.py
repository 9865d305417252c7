"""Brings a model's weights to an XLA device, as dictionaries of tensors."""

from __future__ import annotations

import torch

from ..gpu.module import Decoder
from ..gpu.weights import load_weights as load_on_host
from ..shared.models import decoder
from ..shared.models.config import ModelConfig
from ..shared.progress import Progress

Weights = dict[str, torch.Tensor]


def load_weights(
    folder: str,
    load_format: str,
    model: ModelConfig,
    dtype: torch.dtype,
    seed: int,
    where: torch.device,
    progress: Progress,
) -> tuple[Weights, list[Weights]]:
    """The weights outside of layers, and those of each layer. Raises CheckpointError, and
    ConfigError for entries that `dtype` does not hold.
    """
    table = decoder.parameters_of(model)
    # On the host first: what is made from a seed is integer arithmetic, which lazy tensors would
    # compile for each shape.
    module = Decoder(model, table, None, dtype, torch.device("cpu"))
    load_on_host(module, folder, load_format, table, seed, progress)
    layers = [_moved(dict(layer.named_parameters()), where) for layer in module.layers]
    return _moved(dict(module.named_parameters(recurse=False)), where), layers


def _moved(weights: Weights, where: torch.device) -> Weights:
    return {name: x.detach().to(where) for name, x in weights.items()}
