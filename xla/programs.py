"""The torch functions that become programs: backbone, samplers, log-probabilities. Pure functions
of their arguments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from ..bucketing import Descriptor
from ..ops import BoundPlans
from ..shared.demand import Demand
from ..shared.models import decoder
from ..shared.models.blocks import Block
from ..shared.models.caches import CacheLayout
from ..shared.models.sampler import known_processors, sample
from ..shared.models.spec import Model
from ..shared.step import Sampler, StepShape, histories_shape, processor_layout
from ..shared.step_difference import (
    PARAMETERS,
    PICKED,
    diff_layout,
    sampler_size,
    span_layout,
    update_layout,
)


class Held(NamedTuple):
    """What programs read and no step changes: weights outside of layers and of each layer, and the
    rotary tables [position r].
    """

    top: Mapping[str, torch.Tensor]
    layers: Sequence[Mapping[str, torch.Tensor]]
    cos: torch.Tensor
    sin: torch.Tensor


class State(NamedTuple):
    """What requests keep between steps: pages [G (row + 1), P] int32, and sampling parameters
    [field, row + 1] int32.
    """

    pages: torch.Tensor
    parameters: torch.Tensor


@dataclass(frozen=True, slots=True)
class Setting:
    """What programs are made from. `ops` are the bound plans."""

    model: Model
    ops: BoundPlans
    shape: StepShape
    layout: CacheLayout
    demand: Demand


def as_float(x: torch.Tensor) -> torch.Tensor:
    """int32 read as float32."""
    return x.view(torch.float32)


class Pass(decoder.PlainCalls):
    """Layers one after the other, over the buffers that they share (`shared/models/caches.py`)."""

    def __init__(
        self,
        setting: Setting,
        d: Descriptor,
        held: Held,
        ids: torch.Tensor,
        batch: decoder.Batch,
    ) -> None:
        ops = setting.ops
        super().__init__(
            ops[d.kind],
            setting.model,
            held.top,
            held.layers,
            ids,
            batch.within(d.max_query_len),
            torch.zeros_like,
            lambda layer: ops.of(d.kind, layer),
        )
        self._layout = setting.layout
        self.streams: list[decoder.Stream] = []

    def embed(self) -> decoder.Stream:
        """See `Execution`."""
        stream = super().embed()
        self.streams.append(stream)
        return stream

    def layers(
        self, block: Block, stream: decoder.Stream, cache: Any, rows: Any
    ) -> tuple[decoder.Stream, Any]:
        """See `Execution`. The cache is a list of the buffers."""
        index = block.first
        spec, place = self.model.layers[index], self._layout.places[index]
        batch = self.batch.of_group(place.group, len(self._layout.groups)).of_layer(index)
        buffer = cache[place.index]
        kv = buffer.reshape(-1, *self._layout.page_shape(index))
        weights = self.layer_weights[index]
        stream, kv = decoder.layer(
            self.ops_of(spec), spec, weights, stream, kv, batch._replace(rows=rows)
        )
        cache[place.index] = kv.reshape(buffer.shape)
        self.streams.append(stream)
        return stream, cache


def backbone(
    setting: Setting,
    d: Descriptor,
    held: Held,
    kv: Sequence[torch.Tensor],
    state: State,
    last_tokens: torch.Tensor,
    buffer: torch.Tensor,
) -> tuple[Any, ...]:
    """(kv, state, rows to sample [S dim], all hidden states [T dim], what the sampler has to know
    of them, the streams between layers if the demand has them).

    `buffer` is the step's difference. Rows behind the R of the step are samples that go to the
    scratch row.
    """
    shape = setting.shape
    f = diff_layout(d, shape).unpack(buffer, as_float)
    state = updated(state, f)
    rows = _fit(f["rows"], d.tokens, shape.max_rows)
    ids = torch.where(f["token_ids"] < 0, _at(last_tokens, rows), f["token_ids"])
    positions = f["positions"]
    batch = decoder.Batch(
        _at(held.cos, positions),
        _at(held.sin, positions),
        f["slots"],
        _at(state.pages, _table_rows(shape, f["rows"])),
        f["query_start"],
        f["kv_lens"],
        f["counts"],
    )
    execution = Pass(setting, d, held, ids, batch)
    hidden, buffers = decoder.forward(execution, list(kv))
    missing = sampler_size(d.requests, shape.max_rows) - d.requests
    unused = {"rows": shape.max_rows, "sample_rows": shape.max_rows, "position": 0}
    picked = {name: F.pad(f[name], (0, missing), value=unused[name]) for name in PICKED}
    streams = None
    if setting.demand.streams:
        streams = torch.stack([torch.stack(tuple(stream)) for stream in execution.streams])
    return (
        buffers,
        state,
        _at(hidden, F.pad(f["sample_index"], (0, missing))),
        hidden,
        picked,
        streams,
    )


def _at(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Rows of a table."""
    return table.index_select(0, index.to(torch.int64))


def _fit(rows: torch.Tensor, tokens: int, scratch: int) -> torch.Tensor:
    """The row of the request at each token's index; only the first tokens of a batch ever look
    at theirs.
    """
    return F.pad(rows, (0, max(0, tokens - rows.shape[0])), value=scratch)[:tokens]


def _table_rows(shape: StepShape, rows: torch.Tensor) -> torch.Tensor:
    """Where the page tables of `rows` [R] stand, one group's behind another's: [G R]."""
    groups = torch.arange(shape.num_groups, dtype=torch.int32, device=rows.device)
    return ((groups * (shape.max_rows + 1))[:, None] + rows[None, :]).reshape(-1)


def updated(state: State, f: Mapping[str, torch.Tensor]) -> State:
    """The tables with the changes of an unpacked buffer."""
    pages, parameters = state
    flat = _put(pages.reshape(-1), f["page_at"], f["page"])
    rows = _put(parameters.transpose(0, 1), f["new_rows"], f["new_parameters"].transpose(0, 1))
    return State(flat.reshape(pages.shape), rows.transpose(0, 1))


def _put(table: torch.Tensor, index: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """The table with these rows at an index; those beyond its end are dropped."""
    # There is one more row for them, so that the shape does not depend on the data.
    wide = torch.cat([table, torch.zeros_like(table[:1])])
    where = index.clamp(max=table.shape[0]).to(torch.int64)
    return wide.index_copy(0, where, values)[: table.shape[0]]


def update(shape: StepShape, held: None, state: State, buffer: torch.Tensor) -> State:
    """The program `update`: changes alone."""
    return updated(state, update_layout().unpack(buffer, lambda x: x))


def sampler(
    setting: Setting,
    variant: Sampler,
    requests: int,
    held: Held,
    last_tokens: torch.Tensor,
    parameters: torch.Tensor,
    hidden: torch.Tensor,
    picked: Mapping[str, torch.Tensor],
    processors: torch.Tensor | None = None,
    histories: torch.Tensor | None = None,
    new_tokens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """(last_tokens, tokens [S]) for finished hidden states [S dim] of the rows `picked`;
    `parameters` of all rows. Where there are `histories`, they get `new_tokens` [2, S] (see
    `SamplerBuffers`) and come third.

    A token of -1 (a logit is not finite) stands as token 0 in `last_tokens`: the next step may have
    started before the host ends such a request.
    """
    ops = setting.ops["sample"]
    kept = parameters.index_select(1, picked["rows"].to(torch.int64))
    f = dict(zip(PARAMETERS, kept.unbind(0), strict=True))
    f |= {"scale": as_float(f["scale"]), "position": picked["position"]}
    known = None
    if processors is not None:
        fields = processor_layout(requests, setting.shape, variant).unpack(processors, as_float)
        if histories is None or new_tokens is None:
            shape = histories_shape(setting.shape, (variant,))
            kept = torch.zeros(shape, dtype=torch.int32, device=processors.device)
        else:
            kept = histories = longer(histories, fields["history_row"], new_tokens)
        fields["histories"] = kept
        known = known_processors(torch.where, fields, last_tokens)
    tokens = sample(ops, variant, head(setting, held, hidden), f, known)
    where = picked["sample_rows"].to(torch.int64)
    last_tokens = last_tokens.index_copy(0, where, tokens.clamp(min=0))
    return (last_tokens, tokens) if histories is None else (last_tokens, tokens, histories)


def longer(histories: torch.Tensor, rows: torch.Tensor, new_tokens: torch.Tensor) -> torch.Tensor:
    """The histories with the tokens new_tokens[1] [S] at the columns new_tokens[0] of `rows`; of -1
    nothing comes.
    """
    scratch, length = histories.shape[0] - 1, histories.shape[1]
    is_new = (rows >= 0) & (new_tokens[0] >= 0)
    row = torch.where(is_new, rows, scratch).to(torch.int64)
    place = row * length + new_tokens[0].clamp(min=0)
    return histories.reshape(-1).index_copy(0, place, new_tokens[1]).reshape(histories.shape)


def remember(
    shape: StepShape, held: None, histories: torch.Tensor, buffer: torch.Tensor
) -> torch.Tensor:
    """The program `remember`: the histories with what a buffer of `span_layout` says."""
    f = span_layout(shape).unpack(buffer, as_float)
    row, first, last = f["span"][0:1], f["span"][1:2], f["span"][2:3]
    place = torch.arange(shape.max_model_len, dtype=torch.int32, device=buffer.device)[None]
    new = torch.where(place < last, f["tokens"][None], -1)
    new = torch.where(place < first, _at(histories, row), new)
    return histories.index_copy(0, row.to(torch.int64), new)


def head(setting: Setting, held: Held, rows: torch.Tensor) -> torch.Tensor:
    """Logits [row vocab] of finished hidden states."""
    logits: torch.Tensor = decoder.head(setting.ops["sample"], setting.model, held.top, rows)
    return logits


def logprobs(
    setting: Setting, held: Held, rows: torch.Tensor, chosen: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """The op `top_logprobs` for finished hidden states `rows` [n dim] and the tokens `chosen`
    [n].
    """
    found: tuple[torch.Tensor, ...] = setting.ops["sample"].top_logprobs(
        head(setting, held, rows), chosen
    )
    return found


def take_rows(size: int, held: None, hidden: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
    """`size` rows of hidden [T dim] from `start` [1], padded with zeros past the end."""
    index = start + torch.arange(size, dtype=torch.int32, device=hidden.device)
    return _at(F.pad(hidden, (0, 0, 0, size)), index)
