"""The model as a `torch.nn.Module`, so that torch's own tools (hooks, state_dict, parameter counts) work on it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..shared.models import decoder
from ..shared.models.config import ModelConfig
from ..shared.models.table import ParameterTable

LayerFunction = Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


class Layer(torch.nn.Module):
    """The weights of one decoder layer."""

    def __init__(self, table: ParameterTable, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        for name, parameter in table.items():
            if parameter.layered:
                self.register_parameter(name, _empty(parameter.shape, dtype, device))

    def weights(self) -> dict[str, torch.Tensor]:
        """Weights by name, as the layer function takes them."""
        return dict(self.named_parameters())


class Decoder(torch.nn.Module):
    """The whole model. The mathematics is `shared/models/decoder.py`; this holds the weights and the layer loop."""

    def __init__(
        self,
        config: ModelConfig,
        table: ParameterTable,
        ops: Mapping[str, Any],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.config = config
        self.ops = ops
        for name, parameter in table.items():
            if not parameter.layered:
                self.register_parameter(name, _empty(parameter.shape, dtype, device))
        self.layers = torch.nn.ModuleList(Layer(table, dtype, device) for _ in range(config.num_layers))
        self._top: dict[str, torch.Tensor] = {}
        self._layers: list[dict[str, torch.Tensor]] = []

    def freeze(self) -> None:
        """Fix the weights: collects them into the plain dictionaries that the step loop reads."""
        self._top = dict(self.named_parameters(recurse=False))
        self._layers = [layer.weights() for layer in self.layers]

    def forward(
        self,
        token_ids: torch.Tensor,
        kv: torch.Tensor,
        batch: decoder.Batch,
        kind: str,
        max_query_len: int,
        layer: LayerFunction | None = None,
    ) -> torch.Tensor:
        """Finished hidden states [tok dim]; kv [layer page slot 2*kvhead hdim] is written in place.

        `kind` names the plan; `layer` is the layer function, compiled or not.
        """
        ops, config = self.ops[kind], self.config
        layer = layer or decoder.layer_function(config)
        hidden = decoder.embed(ops, self._top, token_ids)
        residual = torch.zeros(hidden.shape, dtype=hidden.dtype, device=hidden.device)
        for index, weights in enumerate(self._layers):
            window = config.layer_windows[index]
            hidden, residual, _ = layer(ops, config, weights, hidden, residual, kv[index], batch, window, max_query_len)
        return decoder.finish(ops, config, self._top, hidden, residual)

    @property
    def layer_weights(self) -> list[dict[str, torch.Tensor]]:
        """The weights of each layer, by name."""
        return self._layers

    @property
    def top_weights(self) -> dict[str, torch.Tensor]:
        """The weights that belong to no layer, by name."""
        return self._top

    def finish(self, kind: str, hidden: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """The final norm."""
        return decoder.finish(self.ops[kind], self.config, self._top, hidden, residual)

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """Logits [row vocab] of finished hidden states [row dim]."""
        return decoder.head(self.ops["sample"], self._top, rows)


def _empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)
