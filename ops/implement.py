"""What an implementation of an op is, and the check that it has the op's exact schema."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from .annotations import signature_in_words
from .declare import REGISTRY, OpError
from .source_hash import is_ours

Framework = Literal["numpy", "jax", "torch"]
ROWS = "rows"
"""The provider of plain implementations whose rows do not depend on the batch."""


class Refusal(str):
    """What a predicate returns instead of False to say why: the arithmetic, and what to change."""

    def __bool__(self) -> bool:
        return False


def always() -> bool:
    """The default static predicate."""
    return True


@dataclass(frozen=True, slots=True)
class Implementation:
    """One way to run an op in one framework.

    `supported` says whether it can run here at all (library, chip; False, or a Refusal);
    `supports_args`, with exactly the op's parameters, whether it takes these shapes and dtypes
    (False, or a Refusal that says why not). `host_metadata`: it reads the ragged lengths on the
    host, so they are passed as CPU tensors and no graph can capture it. `opaque`: it launches what
    no compiler can look into (a raw kernel), so that it is an operator of its own in compiled code.
    `sized`: it is one too, as it takes its way by the number of rows, which compiled code leaves
    open. `row_invariant`: the bits of a row's result do not depend on how many rows there are, nor
    on what they hold. `stacked`: it takes weights as one of a stack (JAX's `InStack`), which others
    get taken out of it.

    `part`, with the op's parameters, gives what a shard has of a product whose sums run over the
    entries of all shards: in float32 and without a bias, as the sum of all is what is rounded.

    `preferred_on` names platforms (`cpu`, `cuda`, `tpu`) whose plans try it unless somebody says
    otherwise. `only_on` those where it runs at all (empty: on any). `required_on` those where it is
    an error if it refuses a program and nobody has chosen another. `dot` names the products of
    another contract than the op's, which it keeps instead (`Testing.dots`).
    """

    op: str
    provider: str
    framework: Framework
    function: Callable[..., Any]
    supported: Callable[[], bool | Refusal] = always
    supports_args: Callable[..., bool | Refusal] | None = None
    inplace: bool = False
    deterministic: bool = True
    row_invariant: bool = False
    host_metadata: bool = False
    opaque: bool = False
    sized: bool = False
    stacked: bool = False
    preferred_on: tuple[str, ...] = ()
    dot: str = ""
    required_on: tuple[str, ...] = ()
    only_on: tuple[str, ...] = ()
    part: Callable[..., Any] | None = None

    @property
    def closed(self) -> bool:
        """Whether it is an operator of its own in compiled code."""
        return self.host_metadata or self.inplace or self.opaque or self.sized

    def obstacle(self, platform: str) -> str | None:
        """Why it cannot run here on a platform (empty: any), or None."""
        if self.only_on and platform and platform not in self.only_on:
            return f"runs on {', '.join(self.only_on)} only"
        can = self.supported()
        if can:
            return None
        return str(can) if isinstance(can, Refusal) else "not supported on this machine"


IMPLEMENTATIONS: dict[tuple[str, Framework], dict[str, Implementation]] = {}


def implement(
    op: str, *, provider: str, framework: Framework, **properties: Any
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function as an implementation.

    Raises OpError if its schema is not the op's, or for an unknown op or framework.
    """
    check_framework(framework)

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        check_schema(op, function, f"implementation {provider!r} ({framework})")
        for field, what in (("supports_args", "predicate"), ("part", "part")):
            if properties.get(field) is not None:
                check_schema(op, properties[field], f"{what} of {provider!r} ({framework})")
        known = IMPLEMENTATIONS.setdefault((op, framework), {})
        if provider in known:
            raise OpError(f"op {op!r} has two implementations {provider!r} for {framework}")
        known[provider] = Implementation(op, provider, framework, function, **properties)
        return function

    return register


def preferred(framework: Framework, platform: str) -> dict[str, list[str]]:
    """By op, the providers of a framework that a platform prefers: those from outside by name,
    then ours in the order in which they were registered. Who was imported first is chance.
    """
    found: dict[str, list[str]] = {}
    for (op, where), known in IMPLEMENTATIONS.items():
        wanted = [name for name, one in known.items() if platform in one.preferred_on]
        if where == framework and wanted:
            ours = [name for name in wanted if is_ours(known[name].function)]
            found[op] = sorted(set(wanted) - set(ours)) + ours
    return found


def is_required(op: str, framework: Framework, platform: str) -> bool:
    """Whether an implementation of the op is required on a platform."""
    return any(
        platform in found.required_on for found in IMPLEMENTATIONS.get((op, framework), {}).values()
    )


def check_framework(framework: str) -> None:
    """Raise OpError for a framework that is none."""
    known = get_args(Framework)
    if framework not in known:
        raise OpError(f"framework: got {framework!r}, allowed are {', '.join(known)}")


def check_schema(op: str, function: Callable[..., Any], what: str) -> None:
    """Raise OpError, showing both schemas, unless `function` has the names, order, types and
    defaults of the op.
    """
    expected = [_schema(p) for p in REGISTRY[op].signature.parameters.values()]
    actual = [_schema(p) for p in signature_in_words(function).parameters.values()]
    if expected != actual:
        raise OpError(
            f"{what} of op {op!r} has another schema:\n  op:   ({', '.join(expected)})\n  here: "
            f"({', '.join(actual)})"
        )


def _schema(parameter: inspect.Parameter) -> str:
    annotation = parameter.annotation
    if annotation is inspect.Parameter.empty:
        annotation = "no annotation"
    kind = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    default = "" if parameter.default is inspect.Parameter.empty else f" = {parameter.default!r}"
    return f"{parameter.name}: {kind}{default}"
