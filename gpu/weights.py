"""Fills the torch module's weights, one parameter of one layer at a time."""

from __future__ import annotations

import torch

from ..ops.namespaces import namespace
from ..ops.namespaces.torch_ import from_numpy
from ..shared.checkpoint import Checkpoint
from ..shared.models.table import Parameter, ParameterTable, piece_name
from ..shared.narrow_checkpoint import open_checkpoint
from ..shared.progress import Progress
from ..shared.weights import (
    check_checkpoint,
    dummy_parameter,
    dummy_size,
    is_made,
    pieces,
    read_parameter,
)
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
        checkpoint = open_checkpoint(folder, module.config)
        check_checkpoint(checkpoint, table)
    todo = list(table.placed())
    with torch.no_grad():
        for done, (parameter, layer) in enumerate(todo):
            owner = module.layers[layer] if parameter.layered else module
            if is_made(checkpoint, parameter):
                _make(owner, parameter, checkpoint, layer, seed, module.dtype)
            else:
                _fill(getattr(owner, parameter.name), parameter, checkpoint, layer, seed)
            progress("weights", done + 1, len(todo))
    module.freeze()


def _fill(
    target: torch.Tensor, parameter: Parameter, checkpoint: Checkpoint | None, layer: int, seed: int
) -> None:
    """Put a parameter of one layer where it belongs."""
    if checkpoint is None:
        target.copy_(_dummy(parameter, max(layer, 0), seed, target.device))
    else:
        target.copy_(from_numpy(read_parameter(checkpoint, parameter, layer)))


def _make(
    owner: torch.nn.Module,
    parameter: Parameter,
    checkpoint: Checkpoint | None,
    layer: int,
    seed: int,
    dtype: torch.dtype,
) -> None:
    """Quantise a weight on its device. All its pieces are filled with its values."""
    if parameter.piece_of is None or parameter.piece_of.piece != "values":
        return
    plain = parameter.piece_of.wide
    device = getattr(owner, parameter.name).device
    wide = torch.empty(plain.shape, dtype=dtype, device=device)
    _fill(wide, plain, checkpoint, layer, seed)
    for piece, values in pieces(namespace("torch"), wide, parameter.piece_of.narrow).items():
        getattr(owner, piece_name(parameter.name, piece)).copy_(values)


def _dummy(parameter: Parameter, layer: int, seed: int, device: torch.device) -> torch.Tensor:
    index = torch.arange(dummy_size(parameter), dtype=torch.int32, device=device)
    return dummy_parameter(namespace("torch"), parameter, layer, seed, index).view(parameter.shape)
