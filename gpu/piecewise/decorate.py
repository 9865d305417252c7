"""`support_torch_compile`: which dimensions of a module's inputs stay open, and the trace of its
whole forward.

Dynamo traces once. Its guards are never evaluated at run time, as nothing goes through its frame
hook any more: whoever calls the traced graph must first prove for every size that it will ever see
that the guards hold (`Traced.violations`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import torch
from torch import fx

from ...shared.errors import InternalError
from ..compilation import copy_of


@dataclass(frozen=True, slots=True)
class Open:
    """In an annotation: these dimensions of a tensor (of each tensor of a sequence) differ from
    call to call.
    """

    dims: tuple[int, ...] = (0,)


def support_torch_compile(
    module: type | None = None, *, dynamic_arg_dims: Mapping[str, Sequence[int]] | None = None
) -> Any:
    """Class decorator for modules that are traced whole. Open dimensions come from
    `dynamic_arg_dims`, by parameter of `forward`, or else from its annotations:
    `Annotated[torch.Tensor, Open()]`.

    Raises InternalError for a name that is no parameter, and if nothing is open.
    """

    def decorate(cls: Any) -> Any:
        parameters = list(inspect.signature(cls.forward).parameters)[1:]
        dims = {
            name: tuple(value)
            for name, value in (dynamic_arg_dims or _annotated(cls.forward)).items()
        }
        unknown = set(dims) - set(parameters)
        if unknown or not dims:
            raise InternalError(
                f"{cls.__name__}: open dimensions of {sorted(unknown) or 'no parameter'}: "
                f"{parameters}"
            )
        cls.dynamic_arg_dims = dims
        return cls

    return decorate if module is None else decorate(module)


def _annotated(function: Callable[..., Any]) -> dict[str, tuple[int, ...]]:
    hints = get_type_hints(function, include_extras=True)
    marks = {name: [a for a in get_args(hint)[1:] if isinstance(a, Open)] for name,
        hint in hints.items()
             if get_origin(hint) is Annotated}  # fmt: skip
    return {name: found[0].dims for name, found in marks.items() if found}


Place = tuple[str, int | None]
"""An argument of forward: its name, and the position within it if it is a sequence of tensors."""


@dataclass(frozen=True, slots=True)
class Static:
    """A weight, or a number that nothing reads."""

    value: Any


@dataclass(frozen=True, slots=True)
class Given:
    """A tensor that is passed with every call."""

    place: Place


@dataclass(frozen=True, slots=True)
class Size:
    """A dimension of a tensor that is passed."""

    place: Place
    dim: int


@dataclass(slots=True)
class Traced:
    """The graph of a forward, and where each of its inputs comes from."""

    graph: fx.GraphModule
    bindings: list[Static | Given | Size]
    shape_env: Any
    symbols: dict[Any, tuple[Place, int]] = field(default_factory=dict)

    def violations(self, tensors: Mapping[Place, torch.Tensor]) -> list[str]:
        """Guards of the trace that do not hold for inputs of these shapes; a fixed range counts
        as one.
        """
        values = {
            symbol: tensors[place].shape[dim] for symbol, (place, dim) in self.symbols.items()
        }
        return guard_violations(self.shape_env, values)


def guard_violations(shape_env: Any, values: Mapping[Any, int]) -> list[str]:
    """Guards and ranges of `shape_env` that do not hold for these values of symbols, or cannot
    be decided.
    """
    failed = []
    for symbol, value in values.items():
        found = shape_env.var_to_range.get(symbol)
        if found is not None and not found.lower <= value <= found.upper:
            failed.append(f"{symbol} = {value} is not in [{found.lower}, {found.upper}]")
    for guard in shape_env.guards:
        result = guard.expr
        # A symbol that was found equal to another stands for it.
        for _ in range(len(values) + 1):
            result = result.xreplace(
                {
                    s: shape_env.replacements.get(s, s)
                    for s in result.free_symbols
                    if s not in values
                }
            )
        if result.xreplace(dict(values)) != True:  # noqa: E712
            failed.append(str(guard.expr))
    return failed


class _Traced(Exception):
    """Ends the call that was only made to be traced."""


def trace(module: Any, arguments: Mapping[str, Any], name: str, *, static: bool = False) -> Traced:
    """Trace `module.forward` once, in full; nothing is run. With `static`, token dimensions are
    constants.

    `arguments` are tensors by parameter, or sequences of them. Raises what Dynamo raises for what
    it cannot trace, and InternalError if the graph reads a tensor that is neither a weight nor an
    argument.
    """
    found: list[Any] = []

    def backend(graph: fx.GraphModule, _: list[Any]) -> Callable[..., Any]:
        context = torch._guards.TracingContext.get()

        def record(*inputs: Any) -> Any:
            found.append((graph, inputs, context.fake_mode.shape_env))
            raise _Traced

        return record

    if not static:
        _mark(module, arguments)
    with suppress(_Traced):
        _compile(module, name, backend)(module, *arguments.values())
    graph, inputs, shape_env = found[0]
    return _bind(module, arguments, graph, inputs, shape_env)


def evaluate_guards(module: Any, calls: Sequence[Mapping[str, Any]], name: str) -> list[Any]:
    """The slow twin of dropping guards: run the calls under Dynamo with all of them; returns the
    results.

    Raises InternalError if a call fails a guard and would be compiled again.
    """
    results = []
    compiled = _compile(module, name, "eager")
    for index, arguments in enumerate(calls):
        _mark(module, arguments)
        try:
            with torch._dynamo.config.patch(error_on_recompile=True):
                results.append(compiled(module, *arguments.values()))
        except torch._dynamo.exc.RecompileError as error:
            why = " ".join(str(error).split())[:400]
            raise InternalError(
                f"{name}: call {index} fails a guard of the trace: {why}"
            ) from error
    return results


def _compile(module: Any, name: str, backend: Any) -> Callable[..., Any]:
    copy = copy_of(type(module).forward, f"piecewise_{name}")
    # Not dynamic: only what `_mark` names stays open. Dynamo would else remember the sizes of an
    # earlier model that was traced under this name, and leave open what differs.
    return torch.compile(copy, fullgraph=True, backend=backend, dynamic=False)


def _mark(module: Any, arguments: Mapping[str, Any]) -> None:
    for name, dims in module.dynamic_arg_dims.items():
        value = arguments[name]
        for tensor in value if isinstance(value, tuple | list) else (value,):
            for dim in dims:
                torch._dynamo.mark_dynamic(tensor, dim)


def tensors_of(arguments: Mapping[str, Any]) -> Iterator[tuple[Place, torch.Tensor]]:
    """Every tensor among the arguments, with its place."""
    for name, value in arguments.items():
        if isinstance(value, tuple | list):
            yield from (((name, index), tensor) for index, tensor in enumerate(value))
        else:
            yield (name, None), value


def _bind(
    module: Any, arguments: Mapping[str, Any], graph: fx.GraphModule, inputs: Any, shape_env: Any
) -> Traced:
    places = {id(tensor): place for place, tensor in tensors_of(arguments)}
    weights = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    symbols: dict[Any, tuple[Place, int]] = {}
    for node, value in zip(placeholders, inputs, strict=True):
        if isinstance(value, torch.Tensor) and id(value) in places:
            for dim, size in enumerate(node.meta["example_value"].shape):
                if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol:
                    symbols.setdefault(size.node.expr, (places[id(value)], dim))
    bindings: list[Static | Given | Size] = []
    for node, value in zip(placeholders, inputs, strict=True):
        if isinstance(value, int):
            expression = node.meta["example_value"].node.expr
            if not node.users:
                # Dynamo also lifts what nothing reads, such as where a layer's cache begins in the
                # buffer of all.
                bindings.append(Static(value))
                continue
            if expression not in symbols:
                raise InternalError(
                    f"trace: {node.name} is {expression}, which is no size of an argument"
                )
            bindings.append(Size(*symbols[expression]))
        elif id(value) in places:
            bindings.append(Given(places[id(value)]))
        elif id(value) in weights:
            bindings.append(Static(value))
        else:
            raise InternalError(
                f"trace: {node.name} {tuple(value.shape)} is neither a weight nor an argument"
            )
    return Traced(graph, bindings, shape_env, symbols)
