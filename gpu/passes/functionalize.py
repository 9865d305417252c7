"""In-place functionalisation: `maybe_inplace` becomes the functional overload, and the node keeps
what was donated.

AOTAutograd knows nothing of donation, so it never sees it: the lowering reads it from the node and
leaves out the copy.
"""

from __future__ import annotations

from torch import fx

from ...ops import OpError
from ...ops.bindings.torch import front
from .graph import DONATED, Call, calls, is_view


def functionalize(graph: fx.Graph) -> None:
    """Retarget every `maybe_inplace`. Raises OpError if a donated argument, or a view of it, is
    used later.
    """
    for call in calls(graph):
        if call.inplace:
            check_donation(call)
            call.node.target = front(call.op.name).functional
            call.node.meta[DONATED] = frozenset(call.op.activations)


def check_donation(call: Call) -> None:
    """Raise OpError if what a call was given is read by another argument of it, or later."""
    taken: dict[fx.Node, str] = {}
    for name in call.op.activations:
        given = call.arguments[name]
        memory = _memory(given)
        for other, value in call.arguments.items():
            if other != name and value in memory:
                raise OpError(
                    f"{call.node}: {call.op.name} is given {given} as {name} and reads it as "
                    f"{other}"
                )
        taken |= dict.fromkeys(memory, name)
    position = {node: index for index, node in enumerate(call.node.graph.nodes)}
    for node, name in taken.items():
        later = [user for user in node.users if position[user] > position[call.node]]
        if later:
            raise OpError(
                f"{call.node}: {call.op.name} was given {call.arguments[name]} as {name}, and "
                f"{later[0]} uses it later"
                + (f" through {node}" if node is not call.arguments[name] else "")
            )


def _memory(node: fx.Node) -> set[fx.Node]:
    """A node, what it is a view of, and the views of it.

    Views beside it are not among them: the rest of a split tensor may be used on.
    """
    found = {node}
    source = node
    while (
        base := next((n for n in source.all_input_nodes if is_view(source, n)), None)
    ) is not None:
        found.add(base)
        source = base
    todo = [node]
    while todo:
        current = todo.pop()
        views = [user for user in current.users if user not in found and is_view(user, current)]
        found.update(views)
        todo += views
    return found
