"""What must hold of a module and its trace before the trace may stand for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ...shared.errors import InternalError
from .decorate import Static, Traced


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
