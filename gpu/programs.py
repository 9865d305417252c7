"""The programs of a step: from the static inputs to the sampled tokens, eager, compiled or
captured.

A step is two programs: the backbone of its descriptor, which leaves one finished row per request in
`rows`, and the sampler of its number of requests, which reads them. Samplers with processors read
the logits of a third one, the head, so that it runs while masks are awaited. Each is a plain
function until `warm_up` has captured it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from ..bucketing import Descriptor, Table
from ..ops import BoundPlans, Plans
from ..shared.compilation_config import CUDAGraphMode, ResolvedCompilation
from ..shared.errors import InternalError
from ..shared.models import decoder
from ..shared.models.caches import Place
from ..shared.models.sampler import SETTINGS, sample
from ..shared.models.spec import Model
from ..shared.models.stages import Rows
from ..shared.step import HOST_LENGTHS, PROCESSING, SAMPLERS, Sampler
from . import plumbing
from .compilation import LayerCompiler, RegionCompiler, Variant, compile_order, variants
from .graphs import GraphRecorder
from .inputs import StepInputs
from .module import Decoder
from .plans import drops_rows
from .ranks import Ranks
from .regional import RegionalPass

TOP = "top"
HEAD = "head"
IN_ORDER = (*(each for each in SAMPLERS if each not in PROCESSING), TOP, HEAD, *PROCESSING)
"""Samplers as they are built: those that read the logits of the head directly behind it."""


class Programs:
    """All programs of one engine, and what they keep on the device between steps."""

    def __init__(
        self,
        module: Decoder,
        ops: BoundPlans,
        plans: Plans,
        compilation: ResolvedCompilation,
        table: Table,
        inputs: StepInputs,
        rotary: tuple[torch.Tensor, torch.Tensor],
        device: torch.device,
        dtype: torch.dtype,
        compiled: frozenset[str],
        places: Sequence[Place],
        loops: bool,
        streams: bool = False,
        ranks: Ranks | None = None,
    ) -> None:
        self._ranks = ranks
        self._module, self._ops, self._plans = module, ops, plans
        self._compilation, self._table = compilation, table
        self._inputs, self._cos, self._sin = inputs, *rotary
        self._groups = tuple(place.group for place in places)
        self._num_groups = len(inputs.page_sizes)
        rows = max(d.requests for d in table)
        self.rows = torch.zeros((rows, module.config.hidden_size), dtype=dtype, device=device)
        self.tokens = torch.zeros(rows, dtype=torch.int32, device=device)
        self.last_tokens = torch.zeros(table.max_requests + 1, dtype=torch.int32, device=device)
        layers, tokens = module.config.num_layers, max(d.tokens for d in table)
        size = layers + 1, 2, tokens, module.config.hidden_size
        self.streams = torch.zeros(size, dtype=dtype, device=device) if streams else None
        """What was between the layers of the last backbone; a layer that drops tokens has the
        others first.
        """
        self.host_metadata = {kind: plans.host_metadata(kind) for kind in ("decode", "mixed")}
        where = torch.device("cpu") if self.host_metadata["mixed"] else device
        self._row_starts = torch.arange(rows + 1, dtype=torch.int32, device=where)
        self._variants = variants(table, compilation)
        self._compiler = RegionCompiler(compilation)
        self._layers = LayerCompiler(
            module.model, ops, plans, self._compiler, self._variants, compiled
        )
        self._plumbing = plumbing.plumbing(device)
        self._loops = loops
        self._sample_is_kernel = plans["sample"]["sample"].implementation.opaque
        self._starts: dict[Variant, Callable[..., Any]] = {}
        self._by_requests = {d.requests: d for d in table}
        self._backbones: dict[Descriptor, Callable[[], Any]] = {}
        self._samplers: dict[tuple[int, str], tuple[Callable[[], Any], Any]] = {}
        # Of the head that ran last, for the sampler that is next: of a capture, nothing that is
        # captured meanwhile may take their memory.
        self._logits: torch.Tensor | None = None
        self._kv: tuple[torch.Tensor, ...] = ()
        self._recorder: GraphRecorder | None = None
        self._whole: Callable[..., torch.Tensor] | None = None
        self._marking = True

    @property
    def tables(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotary tables [position r]: cos and sin."""
        return self._cos, self._sin

    def freeze(self) -> None:
        """Nothing is compiled from now on."""
        self._marking = False

    def forget(self) -> None:
        """Drop what steps that did not really run have left behind."""
        self.last_tokens.zero_()

    def run_whole(self, build: Callable[[], Callable[..., torch.Tensor]]) -> None:
        """Run the model as one program (token_ids, kv, batch, kind, max_query_len) -> hidden,
        made once by `build`.
        """
        self._whole = self._whole or build()

    def use_cache(self, kv: Sequence[torch.Tensor]) -> None:
        """Run on this cache: [page slot 2*kvhead hdim] of each layer. What was captured on
        another is dropped.
        """
        self._backbones.clear()
        self._samplers.clear()
        self._recorder = None
        self._kv = tuple(kv)

    def order(self) -> list[tuple[Descriptor, bool, bool]]:
        """The descriptors, those whose size code is tuned for first; whether `run_eagerly` must run
        all layers of each, and all samplers: those of the largest number of requests need the most
        memory.
        """
        order = compile_order(self._variants)
        tuned = set(order[: len(set(self._variants.values()))])
        largest = max(order, key=lambda d: d.tokens)
        return [(d, d in tuned, d in tuned or d == largest) for d in order]

    def allocates(self, d: Descriptor) -> bool:
        """Whether the backbone takes memory when it runs: it is not one graph."""
        mode = self._compilation.cudagraph_mode.step_mode(d.kind)
        return d not in self._backbones or mode is CUDAGraphMode.PIECEWISE

    def backbone(self, d: Descriptor) -> None:
        """Run the model and leave the finished rows of the requests in `rows`."""
        replay = self._backbones.get(d)
        if replay is not None:
            replay()
        else:
            self._rows(d)

    def sample(self, requests: int, sampler: str) -> Any:
        """Sample from `rows` into `tokens` and `last_tokens`. The samplers PROCESSING need the
        `head` before, and no other program between.

        The sampler `top` gives the log-probabilities of what was just sampled instead: the results
        of `top_logprobs`, valid until the next call.
        """
        made = self._samplers.get((requests, sampler))
        if made is not None:
            made[0]()
            return made[1]
        found = self._sample(requests, sampler)
        if sampler in PROCESSING:
            self._logits = None
        return found

    def head(self, requests: int) -> None:
        """Compute the logits of `rows` for a sampler that needs processors."""
        self.sample(requests, HEAD)

    def hidden(self, d: Descriptor) -> torch.Tensor:
        """Run the model without a graph; finished hidden states [T dim] of all tokens."""
        if self._whole is not None:
            return self._run_whole(self._whole, d)
        return self._forward(d)

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """Logits of finished rows."""
        found = self._module.logits(rows)
        return found if self._ranks is None else self._ranks.all_words(found)

    def advance(self, d: Descriptor) -> None:
        """Turn the inputs of a decode step into those of the next one, whose tokens are those
        just sampled.
        """
        self._plumbing.advance(self._inputs.fields(d), self._inputs.pages, self._inputs.page_sizes)
        if self.host_metadata[d.kind]:
            lengths = self._inputs.host_fields(d)
            lengths["kv_lens"][: int(lengths["counts"][1])] += 1

    def run_eagerly(self, d: Descriptor, layers: bool, samplers: bool) -> None:
        """Run both programs without graphs, which compiles what they call.

        Without `layers`, only one of the layers that share a function; without `samplers`, only
        samplers whose kernels depend on the size.
        """
        self._rows(d, layers)
        if self._loops and d.kind == "decode":
            self.advance(d)
        for sampler in self._samplers_of(d):
            if samplers or sampler == "greedy" or (self._sample_is_kernel and sampler != TOP):
                self._sample(d.requests, sampler)
        self._logits = None

    def capture(self, recorder: GraphRecorder, d: Descriptor) -> None:
        """Capture what the graph mode asks for; `run_eagerly` went before."""
        self._recorder = recorder
        mode = self._compilation.cudagraph_mode.step_mode(d.kind)
        if self._is_captured(d, mode):
            self._backbones[d], _ = recorder.capture(d, mode, lambda: self._rows(d))
        if self._compilation.cudagraph_mode is not CUDAGraphMode.NONE:
            for sampler in self._samplers_of(d):
                if (d.requests, sampler) not in self._samplers:
                    run = lambda sampler=sampler: self._sample(d.requests, sampler)  # noqa: E731
                    self._samplers[d.requests, sampler] = recorder.capture(
                        d, CUDAGraphMode.FULL, run
                    )
            self._logits = None

    def _is_captured(self, d: Descriptor, mode: CUDAGraphMode) -> bool:
        if mode is CUDAGraphMode.NONE:
            return False
        if d.kind == "decode":
            return d.tokens in self._compilation.cudagraph_capture_sizes
        return d.tokens <= self._compilation.cudagraph_mixed_limit

    def _samplers_of(self, d: Descriptor) -> tuple[str, ...]:
        return IN_ORDER if self._by_requests[d.requests] == d else ()

    def _rows(self, d: Descriptor, every_layer: bool = True) -> None:
        # In a decode program the token of request i is token i.
        index = self._inputs.fields(d)["sample_index"] if d.kind == "mixed" else slice(None)
        if self._whole is not None:
            finished = self._run_whole(self._whole, d)[index]
        elif self.drops_rows(d):
            finished = self._forward(d, every_layer, rows=self._last_tokens(d))
        else:
            finished = self._forward(d, every_layer, selects=index)
        self.rows[: d.requests].copy_(finished)

    def _last_tokens(self, d: Descriptor) -> Rows:
        """Those of the requests of a mixed step."""
        starts, counts = self._row_starts[: d.requests + 1], self._lengths(d)["counts"]
        return Rows(self._inputs.fields(d)["sample_index"], starts, counts[1:].repeat(2))

    def _run_whole(self, whole: Callable[..., torch.Tensor], d: Descriptor) -> torch.Tensor:
        f = self._inputs.fields(d)
        self._put_pages(f)
        given = (
            f["token_ids"],
            f["positions"],
            f["rows"],
            self.last_tokens,
            self._cos,
            self._sin,
            self._inputs.pages,
            self._num_groups,
        )
        ids, cos, sin, pages = self._plumbing.select(*given)
        return whole(ids, self._kv, self._batch(d, cos, sin, pages), d.kind, d.max_query_len)

    def _batch(
        self, d: Descriptor, cos: torch.Tensor, sin: torch.Tensor, pages: torch.Tensor
    ) -> decoder.Batch:
        lengths = self._lengths(d)
        metadata = {name: lengths[name] for name in HOST_LENGTHS}
        return decoder.Batch(cos, sin, self._inputs.fields(d)["slots"], pages, **metadata)

    def _lengths(self, d: Descriptor) -> dict[str, torch.Tensor]:
        """The fields with HOST_LENGTHS where the plan's attention reads them: host or device."""
        of = self._inputs.host_fields if self.host_metadata[d.kind] else self._inputs.fields
        return of(d)

    def _make_start(self, variant: Variant) -> Callable[..., Any]:
        ops = self._ops[variant.kind]
        if variant.kind in self._layers.compiled:
            start = start_of(ops, self._module.model, plumbing.select, self._num_groups)
            return self._compiler.compile(start, variant, "start", self._plans[variant.kind])
        return start_of(ops, self._module.model, self._plumbing.select, self._num_groups)

    def _put_pages(self, fields: Mapping[str, torch.Tensor]) -> None:
        self._plumbing.put_pages(self._inputs.pages, fields["page_index"], fields["page_value"])

    def kept_streams(self, d: Descriptor) -> torch.Tensor | None:
        """[layer + 1, 2, T, dim] of the last backbone, in a copy of its own."""
        return None if self.streams is None else self.streams[:, :, : d.tokens].clone()

    def drops_rows(self, d: Descriptor) -> bool:
        """Whether the last layer finishes only the tokens that are sampled from."""
        return drops_rows(self._module.model, d)

    def _forward(
        self,
        d: Descriptor,
        every_layer: bool = True,
        *,
        rows: Rows | None = None,
        selects: Any = None,
    ) -> torch.Tensor:
        """Finished hidden states of all tokens, or of the tokens `rows` (which the last layer
        keeps) or `selects`.
        """
        marking = self._marking and d.kind in self._layers.compiled

        def mark(stream: decoder.Stream, batch: decoder.Batch) -> None:
            of_tokens = stream if batch.layer_input is None else (*stream, batch.layer_input)
            self._compiler.mark(self._variants[d], of_tokens)

        execution = RegionalPass(
            d,
            self._module,
            self._layers,
            partial(self._start, d, marking),
            self._groups,
            drops=rows is not None,
            selects=selects,
            every_layer=every_layer,
            before_layer=mark if marking else None,
            keep=None if self.streams is None else self._keep,
        )
        finished: torch.Tensor = decoder.forward(execution, self._kv, rows)[0]
        return finished

    def _keep(self, number: int, stream: decoder.Stream) -> None:
        if self.streams is not None:
            for kept, x in zip(self.streams[number], stream, strict=True):
                kept[: len(x)].copy_(x)

    def _start(
        self, d: Descriptor, marking: bool
    ) -> tuple[decoder.Stream, tuple[decoder.Batch, ...]]:
        """What the first layer reads, and what layers of each page group read, from the inputs of
        a step.
        """
        f = self._inputs.fields(d)
        self._put_pages(f)
        variant = self._variants[d]
        if variant not in self._starts:
            self._starts[variant] = self._make_start(variant)
        given = f["token_ids"], f["positions"], f["rows"]
        if marking:
            self._compiler.mark(variant, given if d.kind == "decode" else given[:2])
        start = self._starts[variant]
        hidden, residual, layer_input, cos, sin, pages = start(
            *given,
            self.last_tokens,
            self._cos,
            self._sin,
            self._inputs.pages,
            self._module.top_weights,
        )
        whole = self._batch(d, cos, sin, pages)._replace(layer_input=layer_input)
        batches = tuple(whole.of_group(n, self._num_groups) for n in range(self._num_groups))
        if marking:
            for batch in batches:
                self._layers.mark(d, self._kv, batch)
        return decoder.Stream(hidden, residual), batches

    def _sample(self, requests: int, sampler: Any) -> Any:
        ops = self._ops["sample"]
        f = self._inputs.fields(self._by_requests[requests])
        if sampler == TOP:
            return ops.top_logprobs(self.logits(self.rows[:requests]), self.tokens[:requests])
        if sampler == HEAD:
            self._logits = self._module.logits(self.rows[:requests])
            return None
        processors = None
        if sampler not in PROCESSING:
            logits = self._module.logits(self.rows[:requests])
        elif self._logits is None:
            raise InternalError(f"the sampler {sampler!r} has no logits: its head did not run")
        else:
            logits = self._logits
            fields = self._inputs.processors(requests, sampler)
            processors = self._plumbing.processors(fields, self.last_tokens)
        if self._ranks is None:
            tokens = sample(ops, sampler, logits, f, processors)
        else:
            tokens = _sample_dealt_out(self._ranks, ops, sampler, logits, f, processors)
        self._plumbing.keep(tokens, f["sample_rows"], self.last_tokens, self.tokens[:requests])
        return None


def _sample_dealt_out(
    ranks: Ranks,
    ops: Any,
    sampler: Sampler,
    logits: torch.Tensor,
    settings: Mapping[str, torch.Tensor],
    processors: Mapping[str, torch.Tensor] | None,
) -> torch.Tensor:
    """`sample` where each shard has the logits of its own words: the best of each, or whole rows
    that each samples a share of.
    """
    rows = len(logits)
    if sampler == "greedy" and ranks.deals_out_evenly:
        return ranks.best(ops.greedy_sample(logits), logits)
    mine, part = ranks.share(logits)
    own = {name: settings[name][part] for name in SETTINGS}
    if processors is not None:
        processors = {
            name: values if name == "history" else values[part]
            for name, values in processors.items()
        }
    return ranks.all_tokens(sample(ops, sampler, mine, own, processors), rows)


def start_of(ops: Any, model: Model, select: Callable[..., Any], num_groups: int) -> Any:
    """What makes the layers' inputs from a step's, with a plan's ops."""

    def start(
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        rows: torch.Tensor,
        last_tokens: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        pages: torch.Tensor,
        weights: dict[str, torch.Tensor],
    ) -> tuple[torch.Tensor | None, ...]:
        # hidden and (zero) residual [T dim], the layers' own inputs, cos and sin [T r], page table
        # [G R, P]
        ids, *rest = select(token_ids, positions, rows, last_tokens, cos, sin, pages, num_groups)
        hidden = decoder.embed(ops, model, weights, ids)
        layer_input = decoder.layer_input(ops, model, weights, ids, hidden)
        return hidden, torch.zeros_like(hidden), layer_input, *rest

    return start
