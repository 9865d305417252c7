"""Fills the torch module's weights, one parameter of one layer at a time."""

from __future__ import annotations

import torch

from ..ops.namespaces import namespace
from ..ops.namespaces.torch_ import from_numpy
from ..shared.checkpoint import Checkpoint
from ..shared.models.table import Parameter, ParameterTable
from ..shared.progress import Progress
from ..shared.weights import check_checkpoint, dummy_parameter, dummy_size, read_parameter
from .module import Decoder


def load_weights(
    module: Decoder,
    folder: str,
    load_format: str,
    table: ParameterTable,
    seed: int,
    progress: Progress,
) -> None:
    """Copy every weight into `module`. Raises CheckpointError before anything is copied."""
    checkpoint = None
    if load_format != "dummy":
        checkpoint = Checkpoint(folder)
        check_checkpoint(checkpoint, table)
    todo = list(table.placed())
    with torch.no_grad():
        for done, (parameter, layer) in enumerate(todo):
            owner = module.layers[layer] if parameter.layered else module
            target = getattr(owner, parameter.name)
            if checkpoint is None:
                target.copy_(_dummy(parameter, max(layer, 0), seed, target.device))
            else:
                target.copy_(from_numpy(read_parameter(checkpoint, parameter, layer)))
            progress("weights", done + 1, len(todo))
    module.freeze()


def _dummy(parameter: Parameter, layer: int, seed: int, device: torch.device) -> torch.Tensor:
    index = torch.arange(dummy_size(parameter), dtype=torch.int32, device=device)
    return dummy_parameter(namespace("torch"), parameter, layer, seed, index).view(parameter.shape)
