"""Builds the piecewise program of a model: one callable for every kind and size of its table, with
nothing left to decide at run time but which list of pieces to run.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch

from ...bucketing import Descriptor, Table
from ...ops import Plans
from ...shared.compilation_config import ResolvedCompilation
from ...shared.config import ResolvedConfig
from ...shared.errors import InternalError, OutsideTable
from ...shared.models import decoder
from ..backend import key_factors, write_graph
from .compilers import CompilerManager, EagerAdaptor, InductorStandaloneAdaptor, Range
from .decorate import (
    Given,
    Open,
    Place,
    Size,
    Static,
    Traced,
    support_torch_compile,
    tensors_of,
    trace,
)
from .split import Part, Piece, make_piece, split_graph

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


@dataclass(frozen=True, slots=True)
class Instruction:
    """Call `function` with the values at `inputs`, put the results at `outputs`, forget the
    values at `dead`.
    """

    function: Callable[..., Any]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    single: bool
    dead: tuple[int, ...]


class Stitched:
    """The parts of one traced graph for one number of tokens, called one after the other."""

    def __init__(
        self,
        bindings: Sequence[Static | Given | Size],
        steps: Sequence[Instruction],
        result: int,
        slots: int,
    ) -> None:
        self._steps, self._result = steps, result
        self._values: list[Any] = [None] * slots
        self._given = [(i, b.place) for i, b in enumerate(bindings) if isinstance(b, Given)]
        self._sizes = [(i, b.place, b.dim) for i, b in enumerate(bindings) if isinstance(b, Size)]
        for index, binding in enumerate(bindings):
            if isinstance(binding, Static):
                self._values[index] = binding.value

    def __call__(self, tensors: Mapping[Place, torch.Tensor]) -> torch.Tensor:
        """Hidden states for the tensors at their places."""
        values = self._values.copy()
        for index, place in self._given:
            values[index] = tensors[place]
        for index, place, dim in self._sizes:
            values[index] = tensors[place].shape[dim]
        for step in self._steps:
            results = step.function(*[values[i] for i in step.inputs])
            if step.single:
                values[step.outputs[0]] = results
            else:
                for slot, output in zip(step.outputs, results, strict=True):
                    values[slot] = output
            for index in step.dead:
                values[index] = None
        result: torch.Tensor = values[self._result]
        return result


class PiecewiseBackend:
    """One piece: its compilations, and the one that serves a number of tokens (the exact size,
    then a range).
    """

    def __init__(
        self, piece: Piece, manager: CompilerManager, token: Any, hints: Mapping[Any, int]
    ) -> None:
        self.piece, self._manager, self._token, self._hints = piece, manager, token, hints

    def compile(self, size: int, served: Range, sizes: Sequence[int]) -> Callable[..., Any]:
        """The code for `size` tokens, made now if need be. A size that a guard refuses gets code
        of its own.
        """
        entry = self._manager.compile(self.piece, served, sizes, self._token, self._hints)
        if size in entry.refused:
            self._manager.notes.append(
                f"{size} tokens: a guard of {served} does not hold, so it has code of its own"
            )
            entry = self._manager.compile(
                self.piece, Range(size, size), sizes, self._token, self._hints
            )
        return entry.function


class Piecewise:
    """All programs. Call it as the module: (token_ids, kv, batch, kind, max_query_len) -> hidden
    states [tok dim].
    """

    def __init__(self, layers: int) -> None:
        self.programs: dict[tuple[str, int], Stitched] = {}
        self.seconds: dict[str, float] = {}
        self.counts: dict[str, int] = {}
        self.notes: list[str] = []
        self.pieces: dict[str, int] = {}
        self._caches: tuple[Any, tuple[torch.Tensor, ...]] = (None, ())
        self._places = [("kv", index) for index in range(layers)]

    def __call__(
        self, token_ids: torch.Tensor, kv: Any, batch: decoder.Batch, kind: str, max_query_len: int
    ) -> torch.Tensor:
        """Raises OutsideTable for a size that was not built."""
        tokens = token_ids.shape[0]
        program = self.programs.get((kind, tokens))
        if program is None or max_query_len != (1 if kind == "decode" else tokens):
            raise OutsideTable(
                f"no pieces for {kind}[{tokens}], queries of {max_query_len}: the table was "
                "frozen "
                "at start"
            )
        if self._caches[0] is not kv:
            self._caches = (kv, tuple(kv))
        tensors: dict[Place, torch.Tensor] = dict(zip(self._places, self._caches[1], strict=True))
        tensors["token_ids", None] = token_ids
        for name, value in batch.arrays().items():
            tensors[name, None] = value
        return program(tensors)


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
    descriptors = list(table)
    with torch.no_grad():
        for kind in dict.fromkeys(d.kind for d in descriptors):
            mine = [d for d in descriptors if d.kind == kind]
            one = [d for d in mine if d.tokens == 1]
            # Dynamo takes 1 for a constant whatever it is told, so one token has a trace of its
            # own.
            for group, name in ((one, f"{kind}_1"), ([d for d in mine if d.tokens > 1], kind)):
                if group:
                    start = time.perf_counter()
                    _Group(module, config, plans, kv, chosen, manager, wrap_piece).build(
                        built, group, name
                    )
                    built.seconds[name] = time.perf_counter() - start
                    if progress:
                        progress("pieces", len(built.programs), len(descriptors))
    built.counts, built.notes = manager.counts, manager.notes
    return built


@dataclass(slots=True)
class _Group:
    """What one trace serves."""

    module: Any
    config: ResolvedConfig
    plans: Plans
    kv: Sequence[torch.Tensor]
    chosen: ResolvedCompilation
    manager: CompilerManager
    wrap_piece: WrapPiece | None

    def build(self, built: Piecewise, group: Sequence[Descriptor], name: str) -> None:
        """Add the programs of a group of descriptors of one kind."""
        middle = sorted(group, key=lambda d: d.tokens)[len(group) // 2]
        backbone = Backbone(self.module, middle.kind)
        before = state_of(self.module)
        backbone(**self.arguments(middle))
        check_state(before, state_of(self.module), name)
        traced = trace(
            backbone, self.arguments(middle), name, static=len(group) == 1 and middle.tokens == 1
        )
        check_writes(traced)
        whole, parts = split_graph(traced.graph, self.chosen.splitting_ops)
        if self.chosen.debug_dump_path:
            write_graph(self.chosen.debug_dump_path, f"{name}.traced", traced.graph)
            write_graph(self.chosen.debug_dump_path, f"{name}.split", whole)
        pieces = {part.name: make_piece(part) for part in parts if not part.splits}
        built.pieces[name] = len(pieces)
        built.pieces[f"{name}, different"] = len({piece.key for piece in pieces.values()})
        sizes = [d.tokens for d in group]
        for descriptor in group:
            tensors = dict(tensors_of(self.arguments(descriptor)))
            if failed := traced.violations(tensors):
                raise InternalError(
                    f"{descriptor}: the trace does not hold for it: {'; '.join(failed)}"
                )
            hints = {
                symbol: tensors[place].shape[dim] for symbol, (place, dim) in traced.symbols.items()
            }
            token = next(
                (s for s, (place, _) in traced.symbols.items() if place[0] in PER_TOKEN), None
            )
            token = traced.shape_env.replacements.get(token, token)
            served = served_by(descriptor.tokens, sizes, self.chosen)
            built.programs[descriptor.kind, descriptor.tokens] = self.stitch(
                traced, whole, parts, pieces, descriptor.tokens, served, sizes, token, hints
            )

    def stitch(
        self, traced: Traced, whole: Any, parts: Sequence[Part], pieces: Mapping[str, Piece],
        size: int, served: Range,
        sizes: Sequence[int], token: Any, hints: Mapping[Any, int],
    ) -> Stitched:  # fmt: skip
        """The parts in order for one number of tokens."""
        slots: dict[Any, int] = {}
        nodes = list(whole.graph.nodes)
        for node in nodes:
            if node.op == "placeholder":
                slots[node] = len(slots)
        by_name = {part.name: part for part in parts}
        steps: list[list[Any]] = []
        result = -1
        for node in nodes:
            if node.op == "call_module":
                part = by_name[node.target]
                users = {
                    user.args[1]: user for user in node.users if user.target is operator.getitem
                }
                piece = pieces.get(part.name)
                single = piece is None or piece.single
                outputs = []
                count = (
                    1
                    if piece is None or piece.single
                    else len(piece.graph.graph.output_node().args[0])
                )
                for index in range(count):
                    slot = len(slots)
                    slots[node if single else users.get(index, (node, index))] = slot
                    outputs.append(slot)
                inputs = [slots[argument] for argument in node.args]
                function = part.graph.forward
                if piece is not None:
                    inputs = [inputs[index] for index in piece.kept]
                    function = PiecewiseBackend(piece, self.manager, token, hints).compile(
                        size, served, sizes
                    )
                    function, inputs = self._bound(function, inputs, traced, len(steps), size)
                steps.append([function, inputs, outputs, piece is None])
            elif node.op == "output":
                result = slots[
                    node.args[0][0] if isinstance(node.args[0], tuple | list) else node.args[0]
                ]
        return Stitched(
            traced.bindings,
            _with_lifetimes(steps, len(traced.bindings), result),
            result,
            len(slots),
        )

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

    def arguments(self, d: Descriptor) -> dict[str, Any]:
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


def _with_lifetimes(steps: Sequence[Sequence[Any]], fixed: int, result: int) -> list[Instruction]:
    """Instructions that forget each value after its last use."""
    last: dict[int, int] = {}
    for number, (_, inputs, outputs, _single) in enumerate(steps):
        last |= dict.fromkeys((*inputs, *outputs), number)
    instructions = []
    for number, (function, inputs, outputs, single) in enumerate(steps):
        ended = {
            slot
            for slot in (*inputs, *outputs)
            if last[slot] == number and slot >= fixed and slot != result
        }
        instructions.append(
            Instruction(function, tuple(inputs), tuple(outputs), single, tuple(sorted(ended)))
        )
    return instructions


def _entries(value: Any) -> Iterable[tuple[Any, Any]]:
    """(key, entry) of a dict or a list; anything else is one entry without a key."""
    if isinstance(value, dict):
        return value.items()
    if isinstance(value, list):
        return enumerate(value)
    return [("", value)]


def state_of(module: torch.nn.Module) -> dict[str, Any]:
    """What identifies a module's attributes, parameters and buffers, with the versions of
    tensors.
    """
    state: dict[str, Any] = {}
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            for key, item in _entries(value):
                version = (
                    item._version
                    if isinstance(item, torch.Tensor) and not item.is_inference()
                    else None
                )
                state[f"{path}.{name}.{key}"] = (id(item), version)
    return state


def check_state(before: Mapping[str, Any], after: Mapping[str, Any], name: str) -> None:
    """Raise InternalError if a forward has changed the module: a traced graph would not do it
    again.
    """
    changed = sorted(key for key in {*before, *after} if before.get(key) != after.get(key))
    if changed:
        raise InternalError(
            f"{name}: the forward changes the module's {', '.join(changed[:4])}; it cannot be "
            "compiled whole"
        )


def check_writes(traced: Traced) -> None:
    """Raise InternalError if the graph writes into a weight."""
    placeholders = [node for node in traced.graph.graph.nodes if node.op == "placeholder"]
    weights = {
        n for n, b in zip(placeholders, traced.bindings, strict=True) if isinstance(b, Static)
    }
    for node in traced.graph.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if schema is None:
            continue
        for argument, value in zip(schema.arguments, node.args, strict=False):
            if (
                argument.alias_info is not None
                and argument.alias_info.is_write
                and value in weights
            ):
                raise InternalError(f"trace: {node} writes into the weight {value}")
