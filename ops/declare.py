"""What an op is: a name, a signature, one executable reference, and a contract on rounding.

A *fine* op's reference is a function of an array namespace `xp` (see `namespaces`): the same source
is the float64 oracle under numpy and the native implementation under torch and JAX. A *coarse* op's
reference is a function of the bound ops: it is a composition of finer ops, so a backend without an
implementation of its own falls through to its finer ones.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from .annotations import PARAMETERS, Array, signature_in_words
from .dimensions import Choose, Shapes, ShapesError, parse

__all__ = [
    "DOT",
    "REGISTRY",
    "Array",
    "Contract",
    "Op",
    "OpError",
    "Registry",
    "define",
    "dtype_name",
]


class OpError(Exception):
    """An op or an implementation is declared wrongly, or a plan cannot be made: `options` are what
    was asked for then.
    """

    options = "op_priority, enable_ops"


class NotRowInvariant(OpError):
    """No plan keeps a row's bits in any company."""

    options = "row_invariant"


@dataclass(frozen=True, slots=True)
class Contract:
    """Where an op may lose precision. Implementations meet it; changing one means changing it here.

    `rounds` says where values are rounded to the storage dtype, `accumulate` the dtype between
    those places, `dot` the algorithm of matrix products by storage dtype, `masked` what padded and
    masked rows hold, `nan` the NaN policy.
    """

    rounds: str = "once, at the output"
    accumulate: str = "float32 (float64 for float64 inputs), any order"
    dot: str = "none"
    masked: str = "each row depends on its own input row only"
    nan: str = "NaN in, NaN out, in the same row"


def dtype_name(x: Any) -> str:
    """float32, bfloat16 ... of a torch or numpy array."""
    return str(x.dtype).removeprefix("torch.")


DOT = (
    "BF16_BF16_F32 for bfloat16, F32_F32_F32 for float32 (on a TPU BF16_BF16_F32_X6, within the "
    "same bound): never the framework's default"
)


@dataclass(frozen=True, slots=True)
class Op:
    """One op of the dialect.

    `activations` names the inputs whose memory an implementation may reuse. `state` names those
    among them that the op is called to write: they are its last results, in order, and nothing ever
    stands a copy in for them.

    `shapes` says what goes in and comes out (None: an op from outside that does not say it).
    `shards` names the dimensions that shards of a tensor-parallel layer deal out among them: the op
    runs on each shard's part, which it computes alone; a result that has none of them is the sum of
    what the shards have. With none, all of it is whole on each shard.
    None: only a partitioner that sees through the implementation knows. Shards need shapes, which
    have those dimensions. `host` names the arguments that implementations with `host_metadata` read
    on the host. `sums`: the reference adds up entries of a row in floats, in an order that a
    framework may choose by the number of rows, as it does for products.
    """

    name: str
    level: Literal["fine", "coarse"]
    reference: Callable[..., Any]
    signature: inspect.Signature
    contract: Contract
    activations: tuple[str, ...] = ()
    composition: tuple[str, ...] = ()
    state: tuple[str, ...] = ()
    native: Literal["reference", "per framework"] = "reference"
    shapes: Shapes | None = None
    shards: tuple[str, ...] | None = None
    host: tuple[str, ...] = ()
    sums: bool = False

    @property
    def static_parameters(self) -> tuple[str, ...]:
        """Names of the parameters that are Python values, fixed when a program is compiled."""
        scalars = ("int", "float", "bool", "str")
        return tuple(p.name for p in self.signature.parameters.values() if p.annotation in scalars)

    @property
    def order_is_open(self) -> bool:
        """Whether the bits of the reference's rows may depend on how many there are."""
        return self.sums or self.contract.dot != "none"

    @property
    def gives_one(self) -> bool:
        """Whether it returns an array, not a tuple of them."""
        return bool(self.signature.return_annotation == "Array")


@dataclass(slots=True)
class Registry:
    """All declared ops by name."""

    ops: dict[str, Op] = field(default_factory=dict)

    def add(self, op: Op) -> None:
        """Register `op`.

        Raises OpError if the name is taken, for an activation or a state that it does not have, and
        for shards that its shapes do not name.
        """
        if op.name in self.ops:
            raise OpError(f"op {op.name!r} is registered twice")
        unknown = [name for name in op.activations if name not in op.signature.parameters]
        if unknown:
            raise OpError(
                f"op {op.name!r}: activations {unknown} are not parameters of {op.signature}"
            )
        self._check_names(op)
        foreign = [name for name in op.state if name not in op.activations]
        if foreign:
            raise OpError(
                f"op {op.name!r}: state {foreign} is not among its activations "
                f"{list(op.activations)}"
            )
        self.ops[op.name] = op

    @staticmethod
    def _check_names(op: Op) -> None:
        unknown = [name for name in op.host if name not in op.signature.parameters]
        if unknown:
            raise OpError(
                f"op {op.name!r}: host metadata {unknown} are not parameters of {op.signature}"
            )
        if op.shards is not None and op.shapes is None:
            raise OpError(
                f"op {op.name!r}: shards are {list(op.shards)}, but it has no shapes: say "
                "shapes=..., which name the "
                "dimensions that shards deal out"
            )
        axes = op.shapes.arrays.values() if op.shapes else ()
        known = {
            name for array in axes for dimension in array.dimensions for name in dimension.names
        }
        unknown = [name for name in op.shards or () if name not in known]
        if unknown:
            raise OpError(
                f"op {op.name!r}: shards deal out {unknown}, which are no dimensions of its shapes"
            )

    def __getitem__(self, name: str) -> Op:
        if name not in self.ops:
            raise OpError(f"unknown op {name!r}; known are {', '.join(sorted(self.ops))}")
        return self.ops[name]

    def __iter__(self) -> Iterator[Op]:
        return iter(self.ops.values())


REGISTRY = Registry()


def define(
    *,
    shapes: str = "",
    choose: Choose | None = None,
    level: Literal["fine", "coarse"] = "fine",
    contract: Contract | None = None,
    activations: tuple[str, ...] = (),
    composition: tuple[str, ...] = (),
    state: tuple[str, ...] = (),
    shards: tuple[str, ...] | None = None,
    host: tuple[str, ...] = (),
    native: Literal["reference", "per framework"] = "reference",
    sums: bool = False,
    registry: Registry = REGISTRY,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Declare the decorated function as the reference of an op of its name.

    Its first parameter is `xp` (fine) or `ops` (coarse); the others are the op's signature, each
    annotated as an array or as a Python value (`annotations.PARAMETERS`). `shapes` are written as
    `dimensions` says, `choose(name=size, ...)` gives those sizes of results that no expression
    does. With `native="per framework"` the reference serves numpy only, and each framework
    registers a native implementation. Raises OpError.
    """

    def register(reference: Callable[..., Any]) -> Callable[..., Any]:
        in_words = signature_in_words(reference)
        first, *rest = in_words.parameters.values()
        wanted = "xp" if level == "fine" else "ops"
        name = reference.__name__
        if first.name != wanted:
            raise OpError(
                f"op {name!r}: the first parameter of a {level} reference is {wanted!r}, got "
                f"{first.name!r}"
            )
        for parameter in rest:
            _check_annotation(name, parameter)
        contract_ = contract or Contract()
        signature = in_words.replace(parameters=rest)
        said = _shapes(name, signature, shapes, choose) if shapes else None
        registry.add(
            Op(
                name,
                level,
                reference,
                signature,
                contract_,
                activations,
                composition,
                state,
                native,
                said,
                shards,
                host,
                sums,
            )
        )
        return reference

    return register


def _shapes(op: str, signature: inspect.Signature, text: str, choose: Choose | None) -> Shapes:
    """The shapes of an op as they are written. Raises OpError."""
    arrays = tuple(
        p.name for p in signature.parameters.values() if p.annotation.startswith("Array")
    )
    words = tuple(p.name for p in signature.parameters.values() if p.annotation in ("int", "str"))
    try:
        shapes = parse(text, arrays, words, choose)
    except ShapesError as error:
        raise OpError(f"op {op!r}: {error}") from error
    returned = signature.return_annotation
    count = returned.count("Array") if isinstance(returned, str) else len(shapes.results)
    if count != len(shapes.results):
        raise OpError(
            f"op {op!r} returns {returned}, its shapes have {len(shapes.results)} results"
        )
    return shapes


def _check_annotation(op: str, parameter: inspect.Parameter) -> None:
    if parameter.annotation in PARAMETERS:
        return
    missing = parameter.annotation is inspect.Parameter.empty
    got = "no annotation" if missing else repr(parameter.annotation)
    known = ", ".join(PARAMETERS)
    raise OpError(
        f"op {op!r}: {parameter.name} has {got}, allowed are {known}, with "
        "twinfer.ops.declare.Array"
    )
