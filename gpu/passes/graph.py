"""What the passes read from a graph: which nodes are ops, with which arguments, in whose memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ...ops import REGISTRY, Op
from ...ops.bindings.torch import NAMESPACE

DONATED = "twinfer_donated"
"""Key in a node's meta: names of the activations that the caller gave away."""


@dataclass(frozen=True, slots=True)
class Call:
    """A node that calls an op; `arguments` by name, defaults filled in."""

    node: fx.Node
    op: Op
    arguments: dict[str, Any]
    plan: str
    inplace: bool

    @property
    def donated(self) -> frozenset[str]:
        """Names of the activations that were given away."""
        return frozenset(self.node.meta.get(DONATED, ()))


def as_call(node: Any) -> Call | None:
    """The op that a node calls, or None."""
    if not isinstance(node, fx.Node) or node.op != "call_function":
        return None
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverloadPacket):
        target = target.default
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != NAMESPACE:
        return None
    op = REGISTRY[target._schema.name.partition("::")[2]]
    kwargs = dict(node.kwargs)
    plan = kwargs.pop("plan", "")
    given = op.signature.bind(*node.args, **kwargs)
    given.apply_defaults()
    return Call(node, op, dict(given.arguments), str(plan), target._overloadname == "maybe_inplace")


def calls(graph: fx.Graph) -> Iterator[Call]:
    """The calls of ops in a graph, in order; the graph may change meanwhile."""
    for node in list(graph.nodes):
        call = as_call(node)
        if call is not None:
            yield call


def count_calls(graph: fx.Graph) -> dict[str, int]:
    """How often a graph calls each op."""
    counts: dict[str, int] = {}
    for call in calls(graph):
        counts[call.op.name] = counts.get(call.op.name, 0) + 1
    return counts


def fake_value(node: fx.Node) -> Any:
    """What a node gives, as fake tensors (Dynamo and make_fx name it differently)."""
    return node.meta.get("example_value", node.meta.get("val"))


def is_view(node: fx.Node, source: fx.Node) -> bool:
    """Whether a node that is not an op gives a view of `source`."""
    mine, other = fake_value(node), fake_value(source)
    if (
        as_call(node) is not None
        or not isinstance(mine, torch.Tensor)
        or not isinstance(other, torch.Tensor)
    ):
        return False
    return bool(mine.untyped_storage()._cdata == other.untyped_storage()._cdata)
