"""The torch binding: plain functions, which Dynamo inlines, or one `torch.library` operator per op.

Every op can be called as `twinfer::<op>`, which has two overloads:

- the default one is functional: it copies the activations before an implementation that writes into
  them;
- `maybe_inplace` (ops with one activation per result, or with state) gives its activations away:
  what they hold afterwards is undefined, and the results may lie in their memory, as the schema
  says. Compilers must turn it into the functional one first (`gpu/passes`); AOTAutograd refuses it
  as it stands.

What runs behind an operator is said by its keyword `plan`, the hash of a plan that was bound in
this process, so that engines with different plans share the operators, whose registration is
irreversible, without clashing. An empty hash means the native implementations.

Implementations that no graph may look into, because they write in place, read the host, launch a
raw kernel or go by the number of rows, are operators of their own:
`twinfer_impl::<op>_<provider>`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import torch

from ..declare import REGISTRY, Op, OpError
from ..implement import Implementation
from ..namespaces import namespace
from ..plan import COMPOSITION, Plan, resolve
from ..shapes import without_data

NAMESPACE = "twinfer"
IMPLEMENTATIONS = "twinfer_impl"
KINDS = {
    "Array": "Tensor",
    "Array | None": "Tensor?",
    "float": "float",
    "int": "SymInt",  # a size that a compiled graph left open stays open
    "bool": "bool",
    "str": "str",
}


@dataclass(frozen=True, slots=True)
class Front:
    """The two overloads of an op; `inplace` is None where results and activations do not pair
    up.
    """

    op: Op
    functional: Any
    inplace: Any


@dataclass(frozen=True, slots=True)
class Bound:
    """A plan as it was bound: its functions run, and which of them write into their activations."""

    plan: Plan
    functions: Any
    writes: frozenset[str]


_libraries: list[torch.library.Library] = []
_fronts: dict[str, Front] = {}
_plans: dict[str, Bound] = {}
_opaque: dict[tuple[str, str], tuple[Implementation, Callable[..., Any]]] = {}


def bind(plan: Plan, *, compiling: bool = False, wrap: bool = False) -> Any:
    """A namespace of the plan's ops.

    Plain functions by default; when `compiling`, those that are `closed` (`Implementation`) are
    opaque operators. With `wrap`, every call is one operator `twinfer::<op>`. On
    all roads a call of an op whose planned implementation writes in place gives its activations
    away; a composition's own calls do not, but for the state that it was given. Raises OpError.
    """
    if wrap:
        return _wrapped(plan)
    direct: dict[str, Callable[..., Any]] = {}

    def choose(op: Op, function: Callable[..., Any]) -> Callable[..., Any]:
        choice = plan[op.name].implementation
        if compiling and choice.closed:
            function = opaque(op, choice)
        if not choice.inplace or op.state:
            return function
        direct[op.name] = function
        return _copying(op, function)

    # A reference may return what it gave to an op, so compositions are bound to functions that
    # copy.
    space = plan.bind(choose)
    return SimpleNamespace(**{**vars(space), **direct})


def _copying(op: Op, function: Callable[..., Any]) -> Callable[..., Any]:
    positions = activation_positions(op)

    def call(*args: Any, **named: Any) -> Any:
        copies = {
            name: value.clone() if name in op.activations else value
            for name, value in named.items()
        }
        return function(
            *(value.clone() if i in positions else value for i, value in enumerate(args)), **copies
        )

    return call


def _wrapped(plan: Plan) -> Any:
    bound = _bound(register(plan))
    space = SimpleNamespace()
    for name in plan.choices:
        made = front(name)
        operator = made.functional
        if name in bound.writes:
            if made.inplace is None:
                raise OpError(
                    f"op {name!r} is planned in place, but its results do not pair up with its "
                    "activations"
                )
            operator = made.inplace
        setattr(space, name, partial(operator, plan=plan.hash))
    return space


def register(plan: Plan) -> str:
    """Make `plan` callable behind the operators, under the hash that is returned. Equal hashes
    are equal arithmetic.
    """
    if plan.framework != "torch":
        raise OpError(f"plan: got one for {plan.framework}, the operators need one for torch")
    _plans[plan.hash] = Bound(
        plan, bind(plan), frozenset(name for name in plan.choices if writes(plan, name))
    )
    return plan.hash


@cache
def _native() -> Bound:
    return _plans[register(resolve("torch", enable=("none",)))]


def _bound(key: str) -> Bound:
    if not key:
        return _native()
    if key not in _plans:
        raise OpError(f"plan {key!r} is not bound in this process")
    return _plans[key]


def writes(plan: Plan, name: str) -> bool:
    """Whether what `plan` chose for an op may write into its activations, itself or by passing
    on its state.
    """
    choice = plan[name].implementation
    if choice.provider != COMPOSITION:
        return choice.inplace
    parts = [
        part
        for part in REGISTRY[name].composition
        if REGISTRY[part].state or plan[part].provider == COMPOSITION
    ]
    return any(writes(plan, part) for part in parts)


def activation_positions(op: Op) -> tuple[int, ...]:
    """Positions of an op's activations among its parameters."""
    names = list(op.signature.parameters)
    return tuple(names.index(name) for name in op.activations)


def result_count(op: Op) -> int | None:
    """How many results an op has if it returns a tuple, or None if it returns one array. Raises
    OpError.
    """
    annotation = op.signature.return_annotation
    if annotation == "Array":
        return None
    parts = (
        annotation.removeprefix("tuple[").removesuffix("]").split(", ")
        if isinstance(annotation, str)
        else []
    )
    if not parts or set(parts) != {"Array"}:
        returns = "no annotation" if annotation is inspect.Signature.empty else repr(annotation)
        raise OpError(
            f"op {op.name!r} returns {returns}, operators return Array or tuple[Array, ...]"
        )
    return len(parts)


def front(name: str) -> Front:
    """The operator `twinfer::<name>`, registered when it is first asked for. Raises OpError."""
    op = REGISTRY[name]
    if name in _fronts:
        if _fronts[name].op.signature != op.signature:
            raise OpError(
                f"op {name!r} was registered with {_fronts[name].op.signature}, got {op.signature}"
            )
        return _fronts[name]
    library = _library(NAMESPACE)
    library.define(name + _schema(op, donated=False))
    library.impl(name, partial(_run_functional, op), "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", partial(_fake_functional, op), lib=library)
    inplace = None
    if op.activations and (op.state or len(op.activations) == (result_count(op) or 1)):
        overload = f"{name}.maybe_inplace"
        library.define(overload + _schema(op, donated=True))
        library.impl(overload, partial(_run_inplace, op), "CompositeExplicitAutograd")
        torch.library.register_fake(
            f"{NAMESPACE}::{overload}", partial(_fake_inplace, op), lib=library
        )
        inplace = getattr(torch.ops.twinfer, name).maybe_inplace
    _fronts[name] = Front(op, getattr(torch.ops.twinfer, name).default, inplace)
    return _fronts[name]


def _library(space: str) -> torch.library.Library:
    library = torch.library.Library(space, "FRAGMENT")
    _libraries.append(library)  # an operator lives as long as its library
    return library


def _schema(op: Op, *, donated: bool) -> str:
    """The schema after the name: `(Tensor x, ..., *, str plan="") -> Tensor`."""
    marks = dict(zip(op.activations, "abcdefgh", strict=False)) if donated else {}
    parameters = [*_parameters(op, marks), "*", 'str plan=""']
    count = result_count(op)
    results = ["Tensor"] * ((count or 1) - len(marks)) + [
        f"Tensor({mark}!)" for mark in marks.values()
    ]
    return (
        f"({', '.join(parameters)}) -> "
        f"{results[0] if count is None else '(' + ', '.join(results) + ')'}"
    )


def _parameters(op: Op, marks: dict[str, str]) -> Iterator[str]:
    for parameter in op.signature.parameters.values():
        if parameter.annotation not in KINDS:
            known = ", ".join(KINDS)
            raise OpError(
                f"op {op.name!r}: {parameter.name} is {parameter.annotation!r}, operators take "
                f"{known}"
            )
        kind = (
            f"Tensor({marks[parameter.name]}!)"
            if parameter.name in marks
            else KINDS[parameter.annotation]
        )
        default = parameter.default
        if default is inspect.Parameter.empty:
            yield f"{kind} {parameter.name}"
        else:
            value = f'"{default}"' if isinstance(default, str) else repr(default)
            yield f"{kind} {parameter.name}={value}"


def _run_functional(op: Op, *args: Any, plan: str = "", **kwargs: Any) -> Any:
    bound = _bound(plan)
    if op.name in bound.writes:
        given = op.signature.bind(*args, **kwargs)
        for name in op.activations:
            given.arguments[name] = given.arguments[name].clone()
        args, kwargs = given.args, given.kwargs
    return getattr(bound.functions, op.name)(*args, **kwargs)


def _run_inplace(op: Op, *args: Any, plan: str = "", **kwargs: Any) -> Any:
    return getattr(_bound(plan).functions, op.name)(*args, **kwargs)


def _fake_functional(op: Op, *args: Any, plan: str = "", **kwargs: Any) -> Any:
    return getattr(_fakes(), op.name)(*args, **kwargs)


def _fake_inplace(op: Op, *args: Any, plan: str = "", **kwargs: Any) -> Any:
    if op.name not in _bound(plan).writes:
        return getattr(_fakes(), op.name)(*args, **kwargs)
    given = op.signature.bind(*args, **kwargs).arguments
    donated = tuple(given[name] for name in op.activations)
    if len(donated) == (result_count(op) or 1):
        return donated[0] if result_count(op) is None else donated
    return (*getattr(_fakes(), op.name)(*args, **kwargs)[: -len(donated)], *donated)


class _Fakes:
    """Results without data: the references in the torch namespace, whatever is planned, run on
    fake tensors.
    """

    def __getattr__(self, name: str) -> Callable[..., Any]:
        op = REGISTRY[name]
        if op.level == "coarse":
            return partial(op.reference, self)
        if op.native == "reference":
            return partial(op.reference, namespace("torch"))
        return without_data(op, empty_tensor, donated=False)


def empty_tensor(
    like: torch.Tensor, shape: tuple[Any, ...], dtype: str | None = None
) -> torch.Tensor:
    """A tensor on the device of `like`, of the named dtype or of that of `like`."""
    return like.new_empty(shape, dtype=like.dtype if dtype is None else getattr(torch, dtype))


@cache
def _fakes() -> _Fakes:
    return _Fakes()


def opaque(op: Op, implementation: Implementation) -> Callable[..., Any]:
    """An implementation as the operator `twinfer_impl::<op>_<provider>`.

    What one that writes in place gives the graph is only its results beyond its activations, which
    the caller has. A provider of an op is registered once, so no plans can differ in what is behind
    it. Raises OpError.
    """
    key = (op.name, implementation.provider)
    if key in _opaque:
        _opaque[key] = (implementation, _opaque[key][1])
        return _opaque[key][1]
    positions = activation_positions(op) if implementation.inplace else ()
    names = tuple(op.signature.parameters)[: max(positions, default=-1) + 1]
    count = result_count(op)
    fresh = (count or 1) - len(positions)
    if positions and fresh and not op.state:
        raise OpError(f"op {op.name!r}: an in-place implementation needs one activation per result")
    marks = dict(zip(op.activations, "abcdefgh", strict=False)) if implementation.inplace else {}
    results = "Tensor" if fresh == 1 else f"({', '.join(['Tensor'] * fresh)})"
    name = f"{op.name}_{implementation.provider}"
    library = _library(IMPLEMENTATIONS)
    library.define(f"{name}({', '.join(_parameters(op, marks))}) -> {results}")

    def run(*args: Any) -> Any:
        result = _opaque[key][0].function(*args)
        if not positions:
            return result
        parts = _as_tuple(result)
        for position, value in zip(positions, parts[fresh:], strict=True):
            if value is not args[position]:
                raise OpError(
                    f"op {op.name!r}: {implementation.provider!r} works in place and returns "
                    "other "
                    "tensors"
                )
        return _of_graph(parts[:fresh])

    def fake(*args: Any) -> Any:
        return _of_graph(_as_tuple(_fake_functional(op, *args))[:fresh])

    library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{IMPLEMENTATIONS}::{name}", fake, lib=library)
    operator = getattr(torch.ops.twinfer_impl, name).default

    def call(*args: Any, **named: Any) -> Any:
        result = operator(*args, **named)
        if not positions:
            return result
        args = (*args, *(named[name] for name in names[len(args) :]))
        parts = (*(_as_tuple(result) if fresh else ()), *(args[position] for position in positions))
        return parts[0] if count is None else parts

    _opaque[key] = (implementation, call)
    return call


def _as_tuple(result: Any) -> tuple[Any, ...]:
    return tuple(result) if isinstance(result, tuple | list) else (result,)


def _of_graph(parts: tuple[Any, ...]) -> Any:
    """Results as an operator returns them: nothing, one, or a tuple."""
    if len(parts) > 1:
        return parts
    return parts[0] if parts else None
