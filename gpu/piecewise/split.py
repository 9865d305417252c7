"""Splits a traced graph at operators into pieces, and brings each piece into a form that is
compiled once for all pieces that are alike: tensors in, a tuple of tensors out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.passes.split_module import split_module

from ...ops.bindings.torch import IMPLEMENTATIONS
from ...shared.errors import ConfigError, InternalError

VALUE = "example_value"


@dataclass(frozen=True, slots=True)
class Part:
    """A submodule of a split graph: a piece to compile, or one of the operators between pieces."""

    name: str
    graph: fx.GraphModule
    splits: bool


def is_splitting(node: fx.Node, ops: Sequence[str]) -> bool:
    """Whether a node calls an implementation of one of the ops."""
    target = node.target
    if node.op != "call_function" or not isinstance(
        target, torch._ops.OpOverload | torch._ops.OpOverloadPacket
    ):
        return False
    name = (
        target._schema.name
        if isinstance(target, torch._ops.OpOverload)
        else target._qualified_op_name
    )
    space, _, operator = name.partition("::")
    return space == IMPLEMENTATIONS and any(operator.startswith(f"{op}_") for op in ops)


def split_graph(graph: fx.GraphModule, ops: Sequence[str]) -> tuple[fx.GraphModule, list[Part]]:
    """The graph over its parts, and the parts in order. Raises ConfigError if there is nothing
    to split at.
    """
    place: dict[fx.Node, int] = {}
    splitting: set[int] = set()
    current = 0
    for node in graph.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        if is_splitting(node, ops):
            current += 1
            splitting.add(current)
            place[node] = current
            current += 1
        else:
            place[node] = current
    if not splitting:
        raise ConfigError(
            f"splitting_ops: got {', '.join(ops) or 'none'}, and the traced graph calls none of "
            "them"
        )
    _compute_in_each(graph.graph, place)
    # The order is kept as it stands: writes into the cache are no data dependency.
    whole = split_module(graph, graph, lambda node: place[node], keep_original_order=True)
    parts = []
    for node in whole.graph.nodes:
        if node.op == "call_module":
            number = int(str(node.target).rpartition("_")[2])
            parts.append(
                Part(str(node.target), getattr(whole, str(node.target)), number in splitting)
            )
    return whole, parts


def _compute_in_each(graph: fx.Graph, place: dict[fx.Node, int]) -> None:
    """Have every part compute the numbers that it reads. Dynamo computes each once, in the first
    part that needs it, and between the parts there shall be tensors and their sizes only.
    """
    # What a copy reads stands before it, so its turn is still to come.
    for node in reversed(list(graph.nodes)):
        if node.op != "call_function" or not isinstance(node.meta.get(VALUE), torch.SymInt):
            continue
        copies = {place[node]: node}
        for user in sorted(node.users):
            if user not in place:  # the output
                continue
            part = place[user]
            if part not in copies:
                with graph.inserting_before(user):
                    copies[part] = graph.node_copy(node)
                place[copies[part]] = part
            user.replace_input_with(node, copies[part])


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece whose inputs are tensors only and whose output is a tuple. `kept` are the positions
    of those tensors among the inputs of the part; `symbols` the open sizes by (input, dimension);
    pieces that are alike share a `key`.
    """

    graph: fx.GraphModule
    kept: tuple[int, ...]
    symbols: dict[Any, tuple[int, int]]
    key: str
    text: str
    single: bool


def make_piece(part: Part) -> Piece:
    """Normalise a part. Raises InternalError for a number among its inputs that is no size of a
    tensor there.
    """
    module = copy_graph(part.graph)
    graph = module.graph
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    tensors = [node for node in placeholders if isinstance(node.meta[VALUE], torch.Tensor)]
    symbols: dict[Any, tuple[int, int]] = {}
    for index, node in enumerate(tensors):
        for dim, size in enumerate(node.meta[VALUE].shape):
            if isinstance(size, torch.SymInt):
                symbols.setdefault(size.node.expr, (index, dim))
    first = next(node for node in graph.nodes if node.op != "placeholder")
    for node in placeholders:
        if node in tensors:
            continue
        if node.users:
            expression = node.meta[VALUE].node.expr
            if expression not in symbols:
                raise InternalError(
                    f"{part.name}: {node.name} is {expression}, which is no size of a tensor of "
                    "the piece"
                )
            index, dim = symbols[expression]
            with graph.inserting_before(first):
                size = graph.call_function(torch.ops.aten.sym_size.int, (tensors[index], dim))
            size.meta[VALUE] = node.meta[VALUE]
            node.replace_all_uses_with(size)
        graph.erase_node(node)
    output = graph.output_node()
    single = isinstance(output.args[0], fx.Node)
    output.args = ((output.args[0],) if single else tuple(output.args[0]),)
    graph.eliminate_dead_code(
        is_impure_node=lambda node: node.op == "placeholder" or node.is_impure()
    )
    module.recompile()
    text = describe(module)
    key = hashlib.sha256(text.encode()).hexdigest()
    kept = tuple(index for index, node in enumerate(placeholders) if node in tensors)
    return Piece(module, kept, symbols, key, text, single)


def copy_graph(module: fx.GraphModule) -> fx.GraphModule:
    """A graph module that shares nothing of the graph with `module`."""
    graph = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    result = graph.graph_copy(module.graph, values)
    graph.output(result)
    return fx.GraphModule(module, graph)


def describe(module: fx.GraphModule) -> str:
    """The graph as text without names: equal text is equal computation. Open sizes are numbered
    as they appear.
    """
    numbers: dict[fx.Node, str] = {}
    names: dict[Any, str] = {}

    def size(value: Any) -> str:
        if not isinstance(value, torch.SymInt):
            return str(value)
        expression = value.node.expr
        for symbol in sorted(expression.free_symbols, key=str):
            names.setdefault(symbol, f"n{len(names)}")
        return str(
            expression.xreplace(
                {s: type(s)(names[s], integer=True) for s in expression.free_symbols}
            )
        )

    def show(value: Any) -> str:
        if isinstance(value, fx.Node):
            return numbers[value]
        if isinstance(value, list | tuple):
            return f"({', '.join(map(show, value))})"
        if isinstance(value, dict):
            return f"{{{', '.join(f'{k}: {show(v)}' for k, v in value.items())}}}"
        if isinstance(value, slice):
            return f"slice{show([value.start, value.stop, value.step])}"
        return f"{type(value).__name__} {value!r}"

    lines = []
    for node in module.graph.nodes:
        numbers[node] = f"%{len(numbers)}"
        what = show([node.args, node.kwargs])
        if node.op == "placeholder":
            value = node.meta[VALUE]
            shape, stride = ([size(n) for n in part] for part in (value.shape, value.stride()))
            what = f"{value.dtype} {value.device.type} [{', '.join(shape)}] [{', '.join(stride)}]"
        elif node.op == "get_attr":
            constant = getattr(module, node.target).detach().cpu().contiguous()
            content = constant.flatten().view(torch.uint8).numpy().tobytes()
            what = f"{constant.dtype} {tuple(constant.shape)} {hashlib.sha256(content).hexdigest()}"
        lines.append(f"{numbers[node]} = {node.op} {_target(node)} {what}")
    return "\n".join(lines)


def _target(node: fx.Node) -> str:
    target = node.target
    if node.op in ("placeholder", "output", "get_attr"):
        return ""
    if isinstance(target, str | torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return str(target)
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__qualname__', repr(target))}"
