"""Faults on purpose in a worker: what a comparison is tested with.

A fault wraps what the worker's plans have chosen for an op, or changes weights or rotary tables on
the way to the device. The worker is made, loaded and compiled while the fault is `planted`, and
nothing of it is in the code that serves.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
from safetensors.numpy import save_file

from ...ops import Op, Plan, Plans
from ...ops.namespaces import namespace
from ...shared.models import decoder
from ...shared.models.config import ModelConfig
from ...shared.models.spec import Layer, Model, Sublayer
from ...shared.worker import backend_module
from .subject import HostWeights, Subject, checkpoint_of

Edit = Callable[[dict[str, np.ndarray], dict[str, Any], Any], None]
"""Changes the fields of a step: see `faults/engine.py`."""
Place = Literal["layer", "top", "ops", "engine"]


@dataclass(frozen=True, slots=True)
class Fault:
    """Something wrong on purpose, in layer `layer` (None: in all layers, and before and after them;
    -1: outside of layers).

    `ops` wrap the functions of some ops; they get the framework's array namespace `xp` first.
    `weights` changes the weights of a layer. `tables` changes those of the rotary embedding, which
    all layers share. `edit` changes the steps that a worker gets one after another.

    Of one that is catalogued `what` is a sentence for people. `place`: in the layers of the model,
    in its `top` (embedding, logits), in single `ops` that a dense decoder does not call (those can
    be planted in `twinfer numerics ops` only), or in what an `engine` keeps between steps.
    `shown_by` names the ops that show a fault of `weights` or `tables`. `needs` says what a model
    must have for the fault to make a difference, and `missing` names that.
    """

    name: str
    ops: Mapping[str, Callable[[Any, Callable[..., Any]], Callable[..., Any]]] = field(
        default_factory=dict
    )
    weights: Callable[[dict[str, np.ndarray], Any], dict[str, np.ndarray]] | None = None
    tables: Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]] | None = None
    edit: Edit | None = None
    layer: int | None = None
    what: str = ""
    place: Place = "layer"
    shown_by: tuple[str, ...] = ()
    needs: Callable[[ModelConfig], bool] | None = None
    missing: str = ""

    def at(self, layer: int) -> bool:
        """Whether the fault is in a layer; -1 is outside of layers."""
        return self.layer is None or self.layer == layer


def faulty(
    fault: Fault, framework: str, op: str, function: Callable[..., Any]
) -> Callable[..., Any]:
    """`function`, an implementation of `op`, with the fault, or as it is if the fault is
    elsewhere.
    """
    make = fault.ops.get(op)
    if make is None:
        return function
    wrong = make(namespace(framework), function)
    return _on_arrays(wrong) if framework == "jax" else wrong


def _on_arrays(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` on weights that are taken out of the stacks of a scan: a fault knows arrays."""
    import jax  # what imports this module need not have it

    from ...ops.namespaces.jax_ import OneOf, taken

    def array(x: Any) -> Any:
        if isinstance(x, OneOf):
            return jax.lax.switch(x.index, [lambda matrix=m: matrix for m in x.matrices])
        return taken(x)

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*map(array, args), **{name: array(x) for name, x in kwargs.items()})

    return call


@dataclass(frozen=True, slots=True)
class FaultyPlan(Plan):
    """A plan whose bound ops have a fault."""

    fault: Fault = field(default_factory=lambda: Fault("none"))

    def bind(
        self, wrap: Callable[[Op, Callable[..., Any]], Callable[..., Any]] | None = None
    ) -> Any:
        """As `Plan.bind`; what is wrapped is faulty already."""

        def both(op: Op, function: Callable[..., Any]) -> Callable[..., Any]:
            wrong = faulty(self.fault, self.framework, op.name, function)
            return wrap(op, wrong) if wrap else wrong

        return Plan.bind(self, both)

    @property
    def hash(self) -> str:
        """Not that of the plan without the fault: nothing compiled may be taken from there."""
        return f"{Plan(self.framework, self.choices).hash}+{self.fault.name}"


def faulty_plans(plans: Plans, fault: Fault) -> Plans:
    """`plans` with the fault's ops in them. Where it is in one layer, that layer is of a kind of
    its own (`planted`).
    """

    def faulty_plan(plan: Plan) -> Plan:
        return FaultyPlan(plan.framework, plan.choices, plan.unavailable, fault)

    def is_faulty(layer: Any) -> bool:
        return fault.layer is None or any(isinstance(sub, _Marked) for sub in layer)

    outside = faulty_plan if fault.at(-1) else lambda plan: plan
    kinds = {kind: outside(plan) for kind, plan in plans.by_kind.items()}
    layers = {
        kind: {
            layer: replace(of, plan=faulty_plan(of.plan)) if is_faulty(layer) else of
            for layer, of in of_kind.items()
        }
        for kind, of_kind in plans.layers.items()
    }
    return _FaultyPlans(kinds, layers, plans.stages)


@dataclass(frozen=True, slots=True)
class _FaultyPlans(Plans):
    """Plans in which a layer with a fault is of a kind of its own."""

    def layer_titles(self) -> dict[str, list[str]]:
        """Of the kinds that the model has without the fault."""
        titles = Plans.layer_titles(self)
        found: dict[str, list[str]] = {}
        for kind, layers in self.layers.items():
            plain: dict[Any, str] = {}
            for layer, title in zip(layers, titles[kind], strict=True):
                plain.setdefault(_unmarked(layer), title)
            found[kind] = list(plain.values())
        return found


def _unmarked(layer: Any) -> Layer:
    return tuple(Sublayer(*_values(sub)) for sub in layer)


def _values(sub: Sublayer) -> list[Any]:
    return [getattr(sub, f.name) for f in fields(sub)]


@dataclass(frozen=True)
class _Marked(Sublayer):
    """A sublayer of the layer that has the fault: equal to no other, so that workers plan and
    compile the layer by itself.
    """


def _marked(model: Model, layer: int) -> Model:
    subs = tuple(_Marked(*_values(sub)) for sub in model.layers[layer])
    return replace(model, layers=(*model.layers[:layer], subs, *model.layers[layer + 1 :]))


@contextmanager
def planted(backend: str, fault: Fault | None) -> Iterator[None]:
    """Let a worker have a fault in its plans and tables that is made, loaded and compiled within
    the block, in which the functions that workers ask for them are others. Weights are changed by
    `faulty_checkpoint`.
    """
    if fault is None:
        yield
        return
    module, models, index = backend_module(backend), cast(Any, decoder), fault.layer
    make_plans, model_of, tables = module.make_plans, models.model_of, models.rotary_tables
    change = fault.tables

    def with_marked_layer(config: ModelConfig) -> Model:
        model = model_of(config)
        return model if index is None or index < 0 else _marked(model, index)

    def plans_with_fault(*args: Any) -> Plans:
        return faulty_plans(make_plans(*args), fault)

    def changed_tables(config: ModelConfig, positions: int) -> tuple[np.ndarray, np.ndarray]:
        right = tables(config, positions)
        # Of one position they are only looked at for their shapes, when plans are made.
        return right if change is None or positions == 1 else change(*right)

    try:
        if fault.ops:
            module.make_plans, models.model_of = plans_with_fault, with_marked_layer
        models.rotary_tables = changed_tables
        yield
    finally:
        module.make_plans, models.model_of, models.rotary_tables = make_plans, model_of, tables


@contextmanager
def faulty_checkpoint(subject: Subject, fault: Fault | None) -> Iterator[Subject]:
    """The subject whose checkpoint has the weights of a fault, in a folder of its own that is there
    within the block; without such a fault the subject itself.
    """
    if fault is None or fault.weights is None:
        yield subject
        return
    weights, change = HostWeights(subject), fault.weights

    def changed(layer: int) -> Mapping[str, np.ndarray]:
        right = weights.layer(layer)
        return change(dict(right), layer) if fault.at(layer) else right

    with tempfile.TemporaryDirectory(prefix="twinfer-fault-") as folder:
        shutil.copy(Path(subject.folder) / "config.json", folder)
        save_file(checkpoint_of(weights, changed), Path(folder) / "model.safetensors")
        yield replace(subject, folder=folder, load_format="auto")
