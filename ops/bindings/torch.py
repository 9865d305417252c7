"""The torch binding: plain functions, which Dynamo inlines, but for those that no graph may look into."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..declare import Op
from ..plan import Plan

TYPES = {"Array": "Tensor", "float": "float", "int": "int", "bool": "bool"}
_libraries: list[torch.library.Library] = []
_defined: dict[tuple[str, str], Callable[..., Any]] = {}


def bind(plan: Plan, *, compiling: bool) -> Any:
    """A namespace of the plan's ops. When `compiling`, ops that write in place or read the host become opaque."""

    def wrap(op: Op, function: Callable[..., Any]) -> Callable[..., Any]:
        choice = plan[op.name].implementation
        if compiling and (choice.host_metadata or choice.inplace):
            return _opaque(op, choice.provider, function, choice.inplace)
        return function

    return plan.bind(wrap)


def _opaque(op: Op, provider: str, function: Callable[..., Any], inplace: bool) -> Callable[..., Any]:
    """`function` as the operator `twinfer::<op>_<provider>`.

    An in-place one takes its first activation, returns nothing to the graph, and gives that activation back to the
    caller; any other returns one tensor like its first input.
    """
    if (op.name, provider) in _defined:
        return _defined[op.name, provider]
    target = op.activations[0] if inplace else None
    parameters = []
    for parameter in op.signature.parameters.values():
        kind = TYPES[parameter.annotation]
        parameters.append(f"{'Tensor(a!)' if parameter.name == target else kind} {parameter.name}")
    name = f"{op.name}_{provider}"
    library = torch.library.Library("twinfer", "FRAGMENT")
    library.define(f"{name}({', '.join(parameters)}) -> {'()' if inplace else 'Tensor'}")

    def run(*args: Any) -> Any:
        result = function(*args)
        return None if inplace else result

    library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"twinfer::{name}", lambda *args: None if inplace else torch.empty_like(args[0]))
    operator = getattr(torch.ops.twinfer, name).default
    position = list(op.signature.parameters).index(target) if target else 0

    def call(*args: Any) -> Any:
        result = operator(*args)
        return args[position] if inplace else result

    _libraries.append(library)
    _defined[op.name, provider] = call
    return call
