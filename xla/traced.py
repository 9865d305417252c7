"""Programs: a function of tensors, traced once with lazy tensors, compiled, and run by its hash.

Lazy tensors would trace each step anew, and compile whatever a step does that no step did before.
Here the graph is fixed when it is traced: running it brings new tensors to its parameters. Those
that are donated are overwritten, as the function gives them back with changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as metrics
from torch.utils import _pytree as pytree
from torch_xla.utils.buffer_donor_context import alias_with_buffer_donor_config

from ..shared.errors import InternalError
from .words import Words

_XLA = torch_xla._XLAC


def compilations() -> int:
    """XLA compilations of torch-xla in this process so far."""
    found = metrics.metric_data("CompileTime")
    return 0 if found is None else int(found[0])


@dataclass(frozen=True, slots=True)
class _Result:
    """Where a result comes from: a parameter of the call, an output of the graph, or a value that
    is no tensor.
    """

    argument: int | None = None
    output: int | None = None
    value: Any = None


@dataclass(frozen=True, slots=True)
class Program:
    """A compiled graph. `inputs` are its parameters in order, with those open that a call brings:
    `places` says which of its tensors goes where.
    """

    name: str
    key: Any
    inputs: tuple[Any, ...]
    places: tuple[tuple[int, int], ...]
    results: tuple[_Result, ...]
    spec: Any

    def __call__(self, *given: Any) -> Any:
        """Start it: what the function returns, in tensors that are being computed."""
        leaves = pytree.tree_leaves(given)
        inputs = list(self.inputs)
        for place, leaf in self.places:
            inputs[place] = leaves[leaf]
        outputs = _XLA._run_cached_graph(self.key, inputs) if self.key is not None else []
        return pytree.tree_unflatten([_pick(r, leaves, outputs) for r in self.results], self.spec)


def _pick(result: _Result, leaves: Sequence[Any], outputs: Sequence[torch.Tensor]) -> Any:
    if result.argument is not None:
        return leaves[result.argument]
    return outputs[result.output] if result.output is not None else result.value


def trace(
    name: str,
    function: Callable[..., Any],
    held: Any,
    given: Sequence[Any],
    donated: Sequence[int] = (),
) -> Program:
    """`function(held, *given)` as a program that is called with the tensors of `given` only; those
    at `donated` are overwritten.

    Nothing runs, and no argument changes. Raises InternalError for a function whose results do not
    follow from its arguments on the device alone.
    """
    torch_xla.sync()
    xm.wait_device_ops()
    leaves = pytree.tree_leaves(tuple(given))
    lazy = [i for i, x in enumerate(leaves) if _is_lazy(x)]
    # By what lies on the device: an id of a tensor changes once it was traced.
    handles = dict(zip(_XLA._get_tensors_handle([leaves[i] for i in lazy]), lazy, strict=True))
    if len(handles) != len(lazy):
        raise InternalError(f"program {name}: two of its arguments are one tensor on the device")
    donors = [x for number in donated for x in pytree.tree_leaves(given[number])]
    for x in donors:
        _XLA._set_buffer_donation(x, True)
    try:
        return _trace(name, function, held, given, leaves, handles, donors)
    finally:
        for x in donors:
            _XLA._set_buffer_donation(x, False)
        # Whatever was traced shall not run with what comes next.
        _XLA._clear_pending_irs(str(torch_xla.device()))


def _is_lazy(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.device.type == "xla"


def _trace(
    name: str,
    function: Callable[..., Any],
    held: Any,
    given: Sequence[Any],
    leaves: Sequence[Any],
    handles: dict[Any, int],
    donors: Sequence[torch.Tensor],
) -> Program:
    fallbacks = {op: metrics.counter_value(op) for op in metrics.executed_fallback_ops()}
    _XLA._set_allow_execution(False)
    try:
        with torch.no_grad(), Words():
            out = function(held, *given)
    finally:
        _XLA._set_allow_execution(True)
    left = [
        op
        for op in metrics.executed_fallback_ops()
        if metrics.counter_value(op) != fallbacks.get(op)
    ]
    if left:
        raise InternalError(f"program {name}: torch-xla runs {', '.join(left)} on the host")
    traced = {_XLA._unique_id_for_ir_and_data(x): i for i, x in enumerate(leaves) if _is_lazy(x)}
    made, spec = pytree.tree_flatten(out)
    outputs: dict[Any, int] = {}
    fresh: list[torch.Tensor] = []
    results = []
    for x in made:
        if not isinstance(x, torch.Tensor):
            results.append(_Result(value=x))
            continue
        if not _is_lazy(x):
            raise InternalError(f"program {name}: a result is on the host")
        key = _XLA._unique_id_for_ir_and_data(x)
        if key in traced:
            argument = traced[key]
            if any(leaves[argument] is donor for donor in donors):
                raise InternalError(f"program {name}: gives a donated argument back as it was")
            results.append(_Result(argument=argument))
            continue
        if key not in outputs:
            outputs[key] = len(fresh)
            fresh.append(x)
        results.append(_Result(output=outputs[key]))
    if not fresh:
        return Program(name, None, (), (), tuple(results), spec)
    seed = _XLA._get_seed_info_id()
    ids, values = _XLA._get_tensors_xla_device_data_node(fresh)
    if seed in ids:
        raise InternalError(f"program {name}: depends on torch's random numbers")
    inputs: list[Any] = []
    places = []
    for place, handle in enumerate(_XLA._get_tensors_handle(list(values))):
        value, leaf = values[place], handles.get(handle)
        inputs.append(value if leaf is None else None)
        if leaf is not None:
            places.append((place, leaf))
    used = {id(leaves[leaf]) for _, leaf in places}
    if any(id(donor) not in used for donor in donors):
        raise InternalError(f"program {name}: does not read an argument that is donated to it")
    with alias_with_buffer_donor_config():
        graph = _XLA._get_graph_hash(fresh)
        _XLA._xla_warm_up_cache(fresh, [])
    return Program(name, graph, tuple(inputs), tuple(places), tuple(results), spec)
