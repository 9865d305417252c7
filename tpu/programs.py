"""The JAX functions that become programs: backbone, samplers, log-probabilities. Pure functions
of their arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from ..bucketing import Descriptor
from ..ops import BoundPlans
from ..shared.demand import ANYTHING, Demand
from ..shared.models import decoder
from ..shared.models.blocks import Block
from ..shared.models.caches import CacheLayout
from ..shared.models.config import ModelConfig
from ..shared.models.placement import place
from ..shared.models.sampler import known_processors, sample
from ..shared.step import PROCESSING, Sampler, StepShape, histories_shape, processor_layout
from ..shared.step_difference import PICKED, diff_layout, sampler_size, span_layout
from .layers import ScannedPass, blocks_of
from .sharding import REPLICATED, constrained, partition_of_samples
from .state import State, sampling_fields, updated

Weights = Mapping[str, Any]
LOOP_SAMPLERS: tuple[Sampler, ...] = ("greedy", "filtered")
"""The samplers that loops are built with. `filtered` does what `random` does."""


@dataclass(frozen=True, slots=True)
class Model:
    """What programs are made from. `ops` are the bound plans. `scan` loops over stacked layers;
    else they are unrolled.

    Weights come as {"embed", "norm", ["head"], "blocks"}: for each block of layers and each
    position of its period, a dict of weights stacked over the repeats [n, ...]; with `apart`,
    though a loop runs the layers, for each layer by itself. `decode_steps`: the most steps that a
    loop does. `layout` is that of the caches on each of the `shards` of `mesh`. `row_ops` are the
    ops that sample, for the rows of one shard. `cache_dtype`: of the keys and values that the ops
    see. `demand`: which samplers there are, and whether there are log-probabilities.
    """

    config: ModelConfig
    ops: BoundPlans
    shape: StepShape
    scan: bool
    cache_dtype: Any
    layout: CacheLayout
    mesh: Mesh
    row_ops: Any
    shards: int = 1
    decode_steps: int = 1
    demand: Demand = ANYTHING
    apart: bool = False

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The blocks of layers that weights are stacked for."""
        return blocks_of(decoder.model_of(self.config), self.scan and not self.apart)

    @property
    def dealt(self) -> dict[str, int | None]:
        """The dimension of each narrow weight that shards deal out, None if each has all of it."""
        return {
            p.name: place(p, self.config, self.shards).axis
            for p in decoder.parameters_of(self.config)
            if p.piece_of is not None and p.piece_of.piece == "values"
        }


def loop_sampler(sampler: Sampler) -> Sampler:
    """The sampler of a loop whose steps need `sampler`."""
    return "greedy" if sampler == "greedy" else "filtered"


def loop_samplers(demand: Demand) -> tuple[Sampler, ...]:
    """The samplers that loops are built with. Requests with processors are never decoded in
    loops.
    """
    needed = {loop_sampler(sampler) for sampler in demand.samplers if sampler not in PROCESSING}
    return tuple(sampler for sampler in LOOP_SAMPLERS if sampler in needed)


def bits_to_float(x: jax.Array) -> jax.Array:
    """int32 read as float32."""
    return jax.lax.bitcast_convert_type(x, jnp.float32)


def backbone(
    model: Model,
    descriptor: Descriptor,
    weights: Weights,
    angles: jax.Array,
    kv: jax.Array,
    state: State,
    last_tokens: jax.Array,
    buffer: jax.Array,
) -> tuple[jax.Array, State, jax.Array, jax.Array, dict[str, jax.Array], jax.Array | None]:
    """(kv, state, rows to sample [S dim], all hidden states [T dim], what the sampler has to know
    of them, the streams between layers if the demand has them).

    kv is one buffer (kv_buffer.py), `buffer` the step's difference (state.py). Rows behind the R of
    the step are samples that go to the scratch row.
    """
    f = diff_layout(descriptor, model.shape).unpack(buffer, bits_to_float)
    state = updated(state, f)
    rows = _fit(f["rows"], descriptor.tokens, model.shape.max_rows)
    ids = jnp.where(f["token_ids"] < 0, last_tokens[rows], f["token_ids"])
    kv, hidden, streams = _hidden(
        model,
        descriptor,
        weights,
        angles,
        kv,
        ids,
        f | {"page_table": state.pages[_table_rows(model, f["rows"])]},
    )
    scratch = model.shape.max_rows
    missing = sampler_size(descriptor.requests, scratch) - descriptor.requests
    unused = {"rows": scratch, "sample_rows": scratch, "position": 0}
    picked = {name: jnp.pad(f[name], (0, missing), constant_values=unused[name]) for name in PICKED}
    rows = hidden[jnp.pad(f["sample_index"], (0, missing))]
    return kv, state, rows, hidden, picked, streams


def _hidden(
    model: Model,
    descriptor: Descriptor,
    weights: Weights,
    angles: jax.Array,
    kv: jax.Array,
    ids: jax.Array,
    f: Mapping[str, jax.Array],
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """(kv, finished hidden states [T dim], streams [layer + 1, 2, T, dim] or None) of tokens `ids`
    [T].
    """
    # Two gathers of the halves would be two copies of the table in a TPU's vector memory.
    of_tokens = jax.lax.optimization_barrier(angles[f["positions"]])
    cos, sin = jnp.split(of_tokens, 2, axis=1)
    batch = decoder.Batch(
        cos,
        sin,
        f["slots"],
        f["page_table"],
        f["query_start"],
        f["kv_lens"],
        f["counts"],
    )
    execution = ScannedPass(
        model.ops,
        decoder.model_of(model.config),
        model.scan,
        model.blocks,
        descriptor,
        weights,
        ids,
        batch,
        model.layout,
        model.shards,
        model.cache_dtype,
        model.dealt,
        model.demand.streams,
    )
    hidden, kv = decoder.forward(execution, kv)
    return kv, hidden, execution.streams


def _table_rows(model: Model, rows: jax.Array) -> jax.Array:
    """Where the page tables of `rows` [R] stand, one group's behind another's: [G R]."""
    if model.shape.num_groups == 1:
        return rows
    first = jnp.arange(model.shape.num_groups, dtype=jnp.int32) * (model.shape.max_rows + 1)
    return (first[:, None] + rows[None]).reshape(-1)


def _slots(model: Model, table: jax.Array, positions: jax.Array, live: jax.Array) -> jax.Array:
    """Slots [G R] of the tokens at `positions` [R], -1 for those that do not `live`. `table` [G R,
    P].
    """
    requests, found = positions.shape[0], []
    for number, group in enumerate(model.layout.groups):
        own, page = table[number * requests : (number + 1) * requests], group.page_size
        column = jnp.take_along_axis(own, (positions // page)[:, None], axis=1)[:, 0]
        found.append(jnp.where(live, column * page + positions % page, -1))
    return found[0] if len(found) == 1 else jnp.concatenate(found)


def _fit(rows: jax.Array, tokens: int, scratch: int) -> jax.Array:
    """The row of the request at each token's index; only the first tokens of a batch ever look
    at theirs.
    """
    missing = max(0, tokens - rows.shape[0])
    return jnp.pad(rows, (0, missing), constant_values=scratch)[:tokens]


def sampler(
    model: Model,
    variant: Sampler,
    requests: int,
    weights: Weights,
    last_tokens: jax.Array,
    parameters: jax.Array,
    hidden: jax.Array,
    picked: Mapping[str, jax.Array],
    processors: jax.Array | None = None,
    histories: jax.Array | None = None,
    new_tokens: jax.Array | None = None,
) -> tuple[jax.Array, ...]:
    """(last_tokens, tokens [S]) for finished hidden states [S dim] of the rows `picked`;
    `parameters` of all rows. Where there are `histories`, they get `new_tokens` [2, S] (see
    `SamplerBuffers`) and come third.

    A token of -1 (a logit is not finite) stands as token 0 in `last_tokens`: the next step may have
    started before the host ends such a request.
    """
    ops = model.ops["sample"]
    f = sampling_fields(parameters, picked["rows"], picked["position"], bits_to_float)
    logits = decoder.head(ops, decoder.model_of(model.config), weights, hidden)
    arguments = None
    if processors is not None:
        layout = processor_layout(requests, model.shape, variant)
        fields = layout.unpack(processors, bits_to_float)
        if histories is None or new_tokens is None:
            kept = jnp.zeros(histories_shape(model.shape, (variant,)), jnp.int32)
        else:
            kept = histories = longer(histories, fields["history_row"], new_tokens)
        fields["histories"] = kept
        arguments = known_processors(jnp.where, fields, last_tokens)
    spec = partition_of_samples(requests, logits.shape[1], model.shards)
    if variant == "greedy" or spec is None:  # greedy sends little, and in no loop
        tokens = sample(ops, variant, logits, f, arguments)
    else:
        tokens = _sample_by_rows(model, spec, variant, logits, f, arguments or {})
    last_tokens = last_tokens.at[picked["sample_rows"]].set(jnp.maximum(tokens, 0))
    return (last_tokens, tokens) if histories is None else (last_tokens, tokens, histories)


def _sample_by_rows(
    model: Model,
    spec: P,
    variant: Sampler,
    logits: jax.Array,
    settings: Mapping[str, jax.Array],
    processors: Mapping[str, jax.Array],
) -> jax.Array:
    """`sample` of logits [row vocab], which come with their words dealt out, by the shards that
    have the rows by `spec`: one exchange brings them, and the passes over a row send nothing.
    """
    # The barrier keeps `spec` out of the product, for which XLA would gather the head.
    logits = jax.lax.optimization_barrier(constrained(logits, model.mesh, P(None, "tp")))
    # Each shard cuts its rows out of what it has. Else XLA deals out the buffers that these are
    # read from, and sends each piece.
    settings, processors = constrained((settings, processors), model.mesh, REPLICATED)
    specs = {name: REPLICATED if name == "history" else spec for name in processors}

    # Not left to XLA to partition: it gathers the indices of scatters.
    def of_shard(logits: Any, settings: Any, processors: Any) -> Any:
        return sample(model.row_ops, variant, logits, settings, processors)

    run = jax.shard_map(
        of_shard, mesh=model.mesh, in_specs=(spec, spec, specs), out_specs=spec, check_vma=False
    )
    return constrained(run(logits, settings, processors), model.mesh, REPLICATED)


def longer(histories: jax.Array, rows: jax.Array, new_tokens: jax.Array) -> jax.Array:
    """The histories with the tokens new_tokens[1] [S] at the columns new_tokens[0] of `rows`; of -1
    nothing comes.
    """
    columns, tokens = new_tokens
    rows = jnp.where((rows >= 0) & (columns >= 0), rows, histories.shape[0])
    return histories.at[rows, columns].set(tokens, mode="drop")


def remember(shape: StepShape, histories: jax.Array, buffer: jax.Array) -> jax.Array:
    """The program `remember`: the histories with what a buffer of `span_layout` says."""
    f = span_layout(shape).unpack(buffer, bits_to_float)
    row, first, last = f["span"]
    place = jnp.arange(shape.max_model_len, dtype=jnp.int32)
    new = jnp.where(place < last, f["tokens"], -1)
    return histories.at[row].set(jnp.where(place < first, histories[row], new))


def loop(
    model: Model,
    variant: Sampler,
    descriptor: Descriptor,
    weights: Weights,
    angles: jax.Array,
    kv: jax.Array,
    state: State,
    last_tokens: jax.Array,
    halted: jax.Array,
    buffer: jax.Array,
) -> tuple[jax.Array, State, jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """Decode steps of the same requests until one samples a stop id.

    Returns (kv, state, last_tokens, halted, tokens [N + 1, R], streams [N, layer + 1, 2, R, dim] if
    the demand has them). `halted` says whether the last loop
    stopped early; a loop chained to it does nothing. The last row of `tokens` holds how many of the
    others are filled.
    """
    f = diff_layout(descriptor, model.shape, True).unpack(buffer, bits_to_float)
    state = updated(state, f)
    table = state.pages[_table_rows(model, f["rows"])]
    live = jnp.arange(descriptor.requests, dtype=jnp.int32) < f["counts"][1]
    steps = jnp.where((f["limits"][1] > 0) & halted, 0, f["limits"][0])

    def going(carry: Any) -> jax.Array:
        done, stopped = carry[:2]
        return (done < steps) & ~stopped

    def step(carry: Any) -> Any:
        k, _, kv, last_tokens, made, kept = carry
        positions = jnp.where(live, f["positions"] + k, 0)
        here = f | {
            "page_table": table,
            "positions": positions,
            "slots": _slots(model, table, positions, live),
            "kv_lens": jnp.where(live, f["kv_lens"] + k, 0),
            "position": f["position"] + k,
        }
        # In the first step the batch says which token; later ones follow from the step before.
        ids = jnp.where((k > 0) | (f["token_ids"] < 0), last_tokens[f["rows"]], f["token_ids"])
        kv, hidden, streams = _hidden(model, descriptor, weights, angles, kv, ids, here)
        if kept is not None:
            kept = jax.lax.dynamic_update_index_in_dim(kept, streams, k, 0)
        picked = {name: here[name] for name in PICKED}
        last_tokens, tokens = sampler(
            model,
            variant,
            descriptor.requests,
            weights,
            last_tokens,
            state.parameters,
            hidden,
            picked,
        )
        stopped = (((f["stop_ids"] == tokens[:, None]).any(1) | (tokens < 0)) & live).any()
        return (
            k + 1,
            stopped,
            kv,
            last_tokens,
            jax.lax.dynamic_update_index_in_dim(made, tokens, k, 0),
            kept,
        )

    made = jnp.zeros((model.decode_steps + 1, descriptor.requests), jnp.int32)
    kept = None
    if model.demand.streams:
        config, kind = model.config, weights["embed"].dtype
        size = model.decode_steps, config.num_layers + 1, 2, descriptor.tokens, config.hidden_size
        kept = jnp.zeros(size, kind)
    done, _, kv, last_tokens, made, kept = jax.lax.while_loop(
        going, step, (jnp.int32(0), jnp.bool_(False), kv, last_tokens, made, kept)
    )
    return kv, state, last_tokens, done < f["limits"][0], made.at[-1].set(done), kept


def logprobs(
    model: Model, weights: Weights, rows: jax.Array, chosen: jax.Array
) -> tuple[jax.Array, ...]:
    """The op `top_logprobs` for finished hidden states `rows` [n dim] and the tokens `chosen`
    [n].
    """
    ops = model.ops["sample"]
    return ops.top_logprobs(
        decoder.head(ops, decoder.model_of(model.config), weights, rows), chosen
    )


def take_rows(size: int, hidden: jax.Array, start: jax.Array) -> jax.Array:
    """`size` rows of hidden [T dim] from `start`, padded with zeros past the end."""
    padded = jnp.pad(hidden, ((0, size), (0, 0)))
    return jax.lax.dynamic_slice_in_dim(padded, start, size)


def named(name: str, function: Callable[..., Any], *args: Any) -> Callable[..., Any]:
    """`function` with its first arguments bound, under a name that compiler dumps and profiles
    show.
    """
    bound = partial(function, *args)

    def program(*rest: Any) -> Any:
        return bound(*rest)

    program.__name__ = program.__qualname__ = name
    return program
