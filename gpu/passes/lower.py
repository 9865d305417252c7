"""Lowering: each op in a graph becomes the graph of the implementation that the plan chose for it.

What is spliced in is what Dynamo would have inlined with wrapping off, so both roads give a
compiler the same program. Implementations that no graph may look into become their opaque operators
(`twinfer_impl::`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from ...ops import OpError, Plan
from ...ops.bindings.torch import bind, writes
from .graph import Call, calls, fake_value


class Lowering:
    """Replaces ops by the implementations of one plan, each traced once for its shapes, sizes
    left open included.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.traces = 0
        self._functions = bind(plan, compiling=True)
        self._cache: dict[Any, fx.GraphModule] = {}

    def __call__(self, module: fx.GraphModule) -> None:
        """Lower every op of a functional graph. Raises OpError."""
        for call in calls(module.graph):
            if call.inplace:
                raise OpError(f"{call.node}: functionalise a graph before it is lowered")
            if call.plan not in ("", self.plan.hash):
                raise OpError(
                    f"{call.node}: bound with plan {call.plan}, this graph is lowered with "
                    f"{self.plan.hash}"
                )
            self._replace(module, call)

    def _replace(self, module: fx.GraphModule, call: Call) -> None:
        names = tuple(n for n, v in call.arguments.items() if isinstance(v, fx.Node))
        with module.graph.inserting_before(call.node):
            given = {name: call.arguments[name] for name in names}
            if writes(self.plan, call.op.name):
                for name in set(call.op.activations) - call.donated:
                    given[name] = _copy(module.graph, given[name])
            traced = self._trace(call, names)
            result = _splice(module, traced, [given[name] for name in names])
        if isinstance(result, tuple | list):
            for user in list(call.node.users):
                user.replace_all_uses_with(result[user.args[1]])
                module.graph.erase_node(user)
        else:
            call.node.replace_all_uses_with(result)
        module.graph.erase_node(call.node)

    def _trace(self, call: Call, names: tuple[str, ...]) -> fx.GraphModule:
        values = [fake_value(call.arguments[name]) for name in names]
        if any(value is None for value in values):
            raise OpError(f"{call.node}: no shape is known of an argument")
        static = {name: value for name, value in call.arguments.items() if name not in names}
        key = (
            call.op.name,
            tuple(static.items()),
            *((n, _metadata(v)) for n, v in zip(names, values, strict=True)),
        )
        if key not in self._cache:
            function = getattr(self._functions, call.op.name)
            order = tuple(call.op.signature.parameters)

            def run(*values: Any) -> Any:
                arguments = static | dict(zip(names, values, strict=True))
                return function(*(arguments[name] for name in order))

            mode = next(value.fake_mode for value in values if isinstance(value, torch.Tensor))
            with mode:
                self._cache[key] = make_fx(run, pre_dispatch=True)(*map(_fresh, values))
            self.traces += 1
        return self._cache[key]


def _copy(graph: fx.Graph, source: fx.Node) -> fx.Node:
    """A copy of a tensor of the graph, which says its shape as every node does: the next op is
    traced for it.
    """
    node = graph.call_function(torch.ops.aten.clone.default, (source,))
    value = fake_value(source)
    with value.fake_mode:
        node.meta["val"] = value.clone()
    return node


def _metadata(value: Any) -> tuple[Any, ...]:
    """What a trace depends on. A size left open is its symbol and whose that is, which the
    stored trace keeps alive.
    """
    if not isinstance(value, torch.Tensor):
        return (_size(value),)
    return tuple(map(_size, (*value.shape, *value.stride()))), value.dtype, value.device


def _size(value: Any) -> Any:
    return (
        (id(value.node.shape_env), str(value.node.expr))
        if isinstance(value, torch.SymInt)
        else value
    )


def _fresh(value: Any) -> Any:
    """A buffer of its own for a tensor: what a trace writes into must not be seen as the graph's
    own.
    """
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def _splice(module: fx.GraphModule, traced: fx.GraphModule, inputs: list[fx.Node]) -> Any:
    """Copy a traced graph to the insertion point of a module's graph; returns its results there."""
    graph, placeholders = module.graph, iter(inputs)
    here: dict[fx.Node, fx.Node] = {}
    for node in traced.graph.nodes:
        if node.op == "placeholder":
            here[node] = next(placeholders)
        elif node.op == "output":
            return fx.map_arg(node.args[0], here.__getitem__)
        else:
            copy = graph.node_copy(node, here.__getitem__)
            if node.op == "get_attr":
                copy.target = _adopt(module, getattr(traced, node.target))
            here[node] = copy
    raise OpError("a traced implementation returns nothing")


def _adopt(module: fx.GraphModule, constant: torch.Tensor) -> str:
    """Store a constant of a traced implementation in the module; returns its name."""
    index = 0
    while hasattr(module, f"_twinfer_constant{index}"):
        index += 1
    module.register_buffer(f"_twinfer_constant{index}", constant, persistent=False)
    return f"_twinfer_constant{index}"
