"""The passes as a `torch.compile` backend: functionalise, fuse, lower, then Inductor (or
nothing).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import fx

from ...ops import Plan
from ...ops.bindings import torch as binding
from ...ops.source_hash import closure
from .functionalize import functionalize
from .fuse import fuse, fusible
from .graph import count_calls
from .lower import Lowering

Compiled = Callable[..., Any]
Compiler = Callable[[fx.GraphModule, list[Any]], Compiled]
Inner = Literal["inductor", "eager"] | Compiler


class PassesBackend:
    """Runs the passes over graphs of wrapped ops, for one plan.

    `before`, `fused` and `after` count the ops of the last graph: as it came, after fusion, and
    after lowering.
    """

    def __init__(self, plan: Plan, inner: Inner = "inductor") -> None:
        self.plan = plan
        self.inner = inner
        # A plan covers what the model calls; only that can be run.
        self.fusions = fusible(plan.choices)
        self.lowering = Lowering(plan)
        self.before: dict[str, int] = {}
        self.fused: dict[str, int] = {}
        self.after: dict[str, int] = {}
        self.__name__ = f"twinfer_{self._inner_name}"

    def __call__(self, module: fx.GraphModule, inputs: list[Any]) -> Compiled:
        """Compile a graph. Raises OpError."""
        self.before = count_calls(module.graph)
        # Fusion moves calls, which is sound only once none of them writes.
        functionalize(module.graph)
        fuse(module.graph, self.fusions)
        self.fused = count_calls(module.graph)
        self.lowering(module)
        self.after = count_calls(module.graph)
        given = _drop_given(module.graph)
        module.graph.lint()
        module.recompile()
        return _give_back(self._compile(module, inputs), given)

    def _compile(self, module: fx.GraphModule, inputs: list[Any]) -> Compiled:
        if self.inner == "eager":
            return cast(Compiled, module.forward)
        if self.inner == "inductor":
            from torch._inductor.compile_fx import compile_fx

            return cast(Compiled, compile_fx(module, inputs))
        return self.inner(module, inputs)

    @property
    def _inner_name(self) -> str:
        return (
            self.inner
            if isinstance(self.inner, str)
            else getattr(self.inner, "__qualname__", repr(self.inner))
        )

    def uuid(self) -> str:
        """Hex digest of the passes' sources and all that they import here, the plan, and what
        comes after.
        """
        digest = hashlib.sha256(
            f"{self.plan.hash} {self._inner_name} {self.fusions} {torch.__version__}".encode()
        )
        files = {
            Path(__file__).parent / "__init__.py",
            *closure(frozenset({__name__, binding.__name__})).files(),
        }
        for path in sorted(files):
            digest.update(path.read_bytes())
        return digest.hexdigest()[:16]


def _drop_given(graph: fx.Graph) -> dict[int, int]:
    """Take the results out of a graph that are its arguments; returns by result which argument it
    is.

    Lowering an op in place makes its result the argument, say the cache. Dynamo could not know when
    it counted the results, and with wrapping off it would not have been one.
    """
    output = graph.output_node()
    results, placeholders = (
        list(output.args[0]),
        [node for node in graph.nodes if node.op == "placeholder"],
    )
    given = {i: placeholders.index(node) for i, node in enumerate(results) if node in placeholders}
    output.args = (tuple(node for i, node in enumerate(results) if i not in given),)
    return given


def _give_back(function: Compiled, given: dict[int, int]) -> Compiled:
    if not given:
        return function

    def call(*inputs: Any) -> tuple[Any, ...]:
        # Compiled functions may empty the list that they are called with, but not this tuple.
        results = list(function(*inputs))
        for index, argument in sorted(given.items()):
            results.insert(index, inputs[argument])
        return tuple(results)

    return call


def passes_backend(plan: Plan, inner: Inner = "inductor") -> PassesBackend:
    """A backend for `torch.compile` of functions over `bind(plan, wrap=True)`; sizes may be left
    open.
    """
    return PassesBackend(plan, inner)
