"""Builds the piecewise program of a model: one callable for every kind and size of its table, with
nothing left to decide at run time but which list of pieces to run.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import fx

from ...bucketing import Descriptor, Table
from ...ops import Plans
from ...shared.compilation_config import ResolvedCompilation
from ...shared.config import ResolvedConfig
from ...shared.errors import InternalError
from ...shared.models import decoder
from ..backend import key_factors, write_graph
from .checks import check_state, check_writes, state_of
from .compilers import CompilerManager, EagerAdaptor, InductorStandaloneAdaptor, Range
from .decorate import Open, Place, Static, Traced, support_torch_compile, tensors_of, trace
from .split import Part, Piece, make_piece, split_graph
from .stitched import Instruction, Piecewise, Stitched, with_lifetimes

WrapPiece = Callable[[int, Callable[..., Any], int], Callable[..., Any]]
"""(number of the piece, the piece as a function of what changes from step to step, tokens) ->
what runs instead.
"""


@support_torch_compile
class Backbone(torch.nn.Module):
    """The decoder as a function of flat arguments whose open dimensions are named."""

    def __init__(self, module: Any, kind: str) -> None:
        super().__init__()
        self.module = module
        self.kind = kind

    def forward(
        self,
        token_ids: Annotated[torch.Tensor, Open()],
        kv: Annotated[Sequence[torch.Tensor], Open()],
        cos: Annotated[torch.Tensor, Open()],
        sin: Annotated[torch.Tensor, Open()],
        slots: Annotated[torch.Tensor, Open()],
        page_table: Annotated[torch.Tensor, Open()],
        query_start: Annotated[torch.Tensor, Open()],
        kv_lens: Annotated[torch.Tensor, Open()],
        counts: torch.Tensor,
    ) -> torch.Tensor:
        """Finished hidden states [tok dim]; the caches are written in place."""
        batch = decoder.Batch(cos, sin, slots, page_table, query_start, kv_lens, counts)
        # A mixed program may hold one request whose queries fill it.
        max_query_len = 1 if self.kind == "decode" else token_ids.shape[0]
        return self.module(token_ids, kv, batch, self.kind, max_query_len)


def build(
    module: Any,
    config: ResolvedConfig,
    plans: Plans,
    table: Table,
    kv: Sequence[torch.Tensor],
    *,
    compilation: ResolvedCompilation | None = None,
    wrap_piece: WrapPiece | None = None,
    progress: Callable[[str, int, int], None] | None = None,
    keep: bool = True,
) -> Piecewise:
    """Trace, split and compile everything that the table can ask for; afterwards nothing compiles.

    `module` is the `Decoder` with ops bound for compiling. Raises ConfigError for ops that cannot
    be split at, and InternalError if the forward changes the module's state.
    """
    chosen = compilation or config.compilation
    built = Piecewise(module.config.num_layers)
    factors = key_factors(plans.hash, chosen, {"dtype": config.dtype, "kv": config.kv_cache_dtype})
    adaptor = InductorStandaloneAdaptor() if chosen.use_inductor else EagerAdaptor()
    options = chosen.inductor_compile_config
    manager = CompilerManager(
        adaptor, factors, options, chosen.cache_dir, keep, chosen.debug_dump_path
    )
    builder = _Builder(module, config, plans, kv, chosen, manager, wrap_piece)
    descriptors = list(table)
    with torch.no_grad():
        for name, group in _groups(descriptors).items():
            start = time.perf_counter()
            split = builder.split(group, name)
            built.pieces[name] = len(split.pieces)
            built.pieces[f"{name}, different"] = len({p.key for p in split.pieces.values()})
            for d in group:
                built.programs[d.kind, d.tokens] = builder.stitch(split, d)
            built.seconds[name] = time.perf_counter() - start
            if progress:
                progress("pieces", len(built.programs), len(descriptors))
    built.counts, built.notes = manager.counts, manager.notes
    return built


def _groups(descriptors: Sequence[Descriptor]) -> dict[str, list[Descriptor]]:
    """What one trace serves, by its name: the descriptors of a kind.

    Dynamo takes 1 for a constant whatever it is told, so one token has a trace of its own.
    """
    groups: dict[str, list[Descriptor]] = {}
    for kind in dict.fromkeys(d.kind for d in descriptors):
        mine = [d for d in descriptors if d.kind == kind]
        groups[f"{kind}_1"] = [d for d in mine if d.tokens == 1]
        groups[kind] = [d for d in mine if d.tokens > 1]
    return {name: group for name, group in groups.items() if group}


@dataclass(frozen=True, slots=True)
class _Split:
    """A trace, split: the graph `whole` over its `parts`, and those of them that are compiled, by
    name. `sizes` are the numbers of tokens that it serves.
    """

    traced: Traced
    whole: fx.GraphModule
    parts: dict[str, Part]
    pieces: dict[str, Piece]
    sizes: list[int]

    @property
    def token(self) -> Any:
        """The symbol of the number of tokens; None where that is a constant."""
        symbols = self.traced.symbols.items()
        token = next((s for s, (place, _) in symbols if place[0] in PER_TOKEN), None)
        return self.traced.shape_env.replacements.get(token, token)

    def results(self, node: fx.Node) -> list[Any]:
        """What stands for the values that a part gives: its call, or what takes the call apart."""
        piece = self.pieces.get(str(node.target))
        if piece is None or piece.single:
            return [node]
        taken = {user.args[1]: user for user in node.users if user.target is operator.getitem}
        count = len(piece.graph.graph.output_node().args[0])
        return [taken.get(index, (node, index)) for index in range(count)]


@dataclass(frozen=True, slots=True)
class _Builder:
    """Traces the module, and stitches what its traces are split into."""

    module: Any
    config: ResolvedConfig
    plans: Plans
    kv: Sequence[torch.Tensor]
    chosen: ResolvedCompilation
    manager: CompilerManager
    wrap_piece: WrapPiece | None

    def split(self, group: Sequence[Descriptor], name: str) -> _Split:
        """The trace of a group of descriptors of one kind, split."""
        middle = sorted(group, key=lambda d: d.tokens)[len(group) // 2]
        backbone = Backbone(self.module, middle.kind)
        before = state_of(self.module)
        backbone(**self._arguments(middle))
        check_state(before, state_of(self.module), name)
        traced = trace(
            backbone, self._arguments(middle), name, static=len(group) == 1 and middle.tokens == 1
        )
        check_writes(traced)
        whole, parts = split_graph(traced.graph, self.chosen.splitting_ops)
        if self.chosen.debug_dump_path:
            write_graph(self.chosen.debug_dump_path, f"{name}.traced", traced.graph)
            write_graph(self.chosen.debug_dump_path, f"{name}.split", whole)
        pieces = {part.name: make_piece(part) for part in parts if not part.splits}
        by_name = {part.name: part for part in parts}
        return _Split(traced, whole, by_name, pieces, [d.tokens for d in group])

    def stitch(self, split: _Split, d: Descriptor) -> Stitched:
        """The parts in order for one number of tokens. Raises InternalError if a guard of the trace
        does not hold for it.
        """
        traced = split.traced
        tensors = dict(tensors_of(self._arguments(d)))
        if failed := traced.violations(tensors):
            raise InternalError(f"{d}: the trace does not hold for it: {'; '.join(failed)}")
        nodes = list(split.whole.graph.nodes)
        slots: dict[Any, int] = {}
        for node in nodes:
            if node.op == "placeholder":
                slots[node] = len(slots)
        steps: list[Instruction] = []
        for node in nodes:
            if node.op != "call_module":
                continue
            part = split.parts[node.target]
            piece = split.pieces.get(part.name)
            inputs = [slots[argument] for argument in node.args]
            function = part.graph.forward
            if piece is not None:
                inputs = [inputs[index] for index in piece.kept]
                function = self._compiled(split, piece, d.tokens, tensors)
                function, inputs = self._bound(function, inputs, traced, len(steps), d.tokens)
            outputs = []
            for result in split.results(node):
                slots[result] = len(slots)
                outputs.append(slots[result])
            # Between the pieces an op gives its value as it is; a piece gives a tuple.
            single = piece is None
            steps.append(Instruction(function, tuple(inputs), tuple(outputs), single))
        (output,) = split.whole.graph.output_node().args
        hidden = slots[output[0] if isinstance(output, tuple | list) else output]
        steps = with_lifetimes(steps, len(traced.bindings), hidden)
        return Stitched(traced.bindings, steps, hidden, len(slots))

    def _compiled(
        self, split: _Split, piece: Piece, size: int, tensors: Mapping[Place, torch.Tensor]
    ) -> Callable[..., Any]:
        """The code of a piece for `size` tokens (the exact size, then a range), made now if need
        be. A size that a guard refuses gets code of its own.
        """
        served, symbols = served_by(size, split.sizes, self.chosen), split.traced.symbols
        hints = {symbol: tensors[place].shape[dim] for symbol, (place, dim) in symbols.items()}
        entry = self.manager.compile(piece, served, split.sizes, split.token, hints)
        if size in entry.refused:
            self.manager.notes.append(
                f"{size} tokens: a guard of {served} does not hold, so it has code of its own"
            )
            own = Range(size, size)
            entry = self.manager.compile(piece, own, split.sizes, split.token, hints)
        return entry.function

    def _bound(
        self, function: Callable[..., Any], inputs: list[int], traced: Traced, index: int, size: int
    ) -> tuple[Callable[..., Any], list[int]]:
        """For `wrap_piece`: a function of what changes, with weights bound."""
        if self.wrap_piece is None:
            return function, inputs
        bindings = {p: traced.bindings[i] for p, i in enumerate(inputs) if i < len(traced.bindings)}
        fixed = {p: binding.value for p, binding in bindings.items() if isinstance(binding, Static)}
        free = [p for p in range(len(inputs)) if p not in fixed]
        template = [fixed.get(p) for p in range(len(inputs))]

        def call(*changing: Any) -> Any:
            full = template.copy()
            for position, value in zip(free, changing, strict=True):
                full[position] = value
            return function(*full)

        return self.wrap_piece(index, call, size), [inputs[p] for p in free]

    def _arguments(self, d: Descriptor) -> dict[str, Any]:
        """Padding for a descriptor: nothing is written but the scratch slot."""
        model, where = self.module.config, self.kv[0].device
        on_host = self.plans.host_metadata(d.kind)
        half = decoder.rotary_tables(model, 1)[0].shape[1]

        def ints(*shape: int, device: Any = where) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        lengths = torch.device("cpu") if on_host else where
        return {
            "token_ids": ints(d.tokens),
            "kv": tuple(self.kv),
            "cos": torch.zeros(d.tokens, half, device=where),
            "sin": torch.zeros(d.tokens, half, device=where),
            "slots": ints(d.tokens) - 1,
            "page_table": ints(d.requests, self.config.pages_per_request),
            "query_start": ints(d.requests + 1, device=lengths),
            "kv_lens": ints(d.requests, device=lengths),
            "counts": ints(2, device=lengths),
        }


PER_TOKEN = ("token_ids", "cos", "sin", "slots")
"""Arguments with an entry for each token."""


def served_by(size: int, sizes: Sequence[int], chosen: ResolvedCompilation) -> Range:
    """The compilation that serves a number of tokens: its own, that of a range, or the general
    one.
    """
    if size in chosen.compile_sizes or size == 1 or len(sizes) == 1:
        return Range(size, size)
    for first, last in chosen.compile_ranges:
        if first <= size <= last and first < last:
            return Range(max(2, first), last)
    return Range(2, max(*sizes, 3))
