"""The model as a `torch.nn.Module`, so that torch's own tools (hooks, state_dict, parameter counts)
work on it.

Every engine on torch holds its weights here; the road piecewise traces `forward` whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch

from ..ops import BoundPlans
from ..shared.errors import InternalError
from ..shared.models import decoder
from ..shared.models.config import ModelConfig
from ..shared.models.table import Parameter, ParameterTable


class Layer(torch.nn.Module):
    """The weights of one decoder layer."""

    def __init__(
        self, parameters: Mapping[str, Parameter], dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        for name, parameter in parameters.items():
            self.register_parameter(name, _empty(parameter, dtype, device))

    def weights(self) -> dict[str, torch.Tensor]:
        """Weights by name, as the layer function takes them."""
        return dict(self.named_parameters())


class Decoder(torch.nn.Module):
    """The whole model. The mathematics is `shared/models/decoder.py`; this holds the weights."""

    def __init__(
        self,
        config: ModelConfig,
        table: ParameterTable,
        ops: BoundPlans | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.config = config
        self.model = decoder.model_of(config)
        self.dtype = dtype
        self._ops = ops
        for name, parameter in table.top.items():
            self.register_parameter(name, _empty(parameter, dtype, device))
        layers = (Layer(table.layer(index), dtype, device) for index in range(config.num_layers))
        self.layers = torch.nn.ModuleList(layers)
        self._top: dict[str, torch.Tensor] = {}
        self._layers: list[dict[str, torch.Tensor]] = []
        self._joints = decoder.joints(self.model)

    def freeze(self) -> None:
        """Fix the weights: collects them into the plain dictionaries that the step loop reads."""
        self._top = dict(self.named_parameters(recurse=False))
        self._layers = [layer.weights() for layer in self.layers]
        self._joined = decoder.with_joints(self.model, self._top, self._layers)

    def forward(
        self,
        token_ids: torch.Tensor,
        kv: Sequence[torch.Tensor],
        batch: decoder.Batch,
        kind: str,
        max_query_len: int,
    ) -> torch.Tensor:
        """Finished hidden states [tok dim]; kv [page slot 2*kvhead hdim] of each layer is written
        in place.

        `kind` names the plan.
        """
        calls = decoder.PlainCalls(
            self._bound[kind],
            self.model,
            *self._joined,
            token_ids,
            batch.within(max_query_len),
            torch.zeros_like,
            partial(self._bound.of, kind),
            joins=True,
        )
        finished: torch.Tensor = decoder.forward(calls, list(kv))[0]
        return finished

    @property
    def _bound(self) -> BoundPlans:
        """The ops. Raises InternalError for a module that only holds weights."""
        if self._ops is None:
            raise InternalError("this module has no ops: it holds weights only")
        return self._ops

    @property
    def layer_weights(self) -> list[dict[str, torch.Tensor]]:
        """The weights of each layer, by name."""
        return self._layers

    @property
    def top_weights(self) -> dict[str, torch.Tensor]:
        """The weights that belong to no layer, by name."""
        return self._top

    @property
    def joined_weights(self) -> list[dict[str, torch.Tensor]]:
        """The weights that each layer reads in a walk that joins layers."""
        return self._joined[1]

    def closed(self, kind: str, index: int, stream: decoder.Stream) -> decoder.Stream:
        """The stream behind a layer as it is where nothing is joined."""
        norm = self._joints[index + 1]
        if norm is None:
            return stream
        weight = self._layers[index][norm.weight]
        hidden = self._bound.of(kind, self.model.layers[index]).rms_norm(
            stream.hidden, weight, norm.eps
        )
        return decoder.Stream(hidden, stream.residual)

    def finish(self, kind: str, stream: decoder.Stream) -> torch.Tensor:
        """The final norm, joined with that behind the last layer."""
        ops, top = self._bound[kind], self._joined[0]
        return decoder.finish(ops, self.model, top, stream, self._joints[-1])

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """Logits [row vocab] of finished hidden states [row dim]."""
        return decoder.head(self._bound["sample"], self.model, self._top, rows)


def _empty(parameter: Parameter, dtype: torch.dtype, device: torch.device) -> torch.nn.Parameter:
    if parameter.dtype != "model":
        dtype = getattr(torch, parameter.dtype)
    return torch.nn.Parameter(
        torch.empty(parameter.shape, dtype=dtype, device=device), requires_grad=False
    )
